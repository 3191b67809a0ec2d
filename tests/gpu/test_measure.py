"""`counterpoint measure` on two GPUs: the command as a user runs it, and what its rows must show."""

import sys

import msgspec
import pytest

from counterpoint.records.measurement import Measurement, Row
from tests.support.command import program

pytestmark = [pytest.mark.gpu(2), pytest.mark.own_gpus("it measures times")]

MECHANISMS = ("nccl", "nccl+max_ctas=8+gemm_sms=124", "nccl_zero_cta", "zero_sm")


def suite(folders: pytest.TempPathFactory, name: str, *options: str, timeout_s: float) -> Measurement:
    out = folders.mktemp("measure") / f"{name}.json"
    command = [sys.executable, "-m", "counterpoint", "measure", name, "--nproc", "2", "--rounds", "6", *options]
    done = program([*command, "--out", out], timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(out.read_bytes(), type=Measurement)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """The suite `quick`, once, by four mechanisms."""
    chosen = [argument for name in MECHANISMS for argument in ("--mechanism", name)]
    return suite(tmp_path_factory, "quick", *chosen, timeout_s=200)


def rows(measured: Measurement, mechanism: str, collective: str = "all_gather") -> list[Row]:
    return [row for row in measured.rows if (row.mechanism, row.collective) == (mechanism, collective)]


def test_nothing_is_marked(measured: Measurement) -> None:
    assert [row.marked for row in measured.rows if row.marked] == []


def test_every_control_has_evidence(measured: Measurement) -> None:
    for row in rows(measured, "nccl+max_ctas=8+gemm_sms=124"):
        assert [(proof.control, proof.took_effect) for proof in row.evidence] == [
            ("max_ctas=8", True),
            ("gemm_sms=124", True),
        ]


def test_ctas_are_those_that_ran(measured: Measurement) -> None:
    ctas = {name: {row.usage.comm_ctas for row in rows(measured, name) if row.usage} for name in MECHANISMS}
    assert ctas["nccl+max_ctas=8+gemm_sms=124"] == {8}
    assert ctas["nccl_zero_cta"] == ctas["zero_sm"] == {0}
    assert all(count is not None and count > 8 for count in ctas["nccl"])


def test_sums_are_not_offered_by_copies(measured: Measurement) -> None:
    assert "all_reduce" in measured.unavailable["nccl_zero_cta"]
    assert rows(measured, "nccl_zero_cta", "all_reduce") == []


def test_launch_order_decides_for_stock_nccl(measured: Measurement) -> None:
    """A GEMM that holds every SM keeps the collective out: what the whole suite is about must be visible in it."""
    hidden = {row.order: row.hidden for row in rows(measured, "nccl") if row.ratio == 1.0}
    assert hidden["comm_first"] > hidden["compute_first"] + 0.3


def test_launch_order_does_not_decide_for_programs(measured: Measurement) -> None:
    """An all_gather in place needs no SM: a GEMM that came first hides most of it, too."""
    hidden = {row.order: row.hidden for row in rows(measured, "zero_sm") if row.ratio == 1.0}
    assert min(hidden.values()) > 0.6, hidden


def test_rates_are_possible(measured: Measurement) -> None:
    """A GEMM alone reaches half of its peak at least, and never more than all of it."""
    assert all(row.mfu_alone is not None and 0.5 < row.mfu_alone < 1.0 for row in measured.rows)


PUT_BACK = """
import torch, torch.distributed as dist
from counterpoint.controls.control import Lanes
from counterpoint.measurement.trial import CudaStage
device = torch.device("cuda", 0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
source, target = torch.zeros(1, device=device), torch.zeros(1, device=device)
streams = [torch.cuda.Stream(device) for _ in range(2)]
lanes = Lanes(
    compute_stream=streams[0], comm_stream=streams[1], compute=lambda: None, comm=lambda: target.copy_(source)
)
stage = CudaStage(device, dist.group.WORLD)
torch.cuda._sleep(200_000_000)  # 100 ms, far longer than the stage holds the device back
source.fill_(1)
trial = stage.run(lanes, "comm_alone")
print(target.item(), trial.late)
dist.destroy_process_group()
"""


@pytest.mark.gpu(1)
def test_a_trial_waits_until_its_buffers_are_put_back() -> None:
    done = program([sys.executable, "-c", PUT_BACK], timeout_s=100)
    assert (done.stdout, done.returncode) == ("1.0 False\n", 0), done.stderr


@pytest.fixture(scope="module")
def matmuls(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    return suite(tmp_path_factory, "tensor", timeout_s=500)


def test_matmuls_run_as_they_were_asked_to(matmuls: Measurement) -> None:
    marks = {(row.mechanism, row.marked) for row in matmuls.blocks if row.marked}
    assert [(name, why) for name, why in marks if name != "cuts" or not str(why).startswith("ran as serial")] == []
    assert matmuls.unavailable == {}
