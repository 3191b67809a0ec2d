"""What was planted when the samples were recorded (provenance.json), against what the diagnosis says."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from counterpoint.diagnosis.api import diagnose
from counterpoint.diagnosis.reading.digest import Engine
from counterpoint.records.diagnosis import Diagnosis

SAMPLES = Path(__file__).parents[3] / "samples"
NAMES = ("fsdp-healthy", "fsdp-host-stall", "tail-effect")


@cache
def diagnosis(name: str) -> Diagnosis:
    return diagnose(SAMPLES / name, engine=Engine(workers=1)).diagnosis


def provenance(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((SAMPLES / name / "provenance.json").read_text())
    return made


def test_planted_stall_is_found() -> None:
    planted = provenance("fsdp-host-stall")["planted"]
    found = [(s.rank, s.cause, s.detail) for s in diagnosis("fsdp-host-stall").stragglers]
    assert found == [(planted["rank"], planted["expected_cause"], planted["named_operation"])]


def test_delay_is_the_plant_less_what_was_queued() -> None:
    """30 ms planted; its GPU had no work for the last 24 of them, and the others felt most of that."""
    planted_us = 1e3 * provenance("fsdp-host-stall")["planted"]["amount"]
    assert 0.6 * planted_us < diagnosis("fsdp-host-stall").stragglers[0].delay_us < planted_us


def test_stall_is_located_in_its_step() -> None:
    d, step = diagnosis("fsdp-host-stall"), diagnosis("fsdp-host-stall").steps[0]
    assert step.start_us <= (d.stragglers[0].start_us or -1.0) < step.start_us + step.duration_us


@pytest.mark.parametrize("name", ["fsdp-healthy", "tail-effect"])
def test_no_straggler_where_none_was_planted(name: str) -> None:
    assert diagnosis(name).stragglers == ()


def test_tail_effect_doubles_the_waves() -> None:
    """132 blocks on 132 SMs are one wave, on the 108 that 24 communication CTAs leave two: none can be spared."""
    k = next(k for k in diagnosis("tail-effect").kernels if k.name.startswith("nvjet"))
    assert (k.cause, k.waves_alone, k.waves_overlapped, k.comm_ctas) == ("tail_effect", 1, 2, 24)
    assert k.comm_ctas_without_extra_wave == 0


def test_launch_order_is_found() -> None:
    found = next(f for f in diagnosis("tail-effect").findings if f.kind == "launch_order")
    assert "nvjet" in found.evidence


@pytest.mark.parametrize("name", NAMES)
def test_gathers_move_at_the_speed_of_the_links(name: str) -> None:
    """The fastest large collective has a bus bandwidth between 250 and 400 GB/s (8 x H200: NCCL reaches 340 to 360)."""
    rates = [c.bus_gb_per_s for c in diagnosis(name).collectives if c.bytes and c.bytes > 1 << 28 and c.bus_gb_per_s]
    assert 250 < max(rates) < 400


@pytest.mark.parametrize("name", NAMES)
def test_accounts_add_up(name: str) -> None:
    """Compute, exposed communication and idle leave only copies: never more than the step."""
    for a in diagnosis(name).per_rank:
        rest = a.duration_us - a.compute_us - a.exposed_comm_us - a.idle_us
        assert -1.0 < rest <= a.memcpy_us + 1.0


def test_steps_are_as_long_as_their_host_says() -> None:
    host_us = 1e3 * provenance("fsdp-healthy")["host_step_ms"]["0"][0]
    assert diagnosis("fsdp-healthy").steps[0].duration_us == pytest.approx(host_us, rel=0.02)
