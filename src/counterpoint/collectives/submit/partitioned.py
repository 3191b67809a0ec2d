"""Describe calls in partitions (`program/partitions.py`): an all_gather, and an all_to_all of even blocks."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from counterpoint.collectives.host.status import MAX_CHUNKS
from counterpoint.collectives.program.calls import ALIGNMENT, Buffer
from counterpoint.collectives.program.coalesced import Parts, TensorLayout
from counterpoint.collectives.program.operations import all_gather, all_to_all
from counterpoint.collectives.program.steps import Tuning
from counterpoint.collectives.submit.request import RankContext
from counterpoint.collectives.submit.submission import Submission
from counterpoint.collectives.submit.tensors import block_bytes, described
from counterpoint.errors import Misconfigured


def partitioned_all_gather(
    ranks: RankContext, output: Any, input: Any, dim: int, chunk_rows: int, supplied: bool
) -> Submission:
    """Describe an all_gather along `dim` whose output is taken chunk by chunk; the own block stays in input."""
    count = ranks.world_size
    share = block_bytes(output, input, outputs=count, device=ranks.device)
    _check_output(ranks, output, "all_gather")
    return ranks.submission(
        output,
        input,
        text=f"all_gather of {described(input)} a rank along {dim}, {chunk_rows} rows at a time, {supplied=}",
        call=all_gather(count, share, own="consumer"),
        layout=_layout("output", input, dim, share, count),
        partitioned="output" if supplied else "both",
        tuning=_tuning(input, share, chunk_rows, peers_first=supplied),
    )


def partitioned_all_to_all(ranks: RankContext, output: Any, input: Any, dim: int, chunk_rows: int) -> Submission:
    """Describe an all_to_all of blocks along `dim` of the input, supplied chunk by chunk; the own block stays there."""
    count = ranks.world_size
    share = block_bytes(output, input, device=ranks.device) // count
    _check_output(ranks, output, "all_to_all")
    return ranks.submission(
        output,
        input,
        text=f"all_to_all of {described(input)} a rank along {dim}, {chunk_rows} rows at a time",
        call=all_to_all(((share,) * count,) * count, own="consumer"),
        layout=_layout("input", input, dim, share, count),
        partitioned="both",
        tuning=_tuning(output[0], share, chunk_rows, peers_first=True),
    )


def _check_output(ranks: RankContext, output: Any, operation: str) -> None:
    if not ranks.is_symmetric(output):
        raise Misconfigured(f"{operation} in partitions: its output has to be a tensor of empty(); make one")


def _layout(buffer: Buffer, tensor: Any, dim: int, share: int, count: int) -> TensorLayout:
    """Return where the ranks' shares of a buffer lie: a piece of each in every element of the dimensions before `dim`.

    Args:
        buffer: whose layout is returned; it has `count` shares.
        tensor: tells the dimensions.
        dim: dimension along which shares lie behind one another.
        share: bytes of a share.
        count: number of ranks.

    Raises:
        Misconfigured: the tensor has no such dimension.
    """
    if not 0 <= dim < tensor.dim():
        raise Misconfigured(f"dim={dim} of a tensor of {tensor.dim()} dimensions: give one of them")
    batch = int(tensor.shape[:dim].numel())
    if batch <= 1:
        return ()
    each, whole = share // batch, count * share // batch
    starts = tuple(accumulate((whole,) * (batch - 1), initial=0))
    return ((buffer, Parts(starts=starts, shares=(each,) * batch, sizes=(whole,) * batch)),)


def _tuning(block: Any, share: int, chunk_rows: int, *, peers_first: bool) -> Tuning:
    """Return the tuning that cuts blocks after every `chunk_rows` rows, counted through all dimensions but the last."""
    row_bytes = block.shape[-1] * block.element_size()
    if chunk_rows < 1 or chunk_rows * row_bytes % ALIGNMENT:
        raise Misconfigured(
            f"chunks of {chunk_rows} rows of {row_bytes} bytes: give one or more, of a multiple of {ALIGNMENT} bytes"
        )
    size = chunk_rows * row_bytes
    if share > MAX_CHUNKS * size:
        raise Misconfigured(f"chunks of {chunk_rows} rows: {-(-share // size)} of them, and {MAX_CHUNKS} are allowed")
    return Tuning(chunk_bytes=None if size >= share else size, peers_first=peers_first)
