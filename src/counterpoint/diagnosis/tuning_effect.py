"""Prove from traces that every choice of a tuning took effect, as `counterpoint doctor --check` asks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from counterpoint.diagnosis.api import read_ranks
from counterpoint.diagnosis.effect import check_shows_copies
from counterpoint.diagnosis.knobs import Sight, sight_of
from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.traced_job import missing_ranks, numbered, world_size_of
from counterpoint.diagnosis.tuned_calls import PairCalls, alike_pairs, calls_of_pairs
from counterpoint.records.diagnosis import ranks_in_words
from counterpoint.records.effect import KnobEffect, KnobState, TuningEffect
from counterpoint.records.measurement import Environment
from counterpoint.records.tuning import Tuned, TunedPair
from counterpoint.tuned.choices import Choices, mechanism_base, mechanism_knobs

_STATES: tuple[KnobState, ...] = ("no_effect", "took_effect", "not_seen")  # the first that any rank shows counts
_NAME = "name the modules of each pair in `where`, if their calls should differ"


def check_tuning(
    tuned: Tuned,
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> TuningEffect:
    """Return whether each choice of a tuning took effect in a job, from its traces.

    Args:
        tuned: the content of `counterpoint.toml`.
        source: traces, as of `diagnose`.
        progress: called as (files done, files, what is going on).

    Raises:
        BadTrace: nothing to read, a damaged file, ranks of different jobs, or a trace that cannot show copies.
        Misconfigured: a pair has a mechanism that there is not.
    """
    notes: list[str] = []
    digests, files = read_ranks(source, notes, progress=progress)
    return find_tuning_effect(tuned, digests, files, notes)


def find_tuning_effect(
    tuned: Tuned, digests: list[RankDigest], files: Sequence[str] = (), notes: Sequence[str] = ()
) -> TuningEffect:
    """Return whether each choice of a tuning took effect on these ranks.

    Args:
        tuned: the content of `counterpoint.toml`.
        digests: one per rank, in any order.
        files: the names of their traces.
        notes: notes on the input files, to be put before those on the ranks.

    Raises:
        BadTrace: ranks of different jobs, or a trace that cannot show copies.
        Misconfigured: a pair has a mechanism that there is not.
    """
    said = list(notes)
    digests = numbered(digests, said)
    for digest in digests:
        check_shows_copies(digest)
    world = world_size_of(digests)
    missing = missing_ranks(digests, world)
    if missing:
        said.append(f"no trace of {ranks_in_words(missing)} (of {world} ranks): nothing is said of them")
    machine = _traced_machine(tuned, digests[0])
    choices, overruled = Choices(tuned, machine), _overruled(tuned, machine)
    said += [f"the file was {difference}" for difference in choices.differences]
    calls = [calls_of_pairs(digest, choices) for digest in digests]
    knobs = tuple(
        _effect(number, pair, knob, digests, calls, overruled.get(pair))
        for number, pair in enumerate(tuned.pair, 1)
        for knob in (mechanism_base(pair), *mechanism_knobs(pair))
    )
    return TuningEffect(
        files=tuple(files),
        world_size=world,
        ranks=tuple(digest.rank for digest in digests),
        missing_ranks=missing,
        took_effect=bool(_of(knobs, "took_effect")) and not _of(knobs, "no_effect"),
        verdict=_verdict(knobs),
        knobs=knobs,
        notes=tuple(said),
    )


def _traced_machine(tuned: Tuned, digest: RankDigest) -> Environment:
    """Return the machine of a trace, as far as it is stated; the rest is taken to be that of the tuning."""
    stated = {"gpu": digest.device.name, "nccl": digest.job.get("nccl_version")}
    return replace(tuned.made, **{name: value for name, value in stated.items() if value})


def _overruled(tuned: Tuned, machine: Environment) -> dict[TunedPair, str]:
    """Return the pairs of which others are alike but for their modules and compute, and whose choice is not followed.

    With each comes the mechanism that calls without a named module follow.
    """
    found: dict[TunedPair, str] = {}
    for (operation, ranks, size, dtype, compute), pairs in alike_pairs(tuned.pair).items():
        few = Choices(replace(tuned, pair=tuple(pairs)), machine)
        decides = few.find(operation, ranks=ranks, bytes_per_rank=size, dtype=dtype, compute=compute)
        if decides is not None:
            found |= {pair: decides.mechanism for pair in pairs if pair.mechanism != decides.mechanism}
    return found


def _effect(
    number: int,
    pair: TunedPair,
    knob: str,
    digests: Sequence[RankDigest],
    calls: Sequence[dict[TunedPair, PairCalls]],
    instead: str | None,
) -> KnobEffect:
    """Return what all ranks show of a knob: the worst that any shows, on these ranks."""
    by_state = defaultdict[KnobState, list[tuple[int, Sight]]](list)
    for digest, of_pairs in zip(digests, calls, strict=True):
        sight = sight_of(digest, pair, of_pairs.get(pair), knob)
        if instead is not None and sight.state == "not_seen":
            sight = Sight(state="not_seen", seen=f"calls like these follow {instead}, by another pair", fix=_NAME)
        by_state[sight.state].append((digest.rank, sight))
    state = next(state for state in _STATES if state in by_state)
    _, shown = by_state[state][0]
    return KnobEffect(
        pair=number,
        operation=pair.operation,
        compute=pair.compute,
        bytes_per_rank=pair.bytes_per_rank,
        ranks=pair.ranks,
        mechanism=pair.mechanism,
        knob=knob,
        state=state,
        seen=shown.seen,
        fix=shown.fix,
        on_ranks=tuple(rank for rank, _ in by_state[state]),
    )


def _of(knobs: Sequence[KnobEffect], state: KnobState) -> list[KnobEffect]:
    return [knob for knob in knobs if knob.state == state]


def _verdict(knobs: Sequence[KnobEffect]) -> str:
    took, none, unseen = (len(_of(knobs, state)) for state in ("took_effect", "no_effect", "not_seen"))
    if not knobs:
        return "nothing to prove: the file has no pair"
    rest = f", {unseen} not seen" if unseen else ""
    if none:
        return f"{none} of {len(knobs)} choices had no effect{rest}"
    if not took:
        return "nothing is proved: these traces show none of the choices"
    return f"{took} of {len(knobs)} choices took effect{rest}"
