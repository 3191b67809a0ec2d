"""Turn readings into a checkup: every check in the order of the report."""

from __future__ import annotations

from counterpoint.machine.checks.environment import environment
from counterpoint.machine.checks.gpus import check_gpus
from counterpoint.machine.checks.links import LINK_CHECKS
from counterpoint.machine.checks.software import SOFTWARE_CHECKS, answers, torch_runtime
from counterpoint.machine.checks.verdict import fine, not_seen
from counterpoint.machine.profile import Profile, shipped_profile
from counterpoint.machine.readings import Readings
from counterpoint.records.machine import Check, Checkup

__all__ = ["examine", "exit_code"]


def examine(readings: Readings, *, torch: bool = False, profile: Profile | None = None) -> Checkup:
    """Return all checks of one machine.

    Args:
        readings: what it said.
        torch: whether torch was imported too (`--device-checks`); otherwise that check is left out.
        profile: what was measured on such GPUs; None: what is shipped.
    """
    names = [seen.name for seen in readings.gpus or readings.devices]
    profile = profile or shipped_profile(names[0] if names else None)
    checks = [check(readings) for check in (*LINK_CHECKS, *SOFTWARE_CHECKS)]
    checks += [torch_runtime(readings)] if torch else []
    checks += [_profile(names, profile)]
    return Checkup(
        host=readings.host,
        gpus=tuple(names),
        driver=readings.nvml.driver if readings.nvml else None,
        checks=(*answers(readings), *check_gpus(readings), *checks, *environment(readings, profile)),
    )


def _profile(names: list[str], profile: Profile) -> Check:
    """Say whether the figures that tunings, crossovers and plans go by were measured on such a GPU."""
    if not names:
        return not_seen("profile", "no GPU whose figures could be looked up")
    return fine("profile", str(profile), digest=profile.digest)


def exit_code(checks: tuple[Check, ...], *, strict: bool = False) -> int:
    """Return 1 if there is a problem (or, when strict, a warning), else 0; what was not seen does not count."""
    wrong = {"problem", "warning"} if strict else {"problem"}
    return int(any(check.status in wrong for check in checks))
