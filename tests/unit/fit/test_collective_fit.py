"""Fits, on rows from another model than theirs: pipelines that overlap and fill otherwise, and noise."""

from collections.abc import Iterable
from math import sqrt

import msgspec
import numpy as np
import pytest
from fit.protocols import Checked, error_of, fit_protocols, held_out, splits

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group
from counterpoint.plan.network.nccl_tests import Measured
from counterpoint.plan.network.network import Network, Protocol, levels, nccl_protocols

HOST = Cluster(gpu=find_gpu("H200"), levels=levels("nvlink-h100", 8))
MIB = 1 << 20
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
EVEN, ODD = range(10, 31, 2), range(11, 31, 2)


FIGURES = {"LL": (7.5, 0.7, 0.45, 0.0), "LL128": (12.0, 1.5, 0.9, 0.0), "Simple": (12.0, 4.4, 1.0, 1.0)}
NCCL = Network(cluster=HOST, protocols=nccl_protocols())


def machine(operation: str, ranks: int, num_bytes: float) -> float:
    """µs on a made-up host: three protocols with their own latency and rate, changed where NCCL does."""
    base, hop, efficiency, fill = FIGURES[estimate(operation, num_bytes, Group(ranks=ranks), NCCL).protocol]
    passes = PASSES[operation]
    steps = 0.9 + 0.12 * (ranks - 1) if operation == "all_to_all" else passes * (ranks - 1)
    moved_us = passes * (ranks - 1) / ranks * num_bytes / 1e3 / 345.0 / (0.96 if ranks == 2 else 1.0)
    joined = ((hop * steps) ** 1.8 + (moved_us / efficiency) ** 1.8) ** (1 / 1.8)
    own = 0.0 if operation == "all_to_all" else num_bytes / ranks / 1.2e6
    return float(base + joined + own + fill * sqrt(moved_us))


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
    network = Network(cluster=HOST, protocols=(*nccl_protocols(), *protocols))
    errors = [
        (row.num_bytes, abs(estimate(row.operation, row.num_bytes, Group(ranks=row.ranks), network).us / row.us - 1))
        for row in asked
    ]
    return max(error for size, error in errors if size >= MIB), max(error for size, error in errors if size < MIB)


@pytest.mark.parametrize("unseen", [2, 4, 8])
def test_unseen_sizes_of_an_unseen_group(unseen: int) -> None:
    """Fitted on two of 2, 4, 8 ranks at powers of 4, the third at sizes between: 13 % from 1 MiB up, 10 % below."""
    seen = rows(EVEN, {2, 4, 8} - {unseen})
    large, small = worst(fit_protocols(seen, HOST, source="made up", check=False), rows(ODD, [unseen], noise=0))
    assert (large <= 0.13, small <= 0.1) == (True, True), (large, small)


def test_noise_is_not_learnt() -> None:
    """With 3 % noise on what is fitted, what lies between is predicted within 10 % on the noiseless host."""
    seen = rows(EVEN, [2, 4, 8], noise=0.03, seed=1)
    large, _ = worst(fit_protocols(seen, HOST, source="made up", check=False), rows(ODD, [2, 4, 8], noise=0))
    assert large <= 0.1


def test_what_was_put_in_comes_out() -> None:
    """Rows without noise from fitted figures: 4 % at every size, of groups that were not measured, too."""
    network = Network(cluster=HOST, protocols=(*nccl_protocols(), *fit_protocols(rows(EVEN, [2, 8]), HOST, source="x")))

    def made(powers: Iterable[int], groups: Iterable[int]) -> list[Measured]:
        return [
            msgspec.structs.replace(row, us=estimate(row.operation, row.num_bytes, Group(ranks=row.ranks), network).us)
            for row in rows(powers, groups, noise=0)
        ]

    fitted = fit_protocols(made(EVEN, [2, 8]), HOST, source="made up", check=False)
    assert max(worst(fitted, made(ODD, [2, 3, 4, 6, 8]))) <= 0.04


def test_the_stated_error_is_that_of_held_out_rows() -> None:
    """What an estimate states is the worst error of rows of its group size and band of sizes that were left out."""
    measured = rows(EVEN, [2, 8])
    network = Network(cluster=HOST, protocols=(*nccl_protocols(), *fit_protocols(measured, HOST, source="made up")))
    alike = [
        each
        for each in held_out(measured, HOST)
        if (each.row.operation, each.row.ranks) == ("all_gather", 8) and 1 << 20 <= each.row.num_bytes < 32 << 20
    ]
    error = error_of(alike)
    assert error is not None
    assert estimate("all_gather", 1 << 22, Group(ranks=8), network).error == round(error[1], 4)


def test_every_protocol_is_fitted_to_every_operation() -> None:
    """LL, LL128 and Simple for each of four operations, and for all others."""
    fitted = fit_protocols(rows(EVEN, [8]), HOST, source="made up", check=False)
    assert [(protocol.operations, protocol.name) for protocol in fitted] == [
        (operations, name) for operations in ((), *((name,) for name in PASSES)) for name in ("LL", "LL128", "Simple")
    ]


def test_a_size_measured_twice_is_left_out_twice() -> None:
    measured = [*rows(EVEN, [8]), *rows([20, 24], [8], seed=2)]
    for _, out, _ in splits(measured):
        left_out = {(row.operation, row.num_bytes) for row in out}
        assert [row for row in measured if row not in out and (row.operation, row.num_bytes) in left_out] == []


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
    left_out = [row for what, out, _ in splits(measured) if what == "a third of the sizes" for row in out]
    inner = [row for row in measured if row.num_bytes not in (1 << 10, 1 << 30)]
    assert sorted(left_out, key=measured.index) == inner


def test_each_group_size_is_left_out() -> None:
    """2, 4 and 8 ranks: three more splits, and each with every third of the sizes."""
    names = [what for what, _, _ in splits(rows(EVEN, [2, 4, 8]))]
    groups = [[f"{ranks} ranks"] + 3 * [f"{ranks} ranks, a third of the sizes"] for ranks in (2, 4, 8)]
    assert names[3:] == [name for group in groups for name in group]


def test_of_a_group_and_sizes_left_out_neither_is_seen() -> None:
    """Where both are left out, no row that stays has the group's ranks or, for its operation, a size to predict."""
    measured = rows(EVEN, [2, 4, 8])
    both = [split for split in splits(measured) if ", " in split[0]]
    for _, out, asked in both:
        seen = [row for row in measured if row not in out]
        (ranks,) = {row.ranks for row in asked}
        assert ranks not in {row.ranks for row in seen}
        assert {(row.operation, row.num_bytes) for row in seen}.isdisjoint(
            (row.operation, row.num_bytes) for row in asked
        )


def test_one_row_is_not_held_out() -> None:
    fitted = fit_protocols(rows([20], [8])[:1], HOST, source="made up")
    network = Network(cluster=HOST, protocols=(*nccl_protocols(), *fitted))
    found = estimate("all_gather", MIB, Group(ranks=8), network)
    assert (found.error, found.validated) == (None, "not validated: no row was held out")


def test_what_was_not_measured_is_like_the_rest() -> None:
    """A broadcast, never measured, is fitted to all operations together and takes about as long as an all_gather."""
    fitted = fit_protocols(rows(EVEN, [8]), HOST, source="made up", check=False)
    network = Network(cluster=HOST, protocols=(*nccl_protocols(), *fitted))
    broadcast, gather = (estimate(name, 1 << 30, Group(ranks=8), network) for name in ("broadcast", "all_gather"))
    assert broadcast.validated == "not validated: broadcast was not measured, others were"
    assert broadcast.us == pytest.approx(gather.us * 8 / 7, rel=0.1)


def test_the_same_rows_give_the_same_fit() -> None:
    one, other = (fit_protocols(rows(EVEN, [2, 8]), HOST, source="made up", check=False) for _ in range(2))
    assert one == other


def test_ranks_on_nodes_are_fitted_to_the_network() -> None:
    """Rows over NICs give the NIC's hop and efficiency: what was put in comes out at other sizes."""
    cluster = Cluster(gpu=find_gpu("H100"), levels=levels("h100-ndr-400", 64))
    made = [
        Measured(operation="all_gather", ranks=8, stride=8, num_bytes=1 << power, us=60.0 + (1 << power) * 0.875 / 40e3)
        for power in range(10, 33, 2)
    ]
    fitted = fit_protocols(made, cluster, source="made up", check=False)
    network = Network(cluster=cluster, protocols=(*nccl_protocols(), *fitted))
    found = estimate("all_gather", 1 << 27, Group(ranks=8, stride=8), network)
    assert found.source == "fitted to made up"
    assert found.us == pytest.approx(60.0 + (1 << 27) * 0.875 / 40e3, rel=0.03)


def test_groups_over_nodes_are_fitted_to_both_levels() -> None:
    """32 ranks on 4 nodes hop over NVLink and NICs: a machine 15 % slower than NCCL's figures is found so."""
    cluster = Cluster(gpu=find_gpu("A100"), levels=levels("a100-hdr-200", 32))
    nccl = Network(cluster=cluster, protocols=nccl_protocols())

    def us(num_bytes: int) -> float:
        return 1.15 * estimate("all_reduce", num_bytes, Group(ranks=32), nccl).us

    made = [Measured(operation="all_reduce", ranks=32, num_bytes=1 << power, us=us(1 << power)) for power in EVEN]
    fitted = fit_protocols(made, cluster, source="made up", check=False)
    network = Network(cluster=cluster, protocols=(*nccl_protocols(), *fitted))
    found = [estimate("all_reduce", 1 << power, Group(ranks=32), network).us for power in ODD]
    assert found == pytest.approx([us(1 << power) for power in ODD], rel=0.1)


def test_error_is_relative() -> None:
    """30 instead of 40 µs: 25 %, whatever the sign; of no rows it is not known."""
    row = Measured(operation="all_gather", ranks=8, num_bytes=1, us=40.0)
    assert error_of([Checked(row=row, predicted_us=30.0, left_out="x")]) == (0.25, 0.25)
    assert error_of([]) is None


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
    row = msgspec.structs.replace(rows([20], [8])[0], **bad)
    with pytest.raises(Misconfigured, match=match):
        fit_protocols([row], HOST, source="made up")


def test_no_rows_are_refused() -> None:
    with pytest.raises(Misconfigured, match="no measured row: give some of `measure_suites"):
        fit_protocols([], HOST, source="made up")
