"""Describe an all_to_all whose sizes are known late (`program/late_sizes.py`)."""

from __future__ import annotations

from typing import Any

from counterpoint.collectives.program.late_sizes import LATE_SIZES, LateSizes, late_sizes_call
from counterpoint.collectives.submit.request import RankContext
from counterpoint.collectives.submit.submission import Submission
from counterpoint.collectives.submit.tensors import check, described
from counterpoint.errors import Misconfigured


def all_to_all_vdev(ranks: RankContext, output: Any, input: Any, table: int) -> Submission:
    """Describe an all_to_all of the blocks in the table at an address."""
    check(output, input, ranks.device)
    if output.shape[1:] != input.shape[1:] or not output.dim() or not output.numel():
        raise Misconfigured(
            f"all_to_all_vdev from rows of {tuple(input.shape[1:])} to {tuple(output.shape)}: give an output with rows "
            "of the same shape"
        )
    if ranks.is_symmetric(input) and input.numel():
        raise Misconfigured(
            "all_to_all_vdev: its input is from empty(); give one of torch's, which may die at any time"
        )
    if ranks.transport.early.use(ranks.transport.locate(output)) is None:
        raise Misconfigured("all_to_all_vdev: its output has to be a tensor of empty(early_release=True); make one")
    return ranks.submission(
        output,
        input,
        text=f"all_to_all_vdev into {described(output)}",
        call=late_sizes_call(ranks.world_size, output.nbytes),
        late=LateSizes(
            table=table,
            row_bytes=output[0].nbytes,
            input_rows=input.shape[0],
            output_rows=output.shape[0],
        ),
        tuning=LATE_SIZES,
    )
