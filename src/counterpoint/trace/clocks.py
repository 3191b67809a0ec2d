"""Put all ranks on one clock, estimated from collectives, since ranks finish a collective almost at once.

Offsets (and drifts, where the trace is long enough to show one) are fitted robustly to the ends of joined collectives.
An offset smaller than the spread of those ends counts as zero, so clocks of ranks on one host are not changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from counterpoint.trace.timeline import F64

RESOLUTION_US = 100.0  # ranks of one host end a collective up to 60 µs apart, always in the same order (8 x H200)
_DRIFT_US = 12.0  # a drift that moves the ends by less over the whole trace counts as zero
_SWEEPS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Clocks:
    """Holds the clock of each rank: own clock = reference clock + offset + drift * (reference clock - pivot).

    offset and uncertainty in µs at the pivot; NaN if no collective connects a rank to the reference (the lowest rank).
    """

    offset: F64
    drift: F64
    uncertainty: F64
    pivot: float

    def corrected(self, rank_index: int, at: F64) -> F64:
        """Convert the times `at` of one rank to the reference clock; leave them unchanged if the offset is unknown."""
        offset, drift = self.offset[rank_index], self.drift[rank_index]
        if not np.isfinite(offset):
            return at
        corrected: F64 = at - offset - drift * (at - offset - self.pivot) / (1.0 + drift)
        return corrected


def align_clocks(end: F64) -> Clocks:
    """Return clocks fitted to `end` [collectives, ranks]: µs at which synchronising collectives end; NaN: absent."""
    ranks = end.shape[1]
    offset = _first_guess(end)
    known = np.isfinite(offset)
    usable = end[:, known]
    usable = usable[np.isfinite(usable).sum(axis=1) >= 2]
    drift, uncertainty = np.zeros(ranks), np.full(ranks, np.nan)
    uncertainty[0] = 0.0
    if not len(usable):
        return Clocks(offset=offset, drift=drift, uncertainty=uncertainty, pivot=0.0)
    local = usable - offset[known]
    pivot = float(np.nanmedian(local))
    residual, shift, slope = _polish(local, pivot)
    count = np.isfinite(residual).sum(axis=0)
    deviation = 1.4826 * np.nanmedian(np.abs(residual), axis=0)
    error = deviation / np.sqrt(np.maximum(count, 1)) * 1.25
    error[0] = 0.0
    total = offset[known] + shift  # the reference's shift is 0
    common = one_per_host(total, slope, RESOLUTION_US + 3 * error)
    offset[known], drift[known] = common, slope
    uncertainty[known] = np.maximum(error, np.abs(total - common))
    return Clocks(offset=offset, drift=drift, uncertainty=uncertainty, pivot=pivot)


def one_per_host(offset: F64, slope: F64, resolution: F64) -> F64:
    """Return the offsets (µs), ones closer than `resolution` set to their median, relative to the reference clock.

    Ranks with such offsets are on one host. They leave a ring in the same order in every collective, which must not
    count as a difference of clocks. Clocks that drift are not grouped, and a chain of close offsets that is longer than
    `resolution` stays as it is: it is of several hosts.
    """
    steady = np.flatnonzero(slope == 0.0)
    order = steady[np.argsort(offset[steady], kind="stable")]
    common = offset.copy()
    reference = 0.0
    for host in np.split(order, np.flatnonzero(np.diff(offset[order]) > resolution[order][1:]) + 1):
        if len(host) and np.ptp(offset[host]) <= resolution[host].max():
            common[host] = np.median(offset[host])
            reference = common[0] if 0 in host else reference
    return common - reference


def _first_guess(end: F64) -> F64:
    """Return estimated offsets of all clocks (µs): median differences of ends of collectives that ranks share.

    NaN where no collective connects a rank to the first one.
    """
    ranks = end.shape[1]
    there = np.isfinite(end).astype(np.float64)
    shared = there.T @ there
    offset = np.full(ranks, np.nan)
    if not ranks:
        return offset
    offset[0] = 0.0
    best, via = shared[0].copy(), np.zeros(ranks, int)
    for _ in range(ranks - 1):
        open_ = np.where(np.isnan(offset), best, -1.0)
        rank = int(np.argmax(open_))
        if open_[rank] <= 0:
            break
        offset[rank] = offset[via[rank]] + float(np.nanmedian(end[:, rank] - end[:, via[rank]]))
        closer = shared[rank] > best
        best, via = np.where(closer, shared[rank], best), np.where(closer, rank, via)
    return offset


def _polish(local: F64, pivot: float) -> tuple[F64, F64, F64]:
    """Return residuals (µs), offsets (µs) and drifts, fitted by medians in turn; drifts below the noise become 0."""
    shift, slope = np.zeros(local.shape[1]), np.zeros(local.shape[1])
    span = float(np.nanmax(local) - np.nanmin(local)) if np.isfinite(local).any() else 0.0
    residual = local
    for sweep in range(_SWEEPS):
        corrected = local - shift - slope * (local - pivot)
        residual, step = _apart(corrected)
        shift = shift + step
        if sweep >= 2 and len(local) >= 8:
            tilt = _slopes(local - pivot, residual)
            tilt -= tilt[0]
            slope = slope + tilt
        if sweep >= 4 and float(np.abs(step).max(initial=0.0)) < 1e-3:
            break
    noise = 1.4826 * np.nanmedian(np.abs(residual), axis=0)
    seen = np.abs(slope) * span >= _DRIFT_US + 6 * noise
    drifted = corrected - np.nanmedian(corrected, axis=1, keepdims=True) + slope * (local - pivot)
    for r in np.flatnonzero(seen):
        seen[r] = _steady(local[:, r] - pivot, drifted[:, r], float(slope[r]))
    slope[~seen] = 0.0
    corrected = local - slope * (local - pivot)
    for _ in range(_SWEEPS):
        residual, step = _apart(corrected - shift)
        shift = shift + step
        if float(np.abs(step).max(initial=0.0)) < 1e-3:
            break
    return residual, shift, slope


def _apart(end: F64) -> tuple[F64, F64]:
    """Return ends minus the collective's median end (µs), and each rank's median of these, relative to rank 0."""
    residual = end - np.nanmedian(end, axis=1, keepdims=True)
    step = np.nanmedian(residual, axis=0)
    return residual, step - step[0]


def _steady(x: F64, y: F64, slope: float) -> bool:
    """Return whether both halves of the trace show the drift; if not, varying lateness of the rank looks like drift."""
    middle = float(np.nanmedian(x))
    halves = [_slope(x[part], y[part]) for part in (x <= middle, x > middle)]
    return all(half * np.sign(slope) > 0.5 * abs(slope) for half in halves)


def _slopes(x: F64, y: F64) -> F64:
    """Return the median slope of each column of `y` over `x`; columns without NaN are computed together."""
    slope = np.empty(x.shape[1])
    whole = np.isfinite(x).all(axis=0) & np.isfinite(y).all(axis=0)
    half = len(x) // 2
    order = np.argsort(x[:, whole], axis=0, kind="stable")
    dx, dy = (np.take_along_axis(v[:, whole], order, 0) for v in (x, y))
    dx, dy = (v[half:] - v[: len(v) - half] for v in (dx, dy))
    apart = (dx > 0).all(axis=0)
    together = np.flatnonzero(whole)[apart] if half >= 4 else np.empty(0, np.int64)
    slope[together] = np.median(dy[:, apart] / dx[:, apart], axis=0) if len(together) else 0.0
    for r in np.setdiff1d(np.arange(len(slope)), together).tolist():
        slope[r] = _slope(x[:, r], y[:, r])
    return slope


def _slope(x: F64, y: F64) -> float:
    """Return the median slope of `y` over `x` in pairs of points half the range apart (similar to Theil-Sen)."""
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = x[keep], y[keep]
    half = len(x) // 2
    if half < 4:
        return 0.0
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    dx = x[half:] - x[: len(x) - half]
    dy = y[half:] - y[: len(y) - half]
    good = dx > 0
    return float(np.median(dy[good] / dx[good])) if good.any() else 0.0
