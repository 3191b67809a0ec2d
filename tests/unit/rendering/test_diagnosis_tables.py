"""The tables of a diagnosis: the parts of an account, which ranks are shown, what is said of a replay."""

import msgspec
import pytest

from counterpoint.records.diagnosis import Diagnosis
from counterpoint.rendering import diagnosis_tables as tables
from tests.support import example_diagnosis as example


def test_parts_of_a_budget_add_up_to_the_duration() -> None:
    account = example.account(3)
    assert sum(tables.budget(account).values()) == pytest.approx(account.duration_us)


def test_exposed_time_is_split_into_its_waiting_and_the_rest() -> None:
    account = msgspec.structs.replace(example.account(0), exposed_comm_us=40.0, exposed_wait_us=10.0)
    assert (tables.budget(account)["wait"], tables.budget(account)["transfer"]) == (10.0, 30.0)


def test_exposed_time_that_was_not_joined_counts_as_transfer() -> None:
    account = msgspec.structs.replace(example.account(0), exposed_comm_us=40.0, exposed_wait_us=None)
    assert tables.budget(account)["transfer"] == 40.0


def test_worst_ranks_are_those_with_the_least_compute_in_order_of_rank() -> None:
    shares = [0.9, 0.2, 0.8, 0.1]
    accounts = [
        msgspec.structs.replace(example.account(rank), duration_us=1.0, compute_us=share)
        for rank, share in enumerate(shares)
    ]
    assert [account.rank for account in tables.worst_ranks(accounts, 2)] == [1, 3]


def test_sums_are_divided_by_one_where_no_step_was_found(empty: Diagnosis) -> None:
    assert tables.steps_in(empty) == 1


def test_a_late_rank_is_among_the_worst_however_much_it_computes() -> None:
    accounts = [example.account(rank) for rank in range(40)]
    accounts[37] = msgspec.structs.replace(accounts[37], compute_us=accounts[37].duration_us)
    assert 37 not in [a.rank for a in tables.worst_ranks(accounts, 4)]
    assert 37 in [a.rank for a in tables.worst_ranks(accounts, 4, {37})]


@pytest.mark.parametrize(("replayed", "said"), [(None, ""), (3, ", mean of 3 of 4 steps"), (4, "")])
def test_a_replay_of_some_steps_says_of_how_many(replayed: int | None, said: str) -> None:
    base = example.training()
    assert base.replay is not None
    changed = msgspec.structs.replace(
        base, steps=base.steps[:1] * 4, replay=msgspec.structs.replace(base.replay, steps=replayed)
    )
    assert tables.replayed_steps(changed) == said
