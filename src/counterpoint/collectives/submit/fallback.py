"""Give small calls to the torch process group: below a measured size NCCL may be faster.

The choice depends only on a call's operation, size, dtype and reduction, which are equal on all ranks. Calls given to
torch do not appear in the rank's status: the process group's own watchdog handles them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from counterpoint.collectives.host.group import start_by_torch
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.operations import OPERATIONS
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.submit.tensors import flat_bytes
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile, default_profile

Path: TypeAlias = Literal["zero_sm", "torch"]

BY_TORCH = tuple(name for name, row in OPERATIONS.items() if {"torch", "programs"} <= row.measured_by)
"""Names the collectives that the process group can take: those that `measure` runs both by torch and by programs."""
_REDUCED = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")  # dtypes NCCL can reduce


class Fallback:
    """Decides which calls the process group `group` takes (None: it takes none), and starts them.

    `crossover_bytes` is, by operation, the size of the full array (as nccl-tests count it) below which torch takes a
    call; operations that it lacks have the profile's size. `Misconfigured` is raised for a size below 0, an unknown
    operation, or sizes without a group.
    """

    def __init__(self, group: Any, crossover_bytes: Mapping[str, int] | None, profile: Profile | None = None) -> None:
        given = dict(crossover_bytes or {})
        unknown = [f"{name}={size}" for name, size in given.items() if name not in BY_TORCH or size < 0]
        if unknown:
            there = ", ".join(BY_TORCH)
            raise Misconfigured(f"crossover_bytes {', '.join(unknown)}: give 0 or more for {there}")
        if given and group is None:
            raise Misconfigured("crossover_bytes without fallback: give the process group that takes smaller calls")
        self._group = group
        shipped = (profile or default_profile()).nccl.crossover_bytes
        measured = dict[str, int](shipped.items()) if group is not None else {}
        self.crossover_bytes = {name: given.get(name, measured.get(name, 0)) for name in BY_TORCH}

    def path(self, operation: str, num_bytes: int, reduction: Reduction | None = None) -> Path:
        """Return what runs a call whose full array has `num_bytes`: `zero_sm` (this package) or `torch`."""
        if num_bytes >= self.crossover_bytes.get(operation, 0):
            return "zero_sm"
        if reduction is not None and (reduction.op == "premul_sum" or reduction.dtype not in _REDUCED):
            return "zero_sm"
        return "torch"

    def takes(self, call: Call, reduction: Reduction | None) -> bool:
        """Return whether this call goes to the process group."""
        if self._group is None or call.operation not in BY_TORCH:
            return False
        num_bytes = sum(call.sizes[0]) if call.root is None else call.output_bytes(0)
        return self.path(call.operation, num_bytes, reduction) == "torch"

    def start(
        self, call: Call, output: Any, input: Any, *, async_op: bool, reduction: Reduction | None = None
    ) -> Work | None:
        """Start a call by torch.distributed, which on CUDA runs after what the current stream holds.

        Args:
            call: the collective, equal on all ranks.
            output: contiguous tensor.
            input: contiguous tensor; None: the call works on output.
            async_op: return at once.
            reduction: how values are combined, if the call reduces.

        Returns:
            The call's `TorchWork` with `async_op`, else None.
        """
        op = "sum" if reduction is None else reduction.op
        if reduction is None:  # a library need not know the dtype to move it
            output, input = flat_bytes(output), None if input is None else flat_bytes(input)
        else:
            input = None if input is None else input.reshape(-1)
        works = start_by_torch(call, output.view(-1), input, group=self._group, op=op, async_op=async_op)
        return TorchWork(f"{call.operation} by torch", works, (output, input)) if async_op else None


class TorchWork:
    """Represents a call that torch runs as one or more works of its own; see `Work`."""

    def __init__(self, text: str, works: list[Any], keep: tuple[Any, ...]) -> None:
        self.path: Path = "torch"
        self._text, self._works, self._keep = text, works, keep
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait as torch's Work does: on CUDA the current stream waits.

        Returns:
            True.

        Raises:
            Misconfigured: `timeout_s` was given; a work of torch has only the timeout of its process group.
        """
        if timeout_s is not None:
            raise Misconfigured(f"{self._text}: timeout_s={timeout_s} has no effect there; give the group a timeout")
        try:
            for work in self._works:
                work.wait()
        except BaseException as error:
            self._error = error
            raise
        self._keep = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the error that `wait` raised; None before, since torch reports errors only there."""
        return self._error
