"""Fits, on rows from another model than theirs: protocols that change at the wrong sizes, and noise."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import msgspec
import numpy as np
import pytest

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Cluster
from counterpoint.plan.collective_cost import estimate
from counterpoint.plan.collective_fit import Checked, error_of, fit_protocols, held_out, splits
from counterpoint.plan.gpus import find_gpu
from counterpoint.plan.groups import Group
from counterpoint.plan.measured import Measured
from counterpoint.plan.network import Network, Protocol
from counterpoint.plan.networks import levels

HOST = Cluster(gpu=find_gpu("H200"), levels=levels("nvlink-h100", 8))
MIB = 1 << 20
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
EVEN, ODD = range(10, 31, 2), range(11, 31, 2)


def machine(operation: str, ranks: int, num_bytes: float) -> float:
    """µs on a made-up host: three protocols with their own latency and rate, changed too late and too early."""
    passes = PASSES[operation]
    steps = passes * (ranks - 1) * (0.3 if operation == "all_to_all" else 1.0)
    moved = passes * (ranks - 1) / ranks * num_bytes / 1e3
    rate = 345.0 * (0.96 if ranks == 2 else 1.0)
    times = [
        7.5 + 0.7 * steps + moved / (0.28 * rate),
        12.0 + 1.3 * steps + moved / (0.86 * rate),
        17.0 + 2.1 * steps + moved / rate + 0.9 * sqrt(moved / rate),
    ]
    return times[int(np.argmin([times[0] * 1.1, times[1], times[2] * 0.95]))]


def rows(powers: Iterable[int], groups: Iterable[int], *, noise: float = 0.02, seed: int = 0) -> list[Measured]:
    """All operations at powers of two."""
    rng = np.random.default_rng(seed)
    return [
        Measured(
            operation=operation,
            ranks=ranks,
            num_bytes=1 << power,
            us=machine(operation, ranks, 1 << power) * float(np.exp(rng.normal(0, noise))),
        )
        for operation in PASSES
        for ranks in groups
        for power in powers
    ]


def worst(protocols: tuple[Protocol, ...], asked: Iterable[Measured]) -> tuple[float, float]:
    """Largest error from 1 MiB up, and below."""
    network = Network(cluster=HOST, protocols=protocols)
    errors = [
        (row.num_bytes, abs(estimate(row.operation, row.num_bytes, Group(ranks=row.ranks), network).us / row.us - 1))
        for row in asked
    ]
    return max(error for size, error in errors if size >= MIB), max(error for size, error in errors if size < MIB)


@pytest.mark.parametrize("unseen", [2, 4, 8])
def test_unseen_sizes_of_an_unseen_group(unseen: int) -> None:
    """Fitted on two of 2, 4, 8 ranks at powers of 4, the third at sizes between: 10 % from 1 MiB up, 20 % below."""
    seen = rows(EVEN, {2, 4, 8} - {unseen})
    large, small = worst(fit_protocols(seen, HOST, source="made up", check=False), rows(ODD, [unseen], noise=0))
    assert (large <= 0.1, small <= 0.2) == (True, True), (large, small)


def test_noise_is_not_learnt() -> None:
    """With 3 % noise on what is fitted, what lies between is predicted within 10 % on the noiseless host."""
    seen = rows(EVEN, [2, 4, 8], noise=0.03, seed=1)
    large, _ = worst(fit_protocols(seen, HOST, source="made up", check=False), rows(ODD, [2, 4, 8], noise=0))
    assert large <= 0.1


def test_a_line_is_found_exactly() -> None:
    """Rows of latency + bytes / bandwidth without noise: 2 % at every size."""
    made = [
        Measured(operation="all_gather", ranks=8, num_bytes=1 << power, us=20.0 + (1 << power) * 0.875 / 350e3)
        for power in range(10, 31)
    ]
    assert max(worst(fit_protocols(made, HOST, source="made up", check=False), made)) <= 0.02


def test_the_stated_error_is_that_of_held_out_rows() -> None:
    """What the fit of an operation states is the error of rows that were left out, all of them."""
    measured = rows(EVEN, [2, 8])
    fitted = fit_protocols(measured, HOST, source="made up")
    stated = {protocol.operations: protocol.fit for protocol in fitted}[("all_gather",)]
    error = error_of([each for each in held_out(measured, HOST) if each.row.operation == "all_gather"])
    assert stated is not None
    assert error is not None
    assert (stated.error_mean, stated.error_max) == (round(error[0], 4), round(error[1], 4))


def test_no_row_helps_to_predict_itself() -> None:
    """A row that is off by half is predicted as if it were not there."""
    good = rows(EVEN, [8], noise=0)
    at = next(i for i, row in enumerate(good) if row.operation == "all_reduce" and row.num_bytes == 1 << 26)
    bad = [*good[:at], msgspec.structs.replace(good[at], us=good[at].us * 1.5), *good[at + 1 :]]

    def predicted(measured: list[Measured]) -> float:
        return next(each.predicted_us for each in held_out(measured, HOST) if each.row == measured[at])

    assert predicted(bad) == pytest.approx(predicted(good))


def test_every_size_but_the_outer_ones_is_left_out_once() -> None:
    """Thirds of the sizes: no smallest or largest, every other row in one of them."""
    measured = rows(EVEN, [8])
    left_out = [row for what, out in splits(measured) if what == "a third of the sizes" for row in out]
    inner = [row for row in measured if row.num_bytes not in (1 << 10, 1 << 30)]
    assert sorted(left_out, key=measured.index) == inner


def test_each_group_size_is_left_out() -> None:
    """2, 4 and 8 ranks: three more splits."""
    names = [what for what, _ in splits(rows(EVEN, [2, 4, 8]))]
    assert names[-3:] == ["2 ranks", "4 ranks", "8 ranks"]


def test_one_row_is_not_held_out() -> None:
    """With nothing to leave out, the error is unknown, and estimates say so."""
    fitted = fit_protocols(rows([20], [8])[:1], HOST, source="made up")
    found = estimate("all_gather", MIB, Group(ranks=8), Network(cluster=HOST, protocols=fitted))
    assert (found.error, found.validated) == (None, "not validated: no row was held out")


def test_what_was_not_measured_is_like_the_rest() -> None:
    """A broadcast, never measured, is fitted to all operations together and takes about as long as an all_gather."""
    network = Network(cluster=HOST, protocols=fit_protocols(rows(EVEN, [8]), HOST, source="made up", check=False))
    broadcast, gather = (estimate(name, 1 << 30, Group(ranks=8), network) for name in ("broadcast", "all_gather"))
    assert broadcast.protocol == "fitted"
    assert broadcast.us == pytest.approx(gather.us * 8 / 7, rel=0.1)


def test_the_same_rows_give_the_same_fit() -> None:
    """To the last digit."""
    one, other = (fit_protocols(rows(EVEN, [2, 8]), HOST, source="made up", check=False) for _ in range(2))
    assert one == other


def test_ranks_on_nodes_are_fitted_to_the_network() -> None:
    """Rows over NICs give the NIC's hop and efficiency: what was put in comes out at other sizes."""
    cluster = Cluster(gpu=find_gpu("H100"), levels=levels("h100-ndr-400", 64))
    made = [
        Measured(operation="all_gather", ranks=8, stride=8, num_bytes=1 << power, us=60.0 + (1 << power) * 0.875 / 40e3)
        for power in range(10, 33, 2)
    ]
    network = Network(cluster=cluster, protocols=fit_protocols(made, cluster, source="made up", check=False))
    found = estimate("all_gather", 1 << 27, Group(ranks=8, stride=8), network)
    assert found.protocol == "fitted"
    assert found.us == pytest.approx(60.0 + (1 << 27) * 0.875 / 40e3, rel=0.03)


def test_groups_over_nodes_are_fitted_to_both_levels() -> None:
    """32 ranks on 4 nodes hop over NVLink and NICs: what was put in comes out between the sizes."""
    cluster = Cluster(gpu=find_gpu("A100"), levels=levels("a100-hdr-200", 32))

    def us(num_bytes: int) -> float:
        return 100.0 + num_bytes * 1.9375 / 190e3

    made = [Measured(operation="all_reduce", ranks=32, num_bytes=1 << power, us=us(1 << power)) for power in EVEN]
    network = Network(cluster=cluster, protocols=fit_protocols(made, cluster, source="made up", check=False))
    found = [estimate("all_reduce", 1 << power, Group(ranks=32), network).us for power in ODD]
    assert found == pytest.approx([us(1 << power) for power in ODD], rel=0.05)


def test_error_of_nothing_is_unknown() -> None:
    """No row, no error."""
    assert error_of([]) is None


def test_error_is_relative() -> None:
    """30 instead of 40 µs: 25 %, whatever the sign."""
    row = Measured(operation="all_gather", ranks=8, num_bytes=1, us=40.0)
    assert error_of([Checked(row=row, predicted_us=30.0, left_out="x")]) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"us": 0.0}, r"in 0.0 µs cannot be"),
        ({"us": float("nan")}, r"in nan µs cannot be"),
        ({"num_bytes": -1.0}, r"of -1.0 bytes"),
        ({"ranks": 1}, r"over 1 ranks"),
        ({"operation": "gather"}, r"operation = 'gather': choose from"),
    ],
)
def test_rows_that_cannot_be_are_refused(bad: dict[str, object], match: str) -> None:
    """The error names the row and what is allowed."""
    row = msgspec.structs.replace(rows([20], [8])[0], **bad)
    with pytest.raises(Misconfigured, match=match):
        fit_protocols([row], HOST, source="made up")


def test_no_rows_are_refused() -> None:
    """It says where rows come from."""
    with pytest.raises(Misconfigured, match="no measured row: give some of `counterpoint measure blocks`"):
        fit_protocols([], HOST, source="made up")
