"""Run a collective to be measured: make random buffers, launch on the current stream, check the result.

Sizes are of the full array, as nccl-tests counts: what all_gather returns, what reduce_scatter takes, what all_reduce
and broadcast hold, what each rank gives to all_to_all, what each rank sends on to the next in send_recv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from counterpoint.collectives.host.group import start_by_torch
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.operations import OPERATIONS, even_call
from counterpoint.errors import CounterpointError, Misconfigured

if TYPE_CHECKING:
    from torch import Tensor

    from counterpoint.collectives.communicator import Communicator


_CHUNK = {"cuda": 1 << 24, "cpu": 1 << 18}  # elements made and compared at once: what a check needs besides the buffers


class WrongResult(CounterpointError):
    """Is raised when a collective delivered wrong data, so that its time means nothing."""


def elements_of(size_bytes: int, itemsize: int, world_size: int) -> int:
    """Return the number of elements of an array of about `size_bytes` that splits into shards of multiples of 64."""
    grain = 64 * world_size
    return max(1, round(size_bytes / itemsize / grain)) * grain


def memory_bytes(collective: str, size_bytes: int, world_size: int) -> int:
    """Return the bytes of a collective's buffers on one rank; an in-place collective also keeps a copy of its input."""
    call = find(collective, world_size, size_bytes)
    return 2 * call.output_bytes(0) if _in_one_tensor(call) else call.output_bytes(0) + call.input_bytes(0)


def collectives() -> tuple[str, ...]:
    """Return the names of the collectives that can be measured."""
    return tuple(name for name, row in OPERATIONS.items() if row.measured_by)


def find(collective: str, world_size: int, size_bytes: int) -> Call:
    """Return the `Call` of a collective by its PyTorch name; raise Misconfigured for one that cannot be measured."""
    if collective not in collectives():
        raise Misconfigured(f"there is no collective {collective!r}; choose from: {', '.join(collectives())}")
    return even_call(collective, world_size, size_bytes)


def _in_one_tensor(call: Call) -> bool:
    return "input" not in OPERATIONS[call.operation].arguments


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Holds the input and output of one collective on this rank; several process groups may share them."""

    call: Call
    rank: int
    send: Tensor
    recv: Tensor
    seed: int

    @property
    def collective(self) -> str:
        """Return the name of the collective."""
        return self.call.operation

    @property
    def own_block(self) -> Tensor | None:
        """Return this rank's block of the output buffer if the collective can take its input from there, else None."""
        span = self.call.input_span(self.rank)
        if span.buffer != "output" or _in_one_tensor(self.call):
            return None
        size = self.recv.element_size()
        return self.recv[span.offset // size :][: span.num_bytes // size]


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Runs a collective over one process group: by torch, or by our communicator of the same ranks."""

    buffers: Buffers
    group: dist.ProcessGroup
    communicator: Communicator | None = None

    def launch(self) -> None:
        """Launch the collective on the current stream (CUDA), or run it to its end (CPU)."""
        buffers = self.buffers
        if self.communicator is None:
            start_by_torch(buffers.call, buffers.recv, buffers.send, group=self.group, async_op=False)
            return
        own = buffers.own_block
        self.communicator.call(buffers.collective, buffers.recv, buffers.send if own is None else own)

    def reset(self) -> None:
        """Restore the input data that an in-place collective has overwritten; call this outside timed regions only."""
        buffers = self.buffers
        if _in_one_tensor(buffers.call):
            buffers.recv.copy_(buffers.send)
        elif self.communicator is not None and (own := buffers.own_block) is not None:  # in place: no local copy
            own.copy_(buffers.send)

    def check(self) -> None:
        """Run the collective once and check every element of its output; all ranks of the group call it together.

        Copied data must be equal. Sums may differ from those in float64 by twice the error of adding in their dtype.
        WrongResult is raised otherwise.
        """
        buffers = self.buffers
        buffers.recv.fill_(float("nan"))
        self.reset()
        if buffers.recv.is_cuda:
            torch.cuda.synchronize(buffers.recv.device)
            with torch.cuda.stream(torch.cuda.Stream(buffers.recv.device)):  # NCCL's copies refuse the default stream
                self.launch()
            torch.cuda.synchronize(buffers.recv.device)
        else:
            self.launch()
        size = buffers.recv.element_size()
        for span, sources, offset in buffers.call.output_contents(buffers.rank):
            got = buffers.recv[span.offset // size :][: span.num_bytes // size]
            _compare(buffers, got, sources, offset // size)
        self.reset()


def allocate(
    collective: str,
    *,
    numel: int,
    dtype: torch.dtype,
    rank: int,
    world_size: int,
    seed: int,
    empty: Callable[[int], Tensor],
) -> Buffers:
    """Return the buffers of one collective, whose full array has `numel` elements (from `elements_of`).

    They hold random data that differs on each rank. `empty` allocates a number of elements: plain memory, or memory
    registered with a process group.
    """
    call = find(collective, world_size, numel * dtype.itemsize)
    recv = empty(call.output_bytes(rank) // dtype.itemsize)
    send = torch.empty_like(recv) if _in_one_tensor(call) else empty(call.input_bytes(rank) // dtype.itemsize)
    fill(send, seed, rank)
    if _in_one_tensor(call):
        recv.copy_(send)
    return Buffers(call=call, rank=rank, send=send, recv=recv, seed=seed)


def fill(buffer: Tensor, seed: int, rank: int) -> None:
    """Fill a buffer chunk by chunk with normal random data that any rank can reproduce."""
    step = _CHUNK[buffer.device.type]
    for start in range(0, buffer.numel(), step):
        buffer[start : start + step] = _chunk(buffer, seed, rank, start // step)[: buffer.numel() - start]


def _chunk(like: Tensor, seed: int, rank: int, index: int) -> Tensor:
    generator = torch.Generator(device=like.device).manual_seed(((seed << 10) + rank << 20) + index)
    return torch.randn(_CHUNK[like.device.type], generator=generator, device=like.device, dtype=torch.float32).to(
        like.dtype
    )


def _part(like: Tensor, seed: int, rank: int, start: int, length: int) -> Tensor:
    """Return elements [start, start + length) of the data that `fill` writes on `rank`, making only needed chunks."""
    step = _CHUNK[like.device.type]
    first, last = start // step, (start + length - 1) // step
    chunks = [_chunk(like, seed, rank, index) for index in range(first, last + 1)]
    return torch.cat(chunks)[start - first * step :][:length]


def _compare(buffers: Buffers, got: Tensor, sources: Iterable[int], offset: int) -> None:
    """Raise WrongResult if copied data differ, or sums have over twice the error of adding rank by rank."""
    step = _CHUNK[got.device.type]
    for start in range(0, got.numel(), step):
        piece = got[start : start + step]
        parts = [_part(got, buffers.seed, rank, offset + start, piece.numel()) for rank in sources]
        if len(parts) == 1:
            wrong = int((piece != parts[0]).sum())
            if wrong:
                raise WrongResult(f"{buffers.collective} gave wrong data: {wrong} of {piece.numel()} elements differ")
            continue
        exact, plain = torch.zeros_like(piece, dtype=torch.float64), torch.zeros_like(piece)
        for part in parts:
            exact += part
            plain = plain + part
        error, allowed = relative_error(piece, exact), 2 * relative_error(plain, exact)
        if not error <= max(allowed, torch.finfo(piece.dtype).eps):
            raise WrongResult(
                f"{buffers.collective} gave wrong sums: relative error {error:.2e}, allowed {allowed:.2e}"
            )


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Return ‖got - exact‖ / ‖exact‖ in float64; NaN if `got` has NaN, which fails every comparison."""
    return float((got.double() - exact).norm() / exact.norm())
