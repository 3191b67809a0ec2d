"""Pipelines: orders, the critical path against the formula where one exists, and the extension of a periodic path."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.step.schedule import (
    Kind,
    ScheduledSlot,
    ScheduleName,
    Slot,
    StageTimes,
    in_flight,
    orders,
    pipeline_us,
    scheduled,
)

FIXED: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved")
NAMES: tuple[ScheduleName, ...] = (*FIXED, "zero_bubble")
length = st.floats(0.5, 4.0)


def closed_form_us(name: ScheduleName, times: StageTimes, micro_batches: int) -> float:
    """The formula of the schedule, for equal parts and free sends: schedule.py has the sources."""
    stages, parts, both = times.stages, times.parts, sum(times.forward[0]) + sum(times.backward[0])
    if name == "zero_bubble":
        return micro_batches * both + (stages - 1) * (both - 2 * sum(times.weight[0]))
    return (micro_batches + (stages - 1) / (parts if name == "interleaved" else 1)) * both


def alike(
    stages: int, parts: int, forward: float, backward: float, weight: float = 0.0, send: float = 0.0
) -> StageTimes:
    """All parts equal; `weight` as zero_bubble wants it."""
    return StageTimes(
        forward=((forward / parts,) * parts,) * stages,
        backward=((backward / parts,) * parts,) * stages,
        weight=((weight / parts,) * parts,) * stages,
        send_us=send,
    )


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[ScheduleName, StageTimes, int]:
    """Any lengths."""
    name, stages = draw(st.sampled_from(NAMES)), draw(st.integers(1, 5))
    parts = draw(st.integers(1, 3)) if name == "interleaved" else 1
    rows = st.lists(st.lists(length, min_size=parts, max_size=parts), min_size=stages, max_size=stages)
    forward, backward = draw(rows), draw(rows)
    weight = [[part / 2 for part in row] for row in backward]
    micro = draw(st.integers(1, 4)) * (stages if name == "interleaved" else 1)
    times = StageTimes(
        forward=tuple(map(tuple, forward)), backward=tuple(map(tuple, backward)), weight=tuple(map(tuple, weight)),
        send_us=draw(st.sampled_from([0.0, 0.3])),
    )  # fmt: skip
    return name, times, micro


@given(name=st.sampled_from(FIXED), stages=st.integers(1, 6), parts=st.integers(1, 3), rounds=st.integers(1, 9),
       rest=st.integers(0, 5), f=length, b=length)  # fmt: skip
def test_the_graph_is_the_formula(
    name: ScheduleName, stages: int, parts: int, rounds: int, rest: int, f: float, b: float
) -> None:
    """With equal parts and free sends, critical path and closed form agree to rounding."""
    parts, rest = (parts, 0) if name == "interleaved" else (1, rest % stages)
    times, micro = alike(stages, parts, f, b), rounds * stages + rest
    assert pipeline_us(name, times, micro) == pytest.approx(closed_form_us(name, times, micro))


@given(stages=st.integers(1, 6), micro=st.integers(1, 80), f=length, b=length, part=st.floats(0.1, 0.5))
@example(stages=4, micro=18, f=0.5, b=2.9322280571690666, part=0.19667765060510692)
@example(stages=3, micro=62, f=1.0, b=6.104407251949798, part=0.20235742525909106)
def test_zero_bubble_lies_between_its_work_and_1f1b(stages: int, micro: int, f: float, b: float, part: float) -> None:
    """Putting dW off never makes a pipeline slower, nor faster than a stage's own work and one way there and back."""
    times = alike(stages, 1, f, b, part * b)
    found = pipeline_us("zero_bubble", times, micro)
    least = max(micro * (f + b), stages * (f + b - part * b))
    assert least - 1e-6 <= found <= pipeline_us("1f1b", times, micro) + 1e-6


@pytest.mark.parametrize(("stages", "micro"), [(4, 8), (8, 64)])
def test_zero_bubble_is_its_formula_where_the_three_parts_are_equal(stages: int, micro: int) -> None:
    """F = B = W, the case of the paper's figures."""
    times = alike(stages, 1, 1.0, 2.0, 1.0)
    assert pipeline_us("zero_bubble", times, micro) == closed_form_us("zero_bubble", times, micro)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(FIXED), stages=st.integers(2, 5), rounds=st.integers(5, 12), f=length, b=length,
       head=st.floats(0.0, 1.0), send=st.sampled_from([0.0, 0.05, 0.4]))  # fmt: skip
@example(name="interleaved", stages=2, rounds=12, f=0.5, b=0.5, head=0.0, send=0.4)
def test_a_long_pipeline_is_extended_closely(
    name: ScheduleName, stages: int, rounds: int, f: float, b: float, head: float, send: float
) -> None:
    """With a heavier last stage and sends, the extended path is that of the whole graph to 3 %; that much where sends
    take as long as slots and two interleaved stages wait for every one of them (the worst of 85,600 draws)."""
    parts = 2 if name == "interleaved" else 1
    even = alike(stages, parts, f, b, send=send)
    last = tuple(part + head for part in even.backward[-1])
    times = StageTimes(forward=even.forward, backward=(*even.backward[:-1], last), send_us=send)
    whole = max(each.end_us for each in scheduled(name, times, rounds * stages))
    assert pipeline_us(name, times, rounds * stages) == pytest.approx(whole, rel=0.03)


@given(pipeline=pipelines())
def test_every_slot_runs_once_and_after_what_it_needs(pipeline: tuple[ScheduleName, StageTimes, int]) -> None:
    """Each forward and backward of each part runs once, not before its neighbour's end and the send."""
    name, times, micro = pipeline
    found = scheduled(name, times, micro)
    ends = {(each.slot.kind, each.slot.part * times.stages + each.stage, each.slot.micro): each for each in found}
    wanted = {(kind, part, k) for kind in "FB" for part in range(times.stages * times.parts) for k in range(micro)}
    assert ({key for key in ends if key[0] != "W"}, _late(ends, times)) == (wanted, [])


def _late(ends: Mapping[tuple[Kind, int, int], ScheduledSlot], times: StageTimes) -> list[ScheduledSlot]:
    last = times.stages * times.parts - 1
    wrong = []
    for (kind, part, k), each in ends.items():
        back: tuple[Kind, int, int] = ("B", part + 1, k) if part < last else ("F", part, k)
        needs: dict[Kind, tuple[Kind, int, int]] = {"F": ("F", part - 1, k), "B": back, "W": ("B", part, k)}
        before = ends.get(needs[kind])
        away = before is not None and before.stage != each.stage
        if before is not None and each.start_us < before.end_us + (times.send_us if away else 0.0) - 1e-9:
            wrong.append(each)
    return wrong


@given(pipeline=pipelines())
def test_a_stage_does_one_thing_at_a_time(pipeline: tuple[ScheduleName, StageTimes, int]) -> None:
    name, times, micro = pipeline
    found = sorted(scheduled(name, times, micro), key=lambda each: (each.stage, each.start_us))
    clashes = [
        (one, other)
        for one, other in pairwise(found)
        if one.stage == other.stage and other.start_us < one.end_us - 1e-9
    ]
    assert clashes == []


@given(
    pipeline=pipelines(),
    longer=st.floats(0.0, 1.0),
    stage=st.integers(0, 4),
    kind=st.sampled_from(["F", "B", "W", "send"]),
)
def test_nothing_is_gained_by_what_takes_longer(
    pipeline: tuple[ScheduleName, StageTimes, int], longer: float, stage: int, kind: str
) -> None:
    name, times, micro = pipeline

    def grown(rows: tuple[tuple[float, ...], ...], kinds: str) -> tuple[tuple[float, ...], ...]:
        more = longer if kind in kinds else 0.0
        return tuple(tuple(us + more * (at == stage) for us in row) for at, row in enumerate(rows))

    slower = StageTimes(
        forward=grown(times.forward, "F"),
        backward=grown(times.backward, "BW"),  # with that of its weights
        weight=grown(times.weight, "W"),
        send_us=times.send_us + (longer if kind == "send" else 0.0),
    )
    assert pipeline_us(name, slower, micro) >= pipeline_us(name, times, micro) - 1e-9


def test_orders_of_1f1b_and_interleaving() -> None:
    """Two parts, two stages: two micro-batches of the first part, then of the second."""
    first = orders("interleaved", 2, 4, 2)[0]
    assert first[:4] == (Slot("F", 0, 0), Slot("F", 0, 1), Slot("F", 1, 0), Slot("F", 1, 1))
    # the first of four stages begins with four forwards, the last with one
    slots = orders("1f1b", 4, 8)
    assert [next(i for i, slot in enumerate(stage) if slot.kind == "B") for stage in slots] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("name", "virtual", "held"), [("gpipe", 1, 16), ("1f1b", 1, 4), ("zero_bubble", 1, 4), ("interleaved", 2, 5.5)]
)
def test_micro_batches_in_flight(name: ScheduleName, virtual: int, held: float) -> None:
    """Four stages, 16 micro-batches; interleaving holds 1 + (p - 1) / (p v) times as many as 1F1B."""
    assert in_flight(name, 4, 16, virtual) == held


def test_interleaving_wants_whole_rounds() -> None:
    """6 micro-batches do not go round 4 stages."""
    with pytest.raises(Misconfigured, match=r"parallel\.pp = 4 does not divide micro-batches of a step = 6"):
        pipeline_us("interleaved", alike(4, 2, 1, 2), 6)


def test_many_micro_batches_cost_no_time() -> None:
    """A million of them are extended, not followed."""
    assert pipeline_us("1f1b", alike(4, 1, 1, 2), 10**6) == pytest.approx(3 * (10**6 + 3))
