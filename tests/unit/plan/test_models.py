"""The models that have a name, and the parts that not every model has: latent attention, windows, MTP."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.job import model
from counterpoint.plan.job.fields import parse_record
from counterpoint.plan.job.model import (
    Experts,
    LatentAttention,
    Model,
    find_model,
    known_models,
    layer_parameters,
    model_flops,
)
from counterpoint.plan.job.parallel import (
    Parallel,
    StagePart,
    Training,
    check_division,
    deal_layers,
    part_parameters,
    whole_stage,
)

PUBLISHED = {  # 10^9 parameters, and those that a token visits where that was published, too
    "gpt3-175b": (174.6,),  # "175B", counted as in arXiv 2104.04473
    "llama2-7b": (6.74,), "llama2-13b": (13.02,), "llama2-70b": (68.98,),
    "llama3-8b": (8.03,), "llama3-70b": (70.6,), "llama3-405b": (405.9,),
    "llama3.2-1b": (1.24,), "llama3.2-3b": (3.21,),
    "llama4-scout": (107.8,), "llama4-maverick": (400.7,),  # text models; 109 and 400 with the vision encoder, rounded
    "mistral-7b": (7.24,), "mixtral-8x7b": (46.7, 12.9), "mixtral-8x22b": (140.6, 39.1),
    "qwen2.5-7b": (7.61,), "qwen2.5-14b": (14.8,), "qwen2.5-32b": (32.8,), "qwen2.5-72b": (72.7,),
    "qwen3-0.6b": (0.596,), "qwen3-1.7b": (1.72,), "qwen3-4b": (4.02,), "qwen3-8b": (8.19,), "qwen3-14b": (14.8,),
    "qwen3-32b": (32.8,), "qwen3-30b-a3b": (30.5,), "qwen3-235b-a22b": (235.0, 21.6),
    "deepseek-v2": (236.0, 21.0), "deepseek-v2-lite": (15.7, 2.45),
    "deepseek-v3": (671.0, 36.6),  # README_WEIGHTS.md: with the head, without the embedding
    "kimi-k2": (1026.0, 32.0),
    "gpt-oss-20b": (20.91, 3.61), "gpt-oss-120b": (116.83, 5.13),
    "gemma2-2b": (2.614,), "gemma2-9b": (9.242,), "gemma2-27b": (27.227,),
    "gemma3-1b": (1.0,), "gemma3-4b": (3.884,), "gemma3-12b": (11.771,), "gemma3-27b": (27.016,),
    "nemotron-4-340b": (341.0,), "grok-1": (314.0,),
    "olmo2-7b": (7.30,), "olmo2-13b": (13.7,), "olmo2-32b": (32.2,),
}  # fmt: skip

MLA = LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def whole(of: Model, *, mtp: int = 0) -> StagePart:
    return StagePart(layers=of.layers, routed=of.expert_layers, embedding=True, head=True, mtp=mtp)


def parameters(of: Model, *, mtp: int = 0) -> float:
    return part_parameters(of, Parallel(), whole(of, mtp=mtp)).total / 1e9


def small(**changes: Any) -> Model:
    return Model(**{"layers": 12, "hidden": 512, "heads": 8, "vocab": 1000, "gated": True} | changes)


def test_every_known_model_is_held_against_a_published_count_and_says_where_its_widths_are_from() -> None:
    assert set(PUBLISHED) == set(known_models())
    tables = tomllib.loads(Path(model.__file__).with_name("models.toml").read_text("utf-8"))
    places = ("arXiv", "Hugging Face", "github.com")
    assert [name for name, table in tables.items() if not any(place in table["source"] for place in places)] == []


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items(), ids=PUBLISHED)
def test_a_model_has_as_many_parameters_as_was_published(name: str, published: tuple[float, ...]) -> None:
    """Half a per cent for all of them, one and a half for those that a token visits: reports round these."""
    assert parameters(find_model(name)) == pytest.approx(published[0], rel=0.006)
    if len(published) > 1:
        visited = model_flops(replace(find_model(name), mtp=0), 1) / 6e9
        assert visited == pytest.approx(published[1], rel=0.015)


def test_the_mtp_module_of_deepseek_v3_has_what_was_published() -> None:
    """11.5 billion of its own; embedding and head are the model's (README_WEIGHTS.md)."""
    v3 = find_model("deepseek-v3")
    assert parameters(v3, mtp=1) - parameters(v3) == pytest.approx(11.5, rel=0.01)
    assert model_flops(v3, 4096) > 1.03 * model_flops(replace(v3, mtp=0), 4096)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lama3-8b", '"lama3-8b" is not known; did you mean llama3-8b or '),
        ("LLAMA3-70B", "did you mean llama3-70b"),
        ("zzz", "known are deepseek-v2, .*qwen3-30b-a3b.*or give its widths"),
    ],
)
def test_an_unknown_model_is_answered_with_those_like_it_or_all(name: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        find_model(name)


def test_down_projections_are_whole_on_every_rank_of_tp() -> None:
    """Of latent attention, the products up and out are cut, those down into the latents are not."""
    layer = layer_parameters(small(mla=MLA))
    down = 512 * (512 + 64) + 512
    assert layer.uncut == down
    assert layer.of_rank(4, 1, 4).shared == pytest.approx((layer.shared - down) / 4 + down)


@pytest.mark.parametrize(
    ("every", "first", "expected"), [(1, 0, [6, 6]), (1, 3, [3, 6]), (2, 0, [3, 3]), (2, 1, [2, 3])]
)
def test_layers_with_experts_lie_where_the_model_has_them(every: int, first: int, expected: list[int]) -> None:
    """After the first dense ones; of every two, the second."""
    moe = small(experts=Experts(count=8, per_token=2, width=256, every=every, first_dense=first))
    stages = deal_layers(moe, Parallel(pp=2))
    assert [whole_stage(stage).routed for stage in stages] == expected
    assert moe.expert_layers == sum(expected)


def test_the_last_stage_has_the_mtp_modules_and_another_embedding() -> None:
    """It looks tokens up again."""
    with_, without = (deal_layers(small(mtp=mtp), Parallel(pp=2)) for mtp in (1, 0))
    assert [whole_stage(stage).mtp for stage in with_] == [0, 1]
    more = part_parameters(small(mtp=1), Parallel(pp=2), whole_stage(with_[1])).total
    less = part_parameters(small(), Parallel(pp=2), whole_stage(without[1])).total
    assert more - less == layer_parameters(small()).total + 2 * 512 * 512 + 3 * 512 + 1000 * 512


def test_a_window_leaves_fewer_pairs_of_query_and_key() -> None:
    """Counted one by one; a window as long as the sequence leaves all of them."""
    sequence, window = 1024, 100
    pairs = sum(min(position + 1, window) for position in range(sequence)) / sequence**2
    assert small(window=window).seen(sequence) == pytest.approx(pairs, abs=1e-4)
    assert small(window=window, full_every=2).seen(sequence) == pytest.approx((pairs + 0.5) / 2, abs=1e-3)
    assert small(window=4096).seen(sequence) == small().seen(sequence) == 0.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mla": MLA, "kv_heads": 2}, "model.mla with kv_heads, head_dim or v_head_dim: give its widths in mla alone"),
        ({"full_every": 2}, "model.full_every = 2 without window: give both"),
        ({"window": 64, "causal": False}, "model.window = 64 with causal = false"),
        (
            {"experts": Experts(count=2, per_token=1, width=8, first_dense=13)},
            "first_dense = 13 of 12 layers: none has experts",
        ),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        small(**changes)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window": 0}, "model.window = 0: give a whole number from 1"),
        ({"mtp": -1}, "model.mtp = -1: give a whole number from 0 to 64"),
        ({"mla": to_builtins(MLA) | {"kv_lora_rank": 0}}, "model.mla.kv_lora_rank = 0: give a whole number from 1"),
        ({"experts": {"count": 2}}, "model.experts.per_token is missing: give a whole number from 1"),
        ({"mla": {"q_rank": 2}}, "model.mla.q_rank is not known: give q_lora_rank, or another of"),
    ],
)
def test_a_field_that_cannot_be_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        parse_record("model", to_builtins(small()) | changes, Model)
    assert said in str(raised.value)


def test_whole_experts_need_ranks_enough_and_sequence_parallelism() -> None:
    """With expert_tp = 1, ep divides dp · cp · tp; each rank holds count / ep experts."""
    moe, training = small(experts=Experts(count=64, per_token=2, width=256)), Training(sequence=64, global_batch=16)
    whole = StagePart(layers=12, routed=12)
    parallel = Parallel(tp=4, dp=8, ep=32, expert_tp=1)
    check_division(moe, parallel, training)
    assert part_parameters(moe, parallel, whole).experts * 32 == 12 * layer_parameters(moe, moe.experts).experts
    with pytest.raises(
        Misconfigured, match=r"parallel\.ep = 64 does not divide parallel\.dp · parallel\.cp · parallel\.tp"
    ):
        check_division(moe, replace(parallel, ep=64), training)
    with pytest.raises(Misconfigured, match="give sequence = true"):
        check_division(moe, replace(parallel, sequence=False), training)
