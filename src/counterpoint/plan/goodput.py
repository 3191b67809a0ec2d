"""Compute days, GPU-hours, cost and goodput of a whole training, with each loss of time listed by itself.

Failures come at random, `mean` apart; training writes a checkpoint after every `interval` of work, waits for it, and
goes on from the last checkpoint `restart` after a failure. With N = T / interval and all times in units of `mean`,
Daly's expectation of the whole ("A higher order estimate of the optimum checkpoint interval", 2006, equation 20),
N · e^restart · (e^(interval + checkpoint) - 1), is in parts

    training      T                                          steps
    checkpoints   N · checkpoint                             of work that was not lost
    lost work     N · (e^(interval + checkpoint) - 1 - interval - checkpoint)
    restarts      N · (e^(interval + checkpoint) - 1) · (e^restart - 1)          with failures during restarts

The interval is given by the job, or is Daly's optimum (equation 37): for short checkpoints, Young's √(2 · checkpoint ·
mean).
"""

from __future__ import annotations

from math import expm1, inf, sqrt

from counterpoint.errors import Misconfigured
from counterpoint.plan.compute.memory import STATE_BYTES
from counterpoint.plan.job.job import Job, Run
from counterpoint.plan.job.parallel import Parallel, deal_layers, part_parameters, whole_stage
from counterpoint.records import Record
from counterpoint.records.prediction import RunLoss, TrainingRun

HOUR, DAY = 3600.0, 86400.0
PARAMETER_BYTES = 2  # in a checkpoint, bf16; besides the optimizer's states
MOST = 1000.0  # times the time of all steps: a longer training counts as endless


class Spent(Record, frozen=True, kw_only=True):
    """Holds the seconds that a whole training takes, by cause."""

    training: float
    checkpoints: float = 0.0
    lost_work: float = 0.0
    restarts: float = 0.0
    failures: float = 0.0  # expected number of failures

    @property
    def total(self) -> float:
        """Return the seconds from the first step to the last checkpoint."""
        return self.training + self.checkpoints + self.lost_work + self.restarts


def spent(training: float, *, mean: float, checkpoint: float, interval: float, restart: float) -> Spent:
    """Return the expected seconds of a training whose steps take `training` s, by cause.

    Failures are `mean` s apart (∞: there are none); training waits `checkpoint` s for a checkpoint after every
    `interval` s of work (∞: none is written, and after a failure training begins anew), and goes on `restart` s after
    a failure.

    Raises:
        Misconfigured: failures are so frequent that the training never ends.
    """
    each = min(interval, training)
    count, written = training / each, 0.0 if interval == inf else checkpoint
    if mean == inf:
        return Spent(training=training, checkpoints=count * written)
    segment, again = (each + written) / mean, restart / mean
    if max(segment, again) > 50 or count * mean * expm1(segment) * (1 + expm1(again)) > MOST * training:
        raise Misconfigured(
            f"run.gpu_mtbf_hours, run.node_mtbf_hours: a failure every {_time(mean)}, {_time(each + written)} from one "
            f"checkpoint to the next and {_time(restart)} to restart: it would never end; give larger ones, or smaller "
            "run.checkpoint_minutes, run.checkpoint_seconds and run.restart_minutes"
        )
    tries = count * mean * expm1(segment)
    restarts = tries * expm1(again)
    return Spent(
        training=training,
        checkpoints=count * written,
        lost_work=tries - count * mean * segment,
        restarts=restarts,
        failures=(tries + restarts) / mean,
    )


def optimal_interval(checkpoint: float, mean: float) -> float:
    """Return Daly's optimal checkpoint interval, in seconds of work; ∞ where nothing fails."""
    if mean == inf:
        return inf
    if checkpoint >= 2 * mean:
        return mean
    part = checkpoint / (2 * mean)
    return sqrt(2 * checkpoint * mean) * (1 + sqrt(part) / 3 + part / 9) - checkpoint


def training_run(job: Job, step_us: float, interval_us: tuple[float, float] | None = None) -> TrainingRun | None:
    """Return days, GPU-hours, cost and goodput of all steps of a job; None where the job does not say how long it is.

    `step_us` is the time of one step, which lies between the ends `interval_us`, if these are known. Raise
    Misconfigured if the training would never end.
    """
    run = job.run
    if run is None:
        return None
    ranks, batch = job.parallel.world_size, job.training.global_batch * job.training.sequence
    steps = run.steps if run.steps is not None else -(-round(run.tokens or 0) // batch)
    nodes = -(-ranks // job.cluster.gpus_per_node)
    rate = (ranks / run.gpu_mtbf_hours if run.gpu_mtbf_hours else 0.0) + (
        nodes / run.node_mtbf_hours if run.node_mtbf_hours else 0.0
    )
    mean = HOUR / rate if rate else inf
    checkpoint, note = _checkpoint_seconds(job, run)
    if run.checkpoint_minutes == "optimal":
        interval = optimal_interval(checkpoint, mean)
    else:
        interval = 60.0 * run.checkpoint_minutes
    interval = max(interval, step_us / 1e6)  # a checkpoint is between two steps

    def whole(us: float) -> Spent:
        return spent(
            steps * us / 1e6, mean=mean, checkpoint=checkpoint, interval=interval, restart=60.0 * run.restart_minutes
        )

    found, ends = whole(step_us), [whole(us).total / DAY for us in interval_us or ()]
    gpu_hours = found.total / HOUR * ranks
    return TrainingRun(
        steps=steps,
        tokens=float(steps) * batch,
        days=found.total / DAY,
        low_days=ends[0] if ends else None,
        high_days=ends[1] if ends else None,
        gpu_hours=gpu_hours,
        cost=None if run.price_per_gpu_hour is None else gpu_hours * run.price_per_gpu_hour,
        goodput=found.training / found.total,
        failures=found.failures,
        failure_hours=None if mean == inf else mean / HOUR,
        checkpoint_seconds=checkpoint,
        checkpoint_minutes=None if interval == inf else interval / 60.0,
        losses=(
            RunLoss(name="checkpoints", days=found.checkpoints / DAY, means=f"training waits: {note}"),
            RunLoss(name="lost work", days=found.lost_work / DAY, means="since the last checkpoint, done again"),
            RunLoss(name="restarts", days=found.restarts / DAY, means="from a failure until training goes on"),
        ),
    )


def _checkpoint_seconds(job: Job, run: Run) -> tuple[float, str]:
    """Return the seconds that training waits for a checkpoint, and the source of that number."""
    if run.checkpoint_seconds is not None:
        return run.checkpoint_seconds, f"{run.checkpoint_seconds:g} s each"
    size = run.checkpoint_gb
    if size is None:
        alone = Parallel()
        (stage,) = deal_layers(job.model, alone)
        parameters = part_parameters(job.model, alone, whole_stage(stage)).total
        size = parameters * (PARAMETER_BYTES + STATE_BYTES[job.training.optimizer]) / 1e9
    seconds = size / run.storage_gb_per_s
    return seconds, f"{size:,.0f} GB each at {run.storage_gb_per_s:g} GB/s, {seconds:.3g} s"


def _time(seconds: float) -> str:
    for unit, size in (("days", DAY), ("h", HOUR), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
