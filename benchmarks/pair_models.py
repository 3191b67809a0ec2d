"""Claim: each kind of pair is predicted by the model that misses least, of those that know it (`pair/together.py`).

Reads what `counterpoint measure` wrote: pairs by plain mechanisms, nothing limited. Every model predicts the time
together from the two times alone and the head start of the row. The first file is the one that the choice is made on;
the figures of `kept` are means of its rows, `waves` and `sums` were fitted to other pairs. All others are there to see
whether the choice holds.

    python benchmarks/pair_models.py results/pairs-4xh200.json results/reductions-4xh200.json \
        results/budget-pairs-4xh200.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
from provenance import provenance, read_measurement, write_table
from tables import print_table

from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.profile import Profile, profile_of
from counterpoint.pair.sm_split import SmLayout
from counterpoint.pair.together import NEED_SMS, REDUCTIONS, Model, Pair, model_for, together_us
from counterpoint.records.measurement import Measurement, Row
from counterpoint.tuning.fit import pair_of

ROOT = Path(__file__).resolve().parents[1]
MECHANISMS = ("nccl", "nccl_zero_cta", "zero_sm")
COLUMNS = (
    "measured", "mechanism", "collectives", "rows", "model", "mean error", "worst", "bias", "mean of orders", "apart",
    "chosen",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured row as the models see it."""

    row: Row
    pair: Pair
    profile: Profile

    def error(self, model: Model) -> float:
        """Return T predicted / T measured - 1."""
        return together_us(self.pair, self.profile, model) / self.row.together.us - 1


@dataclass(frozen=True, kw_only=True)
class Line:
    """How one model does on one kind of pair; `apart`: its mean distance from the chosen one."""

    measured: str
    mechanism: str
    collectives: str
    rows: int
    model: Model
    mean_error: float
    worst: float
    bias: float
    mean_of_orders: float
    apart: float
    chosen: bool

    def cells(self) -> tuple[str, ...]:
        """Return the line of the table."""
        shares = (f"{each:.1%}" for each in (self.mean_error, self.worst))
        means = (f"{self.bias:+.1%}", f"{self.mean_of_orders:.1%}", f"{self.apart:.1%}")
        names = (self.measured, self.mechanism, self.collectives, str(self.rows), self.model)
        return (*names, *shares, *means, "yes" if self.chosen else "")


def cases_of(measured: Measurement) -> Iterator[Case]:
    """Yield the rows by a plain mechanism that are not marked."""
    gpu = find_gpu(measured.environment.gpu)
    assert gpu is not None, f"{measured.environment.gpu} is not in machine/gpus.py"
    profile = profile_of(gpu.name)
    layout = SmLayout.even(gpu.sm.num_sms, profile.chip)
    for row in measured.rows:
        if row.mechanism not in MECHANISMS or row.marked is not None:
            continue
        heads = msgspec.structs.replace(profile.contention, head_start_us=row.head_start_us or 100.0)
        pair = pair_of(row, measured.environment.world_size, layout)
        yield Case(row=row, pair=pair, profile=msgspec.structs.replace(profile, contention=heads))


def models_of(mechanism: str, reduces: bool) -> tuple[Model, ...]:
    """Return the models that know such a pair: SMs are NCCL's, sums those of zero-SM reductions."""
    if mechanism in NEED_SMS:
        return ("kept", "waves")
    return ("kept", "sums") if mechanism == "zero_sm" and reduces else ("kept",)


def lines_of(name: str, cases: Sequence[Case]) -> Iterator[Line]:
    """Yield one line for each kind of pair and model."""
    kinds = dict.fromkeys((case.pair.mechanism, case.pair.collective in REDUCTIONS) for case in cases)
    for mechanism, reduces in sorted(kinds):
        mine = [
            case for case in cases if (case.pair.mechanism, case.pair.collective in REDUCTIONS) == (mechanism, reduces)
        ]
        chosen = model_for(mine[0].pair)
        for model in models_of(mechanism, reduces):
            errors = [case.error(model) for case in mine]
            yield Line(
                measured=name,
                mechanism=mechanism,
                collectives="reductions" if reduces else "others",
                rows=len(mine),
                model=model,
                mean_error=fmean(map(abs, errors)),
                worst=max(map(abs, errors)),
                bias=fmean(errors),
                mean_of_orders=fmean(map(abs, scenario_errors(mine, model))),
                apart=fmean(abs(error - case.error(chosen)) for case, error in zip(mine, errors, strict=True)),
                chosen=model == chosen,
            )


def scenario_errors(cases: Iterable[Case], model: Model) -> list[float]:
    """Return the error of the mean over launch orders, by scenario."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.row.scenario, []).append(case)
    return [
        fmean(together_us(case.pair, case.profile, model) for case in members)
        / fmean(case.row.together.us for case in members)
        - 1
        for members in found.values()
    ]


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "pair-models.json")
    asked = parser.parse_args()
    lines = [
        line
        for path in asked.measured
        for line in lines_of(path.name.partition(".")[0], list(cases_of(read_measurement(path))))
    ]
    table = [line.cells() for line in lines]
    print_table(COLUMNS, table, width=160)
    write_table(asked.out, COLUMNS, table, provenance=provenance(["counterpoint", "msgspec"]))


if __name__ == "__main__":
    main()
