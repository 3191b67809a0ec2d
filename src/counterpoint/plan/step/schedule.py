"""Schedule micro-batches through a pipeline: the order in which each stage runs them, and when the last one ends.

`orders` lists, for each stage, its slots (forward or backward, part of the model, micro-batch). The graph:

    F(part, k) after F(part - 1, k) + send      parts go round robin: part c · stages + s is the c-th of stage s
    B(part, k) after B(part + 1, k) + send      and after its own F
    a stage runs its slots one after another, in its order

`pipeline_us` is the length of the critical path. With equal parts, p stages, m micro-batches, v parts per stage,
forward f and backward b of all parts of a stage, and free sends it is

    gpipe, 1f1b     (m + p - 1) (f + b)                    arXiv 1811.06965, 1806.03377
    interleaved     (m + (p - 1) / v) (f + b)              arXiv 2104.04473, section 2.2
    zero_bubble     m (f + b) + (p - 1) (f + b - 2 w)      arXiv 2401.10241, ZB-H1; w: the part of b for dW

zero_bubble has no fixed order here: a stage with nothing else to do runs a dW that it had postponed. That takes as many
activations as 1f1b, and its time is its formula or less; where it would end later than 1f1b, it is 1f1b.

From 4 p micro-batches on, the path has become periodic and grows by the same amount with every p more: a few p are
simulated and the rest is extrapolated. `test_schedule.py` compares this with the whole graph: it agrees to 1.5 %, and
to rounding where sends are short and backward takes longer than forward.
"""

from __future__ import annotations

import heapq
from collections import deque
from functools import lru_cache
from typing import Literal, NamedTuple

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.model import divides, positive
from counterpoint.records import Record

Kind = Literal["F", "B", "W"]
_Waiting = dict[Kind, deque[tuple[float, int]]]
"""Micro-batches that a stage could run, by kind, each with the µs since which it could."""
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SIMULATED_ROUNDS = {"zero_bubble": 8}  # of `stages` micro-batches; greedy choices settle late
DEFAULT_ROUNDS = 3  # of fixed orders, before the period is taken


class Slot(NamedTuple):
    """Describes one operation of a stage; `part` counts its own parts from 0."""

    kind: Kind
    part: int
    micro: int


class ScheduledSlot(NamedTuple):
    """Holds a slot with its start and end."""

    stage: int
    slot: Slot
    start_us: float
    end_us: float


class StageTimes(Record, frozen=True, kw_only=True):
    """Holds the µs of each part for one micro-batch, `[stage][part]`, and of one send between stages."""

    forward: tuple[tuple[float, ...], ...]  # of one micro-batch
    backward: tuple[tuple[float, ...], ...]  # of one micro-batch, with `weight`
    weight: tuple[tuple[float, ...], ...] = ()  # the part of backward for weight gradients; used by zero_bubble
    send_us: float = 0.0  # until the next stage has what was sent

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.forward)

    @property
    def parts(self) -> int:
        """Return the number of parts per stage."""
        return len(self.forward[0])

    def busiest_us(self) -> float:
        """Return the time of one micro-batch on the stage that has most to do."""
        return max(sum(f) + sum(b) for f, b in zip(self.forward, self.backward, strict=True))


def in_flight(name: ScheduleName, stages: int, micro_batches: int, virtual: int = 1) -> float:
    """Return the micro-batches whose activations the first stage holds at once, in units of a whole stage."""
    if name == "gpipe":
        return float(micro_batches)
    if name == "interleaved":
        return min(stages * (1.0 + (stages - 1.0) / (stages * virtual)), float(micro_batches))
    return float(min(stages, micro_batches))


def orders(name: ScheduleName, stages: int, micro_batches: int, virtual: int = 1) -> tuple[tuple[Slot, ...], ...]:
    """Return the slots of every stage in their order; interleaved needs a multiple of `stages` as micro_batches.

    Args:
        name: the schedule.
        stages: number of stages of the pipeline.
        micro_batches: number of micro-batches of one step.
        virtual: parts per stage.

    Raises:
        Misconfigured: zero_bubble has no fixed order.
    """
    positive("stages", stages)
    positive("micro_batches", micro_batches)
    if name == "interleaved":
        divides("parallel.pp", stages, "micro-batches of a step", micro_batches)
        return tuple(_interleaved(stage, stages, micro_batches, virtual) for stage in range(stages))
    if name == "zero_bubble":
        raise Misconfigured("zero_bubble: its stages choose as they go; use pipeline_us or scheduled")
    warm = [micro_batches if name == "gpipe" else min(stages - 1 - stage, micro_batches) for stage in range(stages)]
    forward = [Slot("F", 0, micro) for micro in range(micro_batches)]
    backward = [Slot("B", 0, micro) for micro in range(micro_batches)]
    return tuple(_alternate(forward, backward, first) for first in warm)


def _alternate(forward: list[Slot], backward: list[Slot], first: int) -> tuple[Slot, ...]:
    """Return `first` forwards, then one forward and one backward in turn, then the rest of backward."""
    pairs = zip(forward[first:], backward, strict=False)
    rest = backward[max(len(forward) - first, 0) :]
    return (*forward[:first], *(slot for pair in pairs for slot in pair), *rest)


def _interleaved(stage: int, stages: int, micro_batches: int, virtual: int) -> tuple[Slot, ...]:
    """Return Megatron-LM's order: `stages` micro-batches through each part in turn; backward from the last part."""
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
def pipeline_us(name: ScheduleName, times: StageTimes, micro_batches: int) -> float:
    """Return the time from the first forward to the last backward."""
    stages = times.stages
    if stages == 1:
        return micro_batches * times.busiest_us()
    rounds, rest = divmod(micro_batches, stages)
    simulated = SIMULATED_ROUNDS.get(name, DEFAULT_ROUNDS)
    if rounds <= simulated + 1:
        return _end_us(scheduled(name, times, micro_batches))
    shorter, longer = (_end_us(scheduled(name, times, (simulated + more) * stages + rest)) for more in (0, 1))
    period = max(longer - shorter, stages * times.busiest_us())  # never less than what the busiest stage has to do
    found_us = longer + (rounds - simulated - 1) * period
    return min(found_us, pipeline_us("1f1b", times, micro_batches)) if name == "zero_bubble" else found_us


def _end_us(found: tuple[ScheduledSlot, ...]) -> float:
    return max(each.end_us for each in found)


def scheduled(name: ScheduleName, times: StageTimes, micro_batches: int) -> tuple[ScheduledSlot, ...]:
    """Return every slot with its start and end: the longest path to each node of the graph."""
    if name == "zero_bubble":  # a B may arrive while a dW runs: where that costs more than it fills, 1f1b is kept
        return min(_greedy(times, micro_batches), scheduled("1f1b", times, micro_batches), key=_end_us)
    stages, send = times.stages, times.send_us
    slots = orders(name, stages, micro_batches, times.parts)
    last = stages * times.parts - 1
    found: list[ScheduledSlot] = []
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
            found.append(ScheduledSlot(stage, slot, start, end))
            at[stage] += 1
            follower = (stage + (1 if kind == "F" else -1)) % stages
            if follower not in waiting:
                waiting.append(follower)
    return tuple(found)


def _greedy(times: StageTimes, micro_batches: int) -> tuple[ScheduledSlot, ...]:
    """Return zero_bubble's slots: the oldest B that is ready, else an F if activations fit, else a postponed dW."""
    stages, send = times.stages, times.send_us
    if times.parts > 1 or len(times.weight) != stages:
        raise Misconfigured("zero_bubble: one part per stage, and times.weight of each stage")
    arrived: list[_Waiting] = [{"F": deque(), "B": deque(), "W": deque()} for _ in range(stages)]
    arrived[0]["F"].extend((0.0, micro) for micro in range(micro_batches))
    begun, ended = [0] * stages, [0] * stages
    found: list[ScheduledSlot] = []
    events = [(0.0, stage) for stage in range(stages)]
    free = [0.0] * stages
    while events:
        now, stage = heapq.heappop(events)
        if now < free[stage]:
            continue
        room = begun[stage] - ended[stage] < stages - stage
        kind = _ready(arrived[stage], now, room)
        if kind is None:
            continue  # woken again by what arrives next
        _, micro = arrived[stage][kind].popleft()
        weight = times.weight[stage][0]
        length = {"F": times.forward[stage][0], "B": times.backward[stage][0] - weight, "W": weight}[kind]
        free[stage] = end = now + length
        found.append(ScheduledSlot(stage, Slot(kind, 0, micro), now, end))
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


def _ready(arrived: _Waiting, now: float, room: bool) -> Kind | None:
    if (back := arrived["B"]) and back[0][0] <= now:
        return "B"
    if room and (forward := arrived["F"]) and forward[0][0] <= now:
        return "F"
    return "W" if arrived["W"] else None


def _target(stage: int, stages: int, kind: Kind) -> tuple[int | None, Kind]:
    """Return the stage that a finished slot lets go on, and the kind of slot that it may run; None: no other."""
    if kind == "F":
        return (stage + 1, "F") if stage + 1 < stages else (stage, "B")
    if kind == "B" and stage > 0:
        return stage - 1, "B"
    return None, "W"
