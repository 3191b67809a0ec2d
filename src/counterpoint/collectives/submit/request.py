"""Make the `Submission` of a call: by `even_blocks_of` if all blocks have equal size, else by other functions.

The results depend only on the arguments and on where symmetric memory lies, so `Submitter` caches them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from counterpoint.collectives.host.shared_memory import MAX_CHUNKS
from counterpoint.collectives.memory import EarlyUse, Location
from counterpoint.collectives.program import operations
from counterpoint.collectives.program.calls import ALIGNMENT, Buffer, Call, Own
from counterpoint.collectives.program.coalesced import Parts, TensorAddresses, TensorLayout
from counterpoint.collectives.program.messages import Message
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
    is_block,
    overlap,
    overlap_elsewhere,
    reduction_of,
    splits,
)
from counterpoint.errors import Misconfigured

_MOST_KNOWN = 1024  # shapes of reduce_scatter_coalesced that are cached

_even_call = lru_cache(maxsize=1024)(even_call)  # calls hold large tuples: equal arguments get one cached object

BuildSubmission: TypeAlias = Callable[..., Submission]
"""Types the functions below, which take a `GroupRank` or `RankContext`, output, input as it is sent, and options.

They return the submission, or raise Misconfigured if the tensors or options do not fit the operation.
"""


@dataclass(frozen=True, kw_only=True)
class GroupRank:
    """Holds a rank and the size of its group; makes submissions that have a `Call`, but no program or addresses."""

    rank: int
    world_size: int
    device: Any  # torch.device of all tensors

    def is_symmetric(self, tensor: Any) -> bool:
        """Return True: without a transport every contiguous tensor counts as symmetric memory."""
        return True

    def submission(
        self,
        output: Any,
        input: Any,
        *,
        text: str,
        call: Call | UnevenSplits,
        reduction: Reduction | None = None,
        overlaps: bool = False,
    ) -> Submission:
        """Return a submission of `call` without channel, program or addresses; see `RankContext.submission`."""
        return Submission(text=text, channel=0, line=-1, call=call, reduction=reduction, overlaps=overlaps)


@dataclass(frozen=True, kw_only=True)
class RankContext(GroupRank):
    """Holds a rank's transport; makes submissions with a program and addresses."""

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
        """Return the submission of a call on these tensors, with channel 0 (`Submitter` sets the real channel).

        Output and input are tensors, `TensorList`s or None. `text` describes the call in words that are equal on all
        ranks. `line` is the line of the status that counts the call; None: the line for calls of all ranks. For several
        tensors `layout` says where each lies in the buffers of the call, and `local` at which addresses, if no peer
        writes that buffer. With `overlaps` the input shares bytes with the output and is not in place. `tuning`
        None is what the transport chooses. `Misconfigured` is raised if the output is an early-release tensor and
        the call does not allow such an output.
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
        """Return the early-release block of an output at `at`, or None; raise if `call` forbids early release."""
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


def even_blocks_of(
    ranks: GroupRank,
    output: Any,
    input: Any,
    name: str,
    root: int = 0,
    op: str = "sum",
    factor: float = 1.0,
    *,
    leave_own: bool = False,
) -> Submission:
    """Return the submission of the collective `name` on blocks of equal size."""
    check(output, input, ranks.device)
    row, in_place = find_operation(name), _in_place(ranks, output, input)
    num_bytes = _full_bytes(ranks, row, output, input, root)
    own: Own = "consumer" if leave_own else _own_of(ranks, row, output, in_place)
    call = _even_call(name, ranks.world_size, num_bytes, root=root, own=own)
    needed = call.output_bytes(ranks.rank), call.input_bytes(ranks.rank)
    if "input" not in row.arguments:
        needed = needed[0], 0 if input is None else needed[0]
    given = tuple(0 if one is None else one.nbytes for one in (output, input))
    if given != needed:
        raise Misconfigured(
            f"{name} with output and input of {given} bytes on rank {ranks.rank}: blocks are even, so give {needed}"
        )
    reduction = reduction_of(op, factor, output) if row.layout.reduces else None
    shown = input if output is None else output
    text = name if shown is None else f"{name} of {num_bytes} bytes of {dtype_name(shown.dtype)}"
    text += "" if reduction is None else f", {reduction.op} {reduction.factor!r}"
    apart = output is not None and input is not None and input is not output and call.own != "in_place"
    return ranks.submission(
        output,
        input,
        text=text + (f", root {root}" if "root" in row.arguments else ""),
        call=call,
        reduction=reduction,
        overlaps=apart and overlap_elsewhere([output], [input], [in_place]),
    )


def _full_bytes(ranks: GroupRank, row: Operation, output: Any, input: Any, root: int) -> int:
    """Return the full array's size in bytes, from this rank's tensors; raise if a tensor is missing or superfluous."""
    whole = ALIGNMENT * ranks.world_size  # bytes of a sample full array, to learn which part of it each tensor is
    unit = _even_call(row.layout.name, ranks.world_size, whole, root=root)
    found = []
    for what, one in (("output", output), ("input", input)):
        part = unit.output_bytes(ranks.rank) if what == "output" else unit.input_bytes(ranks.rank)
        if what in row.arguments and (part > 0 if one is None else one.nbytes > 0 == part):
            given = "is missing" if one is None else "was given"
            raise Misconfigured(f"{what} {given} on rank {ranks.rank}: rank {root} gives it, and no other")
        if one is not None and part:
            found.append(int(one.nbytes) * whole // part)
    return found[0] if found else 0


def _in_place(ranks: GroupRank, output: Any, input: Any) -> bool:
    """Return whether input and output are the same tensor, or one is this rank's block of the other."""
    if output is None or input is None or input is output:
        return output is input
    block, whole = (input, output) if input.nbytes <= output.nbytes else (output, input)
    return block.nbytes * ranks.world_size == whole.nbytes and is_block(block, whole, ranks.rank)


def _own_of(ranks: GroupRank, row: Operation, output: Any, in_place: bool) -> Own:
    """Return how the rank's own block reaches the output: "in_place" if the collective and the tensors allow that."""
    others: list[Own] = [own for own in row.layout.own if own != "in_place"]
    if not others:
        return "in_place"
    may_be = "in_place" in row.layout.own and "root" not in row.arguments
    return "in_place" if may_be and in_place and ranks.is_symmetric(output) else others[0]


def all_gather_coalesced(ranks: RankContext, outputs: TensorList, inputs: TensorList) -> Submission:
    """Return the submission of several all_gathers as one call."""
    pairs = _pairs(outputs, inputs)
    shares = tuple(block_bytes(*pair, ranks.world_size, ranks.device) for pair in pairs)
    if sum(shares) and not ranks.is_symmetric(outputs):
        raise Misconfigured("all_gather_coalesced: its outputs have to be parts of one tensor of empty(); make one")
    apart = Parts(starts=outputs.starts, shares=shares, sizes=tuple(one.nbytes for one in outputs.tensors))
    in_place = [is_block(input, output, ranks.rank) for output, input in pairs]
    own = all(there for there, share in zip(in_place, shares, strict=True) if share)
    layout: TensorLayout = (("output", apart),)
    if not own:
        layout += (("input", Parts(starts=inputs.starts, shares=shares, sizes=shares)),)
    text = f"all_gather_coalesced of {_summary(outputs, apart, places=True)}"
    call = _even_call("all_gather", ranks.world_size, ranks.world_size * sum(shares), own="in_place" if own else "copy")
    overlaps = overlap_elsewhere(outputs.tensors, inputs.tensors, in_place)
    return ranks.submission(
        outputs, inputs, text=text, call=call, layout=layout if sum(shares) else (), overlaps=overlaps
    )


@dataclass(frozen=True, slots=True)
class _CoalescedScatter:
    """Holds what a reduce_scatter_coalesced needs except the tensors' addresses; cached by shapes."""

    text: str
    call: Call
    reduction: Reduction
    layout: TensorLayout


def reduce_scatter_coalesced(
    ranks: RankContext, outputs: TensorList, inputs: TensorList, op: str, factor: float
) -> Submission:
    """Return the submission of several reduce_scatters as one call; for known shapes, only look up addresses."""
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
    """Return the call as planned for tensors that lie side by side; raise if shapes do not fit or dtypes differ."""
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
    reduction = widened(reduction_of(op, factor, input), dtype_name(output.dtype))
    width = output.element_size() // input.element_size()
    sizes = tuple(one.nbytes for one in inputs.tensors)
    shares = tuple(one.nbytes // width for one in outputs.tensors)
    sent = Parts(starts=_one_after_the_other(sizes), shares=shares, sizes=sizes)
    kept = Parts(
        starts=_one_after_the_other([width * share for share in shares]), shares=shares, sizes=shares, width=width
    )
    summary = _summary(inputs, sent, places=False)
    return _CoalescedScatter(
        text=f"reduce_scatter_coalesced of {summary}, {op} {reduction.factor!r} as {dtype_name(output.dtype)}",
        call=_even_call("reduce_scatter", ranks.world_size, ranks.world_size * sum(shares)),
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
    """Return a text that is equal on all ranks: number of tensors, bytes, first dtype, and a digest of the layout."""
    dtypes = [dtype_name(tensor.dtype) for tensor in tensors.tensors]
    rest = repr((dtypes, parts.shares, parts.sizes, parts.starts if places else ()))
    digest = blake2b(rest.encode(), digest_size=8).hexdigest()
    return f"{len(dtypes)} tensors, {sum(parts.shares)} bytes of {dtypes[0]} a rank, layout {digest}"


def all_to_all(ranks: GroupRank, output: Any, input: Any, leave_own: bool) -> Submission:
    """Return the submission of an all_to_all of blocks of equal size."""
    _check_own_block(ranks, output, input, leave_own)
    rows = input.shape[0] if input.dim() else 1
    if rows % ranks.world_size:
        raise Misconfigured(f"all_to_all of {rows} rows: give a multiple of {ranks.world_size}, or split sizes")
    return even_blocks_of(ranks, output, input, "all_to_all", leave_own=leave_own)


def uneven_all_to_all(
    ranks: GroupRank,
    output: Any,
    input: Any,
    leave_own: bool,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> Submission:
    """Return the submission of an all_to_all with split sizes; ranks learn each other's sizes when the call runs."""
    _check_own_block(ranks, output, input, leave_own)
    if input_split_sizes is None or output_split_sizes is None:
        raise Misconfigured("all_to_all with one kind of split sizes: give both, or none")
    check(output, input, ranks.device)
    coming = splits(output, output_split_sizes, ranks.world_size)
    row = splits(input, input_split_sizes, ranks.world_size)
    uneven = UnevenSplits(rank=ranks.rank, row=row, column=coming, own="consumer" if leave_own else "copy")
    text = f"all_to_all with split sizes of {dtype_name(input.dtype)}"
    return ranks.submission(output, input, text=text, call=uneven)


def _check_own_block(ranks: GroupRank, output: Any, input: Any, leave_own: bool) -> None:
    """Raise if output and input overlap, or `leave_own` is set and the output is not symmetric memory."""
    if leave_own and output.nbytes and not ranks.is_symmetric(output):
        raise Misconfigured("all_to_all with leave_own: its output has to be from empty(), or all of it is copied")
    if output.nbytes and overlap(output, input):
        raise Misconfigured("all_to_all from a tensor to itself: its layouts differ; give another output")


def send_recv(ranks: RankContext, output: Any, input: Any, peer: int) -> Submission:
    """Return the submission of a send of `input` to `peer`, a receive of `output` from `peer`, or both (None: not)."""
    _check_peer(ranks, peer)
    check(output, input, ranks.device)
    sizes = [[0] * ranks.world_size for _ in range(ranks.world_size)]
    sizes[ranks.rank][peer] = 0 if input is None else input.nbytes
    sizes[peer][ranks.rank] = 0 if output is None else output.nbytes
    low, high = sorted((ranks.rank, peer))
    both = f"{sizes[low][high]} bytes to rank {high} and {sizes[high][low]} to rank {low}"
    text = f"send_recv of {both} of {dtype_name((input if output is None else output).dtype)}"
    overlaps = output is not None and input is not None and overlap_elsewhere([output], [input], [False])
    return ranks.submission(output, input, text=text, call=operations.send_recv(sizes), line=peer, overlaps=overlaps)


def message(ranks: RankContext, output: Any, input: Any, peer: int) -> Submission:
    """Return the submission of a message to `peer` (`output` is None) or from `peer` (`input` is None)."""
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


def _check_peer(ranks: RankContext, peer: int) -> None:
    if not 0 <= peer < ranks.world_size or peer == ranks.rank:
        raise Misconfigured(f"rank {ranks.rank} with rank {peer}: allowed are the others of {ranks.world_size} ranks")


def partitioned_all_gather(
    ranks: RankContext, output: Any, input: Any, dim: int, chunk_rows: int, supplied: bool
) -> Submission:
    """Return the submission of an all_gather along `dim` with output chunk by chunk; the own block stays in input."""
    count = ranks.world_size
    share = _partitioned_block(ranks, output, input, "all_gather", count)
    return ranks.submission(
        output,
        input,
        text=f"all_gather of {described(input)} a rank along {dim}, {chunk_rows} rows at a time, {supplied=}",
        call=_even_call("all_gather", count, count * share, own="consumer"),
        layout=_partitioned_layout("output", input, dim, share, count),
        partitioned="output" if supplied else "both",
        tuning=_partitioned_tuning(input, share, chunk_rows, peers_first=supplied),
    )


def partitioned_all_to_all(ranks: RankContext, output: Any, input: Any, dim: int, chunk_rows: int) -> Submission:
    """Return the submission of an all_to_all along `dim` with input chunk by chunk; the own block stays in input."""
    count = ranks.world_size
    share = _partitioned_block(ranks, output, input, "all_to_all", 1) // count
    return ranks.submission(
        output,
        input,
        text=f"all_to_all of {described(input)} a rank along {dim}, {chunk_rows} rows at a time",
        call=_even_call("all_to_all", count, count * share, own="consumer"),
        layout=_partitioned_layout("input", input, dim, share, count),
        partitioned="both",
        tuning=_partitioned_tuning(output[0], share, chunk_rows, peers_first=True),
    )


def _partitioned_block(ranks: RankContext, output: Any, input: Any, operation: str, count: int) -> int:
    """Return the input's size in bytes; raise unless the output is in symmetric memory and `count` times as large."""
    if not ranks.is_symmetric(output):
        raise Misconfigured(f"{operation} in partitions: its output has to be a tensor of empty(); make one")
    return block_bytes(output, input, count, ranks.device)


def _partitioned_layout(buffer: Buffer, tensor: Any, dim: int, share: int, count: int) -> TensorLayout:
    """Return where `count` ranks' shares of `share` bytes lie in a buffer cut along `dim`; raise on a bad `dim`."""
    if not 0 <= dim < tensor.dim():
        raise Misconfigured(f"dim={dim} of a tensor of {tensor.dim()} dimensions: give one of them")
    batch = int(tensor.shape[:dim].numel())
    if batch <= 1:
        return ()
    each, whole = share // batch, count * share // batch
    starts = tuple(accumulate((whole,) * (batch - 1), initial=0))
    return ((buffer, Parts(starts=starts, shares=(each,) * batch, sizes=(whole,) * batch)),)


def _partitioned_tuning(block: Any, share: int, chunk_rows: int, *, peers_first: bool) -> Tuning:
    """Return the tuning that cuts blocks every `chunk_rows` rows, counted through all dimensions but the last."""
    row_bytes = block.shape[-1] * block.element_size()
    if chunk_rows < 1 or chunk_rows * row_bytes % ALIGNMENT:
        raise Misconfigured(
            f"chunks of {chunk_rows} rows of {row_bytes} bytes: give one or more, of a multiple of {ALIGNMENT} bytes"
        )
    size = chunk_rows * row_bytes
    if share > MAX_CHUNKS * size:
        raise Misconfigured(f"chunks of {chunk_rows} rows: {-(-share // size)} of them, and {MAX_CHUNKS} are allowed")
    return Tuning(chunk_bytes=None if size >= share else size, peers_first=peers_first)
