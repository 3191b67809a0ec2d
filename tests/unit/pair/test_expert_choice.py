"""Which mechanism an exchange of tokens gets, and what is predicted of each."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import default_profile
from counterpoint.pair.expert_choice import (
    CAPTURED,
    EXCHANGE_MECHANISMS,
    ExchangeMechanism,
    ExpertExchange,
    choose_expert,
    predicted_us,
)

QWEN = ExpertExchange(ranks=2, top_k=8, experts=128, tokens=8192, hidden=2048)
MIXTRAL = ExpertExchange(ranks=8, top_k=2, experts=8, tokens=8192, hidden=4096)
DEEPSEEK = ExpertExchange(ranks=8, top_k=8, experts=256, tokens=4096, hidden=7168)
EXCHANGES = st.builds(
    ExpertExchange, ranks=st.sampled_from((2, 4, 8)), top_k=st.integers(1, 8), experts=st.just(64),
    tokens=st.integers(0, 20_000), hidden=st.sampled_from((512, 2048, 7168)), beside_us=st.floats(0, 20_000),
    imbalance=st.floats(1, 2),
)  # fmt: skip


def alone_us(layer: ExpertExchange, mechanism: ExchangeMechanism) -> float:
    """The time of a dispatch and a combine with nothing beside them."""
    return predicted_us(replace(layer, beside_us=0.0), mechanism)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("layer", [QWEN, MIXTRAL, DEEPSEEK], ids=["qwen", "mixtral", "deepseek"])
@pytest.mark.parametrize("tokens", [0, 1, 16, 128])
def test_decode_sizes_are_left_to_torch(layer: ExpertExchange, ranks: int, tokens: int) -> None:
    """A dispatch of so few tokens is latency only, which is not what copy engines are for."""
    assert choose_expert(replace(layer, ranks=ranks, tokens=tokens)).mechanism == "torch"


def test_the_reason_of_a_refusal_has_its_figures() -> None:
    """Who is refused reads why: how much of the time of ours would pass without any token."""
    why = choose_expert(replace(QWEN, tokens=64), offered=("torch", "gather")).why
    assert why.startswith("64 tokens are too few for gather: ")
    assert why.endswith(" µs would pass without any")


@pytest.mark.parametrize(
    ("layer", "mechanism"),
    [
        (QWEN, "gather"),
        (replace(QWEN, beside_us=1000), "gather"),
        (replace(QWEN, ranks=8, beside_us=1000), "gather"),
        (replace(DEEPSEEK, beside_us=5000), "gather"),
        (replace(MIXTRAL, ranks=2), "torch"),  # measured: 11.4 ms a layer, 12.0 by gather
        (replace(MIXTRAL, ranks=2, beside_us=3800), "gather"),
        (replace(MIXTRAL, beside_us=9600), "slabs"),  # gather moves 3 times the bytes of slabs
        (MIXTRAL, "torch"),  # alone, nothing hides
    ],
)
def test_the_choice_for_known_layers(layer: ExpertExchange, mechanism: str) -> None:
    """Top-8 is gathered; top-2 on 8 ranks goes in slabs where something hides it, else by NCCL."""
    assert choose_expert(layer).mechanism == mechanism


@given(EXCHANGES)
def test_no_mechanism_that_is_predicted_to_lose_is_chosen(layer: ExpertExchange) -> None:
    """Ours is chosen only where it is predicted to beat torch by the margin, and nothing offered beats it by that."""
    plan = choose_expert(layer)
    added = {name: plan.predicted_us[name] - layer.beside_us for name in EXCHANGE_MECHANISMS}
    if plan.mechanism != "torch":
        assert added[plan.mechanism] <= 0.9 * added["torch"]
        assert 0.9 * added[plan.mechanism] <= min(added.values()) + 1e-6
    assert set(plan.predicted_us) == set(EXCHANGE_MECHANISMS)
    assert min(added.values()) > 0


@given(EXCHANGES)
def test_hiding_never_costs_more_than_one_after_the_other(layer: ExpertExchange) -> None:
    """Beside compute an exchange takes no less than alone, and no more than both in turn."""
    for name in EXCHANGE_MECHANISMS:
        both, alone = predicted_us(layer, name), alone_us(layer, name)
        assert max(alone, layer.beside_us) - 1e-6 <= both <= alone + layer.beside_us + 1e-6


@given(EXCHANGES, st.integers(1, 5000))
def test_more_tokens_take_longer(layer: ExpertExchange, more: int) -> None:
    for name in EXCHANGE_MECHANISMS:
        assert alone_us(replace(layer, tokens=layer.tokens + more), name) > alone_us(layer, name)


def test_a_graph_gets_a_mechanism_without_the_host() -> None:
    """Torch cannot be recorded, whatever the sizes."""
    for tokens in (1, 8192):
        assert choose_expert(replace(MIXTRAL, captured=True, tokens=tokens)).mechanism in CAPTURED
    assert choose_expert(replace(MIXTRAL, captured=True)).mechanism == "slabs"  # fewer bytes
    assert choose_expert(replace(MIXTRAL, captured=True, imbalance=8)).mechanism == "gather"  # 7 rounds of slabs


def test_only_what_is_offered_is_chosen_and_takes_no_less_than_its_host() -> None:
    """As where slabs may drop rows; all predictions are there all the same."""
    plan = choose_expert(replace(MIXTRAL, beside_us=9600), offered=("gather", "torch"))
    assert plan.mechanism in ("torch", "gather")
    assert set(plan.predicted_us) == set(EXCHANGE_MECHANISMS)
    # where the host of ours is slower than all of torch's way, torch's way it is
    torch_us = choose_expert(QWEN).predicted_us["torch"]
    plan = choose_expert(QWEN, host_us={"gather": 2 * torch_us, "slabs": 2 * torch_us})
    assert (plan.mechanism, plan.predicted_us["gather"]) == ("torch", 2 * torch_us)


def test_routing_to_one_rank_does_not_lengthen_a_gather() -> None:
    """It gathers all tokens anyway: only its kernels have more rows, and one rank of torch gets many more."""
    skewed = replace(QWEN, imbalance=2.0)
    longer = {name: alone_us(skewed, name) - alone_us(QWEN, name) for name in EXCHANGE_MECHANISMS}
    assert longer["gather"] < 0.35 * longer["torch"]


@pytest.mark.parametrize(("layer", "measured_us"), [(QWEN, 130), (replace(MIXTRAL, ranks=2), 220)])
def test_the_gather_takes_what_was_measured(layer: ExpertExchange, measured_us: float) -> None:
    """A whole exchange holds a gather of 2 H200 (2026-11-22), and its bytes back: within a quarter of twice that."""
    kernels_us = alone_us(layer, "gather") - 2 * measured_us
    rows = 4 * layer.most_rows + (3 * layer.ranks + 1) * layer.tokens
    streamed_us = rows * layer.row_bytes / default_profile().sums.memory_gb_per_s / 1000
    assert kernels_us == pytest.approx(streamed_us, abs=0.25 * 2 * measured_us)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks": 1}, "give 2 ranks or more"),
        ({"tokens": -1}, "0 tokens or more"),
        ({"hidden": 0}, "1 or more of everything else"),
        ({"top_k": 200}, "top_k=200 of 128 experts: give at most as many"),
        ({"beside_us": float("nan")}, "give 0 µs or more"),
        ({"imbalance": 3}, r"1 to 2 \(the ranks\)"),
        ({"capacity_factor": 0}, "a factor above 0"),
    ],
)
def test_wrong_figures_are_named(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        replace(QWEN, **wrong)  # type: ignore[arg-type]


def test_wrong_options_are_named() -> None:
    with pytest.raises(Misconfigured, match=r"offered=torch: .* at least one of gather, slabs"):
        choose_expert(replace(QWEN, captured=True), offered=("torch",))
