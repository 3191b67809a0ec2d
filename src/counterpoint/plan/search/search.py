"""Find the fastest ways to divide a job by best-first search, with proved lower bounds of the step time.

    division        tp, cp, pp, dp, ep, micro-batch         `least_division_us`: no bubble, recomputation, shards
    pipeline        with schedule, parts, layers            `least_stages_us`, `least_of_balanced_us`: with a bubble
    recomputation   with what backward computes again       the same
    way             with zero and shards                    `least_step_us`, if it fits in memory: all but the pipeline
    answer          the same way                            `predict_step`

The open node with the least lower bound is expanded: a division becomes its pipelines, and so on.
An answer that comes up is next in the result: all other nodes take longer, or as long with no less memory.
So a way is left out only if it does not fit, is impossible, or its bound is above the last answer: nothing is guessed.
Of the ways that differ in recomputation only, the fastest that fits is listed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import outcome
from counterpoint.plan.compute.memory import least_gib, least_totals, stage_totals
from counterpoint.plan.compute.roofline import GpuRates
from counterpoint.plan.confidence import measured_errors, too_close
from counterpoint.plan.job.cluster import ClusterGpu
from counterpoint.plan.job.job import Job, with_gpus
from counterpoint.plan.job.parallel import CORE_ONLY, deal_layers
from counterpoint.plan.network.estimate import CollectiveTimes, MeshTimes
from counterpoint.plan.network.network import network_of
from counterpoint.plan.observed import Anchor
from counterpoint.plan.search.rank import check_objective, ranked
from counterpoint.plan.search.space import (
    AXES,
    Division,
    Fixed,
    Pipeline,
    Recomputation,
    Sharding,
    balanced_job,
    check_fixed,
    divided,
    divisions,
    least_of_balanced_us,
    piped,
    pipelines,
    recomputations,
    recomputing,
    sharded,
    shardings,
)
from counterpoint.plan.step.layer_time import LayerTimes, end_us, layer_times
from counterpoint.plan.step.step import (
    PredictedStep,
    least_division_us,
    least_stages_us,
    least_step_us,
    predict_step,
)
from counterpoint.records.prediction import PlanOutcome, SearchResult

ADVICE = "give more GPUs, a smaller micro_batch or GPUs with more memory"
UNDIVIDED: dict[str, Any] = {
    **dict.fromkeys(("dp", "tp", "cp", "pp", "ep", "virtual"), 1),
    "shard": None,
    "stage_layers": None,
    "ends_count": False,
    "pieces_tp": False,
}
ROUNDING = 1 - 1e-9  # a bound and a step add up the same times in different orders


class _Node(NamedTuple):
    """Describes all ways to divide a job with equal values of the first `decided` fields, counted from `division`."""

    job: Job
    decided: int
    division: Division
    pipeline: Pipeline = Pipeline("1f1b", 1, "equal")
    again: Recomputation = Recomputation()
    sharding: Sharding = Sharding(0, None)
    step: PredictedStep | None = None  # predicted when only one way is left

    @property
    def family(self) -> tuple[object, ...]:
        """Return all settings of a way except its recomputation; of each family only the fastest way is listed."""
        return self.division, self.pipeline, self.sharding


Progress: TypeAlias = Callable[[int, int, float | None], None]
"""Called with the number of finished divisions, the number of all divisions, and the fastest step's µs so far."""


def search(
    job: Job, *, best: int = 10, fixed: Mapping[str, tuple[Any, ...]] | None = None, gpus: int | None = None,
    progress: Progress | None = None, anchor: Anchor | None = None, min_fits: float | None = None,
) -> SearchResult:  # fmt: skip
    """Return the `best` fastest ways to divide a job's model and batch on GPUs of the job's kind.

    `fixed` has values of axes, by field or its last word: only these are tried; what is no axis stays as it is. `gpus`
    None: the job's ranks, or the whole cluster for a job that is not divided at all. All times are shifted by
    `anchor`, the job's observed step. Ways that fit in memory with a probability below `min_fits` are left out; None:
    those predicted not to fit.

    Raises:
        Misconfigured: no way fits in memory, or a fixed value is not allowed.
    """
    if best < 1:
        raise Misconfigured(f"{best} ways: give 1 or more")
    if min_fits is not None and not 0.0 < min_fits < 1.0:
        raise Misconfigured(f"--min-fits {min_fits:g}: give a probability above 0 and below 1, as 0.9")
    ranks = job.parallel.world_size
    gpus = gpus or (ranks if ranks > 1 else job.cluster.num_gpus)
    return _Search(job, gpus, check_fixed(fixed or {}), best, progress, anchor, min_fits).result()


def search_each(
    job: Job, counts: Sequence[int | None], *, best: int = 10, fixed: Mapping[str, tuple[Any, ...]] | None = None,
    progress: Progress | None = None, anchor: Anchor | None = None, min_fits: float | None = None,
    objective: str = "step",
) -> tuple[SearchResult, ...]:  # fmt: skip
    """Return `search`'s result for each number of GPUs; where no way fits, the result holds only the reason.

    The results are ranked by `objective`: "step", "cost" or "goodput". For all other arguments see `search`.

    Raises:
        Misconfigured: no number of GPUs has a result, for the reason of the first; the objective has no effect.
    """
    by = check_objective(objective, job, counts)
    found = []
    for gpus in counts:
        try:
            found.append(
                search(job, best=best, fixed=fixed, gpus=gpus, progress=progress, anchor=anchor, min_fits=min_fits)
            )
        except Misconfigured as error:
            found.append(SearchResult(gpus=gpus or 0, why_not=str(error)))
    if not any(each.choices for each in found):
        raise Misconfigured(found[0].why_not or "")
    return ranked(found, by)


def chosen_job(job: Job, result: SearchResult) -> Job:
    """Return the job with the settings of the fastest choice, on that choice's number of GPUs."""
    tables: dict[str, dict[str, Any]] = {"parallel": {}, "training": {}}
    for field, value in result.choices[0].settings.items():
        table, _, name = field.partition(".")
        tables[table][name] = value
    tables["training"]["recompute_modules"] = tables["training"]["recompute_modules"] or CORE_ONLY
    parallel, training = replace(job.parallel, **tables["parallel"]), replace(job.training, **tables["training"])
    return replace(job, parallel=parallel, training=training, cluster=_on_gpus(job, result.gpus).cluster)


def _on_gpus(job: Job, gpus: int) -> Job:
    """Return the job without any parallel division, on a cluster of `gpus` GPUs."""
    alone = replace(job.parallel, **UNDIVIDED)
    if gpus == job.cluster.num_gpus or gpus == job.parallel.world_size:
        return replace(job, parallel=alone)
    return replace(job, parallel=alone, cluster=with_gpus(job.cluster, gpus))


class _Search:
    """Holds the open nodes of one best-first search, the ways found, and counts of ways considered."""

    def __init__(
        self, job: Job, gpus: int, fixed: Fixed, best: int, progress: Progress | None, anchor: Anchor | None,
        min_fits: float | None,
    ) -> None:  # fmt: skip
        self.gpu = job.cluster.gpu
        if min_fits is not None:  # a smaller memory: ways that are predicted to fit in it fit with this probability
            job = _of_gpu(
                job, replace(self.gpu, memory_gib=measured_errors().most_predicted_gib(self.gpu.memory_gib, min_fits))
            )
        self.pieces_tp, self.job = job.parallel.pieces_tp, _on_gpus(job, gpus)
        self.gpus, self.fixed, self.best, self.progress, self.anchor = gpus, fixed, best, progress, anchor
        self.rates = GpuRates.of(job.cluster.gpu, job.training.precision)
        self.prices = CollectiveTimes(network_of(self.job.cluster))
        self.again = recomputations(job, fixed)
        self.layers: dict[object, LayerTimes] = {}
        self.open: list[tuple[float, float, int, _Node]] = []
        self.order = count()
        self.considered = self.priced = self.too_large = self.impossible = 0
        self.smallest = float("inf")
        self.fastest: float | None = None
        self.choices: list[PlanOutcome] = []
        self.families: set[tuple[object, ...]] = set()
        self.fastest_us: float | None = None  # of the first choice

    def result(self) -> SearchResult:
        """Return the fastest ways to divide the job; raise Misconfigured if no way fits in memory."""
        self._begin()
        complete = True
        try:
            self._find()
        except KeyboardInterrupt:  # what was predicted so far may not be the fastest, but is better than nothing
            complete = False
            for *_, node in sorted(self.open):
                self._list(node)
            if not self.choices:
                raise
        if not self.choices:
            if self.smallest == float("inf"):
                raise Misconfigured(
                    f"no way to divide the job over {self.gpus:,} GPUs: give a batch, GPUs or fixed values that divide "
                    "one another"
                )
            gib = f"at least {self.smallest:.1f} of {self.job.cluster.gpu.memory_gib:g} GiB"
            ways = f"none of {self.considered:,} ways to divide the job over {self.gpus:,} GPUs fits"
            raise Misconfigured(f"{ways}: the smallest takes {gib}; {ADVICE}")
        return SearchResult(
            gpus=self.gpus, considered=self.considered, priced=self.priced, too_large=self.too_large,
            impossible=self.impossible, complete=complete, choices=tuple(self.choices),
        )  # fmt: skip

    def _find(self) -> None:
        """Expand the open node with the least lower bound until the `best` fastest ways are listed."""
        total, done = len(self.open), 0
        opened = (self._open_division, self._open_pipeline, self._open_recomputation, self._answer)
        while self.open and len(self.choices) < self.best:
            *_, node = heapq.heappop(self.open)
            if node.decided == len(opened) and node.family in self.families:
                continue  # the same way with another recomputation was faster
            if node.step is not None:
                self._list(node)
            else:
                done += node.decided == 1
                opened[node.decided - 1](node)
            if self.progress is not None:
                self.progress(done, total, self.fastest)

    def _list(self, node: _Node) -> None:
        """Add a predicted way to `choices`, unless they have `best` ways or this way with another recomputation."""
        if node.step is not None and node.family not in self.families and len(self.choices) < self.best:
            self.families.add(node.family)
            self.fastest_us = self.fastest_us or node.step.step_us
            self.choices.append(self._choice(node.job, node.step))

    def _push(self, least_us: float, node: _Node) -> None:
        key = (least_us * ROUNDING, 0.0) if node.step is None else (least_us, node.step.memory.total_gib)
        heapq.heappush(self.open, (*key, next(self.order), node))

    def _begin(self) -> None:
        for division in divisions(self.job, self.gpus, self.fixed):
            self.considered += (ways := self._ways(division))
            try:
                job = divided(self.job, division, pieces_tp=self.pieces_tp)
                least = least_gib(job)
                if least > job.cluster.gpu.memory_gib:
                    self.too_large, self.smallest = self.too_large + ways, min(self.smallest, least)
                    continue
                self._push(self._least(job, least_division_us), _Node(job, 1, division))
            except Misconfigured:
                self.impossible += ways

    def _ways(self, division: Division) -> int:
        """Return the number of ways to divide the job that have this division, at least 1."""
        found = sum(1 for _ in pipelines(self.job, division, self.fixed))
        return max(found * sum(1 for _ in shardings(self.job, division, self.fixed)) * len(self.again), 1)

    def _least(self, job: Job, least: Callable[[Job, GpuRates, MeshTimes, LayerTimes], float]) -> float:
        """Return a lower bound of the step µs over all shardings; zero 3 may spare kernels that add up gradients."""
        mesh = MeshTimes(self.prices, job.parallel)
        layers = self._layer_times(job, mesh)
        if not job.training.fused_accumulation:
            layers = min(
                layers, self._layer_times(sharded(job, Sharding(3, None)), mesh), key=lambda x: x.mean_us(job.model)
            )
        return least(job, self.rates, mesh, layers)

    def _layer_times(self, job: Job, mesh: MeshTimes) -> LayerTimes:
        """Return a job's layer times, cached for all pipelines, numbers of shards and zero stages below 3."""
        parallel = replace(
            job.parallel, pp=1, virtual=1, schedule="1f1b", ends_count=False, stage_layers=None, shard=None,
            zero=3 if job.parallel.zero == 3 else 0,
        )  # fmt: skip
        key = (parallel, job.training)
        if key not in self.layers:
            self.layers[key] = layer_times(job, self.rates, mesh)
        return self.layers[key]

    def _open_division(self, node: _Node) -> None:
        for pipeline in pipelines(self.job, node.division, self.fixed):
            try:
                job = piped(node.job, pipeline)
                self._push(self._least_of_stages(job, pipeline), _Node(job, 2, node.division, pipeline))
            except Misconfigured:
                self.impossible += len(self.again) * sum(1 for _ in shardings(self.job, node.division, self.fixed))

    def _open_pipeline(self, node: _Node) -> None:
        for again in self.again:
            job = node.job if again.num_layers == 0 else recomputing(node.job, again)
            self._push(self._least_of_stages(job, node.pipeline), node._replace(job=job, decided=3, again=again))

    def _least_of_stages(self, job: Job, pipeline: Pipeline) -> float:
        return self._least(job, least_of_balanced_us if pipeline.layers == "balanced" else least_stages_us)

    def _open_recomputation(self, node: _Node) -> None:
        found = list(shardings(self.job, node.division, self.fixed))
        alike = node.job.model.expert_layers in (0, node.job.model.layers)  # else fewer layers may take more memory
        monotone = alike or node.pipeline.layers != "balanced"
        if monotone and self._that_fits(node.job, node, least_totals) is None:  # however it is sharded
            self.too_large += len(found)
            return
        for sharding in found:
            try:
                job = self._that_fits(sharded(node.job, sharding), node, stage_totals)
                if job is None:
                    self.too_large += 1
                else:
                    mesh = MeshTimes(self.prices, job.parallel)
                    least_us = least_step_us(job, self.rates, mesh, self._layer_times(job, mesh))
                    self._push(least_us, node._replace(job=job, decided=4, sharding=sharding))
            except Misconfigured:
                self.impossible += 1

    def _that_fits(self, job: Job, node: _Node, totals: Callable[[Job], list[float]]) -> Job | None:
        """Return the job with layers dealt to stages, as few recomputed as memory allows; None if no job would fit."""
        if node.again.num_layers != 0:
            return self._dealt(job, node.pipeline, totals)
        parts = [part.layers for stage in deal_layers(job.model, job.parallel) for part in stage]
        found, fewest, most = None, 1, job.model.layers if node.pipeline.layers == "balanced" else max(parts)
        while fewest <= most:
            middle = (fewest + most) // 2
            again = node.again._replace(num_layers=middle)
            tried = self._dealt(recomputing(job, again), node.pipeline, totals)
            if tried is None:
                fewest = middle + 1
            else:
                found, most = tried, middle - 1
        return found

    def _dealt(self, job: Job, pipeline: Pipeline, totals: Callable[[Job], list[float]]) -> Job | None:
        if pipeline.layers != "balanced":
            largest = max(totals(job))
            self.smallest = min(self.smallest, largest)
            return job if largest <= job.cluster.gpu.memory_gib else None
        mesh = MeshTimes(self.prices, job.parallel)
        layers = self._layer_times(job, mesh)
        ends_us = end_us(job, self.rates, layers)
        found = balanced_job(job, layers.mean_us(job.model), ends_us, totals)
        if found is not None and len(set(found.parallel.stage_layers or ())) == 1 and totals is stage_totals:
            return None  # equal stages are listed as a separate way
        return found

    def _answer(self, node: _Node) -> None:
        try:
            step = predict_step(node.job, prices=self.prices, rates=self.rates)
        except Misconfigured:
            self.impossible += 1
            return
        self.priced += 1
        self.fastest = min(self.fastest or step.step_us, step.step_us)
        self._push(step.step_us, node._replace(step=step))

    def _choice(self, job: Job, step: PredictedStep) -> PlanOutcome:
        """Return a way's main figures with the GPU's full memory, even if `min_fits` made the search assume less."""
        if job.cluster.gpu != self.gpu:
            job = _of_gpu(job, self.gpu)
            step = predict_step(job, prices=self.prices, rates=self.rates)
        settings = {field: getattr(getattr(job, field.split(".")[0]), name) for name, field in AXES.items()}
        settings |= {"parallel.ends_count": job.parallel.ends_count, "parallel.pieces_tp": job.parallel.pieces_tp}
        if job.training.recompute != "selective":
            settings["training.recompute_modules"] = None
        close = bool(self.choices) and too_close(step.step_us, self.fastest_us or 0.0)
        return outcome(job, step, self.anchor, settings=settings, too_close=close)


def _of_gpu(job: Job, gpu: ClusterGpu) -> Job:
    return replace(job, cluster=replace(job.cluster, gpu=gpu))
