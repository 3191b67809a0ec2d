"""Compare an observed step with its job's usual steps, and scale predictions for a changed job by the observed step.

One part of a prediction's error is the same for all ways to run a job (`confidence.py`): it comes from the software,
the cluster and the way of timing. One observed step measures that part: other ways to run the same job are predicted by

    step = predicted · observed / predicted of the job as it ran

and their interval is the error of a ratio of two predictions, which is narrower than the interval of one step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.gpus import find_gpu
from counterpoint.plan.compute.roofline import clock_kept
from counterpoint.plan.confidence import job_features, measured_errors
from counterpoint.plan.job.changes import scaled_links
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.parallel import CORE_ONLY
from counterpoint.plan.step.step import PredictedStep, predict_step
from counterpoint.records.prediction import ObservedStep, StepCause, StepInterval

UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6, "min": 60e6}
LEAST = 0.005  # a cause that changes the step by less is left out
DOWNCLOCKED = 0.75  # of the clock under load: a GPU at its limit of power or heat

Change = Callable[[Job], Job]


def read_duration(text: str) -> float:
    """Return the µs of a duration such as 9.2s or 850ms; raise Misconfigured if it is none."""
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*(us|ms|s|min)\s*", text)
    if found is None or float(found[1]) == 0:
        raise Misconfigured(f"--observed {printable(text, 80)}: give a time with its unit, as in 9.2s or 850ms")
    return float(found[1]) * UNITS[found[2]]


class Anchor(NamedTuple):
    """Corrects predictions by the ratio of a job's observed to its predicted step time."""

    job: Job  # as it ran
    observed_us: float
    predicted_us: float

    @classmethod
    def of(cls, job: Job, observed_us: float) -> Anchor:
        """Return the anchor of a job whose step took `observed_us`."""
        return cls(job, observed_us, predict_step(job).step_us)

    def shifted(self, found: PredictedStep) -> PredictedStep:
        """Return a predicted step with all times multiplied by observed / predicted; memory stays."""
        factor = self.observed_us / self.predicted_us
        return replace(
            found,
            step_us=found.step_us * factor,
            parts={name: us * factor for name, us in found.parts.items()},
            comm_us={name: us * factor for name, us in found.comm_us.items()},
            serial_us=found.serial_us * factor,
            ideal_us=found.ideal_us * factor,
            tokens_per_s=found.tokens_per_s / factor,
            model_tflops=found.model_tflops / factor,
            mfu=found.mfu / factor,
            slowest_us=found.slowest_us * factor,
        )

    def interval(self, job: Job, found: PredictedStep, wide: StepInterval) -> StepInterval:
        """Return a shifted step's interval: no width for the observed job, else the error of a predicted ratio.

        `found` is the shifted step of `job`, and `wide` the interval without an observed step.
        """
        ratio = measured_errors().comparisons
        factor = 1.0 if job == self.job else math.exp(3.0) if ratio is None else ratio.factor
        return replace(
            wide, low_us=found.step_us / factor, usual_us=found.step_us, high_us=found.step_us * factor, slowest_us=0.0
        )

    def verdict(self) -> ObservedStep:
        """Return how the observed step compares with the job's usual step, and possible causes, the largest first."""
        likely = measured_errors().likely(job_features(self.job)).errors
        usual_us = self.predicted_us * math.exp(likely.mean)
        slower = self.observed_us > usual_us
        return ObservedStep(
            step_us=self.observed_us,
            predicted_us=self.predicted_us,
            usual_us=usual_us,
            faster_than=1.0 - likely.cdf(math.log(self.observed_us / self.predicted_us)),
            causes=tuple(sorted(self._causes(slower), key=lambda cause: -abs(cause.us))),
        )

    def _causes(self, slower: bool) -> Iterator[StepCause]:
        """Yield the known changes that each make the job's step slower (`slower` false: faster) than predicted."""
        for name, change, tell in SLOWER if slower else FASTER:
            try:
                us = predict_step(change(self.job)).step_us - self.predicted_us
            except Misconfigured:
                continue  # the job cannot be so
            if abs(us) > LEAST * self.predicted_us and (us > 0) == slower:
                yield StepCause(name=name, us=us, tell=tell)


def _training(**fields: object) -> Change:
    return lambda job: replace(job, training=replace(job.training, **fields))


def _parallel(**fields: object) -> Change:
    return lambda job: replace(job, parallel=replace(job.parallel, **fields))


def _mechanism(name: str) -> Change:
    return lambda job: replace(job, mechanism=name, mechanisms={})


def _downclocked(job: Job) -> Job:
    gpu, sheet = job.cluster.gpu, find_gpu(job.cluster.gpu.name)
    if sheet is None or sheet.clock_ghz is None:
        raise Misconfigured("the clock of this GPU is not known")
    clock_ghz = DOWNCLOCKED * clock_kept(gpu, job.profile.efficiency) * sheet.clock_ghz
    return replace(job, cluster=replace(job.cluster, gpu=replace(gpu, clock_ghz=clock_ghz)))


def _uneven(job: Job) -> Job:
    if job.model.experts is None:
        raise Misconfigured("no experts")
    experts = replace(job.model.experts, imbalance=1.5 * job.model.experts.imbalance)
    return replace(job, model=replace(job.model, experts=experts))


NOTHING_AGAIN = {"recompute_modules": CORE_ONLY, "recompute_method": None, "recompute_num_layers": None}
SLOWER: tuple[tuple[str, Change, str], ...] = (
    ("no collective overlaps", _mechanism("serial"), "diagnose: exposed communication"),
    ("half of the network between nodes", lambda job: scaled_links(job, 0.5, network=True), "doctor, measure"),
    ("half of NVLink", lambda job: scaled_links(job, 0.5, network=False), "doctor: links"),
    ("no flash attention", _training(flash_attention=False), "diagnose: compute"),
    ("kernels are not fused", _training(fused_kernels=False), "diagnose: compute"),
    ("everything is recomputed", _training(recompute="full", **NOTHING_AGAIN), "the log of the run"),
    ("GPUs at three quarters of their clock", _downclocked, "doctor: clocks, power, heat"),
    ("one rank is 20 % slower", lambda job: replace(job, ranks=replace(job.ranks, slow=1.2 * job.ranks.slow)),
     "diagnose: stragglers"),
    ("tokens go to few of the experts", _uneven, "diagnose: experts"),
)  # fmt: skip
FASTER: tuple[tuple[str, Change, str], ...] = (
    ("all collectives are hidden", _mechanism("ideal"), "diagnose: exposed communication"),
    ("nothing is recomputed", _training(recompute="none", **NOTHING_AGAIN), "the log of the run"),
    ("only attention is recomputed", _training(recompute="selective", **NOTHING_AGAIN), "the log of the run"),
    ("kernels are fused", _training(fused_kernels=True, fused_norms=True), "diagnose: compute"),
    ("FlashAttention 3", _training(flash_attention=True, flash_version=3), "diagnose: compute"),
    ("collectives of dp overlap", _parallel(overlap_dp=True), "diagnose: exposed communication"),
    ("collectives of tp overlap", _parallel(overlap_tp=True), "diagnose: exposed communication"),
    ("CUDA graphs", _training(cuda_graphs=True), "diagnose: launch-bound"),
)  # fmt: skip
"""Name what may be otherwise than a job says, the change of the job, and what tells it."""
