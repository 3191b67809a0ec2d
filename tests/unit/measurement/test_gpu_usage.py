"""Clocks and power: of the GPU that was measured."""

import sys
from types import SimpleNamespace

import pytest

from counterpoint.measurement.gpu_usage import combine, read_device

WATTS = {"GPU-first": 100_000, "GPU-second": 650_000}


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, told apart by their power."""
    library = SimpleNamespace(
        NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=WATTS.__getitem__,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x4, nvmlDeviceGetClockInfo=lambda handle, what: 1980,
        nvmlDeviceGetPowerUsage=lambda handle: handle, nvmlDeviceGetTemperature=lambda handle, what: 61,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", library)


def test_the_gpu_is_found_by_its_uuid() -> None:
    """Whatever CUDA_VISIBLE_DEVICES makes of the numbers."""
    assert read_device("GPU-second") == (1980, 650.0, 61, ("power cap",))


def test_a_gpu_that_nvml_does_not_know_is_not_claimed() -> None:
    assert read_device("GPU-third") is None


def test_extremes_over_ranks() -> None:
    state = combine([(1980, 100.0, 40, ()), None, (1200, 650.0, 61, ("power cap",))])
    assert state is not None
    assert (state.sm_mhz_min, state.sm_mhz_max, state.power_w_max, state.temperature_c_max, state.throttle) == (
        1200, 1980, 650.0, 61, ("power cap",),
    )  # fmt: skip
