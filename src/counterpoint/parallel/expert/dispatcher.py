"""Define `Dispatcher`, which sends tokens to their experts and the experts' outputs back, and the derivatives of both.

Each half of a dispatch or a combine is an autograd function of its own: the first half begins communication, the second
half waits for it. Autograd runs nodes in the reverse of the order in which they were created. So in backward the second
half's derivative begins communication, then the derivatives of all that was computed between the halves run, and then
the first half's derivative waits for the communication: what overlaps in forward also overlaps in backward. Between
the halves an empty tensor represents the communication in autograd's graph.

The derivative of a dispatch is a combine without weights. The derivative of a combine sends the gradients of the sums
to the ranks of the rows. The gradients of the routing weights go back while the experts' backward runs; the wait for
them is the wait for the gradients of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.host.group import check_agreement
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.profile import default_profile
from counterpoint.pair.expert_choice import ExpertExchange, choose_expert
from counterpoint.parallel.expert.all_to_all import AllToAll
from counterpoint.parallel.expert.gathering import GatherAll
from counterpoint.parallel.expert.slabs import Slabs
from counterpoint.parallel.expert.token_mechanism import ExpertLayout, Halves, TokenMechanism, finished
from counterpoint.parallel.group import RankGroup, rank_group, torch_group
from counterpoint.parallel.options import ExpertOptions
from counterpoint.parallel.report import CallCounts, Report
from counterpoint.parallel.torch_calls import uncompiled

_MECHANISMS: dict[str, type[GatherAll | Slabs]] = {"gather": GatherAll, "slabs": Slabs}
_AUTOMATIC: tuple[Literal["torch", "gather"], ...] = ("torch", "gather")  # other mechanisms have not been measured yet
_DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64  # of tokens: only floats can be summed
_ALIGNMENT = 16  # bytes that a token's size must be a multiple of, so that chunks of whole tokens suit copies and sums


def most_tokens(x: Tensor, group: Any) -> int:
    """Return the largest number of tokens of any rank, at least 1; all ranks call this, and the host waits."""
    most = torch.tensor(len(x), device=x.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return max(int(most), 1)


class Handle:
    """Identifies one dispatch and its combine; the caller passes the handle from each start or finish to the next."""

    def __init__(self, mechanism: TokenMechanism, tokens: int, dtype: torch.dtype) -> None:
        self.tokens, self.dtype = tokens, dtype
        self._rows = 0
        self._trip = Trip(mechanism)
        self._half: str = "start_dispatch"  # the half that was called last
        self._under_way: Tensor | None = None  # stands for tokens and weights, later for the sums, in autograd

    def _advance(self, after: str, half: str) -> Tensor:
        """Record that `half` is called, and return autograd's stand-in tensor; raise unless `after` was called last."""
        if self._half != after or self._under_way is None:
            raise Misconfigured(f"{half} after {self._half}: call it once, after {after}")
        self._half = half
        return self._under_way


class Dispatcher:
    """Sends tokens of one process group to their experts, and the experts' outputs back.

    All ranks make it together and make the same calls in the same order, forward and backward, each with as many tokens
    as it has. Calls of `finish_*` come in the order of the calls of `start_*`.

    Args:
        group: torch process group; None: the default one.
        experts: number of experts of all ranks, a multiple of the ranks: rank r has the r-th part of them.
        top_k: experts of a token.
        max_tokens: most tokens that a rank dispatches at once; if one has more, all ranks get an error that names it.
        hidden: elements of a token.
        options: the mechanism, and options of the communicator; None: the defaults.

    Raises:
        Misconfigured: a size or an option is not allowed.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        experts: int,
        top_k: int,
        max_tokens: int,
        hidden: int,
        options: ExpertOptions | None = None,
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.options = options or ExpertOptions()
        for name in ("parts", "max_tokens"):
            if getattr(self.options, name) is not None:
                raise Misconfigured(f"ExpertOptions({name}=...) for a Dispatcher, where it has no effect: leave it out")
        self.layout = ExpertLayout(
            rank=dist.get_rank(self.group),
            world_size=dist.get_world_size(self.group),
            experts=experts,
            top_k=top_k,
            max_tokens=max_tokens,
            hidden=hidden,
        )
        self._counts = CallCounts()
        self._ranks: RankGroup | None = None  # the ranks whose communicator it uses
        self._mechanism: TokenMechanism | None = None
        self._why = ""

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Handle]:
        """Send tokens to their experts, and return the token rows that this rank's experts get.

        Args:
            x: `[tokens, hidden]`, at most `max_tokens`; how many may differ between ranks.
            ids: experts of each token, `[tokens, top_k]` of int32 or int64; -1, or any other number that names no
                expert, is no choice.
            weights: weight of each choice, `[tokens, top_k]`, by which `combine` multiplies the expert's output.

        Returns:
            The rows of this rank's experts, `[capacity, hidden]`, by expert, then by rank, token and choice; int32
            offsets `[local experts]`, at which each expert's rows end; and the handle for `combine`.

        Raises:
            Misconfigured: shapes, dtypes or the device do not fit; options or sizes of ranks differ.
            PeerTimeout: another rank died, made no such call, or has more than `max_tokens`.
        """
        handle = self.start_dispatch(x, ids, weights)
        return *self.finish_dispatch(handle), handle

    def combine(self, rows: Tensor, handle: Handle) -> Tensor:
        """Return each token's sum of its experts' output rows times weights, `[tokens, hidden]`, added in float32."""
        return self.finish_combine(self.start_combine(rows, handle))

    @uncompiled
    def start_dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Handle:
        """Start a `dispatch`, which overlaps with the caller's matmuls until `finish_dispatch`."""
        self._check_tokens(x, ids, weights)
        mechanism = self._opened(x)
        handle = Handle(mechanism, len(x), x.dtype)
        self._count("dispatch", x)
        handle._under_way = handle._trip.start_dispatch(x, ids, weights)
        return handle

    @uncompiled
    def finish_dispatch(self, handle: Handle) -> tuple[Tensor, Tensor]:
        """Finish a `dispatch`; return the rows of this rank's experts, and the offset where each expert's rows end."""
        under_way = handle._advance("start_dispatch", "finish_dispatch")
        rows, offsets = handle._trip.finish_dispatch(under_way)
        handle._rows = len(rows)
        return rows, offsets

    @uncompiled
    def start_combine(self, rows: Tensor, handle: Handle) -> Handle:
        """Start a `combine`, which overlaps with the caller's matmuls until `finish_combine`."""
        under_way = handle._advance("finish_dispatch", "start_combine")
        wanted = handle._rows, self.layout.hidden
        if rows.shape != wanted or rows.dtype != handle.dtype:
            raise Misconfigured(
                f"combine of rows {tuple(rows.shape)} of {rows.dtype}: give one for each row that was dispatched, "
                f"{wanted} of {handle.dtype}"
            )
        self._count("combine", rows)
        handle._under_way = handle._trip.start_combine(rows, under_way)
        return handle

    @uncompiled
    def finish_combine(self, handle: Handle) -> Tensor:
        """Finish a `combine`; return each token's weighted sum of its experts' outputs, `[tokens, hidden]`."""
        under_way = handle._advance("start_combine", "finish_combine")
        handle._under_way = None
        return handle._trip.finish_combine(under_way)

    def report(self) -> Report:
        """Return a report: how many dispatches and combines each mechanism ran, and why."""
        return Report(calls=self._counts.rows())

    def dropped(self) -> int:
        """Return how many expert choices have exceeded this rank's capacity so far; on a GPU, wait for the device.

        With `slabs` these are choices of this rank's tokens, else rows of this rank's experts, with padding.
        """
        return 0 if self._mechanism is None else self._mechanism.dropped()

    def check(self) -> None:
        """Raise an error if communication has failed or choices exceeded capacity; all ranks call this.

        With `overflow="raise"` this waits for the device; an error of choices without room is raised once.
        """
        if self._mechanism is not None:
            self._mechanism.check()

    def close(self) -> None:
        """Leave the communicator, which its last user closes; a later dispatch opens another. All ranks call this."""
        mechanism, self._mechanism = self._mechanism, None
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.leave(self)
        if mechanism is not None:
            mechanism.close()

    def _check_tokens(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        layout = self.layout
        if x.dim() != 2 or x.shape[1] != layout.hidden:
            raise Misconfigured(f"dispatch of x {tuple(x.shape)}: give [tokens, {layout.hidden}]")
        for name, tensor in (("ids", ids), ("weights", weights)):
            if tensor.shape != (len(x), layout.top_k):
                raise Misconfigured(
                    f"dispatch of {len(x)} tokens with {name} {tuple(tensor.shape)}: give {(len(x), layout.top_k)}"
                )
        if ids.dtype not in (torch.int32, torch.int64) or not weights.is_floating_point():
            raise Misconfigured(f"ids of {ids.dtype}, weights of {weights.dtype}: give int32 or int64, and floats")
        if x.dtype not in _DTYPES:
            raise Misconfigured(f"dispatch of x of {x.dtype}: give one of {', '.join(map(str, _DTYPES))}")
        if not x.device == ids.device == weights.device:
            raise Misconfigured(f"x on {x.device}, ids on {ids.device}, weights on {weights.device}: give one device")

    def _count(self, operation: str, tensor: Tensor) -> None:
        assert self._mechanism is not None
        self._counts.add(operation, tensor.nbytes, self._mechanism.name, self._why)

    def _opened(self, x: Tensor) -> TokenMechanism:
        """Return the mechanism that moves the tokens; all ranks make it together at the first call."""
        if self._mechanism is None:
            self._mechanism, self._why = self._made(x)
        return self._mechanism

    def _made(self, x: Tensor) -> tuple[TokenMechanism, str]:
        """Make the mechanism that the options name, else the one predicted as fastest; return it with the reason."""
        asked, group = self.options.mechanism, torch_group(self.group)
        if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Unsupported("the first dispatch in a graph capture: make the same call once before, on all ranks")
        sizes = {name: getattr(self.layout, name) for name in ("experts", "top_k", "max_tokens", "hidden")}
        check_agreement(group, sizes | {"dtype": x.dtype} | self.options.shared())
        by_torch = partial(AllToAll, group, self.layout, self.options)
        if asked == "torch":
            return by_torch(), "asked for torch"
        row_bytes = self.layout.hidden * (self.options.wire_dtype or x.dtype).itemsize
        if row_bytes % _ALIGNMENT:
            return by_torch(), f"tokens of {row_bytes} bytes, which is no multiple of {_ALIGNMENT}"
        ranks = rank_group(self.group)
        ranks.join(self, self.options.communicator)
        try:
            communicator = ranks.open_one_host(x.device)
        except Unsupported as error:
            ranks.leave(self)
            return by_torch(), str(error)
        name, why = (asked, f"asked for {asked}") if asked != "auto" else self._chosen(communicator, x)
        if name == "torch":
            ranks.leave(self)
            return by_torch(), why
        self._ranks = ranks
        return _MECHANISMS[name](ranks, self.layout, self.options), why

    def _chosen(self, communicator: Communicator, x: Tensor) -> tuple[str, str]:
        """Return the name of the mechanism with the least predicted time, the same on all ranks, and why."""
        layout, on_gpu = self.layout, x.device.type == "cuda"
        if layout.world_size == 1:
            return "gather", "one rank"
        plan = choose_expert(
            ExpertExchange(
                ranks=layout.world_size,
                top_k=layout.top_k,
                experts=layout.experts,
                tokens=layout.max_tokens,
                hidden=layout.hidden,
                element_bytes=x.element_size(),
                beside_us=self.options.beside_us,
            ),
            communicator.profile if on_gpu else default_profile(),  # CPUs use the default profile, to rehearse GPUs
            offered=_AUTOMATIC,
        )
        return plan.mechanism, plan.why


class Trip:
    """Runs one dispatch and its combine, each as a start and a finish that the caller calls in order.

    A trip refers to no autograd function, so that it is freed with the graph.
    """

    def __init__(self, mechanism: TokenMechanism) -> None:
        self.mechanism = mechanism
        self.route: Any = None
        self._forward: Any = None  # the operation whose first half has run: the dispatch, then the combine
        self._backward: Any = None  # the derivative whose first half has run: the spread, then the combine
        self._weights_grad: Halves[Tensor] | None = None
        self._needs_x = self._needs_weights = False
        self._weights_dtype = torch.float32

    def start_dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Start to send tokens to their experts; return an empty tensor that stands for the tokens in autograd."""
        self._needs_x, self._needs_weights, self._weights_dtype = x.requires_grad, weights.requires_grad, weights.dtype
        under_way: Tensor = _run(self._start_dispatch, self._finish_tokens_grad, x, ids, weights)
        return under_way

    def finish_dispatch(self, dispatched: Tensor) -> tuple[Tensor, Tensor]:
        """Finish the dispatch; return the rows of this rank's experts, and the offset where each expert's rows end."""
        rows, offsets = _run(self._finish_dispatch, self._start_tokens_grad, dispatched)
        return rows, offsets

    def start_combine(self, rows: Tensor, dispatched: Tensor) -> Tensor:
        """Start to send experts' outputs back; return an empty tensor that stands for the sums in autograd."""
        under_way: Tensor = _run(self._start_combine, self._finish_rows_grad, rows, dispatched)
        return under_way

    def finish_combine(self, combined: Tensor) -> Tensor:
        """Finish the combine; return each token's weighted sum of its experts' outputs."""
        sums: Tensor = _run(self._finish_combine, self._start_rows_grad, combined)
        return sums

    # Each half with its derivative, which gets the gradient of its first output. A second half saves a tensor in any
    # case: a recomputation ends where the last tensor is saved, and must not end between halves.

    def _start_dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        self._forward = self.mechanism.dispatch(x.contiguous(), ids, weights)
        next(self._forward)
        return x.new_empty(0), None

    def _finish_tokens_grad(self, _: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        tokens, weights = self._backward, self._weights_grad
        self._backward = self._weights_grad = None
        grad_x = None if tokens is None else finished(tokens)[0]
        return grad_x, None, None if weights is None else finished(weights).to(self._weights_dtype)

    def _finish_dispatch(self, dispatched: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        rows, offsets, self.route = finished(self._forward)
        self._forward = None
        return (rows, offsets), offsets

    def _start_tokens_grad(self, grads: Tensor, _: Tensor) -> tuple[Tensor]:
        if self._needs_x:
            self._backward = self.mechanism.combine(grads, self.route, weighted=False)
            next(self._backward)
        return (grads.new_empty(0),)

    def _start_combine(self, rows: Tensor, dispatched: Tensor) -> tuple[Tensor, None]:
        self._forward = self.mechanism.combine(rows.contiguous(), self.route, weighted=True)
        next(self._forward)
        return rows.new_empty(0), None

    def _finish_rows_grad(self, under_way: Tensor) -> tuple[Tensor, Tensor]:
        grads, self._weights_grad = finished(self._backward)
        self._backward = None
        return grads, under_way

    def _finish_combine(self, combined: Tensor) -> tuple[Tensor, Tensor]:
        sums, saved = finished(self._forward)
        self._forward = None
        return sums, saved if self._needs_weights and saved is not None else sums.new_empty(0)

    def _start_rows_grad(self, grads: Tensor, saved: Tensor) -> tuple[Tensor]:
        self._backward = self.mechanism.spread(grads, self.route, saved if self._needs_weights else None)
        next(self._backward)
        return (grads.new_empty(0),)


def _run(half: Callable[..., Any], derivative: Callable[..., Any], *inputs: Tensor) -> Any:
    """Run `half` as an autograd function, or plainly if gradients are disabled, which saves the host 10 µs."""
    function: Any = _Half
    return function.apply(half, derivative, *inputs) if torch.is_grad_enabled() else half(*inputs)[0]


class _Half(torch.autograd.Function):
    """Runs a start or finish of a dispatch or combine in forward, and its derivative in backward."""

    @staticmethod
    def forward(ctx: Any, half: Callable[..., Any], derivative: Callable[..., Any], *inputs: Tensor) -> Any:
        outputs, saved = half(*inputs)
        ctx.derivative = derivative
        ctx.save_for_backward(*([] if saved is None else [saved]))
        return outputs

    @staticmethod
    def backward(ctx: Any, grads: Tensor, *_: Any) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported("create_graph=True of a dispatch or a combine, whose derivatives have none: leave it out")
        return None, None, *ctx.derivative(grads.contiguous(), *ctx.saved_tensors)
