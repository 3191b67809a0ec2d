"""The status: every flag has a word of its own, and rests as the programs expect."""

import ctypes
from typing import Literal

import pytest

from counterpoint.collectives.host.shared_memory import MAX_CHUNKS, flag_index, new_status, status_type
from counterpoint.collectives.program.steps import Flag, Symmetric, flag_words

KINDS: tuple[Literal["ready", "turn"], ...] = ("ready", "turn")


def flags(world_size: int) -> list[Flag]:
    buffers: tuple[Symmetric, ...] = ("output", "staging")
    row = [(buffer, peer) for buffer in buffers for peer in range(world_size)]
    ready, turn = ([Flag(buffer, kind, peer) for buffer, peer in row] for kind in KINDS)
    arrived = [Flag(buffer, "arrived", peer, chunk) for buffer, peer in row for chunk in range(MAX_CHUNKS)]
    return [*ready, *turn, *arrived]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_flag_has_its_word(world_size: int) -> None:
    indices = sorted(flag_index(flag, world_size) for flag in flags(world_size))
    assert indices == list(range(2 * flag_words(world_size, max_chunks=MAX_CHUNKS)))


def test_only_staging_is_ready_at_rest() -> None:
    """Peers may push there before they are asked to; nothing else is set."""
    kind = status_type(3, 2)
    status = new_status(kind, bytearray(ctypes.sizeof(kind)), 3, 2)
    for channel in status.channels:
        set_ = [flag for flag in flags(3) if channel.words[flag_index(flag, 3)]]
        assert set_ == [Flag("staging", "ready", peer) for peer in range(3)]


def test_words_are_aligned() -> None:
    kind = status_type(3, 2)
    memory = bytearray(ctypes.sizeof(kind))
    status = new_status(kind, memory, 3, 2)
    start = ctypes.addressof(status)
    offsets = [ctypes.addressof(channel.words) - start for channel in status.channels]
    offsets += [ctypes.addressof(line) - start for channel in status.channels for line in channel.lines]
    assert [offset % 4 for offset in offsets[:2]] + [offset % 8 for offset in offsets[2:]] == [0] * len(offsets)
