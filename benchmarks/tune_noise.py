"""Claim: one noisy measurement is enough: what `tune` chooses by it is, in nine of ten draws, within 2 % of the best.

    python benchmarks/tune_noise.py results/pairs-4xh200.json results/reductions-4xh200.json \
        results/forum-4xh200.json results/budget-pairs-4xh200.json

The choice reads one draw and is judged by the truth that it was drawn from: the stored medians of each pair by each
mechanism. A draw has 38 rounds, as `tune` has by default, each normal around the stored median, with the deviation
that p10 and p90 tell. Of its variance a part is common to all mechanisms of a round, as a drift of clocks is, and the
rest is each one's own. The rows do not say how large that part is, so none, half and nine tenths are shown. `medians`
is the rule for measurements that did not keep their rounds, `rounds` the one for those that did; both see the same
draws.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles

from provenance import provenance, read_measurement, write_table
from tables import print_table
from tune_pairs import NEAR, known_times, rows_of, share

from counterpoint.machine.profile import profile_of
from counterpoint.records.measurement import Timing
from counterpoint.records.tuning import LEAVE, StepPair, Tried
from counterpoint.tuning.decide import decide, standard_error
from counterpoint.tuning.experiment import against_stock, best_of

ROOT = Path(__file__).resolve().parents[1]
COMMON = (0.0, 0.5, 0.9)  # of the variance of a round, by all mechanisms alike
RULES = ("medians", "rounds")
ROUNDS = 38
STOCK = "nccl"
COLUMNS = (
    "from", "common noise", "rule", "pairs", "draws", "hit rate", "mean regret", "left", "slower than stock",
    "by more than 2 sigma", "gain overstated by",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NoisyPair:
    """One pair: what each mechanism takes in truth, and how much a round of it spreads."""

    group: str
    pair: StepPair
    us: dict[str, float]  # the truth, by mechanism
    deviation_us: dict[str, float]  # of one round
    listed: Sequence[str]  # the shortlist: what is drawn

    def drawn(self, draw: random.Random, common: float) -> list[tuple[Tried, tuple[float, ...]]]:
        """One measurement: each mechanism of the shortlist, and its rounds."""
        shared = [draw.gauss(0, math.sqrt(common)) for _ in range(ROUNDS)]
        own = math.sqrt(1 - common)
        found = []
        for name in self.listed:
            times = [max(0.0, self.us[name] + self.deviation_us[name] * (z + draw.gauss(0, own))) for z in shared]
            found.append((tried(name, times), tuple(times)))
        return found

    def error_of_difference(self, mechanism: str) -> float:
        """The standard error of the difference between a mechanism and stock, each by itself."""
        apart = math.hypot(self.deviation_us[mechanism], self.deviation_us[STOCK])
        return math.sqrt(math.pi / 2 / ROUNDS) * apart


def tried(name: str, times: Sequence[float]) -> Tried:
    """What a measurement says of times of one rank: `measurement.rounds.timing` without torch."""
    deciles = quantiles(times, n=10, method="inclusive")
    p10, p50, p90 = deciles[0], deciles[4], deciles[8]
    time = Timing(us=p50, p10_us=p10, p90_us=p90, rank=0, per_rank_us=(p50,), runs=len(times))
    return Tried(mechanism=name, us=p50, sigma_us=standard_error(time, len(times)), runs=len(times))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One choice, judged by the truth."""

    regret: float
    left: bool
    slower: bool  # than stock
    much_slower: bool  # by more than 2 sigma
    overstated: float | None  # gain as measured, less that in truth, over the time of stock; None: left


Judgements = dict[tuple[float, str], list[Judged]]
"""By part of common noise and rule."""


def noisy_pairs(path: Path) -> Iterator[NoisyPair]:
    """Yield each scenario and order of a measurement, with what was measured of it and can be believed."""
    measured = read_measurement(path)
    profile, rounds = profile_of(measured.environment.gpu), measured.rounds - measured.dropped_rounds
    ranks = measured.environment.world_size
    for rows in rows_of(measured).values():
        first = rows[0]
        pair = StepPair(
            operation=first.collective, compute=first.workload, bytes_per_rank=first.size_bytes // ranks, ranks=ranks,
            first=first.order,
        )  # fmt: skip
        times = {row.mechanism: row.together for row in rows if row.marked is None}
        runs = {name: time.runs or rounds for name, time in times.items()}
        yield NoisyPair(
            group=path.name.partition(".")[0],
            pair=pair,
            us={name: time.us for name, time in times.items()},
            deviation_us={
                name: standard_error(time, rounds) * math.sqrt(runs[name] / (math.pi / 2))
                for name, time in times.items()
            },
            listed=list(best_of(known_times(pair, profile, times), STOCK)),
        )


def judged(each: NoisyPair, draw: random.Random, common: float) -> dict[str, Judged]:
    """What both rules make of one draw."""
    found = each.drawn(draw, common)
    by_rule = {"medians": tuple(one for one, _ in found), "rounds": against_stock(found, STOCK)}
    return {rule: judge(each, by_rule[rule]) for rule in RULES}


def judge(each: NoisyPair, measured: Sequence[Tried]) -> Judged:
    """How good the choice is in truth."""
    chosen = decide(each.pair, measured, stock=STOCK)
    is_left = chosen.mechanism == LEAVE
    picked = STOCK if is_left else chosen.mechanism
    lost_us = each.us[picked] - each.us[STOCK]
    return Judged(
        regret=each.us[picked] / min(each.us.values()) - 1,
        left=is_left,
        slower=lost_us > 0,
        much_slower=lost_us > 2 * each.error_of_difference(picked),
        overstated=None if is_left else (chosen.stock_us - chosen.us + lost_us) / each.us[STOCK],
    )


def lines_of(group: str, pairs: int, draws: int, found: Judgements) -> Iterator[tuple[str, ...]]:
    """A line for each noise and rule."""
    for (common, rule), mine in found.items():
        overstated = [one.overstated for one in mine if one.overstated is not None]
        yield (
            group, f"{common:.0%}", rule, str(pairs), str(draws),
            share(*(one.regret <= NEAR for one in mine)), f"{fmean(one.regret for one in mine):.3%}",
            share(*(one.left for one in mine)), f"{fmean(one.slower for one in mine):.3%}",
            f"{fmean(one.much_slower for one in mine):.4%}", f"{fmean(overstated):.3%}",
        )  # fmt: skip


def judged_pairs(pairs: Sequence[NoisyPair], draws: int, seed: int) -> Judgements:
    """What both rules make of so many draws of each pair, by part of common noise and rule."""
    found: Judgements = {}
    for common in COMMON:
        draw = random.Random(f"{seed} {pairs[0].group} {common}")
        both = [judged(each, draw, common) for each in pairs for _ in range(draws)]
        found |= {(common, rule): [one[rule] for one in both] for rule in RULES}
    return found


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="+", help="files of counterpoint measure, with every mechanism")
    parser.add_argument("--draws", type=int, default=200, help="measurements of each pair")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "tune-noise.json")
    asked = parser.parse_args()
    table: list[tuple[str, ...]] = []
    every: Judgements = {}
    count = 0
    for path in asked.measured:
        pairs = list(noisy_pairs(path))
        found = judged_pairs(pairs, asked.draws, asked.seed)
        table += lines_of(pairs[0].group, len(pairs), asked.draws, found)
        every = {key: every.get(key, []) + mine for key, mine in found.items()}
        count += len(pairs)
    table += lines_of("all", count, asked.draws, every)
    print_table(COLUMNS, table, width=200)
    write_table(asked.out, COLUMNS, table, provenance=provenance(["counterpoint", "msgspec"]), seed=asked.seed)


if __name__ == "__main__":
    main()
