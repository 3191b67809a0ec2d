"""Claim: the fits of `counterpoint tune --machine` find the shipped figures of H200 again, and predict times as well.

Reads what was measured on 4 x H200 before the suite `machine` was there: collectives alone, building blocks and pairs.
What that suite measures besides (lasting load, streams, launches) is not in these files. The second table compares the
times that the shipped and the fitted figures predict: of rows that were fitted, and of others.

    python benchmarks/tune_machine.py     # prints two tables, writes results/tune-machine.*
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from provenance import provenance, read_measurement, read_result, write_result
from tables import print_table

from counterpoint.collectives.program.operations import even_call
from counterpoint.collectives.program.steps import Tuning
from counterpoint.collectives.program.tuning import best_tuning
from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.machine.profile import Profile, profile_json, profile_of
from counterpoint.measurement.suites import BURSTS, GEMM, MACHINE_LOADS, SUM, capped, few_sms
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.choice import predict
from counterpoint.pair.curves import Curves, curves_from
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.pair.together import kept_us
from counterpoint.records.measurement import BlockRow, Measurement, Row, Timing
from counterpoint.tuning.fit import alone, mean_us, pair_of, sheet_of
from counterpoint.tuning.fit.collectives import TimedCall, predicted_us
from counterpoint.tuning.fit.matmuls import predicted_us as gemm_us
from counterpoint.tuning.fit.matmuls import summed_us
from counterpoint.tuning.machine import fit_profile

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
GPU = "NVIDIA H200"
RANKS = 4
DIVIDED = (capped(), "nccl+max_ctas=8+gemm_sms=124")
RATIOS = (0.5, 2)
PLAIN = ("nccl", "nccl_zero_cta", "zero_sm")
FIGURES = ("figure", "shipped", "fitted", "fitted / shipped")
ERRORS = ("times", "rows", "fitted to them", "shipped figures, mean error", "fitted figures, mean error")
# of the rows of collectives_alone.py, those of a tuning that is known by the row's name
_ROWS = {Tuning(): "own, graph", Tuning(arrivals="together"): "own, graph, one arrival"}
_BEST = "own, graph, best by the clock"


def read(name: str) -> Measurement:
    """Return what `counterpoint measure` wrote."""
    return read_measurement(RESULTS / f"{name}.json")


def alone_rows(ranks: int) -> Iterator[BlockRow]:
    """Yield the rows of collectives_alone.py as the suite would have them: NCCL, ours as it runs today, and sums."""
    by_nccl = (row for row in read(f"blocks-{ranks}xh200").blocks if row.mechanism == "nccl")
    ctas = {(row.what, row.size_bytes): row.num_ctas for row in by_nccl}
    table = json.loads(read_result(RESULTS / f"collectives-alone-{ranks}xh200.json"))
    for operation, size, mechanism, us, rate, _ in table["rows"]:
        time, size_bytes = told(float(us)), int(size.split()[0]) << (10 if size.endswith("KiB") else 20)
        if operation.startswith("reduction kernel"):
            if mechanism == "all SMs":
                yield BlockRow(what=SUM, mechanism="stock", time=time, gb_per_s=float(rate))
            continue
        ours = _ROWS.get(best_tuning(even_call(operation, ranks, size_bytes)), _BEST)
        if mechanism in ("nccl", ours) and (operation, size_bytes) in ctas:  # sizes that the suite has, too
            name, used = ("nccl", ctas[operation, size_bytes]) if mechanism == "nccl" else ("zero_sm", 0)
            yield BlockRow(
                what=operation, mechanism=name, size_bytes=size_bytes, num_ctas=used, time=time, gb_per_s=float(rate)
            )


def told(us: float) -> Timing:
    """Return a time of which no more is known."""
    return Timing(us=us, p10_us=us, p90_us=us, rank=0, per_rank_us=(us,))


def suite() -> Measurement:
    """Return one measurement that holds about what the suite `machine` measures."""
    pairs, blocks, divided = read("pairs-4xh200"), read("blocks-4xh200"), read("budget-pairs-4xh200")
    gemms = {GEMM, *BURSTS}
    taken = [row for row in divided.blocks if row.what in gemms or 0 < (row.size_bytes or 0) <= 1 << 30]
    plain = (row for row in pairs.rows if row.mechanism in PLAIN and row.ratio in RATIOS)
    rows = [row for row in plain if row.workload in MACHINE_LOADS]
    rows += [row for row in divided.rows if row.workload == GEMM and row.mechanism in DIVIDED]
    rows += [row for row in read("reductions-4xh200").rows if is_summed(row)]
    collectives = [row for row in blocks.blocks if not row.what.startswith("gemm ")]
    return msgspec.structs.replace(pairs, rows=tuple(rows), blocks=(*collectives, *taken, *alone_rows(RANKS)))


def is_summed(row: Row) -> bool:
    """Return whether it is one of the suite's pairs of reductions beside GEMMs on fewer SMs."""
    is_asked = row.mechanism in few_sms() and row.ratio in RATIOS and row.order == "together"
    return row.workload == GEMM and is_asked


def without_exchanges(measured: Measurement) -> Measurement:
    """Leave out all_to_all by zero_sm: it ran without the copy of the own block, which the suite has."""
    kept = [row for row in measured.blocks if (row.what, row.mechanism) != ("all_to_all", "zero_sm")]
    return msgspec.structs.replace(measured, blocks=tuple(kept))


def figures(profile: Profile, prefix: tuple[str, ...]) -> dict[str, float]:
    """Return every number of a profile by its path."""

    def walk(value: Any, path: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, Mapping):
            for key, each in value.items():
                yield from walk(each, f"{path}.{key}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value

    content = json.loads(profile_json(profile))
    return {path: figure for group in prefix for path, figure in walk(content.get(group), group)}


def compared(shipped: Profile, fitted: Profile) -> Iterator[tuple[str, ...]]:
    """Yield a line for each figure that was fitted and is shipped."""
    groups = ("rates", "nccl", "nccl_rates", "sums", "contention", "mechanisms", "efficiency")
    before = figures(shipped, groups)
    for path, figure in figures(fitted, groups).items():
        if path in before and not path.endswith("time_spread"):
            was = before[path]
            yield path, f"{was:,.4g}", f"{figure:,.4g}", f"{figure / was:.2f}" if was else ""


def errors(shipped: Profile, fitted: Profile, measured: Measurement) -> Iterator[tuple[str, ...]]:
    """Yield a line for each kind of time that the figures of both profiles predict."""

    def line(what: str, rows: Sequence[Any], is_fitted: bool, error: Any) -> tuple[str, ...]:
        of = [f"{fmean(abs(error(row, profile)) for row in rows):.1%}" for profile in (shipped, fitted)]
        return what, str(len(rows)), "yes" if is_fitted else "", *of

    yield line("zero_sm alone, 4 GPUs", calls(alone_rows(RANKS), RANKS, False), True, clock_error)
    yield line("all_to_all by zero_sm alone, 4 GPUs", calls(alone_rows(RANKS), RANKS, True), False, clock_error)
    yield line("zero_sm alone, 2 GPUs", calls(alone_rows(2), 2, False), False, clock_error)
    yield line("NCCL alone from 16 MiB, 4 GPUs", large(measured), True, nccl_error)
    curves, every = curves_of(measured), read("budget-pairs-4xh200")
    rows = [row for row in measured.rows if SmSplit.of(row.mechanism) and covered(row, curves)]
    yield line("pairs by NCCL, SMs divided", rows, True, lambda row, profile: waves_error(row, profile, curves))
    others, theirs = curves_of(every), [row for row in every.rows if row.workload != GEMM]
    yield line("the same of other GEMMs", theirs, False, lambda row, profile: waves_error(row, profile, others))
    summed = [row for row in measured.rows if is_summed(row)]
    yield line("reductions by zero_sm, few SMs", summed, True, sum_error)
    of_others = [row for row in read("reductions-4xh200").rows if row.mechanism in few_sms() and row.workload != GEMM]
    yield line("the same of other loads", [row for row in of_others if row.order == "together"], False, sum_error)
    for name in PLAIN:
        mine = scenarios(row for row in measured.rows if row.mechanism == name)
        yield line(f"pairs by {name}, mean of orders", mine, True, kept_error)
        by_name = (row for row in read("pairs-4xh200").rows if row.mechanism == name)
        rest = scenarios(row for row in by_name if row.workload not in MACHINE_LOADS)
        yield line("the same of other loads", rest, False, kept_error)
    gemms = [row for row in every.blocks if row.mechanism == "stock"]
    yield line("GEMMs of budget, alone", [row for row in gemms if row.what in BURSTS], True, gemm_error)
    yield line("the others", [row for row in gemms if row.what not in BURSTS], False, gemm_error)


def calls(rows: Iterable[BlockRow], ranks: int, exchanges: bool) -> list[TimedCall]:
    """Return the times of zero_sm, either of all_to_all or of all others."""
    found = []
    for row in rows:
        if row.mechanism == "zero_sm" and row.size_bytes and (row.what == "all_to_all") is exchanges:
            call = even_call(row.what, ranks, row.size_bytes, own="consumer" if exchanges else None)
            found.append(TimedCall(call=call, tuning=best_tuning(call), us=row.time.us))
    return found


def clock_error(timed: TimedCall, profile: Profile) -> float:
    """Return predicted / measured - 1, as all of these do."""
    return predicted_us(timed, profile.rates) / timed.us - 1


def large(measured: Measurement) -> list[tuple[str, int, float]]:
    """Return the times of large arrays by NCCL."""
    found = alone(measured, "nccl")
    return [(name, size, time.us) for name in found for size, time in found[name].items() if size >= 1 << 24]


def nccl_error(row: tuple[str, int, float], profile: Profile) -> float:
    """Return the error of latency + bytes on the bus / bandwidth."""
    name, size, us = row
    rate = profile.nccl_rates.bus_gb_per_s[name]  # type: ignore[index]
    return (profile.nccl_rates.latency_us + bus_factor(name, RANKS) * size / rate / 1e3) / us - 1


def curves_of(measured: Measurement) -> Curves:
    """Return what both sides of pairs cost alone."""
    products = {row.what: find_workload(row.what).products for row in measured.blocks if row.what.startswith("gemm ")}
    return curves_from(measured.blocks, products, layout=SmLayout.even(132))


def covered(row: Row, curves: Curves) -> bool:
    """Return whether the curves reach a pair."""
    return curves.cover(row.workload, row.collective, row.size_bytes, SmSplit.parse(row.mechanism))


def waves_error(row: Row, profile: Profile, curves: Curves) -> float:
    """Return the error of the model that divides the SMs."""
    found = predict(
        curves, row.workload, row.collective, row.size_bytes, SmSplit.parse(row.mechanism),
        orders=(row.order,), contention=profile.contention,
    )  # fmt: skip
    return found.objective_us / row.together.us - 1


def sum_error(row: Row, profile: Profile) -> float:
    """Return the error of the model of zero-SM reductions beside GEMMs on fewer SMs."""
    return summed_us(pair_of(row, RANKS, SmLayout.even(132)), row, profile) / row.together.us - 1


def scenarios(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each scenario."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.scenario, []).append(row)
    return list(found.values())


def kept_error(rows: Sequence[Row], profile: Profile) -> float:
    """Return the error of the model `kept`, in the mean over launch orders, which it is about."""

    def us(row: Row) -> float:
        head = row.head_start_us if row.order != "together" else 0.0
        compute = max(0.0, row.compute_alone.us - (head if row.order == "compute_first" else 0.0))
        comm = max(0.0, row.comm_alone.us - (head if row.order == "comm_first" else 0.0))
        comms, facts = ((row.collective, comm),), profile.mechanisms[row.mechanism]
        return head + kept_us(compute, comms, facts, persistent=profile.efficiency.persistent)

    return fmean(map(us, rows)) / fmean(row.together.us for row in rows) - 1


def gemm_error(row: BlockRow, profile: Profile) -> float:
    """Return the error of the model of waves at the clock of bursts."""
    return gemm_us(row.what, sheet_of(read("blocks-4xh200")), profile.efficiency) / mean_us(row) - 1


def main() -> None:
    """Print both tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "tune-machine.json")
    asked = parser.parse_args()
    shipped, measured = profile_of(GPU), suite()
    whole, calls_alone = fit_profile(measured, known=shipped), fit_profile(without_exchanges(measured), known=shipped)
    fitted = msgspec.structs.replace(whole, rates=calls_alone.rates)
    found, missed = list(compared(shipped, fitted)), list(errors(shipped, fitted, measured))
    print_table(FIGURES, found, width=120)
    print_table(ERRORS, missed, width=120)
    record = {
        "provenance": provenance(["counterpoint", "numpy"]),
        "figures": [dict(zip(FIGURES, cells, strict=True)) for cells in found],
        "errors": [dict(zip(ERRORS, cells, strict=True)) for cells in missed],
        "left_out": fitted.left_out,
    }
    write_result(asked.out, record, ERRORS, missed)


if __name__ == "__main__":
    main()
