"""What a call asks for: its tensors checked, and in words that are the same on all ranks.

Functions of the arguments and of nothing that changes, so that `Submitter` asks once for calls that come again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal

from counterpoint.collectives import calls
from counterpoint.collectives.arguments import (
    Several,
    block_bytes,
    check,
    described,
    dtype_name,
    even_blocks,
    overlap,
    reduction_of,
    splits,
)
from counterpoint.collectives.program import Call
from counterpoint.collectives.reduce import Reduction, widened
from counterpoint.collectives.spread import Layout, Parts
from counterpoint.collectives.symmetric import Location
from counterpoint.collectives.transport import Rows
from counterpoint.errors import Misconfigured

__all__ = [
    "Ask",
    "Here",
    "Request",
    "all_gather",
    "all_gather_coalesced",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "scatter",
    "send_recv",
    "uneven_all_to_all",
]

_all_gather, _all_to_all, _reduce_scatter, _all_reduce, _broadcast = (  # large tuples, and equal ones are planned once
    lru_cache(maxsize=1024)(function)
    for function in (calls.all_gather, calls.all_to_all, calls.reduce_scatter, calls.all_reduce, calls.broadcast)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """Where calls are made.

    Args:
        rank: this one.
        world_size: ranks of the group.
        device: torch.device of all tensors.
        locate: where a tensor lies in own symmetric memory; None if it does not.
    """

    rank: int
    world_size: int
    device: Any
    locate: Callable[[Any], Location | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A call without its tensors.

    Args:
        text: what has to be equal on all ranks.
        call: what all ranks ask for, or how that follows from everyone's row.
        reduction: of calls that reduce.
        row: bytes for each rank, if only this rank knows.
        line: the rank that it is made with, if that is one.
        layout: of calls with several tensors: where they lie.
    """

    text: str
    call: Call | Callable[[Rows], Call]
    reduction: Reduction | None = None
    row: tuple[int, ...] = ()
    line: int | None = None
    layout: Layout = ()


Ask = Callable[..., Request]
"""`Here`, output, input and what else the operation has in; a request out.

Raises:
    Misconfigured: these tensors or options do not fit it.
"""


def all_gather(here: Here, output: Any, input: Any) -> Request:
    num_bytes = block_bytes(output, input, outputs=here.world_size, device=here.device)
    own = here.locate(output) is not None and input.data_ptr() == output.data_ptr() + here.rank * num_bytes
    call = _all_gather(here.world_size, num_bytes, own="in_place" if own else "copy")
    return Request(text=f"all_gather of {described(input)} a rank", call=call)


def reduce_scatter(here: Here, output: Any, input: Any, op: str, factor: float) -> Request:
    call = _reduce_scatter(here.world_size, block_bytes(output, input, inputs=here.world_size, device=here.device))
    reduction = reduction_of(op, factor, output)
    return Request(text=f"reduce_scatter of {described(output, reduction)} a rank", call=call, reduction=reduction)


def all_gather_coalesced(here: Here, outputs: Several, inputs: Several) -> Request:
    pairs = _pairs(outputs, inputs)
    shares = tuple(block_bytes(*pair, outputs=here.world_size, device=here.device) for pair in pairs)
    if sum(shares) and here.locate(outputs) is None:
        raise Misconfigured("all_gather_coalesced: its outputs have to be parts of one tensor of empty(); make one")
    apart = Parts(starts=outputs.starts, shares=shares, sizes=tuple(one.nbytes for one in outputs.tensors))
    own = all(
        input.data_ptr() == output.data_ptr() + here.rank * share
        for (output, input), share in zip(pairs, shares, strict=True)
        if share
    )
    layout: Layout = (("output", apart),)
    if not own:
        layout += (("input", Parts(starts=inputs.starts, shares=shares, sizes=shares)),)
    text = f"all_gather_coalesced of {_summary(outputs, apart, places=True)}"
    call = _all_gather(here.world_size, sum(shares), own="in_place" if own else "copy")
    return Request(text=text, call=call, layout=layout if sum(shares) else ())


def reduce_scatter_coalesced(here: Here, outputs: Several, inputs: Several, op: str, factor: float) -> Request:
    pairs = _pairs(outputs, inputs)
    for output, input in pairs:
        check(output, None, here.device)
        check(None, input, here.device)
        room = output.numel() * here.world_size
        if not (0 < input.numel() <= room or input.numel() == room == 0):
            raise Misconfigured(
                f"reduce_scatter_coalesced of {input.numel()} elements to {output.numel()} on each of "
                f"{here.world_size} ranks: give outputs that hold a share of their input, rounded up"
            )
    if len({(output.dtype, input.dtype) for output, input in pairs}) > 1:
        raise Misconfigured("reduce_scatter_coalesced of several dtypes: make a call for each")
    output, input = pairs[0]
    reduction = widened(reduction_of(op, factor, input), dtype_name(output))
    width = output.element_size() // input.element_size()
    shares = tuple(one.nbytes // width for one in outputs.tensors)
    sent = Parts(starts=inputs.starts, shares=shares, sizes=tuple(one.nbytes for one in inputs.tensors))
    kept = Parts(starts=outputs.starts, shares=shares, sizes=shares, width=width)
    text = f"reduce_scatter_coalesced of {_summary(inputs, sent, places=False)}, {op} {reduction.factor!r} as "
    return Request(
        text=text + dtype_name(output),
        call=_reduce_scatter(here.world_size, sum(shares)),
        reduction=reduction,
        layout=(("input", sent), ("output", kept)) if sum(shares) else (),
    )


def _pairs(outputs: Several, inputs: Several) -> list[tuple[Any, Any]]:
    if len(outputs.tensors) != len(inputs.tensors):
        raise Misconfigured(f"{len(outputs.tensors)} outputs for {len(inputs.tensors)} inputs: give one for each")
    return list(zip(outputs.tensors, inputs.tensors, strict=True))


def _summary(tensors: Several, parts: Parts, *, places: bool) -> str:
    """What has to be equal on all ranks, in a line: how many, of how many bytes, and a digest of the rest."""
    dtypes = [dtype_name(tensor) for tensor in tensors.tensors]
    rest = repr((dtypes, parts.shares, parts.sizes, parts.starts if places else ()))
    digest = blake2b(rest.encode(), digest_size=8).hexdigest()
    return f"{len(dtypes)} tensors, {sum(parts.shares)} bytes of {dtypes[0]} a rank, layout {digest}"


def all_reduce(here: Here, output: Any, input: Any, op: str, factor: float) -> Request:
    num_bytes, at = block_bytes(output, device=here.device), here.locate(output)
    call = _all_reduce(here.world_size, num_bytes, own="consumer" if at is None else "in_place")
    reduction = reduction_of(op, factor, output)
    return Request(text=f"all_reduce of {described(output, reduction)}", call=call, reduction=reduction)


def all_to_all(here: Here, output: Any, input: Any, leave_own: bool) -> Request:
    own = _own_block(here, output, input, leave_own)
    block = even_blocks(output, input, here.world_size, here.device)
    call = _all_to_all(((block,) * here.world_size,) * here.world_size, own=own)
    return Request(text=f"all_to_all of {described(input)} a rank", call=call)


def uneven_all_to_all(
    here: Here,
    output: Any,
    input: Any,
    leave_own: bool,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> Request:
    own = _own_block(here, output, input, leave_own)
    if input_split_sizes is None or output_split_sizes is None:
        raise Misconfigured("all_to_all with one kind of split sizes: give both, or none")
    check(output, input, here.device)
    coming = splits(output, output_split_sizes, here.world_size)
    row = splits(input, input_split_sizes, here.world_size)

    def call_of(rows: Rows) -> Call:
        there = tuple(theirs[here.rank] for theirs in rows)
        if there != coming:
            raise Misconfigured(
                f"all_to_all: ranks send {there} bytes to rank {here.rank}, which expects {coming}; "
                "make output_split_sizes what the others send"
            )
        return calls.all_to_all(rows, own=own)

    return Request(text=f"all_to_all with split sizes of {dtype_name(input)}", call=call_of, row=row)


def _own_block(here: Here, output: Any, input: Any, leave_own: bool) -> Literal["copy", "consumer"]:
    """What an all_to_all does with the block of this rank for itself."""
    if leave_own and output.nbytes and here.locate(output) is None:
        raise Misconfigured("all_to_all with leave_own: its output has to be from empty(), or all of it is copied")
    if output.nbytes and overlap(output, input):
        raise Misconfigured("all_to_all from a tensor to itself: its layouts differ; give another output")
    return "consumer" if leave_own else "copy"


def broadcast(here: Here, output: Any, input: Any, src: int) -> Request:
    call = _broadcast(here.world_size, block_bytes(output, device=here.device), root=src)
    return Request(text=f"broadcast of {described(output)} from rank {src}", call=call)


def scatter(here: Here, output: Any, input: Any, src: int) -> Request:
    _check_root(here, input, "input", src)
    num_bytes = block_bytes(output, input, inputs=here.world_size, device=here.device)
    call = calls.scatter(here.world_size, num_bytes, root=src)
    return Request(text=f"scatter of {described(output)} a rank from {src}", call=call)


def gather(here: Here, output: Any, input: Any, dst: int) -> Request:
    _check_root(here, output, "output", dst)
    num_bytes = block_bytes(output, input, outputs=here.world_size, device=here.device)
    call = calls.gather(here.world_size, num_bytes, root=dst)
    return Request(text=f"gather of {described(input)} a rank to {dst}", call=call)


def send_recv(here: Here, output: Any, input: Any, peer: int) -> Request:
    if not 0 <= peer < here.world_size or peer == here.rank:
        raise Misconfigured(f"rank {here.rank} with rank {peer}: allowed are the others of {here.world_size} ranks")
    check(output, input, here.device)
    sizes = [[0] * here.world_size for _ in range(here.world_size)]
    sizes[here.rank][peer] = 0 if input is None else input.nbytes
    sizes[peer][here.rank] = 0 if output is None else output.nbytes
    low, high = sorted((here.rank, peer))
    both = f"{sizes[low][high]} bytes to rank {high} and {sizes[high][low]} to rank {low}"
    text = f"send_recv of {both} of {dtype_name(input if output is None else output)}"
    return Request(text=text, call=calls.send_recv(sizes), line=peer)


def barrier(here: Here, output: Any, input: Any) -> Request:
    return Request(text="barrier", call=calls.barrier(here.world_size))


def _check_root(here: Here, tensor: Any, what: str, root: int) -> None:
    if (tensor is not None) != (here.rank == root):
        given = "was given" if tensor is not None else "is missing"
        raise Misconfigured(f"{what} {given} on rank {here.rank}: rank {root} gives it, and no other")
