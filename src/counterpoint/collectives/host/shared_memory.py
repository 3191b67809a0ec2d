"""Make the symmetric memory of CPUs: anonymous files in memory, mapped by every process of the group.

A region is a `memfd`: nothing appears in a file system, so nothing is left behind, however the processes end. Peers
open it through `/proc/<pid>/fd/<fd>`, which the kernel allows only to processes of the same user. They learn pid and
descriptor from the process group, and from statuses opened that way; a secret name that only the group knows proves
that it is the right file. Sizes are sealed, so no process can shrink a file that another has mapped.

A rank's status lies in such memory, too: flags, its current calls, its regions, and its failure if any. Only its owner
writes it, except for its flags: word (kind, p) is set to 1 by rank p, and reset to 0 by the owner.

*Order.* Everything here relies on x86-64's total store order: stores of one core are seen by the others in the order in
which they were made, and an aligned store or load of up to 8 bytes happens at once. ctypes fields of 4 and 8 bytes are
aligned and moved by one instruction; glibc's memmove ends its non-temporal stores with a fence; and neither CPython nor
the interpreter's lock moves a store across a call. So bytes first, flag second is enough for the writer; flag first,
bytes second for the reader.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from counterpoint.collectives.memory import MAX_EARLY_BLOCKS, MAX_EARLY_REGIONS, Location
from counterpoint.collectives.program.steps import Flag, flag_word, flag_words
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.rehearsed import host_id

RUNNING, CLOSED, FAILED = 0, 1, 2  # states of a communicator on one rank
DEPTH = 64  # records that a line keeps of its latest calls: one rank may be this many calls ahead of another
MAX_CHUNKS = 16  # most chunks of one block, each with an `arrived` flag
MAX_REGIONS = 256
_TEXT_BYTES, _REASON_BYTES = 160, 384

RankStatus = Any
"""Types an instance of `status_type`, or a part of one; ctypes makes the class, so type checkers see no fields."""


class SharedRegion(ctypes.Structure):
    """Describes a region's memory file: its descriptor and size; `serial` is written last, and 0 if there is none."""

    _fields_ = (("fd", ctypes.c_int32), ("num_bytes", ctypes.c_uint64), ("serial", ctypes.c_uint64))


@lru_cache(maxsize=64)
def status_type(world_size: int, channels: int) -> type[ctypes.Structure]:
    """Return the ctypes class of a rank's status: its calls, flags, regions and failure, which peers read.

    `channels[c].lines[p]` counts the calls that the owner made with rank p alone, `lines[world_size]` those of all; a
    line has the number of its latest call, and records of the last `DEPTH`. `staging` counts how often the channel's
    staging was replaced. `early[b]` are the flag words of early-release block b, `early_regions[k]` is the k-th region
    of such blocks, -1 before there is one.
    """
    half = flag_words(world_size, max_chunks=MAX_CHUNKS)

    class CallRecord(ctypes.Structure):
        _fields_ = (
            ("number", ctypes.c_uint64),
            ("step", ctypes.c_uint32),
            ("steps", ctypes.c_uint32),  # step == steps: it has ended
            ("output_offset", ctypes.c_uint64),
            ("output_region", ctypes.c_int32),
            ("text", ctypes.c_char * _TEXT_BYTES),  # the call in words; if ranks differ, their calls do not match
            ("row", ctypes.c_uint64 * world_size),  # bytes for each rank, where they differ
        )

    class Line(ctypes.Structure):
        _fields_ = (("latest", ctypes.c_uint64), ("records", CallRecord * DEPTH))

    class ChannelStatus(ctypes.Structure):
        _fields_ = (
            ("words", ctypes.c_uint32 * (2 * half)),
            ("staging_region", ctypes.c_int32),
            ("staging", ctypes.c_uint32),
            ("line", ctypes.c_uint32),  # index of the line of the call that runs, or ran last
            ("lines", Line * (world_size + 1)),
        )

    class Whole(ctypes.Structure):
        _fields_ = (
            ("state", ctypes.c_uint32),
            ("culprits", ctypes.c_uint8 * world_size),  # 1 for each rank because of which it failed
            ("reason", ctypes.c_char * _REASON_BYTES),
            ("regions", SharedRegion * MAX_REGIONS),
            ("channels", ChannelStatus * channels),
            ("early", (ctypes.c_uint32 * half) * MAX_EARLY_BLOCKS),
            ("early_regions", ctypes.c_int32 * MAX_EARLY_REGIONS),
        )

    return Whole


def flag_index(flag: Flag, world_size: int) -> int:
    """Return the index of a flag among a channel's words: flags of output come first, then flags of staging."""
    half: Literal[0, 1] = 0 if flag.buffer == "output" else 1
    return half * flag_words(world_size, max_chunks=MAX_CHUNKS) + flag_word(flag, world_size)


def new_status(kind: type[ctypes.Structure], buffer: Any, world_size: int, channels: int) -> RankStatus:
    """Return a rank's status in fresh memory, with every flag at its value between calls.

    Staging and early-release blocks are empty, so every peer may push into them: their `ready` flags are 1.
    """
    status: RankStatus = kind.from_buffer(buffer)
    for peer in range(world_size):
        for channel in range(channels):
            status.channels[channel].words[flag_index(Flag("staging", "ready", peer), world_size)] = 1
        for words in status.early:
            words[flag_word(Flag("output", "ready", peer), world_size)] = 1
    status.early_regions[:] = [-1] * MAX_EARLY_REGIONS
    return status


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessCard:
    """Describes a process; the ranks exchange cards through their process group before they share memory."""

    system: str
    machine: str
    host: str  # `host_id`
    pid_namespace: str
    user: int
    pid: int
    status_fd: int = -1
    name: str = ""  # secret name of its memory files

    @classmethod
    def of_this_process(cls, status_fd: int = -1, name: str = "") -> ProcessCard:
        """Return the card of this process, with the descriptor and secret name of its memory files, if it has any."""
        linux = sys.platform == "linux"
        return cls(
            system=platform.system(),
            machine=platform.machine(),
            host=host_id(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()) if linux else "",
            user=os.getuid(),
            pid=os.getpid(),
            status_fd=status_fd,
            name=name,
        )


def why_not(cards: Sequence[ProcessCard]) -> str | None:
    """Return why the processes with these cards cannot share memory, in equal words on every rank; None if they can."""
    first = cards[0]
    for rank, card in enumerate(cards):
        if (card.system, card.machine) != ("Linux", "x86_64"):
            return f"rank {rank} runs on {card.system} {card.machine}; shared memory is used on Linux x86_64 alone"
        if card.host != first.host:
            return f"ranks 0 and {rank} are on different hosts; use one group for the ranks of each host"
        if card.pid_namespace != first.pid_namespace:
            return f"ranks 0 and {rank} are in different containers; start all of them in one PID namespace"
        if card.user != first.user:
            return f"ranks 0 and {rank} belong to different users; start all of them as one"
    return None


class _Mapping:
    """Maps a file into this process for as long as this object or a view of its buffer lives."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.buffer = mmap.mmap(fd, num_bytes)
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))


class SharedMemory:
    """Holds the regions of this process, up to `max_bytes` together, and maps a peer's region when first used."""

    def __init__(self, *, world_size: int, rank: int, channels: int, max_bytes: int) -> None:
        self.world_size, self.rank, self.max_bytes = world_size, rank, max_bytes
        self._type = status_type(world_size, channels)
        self._own: dict[int, tuple[int, _Mapping]] = {}  # region -> descriptor, mapping
        self._peers: dict[tuple[int, int], tuple[int, _Mapping]] = {}  # rank, region -> serial, mapping
        self._pids = [os.getpid()] * world_size
        self.created = 0  # regions so far; the serial of the last one
        self._lock = threading.Lock()  # channels and pools make regions at the same time
        self._mapping_lock = threading.Lock()
        name = f"counterpoint-{secrets.token_hex(8)}"  # of this rank's files; only the group learns it
        self._names = [name] * world_size
        self._status_fd, mapping = _new_file(self._names[rank], ctypes.sizeof(self._type))
        self.statuses: list[RankStatus] = [new_status(self._type, mapping.buffer, world_size, channels)] * world_size

    def card(self) -> ProcessCard:
        """Return the card that peers need to `join` this process."""
        return ProcessCard.of_this_process(self._status_fd, self._names[self.rank])

    def join(self, cards: Sequence[ProcessCard]) -> None:
        """Map the statuses of all ranks, whose cards came through the process group, or raise `Unsupported`."""
        for rank, card in enumerate(cards):
            if rank == self.rank:
                continue
            self._pids[rank], self._names[rank] = card.pid, card.name
            mapping = self._open(rank, card.status_fd, ctypes.sizeof(self._type))
            self.statuses[rank] = self._type.from_buffer(mapping.buffer)

    def create(self, num_bytes: int) -> int:
        """Allocate a region of `num_bytes` zeros and return its number; raise `Unsupported` if memory is short."""
        with self._lock:
            region = next((number for number in range(MAX_REGIONS) if number not in self._own), None)
            held = sum(mapping.num_bytes for _, mapping in self._own.values())
            if region is None or held + num_bytes > self.max_bytes:
                raise Unsupported(
                    f"{num_bytes} bytes of shared memory, with {held} in use in {len(self._own)} regions; allowed are "
                    f"{self.max_bytes} in {MAX_REGIONS}: drop tensors that are no longer used, or give a larger "
                    "max_bytes"
                )
            fd, mapping = _new_file(self._names[self.rank], num_bytes)
            self._own[region] = fd, mapping
            self.created += 1
            shown = self.statuses[self.rank].regions[region]
            shown.fd, shown.num_bytes = fd, num_bytes
            shown.serial = self.created  # last: who sees it sees the others
            return region

    def release(self, region: int) -> None:
        """Remove a region from the status; its memory is freed when no process maps it any more."""
        with self._lock:
            self.statuses[self.rank].regions[region].serial = 0
            fd, _ = self._own.pop(region)
            os.close(fd)

    def address(self, rank: int, at: Location, num_bytes: int) -> int:
        """Return the address in this process of `num_bytes` at `at` of `rank`; raise if they lie in no region."""
        mapping = self._mapping(rank, at.region)
        if mapping is None or at.offset < 0 or at.offset + num_bytes > mapping.num_bytes:
            raise Misconfigured(
                f"bytes {at.offset} to {at.offset + num_bytes} of region {at.region} of rank {rank}, which has "
                f"{0 if mapping is None else mapping.num_bytes}; make the same call on every rank"
            )
        return mapping.address + at.offset

    def _mapping(self, rank: int, region: int) -> _Mapping | None:
        if rank == self.rank:
            return self._own[region][1] if region in self._own else None
        if not 0 <= region < MAX_REGIONS:
            return None
        shown = self.statuses[rank].regions[region]
        with self._mapping_lock:  # if two threads map a region, the first mapping goes while in use
            serial, known = shown.serial, self._peers.get((rank, region))
            if not serial:
                return None
            if known is None or known[0] != serial:
                known = serial, self._open(rank, shown.fd, shown.num_bytes)
                self._peers[rank, region] = known
            return known[1]

    def _open(self, rank: int, fd: int, num_bytes: int) -> _Mapping:
        """Return a mapping of a peer's file; raise if the file is another one, is too small, or may not be opened."""
        pid = self._pids[rank]
        path = Path(f"/proc/{pid}/fd/{fd}")
        try:
            if str(path.readlink()) != f"/memfd:{self._names[rank]} (deleted)":  # first: opening may do something
                raise Unsupported(f"descriptor {fd} of process {pid} is no memory of rank {rank}; start all ranks anew")
            mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unsupported(f"cannot open the memory of rank {rank}: {error}; run all ranks as one user") from error
        try:
            size = os.fstat(mine).st_size
            if size < num_bytes:
                raise Unsupported(f"descriptor {fd} of rank {rank} has {size} bytes, not {num_bytes}; start all anew")
            return _Mapping(mine, num_bytes)
        finally:
            os.close(mine)

    def locate(self, address: int, num_bytes: int) -> Location | None:
        """Return the location of the `num_bytes` at `address` in this rank's regions; None if they lie in none."""
        for region, (_, mapping) in list(self._own.items()):
            if mapping.address <= address and address + num_bytes <= mapping.address + mapping.num_bytes:
                return Location(region, address - mapping.address)
        return None

    def tensor(self, at: Location, num_bytes: int, freed: Callable[[], object]) -> Any:
        """Return this rank's bytes at `at` as a flat uint8 tensor; `freed` is called when the last view is gone."""
        import torch

        view = memoryview(self._own[at.region][1].buffer)[at.offset : at.offset + num_bytes]
        weakref.finalize(view, freed).atexit = False  # the storage holds `view`, and nothing else does
        return torch.frombuffer(view, dtype=torch.uint8)

    def close(self) -> None:
        """Close every descriptor; memory that tensors still use stays mapped until they die."""
        for region in list(self._own):
            self.release(region)
        self._peers.clear()
        if self._status_fd >= 0:
            os.close(self._status_fd)
            self._status_fd = -1


def _new_file(name: str, num_bytes: int) -> tuple[int, _Mapping]:
    free = available_bytes()
    if num_bytes > free:  # asked before: the kernel would rather end other processes than refuse
        raise Unsupported(f"{num_bytes} bytes of shared memory, where {free} are free; use smaller buffers")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd, _Mapping(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        raise Unsupported(f"no {num_bytes} bytes of shared memory: {error}; use smaller buffers") from error


def available_bytes() -> int:
    """Return the free memory in bytes: of the machine or of this container (cgroup), whichever is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free
