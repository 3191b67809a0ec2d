"""`counterpoint.measure`: bad requests end before any rank is started, and a run's outcomes become one measurement."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import counterpoint
from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout, Unsupported
from counterpoint.measurement import api
from counterpoint.measurement.api import STARTUP_S
from counterpoint.records.measurement import Outcome, Plan, Scenario
from tests.support import fake_worker


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture(name="never")
def never_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two H200, and a launcher that must not be reached."""

    def launch(plan: Plan, **options: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(api, "launch", launch)
    monkeypatch.setattr(api, "visible_gpus", lambda: ("NVIDIA H200", "NVIDIA H200"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "suite": ({"suite": "nonsense"}, r"no suite 'nonsense'; choose from: quick"),
    "mechanism": ({"mechanisms": ["nonsense"]}, r"no mechanism 'nonsense' on cuda; choose from: nccl"),
    "device": ({"device": "tpu"}, r"device 'tpu'; allowed: cuda, cpu"),
    "more ranks than GPUs": ({"world_size": 3}, r"3 ranks for 2 visible GPUs; .* at most 2"),
    "one rank": ({"world_size": 1}, r"1 rank; a collective needs at least 2"),
    "a thousand ranks": ({"world_size": 1000, "device": "cpu"}, r"1000 ranks; at most 64"),
    "rounds": ({"rounds": 4}, r"rounds 4; at least 5: the first two are dropped"),
    "timeout": ({"timeout_s": 0.0}, r"timeout 0 s; it must be more than 0"),
}


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(("options", "text"), BAD.values(), ids=BAD)
def test_a_bad_request_is_refused_before_ranks_start(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Misconfigured, match=text):
        api.measure(**({"suite": "quick"} | options))


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ((), "^no GPU is visible; measure needs at least 2.*--device cpu"),
        (("NVIDIA H200",), "^one GPU is visible; measure needs at least 2.*--device cpu"),
        (Unsupported("cuInit failed: (802)"), r"no GPU can be used: cuInit failed: \(802\)"),  # a broken machine
    ],
)
def test_two_gpus_are_needed(monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...] | Unsupported, said: str) -> None:

    def visible_gpus() -> tuple[str, ...]:
        if isinstance(gpus, Unsupported):
            raise gpus
        return gpus

    monkeypatch.setattr(api, "visible_gpus", visible_gpus)
    with pytest.raises(Unsupported, match=said):
        api.measure("quick")


@pytest.mark.usefixtures("never")
def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'counterpoint\[torch\]'"):
        api.measure("quick")


@pytest.mark.usefixtures("never")
def test_inside_torchrun_it_says_to_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(Misconfigured, match=r"RANK=3 is set.*without torchrun"):
        api.measure("quick")


def replay(*skip: int) -> Callable[..., None]:
    """A launcher that measures all scenarios but those at these places."""

    def launch(plan: Plan, **options: Any) -> None:
        names = [part.name for place, part in enumerate(plan.parts) if place not in skip]
        lines = [Outcome(scenario=name, environment=fake_worker.ENVIRONMENT) for name in reversed(names)]
        with Path(plan.results).open("ab") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)

    return launch


def test_outcomes_become_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room is callable, and what ranks wrote comes back under the suite's name."""
    monkeypatch.setattr(api, "launch", replay())
    measured = counterpoint.measure("quick", device="cpu", rounds=5)
    assert (measured.suite, measured.rounds, measured.environment.torch) == ("quick", 5, "none")


@pytest.mark.parametrize(("error", "stays"), [(PeerTimeout("x"), True), (Misconfigured("x"), False)])
def test_logs_stay_only_where_the_error_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: CounterpointError, stays: bool
) -> None:
    """The folder of a run is left after ranks died, and after nothing else."""

    def launch(plan: Plan, **options: Any) -> None:
        raise error

    monkeypatch.setattr(api, "launch", launch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(type(error)):
        api.measure("quick", device="cpu")
    assert bool(list(tmp_path.iterdir())) == stays


def test_ranks_wait_longer_than_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the launcher says which rank is stuck, before another rank complains of its own wait."""
    waits: list[tuple[float, float]] = []

    def launch(plan: Plan, **options: Any) -> None:
        assert plan.device == "cpu"
        waits.append((plan.timeout_s, options["timeout_s"] + STARTUP_S))
        replay()(plan)

    monkeypatch.setattr(api, "launch", launch)
    for timeout_s in (0.5, 1e4, float("inf")):
        api.measure("quick", device="cpu", timeout_s=timeout_s)
    assert [rank > launcher for rank, launcher in waits] == [True, True, False]  # no clock waits for ever


def test_ranks_are_as_many_as_asked_or_as_gpus() -> None:
    """Two on CPUs, where up to 64 may be asked for; a GPU holds one."""
    asked = [("cpu", None), ("cpu", 64), ("cuda", None), ("cuda", 2), ("cuda", 8)]
    assert [api._world_size(device, ranks, 8) for device, ranks in asked] == [2, 64, 8, 2, 8]


def lacking(*mechanisms: str) -> Callable[..., None]:
    """A launcher whose ranks find that these mechanisms cannot run."""

    def launch(plan: Plan, **options: Any) -> None:
        with Path(plan.results).open("ab") as file:
            for scenario in plan.parts:
                assert isinstance(scenario, Scenario)
                missing = {name: f"no {scenario.collective}" if name == "a" else "too old" for name in mechanisms}
                outcome = Outcome(scenario=scenario.name, environment=fake_worker.ENVIRONMENT, unavailable=missing)
                file.write(msgspec.json.encode(outcome) + b"\n")

    return launch


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (replay(0), "without having measured scenario"),
        # a mechanism that lacks two collectives says both; one reason stands alone
        (lacking("a"), "a: all_gather: no all_gather; all_reduce: no all_reduce$"),
        (lacking("b"), "b: too old$"),
    ],
)
def test_what_was_not_measured_is_an_error(
    monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None], said: str
) -> None:
    monkeypatch.setattr(api, "launch", launch)
    with pytest.raises(CounterpointError, match=said):
        api.measure("quick", device="cpu")


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(9, {}, "4"), (1, {}, "1"), (9, {"OMP_NUM_THREADS": "7"}, "7")]
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: dict[str, str], threads: str
) -> None:
    """Unless the user gives the number; which rank it is comes from here, whatever the user has set."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr("os.environ", {"LOCAL_RANK": "5"} | given)
    found = api._environment(1, 2, 4000)
    assert (found["OMP_NUM_THREADS"], found["LOCAL_RANK"], found["MASTER_PORT"]) == (threads, "1", "4000")
