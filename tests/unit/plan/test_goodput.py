"""A whole training: its losses by themselves, the best interval between checkpoints, and published trainings."""

from __future__ import annotations

from math import inf, sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import answer
from counterpoint.plan.goodput import DAY, HOUR, optimal_interval, spent, training_run
from counterpoint.plan.job.changes import build_job
from counterpoint.plan.job.job import parse_job, read_tables
from counterpoint.records.prediction import TrainingRun

EXAMPLES = Path(__file__).parents[3] / "examples" / "plan"
LLAMA = read_tables(EXAMPLES / "llama3-405b-16384-gpus.toml")
seconds = st.floats(1.0, 1e4)


def llama(**run: Any) -> TrainingRun:
    """Llama 3 405B on 16,384 H100, with this table [run]."""
    found = answer(parse_job(LLAMA | {"run": {"tokens": 15.6e12} | run})).run
    assert found is not None
    return found


@given(mean=st.floats(1e3, 1e7), checkpoint=seconds, interval=seconds, restart=seconds)
def test_losses_are_never_negative_and_grow_with_failures(
    mean: float, checkpoint: float, interval: float, restart: float
) -> None:
    """Half as many failures cost less in each part; without any only checkpoints are left."""
    try:
        often = spent(1e7, mean=mean, checkpoint=checkpoint, interval=interval, restart=restart)
    except Misconfigured:
        return
    rare = spent(1e7, mean=2 * mean, checkpoint=checkpoint, interval=interval, restart=restart)
    never = spent(1e7, mean=inf, checkpoint=checkpoint, interval=interval, restart=restart)
    assert 0 <= rare.lost_work <= often.lost_work
    assert 0 <= rare.restarts <= often.restarts
    assert often.checkpoints == rare.checkpoints == never.checkpoints
    assert (never.lost_work, never.restarts, never.failures) == (0.0, 0.0, 0.0)
    assert often.total == pytest.approx(1e7 + often.checkpoints + often.lost_work + often.restarts)


@given(mean=st.floats(1e4, 1e7), part=st.floats(1e-4, 0.3))
def test_the_optimal_interval_is_the_cheapest(mean: float, part: float) -> None:
    """No interval a tenth longer or shorter takes less, but for Daly's own error of some thousandths."""
    checkpoint = part * mean
    best = optimal_interval(checkpoint, mean)

    def total(interval: float) -> float:
        return spent(1e9, mean=mean, checkpoint=checkpoint, interval=interval, restart=60.0).total

    assert total(best) <= min(total(0.9 * best), total(1.1 * best)) * 1.002


def test_intervals_of_short_checkpoints_are_youngs_and_failures_as_many_as_their_mean_says() -> None:
    """√(2 · checkpoint · mean), 1 s and 10 days: 22 minutes."""
    assert optimal_interval(1.0, 10 * DAY) == pytest.approx(sqrt(2 * 10 * DAY), rel=2e-3)
    # ten days at one a day, with losses that make them eleven: eleven
    found = spent(10 * DAY, mean=DAY, checkpoint=60.0, interval=HOUR, restart=HOUR)
    assert found.failures == pytest.approx(found.total / DAY)
    assert 10 < found.failures < 12


def test_llama_3_in_gpu_hours_and_effective_time() -> None:
    """30.84 million GPU-hours (its model card), over 90 % effective training time (arXiv 2407.21783, section 3.3.4).

    419 unexpected interruptions in 54 days on 16,384 GPUs are one GPU's in 50,700 hours; the storage writes 2 TB/s.
    The paper does not say how long a restart takes: 10 minutes are the default here.
    """
    found = llama(gpu_mtbf_hours=54 * 24 * 16384 / 419, storage_gb_per_s=2000.0)
    assert found.gpu_hours == pytest.approx(30.84e6, rel=0.1)
    assert found.goodput > 0.9
    assert found.failures / found.days == pytest.approx(419 / 54, rel=0.01)
    assert found.checkpoint_seconds == pytest.approx(405e9 * 14 / 2e12, rel=0.01)


def megatron(layers: int, hidden: int, heads: int, batch: int, parallel: dict[str, int], tokens: float) -> TrainingRun:
    """A GPT of arXiv 2104.04473 on A100, as that paper trained it."""
    job = parse_job(
        {
            "model": {
                "layers": layers, "hidden": hidden, "heads": heads, "vocab": 51200, "tied": True, "dropout": True,
            },
            "training": {
                "sequence": 2048, "global_batch": batch, "precision": "fp16", "recompute": "full",
                "flash_attention": False,
            },
            "parallel": parallel | {
                "tp": 8, "schedule": "interleaved", "virtual": 2, "overlap_tp": False, "overlap_pp": False,
                "overlap_dp": False,
            },
            "cluster": {"gpu": "A100", "network": "a100-hdr-200"},
            "run": {"tokens": tokens},
        }
    )  # fmt: skip
    found = answer(job).run
    assert found is not None
    return found


def test_days_that_megatron_published() -> None:
    """GPT-3 on 1,024 A100: 34 days; a trillion parameters on 3,072: 84 days (section 5.1 there): within a seventh."""
    gpt3 = megatron(96, 12288, 96, 1536, {"pp": 8, "dp": 16}, 300e9)
    trillion = megatron(128, 25600, 160, 3072, {"pp": 64, "dp": 6}, 450e9)
    assert [gpt3.days, trillion.days] == pytest.approx([34.0, 84.0], rel=1 / 7)
    assert (gpt3.goodput, gpt3.failure_hours, gpt3.cost) == (1.0, None, None)


def test_deepseek_v3_adds_up() -> None:
    """14.8 trillion tokens at 180,000 H800-hours each: 2.664 million, 54 days on 2,048 (arXiv 2412.19437, table 1).

    Steps are as long as the paper says, so this holds the arithmetic only.
    """
    job = parse_job(
        {
            "model": {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 1024},
            "training": {"sequence": 4096, "global_batch": 16384},
            "parallel": {"dp": 2048},
            "cluster": {"gpu": "H100", "network": "h100-ndr-400"},
            "run": {"tokens": 14.8e12, "price_per_gpu_hour": 2.0},
        }
    )
    step_us = 180e3 / 2048 * 3600 * 1e6 * 4096 * 16384 / 1e12
    found = training_run(job, step_us, (0.9 * step_us, 1.2 * step_us))
    assert found is not None
    assert [found.gpu_hours, found.cost or 0.0] == pytest.approx([2.664e6, 5.328e6], rel=1e-3)
    assert found.days == pytest.approx(54.2, rel=1e-3)
    assert [found.low_days or 0.0, found.high_days or 0.0] == pytest.approx([0.9 * found.days, 1.2 * found.days])


def test_fields_of_the_training_change_it() -> None:
    """Tokens begin the table; failures, checkpoints and restarts each cost days."""
    base = {"run.tokens": "1e12"}

    def days(**more: str) -> float:
        job = build_job(LLAMA, base | {f"run.{name}": value for name, value in more.items()})
        found = training_run(job, 7e6)
        assert found is not None
        return found.days

    failing = days(gpu_mtbf_hours="50000")
    assert days() < failing < days(gpu_mtbf_hours="20000")
    assert failing < days(gpu_mtbf_hours="50000", restart_minutes="60")
    assert failing < days(gpu_mtbf_hours="50000", checkpoint_minutes="240")


def test_a_node_can_fail_besides_its_gpus() -> None:
    """2,048 nodes that fail as often as 16,384 GPUs do: the same, together twice as often."""
    gpus, nodes = llama(gpu_mtbf_hours=80000.0), llama(node_mtbf_hours=10000.0)
    both = llama(gpu_mtbf_hours=80000.0, node_mtbf_hours=10000.0)
    assert gpus.failure_hours == nodes.failure_hours == 2 * (both.failure_hours or 0.0)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        ({}, "neither given; give one of them"),
        ({"tokens": 1e12, "steps": 5}, "both given; give one of them"),
        ({"tokens": 9e18}, r"run.tokens = 9e\+18: give a number from 1 to 10,000,000,000,000,000"),
        ({"tokens": float("nan")}, "run.tokens = nan"),
        ({"steps": 0}, "run.steps = 0"),
        ({"steps": 5, "checkpoint_minutes": "never"}, 'run.checkpoint_minutes = "never"'),
        ({"steps": 5, "checkpoint_minutes": 0}, "run.checkpoint_minutes = 0"),
        ({"steps": 5, "gpu_mtbf_hours": -1}, "run.gpu_mtbf_hours = -1"),
        ({"steps": 5, "checkpoint_gb": 5, "checkpoint_seconds": 5}, "both say how long one takes"),
        ({"steps": 5, "price": 1}, "run.price is not known"),
        ({"steps": 5000, "gpu_mtbf_hours": 1.0}, "it would never end"),
        (5, r"run = 5: give a table \[?"),
    ],
)
def test_what_cannot_be_is_refused(run: object, match: str) -> None:
    with pytest.raises(Misconfigured, match=match):
        answer(parse_job(LLAMA | {"run": run}))
