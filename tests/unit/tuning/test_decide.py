"""The decision: what is proved to be faster than stock by 2 sigma, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.records.tuning import LEAVE, StepPair, Tried
from counterpoint.tuning.decide import as_another, decide, left

PAIR = StepPair(operation="all_gather", compute="gemm 8x8x8", bytes_per_rank=64, ranks=2)


def tried(mechanism: str, us: float, sigma_us: float = 1.0, marked: str | None = None) -> Tried:
    return Tried(mechanism=mechanism, us=us, sigma_us=sigma_us, runs=10, marked=marked)


def test_the_fastest_of_those_that_are_proved_is_chosen() -> None:
    found = decide(PAIR, [tried("nccl", 100), tried("a", 80), tried("b", 90)], stock="nccl", compute_us=70, comm_us=30)
    assert (found.mechanism, found.us, found.next_best, found.next_best_us) == ("a", 80, "b", 90)
    assert (found.compute_us, found.comm_us, found.stock_us) == (70, 30, 100)
    assert found.why == (
        "20.0% less than nccl; the bar of 2.0 sigma, the smallest gain that these 10 rounds could prove, is 2.8%"
    )


def test_a_gain_within_two_sigma_is_left() -> None:
    """The bar is 2 · sqrt(3² + 4²) = 10."""
    on_the_bar = decide(PAIR, [tried("nccl", 100, 3), tried("a", 90, 4)], stock="nccl")
    above_it = decide(PAIR, [tried("nccl", 100, 3), tried("a", 89.9, 4)], stock="nccl")
    assert [on_the_bar.mechanism, above_it.mechanism] == [LEAVE, "a"]
    assert (
        on_the_bar.why
        == "nothing is proved to be faster: a takes 90.0 µs, nccl 100.0; the bar of 2.0 sigma, the smallest gain that "
        "these 10 rounds could prove, is 10.0 µs (10.0%)"
    )
    assert (on_the_bar.us, on_the_bar.next_best) == (100, "a")


def test_a_sure_gain_goes_before_a_larger_one_that_is_not() -> None:
    """What spreads so much that it proves nothing does not keep the next one from being chosen."""
    assert decide(PAIR, [tried("nccl", 100), tried("a", 50, 40), tried("b", 90)], stock="nccl").mechanism == "b"


def test_what_is_marked_is_never_chosen_and_against_a_marked_stock_nothing_is_proved() -> None:
    found = decide(PAIR, [tried("nccl", 100), tried("a", 10, marked="it did nothing")], stock="nccl")
    assert (found.mechanism, found.next_best) == (LEAVE, None)
    assert found.why == "no time of another mechanism can be believed; a: it did nothing"
    found = decide(PAIR, [tried("nccl", 100, marked="late"), tried("a", 10)], stock="nccl")
    assert (found.mechanism, found.why) == (LEAVE, "the time of nccl must not be believed: late")


def test_without_stock_or_without_others_a_pair_is_left() -> None:
    assert "nccl itself could not be measured" in decide(PAIR, [tried("a", 10)], stock="nccl").why
    assert decide(PAIR, [tried("nccl", 10)], stock="nccl").why == "nothing but nccl can run here"


@given(
    st.lists(
        st.tuples(st.floats(1, 1e6), st.floats(0, 1e3), st.booleans()), min_size=1, max_size=6
    ),
    st.tuples(st.floats(1, 1e6), st.floats(0, 1e3), st.booleans()),
)  # fmt: skip
def test_a_choice_is_never_slower_than_stock_nor_marked(
    others: list[tuple[float, float, bool]], stock: tuple[float, float, bool]
) -> None:
    """Whatever was measured; and the next best is never the choice itself."""
    rows = [("nccl", *stock), *((f"m{place}", *other) for place, other in enumerate(others))]
    found = decide(PAIR, [tried(name, us, sigma, "x" if bad else None) for name, us, sigma, bad in rows], stock="nccl")
    by_name = {each.mechanism: each for each in found.tried}
    assert found.us <= found.stock_us
    assert found.mechanism == LEAVE or by_name[found.mechanism].marked is None
    assert found.mechanism == LEAVE or found.us < found.stock_us
    assert found.next_best is None or by_name[found.next_best].marked is None
    assert found.next_best != found.mechanism


def test_a_pair_without_times_says_how_uncertain_it_is() -> None:
    """A prediction alone is uncertain by all of itself."""
    found = left(PAIR, stock="nccl", why="no time", predicted_us=50.0)
    assert (found.mechanism, found.us, found.sigma_us, found.tried) == (LEAVE, 50.0, 50.0, ())


def test_a_pair_follows_another_one_of_its_class() -> None:
    """It keeps its own fields, and says whose choice it has."""
    measured = decide(PAIR, [tried("nccl", 100), tried("a", 80)], stock="nccl")
    mine = StepPair(operation="all_gather", compute="gemm 8x8x8", bytes_per_rank=60, ranks=2, calls=3, where=("x",))
    found = as_another(mine, measured)
    assert (found.bytes_per_rank, found.calls, found.where, found.mechanism) == (60, 3, ("x",), "a")
    assert found.why.startswith("not measured; as all_gather of 64 bytes a rank: 20.0% less than nccl")
