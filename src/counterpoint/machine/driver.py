"""Call the CUDA driver through cuda-bindings, or through ctypes in processes without cuda-bindings and torch."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from counterpoint.errors import Unsupported

_NO_DEVICE = (100, 34)  # no GPU for this process; the stub library of the toolkit
_REFUSED = (2, 46)  # out of memory; held by another process in exclusive mode
_MOST_DEVICES = 1024  # more is no answer, and asking all of them would take days


class ProbeUnavailable(Unsupported):
    """Says that this process cannot read the machine's properties; the text names the missing part."""


class ProbeFailed(ProbeUnavailable):
    """Says that a driver or library failed or returned nonsense; the text says how."""


def call_bindings(bindings: Any, name: str, *arguments: Any) -> Any:
    """Return the result of the driver's function `name` without its error code: None, one value, or a tuple.

    `bindings` is `cuda.bindings.driver`, which only processes with torch have, or stands in for it.

    Raises:
        Unsupported: the function failed.
    """
    error, *values = getattr(bindings, name)(*arguments)
    if error:
        said = getattr(error, "name", error)
        raise Unsupported(f"{name} failed: {said}; the driver or GPU does not allow it, or an earlier call failed")
    return values[0] if len(values) == 1 else tuple(values) or None


class Driver:
    """Loads and initialises libcuda, and calls it. Handles of contexts, streams and events are plain integers.

    Raises:
        ProbeUnavailable: there is no driver, or the GPU is in use.
        ProbeFailed: a call failed (the text has CUDA's name of the error), is missing, or its answer makes no sense.
    """

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise ProbeUnavailable("no CUDA driver: libcuda.so.1 is not on this machine") from None
        self.no_device = self._function("cuInit")(0) in _NO_DEVICE
        if not self.no_device:
            self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver; raise `ProbeFailed` if it fails, `ProbeUnavailable` if the GPU is in use."""
        code = self._function(name)(*arguments)
        if code:
            text = c_char_p()
            self._function("cuGetErrorName")(code, byref(text))
            failed = ProbeUnavailable if code in _REFUSED else ProbeFailed
            raise failed(f"{name} failed: {(text.value or b'unknown error').decode(errors='replace')} ({code})")

    def get(self, kind: type[Any], name: str, *arguments: object) -> Any:
        """Return the value, of ctypes type `kind`, that a function of the driver writes through its first argument."""
        value = kind()
        self.call(name, byref(value), *arguments)
        return value.value

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._lib, name)
        except AttributeError:
            raise ProbeFailed(f"libcuda.so.1 has no {name}: it is not NVIDIA's driver, or damaged") from None

    def version(self) -> int:
        """Return the CUDA version that the driver supports, as an integer: 13000 stands for 13.0."""
        version: int = self.get(c_int, "cuDriverGetVersion")
        if version <= 0:
            raise ProbeFailed(f"cuDriverGetVersion says {version}, which is no version of CUDA")
        return version

    def device_count(self) -> int:
        """Return how many devices CUDA_VISIBLE_DEVICES leaves to this process."""
        count: int = 0 if self.no_device else self.get(c_int, "cuDeviceGetCount")
        if not 0 <= count <= _MOST_DEVICES:
            raise ProbeFailed(f"cuDeviceGetCount says {count}, which is no number of GPUs")
        return count

    def attribute(self, device: int, which: int) -> int:
        """Return the value of a `CUdevice_attribute`; 0 if the driver does not know the attribute."""
        value = c_int()
        return 0 if self._function("cuDeviceGetAttribute")(byref(value), which, device) else value.value

    def name(self, device: int) -> str:
        """Return the driver's name of a device, such as "NVIDIA H200"."""
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, c_int(256), device)
        return text.value.decode(errors="replace")

    def can_access(self, device: int, peer: int) -> bool:
        """Return whether `device` can map the memory of `peer`."""
        return bool(self.get(c_int, "cuDeviceCanAccessPeer", device, peer) == 1)

    def context(self, device: int) -> int:
        """Return the handle of a device's primary context."""
        return self.get(c_void_p, "cuDevicePrimaryCtxRetain", device) or 0

    def use(self, context: int) -> None:
        """Make `context` current for the calls that follow."""
        self.call("cuCtxSetCurrent", c_void_p(context))


def visible_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that CUDA shows to this process; raise `Unsupported` without a driver."""
    driver = Driver()
    return tuple(driver.name(ordinal) for ordinal in range(driver.device_count()))


def free_bytes(device: int) -> int:
    """Return a GPU's free memory in bytes, from a context that this call opens; raise `Unsupported` on failure."""
    driver, free, total = Driver(), c_size_t(), c_size_t()
    driver.use(driver.context(device))
    try:
        driver.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value
    finally:
        driver.call("cuDevicePrimaryCtxRelease_v2", c_int(device))
