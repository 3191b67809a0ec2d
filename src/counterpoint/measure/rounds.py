"""Interleaved rounds: every round runs every case once, in a new order, so that drift of clocks hits all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import TypeVar

from counterpoint.measure.session import Session
from counterpoint.measure.stage import Trial

__all__ = ["Samples", "play_rounds", "why_late"]

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

    A trial in which any rank queued too slowly is dropped on all ranks, as long as three others remain.
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
    return {key: _good([ranks[key] for ranks in everyone]) for key in trials}


def _good(samples: Samples) -> Samples:
    """Without the rounds in which a rank was late; all of them, if fewer than three were good: `why_late` says so."""
    good = [index for index in range(len(samples[0])) if not any(rank[index].late for rank in samples)]
    return samples if len(good) < _FEWEST else [[rank[index] for index in good] for rank in samples]


def why_late(*found: Samples) -> str | None:
    """Why what follows from these samples must not be believed; None if every trial in them was in time."""
    for samples in found:
        late = sum(any(trial.late for trial in trials) for trials in zip(*samples, strict=True))
        if late:
            return (
                f"the host queued too slowly in {late} of {len(samples[0])} rounds; "
                "free its cores or measure larger operations"
            )
    return None
