"""Claim: the budget rule finds the best division of the SMs, on pairs it was not fitted on.

Reads what `measure_suites.py budget` wrote: curves from the building blocks, pairs from the rows. Contention is
fitted on every second workload, and on the one that the rule was designed on, at every second length of the collective;
all other pairs are held out. A pick counts by what was measured for it, never by what was predicted. `--unseen` judges
the same fit on the pairs of another run, of which nothing is fitted.

    python benchmarks/measure_suites.py budget --out results/budget-pairs-4xh200.json
    counterpoint measure forum --out results/forum-4xh200.json
    python benchmarks/budget_rule.py results/budget-pairs-4xh200.json --unseen results/forum-4xh200.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from provenance import provenance, read_measurement, write_result
from tables import print_table

from counterpoint.errors import Misconfigured
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.profile import Contention, default_profile
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.choice import ORDERS, Objective, choose_split
from counterpoint.pair.curves import Curves, GemmCurve, curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.pair.together import Product
from counterpoint.records.measurement import BlockRow, Measurement, Order, Row
from counterpoint.tuning.fit.matmuls import contention_of, error_of_contention

ROOT = Path(__file__).resolve().parents[1]
NOISE = 0.01  # two times this close are the same: `within 1 %` counts such a pick as a hit, `hits` does not
STOCK = SmSplit()
DESIGNED_ON = frozenset({"gemm 8192x8192x8192"})  # its rows were in view when the rule was made: it cannot be new
COLUMNS = ("pairs", "policy", "n", "hits", "within 1 %", "regret, mean", "regret, max")

Key = float | int  # of a length: the ratio asked for, else bytes


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One scenario with every division of the SMs that was measured in all orders and is not marked."""

    scenario: str
    workload: str
    collective: str
    size_bytes: int
    length: Key
    together_us: Mapping[SmSplit, Mapping[Order, float]]

    def cost_us(self, choice: SmSplit, orders: Sequence[Order], objective: Objective) -> float:
        """As measured."""
        times = [self.together_us[choice][order] for order in orders]
        return fmean(times) if objective == "mean" else max(times)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Every second workload and every second length, in sorted order, beginning with the first, is fitted.

    So is the workload that the rule was designed on, wherever it stands.
    """

    workloads: frozenset[str]
    lengths: frozenset[Key]

    def group(self, workload: str, length: Key) -> str:
        """`fitted`, or what is new about a pair."""
        new_workload, new_length = workload not in self.workloads, length not in self.lengths
        if new_workload and new_length:
            return "new GEMM and length"
        return "new GEMM" if new_workload else "new length" if new_length else "fitted"


@dataclass(frozen=True, kw_only=True)
class Score:
    """One policy over some pairs. `hits`: its pick measured best; `near`: within 1 % of the best."""

    pairs: str
    policy: str
    count: int
    hits: float
    near: float
    mean_regret: float
    max_regret: float


def length_of(row: Row) -> Key:
    return row.size_bytes if row.ratio is None else row.ratio


def pairs_of(rows: Iterable[Row], curves: Curves) -> tuple[list[Pair], list[str]]:
    """Pairs in the order of the rows, and what was left out: marked, not in all orders, or not on the curves.

    A scenario of several sizes (of several runs, each of which makes the length fit) is left out whole.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.scenario, []).append(row)
    pairs, left_out = [], []
    for scenario, members in found.items():
        if len({row.size_bytes for row in members}) > 1:
            left_out.append(f"{scenario}: whole, measured at several sizes, which cannot be compared")
            continue
        times: dict[SmSplit, dict[Order, float]] = {}
        for row in members:
            choice = SmSplit.of(row.mechanism)
            if choice is not None and row.marked is None:
                times.setdefault(choice, {})[row.order] = row.together.us
        first = members[0]
        whole = {
            choice: by_order
            for choice, by_order in times.items()
            if set(by_order) == set(ORDERS) and curves.cover(first.workload, first.collective, first.size_bytes, choice)
        }
        dropped = sorted({row.mechanism for row in members} - {choice.mechanism for choice in whole})
        left_out += [f"{scenario}: {mechanism}" for mechanism in dropped]
        if STOCK not in whole or len(whole) < 2:
            left_out.append(f"{scenario}: whole, without plain nccl there is nothing to compare with")
            continue
        pairs.append(
            Pair(
                scenario=scenario,
                workload=first.workload,
                collective=first.collective,
                size_bytes=first.size_bytes,
                length=length_of(first),
                together_us=whole,
            )
        )
    return pairs, left_out


def split_of(pairs: Sequence[Pair]) -> Split:
    """Raises Misconfigured if nothing would be held out."""
    workloads, lengths = sorted({pair.workload for pair in pairs}), sorted({pair.length for pair in pairs})
    if len(workloads) < 2 or len(lengths) < 2:
        raise Misconfigured(f"{len(workloads)} workloads at {len(lengths)} lengths; at least 2 of each are needed")
    fitted = {*workloads[::2], *DESIGNED_ON.intersection(workloads)}
    return Split(workloads=frozenset(fitted), lengths=frozenset(lengths[::2]))


Policy = Callable[[Pair], SmSplit]


def regret(pair: Pair, pick: SmSplit, orders: Sequence[Order], objective: Objective) -> float:
    """T of the pick / T of the best - 1, both as measured."""
    best = min(pair.cost_us(choice, orders, objective) for choice in pair.together_us)
    return pair.cost_us(pick, orders, objective) / best - 1.0


def best_fixed(pairs: Sequence[Pair], orders: Sequence[Order], objective: Objective) -> SmSplit:
    """The one setting with the least mean regret on these pairs, of those that all of them have."""
    common = [choice for choice in pairs[0].together_us if all(choice in pair.together_us for pair in pairs)]
    return min(common, key=lambda choice: fmean(regret(pair, choice, orders, objective) for pair in pairs))


def score(name: str, policy: str, regrets: Sequence[Sequence[float]]) -> Score:
    """Over pairs; several regrets of one pair are picks of equal probability."""
    return Score(
        pairs=name,
        policy=policy,
        count=len(regrets),
        hits=fmean(fmean(r <= 0.0 for r in each) for each in regrets),
        near=fmean(fmean(r <= NOISE for r in each) for each in regrets),
        mean_regret=fmean(fmean(each) for each in regrets),
        max_regret=max(max(each) for each in regrets),
    )


def scores(
    name: str,
    pairs: Sequence[Pair],
    rules: Mapping[str, Policy],
    fixed: SmSplit,
    orders: Sequence[Order],
    objective: Objective,
) -> list[Score]:
    """The rules, plain NCCL, the best fixed setting of the fitted pairs, and chance, over the same pairs."""

    def one(policy: Policy) -> list[list[float]]:
        return [[regret(pair, policy(pair), orders, objective)] for pair in pairs]

    having = [pair for pair in pairs if fixed in pair.together_us]
    always = [[regret(pair, fixed, orders, objective)] for pair in having]
    chance = [[regret(pair, choice, orders, objective) for choice in pair.together_us] for pair in pairs]
    return [
        *(score(name, title, one(rule)) for title, rule in rules.items()),
        score(name, "plain nccl", one(lambda pair: STOCK)),
        *([score(name, f"always {fixed.mechanism}", always)] if having else []),
        score(name, "random", chance),
    ]


def rule_for(curves: Curves, contention: Contention, orders: Sequence[Order], objective: Objective) -> Policy:
    """The rule, choosing among what was measured of a pair."""

    def pick(pair: Pair) -> SmSplit:
        return choose_split(
            curves, pair.workload, pair.collective, pair.size_bytes,
            orders=orders, candidates=pair.together_us, objective=objective, contention=contention,
        ).split  # fmt: skip

    return pick


def judge(rows: Sequence[Row], curves: Curves, unseen: Sequence[Row] = ()) -> dict[str, Any]:
    """Everything that is kept: fit, scores by group and by objective, and each pair that was not fitted."""
    pairs, left_out = pairs_of(rows, curves)
    others, left_out_unseen = pairs_of(unseen, curves)
    split = split_of(pairs)
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(split.group(pair.workload, pair.length), []).append(pair)
    fitted = groups.pop("fitted", [])
    held_out = [pair for members in groups.values() for pair in members]
    names = {pair.scenario: set(pair.together_us) for pair in pairs}
    believed = [row for row in rows if SmSplit.of(row.mechanism) in names.get(row.scenario, set())]
    fit_rows = [row for row in believed if split.group(row.workload, length_of(row)) == "fitted"]
    contention = contention_of(fit_rows, curves)
    found: list[Score] = []
    for title, orders, objective in views():
        known = {"rule": contention, "rule, default calibration": default_profile().contention}
        rules = {name: rule_for(curves, each, orders, objective) for name, each in known.items()}
        fixed = best_fixed(fitted, orders, objective)
        for name, members in (("held out", held_out), *([("unseen", others)] if others else [])):
            found += scores(f"{name}, {title}", members, rules, fixed, orders, objective)
        if title == "mean of orders":
            for name, members in (*sorted(groups.items()), ("fitted", fitted)):
                found += scores(name, members, rules, fixed, orders, objective)
    held_rows = [row for row in believed if split.group(row.workload, length_of(row)) != "fitted"]
    return {
        "calibration": msgspec.to_builtins(contention),
        "error_fitted": error_of_contention(fit_rows, curves, contention),
        "error_held_out": error_of_contention(held_rows, curves, contention),
        "noise": median((row.together.p90_us - row.together.p10_us) / 2 / row.together.us for row in believed),
        "split": {"workloads": sorted(split.workloads), "lengths": sorted(split.lengths)},
        "left_out": left_out + left_out_unseen,
        "scores": [asdict(each) for each in found],
        "pairs": [one_pair(pair, curves, contention) for pair in (*held_out, *others)],
    }


def views() -> list[tuple[str, tuple[Order, ...], Objective]]:
    """What a pick may be asked to be good at; the first is the claim."""
    return [
        ("mean of orders", ORDERS, "mean"),
        ("worst order", ORDERS, "worst"),
        *((f"{order} only", (order,), "mean") for order in ORDERS),
    ]


def one_pair(pair: Pair, curves: Curves, contention: Contention) -> dict[str, Any]:
    """Prediction beside measurement, of the pick."""
    budget = choose_split(
        curves, pair.workload, pair.collective, pair.size_bytes, candidates=pair.together_us, contention=contention
    )
    costs = {choice.mechanism: pair.cost_us(choice, ORDERS, "mean") for choice in pair.together_us}
    return {
        "scenario": pair.scenario,
        "size_bytes": pair.size_bytes,
        "picked": budget.split.mechanism,
        "best": min(costs, key=costs.__getitem__),
        "regret": regret(pair, budget.split, ORDERS, "mean"),
        "predicted_us": budget.objective_us,
        "reason": budget.reason,
        "measured_us": costs,
    }


def products_of(blocks: Iterable[BlockRow]) -> dict[str, tuple[Product, ...]]:
    """Return the GEMMs of the workloads among the blocks."""
    return {block.what: find_workload(block.what).products for block in blocks if block.size_bytes is None}


def gemm_curve(workload: str, points: tuple[tuple[int, float], ...]) -> GemmCurve:
    """Return the curve of a workload from its times by SMs."""
    return GemmCurve(workload=workload, products=find_workload(workload).products, points=points)


def read(paths: Sequence[Path]) -> list[Measurement]:
    return [read_measurement(path) for path in paths]


def rows_of(measured: Iterable[Measurement]) -> list[Row]:
    return [row for each in measured for row in each.rows]


def cells(found: Mapping[str, Any]) -> list[str]:
    """One line of the table."""
    percent = [f"{found[key]:.0%}" for key in ("hits", "near")]
    regrets = [f"{found[key]:.1%}" for key in ("mean_regret", "max_regret")]
    return [found["pairs"], found["policy"], str(found["count"]), *percent, *regrets]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "measurements", type=Path, nargs="+", help="JSON of `measure_suites.py budget`; blocks and rows are joined"
    )
    parser.add_argument("--unseen", type=Path, nargs="*", default=[], help="JSON of other runs: judged, never fitted")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "budget-rule.json")
    parser.add_argument("--default-ctas", type=int, help="of plain NCCL, where nobody looked at what ran")
    args = parser.parse_args()
    measured, unseen = read(args.measurements), read(args.unseen)
    environment = measured[0].environment
    if len({(each.environment.gpu, each.environment.world_size) for each in (*measured, *unseen)}) > 1:
        parser.error("the measurements are of different machines; give those of one kind and number of GPUs")
    gpu = find_gpu(environment.gpu)
    if gpu is None:
        parser.error(f"unknown GPU {environment.gpu!r}: its number of SMs is not in machine/gpus.py")
    blocks = [block for each in measured for block in each.blocks]
    curves = curves_from(
        blocks, products_of(blocks), layout=SmLayout.even(gpu.sm.num_sms), default_ctas=args.default_ctas
    )
    verdict = judge(rows_of(measured), curves, rows_of(unseen))
    lines = [cells(each) for each in verdict["scores"]]
    print_table(COLUMNS, lines, title="budget rule")
    print(
        f"fitted {verdict['calibration']}; T predicted within {verdict['error_fitted']:.1%} (rms) where fitted, "
        f"{verdict['error_held_out']:.1%} held out; trials of one T lie within ±{verdict['noise']:.1%} (p10 to p90, "
        f"median of rows); left out: {len(verdict['left_out'])}"
    )
    facts = provenance(("counterpoint", "msgspec"))
    facts |= {key: getattr(environment, key) for key in ("gpu", "driver", "torch", "nccl", "world_size")}
    facts["measured"] = [
        {"date": each.environment.date, "commit": each.environment.commit, "command": list(each.environment.command)}
        for each in (*measured, *unseen)
    ]
    write_result(args.out, {"provenance": facts, **verdict}, COLUMNS, lines)


if __name__ == "__main__":
    main()
