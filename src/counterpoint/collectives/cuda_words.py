"""Where the words of a GPU's flags lie: one region for all of them, laid out alike on every rank."""

from __future__ import annotations

from typing import Any

from counterpoint.collectives.board import MAX_CHUNKS, MAX_EARLY_BLOCKS
from counterpoint.collectives.program import flag_words
from counterpoint.collectives.symmetric import Location, SymmetricMemory

__all__ = ["Words"]

_WORD_BYTES, _LINE_BYTES = 4, 128


class Words:
    """For every channel those of output and of staging, then those of each early-release block.

    At rest `ready` of staging and of blocks is 1, everything else 0.

    Args:
        memory: all ranks make theirs together; what is here must not be written by a peer before all have.
        channels: of the communicator.
    """

    def __init__(self, memory: SymmetricMemory, channels: int) -> None:
        words = flag_words(memory.world_size, max_chunks=MAX_CHUNKS)
        self._stride = -(-words * _WORD_BYTES // _LINE_BYTES) * _LINE_BYTES
        self._channels = channels
        self.num_bytes = (2 * channels + MAX_EARLY_BLOCKS) * self._stride
        self.region = memory.create(self.num_bytes)
        tensor = self._tensor(memory)
        tensor.zero_()
        tensor[1 : 2 * channels : 2, : memory.world_size] = 1
        tensor[2 * channels :, : memory.world_size] = 1

    def of_channel(self, index: int) -> Location:
        """Beside outputs of calls on this channel."""
        return Location(self.region, 2 * index * self._stride)

    def of_staging(self, index: int) -> Location:
        """Beside the staging of this channel."""
        return Location(self.region, (2 * index + 1) * self._stride)

    def of_block(self, number: int) -> Location:
        """Beside an early-release block."""
        return Location(self.region, (2 * self._channels + number) * self._stride)

    @property
    def channels_bytes(self) -> int:
        """Of all words that lie beside no block: the first of the region."""
        return 2 * self._channels * self._stride

    def _tensor(self, memory: SymmetricMemory) -> Any:
        import torch

        whole = memory.tensor(Location(self.region, 0), self.num_bytes, lambda: None)
        return whole.view(torch.int32).view(-1, self._stride // _WORD_BYTES)
