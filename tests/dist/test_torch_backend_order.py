"""Which way a call of backend `counterpoint` goes, and in which order calls come: the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from counterpoint.machine.profile import default_profile
from counterpoint.parallel.group import CHANNELS
from tests.dist import torch_backend_order_programs as programs
from tests.dist.test_collectives_failures import SLOWER
from tests.support.ranks import Ranks

DIFFER = [
    ({"crossover_bytes": {"all_reduce": 1}}, {"crossover_bytes": {"all_reduce": 1 << 40}}, "crossover_bytes"),
    ({"profile": default_profile()}, {"profile": SLOWER}, "profile"),
    ({"mailbox_bytes": 1 << 20}, {"mailbox_bytes": None}, "mailbox_bytes"),
    ({"ranks_per_host": 1}, {"ranks_per_host": 2}, "ranks_per_host"),
]


@pytest.mark.parametrize(("first", "second", "name"), DIFFER, ids=[name for *_, name in DIFFER])
def test_options_that_differ_are_told_to_all(
    two_ranks: Ranks, first: dict[str, Any], second: dict[str, Any], name: str
) -> None:
    """At the first call, before anybody waits for the other; only what differs is named."""
    for said in two_ranks.run(programs.called_with, (first, second)):
        assert said.startswith("Misconfigured"), said
        assert [other for *_, other in DIFFER if other in said] == [name], said


@pytest.mark.parametrize("name", ["mailbox_bytes", "ranks_per_host"])
def test_options_that_differ_are_told_to_both_ends_of_a_message(two_ranks: Ranks, name: str) -> None:
    """Before one goes to a mailbox and the other to NCCL."""
    for rank, said in enumerate(two_ranks.run(programs.messages_with, name)):
        assert said.startswith(f"Misconfigured: messages of ranks {rank} and {1 - rank}: "), said
        assert f"{name}=1" in said


def test_memory_and_the_backward_pass_decide_nothing(two_ranks: Ranks) -> None:
    """The same call of a bucket's size in symmetric memory and in a backward pass, and of plain memory outside."""
    assert two_ranks.run(programs.elsewhere, False) == [("torch", 2.0)] * 2
    assert two_ranks.run(programs.elsewhere, True) == [("zero_sm", 2.0)] * 2


def test_uneven_inputs_with_buckets_in_symmetric_memory(two_ranks: Ranks) -> None:
    """Under torch's `Join` the rank that has ended reduces zeros in plain memory, outside of a backward pass."""
    for ours, gloo, taken in two_ranks.run(programs.joined):
        assert ours == gloo
        assert taken == {"zero_sm"}


def test_a_hook_on_uneven_inputs_has_the_channels_of_its_buckets(two_ranks: Ranks) -> None:
    """Of `overlap`: wherever the buckets lie on a rank."""
    first, second = two_ranks.run(programs.channels_of_buckets)
    assert first == second == [*CHANNELS["buckets"]] * 2


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("operation", programs.OPERATIONS)
def test_the_layout_of_one_rank_decides_nothing(two_ranks: Ranks, operation: str, async_op: bool) -> None:
    """Its output is a view with strides: it gets what gloo gives, and on both ranks the backend takes the call."""
    assert two_ranks.run(programs.strided_on_one, operation, async_op) == [(True, 1)] * 2


def test_large_calls_go_in_pieces_wherever_they_lie(two_ranks: Ranks) -> None:
    """As all ranks cut them, blocking or not."""
    assert two_ranks.run(programs.in_pieces) == [[3, 3, 3]] * 2


@pytest.mark.parametrize("operation", programs.OPERATIONS)
def test_calls_in_callbacks_have_one_order_with_those_that_torch_makes(two_ranks: Ranks, operation: str) -> None:
    """A rank whose callback is late does not let its next call go first."""
    assert two_ranks.run(programs.called_in_callbacks, operation, 5) == [[202.0, 2.0] * 5] * 2


def test_a_tensor_that_comes_twice_on_one_rank_decides_nothing(two_ranks: Ranks) -> None:
    """It is reduced once, as by gloo, and all ranks make the same calls."""
    assert two_ranks.run(programs.repeated_on_one) == [[2.0, 2.0]] * 2


def test_two_threads_may_use_a_group_first_at_the_same_time(two_ranks: Ranks) -> None:
    """One of them opens it, whichever on each rank."""
    assert two_ranks.run(programs.opened_by_two_threads, 10) == [{2.0}] * 2


def test_a_callback_of_a_group_that_has_ended_is_told(two_ranks: Ranks) -> None:
    """Torch does not make its call either, which would wait for the other ranks."""
    said, _ = two_ranks.run(programs.ended_before_a_callback)
    assert said == "Misconfigured: allreduce on a process group that was destroyed or aborted; make a new one"


def test_powersgd_trains_as_on_gloo(two_ranks: Ranks) -> None:
    """Torch's own hook, which makes collectives in callbacks of others, and waits for them there."""
    for ours, gloo, taken in two_ranks.run(programs.powersgd):
        assert ours == pytest.approx(gloo, rel=1e-5)
        assert taken > 0


def test_a_barrier_waits_for_calls_that_nobody_has_waited_for(two_ranks: Ranks) -> None:
    """Their tensors live as long; those of a thread, too."""
    assert two_ranks.run(programs.waited_for_by_a_barrier) == [3] * 2
