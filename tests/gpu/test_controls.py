"""Every control on two GPUs: what it changes in what really runs, and that `verify` catches a knob that did nothing.

Two processes run all scenarios of controls_worker.py once; each test asserts one claim about what they saw.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.controls.observe import blocks, matmul_kernels, nccl_kernels
from counterpoint.controls.parse import parse_mechanism
from counterpoint.records.measurement import Evidence, Observation
from tests.support.gpu_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.own_gpus("its controls show in how SMs are divided, and NCCL sends over sockets there"),
]

WORKER = Path(__file__).with_name("controls_worker.py")
TIMEOUT_S = 150


class Ran(msgspec.Struct):
    seen: dict[str, Observation]
    failed: dict[str, str]
    said: dict[str, str]  # by `verified`, with a GEMM limit of 108


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("controls")
    answer = folder / "answer.json"
    run_ranks(WORKER, folder, answer, folder=folder, world_size=2, timeout_s=TIMEOUT_S).well()
    return msgspec.json.decode(answer.read_bytes(), type=Ran)


def verified(ran: Ran, scenario: str, setting: str) -> Evidence:
    (control,) = parse_mechanism(f"nccl+{setting}")[1]
    return control.verify(ran.seen[scenario])


TOOK_EFFECT = [
    ("priority=high", "priority=high"),
    ("priority=low", "priority=low"),
    ("priority=-2", "priority=-2"),
    ("max_ctas=4", "max_ctas=4"),
    ("min_ctas=32", "min_ctas=32"),
    ("cga_cluster=2", "cga_cluster=2"),
    ("cga_cluster=0", "cga_cluster=0"),
    ("cta_policy=zero+windows", "cta_policy=zero"),
    ("cta_policy=zero+windows, all_to_all", "cta_policy=zero"),
    ("windows", "windows"),
    ("gemm_sms=108", "gemm_sms=108"),
    ("gemm_sms=108, linear with bias", "gemm_sms=108"),
    ("gemm_sms=108, fp8 mm", "gemm_sms=108"),
    ("gemm_sms=108, backward", "gemm_sms=108"),
    ("green=108", "green=108"),
    ("green=112", "green=112"),
    ("green=108+gemm_sms=108", "green=108"),
    ("green=108+gemm_sms=108", "gemm_sms=108"),
    ("green=108+priority=high", "green=108"),
    ("green=108+priority=high", "priority=high"),
    *((f"order=comm_resident, {number}", "order=comm_resident") for number in range(1, 6)),
]

DID_NOTHING = [
    ("priority=high, not applied", "priority=high"),
    ("max_ctas=6, all_to_all", "max_ctas=6"),  # rounded up to 8
    ("max_ctas=64", "max_ctas=64"),  # no limit at all
    ("cga_cluster=2, max_ctas=3", "cga_cluster=2"),  # 2 does not divide 3
    ("cta_policy=zero, no windows", "cta_policy=zero"),
    ("cta_policy=zero, one window", "cta_policy=zero"),
    ("cta_policy=efficiency", "cta_policy=efficiency"),  # NVLink multicast is off
    ("windows, one window", "windows"),
    ("gemm_sms=108, mm by the carve-out only", "gemm_sms=108"),
    ("gemm_sms=108, linear by the handle only", "gemm_sms=108"),
    ("gemm_sms=108, backward by the handle only", "gemm_sms=108"),
    ("gemm_sms=108, fp32 mm", "gemm_sms=108"),  # not persistent
    ("green=108, not applied", "green=108"),
    ("order=comm_resident, not applied", "order=comm_resident"),
]


def test_every_scenario_ran(ran: Ran) -> None:
    assert ran.failed == {}


@pytest.mark.parametrize(("scenario", "setting"), TOOK_EFFECT)
def test_control_takes_effect(ran: Ran, scenario: str, setting: str) -> None:
    evidence = verified(ran, scenario, setting)
    assert evidence.took_effect, evidence


@pytest.mark.parametrize(("scenario", "setting"), DID_NOTHING)
def test_a_knob_that_did_nothing_is_caught(ran: Ran, scenario: str, setting: str) -> None:
    evidence = verified(ran, scenario, setting)
    assert not evidence.took_effect, evidence


def test_one_call_applies_what_works_and_raises_what_did_nothing(ran: Ran) -> None:
    assert ran.said["mm"] == "applied"
    assert ran.said["fp32 mm"].startswith("gemm_sms=108 had no effect: ")


def test_the_gemm_limit_is_undone(ran: Ran) -> None:
    seen = ran.seen["gemm_sms=108, after"]
    assert blocks(matmul_kernels(seen.compute)) == blocks(matmul_kernels(seen.compute_without)) != [108]


def test_green_contexts_leave_no_sm_unused(ran: Ran) -> None:
    """Both sides of the split together have every SM of the device."""
    seen, whole = ran.seen["green=112"], ran.seen["green=108, not applied"]
    assert {*(seen.compute_sms or ()), *(seen.comm_sms or ())} == {*(whole.compute_sms or ())}


def test_nccl_runs_on_a_green_stream(ran: Ran) -> None:
    """NCCL's grid is the same on fewer SMs than it has CTAs, and it ends."""
    seen = ran.seen["green=112"]
    assert blocks(nccl_kernels(seen.comm)) == blocks(nccl_kernels(seen.comm_without))


@pytest.mark.parametrize("field", ["grid", "block", "stream", "priority", "regs_per_thread", "smem_bytes"])
def test_the_profiler_tells(ran: Ran, field: str) -> None:
    values: list[Any] = [getattr(one, field) for seen in ran.seen.values() for one in nccl_kernels(seen.comm)]
    assert values
    assert None not in values
