"""Lay out a rank's status in memory that all peers map: flags, its current call, its regions, and its failure if any.

*Who writes.* Only its owner writes a status, except for its flags: word (kind, p) is set to 1 by rank p, and reset to 0
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

RUNNING, CLOSED, FAILED = 0, 1, 2  # states of a communicator on one rank
DEPTH = 64  # records that a line keeps of its latest calls: one rank may be this many calls ahead of another
MAX_CHUNKS = 16  # most chunks of one block, each with an `arrived` flag
MAX_REGIONS = 256
MAX_EARLY_BLOCKS, MAX_EARLY_REGIONS = 256, 32  # most blocks and regions of outputs with an early release
_TEXT_BYTES, _REASON_BYTES = 160, 384

RankStatus = Any
"""Types an instance of `status_type`, or a part of one; ctypes makes the class, so type checkers see no fields."""


class SharedRegion(ctypes.Structure):
    """Describes a region's memory file: its owner's descriptor and size. `serial` is written last; 0: no region."""

    _fields_ = (("fd", ctypes.c_int32), ("num_bytes", ctypes.c_uint64), ("serial", ctypes.c_uint64))


@lru_cache(maxsize=64)
def status_type(world_size: int, channels: int) -> type[ctypes.Structure]:
    """Return the ctypes class of a rank's status.

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
    """Return the index of a flag among a channel's words: flags of output come first, then those of staging."""
    half: Literal[0, 1] = 0 if flag.buffer == "output" else 1
    return half * flag_words(world_size, max_chunks=MAX_CHUNKS) + flag_word(flag, world_size)


def new_status(kind: type[ctypes.Structure], buffer: Any, world_size: int, channels: int) -> RankStatus:
    """Return a rank's status in fresh memory, with every flag as it is between calls.

    Staging and early-release blocks are empty, so every peer may push there: their `ready` flags are 1.
    """
    status: RankStatus = kind.from_buffer(buffer)
    for peer in range(world_size):
        for channel in range(channels):
            status.channels[channel].words[flag_index(Flag("staging", "ready", peer), world_size)] = 1
        for words in status.early:
            words[flag_word(Flag("output", "ready", peer), world_size)] = 1
    status.early_regions[:] = [-1] * MAX_EARLY_REGIONS
    return status
