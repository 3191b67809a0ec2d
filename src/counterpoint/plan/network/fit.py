"""Fit a network to the user's own nccl-tests output, and keep it in a file that a job can name.

For each operation and kind of link, latency and rate are fitted as factors a and b on the times of hops and of bytes
in NCCL's own model (`network.py`):

    T = latency of the levels + a · (base + H) + b · X          with the least sum of squares of T / measured - 1

The file is JSON: levels, as in networks.toml, and NCCL's protocols with the fitted figures, as in fits/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.gpus import find_gpu as find_sheet
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.network.algorithms import shared_gb_per_s
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group, reach
from counterpoint.plan.network.nccl_tests import Measured, NcclTestsRun, read_nccl_tests
from counterpoint.plan.network.network import (
    OPERATIONS,
    Fit,
    FittedRange,
    Kind,
    Network,
    OwnNetwork,
    Protocol,
    all_levels,
    levels,
    nccl_protocols,
)
from counterpoint.records import Record
from counterpoint.records.prediction import FitError

F64 = NDArray[np.float64]
KINDS = ("nvlink", "pcie", "network")
LEAST = 1e-3  # least value of a fitted factor
FEWEST_SIZES = 6  # of each operation and number of ranks: fewer leave none to hold out
LARGEST_ERROR = 0.5  # largest mean error on held-out sizes; with more the times follow no law
IN_NODE = {  # networks of one host, by GPU
    "A100": "nvlink-a100",
    "H100": "nvlink-h100",
    "H200": "nvlink-h100",
    "B200": "nvlink-b200",
}


class NetworkFit(Record, frozen=True, kw_only=True):
    """Holds a fitted network and the errors of the fit."""

    network: OwnNetwork
    errors: tuple[FitError, ...]
    host_bound: int  # number of host-bound rows left out


def fit_network(
    files: Sequence[str], *, network: str | None = None, gpu: str | None = None, ranks: int | None = None
) -> NetworkFit:
    """Return the network fitted to the times in nccl-tests' output files: levels, fitted protocols and held-out errors.

    `files` are paths, or OPERATION=PATH where neither the text nor the file's name says the operation. `network` names
    a network with the same levels (None: NVLink of one host); `gpu`, and `ranks` of every run, are as the files say if
    None.

    Raises:
        Misconfigured: files that cannot be read, contradict themselves or each other, or have too few sizes.
    """
    if twice := [text for text in files if files.count(text) > 1]:
        raise Misconfigured(f"--fit {printable(twice[0], 200)} comes twice: give each file once")
    runs: list[NcclTestsRun] = []
    for text in files:
        operation, _, path = text.partition("=")
        named = operation if path and operation in OPERATIONS else None
        runs += read_nccl_tests(Path(path if named else text), operation=named, ranks=ranks)
    name = _gpu(runs, gpu)
    base = _base(runs, network, name)
    whole = all_levels(base)
    rows = [_placed(row, run, whole[0].size, base) for run in runs for row in run.rows]
    if not rows:
        raise Misconfigured(
            "--fit: every row is bound by one process that launches on all GPUs: run one process for each"
        )
    cluster = Cluster(gpu=find_gpu(name), levels=levels(base, max((row.ranks - 1) * row.stride + 1 for row in rows)))
    source = f"one's own rows of nccl-tests: {', '.join(Path(text.partition('=')[2] or text).name for text in files)}"
    protocols: list[Protocol] = []
    errors: list[FitError] = []
    alike = dict.fromkeys((row.operation, _kind(row, cluster)) for row in rows)
    for operation, kind in sorted(alike, key=lambda each: (KINDS.index(each[1]), each[0])):
        mine = [row for row in rows if (row.operation, _kind(row, cluster)) == (operation, kind)]
        columns = _columns(mine, cluster)
        found = tuple(_errors(mine, columns))
        spans = tuple(
            FittedRange(
                ranks=each.ranks,
                smallest_bytes=int(min(row.num_bytes for row in mine if row.ranks == each.ranks)),
                largest_bytes=int(max(row.num_bytes for row in mine if row.ranks == each.ranks)),
                mean=round(each.mean, 4),
                worst=round(each.worst, 4),
            )
            for each in found
        )
        fit = Fit(
            source=source[:400], gpu=name, rows=len(mine), held_out="a third of the sizes",
            gb_per_s=_gb_per_s(cluster), spans=spans,
        )  # fmt: skip
        protocols += _protocols(operation, kind, _factors(columns), fit)
        errors += found
    return NetworkFit(
        network=OwnNetwork(source=source[:400], gpu=name, levels=whole, protocols=tuple(protocols)),
        errors=tuple(errors),
        host_bound=sum(run.host_bound for run in runs),
    )


def _gpu(runs: Sequence[NcclTestsRun], given: str | None) -> str:
    """Return the name of the GPU of all runs; raise Misconfigured if runs differ, or the name is not known."""
    if given is not None:
        return find_gpu(given).name
    found = {run.gpu for run in runs}
    sheets = {sheet.name if (sheet := find_sheet(name)) else None for name in found}
    if len(sheets) > 1:
        raise Misconfigured(f"--fit: runs on {' and '.join(sorted(map(str, found)))}: give those of one kind of GPU")
    name = sheets.pop()
    if name is None:
        raise Misconfigured("--fit: which GPU it is does not stand in the files: give --gpu")
    return find_gpu(name).name


def _base(runs: Sequence[NcclTestsRun], network: str | None, gpu: str) -> str:
    """Return the named network whose levels the fit uses: the given one, or the GPU's network inside a node."""
    if network is not None:
        return network
    alone = all(run.ranks_per_host == row.ranks for run in runs for row in run.rows)
    if alone and gpu in IN_NODE:
        return IN_NODE[gpu]
    raise Misconfigured("--fit: give --network, a named one whose levels yours has; --ranks alone does not say them")


def _placed(row: Measured, run: NcclTestsRun, node: int, base: str) -> Measured:
    """Return a measured row with its ranks' stride: the GPUs per node where each host has one rank, else 1."""
    here = min(run.ranks_per_host or node, row.ranks)
    if here > node:
        raise Misconfigured(
            f"--fit: {here} ranks on one host, and nodes of {base} have {node} GPUs: give another network"
        )
    if row.ranks > here == 1:
        return Measured(operation=row.operation, ranks=row.ranks, stride=node, num_bytes=row.num_bytes, us=row.us)
    if row.ranks > here and here < node:
        raise Misconfigured(
            f"--fit: {row.ranks} ranks, {here} on each host of {node} GPUs: give runs on whole nodes, or one rank each"
        )
    return row


def _kind(row: Measured, cluster: Cluster) -> Kind:
    top = reach(Group(ranks=row.ranks, stride=row.stride), cluster).crossed[-1]
    return cluster.levels[top].kind


def _gb_per_s(cluster: Cluster) -> dict[Kind, float]:
    """Return the GB/s of each kind of link; where several levels have that kind, the GB/s of the slowest level."""
    found: dict[Kind, float] = {}
    for level, rate in zip(cluster.levels, shared_gb_per_s(cluster.levels), strict=True):
        found[level.kind] = min(rate, found.get(level.kind, rate))
    return found


def _columns(rows: Sequence[Measured], cluster: Cluster) -> F64:
    """Return `[rows, 4]` µs: latency of the levels, latency and bandwidth time by NCCL's model, measured time."""
    own = {level.name: level.latency_us for level in cluster.levels}
    cluster = replace(cluster, levels=tuple(replace(level, latency_us=0.0) for level in cluster.levels))
    nccl, found = Network(cluster=cluster, protocols=nccl_protocols()), []
    for row in rows:
        one = estimate(row.operation, row.num_bytes, Group(ranks=row.ranks, stride=row.stride), nccl)
        given = sum(term.hops * own[term.level] for term in one.terms)
        found.append((given, one.latency_us, one.bandwidth_us, row.us))
    return np.array(found)


def _factors(columns: F64) -> F64:
    """Return the factors a (latency) and b (bandwidth); if one would fall below `LEAST`, the other is fitted alone."""
    wanted = 1 - columns[:, 0] / columns[:, 3]
    sides = columns[:, 1:3] / columns[:, 3:]
    found = np.linalg.lstsq(sides, wanted, rcond=None)[0]
    if found.min() < LEAST:
        alone = wanted @ sides / (sides**2).sum(axis=0)
        errors = ((sides * alone - wanted[:, None]) ** 2).sum(axis=0)
        found = np.where(np.arange(2) == errors.argmin(), alone, LEAST)
    return np.asarray(np.maximum(found, LEAST))


def _protocols(operation: str, kind: Kind, factors: F64, fit: Fit) -> Iterator[Protocol]:
    """Yield NCCL's protocols for an operation, with latencies and bandwidths scaled by the fitted factors."""
    slower, longer = (float(factor) for factor in factors)

    def scaled(figures: dict[Kind, float], factor: float) -> dict[Kind, float]:
        return {name: round(value * factor, 5) for name, value in figures.items()}

    for protocol in nccl_protocols():
        if protocol.serves(operation, "", kind):
            yield replace(
                protocol, base_us=round(protocol.base_us * slower, 4), hop_us=scaled(protocol.hop_us, slower),
                efficiency=scaled(protocol.efficiency, 1 / longer),
                ceiling_gb_per_s=scaled(protocol.ceiling_gb_per_s, 1 / longer), operations=(operation,), kinds=(kind,),
                fit=fit,
                source=f"{protocol.source}, latency · {slower:.3g} and time of bytes · {longer:.3g}: {fit.source}",
            )  # fmt: skip


def _errors(rows: Sequence[Measured], columns: F64) -> Iterator[FitError]:
    """Yield for each number of ranks the held-out error: a fit to two thirds of the sizes predicts the last third."""
    ranks, sizes = np.array([row.ranks for row in rows]), np.array([row.num_bytes for row in rows])
    nccl = abs(columns[:, :3].sum(axis=1) / columns[:, 3] - 1)
    off, third = np.zeros(len(rows)), np.full(len(rows), -1)  # -1: never held out
    for count in np.unique(ranks):
        each, nth = np.unique(sizes[ranks == count], return_inverse=True)
        if len(each) < FEWEST_SIZES:
            raise Misconfigured(
                f"--fit: {rows[0].operation} over {count} ranks has {len(each)} sizes: give {FEWEST_SIZES} or more, "
                "as by -b 64K -e 1G -f 2"
            )
        third[ranks == count] = np.where((nth > 0) & (nth < len(each) - 1), nth % 3, -1)
    for part in range(3):
        given, latency, links, us = columns[third == part].T
        slower, longer = _factors(columns[third != part])
        off[third == part] = abs((given + slower * latency + longer * links) / us - 1)
    for count in np.unique(ranks):
        mine = (ranks == count) & (third >= 0)
        mean = float(off[mine].mean())
        if mean > LARGEST_ERROR:
            raise Misconfigured(
                f"--fit: {rows[0].operation} over {count} ranks: sizes left out are predicted {mean:.0%} off, so its "
                "times follow no law of sizes; measure again on idle links"
            )
        yield FitError(
            operation=rows[0].operation, ranks=int(count), sizes=len(np.unique(sizes[ranks == count])), mean=mean,
            worst=float(off[mine].max()), nccl_mean=float(nccl[mine].mean()),
        )  # fmt: skip
