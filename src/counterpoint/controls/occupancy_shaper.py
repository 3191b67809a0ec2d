"""Shapes kernels as they are launched: asks the driver what a kernel takes, and lets it have more shared memory.

This is the way in for kernels launched through cuda-bindings or cuda.core: ask `dynamic_smem` for the bytes to launch
with, or `launch_config` for the whole configuration. The other ways in (Triton's launcher, the driver's own launch)
call it, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from counterpoint.controls.driver import call
from counterpoint.controls.occupancy_shape import Kernel, Shape, Wanted, shape
from counterpoint.errors import Unsupported
from counterpoint.machine.occupancy import SmLimits

__all__ = ["Shaper", "device_limits"]


class Shaper:
    """Decides for every kernel once, and remembers. Usable from several threads: a decision taken twice is the same.

    Args:
        wanted: what every kernel should have.
        kernels: regular expression; kernels whose names it is not found in stay as they are.
    """

    def __init__(self, wanted: Wanted, *, kernels: str = "") -> None:
        self.active = True  # the ways in look at it: off while the communication side is queued
        self._wanted, self._pattern = wanted, re.compile(kernels)
        self._shapes: dict[tuple[int, int, int, bool, bool], Shape | None] = {}
        self._limits: dict[int, SmLimits] = {}  # by device

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every kernel that was met, shaped or refused, in the order of its first launch."""
        return tuple(found for found in self._shapes.values() if found is not None)

    def dynamic_smem(
        self,
        handle: int,
        *,
        threads: int,
        dynamic_smem_bytes: int = 0,
        clustered: bool = False,
        cooperative: bool = False,
    ) -> int:
        """Bytes of dynamic shared memory to launch a kernel with; the kernel may be launched with them from now on.

        That permission stays: it changes nothing by itself, and captured graphs need it.

        Args:
            handle: `CUfunction` or `CUkernel`, as an integer.
            threads: per block.
            dynamic_smem_bytes: what it needs by itself.
            clustered: launched with a cluster dimension.
            cooperative: launched cooperatively.

        Raises:
            Unsupported: the driver refused.
        """
        key = (handle, threads, dynamic_smem_bytes, clustered, cooperative)
        if key not in self._shapes:
            function = _function(handle)
            kernel = Kernel(
                name=call("cuFuncGetName", function).decode(),
                threads=threads,
                regs_per_thread=_attribute(function, "NUM_REGS"),
                static_smem_bytes=_attribute(function, "SHARED_SIZE_BYTES"),
                dynamic_smem_bytes=dynamic_smem_bytes,
                clustered=clustered or _attribute(function, "REQUIRED_CLUSTER_WIDTH") > 0,
                cooperative=cooperative,
            )
            self._shapes[key] = self._decide(kernel, function)
        found = self._shapes[key]
        return dynamic_smem_bytes if found is None else found.dynamic_smem_bytes

    def launch_config(self, config: Any, kernel: Any) -> Any:
        """A copy of cuda.core's `LaunchConfig` with the shared memory to launch its `Kernel` with."""
        threads = config.block[0] * config.block[1] * config.block[2]
        smem = self.dynamic_smem(
            int(kernel.handle if hasattr(kernel, "handle") else kernel._handle),
            threads=threads,
            dynamic_smem_bytes=config.shmem_size,
            clustered=bool(config.cluster),
            cooperative=bool(getattr(config, "is_cooperative", False)),
        )
        fields = ("grid", "cluster", "block", "is_cooperative", "programmatic_stream_serialization")
        kept = {name: getattr(config, name) for name in fields if getattr(config, name, None)}
        return type(config)(**kept, shmem_size=smem)

    @contextmanager
    def only_here(self) -> Iterator[None]:
        """Shape what is launched inside, and nothing that is launched after it."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _decide(self, kernel: Kernel, function: Any) -> Shape | None:
        if not self._pattern.search(kernel.name):
            return None
        device = int(call("cuCtxGetDevice"))
        if device not in self._limits:
            self._limits[device] = device_limits(device)
        found = shape(kernel, self._wanted, sm=self._limits[device])
        if found.dynamic_smem_bytes > _attribute(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES"):
            _allow(function, found.dynamic_smem_bytes)
        return found


def device_limits(device: int | None = None) -> SmLimits:
    """What an SM of the device (None: of the current context) holds, as the driver says.

    Raises:
        Unsupported: no context, or the driver is too old to say.
    """
    from cuda.bindings import driver

    which = call("cuCtxGetDevice") if device is None else call("cuDeviceGet", device)

    def ask(name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", attribute, which))

    return SmLimits(
        num_sms=ask("MULTIPROCESSOR_COUNT"),
        regs=ask("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        smem=ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        threads=ask("MAX_THREADS_PER_MULTIPROCESSOR"),
        blocks=ask("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        smem_reserved=ask("RESERVED_SHARED_MEMORY_PER_BLOCK"),
    )


def _function(handle: int) -> Any:
    """The function behind a launch: cuBLAS and the CUDA runtime launch `CUkernel`s, Triton `CUfunction`s."""
    from cuda.bindings import driver

    function = driver.CUfunction(handle)
    try:
        _attribute(function, "NUM_REGS")
    except Unsupported:
        return call("cuKernelGetFunction", driver.CUkernel(handle))
    return function


def _attribute(function: Any, name: str) -> int:
    from cuda.bindings import driver

    return int(call("cuFuncGetAttribute", getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}"), function))


def _allow(function: Any, dynamic_smem_bytes: int) -> None:
    from cuda.bindings import driver

    name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call("cuFuncSetAttribute", function, name, dynamic_smem_bytes)
