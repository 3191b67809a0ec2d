"""`verify` of every control on what really ran: records of tests/gpu/test_controls.py on 2 x H200, 2026-11-21."""

from pathlib import Path

import msgspec
import pytest

from counterpoint.controls.parse import parse_mechanism
from counterpoint.records.measurement import Evidence, Launched, Observation

RAN = msgspec.json.decode(Path(__file__).with_name("seen_2xh200.json").read_bytes(), type=dict[str, Observation])


def verified(scenario: str, setting: str) -> Evidence:
    (control,) = parse_mechanism(f"nccl+{setting}")[1]
    return control.verify(RAN[scenario])


@pytest.mark.parametrize(
    ("scenario", "setting"),
    [
        ("priority=high", "priority=high"),
        ("priority=low", "priority=low"),
        ("priority=-2", "priority=-2"),
        ("max_ctas=4", "max_ctas=4"),
        ("min_ctas=32", "min_ctas=32"),
        ("cga_cluster=2", "cga_cluster=2"),
        ("cga_cluster=0", "cga_cluster=0"),
        ("cta_policy=zero+windows", "cta_policy=zero"),
        ("cta_policy=zero+windows", "windows"),
        ("windows", "windows"),
        ("windows", "cta_policy=default"),
        ("gemm_sms=108", "gemm_sms=108"),
        ("gemm_sms=108, linear with bias", "gemm_sms=108"),
        ("gemm_sms=108, backward", "gemm_sms=108"),
        ("green=108", "green=108"),
        ("green=112", "green=112"),
        ("order=comm_resident, 1", "order=comm_resident"),
    ],
)
def test_what_took_effect_is_told(scenario: str, setting: str) -> None:
    assert verified(scenario, setting).took_effect


@pytest.mark.parametrize(
    ("scenario", "setting"),
    [
        ("priority=high, not applied", "priority=high"),
        ("priority=high, not applied", "priority=low"),
        ("priority=-2", "priority=-1"),
        ("priority=-2", "priority=default"),
        ("max_ctas=6, all_to_all", "max_ctas=6"),
        ("max_ctas=64", "max_ctas=64"),
        ("max_ctas=4", "min_ctas=8"),
        ("cga_cluster=2, max_ctas=3", "cga_cluster=2"),
        ("max_ctas=4", "cga_cluster=4"),
        ("cta_policy=zero, no windows", "cta_policy=zero"),
        ("cta_policy=zero, one window", "cta_policy=zero"),
        ("cta_policy=efficiency", "cta_policy=efficiency"),
        ("cta_policy=zero+windows", "cta_policy=default"),
        ("windows, one window", "windows"),
        ("gemm_sms=108, mm by the carve-out only", "gemm_sms=108"),
        ("gemm_sms=108, linear by the handle only", "gemm_sms=108"),
        ("gemm_sms=108, backward by the handle only", "gemm_sms=108"),
        ("gemm_sms=108, fp32 mm", "gemm_sms=108"),
        ("gemm_sms=108", "gemm_sms=100"),
        ("green=108, not applied", "green=108"),
        ("green=112", "green=108"),
        ("order=comm_resident, not applied", "order=comm_resident"),
    ],
)
def test_what_did_nothing_is_told(scenario: str, setting: str) -> None:
    assert not verified(scenario, setting).took_effect


@pytest.mark.parametrize(
    "setting",
    [
        "priority=high", "priority=low", "priority=default", "max_ctas=8", "min_ctas=8", "cga_cluster=2",
        "cta_policy=zero", "cta_policy=efficiency", "cta_policy=default", "windows", "gemm_sms=108", "green=108",
        "order=comm_resident",
    ],
)  # fmt: skip
def test_nothing_seen_proves_nothing(setting: str) -> None:
    (control,) = parse_mechanism(f"nccl+{setting}")[1]
    assert not control.verify(Observation()).took_effect


@pytest.mark.parametrize(("scenario", "setting"), [("max_ctas=4", "max_ctas=4"), ("gemm_sms=108", "gemm_sms=108")])
def test_without_a_comparison_nothing_is_proved(scenario: str, setting: str) -> None:
    """A grid within the limit may have been so anyway."""
    (control,) = parse_mechanism(f"nccl+{setting}")[1]
    alone = msgspec.structs.replace(RAN[scenario], comm_without=(), compute_without=())
    assert not control.verify(alone).took_effect


def test_unknown_priorities_and_memsets_of_other_controls_prove_nothing() -> None:
    (control,) = parse_mechanism("nccl+priority=high")[1]
    comm = (Launched(kind="kernel", name="ncclDevKernel", priority=-3), Launched(kind="kernel", name="ncclDevKernel"))
    assert not control.verify(Observation(comm=comm)).took_effect
    # A memset on a third stream, as the launch order has them, changes nothing about the collective's priority
    (control,) = parse_mechanism("nccl+priority=high")[1]
    seen = RAN["priority=high"]
    beside = msgspec.structs.replace(seen, comm=(*seen.comm, Launched(kind="memset", name="Memset (Device)")))
    assert control.verify(beside).took_effect


def test_evidence_names_both_numbers() -> None:
    assert verified("gemm_sms=108", "gemm_sms=108").seen == "GEMM grids of 108 blocks, without it 132"


def kernel(name: str, blocks: int, *, priority: int | None = 0, duration_us: float = 1.0) -> Launched:
    return Launched(kind="kernel", name=name, grid=(blocks, 1, 1), priority=priority, duration_us=duration_us)


GEMM, NCCL, COPY = "nvjet_sm90_tst", "ncclDevKernel_AllGather", Launched(kind="copy", name="Memcpy PtoP", priority=0)
FLASH = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, cutlass::bfloat16_t>>"


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        # cuBLAS launched one kernel more without the limit, all of them within it anyway
        (
            "gemm_sms=108",
            Observation(compute=(kernel(GEMM, 64),), compute_without=(kernel(GEMM, 64), kernel(GEMM, 64))),
        ),
        # a small message takes other channels from one group to the next, never as many as the limit
        ("max_ctas=16", Observation(comm=(kernel(NCCL, 2),), comm_without=(kernel(NCCL, 4),))),
        # one rank: NCCL copies, policy or not
        ("cta_policy=zero", Observation(comm=(COPY,), comm_without=(COPY,))),
        # copies on a stream of high priority: nothing for a priority to reorder
        ("priority=high", Observation(comm=(msgspec.structs.replace(COPY, priority=-3),))),
        # NCCL on its own stream, which is in no green context, whatever the probe says
        (
            "green=108",
            msgspec.structs.replace(RAN["green=108"], comm=(kernel(NCCL, 24, priority=None),)),
        ),
    ],
)  # fmt: skip
def test_what_would_have_been_so_anyway_is_no_proof(setting: str, seen: Observation) -> None:
    """Within the limit, but the limit is not why."""
    (control,) = parse_mechanism(f"nccl+{setting}")[1]
    assert not control.verify(seen).took_effect


def test_attention_beside_gemms_is_not_held_against_a_gemm_limit() -> None:
    """Flash attention has CUTLASS in its name and a grid of its own."""
    (control,) = parse_mechanism("nccl+gemm_sms=108")[1]
    seen = Observation(
        compute=(kernel(GEMM, 108), kernel(FLASH, 4096)), compute_without=(kernel(GEMM, 132), kernel(FLASH, 4096))
    )
    assert control.verify(seen).took_effect
