"""Fit one's own network to what nccl-tests printed there, and keep it in a file that a job can name.

The file is JSON: levels, as in networks.toml, and fitted protocols, as in fits/. Groups below the innermost level and
those between nodes are fitted apart: each kind of link has figures of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.gpus import find_gpu as find_sheet
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.fit import error_of, fit_protocols, held_out
from counterpoint.plan.network.group import Group, reach
from counterpoint.plan.network.nccl_tests import Measured, NcclTestsRun, read_nccl_tests
from counterpoint.plan.network.protocols import (
    OPERATIONS,
    Network,
    OwnNetwork,
    Protocol,
    all_levels,
    levels,
    nccl_protocols,
)
from counterpoint.records import Record
from counterpoint.records.prediction import FitError

FEWEST_SIZES = 6  # of each operation and number of ranks: fewer leave none to hold out
LARGEST_ERROR = 0.5  # mean of sizes left out; more is no law of sizes
IN_NODE = {  # networks of one host, by GPU
    "A100": "nvlink-a100",
    "H100": "nvlink-h100",
    "H200": "nvlink-h100",
    "B200": "nvlink-b200",
}


class NetworkFit(Record, frozen=True, kw_only=True):
    """Holds a fitted network, and how sure it is."""

    network: OwnNetwork
    errors: tuple[FitError, ...]
    host_bound: int  # rows left out


def fit_network(
    files: Sequence[str], *, network: str | None = None, gpu: str | None = None, ranks: int | None = None
) -> NetworkFit:
    """Return the network that files of nccl-tests were measured on.

    Args:
        files: paths, or OPERATION=PATH where neither the text nor the file's name says the operation.
        network: a named one whose levels it has; None: NVLink of one host.
        gpu: its name; None: as the files say.
        ranks: of every run; None: as the files say.

    Returns:
        Its levels, fitted protocols and held-out errors.

    Raises:
        Misconfigured: files that cannot be read, contradict themselves or each other, or have too few sizes.
    """
    if twice := [text for text in files if files.count(text) > 1]:
        raise Misconfigured(f"--fit {printable(twice[0], 200)} comes twice: give each file once")
    runs = [run for text in files for run in _read(text, ranks)]
    name = _gpu(runs, gpu)
    base = _base(runs, network, name)
    whole = all_levels(base)
    rows = [_placed(row, run, whole[0].size, base) for run in runs for row in run.rows]
    _check_sizes(rows)
    cluster = Cluster(gpu=find_gpu(name), levels=levels(base, max((row.ranks - 1) * row.stride + 1 for row in rows)))
    source = f"one's own rows of nccl-tests: {', '.join(Path(text.partition('=')[2] or text).name for text in files)}"
    protocols: list[Protocol] = []
    errors: list[FitError] = []
    for kind in ("nvlink", "pcie", "network"):
        mine = [row for row in rows if _kind(row, cluster) == kind]
        if mine:
            protocols += fit_protocols(mine, cluster, source=source[:400])
            errors += _errors(mine, cluster)
    return NetworkFit(
        network=OwnNetwork(source=source[:400], gpu=name, levels=whole, protocols=tuple(protocols)),
        errors=tuple(errors),
        host_bound=sum(run.host_bound for run in runs),
    )


def _read(text: str, ranks: int | None) -> tuple[NcclTestsRun, ...]:
    operation, equals, path = text.partition("=")
    if equals and operation in OPERATIONS:
        return read_nccl_tests(Path(path), operation=operation, ranks=ranks)
    return read_nccl_tests(Path(text), ranks=ranks)


def _gpu(runs: Sequence[NcclTestsRun], given: str | None) -> str:
    """Return the name of the GPU of all runs."""
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
    """Return the named network that has the levels."""
    if network is not None:
        return network
    alone = all(run.ranks_per_host == row.ranks for run in runs for row in run.rows)
    if alone and gpu in IN_NODE:
        return IN_NODE[gpu]
    raise Misconfigured("--fit: give --network, a named one whose levels yours has; --ranks alone does not say them")


def _placed(row: Measured, run: NcclTestsRun, node: int, base: str) -> Measured:
    """Return a row with the distance of its ranks."""
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


def _check_sizes(rows: Sequence[Measured]) -> None:
    """Raise Misconfigured where an operation was measured for too few sizes to hold some of them out."""
    sizes: dict[tuple[str, int], set[float]] = {}
    for row in rows:
        sizes.setdefault((row.operation, row.ranks), set()).add(row.num_bytes)
    if not sizes:
        raise Misconfigured(
            "--fit: every row is bound by one process that launches on all GPUs: run one process for each"
        )
    for (operation, ranks), found in sizes.items():
        if len(found) < FEWEST_SIZES:
            raise Misconfigured(
                f"--fit: {operation} over {ranks} ranks has {len(found)} sizes: give {FEWEST_SIZES} or more, "
                "as by -b 64K -e 1G -f 2"
            )


def _kind(row: Measured, cluster: Cluster) -> str:
    top = reach(Group(ranks=row.ranks, stride=row.stride), cluster).crossed[-1]
    return cluster.levels[top].kind


def _errors(rows: Sequence[Measured], cluster: Cluster) -> list[FitError]:
    """Return the errors on sizes left out, by operation and ranks; Misconfigured where rows follow no law."""
    nccl = Network(cluster=cluster, protocols=nccl_protocols())
    checked = [each for each in held_out(rows, cluster) if each.left_out == "a third of the sizes"]
    found = []
    for operation, ranks in dict.fromkeys((row.operation, row.ranks) for row in rows):
        mine = [each for each in checked if (each.row.operation, each.row.ranks) == (operation, ranks)]
        mean, worst = error_of(mine) or (0.0, 0.0)
        if mean > LARGEST_ERROR:
            raise Misconfigured(
                f"--fit: {operation} over {ranks} ranks: sizes left out are predicted {mean:.0%} off, so its times "
                "follow no law of sizes; measure again on idle links"
            )
        others = [
            estimate(operation, each.row.num_bytes, Group(ranks=ranks, stride=each.row.stride), nccl).us / each.row.us
            for each in mine
        ]
        found.append(
            FitError(
                operation=operation,
                ranks=ranks,
                sizes=len({row.num_bytes for row in rows if (row.operation, row.ranks) == (operation, ranks)}),
                mean=mean,
                worst=worst,
                nccl_mean=fmean(abs(each - 1) for each in others) if others else 0.0,
            )
        )
    return found
