"""Measure copies between random pairs of GPUs, and between all of them at once; runs in a child process.

One copy engine per source, cuMemcpyPeerAsync, timed by CUDA events: rate = bytes / median time. Then every GPU pushes
to the one `shift` places on, all at once: every link carries one copy each way, which is what an all-gather does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from counterpoint.machine.driver import Driver
from counterpoint.machine.readings import Bandwidth, PairRate, ProbeUnavailable

__all__ = ["choose_pairs", "measure_bandwidth"]

SIZE_BYTES = 256 << 20
MAX_PAIRS = 12
_ROUNDS = 7
_WARM_UPS = 2
_COPIES_AT_ONCE = 4  # so that the first to be launched still runs when the last one starts


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
    """Choose random pairs (a < b): all if at most `most`, else about as many, with every GPU in one of them."""
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
    """Measure GB/s of random pairs both ways, then all rotations; raise `ProbeUnavailable` if there is one GPU."""
    driver = Driver()
    count = driver.device_count()
    if count < 2:
        raise ProbeUnavailable(f"it takes two GPUs to copy between them; CUDA shows {count}")
    gpus = [_prepare(driver, device) for device in range(count)]
    _map_peers(driver, gpus)
    directions = [way for a, b in choose_pairs(count, chance=random.Random()) for way in ((a, b), (b, a))]
    pairs = tuple(PairRate(source=a, target=b, gb_per_s=_rates(driver, gpus, [(a, b)], 1)[0]) for a, b in directions)
    rotation = tuple(_rotate(driver, gpus, shift) for shift in range(1, count))
    return Bandwidth(pairs=pairs, rotation=rotation)


def _prepare(driver: Driver, device: int) -> _CopyDevice:
    context = driver.context(device)
    driver.use(context)
    return _CopyDevice(
        context=context,
        stream=driver.stream(),
        source=driver.allocate(SIZE_BYTES),
        target=driver.allocate(SIZE_BYTES),
        start=driver.event(),
        end=driver.event(),
    )


def _map_peers(driver: Driver, gpus: list[_CopyDevice]) -> None:
    """Map peers into each other where that is allowed; elsewhere copies go, and are measured, through host memory."""
    for mine, gpu in enumerate(gpus):
        driver.use(gpu.context)
        for other, peer in enumerate(gpus):
            if mine != other and driver.can_access(mine, other):
                driver.enable_peer(peer.context)


def _rotate(driver: Driver, gpus: list[_CopyDevice], shift: int) -> PairRate:
    ways = [(source, (source + shift) % len(gpus)) for source in range(len(gpus))]
    rates = _rates(driver, gpus, ways, _COPIES_AT_ONCE)
    slowest = min(range(len(gpus)), key=lambda index: rates[index])
    return PairRate(source=ways[slowest][0], target=ways[slowest][1], gb_per_s=rates[slowest])


def _rates(driver: Driver, gpus: list[_CopyDevice], ways: list[tuple[int, int]], copies: int) -> list[float]:
    """Return the GB/s of every way while all of them run at once, each pushed by its source."""
    times: list[list[float]] = [[] for _ in ways]
    for round_ in range(_WARM_UPS + _ROUNDS):
        for source, target in ways:
            _push(driver, gpus[source], gpus[target], copies)
        for index, (source, _) in enumerate(ways):
            driver.use(gpus[source].context)
            elapsed = driver.elapsed_ms(gpus[source].start, gpus[source].end)
            if round_ >= _WARM_UPS:
                times[index].append(elapsed)
    return [copies * SIZE_BYTES / median(of_way) / 1e6 for of_way in times]


def _push(driver: Driver, source: _CopyDevice, target: _CopyDevice, copies: int) -> None:
    driver.use(source.context)
    driver.record(source.start, source.stream)
    for _ in range(copies):
        ends = (target.target, target.context), (source.source, source.context)
        driver.copy_peer(*ends, SIZE_BYTES, source.stream)
    driver.record(source.end, source.stream)
