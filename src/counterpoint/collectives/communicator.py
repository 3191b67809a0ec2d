"""Collectives of one process group, by programs over symmetric memory: copy engines on GPUs, threads on CPUs.

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
- With `async_op=True` a call returns a `Work` at once, else it returns None when the output may be read. On a GPU that
  is in the order of streams: a call runs on the current stream, with `async_op=True` behind it on the channel's own,
  and `Work.wait` lets the current stream wait, not the host.
- On a GPU calls that make memory grow, and `empty` where it does, are made in the same order on all channels: ranks
  meet there. What is captured in a graph uses its buffers at every replay: they are never given back.
- A rank that dies, does not come or calls something else ends the call on the others with an error that names it. A
  communicator that has failed once raises that error for ever: close it and make a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from counterpoint.collectives import request
from counterpoint.collectives.arguments import Several, reduction_name
from counterpoint.collectives.cpu_channel import BeforeStep
from counterpoint.collectives.fallback import Fallback, Path
from counterpoint.collectives.group import membership
from counterpoint.collectives.opening import Options, available, open_transport
from counterpoint.collectives.submitter import Submitter
from counterpoint.collectives.work import Work

__all__ = ["Communicator", "available"]


class Communicator:
    """Collectives among the ranks of one host.

    All ranks of the group make it together. Memory of a rank: what `empty` was asked for; on each channel staging and a
    landing, up to twice as large as the largest call needs, and a board of about 64 (n + 1) (200 + 8 n) bytes.

    Args:
        group: torch process group, of a mesh axis by `mesh.get_group(axis)`; None: the default one. Used now, and on
            GPUs whenever symmetric memory grows.
        device: of all tensors; None: this process's current GPU if the group has NCCL, else the CPU.
        channels: how many calls can run at the same time; `channel=` of a call says which one runs it.
        timeout_s: seconds that a rank waits for another before it gives up.
        debug: compare the calls of all ranks before each starts (a round trip), not only when one waits or has ended.
        max_bytes: symmetric memory that this rank may take; None: an eighth of the machine's, on a GPU what it has.
        chunk_bytes: smallest piece in which blocks are sent and reduced, a multiple of 16; large blocks take larger.
            None: what is best for the device.
        staging_bytes: most staging that a channel keeps for reduce_scatters, which come in slices if they need more;
            None: as much as the largest needs, (n - 1) / n of its input.
        reserve_bytes: `empty` makes its first region now, of this size.
        graphs: on GPUs, replay a call from a CUDA graph when it comes again; None: yes.
        sum_sms: on GPUs, SMs that the sums of reductions run on, one large block each, so that they take no more from a
            GEMM beside them; None: as many as are free, which is faster where a GEMM leaves some (`GemmSmLimit`).
        fallback: torch process group that takes calls below `crossover_bytes`; None: none is taken by torch.
        crossover_bytes: by operation, bytes of the full array; None: as measured.
        before_step: on CPUs, called before every step, in a thread of the channel; for tests.

    Raises:
        Unsupported: this group cannot, and why: see `available`.
        Misconfigured: an option that cannot mean anything, or this process is not in the group.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        device: Any = None,
        channels: int = 2,
        timeout_s: float = 600.0,
        debug: bool = False,
        max_bytes: int | None = None,
        chunk_bytes: int | None = None,
        staging_bytes: int | None = None,
        reserve_bytes: int | None = None,
        graphs: bool | None = None,
        sum_sms: int | None = None,
        fallback: Any = None,
        crossover_bytes: Mapping[str, int] | None = None,
        before_step: BeforeStep | None = None,
    ) -> None:
        self._fallback = Fallback(fallback, crossover_bytes)
        options = Options(
            channels=channels,
            timeout_s=timeout_s,
            debug=debug,
            max_bytes=max_bytes,
            chunk_bytes=chunk_bytes,
            staging_bytes=staging_bytes,
            reserve_bytes=reserve_bytes,
            graphs=graphs,
            sum_sms=sum_sms,
            crossover_bytes=self._fallback.crossover_bytes,
            before_step=before_step,
        )
        self._transport = open_transport(group, device, options)
        self.rank, self.world_size = membership(group)
        self.channels = channels
        self.device = self._transport.device
        here = request.Here(
            rank=self.rank, world_size=self.world_size, device=self.device, locate=self._transport.locate
        )
        self._start = Submitter(self._transport, self._fallback, here, channels=channels, debug=debug).start
        self._close = weakref.finalize(self, self._transport.close)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs, here and on peers that wait for this rank; on a GPU it waits for the calls under way.
        Tensors stay valid."""
        self._close()

    def check(self) -> None:
        """Raises what ended this communicator, if something did. On GPUs a call that will not end lets its stream go
        on, so that the process can end: outputs are right only if this raises nothing after they were waited for."""
        self._transport.check()

    def path(self, operation: str, num_bytes: int) -> Path:
        """Which way an even `operation` goes, by bytes of the full array: `zero_sm`, or `torch` below the crossover.

        Two kinds of calls never take the way of torch: premul_sum, and reductions of dtypes that NCCL does not have.
        """
        return self._fallback.path(operation, num_bytes)

    def empty(self, *shape: int, dtype: Any = None, early_release: bool = False) -> Any:
        """An uninitialised tensor in symmetric memory: as output it needs no landing.

        Its memory is used again when the last view of it has died. Ranks that make and drop theirs in the same order
        have them at the same offset; on GPUs they have to, since peers write there. On a GPU it is used again in the
        order of streams: those that it was made on, of calls with it, and of `record_stream`.

        Args:
            shape: its sizes.
            dtype: None: torch's default.
            early_release: tell the peers that it is free when it has died (at the latest with this rank's next call
                or `empty`), not when the next call begins: no call waits for a round trip. So peers may write their
                blocks from the beginning: write nothing but your own. It may be the output only of calls in which every
                rank sends to every other: all_gather and all_to_all.

        Raises:
            Unsupported: more than `max_bytes`, or than the machine has.
        """
        import torch

        self._transport.check()
        dtype = dtype or torch.get_default_dtype()
        if 0 in shape:  # nothing to map
            return torch.empty(shape, dtype=dtype, device=self.device)
        pool = self._transport.early if early_release else self._transport.pool
        return pool.empty(*shape, dtype=dtype)

    def record_stream(self, tensor: Any, stream: Any = None) -> None:
        """On GPUs: `tensor`, from `empty`, is used on `stream`, by other things than calls of this communicator.

        Args:
            tensor: or a view of one.
            stream: torch.cuda.Stream; None: the current one.
        """
        self._transport.record_stream(tensor, stream)

    def all_gather(self, output: Any, input: Any, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """output[r] = input of rank r; as `all_gather_into_tensor`. In place if input is this rank's block of output.

        Sends input.nbytes to each of the other ranks.
        """
        return self._start(request.all_gather, output, input, channel, async_op)

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
        return self._start(request.reduce_scatter, output, input, channel, async_op, reduction_name(op), factor)

    def all_gather_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """outputs[i][r] = inputs[i] of rank r: several all_gathers as one, with the handshakes and arrivals of one.

        Outputs may be of different dtypes. In place if each input is this rank's block of its output.

        Args:
            outputs: contiguous parts of one tensor of `empty`, in any order.
            inputs: as many.
            channel: which runs it.
            async_op: return a `Work` at once.

        Raises:
            Misconfigured: outputs elsewhere, or tensors that do not fit each other.
        """
        return self._start(request.all_gather_coalesced, Several(outputs), Several(inputs), channel, async_op)

    def reduce_scatter_coalesced(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        op: Any = "sum",
        *,
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """outputs[i] = the ranks' inputs[i][rank], combined: several reduce_scatters as one, from where inputs lie.

        Args:
            outputs: this rank's shards, of equal dtype: that of the inputs, or float32 for bfloat16 and float16, in
                which they are added up: then nothing is rounded.
            inputs: as many, in any memory, of equal dtype. One that the ranks cannot share equally is cut as
                `torch.chunk` cuts dim 0: outputs are a share rounded up, of which what is beyond the input is not
                written.
            op: as in `reduce_scatter`.
            factor: likewise.
            channel: which runs it.
            async_op: return a `Work` at once.

        Raises:
            Misconfigured: as in `reduce_scatter`, or tensors that do not fit each other.
        """
        op = reduction_name(op)
        both = Several(outputs), Several(inputs)
        return self._start(request.reduce_scatter_coalesced, *both, channel, async_op, op, factor)

    def all_reduce(
        self, tensor: Any, op: Any = "sum", *, factor: float = 1.0, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """tensor = the ranks' tensors, combined in the order of ranks: the same bits on all of them.

        `op`, `factor` and accumulation as in `reduce_scatter`. Sends 2 (n − 1) / n · tensor.nbytes.
        """
        return self._start(request.all_reduce, tensor, tensor, channel, async_op, reduction_name(op), factor)

    def all_to_all(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        leave_own: bool = False,
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
            leave_own: the own block stays in input for whoever reads output, where its place is not written: on a GPU
                to copy it is the one part that needs an SM. The output has to be from `empty`.
            channel: which runs it.
            async_op: return a `Work` at once.

        Raises:
            Misconfigured: a rank sends more or fewer rows than are expected here, output overlaps input, or
                `leave_own` without an output from `empty`.
        """
        if input_split_sizes is None and output_split_sizes is None:
            return self._start(request.all_to_all, output, input, channel, async_op, leave_own)
        sizes = output_split_sizes, input_split_sizes
        return self._start(request.uneven_all_to_all, output, input, channel, async_op, leave_own, *sizes)

    def broadcast(self, tensor: Any, src: int = 0, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """tensor of rank `src` to that of every rank. A large one it sends once, in parts, which the others pass on."""
        return self._start(request.broadcast, tensor, None, channel, async_op, src)

    def scatter(
        self, tensor: Any, input: Any = None, src: int = 0, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """tensor = input[rank] of rank `src`, the only one that gives input: one tensor, its blocks by rank."""
        return self._start(request.scatter, tensor, input, channel, async_op, src)

    def gather(
        self, tensor: Any, output: Any = None, dst: int = 0, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """output[r] = tensor of rank r, on rank `dst`, the only one that gives output: one tensor."""
        return self._start(request.gather, output, tensor, channel, async_op, dst)

    def send(self, tensor: Any, dst: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """tensor to rank `dst`, which calls `recv`. Ends when it may be overwritten."""
        return self._start(request.send_recv, None, tensor, channel, async_op, dst)

    def recv(self, tensor: Any, src: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """tensor = what rank `src` sends."""
        return self._start(request.send_recv, tensor, None, channel, async_op, src)

    def send_recv(self, output: Any, input: Any, peer: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """input to rank `peer`, and its input to output, both at once; `peer` calls `send_recv`, too."""
        return self._start(request.send_recv, output, input, channel, async_op, peer)

    def barrier(self, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Ends when every rank has come to it."""
        return self._start(request.barrier, None, None, channel, async_op)
