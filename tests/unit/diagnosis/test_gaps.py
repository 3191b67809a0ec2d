"""Every time without GPU operations has a cause, and together they are the idle time."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from counterpoint.diagnosis.findings.advice import advise_operation
from counterpoint.diagnosis.reading.host_categories import CATEGORIES
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.records.diagnosis import Diagnosis, Finding
from counterpoint.trace.timeline import Device, HostKind, Kind
from tests.support.job_builder import Host, Op, Rank, comm, diagnosed, digested, host, op, rank

NAN = float("nan")
PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
OP, PYTHON, ANNOTATION = HostKind.OP, HostKind.PYTHON, HostKind.ANNOTATION
LOCK = "<built-in method acquire of _thread.lock object>"
LOADER = host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 150.0, 5000.0, ANNOTATION)


def causes(*parts: Op | Host, **more: Any) -> dict[str, float]:
    """What a rank idles for between its first operation and its last, in µs."""
    d = digested(rank(*parts, **more))
    within = (d.gaps.start >= d.gpu.start[0]) & (d.gaps.end <= d.gpu.end.max())
    us = np.bincount(d.gaps.category[within], weights=d.gaps.time[within], minlength=len(CATEGORIES))
    return {name: t for name, t in zip(CATEGORIES, us.tolist(), strict=True) if t > 1e-6}


def finding(d: Diagnosis, kind: str) -> Finding:
    return next(f for f in d.findings if f.kind == kind)


def stalled(*hosts: Host, us: float = 5000.0, launch: float | None = None, **more: Any) -> dict[str, float]:
    """A kernel ends at 110, the next begins `us` later, 10 µs after its launch."""
    last = op("after", 110 + us, 210 + us, launch=launch, **more)
    return causes(op("before", 10, 110, launch=0.0), last, *hosts)


@pytest.mark.parametrize(
    ("category", "ranges"),
    [
        ("allocator", [host("cudaFree", 150, 5000)]),
        ("allocator", [host("cudaMalloc", 150, 5000, thread=3)]),  # its lock holds up every thread
        ("garbage_collection", [host("Python GC collect", 150, 5000, thread=3)]),
        ("late_input", [LOADER]),
        # the loader decodes: the copy in it is no blocking copy, the decoding no operation of the step
        ("late_input", [LOADER, host("aten::stack", 160, 4990, OP)]),
        ("synchronise", [host("aten::item", 150, 5000, OP)]),
        ("copy", [host("cudaMemcpy", 150, 5000)]),
        ("copy", [host("cudaMemcpyAsync", 150, 5000)]),
        ("start_up", [host("Lazy Function Loading", 150, 5000)]),
        ("start_up", [host("torch/_inductor/compile_fx.py(700): compile_fx_inner", 150, 5000, PYTHON)]),
        ("start_up", [host("cudaStreamBeginCapture", 150, 160), host("aten::mm", 170, 4900, OP),
                      host("cudaStreamEndCapture", 4990, 5000)]),
        ("profiler", [host("Activity Buffer Request", 150, 5000)]),
        ("operation", [host("tokenizer.encode", 150, 5000, PYTHON)]),
        ("operation", [host("tokenizer.encode", 150, 5000, PYTHON, thread=3)]),
        ("unrecorded", []),
    ],
)  # fmt: skip
def test_a_stall_is_what_the_host_was_in(category: str, ranges: list[Host]) -> None:
    """4850 of 5000 µs; the rest is slow Python before and after, and the launch."""
    found = stalled(*ranges)
    assert found[category] >= 4800
    assert sum(found.values()) == pytest.approx(5000)


def test_a_gap_is_inside_the_range_around_its_own_operation() -> None:
    """Each of two gaps has an operation in a Python function of its own, and not in that of the range before it."""
    parts: list[Op | Host] = [op("kernel", 10, 110, launch=0.0)]
    for at, name in ((0, "a"), (5000, "b")):
        parts += [
            host(f"{name}.py(1): outer", at + 120, at + 5090, PYTHON),
            host(f"tokenizer.{name}", at + 150, at + 5000, OP),
            op("kernel", at + 5110, at + 5115),
        ]
    d = digested(rank(*parts))
    seen = {(d.names[o], d.names[i]) for o, i in zip(d.gaps.operation, d.gaps.inside, strict=True) if i >= 0}
    assert seen == {("tokenizer.a", "a.py(1): outer"), ("tokenizer.b", "b.py(1): outer")}


@pytest.mark.parametrize(
    ("hosts", "more", "expected"),
    [
        # another thread sleeps on a lock, as most do; that the host was in an epoch says not what it did
        ([host(LOCK, 0, 6000, PYTHON, thread=3)], {}, {"unrecorded": 5000}),
        ([host("epoch 3", 0, 6000, ANNOTATION)], {}, {"unrecorded": 5000}),
        # a synchronisation that ends just after the next operation began does not go on when that has ended
        ([host("cudaStreamSynchronize", 20, 150.01), host("aten::mm", 150, 2000, OP)], {},
         {"synchronise": 40, "operation": 1850, "unrecorded": 3110}),
        # launched at 20, it begins 5 ms later: not for want of a launch, whatever the host does
        ([host("tokenizer.encode", 150, 5000, PYTHON)], {"launch": 20.0}, {"queued": 5000}),
        ([], {"us": 2.0, "launch": 20.0}, {"between_kernels": 2}),  # launched long before
        ([], {"us": 8.0, "launch": 105.0}, {"launch": 8}),  # while the other still ran, and begun as soon as can be
        ([], {"launch": NAN}, {"no_launch_recorded": 5000}),  # as in a trace of the GPU alone, or one with holes
        # the host waited until the kernel had ended, and needs 60 µs to launch again
        ([host("cudaStreamSynchronize", 20, 113)], {"us": 80.0}, {"synchronise": 80}),
        # the GPU had run out of work before it was called
        ([host("cudaStreamSynchronize", 130, 131)], {"us": 80.0}, {"launch": 80}),
        # `__call__` of what was compiled is in every step
        ([host("torch/_inductor/codecache.py(906): __call__", 150, 5000, PYTHON)], {},
         {"operation": 4850, "unrecorded": 150}),
        ([host("cudaFree", 115, 5105)], {"launch": NAN}, {"allocator": 4990, "no_launch_recorded": 10}),
        # 3000 µs in the allocator, 1500 in the tokenizer
        ([host("cudaFree", 150, 3150), host("tokenizer.encode", 3200, 4700, PYTHON)], {},
         {"allocator": 3000, "operation": 1500, "unrecorded": 500}),
    ],
)  # fmt: skip
def test_causes_of_a_stall(hosts: list[Host], more: dict[str, float], expected: dict[str, float]) -> None:
    assert stalled(*hosts, **more) == {category: pytest.approx(us) for category, us in expected.items()}


@pytest.mark.parametrize("overlap", [-0.2, 0.0, 0.001, 0.2, 2.0])
def test_a_range_that_touches_the_one_before_keeps_its_children(overlap: float) -> None:
    """The loader begins as the synchronisation ends, and the dataset's own function right within it."""
    waits = host("cudaStreamSynchronize", 20, 150.0 + overlap)
    found = stalled(waits, LOADER, host("dataset.py(20): __getitem__", 150.0 + max(overlap, 0.0), 5000.001, PYTHON))
    assert found["late_input"] == pytest.approx(4850.0, abs=3.0)
    assert "operation" not in found


def shares(d: Diagnosis, category: str) -> dict[str, float]:
    """What the idle time of one cause is named after, in µs a step."""
    assert d.idle is not None
    return {o.name: o.us for c in d.idle.causes if c.category == category for o in c.operations}


def test_each_name_gets_the_time_that_it_covers() -> None:
    """One gap, one cause, two calls; together less than the gap, which also holds slow Python."""
    around = op("before", 10, 110, launch=0.0), op("after", 5110, 5210, launch=5100.0)
    d = diagnosed(rank(*around, host("cudaFree", 150, 3150), host("cudaMalloc", 3200, 4700)))
    assert shares(d, "allocator") == {"cudaFree": pytest.approx(3000), "cudaMalloc": pytest.approx(1500)}


def test_a_short_gap_is_named_after_all_that_covers_it() -> None:
    """20 gaps of 80 µs: 30 in one operation, 20 in the one at the middle, the rest in none."""
    parts: list[Op | Host] = []
    for i in range(21):
        at = 100.0 * i
        parts += [op("add", at + 80, at + 100, launch=at + 74), host("aten::empty", at + 1, at + 31, OP)]
        parts += [host("aten::mm", at + 32, at + 52, OP)]
    found = shares(diagnosed(rank(*parts, steps=((100.0, 2100.0),))), "launch")
    assert found == {"aten::empty": pytest.approx(600), "aten::mm": pytest.approx(400)}


def test_before_the_first_event_and_after_the_last_nothing_was_recorded() -> None:
    """As where a trace was cut: a kernel in the middle of a step of 20 ms, and no more."""
    d = diagnosed(rank(op("add", 5000, 5100, launch=4990.0), steps=((0.0, 20_000.0),)))
    found = d.findings[0]
    assert found.kind == "not_recorded"
    assert found.cost_us == pytest.approx(19_900, rel=0.01)
    assert "gc." not in found.advice
    assert d.idle is not None
    assert d.idle.explained_us == pytest.approx(0, abs=20)
    assert d.replay is not None
    assert not [w.name for w in d.replay.what_if if "host" in w.name or "stall" in w.name]  # nobody knows


def test_a_stream_that_is_busy_with_earlier_work_is_not_idle() -> None:
    """Its first operation begins 8 ms after its launch, though nothing runs: work from before the recording."""
    first = op("gemm", 8010, 8110, launch=100.0)
    found = causes(op("add", 10, 20, launch=0.0, stream=9), first, host("cudaStreamSynchronize", 120, 8100))
    assert found["earlier_work"] == pytest.approx(8010 - 105)
    again = causes(op("add", 10, 20, launch=0.0), first)  # not the first of its stream
    assert again["queued"] == pytest.approx(8010 - 105)


def test_a_range_in_a_cut_trace_explains_its_gap() -> None:
    """It spans most of what was recorded, but not most of the step."""
    backward = host("## backward ##", 3000, 5000, ANNOTATION)
    d = diagnosed(rank(op("add", 5000, 5100, launch=4990.0), backward, steps=((0.0, 9000.0),)))
    assert shares(d, "operation") == {"## backward ##": pytest.approx(1990, abs=15)}


def test_launches_in_bursts_are_told_as_such() -> None:
    """Two launches at once every 100 µs, for kernels of 60 µs on two streams: as many launches as kernels, in time."""
    pairs = [
        op("add", i * 100 + 10 + k, i * 100 + 70 + k, launch=i * 100 + 2.0 * k, call_us=1.0, stream=7 + k)
        for i in range(100)
        for k in range(2)
    ]
    found = finding(diagnosed(rank(*pairs, steps=((0.0, 9_990.0),))), "host_bound")
    assert "no slower than kernels run (60.0 µs), but in bursts" in found.evidence


@pytest.mark.parametrize(
    ("name", "moves"), [("tokenizer.encode", True), ("## backward ##", False), ("aten::cudnn_convolution", False)]
)
def test_a_part_of_the_step_is_not_moved_out_of_it(name: str, moves: bool) -> None:
    kind = OP if name.startswith("aten") else PYTHON
    d = diagnosed(rank(op("a", 10, 110, launch=0.0), op("b", 5110, 5210, launch=5100.0), host(name, 150, 5000, kind)))
    assert ("out of the step" in finding(d, "host_stall").advice) == moves


def test_a_first_launch_that_takes_long_loads_the_kernel() -> None:
    """The call takes 4 ms, the kernel was never seen before."""
    found = causes(
        op("before", 10, 110, launch=0.0),
        op("after", 4210, 4310, launch=200.0, call_us=4000.0),
        host("hipLaunchKernel", 200, 4200),
    )
    assert found["start_up"] == pytest.approx(4000)


def test_gaps_before_the_first_and_after_the_last_operation_count() -> None:
    """A step of 10 ms with one kernel in the middle."""
    kernel = op("matmul", 5000, 6000)
    d = diagnosed(rank(kernel, host("cudaFree", 10, 4900), steps=((0.0, 10_000.0),)))
    assert d.idle is not None
    assert d.idle.idle_us == pytest.approx(9000)
    assert d.idle.idle_us == pytest.approx(d.totals.idle_us)
    found = {c.category for c in d.idle.causes}
    assert found >= {"start_up", "nothing_recorded"}  # before the first launch: CUDA starts


def many(count: int, kernel_us: float, gap_us: float, *, hosts: bool = True) -> Rank:
    """Three steps of `count` kernels with gaps between, each launched as the one before has ended."""
    every = kernel_us + gap_us
    ops = [
        op("add", i * every, i * every + kernel_us, launch=i * every - 6.0, call_us=4.0) for i in range(1, 3 * count)
    ]
    adds = [host("aten::add", i * every - 14.0, i * every - 1.0, OP) for i in range(1, 3 * count)] if hosts else []
    steps = [(i * count * every, (i + 1) * count * every - 20.0) for i in range(3)]
    return rank(*ops, *adds, steps=steps)


@pytest.mark.parametrize("hosts", [True, False])
def test_small_kernels_with_small_gaps_are_host_bound(hosts: bool) -> None:
    """Kernels of 10 µs, gaps of 15: 60 % idle, though no gap is long."""
    d = diagnosed(many(200, 10.0, 15.0, hosts=hosts))
    found = finding(d, "host_bound")
    assert found is d.findings[0]
    assert found.cost_us == pytest.approx(0.6 * 5000, rel=0.05)
    assert "host-bound" in d.verdict
    assert "a kernel takes 10.0 µs" in found.evidence
    assert "CUDA graphs" in found.advice
    assert d.idle is not None
    assert d.idle.explained_us == pytest.approx(d.idle.idle_us, rel=0.02)
    assert d.replay is not None
    free = {w.name: w.step_us for w in d.replay.what_if}["hosts free (CUDA graphs)"]
    assert free == pytest.approx(2000, rel=0.1)


def test_host_bound_names_operations_and_python() -> None:
    frame = host("train.py(12): forward", 0, 20_000, PYTHON)
    base = many(200, 10.0, 15.0)
    d = diagnosed(rank(*base.ops, *base.hosts, frame, steps=base.steps))
    found = finding(d, "host_bound")
    assert "aten::add" in found.evidence
    assert "train.py(12): forward" in found.evidence


def stalls_in_turn() -> list[Rank]:
    """Four ranks, each of which pauses for 6 ms at another time, and a collective that makes the others wait."""
    ranks = []
    for r in range(4):
        parts: list[Op | Host] = []
        at = 100.0
        for turn in range(8):
            late = 6000.0 if turn % 4 == r else 0.0
            begins = at + late
            parts += [op("matmul", begins, begins + 500, launch=begins - 10)]
            parts += [comm("all_reduce", begins + 500, at + 6000 + 600, launch=begins - 4)]
            if late:
                parts.append(host("tokenizer.encode", at, at + 5900, OP))
            at += 6700.0
        ranks.append(rank(*parts, steps=((0.0, at),)))
    return ranks


def test_stalls_of_all_ranks_cost_what_they_cost_together() -> None:
    """Each pauses twice, 12 of 54 ms; as they take turns the step loses 49, while the other hosts do nothing."""
    d = diagnosed(*stalls_in_turn())
    assert not d.stragglers
    found = finding(d, "host_stall")
    assert found.title == "The GPUs run out of work while the host is in tokenizer.encode"
    assert sum(f.cost_us for f in d.findings if f.kind == "host_stall") == pytest.approx(49_000, rel=0.05)
    assert found.cost_us == pytest.approx(4 * 2 * 5900, rel=0.05)
    assert "without any rank's stalls a step would be 49" in found.evidence
    assert "hosts pause for 11.80 ms a step for this (mean of 4 ranks), in tokenizer.encode" in found.evidence
    assert "every host pauses 2 times in 1 step for over 5 ms" in found.evidence  # the others may wait for the GPU
    assert d.replay is not None
    assert {w.name: w.step_us for w in d.replay.what_if}["no stall on any rank"] < 0.2 * d.replay.measured_us


def test_idle_time_is_told_by_phase_and_module() -> None:
    """Two pauses in modules and one in no range; what nothing is known of is left out."""
    parts: list[Op | Host] = [op("matmul", 0, 100, launch=0.0)]
    for i in range(3):
        at = 100.0 + 5100.0 * i
        parts += [host("json.dumps", at + 10, at + 4900, OP), op("matmul", at + 5000, at + 5100)]
    parts += [host("nn.Module: MLP_3", 50, 5080, PYTHON), host("FSDP::post_backward (layers.3)", 5190, 10_190, PYTHON)]
    d = diagnosed(rank(*parts))
    assert d.idle is not None
    cause = next(c for c in d.idle.causes if c.category == "operation")
    for known in (cause.phases, cause.modules):
        assert [p.us for p in known] == pytest.approx([5000.0, 5000.0], rel=0.05)
    assert {p.name for p in cause.phases} == {"forward", "backward"}
    assert {p.name for p in cause.modules} == {"MLP_3", "layers.3"}
    assert "; in module " in finding(d, "host_stall").evidence


def pauses_at_random(
    ranks: int = 8, steps: int = 3, layers: int = 40, input_us: float = 0.0
) -> tuple[list[Rank], float]:
    """Return ranks whose hosts each pause 17 to 36 times, whenever, and the time of a step if none did.

    A step begins with `input_us` of waiting for input on every rank.
    A layer is a matmul and an all-reduce that all wait for; at the end of a step the hosts wait for the GPU.
    """
    random = np.random.default_rng(0)
    pause = np.zeros((ranks, steps * layers))
    for own in pause:
        at = random.choice(len(own), size=random.integers(17, 37), replace=False)
        own[at] = random.uniform(6000.0, 14_000.0, len(at))
    parts: list[list[Op | Host]] = [[] for _ in range(ranks)]
    host_at, gpu_at = np.zeros(ranks), np.zeros(ranks)
    bounds = [host_at.copy()]
    for layer in range(steps * layers):
        arrival = np.zeros(ranks)
        for r in range(ranks):
            if input_us and layer % layers == 0:
                loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
                parts[r].append(host(loader, host_at[r], host_at[r] + input_us, ANNOTATION))
                host_at[r] += input_us
            if pause[r, layer]:
                parts[r].append(host("tokenizer.encode", host_at[r] + 1, host_at[r] + pause[r, layer] - 1, OP))
            launch = host_at[r] + pause[r, layer]
            begin = max(launch + 10, gpu_at[r])
            parts[r].append(op("matmul", begin, begin + 1000, launch=launch))
            arrival[r] = begin + 1000
            host_at[r] = launch + 20
        gpu_at = np.full(ranks, arrival.max() + 100)
        for r in range(ranks):
            parts[r].append(comm("all_reduce", arrival[r], gpu_at[r], launch=host_at[r] - 8))
        if (layer + 1) % layers == 0:
            for r in range(ranks):
                parts[r].append(host("cudaStreamSynchronize", host_at[r], gpu_at[r] + 5))
            host_at = gpu_at + 6
            bounds.append(host_at.copy())
    windows = [list(zip(np.array(bounds)[:-1, r], np.array(bounds)[1:, r] - 0.5, strict=True)) for r in range(ranks)]
    return [rank(*parts[r], steps=windows[r]) for r in range(ranks)], layers * 1100.0


def test_pauses_of_all_hosts_outweigh_the_rank_that_pauses_most() -> None:
    """Half of the step is lost, by all ranks: the ranks that lose most are not all of it."""
    ranks, without_us = pauses_at_random()
    d = diagnosed(*ranks)
    step = d.totals.duration_us / 3
    assert step > 1.8 * without_us
    worst = d.findings[0]
    assert (worst.kind, worst.title) == ("host_stall", "The GPUs run out of work while the host is in tokenizer.encode")
    assert "every host pauses 1" in worst.evidence
    by_stalls = sum(f.cost_us for f in d.findings if f.kind in ("host_stall", "straggler"))
    assert by_stalls == pytest.approx(step - without_us, rel=0.03)
    assert d.replay is not None
    assert {w.name: w.step_us for w in d.replay.what_if}["no stall on any rank"] == pytest.approx(without_us, rel=0.01)


def test_a_short_cause_costs_no_more_than_it_lasts_beside_long_pauses() -> None:
    """Input takes 6 ms a step on every rank, the pauses of the hosts far more: the loader is not what they cost."""
    ranks, without_us = pauses_at_random(input_us=6000.0)
    d = diagnosed(*ranks)
    cost = {f.kind: f.cost_us for f in d.findings if f.rank is None}
    assert cost["late_input"] == pytest.approx(6000.0, rel=0.3)
    assert cost["host_stall"] > 0.3 * (d.totals.duration_us / 3 - without_us)


def late_by(*late_us: float) -> list[Rank]:
    """Return ranks whose hosts sit that long in the tokenizer in each of four steps, before an all-reduce."""
    parts: list[list[Op | Host]] = [[] for _ in late_us]
    steps, length = [], max(late_us) + 2000.0
    for i in range(4):
        at = 100.0 + i * length
        steps.append((at, at + length))
        for own, late in zip(parts, late_us, strict=True):
            if late:
                own.append(host("tokenizer.encode", at + 1, at + late - 2, OP))
            begins = at + late + 10
            own.append(op("matmul", begins, begins + 1000, launch=at + late))
            own.append(comm("all_reduce", begins + 1000, at + length - 50, launch=at + late + 7))
            own.append(host("cudaStreamSynchronize", at + late + 15, at + length - 45))
    return [rank(*own, steps=steps) for own in parts]


def test_a_rank_that_is_second_latest_is_named() -> None:
    """Rank 1 is late by 7 ms and rank 2 by 4: without rank 1 the others would wait for rank 2."""
    d = diagnosed(*late_by(0.0, 7000.0, 4000.0, 0.0, 0.0, 0.0))
    cost = {(f.kind, f.rank): f.cost_us for f in d.findings}
    assert cost["straggler", 1] == pytest.approx(3000.0, rel=0.05)
    assert cost["host_stall", 2] == pytest.approx(4000.0, rel=0.06)
    found = finding(d, "host_stall")
    assert found.title == "The GPUs run out of work while the host is in tokenizer.encode, on rank 2"
    assert "the host of rank 2 pauses for 4.00 ms a step for this, in tokenizer.encode" in found.evidence


@pytest.mark.parametrize("alone", [True, False])
def test_ranks_that_no_collective_joins_do_not_wait_for_one_another(alone: bool) -> None:
    """One rank of a job, or two without collectives: a stall costs what the GPU idles, mean over ranks."""
    late, other = late_by(4000.0, 0.0)
    apart = [replace(r, ops=tuple(o for o in r.ops if o.info is None)) for r in (late, other)]
    d = diagnosed(*([late] if alone else apart))
    stalls = [f for f in d.findings if f.kind == "host_stall"]
    assert d.idle is not None
    assert 0.0 < sum(f.cost_us for f in stalls) <= d.idle.idle_us * 1.001
    assert not any("the others wait" in f.evidence for f in stalls)


def test_what_only_the_late_rank_stalls_for_is_its_own() -> None:
    d = diagnosed(*late_by(0.0, 4000.0, 0.0, 0.0))
    assert [(f.kind, f.rank) for f in d.findings if f.kind in ("host_stall", "straggler")] == [("straggler", 1)]


def test_hosts_that_launch_slowly_on_half_the_ranks_are_told_with_what_all_lose() -> None:
    """Ranks 4-7 launch a kernel every 100 µs, the others every 10 µs, well ahead; then all reduce and wait."""
    parts: list[list[Op | Host]] = [[] for _ in range(8)]
    steps, length, kernels = [], 4800.0, 40
    for i in range(3):
        at = length * i
        steps.append((at, at + length))
        for r, own in enumerate(parts):
            apart = 100.0 if r >= 4 else 10.0
            for k in range(kernels):
                launch = at + 10 + k * apart
                begins = max(launch + 10, at + 20 + k * 50.0)
                own.append(op("matmul", begins, begins + 50, launch=launch, call_us=4))
            arrives = begins + 50 + r
            own.append(comm("all_reduce", arrives, at + length - 100, launch=launch + 6, call_us=4))
            own.append(host("cudaStreamSynchronize", launch + 12, at + length - 95))
    d = diagnosed(*[rank(*own, steps=steps) for own in parts])
    worst = d.findings[0]
    assert worst.title == "Ranks 4-7 make the others wait: their hosts launch slowly"
    assert worst.cost_us == pytest.approx((kernels - 1) * 50.0, rel=0.05)
    assert "CPUs of the host of ranks 4-7" in worst.advice
    assert all(f.kind != "host_bound" for f in d.findings)


def copies(name: str, us: float) -> Diagnosis:
    """Three steps of a copy and a kernel that needs it, all launched ahead."""
    parts, every = [], us + 500
    for i in range(3):
        at = 100.0 + i * every
        parts += [op(name, at, at + us, kind=Kind.MEMCPY, launch=i * 20.0 + 1, bytes=1 << 20)]
        parts += [op("matmul", at + us, at + us + 500, launch=i * 20.0 + 8)]
    return diagnosed(rank(*parts, steps=[(i * 20.0, i * 20.0 + 20) for i in range(3)]))


def test_copies_cost_no_more_than_they_take() -> None:
    """The host is in the call for 3 ms, the copy takes 1: the time in which the GPU idles has a finding of its own."""
    first = op(PAGEABLE, 10, 1010, kind=Kind.MEMCPY, launch=0, call_us=3000, bytes=1 << 20)
    d = diagnosed(rank(first, op("matmul", 3040, 4040, launch=3030), steps=[(0, 4045)]))
    assert finding(d, "copies").cost_us == pytest.approx(1000, abs=1)
    assert sum(f.cost_us for f in d.findings) <= d.totals.duration_us


@pytest.mark.parametrize("aside", [False, True])
def test_copies_on_a_stream_of_their_own_are_not_told_to_use_one(aside: bool) -> None:
    stream = 41 if aside else 7
    parts = [op(PINNED, 10 + 3000 * i, 2010 + 3000 * i, kind=Kind.MEMCPY, launch=5.0 * i,
                stream=stream, bytes=1 << 20) for i in range(3)]  # fmt: skip
    parts += [op("matmul", 2010 + 3000 * i, 3010 + 3000 * i, launch=5.0 * i + 2) for i in range(3)]
    found = finding(diagnosed(rank(*parts)), "copies")
    assert ("run on a stream of their own already" in found.advice) == aside
    assert ("copy ahead on a stream of its own" in found.advice) != aside


def test_copies_both_ways_at_once_say_so() -> None:
    """No compute runs beside them, but each runs beside the other for 700 µs."""
    up = op(PINNED, 10, 1010, kind=Kind.MEMCPY, launch=0.0, bytes=1 << 20)
    down = op("Memcpy DtoH (Device -> Pinned)", 310, 1310, kind=Kind.MEMCPY, launch=5.0, stream=9, bytes=1 << 20)
    found = finding(diagnosed(rank(up, down)), "copies")
    assert found.evidence.count("0.70 ms beside copies another way") == 2


def test_copies_that_other_work_waits_for_cost_more_than_they_run_alone() -> None:
    """Two of three copies run beside a kernel, but each matmul needs one: without them it takes 2 ms less, not 1."""
    parts: list[Op | Host] = [op("other", 10, 3010, launch=0.0, stream=11)]
    for i in range(3):
        at, called = 2000.0 * i, 20.0 * i + 5
        parts.append(op(PINNED, at + 10, at + 1010, kind=Kind.MEMCPY, launch=called,
                        stream=9, call_us=1, bytes=1 << 20))  # fmt: skip
        parts.append(host("cudaStreamWaitEvent", called + 2, called + 3))
        parts.append(op("matmul", at + 1010, at + 2010, launch=called + 4, call_us=1))
    found = finding(diagnosed(rank(*parts, steps=[(0, 6010)])), "copies")
    assert "(1.00 ms)" in found.title
    assert found.cost_us == pytest.approx(2000.0, rel=0.02)
    assert "would take 2.00 ms less, for other work waits for it" in found.evidence


def test_a_job_without_kernels_does_not_start_up_all_the_time() -> None:
    """The host is in a call for 600 µs before each copy."""
    copies_only: list[Op | Host] = []
    for i in range(3):
        at = 1000.0 * i
        copies_only.append(op(PAGEABLE, at + 610, at + 900, kind=Kind.MEMCPY, launch=at,
                              call_us=605))  # fmt: skip
        copies_only.append(host("cudaMemcpyAsync", at, at + 605))
    assert "start_up" not in causes(*copies_only)


def test_short_gaps_without_recorded_launches_are_no_long_operations() -> None:
    """As of a trace without correlations: in each gap of 30 µs the host is in an operation."""
    parts: list[Op | Host] = []
    for i in range(20):
        parts += [op("matmul", 40.0 * i, 40.0 * i + 10, launch=NAN), host("aten::mm", 40.0 * i + 11, 40.0 * i + 39, OP)]
    assert set(causes(*parts)) <= {"launch", "no_launch_recorded", "unrecorded"}
    assert causes(*parts)["launch"] > 500


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch/serialization.py(964): _save", "async_save"),
        ("aten::normal_", "on the GPU"),
        ("torch/utils/data/dataset.py(300): __getitem__", "otherwise"),
        ("torch/nn/modules/module.py(1773): _call_impl", "a part of the step itself"),
        ("torch/utils/checkpoint.py(250): checkpoint", "a part of the step itself"),
        ("aten::mm", "a part of the step itself"),
    ],
)
def test_what_is_advised_on_a_long_operation(name: str, said: str) -> None:
    assert said in advise_operation(name, "otherwise")


def test_pageable_copies_are_a_finding() -> None:
    """1 MiB in 400 µs: 2.6 GB/s from pageable memory."""
    d = copies(PAGEABLE, 400.0)
    found = finding(d, "copies")
    assert found.cost_us == pytest.approx(400, rel=0.02)
    assert "pageable host memory" in found.evidence
    assert "in 1 copy at 2.62 GB/s" in found.evidence
    assert "pin_memory" in found.advice
    assert d.replay is not None
    steps = {w.name: w.step_us for w in d.replay.what_if}
    assert d.replay.replayed_us - steps["no copies"] == pytest.approx(400, rel=0.01)


@pytest.mark.parametrize(
    "ops",
    [
        # the host launches the next kernel only 1000 µs later: without the copy the step would take as long
        (op(PAGEABLE, 10, 410, kind=Kind.MEMCPY, launch=0.0),
         op("matmul", 1010, 1110, launch=1000.0)),
        # beside compute
        (op("matmul", 100, 1000, launch=10.0),
         op(PINNED, 110, 900, kind=Kind.MEMCPY, stream=9, launch=20.0, bytes=1 << 20)),
    ],
    ids=["not waited for", "hidden"],
)  # fmt: skip
def test_copies_that_cost_nothing_are_no_finding(ops: tuple[Op, Op]) -> None:
    assert not [f for f in diagnosed(rank(*ops)).findings if f.kind == "copies"]


def test_copies_of_a_trace_without_launches_cost_what_is_exposed() -> None:
    """The replay cannot move a host that it does not know."""
    copy = op(PINNED, 10, 410, kind=Kind.MEMCPY, launch=NAN)
    d = diagnosed(rank(copy, op("matmul", 410, 510, launch=NAN), steps=((0.0, 510.0),)))
    assert finding(d, "copies").cost_us == pytest.approx(400)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (PINNED, "copy ahead"),
        ("Memcpy DtoH (Device -> Pinned)", "copy back"),
        ("CopyDeviceToHost", "copy back"),
        ("Memcpy DtoD (Device -> Device)", "avoid the copy"),
        ("Memset (Device)", "torch.empty"),
    ],
)
def test_advice_on_copies_fits_their_direction(name: str, said: str) -> None:
    assert said in finding(copies(name, 400.0), "copies").advice


def test_what_copies_take_and_what_they_cost_are_both_said() -> None:
    """They run alone for 400 µs, but the next kernel is launched only 300 µs after their begin, whatever they do."""
    copy = op("Memcpy DtoD (Device -> Device)", 10, 410, kind=Kind.MEMCPY, launch=0.0)
    d = diagnosed(rank(copy, op("matmul", 410, 1010, launch=300.0)))
    found = finding(d, "copies")
    assert found.title.startswith("40% of the step (0.40 ms) is copying")
    assert found.cost_us == pytest.approx(100, abs=15)
    assert "would take only 0.10 ms less" in found.evidence
    assert d.verdict.endswith("; at most 0.10 ms can be saved.")


def test_a_step_of_no_length_is_diagnosed() -> None:
    copy = op(PINNED, 10, 410, kind=Kind.MEMCPY, launch=0.0)
    assert not diagnosed(rank(copy, steps=((500.0, 500.0),))).findings


def test_no_finding_reads_as_nothing() -> None:
    """A step of 21 µs: 3 µs are 14 %, but 0.00 ms."""
    d = diagnosed(rank(op("a", 1, 10, launch=0.0), op("b", 12, 21, launch=1.0)))
    assert not d.findings


def test_a_rank_without_a_gpu_says_what_its_host_was_in() -> None:
    cpu = Device(name="cpu")
    parts = [op("aten::mm", 0, 100, launch=NAN), op("aten::mm", 2000, 2100, launch=NAN)]
    d = diagnosed(rank(*parts, host("loss.py(3): backward", 120, 1990, PYTHON), steps=((0.0, 2100.0),), device=cpu))
    assert d.idle is not None
    assert d.idle.explained_us >= 0.9 * d.idle.idle_us
    assert "loss.py(3): backward" in finding(d, "host_stall").title
    assert "GPU" not in finding(d, "host_stall").title + finding(d, "host_stall").evidence


NAMES = ("aten::add", "cudaLaunchKernel", "cudaFree", "cudaStreamSynchronize", "train.py(1): step",
         "enumerate(DataLoader)")  # fmt: skip
KINDS = (HostKind.OP, HostKind.RUNTIME, HostKind.PYTHON, HostKind.ANNOTATION, HostKind.SYNC)
times = st.integers(0, 3000).map(float)


@st.composite
def any_rank(draw: st.DrawFn) -> Rank:
    """Any operations and host ranges, badly nested too, launched before, late, or at an unknown time."""
    ops, hosts = [], []
    for _ in range(draw(st.integers(1, 12))):
        start, length = draw(times), draw(st.integers(1, 800))
        launch = draw(st.one_of(st.just(NAN), st.just(start - draw(st.integers(0, 900)))))
        ops.append(op(draw(st.sampled_from("abc")), start, start + length, launch=launch,
                      stream=draw(st.sampled_from((7, 9))), thread=draw(st.integers(0, 2))))  # fmt: skip
    for _ in range(draw(st.integers(0, 20))):
        start, length = draw(times), draw(st.integers(0, 2000))
        kind = draw(st.sampled_from(KINDS))
        hosts.append(host(draw(st.sampled_from(NAMES)), start, start + length, kind, thread=draw(st.integers(0, 3))))
    cuts = sorted(draw(st.sets(st.integers(0, 4000), min_size=2, max_size=4)))
    device = Device(name=draw(st.sampled_from(("cpu", "NVIDIA H200"))))
    steps = [(float(a), float(b)) for a, b in itertools.pairwise(cuts)]
    return rank(*ops, *hosts, steps=steps, device=device)


@settings(max_examples=150, deadline=None)
@given(st.lists(any_rank(), min_size=1, max_size=2))
def test_causes_add_up_to_the_idle_time(ranks: list[Rank]) -> None:
    """Of every gap, of every rank, and of the job; no more is explained than there is, and none costs more."""
    for number, r in enumerate(ranks):
        d = digested(r, number, len(ranks))
        gaps = d.gaps
        first = np.flatnonzero(gaps.whole)
        assert (gaps.time > 0).all()
        assert np.add.reduceat(gaps.time, first) == pytest.approx((gaps.end - gaps.start)[first])
        busy = Intervals.union(d.gpu.start, d.gpu.end)
        assert busy.within(gaps.start, gaps.end).sum() == pytest.approx(0)
        assume((d.steps.end > d.steps.start).all())
        whole = float(d.steps.end.max() - d.steps.start.min())
        inside = Intervals.union(gaps.start, gaps.end).within(d.steps.start, d.steps.end).sum()
        covered = busy.within(d.steps.start, d.steps.end).sum()
        assert inside + covered == pytest.approx((d.steps.end - d.steps.start).sum(), abs=1e-6 * whole)
    found = diagnosed(*ranks)
    assert found.idle is not None
    assert found.idle.idle_us == pytest.approx(found.totals.idle_us / len(found.steps), abs=1e-6)
    assert sum(c.us for c in found.idle.causes) == pytest.approx(found.idle.idle_us, abs=1e-6)
    assert found.idle.explained_us <= found.idle.idle_us + 1e-6
    if found.replay is not None:  # less work and fewer waits never take longer than what was measured
        most = max(found.replay.measured_us, found.replay.replayed_us)
        assert all(what_if.step_us <= most + 1e-3 for what_if in found.replay.what_if)
    assert all(5.0 <= f.cost_us <= found.totals.duration_us / len(found.steps) * 2 for f in found.findings)
