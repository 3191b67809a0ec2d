"""Change the shared memory of kernels at launch: of any kernel by CUPTI, of Triton kernels by Triton's launcher.

CUPTI calls us as the driver is about to launch. Its callback gets a pointer to the arguments of `cuLaunchKernel` and
`cuLaunchKernelEx`, in the memory that the driver reads them from afterwards. What is written there, by value or by
reference, is what is launched (seen on driver 580, CUDA 13.0, 2026-11-21); the caller's own structure is put back
before the call returns.

CUPTI serves **one** subscriber per process. So it is either this hook or a profiler:
- once torch.profiler has run, or under nsys, ncu or compute-sanitizer, the hook raises `Unsupported`;
- a process that uses the hook first gets no GPU events from torch.profiler ever after (it says so on stderr).

It costs the launching thread about 7 µs a kernel (12.5 instead of 5.7, H200, 2026-11-21).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

from counterpoint.controls.control import why_unsupported
from counterpoint.errors import Unsupported

_DRIVER_API, _ENTER, _SUCCESS, _TAKEN = 1, 0, 0, 39
_BY_VALUE, _BY_REFERENCE = (307, 442), (652, 653)  # cuLaunchKernel, cuLaunchKernelEx; each also per-thread stream
_CLUSTER_DIMENSION, _COOPERATIVE = 4, 2  # CUlaunchAttributeID


class LaunchShaper(Protocol):
    """Decides how much dynamic shared memory each kernel is launched with; must not launch anything itself."""

    active: bool  # while it is False, launches stay as they are

    def dynamic_smem(
        self, handle: int, *, threads: int, dynamic_smem_bytes: int, clustered: bool, cooperative: bool
    ) -> int:
        """Return with how many bytes of dynamic shared memory to launch a kernel that asks for `dynamic_smem_bytes`."""


class _CallbackData(ctypes.Structure):
    _fields_ = [
        ("site", ctypes.c_int),
        ("function_name", ctypes.c_char_p),
        ("parameters", ctypes.c_void_p),
        ("returned", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("context_uid", ctypes.c_uint32),
        ("ours", ctypes.POINTER(ctypes.c_uint64)),  # kept from enter to exit
        ("correlation", ctypes.c_uint32),
    ]


class _Config(ctypes.Structure):
    """Lays out `CUlaunchConfig`, whose fields up to `stream` are also cuLaunchKernel's arguments after the function."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


class _ByValue(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("config", _Config)]


class _ByReference(ctypes.Structure):
    _fields_ = [("config", ctypes.POINTER(_Config)), ("function", ctypes.c_void_p)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallbackData))


@contextmanager
def shaped_launches(shaper: LaunchShaper) -> Iterator[None]:
    """Set the shared memory of every kernel that this process launches in the `with` block, as `shaper` says.

    Launches by `cuLaunchCooperativeKernel` are left alone. What the shaper raises is raised at the end, and the launch
    goes on unchanged.

    Raises:
        Unsupported: there is no CUPTI, or somebody else has subscribed.
    """
    failures: list[Exception] = []

    def called(_user: Any, _domain: int, call: int, data: Any) -> None:
        """Set the launch's shared memory when the driver call begins; put back the old value when it ends."""
        seen = data[0]
        by_value = call in _BY_VALUE
        arguments = ctypes.cast(seen.parameters, ctypes.POINTER(_ByValue if by_value else _ByReference))[0]
        config = arguments.config if by_value else arguments.config[0]
        if seen.site != _ENTER:
            if seen.ours[0]:
                config.smem = seen.ours[0] - 1
            return
        seen.ours[0] = 0
        try:
            wanted = _smem(shaper, arguments.function, config, by_value) if shaper.active else config.smem
        except Exception as error:  # nothing may leave a callback of C
            failures.append(error)
            return
        if wanted != config.smem:
            seen.ours[0] = config.smem + 1
            config.smem = wanted

    cupti, subscriber = _cupti(), ctypes.c_void_p()
    callback = _CALLBACK(called)  # held: CUPTI keeps only its address
    status = cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None)
    if status == _TAKEN:
        raise Unsupported(
            "another tool has subscribed to CUPTI in this process (torch.profiler once it has run, nsys, ncu, "
            "compute-sanitizer), and it serves one; interpose in a process without it, or shape Triton kernels only"
        )
    _check(status, "cuptiSubscribe")
    try:
        for call in (*_BY_VALUE, *_BY_REFERENCE):
            _check(cupti.cuptiEnableCallback(1, subscriber, _DRIVER_API, call), "cuptiEnableCallback")
        yield
    finally:
        status = cupti.cuptiUnsubscribe(subscriber)  # else CUPTI would go on calling a freed callback
    _check(status, "cuptiUnsubscribe")
    if failures:
        raise failures[0]


def _smem(shaper: LaunchShaper, function: int, config: _Config, by_value: bool) -> int:
    """Return the bytes of dynamic shared memory for one launch, given the launch's arguments to the driver."""
    clustered = cooperative = False
    if not by_value and config.num_attributes:
        attributes = ctypes.cast(config.attributes, ctypes.POINTER(_Attribute))
        for attribute in attributes[: config.num_attributes]:
            clustered = clustered or (attribute.id == _CLUSTER_DIMENSION and prod(attribute.value[:3]) > 1)
            cooperative = cooperative or (attribute.id == _COOPERATIVE and attribute.value[0] != 0)
    return shaper.dynamic_smem(
        function,
        threads=prod(config.block),
        dynamic_smem_bytes=config.smem,
        clustered=clustered,
        cooperative=cooperative,
    )


def no_cupti() -> str | None:
    """Return why CUPTI cannot be called; None if it can (another tool may still have subscribed)."""
    return why_unsupported(_cupti)


def _cupti() -> ctypes.CDLL:
    """Return the CUPTI library that the process has loaded (torch links it), or else the system's."""
    maps = Path("/proc/self/maps")
    loaded = re.search(r"(/\S*libcupti\.so\S*)", maps.read_text()) if maps.exists() else None
    for name in ([loaded[1]] if loaded else []) + ["libcupti.so.13", "libcupti.so.12", "libcupti.so"]:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cuptiSubscribe.argtypes = [ctypes.c_void_p, _CALLBACK, ctypes.c_void_p]
        library.cuptiUnsubscribe.argtypes = [ctypes.c_void_p]
        library.cuptiEnableCallback.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
        return library
    raise Unsupported("libcupti is not there; it comes with PyTorch for CUDA (nvidia-cuda-cupti) and the CUDA toolkit")


def _check(status: int, call: str) -> None:
    if status != _SUCCESS:
        raise Unsupported(f"{call} failed with CUPTI status {status}; this driver does not let launches be watched")


def no_triton() -> str | None:
    """Return why Triton's launcher cannot be changed; None if it can."""
    return why_unsupported(_launcher)


@contextmanager
def shaped_triton(shaper: LaunchShaper) -> Iterator[None]:
    """Set the shared memory of Triton kernels that any thread launches in the `with` block, as `shaper` says.

    Not reached: kernels that Inductor launches through torch's own static launcher, and captured graphs.

    Raises:
        Unsupported: no Triton for NVIDIA GPUs, or one with another launcher than 3.6 and 3.7 have.
    """
    launcher = _launcher()
    stock: Callable[..., Any] = launcher.__call__

    def launch(
        self: Any, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, packed: Any, *rest: Any
    ) -> Any:
        if shaper.active:
            warps, ctas, smem = _unpacked(packed)
            cooperative = bool(getattr(self, "launch_cooperative_grid", False))
            smem = shaper.dynamic_smem(
                function, threads=32 * warps, dynamic_smem_bytes=smem, clustered=ctas > 1, cooperative=cooperative
            )
            packed = (warps, ctas, smem)
        return stock(self, grid_x, grid_y, grid_z, stream, function, packed, *rest)

    launcher.__call__ = launch
    try:
        yield
    finally:
        launcher.__call__ = stock


def _unpacked(packed: Any) -> tuple[int, int, int]:
    """Return (warps, blocks per cluster, bytes of dynamic shared memory) from the launcher's packed argument."""
    if not (isinstance(packed, tuple) and len(packed) == 3):
        raise Unsupported(f"Triton's launcher got {packed!r} and not (warps, CTAs, shared memory); use interpose=True")
    return packed


def _launcher() -> Any:
    try:
        from triton.backends.nvidia.driver import CudaLauncher
    except ImportError as error:
        raise Unsupported(f"Triton for NVIDIA GPUs is not installed, or not 3.6 or newer: {error}") from error
    return CudaLauncher
