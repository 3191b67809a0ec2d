"""Interleaved rounds: every round runs every case once, in a new order, so that drift of clocks hits all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from counterpoint.errors import Unsupported
from counterpoint.measure.session import Session
from counterpoint.measure.stage import Trial

__all__ = ["Samples", "play_rounds"]

Key = TypeVar("Key", bound=Hashable)
Samples = list[list[Trial]]  # [rank][round]

_FEWEST = 3


def play_rounds(
    session: Session,
    trials: dict[Key, Callable[[], Trial]],
    *,
    rounds: int,
    dropped: int,
    seed: int,
) -> dict[Key, Samples]:
    """Runs every trial `rounds` times, drops the first `dropped`, and gathers what all ranks saw.

    A trial in which any rank queued too slowly is dropped on all ranks.

    Raises:
        Unsupported: fewer than three good trials of some case.
    """
    kept: dict[Key, list[Trial]] = {key: [] for key in trials}
    order = list(trials)
    shuffle = random.Random(seed)  # the same on every rank
    for index in range(rounds):
        shuffle.shuffle(order)
        for key in order:
            trial = trials[key]()
            if index >= dropped:
                kept[key].append(trial)
    everyone = session.gather({key: kept[key] for key in trials})
    return {key: _good([ranks[key] for ranks in everyone], key) for key in trials}


def _good(samples: Sequence[Sequence[Trial]], key: object) -> Samples:
    good = [index for index in range(len(samples[0])) if not any(rank[index].late for rank in samples)]
    if len(good) < _FEWEST:
        raise Unsupported(
            f"{key}: the host queued too slowly in all but {len(good)} of {len(samples[0])} rounds; "
            "free its cores or measure larger operations"
        )
    return [[rank[index] for index in good] for rank in samples]
