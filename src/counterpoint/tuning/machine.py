"""Measure this machine, and fit its profile (figures for predictions) to the measurement.

The suite `machine` (measurement/suites.py) measures; a pure function turns its rows into the groups of
`machine/profile.py`, each by the file that knows it:

    rates, nccl, nccl_rates                     fit/collectives.py
    efficiency, sums, contention, mechanisms    fit/matmuls.py: of efficiency some fields

`chip` is not measured. A group for which rows are missing is left out, and the profile says why (`left_out`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.profile import Profile, parse_profile, profile_of
from counterpoint.measurement import api
from counterpoint.processes import Progress
from counterpoint.records.measurement import Environment, Measurement
from counterpoint.tuning.fit import Fitted
from counterpoint.tuning.fit.collectives import fit_nccl, fit_nccl_rates, fit_rates
from counterpoint.tuning.fit.matmuls import fit_contention, fit_efficiency, fit_mechanisms, fit_sums

SUITE = "machine"
ROUNDS = 7
CPU = "CPU"  # name of the GPU in a profile of a machine without GPUs
_TEXT = 400  # characters of a text in a profile
FITS: dict[str, Callable[[Measurement, Profile], Fitted]] = {
    "rates": fit_rates, "nccl": fit_nccl, "nccl_rates": fit_nccl_rates, "sums": fit_sums, "contention": fit_contention,
    "efficiency": fit_efficiency,
}  # fmt: skip


def tune_machine(
    *, device: str = "cuda", world_size: int | None = None, timeout_s: float = 120.0, progress: Progress | None = None
) -> Profile:
    """Return the profile of this machine's GPUs (with gloo its CPUs), which are measured for up to two minutes.

    The arguments are as in `measure`. What was not measured is as shipped, and `Profile.note` names it; `profile_json`
    turns the profile into a file.

    Raises:
        Misconfigured: an option has a value that is not allowed here, or no group could be fitted.
        Unsupported, PeerTimeout: as in `measure`.
    """
    measured = api.measure(
        SUITE, device=device, world_size=world_size, rounds=ROUNDS, timeout_s=timeout_s, progress=progress
    )
    return fit_profile(measured, known=profile_of(measured.environment.gpu))


def fit_profile(measured: Measurement, *, known: Profile) -> Profile:
    """Return a profile fitted to rows of the suite `machine`, or of suites that have some of the same rows.

    `known` is the profile that ranks used when they measured: fits start from it, and groups without rows stay as
    shipped.

    Raises:
        Misconfigured: the rows suffice for no group, or a time is not above 0.
    """
    _check_times(measured)
    groups: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for group, fit in FITS.items():
        try:
            groups[group] = _sourced(fit(measured, known), measured.environment)
        except Misconfigured as error:
            left_out[group] = _why(error, measured)
    try:
        kept = fit_mechanisms(measured, known)
        groups["mechanisms"] = {name: _sourced(fitted, measured.environment) for name, fitted in kept.items()}
    except Misconfigured as error:
        left_out["mechanisms"] = _why(error, measured)
    if not groups:
        raise Misconfigured(f"nothing can be fitted: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
    content = {"gpu": _gpu(measured.environment), **groups, "left_out": left_out}
    return parse_profile(msgspec.json.encode(content), "the fitted profile")


def _check_times(measured: Measurement) -> None:
    """Raise Misconfigured for a time that is not positive and finite: fits divide by times and take logarithms."""
    alone = [(row.what, row.time) for row in measured.blocks]
    pairs = [
        (row.scenario, time)
        for row in measured.rows
        for time in (row.compute_alone, row.comm_alone, row.together, row.compute_together, row.comm_together)
    ]
    for what, time in (*alone, *pairs):
        if not time.per_rank_us or not all(0.0 < us < math.inf for us in (time.us, *time.per_rank_us)):
            raise Misconfigured(f"{printable(what)} in {time.us} µs cannot be; measure it again")


def _why(error: Misconfigured, measured: Measurement) -> str:
    """Return why a group is left out of the profile, with ranks' reasons for mechanisms that the error names."""
    words = re.split(r"[^\w+=]+", str(error))
    reasons = [f"{name}: {reason}" for name, reason in measured.unavailable.items() if name in words]
    return printable("; ".join([str(error), *reasons]))[:_TEXT]


def _sourced(fitted: Fitted, where: Environment) -> dict[str, Any]:
    """Return a group's fitted figures with their source: machine, command, fit, date and spread."""
    nccl = f", NCCL {where.nccl}" if where.nccl else ""
    source = f"{where.world_size} x {_gpu(where)}{nccl}: {fitted.said}; {' '.join(where.command)}"
    about = {"source": printable(source)[:_TEXT], "date": where.date[:10], "time_spread": fitted.spread}
    return {key: _rounded(each) for key, each in (fitted.figures | about).items()}


def _rounded(value: Any) -> Any:
    """Return figures rounded to four significant digits; more digits would not be reproducible."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _gpu(where: Environment) -> str:
    sheet = find_gpu(where.gpu)
    return sheet.name if sheet else where.gpu or CPU
