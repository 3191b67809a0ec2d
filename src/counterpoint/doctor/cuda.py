"""Read the devices that CUDA shows, and measure copies between random pairs of GPUs and between all of them at once.

Both run in a child process. One copy engine per source, cuMemcpyPeerAsync, timed by CUDA events: rate = bytes / median
time. Then every GPU pushes to the one `shift` places on, all at once: every link carries one copy each way, which is
what an all-gather does.
"""

from __future__ import annotations

import random
from ctypes import c_float, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import combinations, permutations
from statistics import median

from counterpoint.doctor.readings import Bandwidth, Cuda, CudaDevice, PairRate
from counterpoint.machine.driver import Driver, ProbeUnavailable

# CUdevice_attribute, cuda.h 13.0
_NUM_SMS, _ASYNC_ENGINES, _STREAM_MEMORY_OPS_V1, _DMA_BUF, _MULTICAST = 16, 40, 92, 124, 132
_STREAM_MEMORY_OPS_SINCE = 12000  # CUDA 12 made them part of every device; before, attribute 92 tells
SIZE_BYTES = 256 << 20
MAX_PAIRS = 12
_ROUNDS = 7
_WARM_UPS = 2
_COPIES_AT_ONCE = 4  # per GPU, so that those launched first still run when the last one starts


def read_cuda() -> Cuda:
    """Read every device that this process may use, and the ordered pairs of devices without peer access."""
    driver = Driver()
    version = driver.version()
    devices = range(driver.device_count())
    denied = tuple(pair for pair in permutations(devices, 2) if not driver.can_access(*pair))
    return Cuda(version=version, devices=tuple(_device(driver, i, version) for i in devices), no_peer_access=denied)


def _device(driver: Driver, device: int, version: int) -> CudaDevice:
    memory_ops = version >= _STREAM_MEMORY_OPS_SINCE or driver.attribute(device, _STREAM_MEMORY_OPS_V1) == 1
    return CudaDevice(
        name=driver.name(device),
        num_sms=driver.attribute(device, _NUM_SMS),
        copy_engines=driver.attribute(device, _ASYNC_ENGINES),
        stream_memory_ops=memory_ops,
        multicast=driver.attribute(device, _MULTICAST) == 1,
        dma_buf=driver.attribute(device, _DMA_BUF) == 1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _CopyDevice:
    """Holds the handles of one GPU that copies: context, stream, buffers and events."""

    context: int
    stream: int
    source: int
    target: int
    start: int
    end: int


def choose_pairs(gpus: int, *, chance: random.Random, most: int = MAX_PAIRS) -> list[tuple[int, int]]:
    """Choose random pairs of GPUs (a < b): all if at most `most`, else about `most`, with each GPU at least once."""
    every = list(combinations(range(gpus), 2))
    if len(every) <= most:
        return every
    order = chance.sample(range(gpus), gpus)
    if gpus % 2:
        order.append(order[0])
    chosen = {(min(a, b), max(a, b)) for a, b in zip(order[::2], order[1::2], strict=True)}
    rest = [pair for pair in every if pair not in chosen]
    return sorted(chosen.union(chance.sample(rest, max(0, most - len(chosen)))))


def measure_bandwidth() -> Bandwidth:
    """Measure GB/s of random pairs both ways, then all rotations; raise `ProbeUnavailable` with fewer than 2 GPUs."""
    driver = Driver()
    count = driver.device_count()
    if count < 2:
        raise ProbeUnavailable(f"it takes two GPUs to copy between them; CUDA shows {count}")
    gpus = [_prepare(driver, device) for device in range(count)]
    _map_peers(driver, gpus)
    directions = [each for a, b in choose_pairs(count, chance=random.Random()) for each in ((a, b), (b, a))]
    pairs = tuple(PairRate(source=a, target=b, gb_per_s=_rates(driver, gpus, [(a, b)], 1)[0]) for a, b in directions)
    rotation = tuple(_rotate(driver, gpus, shift) for shift in range(1, count))
    return Bandwidth(pairs=pairs, rotation=rotation)


def _prepare(driver: Driver, device: int) -> _CopyDevice:
    context = driver.context(device)
    driver.use(context)
    return _CopyDevice(
        context=context,
        stream=driver.get(c_void_p, "cuStreamCreate", c_uint(1)),  # 1: the stream does not wait for the default stream
        source=driver.get(c_uint64, "cuMemAlloc_v2", c_size_t(SIZE_BYTES)),
        target=driver.get(c_uint64, "cuMemAlloc_v2", c_size_t(SIZE_BYTES)),
        start=driver.get(c_void_p, "cuEventCreate", c_uint(0)),  # 0: the event records a time
        end=driver.get(c_void_p, "cuEventCreate", c_uint(0)),
    )


def _map_peers(driver: Driver, gpus: list[_CopyDevice]) -> None:
    """Enable peer access where it is allowed; copies between other GPUs are measured through host memory."""
    for mine, gpu in enumerate(gpus):
        driver.use(gpu.context)
        for other, peer in enumerate(gpus):
            if mine != other and driver.can_access(mine, other):
                driver.call("cuCtxEnablePeerAccess", c_void_p(peer.context), c_uint(0))


def _rotate(driver: Driver, gpus: list[_CopyDevice], shift: int) -> PairRate:
    pairs = [(source, (source + shift) % len(gpus)) for source in range(len(gpus))]
    rates = _rates(driver, gpus, pairs, _COPIES_AT_ONCE)
    slowest = min(range(len(gpus)), key=lambda index: rates[index])
    return PairRate(source=pairs[slowest][0], target=pairs[slowest][1], gb_per_s=rates[slowest])


def _rates(driver: Driver, gpus: list[_CopyDevice], pairs: list[tuple[int, int]], copies: int) -> list[float]:
    """Return the GB/s of each (source, target) while all of them copy at once; the source's copy engine pushes."""
    times: list[list[float]] = [[] for _ in pairs]
    for round_ in range(_WARM_UPS + _ROUNDS):
        for source, target in pairs:
            _push(driver, gpus[source], gpus[target], copies)
        for index, (source, _) in enumerate(pairs):
            gpu = gpus[source]
            driver.use(gpu.context)
            driver.call("cuEventSynchronize", c_void_p(gpu.end))
            elapsed_ms = driver.get(c_float, "cuEventElapsedTime", c_void_p(gpu.start), c_void_p(gpu.end))
            if round_ >= _WARM_UPS:
                times[index].append(elapsed_ms)
    return [copies * SIZE_BYTES / median(of_pair) / 1e6 for of_pair in times]


def _push(driver: Driver, source: _CopyDevice, target: _CopyDevice, copies: int) -> None:
    """Queue `copies` copies from one GPU to another, between the two events of the source."""
    driver.use(source.context)
    stream = c_void_p(source.stream)
    driver.call("cuEventRecord", c_void_p(source.start), stream)
    to, start = (c_uint64(target.target), c_void_p(target.context)), (c_uint64(source.source), c_void_p(source.context))
    for _ in range(copies):
        driver.call("cuMemcpyPeerAsync", *to, *start, c_size_t(SIZE_BYTES), stream)
    driver.call("cuEventRecord", c_void_p(source.end), stream)
