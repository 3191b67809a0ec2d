"""What is opened is put back: buffers before each trial, registered memory at the end."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from counterpoint.controls.control import Lanes
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.measurement.collective import Comm
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.measurement.open_mechanisms import Opened, open_all, open_mechanism
from counterpoint.measurement.trial import Case

LANES = Lanes(compute_stream=None, comm_stream=None, compute=lambda: None, comm=lambda: None)
SESSION: Any = SimpleNamespace(
    group=lambda controls: None, raise_together=lambda action: action(), rank=0, world_size=2,
    device=torch.device("cpu"), dtype=torch.float32,
    communicator=SimpleNamespace(empty=lambda numel, dtype: torch.empty(numel, dtype=dtype)),
)  # fmt: skip


def mechanism(name: str, base: str, windows: Any = None) -> Any:
    """A mechanism that can run anywhere."""
    return SimpleNamespace(name=name, base=base, windows=windows, controls=(), why_unavailable=lambda collective: None)


@pytest.mark.parametrize("what", ["comm_alone", "serial", "together", "compute_alone"])
def test_every_trial_starts_with_its_own_data(what: Case) -> None:
    """An all_reduce in place would otherwise grow from trial to trial."""
    did: list[str] = []
    comm = SimpleNamespace(reset=lambda: did.append("reset"))
    session = SimpleNamespace(stage=SimpleNamespace(run=lambda lanes, case: did.append(case)))
    opened: Any = Opened(mechanism=None, comm=comm, lanes=LANES, alone=LANES)  # type: ignore[arg-type]
    opened.trial(session, what)()
    assert did == ["reset", what]


class Windows:
    """Plain memory that says when it was released."""

    released = 0

    def empty(self, numel: int, *, dtype: Any, device: Any, group: Any) -> Any:
        return torch.empty(numel, dtype=dtype, device=device)

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize(
    ("error", "released"), [(None, 1), (Unsupported("another rank could not"), 1), (RuntimeError("NCCL error"), 0)]
)
def test_windows_are_released_unless_it_could_hang(error: Exception | None, released: int) -> None:
    """To release waits for the GPU: after an unexpected error that would hide the error behind a timeout."""
    windows = Windows()
    opened = open_mechanism(SESSION, mechanism("m", "nccl", windows), "all_gather", 256, LANES, {})
    with suppress(Unsupported, RuntimeError), opened:
        if error:
            raise error
    assert windows.released == released


@pytest.mark.parametrize(
    ("name", "device", "controls"),
    [("zero_sm", "cuda", []), ("zero_sm", "cpu", []), ("zero_sm+gemm_sms=124", "cuda", ["gemm_sms=124"])],
)
def test_programs_are_a_mechanism_everywhere(name: str, device: str, controls: list[str]) -> None:
    """By the same name; controls of the GEMM act on the other side of the pair."""
    found = find_mechanism(name, device)
    assert (found.base, [control.name for control in found.controls]) == ("zero_sm", controls)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_sm+max_ctas=8", "max_ctas=8 is a control of NCCL, which zero_sm does not use"),
        ("nccl+gemm_sms=fit", "gemm_sms=fit leaves SMs to the sums of zero_sm"),  # NCCL has no sums that wait for SMs
    ],
)
def test_controls_that_would_do_nothing_are_refused(name: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        find_mechanism(name, "cuda")


@pytest.mark.parametrize(("found", "settings"), [(124, "zero_sm+gemm_sms=124"), (None, "zero_sm+gemm_sms=fit")])
def test_what_the_rule_found_is_set(found: int | None, settings: str) -> None:
    fitted = find_mechanism("zero_sm+gemm_sms=fit", "cuda").with_gemm_sms(found)
    assert (fitted.name, fitted.settings) == ("zero_sm+gemm_sms=fit", settings)


def test_mechanisms_of_one_memory_share_buffers() -> None:
    """Five limits of zero_sm need no five arrays."""
    shared: dict[Any, Any] = {}
    with (
        open_mechanism(SESSION, mechanism("0", "zero_sm"), "all_gather", 256, LANES, shared) as one,
        open_mechanism(SESSION, mechanism("1", "zero_sm"), "all_gather", 256, LANES, shared) as other,
    ):
        assert one.comm.buffers is other.comm.buffers
    assert list(shared) == ["symmetric"]


def test_every_buffer_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(Comm, "check", lambda comm: checked.append(id(comm.buffers)))
    names = {"plain": None, "also_plain": None, "windows": Windows()}
    mechanisms = [mechanism(name, "nccl", windows) for name, windows in names.items()]
    with open_all(SESSION, mechanisms, "all_gather", 256, LANES, {}) as (opened, _):
        assert checked == list(dict.fromkeys(id(each.comm.buffers) for each in opened))
    assert len(checked) == 2
