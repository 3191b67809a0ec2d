"""The collective of a pair: buffers of random data, one launch on the current stream, and a check of the result.

Sizes are of the full array, as nccl-tests counts: what all_gather returns, what reduce_scatter takes, what all_reduce
and broadcast hold, what each rank gives to all_to_all, what each rank sends on to the next in send_recv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError, Misconfigured

if TYPE_CHECKING:
    from torch import Tensor

    from counterpoint.collectives.communicator import Communicator

__all__ = ["BY_PROGRAMS", "COLLECTIVES", "Buffers", "Comm", "WrongResult", "allocate", "elements_of", "memory_bytes"]

_CHUNK = {"cuda": 1 << 24, "cpu": 1 << 18}  # elements made and compared at once: what a check needs beside the buffers


class WrongResult(CounterpointError):
    """A collective gave other data than it must: its time is worth nothing."""


class Empty(Protocol):
    """Allocates one buffer: plain memory, or memory that is registered with a process group."""

    def __call__(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor: ...


def plain_memory(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What torch's allocator gives."""
    return torch.empty(numel, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the two buffers, as parts of the full array, and how to run and check one collective.

    `in_place` collectives have one buffer. `launch(group, send, recv)` queues it on the current stream.
    """

    send_is_shard: bool = False
    recv_is_shard: bool = False
    in_place: bool = False
    reduces: bool = False
    launch: Callable[[dist.ProcessGroup, Tensor, Tensor], object]
    sources: Callable[[int, int, int], list[tuple[int, int]]]
    """(rank, world_size, shard) -> for each shard of the result: (source rank, offset in its send buffer)."""


# Their names since PyTorch 2.13, where the older ones warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _send_recv(group: dist.ProcessGroup, send: Tensor, recv: Tensor) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    operations = [
        dist.P2POp(dist.isend, send, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, recv, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _same_place(source: Callable[[int, int], int]) -> Callable[[int, int, int], list[tuple[int, int]]]:
    """The whole array of one rank, shard by shard."""
    return lambda rank, size, shard: [(source(rank, size), index * shard) for index in range(size)]


COLLECTIVES: dict[str, Layout] = {
    "all_gather": Layout(
        send_is_shard=True,
        launch=lambda group, send, recv: _all_gather(recv, send, group=group),
        sources=lambda rank, size, shard: [(source, 0) for source in range(size)],
    ),
    "reduce_scatter": Layout(
        recv_is_shard=True,
        reduces=True,
        launch=lambda group, send, recv: _reduce_scatter(recv, send, group=group),
        sources=lambda rank, size, shard: [(-1, rank * shard)],
    ),
    "all_reduce": Layout(
        in_place=True,
        reduces=True,
        launch=lambda group, send, recv: dist.all_reduce(recv, group=group),
        sources=lambda rank, size, shard: [(-1, index * shard) for index in range(size)],
    ),
    "all_to_all": Layout(
        launch=lambda group, send, recv: dist.all_to_all_single(recv, send, group=group),
        sources=lambda rank, size, shard: [(source, rank * shard) for source in range(size)],
    ),
    "broadcast": Layout(
        in_place=True,
        launch=lambda group, send, recv: dist.broadcast(recv, group=group, group_src=0),
        sources=_same_place(lambda rank, size: 0),
    ),
    "send_recv": Layout(launch=_send_recv, sources=_same_place(lambda rank, size: (rank - 1) % size)),
}


def elements_of(size_bytes: int, itemsize: int, world_size: int) -> int:
    """Elements of the full array: whole shards, each a multiple of 64 elements (aligned to 128 bytes)."""
    grain = 64 * world_size
    return max(1, round(size_bytes / itemsize / grain)) * grain


def memory_bytes(collective: str, size_bytes: int, world_size: int) -> int:
    """What the buffers of one collective take on a rank (in place: the original beside it)."""
    layout = find(collective)
    return sum(size_bytes // (world_size if shard else 1) for shard in (layout.send_is_shard, layout.recv_is_shard))


def find(collective: str) -> Layout:
    """The layout by PyTorch's name; raises Misconfigured."""
    if collective not in COLLECTIVES:
        raise Misconfigured(f"there is no collective {collective!r}; choose from: {', '.join(COLLECTIVES)}")
    return COLLECTIVES[collective]


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What one collective reads and writes on this rank; several process groups may share them."""

    collective: str
    send: Tensor
    recv: Tensor
    seed: int

    @property
    def size_bytes(self) -> int:
        """Of the full array."""
        layout = COLLECTIVES[self.collective]
        return (self.send if layout.recv_is_shard else self.recv).nbytes


def _own_block(rank: int, send: Tensor, recv: Tensor) -> Tensor:
    """This rank's block of a gathered array."""
    return recv[rank * send.numel() : (rank + 1) * send.numel()]


BY_PROGRAMS: dict[str, Callable[[Communicator, Tensor, Tensor], object]] = {  # what zero_sm offers
    "all_gather": lambda communicator, send, recv: communicator.all_gather(
        recv, _own_block(communicator.rank, send, recv)
    ),
    "reduce_scatter": lambda communicator, send, recv: communicator.reduce_scatter(recv, send),
    "all_reduce": lambda communicator, send, recv: communicator.all_reduce(recv),
    "all_to_all": lambda communicator, send, recv: communicator.all_to_all(recv, send),
    "broadcast": lambda communicator, send, recv: communicator.broadcast(recv),
}


@dataclass(frozen=True, kw_only=True)
class Comm:
    """One collective over one process group: by torch, or by the programs of a communicator of the same ranks."""

    buffers: Buffers
    group: dist.ProcessGroup
    communicator: Communicator | None = None

    def launch(self) -> None:
        """Queues it on the current stream (CUDA), or runs it to its end (CPU)."""
        collective, send, recv = self.buffers.collective, self.buffers.send, self.buffers.recv
        if self.communicator is None:
            COLLECTIVES[collective].launch(self.group, send, recv)
        else:
            BY_PROGRAMS[collective](self.communicator, send, recv)

    def reset(self) -> None:
        """Puts back what an in-place collective has overwritten; never inside a timed region."""
        send, recv = self.buffers.send, self.buffers.recv
        if COLLECTIVES[self.buffers.collective].in_place:
            recv.copy_(send)
        elif self.communicator is not None and self.buffers.collective == "all_gather":  # in place: no local copy
            _own_block(self.communicator.rank, send, recv).copy_(send)

    def check(self) -> None:
        """Runs it once and compares every element with what it must be. All ranks of the group call it.

        Raises:
            WrongResult: copies that are not equal, or sums that are off by more than twice the error of adding in the
                same dtype, against float64.
        """
        buffers, layout = self.buffers, COLLECTIVES[self.buffers.collective]
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        buffers.recv.fill_(float("nan"))
        self.reset()
        if buffers.recv.is_cuda:
            torch.cuda.synchronize(buffers.recv.device)
            with torch.cuda.stream(torch.cuda.Stream(buffers.recv.device)):  # NCCL's copies refuse the default stream
                self.launch()
            torch.cuda.synchronize(buffers.recv.device)
        else:
            self.launch()
        shard = buffers.send.numel() // size if not layout.send_is_shard else buffers.send.numel()
        for index, (source, offset) in enumerate(layout.sources(rank, size, shard)):
            summed = range(size) if source < 0 else (source,)
            _compare(buffers, buffers.recv[index * shard :][:shard], summed, offset)
        self.reset()


def allocate(
    collective: str,
    *,
    numel: int,
    rank: int,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    empty: Empty = plain_memory,
) -> Buffers:
    """Buffers of random data for a collective over `numel` elements (from `elements_of`); each rank's data differs."""
    layout, shard = find(collective), numel // world_size
    recv = empty(shard if layout.recv_is_shard else numel, dtype=dtype, device=device)
    if layout.in_place:
        send = torch.empty_like(recv)
    else:
        send = empty(shard if layout.send_is_shard else numel, dtype=dtype, device=device)
    fill(send, seed, rank)
    if layout.in_place:
        recv.copy_(send)
    return Buffers(collective=collective, send=send, recv=recv, seed=seed)


def fill(buffer: Tensor, seed: int, rank: int) -> None:
    """Normal random data that any rank can make again, a chunk at a time."""
    step = _CHUNK[buffer.device.type]
    for start in range(0, buffer.numel(), step):
        buffer[start : start + step] = _chunk(buffer, seed, rank, start // step)[: buffer.numel() - start]


def _chunk(like: Tensor, seed: int, rank: int, index: int) -> Tensor:
    generator = torch.Generator(device=like.device).manual_seed(((seed << 10) + rank << 20) + index)
    return torch.randn(_CHUNK[like.device.type], generator=generator, device=like.device, dtype=torch.float32).to(
        like.dtype
    )


def _part(like: Tensor, seed: int, rank: int, start: int, length: int) -> Tensor:
    """`length` elements of what `fill` gave rank `rank`, from `start`; at most two chunks are made."""
    step = _CHUNK[like.device.type]
    first, last = start // step, (start + length - 1) // step
    chunks = [_chunk(like, seed, rank, index) for index in range(first, last + 1)]
    return torch.cat(chunks)[start - first * step :][:length]


def _compare(buffers: Buffers, got: Tensor, sources: Iterable[int], offset: int) -> None:
    """Copies must be equal; sums may differ by twice what adding in this dtype, rank after rank, costs."""
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
        error, allowed = _relative(piece, exact), 2 * _relative(plain, exact)
        if not error <= max(allowed, torch.finfo(piece.dtype).eps):
            raise WrongResult(
                f"{buffers.collective} gave wrong sums: relative error {error:.2e}, allowed {allowed:.2e}"
            )


def _relative(got: Tensor, exact: Tensor) -> float:
    """‖got - exact‖ / ‖exact‖ in float64; NaN never passes a comparison."""
    return float((got.double() - exact).norm() / exact.norm())
