"""Fit protocols to measured collectives, and say how far they are off on rows that they have not seen.

Least squares of log(predicted / measured), an operation at a time, of

    base, hop              µs: L = base + hops · hop + what the levels add; PCIe and network hops are so much longer
                           than NVLink's as in NCCL's model (Ring, Simple: 3.4, 5.7, 14 µs)
    efficiency, lost       X = S · share / (gb_per_s · efficiency · (1 - lost)^(log2 n - 1))
    slopes of log φ        by log2(X / L), one per octave, each within 0 and 1 (`network.py` says why)

Few rows do not settle all of them, so each is drawn to a prior with a width: first all operations together to
φ = 1 + u and, below the smallest size that was measured, to the times of NCCL's own model; then each operation to what
all have in common. Group sizes share a curve: it is in units of their own latency. Held out are each third of the
sizes, and each group size, in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from counterpoint.plan.algorithms import offered, schedule
from counterpoint.plan.cluster import Cluster
from counterpoint.plan.collective_cost import estimate
from counterpoint.plan.congestion import shares_gb_per_s
from counterpoint.plan.groups import Group
from counterpoint.plan.measured import Measured, require
from counterpoint.plan.network import Fit, Kind, Network, Protocol
from counterpoint.plan.networks import nccl_protocols
from counterpoint.plan.reach import Reach, reach

__all__ = ["Checked", "error_of", "fit_protocols", "held_out", "splits"]

Array = NDArray[np.float64]

KNOTS = np.arange(-6.0, 13.0)  # log2 u
NOISE = 0.03  # of a measured time
LONGER: dict[Kind, float] = {"nvlink": 1.0, "pcie": 5.7 / 3.4, "network": 14.0 / 3.4}  # a hop than one over NVLink
DOUBT = 0.15  # of NCCL's own model where nothing was measured
# θ = log base, log hop, log efficiency, lost, slopes
FLAT = 1 / (1 + 2.0 ** -(KNOTS[:-1] + 0.5))  # slopes of φ = 1 + u
FIRST = np.concatenate([[np.log(10.0), np.log(1.0), np.log(0.95), 0.0], FLAT])
FIRST_WIDTH = np.concatenate([[0.5, 0.7, 0.1, 0.03], np.full(len(FLAT), 0.4)])
WIDTH = np.concatenate([[0.3, 0.5, 0.05, 0.03], np.full(len(FLAT), 0.2)])
LOWER = np.concatenate([[-7.0, -7.0, -3.0, -0.25], np.zeros(len(FLAT))])
UPPER = np.concatenate([[9.0, 9.0, 0.7, 0.25], np.ones(len(FLAT))])
BEND = 0.2  # how much two neighbouring slopes may differ from their prior differently


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A row, and what was predicted for it without it."""

    row: Measured
    predicted_us: float
    left_out: str

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_us / self.row.us - 1


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """R rows as arrays, by the A algorithms that NCCL chooses from, their P phases and L levels."""

    us: Array  # [R]
    num_bytes: Array  # [R]
    doublings: Array  # [R]: log2 n - 1
    hops: Array  # [A, R]: as many of NVLink
    given_us: Array  # [A, R]: latency of the levels themselves
    us_per_byte: Array  # [A, R, P, L]: at efficiency 1
    missing: NDArray[np.bool_]  # [A, R]

    def predicted_us(self, theta: Array) -> Array:
        """[R]."""
        base, hop, efficiency = np.exp(theta[:3])
        latency = base + self.hops * hop + self.given_us
        reached = efficiency * (1 - theta[3]) ** self.doublings
        bandwidth = self.us_per_byte.max(axis=3).sum(axis=2) * self.num_bytes / reached
        phi = np.interp(np.log2(bandwidth / latency), *_curve(theta))
        beyond = np.maximum(np.log2(bandwidth / latency) - KNOTS[-1], 0.0)
        times = latency * 2.0 ** (phi + beyond)
        times[self.missing] = np.inf
        return np.asarray(times.min(axis=0))


def _curve(theta: Array) -> tuple[Array, Array]:
    """Points of log2 φ by log2 u."""
    return KNOTS, np.concatenate([[0.0], np.cumsum(theta[4:])])


def fit_protocols(
    rows: Sequence[Measured], cluster: Cluster, *, source: str, nccl: tuple[int, int] = (2, 28), check: bool = True
) -> tuple[Protocol, ...]:
    """One protocol for each operation that was measured, and one for all others, for groups below the same levels.

    Args:
        rows: measured on `cluster`.
        cluster: what they were measured on.
        source: what they are: machine, versions, date.
        nccl: version.
        check: also fit without each third of the sizes and each group size, to state the error.

    Raises:
        Misconfigured: no rows, rows that cannot have been measured, or ranks beyond the cluster.
    """
    require(rows)
    common = _common(rows, cluster, nccl)
    checked = held_out(rows, cluster, nccl=nccl) if check else ()
    kinds = tuple(sorted({cluster.levels[reach_of(row, cluster).crossed[-1]].kind for row in rows}))
    made = partial(_protocol, kinds=kinds, gpu=cluster.gpu.name, source=source)
    found = [made((), common, rows, checked)]
    for operation in dict.fromkeys(row.operation for row in rows):
        mine = [row for row in rows if row.operation == operation]
        theta = _solve(_arrays(mine, cluster, nccl), common, WIDTH)
        known = [each for each in checked if each.row.operation == operation]
        found.append(made((operation,), theta, mine, known))
    return tuple(found)


def held_out(rows: Sequence[Measured], cluster: Cluster, *, nccl: tuple[int, int] = (2, 28)) -> tuple[Checked, ...]:
    """Every row that can be left out, predicted by a fit without it; what has no neighbours left stays in."""
    require(rows)
    checked: list[Checked] = []
    for left_out, out in splits(rows):
        seen = [row for row in rows if row not in out]
        common = _common(seen, cluster, nccl)
        for operation in dict.fromkeys(row.operation for row in rows):
            fitted = [row for row in seen if row.operation == operation]
            asked = [row for row in rows if row.operation == operation and row in out]
            if fitted and asked:
                theta = _solve(_arrays(fitted, cluster, nccl), common, WIDTH)
                times = _arrays(asked, cluster, nccl).predicted_us(theta)
                checked += [
                    Checked(row=row, predicted_us=float(us), left_out=left_out)
                    for row, us in zip(asked, times, strict=True)
                ]
    return tuple(checked)


def error_of(checked: Sequence[Checked]) -> tuple[float, float] | None:
    """Mean and largest |error|; None of nothing."""
    errors = [abs(each.error) for each in checked]
    return (sum(errors) / len(errors), max(errors)) if errors else None


def splits(rows: Sequence[Measured]) -> Iterator[tuple[str, frozenset[Measured]]]:
    """(what is left out, its rows): a third of the sizes, but never the smallest or largest; one group size."""
    alike: dict[tuple[str, int, int], list[Measured]] = {}
    for row in sorted(rows, key=lambda row: row.num_bytes):
        alike.setdefault((row.operation, row.ranks, row.stride), []).append(row)
    for third in range(3):
        if out := frozenset(row for those in alike.values() for row in those[1:-1][third::3]):
            yield "a third of the sizes", out
    groups = sorted({row.ranks for row in rows})
    for ranks in groups if len(groups) > 1 else ():
        yield f"{ranks} ranks", frozenset(row for row in rows if row.ranks == ranks)


def _common(rows: Sequence[Measured], cluster: Cluster, nccl: tuple[int, int]) -> Array:
    """θ of all operations together."""
    guessed = _below(rows, Network(cluster=cluster, protocols=nccl_protocols(), nccl=nccl))
    noise = np.array([NOISE] * len(rows) + [DOUBT] * len(guessed))
    return _solve(_arrays([*rows, *guessed], cluster, nccl), FIRST, FIRST_WIDTH, noise)


def _below(rows: Sequence[Measured], network: Network) -> list[Measured]:
    """What NCCL's own model says of sizes from 1 KiB to half of the smallest that was measured, by powers of 4."""
    smallest: dict[tuple[str, int, int], float] = {}
    for row in rows:
        key = (row.operation, row.ranks, row.stride)
        smallest[key] = min(row.num_bytes, smallest.get(key, np.inf))
    guessed = []
    for (operation, ranks, stride), measured in smallest.items():
        for num_bytes in (1 << power for power in range(10, 31, 2) if 1 << power < measured / 2):
            us = estimate(operation, num_bytes, Group(ranks=ranks, stride=stride), network).us
            guessed.append(Measured(operation=operation, ranks=ranks, stride=stride, num_bytes=num_bytes, us=us))
    return guessed


def reach_of(row: Measured, cluster: Cluster) -> Reach:
    """Levels that its group crosses."""
    return reach(Group(ranks=row.ranks, stride=row.stride), cluster)


def _arrays(rows: Sequence[Measured], cluster: Cluster, nccl: tuple[int, int]) -> _Rows:
    at = [reach_of(row, cluster) for row in rows]
    names = list(
        dict.fromkeys(name for row, a in zip(rows, at, strict=True) for name in offered(row.operation, a, nccl))
    )
    gb_per_s, depth = shares_gb_per_s(cluster.levels), len(cluster.levels)
    shape = (len(names), len(rows))
    hops, given = np.zeros(shape), np.zeros(shape)
    costs, missing = np.zeros((*shape, depth, depth)), np.ones(shape, dtype=np.bool_)
    for r, (row, a) in enumerate(zip(rows, at, strict=True)):
        for name in offered(row.operation, a, nccl):
            where = (names.index(name), r)
            missing[where] = False
            for p, phase in enumerate(schedule(row.operation, name, a) or ()):
                for i, steps, share in phase:
                    hops[where] += steps * LONGER[cluster.levels[i].kind]
                    given[where] += steps * cluster.levels[i].latency_us
                    costs[(*where, p, i)] = share / gb_per_s[i] / 1e3
    costs[missing] = 1e-12
    return _Rows(
        us=np.array([row.us for row in rows]),
        num_bytes=np.array([row.num_bytes for row in rows], dtype=np.float64),
        doublings=np.log2([row.ranks for row in rows]) - 1,
        hops=hops,
        given_us=given,
        us_per_byte=costs,
        missing=missing,
    )


def _solve(rows: _Rows, prior: Array, width: Array, noise: Array | float = NOISE) -> Array:
    """The θ that explains the rows best, drawn to the prior."""
    measured = np.log(rows.us)

    def residuals(theta: Array) -> Array:
        off = theta - prior
        return np.concatenate(
            [(np.log(rows.predicted_us(theta)) - measured) / noise, off / width, np.diff(off[4:]) / BEND]
        )

    start = np.clip(prior, LOWER + 1e-6, UPPER - 1e-6)
    return np.asarray(least_squares(residuals, start, bounds=(LOWER, UPPER), x_scale=width, max_nfev=200).x)


def _protocol(
    operations: tuple[str, ...],
    theta: Array,
    rows: Sequence[Measured],
    checked: Sequence[Checked],
    *,
    kinds: tuple[Kind, ...],
    gpu: str,
    source: str,
) -> Protocol:
    """θ as a record. The curve is moved along u until it ends on φ = u: efficiency is then that of the limit."""
    base, hop, efficiency = (float(value) for value in np.exp(theta[:3]))
    log_u, log_phi = _curve(theta)
    move = float(log_phi[-1] - log_u[-1])
    error = error_of(checked)
    fit = Fit(
        source=source,
        gpu=gpu,
        rows=len(rows),
        ranks=tuple(sorted({row.ranks for row in rows})),
        smallest_bytes=int(min(row.num_bytes for row in rows)),
        largest_bytes=int(max(row.num_bytes for row in rows)),
        held_out=", ".join(dict.fromkeys(each.left_out for each in checked)) or "nothing",
        error_mean=round(error[0], 4) if error else None,
        error_max=round(error[1], 4) if error else None,
    )
    return Protocol(
        name="fitted",
        base_us=round(base, 4),
        hop_us={kind: round(hop * longer, 4) for kind, longer in LONGER.items()},
        efficiency=dict.fromkeys(LONGER, round(efficiency / 2.0**move, 5)),
        lost_per_doubling=round(float(theta[3]), 5),
        curve=tuple((round(float(x) + move, 4), round(float(y), 4)) for x, y in zip(log_u, log_phi, strict=True)),
        operations=operations,
        kinds=kinds,
        fit=fit,
        source=f"fitted to {source}",
    )
