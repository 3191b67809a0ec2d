"""Collectives of one process group, by programs over symmetric memory; on CPUs for now: threads, no kernels.

    communicator = Communicator(group)
    shards = communicator.empty(world_size, 1024, dtype=torch.bfloat16)
    work = communicator.all_gather(shards, shards[rank], async_op=True)  # in place: nothing is copied twice
    work.wait()

Rules that hold for every operation:

- All ranks make the same calls in the same order on each channel. `send`, `recv` and `send_recv` involve two ranks, and
  their order counts between these. Ranks are counted within the group.
- A channel runs its calls one after the other; different channels run at the same time, as do different communicators.
- The input may be in any memory; if it is not contiguous, a copy of it is sent. An output that is not from `empty`
  costs a copy of its bytes: peers cannot write there, so they write to a landing of the channel.
- With `async_op=True` a call returns a `Work` at once, else it returns None when the output may be read.
- A rank that dies, does not come or calls something else ends the call on the others with an error that names it. A
  communicator that has failed once raises that error for ever: close it and make a new one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.collectives import calls
from counterpoint.collectives.arguments import (
    block_bytes,
    check,
    described,
    dtype_name,
    even_blocks,
    overlap,
    reduction_of,
    sendable,
    splits,
)
from counterpoint.collectives.board import MAX_CHUNKS
from counterpoint.collectives.cpu import BeforeStep, CpuExecutor
from counterpoint.collectives.cpu_run import Job
from counterpoint.collectives.group import agree, gathered, membership, together
from counterpoint.collectives.plan import plan
from counterpoint.collectives.program import ALIGNMENT, Call, Program, Tuning
from counterpoint.collectives.reduce import Reduction
from counterpoint.collectives.shared_memory import Card, SharedMemory, why_not
from counterpoint.collectives.symmetric import Pool
from counterpoint.collectives.watchdog import Doing, Watchdog
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured, Unsupported

__all__ = ["Communicator", "available"]

Rows = Sequence[Sequence[int]]


def available(group: Any = None) -> str | None:
    """Why the ranks of `group` cannot have a `Communicator`; None if they can. All ranks call it and get the same
    answer.

    Args:
        group: torch process group; None: the default one.
    """
    return why_not(gathered(group, Card.of_this_process()))


class Communicator:
    """Collectives among the ranks of one host.

    All ranks of the group make it together. Memory of a rank: what `empty` was asked for; on each channel staging and a
    landing, up to twice as large as the largest call needs, and a board of about 8 (n + 1) (200 + 8 n) bytes.

    Args:
        group: torch process group, of a mesh axis by `mesh.get_group(axis)`; None: the default one. Used now and not
            afterwards.
        channels: how many calls can run at the same time; `channel=` of a call says which one runs it.
        timeout_s: seconds that a rank waits for another before it gives up.
        debug: compare the calls of all ranks before each starts (a round trip), not only when one waits or has ended.
        max_bytes: shared memory that this rank may take; None: an eighth of the machine's.
        chunk_bytes: smallest piece in which blocks are sent and reduced, a multiple of 16; large blocks take larger.
        before_step: called before every step, in a thread of the channel; for tests.

    Raises:
        Unsupported: this group cannot, and why: see `available`.
        Misconfigured: an option that cannot mean anything, or this process is not in the group.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        channels: int = 2,
        timeout_s: float = 600.0,
        debug: bool = False,
        max_bytes: int | None = None,
        chunk_bytes: int = 1 << 16,
        before_step: BeforeStep | None = None,
    ) -> None:
        if channels < 1 or not timeout_s > 0:
            raise Misconfigured(
                f"channels={channels}, timeout_s={timeout_s}: give one channel or more, and a time above 0"
            )
        Tuning(chunk_bytes=chunk_bytes)  # raises if it cannot be one
        agree(group, {"channels": channels, "chunk_bytes": chunk_bytes, "debug": debug})
        self.rank, self.world_size = membership(group)
        self.channels, self.chunk_bytes, self.debug = channels, chunk_bytes, debug
        reason = available(group)
        if reason is not None:
            raise Unsupported(reason)
        memory, watchdog = _joined(group, channels, _eighth_of_memory() if max_bytes is None else max_bytes, timeout_s)
        self._memory, self._pool = memory, Pool(memory)
        self._executor = CpuExecutor(memory, watchdog, channels=channels, before_step=before_step)
        self._numbers: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()  # the order of numbers is the order of the queue
        self._close = weakref.finalize(self, _closed, self._executor, watchdog, memory)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs, here and on peers that wait for this rank. Tensors stay valid."""
        self._close()

    def empty(self, *shape: int, dtype: Any = None) -> Any:
        """An uninitialised tensor in symmetric memory: as output it needs no landing.

        Its memory is used again when the last view of it has died. Ranks that make and drop theirs in the same order
        have them at the same offset.

        Args:
            shape: its sizes.
            dtype: None: torch's default.

        Raises:
            Unsupported: more than `max_bytes`, or than the machine has.
        """
        import torch

        return self._pool.empty(*shape, dtype=dtype or torch.get_default_dtype())

    def all_gather(self, output: Any, input: Any, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """output[r] = input of rank r; as `all_gather_into_tensor`. In place if input is this rank's block of output.

        Sends input.nbytes to each of the other ranks.
        """
        num_bytes = block_bytes(output, input, outputs=self.world_size)
        in_place = self._is_symmetric(output) and input.data_ptr() == output.data_ptr() + self.rank * num_bytes
        call = calls.all_gather(self.world_size, num_bytes, own="in_place" if in_place else "copy")
        text = f"all_gather of {described(input)} a rank"
        return self._start(text, call, output, input, channel, async_op)

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: Any = "sum",
        *,
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """output = the ranks' input[rank], combined in the order of ranks; as `reduce_scatter_tensor`.

        Accumulates in float32 if the dtype is narrower, and rounds once. Sends output.nbytes to each of the others.

        Args:
            output: this rank's shard.
            input: the shards of all ranks.
            op: sum, avg, max, min or premul_sum; or torch's ReduceOp of that name.
            factor: by which premul_sum multiplies first; the same on all ranks.
            channel: which runs it.
            async_op: return a `Work` at once.

        Raises:
            Misconfigured: `op` is none of these, or has no meaning for this dtype.
        """
        call = calls.reduce_scatter(self.world_size, block_bytes(output, input, inputs=self.world_size))
        reduction = reduction_of(op, factor, output)
        text = f"reduce_scatter of {described(output, reduction)} a rank"
        return self._start(text, call, output, input, channel, async_op, reduction=reduction)

    def all_reduce(
        self, tensor: Any, op: Any = "sum", *, factor: float = 1.0, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """tensor = the ranks' tensors, combined in the order of ranks: the same bits on all of them.

        `op`, `factor` and accumulation as in `reduce_scatter`. Sends 2 (n − 1) / n · tensor.nbytes.
        """
        in_place, num_bytes = self._is_symmetric(tensor), block_bytes(tensor)
        call = calls.all_reduce(self.world_size, num_bytes, own="in_place" if in_place else "consumer")
        reduction = reduction_of(op, factor, tensor)
        text = f"all_reduce of {described(tensor, reduction)}"
        return self._start(text, call, tensor, tensor, channel, async_op, reduction=reduction)

    def all_to_all(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Block r of input goes to rank r; as `all_to_all_single`.

        With split sizes all ranks first tell each other theirs, which is a round trip. Sends all but the own block.

        Args:
            output: blocks that came, by rank.
            input: blocks to send, by rank.
            output_split_sizes: rows of dim 0 of each block, on all ranks or on none; None: all equal.
            input_split_sizes: likewise.
            channel: which runs it.
            async_op: return a `Work` at once.

        Raises:
            Misconfigured: a rank sends more or fewer rows than are expected here, or output overlaps input.
        """
        if output.nbytes and overlap(output, input):
            raise Misconfigured("all_to_all from a tensor to itself: its layouts differ; give another output")
        if input_split_sizes is None and output_split_sizes is None:
            block = even_blocks(output, input, self.world_size)
            call = calls.all_to_all([[block] * self.world_size] * self.world_size)
            return self._start(f"all_to_all of {described(input)} a rank", call, output, input, channel, async_op)
        if input_split_sizes is None or output_split_sizes is None:
            raise Misconfigured("all_to_all with one kind of split sizes: give both, or none")
        check(output, input)
        coming = splits(output, output_split_sizes, self.world_size)
        row = splits(input, input_split_sizes, self.world_size)

        def call_of(rows: Rows) -> Call:
            there = tuple(theirs[self.rank] for theirs in rows)
            if there != coming:
                raise Misconfigured(
                    f"all_to_all: ranks send {there} bytes to rank {self.rank}, which expects {coming}; "
                    "make output_split_sizes what the others send"
                )
            return calls.all_to_all(rows)

        text = f"all_to_all with split sizes of {dtype_name(input)}"
        return self._start(text, call_of, output, input, channel, async_op, row=row)

    def broadcast(self, tensor: Any, src: int = 0, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """tensor of rank `src` to that of every rank. A large one it sends once, in parts, which the others pass on."""
        call = calls.broadcast(self.world_size, block_bytes(tensor), root=src)
        return self._start(f"broadcast of {described(tensor)} from rank {src}", call, tensor, None, channel, async_op)

    def scatter(
        self, tensor: Any, input: Any = None, src: int = 0, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """tensor = input[rank] of rank `src`, the only one that gives input: one tensor, its blocks by rank."""
        self._check_root(input, "input", src)
        call = calls.scatter(self.world_size, block_bytes(tensor, input, inputs=self.world_size), root=src)
        text = f"scatter of {described(tensor)} a rank from {src}"
        return self._start(text, call, tensor, input, channel, async_op)

    def gather(
        self, tensor: Any, output: Any = None, dst: int = 0, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """output[r] = tensor of rank r, on rank `dst`, the only one that gives output: one tensor."""
        self._check_root(output, "output", dst)
        call = calls.gather(self.world_size, block_bytes(output, tensor, outputs=self.world_size), root=dst)
        text = f"gather of {described(tensor)} a rank to {dst}"
        return self._start(text, call, output, tensor, channel, async_op)

    def send(self, tensor: Any, dst: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """tensor to rank `dst`, which calls `recv`. Ends when it may be overwritten."""
        return self._pair(None, tensor, dst, channel, async_op)

    def recv(self, tensor: Any, src: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """tensor = what rank `src` sends."""
        return self._pair(tensor, None, src, channel, async_op)

    def send_recv(self, output: Any, input: Any, peer: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """input to rank `peer`, and its input to output, both at once; `peer` calls `send_recv`, too."""
        return self._pair(output, input, peer, channel, async_op)

    def barrier(self, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Ends when every rank has come to it."""
        return self._start("barrier", calls.barrier(self.world_size), None, None, channel, async_op)

    def _pair(self, output: Any, input: Any, peer: int, channel: int, async_op: bool) -> Work | None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise Misconfigured(f"rank {self.rank} with rank {peer}: allowed are the others of {self.world_size} ranks")
        check(output, input)
        sizes = [[0] * self.world_size for _ in range(self.world_size)]
        sizes[self.rank][peer] = 0 if input is None else input.nbytes
        sizes[peer][self.rank] = 0 if output is None else output.nbytes
        low, high = sorted((self.rank, peer))
        both = f"{sizes[low][high]} bytes to rank {high} and {sizes[high][low]} to rank {low}"
        text = f"send_recv of {both} of {dtype_name(input if output is None else output)}"
        return self._start(text, calls.send_recv(sizes), output, input, channel, async_op, line=peer)

    def _start(
        self,
        text: str,
        call: Call | Callable[[Rows], Call],
        output: Any,
        input: Any,
        channel: int,
        async_op: bool,
        *,
        reduction: Reduction | None = None,
        row: tuple[int, ...] = (),
        line: int | None = None,
    ) -> Work | None:
        """Numbers the call and queues it. `call`: what all ranks ask for, or how that follows from everyone's row."""
        if not 0 <= channel < self.channels:
            raise Misconfigured(f"channel={channel}: allowed are 0 to {self.channels - 1}, by channels={self.channels}")
        sent = None if input is None else sendable(input)
        line = self.world_size if line is None else line
        with self._lock:
            number = self._numbers.get((channel, line), 0) + 1
            job = Job(
                doing=Doing(text=text, channel=channel, line=line, number=number),
                program=lambda rows: self._planned(call(rows) if callable(call) else call),
                row=row,
                meet=self.debug or bool(row),
                input=0 if sent is None else sent.data_ptr(),
                output=0 if output is None else output.data_ptr(),
                output_bytes=0 if output is None else output.nbytes,
                at=None if output is None else self._memory.locate(output.data_ptr(), output.nbytes),
                reduction=reduction,
                keep=(sent, output),
            )
            work = self._executor.submit(job)
            self._numbers[channel, line] = number
        if async_op:
            return work
        work.wait()
        return None

    def _planned(self, call: Call) -> Program:
        """Chunks of at least the size asked for, and no more of them than a channel has flags."""
        units = -(-max(map(max, call.sizes)) // (MAX_CHUNKS * ALIGNMENT))
        chunk_bytes = max(self.chunk_bytes, units * ALIGNMENT)
        return plan(call, self.rank, Tuning(chunk_bytes=chunk_bytes, relay_bytes=4 * self.chunk_bytes))

    def _is_symmetric(self, tensor: Any) -> bool:
        return self._memory.locate(tensor.data_ptr(), tensor.nbytes) is not None

    def _check_root(self, tensor: Any, what: str, root: int) -> None:
        if (tensor is not None) != (self.rank == root):
            given = "was given" if tensor is not None else "is missing"
            raise Misconfigured(f"{what} {given} on rank {self.rank}: rank {root} gives it, and no other")


def _eighth_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


def _joined(group: Any, channels: int, max_bytes: int, timeout_s: float) -> tuple[SharedMemory, Watchdog]:
    """Memory that all ranks of the group have mapped, and an eye on their processes."""
    rank, world_size = membership(group)
    memory = together(
        group, lambda: SharedMemory(world_size=world_size, rank=rank, channels=channels, max_bytes=max_bytes)
    )
    cards = gathered(group, memory.card())

    def join() -> Watchdog:
        memory.join(cards)
        return Watchdog(memory.boards, rank=rank, pids=[card.pid for card in cards], timeout_s=timeout_s)

    try:
        return memory, together(group, join)
    except BaseException:
        memory.close()
        raise


def _closed(executor: CpuExecutor, watchdog: Watchdog, memory: SharedMemory) -> None:
    executor.close()
    watchdog.close()
    memory.close()
