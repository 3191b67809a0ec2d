"""Sum up the GPU time of a step by operator, inputs and place in the program, beside what the card could do.

All GPU operations of one call of a host operation count for the call, since only the call has FLOPs: a GEMM may need
a second kernel that adds up its parts. The card's rates are the measured shares of the data sheet's peaks, where a
profile of the chip holds them, else the data sheet's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from counterpoint.diagnosis.analysis.kernel_names import precision_of
from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.intervals import unique_rows
from counterpoint.diagnosis.reading.modules import PHASES, module_of
from counterpoint.diagnosis.reading.operator_work import OperatorWork, WorkOf, inputs_in_words
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.profile import own_profile_of_traces, shipped_profile
from counterpoint.records.operators import CardRates, KernelTime, OperatorTime
from counterpoint.trace.timeline import I64, Device, Kind

_MOST = 2000  # rows; the rest is summed up in one more
_MOST_KERNELS = 16  # of one row
_ABOVE = 1.03  # times the data sheet's rate: a figure above it is wrong (bytes from caches, inputs that share memory)
_NUMBER = re.compile(r"(?:(?<=[._])|^)\d+(?=[._]|$)")
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
_Key = tuple[str | None, str | None, str | None, str | None, str | None, str | None, str]


def card_rates(device: Device, *, highest: bool = False) -> CardRates | None:
    """Return the rates of a traced GPU, by its measured profile if there is one; `highest`: always the data sheet's."""
    sheet = find_gpu(device.name)
    if sheet is None:
        return None
    own = own_profile_of_traces(device.name)
    known = own or shipped_profile(sheet.name)
    measured = known.is_of_this_chip and known.measured_on.get("efficiency", sheet.name) == sheet.name and not highest
    reached = known.efficiency if measured else None
    matmul, memory, fp8 = (reached.matmul, reached.memory, reached.fp8) if reached else (1.0, 1.0, 1.0)
    tflops = {name: peak * matmul * (fp8 if name == "fp8" else 1.0) for name, peak in sheet.tflops.items()}
    if "fp32" in tflops:
        tflops["tf32"] = tflops.pop("fp32")  # the data sheet's name for what tensor cores do with fp32
    if sheet.fp32_tflops is not None:
        tflops["fp32"] = sheet.fp32_tflops
    return CardRates(
        gpu=sheet.name,
        source=f"{'your profile' if own else 'profile'} {known.efficiency.date}".rstrip() if measured else "data sheet",
        tflops={name: round(peak, 1) for name, peak in tflops.items()},
        gb_per_s=None if sheet.memory_gb_per_s is None else round(sheet.memory_gb_per_s * memory, 1),
    )


def peak_of(work: OperatorWork, kernels: Sequence[str], tflops: dict[str, float]) -> float | None:
    """Return the TFLOP/s, among rates by precision, for an operator's dtype and kernels; None: unknown."""
    seen = [found for found in map(precision_of, kernels) if found]
    if work.dtype is None:
        return tflops.get(seen[0]) if seen else None
    if work.dtype == "float32":
        return tflops.get("tf32" if "tf32" in seen else "fp32")
    return tflops.get("fp8" if work.dtype.startswith("float8") else _PRECISIONS.get(work.dtype, ""))


def column_of(d: RankDigest, name: str) -> I64:
    """Return the column `operator`, `inputs` or `call` of a rank's GPU operations; -1 in all rows if it is missing."""
    column: Any = getattr(d.gpu, name)
    return np.full(len(d.gpu), -1, np.int64) if column is None else column.astype(np.int64)


@dataclass(slots=True)
class _Sum:
    """Adds up one row of the table over ranks; times in µs."""

    work: OperatorWork
    calls: float = 0.0
    us: float = 0.0
    kernels: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))  # count, µs


def operator_times(job: TracedJob, card: CardRates | None, work_of: WorkOf) -> tuple[OperatorTime, ...]:
    """Return the GPU time in the steps by operator, most time first; communication is left out."""
    sums: dict[_Key, _Sum] = {}
    for column, d in enumerate(job.digests):
        for key, work, calls, kernels in _of_rank(job, column, d, work_of):
            row = sums.setdefault(key, _Sum(work))
            row.calls += calls
            for name, count, us in kernels:
                row.us += us
                row.kernels[name] = [row.kernels[name][0] + count, row.kernels[name][1] + us]
    share, device = 1.0 / (len(job.digests) * job.num_steps), job.digests[0].device
    rows = sorted(sums.items(), key=lambda item: -item[1].us)
    highest = card_rates(device, highest=True)
    found = [_row(key, row, share, card, highest, from_host=device.from_host) for key, row in rows[:_MOST]]
    if rest := [row for _, row in rows[_MOST:]]:
        calls, us = (share * sum(getattr(row, name) for row in rest) for name in ("calls", "us"))
        found.append(OperatorTime(operator="all other operators", calls=calls, us=us))
    return tuple(found)


def _of_rank(
    job: TracedJob, column: int, d: RankDigest, work_of: WorkOf
) -> Iterator[tuple[_Key, OperatorWork, int, list[tuple[str, int, float]]]]:
    """Yield the rows of one rank: key, work of one call, number of calls, and name, count and µs of each kernel."""
    gpu = d.gpu
    rows = np.flatnonzero(job.in_steps(column, np.arange(len(job.step_names))) & (gpu.kind != Kind.COMM))
    if not len(rows):
        return
    table, calls = _facts(d, rows)
    groups, which = unique_rows(table)
    runs, run_of = unique_rows(np.column_stack((which, gpu.name[rows])))
    count, time = np.bincount(run_of), np.bincount(run_of, (gpu.end - gpu.start)[rows])
    called = np.bincount(unique_rows(np.column_stack((which, calls)))[0][:, 0])
    first = np.searchsorted(runs[:, 0], np.arange(len(groups) + 1))
    for at, (operator, given, phase, module, stack, _) in enumerate(groups.tolist()):
        part = range(first[at], first[at + 1])
        kernels = [(d.names[runs[run, 1]], int(count[run]), float(time[run])) for run in part]
        host = d.names[operator] if operator >= 0 else None
        stated = d.inputs[given] if host and 0 < given < len(d.inputs) else None
        shapes, dtypes = inputs_in_words(stated) if stated else (None, None)
        place = _NUMBER.sub("*", module_of(d.names[module]) or d.names[module]) if module >= 0 else None
        key = (host, shapes, dtypes, PHASES[phase], place, d.origins.stacks[stack] or None,
               "" if host else kernels[0][0])  # fmt: skip
        yield key, work_of(host, stated) if host and stated else OperatorWork(), int(called[at]), kernels


def _facts(d: RankDigest, rows: I64) -> tuple[I64, I64]:
    """Return what distinguishes rows of the table, `[n, 6]`, and the call, for the GPU operations `rows`.

    The facts are operator, inputs, phase, module, stack, and the kernel if the operator is not known. Of one call all
    operations have one place, the best known one, since only the longest operations are placed.
    """
    call, operator, given = (column_of(d, name)[rows] for name in ("call", "operator", "inputs"))
    place = np.column_stack((d.origins.phase[rows], d.origins.module[rows], d.origins.stack[rows])).astype(np.int64)
    _, of_call = np.unique(call, return_inverse=True)
    best = np.full((int(of_call.max()) + 1, 3), -1, np.int64)
    np.maximum.at(best, of_call, place)
    place = np.where((call >= 0)[:, None], best[of_call], place)
    calls = np.where(call >= 0, call, -2 - np.arange(len(rows)))  # each GPU operation of unknown call is its own
    return np.column_stack((operator, given, place, np.where(operator < 0, d.gpu.name[rows], -1))), calls


def _row(
    key: _Key, row: _Sum, share: float, card: CardRates | None, highest: CardRates | None, *, from_host: bool
) -> OperatorTime:
    kernels = sorted(row.kernels.items(), key=lambda item: -item[1][1])
    tflops, gb_per_s, of_card = _rates(row, card, highest, [name for name, _ in kernels])
    shown = [] if from_host else kernels[:_MOST_KERNELS]
    return OperatorTime(
        **dict(zip(("operator", "shapes", "dtypes", "phase", "module", "stack"), key, strict=False)),
        calls=row.calls * share,
        us=row.us * share,
        tflops=tflops,
        gb_per_s=gb_per_s,
        of_card=of_card,
        lost_us=None if of_card is None else row.us * share * (1.0 - of_card),
        kernels=tuple(KernelTime(name=name, count=count * share, us=us * share) for name, (count, us) in shown),
    )  # fmt: skip


def _rates(
    row: _Sum, card: CardRates | None, highest: CardRates | None, kernels: Sequence[str]
) -> tuple[float | None, float | None, float | None]:
    """Return TFLOP/s, GB/s and the share of the card's rate that a row reaches; None: unknown or impossible."""
    work, us = row.work, row.us
    tflops = work.flops * row.calls / us / 1e6 if work.flops is not None and us > 0 else None
    gb_per_s = work.bytes * row.calls / us / 1e3 if work.bytes is not None and us > 0 else None
    if card is None or highest is None:
        return tflops, gb_per_s, None
    most = peak_of(work, kernels, highest.tflops)
    if tflops is not None and (most is None or tflops > _ABOVE * most):
        return None if most else tflops, None, None
    if gb_per_s is not None and highest.gb_per_s is not None and gb_per_s > _ABOVE * highest.gb_per_s:
        gb_per_s = None
    peak = peak_of(work, kernels, card.tflops)
    shares = [rate / of for rate, of in ((tflops, peak), (gb_per_s, card.gb_per_s)) if rate is not None and of]
    return tflops, gb_per_s, min(max(shares), 1.0) if shares else None
