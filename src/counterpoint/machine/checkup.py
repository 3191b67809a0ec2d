"""From readings to a checkup: every check in the order of the report. Pure."""

from __future__ import annotations

from counterpoint.machine.checks_environment import environment
from counterpoint.machine.checks_gpus import check_gpus
from counterpoint.machine.checks_links import LINK_CHECKS
from counterpoint.machine.checks_network import NETWORK_CHECKS
from counterpoint.machine.checks_software import SOFTWARE_CHECKS, answers, torch_runtime
from counterpoint.machine.readings import Readings
from counterpoint.records.machine import Check, Checkup

__all__ = ["examine", "exit_code"]


def examine(readings: Readings, *, torch: bool = False) -> Checkup:
    """All checks of one machine.

    Args:
        readings: what it said.
        torch: whether torch was imported too (`--device-checks`); otherwise that check is left out.
    """
    names = [seen.name for seen in readings.gpus or readings.devices]
    checks = [check(readings) for check in (*LINK_CHECKS, *NETWORK_CHECKS, *SOFTWARE_CHECKS)]
    checks += [torch_runtime(readings)] if torch else []
    return Checkup(
        host=readings.host,
        gpus=tuple(names),
        driver=readings.nvml.driver if readings.nvml else None,
        checks=(*answers(readings), *check_gpus(readings), *checks, *environment(readings)),
    )


def exit_code(checks: tuple[Check, ...], *, strict: bool = False) -> int:
    """1 if there is a problem (or, when strict, a warning), else 0. What was not seen is not held against a machine."""
    wrong = {"problem", "warning"} if strict else {"problem"}
    return int(any(check.status in wrong for check in checks))
