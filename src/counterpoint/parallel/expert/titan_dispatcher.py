"""Run torchtitan's expert parallelism by a `Dispatcher`, through a mixin for torchtitan's token dispatcher.

`counterpoint.torchtitan` puts it there; nothing here imports torchtitan. Suffixes of names are torchtitan's: T tokens,
D hidden, K choices, E experts, R rows of this rank's experts, e these experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from counterpoint.parallel.expert.dispatcher import Dispatcher, Handle, most_tokens
from counterpoint.parallel.group import Registry
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.torch_calls import uncompiled

_ROW = 4  # rows have a multiple of this many float32 elements: 16 bytes


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """Holds what `combine` needs from its `dispatch`: the dispatcher and the handle."""

    dispatcher: Dispatcher
    handle: Handle


class TokenDispatching:
    """Replaces `dispatch` and `combine` of torchtitan's token dispatcher, if experts are divided among ranks.

    All layers of a group with the same sizes and options have one dispatcher, which is closed with the group. It is
    made by `init_buffer` where the override gives `hidden` and `max_tokens`; else by the first dispatch, for as many
    tokens as any rank has then.
    """

    ep_mesh: Any
    num_experts: int
    top_k: int

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # torchtitan's class comes after this one
        self._options: ExpertOptions = config.options
        self._hidden: int | None = config.hidden
        self._max_tokens: int | None = config.max_tokens
        self._scores_first: bool = getattr(config, "score_before_experts", False)

    def init_buffer(self) -> None:
        """Make the dispatcher now if its sizes are known, so that a dispatch in a graph capture need not make it."""
        if self.ep_mesh is not None and self._hidden is not None and self._max_tokens is not None:
            self._dispatcher(self._hidden, self._max_tokens, self._options)

    @uncompiled
    def dispatch(
        self,
        x_TD: Tensor,  # noqa: N803
        topk_scores_TK: Tensor,  # noqa: N803
        topk_expert_ids_TK: Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: Tensor,  # noqa: N803
    ) -> tuple[Tensor, Tensor, Any]:
        """Send tokens to their experts, and return the token rows that this rank's experts get.

        Args:
            x_TD: this rank's tokens.
            topk_scores_TK: the weight of each choice.
            topk_expert_ids_TK: the expert of each choice.
            num_local_tokens_per_expert_E: of this rank's tokens; not needed where experts are divided.

        Returns:
            Rows of this rank's experts, of which those past the last expert's are not used; int32 numbers of rows of
            each expert, with padding; and the argument `metadata` of `combine`.
        """
        scores, ids = topk_scores_TK, topk_expert_ids_TK
        if self.ep_mesh is None:
            whole: tuple[Tensor, Tensor, Any] = super().dispatch(x_TD, scores, ids, num_local_tokens_per_expert_E)  # type: ignore[misc]
            return whole
        if self._max_tokens is None:
            self._max_tokens = most_tokens(x_TD, self.ep_mesh.get_group())
        dispatcher = self._dispatcher(x_TD.shape[1], self._max_tokens, self._options)
        weights = torch.ones_like(scores, requires_grad=False) if self._scores_first else scores
        rows, ends, handle = dispatcher.dispatch(x_TD, ids, weights)
        if self._scores_first:
            rows = (rows.float() * self._scores_of_rows(scores, ids, self._max_tokens)).to(rows.dtype)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return rows, counts, RoutedTokens(dispatcher=dispatcher, handle=handle)

    @uncompiled
    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:  # noqa: N803
        """Return each token's sum of its experts' outputs, `[T, D]`, weighted unless the rows were weighted before."""
        if not isinstance(metadata, RoutedTokens):
            whole: Tensor = super().combine(routed_output_RD, metadata, x_TD)  # type: ignore[misc]
            return whole
        return metadata.dispatcher.combine(routed_output_RD, metadata.handle)

    def _scores_of_rows(self, scores: Tensor, ids: Tensor, max_tokens: int) -> Tensor:
        """Return the score of each row, `[R, 1]`: scores and ids travel like tokens, and each row's expert picks one.

        Float32 holds every number of an expert below 2^24.
        """
        width = -(-2 * self.top_k // _ROW) * _ROW
        filled = scores.new_zeros(len(scores), width - 2 * self.top_k, dtype=torch.float32)
        dispatcher = self._dispatcher(width, max_tokens, replace(self._options, wire_dtype=None))
        rows, ends, _ = dispatcher.dispatch(
            torch.cat([scores.float(), ids.float(), filled], dim=1), ids, torch.ones_like(scores, requires_grad=False)
        )
        experts = torch.bucketize(torch.arange(len(rows), device=rows.device, dtype=ends.dtype), ends, right=True)
        chosen = rows[:, self.top_k : 2 * self.top_k] == (experts + dispatcher.layout.first_expert)[:, None]
        return (rows[:, : self.top_k] * chosen).sum(dim=1, keepdim=True)

    def _dispatcher(self, hidden: int, max_tokens: int, options: ExpertOptions) -> Dispatcher:
        group = self.ep_mesh.get_group()
        sizes = {"experts": self.num_experts, "top_k": self.top_k, "max_tokens": max_tokens, "hidden": hidden}
        make = partial(Dispatcher, group, options=options, **sizes)
        return _DISPATCHERS.get(group, make, key=(*sizes.values(), repr(options)))


_DISPATCHERS: Registry[Dispatcher] = Registry(Dispatcher.close)
