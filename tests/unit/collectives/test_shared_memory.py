"""Shared memory: peers write where they should, nobody is let in who has no card, and nothing is left behind."""

import ctypes
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.collectives.host import shared_memory
from counterpoint.collectives.host.shared_memory import ProcessCard, SharedMemory, why_not
from counterpoint.collectives.memory import Location
from counterpoint.errors import Misconfigured, Unsupported

Pair = tuple[SharedMemory, SharedMemory]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ranks in this process, joined."""
    first, second = (SharedMemory(world_size=2, rank=rank, channels=1, max_bytes=1 << 20) for rank in range(2))
    for memory in (first, second):
        memory.join([first.card(), second.card()])
    yield first, second
    first.close()
    second.close()


def test_what_a_peer_writes_is_there(pair: Pair) -> None:
    first, second = pair
    at = Location(first.create(4096), 100)
    ctypes.memmove(second.address(0, at, 5), b"hello", 5)
    assert ctypes.string_at(first.address(0, at, 5), 5) == b"hello"


def test_own_bytes_are_located_and_no_others(pair: Pair) -> None:
    region = pair[0].create(4096)
    start = pair[0].address(0, Location(region, 0), 1)
    assert pair[0].locate(pair[0].address(0, Location(region, 77), 10), 10) == Location(region, 77)
    assert [pair[0].locate(start + 4000, 200), pair[0].locate(12345, 1)] == [None, None]


@pytest.mark.parametrize("at", [Location(0, -1), Location(0, 4090), Location(1, 0), Location(-1, 0), Location(999, 0)])
def test_no_address_outside_a_region(pair: Pair, at: Location) -> None:
    pair[0].create(4096)
    with pytest.raises(Misconfigured, match="make the same call on every rank"):
        pair[1].address(0, at, 8)


def test_a_region_that_was_replaced_is_mapped_anew(pair: Pair) -> None:
    """The same number may mean other memory later."""
    first, second = pair
    at = Location(first.create(4096), 0)
    second.address(0, at, 1)
    first.release(at.region)
    assert first.create(8192) == at.region
    ctypes.memmove(second.address(0, at + 8000, 1), b"x", 1)
    assert ctypes.string_at(first.address(0, at + 8000, 1), 1) == b"x"


def test_threads_map_a_region_once(pair: Pair) -> None:
    """All get the one address: a second mapping would end the first under a copy."""
    first, second = pair
    for _ in range(20):
        at, found, gate = Location(first.create(4096), 0), set[int](), threading.Barrier(8)

        def look(at: Location = at, found: set[int] = found, gate: threading.Barrier = gate) -> None:
            gate.wait()
            found.add(second.address(0, at, 1))

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1


def test_sizes_are_capped_and_memory_that_is_not_there_is_not_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair[0].create(1 << 19)
    with pytest.raises(Unsupported, match=r"with 524288 in use in 1 regions; allowed are 1048576"):
        pair[0].create((1 << 19) + 1)
    # the kernel would end other processes to find it
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 4095)
    with pytest.raises(Unsupported, match="4096 bytes of shared memory, where 4095 are free; use smaller buffers"):
        pair[0].create(4096)


def test_what_is_available_is_what_the_kernel_says() -> None:
    assert 0 < shared_memory.available_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_region_cannot_be_cut(pair: Pair) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(pair[0].card().status_fd, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "counterpoint-0000"}, "is no memory of rank 1"),  # a file of the right process with another name
        ({"status_fd": 0}, "is no memory of rank 1"),  # any other file
        ({"pid": 2**22 + 1}, "cannot open the memory of rank 1"),  # a dead process
    ],
)
def test_a_wrong_card_is_refused(pair: Pair, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    first, second = pair
    with (tmp_path / "file").open("w") as file:
        other = {"status_fd": file.fileno()} if "status_fd" in change else change
        with pytest.raises(Unsupported, match=said):
            first.join([first.card(), dataclasses.replace(second.card(), **other)])


def test_closing_closes_every_descriptor() -> None:
    before = descriptors()
    memory = SharedMemory(world_size=1, rank=0, channels=1, max_bytes=1 << 20)
    memory.create(4096)
    memory.close()
    del memory
    assert descriptors() == before


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


HERE = ProcessCard.of_this_process()


def test_ranks_alike_can_share() -> None:
    assert why_not([HERE, HERE]) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"system": "Darwin"}, "rank 1 runs on Darwin x86_64"),
        ({"machine": "aarch64"}, "rank 1 runs on Linux aarch64"),
        ({"host": "other"}, "ranks 0 and 1 are on different hosts"),
        ({"pid_namespace": "other"}, "ranks 0 and 1 are in different containers"),
        ({"user": 12345}, "ranks 0 and 1 belong to different users"),
    ],
)
def test_ranks_that_cannot_share_are_told_why(change: dict[str, str], said: str) -> None:
    other = dataclasses.replace(HERE, **change)  # type: ignore[arg-type]
    assert (why_not([HERE, other]) or "").startswith(said)
