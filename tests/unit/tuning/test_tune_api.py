"""`counterpoint.tune` on a machine whose optimum is planted: found, proved, and left where nothing can be proved."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import counterpoint
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import default_profile
from counterpoint.measurement import api as measurement_api
from counterpoint.records.measurement import Order
from counterpoint.records.tuning import LEAVE, StepPair, Tuned
from counterpoint.tuning import api
from counterpoint.tuning.experiment import class_of, shortlist
from tests.support.planted_machine import NO_EFFECT, PlantedMachine

GEMM = "gemm 8192x8192x8192"
GATHER = StepPair(operation="all_gather", compute=GEMM, bytes_per_rank=64 << 20, ranks=2)
REDUCE = StepPair(operation="all_reduce", compute=GEMM, bytes_per_rank=32 << 20, ranks=2)
MATMUL = StepPair(operation="all_gather_matmul", compute="gemm 1024x1024x512", bytes_per_rank=512 << 10, ranks=2)
EXCHANGE = StepPair(operation="exchange", compute="tiny 128 zipf", bytes_per_rank=32768, ranks=2)
BEST = list(shortlist(GATHER, default_profile()))[1]  # by the model


def truth(**by_mechanism: float) -> Callable[[str, str, Order], float]:
    """The time of every mechanism, in any order; those that are not named take 2000 µs, stock 1600."""
    times = {"nccl": 1600.0, "gloo": 1600.0, "torch": 1600.0} | by_mechanism
    return lambda operation, mechanism, order: times.get(mechanism, 2000.0)


@pytest.fixture(name="tune")
def tune_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tuned]:
    """`counterpoint.tune` on two H200 that are a planted machine."""
    monkeypatch.delenv("RANK", raising=False)
    gpus = ("NVIDIA H200", "NVIDIA H200")
    monkeypatch.setattr(api, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(measurement_api, "visible_gpus", lambda: gpus)

    def tune(machine: PlantedMachine, *pairs: StepPair, **options: Any) -> Tuned:
        monkeypatch.setattr(api, "measure_parts", machine.measure_parts)
        return counterpoint.tune(pairs, **options)

    return tune


def test_the_planted_optimum_is_found(tune: Callable[..., Tuned]) -> None:
    """By its measured time, whatever place the model gave it among the three."""
    for place in (1, 2, 3):
        name = list(shortlist(GATHER, default_profile()))[place]
        found = tune(PlantedMachine(together_us=truth(**{name: 1500.0}), noise=0.002), GATHER).pair[0]
        assert (found.mechanism, found.stock) == (name, "nccl")


def test_a_model_that_is_wrong_changes_nothing_but_what_is_measured(tune: Callable[..., Tuned]) -> None:
    """Where all that it recommends is slower, stock is measured beside it and stays."""
    found = tune(PlantedMachine(together_us=truth(), noise=0.002), GATHER).pair[0]
    assert found.mechanism == LEAVE
    assert found.us == pytest.approx(1600, rel=0.01)
    assert {each.mechanism for each in found.tried} >= {"nccl", BEST}


def test_a_knob_without_effect_is_reported_and_never_chosen(tune: Callable[..., Tuned]) -> None:
    """Even if luck makes it fast."""
    machine = PlantedMachine(together_us=truth(**{BEST.partition("+")[0]: 100.0}), no_ops=frozenset({BEST}))
    found = tune(machine, GATHER).pair[0]
    marked = {each.mechanism: each.marked for each in found.tried if each.marked}
    assert (found.mechanism, marked) == (LEAVE, {BEST: NO_EFFECT})


@pytest.mark.parametrize(("us", "least", "most"), [(1600.0, 0, 1), (1568.0, 17, 20)])
def test_more_rounds_prove_what_the_first_could_not(
    tune: Callable[..., Tuned], us: float, least: int, most: int
) -> None:
    """With 2 % of noise a round, a gain of 2 % is found on 17 of 20 machines or more, and none where there is none."""
    chosen = [
        tune(
            PlantedMachine(together_us=truth(**{BEST: us}), noise=0.02, seed=seed), replace(GATHER, first="together")
        ).pair[0]
        for seed in range(20)
    ]
    found = [each for each in chosen if each.mechanism == BEST]
    assert least <= len(found) <= most
    assert len([each for each in chosen if each.mechanism not in (BEST, LEAVE)]) == 0
    assert all("the smallest gain that these" in each.why for each in chosen)


def test_no_second_look_where_no_time_is_left(tune: Callable[..., Tuned], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the first proved the gain, or that all others are slower; else it asks for twelve times the rounds."""
    asked = list[tuple[int, int]]()

    def looks(us: float, **options: Any) -> list[tuple[int, int]]:
        machine = PlantedMachine(together_us=truth(**{BEST: us}), noise=0.02, seed=4)
        measure = machine.measure_parts

        def noted(verb: str, parts: Any, **given: Any) -> Any:
            asked.append((len(parts), given["rounds"]))
            return measure(verb, parts, **given)

        monkeypatch.setattr(machine, "measure_parts", noted)
        asked.clear()
        tune(machine, replace(GATHER, first="together"), **options)
        return [*asked]

    assert looks(800.0) == [(1, 40)]
    assert looks(2000.0) == [(1, 40)]
    assert looks(1560.0) == [(1, 40), (1, 480)]
    clock = itertools.count(0.0, 100.0)
    monkeypatch.setattr("counterpoint.tuning.api.time.monotonic", lambda: next(clock))
    assert looks(1560.0, budget_s=120.0) == [(1, 40)]


def test_clocks_that_drift_deceive_only_those_who_do_not_interleave(tune: Callable[..., Tuned]) -> None:
    """The best of four is 5 % faster, and the last trial of a scenario takes a fifth longer than its first."""
    names = list(shortlist(GATHER, default_profile()))
    times = truth(**{names[-1]: 1400.0, names[1]: 1470.0})
    taken = {
        interleaved: tune(
            PlantedMachine(together_us=times, drift=0.0002, noise=0.001, interleaved=interleaved), GATHER
        ).pair[0].mechanism
        for interleaved in (True, False)
    }  # fmt: skip
    assert taken == {True: names[-1], False: names[1]}


@pytest.mark.parametrize(("rounds_are_kept", "chosen"), [(True, BEST), (False, LEAVE)])
def test_a_gain_of_one_per_cent_is_proved_while_clocks_drift(
    tune: Callable[..., Tuned], rounds_are_kept: bool, chosen: str
) -> None:
    """Rounds differ by a fifth from first to last, times of a round by little: medians alone would prove nothing."""
    machine = PlantedMachine(together_us=truth(**{BEST: 1584.0}), drift=0.0008, noise=0.001)
    machine.rounds_are_kept = rounds_are_kept
    found = tune(machine, replace(GATHER, first="together"), rounds=22).pair[0]
    assert found.mechanism == chosen


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(500, 3000), min_size=4, max_size=4), st.sampled_from([0.0, 0.003, 0.02]), st.integers(0, 99))
def test_regret_against_the_planted_oracle_is_within_the_noise(times: list[float], noise: float, seed: int) -> None:
    """Whatever is planted: never slower than stock in truth by more than noise allows, nor than the best of the four.

    4 sigma of a mean over 3 orders and 10 rounds, for both times of a comparison, are 4 · 1.25 · sqrt(2 / 30) = 1.3
    times the noise of a round.
    """
    pairs = list(shortlist(GATHER, default_profile()))
    planted = dict(zip(pairs, times, strict=True))
    machine = PlantedMachine(together_us=truth(**planted), noise=noise, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setattr(api, "visible_gpus", lambda: ("NVIDIA H200",) * 2)
        patch.setattr(measurement_api, "visible_gpus", lambda: ("NVIDIA H200",) * 2)
        patch.setattr(api, "measure_parts", machine.measure_parts)
        found = counterpoint.tune([GATHER]).pair[0]
    taken = planted["nccl" if found.mechanism == LEAVE else found.mechanism]
    allowed = 1 + 3 * noise  # twice 1.3, and the bar itself
    assert taken <= allowed * min(times)
    assert taken <= (1 + 1.3 * noise) * planted["nccl"]


def test_what_is_fast_in_one_order_counts_in_that_order(tune: Callable[..., Tuned]) -> None:
    """A mechanism that wins only where the collective comes first is left where the order is not known."""

    def together_us(operation: str, mechanism: str, order: Order) -> float:
        behind = {BEST: 2200.0, "nccl": 1600.0}.get(mechanism, 2500.0)
        return 1000.0 if (mechanism, order) == (BEST, "comm_first") else behind

    known = replace(GATHER, first="comm_first")
    best = shortlist(known, default_profile())
    assert BEST in best
    found = tune(PlantedMachine(together_us=together_us, noise=0.002), GATHER, known)
    assert [pair.mechanism for pair in found.pair] == [LEAVE, BEST]


def test_a_second_run_chooses_alike(tune: Callable[..., Tuned]) -> None:
    """Whatever noise does, as long as the choices are further apart."""
    times = truth(**{BEST: 1500.0, "cuts": 1200.0})
    runs = [
        tune(PlantedMachine(together_us=times, noise=0.01, seed=seed), GATHER, MATMUL, EXCHANGE) for seed in range(5)
    ]
    assert {tuple(pair.mechanism for pair in run.pair) for run in runs} == {(BEST, "cuts", LEAVE)}


def test_dependent_pairs_and_exchanges_are_decided_too(tune: Callable[..., Tuned]) -> None:
    """Each against torch, its stock."""
    machine = PlantedMachine(together_us=truth(cuts=1200.0, slabs=1300.0), noise=0.002)
    found = tune(machine, MATMUL, EXCHANGE)
    assert [(pair.mechanism, pair.stock) for pair in found.pair] == [("cuts", "torch"), ("slabs", "torch")]


def test_a_prediction_is_kept_beside_each_time(tune: Callable[..., Tuned]) -> None:
    """So that a reader sees how far the model was off."""
    found = tune(PlantedMachine(together_us=truth()), GATHER).pair[0]
    expected = shortlist(GATHER, default_profile())
    assert {each.mechanism: each.predicted_us for each in found.tried} == expected


def test_equal_pairs_are_measured_once(tune: Callable[..., Tuned]) -> None:
    here, there = (replace(GATHER, where=(name,), calls=2) for name in ("a", "b"))
    machine = PlantedMachine(together_us=truth(**{BEST: 1000.0}))
    found = tune(machine, here, there).pair
    assert len(machine.measured) == 1
    assert [(pair.where, pair.mechanism) for pair in found] == [(("a",), BEST), (("b",), BEST)]


def test_what_a_class_was_not_given_time_for_follows_its_largest(tune: Callable[..., Tuned]) -> None:
    """And what is of no measured class is left, with what the model would have tried."""
    smaller = replace(GATHER, bytes_per_rank=48 << 20)
    larger = replace(GATHER, bytes_per_rank=127 << 20, calls=9)
    other = replace(GATHER, bytes_per_rank=30 << 20)
    machine = PlantedMachine(together_us=truth(**{BEST: 1000.0}), seconds=20.0)
    found = tune(machine, smaller, GATHER, larger, other, budget_s=30).pair
    assert len(machine.measured) == 1
    assert [pair.mechanism for pair in found] == [LEAVE, BEST, BEST, LEAVE]
    assert found[1].why.startswith(f"not measured; as all_gather of {127 << 20} bytes a rank")
    assert found[3].why.startswith("not measured: the budget of 30 s was used up; by the model ")


def test_one_of_each_class_is_measured_before_a_second(tune: Callable[..., Tuned]) -> None:
    """The largest of each class, and the heaviest class first; with time enough every pair is."""
    large, small = (replace(GATHER, bytes_per_rank=size << 20, calls=99) for size in (120, 65))
    machine = PlantedMachine(together_us=truth())
    found = tune(machine, small, REDUCE, large)
    assert [str(120 << 20) in machine.measured[0], "all_reduce" in machine.measured[1]] == [True, True]
    assert all(pair.tried for pair in found.pair)


def test_no_more_pairs_are_looked_at_than_the_budget_has_seconds(tune: Callable[..., Tuned]) -> None:
    """Those with the most bytes in a step; the others are left, without a prediction."""
    pairs = [replace(GATHER, bytes_per_rank=1 << power) for power in range(20, 26)]
    machine = PlantedMachine(together_us=truth())
    found = tune(machine, *pairs, budget_s=3).pair
    assert [bool(pair.tried) for pair in found] == [False] * 3 + [True] * 3
    assert (found[0].why, found[0].us) == ("not measured: the budget of 3 s was used up", 0.0)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"bytes_per_rank": 127 << 20}, True),
        ({"calls": 7, "where": ("x",)}, True),
        ({"bytes_per_rank": 63 << 20}, False),
        ({"compute": "gemm 8192x8192x8193"}, False),
        ({"first": "together"}, False),
        ({"dtype": "float32"}, False),
        ({"operation": "all_reduce"}, False),
        ({"ranks": 4}, False),
    ],
)
def test_a_class_shares_all_but_place_calls_and_some_bytes(change: dict[str, Any], same: bool) -> None:
    assert (class_of(replace(GATHER, **change)) == class_of(GATHER)) == same


def test_pairs_of_other_ranks_are_left(tune: Callable[..., Tuned]) -> None:
    """With the reason; the ranks that are started are the most that fit."""
    eight = replace(GATHER, ranks=8)
    machine = PlantedMachine(together_us=truth(**{BEST: 1000.0}))
    found = tune(machine, eight, GATHER)
    assert [pair.mechanism for pair in found.pair] == [LEAVE, BEST]
    assert found.pair[0].why == "not measured: it has 8 ranks, and 2 were started"


def test_what_was_measured_is_said_of_another_dtype(tune: Callable[..., Tuned]) -> None:
    """Of float8 alone: what else a pair may have is measured as it is."""
    float8, float32 = replace(GATHER, dtype="float8_e4m3fn"), replace(REDUCE, dtype="float32", compute_dtype="float16")
    assert tune(PlantedMachine(together_us=truth()), float8, float32).notes == (
        "float8_e4m3fn was measured as bfloat16: collectives of as many bytes, matmuls and exchanges of the same shape",
    )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "budget": ({"budget_s": 0.5}, "budget 0.5 s; allowed are 1 to 86400"),
    "no budget": ({"budget_s": float("nan")}, "budget nan s"),
    "device": ({"device": "tpu"}, "device 'tpu'"),
    "ranks": ({"world_size": 3}, "3 ranks for 2 visible GPUs"),
    "profile": ({"profile": Path("/nowhere.json")}, "/nowhere.json"),
}


@pytest.mark.parametrize(("options", "text"), BAD.values(), ids=BAD)
def test_a_bad_request_is_refused(tune: Callable[..., Tuned], options: dict[str, Any], text: str) -> None:
    with pytest.raises(Misconfigured, match=text):
        tune(PlantedMachine(together_us=truth()), GATHER, **options)


def test_pairs_that_no_machine_of_this_size_has_are_refused(tune: Callable[..., Tuned]) -> None:
    with pytest.raises(Misconfigured, match="no pair is one of 2 ranks; the pairs have 8"):
        tune(PlantedMachine(together_us=truth()), replace(GATHER, ranks=8))


def test_no_pairs_are_refused(tune: Callable[..., Tuned]) -> None:
    with pytest.raises(Misconfigured, match="no pair is given"):
        tune(PlantedMachine(together_us=truth()))
