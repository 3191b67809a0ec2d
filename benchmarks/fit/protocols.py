"""Fit protocols to measured collectives, and say how far the fit is off on rows that it had not seen.

NCCL's own model says by which protocol each row was run (LL, LL128 or Simple, by size and ranks); its figures are not
fitted, they only choose. Versions and tuners choose otherwise, so of several `DIALECTS` the one that explains the rows
best says what was chosen: without LL128, with LL up to larger sizes, with figures of trees apart from those of rings.
Figures of a protocol are, each as a logarithm, to relative errors:

    base                   µs
    hop / base             PCIe and network hops are so much longer than NVLink's as in NCCL's model
    efficiency             of the links' bandwidth
    own                    GB/s, at which a rank handles the shard that it does not send
    fill                   of √(base · X)

Few rows do not settle all of them, so each is drawn to a prior with a width: what all operations have in common to
what the protocol does (LL sends a flag with every 4 bytes, LL128 with every 120) and to the ratios of NCCL's latencies;
each operation to what they have in common. Ranks are in the formulas only (`network.py`, `algorithms.py`): no figure
belongs to a group size, which is what predicts one that was not measured. Held out are each third of the sizes, each
group size, and each group size together with each third of the sizes of all others, in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite, log
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import least_squares

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.cluster import Cluster
from counterpoint.plan.network.algorithms import ALGORITHMS, own_share, schedule, shared_gb_per_s
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group, reach
from counterpoint.plan.network.nccl_tests import Measured
from counterpoint.plan.network.network import (
    OPERATIONS,
    Fit,
    FittedRange,
    Kind,
    Network,
    Protocol,
    nccl_protocols,
)

Array = NDArray[np.float64]

NOISE = 0.04  # of a measured time
LONGER: dict[Kind, float] = {"nvlink": 1.0, "pcie": 5.7 / 3.4, "network": 14.0 / 3.4}  # a hop than one over NVLink
JOIN = 2.0  # hops and bytes hide each other as the sides of a right angle make its diagonal
OTHER = 10.0  # squared errors, in units of noise, that another dialect than NCCL's own model has to spare
BANDS = (1 << 20, 32 << 20)  # bytes: errors are stated below, between and above
# base µs, hop / base, efficiency, own GB/s, fill
PRIOR = {
    "LL": np.log([9.0, 0.1, 0.5, 1000.0, 0.1]),
    "LL128": np.log([14.0, 0.136, 0.92, 1000.0, 0.1]),
    "Simple": np.log([13.0, 0.4, 1.0, 1000.0, 0.3]),
}
WIDTH = np.array([0.4, 0.1, 0.1, 0.5, 0.6])  # of what all operations have in common
EACH = np.array([0.4, 0.1, 0.05, 0.4, 0.3])  # of an operation around it


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A row, and what was predicted for it without it."""

    row: Measured
    predicted_us: float
    left_out: str

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_us / self.row.us - 1


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """R rows of one protocol as arrays, by the phases P and levels L of the algorithm that NCCL took."""

    us: Array  # [R]
    hops: Array  # [R]: as many of NVLink
    given_us: Array  # [R]: latency of the levels themselves
    links_us: Array  # [R]: at efficiency 1
    own: Array  # [R]: KB
    operation: NDArray[np.intp]  # [R]

    def predicted_us(self, theta: Array) -> Array:
        """[R], with theta [operations, 5]."""
        base, ratio, efficiency, rate, fill = np.exp(theta[self.operation]).T
        hops, links = base * ratio * self.hops + self.given_us, self.links_us / efficiency
        joined = (hops**JOIN + links**JOIN) ** (1 / JOIN)
        return np.asarray(base + joined + self.own / rate + fill * np.sqrt(base * links))


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """θ of one protocol: what all operations have in common, and of each in the order of `operations`."""

    common: Array  # [5]
    each: Array  # [operations, 5]


_Way = tuple[str, bool | None]
"""A protocol's name, and whether trees or all else; None: both."""
_Solved = dict[_Way, _Figures]


class Dialect(NamedTuple):
    """Describes how NCCL may have chosen, and which of its ways have figures of their own."""

    offered: tuple[str, ...] = ("LL", "LL128", "Simple")  # protocols
    believed: float = 1.0  # `Protocol.believed` of LL
    trees_apart: bool = False

    def scaled(self, protocol: Protocol) -> Protocol:
        """Return one of NCCL's own protocols with the bandwidth that NCCL believes it to have."""
        if protocol.name != "LL" or self.believed == 1:
            return protocol
        efficiency, ceilings = (
            {kind: self.believed * value for kind, value in figures.items()}
            for figures in (protocol.efficiency, protocol.ceiling_gb_per_s)
        )
        return replace(protocol, efficiency=efficiency, ceiling_gb_per_s=ceilings)


DIALECTS = tuple(
    Dialect(offered, believed, trees_apart)
    for trees_apart in (False, True)
    for offered in (("LL", "LL128", "Simple"), ("LL", "Simple"))
    for believed in (1.0, 2.0, 4.0, 8.0)
)


class _Machine:
    """Holds where rows were measured: by which protocol each was run there, and what it did on which links."""

    def __init__(self, rows: Sequence[Measured], cluster: Cluster, nccl: tuple[int, int], dialect: Dialect) -> None:
        self.operations = tuple(dict.fromkeys(row.operation for row in rows))
        self.dialect = dialect
        self._cluster = cluster
        measured = Cluster(gpu=cluster.gpu, levels=tuple(replace(each, latency_us=0.0) for each in cluster.levels))
        protocols = tuple(dialect.scaled(each) for each in nccl_protocols() if each.name in dialect.offered)
        self._network = Network(cluster=measured, protocols=protocols, nccl=nccl)  # as `Links.measured` has it
        self._taken = {row: self._pick(row) for row in rows}
        self.ways: tuple[_Way, ...] = tuple(
            (name, trees) for name in dialect.offered for trees in ((False, True) if dialect.trees_apart else (None,))
        )

    def _pick(self, row: Measured) -> tuple[str, str]:
        found = estimate(row.operation, row.num_bytes, Group(ranks=row.ranks, stride=row.stride), self._network)
        return found.algorithm, found.protocol

    def taken(self, row: Measured) -> tuple[str, str]:
        """Return the algorithm and the protocol by which a row was run."""
        return self._taken[row]

    def by(self, way: _Way, rows: Sequence[Measured]) -> tuple[Measured, ...]:
        """Return those that NCCL runs this way."""
        name, trees = way
        return tuple(
            row
            for row in rows
            if self._taken[row][1] == name and (trees is None or trees == (self._taken[row][0] == "tree"))
        )

    def arrays(self, rows: Sequence[Measured]) -> _Rows:
        """Return rows of one protocol."""
        columns = np.array([self._columns(row) for row in rows]).reshape(len(rows), 5).T
        us, hops, given, links, own = columns
        operation = np.array([self.operations.index(row.operation) for row in rows], dtype=np.intp)
        return _Rows(us=us, hops=hops, given_us=given, links_us=links, own=own, operation=operation)

    def _columns(self, row: Measured) -> tuple[float, float, float, float, float]:
        levels = self._cluster.levels
        at, algorithm = reach(Group(ranks=row.ranks, stride=row.stride), self._cluster), self._taken[row][0]
        gb_per_s, hops, given, us_per_byte = shared_gb_per_s(levels), 0.0, 0.0, 0.0
        for phase in schedule(row.operation, algorithm, at) or ():
            hops += sum(steps * LONGER[levels[i].kind] for i, steps, _ in phase)
            given += sum(steps * levels[i].latency_us for i, steps, _ in phase)
            us_per_byte += max(share / gb_per_s[i] / 1e3 for i, _, share in phase)
        own = own_share(row.operation, algorithm, at) * row.num_bytes / 1e3
        return row.us, hops, given, us_per_byte * row.num_bytes, own

    def gb_per_s(self) -> dict[Kind, float]:
        """Return the GB/s of the links by kind: the slowest of levels of the same kind."""
        found: dict[Kind, float] = {}
        for level, rate in zip(self._cluster.levels, shared_gb_per_s(self._cluster.levels), strict=True):
            found[level.kind] = min(rate, found.get(level.kind, rate))
        return found

    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of the highest levels that rows crossed."""
        tops = {reach(Group(ranks=row.ranks, stride=row.stride), self._cluster).crossed[-1] for row in self._taken}
        return tuple(sorted({self._cluster.levels[top].kind for top in tops}))

    def predicted_us(self, figures: _Solved, rows: Sequence[Measured]) -> dict[Measured, float]:
        """Return the time of rows with these figures."""
        found: dict[Measured, float] = {}
        for way, each in figures.items():
            mine = self.by(way, rows)
            found |= zip(mine, self.arrays(mine).predicted_us(each.each).tolist(), strict=True)
        return found


class _Machines:
    """Holds the same rows in every dialect."""

    def __init__(
        self, rows: Sequence[Measured], cluster: Cluster, nccl: tuple[int, int], dialects: Sequence[Dialect]
    ) -> None:
        require(rows)
        self._each = [_Machine(rows, cluster, nccl, dialect) for dialect in dialects]
        self._known: dict[tuple[str, tuple[Measured, ...], tuple[tuple[str, str], ...]], _Figures] = {}

    def solve(self, rows: Sequence[Measured]) -> tuple[_Machine, _Solved]:
        """Return the machine in the dialect that explains these rows best, and its figures."""
        found = [(machine, self._figures(machine, rows)) for machine in self._each]
        return min(found, key=lambda each: self._cost(each[0], each[1], rows))  # the first of equal ones

    def _figures(self, machine: _Machine, rows: Sequence[Measured]) -> _Solved:
        """Return the figures of every way; the same rows by the same algorithms are solved once for all dialects."""
        solved: _Solved = {}
        for way in machine.ways:
            mine = machine.by(way, rows)
            key = (way[0], mine, tuple(machine.taken(row) for row in mine))
            if key not in self._known:
                self._known[key] = _solve(machine.arrays(mine), PRIOR[way[0]], len(machine.operations))
            solved[way] = self._known[key]
        return solved

    def _cost(self, machine: _Machine, figures: _Solved, rows: Sequence[Measured]) -> float:
        """Return the squared errors in units of noise, and the price of another dialect than NCCL's own model.

        Where several group sizes were measured, the errors are those of each without it, since jobs have others.
        """
        groups = sorted({row.ranks for row in rows})
        predicted: dict[Measured, float] = {} if len(groups) > 1 else machine.predicted_us(figures, rows)
        for ranks in groups if len(groups) > 1 else ():
            others = [row for row in rows if row.ranks != ranks]
            predicted |= machine.predicted_us(
                self._figures(machine, others), [row for row in rows if row.ranks == ranks]
            )
        price = OTHER * (machine.dialect != DIALECTS[0])
        price += len(WIDTH) * log(len(rows)) * machine.dialect.trees_apart  # of more figures (Schwarz 1978)
        return price + sum((log(us / row.us) / NOISE) ** 2 for row, us in predicted.items())


def require(rows: Sequence[Measured]) -> None:
    """Raise Misconfigured for a row that cannot have been measured, or for none."""
    if not rows:
        raise Misconfigured("no measured row: give some of `measure_suites.py blocks` or of nccl-tests")
    for row in rows:
        if row.operation not in OPERATIONS:
            raise Misconfigured(f"operation = {printable(row.operation)!r}: choose from: {', '.join(OPERATIONS)}")
        if row.ranks < 2 or not row.num_bytes > 0 or not row.us > 0 or not isfinite(row.us + row.num_bytes):
            raise Misconfigured(
                f"{row.operation} of {row.num_bytes} bytes over {row.ranks} ranks in {row.us} µs cannot be: "
                "give 2 ranks or more, bytes and µs above 0"
            )


def fit_protocols(
    rows: Sequence[Measured],
    cluster: Cluster,
    *,
    source: str,
    nccl: tuple[int, int] = (2, 28),
    check: bool = True,
    dialects: Sequence[Dialect] = DIALECTS,
) -> tuple[Protocol, ...]:
    """Return each protocol for every operation that was measured, for groups below the same levels.

    Where several operations were measured, all others get figures of what these have in common.

    Args:
        rows: measured on `cluster`.
        cluster: what they were measured on.
        source: what they are: machine, versions, date.
        nccl: version.
        check: also fit without each third of the sizes and each group size, to state the error.
        dialects: how NCCL may have chosen; the first one alone for rows of several machines, which chose differently.

    Returns:
        Protocols with a `Fit` each.

    Raises:
        Misconfigured: no rows, rows that cannot have been measured, or ranks beyond the cluster.
    """
    machine, solved = _Machines(rows, cluster, nccl, dialects).solve(rows)
    checked = held_out(rows, cluster, nccl=nccl, dialects=dialects) if check else ()
    gpu, links = cluster.gpu.name, machine.gb_per_s()
    anything = Fit(source=source, gpu=gpu, rows=len(rows), held_out="", gb_per_s=links, spans=())
    found = []
    if len(machine.operations) > 1:
        found += [_protocol(machine, way, each.common, (), anything) for way, each in solved.items()]
    for i, operation in enumerate(machine.operations):
        mine = [row for row in rows if row.operation == operation]
        known = [each for each in checked if each.row.operation == operation]
        left_out = ", ".join(dict.fromkeys(each.left_out for each in known)) or "nothing"
        fit = Fit(source=source, gpu=gpu, rows=len(mine), held_out=left_out, gb_per_s=links, spans=_spans(mine, known))
        found += [_protocol(machine, way, each.each[i], (operation,), fit) for way, each in solved.items()]
    return tuple(found)


def held_out(
    rows: Sequence[Measured],
    cluster: Cluster,
    *,
    nccl: tuple[int, int] = (2, 28),
    dialects: Sequence[Dialect] = DIALECTS,
) -> tuple[Checked, ...]:
    """Return every row that can be left out, predicted by a fit without it; what has no neighbours left stays in.

    Args:
        rows: measured on `cluster`.
        cluster: what they were measured on.
        nccl: version.
        dialects: how NCCL may have chosen.
    """
    machines = _Machines(rows, cluster, nccl, dialects)
    checked: list[Checked] = []
    for left_out, out, asked in splits(rows):
        seen = [row for row in rows if row not in out]
        known = {row.operation for row in seen}
        machine, figures = machines.solve(seen)
        mine = [row for row in rows if row in asked and row.operation in known]
        checked += [
            Checked(row=row, predicted_us=us, left_out=left_out)
            for row, us in machine.predicted_us(figures, mine).items()
        ]
    return tuple(checked)


def error_of(checked: Sequence[Checked]) -> tuple[float, float] | None:
    """Mean and largest |error|; None of nothing."""
    errors = [abs(each.error) for each in checked]
    return (sum(errors) / len(errors), max(errors)) if errors else None


def splits(rows: Sequence[Measured]) -> Iterator[tuple[str, frozenset[Measured], frozenset[Measured]]]:
    """Yield what is left out, its rows, and those to predict.

    A third of the sizes, but never the smallest or largest; one group size; one group size and a third of the sizes of
    all, of which the group's are to be predicted: neither they nor their sizes were seen.

    Yields:
        The name, the rows, and those of them that are to be predicted.
    """
    thirds = _thirds(rows)
    yield from (("a third of the sizes", out, out) for out in thirds)
    groups = sorted({row.ranks for row in rows})
    for ranks in groups if len(groups) > 1 else ():
        group = frozenset(row for row in rows if row.ranks == ranks)
        yield f"{ranks} ranks", group, group
        yield from ((f"{ranks} ranks, a third of the sizes", group | out, group & out) for out in thirds)


def _thirds(rows: Sequence[Measured]) -> list[frozenset[Measured]]:
    """Rows of every third size between the smallest and the largest, of each operation and group."""
    sizes: dict[tuple[str, int, int], list[float]] = {}
    for row in sorted(rows, key=lambda row: row.num_bytes):
        alike = sizes.setdefault((row.operation, row.ranks, row.stride), [])
        alike += [] if row.num_bytes in alike else [row.num_bytes]
    found = []
    for third in range(3):
        left_out = {key: frozenset(alike[1:-1][third::3]) for key, alike in sizes.items()}
        found.append(frozenset(row for row in rows if row.num_bytes in left_out[row.operation, row.ranks, row.stride]))
    return [out for out in found if out]


def _spans(rows: Sequence[Measured], checked: Sequence[Checked]) -> tuple[FittedRange, ...]:
    """One for each group size and band of sizes."""

    def where(row: Measured) -> tuple[int, int]:
        return row.ranks, sum(row.num_bytes >= start for start in BANDS)

    spans = []
    for key, group in groupby(sorted(rows, key=where), where):
        sizes = sorted(row.num_bytes for row in group)
        error = error_of([each for each in checked if where(each.row) == key])
        mean, worst = (round(error[0], 4), round(error[1], 4)) if error else (None, None)
        smallest, largest = int(sizes[0]), int(sizes[-1])
        spans.append(FittedRange(ranks=key[0], smallest_bytes=smallest, largest_bytes=largest, mean=mean, worst=worst))
    return tuple(spans)


def _solve(rows: _Rows, prior: Array, operations: int) -> _Figures:
    """The figures that explain the rows best, drawn to the prior."""
    width = np.concatenate([WIDTH, np.tile(EACH, operations)])

    def theta(x: Array) -> Array:
        return np.asarray(prior + x[:5] + x[5:].reshape(operations, 5))

    def residuals(x: Array) -> Array:
        return np.concatenate([np.log(rows.predicted_us(theta(x)) / rows.us) / NOISE, x / width])

    start = np.zeros(len(width))
    x = np.asarray(least_squares(residuals, start, x_scale=width, max_nfev=200).x) if len(rows.us) else start
    return _Figures(common=prior + x[:5], each=theta(x))


def _protocol(machine: _Machine, way: _Way, theta: Array, operations: tuple[str, ...], fit: Fit) -> Protocol:
    """Return θ as a record."""
    base, ratio, efficiency, rate, fill = (float(value) for value in np.exp(theta))
    name, trees = way
    return Protocol(
        name=name,
        base_us=round(base, 4),
        hop_us={kind: round(base * ratio * longer, 4) for kind, longer in LONGER.items()},
        efficiency=dict.fromkeys(LONGER, round(efficiency, 5)),
        own_gb_per_s=round(rate, 2),
        join=JOIN,
        fill=round(fill, 4),
        believed=machine.dialect.believed if name == "LL" else 1.0,
        operations=operations,
        algorithms=()
        if trees is None
        else ("tree",)
        if trees
        else tuple(each for each in ALGORITHMS if each != "tree"),
        kinds=machine.kinds(),
        fit=fit,
        source=f"fitted to {fit.source}",
    )
