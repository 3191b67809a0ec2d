"""Do these ranks belong to one run? What no run can show, in the order in which it can be seen."""

from __future__ import annotations

import numpy as np

from counterpoint.diagnose.digest import RankDigest
from counterpoint.diagnose.join import LOOSE_ENDS, Joined
from counterpoint.errors import BadTrace
from counterpoint.trace.clocks import Clocks

__all__ = ["check_clocks", "check_collectives"]

_APART_S = 600.0  # clocks of hosts in one job never differ by more
_DRIFT_PPM = 1000.0  # nor do they run faster or slower by more
_SLACK_US = 200.0  # what clocks may be off after alignment
_FEW = 4  # collectives: too few to judge by


def check_collectives(digests: list[RankDigest], joined: Joined) -> None:
    """Before the clocks are known.

    Raises:
        BadTrace: recorded too far apart; the same id for different collectives; groups in common but no collective.
    """
    origin = np.array([d.origin_ns for d in digests], np.float64)
    apart = (origin.max() - origin.min()) / 1e9
    if apart > _APART_S:
        raise _different(digests, int(origin.argmax()), f"recorded {apart:.0f} s after {digests[0].path}")
    there = joined.row >= 0
    shared = there.sum(axis=1) >= 2
    by_id = np.array([by in ("seq", "comms_id") for by in joined.by], bool)
    if joined.mismatched >= 3 and joined.mismatched > 0.5 * int((shared & by_id).sum()):
        what = f"{joined.mismatched} collectives with the same id differ in operation or size"
        raise _different(digests, len(digests) - 1, what)
    awaited = joined.expected >= 2
    for column in range(1, len(digests)):
        own = there[:, column] & awaited
        if own.sum() >= _FEW and (awaited & ~there[:, column]).sum() >= _FEW and not (own & shared).any():
            raise _different(digests, column, "none of its collectives is one of the other ranks'")


def check_clocks(digests: list[RankDigest], joined: Joined, clocks: Clocks) -> None:
    """After alignment: a collective cannot end anywhere before it has begun everywhere.

    Args:
        digests: the ranks.
        joined: with starts and ends on one clock.
        clocks: how they got there.

    Raises:
        BadTrace: a quarter of the collectives did the impossible, or a clock would have to run impossibly fast.
    """
    drift = np.abs(clocks.drift) * 1e6
    if drift.max(initial=0.0) > _DRIFT_PPM:
        what = f"its clock would have to be off by {drift.max():.0f} ppm to fit the others'"
        raise _different(digests, int(drift.argmax()), what)
    judged = (joined.row >= 0).sum(axis=1) >= 2
    judged &= np.array([op not in LOOSE_ENDS for op in joined.op], bool)
    if judged.sum() < _FEW or digests[0].device.name == "cpu":
        return
    start, end = joined.start[judged], joined.end[judged]
    impossible = np.nanmax(start, axis=1) > np.nanmin(end, axis=1) + _SLACK_US
    if impossible.mean() > 0.25:
        last = np.bincount(np.nanargmax(start[impossible], axis=1), minlength=len(digests))
        what = f"{int(impossible.sum())} of {int(judged.sum())} collectives would end before all ranks have begun them"
        raise _different(digests, int(last.argmax()), what)


def _different(digests: list[RankDigest], column: int, what: str) -> BadTrace:
    return BadTrace(f"ranks of different runs: {what}; give the traces of one run", path=digests[column].path)
