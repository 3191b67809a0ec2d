"""Claim: the collective model predicts sizes and group sizes that it was not fitted on, within 10 % from 1 MiB up.

Fits protocols to measured rows without a third of the sizes, one group size, or both, and compares what was left out.
Beside it, on the same rows: one line per operation (latency + bytes / bandwidth, fitted without the same rows) and
NCCL's own model, which is not fitted. Every row that is predicted worse than asked (10 %, 20 % below 1 MiB) is listed.
Rows are CSV (operation,ranks,bytes,us), results of `counterpoint measure blocks` (one per group size) or what
nccl-tests printed.

A last table has rows of 4 DGX A100 that nothing was fitted to: NCCL's own latencies and the links' bandwidths.

    python benchmarks/collective_model.py --serves H100 --write src/counterpoint/plan/network/fits/nvlink-h200.json
    python benchmarks/collective_model.py mine-[248].json --gpu H200 --network nvlink-h100 \\
        --source "2, 4, 8 × H200, NCCL 2.30, 2027-01-01" --out mine.json
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from fit.collective_fit import Checked, fit_protocols, held_out, splits
from fit.measured import Measured, from_blocks
from fit.nccl_tables import nccl_test_rows
from provenance import provenance, read_result, write_result
from tables import markdown, print_table

from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group
from counterpoint.plan.network.protocols import FittedProtocols, Network, levels, nccl_protocols, network_of
from counterpoint.records.measurement import Measurement

ROOT = Path(__file__).resolve().parents[1]
ROWS = (
    ROOT / "results" / "blocks-2xh200.json",
    ROOT / "results" / "blocks-4xh200.json",
    ROOT / "benchmarks" / "nccl_alone_8xh200.csv",
)
UNFITTED = ROOT / "benchmarks" / "nccl_4xdgx_a100.csv"
SOURCE = "2, 4 and 8 × H200, NCCL 2.28.9, NVLS off, 2026-11-20 and 21"
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
UNFITTED_COLUMNS = ("operation", "ranks", "bytes", "measured, µs", "predicted, µs", "error", "by")


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
            measurements.append(msgspec.json.decode(read_result(path), type=Measurement))
        else:
            rows.extend(nccl_test_rows(path.read_text("utf-8", errors="replace")))
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


@dataclass(frozen=True, kw_only=True)
class Unfitted:
    """A row, and what is predicted for it from data sheets and NCCL's own model."""

    row: Measured
    predicted_us: float
    by: str

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_us / self.row.us - 1

    @property
    def cells(self) -> tuple[str, ...]:
        row = self.row
        times = (f"{row.us:.0f}", f"{self.predicted_us:.0f}", f"{self.error:+.0%}")
        return row.operation, str(row.ranks), f"{row.num_bytes:.0f}", *times, self.by


def unfitted() -> list[Unfitted]:
    """4 DGX A100."""
    rows = read([UNFITTED])
    most = max(row.ranks for row in rows)
    network = network_of(Cluster(gpu=find_gpu("A100"), levels=levels("a100-hdr-200", most)))
    found = [(row, estimate(row.operation, row.num_bytes, Group(ranks=row.ranks), network)) for row in rows]
    return [Unfitted(row=row, predicted_us=each.us, by=f"{each.algorithm}, {each.protocol}") for row, each in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, default=ROWS)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--serves", nargs="*", help="other GPUs with the same links that may use the fit")
    parser.add_argument("--network", default="nvlink-h100", help="levels on which it was measured (networks.toml)")
    parser.add_argument("--source", default=SOURCE, help="what was measured, on what, when")
    parser.add_argument("--write", type=Path, help="keep the fitted protocols here, to be used from now on")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "collective-model.json")
    options = parser.parse_args()
    rows = read(options.rows)
    size = max((row.ranks - 1) * row.stride + 1 for row in rows)
    cluster = Cluster(gpu=find_gpu(options.gpu), levels=levels(options.network, size))
    ours, others = held_out(rows, cluster), unfitted()
    lines, misses = compare(ours, rows, cluster), missed(ours)
    table, worse = [line.cells for line in lines], f"{len(misses)} of {len(ours)} predictions are worse than asked"
    print_table(COLUMNS, table, title=f"{len(rows)} rows: {options.source}", width=160)
    print_table(MISSED_COLUMNS, misses, title=worse, width=160)
    unseen = "not fitted: 4 x DGX A100 (8 x HDR), NCCL of June 2020"
    print_table(UNFITTED_COLUMNS, [each.cells for each in others], title=unseen, width=160)
    record = {
        "provenance": provenance(("numpy", "scipy")) | {"measured": options.source},
        "rows": len(rows),
        "lines": [asdict(line) for line in lines],
        "missed": [dict(zip(MISSED_COLUMNS, cells, strict=True)) for cells in misses],
        "unfitted": [dict(zip(UNFITTED_COLUMNS, each.cells, strict=True)) for each in others],
    }
    write_result(options.out, record, COLUMNS, table)
    with options.out.with_suffix(".md").open("a") as page:
        page.write("\n".join(["", f"{worse}:", "", *markdown(MISSED_COLUMNS, misses), ""]))
    if options.write:
        kept = FittedProtocols(
            gpus=(cluster.gpu.name, *(options.serves or ())),
            protocols=fit_protocols(rows, cluster, source=options.source),
        )
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


if __name__ == "__main__":
    main()
