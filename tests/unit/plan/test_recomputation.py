"""Recomputation by module and by number of layers: what it saves, and what it costs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.plan.compute.memory import memory
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import find_model
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.network import levels
from counterpoint.plan.step.step import predict_step


def job(name: str = "llama3-8b", **training: Any) -> Job:
    return Job(
        model=find_model(name),
        parallel=Parallel(dp=4, tp=2, pp=2, ep=4 if name.startswith("mixtral") else 1),
        training=Training(sequence=4096, global_batch=32, **training),
        cluster=Cluster(gpu=find_gpu("H200"), levels=levels("h200-ndr-400", 16)),
    )


def costs(name: str = "llama3-8b", **training: Any) -> tuple[float, float]:
    found = job(name, **training)
    return memory(found).gib["activations"], predict_step(found).step_us


def in_order(found: list[tuple[float, float]]) -> bool:
    """Less memory and more time from one to the next."""
    return all(more > less and fast < slow for (more, fast), (less, slow) in pairwise(found))


def block(count: int) -> dict[str, Any]:
    return {"recompute": "full", "recompute_method": "block", "recompute_num_layers": count}


def modules(*names: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_modules": names}


@pytest.mark.parametrize("flash", [False, True])
def test_more_layers_computed_again_take_less_memory_and_more_time(flash: bool) -> None:
    """None, 1 to 15 of 16 layers of a stage, and all, which full recomputation is."""
    ways: list[dict[str, Any]] = [{}, *(block(count) for count in (1, 4, 8, 15)), {"recompute": "full"}]
    assert in_order([costs(flash_attention=flash, **way) for way in ways])
    assert costs(**block(16)) == pytest.approx(costs(recompute="full"))


def test_units_of_several_layers_keep_fewer_inputs() -> None:
    """As much time as full; several layers are whole at work."""
    one, four = (costs(recompute="full", recompute_method="uniform", recompute_num_layers=count) for count in (1, 4))
    assert one == costs(recompute="full")
    assert four[1] == one[1]
    kept = 32 / 2 * 2.0 * 4096 * 4096 / 2 / 2**30  # inputs of 16 layers of one micro-batch, two of which are in flight
    assert four[0] < one[0] + 3 * (costs()[0] / 32) - 0.7 * kept


def test_modules_add_up() -> None:
    """Each module that is added takes less memory and more time; core_attn alone is what selective was."""
    ways = [modules("core_attn"), modules("core_attn", "layernorm"), modules("core_attn", "layernorm", "mlp")]
    assert in_order([costs(flash_attention=False, **way) for way in ({}, *ways, {"recompute": "full"})])
    assert costs(flash_attention=False, recompute="selective") == costs(flash_attention=False, **ways[0])


def test_experts_are_computed_again_with_their_exchanges() -> None:
    """moe_act repeats no exchange, moe those of dispatch and combine; mlp is for dense layers only."""
    ways = [modules("moe_act"), modules("moe"), modules("moe", "layernorm")]
    assert in_order([costs("mixtral-8x7b", **way) for way in ({}, *ways, {"recompute": "full"})])
    sent = [predict_step(job("mixtral-8x7b", **way)).comm_us["ep"] for way in ({}, *ways)]
    assert sent[0] == sent[1]
    assert sent[2] == pytest.approx(1.5 * sent[0])
    assert costs("mixtral-8x7b", **modules("mlp")) == costs("mixtral-8x7b")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recompute_modules": ("mlp",)}, 'only "selective" chooses modules'),
        ({"recompute": "selective", "recompute_modules": ()}, "give at least one of core_attn, layernorm, mlp"),
        ({"recompute": "selective", "recompute_modules": ("mlp", "mlp")}, "each once"),
        ({"recompute": "full", "recompute_num_layers": 2}, "give both or none"),
        ({**block(2), "recompute": "selective"}, 'give recompute = "full"'),
    ],
)
def test_what_does_not_belong_together_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        job(**given)
