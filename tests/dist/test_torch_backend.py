"""Backend `counterpoint` under torch's own calls, beside gloo."""

import pytest

from tests.dist import torch_backend_programs as programs
from tests.support.ranks import Ranks, finding

HOSTS = pytest.mark.parametrize("ranks_per_host", [None, 2], ids=["one host", "two hosts"])


@HOSTS
def test_random_calls_are_those_of_gloo(four_ranks: Ranks, ranks_per_host: int | None) -> None:
    """Every bit of integers in any dtype; most calls are taken, those with split sizes and lists are not."""
    for count, taken in four_ranks.run(programs.random_calls, ranks_per_host, 5, 120):
        assert 0.5 * count < taken < 0.95 * count


test_what_ranks_find = finding({
    "every other call": (3, programs.other_calls, (), None),
    "calls of the group with one option, and sparse tensors": (3, programs.short_forms, (), None),
    "a barrier waits for earlier calls": (4, programs.barrier_after_calls, (), True),
    "futures complete and chain": (4, programs.futures, (None,), [1.0, 1.0]),
    "futures complete and chain, two hosts": (4, programs.futures, (2,), [1.0, 1.0]),
})  # fmt: skip


def test_torch_compares_calls_if_it_is_told_to(two_ranks: Ranks) -> None:
    for message, why in two_ranks.run(programs.compared_calls):
        assert message.startswith("Detected mismatch between collectives on ranks"), message
        assert why == "TORCH_DISTRIBUTED_DEBUG=DETAIL"


@HOSTS
def test_ddp_is_as_exact_as_with_gloo(four_ranks: Ranks, ranks_per_host: int | None) -> None:
    for ours, gloo, taken in four_ranks.run(programs.ddp_errors, ranks_per_host):
        assert 0 < ours <= 2 * gloo
        assert taken >= 4


def test_a_timeout_that_is_set_reaches_the_communicator(two_ranks: Ranks) -> None:
    waited, other = two_ranks.run(programs.shorter_timeout)
    assert waited.startswith("PeerTimeout: ")
    assert "no progress for 1 s; waiting for rank 1" in waited
    assert other == "came not"


def test_an_abort_fails_buckets_that_wait(two_ranks: Ranks) -> None:
    """Those under way, and those that the thread has not started."""
    said = two_ranks.run(programs.abort_with_buckets)[0]
    assert [text.partition(":")[0] for text in said] == ["Misconfigured"] * 5


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other options", "Misconfigured: pg_options of type _Options: give counterpoint.torch_backend.BackendOptions"),
        ("other group", "Misconfigured: a group of backend gloo: make it with backend='counterpoint'"),
        (
            "none taken",
            "NoEffect: counterpoint had no effect: asked for calls or modules that torch does not run, "
            "saw 1 all_reduce below 1 MiB by torch (below the crossover)",
        ),
    ],
)
def test_what_cannot_work_says_so(two_ranks: Ranks, what: str, message: str) -> None:
    for said in two_ranks.run(programs.refused, what):
        assert message in said
