"""`verified`: a pair under controls of which each has to show its effect, on records of what ran."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.controls import observe as module
from counterpoint.controls.control import Lanes
from counterpoint.controls.gemm_sms import GemmSmLimit
from counterpoint.controls.observe import verified
from counterpoint.controls.parse import parse_mechanism
from counterpoint.errors import NoEffect, Unsupported
from counterpoint.records.measurement import Evidence, Observation
from counterpoint.tuned.choices import KNOBS

RAN = msgspec.json.decode(Path(__file__).with_name("seen_2xh200.json").read_bytes(), type=dict[str, Observation])
LANES = Lanes(compute_stream="compute", comm_stream="comm", compute=lambda: None, comm=lambda: None)
LIMIT = GemmSmLimit(num_sms=108)


class Log(list[str]):
    """What was applied, watched and undone, in that order."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A machine on which the limit can be applied; what ran is a record."""
    happened = Log()

    @contextmanager
    def apply(self: GemmSmLimit, lanes: Lanes) -> Iterator[Lanes]:
        happened.append("on")
        try:
            yield lanes
        finally:
            happened.append("off")

    monkeypatch.setattr(GemmSmLimit, "available", lambda self: None)
    monkeypatch.setattr(GemmSmLimit, "apply", apply)
    return happened


def watching(monkeypatch: pytest.MonkeyPatch, scenario: str) -> list[dict[str, Any]]:
    """`see` gives a record; what it was called with is kept."""
    calls: list[dict[str, Any]] = []

    def see(lanes: Lanes, **options: Any) -> Observation:
        calls.append({"lanes": lanes, **options})
        return RAN[scenario]

    monkeypatch.setattr(module, "see", see)
    return calls


def test_a_knob_that_did_nothing_is_raised_and_undone(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """One call applies, looks and refuses, with what was asked, what ran and what to do."""
    watching(monkeypatch, "gemm_sms=108, fp32 mm")
    said = r"gemm_sms=108 had no effect: asked for .* 108 blocks.*, saw .* 1024 .*; launch GEMMs of torch inside"
    with pytest.raises(NoEffect, match=said), verified([LIMIT], LANES, device="cuda"):
        log.append("inside")
    assert log == ["on", "off"]


def test_a_knob_that_works_stays_on_inside(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """The pair without controls is the comparison, unless another one is given, as controls of NCCL need."""
    calls = watching(monkeypatch, "gemm_sms=108")
    with verified([LIMIT], LANES, device="cuda"):
        log.append("inside")
    assert (log, calls[0]["without"]) == (["on", "inside", "off"], LANES)


def test_a_control_that_cannot_work_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GemmSmLimit, "available", lambda self: "no such GPU")
    with (
        pytest.raises(Unsupported, match="gemm_sms=108 cannot work here: no such GPU"),
        verified([LIMIT], LANES, device="cuda"),
    ):
        pass


def test_a_knob_idle_on_another_rank_is_raised_here(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    watching(monkeypatch, "gemm_sms=108")
    idle = Evidence(control="gemm_sms=108", asked="x", seen="y", took_effect=False)
    monkeypatch.setattr(module, "_of_ranks", lambda mine, group: [mine, [idle]])
    with pytest.raises(NoEffect, match="saw y"), verified([LIMIT], LANES, device="cuda", group="two ranks"):
        pass


VALUES = {"priority": "high", "cta_policy": "zero", "order": "comm_resident", "windows": ""}


@pytest.mark.parametrize("key", KNOBS)
def test_every_control_says_what_to_do(key: str) -> None:
    setting = f"{key}={VALUES.get(key, '2')}".removesuffix("=")
    (control,) = parse_mechanism(f"nccl+{setting}")[1]
    assert control.remedy
