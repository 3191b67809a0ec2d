"""Make the `Submission` of a call: one function for each operation checks the tensors and describes the collective.

The results depend only on the arguments and on where symmetric memory lies, so `Submitter` caches them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from counterpoint.collectives.memory.early_release import EarlyUse
from counterpoint.collectives.memory.pool import Location
from counterpoint.collectives.program import operations
from counterpoint.collectives.program.calls import ALIGNMENT, Buffer, Call, Own
from counterpoint.collectives.program.coalesced import Parts, TensorAddresses, TensorLayout
from counterpoint.collectives.program.mailbox import Message
from counterpoint.collectives.program.operations import Operation, even_call, find_operation, plan_all
from counterpoint.collectives.program.reductions import Reduction, widened
from counterpoint.collectives.program.steps import Tuning
from counterpoint.collectives.submit.submission import Submission, Transport, UnevenSplits
from counterpoint.collectives.submit.tensors import (
    TensorList,
    block_bytes,
    check,
    described,
    dtype_name,
    even_blocks,
    is_block,
    overlap,
    overlap_elsewhere,
    reduction_of,
    splits,
)
from counterpoint.errors import Misconfigured

_MOST_KNOWN = 1024  # shapes of reduce_scatter_coalesced that are cached

# calls hold large tuples: equal arguments get one cached object
_all_gather = lru_cache(maxsize=1024)(operations.all_gather)
_all_to_all = lru_cache(maxsize=1024)(operations.all_to_all)
_reduce_scatter = lru_cache(maxsize=1024)(operations.reduce_scatter)
_all_reduce = lru_cache(maxsize=1024)(operations.all_reduce)
_broadcast = lru_cache(maxsize=1024)(operations.broadcast)

BuildSubmission: TypeAlias = Callable[..., Submission]
"""Types the functions below, which take a `GroupRank` or `RankContext`, output, input as it is sent, and options.

They return the submission, or raise Misconfigured if the tensors or options do not fit the operation.
"""


@dataclass(frozen=True, kw_only=True)
class GroupRank:
    """Holds a rank and the size of its group; makes submissions that have a call, but no addresses."""

    rank: int
    world_size: int
    device: Any  # torch.device of all tensors

    def is_symmetric(self, tensor: Any) -> bool:
        """Return whether peers can write a contiguous tensor, so that a call may be in place; here always True."""
        return True

    def submission(
        self,
        output: Any,
        input: Any,
        *,
        text: str,
        call: Call,
        reduction: Reduction | None = None,
        overlaps: bool = False,
    ) -> Submission:
        """Return a submission of `call` without channel, program or addresses; see `RankContext.submission`."""
        return Submission(text=text, channel=0, line=-1, call=call, reduction=reduction, overlaps=overlaps)


@dataclass(frozen=True, kw_only=True)
class RankContext(GroupRank):
    """Holds the transport of a rank's calls; makes submissions with program and addresses."""

    transport: Transport  # runs the calls
    debug: bool = False  # all ranks compare every call before it begins
    scatters: dict[Hashable, _CoalescedScatter] = field(default_factory=dict, compare=False)  # by tensors' shapes

    def is_symmetric(self, tensor: Any) -> bool:
        """Return whether a contiguous tensor lies in this rank's symmetric memory."""
        return self.transport.locate(tensor) is not None

    def submission(
        self,
        output: Any,
        input: Any,
        *,
        text: str,
        call: Call | UnevenSplits,
        reduction: Reduction | None = None,
        line: int | None = None,
        layout: TensorLayout = (),
        local: tuple[tuple[Buffer, TensorAddresses], ...] = (),
        overlaps: bool = False,
        partitioned: Literal["no", "output", "both"] = "no",
        tuning: Tuning | None = None,
    ) -> Submission:
        """Return the submission of a call on these tensors, with channel 0 (`Submitter` sets the real one).

        Output and input are tensors, `TensorList`s or None. `text` describes the call in words that are equal on all
        ranks. `line` is the line of the status that counts the call; None: that of calls of all ranks. For several
        tensors `layout` says where each lies in the buffers of the call, and `local` at which addresses, if no peer
        writes that buffer. With `overlaps` the input shares bytes with the output and is not in place. `tuning`
        None is what the transport chooses. `Misconfigured` is raised if the output is one of an early release and the
        call does not allow that.
        """
        transport = self.transport
        known = call if isinstance(call, Call) else None
        at = None if output is None else transport.locate(output)
        early = self._early_use(known, text, at)
        output_bytes = 0 if output is None else output.nbytes
        in_place = input is not None and output is not None and 0 <= input.data_ptr() - output.data_ptr() < output_bytes
        place = transport.place(known, at, output_bytes) if early is None else str(early)
        return Submission(
            text=text + place,
            channel=0,
            line=self.world_size if line is None else line,
            call=call,
            program=None if known is None else transport.programs.get(known, early is not None, layout, tuning),
            partitioned=partitioned,
            meets=self.debug or known is None,
            reduction=reduction,
            layout=layout,
            local=local,
            input=0 if input is None else input.data_ptr(),
            input_at=() if input is None or in_place else transport.read_at(input),
            output=0 if output is None else output.data_ptr(),
            output_bytes=output_bytes,
            at=at,
            shown_at=transport.shown_at(at, output_bytes),
            early=early,
            overlaps=overlaps,
            epoch=transport.epoch,
        )

    def _early_use(self, call: Call | None, text: str, at: Location | None) -> EarlyUse | None:
        """Return the early-release block of an output at `at`; None if it has none. `call` is None with split sizes."""
        early = self.transport.early.use(at)
        if early is not None and call is not None:
            tuning = self.transport.programs.get(call, True).tuning
            if not _all_push_to_all(call, tuning):
                raise Misconfigured(
                    f"{text} into a tensor of empty(early_release=True): allowed are calls in which every rank sends "
                    "to every other, all_gather and all_to_all; use empty() for this one"
                )
        return early


@lru_cache(maxsize=1024)
def _all_push_to_all(call: Call, tuning: Tuning) -> bool:
    return all(len(program.pushers) == call.world_size - 1 for program in plan_all(call, tuning))


def all_gather(ranks: GroupRank, output: Any, input: Any) -> Submission:
    """Describe an all_gather."""
    num_bytes = block_bytes(output, input, outputs=ranks.world_size, device=ranks.device)
    in_place = is_block(input, output, ranks.rank)
    own = in_place and ranks.is_symmetric(output)
    call = _all_gather(ranks.world_size, num_bytes, own="in_place" if own else "copy")
    overlaps = overlap_elsewhere([output], [input], [in_place])
    return ranks.submission(
        output, input, text=f"all_gather of {described(input)} a rank", call=call, overlaps=overlaps
    )


def reduce_scatter(ranks: GroupRank, output: Any, input: Any, op: str, factor: float) -> Submission:
    """Describe a reduce_scatter."""
    call = _reduce_scatter(ranks.world_size, block_bytes(output, input, inputs=ranks.world_size, device=ranks.device))
    reduction = reduction_of(op, factor, output)
    return ranks.submission(
        output,
        input,
        text=f"reduce_scatter of {described(output, reduction)} a rank",
        call=call,
        reduction=reduction,
        overlaps=overlap_elsewhere([output], [input], [is_block(output, input, ranks.rank)]),
    )


def all_gather_coalesced(ranks: RankContext, outputs: TensorList, inputs: TensorList) -> Submission:
    """Describe several all_gathers as one call."""
    pairs = _pairs(outputs, inputs)
    shares = tuple(block_bytes(*pair, outputs=ranks.world_size, device=ranks.device) for pair in pairs)
    if sum(shares) and not ranks.is_symmetric(outputs):
        raise Misconfigured("all_gather_coalesced: its outputs have to be parts of one tensor of empty(); make one")
    apart = Parts(starts=outputs.starts, shares=shares, sizes=tuple(one.nbytes for one in outputs.tensors))
    in_place = [is_block(input, output, ranks.rank) for output, input in pairs]
    own = all(there for there, share in zip(in_place, shares, strict=True) if share)
    layout: TensorLayout = (("output", apart),)
    if not own:
        layout += (("input", Parts(starts=inputs.starts, shares=shares, sizes=shares)),)
    text = f"all_gather_coalesced of {_summary(outputs, apart, places=True)}"
    call = _all_gather(ranks.world_size, sum(shares), own="in_place" if own else "copy")
    overlaps = overlap_elsewhere(outputs.tensors, inputs.tensors, in_place)
    return ranks.submission(
        outputs, inputs, text=text, call=call, layout=layout if sum(shares) else (), overlaps=overlaps
    )


@dataclass(frozen=True, slots=True)
class _CoalescedScatter:
    """Holds the part of a reduce_scatter_coalesced that does not depend on the addresses of its tensors."""

    text: str
    call: Call
    reduction: Reduction
    layout: TensorLayout


def reduce_scatter_coalesced(
    ranks: RankContext, outputs: TensorList, inputs: TensorList, op: str, factor: float
) -> Submission:
    """Describe several reduce_scatters as one call; for shapes seen before, only addresses are looked up."""
    key = outputs.shape_key, inputs.shape_key, op, factor
    known = ranks.scatters.get(key)
    if known is None:
        if len(ranks.scatters) >= _MOST_KNOWN:
            ranks.scatters.clear()
        known = ranks.scatters[key] = _coalesced_scatter(ranks, outputs, inputs, op, factor)
    both = zip(known.layout, (inputs, outputs), strict=False)
    return ranks.submission(
        outputs,
        inputs,
        text=known.text,
        call=known.call,
        reduction=known.reduction,
        layout=known.layout,
        local=tuple((buffer, TensorAddresses(parts.starts, one.addresses)) for (buffer, parts), one in both),
        overlaps=not (outputs.is_split and not overlap(outputs, inputs))
        and overlap_elsewhere(
            outputs.tensors, inputs.tensors, [is_block(*pair, ranks.rank) for pair in _pairs(outputs, inputs)]
        ),
    )


def _coalesced_scatter(
    ranks: RankContext, outputs: TensorList, inputs: TensorList, op: str, factor: float
) -> _CoalescedScatter:
    """Return the call as if its tensors lay one after the other; raise if shapes do not fit or dtypes differ."""
    pairs = _pairs(outputs, inputs)
    for output, input in pairs:
        check(output, None, ranks.device)
        check(None, input, ranks.device)
        room = output.numel() * ranks.world_size
        if not (0 < input.numel() <= room or input.numel() == room == 0):
            raise Misconfigured(
                f"reduce_scatter_coalesced of {input.numel()} elements to {output.numel()} on each of "
                f"{ranks.world_size} ranks: give outputs that hold a share of their input, rounded up"
            )
    if len({(output.dtype, input.dtype) for output, input in pairs}) > 1:
        raise Misconfigured("reduce_scatter_coalesced of several dtypes: make a call for each")
    output, input = pairs[0]
    reduction = widened(reduction_of(op, factor, input), dtype_name(output))
    width = output.element_size() // input.element_size()
    sizes = tuple(one.nbytes for one in inputs.tensors)
    shares = tuple(one.nbytes // width for one in outputs.tensors)
    sent = Parts(starts=_one_after_the_other(sizes), shares=shares, sizes=sizes)
    kept = Parts(
        starts=_one_after_the_other([width * share for share in shares]), shares=shares, sizes=shares, width=width
    )
    summary = _summary(inputs, sent, places=False)
    return _CoalescedScatter(
        text=f"reduce_scatter_coalesced of {summary}, {op} {reduction.factor!r} as {dtype_name(output)}",
        call=_reduce_scatter(ranks.world_size, sum(shares)),
        reduction=reduction,
        layout=(("input", sent), ("output", kept)) if sum(shares) else (),
    )


def _one_after_the_other(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes[:-1], initial=0))


def _pairs(outputs: TensorList, inputs: TensorList) -> list[tuple[Any, Any]]:
    if len(outputs.tensors) != len(inputs.tensors):
        raise Misconfigured(f"{len(outputs.tensors)} outputs for {len(inputs.tensors)} inputs: give one for each")
    return list(zip(outputs.tensors, inputs.tensors, strict=True))


def _summary(tensors: TensorList, parts: Parts, *, places: bool) -> str:
    """Return a line that is equal on all ranks: number of tensors, bytes, first dtype, and a digest of the layout."""
    dtypes = [dtype_name(tensor) for tensor in tensors.tensors]
    rest = repr((dtypes, parts.shares, parts.sizes, parts.starts if places else ()))
    digest = blake2b(rest.encode(), digest_size=8).hexdigest()
    return f"{len(dtypes)} tensors, {sum(parts.shares)} bytes of {dtypes[0]} a rank, layout {digest}"


def all_reduce(ranks: GroupRank, output: Any, input: Any, op: str, factor: float) -> Submission:
    """Describe an all_reduce."""
    own: Own = "in_place" if ranks.is_symmetric(output) else "consumer"
    call = _all_reduce(ranks.world_size, block_bytes(output, device=ranks.device), own=own)
    reduction = reduction_of(op, factor, output)
    return ranks.submission(
        output, input, text=f"all_reduce of {described(output, reduction)}", call=call, reduction=reduction
    )


def all_to_all(ranks: GroupRank, output: Any, input: Any, leave_own: bool) -> Submission:
    """Describe an all_to_all of equal blocks."""
    own = _own_block(ranks, output, input, leave_own)
    block = even_blocks(output, input, ranks.world_size, ranks.device)
    call = _all_to_all(((block,) * ranks.world_size,) * ranks.world_size, own=own)
    return ranks.submission(output, input, text=f"all_to_all of {described(input)} a rank", call=call)


def uneven_all_to_all(
    ranks: RankContext,
    output: Any,
    input: Any,
    leave_own: bool,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> Submission:
    """Describe an all_to_all with split sizes; this rank knows only its own, and learns the others' later."""
    own = _own_block(ranks, output, input, leave_own)
    if input_split_sizes is None or output_split_sizes is None:
        raise Misconfigured("all_to_all with one kind of split sizes: give both, or none")
    check(output, input, ranks.device)
    coming = splits(output, output_split_sizes, ranks.world_size)
    row = splits(input, input_split_sizes, ranks.world_size)

    uneven = UnevenSplits(rank=ranks.rank, row=row, column=coming, own=own)
    text = f"all_to_all with split sizes of {dtype_name(input)}"
    return ranks.submission(output, input, text=text, call=uneven)


def _own_block(ranks: GroupRank, output: Any, input: Any, leave_own: bool) -> Literal["copy", "consumer"]:
    """Return whether an all_to_all copies this rank's own block to output, or leaves it in input (`consumer`)."""
    if leave_own and output.nbytes and not ranks.is_symmetric(output):
        raise Misconfigured("all_to_all with leave_own: its output has to be from empty(), or all of it is copied")
    if output.nbytes and overlap(output, input):
        raise Misconfigured("all_to_all from a tensor to itself: its layouts differ; give another output")
    return "consumer" if leave_own else "copy"


def broadcast(ranks: GroupRank, output: Any, input: Any, src: int) -> Submission:
    """Describe a broadcast."""
    call = _broadcast(ranks.world_size, block_bytes(output, device=ranks.device), root=src)
    return ranks.submission(output, input, text=f"broadcast of {described(output)} from rank {src}", call=call)


def scatter(ranks: RankContext, output: Any, input: Any, src: int) -> Submission:
    """Describe a scatter."""
    _check_root(ranks, input, "input", src)
    num_bytes = block_bytes(output, input, inputs=ranks.world_size, device=ranks.device)
    call = operations.scatter(ranks.world_size, num_bytes, root=src)
    overlaps = input is not None and overlap_elsewhere([output], [input], [is_block(output, input, ranks.rank)])
    return ranks.submission(
        output, input, text=f"scatter of {described(output)} a rank from {src}", call=call, overlaps=overlaps
    )


def gather(ranks: RankContext, output: Any, input: Any, dst: int) -> Submission:
    """Describe a gather."""
    _check_root(ranks, output, "output", dst)
    num_bytes = block_bytes(output, input, outputs=ranks.world_size, device=ranks.device)
    call = operations.gather(ranks.world_size, num_bytes, root=dst)
    overlaps = output is not None and overlap_elsewhere([output], [input], [is_block(input, output, ranks.rank)])
    return ranks.submission(
        output, input, text=f"gather of {described(input)} a rank to {dst}", call=call, overlaps=overlaps
    )


def send_recv(ranks: RankContext, output: Any, input: Any, peer: int) -> Submission:
    """Describe a send to one other rank, a receive from it, or both; a tensor that is None is left out."""
    _check_peer(ranks, peer)
    check(output, input, ranks.device)
    sizes = [[0] * ranks.world_size for _ in range(ranks.world_size)]
    sizes[ranks.rank][peer] = 0 if input is None else input.nbytes
    sizes[peer][ranks.rank] = 0 if output is None else output.nbytes
    low, high = sorted((ranks.rank, peer))
    both = f"{sizes[low][high]} bytes to rank {high} and {sizes[high][low]} to rank {low}"
    text = f"send_recv of {both} of {dtype_name(input if output is None else output)}"
    overlaps = output is not None and input is not None and overlap_elsewhere([output], [input], [False])
    return ranks.submission(output, input, text=text, call=operations.send_recv(sizes), line=peer, overlaps=overlaps)


def message(ranks: RankContext, output: Any, input: Any, peer: int) -> Submission:
    """Describe a message to another rank or from it: one of the tensors is None."""
    tensor = input if output is None else output
    _check_peer(ranks, peer)
    check(output, input, ranks.device)
    transport = ranks.transport
    assert transport.mailbox_channel is not None, "the communicator has mailboxes"
    source, target = (ranks.rank, peer) if output is None else (peer, ranks.rank)
    return Submission(
        text=f"message of {described(tensor)} from rank {transport.names[source]} to rank {transport.names[target]}",
        channel=transport.mailbox_channel + (source < target),
        line=peer,
        message=Message(source, target, tensor.nbytes),
        input=0 if input is None else input.data_ptr(),
        input_at=() if input is None else transport.read_at(input),
        output=0 if output is None else output.data_ptr(),
        output_bytes=0 if output is None else output.nbytes,
        at=None if output is None else transport.locate(output),
        epoch=transport.epoch,
    )


def barrier(ranks: GroupRank, output: Any, input: Any) -> Submission:
    """Describe a barrier."""
    return ranks.submission(output, input, text="barrier", call=operations.barrier(ranks.world_size))


def even_blocks_of(
    ranks: RankContext, output: Any, input: Any, name: str, root: int, op: str, factor: float
) -> Submission:
    """Describe a call of any collective with even blocks, by its name."""
    check(output, input, ranks.device)
    row, tensors = find_operation(name), (output, input)
    whole = ALIGNMENT * ranks.world_size  # bytes of a sample full array, to learn which part of it each tensor is
    unit = even_call(name, ranks.world_size, whole, root=root)
    parts = unit.output_bytes(ranks.rank), unit.input_bytes(ranks.rank)
    found = [one.nbytes * whole // part for one, part in zip(tensors, parts, strict=True) if one is not None and part]
    num_bytes, own = found[0] if found else 0, _own_of(ranks, row, output, input)
    call = even_call(name, ranks.world_size, num_bytes, root=root, own=own)
    needed = call.output_bytes(ranks.rank), call.input_bytes(ranks.rank)
    if "input" not in row.arguments:
        needed = needed[0], 0 if input is None else needed[0]
    given = tuple(0 if one is None else one.nbytes for one in tensors)
    if given != needed:
        raise Misconfigured(
            f"{name} with output and input of {given} bytes on rank {ranks.rank}: blocks are even, so give {needed}"
        )
    reduction = reduction_of(op, factor, output) if row.layout.reduces else None
    shown = next((one for one in tensors if one is not None), None)
    text = name if shown is None else f"{name} of {num_bytes} bytes of {dtype_name(shown)}"
    text += "" if reduction is None else f", {reduction.op} {reduction.factor!r}"
    overlaps = None not in tensors and call.own != "in_place" and input is not output
    return ranks.submission(
        output,
        input,
        text=text + (f", root {root}" if "root" in row.arguments else ""),
        call=call,
        reduction=reduction,
        overlaps=overlaps and overlap_elsewhere([output], [input], [is_block(output, input, ranks.rank)]),
    )


def _own_of(ranks: RankContext, row: Operation, output: Any, input: Any) -> Own:
    """Return how a call handles the own block: in place if the collective allows it and the input lies there."""
    ways = row.layout.own
    others: list[Own] = [way for way in ways if way != "in_place"]
    if not others or "in_place" not in ways or "root" in row.arguments:
        return (others or list(ways))[0]
    if output is None or not ranks.is_symmetric(output):
        return others[0]
    in_place = input is output or is_block(input, output, ranks.rank)
    return "in_place" if in_place else others[0]


def _check_peer(ranks: RankContext, peer: int) -> None:
    if not 0 <= peer < ranks.world_size or peer == ranks.rank:
        raise Misconfigured(f"rank {ranks.rank} with rank {peer}: allowed are the others of {ranks.world_size} ranks")


def _check_root(ranks: RankContext, tensor: Any, what: str, root: int) -> None:
    if (tensor is not None) != (ranks.rank == root):
        given = "was given" if tensor is not None else "is missing"
        raise Misconfigured(f"{what} {given} on rank {ranks.rank}: rank {root} gives it, and no other")
