"""Micro-batches through a pipeline: what each stage runs in which order, and when the last one ends.

Data first: `orders` lists, for each stage, its slots (forward or backward, part of the model, micro-batch). The graph:

    F(part, k) after F(part - 1, k) + send      parts are dealt round: part c · stages + s is the c-th of stage s
    B(part, k) after B(part + 1, k) + send      and after its own F
    a stage runs its slots one after another, in its order

`pipeline_us` is the length of the critical path. With equal parts, p stages, m micro-batches, v parts per stage,
forward f and backward b of all parts of a stage, and free sends it is

    gpipe, 1f1b     (m + p - 1) (f + b)                    arXiv 1811.06965, 1806.03377
    interleaved     (m + (p - 1) / v) (f + b)              arXiv 2104.04473, section 2.2
    zero_bubble     m (f + b) + (p - 1) (f + b - 2 w)      arXiv 2401.10241, ZB-H1; w: the part of b for dW

zero_bubble has no fixed order here: a stage with nothing else to do runs a dW that it had put off. That takes as many
activations as 1f1b, and comes out at its formula or below; where it would end later than 1f1b, it is 1f1b.

From 4 p micro-batches on, the path has become periodic and grows by the same amount with every p more: it is followed
for a few p and extended. `test_schedule.py` holds this against the whole graph: to 1.5 %, to rounding where sends are
short and backward takes longer than forward.
"""

from __future__ import annotations

import heapq
from collections import deque
from functools import lru_cache
from typing import Literal, NamedTuple

from counterpoint.errors import Misconfigured
from counterpoint.plan.model import divides, positive
from counterpoint.records.base import Record

__all__ = ["Kind", "Placed", "Slot", "Times", "closed_form_us", "in_flight", "orders", "pipeline_us", "placed"]

Kind = Literal["F", "B", "W"]
_Arrived = dict[Kind, deque[tuple[float, int]]]
"""What a stage could run: since when, and which micro-batch."""
Name = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
FOLLOWED = {"zero_bubble": 8}  # times the number of stages, before the period is taken; greedy choices settle late
SETTLED = 3  # of fixed orders


class Slot(NamedTuple):
    """One operation of a stage; `part` counts its own parts from 0."""

    kind: Kind
    part: int
    micro: int


class Placed(NamedTuple):
    """A slot with its times, µs."""

    stage: int
    slot: Slot
    start_us: float
    end_us: float


class Times(Record, frozen=True, kw_only=True):
    """µs of each part, `[stage][part]`, and of one send between stages.

    Args:
        forward: of one micro-batch.
        backward: all of it, with `weight`.
        weight: the part of backward that only makes weight gradients; used by zero_bubble.
        send_us: that a neighbour waits.
    """

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    weight: tuple[tuple[float, ...], ...] = ()
    send_us: float = 0.0

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def parts(self) -> int:
        """Per stage."""
        return len(self.forward[0])

    def busiest_us(self) -> float:
        """Of one micro-batch, on the stage that has most to do."""
        return max(sum(f) + sum(b) for f, b in zip(self.forward, self.backward, strict=True))


def in_flight(name: Name, stages: int, micro_batches: int, virtual: int = 1) -> float:
    """Micro-batches whose activations the first stage holds at once, in units of a whole stage."""
    if name == "gpipe":
        return float(micro_batches)
    if name == "interleaved":
        return min(stages * (1.0 + (stages - 1.0) / (stages * virtual)), float(micro_batches))
    return float(min(stages, micro_batches))


def closed_form_us(name: Name, times: Times, micro_batches: int) -> float:
    """For equal parts and free sends; a bound from below for others would need the graph.

    Raises:
        Misconfigured: the parts differ, or sends take time.
    """
    stages, parts = times.stages, times.parts
    alike = len({part for stage in times.forward for part in stage}) == 1
    if not alike or len({part for stage in times.backward for part in stage}) != 1 or times.send_us:
        raise Misconfigured("closed_form_us: parts differ or send_us > 0; use pipeline_us")
    both = sum(times.forward[0]) + sum(times.backward[0])
    if name == "zero_bubble":
        return micro_batches * both + (stages - 1) * (both - 2 * sum(times.weight[0]))
    return (micro_batches + (stages - 1) / (parts if name == "interleaved" else 1)) * both


def orders(name: Name, stages: int, micro_batches: int, virtual: int = 1) -> tuple[tuple[Slot, ...], ...]:
    """The slots of every stage, first to last.

    Raises:
        Misconfigured: interleaved needs a multiple of `stages` as micro_batches; zero_bubble has no fixed order.
    """
    positive("stages", stages)
    positive("micro_batches", micro_batches)
    if name == "interleaved":
        divides("parallel.pp", stages, "micro-batches of a step", micro_batches)
        return tuple(_interleaved(stage, stages, micro_batches, virtual) for stage in range(stages))
    if name == "zero_bubble":
        raise Misconfigured("zero_bubble: its stages choose as they go; use pipeline_us or placed")
    warm = [micro_batches if name == "gpipe" else min(stages - 1 - stage, micro_batches) for stage in range(stages)]
    forward = [Slot("F", 0, micro) for micro in range(micro_batches)]
    backward = [Slot("B", 0, micro) for micro in range(micro_batches)]
    return tuple(_alternate(forward, backward, first) for first in warm)


def _alternate(forward: list[Slot], backward: list[Slot], first: int) -> tuple[Slot, ...]:
    """`first` forwards, then one forward and one backward in turn, then what is left of backward."""
    pairs = zip(forward[first:], backward, strict=False)
    rest = backward[max(len(forward) - first, 0) :]
    return (*forward[:first], *(slot for pair in pairs for slot in pair), *rest)


def _interleaved(stage: int, stages: int, micro_batches: int, virtual: int) -> tuple[Slot, ...]:
    """As Megatron-LM: rounds of `stages` micro-batches through each part in turn; backward from the last part."""
    total = micro_batches * virtual

    def slot(kind: Kind, index: int) -> Slot:
        group, inside = divmod(index, stages * virtual)
        part = inside // stages
        return Slot(kind, part if kind == "F" else virtual - 1 - part, group * stages + inside % stages)

    forward = [slot("F", index) for index in range(total)]
    backward = [slot("B", index) for index in range(total)]
    warm = 2 * (stages - 1 - stage) + (virtual - 1) * stages if virtual > 1 else stages - 1 - stage
    return _alternate(forward, backward, min(warm, total))


@lru_cache(maxsize=1 << 14)
def pipeline_us(name: Name, times: Times, micro_batches: int) -> float:
    """From the first forward to the last backward, µs.

    Raises:
        Misconfigured: as `orders`.
    """
    stages = times.stages
    if stages == 1:
        return micro_batches * times.busiest_us()
    rounds, rest = divmod(micro_batches, stages)
    followed = FOLLOWED.get(name, SETTLED)
    if rounds <= followed + 1:
        return _end_us(placed(name, times, micro_batches))
    shorter, longer = (_end_us(placed(name, times, (followed + more) * stages + rest)) for more in (0, 1))
    period = max(longer - shorter, stages * times.busiest_us())  # never less than what the busiest stage has to do
    found_us = longer + (rounds - followed - 1) * period
    return min(found_us, pipeline_us("1f1b", times, micro_batches)) if name == "zero_bubble" else found_us


def _end_us(found: tuple[Placed, ...]) -> float:
    return max(each.end_us for each in found)


def placed(name: Name, times: Times, micro_batches: int) -> tuple[Placed, ...]:
    """Every slot with its start and end: the longest path to each node of the graph."""
    if name == "zero_bubble":  # a B may arrive while a dW runs: where that costs more than it fills, 1f1b is kept
        return min(_greedy(times, micro_batches), placed("1f1b", times, micro_batches), key=_end_us)
    stages, send = times.stages, times.send_us
    slots = orders(name, stages, micro_batches, times.parts)
    last = stages * times.parts - 1
    found: list[Placed] = []
    done: dict[tuple[Kind, int, int], float] = {}
    at, free = [0] * stages, [0.0] * stages
    waiting = list(range(stages))
    while waiting:
        stage = waiting.pop()
        mine, forward, backward = slots[stage], times.forward[stage], times.backward[stage]
        while at[stage] < len(mine):
            slot = mine[at[stage]]
            kind, part = slot.kind, slot.part * stages + stage
            before = (kind, part - 1 if kind == "F" else part + 1, slot.micro)
            away = part != (0 if kind == "F" else last)
            if away and before not in done:
                break
            ready = done[before] + send if away else 0.0
            start = max(free[stage], ready)
            free[stage] = end = start + (forward if kind == "F" else backward)[slot.part]
            done[kind, part, slot.micro] = end
            found.append(Placed(stage, slot, start, end))
            at[stage] += 1
            follower = (stage + (1 if kind == "F" else -1)) % stages
            if follower not in waiting:
                waiting.append(follower)
    return tuple(found)


def _greedy(times: Times, micro_batches: int) -> tuple[Placed, ...]:
    """zero_bubble: at every moment the oldest B that is ready, else an F if there is room, else a dW put off."""
    stages, send = times.stages, times.send_us
    if times.parts > 1 or len(times.weight) != stages:
        raise Misconfigured("zero_bubble: one part per stage, and times.weight of each stage")
    arrived: list[_Arrived] = [{"F": deque(), "B": deque(), "W": deque()} for _ in range(stages)]
    arrived[0]["F"].extend((0.0, micro) for micro in range(micro_batches))
    begun, ended = [0] * stages, [0] * stages
    found: list[Placed] = []
    events = [(0.0, stage) for stage in range(stages)]
    free = [0.0] * stages
    while events:
        now, stage = heapq.heappop(events)
        if now < free[stage]:
            continue
        room = begun[stage] - ended[stage] < stages - stage
        kind = _ready(arrived[stage], now, room)
        if kind is None:
            continue  # woken again by whatever arrives
        _, micro = arrived[stage][kind].popleft()
        weight = times.weight[stage][0]
        length = {"F": times.forward[stage][0], "B": times.backward[stage][0] - weight, "W": weight}[kind]
        free[stage] = end = now + length
        found.append(Placed(stage, Slot(kind, 0, micro), now, end))
        heapq.heappush(events, (end, stage))
        begun[stage] += kind == "F"
        ended[stage] += kind == "B"
        if kind == "B":
            arrived[stage]["W"].append((end, micro))
        target, passed = _target(stage, stages, kind)
        if target is not None:
            delay = end if target == stage else end + send
            arrived[target][passed].append((delay, micro))
            heapq.heappush(events, (delay, target))
    return tuple(found)


def _ready(arrived: _Arrived, now: float, room: bool) -> Kind | None:
    if (back := arrived["B"]) and back[0][0] <= now:
        return "B"
    if room and (forward := arrived["F"]) and forward[0][0] <= now:
        return "F"
    return "W" if arrived["W"] else None


def _target(stage: int, stages: int, kind: Kind) -> tuple[int | None, Kind]:
    """Who can go on now, and with what."""
    if kind == "F":
        return (stage + 1, "F") if stage + 1 < stages else (stage, "B")
    if kind == "B" and stage > 0:
        return stage - 1, "B"
    return None, "W"
