"""Read every CUDA device and who can map whose memory. Runs in a child process."""

from __future__ import annotations

from itertools import permutations

from counterpoint.machine.driver import Driver
from counterpoint.machine.readings import Cuda, CudaDevice

__all__ = ["read_cuda"]

# CUdevice_attribute, cuda.h 13.0
_NUM_SMS, _MAJOR, _MINOR = 16, 75, 76
_ASYNC_ENGINES, _STREAM_MEMORY_OPS_V1, _DMA_BUF, _MULTICAST = 40, 92, 124, 132
_STREAM_MEMORY_OPS_SINCE = 12000  # CUDA 12 made them part of every device; before, attribute 92 tells


def read_cuda() -> Cuda:
    """Every device that this process may use.

    Raises:
        Blind: no driver, or it failed to start.
    """
    driver = Driver()
    version = driver.version()
    devices = range(driver.device_count())
    denied = tuple(pair for pair in permutations(devices, 2) if not driver.can_access(*pair))
    return Cuda(version=version, devices=tuple(_device(driver, i, version) for i in devices), no_peer_access=denied)


def _device(driver: Driver, device: int, version: int) -> CudaDevice:
    memory_ops = version >= _STREAM_MEMORY_OPS_SINCE or driver.attribute(device, _STREAM_MEMORY_OPS_V1) == 1
    return CudaDevice(
        name=driver.name(device),
        bus_id=driver.bus_id(device),
        capability=(driver.attribute(device, _MAJOR), driver.attribute(device, _MINOR)),
        num_sms=driver.attribute(device, _NUM_SMS),
        copy_engines=driver.attribute(device, _ASYNC_ENGINES),
        stream_memory_ops=memory_ops,
        multicast=driver.attribute(device, _MULTICAST) == 1,
        dma_buf=driver.attribute(device, _DMA_BUF) == 1,
    )
