"""Open the ways by which tokens are brought to experts and back: ours, NCCL's, and torch's operation by NVSHMEM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import Unsupported, printable
from counterpoint.measurement.dependent import TokenExchange
from counterpoint.measurement.sample_tokens import SampleTokens
from counterpoint.measurement.session import Session
from counterpoint.measurement.suites import SYMM_MEM
from counterpoint.parallel.expert import permute as routing
from counterpoint.parallel.expert.dispatcher import Dispatcher
from counterpoint.parallel.options import ExpertOptions

if TYPE_CHECKING:
    from torch import Tensor

FORCED = ("gather", "slabs")  # mechanisms that a call may be unable to take
_OURS = ("gather", "slabs", "auto")  # copies by copy engines: their memory is of torch's kind CUDA
_NVSHMEM: Literal["NVSHMEM"] = "NVSHMEM"  # a backend of torch's symmetric memory


class ExchangeMechanism(Protocol):
    """Does one way of moving tokens; the handle is of one dispatch and one combine."""

    def dispatch(self, tokens: SampleTokens) -> tuple[Tensor, Tensor, Any]:
        """Return the rows of this rank's experts, where each one's end, and a handle."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return the weighted sums of the rows of each token."""

    def way(self) -> dict[str, str]:
        """Return which ways calls went, and why; empty where there is only one."""

    def close(self) -> None:
        """Give back what it holds."""


class _Ours:
    """Goes by a `Dispatcher`, whose mechanism `torch` is that of all_to_all_single."""

    def __init__(self, session: Session, exchange: TokenExchange, name: str, timeout_s: float) -> None:
        of_communicator = CommunicatorOptions(timeout_s=timeout_s)
        options = ExpertOptions(mechanism=name, equal_tokens=True, communicator=of_communicator)  # type: ignore[arg-type]
        layer = exchange.sizes
        self._dispatcher = Dispatcher(
            session.world, experts=layer.experts, top_k=layer.top_k, max_tokens=exchange.tokens, hidden=layer.hidden,
            options=options,
        )  # fmt: skip

    def dispatch(self, tokens: SampleTokens) -> tuple[Tensor, Tensor, Any]:
        return self._dispatcher.dispatch(tokens.x, tokens.ids, tokens.weights)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return self._dispatcher.combine(rows, handle)

    def way(self) -> dict[str, str]:
        return {str(one.path): one.why for one in self._dispatcher.report().calls}

    def close(self) -> None:
        self._dispatcher.close()


class NcclExchange:
    """Gathers all tokens and scatters sums as `gather` does, with the same kernels, but by torch's collectives."""

    def __init__(self, session: Session, exchange: TokenExchange) -> None:
        self._session, self._exchange = session, exchange

    def dispatch(self, tokens: SampleTokens) -> tuple[Tensor, Tensor, Any]:
        """Gather the tokens of all ranks, and take the rows of this rank's experts."""
        x, ids, weights = map(self._gathered, (tokens.x, tokens.ids, tokens.weights))
        experts = self._exchange.sizes.experts // self._session.world_size
        rows = self._exchange.capacity(self._session.world_size)
        first = self._session.rank * experts
        there = routing.assign(ids, first_expert=first, num_experts=experts, capacity=rows)
        return routing.permute(x, there, zero_tail=False), there.offsets, (there, weights)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Add up the rows of all tokens, and scatter the sums."""
        there, weights = handle
        partial_sums = routing.combine(rows, there, weights=weights)
        out = rows.new_empty(self._exchange.tokens, rows.shape[1])
        torch_function("reduce_scatter")(out, partial_sums, group=self._session.world)
        return out

    def _gathered(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(self._session.world_size * len(tensor), *tensor.shape[1:])
        torch_function("all_gather")(out, tensor, group=self._session.world)
        return out

    def way(self) -> dict[str, str]:
        """Return nothing: there is one way."""
        return {}

    def close(self) -> None:
        """Do nothing: it holds nothing."""


class _SymmMem:
    """Goes by torch's all_to_all_vdev_2d, which reads counts on the device; experts write where it reads.

    Raises:
        Unsupported: it does not run here, or other mechanisms of this measurement need another kind of memory.
    """

    def __init__(self, session: Session, exchange: TokenExchange, others: Sequence[str]) -> None:
        reason = _no_symm_mem(session, others)
        reasons = [one for one in session.gather(reason) if one is not None]
        if reasons:
            raise Unsupported(reasons[0])
        with suppress(RuntimeError):  # it is in use already
            symm_mem.set_backend(_NVSHMEM)
        if symm_mem.get_backend(session.device) != _NVSHMEM:
            raise Unsupported(f"this process has symmetric memory of another kind: set TORCH_SYMMMEM={_NVSHMEM}")
        layer, tokens = exchange.sizes, exchange.tokens
        self._experts, self._local = layer.experts, layer.experts // session.world_size
        self._group = session.world.group_name
        empty = partial(symm_mem.empty, device=session.device)
        self._home = empty(tokens * layer.top_k, layer.hidden, dtype=session.dtype)
        self._there = empty(exchange.capacity(session.world_size), layer.hidden, dtype=session.dtype)
        self._counts = empty(layer.experts, dtype=torch.int64)
        self._at_home, self._at_experts = (empty(2, layer.experts, dtype=torch.int64) for _ in range(2))
        dist.barrier(group=session.world)

    def dispatch(self, tokens: SampleTokens) -> tuple[Tensor, Tensor, Any]:
        home = routing.assign(tokens.ids, first_expert=0, num_experts=self._experts, capacity=len(self._home))
        self._counts.copy_(home.offsets.diff(prepend=home.offsets.new_zeros(1)))
        routing.permute(tokens.x, home, out=self._home, zero_tail=False)
        ops: Any = torch.ops.symm_mem
        ops.all_to_all_vdev_2d(self._home, self._there, self._counts, self._at_experts, self._group)
        offsets = self._at_experts[0].view(self._local, -1).sum(1).cumsum(0).int()
        return self._there, offsets, (home, tokens.weights)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        home, weights = handle
        if rows is not self._there:
            self._there.copy_(rows)
        ops: Any = torch.ops.symm_mem
        ops.all_to_all_vdev_2d_offset(self._there, self._home, self._at_experts, self._at_home, self._group)
        return routing.combine(self._home, home, weights=weights)

    def way(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        del self._home, self._there, self._counts, self._at_home, self._at_experts


def _no_symm_mem(session: Session, others: Sequence[str]) -> str | None:
    """Return why torch's operation cannot be measured here; None if it can."""
    if not session.is_cuda:
        return "torch's all_to_all_vdev_2d runs on GPUs only"
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset"):
        return f"torch {torch.__version__} has no all_to_all_vdev_2d_offset"
    if not symm_mem.is_nvshmem_available():
        return "torch's all_to_all_vdev_2d needs NVSHMEM, and libnvshmem_host.so.3 cannot be loaded"
    if os.environ.get("NVSHMEM_DISABLE_NVLS") != "1":
        return "NVLink multicast has to be off: set NVSHMEM_DISABLE_NVLS=1, or leave it unset"
    if any(name in _OURS for name in others):
        return (
            "a process has symmetric memory of one kind, NVSHMEM's or that of our mechanisms: measure it in a run of "
            "its own, with --mechanism torch --mechanism nccl --mechanism symm_mem"
        )
    return None


def opened_mechanism(
    session: Session, exchange: TokenExchange, name: str, others: Sequence[str], timeout_s: float
) -> ExchangeMechanism:
    """Return the mechanism called so; `others` are measured in the same process."""
    if name == SYMM_MEM:
        try:
            return _SymmMem(session, exchange, others)
        except (RuntimeError, AttributeError) as error:
            raise Unsupported(f"NVSHMEM failed: {printable(str(error), 200)}") from error
    return NcclExchange(session, exchange) if name == "nccl" else _Ours(session, exchange, name, timeout_s)
