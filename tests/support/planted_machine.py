"""A machine whose optimum is known: planted times, noise, clocks that drift, knobs that do nothing.

Its rounds are those of `measurement/rounds.py`, so that what a decision is made from has the same form and errors.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from counterpoint.measurement.gpu_usage import Observed
from counterpoint.measurement.rounds import Samples, compute_time, play_rounds, row, time_of
from counterpoint.measurement.trial import Trial
from counterpoint.records.measurement import Block, BlockRow, Measurement, Order, Row, Scenario
from tests.support import fake_worker

DROPPED = 2
COMPUTE_US, COMM_US = 1000.0, 600.0  # alone
NO_EFFECT = "the knob did nothing"


class _OneRank:
    def gather(self, value: Any) -> list[Any]:
        return [value]


@dataclass(kw_only=True)
class PlantedMachine:
    """Measures parts of a plan as `measure_parts` does."""

    together_us: Callable[[str, str, Order], float]  # the truth: operation, mechanism, order
    noise: float = 0.0  # standard deviation of a trial, over its time
    drift: float = 0.0  # by how much each trial is slower than the one before, over the first one's time
    no_ops: frozenset[str] = frozenset()  # mechanisms whose knob does nothing
    interleaved: bool = True  # False: all rounds of a mechanism, then those of the next one
    rounds_are_kept: bool = True  # False: as measurements were before
    seconds: float = 0.0  # that a part takes of the budget
    seed: int = 0
    measured: list[str] = field(default_factory=list)  # names of parts
    tried: set[str] = field(default_factory=set)  # mechanisms
    _trials: int = 0

    def measure_parts(
        self, suite: str, parts: Sequence[Scenario | Block], *, device: str, world_size: int, rounds: int,
        budget_s: float | None = None, **others: Any,
    ) -> Measurement:  # fmt: skip
        self._random = random.Random(self.seed)
        rows: list[Row] = []
        blocks: list[BlockRow] = []
        for number, part in enumerate(parts):
            if number and budget_s is not None and (number + 1) * self.seconds > budget_s:
                break
            self.measured.append(part.name)
            self.tried |= set(part.mechanisms)
            if isinstance(part, Scenario):
                rows += self._rows(part, rounds)
            else:
                blocks += self._blocks(part, rounds)
        environment = msgspec.structs.replace(fake_worker.ENVIRONMENT, device=device, world_size=world_size)
        return Measurement(
            suite=suite, environment=environment, rounds=rounds, dropped_rounds=DROPPED,
            rows=tuple(rows), blocks=tuple(blocks),
        )  # fmt: skip

    def _rows(self, part: Scenario, rounds: int) -> list[Row]:
        trials: dict[tuple[str, str], Callable[[], Trial]] = {("", "compute_alone"): self._side("compute", COMPUTE_US)}
        for name in part.mechanisms:
            trials[name, "compute_alone"] = self._side("compute", COMPUTE_US)
            trials[name, "comm_alone"] = self._side("comm", COMM_US)
            trials[name, "serial"] = self._both(COMPUTE_US + COMM_US)
            for order in part.orders:
                trials[name, order] = self._both(self.together_us(part.collective, self._as_is(name), order))
        samples = self._play(trials, rounds)
        found = [
            row(
                part, mechanism=name, order=order, size_bytes=part.size_bytes or 0, flops=1, peak_tflops=None,
                samples=samples, best=(part.mechanisms[0], COMM_US),
                observed=Observed(marked=NO_EFFECT if name in self.no_ops else None), device=None,
            )
            for name in part.mechanisms
            for order in part.orders
        ]  # fmt: skip
        return found if self.rounds_are_kept else [_without_rounds(each) for each in found]

    def _blocks(self, part: Block, rounds: int) -> list[BlockRow]:
        operation, _, rest = part.what.partition(" ")
        legs = [f"{leg} {rest}" for leg in ("dispatch", "combine")] if operation == "exchange" else [part.what]
        found = []
        for leg in legs:
            trials = {("matmul alone", ""): self._side("compute", COMPUTE_US)} if operation != "exchange" else {}
            for name in part.mechanisms:
                us = self.together_us(operation, self._as_is(name), "together") / len(legs)
                trials[name, ""] = self._side("compute", us)
            for (name, _), samples in self._play(trials, rounds).items():
                marked = NO_EFFECT if name in self.no_ops else None
                found.append(BlockRow(what=leg, mechanism=name, time=time_of(samples, compute_time), marked=marked))
        return found

    def _as_is(self, mechanism: str) -> str:
        return mechanism.partition("+")[0] if mechanism in self.no_ops else mechanism

    def _play(
        self, trials: Mapping[tuple[str, str], Callable[[], Trial]], rounds: int
    ) -> dict[tuple[str, str], Samples]:
        session = cast(Any, _OneRank())
        if self.interleaved:
            return play_rounds(session, dict(trials), rounds=rounds, dropped=DROPPED, seed=self.seed)
        found: dict[tuple[str, str], Samples] = {}
        for key, trial in trials.items():
            found |= play_rounds(session, {key: trial}, rounds=rounds, dropped=DROPPED, seed=self.seed)
        return found

    def _now(self) -> float:
        self._trials += 1
        return (1 + self.drift * self._trials) * math.exp(self._random.gauss(0.0, self.noise))

    def _side(self, side: str, us: float) -> Callable[[], Trial]:
        def run() -> Trial:
            end = us * self._now()
            return (
                Trial(compute_start=0.0, compute_end=end) if side == "compute" else Trial(comm_start=0.0, comm_end=end)
            )

        return run

    def _both(self, us: float) -> Callable[[], Trial]:
        def run() -> Trial:
            end = us * self._now()
            return Trial(compute_start=0.0, compute_end=end, comm_start=0.0, comm_end=end)

        return run


def _without_rounds(row: Row) -> Row:
    return msgspec.structs.replace(row, together=msgspec.structs.replace(row.together, rounds_us=()))
