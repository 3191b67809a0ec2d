"""Memory of the fullest GPU: published formulas, sharding, and a verdict that says why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from counterpoint.plan.compute.layers import LocalShape
from counterpoint.plan.compute.memory import activation_bytes, memory
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.job.job import Job, parse_job
from counterpoint.plan.job.model import Experts, Model, find_model
from counterpoint.plan.job.parallel import Compression, Parallel, Training
from counterpoint.plan.network.network import levels

GPT = Model(layers=96, hidden=12288, heads=96, vocab=51200, tied=True, dropout=True)
UNIT = 2048 * 12288  # s · b · h of one sample


def share(**kwargs: Any) -> LocalShape:
    return LocalShape(**{"batch": 1, "queries": 2048, "keys": 2048, "tp": 8, "flash": False} | kwargs)


def job(name: str = "llama3-70b", gpus: int = 64, batch: int = 64, **kwargs: Any) -> Job:
    """On H100s; keywords go to Parallel or Training."""
    training = {key: kwargs.pop(key) for key in list(kwargs) if key in Training.__struct_fields__}
    return Job(
        model=find_model(name), parallel=Parallel(**kwargs),
        training=Training(**{"sequence": 4096, "global_batch": batch} | training),
        cluster=Cluster(gpu=find_gpu("H100"), levels=levels("h100-ndr-400", gpus)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sequence", "kind", "expected"),
    [
        (False, "none", 10 + 24 / 8 + 5 * 96 * 2048 / 12288 / 8),  # equation 2
        (True, "none", (34 + 5 * 96 * 2048 / 12288) / 8),  # equation 4
        (True, "selective", 34 / 8),  # equation 6
        (False, "full", 2.0),
    ],
)
def test_activations_are_those_of_the_paper(sequence: bool, kind: Any, expected: float) -> None:
    """Bytes per layer over s · b · h are the equations of arXiv 2205.05198."""
    assert activation_bytes(GPT, share(sequence=sequence), kind) / UNIT == pytest.approx(expected)


@pytest.mark.parametrize(("zero", "bytes_each"), [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_zero_shards_what_it_says(zero: Any, bytes_each: float) -> None:
    """2 + 4 + 12 bytes per parameter with Adam, each divided by 8 from its stage on."""
    found = memory(job("llama3-8b", gpus=8, batch=8, dp=8, zero=zero))
    held = found.gib["parameters"] + found.gib["gradients"] + found.gib["optimizer"]
    assert held * 2**30 / 8.03e9 == pytest.approx(bytes_each, rel=0.002)


def test_states_in_bf16_take_a_third() -> None:
    """Two moments of two bytes and no float32 copy; published jobs that ran so are not called impossible."""
    given = {"model": {"name": "deepseek-v3", "mtp": 0}, "cluster": {"gpu": "H100", "network": "h100-ndr-400"}}
    parallel = {"dp": 64, "pp": 4, "ep": 64, "zero": 2, "stage_layers": [16, 15, 15, 15]}
    whole, half = (
        memory(
            parse_job(
                given
                | {"parallel": parallel}
                | {"training": {"sequence": 4096, "global_batch": 512, "recompute": "full", "optimizer": optimizer}}
            )
        )
        for optimizer in ("adam", "adam_bf16")
    )
    assert half.gib["optimizer"] == pytest.approx(whole.gib["optimizer"] / 3)
    assert half.gib["parameters"] == whole.gib["parameters"]
    assert half.fits


def test_a_70b_model_does_not_fit_whole_and_a_published_run_fits() -> None:
    """One replica per node without zero: optimizer states are what is too much, and the verdict says so."""
    found = memory(job(dp=8, tp=8))
    assert (found.fits, found.verdict.startswith("does not fit:"), "most of it optimizer" in found.verdict) == (
        False, True, True,
    )  # fmt: skip
    # GPT-3 175B on 64 A100s with sequence parallelism and selective recomputation did run (arXiv 2205.05198)
    parallel = Parallel(tp=8, pp=8, virtual=3, schedule="interleaved")
    training = Training(
        sequence=2048, global_batch=64, precision="fp16", recompute="selective", flash_attention=False
    )  # fmt: skip
    cluster = Cluster(gpu=find_gpu("A100"), levels=levels("a100-hdr-200", 64))
    assert memory(Job(model=GPT, parallel=parallel, training=training, cluster=cluster)).fits


@pytest.mark.parametrize("less", [{"recompute": "selective"}, {"recompute": "full"}])
def test_recomputation_saves_activations(less: dict[str, Any]) -> None:
    """Without flash attention, each kind keeps less than none."""
    base: dict[str, Any] = {"dp": 8, "tp": 8, "flash_attention": False}
    assert memory(job(**base | less)).gib["activations"] < memory(job(**base)).gib["activations"]


def test_the_first_stage_holds_most() -> None:
    """In 1F1B the first stage has micro-batches of all others behind it; GPipe holds every one."""
    few, all_of_them = (memory(job(tp=8, pp=8, schedule=name)) for name in ("1f1b", "gpipe"))
    assert all_of_them.gib["activations"] == pytest.approx(few.gib["activations"] * 64 / 8)


def test_experts_are_divided_by_ep() -> None:
    """Eight ranks share mixtral's experts: 45.1 of 46.7 billion parameters."""
    one, eight = (memory(job("mixtral-8x7b", gpus=8, batch=8, dp=8, ep=ep)) for ep in (1, 8))
    assert (one.gib["parameters"] - eight.gib["parameters"]) * 2**30 / 2 == pytest.approx(45.1e9 * 7 / 8, rel=0.001)


def test_rows_of_fixed_number_have_room_for_all_that_may_come() -> None:
    """All choices of 8 ranks may be of experts of one: 8 times the mean, which is kept."""
    found = {
        how: memory(job("qwen3-30b-a3b", gpus=8, dp=8, ep=8, zero=3, expert_exchange=how)).gib["activations"]
        for how in ("all_to_all", "gather", "slabs")
    }
    assert 3 * found["all_to_all"] < min(found["gather"], found["slabs"])
    again = memory(job("qwen3-30b-a3b", gpus=8, dp=8, ep=8, zero=3, expert_exchange="gather", recompute="full"))
    assert again.gib["activations"] < found["all_to_all"]


def test_error_feedback_keeps_another_copy_of_the_gradients() -> None:
    """What compression left out is kept until the next step."""
    without = job(tp=8, dp=8)
    with_ = msgspec.structs.replace(without, compression=Compression(method="topk"))
    assert memory(with_).gib["gradients"] == 2 * memory(without).gib["gradients"]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize(
    ("layers", "every"), [(1, None), (1, 1), (2, None), (2, 1), (2, 2), (12, None), (12, 1), (12, 2)]
)
def test_recomputation_never_takes_more_memory(flash: bool, layers: int, every: int | None) -> None:
    """Down to a stage of one layer, whose core or whole is there again while its backward runs."""
    experts = None if every is None else Experts(count=8, per_token=2, width=4096, every=every)
    model = Model(layers=layers, hidden=4096, heads=32, vocab=50304, experts=experts)
    small = job("llama3-8b", gpus=8, batch=8, dp=8, sequence=8192, flash_attention=flash)
    totals = []
    for kind in ("none", "selective", "full"):
        training = msgspec.structs.replace(small.training, recompute=kind)
        totals.append(memory(msgspec.structs.replace(small, model=model, training=training)).total_gib)
    none, selective, full = totals
    assert none >= selective >= full
    assert (selective < none) == (not flash and layers > 1)


def test_the_recomputed_core_of_one_layer_is_there() -> None:
    """32 heads, 8192 tokens: a layer's softmax takes 4 GiB, however few layers keep theirs."""
    kept = job("llama3-8b", gpus=8, batch=8, dp=8, sequence=8192, flash_attention=False, recompute="selective")
    flash = msgspec.structs.replace(kept, training=msgspec.structs.replace(kept.training, flash_attention=True))
    assert memory(kept).gib["activations"] - memory(flash).gib["activations"] == pytest.approx(4.0)


def test_states_on_the_host_take_no_memory() -> None:
    """A quarter of them leaves three; nothing else changes."""
    whole, less = (memory(job(tp=8, dp=8, zero=1, offload_optimizer=share)).gib for share in (0.0, 0.25))
    assert less == whole | {"optimizer": 0.75 * whole["optimizer"]}


@pytest.mark.parametrize(("layers", "left"), [(1, 1.0), (2, 1.0), (32, 0.5 + 0.5 * 2 / 32)])
def test_of_activations_on_the_host_two_layers_are_here(layers: int, left: float) -> None:
    """One is in use, one is being copied; of the other half of 32 layers everything stays."""
    model = msgspec.structs.replace(find_model("llama3-8b"), layers=layers)
    kept, less = (
        memory(msgspec.structs.replace(job(dp=8, gpus=8, offload_activations=share), model=model)).gib["activations"]
        for share in (0.0, 0.5)
    )
    assert less == pytest.approx(left * kept)
