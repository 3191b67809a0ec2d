"""A pair under controls that have shown that they work: the one call that raises where a knob did nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from counterpoint.controls.control import Control, Lanes, require
from counterpoint.controls.nccl_cluster import NcclCluster
from counterpoint.controls.what_ran import see
from counterpoint.errors import Unsupported
from counterpoint.records.evidence import Evidence

__all__ = ["proved"]


@contextmanager
def proved(
    controls: Sequence[Control], lanes: Lanes, *, device: Any, without: Lanes | None = None, group: Any = None
) -> Iterator[Lanes]:
    """`lanes` with all `controls` applied, after a look at what they change in what runs.

        with proved([GemmSmLimit(num_sms=108)], lanes, device=device) as lanes:
            ...  # launch lanes.comm on lanes.comm_stream, lanes.compute on lanes.compute_stream

    Runs the pair twice with the controls and twice without; the profiler takes a second or two. Controls go together
    (streams first, `parse_mechanism` sorts them), and each has to show its own effect.

    Args:
        controls: in the order in which to apply them.
        lanes: the pair; its collective in a process group that the controls have `configure`d.
        device: torch.device.
        without: the same pair with a plain process group and plain buffers, for controls of NCCL; None: `lanes`.
        group: process group whose ranks all call this; if any rank sees nothing, all of them raise. None: this process
            is alone.

    Raises:
        NoEffect: a control did nothing, on any rank; says what was asked, what ran and what to do. On exit and on
            errors everything is as it was.
        Unsupported: a control cannot work here, or the profiler saw nothing.
    """
    for control in controls:
        reason = control.available()
        if reason is not None:
            raise Unsupported(f"{control.name} cannot work here: {reason}")
    with ExitStack() as applied:
        shaped = lanes
        for control in controls:
            shaped = applied.enter_context(control.apply(shaped))
        clusters = any(isinstance(control, NcclCluster) for control in controls)
        seen = see(shaped, without=without or lanes, device=device, clusters=clusters)
        of_ranks = _of_ranks([control.verify(seen) for control in controls], group)
        for control, proofs in zip(controls, zip(*of_ranks, strict=True), strict=True):
            for proof in proofs:
                require(proof, fix=control.remedy)
        yield shaped


def _of_ranks(mine: list[Evidence], group: Any) -> list[list[Evidence]]:
    """What every rank saw, so that all of them come to the same verdict."""
    if group is None:
        return [mine]
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
