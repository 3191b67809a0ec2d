"""Programs carried out on several tensors: the same bytes as on one, wherever the tensors lie."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.collectives.program.calls import Span
from counterpoint.collectives.program.coalesced import Parts, place_on_tensors
from counterpoint.collectives.program.operations import all_gather, plan_all, reduce_scatter
from counterpoint.collectives.program.steps import Batch, Copy, Program, Reduce, Tuning, Wait

TUNINGS = [Tuning(), Tuning(chunk_bytes=16, turn_bytes=1), Tuning(chunk_bytes=32, last_bytes=16)]


def placed(shares: list[int], gaps: list[int], ranks: int, missing: list[int]) -> Parts:
    """Tensors one after the other with gaps between, `missing` bytes short of a whole share for everyone."""
    sizes = [max(0, share * ranks - less) for share, less in zip(shares, missing, strict=True)]
    starts = list(accumulate([0, *(size + gap for size, gap in zip(sizes, gaps, strict=True))]))[:-1]
    return Parts(starts=tuple(starts), shares=tuple(shares), sizes=tuple(sizes))


def bytes_of(span: Span, parts: Parts | None) -> list[int]:
    """Where each byte of a span of the one buffer really lies; -1 where it does not."""
    if parts is None:
        return list(range(span.offset, span.offset + span.num_bytes))
    found = [-1] * span.num_bytes
    for at, place, size in parts.places(span.offset, span.num_bytes):
        found[at : at + size] = range(place, place + size)
    return found


def moved(program: Program, layout: dict[str, Parts]) -> list[tuple[int, ...]]:
    """Every byte that a program copies or adds up, with where it comes from and goes to, in order."""
    seen = []
    for step in program.cycle():
        if isinstance(step, Copy | Reduce):
            spans = (step.source, step.target) if isinstance(step, Copy) else (*step.sources, step.target)
            columns = [bytes_of(span, layout.get(span.buffer)) for span in spans]
            who = step.peer if isinstance(step, Copy) else -1
            seen += [(who, *row) for row in zip(*columns, strict=True) if -1 not in row]
    return seen


parts = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=5)


@given(parts, st.sampled_from(TUNINGS), st.integers(2, 4))
def test_gathers_move_the_same_bytes(drawn: list[tuple[int, int, int]], tuning: Tuning, ranks: int) -> None:
    shares = [share for share, _, _ in drawn]
    layout = placed(shares, [gap for _, gap, _ in drawn], ranks, [0] * len(drawn))
    for program in plan_all(all_gather(ranks, sum(shares)), tuning) if sum(shares) else ():
        done = place_on_tensors(program, (("output", layout),))
        assert moved(done, {}) == moved(program, {"output": layout})
        assert signals(done) == signals(program)


@given(parts, st.sampled_from([*TUNINGS, Tuning(staging_bytes=64)]), st.integers(2, 4))
def test_sums_are_of_the_same_bytes(drawn: list[tuple[int, int, int]], tuning: Tuning, ranks: int) -> None:
    """Whatever a tensor lacks of a share for everyone is neither sent nor added up."""
    shares = [share for share, _, _ in drawn]
    sent = placed(shares, [gap for _, gap, _ in drawn], ranks, [less for _, _, less in drawn])
    kept = placed(shares, [gap for _, gap, _ in drawn], 1, [0] * len(drawn))
    layout = {"input": sent, "output": kept}
    for program in plan_all(reduce_scatter(ranks, sum(shares)), tuning) if sum(shares) else ():
        done = place_on_tensors(program, (("input", sent), ("output", kept)))
        assert moved(done, {}) == moved(program, layout)
        assert signals(done) == signals(program)
        assert done.staging_bytes <= program.staging_bytes


def signals(program: Program) -> list[object]:
    batches = [step for step in program.cycle() if isinstance(step, Batch)]
    return [
        (batch.lane, replace(one, brings=None) if isinstance(one, Wait) else one)
        for batch in batches
        for one in batch.operations
    ]


def test_wider_sums_lie_twice_as_far_apart() -> None:
    """Sent as 2 bytes and kept as 4: the second share of 6 elements begins at byte 16 + 2 * 6."""
    kept = Parts(starts=(0, 16), shares=(8, 12), sizes=(8, 12), width=2)
    program = plan_all(reduce_scatter(2, 20), Tuning(chunk_bytes=16))[0]
    sent = Parts(starts=(0, 100), shares=(8, 12), sizes=(16, 24))
    done = place_on_tensors(program, (("input", sent), ("output", kept)))
    targets = [(step.target.offset, step.target.num_bytes) for step in done.steps if isinstance(step, Reduce)]
    assert targets == [(0, 8), (16, 8), (16 + 2 * 8, 4)]


@pytest.mark.parametrize("offset", [0, 3, 20, 59])
def test_places_are_those_of_every_rank(offset: int) -> None:
    """A span may begin and end anywhere in the blocks of several ranks."""
    layout = Parts(starts=(0, 1000), shares=(8, 12), sizes=(24, 36))
    whole = bytes_of(Span("output", 0, 60), layout)
    assert bytes_of(Span("output", offset, 60 - offset), layout) == whole[offset:]
    assert sorted(whole) == [*range(24), *range(1000, 1036)]
