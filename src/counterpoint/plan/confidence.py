"""Say how sure a prediction is: the step's interval, whether similar steps were measured, P(fits in memory).

A row is a published or measured step with its features and its error, ln(measured / predicted). Rows to which a
constant was fitted are left out. `benchmarks/plan_published.py --calibrate` writes them to `measured_steps.json`.

class       the rows that equal the job in the features of one rung of LADDER, from all features down to none. The first
            rung is taken whose rows are of two sources and bound the interval; what it holds equal is printed. On the
            last rung are all rows, none like the job: the interval then has UNLIKE_LEVEL of their errors within
weights     a source with n rows in the class counts as min(n, MOST_OF_SOURCE) of them, so that none drowns the others
interval    split conformal prediction: an end is the quantile of the errors and of one more, which may be anything. Of
            n rows of equal weight that is the ceil(q · (n + 1))-th smallest, and a new row of the class that is
            exchangeable with them lies within with the stated probability at least. The predicted time is always within
widened     where the rows have other ranks, the upper end gets what the slowest of the job's ranks is expected to add
ratio       two ways to run a model on as many GPUs: |difference of their errors|, the same quantile over pairs of rows
            of one series. What two predictions share cancels, so this is narrower than an interval
memory      P(ln(needed / predicted) <= ln(available / predicted)), normal; its mean and deviation explain best which
            published configurations ran and which had too little (probit regression); without any, MEMORY_SPREAD
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import asdict

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.job.cluster import GPUS
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.parallel import Training
from counterpoint.plan.step.step import PredictedStep
from counterpoint.records import Record
from counterpoint.records.prediction import RatioError, StepInterval

LEVEL = 0.8  # probability of an interval: P10 to P90
UNLIKE_LEVEL = 0.95  # of all rows' errors where none is like the job: such a step is off by more than those measured
MOST_OF_SOURCE = 8.0  # most weight of one source, in rows
LIKE_IT = 3  # rows alike in all features that "validated" needs
MEMORY_SPREAD = 0.15  # assumed standard deviation of ln(needed / predicted GiB)
REMEDY = "benchmarks/plan_published.py --calibrate writes it"
FILE = Path(__file__).with_name("measured_steps.json")
MAX_BYTES = 1 << 22
RANKS = (1, 8, 64, 512, 4096)  # upper end of each range of ranks, and of tokens
TOKENS = (1024, 4096, 16384, 65536)
SIXTEEN_BIT = ("bf16", "fp16")

FEATURES = (
    "GPU", "ranks", "network", "tokens", "precision", "recomputation", "sharding", "experts", "axes", "kernels",
    "collectives", "other",
)  # fmt: skip
LADDER: tuple[tuple[str, ...], ...] = (
    FEATURES,
    ("GPU", "network", "precision", "sharding", "experts"),
    ("GPU", "precision", "experts"),
    ("GPU", "experts"),
    (),
)

Text = Annotated[str, Meta(min_length=1, max_length=200)]
Error = Annotated[float, Meta(ge=-3, le=3)]


class _RowFigures(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the figures of a row (one measured step) without its features."""

    source: Text  # who measured: what rows of one source share is not seen in them
    name: Text  # of the row in its source
    series: Text  # rows of one series run one model on the same number of GPUs in different ways
    error: Error  # ln(measured / predicted) of the step's time
    slowest: Annotated[float, Meta(ge=0, le=1)] = 0.0  # delay by the slowest rank, as a fraction of the step


class CalibrationRow(_RowFigures, frozen=True, kw_only=True):
    """Holds one measured step, to which no constant of the model was fitted."""

    features: Mapping[str, str]  # as `job_features` has them


class _FileRow(_RowFigures, frozen=True, kw_only=True):
    """Holds one row of the data file, with its features by index: many rows share the same ones."""

    features: Annotated[int, Meta(ge=0)]  # index in `_File.features`


class MemoryNeed(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the normal distribution of ln(needed / predicted) memory, and the data that it was fitted to."""

    mean: Error
    deviation: Annotated[float, Meta(gt=0, le=3)]
    rows: int
    sources: tuple[Text, ...]


class _File(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the content of the data file."""

    written_by: str
    features: tuple[dict[Text, Text], ...]
    steps: tuple[_FileRow, ...]
    memory: MemoryNeed | None


def job_features(job: Job) -> dict[str, str]:
    """Return the features by which a job is matched with measured steps, in words; `LADDER` names them."""
    parallel, training = job.parallel, job.training
    return {
        "GPU": job.cluster.gpu.name,
        "ranks": _band(parallel.world_size, RANKS),
        "network": "between nodes" if parallel.world_size > job.cluster.gpus_per_node else "inside a node",
        "tokens": _band(-(-training.micro_batch * training.sequence // parallel.cp), TOKENS),
        "precision": "16 bit" if training.precision in SIXTEEN_BIT else training.precision,
        "recomputation": training.recompute,
        "sharding": "parameters" if parallel.zero == 3 else "no parameters",
        "experts": "experts" if job.model.experts is not None else "dense",
        "axes": _listed(axis for axis in ("tp", "pp", "cp", "ep") if getattr(parallel, axis) > 1) or "dp only",
        "kernels": _kernels(training),
        "collectives": _collectives(job),
        "other": _unusual(job),
    }


def _kernels(training: Training) -> str:
    flash = f"FlashAttention {training.flash_version}" if training.flash_attention else "without flash attention"
    more = {
        "norms of operators": not training.fused_norms,
        "CUDA graphs": training.cuda_graphs,
        f"{training.fp8_scaling} scaling": training.precision == "fp8",
        "fp8 attention": training.precision == "fp8" and training.fp8_attention,
    }
    return " with ".join(["fused" if training.fused_kernels else "eager", _listed([flash, *_true(more)])])


def _collectives(job: Job) -> str:
    axes = [f"{axis} by {mechanism}" for axis, mechanism in sorted(job.mechanisms.items())]
    waiting = [f"{axis} not overlapped" for axis in ("tp", "dp", "pp") if not getattr(job.parallel, f"overlap_{axis}")]
    more = {
        "tp in pieces": job.parallel.pieces_tp,
        f"experts by {job.parallel.expert_exchange}": job.parallel.ep > 1
        and job.parallel.expert_exchange != "all_to_all",
        "experts of two halves": job.parallel.ep > 1 and job.parallel.overlap_ep,
    }
    return _listed([job.mechanism, *axes, *_true(more), *waiting])


def _unusual(job: Job) -> str:
    """Return in words the rare properties of a job (compressed gradients, locked clocks, ...), or "nothing"."""
    model, training, gpu = job.model, job.training, job.cluster.gpu
    sheet = GPUS.get(gpu.name, gpu)
    found = {
        "compressed gradients": job.compression is not None,
        f"local_steps = {training.local_steps}": training.local_steps > 1,
        "asynchronous replicas": training.asynchronous,
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
    return _listed(_true(found)) or "nothing"


def _true(said: Mapping[str, bool]) -> list[str]:
    return [name for name, so in said.items() if so]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _band(value: int, last: Sequence[int]) -> str:
    """Return the range that contains a number, in words: "9 to 64"."""
    low = 1
    for high in last:
        if value <= high:
            return f"{low:,} to {high:,}" if low < high else f"{high:,}"
        low = high + 1
    return f"{low:,} and more"


def source_weights(sources: Sequence[str]) -> np.ndarray:
    """Return the weight of each row, at most 1, such that no source has more than `MOST_OF_SOURCE` in all."""
    count = Counter(sources)
    return np.array([min(1.0, MOST_OF_SOURCE / count[source]) for source in sources])


def conformal_quantile(errors: np.ndarray, weights: np.ndarray, level: float) -> float:
    """Return the smallest error at which `level` of all weight is reached; infinite if there are too few rows.

    To the weight of the rows comes 1 for the step that is predicted, whose error may be larger than all of theirs.
    """
    order = np.argsort(errors, kind="stable")
    reached = np.cumsum(weights[order])
    needed = level * (float(weights.sum()) + 1.0) * (1.0 - 1e-12)  # the factor allows for rounded sums
    index = int(np.searchsorted(reached, needed))
    return float(errors[order[index]]) if index < len(order) else math.inf


class AlikeRows:
    """Holds the measured rows that equal a job in the features `equal`."""

    def __init__(self, equal: tuple[str, ...], rows: Sequence[CalibrationRow]) -> None:
        self.equal, self.errors = equal, np.array([row.error for row in rows])
        self.sources = tuple(dict.fromkeys(row.source for row in rows))
        self._weights = source_weights([row.source for row in rows])

    def ends(self, level: float) -> tuple[float, float]:
        """Return the interval's lower and upper end as ln(measured / predicted); infinite where rows are too few."""
        tail = (1.0 + self.within(level)) / 2.0
        return (
            -conformal_quantile(-self.errors, self._weights, tail),
            conformal_quantile(self.errors, self._weights, tail),
        )

    def within(self, level: float) -> float:
        """Return the fraction of errors that the interval must cover: above `level` where no row is like the job."""
        return level if self.equal else max(level, UNLIKE_LEVEL)

    @property
    def mean_and_worst(self) -> str:
        """Return the mean and the worst error of the predicted time, as text."""
        off = [abs(math.expm1(-error)) for error in self.errors]
        return f"mean {fmean(off):.1%}, worst {max(off):.1%}"


class MeasuredErrors:
    """Holds the measured rows by class; `measured_errors` returns those of the package."""

    def __init__(self, rows: Sequence[CalibrationRow], memory: MemoryNeed | None = None) -> None:
        self.rows, self.memory = tuple(rows), memory
        self._classes: dict[tuple[int, tuple[str, ...]], list[CalibrationRow]] = defaultdict(list)
        for row in self.rows:
            self._classes[_key(0, row.features)].append(row)
        for found in [*self._classes.values()]:
            for rung in range(1, len(LADDER)):
                self._classes[_key(rung, found[0].features)].extend(found)

    def classes(self, features: Mapping[str, str]) -> Iterator[AlikeRows]:
        """Yield the non-empty classes of rows for a job, from the most similar rows to all rows."""
        for rung, names in enumerate(LADDER):
            if found := self._classes.get(_key(rung, features)):
                yield AlikeRows(names, found)

    def alike(self, features: Mapping[str, str], level: float = LEVEL) -> AlikeRows:
        """Return the most similar class that has two sources and finite interval ends; Misconfigured if none has."""
        for rows in self.classes(features):
            if len(rows.sources) > 1 and all(map(math.isfinite, rows.ends(level))):
                return rows
        raise Misconfigured(
            f"{len(self.rows)} measured steps bound no interval of {level:.0%}: give more, of two sources or more"
        )

    def interval(self, features: Mapping[str, str], step_us: float, slowest_us: float = 0.0) -> StepInterval:
        """Return the interval around a predicted step time.

        Args:
            features: of its job.
            step_us: the predicted time.
            slowest_us: what its slowest rank is expected to add; counts where the rows have other ranks.
        """
        rows = self.alike(features)
        low, high = rows.ends(LEVEL)
        wider = 0.0 if "ranks" in rows.equal else slowest_us
        return StepInterval(
            level=LEVEL,
            errors_within=rows.within(LEVEL),
            low_us=step_us * math.exp(min(low, 0.0)),
            high_us=step_us * math.exp(max(high, 0.0)) + wider,
            alike=rows.equal,
            differ=tuple(name for name in FEATURES if name not in rows.equal),
            rows=len(rows.errors),
            sources=rows.sources,
            slowest_us=wider,
        )

    def validated(self, features: Mapping[str, str]) -> str:
        """Return one line: the error of rows equal in all features, or "not validated" and how the closest differ."""
        values = _key(0, features)[1]
        closest = min(  # of all that have the same GPU, where there are any
            (key for key in self._classes if key[0] == 0),
            key=lambda key: (key[1][0] != values[0], sum(map(str.__ne__, key[1], values))),
        )
        rows = AlikeRows(FEATURES, self._classes[closest])
        measured = f"{len(rows.errors)} measured step{'' if len(rows.errors) == 1 else 's'} of {_listed(rows.sources)}"
        differs = [
            f"{name}: {mine}, not {theirs}"
            for name, mine, theirs in zip(FEATURES, values, closest[1], strict=True)
            if mine != theirs
        ]
        if differs:
            return f"not validated: {'; '.join(differs)}; closest: {measured}: {rows.mean_and_worst}"
        if len(rows.errors) < LIKE_IT:
            return f"not validated: only {measured} like it: {rows.mean_and_worst}"
        return f"validated: {rows.mean_and_worst} on {measured}, alike in all {len(FEATURES)} features"

    @cached_property
    def comparisons(self) -> RatioError | None:
        """Return the error of predicted ratios between two steps of one series; None: too few pairs of steps."""
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
        need = self.memory or MemoryNeed(mean=0.0, deviation=MEMORY_SPREAD, rows=0, sources=())
        return NormalDist(need.mean, need.deviation).cdf(math.log(available_gib / predicted_gib))

    @property
    def memory_source(self) -> str:
        """Return the data that the probability of `fits` is based on, as text."""
        if self.memory is None:
            return f"a predicted memory {MEMORY_SPREAD:.0%} off (1 deviation), assumed"
        need, more = self.memory, math.expm1(self.memory.mean)
        return (
            f"{need.rows} configurations of {_listed(need.sources)} that ran or had too little: they needed "
            f"{abs(more):.0%} {'less' if more < 0 else 'more'} than predicted, with a deviation of {need.deviation:.0%}"
        )


def _key(rung: int, features: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    return rung, tuple(features[name] for name in LADDER[rung])


def read_rows(path: Path) -> MeasuredErrors:
    """Return the measured rows in a file; raise Misconfigured, with the field and what is allowed, if it is invalid."""
    name = printable(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Misconfigured(f"{name}: {error.strerror}; {REMEDY}") from None
    if len(content) > MAX_BYTES:
        raise Misconfigured(f"{name}: larger than {MAX_BYTES} bytes; {REMEDY}")
    try:
        found = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Misconfigured(f"{name}: {printable(str(error))}; {REMEDY}") from None
    if any(features.keys() != set(FEATURES) for features in found.features):
        raise Misconfigured(f"{name}: other features than {_listed(FEATURES)}; {REMEDY}")
    if not found.steps or max(row.features for row in found.steps) >= len(found.features):
        raise Misconfigured(f"{name}: no steps, or one whose features are not in the file; {REMEDY}")
    rows = (CalibrationRow(**asdict(row) | {"features": found.features[row.features]}) for row in found.steps)
    return MeasuredErrors(tuple(rows), found.memory)


def encode_rows(rows: MeasuredErrors, written_by: str) -> bytes:
    """Return the content of a file that `read_rows` can read, with one row per line."""
    places = {tuple(row.features.items()): place for place, row in reversed([*enumerate(rows.rows)])}
    kinds = sorted(places, key=places.__getitem__)
    steps = [asdict(row) | {"features": kinds.index(tuple(row.features.items()))} for row in rows.rows]
    tables = {"features": [dict(kind) for kind in kinds], "steps": steps}
    lists = [
        f'"{name}": [\n' + ",\n".join(msgspec.json.encode(row).decode() for row in found) + "\n]"
        for name, found in tables.items()
    ]
    head = msgspec.json.encode({"written_by": written_by, "memory": rows.memory}).decode().removesuffix("}")
    return (",\n".join([head, *lists]) + "}\n").encode()


@cache
def measured_errors() -> MeasuredErrors:
    """Return the measured rows that the package ships."""
    return read_rows(FILE)


def step_interval(job: Job, found: PredictedStep) -> StepInterval:
    """Return the interval of a predicted step, based on the rows that the package ships."""
    return measured_errors().interval(job_features(job), found.step_us, found.slowest_us)


def fits_in_memory(found: PredictedStep) -> float:
    """Return the probability that the job of a predicted step fits in memory."""
    return measured_errors().fits(found.memory.total_gib, found.memory.available_gib)


def too_close(step_us: float, fastest_us: float) -> bool:
    """Return whether two steps of one model differ by less than the error of predicted ratios."""
    known = measured_errors().comparisons
    return known is not None and fastest_us < step_us <= fastest_us * known.factor
