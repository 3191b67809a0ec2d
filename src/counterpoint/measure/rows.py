"""From trials to rows: pure functions of what all ranks saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from counterpoint.measure.metrics import overlap, pair_class, timing
from counterpoint.measure.rounds import Samples, why_late
from counterpoint.measure.stage import Trial
from counterpoint.records.evidence import Evidence
from counterpoint.records.measurement import DeviceState, Order, Row, Scenario, Timing, Usage

__all__ = ["Watched", "comm_time", "compute_time", "row", "time_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What was seen beside the times: SMs, evidence of controls, and why a row must not be believed."""

    usage: Usage | None = None
    evidence: tuple[Evidence, ...] = ()
    marked: str | None = None


def time_of(samples: Samples, measure: Callable[[Trial], float]) -> Timing:
    """A duration of each trial as a `Timing`."""
    return timing([[measure(trial) for trial in rank] for rank in samples])


def compute_time(trial: Trial) -> float:
    """Of the computation, from the moment its stream reached it, in µs."""
    return trial.compute_end - trial.compute_start


def comm_time(trial: Trial) -> float:
    """Of the collective, from the moment its stream reached it, in µs."""
    return trial.comm_end - trial.comm_start


def both_time(trial: Trial) -> float:
    """From the first start to the last end."""
    return max(trial.compute_end, trial.comm_end) - min(trial.compute_start, trial.comm_start)


def head_start(trial: Trial) -> float:
    """By how much one side was first, in µs."""
    return abs(trial.compute_start - trial.comm_start)


def row(
    scenario: Scenario,
    *,
    mechanism: str,
    order: Order,
    size_bytes: int,
    flops: int,
    peak_tflops: float | None,
    samples: Mapping[tuple[str, str], Samples],
    best: tuple[str, float],
    watched: Watched,
    device: DeviceState | None,
) -> Row:
    """One row of the result.

    Args:
        scenario: what was asked.
        mechanism: whose row.
        order: which launch order.
        size_bytes: of the full array, as it was run.
        flops: of the computation.
        peak_tflops: the device's dense peak, for MFU; None if unknown.
        samples: by (mechanism, case); the computation without any control is (`""`, `compute_alone`).
        best: the fastest mechanism alone and its time in µs.
        watched: what the profiler showed.
        device: clocks and power.
    """
    together = samples[mechanism, order]
    compute_alone = time_of(samples["", "compute_alone"], compute_time)
    comm_alone = time_of(samples[mechanism, "comm_alone"], comm_time)
    both, compute, comm = (time_of(together, part) for part in (both_time, compute_time, comm_time))
    heads = time_of(together, head_start).per_rank_us
    head_us = 0.0 if order == "together" else sum(heads) / len(heads)
    ratios = overlap(compute_us=compute_alone.us, comm_us=best[1], both_us=both.us, order=order, head_us=head_us)
    late = why_late(
        samples["", "compute_alone"], *(samples[name, "comm_alone"] for name in (best[0], mechanism)), together
    )
    rates = _rates(flops, peak_tflops, (compute_alone.us, compute.us))
    return Row(
        scenario=scenario.name,
        workload=scenario.workload,
        collective=scenario.collective,
        size_bytes=size_bytes,
        ratio=scenario.ratio,
        mechanism=mechanism,
        order=order,
        compute_alone=compute_alone,
        compute_controlled=time_of(samples[mechanism, "compute_alone"], compute_time),
        comm_alone=comm_alone,
        best_comm_alone_us=best[1],
        best_mechanism=best[0],
        serial=time_of(samples[mechanism, "serial"], both_time),
        together=both,
        compute_together=compute,
        comm_together=comm,
        head_start_us=head_us,
        hidden=ratios.hidden,
        ideal_fraction=ratios.ideal_fraction,
        compute_kept=compute_alone.us / compute.us,
        comm_kept=comm_alone.us / comm.us,
        pair_class=pair_class(compute_alone.us, best[1]),
        tflops_alone=rates[0],
        tflops_together=rates[1],
        mfu_alone=rates[2],
        mfu_together=rates[3],
        usage=watched.usage,
        evidence=watched.evidence,
        marked="; ".join(filter(None, (watched.marked, late))) or None,
        device=device,
    )


def _rates(flops: int, peak: float | None, times_us: Sequence[float]) -> tuple[float | None, ...]:
    """TFLOP/s alone and together, then both as parts of the peak."""
    rates = [flops / time / 1e6 for time in times_us]
    return (*rates, *(None if peak is None else rate / peak for rate in rates))
