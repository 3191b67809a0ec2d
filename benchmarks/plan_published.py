"""Claim: one set of constants per GPU generation predicts published step times, also those it was not fitted to.

    python benchmarks/plan_published.py                 # the tables, results/plan-published.{json,md}
    python benchmarks/plan_published.py --leave-out     # and both fitted constants again without each model (a minute)

Rows are files, `benchmarks/published/*.toml`, one for each source:

    source, url, date, vendor    what a person looks up, and who measured it
    notes                        what the source leaves open, how that was set once for the file, rows left out
    fitted                       whether constants were fitted to these rows; left out: they were not
    measured                     what the last column holds: a key of `READS`, or "fits": whether memory was enough
    columns, rows                "name", fields of a job ("model.layers"), "measured"; a list of values for each row
    [job.training], ...          tables of a job (`plan/job/job.py`) that all rows share; a column overrides a field

What a source leaves open is set by what its software did at that time, for all of its rows alike
(`docs/results/planner.md`). The measurements of this project on H200 are read from results/, by functions below.
Of Ampere `matmul` and `memory` are fitted to the rows marked so. The half of all files whose names have an even crc32
chose the clocks of `CLOCKED`, with rows of these GPUs, what norms of operators take, with rows that have them, and
the rate of grouped products (`GROUPED`), with rows that have experts; the
clock of Hopper and what the host takes are also from floors of 2 and 4 x H200 and steps of 2 x H200.
The rows of the others calibrate the intervals of a step (`plan_coverage.py`):

    python benchmarks/plan_published.py --calibrate     # and write src/counterpoint/plan/measured_steps.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import msgspec
from msgspec.structs import asdict
from plan_coverage import COLUMNS as COVERAGE_COLUMNS
from plan_coverage import Ran, coverage, coverage_summary, left_out, memory_need
from provenance import provenance, read_result, write_result
from tables import print_table

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Efficiency, shipped_profile
from counterpoint.plan.compute.memory import memory
from counterpoint.plan.compute.roofline import GpuRates
from counterpoint.plan.confidence import (
    FILE,
    CalibrationRow,
    MeasuredErrors,
    job_features,
)
from counterpoint.plan.job.cluster import Cluster, Level, find_gpu
from counterpoint.plan.job.fields import parse_record
from counterpoint.plan.job.job import RECORDS, Job, TrainingSoftware, parse_job, read_tables
from counterpoint.plan.job.model import Model, model_flops
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.estimate import CollectiveTimes
from counterpoint.plan.network.network import levels, network_of
from counterpoint.plan.step.step import PredictedStep, predict_step
from counterpoint.records import Record

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "benchmarks" / "published"
SOFTWARE = TrainingSoftware(name="FSDP2", version="2026-11")
OWN = "this project"  # the source of rows that are not public
COLUMNS = ("group", "row", "published", "unit", "predicted", "error", "exposed", "bubble")
GROUP_COLUMNS = ("source", "rows", "mean", "bias", "worst")
CLASS_COLUMNS = (
    "dense models", "files", "rows", "chosen with: mean of files", "of rows", "checked: mean of files", "of rows",
)  # fmt: skip
VARIANTS = {"stock": "stock", "overlap": "zero-SM", "bound": "bound", "floor": "floor"}  # of fsdp_step.py, and here
PROTOTYPE = {"stock": "stock", "copied": "zero-SM, copied", "bound": "bound", "floor": "floor"}
KINDS_OF_GPUS = (("A100", "A100-40"), ("H100", "H200"), ("B200", "GB200"), ("B300", "GB300"))
CLOCKED = ("H100", "H200", "B200", "GB200")  # GPUs whose clock under load was chosen with public rows
Read = Callable[[Job, PredictedStep], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure; `read` takes it from a predicted step; `unit` is "s", "ms" or one of a rate.

    A source, such as a paper or a repository, may have several groups, one for each file.
    """

    source: str
    group: str
    name: str
    job: Job
    published: float
    unit: str
    read: Read
    fitted: bool = False
    chosen_with: bool = False  # constants were chosen with it and others


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One published job of which is known whether it fitted in memory."""

    source: str
    group: str
    name: str
    job: Job
    fitted: bool


class Source(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of rows, as at the top."""

    source: str
    url: str
    date: str
    vendor: str
    notes: list[str]
    fitted: bool = False
    measured: str
    columns: list[str]
    rows: list[list[Any]]
    job: dict[str, dict[str, Any]]


def cluster(gpu: str, network: str, gpus: int) -> Cluster:
    return Cluster(gpu=find_gpu(gpu), levels=levels(network, gpus))


def with_recomputation(job: Job, found: PredictedStep) -> float:
    """TFLOP/s per GPU as arXiv 2104.04473 counts them: recomputation included (its equation 3)."""
    m, t = job.model, job.training
    matrices = 96.0 * t.global_batch * t.sequence * m.layers * m.hidden**2
    flops = matrices * (1 + t.sequence / (6 * m.hidden) + m.vocab / (16 * m.layers * m.hidden))
    return flops / job.parallel.world_size / found.step_us / 1e6


def causal_part(job: Job) -> float:
    """FLOP with the half of attention that causal models need, of those with all of it."""
    m, sequence = job.model, job.training.sequence
    attention = 3 * 4.0 * m.heads * m.head_width * sequence * m.layers
    return 1 - attention / 2 / model_flops(m, sequence)


READS: dict[str, tuple[str, Read]] = {  # by what a file's last column holds: the unit, and what is predicted
    "seconds": ("s", lambda job, found: found.step_us / 1e6),
    "ms": ("ms", lambda job, found: found.step_us / 1e3),
    "tokens_per_s": ("tokens/s", lambda job, found: found.tokens_per_s),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", lambda job, found: found.tokens_per_s / job.parallel.world_size),
    "samples_per_s": ("samples/s", lambda job, found: found.tokens_per_s / job.training.sequence),
    "model_tflops": ("TFLOP/s", lambda job, found: found.model_tflops),  # attention in full
    "causal_tflops": ("TFLOP/s", lambda job, found: found.model_tflops * causal_part(job)),
    "tflops_with_recomputation": ("TFLOP/s", with_recomputation),
    "mfu": ("of peak", lambda job, found: found.mfu),  # attention in full
    "causal_mfu": ("of peak", lambda job, found: found.mfu * causal_part(job)),
}


def read_source(path: Path) -> tuple[Row, ...] | tuple[MemoryRow, ...]:
    """Rows of a file, or Misconfigured with the file and the row that is wrong."""
    source = parse_record(path.name, read_tables(path), Source)
    check_columns(path.name, source)
    jobs = [row_job(f"{path.name}, row {number}", source, row) for number, row in enumerate(source.rows, start=1)]
    found = [(row[0], job, row[-1]) for row, job in zip(source.rows, jobs, strict=True)]
    names = [row[0] for row in source.rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Misconfigured(f"{path.name}: {twice[0]!r} is the name of two rows: give each its own")
    origin = source.source.partition(",")[0]
    if source.measured == "fits":
        return tuple(
            MemoryRow(source=origin, group=path.stem, name=name, job=job, fitted=value) for name, job, value in found
        )
    unit, read = READS[source.measured]
    return tuple(
        Row(
            source=origin,
            group=path.stem,
            name=name,
            job=job,
            published=value,
            unit=unit,
            read=read,
            fitted=source.fitted,
            chosen_with=is_chosen_with(path.stem, job),
        )
        for name, job, value in found
    )


def is_chosen_with(stem: str, job: Job) -> bool:
    """Whether a constant was chosen with a file's rows: the clock of its GPU, what norms take, or grouped products."""
    clocked = job.cluster.gpu.name in CLOCKED or not job.training.fused_norms
    return is_of_choosing_half(stem) and (clocked or job.model.experts is not None)


def is_of_choosing_half(stem: str) -> bool:
    """Whether a file is of the half that constants were chosen with."""
    return crc32(stem.encode()) % 2 == 0


def check_columns(where: str, source: Source) -> None:
    if source.measured not in (*READS, "fits"):
        raise Misconfigured(f"{where}: measured = {source.measured!r}: give one of {', '.join(READS)}, fits")
    columns = source.columns
    if len(columns) < 3 or columns[0] != "name" or columns[-1] != "measured" or len({*columns}) < len(columns):
        raise Misconfigured(f'{where}: columns: give "name", fields of a job, each once, and "measured"')
    for column in columns[1:-1]:
        if column.partition(".")[0] not in RECORDS or "." not in column:
            raise Misconfigured(f"{where}: column {column!r}: give TABLE.FIELD, a table of {', '.join(RECORDS)}")


def row_job(where: str, source: Source, values: Sequence[Any]) -> Job:
    """The job of a row; its last value is checked, too."""
    if len(values) != len(source.columns):
        raise Misconfigured(f"{where}: {len(values)} values in {len(source.columns)} columns: give one for each column")
    if not isinstance(values[0], str):
        raise Misconfigured(f"{where}: the name is {values[0]!r}: give a string")
    where, measured = f"{where} ({values[0]})", values[-1]
    if source.measured == "fits":
        if not isinstance(measured, bool):
            raise Misconfigured(f"{where}: measured = {measured!r}: give true if the job fitted in memory, or false")
    elif isinstance(measured, bool) or not isinstance(measured, int | float) or not 0 < measured < float("inf"):
        raise Misconfigured(f"{where}: measured = {measured!r}: give a number above 0")
    tables: dict[str, Any] = deepcopy(source.job)
    for column, value in zip(source.columns[1:-1], values[1:-1], strict=True):
        *outer, field = column.split(".")
        table = tables
        for name in outer:
            table = table.setdefault(name, {})
        table[field] = value
    try:
        return parse_job(tables)
    except Misconfigured as error:
        raise Misconfigured(f"{where}: {error}") from None


def without_update(job: Job, found: PredictedStep) -> float:
    """Forward and backward, ms."""
    return (found.step_us - found.parts["optimizer_us"]) / 1e3


def with_copies(job: Job, found: PredictedStep) -> float:
    """Collectives do nothing, FSDP2's copies stay."""
    return without_update(job, found) - found.parts["shards_us"] / 1e3


def fsdp_step(group: str, name: str, model: Model, ranks: int, tokens: int, times: dict[str, float]) -> list[Row]:
    """Forward and backward under FSDP2, eager; `bound` has no communication, `floor` is not sharded."""
    kinds: dict[str, tuple[str, Read]] = {
        "stock": ("nccl", without_update),
        "zero-SM": ("zero_sm", without_update),
        "zero-SM, copied": ("zero_sm_copied", without_update),
        "bound": ("nccl", with_copies),
        "floor": ("nccl", without_update),
    }
    found = []
    for kind in times:
        mechanism, read = kinds[kind]
        dp = 1 if kind == "floor" else ranks
        job = Job(
            model=model, parallel=Parallel(dp=dp, zero=3 if dp > 1 else 0),
            training=Training(sequence=tokens, global_batch=dp, grad_bytes=2, fused_kernels=False),
            cluster=cluster("H200", "nvlink-h100", 8), mechanism=mechanism, software=SOFTWARE,
        )  # fmt: skip
        found.append(
            Row(source=OWN, group=group, name=f"{name}{tokens} tokens, {kind}", job=job, published=times[kind],
                unit="ms", read=read)
        )  # fmt: skip
    return found


def fsdp_8xh200() -> list[Row]:
    """This project's measurements, 2026-11-20: FSDP2, eager, 12 layers of Llama-3-8B's shape without its ends."""
    model = Model(layers=12, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=1)
    return [
        row
        for tokens, times in ((2048, (91.0, 79.1, 62.3, 59.1)), (4096, (150.3, 138.2, 129.5, 117.6)),
                              (8192, (274.3, 261.5, 251.4, 239.1)))
        for row in fsdp_step("H200 FSDP2", "", model, 8, tokens, dict(zip(PROTOTYPE.values(), times, strict=True)))
    ]  # fmt: skip


def fsdp_fewer_h200(ranks: int) -> list[Row]:
    """This project's measurements, 2026-11-21, on other machines: layers of 8B's and of 70B's shape, small ends."""
    found = []
    for name, kind, (layers, hidden, heads, ffn) in (
        ("8B", "layers", (12, 4096, 32, 14336)),
        ("70B", "70b", (4, 8192, 64, 28672)),
    ):
        model = Model(layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, gated=True, vocab=1024)
        measured: dict[int, dict[str, float]] = {}
        for row in json.loads(read_result(ROOT / "results" / f"fsdp-step-{kind}-{ranks}xh200.json"))["rows"]:
            if row["variant"] in VARIANTS:
                measured.setdefault(row["tokens"], {})[VARIANTS[row["variant"]]] = row["ms"]
        for tokens, times in measured.items():
            found += fsdp_step(f"{ranks} x H200 FSDP2", f"{name}, ", model, ranks, tokens, times)
    return [dataclasses.replace(row, chosen_with=ranks == 2 or "floor" in row.name) for row in found]


def whole_steps() -> list[Row]:
    """This project's recordings, 2026-11-21, of `examples/record_fsdp.py` as it comes, on two machines: 8 layers of 8B,
    embedding, head, reduction in float32, clipping and AdamW; the mean step that `diagnose` finds."""
    model = Model(layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=128256)
    recorded = json.loads(read_result(ROOT / "results" / "plan-from-trace.json"))["rows"]
    return [
        Row(
            source=OWN, group="H200 FSDP2, whole steps", name=f"{ranks} GPUs", published=ms, unit="ms",
            read=lambda job, found: found.step_us / 1e3,
            job=Job(
                model=model, parallel=Parallel(dp=ranks, zero=3), cluster=cluster("H200", "nvlink-h100", 8),
                software=SOFTWARE,
                training=Training(sequence=4096, global_batch=ranks, grad_bytes=4, fused_kernels=False),
            ),
        )
        for ranks, ms in sorted({int(row[1]): float(row[2]) for row in recorded}.items())
    ]  # fmt: skip


@cache
def published() -> tuple[list[Row], list[MemoryRow]]:
    """All rows of the files: steps, and what fitted in memory."""
    found = [row for path in sorted(PUBLISHED.glob("*.toml")) for row in read_source(path)]
    return [row for row in found if isinstance(row, Row)], [row for row in found if isinstance(row, MemoryRow)]


def rows() -> list[Row]:
    """All steps."""
    return [*published()[0], *fsdp_8xh200(), *fsdp_fewer_h200(4), *fsdp_fewer_h200(2), *whole_steps()]


class Predictions:
    """Steps of rows; networks are priced once."""

    def __init__(self) -> None:
        self.prices: dict[tuple[str, tuple[Level, ...]], CollectiveTimes] = {}

    def step(self, row: Row, efficiency: Efficiency | None = None) -> PredictedStep:
        cluster = row.job.cluster
        key = (cluster.gpu.name, cluster.levels)
        if key not in self.prices:
            self.prices[key] = CollectiveTimes(network_of(cluster))
        rates = GpuRates.of(cluster.gpu, row.job.training.precision, efficiency)
        return predict_step(row.job, prices=self.prices[key], rates=rates)

    def error(self, row: Row, efficiency: Efficiency | None = None) -> float:
        return error_of(row, self.step(row, efficiency))


def error_of(row: Row, found: PredictedStep) -> float:
    """Of the step's time: predicted / published - 1, turned round for rates."""
    ratio = row.read(row.job, found) / row.published
    return (ratio if row.unit in ("s", "ms") else 1 / ratio) - 1


def leave_out(predictions: Predictions, fitted: Sequence[Row]) -> dict[str, float]:
    """Mean error on each model when both constants are fitted to the rows of the others, on the grid of the fit."""
    grid = [
        msgspec.structs.replace(shipped_profile("A100").efficiency, matmul=matmul, memory=memory)
        for matmul in (0.86, 0.88, 0.90, 0.92) for memory in (0.58, 0.62, 0.66, 0.70)
    ]  # fmt: skip
    errors = [[predictions.error(row, efficiency) for row in fitted] for efficiency in grid]
    models = [row.name.split(",")[0] for row in fitted]
    found = {}
    for left in dict.fromkeys(models):
        kept = [i for i, name in enumerate(models) if name != left]
        best = min(errors, key=lambda each: sum(each[i] ** 2 for i in kept))
        found[left] = fmean(abs(best[i]) for i, name in enumerate(models) if name == left)
    return found


def by_group(errors: dict[str, list[float]]) -> list[list[str]]:
    """A row for each group."""
    return [
        [group, str(len(each)), f"{fmean(map(abs, each)):.1%}", f"{fmean(each):+.1%}", f"{max(each, key=abs):+.1%}"]
        for group, each in errors.items()
    ]


def by_class(found: Iterable[tuple[Row, float]]) -> list[list[str]]:
    """A row for each kind of GPU and precision, of dense models: the half of the files that chose, and the other."""
    classes: dict[str, tuple[dict[str, list[float]], dict[str, list[float]]]] = {}
    for row, error in found:
        kind = next((kind for kind in KINDS_OF_GPUS if row.job.cluster.gpu.name in kind), None)
        if row.source == OWN or row.job.model.experts is not None or kind is None:
            continue
        precision = "fp8" if row.job.training.precision == "fp8" else "16 bit"
        halves = classes.setdefault(f"{' and '.join(kind)}, {precision}", ({}, {}))
        halves[not is_of_choosing_half(row.group)].setdefault(row.group, []).append(abs(error))
    lines = []
    for name, halves in sorted(classes.items()):
        line = [name, str(sum(map(len, halves))), str(sum(len(each) for half in halves for each in half.values()))]
        for half in halves:
            rows_of_it = [error for each in half.values() for error in each]
            line += [f"{fmean(map(fmean, half.values())):.1%}", f"{fmean(rows_of_it):.1%}"] if half else ["", ""]
        lines.append(line)
    return lines


def memory_summary(found: Iterable[MemoryRow]) -> list[str]:
    """A line for each group: how many jobs the planner calls right."""
    groups: dict[str, list[tuple[bool, bool]]] = {}
    for row in found:
        groups.setdefault(row.group, []).append((row.fitted, memory(row.job).fits))
    return [
        f"{group}: {sum(fitted == said for fitted, said in each)} of {len(each)} called right; "
        f"{each.count((True, False))} fitted that should not, {each.count((False, True))} did not that should"
        for group, each in groups.items()
    ]


def series(row: Row) -> str:
    """Rows of one: of a file, with the same model, GPUs and precision."""
    model, training = row.job.model, row.job.training
    shape = f"{model.layers} x {model.hidden}, {training.sequence} tokens, {training.precision}"
    return f"{row.group}: {shape}, {row.job.parallel.world_size} x {row.job.cluster.gpu.name}"


def calibration(predicted: Iterable[tuple[Row, PredictedStep]]) -> MeasuredErrors:
    """The rows that intervals are calibrated on: of no row a constant was fitted to."""
    steps = [
        CalibrationRow(
            source=row.source, name=f"{row.group}: {row.name}", series=series(row),
            features=job_features(row.job), error=round(-math.log1p(error_of(row, found)), 5),
            slowest=round(found.slowest_us / found.step_us, 5),
        )
        for row, found in predicted if not (row.fitted or row.chosen_with)
    ]  # fmt: skip
    fits = [
        Ran(source=row.source, ran=row.fitted, room=math.log(need.available_gib / need.total_gib))
        for row in published()[1] for need in [memory(row.job)]
    ]  # fmt: skip
    seen = [each.row for each in left_out(steps, lambda row: row.source) if each.place == 0]
    inside = {(row.source, row.name) for row in seen}
    steps = [msgspec.structs.replace(row, seen=(row.source, row.name) in inside) for row in steps]
    return MeasuredErrors(steps, memory_need(fits))


def encode_rows(rows: MeasuredErrors, written_by: str) -> bytes:
    """Return the content of a file that `read_rows` can read, with one row per line."""
    places = {tuple(row.features.items()): place for place, row in reversed([*enumerate(rows.rows)])}
    kinds = sorted(places, key=places.__getitem__)
    steps = [asdict(row) | {"features": kinds.index(tuple(row.features.items()))} for row in rows.rows]
    tables = {"features": [dict(kind) for kind in kinds], "steps": steps}
    lists = [
        f'"{name}": [\n' + ",\n".join(msgspec.json.encode(row).decode() for row in found) + "\n]"
        for name, found in tables.items()
    ]
    head = msgspec.json.encode({"written_by": written_by, "memory": rows.memory}).decode().removesuffix("}")
    return (",\n".join([head, *lists]) + "}\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--calibrate", action="store_true", help=f"write {FILE.relative_to(ROOT)}")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "plan-published.json")
    args = parser.parse_args()
    predictions = Predictions()
    lines, kept, errors, off = [], [], dict[str, list[float]](), []
    predicted = [(row, predictions.step(row)) for row in rows()]
    for row, found in predicted:
        value, error = row.read(row.job, found), error_of(row, found)
        line = [
            row.group + {1: ", chosen with", 2: ", fitted", 3: ", fitted"}.get(row.chosen_with + 2 * row.fitted, ""),
            row.name, f"{row.published:.4g}", row.unit, f"{value:.4g}",
            f"{error:+.1%}", f"{found.exposed_comm_us / found.step_us:.0%}",
            f"{found.parts['bubble_us'] / found.step_us:.0%}",
        ]  # fmt: skip
        errors.setdefault(line[0], []).append(error)
        off.append((row, error))
        lines.append(line)
        kept.append({"group": row.group, "row": row.name, "published": row.published, "unit": row.unit,
                     "predicted": float(f"{value:.6g}"), "error": round(error, 5)})  # fmt: skip
    groups, said = by_group(errors), memory_summary(published()[1])
    print_table(COLUMNS, lines, width=140)
    print_table(GROUP_COLUMNS, groups, width=140)
    classes = by_class(off)
    print_table(CLASS_COLUMNS, classes, width=140)
    print("\n".join(said))
    known = calibration(predicted)
    intervals = coverage(known.rows, OWN)
    print_table(COVERAGE_COLUMNS, intervals, width=140)
    said.append(coverage_summary(intervals[-1]))
    print(said[-1])
    if args.calibrate:
        FILE.write_bytes(encode_rows(known, "benchmarks/plan_published.py --calibrate"))
    result: dict[str, Any] = {
        "provenance": provenance(("counterpoint",)), "rows": kept, "groups": groups, "classes": classes,
        "summary": said, "coverage": intervals,
    }  # fmt: skip
    if args.leave_out:
        left = leave_out(predictions, [row for row in rows() if row.fitted])
        result["leave_one_model_out"] = left
        print(f"leave one model out: mean {fmean(left.values()):.1%}, worst {max(left.values()):.1%}: {left}")
    write_result(args.out, result, GROUP_COLUMNS, groups)


if __name__ == "__main__":
    main()
