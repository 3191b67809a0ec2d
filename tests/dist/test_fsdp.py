"""FSDP2 with zero-SM collectives beside stock FSDP2, between real processes: every way to train gives the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import fsdp_training as training
from tests.support.fsdp_training import BF16, CASES, Case
from tests.support.ranks import Ranks, finding


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_is_that_of_stock(two_ranks: Ranks, case: Case) -> None:
    """Losses, gradients, norms and parameters, bit by bit; in every module our hooks moved the data, in place."""
    assert two_ranks.run(training.beside_stock, case) == [([], [])] * 2


HSDP = Case(policy=BF16, mesh=(2, 2))  # two replicas of two shards each: torch reduces between them
test_what_ranks_find = finding({
    "premultiplied sums": (2, training.premultiplied, (), []),
    "asynchronous gathers are waited for": (2, training.unsharded_ahead, (), []),
    "layers are gathered twice in each of three microbatches, the root once, and gradients scattered once": (
        2, training.gathers_and_scatters, (Case(microbatches=3, steps=1),), [(3, 1, "avg"), *[(6, 1, "avg")] * 3]),
    "HSDP, ours within a replica": (4, training.beside_stock, (HSDP,), ([], [])),
    "HSDP, accumulated": (4, training.beside_stock, (replace(HSDP, microbatches=2),), ([], [])),
})  # fmt: skip


@pytest.mark.parametrize("reshard", [True, 2])
def test_sums_of_four_are_as_exact_as_those_of_stock(four_ranks: Ranks, reshard: bool | int) -> None:
    """Sharded over four, and over two after forward: errors of gradients at most twice those of gloo's sums."""
    errors = four_ranks.run(training.rounding, Case(mesh=(4,), reshard=reshard, steps=1))
    assert [row for rank in errors for row in rank if row[1] > 2 * row[2]] == []


def test_the_smaller_group_gathers_in_place(four_ranks: Ranks) -> None:
    """Parameters kept on two of four ranks are gathered again by a communicator of these two, in symmetric memory; only
    the root, which is not, is gathered without a copy of FSDP2's."""
    for _, wrong in four_ranks.run(training.beside_stock, Case(mesh=(4,), reshard=2, steps=1, direct=(False, True))):
        assert [line.split(":")[0] for line in wrong] == ["(root)"]


def test_sizes_are_foreseen(two_ranks: Ranks) -> None:
    """The report says before the first step how much each module gathers, with what FSDP2 pads."""
    for sizes in two_ranks.run(training.sizes):
        assert [(foreseen, foreseen) for foreseen, _ in sizes] == sizes


def test_checkpoints_are_those_of_stock(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(training.saved_and_loaded, str(tmp_path / "checkpoint")) == [[]] * 2


def test_two_hundred_steps_follow_stock(two_ranks: Ranks) -> None:
    """Two stock runs give the same losses on CPUs, bit by bit, so the noise is zero: ours are the same, and fall."""
    for stock, again, ours in two_ranks.run(training.curves, 200):
        assert stock == again == ours
        assert ours[-1] < 0.1 * ours[0]


def test_large_modules_may_keep_torchs_collectives(two_ranks: Ranks) -> None:
    """Above `limit_bytes` nothing changes, the report says so, and training is that of stock."""
    for different, lines in two_ranks.run(training.limited):
        assert (different, "direct" in lines[1], ["torch's: it gathers" in line for line in lines[2:5]]) == (
            [],
            True,
            [True] * 3,
        )


def test_evaluation_is_that_of_stock(two_ranks: Ranks) -> None:
    for stock, ours in two_ranks.run(training.evaluated):
        assert stock == ours


def test_tensor_parallel_layers_are_those_of_stock(four_ranks: Ranks) -> None:
    """On a mesh of two axes ours run along the one over which FSDP2 shards; sums of the other have another order."""
    for furthest, ranks in four_ranks.run(training.beside_tensor_parallel):
        assert {*ranks} <= {(0, 2), (1, 3)}
        assert furthest < 8 * 2**-23
