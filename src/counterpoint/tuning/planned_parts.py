"""Plan what is measured, and in which order: one pair of each class, the heaviest in a step first, then the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from counterpoint.machine.profile import Profile
from counterpoint.records.measurement import Block, Scenario
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.parts import part_of
from counterpoint.tuning.shortlist import MechanismCandidate, shortlist

_BYTES_PER_US = 1e5  # of a pair that nothing is predicted of, to be weighed against others


@dataclass(frozen=True, kw_only=True)
class TuningPlan:
    """Holds what is to be measured, in this order, and what the model expects of it."""

    parts: tuple[Scenario | Block, ...]
    candidates: Mapping[str, tuple[MechanismCandidate, ...]]  # by name of a part

    @classmethod
    def of(cls, pairs: Sequence[StepPair], profile: Profile, device: str, *, most: int) -> TuningPlan:
        """Return a part for each pair that differs; of more than `most`, those with the most bytes in a step.

        Predictions take milliseconds, a measurement seconds: a budget that has no second for a pair does not get to it.
        """
        same: dict[str, list[StepPair]] = {}
        for pair in pairs:
            same.setdefault(part_of(pair, ()).name, []).append(pair)
        looked_at = sorted(same, key=lambda name: -_calls(same[name]) * same[name][0].bytes_per_rank)[:most]
        candidates = {name: shortlist(same[name][0], profile, device=device) for name in looked_at}
        heaviest = sorted(looked_at, key=lambda name: -_calls(same[name]) * _us(same[name][0], candidates[name]))
        classes: dict[object, list[str]] = {}
        for name in heaviest:
            classes.setdefault(class_of(same[name][0]), []).append(name)
        largest = [max(names, key=lambda name: same[name][0].bytes_per_rank) for names in classes.values()]
        order = dict.fromkeys((*largest, *heaviest))
        parts = tuple(part_of(same[name][0], [each.mechanism for each in candidates[name]]) for name in order)
        return cls(parts=parts, candidates=candidates)


def class_of(pair: StepPair) -> tuple[object, ...]:
    """Return what pairs share whose best mechanism is taken to be the same, where there is no time to measure all.

    These are operation, ranks, dtypes, computation, launch order, and the power of two below `bytes_per_rank`. GEMMs of
    another shape are of another class: one tile more may take one wave more.
    """
    dtypes = pair.dtype, pair.computed_in
    return (pair.operation, pair.ranks, *dtypes, pair.compute, pair.first, pair.bytes_per_rank.bit_length())


def _calls(pairs: Sequence[StepPair]) -> int:
    return sum(pair.calls for pair in pairs)


def _us(pair: StepPair, candidates: Sequence[MechanismCandidate]) -> float:
    """Return about what a pair takes by stock."""
    return candidates[0].predicted_us or pair.bytes_per_rank / _BYTES_PER_US
