"""Small calls through the torch process group: below a measured size another library may be faster.

Which way a call takes follows from its operation, size, dtype and reduction alone, which are equal on all ranks. Calls
that take it are not shown on the board: the process group watches over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from counterpoint.collectives.program import Call
from counterpoint.collectives.reduce import Reduction
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured

__all__ = ["CROSSOVER_BYTES", "Fallback", "Path", "TorchWork"]

Path: TypeAlias = Literal["zero_sm", "torch"]

CROSSOVER_BYTES: dict[str, int] = {
    "all_gather": 32 << 20,
    "reduce_scatter": 128 << 20,
    "all_reduce": 256 << 20,
    "all_to_all": 32 << 20,
    "broadcast": 0,  # not measured: never by torch
}
"""Below these sizes NCCL was faster **alone** (4 x H200, NCCL 2.28.9, 2026-11-21, results/collectives-alone-4xh200.md).
Beside a GEMM it waits for SMs at any size."""
_REDUCED = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")  # what NCCL can add up


class Fallback:
    """When calls go to the process group, and how.

    Args:
        group: torch process group of the same ranks; None: they never do.
        crossover_bytes: by operation, the size of the full array (as nccl-tests count it) below which they do; what is
            not named is as in `CROSSOVER_BYTES`.

    Raises:
        Misconfigured: sizes of unknown operations, or sizes and no group that could take the calls.
    """

    def __init__(self, group: Any, crossover_bytes: Mapping[str, int] | None) -> None:
        given = dict(crossover_bytes or {})
        unknown = [f"{name}={size}" for name, size in given.items() if name not in CROSSOVER_BYTES or size < 0]
        if unknown:
            there = ", ".join(CROSSOVER_BYTES)
            raise Misconfigured(f"crossover_bytes {', '.join(unknown)}: give 0 or more for {there}")
        if given and group is None:
            raise Misconfigured("crossover_bytes without fallback: give the process group that takes smaller calls")
        self._group = group
        self.crossover_bytes = CROSSOVER_BYTES | given if group is not None else dict.fromkeys(CROSSOVER_BYTES, 0)

    def path(self, operation: str, num_bytes: int, reduction: Reduction | None = None) -> Path:
        """Which way a call of `num_bytes` (of the full array) takes."""
        if num_bytes >= self.crossover_bytes.get(operation, 0):
            return "zero_sm"
        if reduction is not None and (reduction.op == "premul_sum" or reduction.dtype not in _REDUCED):
            return "zero_sm"
        return "torch"

    def takes(self, call: Call, reduction: Reduction | None) -> bool:
        """Whether this call goes to the process group."""
        if self._group is None or call.operation not in CROSSOVER_BYTES:
            return False
        num_bytes = max(map(max, call.sizes)) if call.operation == "broadcast" else sum(call.sizes[0])
        return self.path(call.operation, num_bytes, reduction) == "torch"

    def start(
        self, call: Call, output: Any, input: Any, *, async_op: bool, reduction: Reduction | None = None
    ) -> Work | None:
        """The call by torch.distributed; on CUDA on the current stream, or if async_op behind it."""
        import torch.distributed as dist

        group = self._group
        op = dist.ReduceOp.SUM if reduction is None else getattr(dist.ReduceOp, reduction.op.upper())
        match call.operation:
            case "all_gather":
                work = dist.all_gather_into_tensor(_flat(output), _flat(input), group, async_op)
            case "reduce_scatter":
                work = dist.reduce_scatter_tensor(output.view(-1), input.reshape(-1), op, group, async_op)
            case "all_reduce":
                work = dist.all_reduce(output, op, group, async_op)
            case "all_to_all":
                work = dist.all_to_all_single(_flat(output), _flat(input), group=group, async_op=async_op)
            case _:
                source = dist.get_global_rank(group, call.root or 0)
                work = dist.broadcast(_flat(output), source, group, async_op)
        return TorchWork(f"{call.operation} by torch", work, (output, input)) if async_op else None


class TorchWork(Work):
    """A call of the process group."""

    path: Path = "torch"

    def __init__(self, text: str, work: Any, keep: tuple[Any, ...]) -> None:
        super().__init__(text)
        self._work, self._keep = work, keep

    def wait(self, timeout_s: float | None = None) -> bool:
        """As of torch's Work: on CUDA the current stream waits.

        Raises:
            Misconfigured: a time: torch's works have none of their own.
        """
        if timeout_s is not None:
            raise Misconfigured(f"{self._text}: timeout_s={timeout_s} has no effect there; give the group a timeout")
        self._work.wait()
        self._keep = ()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._work.is_completed())


def _flat(tensor: Any) -> Any:
    """Its bytes: a library need not know the dtype to move them."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
