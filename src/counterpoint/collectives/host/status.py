"""The status of a rank, in memory that all peers map: flags, the call it is in, its regions, and whether it gave up.

*Who writes.* A status is written by its owner, except for its flags: word (kind, p) is written by rank p, and set back
by the owner.

*Order.* Everything here relies on x86-64's total store order: stores of one core are seen by the others in the order in
which they were made, and an aligned store or load of up to 8 bytes happens at once. ctypes fields of 4 and 8 bytes are
aligned and moved by one instruction; glibc's memmove ends its non-temporal stores with a fence; and neither CPython nor
the interpreter's lock moves a store across a call. So bytes first, flag second is enough for the writer; flag first,
bytes second for the reader.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Literal

from counterpoint.collectives.program.steps import Flag, flag_word, flag_words

RUNNING, CLOSED, FAILED = 0, 1, 2  # states
DEPTH = 64  # calls that one rank may be ahead of another: so long stays readable what each of them was
MAX_CHUNKS = 16  # arrivals of one block
MAX_REGIONS = 256
MAX_EARLY_BLOCKS, MAX_EARLY_REGIONS = 256, 32  # of outputs with an early release
_TEXT_BYTES, _REASON_BYTES = 160, 384

RankStatus = Any
"""An instance of `status_type`, or a part of one; ctypes makes the class, so no type checker knows its fields."""


class SharedRegion(ctypes.Structure):
    """Describes a file in memory, as its owner has it open. `serial` is written last, and 0 if there is none."""

    _fields_ = (("fd", ctypes.c_int32), ("num_bytes", ctypes.c_uint64), ("serial", ctypes.c_uint64))


@lru_cache(maxsize=64)
def status_type(world_size: int, channels: int) -> type[ctypes.Structure]:
    """Return the layout of a status.

    `channels[c].lines[p]` are the calls that the owner made with rank p alone, `lines[world_size]` those with everyone;
    each has the number of the latest one, and the last `DEPTH` of them. `staging` counts how often the channel's
    staging was replaced. `early[b]` are the words of output block b with an early release, `early_regions[k]` is the
    k-th region of such blocks, -1 before there is one.
    """
    half = flag_words(world_size, max_chunks=MAX_CHUNKS)

    class CallRecord(ctypes.Structure):
        _fields_ = (
            ("number", ctypes.c_uint64),
            ("step", ctypes.c_uint32),
            ("steps", ctypes.c_uint32),  # step == steps: it has ended
            ("output_offset", ctypes.c_uint64),
            ("output_region", ctypes.c_int32),
            ("text", ctypes.c_char * _TEXT_BYTES),  # equal on all ranks, or their calls do not belong together
            ("row", ctypes.c_uint64 * world_size),  # bytes for each rank, where they differ
        )

    class Line(ctypes.Structure):
        _fields_ = (("latest", ctypes.c_uint64), ("records", CallRecord * DEPTH))

    class ChannelStatus(ctypes.Structure):
        _fields_ = (
            ("words", ctypes.c_uint32 * (2 * half)),
            ("staging_region", ctypes.c_int32),
            ("staging", ctypes.c_uint32),
            ("line", ctypes.c_uint32),  # of the call that runs, or ran last
            ("lines", Line * (world_size + 1)),
        )

    class Whole(ctypes.Structure):
        _fields_ = (
            ("state", ctypes.c_uint32),
            ("culprits", ctypes.c_uint8 * world_size),  # why it gave up
            ("reason", ctypes.c_char * _REASON_BYTES),
            ("regions", SharedRegion * MAX_REGIONS),
            ("channels", ChannelStatus * channels),
            ("early", (ctypes.c_uint32 * half) * MAX_EARLY_BLOCKS),
            ("early_regions", ctypes.c_int32 * MAX_EARLY_REGIONS),
        )

    return Whole


def flag_index(flag: Flag, world_size: int) -> int:
    """Return the index of a flag in a channel's words: those of output, then those of staging."""
    half: Literal[0, 1] = 0 if flag.buffer == "output" else 1
    return half * flag_words(world_size, max_chunks=MAX_CHUNKS) + flag_word(flag, world_size)


def new_status(kind: type[ctypes.Structure], buffer: Any, world_size: int, channels: int) -> RankStatus:
    """Return a status in fresh memory, with every flag at rest.

    Nothing is in staging, nor in outputs with an early release, so every peer may push there.
    """
    status: RankStatus = kind.from_buffer(buffer)
    for peer in range(world_size):
        for channel in range(channels):
            status.channels[channel].words[flag_index(Flag("staging", "ready", peer), world_size)] = 1
        for words in status.early:
            words[flag_word(Flag("output", "ready", peer), world_size)] = 1
    status.early_regions[:] = [-1] * MAX_EARLY_REGIONS
    return status
