"""Schedule micro-batches through a pipeline: the order of operations on each stage, and when the last one ends.

`orders` lists, for each stage, its slots (forward or backward, part of the model, micro-batch). The graph:

    F(part, k) after F(part - 1, k) + send      parts go round robin: part c · stages + s is the c-th of stage s
    B(part, k) after B(part + 1, k) + send      and after its own F
    a stage runs its slots one after another, in its order

`pipeline_us` is the length of the critical path. With equal parts, p stages, m micro-batches, v parts per stage,
forward f and backward b of all parts of a stage, and free sends it is

    gpipe, 1f1b     (m + p - 1) (f + b)                    arXiv 1811.06965, 1806.03377
    interleaved     (m + (p - 1) / v) (f + b)              arXiv 2104.04473, section 2.2
    zero_bubble     m (f + b) + (p - 1) (f + b - 2 w)      arXiv 2401.10241, ZB-H1; w: the part of b for dW

zero_bubble is ZB-H1: stage s postpones every dW by s micro-batches, which takes as many activations as 1f1b. Where it
would end later than 1f1b, it is 1f1b. All orders are fixed: where stages choose as they go, a longer slot may let a
step end earlier.

From 4 p micro-batches on, the path has become periodic and grows by the same amount with every p more: a few p are
simulated and the rest is extrapolated. `test_schedule.py` compares this with the whole graph: it agrees to 1.5 %, and
to rounding where sends are short and backward takes longer than forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from counterpoint.plan.job.model import divides, positive
from counterpoint.records import Record

Kind = Literal["F", "B", "W"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SIMULATED_ROUNDS = 3  # rounds of `stages` micro-batches that are simulated before the pattern is taken as periodic


class Slot(NamedTuple):
    """Describes one operation of a stage: kind, part and micro-batch; `part` counts the stage's own parts from 0."""

    kind: Kind
    part: int
    micro: int


class ScheduledSlot(NamedTuple):
    """Holds an operation of a stage with its start and end."""

    stage: int
    slot: Slot
    start_us: float
    end_us: float


class StageTimes(Record, frozen=True, kw_only=True):
    """Holds the µs of each part for one micro-batch, `[stage][part]`, and the µs of one send between stages."""

    forward: tuple[tuple[float, ...], ...]  # of one micro-batch
    backward: tuple[tuple[float, ...], ...]  # of one micro-batch, with `weight`
    weight: tuple[tuple[float, ...], ...] = ()  # the part of backward for weight gradients; used by zero_bubble
    send_us: float = 0.0  # from the send until the next stage has the data

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.forward)

    @property
    def parts(self) -> int:
        """Return the number of parts per stage."""
        return len(self.forward[0])

    def busiest_us(self) -> float:
        """Return the µs of one micro-batch on the stage that has the most to do."""
        return max(sum(f) + sum(b) for f, b in zip(self.forward, self.backward, strict=True))


def in_flight(name: ScheduleName, stages: int, micro_batches: int, virtual: int = 1, *, stage: int = 0) -> float:
    """Return how many micro-batches' activations a stage holds at once, in units of a whole stage.

    `virtual` is the number of parts per stage; of all stages, the first holds most.
    """
    if name == "gpipe":
        return float(micro_batches)
    if name == "interleaved" and virtual > 1:  # the micro-batches of its warm-up, and one more (`_interleaved`)
        return min(stages + (2.0 * (stages - stage) - stages - 1.0) / virtual, float(micro_batches))
    return float(min(stages - stage, micro_batches))


def orders(name: ScheduleName, stages: int, micro_batches: int, virtual: int = 1) -> tuple[tuple[Slot, ...], ...]:
    """Return the operations of every stage in order; interleaved needs `micro_batches` to be a multiple of `stages`."""
    positive("stages", stages)
    positive("micro_batches", micro_batches)
    if name == "interleaved":
        divides("parallel.pp", stages, "micro-batches of a step", micro_batches)
        return tuple(_interleaved(stage, stages, micro_batches, virtual) for stage in range(stages))
    if name == "zero_bubble":
        return tuple(_postponed(stage, stages, micro_batches) for stage in range(stages))
    warm = [micro_batches if name == "gpipe" else min(stages - 1 - stage, micro_batches) for stage in range(stages)]
    forward = [Slot("F", 0, micro) for micro in range(micro_batches)]
    backward = [Slot("B", 0, micro) for micro in range(micro_batches)]
    return tuple(_alternate(forward, backward, first) for first in warm)


def _alternate(forward: list[Slot], backward: list[Slot], first: int) -> tuple[Slot, ...]:
    """Return `first` forwards, then alternately one forward and one backward, then the remaining backwards."""
    pairs = zip(forward[first:], backward, strict=False)
    rest = backward[max(len(forward) - first, 0) :]
    return (*forward[:first], *(slot for pair in pairs for slot in pair), *rest)


def _postponed(stage: int, stages: int, micro_batches: int) -> tuple[Slot, ...]:
    """Return ZB-H1's order: 1f1b with each dW postponed by `stage` micro-batches."""
    held = stages - stage
    found = [Slot("F", 0, micro) for micro in range(min(held, micro_batches))]
    for micro in range(micro_batches):
        found.append(Slot("B", 0, micro))
        if micro + held < micro_batches:
            found.append(Slot("F", 0, micro + held))
        if micro >= stage:
            found.append(Slot("W", 0, micro - stage))
    return (*found, *(Slot("W", 0, micro) for micro in range(max(micro_batches - stage, 0), micro_batches)))


def _interleaved(stage: int, stages: int, micro_batches: int, virtual: int) -> tuple[Slot, ...]:
    """Return Megatron-LM's interleaved order: `stages` micro-batches per part; backward starts at the last part."""
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
    """Return the µs from the start of the first forward to the end of the last backward."""
    stages = times.stages
    if stages == 1:
        return micro_batches * times.busiest_us()
    rounds, rest = divmod(micro_batches, stages)
    if rounds <= SIMULATED_ROUNDS + 1:
        found_us = _end_us(_followed(name, times, micro_batches))
    else:
        counts = ((SIMULATED_ROUNDS + more) * stages + rest for more in (0, 1))
        shorter, longer = (_end_us(_followed(name, times, count)) for count in counts)
        period = max(longer - shorter, stages * times.busiest_us())  # never less than the busiest stage's work
        found_us = longer + (rounds - SIMULATED_ROUNDS - 1) * period
    return min(found_us, pipeline_us("1f1b", times, micro_batches)) if name == "zero_bubble" else found_us


def least_pipeline_us(name: ScheduleName, times: StageTimes, micro_batches: int) -> float:
    """Return a lower bound of `pipeline_us`, without simulating the pipeline.

    A stage begins after the first parts of all earlier stages and does all its work; then its last backward (of its
    first part) goes back through the earlier stages, except in zero_bubble, which may end with a postponed dW.
    """
    before = after = least = 0.0
    for forward, backward in zip(times.forward, times.backward, strict=True):
        least = max(least, before + micro_batches * (sum(forward) + sum(backward)) + after)
        before += forward[0] + times.send_us
        after += 0.0 if name == "zero_bubble" else backward[0] + times.send_us
    return least


def least_of_any_stages_us(
    layers_us: float, ends_us: Sequence[float], micro_batches: int, *, virtual: int = 1, send_us: float = 0.0
) -> float:
    """Return a lower bound of `least_pipeline_us` over all splits of `layers_us` of layers among stages.

    Stage s with layers of x_s and ends of e_s cannot end before before_s + micro_batches · (x_s + e_s), where before_s
    = sum of (x / virtual + 2 · send_us) of the stages before it. Within a time T it has room for x_s = (T - before_s)
    / micro_batches - e_s, or for none; the least T with room for all layers is found by halving. All µs are of one
    micro-batch; the first of a stage's `virtual` parts is no shorter than its others.
    """

    def room_us(within_us: float) -> float:
        before = total = 0.0
        for end_us in ends_us:
            here = max((within_us - before) / micro_batches - end_us, 0.0)
            total += here
            before += here / virtual + 2 * send_us
        return total

    low, high = 0.0, micro_batches * (layers_us + max(ends_us))
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if room_us(middle) < layers_us else (low, middle)
    return low


def _end_us(found: tuple[ScheduledSlot, ...]) -> float:
    return max(each.end_us for each in found)


def scheduled(name: ScheduleName, times: StageTimes, micro_batches: int) -> tuple[ScheduledSlot, ...]:
    """Return every operation with its start and end, by the longest path to each node of the dependency graph."""
    found = _followed(name, times, micro_batches)
    if name == "zero_bubble":  # a B may arrive while a dW runs: if that costs more than dW fills, 1f1b stays
        return min(found, _followed("1f1b", times, micro_batches), key=_end_us)
    return found


def _followed(name: ScheduleName, times: StageTimes, micro_batches: int) -> tuple[ScheduledSlot, ...]:
    stages, send = times.stages, times.send_us
    slots = orders(name, stages, micro_batches, times.parts)
    last = stages * times.parts - 1
    found: list[ScheduledSlot] = []
    done: dict[tuple[Kind, int, int], float] = {}
    at, free = [0] * stages, [0.0] * stages
    waiting = list(range(stages))
    while waiting:
        stage = waiting.pop()
        mine, lengths = slots[stage], _lengths(times, stage, apart=name == "zero_bubble")
        while at[stage] < len(mine):
            slot = mine[at[stage]]
            kind, part = slot.kind, slot.part * stages + stage
            before = (kind, part - 1 if kind == "F" else part + 1, slot.micro)
            away = kind != "W" and part != (0 if kind == "F" else last)
            if away and before not in done:
                break
            ready = done[before] + send if away else 0.0
            start = max(free[stage], ready)
            free[stage] = end = start + lengths[kind][slot.part]
            done[kind, part, slot.micro] = end
            found.append(ScheduledSlot(stage, slot, start, end))
            at[stage] += 1
            follower = (stage + (1 if kind == "F" else -1)) % stages
            if follower not in waiting:
                waiting.append(follower)
    return tuple(found)


def _lengths(times: StageTimes, stage: int, *, apart: bool) -> dict[Kind, tuple[float, ...]]:
    """Return the µs of a stage's operations by kind and part; `apart`: dW is separate from backward."""
    forward, backward, weight = times.forward[stage], times.backward[stage], times.weight[stage] if apart else ()
    rest = tuple(whole - dw for whole, dw in zip(backward, weight, strict=True)) if apart else backward
    return {"F": forward, "B": rest, "W": weight}
