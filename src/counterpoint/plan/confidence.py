"""Say how sure a prediction is: the step's interval, whether similar steps were measured, P(fits in memory).

A row is a published or measured step with its features and its error, ln(measured / predicted). Rows to which a
constant was fitted are left out. `benchmarks/plan_published.py --calibrate` writes them to `measured_steps.json`.

    error of a step = middle + effect of its source + the rest

source      who measured: software, cluster and way of timing are shared by its rows, so their errors are alike. The
            effect of an unmeasured source is a random draw from the effects of measured sources
alike       a row counts exp(-sum of LOST over the features that differ from the job's); a source counts as its most
            similar row does, times n / (n + HALF) of its n similar rows, so that none drowns the others
middle      the mean of the sources' medians, and of an assumed source of error 0 with the weight PRIOR
deviation   between sources: of their medians; within: the median absolute deviation in a source. The assumed source
            has BETWEEN and WITHIN, so that the interval is wide where few sources are alike
interval    middle ± deviation at LEVEL of Student's t with as many degrees of freedom as sources count: symmetric in
            the logarithm, so old slow runs do not make it one-sided. The predicted time is always within
seen        of the rows, by the same weights, the fraction that lay in the interval of the other sources' rows
widened     the upper end gets the time that the job's slowest rank is expected to add, times the share of rows with
            other numbers of ranks
ratio       two ways to run a model on as many GPUs: |difference of their errors|, the conformal quantile over pairs of
            rows of one series. What two predictions share cancels, so this is narrower than an interval
memory      P(ln(needed / predicted) <= ln(available / predicted)), normal; its mean and deviation explain best which
            published configurations ran and which had too little (probit regression); without any, MEMORY_SPREAD

LOST, HALF, PRIOR, BETWEEN and WITHIN were chosen by the pinball loss of both ends, with whole sources left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import GPUS
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.parallel import Training
from counterpoint.plan.step.step import PredictedStep
from counterpoint.records import Record
from counterpoint.records.prediction import RatioError, StepInterval

LEVEL = 0.8  # probability of an interval: P10 to P90
MOST_OF_SOURCE = 8.0  # most weight of one source in the error of ratios, in rows
LIKE_IT = 3  # rows alike in all features that "validated" needs
LEAST_SEEN = 0.7  # least fraction of similar rows in the other sources' intervals that "validated" needs
MEMORY_SPREAD = 0.15  # assumed standard deviation of ln(needed / predicted GiB)
FILE = Path(__file__).with_name("measured_steps.json")
RANKS = (1, 8, 64, 512, 4096)  # upper end of each range of ranks, and of tokens
TOKENS = (1024, 4096, 16384, 65536)
SIXTEEN_BIT = ("bf16", "fp16")

FEATURES = (
    "GPU", "generation", "ranks", "network", "tokens", "precision", "recomputation", "sharding", "experts", "axes",
    "kernels", "collectives", "other", "software", "year",
)  # fmt: skip
LOST: Mapping[str, float] = {  # a row whose feature differs counts exp(-this) as much
    "GPU": 0.3, "generation": 1.5, "network": 0.3, "precision": 0.5, "sharding": 0.5, "experts": 1.0, "kernels": 0.5,
    "other": 0.5, "software": 0.3,
}  # fmt: skip
YEAR_LOST = 0.1  # as in LOST, for each year of difference
HALF = 2.0  # number of similar rows with which a source counts half
MOST_EFFECT = 0.3  # largest effect of a source: larger ones are cut to this
PRIOR, BETWEEN, WITHIN = 0.3, 0.15, 0.08  # of a source of error 0: its weight, and both deviations
UNKNOWN = "unknown"  # software and year that a job does not name; they count as alike
GENERATIONS = {"A": "Ampere", "H": "Hopper", "B": "Blackwell", "L": "Ada", "M": "CDNA"}  # by a GPU's first letter

Text = Annotated[str, Meta(min_length=1, max_length=200)]
Error = Annotated[float, Meta(ge=-3, le=3)]


class CalibrationRow(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds one measured step that no constant of the model was fitted to."""

    source: Text  # who measured; errors common to all rows of a source do not show in its spread
    name: Text  # of the row in its source
    series: Text  # rows of one series run one model on the same number of GPUs in different ways
    error: Error  # ln(measured / predicted) of the step's time
    slowest: Annotated[float, Meta(ge=0, le=1)] = 0.0  # delay by the slowest rank, as a fraction of the step
    seen: bool = False  # whether it lies in the interval of the other sources' rows
    features: Mapping[str, str]  # as `job_features` has them


class MemoryNeed(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the normal distribution of ln(needed / predicted) memory, and the data that it was fitted to."""

    mean: Error
    deviation: Annotated[float, Meta(gt=0, le=3)]
    rows: int
    sources: tuple[Text, ...]


class _File(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the content of the data file; many steps have equal features, so a step has an index of `features`."""

    written_by: str
    features: tuple[dict[Text, Text], ...]
    steps: tuple[dict[str, Any], ...]
    memory: MemoryNeed | None


def job_features(job: Job) -> dict[str, str]:
    """Return a job's features by name (`FEATURES`), as text; they decide which measured steps are similar to it."""
    parallel, training = job.parallel, job.training
    return {
        "GPU": job.cluster.gpu.name,
        "generation": GENERATIONS.get(job.cluster.gpu.name.removeprefix("G")[:1], "other"),
        "ranks": _band(parallel.world_size, RANKS),
        "network": "between nodes" if parallel.world_size > job.cluster.gpus_per_node else "inside a node",
        "tokens": _band(-(-training.micro_batch * training.sequence // parallel.cp), TOKENS),
        "precision": "16 bit" if training.precision in SIXTEEN_BIT else training.precision,
        "recomputation": training.recompute,
        "sharding": "parameters" if parallel.zero == 3 else "no parameters",
        "experts": "experts" if job.model.experts is not None else "dense",
        "axes": ", ".join(axis for axis in ("tp", "pp", "cp", "ep") if getattr(parallel, axis) > 1) or "dp only",
        "kernels": _kernels(training),
        "collectives": _collectives(job),
        "other": _unusual(job),
        "software": job.software.name.casefold(),
        "year": str(job.software.year or UNKNOWN),
    }


def _kernels(training: Training) -> str:
    flash = f"FlashAttention {training.flash_version}" if training.flash_attention else "without flash attention"
    more = {
        "norms of operators": not training.fused_norms,
        "CUDA graphs": training.cuda_graphs,
        f"{training.fp8_scaling} scaling": training.precision == "fp8",
        "fp8 attention": training.precision == "fp8" and training.fp8_attention,
    }
    return " with ".join(["fused" if training.fused_kernels else "eager", ", ".join([flash, *_true(more)])])


def _collectives(job: Job) -> str:
    axes = [f"{axis} by {mechanism}" for axis, mechanism in sorted(job.mechanisms.items())]
    waiting = [f"{axis} not overlapped" for axis in ("tp", "dp", "pp") if not getattr(job.parallel, f"overlap_{axis}")]
    more = {
        "tp in pieces": job.parallel.pieces_tp,
        f"experts by {job.parallel.expert_exchange}": job.parallel.ep > 1
        and job.parallel.expert_exchange != "all_to_all",
        "experts of two halves": job.parallel.ep > 1 and job.parallel.overlap_ep in (True, "halves"),
        "experts beside a micro-batch": job.parallel.ep > 1 and job.parallel.overlap_ep == "micro_batches",
    }
    return ", ".join([job.mechanism, *axes, *_true(more), *waiting])


def _unusual(job: Job) -> str:
    """Return as text a job's rare properties (compressed gradients, locked clocks, ...), or "nothing"."""
    model, training, gpu = job.model, job.training, job.cluster.gpu
    sheet = GPUS.get(gpu.name, gpu)
    found = {
        "compressed gradients": job.compression is not None,
        f"local_steps = {training.local_steps}": training.local_steps > 1,
        "asynchronous replicas": training.asynchronous,
        "offloading": bool(training.offload_optimizer or training.offload_activations),
        "a slow rank": job.ranks.slow > 1,
        "jitter": bool(job.ranks.jitter),
        "locked clocks": gpu.clock_ghz is not None,
        "a power limit": gpu.power_watts is not None,
        "a profile of one's own": bool(gpu.machine),
        "other figures of the GPU": (gpu.tflops, gpu.memory_gb_per_s) != (sheet.tflops, sheet.memory_gb_per_s),
        "latent attention": model.mla is not None,
        "a window of attention": model.window is not None,
        "multi-token prediction": model.mtp > 0,
    }
    return ", ".join(_true(found)) or "nothing"


def _true(said: Mapping[str, bool]) -> list[str]:
    return [name for name, so in said.items() if so]


def _band(value: int, last: Sequence[int]) -> str:
    """Return as text the range that contains `value`, such as "9 to 64"; `last` has the last number of each range."""
    low = 1
    for high in last:
        if value <= high:
            return f"{low:,} to {high:,}" if low < high else f"{high:,}"
        low = high + 1
    return f"{low:,} and more"


def source_weights(sources: Sequence[str]) -> np.ndarray:
    """Return a weight of at most 1 per row, so that each source's rows weigh at most `MOST_OF_SOURCE` together."""
    count = Counter(sources)
    return np.array([min(1.0, MOST_OF_SOURCE / count[source]) for source in sources])


def conformal_quantile(errors: np.ndarray, weights: np.ndarray, level: float) -> float:
    """Return the smallest error up to which the fraction `level` of all weight lies; infinite with too few rows.

    The total weight includes 1 for the predicted step, whose error may be larger than every row's error.
    """
    order = np.argsort(errors, kind="stable")
    reached = np.cumsum(weights[order])
    needed = level * (float(weights.sum()) + 1.0) * (1.0 - 1e-12)  # the factor allows for rounded sums
    index = int(np.searchsorted(reached, needed))
    return float(errors[order[index]]) if index < len(order) else math.inf


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the smallest value up to which half of all weight lies."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order[int(np.searchsorted(reached, reached[-1] / 2))]])


def student_factor(freedom: float) -> float:
    """Return the quotient of Student's t and normal quantiles at both ends of LEVEL (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    return 1 + (z**2 + 1) / (4 * freedom) + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)


class Likely(NamedTuple):
    """Describes the likely distribution of ln(measured / predicted) for a job of a source without measured rows."""

    errors: NormalDist  # with the quantiles of Student's t at both ends of an interval of LEVEL
    seen: float  # fraction of similar rows that lay in the interval of the other sources' rows
    same_ranks: float  # share of the weight of rows with about as many ranks
    sources: Mapping[str, tuple[float, float]]  # weight and median error, the largest weight first

    @property
    def ends(self) -> tuple[float, float, float]:
        """Return the interval of the error at LEVEL: its lower end, middle and upper end."""
        return self.errors.inv_cdf((1 - LEVEL) / 2), self.errors.mean, self.errors.inv_cdf((1 + LEVEL) / 2)


class MeasuredErrors:
    """Holds measured rows, with errors and features as arrays; `measured_errors` has the rows that are shipped."""

    def __init__(self, rows: Sequence[CalibrationRow], memory: MemoryNeed | None = None) -> None:
        self.rows, self.memory = tuple(rows), memory
        self._errors = np.array([row.error for row in rows])
        self._seen = np.array([row.seen for row in rows], dtype=float)
        self._values = {name: np.array([row.features[name] for row in rows]) for name in FEATURES}
        self._of_source: dict[str, list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            self._of_source[row.source].append(place)
        self._likely: dict[tuple[str, ...], Likely] = {}

    def likely(self, features: Mapping[str, str]) -> Likely:
        """Return the distribution of a job's error by its features; raise Misconfigured with fewer than two sources."""
        key = tuple(features[name] for name in FEATURES)
        if key not in self._likely:
            self._likely[key] = self._find_likely(features)
        return self._likely[key]

    def _find_likely(self, features: Mapping[str, str]) -> Likely:
        if len(self._of_source) < 2:
            raise Misconfigured(f"{len(self.rows)} measured steps bound no interval: give more, of two sources or more")
        alike = np.exp(-self._lost(features))
        same_ranks = self._values["ranks"] == features["ranks"]
        table = []
        for places in self._of_source.values():
            weights, errors = alike[places], self._errors[places]
            middle = weighted_median(errors, weights)
            count = weights.sum() ** 2 / (weights**2).sum()
            within = weighted_median(np.abs(errors - middle), weights) / NormalDist().inv_cdf(0.75)
            seen, same = (float(weights @ each[places] / weights.sum()) for each in (self._seen, same_ranks))
            table.append((weights.max() * count / (count + HALF), middle, within, seen, same))
        weights, middles, within, seen, same = np.array(table).T
        total = weights.sum() + PRIOR
        middles = np.clip(middles, -MOST_EFFECT, MOST_EFFECT)
        middle = weights @ middles / total
        between = (weights @ (middles - middle) ** 2 + PRIOR * BETWEEN**2) / total
        inside = (weights @ within**2 + PRIOR * WITHIN**2) / total
        spread = math.sqrt(between * (1.0 + 1.0 / total) + inside)
        order = sorted(zip(self._of_source, weights.tolist(), middles.tolist(), strict=True), key=lambda each: -each[1])
        return Likely(
            errors=NormalDist(float(middle), spread * student_factor(float(total))),
            seen=float(weights @ seen / weights.sum()),
            same_ranks=float(weights @ same / weights.sum()),
            sources={name: (weight, error) for name, weight, error in order},
        )

    def _lost(self, features: Mapping[str, str]) -> np.ndarray:
        """Return each row's dissimilarity d to the given features; the row's weight is exp(-d)."""
        lost = np.zeros(len(self.rows))
        for name, each in LOST.items():
            if features[name] != UNKNOWN:
                lost += each * ((self._values[name] != features[name]) & (self._values[name] != UNKNOWN))
        if features["year"] != UNKNOWN:
            years = np.array([int(features["year"] if year == UNKNOWN else year) for year in self._values["year"]])
            lost += YEAR_LOST * np.abs(years - int(features["year"]))
        return lost

    def interval(self, features: Mapping[str, str], step_us: float, slowest_us: float = 0.0) -> StepInterval:
        """Return the interval around a predicted step time of a job with these features.

        `slowest_us` is what the step's slowest rank is expected to add; it counts by the share of rows with other
        ranks.
        """
        found = self.likely(features)
        low, middle, high = found.ends
        wider = (1.0 - found.same_ranks) * slowest_us
        return StepInterval(
            level=LEVEL, seen=found.seen, low_us=step_us * math.exp(min(low, 0.0)), usual_us=step_us * math.exp(middle),
            high_us=step_us * math.exp(max(high, 0.0)) + wider, rows=len(self.rows), sources=tuple(found.sources),
            alike=sum(weight for weight, _ in found.sources.values()), slowest_us=wider,
        )  # fmt: skip

    def validated(self, features: Mapping[str, str]) -> str:
        """Return a line: "validated" and the error of rows with equal features, or "not validated" and why not."""
        found = self.likely(features)
        unlike = {  # of software and year that are not named, nobody can say that they differ
            name: self._values[name] != features[name] for name in FEATURES if features[name] != UNKNOWN
        }
        count = np.sum([*unlike.values()], axis=0) + len(FEATURES) * unlike["GPU"]
        place = int(np.argmin(count))
        closest = self.rows[place]
        rows = [row for row, each in zip(self.rows, count, strict=True) if each == 0] or [
            row for row in self.rows if row.features == closest.features
        ]
        off = [abs(math.expm1(-row.error)) for row in rows]
        error = f"mean {fmean(off):.1%}, worst {max(off):.1%}"
        names = ", ".join(dict.fromkeys(row.source for row in rows))
        measured = f"{len(rows)} measured step{'' if len(rows) == 1 else 's'} of {names}"
        differs = [f"{name}: {features[name]}, not {closest.features[name]}" for name in unlike if unlike[name][place]]
        if differs:
            return f"not validated: {'; '.join(differs)}; closest: {measured}: {error}"
        if len(rows) < LIKE_IT:
            return f"not validated: only {measured} like it: {error}"
        if found.seen < LEAST_SEEN:
            return (
                f"not validated: of unseen sources {found.seen:.0%} lay in their intervals; {measured} like it: {error}"
            )
        return f"validated: {error} on {measured}, alike in all {len(unlike)} features"

    @cached_property
    def comparisons(self) -> RatioError | None:
        """Return the error of a predicted ratio of two steps of one series; None if pairs of steps are too few."""
        groups: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row in self.rows:
            groups[row.source, row.series].append(row.error)
        pairs = [
            (abs(one - other), source) for (source, _), found in groups.items() for one, other in combinations(found, 2)
        ]
        if not pairs:
            return None
        sources = [source for _, source in pairs]
        off = conformal_quantile(np.array([off for off, _ in pairs]), source_weights(sources), LEVEL)
        if not math.isfinite(off):
            return None
        return RatioError(level=LEVEL, factor=math.exp(off), pairs=len(pairs), sources=len(set(sources)))

    def fits(self, predicted_gib: float, available_gib: float) -> float:
        """Return the probability that a job with this predicted memory fits into the available memory."""
        return self._need.cdf(math.log(available_gib / predicted_gib))

    def most_predicted_gib(self, available_gib: float, probability: float) -> float:
        """Return the largest predicted memory that fits into the available memory with this probability."""
        return available_gib * math.exp(-self._need.inv_cdf(probability))

    @property
    def _need(self) -> NormalDist:
        """Return the distribution of ln(needed / predicted) memory."""
        need = self.memory
        return NormalDist(0.0, MEMORY_SPREAD) if need is None else NormalDist(need.mean, need.deviation)

    @property
    def memory_source(self) -> str:
        """Return as text the data on which the probability of `fits` is based."""
        if self.memory is None:
            return f"a predicted memory {MEMORY_SPREAD:.0%} off (1 deviation), assumed"
        need, more = self.memory, math.expm1(self.memory.mean)
        return (
            f"{need.rows} configurations of {', '.join(need.sources)} that ran or had too little: they needed "
            f"{abs(more):.0%} {'less' if more < 0 else 'more'} than predicted, with a deviation of {need.deviation:.0%}"
        )


def read_rows(path: Path) -> MeasuredErrors:
    """Return the measured rows in a file that `benchmarks/plan_published.py --calibrate` has written."""
    found = msgspec.json.decode(path.read_bytes(), type=_File)
    rows = [step | {"features": found.features[step["features"]]} for step in found.steps]
    return MeasuredErrors(msgspec.convert(rows, tuple[CalibrationRow, ...]), found.memory)


@cache
def measured_errors() -> MeasuredErrors:
    """Return the measured rows that the package ships."""
    return read_rows(FILE)


def step_interval(job: Job, found: PredictedStep) -> StepInterval:
    """Return the interval of a predicted step's time, from errors of the measured steps that the package ships."""
    return measured_errors().interval(job_features(job), found.step_us, found.slowest_us)


def fits_in_memory(found: PredictedStep) -> float:
    """Return the probability that the job of a predicted step fits in memory."""
    return measured_errors().fits(found.memory.total_gib, found.memory.available_gib)


def too_close(step_us: float, fastest_us: float) -> bool:
    """Return whether `step_us` exceeds `fastest_us`, but by no more than the error of a predicted ratio."""
    known = measured_errors().comparisons
    return known is not None and fastest_us < step_us <= fastest_us * known.factor
