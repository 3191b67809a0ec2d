"""Run trials in interleaved rounds, and turn the samples of all ranks into rows of a measurement.

Each kind of part is a generator of experiments (pairs.py, alone.py, tensor.py, expert.py). It prepares and checks what
is to be timed, and holds it open until the rounds have been played and the rows made (worker.py).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from counterpoint.measurement.mechanisms import joined
from counterpoint.measurement.session import Session
from counterpoint.measurement.trial import Trial
from counterpoint.pair.together import overlap, pair_class
from counterpoint.records.measurement import BlockRow, DeviceState, Order, Row, Scenario, Timing

if TYPE_CHECKING:
    from counterpoint.measurement.gpu_usage import Observed

Key = TypeVar("Key", bound=Hashable)
Samples = list[list[Trial]]  # [rank][round]
SamplesOf: TypeAlias = Mapping[Key, Samples]

_FEWEST = 3
TURN = 12  # rounds that are played even if time is short, and after each of which ranks ask whether any is left


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Holds trials, by key, to run in each round, and a function that makes result rows from all ranks' samples.

    `rows` is called on all ranks, with the keys of `trials`, before the generator that yielded the experiment goes on.
    """

    trials: Mapping[Any, Callable[[], Trial]]
    rows: Callable[[Any], Sequence[Row | BlockRow]]


def play_rounds(
    session: Session, trials: Mapping[Key, Callable[[], Trial]], *, rounds: int, dropped: int, seed: int,
    until_s: float = math.inf,
) -> dict[Key, Samples]:  # fmt: skip
    """Return all ranks' results of running each trial once per round, by key, without the first `dropped` rounds.

    Each round has a new random order, by `seed`, so that drifting clocks affect all trials alike. A trial in which any
    rank queued too slowly does not count on any, as long as three others remain. After every twelfth round it ends if
    it is past `until_s` of CLOCK_MONOTONIC. All ranks call it with the same arguments.
    """
    kept: dict[Key, list[Trial]] = {key: [] for key in trials}
    order = list(trials)
    shuffle = random.Random(seed)  # seeded equally on every rank
    for index in range(rounds):
        if index and index % TURN == 0 and until_s < math.inf and session.gather(time.monotonic() > until_s)[0]:
            break
        shuffle.shuffle(order)
        for key in order:
            trial = trials[key]()
            if index >= dropped:
                kept[key].append(trial)
    everyone = session.gather({key: kept[key] for key in trials})
    return {key: [ranks[key] for ranks in everyone] for key in trials}


def _in_time(samples: Samples) -> list[bool]:
    return [not any(trial.late for trial in trials) for trials in zip(*samples, strict=True)]


def why_late(*found: Samples) -> str | None:
    """Return why to distrust results of these samples: late trials; None if enough trials were in time."""
    for samples in found:
        in_time = _in_time(samples)
        if sum(in_time) < min(_FEWEST, len(in_time)):
            return (
                f"the host queued too slowly in {in_time.count(False)} of {len(in_time)} rounds; "
                "free its cores or measure larger operations"
            )
    return None


def timing(per_rank: Sequence[Sequence[float]], counts: Sequence[bool] | None = None) -> Timing:
    """Return the `Timing` of µs [rank][round]: median, 10th and 90th percentile of the rank with the largest median.

    `counts` says for each round whether it counts; None: all do.
    """
    slowest = np.max(per_rank, axis=0).round(3).tolist()
    counts = counts or [True] * len(slowest)
    quantiles = [np.quantile(np.compress(counts, rounds), (0.1, 0.5, 0.9)).tolist() for rounds in per_rank]
    medians = tuple(median for _, median, _ in quantiles)
    rank = max(range(len(medians)), key=medians.__getitem__)
    p10, median, p90 = quantiles[rank]
    return Timing(
        us=median,
        p10_us=p10,
        p90_us=p90,
        rank=rank,
        per_rank_us=medians,
        runs=sum(counts),
        rounds_us=tuple(us if good else None for us, good in zip(slowest, counts, strict=True)),
    )


def time_of(samples: Samples, measure: Callable[[Trial], float]) -> Timing:
    """Return the `Timing` of the µs that `measure` returns for each trial."""
    in_time = _in_time(samples)  # if fewer than three remain, all rounds count
    counts = in_time if sum(in_time) >= _FEWEST else None
    return timing([[measure(trial) for trial in rank] for rank in samples], counts)


def compute_time(trial: Trial) -> float:
    """Return the computation's µs, from the moment when its stream reached the computation."""
    return trial.compute_end - trial.compute_start


def comm_time(trial: Trial) -> float:
    """Return the collective's µs, from the moment when its stream reached the collective."""
    return trial.comm_end - trial.comm_start


def both_time(trial: Trial) -> float:
    """Return the µs from the first start to the last end of computation and collective."""
    return max(trial.compute_end, trial.comm_end) - min(trial.compute_start, trial.comm_start)


def row(
    scenario: Scenario, *, mechanism: str, order: Order, size_bytes: int, flops: int, peak_tflops: float | None,
    samples: Mapping[tuple[str, str], Samples], best: tuple[str, float], observed: Observed, device: DeviceState | None,
) -> Row:  # fmt: skip
    """Return one row of the measurement, for one mechanism and launch order.

    `samples` are by (mechanism, case), and the computation without any control is (`""`, `compute_alone`). `best` is
    the fastest mechanism alone and its time in µs, `size_bytes` the full array as it was run, and `peak_tflops` the
    device's dense peak, for MFU; None if unknown.
    """
    together = samples[mechanism, order]
    compute_alone = time_of(samples["", "compute_alone"], compute_time)
    comm_alone = time_of(samples[mechanism, "comm_alone"], comm_time)
    both, compute, comm = (time_of(together, part) for part in (both_time, compute_time, comm_time))
    heads = time_of(together, lambda trial: abs(trial.compute_start - trial.comm_start)).per_rank_us
    head_us = 0.0 if order == "together" else sum(heads) / len(heads)
    ratios = overlap(compute_us=compute_alone.us, comm_us=best[1], both_us=both.us, order=order, head_us=head_us)
    late = why_late(
        samples["", "compute_alone"], *(samples[name, "comm_alone"] for name in (best[0], mechanism)), together
    )
    rates = [flops / us / 1e6 for us in (compute_alone.us, compute.us)]
    mfus = [None if peak_tflops is None else rate / peak_tflops for rate in rates]
    return Row(
        scenario=scenario.name, workload=scenario.workload, collective=scenario.collective, size_bytes=size_bytes,
        ratio=scenario.ratio, mechanism=mechanism, order=order, compute_alone=compute_alone,
        compute_controlled=time_of(samples[mechanism, "compute_alone"], compute_time), comm_alone=comm_alone,
        best_comm_alone_us=best[1], best_mechanism=best[0], serial=time_of(samples[mechanism, "serial"], both_time),
        together=both, compute_together=compute, comm_together=comm, head_start_us=head_us, hidden=ratios.hidden,
        ideal_fraction=ratios.ideal_fraction, compute_kept=compute_alone.us / compute.us,
        comm_kept=comm_alone.us / comm.us, pair_class=pair_class(compute_alone.us, best[1]), tflops_alone=rates[0],
        tflops_together=rates[1], mfu_alone=mfus[0], mfu_together=mfus[1], usage=observed.usage,
        evidence=observed.evidence, marked=joined(observed.marked, late), device=device,
    )  # fmt: skip
