"""Claim: the rule of `pair/choice.py` leaves about as many SMs to the sums of zero-SM collectives as is best.

Reads what `measure_suites.py reductions` wrote: every pair with the GEMM on all SMs and on four numbers fewer. A
pick counts by what was measured for it, in the mean over the launch orders. Nothing is fitted here; the rates of the
rule were read off the first such run (results/reductions-4xh200.json), so that another one is the proof.

    python benchmarks/measure_suites.py reductions --out results/reductions-4xh200.json
    python benchmarks/sum_sms.py results/reductions-4xh200.json     # prints a table, writes results/sum-sms.*
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from provenance import provenance, read_measurement, write_result
from tables import print_table

from counterpoint.errors import Misconfigured
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.profile import default_profile
from counterpoint.pair.choice import choose_gemm_sms
from counterpoint.pair.sm_split import SmLayout
from counterpoint.records.measurement import Measurement, Row
from counterpoint.tuning.fit import pair_of

ROOT = Path(__file__).resolve().parents[1]
NOISE = 0.01  # times this close are the same
COLUMNS = (
    "collective",
    "GEMM on",
    "pairs",
    "hidden, mean",
    "lowest order",
    "lowest pair",
    "within 1 %",
    "regret, mean",
    "max",
)
ALL = "all SMs"
RULE = "by rule"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One scenario: rows by SMs of the GEMM, in every order."""

    scenario: str
    collective: str
    pick: str
    by_sms: dict[str, list[Row]]

    def rows(self, sms: str) -> list[Row]:
        return self.by_sms[self.pick if sms == RULE else sms]

    def together_us(self, sms: str) -> float:
        return fmean(row.together.us for row in self.rows(sms))

    def regret(self, sms: str) -> float:
        """Beyond the fastest of all that were measured."""
        return self.together_us(sms) / min(map(self.together_us, self.by_sms)) - 1


def pairs_of(measured: Measurement, num_sms: int) -> list[Measured]:
    """Scenarios in which every limit was measured and is not marked."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in measured.rows:
        base, *settings = row.mechanism.split("+")
        limit = settings[0].removeprefix("gemm_sms=") if settings else ALL
        if base == "zero_sm" and row.marked is None and limit != "fit":
            found.setdefault(row.scenario, {}).setdefault(limit, []).append(row)
    most = max(map(len, found.values()), default=0)
    return [
        Measured(
            scenario=scenario,
            collective=by_sms[ALL][0].collective,
            pick=picked(by_sms[ALL][0], measured.environment.world_size, num_sms),
            by_sms=by_sms,
        )
        for scenario, by_sms in found.items()
        if len(by_sms) == most
    ]


def picked(row: Row, world_size: int, num_sms: int) -> str:
    """What the rule says, from what was measured alone."""
    found = choose_gemm_sms(pair_of(row, world_size, SmLayout.even(num_sms)), default_profile())
    return ALL if found.gemm_sms is None else str(found.gemm_sms)


def lines(pairs: Sequence[Measured]) -> Iterable[tuple[str, ...]]:
    """The table: for each collective the rule, then every number of SMs for all pairs alike."""
    for collective in dict.fromkeys(pair.collective for pair in pairs):
        mine = [pair for pair in pairs if pair.collective == collective]
        for sms in (RULE, *mine[0].by_sms):
            rows = [row for pair in mine for row in pair.rows(sms)]
            orders = {
                order: fmean(row.hidden for row in rows if row.order == order) for order in {row.order for row in rows}
            }
            regrets = [pair.regret(sms) for pair in mine]
            hidden = fmean(row.hidden for row in rows), min(orders.values()), min(row.hidden for row in rows)
            near = sum(regret <= NOISE for regret in regrets)
            shares = f"{fmean(regrets):.1%}", f"{max(regrets):.1%}"
            yield (collective, sms, str(len(mine)), *(f"{each:.2f}" for each in hidden), str(near), *shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "sum-sms.json")
    asked = parser.parse_args()
    measured = read_measurement(asked.measured)
    gpu = find_gpu(measured.environment.gpu)
    if gpu is None:
        raise Misconfigured(f"nothing is known about the GPU {measured.environment.gpu!r}")
    pairs = pairs_of(measured, gpu.sm.num_sms)
    table = list(lines(pairs))
    print_table(COLUMNS, table, width=140)
    picks = [{"scenario": pair.scenario, "pick": pair.pick, "regret": pair.regret(RULE)} for pair in pairs]
    record = {
        "provenance": provenance([]),
        "measured": asked.measured.name,
        "columns": COLUMNS,
        "rows": table,
        "picks": picks,
    }
    write_result(asked.out, record, COLUMNS, table)


if __name__ == "__main__":
    main()
