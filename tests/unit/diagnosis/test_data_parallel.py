"""The commonest faults of FSDP and DDP, each planted in made-up steps, with its cost; and none in steps without it."""

from typing import Any

import pytest

from counterpoint.records.diagnosis import Diagnosis, Finding
from tests.support.job_builder import Rank, diagnosed
from tests.support.queued_training import GATHER_US, LAYERS, MATMUL_US, ddp, fsdp

EVEN = [(layer, 25.0) for layer in range(1, LAYERS + 1)]
FAULTS = (
    "fsdp_one_unit",
    "late_gather",
    "stream_order",
    "ddp_buckets",
    "odd_payload",
    "launch_order",
    "suspected_wait",
)


def of(r: Rank) -> Diagnosis:
    return diagnosed(r, r)


def faults(d: Diagnosis) -> list[str]:
    return [f.kind for f in d.findings if f.kind in FAULTS]


def the_one(d: Diagnosis, kind: str) -> Finding:
    """The finding of a kind, which is the only fault and comes before the exposed communication that it causes."""
    assert faults(d) == [kind]
    assert d.findings[0].kind == kind
    return d.findings[0]


@pytest.mark.parametrize("job", [fsdp(), fsdp(layers=2), ddp(buckets=EVEN), ddp(buckets=[*EVEN[:-1], (LAYERS, 40.0)])])
def test_steps_without_a_fault_have_no_finding_of_one(job: Rank) -> None:
    assert faults(of(job)) == []


def test_a_model_that_is_one_unit_waits_for_all_its_gathers() -> None:
    """Two gathers of 3 ms before all compute; the scatter could hide, too, but the optimizer waits for it."""
    found = the_one(of(fsdp(layers=1, gather_us=2000.0)), "fsdp_one_unit")
    assert found.cost_us == pytest.approx(2 * 2000, rel=0.05)
    assert found.evidence.startswith("3 gathers and scatters a step")
    assert "fully_shard to each transformer block" in found.advice


def test_gathers_that_wait_for_compute_cost_what_a_prefetch_would_hide() -> None:
    """All but the first gather of forward and of backward: 10 of 12."""
    found = the_one(of(fsdp(prefetch=False)), "late_gather")
    assert found.cost_us == pytest.approx(2 * (LAYERS - 1) * GATHER_US, rel=0.05)
    assert found.evidence.startswith("60 of 60 gathers")
    assert "set_modules_to_forward_prefetch" in found.advice


def test_streams_that_share_a_queue_are_told_from_gathers_that_wait() -> None:
    """The gather is ready while the matmuls launched before it are queued, and begins with the last of them."""
    apart, together = of(fsdp()), of(fsdp(one_queue=True))
    found = the_one(together, "stream_order")
    longer = (together.totals.duration_us - apart.totals.duration_us) / 3
    assert found.cost_us == pytest.approx(longer, rel=0.05)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in found.advice


@pytest.mark.parametrize(
    ("buckets", "cost_us", "said"),
    [
        # 150 MiB at 20 µs: all after the last matmul
        ([(LAYERS, 150.0)], 3000.0, "one all_reduce a step, of 150 MiB"),
        # 200 instead of 25 MiB
        (
            [*EVEN[:-1], (LAYERS, 200.0)],
            175 * 20.0,
            "the last of 6 buckets has 200 MiB, the median of the others 25 MiB",
        ),
        # full after 5 of 6 layers: it ends after the last one; then 50 MiB
        ([(5, 200.0), (6, 50.0)], 4000 - 4 * MATMUL_US + 1000, "2 buckets, the first of 200 MiB: it begins after 83%"),
    ],
)
def test_buckets_that_find_no_compute(buckets: list[tuple[int, float]], cost_us: float, said: str) -> None:
    found = the_one(of(ddp(buckets=buckets)), "ddp_buckets")
    assert found.cost_us == pytest.approx(cost_us, rel=0.05)
    assert found.evidence.startswith(said)


def test_parts_that_are_no_multiple_of_16_bytes() -> None:
    """Every other layer's part has 4 bytes more, and takes 7.5 times as long; 16 bytes more would not explain that."""

    def job(more: int) -> Rank:
        return fsdp(payloads=(1 << 20, (1 << 20) + more), us_of_payload=(400.0, 3000.0))

    found = of(job(1))
    assert faults(found) == ["odd_payload"]
    worst = next(f for f in found.findings if f.kind == "odd_payload")
    exposed = next(f for f in found.findings if f.kind == "exposed_comm")
    assert 0.5 * exposed.cost_us < worst.cost_us < exposed.cost_us
    assert "4,194,308 bytes a rank takes 7.5 x as long" in worst.evidence
    assert faults(of(job(4))) == []


@pytest.mark.parametrize("change", [{"prefetch": False}, {"one_queue": True}, {"layers": 1}])
def test_one_rank_alone_shows_the_same_fault(change: dict[str, Any]) -> None:
    one, both = (diagnosed(*[fsdp(gather_us=900.0, **change)] * n, world_size=2) for n in (1, 2))
    assert faults(one) == faults(both) != []
