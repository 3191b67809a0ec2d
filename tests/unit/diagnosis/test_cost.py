"""What exposed communication costs a day: in the verdict of those who ask."""

from pathlib import Path

import msgspec
import pytest

from counterpoint.cli import app
from counterpoint.diagnosis.cost import with_cost
from counterpoint.errors import Misconfigured
from counterpoint.records.diagnosis import Diagnosis
from tests.support import kineto_trace as kt
from tests.support.job_builder import comm, diagnosed, op, rank


def half_exposed() -> Diagnosis:
    """Two ranks that compute for 1 ms, and communicate for 1 ms."""
    return diagnosed(*(rank(op("matmul", 0.0, 1000.0), comm("all_reduce", 1000.0, 2000.0)) for _ in range(2)))


def test_gpu_hours_and_money() -> None:
    d = half_exposed()
    share = d.totals.exposed_comm_us / d.totals.duration_us
    found = with_cost(d, gpus=1000, price_per_gpu_hour=2.5)
    assert found.cost is not None
    assert found.cost.gpu_hours_a_day == pytest.approx(24_000 * share)
    assert found.cost.cost_a_day == pytest.approx(60_000 * share)
    assert found.verdict.startswith(d.verdict)
    assert (
        f"{24_000 * share:,.1f} GPU-hours a day on 1,000 GPUs, {60_000 * share:,.2f} at 2.5 an hour." in found.verdict
    )


def test_without_a_price_or_a_number_of_gpus() -> None:
    found = with_cost(half_exposed(), gpus=8)
    assert found.verdict.endswith("GPU-hours a day on 8 GPUs.")
    by_ranks = with_cost(half_exposed(), price_per_gpu_hour=1.0)
    assert by_ranks.cost is not None
    assert by_ranks.cost.gpus == 2


def test_hosts_alone_have_no_cost() -> None:
    d = msgspec.structs.replace(half_exposed(), idle=None)
    found = with_cost(d, gpus=8)
    assert (found.cost, found.verdict, found.notes[-1][:7]) == (None, d.verdict, "no cost")


@pytest.mark.parametrize(("gpus", "price"), [(0, None), (-8, 1.0), (8, -1.0), (8, float("nan")), (8, float("inf"))])
def test_what_is_no_price_is_refused(gpus: int, price: float | None) -> None:
    with pytest.raises(Misconfigured, match="give"):
        with_cost(half_exposed(), gpus=gpus, price_per_gpu_hour=price)


def test_the_command_says_it_on_request_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(kt.write_job(tmp_path / "job"))
    app(["diagnose", job, "--price-per-gpu-hour", "2"], standalone_mode=False)
    app(["diagnose", job], standalone_mode=False)
    assert capsys.readouterr().out.replace("\n", " ").count("GPU-hours a day") == 1
