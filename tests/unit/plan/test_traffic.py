"""Traffic: what groups, jobs, traces and matrices say about pairs of ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from counterpoint.errors import Misconfigured
from counterpoint.plan.groups import Axis
from counterpoint.plan.parallel import Parallel
from counterpoint.plan.traffic import Block, Traffic, thin


def dense(traffic: Traffic) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(traffic.sampled.toarray())


def test_a_collective_is_shared_among_its_partners() -> None:
    """Each of 4 ranks sends 30 bytes: 10 to each other one, 20 per pair both ways."""
    found = dense(Traffic.of_job(Parallel(tp=4), {"tp": 30.0}))
    assert (found == 20.0 * (1 - np.eye(4))).all()


def test_stages_exchange_with_their_neighbours() -> None:
    """Of 4 stages, the first and the last do not meet."""
    found = dense(Traffic.of_job(Parallel(pp=4), {"pp": 5.0}))
    assert (found == 10.0 * (abs(np.subtract.outer(np.arange(4), np.arange(4))) == 1)).all()


def test_interleaved_stages_form_a_ring() -> None:
    """With several parts per stage the last stage hands back to the first."""
    found = dense(Traffic.of_job(Parallel(pp=4, virtual=2, schedule="interleaved"), {"pp": 5.0}))
    assert (found[0, 3], found[0, 2]) == (10.0, 0.0)


@pytest.mark.parametrize("axis", ["tp", "dp", "pp", "ep"])
def test_the_bytes_of_a_block_are_those_of_its_pairs(axis: Axis) -> None:
    """The sum in closed form and the sum over pairs are one number."""
    traffic = Traffic.of_job(Parallel(tp=2, dp=4, pp=3, ep=2), {axis: 7.0})
    assert traffic.num_bytes == pytest.approx(dense(traffic).sum() / 2)


def test_a_large_group_keeps_its_bytes_when_it_is_sampled() -> None:
    """Of 500 ranks, each meets some of the others in the sample, and all bytes are there."""
    traffic = Traffic.of_job(Parallel(dp=500), {"dp": 499.0})
    found = traffic.sampled
    assert (found.nnz < 500 * 65, found.sum() / 2) == (True, pytest.approx(traffic.num_bytes))


def test_a_matrix_counts_both_ways() -> None:
    """3 bytes there and 4 back are 7 between the two; the diagonal does not travel."""
    found = dense(Traffic.of_matrix(np.array([[9.0, 3.0], [4.0, 0.0]])))
    assert found.tolist() == [[0.0, 7.0], [7.0, 0.0]]


def test_sparse_and_dense_matrices_are_the_same() -> None:
    """scipy's matrices are read as they are."""
    matrix = np.triu(np.arange(16.0).reshape(4, 4), 1)
    assert (dense(Traffic.of_matrix(sparse.coo_array(matrix))) == dense(Traffic.of_matrix(matrix))).all()


def test_groups_of_a_trace() -> None:
    """Ranks of a group and what each of them sends, as a trace has it, add up."""
    found = dense(Traffic.of_groups(4, {(0, 1): 5.0, (0, 1, 2): 6.0, (3,): 9.0}))
    assert found[0].tolist() == [0.0, 16.0, 6.0, 0.0]


@given(seed=st.integers(0, 1000))
def test_other_names_for_ranks_move_the_matrix(seed: int) -> None:
    """M of renamed ranks is M with its rows and columns moved."""
    to = np.random.default_rng(seed).permutation(12)
    traffic = Traffic.of_job(Parallel(tp=2, dp=3, pp=2), {"tp": 9.0, "dp": 4.0, "pp": 1.0})
    assert (dense(traffic.permuted(to))[np.ix_(to, to)] == dense(traffic)).all()


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (np.zeros((2, 3)), "2 x 3: give one row and one column per rank"),
        (np.zeros(3), "3: give one row"),
        (np.array([[0.0, -1.0], [0.0, 0.0]]), "negative or no number"),
        (np.array([[0.0, math.nan], [0.0, 0.0]]), "negative or no number"),
        (np.zeros((0, 0)), "world_size = 0"),
        (sparse.coo_array((200_000, 200_000)), "world_size = 200000"),
    ],
)
def test_what_is_no_traffic_matrix_is_refused(matrix: object, said: str) -> None:
    """Not square, negative, not a number, empty, too large."""
    with pytest.raises(Misconfigured, match=said):
        Traffic.of_matrix(matrix)


@pytest.mark.parametrize(("sent", "said"), [({"xp": 1.0}, "choose from tp"), ({"tp": -1.0}, "bytes of tp = -1.0")])
def test_bytes_of_a_job_are_checked(sent: dict[Any, float], said: str) -> None:
    """The axis exists, and the bytes are a number."""
    with pytest.raises(Misconfigured, match=said):
        Traffic.of_job(Parallel(tp=2), sent)


@pytest.mark.parametrize(("group", "num_bytes"), [((0, 9), 1.0), ((1, 1), 1.0), ((0, 1), math.inf)])
def test_groups_of_a_trace_are_checked(group: tuple[int, ...], num_bytes: float) -> None:
    """Ranks of the job, each once, and a number of bytes."""
    with pytest.raises(Misconfigured, match="group"):
        Traffic.of_groups(4, {group: num_bytes})


def test_a_ring_of_two_has_one_pair() -> None:
    """Two stages that hand to each other both ways are one pair, not two."""
    block = Block(axis="pp", members=np.array([[0, 1]]), pair_bytes=np.array([3.0]), pattern="ring")
    assert (len(block.pairs()[0]), block.num_bytes) == (1, 3.0)


@given(seed=st.integers(0, 1000), count=st.sampled_from([500, 2000]))
def test_thinning_keeps_sums(seed: int, count: int) -> None:
    """Of 10,000 weights about `count` are left, and their sum is within 5 standard errors."""
    weights = np.random.default_rng(seed).lognormal(0, 3, 10_000)
    keep, thinned = thin(weights, count)
    threshold = thinned.min()
    error = np.sqrt((np.minimum(weights, threshold) * np.maximum(threshold - weights, 0)).sum())
    assert (abs(len(thinned) - count) < 5 * np.sqrt(count), bool((thinned >= weights[keep]).all())) == (True, True)
    assert abs(thinned.sum() - weights.sum()) <= 5 * error + 1e-9 * weights.sum()


def test_few_weights_are_not_thinned() -> None:
    """As many as may stay do."""
    assert thin(np.ones(5), 5)[1].tolist() == [1.0] * 5
