"""Operations of a layer: their arithmetic is the model's, their shapes are what tensor parallelism leaves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from counterpoint.plan.compute.layers import LayerWork, LocalShape, head_work, layer_work, mtp_work
from counterpoint.plan.compute.operations import FlashAttentionOp, MatmulOp, MemoryBoundOp
from counterpoint.plan.job.model import Experts, Model, find_model, layer_flops, layer_parameters
from counterpoint.plan.job.parallel import Parallel, StagePart, part_parameters

GPT = Model(layers=96, hidden=12288, heads=96, vocab=51200, tied=True, dropout=True)
LLAMA = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=128256)
V3 = find_model("deepseek-v3")
GEMMA = find_model("gemma3-27b")
EXPERTS = Experts(count=8, per_token=2, width=14336)


def flops(work: LayerWork, part: str = "forward") -> float:
    operations = work.backward if part == "backward" else work.forward
    return sum(op.flops for op in operations if not isinstance(op, MemoryBoundOp))


def share(**kwargs: object) -> LocalShape:
    return LocalShape(**{"batch": 2, "queries": 2048, "keys": 2048, "flash": False} | kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [GPT, LLAMA, V3, GEMMA], ids=["gpt", "llama", "mla", "windows"])
@pytest.mark.parametrize("tp", [1, 8])
def test_forward_does_the_arithmetic_of_the_model(model: Model, tp: int) -> None:
    """FLOPs of a layer's forward, times tp, are 2 per parameter and token, and attention's."""
    if model.window:  # scores in memory are computed whole
        model = msgspec.structs.replace(model, window=None, full_every=None)
    expected = layer_flops(model, 2048) * 2 * 2048
    assert flops(layer_work(model, share(tp=tp))) * tp == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_backward_does_twice_the_arithmetic(fused: bool) -> None:
    """Each product of forward has two in backward, fused or not."""
    work = layer_work(LLAMA, share(fused=fused))
    assert flops(work, "backward") == pytest.approx(2 * flops(work))


def test_flash_attention_does_half_where_causal_and_is_as_wide_as_its_parts() -> None:
    """Scores that are masked are not computed; backward computes them again: 5 products for 2."""
    forward, backward = (
        FlashAttentionOp(name="", batch=4, queries=64, keys=64, width=16, causal=True, backward=b)
        for b in (False, True)
    )
    assert (forward.flops, backward.flops / forward.flops) == (4 * 2 * 64 * 64 * 16, 2.5)
    # queries and keys 192, values 128: 320 forward, 3 * 192 + 2 * 128 backward; a causal mask leaves half
    work = layer_work(V3, share(flash=True))
    both = [op for op in (*work.forward, *work.backward) if isinstance(op, FlashAttentionOp)]
    assert [op.flops for op in both] == [2 * 128 * 2048 * 2048 * width * 2 / 2 for width in (320, 832)]


def test_megatrons_formula_comes_out() -> None:
    """GPT's layer forward is 24 · tokens · h² · (1 + s / 6h) operations (arXiv 2104.04473, appendix)."""
    expected = 24 * 4096 * 12288**2 * (1 + 2048 / (6 * 12288))
    assert flops(layer_work(GPT, share())) == pytest.approx(expected)


def test_sequence_parallelism_divides_what_lies_between() -> None:
    """Norms and additions see 1/tp of the tokens, the products all of them."""
    whole, part = (layer_work(GPT, share(tp=8, sequence=s)) for s in (False, True))

    def norms(work: LayerWork) -> float:
        return sum(op.num_bytes for op in work.forward if op.name in ("norms", "residual add"))

    assert (norms(part) * 8, flops(part)) == (norms(whole), flops(whole))


def test_selective_recomputation_repeats_attention_only() -> None:
    """Its core has no product with a weight."""
    core = layer_work(GPT, share()).core
    assert {op.name for op in core if isinstance(op, MatmulOp)} == {"scores", "values"}


def test_experts_work_on_the_tokens_that_visit_them() -> None:
    """Two of eight experts per token cost as much as two dense feed-forward blocks, besides the router."""
    dense, routed = layer_work(LLAMA, share()), layer_work(LLAMA, share(), EXPERTS)
    block = 6 * 4096 * 14336 * 4096
    router = 2 * 4096 * 8 * 4096
    assert flops(routed) - flops(dense) == pytest.approx(block + router)


def test_imbalance_makes_the_busiest_rank_slower() -> None:
    """Experts' products grow with the tokens of the busiest rank."""
    even, uneven = (
        layer_work(LLAMA, share(ep=8), Experts(count=8, per_token=2, width=14336, imbalance=factor))
        for factor in (1.0, 1.5)
    )
    grown = flops(uneven) - flops(even)
    assert grown == pytest.approx(0.5 * 2 * 6 * 4096 * 14336 * 4096, rel=1e-3)


def test_the_head_is_a_product_with_the_vocabulary() -> None:
    assert flops(head_work(GPT, share(tp=8))) == 2 * 4096 * 12288 * 51200 / 8


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (GPT, 174.6),
        (Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, gated=True, vocab=128256), 405.0),
        (LLAMA, 8.03),
        (msgspec.structs.replace(LLAMA, vocab=32000, experts=EXPERTS), 46.7),
    ],
    ids=["gpt3-175b", "llama3-405b", "llama3-8b", "mixtral"],
)  # fmt: skip
def test_parameters_are_those_that_the_names_say(model: Model, billions: float) -> None:
    """Within 0.4 % of what was published."""
    whole = StagePart(layers=model.layers, routed=model.expert_layers, embedding=True, head=True)
    assert part_parameters(model, Parallel(), whole).total / 1e9 == pytest.approx(billions, rel=0.004)


def test_weight_gradients_are_as_large_as_the_weights() -> None:
    work = layer_work(LLAMA, share())
    made = sum(op.m * op.n * op.batch for op in work.backward if isinstance(op, MatmulOp) and op.weight_gradient)
    assert made == layer_parameters(LLAMA).total - 2 * 4096


def test_kernels_are_those_of_a_profile() -> None:
    """samples/fsdp-healthy, eager Llama-3-8B: 24 launches forward, 41 backward: two sum up heads of dk."""
    work = layer_work(LLAMA, share(batch=1, flash=True, fused=False))
    assert [sum(op.kernels for op in way) for way in (work.forward, work.backward)] == [24, 41 - 2]


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_fused_kernels_launch_and_move_less(experts: Experts | None) -> None:
    """In both directions, with and without experts."""
    fused, eager = (layer_work(LLAMA, share(fused=fused), experts) for fused in (True, False))
    for less, more in ((fused.forward, eager.forward), (fused.backward, eager.backward)):
        assert sum(op.kernels for op in less) < sum(op.kernels for op in more)
        assert sum(op.num_bytes for op in less) < sum(op.num_bytes for op in more)


def fp8_work(**kwargs: object) -> LayerWork:
    return layer_work(LLAMA, share(**{"batch": 1, "flash": True, "fp8": "delayed"} | kwargs), EXPERTS)


def test_only_linear_layers_of_blocks_are_in_fp8() -> None:
    """Not the router, not attention unless asked for, and not the logits."""
    work = fp8_work()
    assert {op.name for op in work.forward if getattr(op, "fp8", False)} == {
        "qkv", "attention out", "gate and up", "ffn out"
    }  # fmt: skip
    assert not any(getattr(op, "fp8", False) for op in head_work(LLAMA, share(fp8="delayed")).forward)
    asked = fp8_work(fp8_attention=True)
    assert [op.fp8 for op in (*asked.forward, *asked.backward) if isinstance(op, FlashAttentionOp)] == [True, True]


@pytest.mark.parametrize(
    ("scaling", "each", "kernels", "joined"), [("delayed", 4, 1, 2), ("tensorwise", 6, 3, 0), ("rowwise", 10, 4, 0)]
)
def test_casts_are_bytes_and_kernels(scaling: str, each: int, kernels: int, joined: int) -> None:
    """Forward: input and, where gathered, weight of 4 dense products; backward: the gradients of their outputs.

    A norm writes its output in fp8 where the scale is known before: of the inputs of qkv and of gate and up.
    """
    model, local = LLAMA, share(batch=1, flash=True, fp8=scaling, weight_casts=1.0)
    work, without = layer_work(model, local), layer_work(model, msgspec.structs.replace(local, fp8=""))
    inputs = 2048 * ((2 - joined) * 4096 + 4096 + 14336)
    outputs = 2048 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    weights = layer_parameters(model).total - 2 * 4096

    def added(way: str) -> tuple[float, int]:
        more, less = getattr(work, way), getattr(without, way)
        casts = [op for op in more if op.name == "cast to fp8"]
        assert sum(op.kernels for op in more) - sum(op.kernels for op in less) == sum(op.kernels for op in casts)
        return sum(op.num_bytes for op in casts), sum(op.kernels for op in casts)

    assert added("forward") == (each * (inputs + weights), (8 - joined) * kernels)
    assert added("backward") == (each * outputs, 4 * kernels)


@pytest.mark.parametrize("fused", [True, False])
def test_latent_attention_makes_gradients_of_all_its_weights(fused: bool) -> None:
    """The products marked so make one for each parameter of a matrix; norms of latents have no product."""
    work = layer_work(V3, share(fused=fused))
    made = sum(op.m * op.n * op.batch for op in work.backward if isinstance(op, MatmulOp) and op.weight_gradient)
    assert made == layer_parameters(V3).total - 2 * 7168 - 1536 - 512
    assert flops(work, "backward") == pytest.approx(2 * flops(work))


def test_a_window_shortens_flash_attention() -> None:
    """Gemma 3 at 32,768 tokens: five of six layers see 1,024 each, so less than a quarter is left."""
    long = share(flash=True, queries=32768, keys=32768)
    windows, none = (
        sum(op.flops for op in layer_work(model, long).core if isinstance(op, FlashAttentionOp))
        for model in (GEMMA, msgspec.structs.replace(GEMMA, window=None, full_every=None))
    )
    part = 1024 / 32768
    assert windows / none == pytest.approx(10 / 62 + 52 / 62 * 2 * part * (1 - part / 2))


def test_mtp_is_a_projection_and_another_head() -> None:
    """With sequence parallelism each rank projects its own tokens, so the ranks of tp do it together."""
    for tp in (1, 8):
        projection, logits = 2 * 4096 * 7168 * 2 * 7168, 2 * 4096 * 7168 * 129280
        assert flops(mtp_work(V3, share(tp=tp))) * tp == pytest.approx(projection + logits)


def test_an_eager_norm_is_many_kernels() -> None:
    """RMSNorm of tensor operators: as long as 45 bytes an element forward instead of 4, and twice as many backward."""
    fused, eager = (layer_work(LLAMA, share(fused_norms=each)) for each in (True, False))

    def norms(work: LayerWork) -> list[tuple[float, int]]:
        each = [op for op in (*work.forward, *work.backward) if op.name in ("norms", "norms backward")]
        return [(op.num_bytes / (2 * 2 * 2048 * 4096), op.kernels) for op in each]

    assert norms(fused) == [(4, 2), (10, 4)]
    assert norms(eager) == [(45, 14), (90, 28)]


def norm_bytes(model: Model, local: LocalShape) -> dict[str, float]:
    """Return the bytes of each norm, forward and backward, of a layer, the last stage and MTP."""
    works = layer_work(model, local), head_work(model, local), mtp_work(model, local)
    operations = [op for work in works for op in (*work.forward, *work.backward) if "norm" in op.name]
    return {op.name: op.num_bytes for op in operations if isinstance(op, MemoryBoundOp)}


assert V3.mla is not None
WIDER: dict[str, tuple[Model, dict[str, Any]]] = {  # twice as wide: what norms of that name pass over
    "norms": (GPT, {"hidden": 2 * 12288}),
    "last norm": (GPT, {"hidden": 2 * 12288}),
    "norms of both inputs": (GPT, {"hidden": 2 * 12288}),
    "latent norms": (V3, {"mla": msgspec.structs.replace(V3.mla, q_lora_rank=2 * 1536, kv_lora_rank=2 * 512)}),
    "qk norm": (GEMMA, {"head_dim": 2 * 128}),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", WIDER)
def test_bytes_of_a_norm_grow_with_width_and_tokens(name: str, fused: bool) -> None:
    """Of any norm, forward and backward: twice as many for twice the width, and for twice the tokens."""
    model, wider = WIDER[name]
    local = share(fused_norms=fused)
    narrow, wide = (norm_bytes(each, local) for each in (model, msgspec.structs.replace(model, **wider)))
    longer = norm_bytes(model, msgspec.structs.replace(local, batch=2 * local.batch))
    for each in (name, f"{name} backward"):
        assert wide[each] == longer[each] == 2 * narrow[each] > 0


@pytest.mark.parametrize(("ep", "sorts"), [(1, 1), (4, 2)])
def test_tokens_are_sorted_before_they_are_sent_and_after(ep: int, sorts: int) -> None:
    """Each sort reads and writes every visit, there and back; the scores are passed over twelve times forward."""
    work = layer_work(LLAMA, share(ep=ep), EXPERTS)
    visits = 2 * 2048 * 2
    moved = {op.name: op.num_bytes for op in work.forward if isinstance(op, MemoryBoundOp)}
    assert moved["dispatch"] == moved["combine"] == sorts * 2 * 2 * visits * 4096
    assert moved["routing"] == 12 * 4 * 2 * 2048 * 8


def test_experts_do_the_same_arithmetic_cut_or_whole() -> None:
    """With 8 ranks of tp: an eighth of every expert for all tokens, or whole experts for an eighth of the tokens."""
    for ep in (1, 8):
        cut, whole = (
            [op for op in layer_work(LLAMA, share(tp=8, ep=ep, experts_whole=not cut), EXPERTS).forward
             if isinstance(op, MatmulOp) and op.name in ("gate and up", "ffn out")]
            for cut in (True, False)
        )  # fmt: skip
        assert sum(op.flops for op in cut) == sum(op.flops for op in whole)
        assert [op.m for op in cut] == [8 * op.m for op in whole]
