"""Probes and what they share, as far as that runs without a GPU."""

import ctypes
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.doctor import checkup
from counterpoint.doctor.checkup import collect_readings
from counterpoint.doctor.probe import Answer
from counterpoint.doctor.read_gpus import CLOCK_REASONS, MAX_PAIRS, choose_pairs, read_nvml
from counterpoint.doctor.readings import Cuda, NvLink, Readings
from counterpoint.doctor.system import nccl_version, read_torch_files
from counterpoint.machine.driver import Driver, ProbeFailed, ProbeUnavailable


@pytest.mark.parametrize("gpus", [2, 3, 4, 8, 15, 16, 72])
def test_every_gpu_is_in_a_pair(gpus: int) -> None:
    pairs = choose_pairs(gpus, chance=random.Random(gpus))
    assert {gpu for pair in pairs for gpu in pair} == set(range(gpus))


@pytest.mark.parametrize(("gpus", "count"), [(2, 1), (4, 6), (5, 10), (8, MAX_PAIRS), (16, MAX_PAIRS), (72, 36)])
def test_pairs_are_all_or_a_dozen(gpus: int, count: int) -> None:
    """All pairs of a small machine, a dozen of a large one, more only to reach every GPU."""
    assert len(set(choose_pairs(gpus, chance=random.Random(0)))) == count


@pytest.mark.parametrize(("code", "version"), [(22809, (2, 28, 9)), (22304, (2, 23, 4)), (2708, (2, 7, 8))])
def test_version_code_of_nccl(code: int, version: tuple[int, int, int]) -> None:
    assert nccl_version(code) == version


def test_torch_and_its_features_are_read_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n"
        "hip: Optional[str] = None\nraise SystemExit('never run')\n"
    )
    found = read_torch_files(tmp_path)
    assert (found.torch, found.torch_cuda, found.torch_hip) == ("2.11.0+cu130", "13.0", None)
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "green_contexts.py").write_text("class GreenContext:\n    pass\n")
    features = read_torch_files(tmp_path).features
    assert {name for name, there in features.items() if there} == {"green_contexts"}


class FakeNvml(types.ModuleType):
    """nvidia-ml-py on a machine of one GPU whose driver knows only what is given."""

    class NVMLError(Exception):
        value: int

    NVML_SUCCESS = 0

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__("pynvml")
        self.answers = {
            "nvmlInit": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlSystemGetDriverVersion": b"580.159.04", "nvmlDeviceGetName": b"NVIDIA H200",
        } | answers  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") and name not in self.answers:
            raise AttributeError(name)
        if name not in self.answers:

            def refuse(*_: object) -> None:
                raise self.NVMLError("Not Supported")

            return refuse
        answer = self.answers[name]
        return answer if callable(answer) else lambda *_: answer


def fake(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml(answers))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)


def test_what_nvml_refuses_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    gpu = read_nvml().gpus[0]
    known = {key for key, value in msgspec.structs.asdict(gpu).items() if value is not None}
    assert known == {"index", "name", "nvlinks"}


@pytest.mark.parametrize(("bit", "reason"), CLOCK_REASONS.items())
def test_clock_reasons_are_named(monkeypatch: pytest.MonkeyPatch, bit: int, reason: str) -> None:
    fake(monkeypatch, nvmlDeviceGetCurrentClocksEventReasons=bit)
    assert read_nvml().gpus[0].clock_reasons == (reason,)


class FabricInfo(ctypes.Structure):
    _fields_ = [("status", ctypes.c_uint), ("state", ctypes.c_uint)]


@pytest.mark.parametrize(
    ("status", "state", "expected"),
    [(0, 3, "completed"), (0, 2, "in_progress"), (0, 1, "not_started"), (15, 3, "failed"), (0, 0, None)],
)
def test_the_state_of_the_fabric_is_named(
    monkeypatch: pytest.MonkeyPatch, status: int, state: int, expected: str | None
) -> None:
    """Completed with an error is failed; not supported is no fabric."""

    def fill(_: object, reference: Any) -> None:
        reference._obj.status, reference._obj.state = status, state

    fake(monkeypatch, nvmlDeviceGetGpuFabricInfoV=fill, c_nvmlGpuFabricInfoV_t=FabricInfo)
    assert read_nvml().gpus[0].fabric == expected


def test_links_are_read_from_fields_and_else_from_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that the GPU lacks (here 161, replays) is asked for by the function of older GPUs, if the link is up."""

    def fields(_: object, wanted: list[tuple[int, int]]) -> list[types.SimpleNamespace]:
        return [
            types.SimpleNamespace(nvmlReturn=3 * (name == 161), valueType=1, value=types.SimpleNamespace(uiVal=name))
            for name, _ in wanted
        ]

    fake(
        monkeypatch,
        nvmlDeviceGetNvLinkState=lambda handle, link: int(link == 0),
        nvmlDeviceGetFieldValues=fields,
        nvmlDeviceGetNvLinkErrorCounter=lambda handle, link, which: 70 + which,
    )
    links = read_nvml().gpus[0].nvlinks
    assert links is not None
    assert links[0] == NvLink(active=True, replays=70, recoveries=162, crc_errors=163, speed_mb_per_s=164)
    assert links[1] == NvLink(active=False, replays=None, recoveries=None, crc_errors=None, speed_mb_per_s=None)


def test_a_gpu_that_fell_off_the_bus_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:

    def handle(index: int) -> str:
        if index == 1:
            raise FakeNvml.NVMLError("GPU is lost")
        return "handle"

    fake(monkeypatch, nvmlDeviceGetCount=3, nvmlDeviceGetHandleByIndex=handle)
    assert {gpu.index: gpu.lost for gpu in read_nvml().gpus} == {0: None, 1: "GPU is lost", 2: None}


def test_a_denied_peer_has_nvmls_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, nvmlDeviceGetCount=2, nvmlDeviceGetP2PStatus=3)
    assert read_nvml().denied_peers == {"0-1": "topology_not_supported", "1-0": "topology_not_supported"}


@pytest.mark.parametrize(("read", "library"), [(read_nvml, "libnvidia-ml.so.1"), (Driver, "libcuda.so.1")])
def test_a_machine_without_driver_says_so(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[], object], library: str
) -> None:

    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(ProbeUnavailable, match=f"driver: {library} is not on this machine"):
        read()


def libcuda(monkeypatch: pytest.MonkeyPatch, **answers: Callable[..., int]) -> None:
    """A libcuda.so.1 that has only these functions."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(**answers))


def saying(number: int) -> Callable[..., int]:
    """A function of libcuda that succeeds and gives `number`."""

    def answer(reference: Any) -> int:
        reference._obj.value = number
        return 0

    return answer


OK = {"cuInit": lambda flags: 0}


@pytest.mark.parametrize(
    ("answers", "read", "said"),
    [
        # a file of that name which is no driver ends in one line, not in a traceback
        ({}, Driver, "has no cuInit: it is not NVIDIA's driver"),
        (OK | {"cuDeviceGetCount": saying(-3)}, lambda: Driver().device_count(), "cuDeviceGetCount says -3"),
        (
            OK | {"cuDeviceGetCount": saying(2 * 10**9)},
            lambda: Driver().device_count(),
            "cuDeviceGetCount says 2000000000",
        ),
        (OK | {"cuDriverGetVersion": saying(-5)}, lambda: Driver().version(), "cuDriverGetVersion says -5"),
    ],
)
def test_a_driver_that_is_not_in_order_has_failed(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], read: Callable[[], object], said: str
) -> None:
    libcuda(monkeypatch, **answers)
    with pytest.raises(ProbeFailed, match=said):
        read()


def test_a_name_of_an_error_that_is_no_text_is_shown_as_far_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:

    def name(code: int, reference: Any) -> int:
        reference._obj.value = b"\xffEVIL"
        return 0

    libcuda(monkeypatch, cuInit=lambda flags: 999, cuGetErrorName=name)
    with pytest.raises(ProbeFailed, match=r"cuInit failed: .EVIL \(999\)"):
        Driver()


@pytest.mark.parametrize(
    ("code", "kind"), [(18, ProbeFailed), (9, ProbeUnavailable)], ids=["version mismatch", "not loaded"]
)
def test_nvml_that_does_not_start_has_failed_unless_it_is_absent(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[ProbeUnavailable]
) -> None:
    """A driver updated without a reboot is a fault; one that is not there is none."""

    def start() -> None:
        error = FakeNvml.NVMLError("it does not start")
        error.value = code
        raise error

    fake(monkeypatch, nvmlInit=start)
    with pytest.raises(ProbeUnavailable) as raised:
        read_nvml()
    assert raised.type is kind


def test_nvml_with_too_many_gpus_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, nvmlDeviceGetCount=4_000_000_000)
    with pytest.raises(ProbeFailed, match="nvmlDeviceGetCount says 4000000000"):
        read_nvml()


def test_a_name_that_is_no_text_costs_the_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py decodes what the driver gives; the GPU is read all the same."""

    def name(handle: object) -> str:
        return b"\xff".decode()

    fake(monkeypatch, nvmlDeviceGetName=name)
    assert read_nvml().gpus[0].name == "a GPU without a name"


def test_a_missing_driver_is_a_reason_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "ask_probe", lambda probe, **_: Answer(output=None, reason=f"no {probe}"))
    reasons = collect_readings(bandwidth=True, torch=True).unavailable
    each = {probe: f"no {probe}" for probe in ("nvml", "cuda", "nccl", "torch")}
    assert reasons == {**each, "bandwidth": "it takes two GPUs that CUDA shows"}


def test_an_answer_that_is_no_reading_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "ask_probe", lambda probe, **_: Answer(output=b"hello"))
    assert collect_readings(bandwidth=False).unavailable["cuda"].startswith("the probe's answer is not a reading: ")


def test_a_driver_that_ends_the_process_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`exit(0)` inside a library looks like success, with nothing said."""
    monkeypatch.setattr(checkup, "ask_probe", lambda probe, **_: Answer(output=b""))
    assert collect_readings(bandwidth=False).failed == ("nvml", "cuda", "nccl")


def test_bandwidth_that_is_not_wanted_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(probe: str, **_: object) -> Answer:
        asked.append(probe)
        return Answer(output=msgspec.json.encode(Cuda(version=13000)))

    monkeypatch.setattr(checkup, "ask_probe", ask)
    collect_readings(bandwidth=False)
    assert "bandwidth" not in asked


def test_only_variables_that_matter_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "ask_probe", lambda probe, **_: Answer(output=None))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    environment = collect_readings().environment
    assert ("AWS_SECRET_ACCESS_KEY" in environment, environment["NCCL_DEBUG"]) == (False, "WARN")


def test_readings_survive_json(healthy: Readings) -> None:
    assert msgspec.json.decode(msgspec.json.encode(healthy), type=Readings) == healthy
