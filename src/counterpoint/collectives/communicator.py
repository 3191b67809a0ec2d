"""Collectives of one process group by programs over symmetric memory, run by copy engines on GPUs, threads on CPUs.

    communicator = Communicator(group)
    shards = communicator.empty(world_size, 1024, dtype=torch.bfloat16)
    work = communicator.all_gather(shards, shards[rank], async_op=True)  # in place: nothing is copied twice
    work.wait()

Rules that hold for every operation:

- All ranks make the same calls in the same order on each channel. `send`, `recv` and `send_recv` involve two ranks, and
  their order counts between these. Ranks are counted within the group.
- A channel runs its calls one after the other; different channels run at the same time, as do different communicators.
- The input may be in any memory; if it is not contiguous, or shares bytes with the output and is not in place, a copy
  of it is sent. The output is contiguous. One that is not from `empty` costs a copy of its bytes: peers cannot write
  there, so they write to a landing of the channel.
- With `async_op=True` a call returns a `Work` at once, else it returns None when the output may be read. On a GPU that
  is in the order of streams: a call runs on the current stream, with `async_op=True` behind it on the channel's own,
  and `Work.wait` lets the current stream wait, not the host.
- On a GPU calls that make memory grow, and `empty` where it does, are made in the same order on all channels: ranks
  meet there. What is captured in a graph uses its buffers at every replay: they are never given back.
- A process forked from a rank (a worker of a DataLoader) may end as it likes, and makes no calls.
- A rank that dies, does not come or calls something else ends the call on the others with an error that names it. A
  communicator that has failed once raises that error for ever: close it and make a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, Unpack

from counterpoint.collectives.connect import GpuStandIn, device_profile, open_transport
from counterpoint.collectives.cpu.channel import BeforeStep
from counterpoint.collectives.host.group import membership
from counterpoint.collectives.options import CommunicatorOptions, OptionKeywords
from counterpoint.collectives.program.operations import find_operation
from counterpoint.collectives.submit import request
from counterpoint.collectives.submit.fallback import Fallback, Path
from counterpoint.collectives.submit.submitter import Submitter
from counterpoint.collectives.submit.tensors import TensorList, reduction_name, tensor_list
from counterpoint.collectives.work import Work

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup, ReduceOp

    Tensors: TypeAlias = Sequence[Tensor] | TensorList


class Communicator:
    """Runs collectives among the ranks of one host.

    All ranks of the group make it together. Memory of a rank: what `empty` was asked for; on each channel staging and a
    landing, up to twice as large as the largest call needs, and a status of about 64 (n + 1) (200 + 8 n) bytes.

    Every method takes tensors on `device`, of any dtype (reductions: see `reduce_scatter`). An input may have any
    strides and lie in any memory; an output is contiguous. Calls run on the current stream of the calling thread, with
    `async_op=True` behind it on a stream of the channel. Sizes are in elements where shapes are given, else in bytes.
    `Misconfigured` is raised where tensors or options do not fit a call, `PeerTimeout` where a rank died or did not
    come.

    Args:
        group: torch process group, of a mesh axis by `mesh.get_group(axis)`; None: the default one. Used now, and on
            GPUs whenever symmetric memory grows.
        device: where all tensors are; None: this process's current GPU if the group has NCCL, else the CPU.
        fallback: torch process group that takes calls below `crossover_bytes`; None: torch takes none.
        before_step: on CPUs, called before every step, in a thread of the channel; for tests.
        options: what is not asked for by keyword; None: the defaults.
        keywords: any field of `CommunicatorOptions`.

    Raises:
        Unsupported: this group cannot, and why: see `available`.
        Misconfigured: an option that cannot mean anything, or this process is not in the group.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        device: torch.device | str | int | GpuStandIn | None = None,
        fallback: ProcessGroup | None = None,
        before_step: BeforeStep | None = None,
        options: CommunicatorOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        options = replace(options or CommunicatorOptions(), **keywords)
        self.profile = device_profile(group, device, options.profile)
        self._fallback = Fallback(fallback, options.crossover_bytes, self.profile)
        self._transport = open_transport(
            group,
            device,
            options,
            profile=self.profile,
            crossover_bytes=self._fallback.crossover_bytes,
            before_step=before_step,
        )
        self.rank, self.world_size = membership(group)
        self.channels = options.channels
        self.device: torch.device = self._transport.device
        self._submitter = Submitter(
            self._transport,
            self._fallback,
            rank=self.rank,
            world_size=self.world_size,
            channels=options.channels,
            debug=options.debug,
        )
        self._close = weakref.finalize(self, self._transport.close)

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.world_size} on {self.device}, profile: {self.profile})"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs, here and on peers that wait for this rank.

        On a GPU it waits for the calls that are under way. Tensors stay valid.
        """
        self._close()

    def check(self) -> None:
        """Raise what ended this communicator, if something did.

        On GPUs a call that will not end lets its stream go on, so that the process can end: outputs are right only if
        this raises nothing after they were waited for.
        """
        self._transport.check()

    def path(self, operation: str, num_bytes: int) -> Path:
        """Return which way a call with even blocks takes: `zero_sm`, or `torch` for full arrays below the crossover.

        Two kinds of calls never go to torch: premul_sum, and reductions of dtypes that NCCL does not have. Operations
        that are not known take `zero_sm`.
        """
        return self._fallback.path(operation, num_bytes)

    def empty(self, *shape: int, dtype: torch.dtype | None = None, early_release: bool = False) -> Tensor:
        """Return an uninitialised, contiguous tensor in symmetric memory, which as output needs no landing.

        Its memory is used again when the last view of it has died. Ranks that make and drop theirs in the same order
        have them at the same offset; on GPUs they have to, since peers write there. On a GPU it is for use on the
        current stream, and is used again in the order of streams: those that it was made on, of calls with it, and of
        `record_stream`. `dtype` None is torch's default. `Unsupported` is raised for more than `max_bytes`, or than the
        machine has.

        With `early_release` the peers are told that it is free when it has died (at the latest with this rank's next
        call or `empty`), not when the next call begins: no call waits for a round trip. So peers may write their blocks
        from the beginning: write nothing but your own. It may be the output only of calls in which every rank sends to
        every other: all_gather and all_to_all.
        """
        import torch

        self._transport.check()
        dtype = dtype or torch.get_default_dtype()
        if 0 in shape:  # nothing to map
            return torch.empty(shape, dtype=dtype, device=self.device)
        pool = self._transport.early if early_release else self._transport.pool
        tensor: Tensor = pool.empty(*shape, dtype=dtype)
        return tensor

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Note that other things than calls use a tensor of `empty`, or a view of it, on a stream; GPUs only.

        `stream` None is the current one.
        """
        self._transport.record_stream(tensor, stream)

    def all_gather(self, output: Tensor, input: Tensor, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Gather the ranks' inputs in every rank's output, as `all_gather_into_tensor` does.

        In place, and without a copy, if input is this rank's block of output. Sends input.nbytes to each of the others.

        Args:
            output: `[world_size, *input.shape]`, or any contiguous shape of as many elements; block r is from rank r.
            input: equal in size and dtype on all ranks.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `output` may be read on the current stream.
        """
        return self._submitter.submit(request.all_gather, output, input, channel, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: str | ReduceOp | ReduceOp.RedOpType = "sum",
        *,
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Combine the ranks' inputs in the order of ranks, one block on each rank, as `reduce_scatter_tensor` does.

        Accumulates in float32 if the dtype is narrower, and rounds once. Sends output.nbytes to each of the others.

        Args:
            output: this rank's block: 1 / world_size of input's elements, of equal dtype.
            input: `[world_size, *output.shape]`, or any shape of as many elements; block r is for rank r. In place if
                output is this rank's block of it.
            op: sum, avg, max, min or premul_sum, or torch's ReduceOp of that name; avg and premul_sum of floating-point
                dtypes only.
            factor: premul_sum multiplies by it first; the same on all ranks.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `output` may be read on the current stream.
        """
        return self._submitter.submit(
            request.reduce_scatter, output, input, channel, async_op, reduction_name(op), factor
        )

    def all_gather_coalesced(
        self,
        outputs: Tensors,
        inputs: Tensors,
        *,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Run several all_gathers as one, with the handshakes and arrivals of one.

        In place if each input is this rank's block of its output.

        Args:
            outputs: contiguous parts of one tensor of `empty`, in any order, each `[world_size, *inputs[i].shape]`;
                they may have different dtypes, and share no bytes.
            inputs: as many, outputs[i] of equal dtype.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `outputs` may be read on the current stream.
        """
        return self._submitter.submit(
            request.all_gather_coalesced, tensor_list(outputs), tensor_list(inputs), channel, async_op
        )

    def reduce_scatter_coalesced(
        self,
        outputs: Tensors,
        inputs: Tensors,
        op: str | ReduceOp | ReduceOp.RedOpType = "sum",
        *,
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Run several reduce_scatters as one, from where the inputs lie.

        Args:
            outputs: this rank's shards, contiguous and of equal dtype: that of the inputs, or float32 for bfloat16 and
                float16, in which they are added up: then nothing is rounded. They share no bytes.
            inputs: as many, in any memory, of equal dtype. One that the ranks cannot share equally is cut as
                `torch.chunk` cuts dim 0: outputs are a share rounded up, of which what is beyond the input is not
                written.
            op: how they are combined, as in `reduce_scatter`.
            factor: premul_sum multiplies by it first.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `outputs` may be read on the current stream.
        """
        op = reduction_name(op)
        both = tensor_list(outputs), tensor_list(inputs)
        return self._submitter.submit(request.reduce_scatter_coalesced, *both, channel, async_op, op, factor)

    def all_reduce(
        self,
        tensor: Tensor,
        op: str | ReduceOp | ReduceOp.RedOpType = "sum",
        *,
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Combine the ranks' tensors in the order of ranks, in place: the same bits on all of them.

        Accumulates as `reduce_scatter` does. Sends 2 (n - 1) / n of tensor.nbytes.

        Args:
            tensor: contiguous, equal in size and dtype on all ranks; input and output.
            op: how they are combined, as in `reduce_scatter`.
            factor: premul_sum multiplies by it first.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `tensor` may be read on the current stream.
        """
        return self._submitter.submit(request.all_reduce, tensor, tensor, channel, async_op, reduction_name(op), factor)

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
        """Send block r of the input to rank r, as `all_to_all_single` does. Sends all but the own block.

        With split sizes the ranks first exchange theirs, which is a round trip; `Misconfigured` is raised if they do
        not fit.

        Args:
            output: `[rows, ...]`, the blocks that come, by rank; shares no bytes with input.
            input: `[rows, ...]`, the blocks to send, by rank, of equal dtype.
            output_split_sizes: rows of dim 0 of each block, on all ranks or on none; None: all equal.
            input_split_sizes: rows of dim 0 of each block of input; None: all equal.
            leave_own: do not write the own block of output, which stays in input: on a GPU its copy is the one part
                that needs an SM. The output has to be from `empty`.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `output` may be read on the current stream.
        """
        if input_split_sizes is None and output_split_sizes is None:
            return self._submitter.submit(request.all_to_all, output, input, channel, async_op, leave_own)
        sizes = output_split_sizes, input_split_sizes
        return self._submitter.submit(request.uneven_all_to_all, output, input, channel, async_op, leave_own, *sizes)

    def broadcast(self, tensor: Tensor, src: int = 0, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank `src` to every rank; a large one is sent once, in parts, which the others pass on.

        Args:
            tensor: contiguous, equal in size and dtype on all ranks; input on `src`, output on the others.
            src: rank that sends.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `tensor` may be read on the current stream.
        """
        return self._submitter.submit(request.broadcast, tensor, None, channel, async_op, src)

    def scatter(
        self, tensor: Tensor, input: Tensor | None = None, src: int = 0, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """Send block r of the input of rank `src` to rank r.

        Args:
            tensor: this rank's block, contiguous, equal in size and dtype on all ranks.
            input: `[world_size, *tensor.shape]` on rank `src`; None on the others.
            src: rank that sends.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `tensor` may be read on the current stream.
        """
        return self._submitter.submit(request.scatter, tensor, input, channel, async_op, src)

    def gather(
        self, tensor: Tensor, output: Tensor | None = None, dst: int = 0, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """Gather the ranks' tensors in the output of rank `dst`.

        Args:
            tensor: this rank's block, equal in size and dtype on all ranks.
            output: `[world_size, *tensor.shape]`, contiguous, on rank `dst`; None on the others. On a GPU from `empty`,
                or it costs a copy.
            dst: rank that receives.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `output` may be read on the current stream.
        """
        return self._submitter.submit(request.gather, output, tensor, channel, async_op, dst)

    def send(self, tensor: Tensor, dst: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Send a tensor to rank `dst`, which calls `recv`.

        Args:
            tensor: of any strides.
            dst: rank that receives.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `tensor` may be overwritten on the current stream.
        """
        return self._submitter.submit(request.send_recv, None, tensor, channel, async_op, dst)

    def recv(self, tensor: Tensor, src: int, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Receive what rank `src` sends.

        Args:
            tensor: contiguous, of the size and dtype that are sent; on a GPU from `empty`.
            src: rank that sends.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `tensor` may be read on the current stream.
        """
        return self._submitter.submit(request.send_recv, tensor, None, channel, async_op, src)

    def send_recv(
        self, output: Tensor, input: Tensor, peer: int, *, channel: int = 0, async_op: bool = False
    ) -> Work | None:
        """Send to a rank and receive from it at the same time; `peer` calls `send_recv`, too.

        Args:
            output: contiguous, of the size that `peer` sends; on a GPU from `empty`.
            input: what is sent, of equal dtype.
            peer: the other rank.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `output` may be read on the current stream.
        """
        return self._submitter.submit(request.send_recv, output, input, channel, async_op, peer)

    def call(
        self,
        name: str,
        output: Tensor | None = None,
        input: Tensor | None = None,
        *,
        root: int = 0,
        op: str | ReduceOp | ReduceOp.RedOpType = "sum",
        factor: float = 1.0,
        channel: int = 0,
        async_op: bool = False,
    ) -> Work | None:
        """Run any collective of `OPERATIONS` with even blocks, by its name.

        Args:
            name: name of the collective, such as `all_gather`.
            output: what this rank receives, contiguous; None: nothing, as in a gather to another rank.
            input: what this rank gives; None: nothing, or the collective works on one tensor, `output`.
            root: rank that sends or receives in collectives that have one.
            op: how values are combined, in collectives that do, as in `reduce_scatter`.
            factor: premul_sum multiplies by it first.
            channel: runs the call, behind its earlier ones.
            async_op: return at once; the call runs behind the current stream.

        Returns:
            The call's `Work` with `async_op`; else None, when `output` may be read on the current stream.
        """
        if "input" not in find_operation(name).arguments:
            input = output if find_operation(name).layout.reduces else None
        options = name, root, reduction_name(op), factor
        return self._submitter.submit(request.even_blocks_of, output, input, channel, async_op, *options)

    def barrier(self, *, channel: int = 0, async_op: bool = False) -> Work | None:
        """Return when every rank has come to this call; on a GPU the current stream waits, not the host.

        `channel` runs the call, behind its earlier ones; with `async_op` its `Work` is returned at once.
        """
        return self._submitter.submit(request.barrier, None, None, channel, async_op)
