"""Occupancy shaping without a GPU: bytes by the calculator's rule, what is refused and why, what verify believes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from counterpoint.controls.occupancy import OccupancyShaping, UnshapedKernel, shape
from counterpoint.errors import Misconfigured
from counterpoint.machine.occupancy import Footprint, SmLimits, blocks_beside, smem_for_blocks_per_sm
from counterpoint.records.measurement import Launched, Observation

H200 = SmLimits(num_sms=132, regs=65536, smem=233472, threads=2048)
A40 = SmLimits(num_sms=84, regs=65536, smem=102400, threads=1536, blocks=16)
V100 = SmLimits(num_sms=80, regs=65536, smem=98304, threads=2048, smem_reserved=0)

footprints = st.builds(
    Footprint,
    threads=st.integers(1, 32).map(lambda warps: 32 * warps),
    regs_per_thread=st.integers(16, 255),
    smem_bytes=st.integers(0, 96 * 1024),
)


def with_smem(block: Footprint, smem_bytes: int) -> Footprint:
    return dataclasses.replace(block, smem_bytes=smem_bytes)


@given(footprints, st.integers(0, 31), st.sampled_from([H200, A40]))
def test_the_least_bytes_leave_exactly_the_blocks_asked_for(block: Footprint, draw: int, sm: SmLimits) -> None:
    """Whatever the kernel: between what a block needs and what it may have; 128 fewer would let another block in."""
    assume(most := block.most_on(sm))
    wanted = 1 + draw % most
    smem = smem_for_blocks_per_sm(wanted, kernel=block, sm=sm)
    assert block.smem_bytes <= smem <= sm.most_smem_per_block
    assert with_smem(block, smem).most_on(sm) == wanted
    assert wanted == most or with_smem(block, smem - 128).most_on(sm) > wanted


@pytest.mark.parametrize(
    ("wanted", "smem"),
    [
        (1, 116864 - 1024),  # more than half of 233472, less what the system takes
        *((2, 77952 - 1024), (3, 58496 - 1024), (4, 46720 - 1024), (7, 29312 - 1024)),
    ],
)
def test_bytes_of_the_study(wanted: int, smem: int) -> None:
    """The bytes that cuOccupancyMaxActiveBlocksPerMultiprocessor gave these numbers of blocks for on an H200."""
    block = Footprint(threads=128, regs_per_thread=64, smem_bytes=24576)
    assert smem_for_blocks_per_sm(wanted, kernel=block, sm=H200) == smem


@pytest.mark.parametrize(
    ("wanted", "block", "sm", "said"),
    [
        # shared memory lowers the number: 8 fit, so 9 are refused, as is less than one
        *(
            (wanted, Footprint(threads=128, regs_per_thread=64, smem_bytes=24576), H200, "8 fit")
            for wanted in (0, -1, 9)
        ),
        # Volta's 96 KiB in units of 128 bytes have no size that leaves exactly 31 blocks
        (31, Footprint(threads=32, regs_per_thread=16, smem_bytes=0), V100, "exactly 31"),
    ],
)
def test_blocks_that_cannot_be_had_are_refused(wanted: int, block: Footprint, sm: SmLimits, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        smem_for_blocks_per_sm(wanted, kernel=block, sm=sm)


GEMM = Footprint(threads=128, regs_per_thread=64, smem_bytes=24576)
NCCL = Footprint(threads=544, regs_per_thread=96, smem_bytes=106000)


@pytest.mark.parametrize(
    ("kernel_smem", "guest", "beside"),
    [
        (24576, NCCL, False),
        (45696, NCCL, False),
        (115840, NCCL, False),
        (24576, dataclasses.replace(NCCL, smem_bytes=32000), False),  # it is not the shared memory
        (24576, dataclasses.replace(NCCL, threads=288), True),  # 9 warps: 3 in the fullest register file, not 5
        (115840, dataclasses.replace(NCCL, threads=288), True),
        (125952, dataclasses.replace(NCCL, threads=288), False),  # 126976 + 107024 > 233472
        (24576, dataclasses.replace(NCCL, regs_per_thread=31), True),
        (115840, dataclasses.replace(NCCL, regs_per_thread=31), True),
    ],
)
def test_who_lives_beside_whom(kernel_smem: int, guest: Footprint, beside: bool) -> None:
    """A GEMM's blocks next to a block like NCCL's, as SMs of an H200 wrote down (docs/results/pairs.md)."""
    assert (blocks_beside(with_smem(GEMM, kernel_smem), guest, sm=H200) > 0) == beside


def test_the_rule_gives_what_the_sms_wrote_down() -> None:
    """Blocks of the GEMM beside a guest that was there first: every row of the measurement on an H200."""
    rows = json.loads((Path(__file__).parents[3] / "results" / "occupancy-residency.json").read_text())["rows"]
    found = [
        (blocks_beside(with_smem(GEMM, row["gemm_smem_bytes"]), Footprint(**row["guest"]), sm=H200), row)
        for row in rows
        if row["order"] == "guest_first"
    ]
    assert len(found) == 30
    assert [row for expected, row in found if expected != row["blocks_beside"]] == []


@given(footprints, footprints)
def test_a_guest_never_makes_room(block: Footprint, guest: Footprint) -> None:
    assert blocks_beside(block, guest, sm=H200) <= block.most_on(H200)


KERNEL = UnshapedKernel(
    name="matmul", threads=128, regs_per_thread=64, static_smem_bytes=1024, dynamic_smem_bytes=23552
)


def test_dynamic_bytes_are_what_is_missing_beside_the_static_ones() -> None:
    """Static shared memory cannot be changed at launch, so the dynamic part makes up the rest."""
    found = shape(KERNEL, OccupancyShaping(blocks_per_sm=2), sm=H200)
    assert (found.dynamic_smem_bytes, found.blocks_before, found.blocks_after) == (76928 - 1024, 8, 2)


@pytest.mark.parametrize(
    ("kernel", "wanted", "reason"),
    [
        (dataclasses.replace(KERNEL, clustered=True), OccupancyShaping(blocks_per_sm=2), "clusters"),
        (dataclasses.replace(KERNEL, cooperative=True), OccupancyShaping(blocks_per_sm=2), "cooperative"),
        (dataclasses.replace(KERNEL, threads=384, regs_per_thread=168), OccupancyShaping(blocks_per_sm=1), "gemm_sms"),
        (KERNEL, OccupancyShaping(blocks_per_sm=8), "only 8 blocks fit"),
        (KERNEL, OccupancyShaping(smem_bytes=300_000), "more than a block may have: 232448"),
        (KERNEL, OccupancyShaping(smem_bytes=24576), "24576 bytes itself"),
    ],
)
def test_what_cannot_be_shaped_stays_and_says_why(
    kernel: UnshapedKernel, wanted: OccupancyShaping, reason: str
) -> None:
    found = shape(kernel, wanted, sm=H200)
    assert (found.dynamic_smem_bytes, reason in str(found.refused)) == (kernel.dynamic_smem_bytes, True), found.refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *((wrong, "exactly one") for wrong in ({}, {"blocks_per_sm": 2, "smem_bytes": 60000}, {"blocks_per_sm": 0})),
        ({"blocks_per_sm": 1, "kernels": "("}, "regular expression"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        OccupancyShaping(**options)


@pytest.mark.parametrize(
    ("control", "name"),
    [
        (OccupancyShaping(blocks_per_sm=3), "blocks_per_sm=3"),
        (OccupancyShaping(smem_bytes=60000), "smem=60000"),
        (OccupancyShaping(blocks_per_sm=1, interpose=True), "blocks_per_sm=1,interposed"),
    ],
)
def test_name(control: OccupancyShaping, name: str) -> None:
    assert control.name == name


def ran(smem_bytes: int | None, *, name: str = "matmul", regs: int = 64, threads: int = 128) -> Launched:
    return Launched(kind="kernel", name=name, grid=(16384, 1, 1), block=(threads, 1, 1), regs_per_thread=regs,
                    smem_bytes=smem_bytes, duration_us=100.0)  # fmt: skip


CONTROL = OccupancyShaping(blocks_per_sm=2, sm=H200)
PERSISTENT = ran(213188, name="nvjet_sm90", regs=168, threads=384)


@pytest.mark.parametrize(
    ("control", "with_it", "without", "took_effect"),
    [
        pytest.param(CONTROL, ran(76928), ran(24576), True, id="shaped"),
        pytest.param(CONTROL, ran(24576), ran(24576), False, id="no-op"),
        pytest.param(CONTROL, ran(57472), ran(24576), False, id="other-bytes"),
        pytest.param(CONTROL, ran(76928), ran(76928), False, id="was-so-before"),
        pytest.param(CONTROL, ran(76928, name="other"), ran(24576), False, id="another-kernel"),
        pytest.param(CONTROL, PERSISTENT, PERSISTENT, False, id="persistent"),
        pytest.param(CONTROL, ran(None), ran(24576), False, id="unknown-size"),
        pytest.param(OccupancyShaping(smem_bytes=60000, sm=H200), ran(60000), ran(24576), True, id="bytes"),
        pytest.param(OccupancyShaping(smem_bytes=60000, sm=H200), ran(24576), ran(24576), False, id="bytes-no-op"),
    ],
)
def test_verify(control: OccupancyShaping, with_it: Launched, without: Launched, took_effect: bool) -> None:
    """Only the same kernel with the bytes that give the blocks is a proof."""
    evidence = control.verify(Observation(compute=(with_it,), compute_without=(without,)))
    assert evidence.took_effect is took_effect, evidence.seen


def test_verify_names_what_to_do_for_a_persistent_kernel() -> None:
    """One block per SM cannot become fewer; the grid can."""
    assert "gemm_sms" in CONTROL.verify(Observation(compute=(PERSISTENT,), compute_without=(PERSISTENT,))).seen


def test_another_kernel_that_now_takes_longer_does_not_hide_the_proof() -> None:
    """Shaping changes which kernel of a computation takes longest; the same one is looked at."""
    other = msgspec.structs.replace(ran(0), name="other", duration_us=150.0)
    shorter = msgspec.structs.replace(other, duration_us=50.0)
    seen = Observation(compute=(ran(76928), other), compute_without=(ran(24576), shorter))
    assert CONTROL.verify(seen).took_effect


def test_a_guest_takes_one_of_the_blocks_that_an_sm_can_hold() -> None:
    tiny = Footprint(threads=32, regs_per_thread=8, smem_bytes=0)
    assert blocks_beside(tiny, tiny, sm=H200) == H200.blocks - 1
