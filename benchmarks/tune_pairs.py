"""Claim: what `tune` chooses for a pair is the fastest mechanism, or within 2 % of it, in nine of ten held-out pairs.

From rows that `counterpoint measure` kept, where every mechanism was measured:

    python benchmarks/tune_pairs.py results/pairs-4xh200.json results/reductions-4xh200.json \
        results/forum-4xh200.json results/budget-pairs-4xh200.json

Here shortlist and decision see only the mechanisms of a file, and the decision reads the rows that it is judged by: so
this judges the model that makes the shortlist, and the bar of 2 sigma. Its constants were set on `pairs`, `reductions`,
`forum` and `blocks`; `budget-pairs` was held out.

On GPUs, or with gloo on CPUs: random pairs (all collectives, matmuls that depend on them, all orders), measured by
every mechanism, then chosen by `counterpoint.tune` in ranks and rounds of its own:

    python benchmarks/tune_pairs.py --pairs 24 --out results/tune-pairs-2xh200.json
    python benchmarks/tune_pairs.py --suite conccl --suite resource-aware --out results/tune-suites-2xh200.json

The table has the mean part of the ideal gain by stock and as chosen, and the mean gain over stock; below these suites
is what their papers report.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import msgspec
from provenance import gpu_provenance, provenance, read_measurement, write_result
from tables import print_table

from counterpoint.machine.driver import visible_gpus
from counterpoint.machine.profile import Profile, profile_of
from counterpoint.measurement.api import measure, measure_parts
from counterpoint.pair.choice import ORDERS
from counterpoint.records.measurement import Measurement, Row
from counterpoint.records.tuning import LEAVE, StepPair, Tried, TunedPair
from counterpoint.tuning.api import tune
from counterpoint.tuning.decide import decide, standard_error
from counterpoint.tuning.experiment import MOST, Predicted, best_of, part_of, shortlist, times_of
from counterpoint.tuning.pairs import stock_of
from counterpoint.tuning.predictions import predicted_times

ROOT = Path(__file__).resolve().parents[1]
NEAR = 0.02  # of the best: as good
FIT = "zero_sm+gemm_sms=fit"  # a number of SMs that the rows do not name
COLUMNS = (
    "from", "pairs", "in shortlist", "hit rate", "by the model alone", "mean regret", "worst",
    "worst against stock, sigma", "left", "stock", "best single", "its regret", "of ideal by stock", "as chosen",
    "gain over stock",
)  # fmt: skip
PAPERS = {  # what they report: part of the ideal gain, gain over the stock library
    "conccl": ("42% without, 72% with copy engines", ""),  # arXiv 2412.14335
    "resource-aware": ("", "25.5%"),  # arXiv 2606.09200
}
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_gather_matmul", "matmul_reduce_scatter")
SIZES = {"cuda": (512, 16384), "cpu": (64, 256)}  # of a matmul
RATIOS = (0.1, 4.0)  # bytes of a collective that takes so many times as long as its matmul, by the model
CPU_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pair, what every mechanism takes, and what was chosen."""

    group: str
    pair: StepPair
    times: dict[str, Tried]  # that can be believed
    listed: Predicted  # the shortlist
    chosen: TunedPair
    stock: str
    of_ideal: dict[str, float] = field(default_factory=dict)  # by mechanism

    @property
    def picked(self) -> str:
        """The mechanism that runs."""
        return self.stock if self.chosen.mechanism == LEAVE else self.chosen.mechanism

    @property
    def predicted(self) -> str:
        """The mechanism that the model would take without a measurement."""
        return min(self.listed, key=lambda mechanism: self.listed[mechanism] or 0.0)

    def regret(self, mechanism: str) -> float:
        """What a mechanism takes more than the best; one that was not measured here is taken for stock."""
        best_us = min(each.us for each in self.times.values())
        return self.times.get(mechanism, self.times[self.stock]).us / best_us - 1

    @property
    def against_stock(self) -> float:
        """How many sigma the choice is slower than stock."""
        mine, stock = self.times.get(self.picked, self.times[self.stock]), self.times[self.stock]
        return (mine.us - stock.us) / max(math.hypot(mine.sigma_us, stock.sigma_us), 1e-9)


def stored_cases(path: Path, profile: Profile | None = None) -> Iterator[Case]:
    """Yield a case for each scenario and order of a measurement, predicted by a profile, None: the shipped one."""
    measured = read_measurement(path)
    profile = profile or profile_of(measured.environment.gpu)
    rounds = measured.rounds - measured.dropped_rounds
    for rows in rows_of(measured).values():
        first = rows[0]
        ranks = measured.environment.world_size
        pair = StepPair(
            operation=first.collective, compute=first.workload, bytes_per_rank=first.size_bytes // ranks, ranks=ranks,
            first=first.order,
        )  # fmt: skip
        times = {row.mechanism: tried(row, rounds) for row in rows if row.marked is None}
        listed = best_of(known_times(pair, profile, times), "nccl")
        chosen = decide(pair, [times[mechanism] for mechanism in listed], stock="nccl")
        yield Case(
            group=path.name.partition(".")[0],
            pair=pair,
            times=times,
            listed=listed,
            chosen=chosen,
            stock="nccl",
            of_ideal={row.mechanism: row.ideal_fraction for row in rows},
        )


def rows_of(measured: Measurement) -> dict[tuple[str, str], list[Row]]:
    """The rows of each scenario and order."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in measured.rows:
        found.setdefault((row.scenario, row.order), []).append(row)
    return found


def tried(row: Row, rounds: int) -> Tried:
    """The time of a row with its error."""
    return Tried(
        mechanism=row.mechanism, us=row.together.us, sigma_us=standard_error(row.together, rounds), runs=rounds
    )


def known_times(pair: StepPair, profile: Profile, measured: Iterable[str]) -> dict[str, float]:
    """What the model says of the mechanisms that were measured; `fit` is one of the others where they are not there."""
    there, predicted = set(measured), predicted_times(pair, profile)
    zero_sm = {name: us for name, us in predicted.items() if name.startswith("zero_sm")}
    if FIT in there and len(there & zero_sm.keys()) == 1:
        predicted[FIT] = min(zero_sm.values())
    return {name: us for name, us in predicted.items() if name in there}


def measured_cases(pairs: Sequence[StepPair], asked: argparse.Namespace) -> Iterator[Case]:
    """Measure pairs by every mechanism, have them tuned, and yield a case for each."""
    profile, ranks = profile_here(asked.device), pairs[0].ranks
    every = {part_of(pair, ()).name: every_mechanism(pair, profile, asked.device) for pair in pairs}
    parts = {name: part_of(pair, every[name]) for pair in pairs for name in [part_of(pair, ()).name]}
    truth = measure_parts(
        "tune-pairs", tuple(parts.values()), device=asked.device, world_size=ranks, rounds=asked.rounds, timeout_s=300.0
    )
    tuned = tune(pairs, device=asked.device, world_size=ranks, rounds=asked.rounds, budget_s=asked.budget)
    for pair, chosen in zip(pairs, tuned.pair, strict=True):
        times = {each.mechanism: each for each in times_of(pair, truth).tried if each.marked is None}
        stock = stock_of(pair, asked.device)
        if stock in times and chosen.tried:
            listed = shortlist(pair, profile, device=asked.device)
            yield Case(group=pair.operation, pair=pair, times=times, listed=listed, chosen=chosen, stock=stock)


def suite_cases(suite: str, asked: argparse.Namespace) -> Iterator[Case]:
    """Measure a suite by its own mechanisms, have its pairs tuned as launched together, and yield a case for each."""
    truth = measure(suite, device=asked.device, world_size=asked.ranks, rounds=asked.rounds)
    ranks = truth.environment.world_size
    rows = {key: mine for key, mine in rows_of(truth).items() if key[1] == "together"}
    pairs = [
        StepPair(
            operation=mine[0].collective, compute=mine[0].workload, bytes_per_rank=mine[0].size_bytes // ranks,
            ranks=ranks, first=mine[0].order,
        )
        for mine in rows.values()
    ]  # fmt: skip
    tuned = tune(pairs, device=asked.device, world_size=ranks, rounds=asked.rounds, budget_s=asked.budget)
    profile = profile_here(asked.device)
    for mine, pair, chosen in zip(rows.values(), pairs, tuned.pair, strict=True):
        if not chosen.tried:
            continue
        stock = stock_of(pair, asked.device)
        times = {row.mechanism: tried(row, truth.rounds - truth.dropped_rounds) for row in mine if row.marked is None}
        times |= {each.mechanism: each for each in chosen.tried if each.mechanism not in times and not each.marked}
        serial_us, ideal_us = mine[0].serial_us, max(mine[0].compute_alone.us, mine[0].best_comm_alone_us)
        of_ideal = {name: (serial_us / each.us - 1) / (serial_us / ideal_us - 1) for name, each in times.items()}
        listed = shortlist(pair, profile, device=asked.device)
        yield Case(
            group=suite, pair=pair, times=times, listed=listed, chosen=chosen, stock=stock, of_ideal=of_ideal
        )  # fmt: skip


def profile_here(device: str) -> Profile:
    """The figures that `tune` goes by on this machine."""
    return profile_of(visible_gpus()[0] if device == "cuda" else None)


def every_mechanism(pair: StepPair, profile: Profile, device: str) -> tuple[str, ...]:
    """All that the model knows of, or all that runs on CPUs."""
    if device == "cuda":
        return tuple(predicted_times(pair, profile))
    return tuple(shortlist(pair, profile, device=device, most=99))


def random_pairs(asked: argparse.Namespace) -> list[StepPair]:
    """Pairs that nothing was fitted on: random shapes, operations in turn, random orders and lengths."""
    draw = random.Random(asked.seed)
    return [random_pair(draw, OPERATIONS[place % len(OPERATIONS)], asked) for place in range(asked.pairs)]


def random_pair(draw: random.Random, operation: str, asked: argparse.Namespace) -> StepPair:
    """One pair: sizes of its matmul are log-uniform multiples, the collective 0.1 to 4 times as long."""
    ranks, (low, high) = asked.ranks, SIZES[asked.device]
    grain = low // 4
    m, n, k = (max(grain, round(low * (high / low) ** draw.random() / grain) * grain) for _ in range(3))
    dtype, itemsize = ("bfloat16", 2) if asked.device == "cuda" else ("float32", 4)
    if "matmul" in operation:
        m = -(-m // (128 * ranks)) * 128 * ranks
        moved = m * (k if operation == "all_gather_matmul" else n) * itemsize // ranks
        compute = f"gemm {m}x{n}x{k}"
        return StepPair(operation=operation, compute=compute, bytes_per_rank=moved, ranks=ranks, dtype=dtype)
    size = CPU_BYTES
    if asked.device == "cuda":
        ratio = RATIOS[0] * (RATIOS[1] / RATIOS[0]) ** draw.random()
        rates = profile_here("cuda").nccl_rates
        gemm_us = 2 * m * n * k / 700e6
        size = max(1 << 16, int((ratio * gemm_us - rates.latency_us) * rates.bus_gb_per_s["all_gather"] * 1000))
    return StepPair(
        operation=operation, compute=f"gemm {m}x{n}x{k}", bytes_per_rank=size // ranks // 4096 * 4096 or 4096,
        ranks=ranks, dtype=dtype, first=draw.choice(ORDERS),
    )  # fmt: skip


def line(group: str, cases: Sequence[Case]) -> tuple[str, ...]:
    """One line of the table."""
    listed = [min(case.regret(mechanism) for mechanism in case.listed if mechanism in case.times) for case in cases]
    by_model = [case.regret(case.predicted) for case in cases]
    regrets = [case.regret(case.picked) for case in cases]
    names = dict.fromkeys(name for case in cases for name in case.times)
    single = {name: fmean(case.regret(name) for case in cases) for name in names}
    best = min(single, key=single.__getitem__)
    by_stock = [case.of_ideal[case.stock] for case in cases if case.stock in case.of_ideal]
    as_chosen = [case.of_ideal[case.picked] for case in cases if case.picked in case.of_ideal]
    gains = [case.times[case.stock].us / case.times.get(case.picked, case.times[case.stock]).us - 1 for case in cases]
    return (
        group, str(len(cases)), near(listed), near(regrets), near(by_model), f"{fmean(regrets):.2%}",
        f"{max(regrets):.1%}", f"{max(case.against_stock for case in cases):+.1f}",
        str(sum(case.chosen.mechanism == LEAVE for case in cases)),
        f"{fmean(case.regret(case.stock) for case in cases):.1%}", best, f"{single[best]:.1%}",
        share(*by_stock), share(*as_chosen), f"{fmean(gains):.1%}",
    )  # fmt: skip


def near(regrets: Sequence[float]) -> str:
    """Which part is within 2 % of the best."""
    return share(*(regret <= NEAR for regret in regrets))


def share(*parts: float) -> str:
    """The mean of parts in per cent; nothing where there is none."""
    return f"{fmean(parts):.1%}" if parts else ""


def table_of(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """A line for each group and, where it has several, for each of its operations, and one for all."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        for name in (case.group, f"{case.group}: {case.pair.operation}"):
            groups.setdefault(name, []).append(case)
    parts = {name for name, mine in groups.items() if len(mine) < len(groups[mine[0].group])}
    lines = [line(name, mine) for name, mine in groups.items() if name in parts or name == mine[0].group]
    lines += [paper(name) for name in groups if name in PAPERS]
    return [*lines, line("all", cases)] if cases else []


def paper(suite: str) -> tuple[str, ...]:
    """The line of what a paper reports of its own machine."""
    of_ideal, gain = PAPERS[suite]
    return (f"{suite}: its paper", *[""] * (len(COLUMNS) - 3), of_ideal, gain)


def main() -> None:
    """Print the table, and write it with every choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="*", help="files of counterpoint measure, with every mechanism")
    parser.add_argument("--suite", action="append", default=[], help="measure and tune this suite")
    parser.add_argument("--pairs", type=int, default=24, help="random pairs to measure, where no file is given")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of tune")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "tune-stored-pairs.json")
    asked = parser.parse_args()
    if asked.measured:
        cases = [case for path in asked.measured for case in stored_cases(path)]
    elif asked.suite:
        cases = [case for suite in asked.suite for case in suite_cases(suite, asked)]
    else:
        cases = list(measured_cases(random_pairs(asked), asked))
    table = table_of(cases)
    print_table(COLUMNS, table, width=200)
    packages = ["counterpoint", "msgspec"]
    on_gpus = not asked.measured and asked.device == "cuda"
    origin = gpu_provenance(packages, world_size=asked.ranks) if on_gpus else provenance(packages)
    choices = [
        {
            "group": case.group,
            "pair": msgspec.to_builtins(case.pair),
            "listed": list(case.listed),
            "picked": case.picked,
            "regret": round(case.regret(case.picked), 4),
            "best": min(case.times, key=lambda name: case.times[name].us),
        }
        for case in cases
    ]  # fmt: skip
    record = {"provenance": origin, "most": MOST, "columns": COLUMNS, "rows": table, "choices": choices}
    write_result(asked.out, record, COLUMNS, table)


if __name__ == "__main__":
    main()
