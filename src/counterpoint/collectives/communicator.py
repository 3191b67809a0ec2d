"""Run the collectives of one process group over symmetric memory: by copy engines on GPUs, by threads on CPUs.

    communicator = Communicator(group)
    shards = communicator.empty(world_size, 1024, dtype=torch.bfloat16)
    work = communicator.all_gather(shards, shards[rank], async_op=True)  # in place: no extra local copy
    work.wait()

Rules that hold for every operation:

- All ranks make the same calls in the same order on each channel. `send`, `recv` and `send_recv` involve two ranks;
  only these two need the same order. Ranks are counted within the group.
- A channel runs its calls one after the other; different channels run at the same time, as do different communicators.
- The input may be in any memory; if it is not contiguous, or shares bytes with the output and is not in place, a copy
  of it is sent. The output is contiguous. An output that is not from `empty` costs a copy: peers cannot write into
  it, so they write to a buffer of the channel (the landing), from which the output is copied.
- On a GPU a call runs on the current stream; with `async_op=True` it runs on the channel's own stream, after the work
  queued on the current stream, and `Work.wait` makes the current stream wait, not the host.
- On a GPU, calls of any channel and `empty` come in the same order on all ranks if they make symmetric memory grow,
  since ranks meet to allocate it. A graph uses its buffers at every replay, so captured buffers are never reused.
- A process forked from a rank (such as a DataLoader worker) may exit at any time, and must not make calls.
- A rank that dies, makes no call or makes a different one ends the call on the others with an error that names it. A
  communicator that has failed once raises that error in every later call: close it and make a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self, TypeAlias, cast

from counterpoint.collectives.connect import GpuStandIn, device_profile, open_transport
from counterpoint.collectives.cpu.call import BeforeStep
from counterpoint.collectives.host.group import membership
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.operations import find_operation
from counterpoint.collectives.submit import request
from counterpoint.collectives.submit.submitter import Submitter
from counterpoint.collectives.submit.tensors import TensorList, reduction_name, tensor_list
from counterpoint.collectives.work import PartitionedWork, Work
from counterpoint.errors import CounterpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup, ReduceOp

    Tensors: TypeAlias = Sequence[Tensor] | TensorList
    Op: TypeAlias = str | ReduceOp | ReduceOp.RedOpType


class EvenCollectives:
    """Declares the collectives on equal blocks that both `Communicator` and `HierarchicalCommunicator` run.

    Every method takes tensors of any dtype (reductions: see `reduce_scatter`), equal on all ranks in size and dtype.
    Sizes are in elements where shapes are given, else in bytes. Two arguments of all methods are explained here only:

    - `channel` runs the call, after the channel's earlier calls.
    - With `async_op` a method returns the call's `Work` at once; else it returns None when the output may be read.

    `Misconfigured` is raised if tensors or options do not fit a call, `PeerTimeout` if a rank died or did not make the
    call in time.
    """

    _submit: Callable[..., Work | None]
    """Takes a function of `request.py`, output, input, channel, `async_op`, and further arguments of that function."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the communicator: peers that wait for this rank get an error; tensors from `empty` stay valid."""
        raise NotImplementedError

    def all_gather(self, output: Tensor, input: Tensor, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Gather the ranks' inputs in every rank's output, as `all_gather_into_tensor` does.

        In place, and without a copy, if input is this rank's block of output. Sends input.nbytes to each other rank.

        Args:
            output: `[world_size, *input.shape]`, or any shape of as many elements; block r is from rank r.
            input: this rank's block.
        """
        return self._submit(request.even_blocks_of, output, input, channel, async_op, "all_gather")

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: Op = "sum",
        *,
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Combine the ranks' inputs in rank order and leave block r on rank r, as `reduce_scatter_tensor` does.

        Accumulates bfloat16 and float16 in float32, and rounds once. Sends output.nbytes to each other rank.

        Args:
            output: this rank's block: 1 / world_size of input's elements, of equal dtype.
            input: `[world_size, *output.shape]`, or any shape of as many elements; block r is for rank r. In place if
                output is this rank's block of it.
            op: sum, avg, max, min or premul_sum, or torch's ReduceOp of that name; avg and premul_sum of floating-point
                dtypes only.
            factor: what premul_sum multiplies every input by first; equal on all ranks.
        """
        op = reduction_name(op)
        return self._submit(request.even_blocks_of, output, input, channel, async_op, "reduce_scatter", 0, op, factor)

    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", *, factor: float = 1.0, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """Combine the ranks' tensors in rank order, in place, with bitwise equal results on all ranks.

        `tensor` is contiguous; `op` and `factor` are as in `reduce_scatter`, and so is the accumulation. Sends
        2 (n - 1) / n of tensor.nbytes, where n is the number of ranks.
        """
        op = reduction_name(op)
        return self._submit(request.even_blocks_of, tensor, tensor, channel, async_op, "all_reduce", 0, op, factor)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        leave_own: bool = False,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Send block r of the input to rank r, as `all_to_all_single` does; this rank's own block is copied locally.

        With split sizes, which only a `Communicator` takes, the ranks first exchange their sizes: a round trip, after
        which `Misconfigured` is raised if the sizes do not match.

        Args:
            output: `[rows, ...]`, the received blocks in the order of ranks; shares no bytes with input.
            input: `[rows, ...]`, the blocks to send in the order of ranks, of equal dtype.
            output_split_sizes: rows (dim 0) of each block of output, on all ranks or on none; None: all equal.
            input_split_sizes: rows (dim 0) of each block of input, on all ranks or on none; None: all equal.
            leave_own: do not copy this rank's own block from input to output: on a GPU that copy is the only part that
                needs an SM. The output has to be from `empty`.
        """
        if input_split_sizes is None and output_split_sizes is None:
            return self._submit(request.all_to_all, output, input, channel, async_op, leave_own)
        sizes = output_split_sizes, input_split_sizes
        return self._submit(request.uneven_all_to_all, output, input, channel, async_op, leave_own, *sizes)

    def broadcast(self, tensor: Tensor, src: int = 0, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Copy the contiguous tensor of rank `src` to all ranks; a large one leaves `src` once, and others relay it."""
        return self._submit(request.even_blocks_of, tensor, None, channel, async_op, "broadcast", src)

    def barrier(self, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Wait until every rank has made this call; on a GPU the current stream waits, not the host."""
        return self._submit(request.even_blocks_of, None, None, channel, async_op, "barrier")


class Communicator(EvenCollectives):
    """Runs collectives among the ranks of one host.

    All ranks of the group make it together. Memory of a rank: the tensors from `empty`; on each channel staging and a
    landing, up to twice as large as the largest call needs, and a status of about 64 (n + 1) (200 + 8 n) bytes. What
    all methods have in common is said in the module and in `EvenCollectives`; all tensors are on `device`.

        with Communicator(group) as communicator:
            total = communicator.empty(1024).fill_(rank)
            communicator.all_reduce(total)

    Args:
        group: torch process group, of a mesh axis by `mesh.get_group(axis)`; None: the default one. Used now, and on
            GPUs whenever symmetric memory grows.
        device: where all tensors are; None: this process's current GPU if the group has NCCL, else the CPU.
        before_step: on CPUs, called before every step of a program, in a thread of the channel; for tests.
        names: numbers by which errors call the ranks, such as ranks in a larger group; None: their ranks in the group.
        options: options of the communicator; None: the defaults.

    Raises:
        Unsupported: the ranks of this group cannot share memory; `available` returns the same reason.
        Misconfigured: an option has no effect here or differs between ranks, or this process is not in the group.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        device: torch.device | str | int | GpuStandIn | None = None,
        before_step: BeforeStep | None = None,
        names: Sequence[int] | None = None,
        options: CommunicatorOptions | None = None,
    ) -> None:
        options = options or CommunicatorOptions()
        self.profile = device_profile(group, device, options.profile)
        self._transport = open_transport(
            group, device, options, profile=self.profile, before_step=before_step, names=names
        )
        self.rank, self.world_size = membership(group)
        self.channels = options.channels
        self.device: torch.device = self._transport.device
        self._submit = Submitter(
            self._transport, rank=self.rank, world_size=self.world_size, channels=options.channels, debug=options.debug
        ).submit
        self._send_or_recv = request.send_recv if self._transport.mailbox_channel is None else request.message
        self._dropped = weakref.finalize(self, self._transport.abort)  # runs in any thread: may not wait for peers

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.world_size} on {self.device}, profile: {self.profile})"

    def close(self) -> None:
        """End the communicator: peers that wait for this rank get an error; tensors from `empty` stay valid.

        On a GPU this waits for the calls under way; on CPUs calls that wait for a peer fail. A communicator that is
        dropped is aborted: see `abort`.
        """
        if self._dropped.detach():
            self._transport.close()

    def abort(self) -> None:
        """End the communicator without waiting for peers: calls under way fail, and their outputs are invalid.

        Calls that end by themselves within 0.25 s succeed.
        """
        if self._dropped.detach():
            self._transport.abort()

    def check(self) -> None:
        """Raise the error that ended this communicator, if there was one.

        On GPUs the watchdog releases the stream of a call that will not end, so that the process can exit. So outputs
        are right only if this raises nothing after their calls were waited for.
        """
        self._transport.check()

    def give_up(self, error: CounterpointError) -> BaseException:
        """End the communicator with `error`, and tell the peers why, so that they do not wait for this rank.

        Returns:
            The error that all calls of the communicator raise from now on: `error`, or an earlier one.
        """
        return self._transport.failure.set(error)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds this rank waits for a peer before it gives up; other ranks keep their own timeouts."""
        self._transport.watchdog.timeout_s = timeout_s

    def empty(self, *shape: int, dtype: torch.dtype | None = None, early_release: bool = False) -> Tensor:
        """Return an uninitialised, contiguous tensor in symmetric memory: as an output it needs no copy from a buffer.

        Its memory is reused when the last view of it has died. Ranks that make and drop tensors in the same order have
        them at the same offset; on GPUs they must, since peers write into them. On a GPU, use the tensor on the current
        stream: its memory is reused after the work queued so far on that stream, on the streams of calls with it, and
        on streams given to `record_stream`. `dtype` None is torch's default. `Unsupported` is raised for more than
        `max_bytes`, or more than the machine has.

        With `early_release` the peers are told that the memory is free when the tensor has died (at the latest with
        this rank's next call or `empty`), not when the next call begins, which saves that call a round trip. So peers
        may write their blocks of a new tensor at any time: write only this rank's own. The tensor may be the output
        only of calls in which every rank sends to every other: all_gather and all_to_all.
        """
        import torch

        self._transport.check()
        dtype = dtype or torch.get_default_dtype()
        if 0 in shape:  # nothing to map
            return torch.empty(shape, dtype=dtype, device=self.device)
        pool = self._transport.early if early_release else self._transport.pool
        tensor: Tensor = pool.empty(*shape, dtype=dtype)
        return tensor

    def is_symmetric(self, tensor: Tensor) -> bool:
        """Return whether a contiguous tensor lies in this rank's symmetric memory, where peers can write it."""
        return self._transport.locate(tensor) is not None

    def memory_pool(self) -> AbstractContextManager[None]:
        """Return a context in which every CUDA tensor that torch makes in this thread lies in symmetric memory.

        Each use is a memory pool of torch: memory of tensors that died serves later ones of the same use. All ranks
        enter and leave it together, and make and drop tensors of the same sizes in the same order inside: at the end
        the ranks map the segments of tensors that still live, each of 2 MiB or more. `Unsupported` is raised on CPUs.
        """
        return self._transport.memory_pool()

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Record that `stream` uses a tensor from `empty`, or a view of one, outside a communicator's calls; GPUs only.

        `stream` None is the current one. The memory is not reused before the work queued on `stream` has ended.
        """
        self._transport.record_stream(tensor, stream)

    def all_gather_coalesced(
        self, outputs: Tensors, inputs: Tensors, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """Run several all_gathers as one call, with a single handshake and a single set of arrival signals.

        In place if each input is this rank's block of its output.

        Args:
            outputs: contiguous parts of one tensor of `empty`, in any order, each `[world_size, *inputs[i].shape]`;
                they may have different dtypes, and share no bytes.
            inputs: one tensor for each output, of equal dtype.
        """
        both = tensor_list(outputs), tensor_list(inputs)
        return self._submit(request.all_gather_coalesced, *both, channel, async_op)

    def reduce_scatter_coalesced(
        self,
        outputs: Tensors,
        inputs: Tensors,
        op: Op = "sum",
        *,
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Run several reduce_scatters as one call, without first copying the inputs into one buffer.

        Args:
            outputs: this rank's shards, contiguous and of one dtype: that of the inputs, or, for bfloat16 and float16,
                float32, in which they are added up, so that sums are not rounded. They share no bytes.
            inputs: one tensor for each output, in any memory, all of one dtype. If a size is no multiple of the
                number of ranks, it is cut as `torch.chunk` cuts dim 0: outputs have a share's size rounded up, and
                their part beyond the input is not written.
            op: how inputs are combined, as in `reduce_scatter`.
            factor: what premul_sum multiplies every input by first.
        """
        op = reduction_name(op)
        both = tensor_list(outputs), tensor_list(inputs)
        return self._submit(request.reduce_scatter_coalesced, *both, channel, async_op, op, factor)

    def partitioned_all_gather(
        self, output: Tensor, input: Tensor, *, dim: int = 0, chunk_rows: int, supplied: bool = True, channel: int = 0
    ) -> PartitionedWork:
        """Gather the ranks' inputs along a dimension; the caller can use rows of `output` before all rows have arrived.

        This rank's own rows stay in `input`, which may be its part of `output`.

        Args:
            output: tensor of `empty`, of the shape of `input` but `world_size` times as long in `dim`.
            input: this rank's rows, contiguous.
            dim: dimension along which inputs lie behind one another by rank.
            chunk_rows: rows of a partition, counted through all dimensions but the last: the block of a rank comes in
                chunks of so many, the last one may have fewer.
            supplied: `input` is written; False: the caller writes it chunk by chunk, and `ready` sends each to all.

        Returns:
            The work, whose partitions come from rank - 1 first, then from rank - 2, and so on.
        """
        build = request.partitioned_all_gather
        work = self._submit(build, output, input, channel, True, dim, chunk_rows, supplied)
        return cast("PartitionedWork", work)

    def partitioned_all_to_all(
        self, output: Tensor, input: Tensor, *, dim: int = 0, chunk_rows: int, channel: int = 0
    ) -> PartitionedWork:
        """Split the input along a dimension and send block r to rank r, chunk by chunk as the caller writes the input.

        This rank's own block stays in `input`.

        Args:
            output: tensor of `empty`, `[world_size, ...]`; block r is from rank r.
            input: contiguous, `world_size` times as long in `dim` as a block of `output`; not written yet.
            dim: dimension of which each rank gets an equal part.
            chunk_rows: rows of a partition, as in `partitioned_all_gather`.

        Returns:
            The work, whose partitions are sent to rank + 1 first, then to rank + 2, and so on.
        """
        work = self._submit(request.partitioned_all_to_all, output, input, channel, True, dim, chunk_rows)
        return cast("PartitionedWork", work)

    def scatter(
        self, tensor: Tensor, input: Tensor | None = None, src: int = 0, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """Send block r of the input of rank `src` to rank r, into the contiguous `tensor` of rank r.

        `input` is `[world_size, *tensor.shape]` on rank `src`, None on the others.
        """
        return self._submit(request.even_blocks_of, tensor, input, channel, async_op, "scatter", src)

    def gather(
        self, tensor: Tensor, output: Tensor | None = None, dst: int = 0, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """Gather the ranks' tensors in the output of rank `dst`.

        `output` is `[world_size, *tensor.shape]`, contiguous, on rank `dst`; None on the others. On a GPU, an output
        that is not from `empty` costs a copy.
        """
        return self._submit(request.even_blocks_of, output, tensor, channel, async_op, "gather", dst)

    def send(self, tensor: Tensor, dst: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Send a tensor, of any strides, to rank `dst`, which calls `recv`.

        On a GPU with `mailbox_bytes`, messages from one rank to another form a line, whatever their channel: the n-th
        one sent is the n-th one received, and lines have streams of their own. A send needs no SM and ends, even before
        its `recv` is made, when `dst` has room for the rest of the message: a blocking send of more than
        `mailbox_bytes` waits for the receiver. The tensor may be overwritten when the call has ended.
        """
        return self._submit(self._send_or_recv, None, tensor, channel, async_op, dst)

    def recv(self, tensor: Tensor, src: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Receive the tensor that rank `src` sends into `tensor`; see `send` for the order of messages.

        `tensor` is contiguous, of the size and dtype that `src` sends; on a GPU without `mailbox_bytes` from `empty`.
        """
        return self._submit(self._send_or_recv, tensor, None, channel, async_op, src)

    def send_recv(
        self, output: Tensor, input: Tensor, peer: int, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """Send a tensor to rank `peer` and receive one from `peer` at the same time; `peer` calls `send_recv`, too.

        `output` is contiguous, of the size that `peer` sends, and on a GPU from `empty`; `input` has its dtype.
        """
        return self._submit(request.send_recv, output, input, channel, async_op, peer)

    def call(
        self,
        name: str,
        output: Tensor | None = None,
        input: Tensor | None = None,
        *,
        root: int = 0,
        op: Op = "sum",
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Run the collective `name`, a key of `OPERATIONS`, on blocks of equal size.

        Args:
            name: name of the collective, such as `all_gather`.
            output: tensor that this rank receives into, contiguous; None: nothing, as in a gather to another rank.
            input: tensor that this rank sends; None: nothing, or the collective works on one tensor, `output`.
            root: rank that sends or receives, in collectives with a root.
            op: how values are combined, in collectives that reduce, as in `reduce_scatter`.
            factor: what premul_sum multiplies every input by first.
        """
        if "input" not in find_operation(name).arguments:
            input = output if find_operation(name).layout.reduces else None
        op = reduction_name(op)
        return self._submit(request.even_blocks_of, output, input, channel, async_op, name, root, op, factor)
