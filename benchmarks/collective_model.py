"""Claim: the collective model predicts sizes and group sizes that it was not fitted on, within 10 % from 1 MiB up.

Fits protocols to measured rows without a third of the sizes, one group size, or both, and compares what was left out.
Beside it, on the same rows: one line per operation (latency + bytes / bandwidth, fitted without the same rows) and
NCCL's own model, which is not fitted. Every row that is predicted worse than asked (10 %, 20 % below 1 MiB) is listed.
Rows are CSV (operation,ranks,bytes,us), results of `measure_suites.py blocks` (one per group size) or what
nccl-tests printed.

Without rows, all fits that are shipped are checked, each on its own rows; `--write` makes them again.

    python benchmarks/collective_model.py --write src/counterpoint/plan/network/fits
    python benchmarks/collective_model.py mine-[248].json --gpu H200 --network nvlink-h100 \\
        --source "2, 4, 8 × H200, NCCL 2.30, 2027-01-01" --out mine.json
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from fit.measured import from_blocks
from fit.protocols import DIALECTS, Checked, Dialect, fit_protocols, held_out, splits
from provenance import provenance, read_measurement, write_result
from tables import markdown, print_table

from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group
from counterpoint.plan.network.nccl_tests import Measured, read_nccl_tests
from counterpoint.plan.network.network import FittedProtocols, Network, levels, nccl_protocols
from counterpoint.records.measurement import Measurement

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
COLUMNS = (
    "operation",
    "sizes",
    "left out",
    "n",
    "error, mean",
    "max",
    "over",
    "one line, mean",
    "max",
    "NCCL's model, mean",
    "max",
)
MISSED_COLUMNS = ("operation", "ranks", "KiB", "left out", "measured, µs", "predicted, µs", "error")


class Fitted(NamedTuple):
    """Rows of one machine, and the fit that serves it and machines like it."""

    name: str  # of its file in fits/
    files: tuple[Path, ...]
    gpu: str
    network: str
    serves: tuple[str, ...]  # other GPUs with the same links
    source: str
    dialects: tuple[Dialect, ...] = DIALECTS

    def rows(self) -> tuple[Measured, ...]:
        """All rows of its files."""
        return read(self.files)

    def cluster(self) -> Cluster:
        """As large as its rows need."""
        size = max((row.ranks - 1) * row.stride + 1 for row in self.rows())
        return Cluster(gpu=find_gpu(self.gpu), levels=levels(self.network, size))


SHIPPED = (
    Fitted(
        "nvlink-h200",
        (
            ROOT / "results" / "blocks-2xh200.json",
            ROOT / "results" / "blocks-4xh200.json",
            ROOT / "benchmarks" / "nccl_alone_8xh200.csv",
        ),
        "H200",
        "nvlink-h100",
        ("H100",),
        "2, 4 and 8 × H200, NCCL 2.28.9, NVLS off, 2026-11-20 and 21",
    ),
    Fitted(
        "nvlink-a100",
        (ROOT / "benchmarks" / "nccl_8xa100.csv",),
        "A100",
        "nvlink-a100",
        ("A100-40",),
        "8 × A100, microsoft/superbenchmark, 2021",
    ),
    Fitted(
        "hdr-a100",
        (ROOT / "benchmarks" / "nccl_4xdgx_a100.csv", ROOT / "benchmarks" / "nccl_2x8_a100.csv"),
        "A100",
        "a100-hdr-200",
        ("A100-40",),
        "4 × DGX A100 (HDR, NVIDIA DeepOps, 2020) and 2 × BM.GPU4.8 (RoCE, Oracle, 2023 and 2026)",
        DIALECTS[:1],  # two machines
    ),
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Errors of one operation on what was left out: |predicted / measured - 1|."""

    operation: str
    large: bool  # 1 MiB or more
    left_out: str
    n: int
    mean: float
    max: float
    over: int  # rows that are worse than asked
    line_mean: float
    line_max: float
    nccl_mean: float
    nccl_max: float

    @property
    def cells(self) -> tuple[str, ...]:
        sizes = "≥ 1 MiB" if self.large else "< 1 MiB"
        mine = (f"{self.mean:.1%}", f"{self.max:.1%}", str(self.over) if self.over else "")
        others = (self.line_mean, self.line_max, self.nccl_mean, self.nccl_max)
        return self.operation, sizes, self.left_out, str(self.n), *mine, *(f"{figure:.1%}" for figure in others)


def read(paths: Iterable[Path]) -> tuple[Measured, ...]:
    """Rows of CSV, JSON and nccl-tests' text, by the end of the file's name."""
    rows: list[Measured] = []
    measurements: list[Measurement] = []
    for path in paths:
        if path.suffix == ".csv":
            rows.extend(_csv(path))
        elif path.suffix == ".json":
            measurements.append(read_measurement(path))
        else:
            rows.extend(row for run in read_nccl_tests(path) for row in run.rows)
    return (*rows, *(from_blocks(measurements) if measurements else ()))


def _csv(path: Path) -> list[Measured]:
    lines = (line for line in path.read_text("utf-8").splitlines() if not line.startswith("#"))
    return [
        Measured(
            operation=row["operation"],
            ranks=int(row["ranks"]),
            stride=int(row.get("stride") or 1),
            num_bytes=float(row["bytes"]),
            us=float(row["us"]),
        )
        for row in csv.DictReader(lines)
    ]


def one_line(rows: Sequence[Measured]) -> tuple[Checked, ...]:
    """The same rows left out, predicted by latency + bytes on the bus / bandwidth of each operation."""
    checked = []
    for left_out, out, predicted in splits(rows):
        for operation in dict.fromkeys(row.operation for row in predicted):
            seen = [row for row in rows if row.operation == operation and row not in out]
            if len(seen) > 1:
                us = np.array([row.us for row in seen])
                design = np.array([[1.0, _bus_bytes(row)] for row in seen]) / us[:, None]  # relative errors count
                (latency, rate), *_ = np.linalg.lstsq(design, np.ones(len(us)), rcond=None)
                asked = [row for row in predicted if row.operation == operation]
                checked += [
                    Checked(row=row, predicted_us=float(latency + rate * _bus_bytes(row)), left_out=left_out)
                    for row in asked
                ]
    return tuple(checked)


def _bus_bytes(row: Measured) -> float:
    return row.num_bytes * bus_factor(row.operation, row.ranks)


def by_nccl(rows: Sequence[Measured], network: Network) -> dict[Measured, float]:
    """Error of NCCL's own model, by row."""
    return {
        row: estimate(row.operation, row.num_bytes, Group(ranks=row.ranks, stride=row.stride), network).us / row.us - 1
        for row in rows
    }


def compare(ours: Sequence[Checked], rows: Sequence[Measured], cluster: Cluster) -> list[Line]:
    """A line for each operation, below and above 1 MiB, and kind of what was left out."""
    lines = one_line(rows)
    nccl = by_nccl(rows, Network(cluster=cluster, protocols=nccl_protocols()))
    keys = dict.fromkeys((each.row.operation, each.row.num_bytes >= MIB, each.left_out) for each in ours)
    return [
        Line(
            operation=key[0],
            large=key[1],
            left_out=key[2],
            n=sum(_key(each) == key for each in ours),
            over=sum(_key(each) == key and is_missed(each) for each in ours),
            **_errors(key, ours, lines, nccl),
        )
        for key in sorted(keys)
    ]


def _errors(
    key: tuple[str, bool, str], ours: Sequence[Checked], lines: Sequence[Checked], nccl: dict[Measured, float]
) -> dict[str, float]:
    mine, theirs = ([abs(each.error) for each in checked if _key(each) == key] for checked in (ours, lines))
    unfitted = [abs(nccl[each.row]) for each in ours if _key(each) == key]
    named = (("", mine), ("line_", theirs or [np.nan]), ("nccl_", unfitted))
    return {f"{name}{what.__name__}": float(what(errors)) for name, errors in named for what in (np.mean, max)}


def is_missed(each: Checked) -> bool:
    """Predicted worse than asked: 10 % from 1 MiB up, 20 % below."""
    return abs(each.error) > (0.1 if each.row.num_bytes >= MIB else 0.2)


def missed(ours: Sequence[Checked]) -> list[tuple[str, ...]]:
    """Cells of every held-out row that is."""
    worst = sorted((each for each in ours if is_missed(each)), key=lambda each: -abs(each.error))
    return [
        (
            each.row.operation,
            str(each.row.ranks),
            f"{each.row.num_bytes / 1024:.0f}",
            each.left_out,
            f"{each.row.us:.1f}",
            f"{each.predicted_us:.1f}",
            f"{each.error:+.0%}",
        )
        for each in worst
    ]


def _key(each: Checked) -> tuple[str, bool, str]:
    return each.row.operation, each.row.num_bytes >= MIB, each.left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, help="of one's own; without them, those that are shipped")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--serves", nargs="*", default=(), help="other GPUs with the same links that may use the fit")
    parser.add_argument("--network", default="nvlink-h100", help="levels on which it was measured (networks.toml)")
    parser.add_argument("--source", default="", help="what was measured, on what, when")
    parser.add_argument("--write", type=Path, help="keep the fitted protocols here; of those shipped, in this folder")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "collective-model.json")
    options = parser.parse_args()
    shipped = not options.rows
    fits = SHIPPED if shipped else (
        Fitted("own", tuple(options.rows), options.gpu, options.network, tuple(options.serves), options.source),
    )  # fmt: skip
    lines, misses, predictions, count = [], [], 0, 0
    for fit in fits:
        rows, cluster = fit.rows(), fit.cluster()
        ours = held_out(rows, cluster, dialects=fit.dialects)
        of_fit, missed_rows = compare(ours, rows, cluster), missed(ours)
        print_table(COLUMNS, [line.cells for line in of_fit], title=f"{len(rows)} rows: {fit.source}", width=160)
        lines += [(fit.name, line) for line in of_fit]
        misses += [(fit.name, *cells) for cells in missed_rows]
        predictions, count = predictions + len(ours), count + len(rows)
        if options.write:
            kept = FittedProtocols(
                gpus=(cluster.gpu.name, *fit.serves),
                protocols=fit_protocols(rows, cluster, source=fit.source, dialects=fit.dialects),
            )
            path = options.write / f"{fit.name}.json" if shipped else options.write
            path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    worse = f"{len(misses)} of {predictions} predictions are worse than asked"
    print_table(("fit", *MISSED_COLUMNS), misses, title=worse, width=160)
    record = {
        "provenance": provenance(("numpy", "scipy")) | {"measured": "; ".join(fit.source for fit in fits)},
        "rows": count,
        "lines": [{"fit": name} | asdict(line) for name, line in lines],
        "missed": [dict(zip(("fit", *MISSED_COLUMNS), cells, strict=True)) for cells in misses],
    }
    write_result(options.out, record, ("fit", *COLUMNS), [(name, *line.cells) for name, line in lines])
    with options.out.with_suffix(".md").open("a") as page:
        page.write("\n".join(["", f"{worse}:", "", *markdown(("fit", *MISSED_COLUMNS), misses), ""]))


if __name__ == "__main__":
    main()
