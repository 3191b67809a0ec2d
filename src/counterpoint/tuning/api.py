"""Define `counterpoint.tune`, which starts ranks to measure mechanisms, and imports no torch itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from counterpoint.errors import Misconfigured
from counterpoint.machine.driver import visible_gpus
from counterpoint.machine.profile import Profile, profile_of
from counterpoint.measurement.api import count_ranks, measure_parts
from counterpoint.measurement.workloads import MEASURABLE, OF_DEVICE
from counterpoint.processes import Progress
from counterpoint.records.measurement import Measurement
from counterpoint.records.tuning import StepPair, Tuned, TunedPair, as_sentence
from counterpoint.tuning.decide import as_another, decide, is_open, left
from counterpoint.tuning.experiment import Part, Predicted, class_of, part_of, planned, times_of
from counterpoint.tuning.from_trace import pairs_of_traces
from counterpoint.tuning.pairs import check_pair, read_pairs, stock_of

LEAST_BUDGET_S = 1.0
LONGEST_BUDGET_S = 86400.0
LEAST_MORE, MOST_MORE = 2, 12  # times as many rounds, for a pair of which the first ones left open what is faster


def tune(
    source: str | Path | Sequence[StepPair],
    *,
    device: str = "cuda",
    world_size: int | None = None,
    profile: str | Path | None = None,
    budget_s: float = 120.0,
    rounds: int = 40,
    timeout_s: float = 120.0,
    progress: Progress | None = None,
) -> Tuned:
    """Choose a mechanism for each collective and its computation: a model preselects, then measurement decides.

    The default (`stock`) and the three mechanisms with the least predicted time are measured in interleaved rounds, in
    one new process per rank. Pairs that take most of a step come first; when the budget is used up, unmeasured pairs
    get the choice of a measured pair of their class, or keep the default. If budget is left, pairs for which the first
    rounds left open what is faster are measured again, with up to twelve times as many rounds.

    Args:
        source: a file of pairs (docs/reference/tune.md), traces of a job as for `diagnose`, or pairs.
        device: cuda, or cpu for the same with gloo and threads.
        world_size: ranks to start; None: the pairs' largest number of ranks that fits this machine. Pairs of another
            number are not measured.
        profile: a file with this machine's figures; None: the file that COUNTERPOINT_PROFILE names, or the shipped one.
        budget_s: seconds after which no further pair is measured; the first one always is.
        rounds: rounds in which a pair is measured, of which the first two are dropped; twelve where time is short.
        timeout_s: longest time in which no pair is finished.
        progress: called as (pairs done, all pairs, what runs now).

    Returns:
        The choices with all that was tried, and why; `tuned.file.tuned_toml` writes them.

    Raises:
        Misconfigured: an option or pair has a value that is not allowed.
        Unsupported: no torch, fewer than two GPUs, or nothing can run here.
        PeerTimeout: ranks died or hung; names them, and their logs.
    """
    began = time.monotonic()
    if not LEAST_BUDGET_S <= budget_s <= LONGEST_BUDGET_S:
        raise Misconfigured(f"budget {budget_s:g} s; allowed are {LEAST_BUDGET_S:g} to {LONGEST_BUDGET_S:g}")
    pairs, said = pairs_of(source)
    ranks = _ranks(pairs, device, world_size)
    known = profile_of(visible_gpus()[0] if device == "cuda" else None, profile)
    here = [pair for pair in pairs if pair.ranks == ranks]
    parts, expected = planned(here, known, device, most=math.ceil(budget_s))
    left_s = max(0.0, budget_s - (time.monotonic() - began))
    measured = measure_parts(
        "tune", parts, device=device, world_size=ranks, rounds=rounds, timeout_s=timeout_s, budget_s=left_s,
        progress=progress,
    )  # fmt: skip
    choices = [_choice(pair, expected, measured, device, budget_s) for pair in pairs]
    if again := _again(parts, choices, budget_s, time.monotonic() - began):
        more = measure_parts(
            "tune", again, device=device, world_size=ranks, rounds=MOST_MORE * rounds, timeout_s=timeout_s,
            budget_s=budget_s - (time.monotonic() - began), progress=progress,
        )  # fmt: skip
        second = {each.name for each in again} - more.unmeasured.keys()
        choices = [
            _choice(pair, expected, more if part_of(pair, ()).name in second else measured, device, budget_s)
            for pair in pairs
        ]
    return Tuned(
        seconds=round(time.monotonic() - began, 1),
        profile=known.digest,
        made=measured.environment,
        notes=(*said, *_notes(pairs, measured, known, device)),
        pair=tuple(_followed(choices)),
    )


def _again(parts: Sequence[Part], choices: Sequence[TunedPair], budget_s: float, spent_s: float) -> list[Part]:
    """Return the parts of the measurement that more rounds may decide, as many as the time left allows."""
    looked_at = {part_of(each, ()).name: is_open(each) for each in choices if each.tried}
    again = [part for part in parts if looked_at.get(part.name)]
    return again[: max(0, int((budget_s - spent_s) * len(looked_at) / (LEAST_MORE * spent_s)))]


def pairs_of(source: str | Path | Sequence[StepPair]) -> tuple[tuple[StepPair, ...], tuple[str, ...]]:
    """Return the pairs in `source`, and notes; raise Misconfigured if there are none, or one cannot be measured."""
    if isinstance(source, str | Path):
        if Path(source).suffix == ".toml":
            return read_pairs(source), ()
        pairs, notes = pairs_of_traces(source)
        if not pairs:
            raise Misconfigured(f"no collective and matmul of a step can run together: {'; '.join(notes)}")
        return pairs, notes
    if not source:
        raise Misconfigured("no pair is given; give at least one")
    for pair in source:
        check_pair(pair)
    return tuple(source), ()


def _ranks(pairs: Sequence[StepPair], device: str, world_size: int | None) -> int:
    """Return the number of ranks to start; raise Misconfigured if no pair runs on that number of ranks."""
    asked = sorted({pair.ranks for pair in pairs})
    if world_size is None:
        most = count_ranks(device, None if device == "cuda" else asked[0], verb="tune")
        world_size = max((ranks for ranks in asked if ranks <= most), default=most)
    ranks = count_ranks(device, world_size, verb="tune")
    if ranks not in asked:
        there = ", ".join(map(str, asked))
        raise Misconfigured(f"no pair is one of {ranks} ranks; the pairs have {there}: run it where that many are")
    return ranks


def _choice(
    pair: StepPair, expected: Mapping[str, Predicted], measured: Measurement, device: str, budget_s: float
) -> TunedPair:
    """Return a compute-collective pair with its chosen mechanism; a pair without measured times keeps `stock`."""
    stock, ranks = stock_of(pair, device), measured.environment.world_size
    if pair.ranks != ranks:
        return left(pair, stock=stock, why=f"not measured: it has {pair.ranks} ranks, and {ranks} were started")
    name = part_of(pair, ()).name
    of_pair = expected.get(name, {})
    times = times_of(pair, measured)
    if not times.tried:
        reason = measured.unmeasured.get(name)
        why = as_sentence(f"not measured: {reason}") if reason else _out_of_time(of_pair, stock, budget_s)
        return left(pair, stock=stock, why=why, predicted_us=of_pair.get(stock))
    tried = [structs.replace(each, predicted_us=of_pair.get(each.mechanism)) for each in times.tried]
    return decide(pair, tried, stock=stock, compute_us=times.compute_us, comm_us=times.comm_us)


def _out_of_time(expected: Predicted, stock: str, budget_s: float) -> str:
    """Return a sentence that the time budget ended before a pair was measured, with the best predicted mechanism."""
    why = f"not measured: the budget of {budget_s:g} s was used up"
    known = {mechanism: us for mechanism, us in expected.items() if us}
    best = min(known, key=lambda mechanism: known[mechanism], default=stock)
    if stock not in known or best == stock:
        return why
    return f"{why}; by the model {best} takes {1 - known[best] / known[stock]:.0%} less"


def _followed(choices: Sequence[TunedPair]) -> Iterator[TunedPair]:
    """Yield `choices`, but give unmeasured pairs the choice of their class's largest measured pair (`class_of`)."""
    measured: dict[object, TunedPair] = {}
    for choice in sorted(choices, key=lambda each: each.bytes_per_rank):
        if choice.tried:
            measured[class_of(choice)] = choice
    for choice in choices:
        follows = None if choice.tried else measured.get(class_of(choice))
        yield choice if follows is None else as_another(choice, follows)


def _notes(pairs: Sequence[StepPair], measured: Measurement, profile: Profile, device: str) -> Iterator[str]:
    """Yield notes for the user: what was measured in another dtype or not at all, and what was assumed."""
    if device == "cuda" and (assumed := profile.note()):
        yield as_sentence(assumed)
    dtypes = {dtype for pair in pairs for dtype in (pair.dtype, pair.computed_in)}
    if others := sorted(dtypes - set(MEASURABLE)):
        yield (
            f"{', '.join(others)} was measured as {OF_DEVICE[device]}: collectives of as many bytes, "
            "matmuls and exchanges of the same shape"
        )
    for mechanism, reason in measured.unavailable.items():
        yield as_sentence(f"{mechanism} was not measured: {reason}")
