"""Measure what no collective or GEMM alone tells of a machine: launches, sums, and GEMMs under lasting load.

Names: `launch kernel` (µs of the host for one operation of an eager layer, forward and backward), `launch collective`
(µs of the host for one all_gather of torch), `sum BYTES` (each rank adds up its part of a full array of BYTES, which
came from all ranks) and `lasting gemm MxNxK` (a GEMM after seconds without a pause, when the power limit counts).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.sums import bind
from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.measurement.rows import compute_time, play_rounds, time_of, timing, why_late
from counterpoint.measurement.session import Session
from counterpoint.measurement.workloads import find_workload, prepare
from counterpoint.records.measurement import Block, BlockRow, Outcome, Plan

_SUM = re.compile(r"sum ([1-9]\d{0,12})")
_LASTING = "lasting "
_LASTING_S = {"cuda": 3.0, "cpu": 0.05}  # the power limit and the fans take about a second
_BATCH_US = 100_000.0  # of a load that lasts, until the host looks at the clock
_LAUNCHES = 50
_WIDTH = 64  # of the layer: its kernels must be shorter than their launches


def is_cost(what: str) -> bool:
    """Return whether this is the name of such a block."""
    return what in _OF_HOST or what.startswith(_LASTING) or _SUM.fullmatch(what) is not None


def measure_cost(session: Session, block: Block, plan: Plan) -> Outcome:
    """Return the row of a block, by its one mechanism `stock`. All ranks call it with the same arguments."""
    if found := _SUM.fullmatch(block.what):
        return _sum(session, block, int(found[1]), plan)
    measure, tflops = _OF_HOST.get(block.what, _lasting), None
    time_us = timing(session.gather(measure(session, block.what, plan.rounds)[plan.dropped_rounds :]))
    if block.what.startswith(_LASTING):
        tflops = find_workload(block.what.removeprefix(_LASTING)).flops / time_us.us / 1e6
    row = BlockRow(what=block.what, mechanism="stock", time=time_us, tflops=tflops)
    return Outcome(scenario=block.name, blocks=(row,))


def _sum(session: Session, block: Block, size_bytes: int, plan: Plan) -> Outcome:
    """Return the row of the sum kernel on all SMs, with GB/s of memory, read and written."""
    if not session.is_cuda:
        return Outcome(scenario=block.name, unavailable={"stock": "the sum kernel runs on GPUs"})
    world, shard = session.world_size, size_bytes // session.world_size // 512 * 512
    session.require_memory((world + 1) * shard, f"{block.what} of {size_bytes / 1e9:.2f} GB")
    sources = torch.empty(world * shard // 2, dtype=torch.bfloat16, device=session.device).normal_()
    target = torch.empty(shard // 2, dtype=torch.bfloat16, device=session.device)
    addresses = tuple(sources.data_ptr() + rank * shard for rank in range(world))
    idle = session.lanes(lambda: None, lambda: None)
    launch = bind(
        ReduceLaunch(addresses, target.data_ptr(), shard, 0),
        Reduction(op="sum", dtype="bfloat16"),
        stream=idle.compute_stream.cuda_stream,
        device_sms=torch.cuda.get_device_properties(session.device).multi_processor_count,
    )
    lanes = replace(idle, compute=launch)
    samples = play_rounds(
        session,
        {block.what: lambda: session.stage.run(lanes, "compute_alone")},
        rounds=plan.rounds,
        dropped=plan.dropped_rounds,
        seed=plan.seed,
    )[block.what]
    time_us = time_of(samples, compute_time)
    rate = (world + 1) * shard / time_us.us / 1e3
    row = BlockRow(what=block.what, mechanism="stock", time=time_us, gb_per_s=rate, marked=why_late(samples))
    return Outcome(scenario=block.name, blocks=(row,))


def _lasting(session: Session, what: str, rounds: int) -> list[float]:
    """Return the µs of a workload in each of so many rounds, at the end of a time in which the device had no pause."""
    workload = find_workload(what.removeprefix(_LASTING))
    session.require_memory(workload.memory_bytes(session.dtype.itemsize), what)
    run = prepare(workload, session.device, session.dtype, seed=session.rank)
    run()
    session.gather(None)  # all ranks heat the machine at once
    each_us, begun = _each_us(session, run, 1), time.perf_counter()
    times = max(1, min(4096, round(_BATCH_US / each_us)))
    while time.perf_counter() - begun < _LASTING_S[session.device.type]:
        _each_us(session, run, times)
    return [_each_us(session, run, times) for _ in range(rounds)]


def _each_us(session: Session, run: Callable[[], object], times: int) -> float:
    """Return the µs of each of so many runs, from the first launch until the device has ended."""
    begun = time.perf_counter()
    for _ in range(times):
        run()
    session.synchronize()
    return (time.perf_counter() - begun) / times * 1e6


def _host_us(session: Session, launch: Callable[[], object]) -> float:
    """Return the µs that the host takes for each of several calls; the device follows behind."""
    session.synchronize()
    session.gather(None)
    begun = time.perf_counter()
    for _ in range(_LAUNCHES):
        launch()
    host_us = (time.perf_counter() - begun) / _LAUNCHES * 1e6
    session.synchronize()
    return host_us


def _of_kernel(session: Session, what: str, rounds: int) -> list[float]:
    layer = torch.nn.Sequential(
        torch.nn.RMSNorm(_WIDTH),
        torch.nn.Linear(_WIDTH, _WIDTH, bias=False),
        torch.nn.SiLU(),
        torch.nn.Linear(_WIDTH, _WIDTH, bias=False),
    ).to(session.device, session.dtype)
    tokens = torch.randn(_WIDTH, _WIDTH, device=session.device, dtype=session.dtype, requires_grad=True)

    def step() -> None:
        layer(tokens).sum().backward()

    step()  # gradients are allocated
    with _Counting() as counting:
        step()
    return [_host_us(session, step) / counting.operations for _ in range(rounds)]


def _of_collective(session: Session, what: str, rounds: int) -> list[float]:
    send = torch.zeros(_WIDTH, device=session.device)
    received = torch.zeros(_WIDTH * session.world_size, device=session.device)
    all_gather = torch_function("all_gather")
    return [_host_us(session, lambda: all_gather(received, send, group=session.world)) for _ in range(rounds)]


_OF_HOST = {"launch kernel": _of_kernel, "launch collective": _of_collective}


class _Counting(TorchDispatchMode):
    """Counts the operations that compute something; views launch no kernel."""

    operations: int = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        self.operations += not function.is_view
        return function(*args, **(kwargs or {}))
