"""Measure one operation alone: a collective by size, a computation by settings of a control, or a machine's costs.

Costs are what no collective or GEMM alone tells: `launch kernel` (µs of the host for one operation of an eager layer,
forward and backward), `launch collective` (µs of the host for one all_gather of torch), `sum BYTES` (each rank adds up
its part of a full array of BYTES, which came from all ranks) and `lasting gemm MxNxK` (a GEMM after seconds without a
pause, when the power limit counts). Their one mechanism is `stock`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.cuda.sum_launch import bind
from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.controls.control import applied
from counterpoint.controls.parse import parse_mechanism
from counterpoint.machine.bus_bandwidth import bus_gb_per_s
from counterpoint.measurement.collective import elements_of, memory_bytes
from counterpoint.measurement.gpu_usage import observe, observe_compute
from counterpoint.measurement.mechanisms import Mechanism, find_mechanism
from counterpoint.measurement.open_mechanisms import offered, open_all
from counterpoint.measurement.rounds import Experiment, SamplesOf, comm_time, compute_time, time_of, why_late
from counterpoint.measurement.session import Session
from counterpoint.measurement.trial import Trial
from counterpoint.measurement.workloads import find_workload, prepare
from counterpoint.records.measurement import Block, BlockRow, Plan

_SUM = re.compile(r"sum ([1-9]\d{0,12})")
_LASTING = "lasting "
_LASTING_S = {"cuda": 3.0, "cpu": 0.05}  # seconds of load; the power limit and the fans react within about one
_BATCH_US = 100_000.0  # µs of a lasting load between two looks at the clock
_LAUNCHES = 50
_WIDTH = 64  # width of the layer, so small that its kernels are shorter than their launches


def collective_alone(session: Session, block: Block, plan: Plan, unavailable: dict[str, str]) -> Iterator[Experiment]:
    """Yield one experiment per message size: a collective alone, by every mechanism."""
    asked = [find_mechanism(name, session.device.type) for name in block.mechanisms]
    mechanisms = offered(session, asked, block.what, unavailable)
    for size in block.sizes_bytes if mechanisms else ():
        yield from _of_size(session, block, size, mechanisms, unavailable)


def _of_size(
    session: Session, block: Block, size: int, mechanisms: Sequence[Mechanism], unavailable: dict[str, str]
) -> Iterator[Experiment]:
    numel = elements_of(size, session.dtype.itemsize, session.world_size)
    stock = session.lanes(lambda: None, lambda: None)
    copies = 1 + sum(mechanism.windows is not None for mechanism in mechanisms)
    session.require_memory(copies * memory_bytes(block.what, size, session.world_size), f"{block.what} of {size} bytes")
    size = numel * session.dtype.itemsize
    with open_all(session, mechanisms, block.what, numel, stock, unavailable) as (opened, plain):

        def rows(samples: SamplesOf[str]) -> list[BlockRow]:
            observed = observe(session, opened, plain)
            times = [time_of(samples[each.mechanism.name], comm_time) for each in opened]
            return [
                BlockRow(
                    what=block.what,
                    mechanism=each.mechanism.name,
                    size_bytes=size,
                    num_ctas=None if seen.usage is None else seen.usage.comm_ctas,
                    time=time,
                    gb_per_s=bus_gb_per_s(block.what, size, session.world_size, time.us),
                    marked=seen.marked or why_late(samples[each.mechanism.name]),
                )
                for each, time, seen in zip(opened, times, observed, strict=True)
            ]

        yield Experiment(trials={each.mechanism.name: each.trial(session, "comm_alone") for each in opened}, rows=rows)


def compute_alone(session: Session, block: Block, plan: Plan, unavailable: dict[str, str]) -> Iterator[Experiment]:
    """Yield the experiment that times a computation alone under each setting of its controls."""
    workload = find_workload(block.what)
    session.require_memory(workload.memory_bytes(session.compute_dtype.itemsize), block.what)
    found = [(name, () if name == "stock" else parse_mechanism(f"nccl+{name}")[1]) for name in block.mechanisms]
    asked = [Mechanism(name=name, controls=controls) for name, controls in found]
    mechanisms = offered(session, asked, block.what, unavailable)
    compute = prepare(workload, session.device, session.compute_dtype, seed=plan.seed + session.rank)
    stock = session.lanes(compute, lambda: None)
    with ExitStack() as stack:
        settings = [stack.enter_context(applied(mechanism.controls, stock)) for mechanism in mechanisms]

        def rows(samples: SamplesOf[str]) -> list[BlockRow]:
            controls = [mechanism.controls for mechanism in mechanisms]
            observed = observe_compute(session, list(zip(settings, controls, strict=True)), stock)
            times = [time_of(samples[mechanism.name], compute_time) for mechanism in mechanisms]
            return [
                BlockRow(
                    what=block.what,
                    mechanism=mechanism.name,
                    num_sms=None if seen.usage is None else seen.usage.compute_sms,
                    time=time,
                    tflops=workload.flops / time.us / 1e6,
                    marked=seen.marked or why_late(samples[mechanism.name]),
                )
                for mechanism, time, seen in zip(mechanisms, times, observed, strict=True)
            ]

        trials: dict[str, Callable[[], Trial]] = {
            mechanism.name: partial(session.stage.run, lanes, "compute_alone")
            for mechanism, lanes in zip(mechanisms, settings, strict=True)
        }
        yield Experiment(trials=trials, rows=rows)


def is_cost(what: str) -> bool:
    """Return whether block `what` measures a cost of the machine: of a launch, a lasting load, or a sum of buffers."""
    return what in _OF_HOST or what.startswith(_LASTING) or _SUM.fullmatch(what) is not None


def cost(session: Session, block: Block, plan: Plan, unavailable: dict[str, str]) -> Iterator[Experiment]:
    """Yield the experiment that measures one cost of a machine (`is_cost`)."""
    if found := _SUM.fullmatch(block.what):
        if session.is_cuda:
            yield from _sum(session, block.what, int(found[1]))
        else:
            unavailable["stock"] = "the sum kernel runs on GPUs"
        return
    host_us, flops = _OF_HOST.get(block.what, _lasting)(session, block.what), None
    if block.what.startswith(_LASTING):
        flops = find_workload(block.what.removeprefix(_LASTING)).flops
    yield _stock(block.what, lambda: Trial(compute_start=0.0, compute_end=host_us()), flops=flops)


def _stock(
    what: str, trial: Callable[[], Trial], *, num_bytes: int | None = None, flops: int | None = None
) -> Experiment:
    """Return an experiment that runs `trial` as mechanism `stock`; rows state GB/s with bytes, TFLOP/s with FLOPs."""

    def rows(samples: SamplesOf[str]) -> list[BlockRow]:
        time_us = time_of(samples[what], compute_time)
        return [
            BlockRow(
                what=what,
                mechanism="stock",
                time=time_us,
                gb_per_s=None if num_bytes is None else num_bytes / time_us.us / 1e3,
                tflops=None if flops is None else flops / time_us.us / 1e6,
                marked=why_late(samples[what]),
            )
        ]

    return Experiment(trials={what: trial}, rows=rows)


def _sum(session: Session, what: str, size_bytes: int) -> Iterator[Experiment]:
    """Yield the experiment that times the sum kernel on all SMs; its GB/s count bytes read and written."""
    world, shard = session.world_size, size_bytes // session.world_size // 512 * 512
    session.require_memory((world + 1) * shard, f"{what} of {size_bytes / 1e9:.2f} GB")
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
    yield _stock(what, lambda: session.stage.run(lanes, "compute_alone"), num_bytes=(world + 1) * shard)
    del sources, target  # the launch knows only their addresses


def _lasting(session: Session, what: str) -> Callable[[], float]:
    """Run a workload without pause until the device is warm; return a function that measures the workload's µs."""
    workload = find_workload(what.removeprefix(_LASTING))
    session.require_memory(workload.memory_bytes(session.dtype.itemsize), what)
    run = prepare(workload, session.device, session.dtype, seed=session.rank)
    run()
    session.gather(None)  # all ranks heat the machine at once
    each_us, begun = _each_us(session, run, 1), time.perf_counter()
    times = max(1, min(4096, round(_BATCH_US / each_us)))
    while time.perf_counter() - begun < _LASTING_S[session.device.type]:
        _each_us(session, run, times)
    return partial(_each_us, session, run, times)


def _each_us(session: Session, run: Callable[[], object], times: int) -> float:
    """Run `run` `times` times; return the µs per repetition, from the first launch until the device has finished."""
    begun = time.perf_counter()
    for _ in range(times):
        run()
    session.synchronize()
    return (time.perf_counter() - begun) / times * 1e6


def _host_us(session: Session, launch: Callable[[], object], operations: int = 1) -> float:
    """Return the host's µs to launch one operation, as a mean over several calls, without waiting for the device."""
    session.synchronize()
    session.gather(None)
    begun = time.perf_counter()
    for _ in range(_LAUNCHES):
        launch()
    host_us = (time.perf_counter() - begun) / _LAUNCHES * 1e6
    session.synchronize()
    return host_us / operations


def _of_kernel(session: Session, what: str) -> Callable[[], float]:
    layer = torch.nn.Sequential(
        torch.nn.RMSNorm(_WIDTH),
        torch.nn.Linear(_WIDTH, _WIDTH, bias=False),
        torch.nn.SiLU(),
        torch.nn.Linear(_WIDTH, _WIDTH, bias=False),
    ).to(session.device, session.dtype)
    tokens = torch.randn(_WIDTH, _WIDTH, device=session.device, dtype=session.dtype, requires_grad=True)

    def step() -> None:
        layer(tokens).sum().backward()

    step()  # allocates the gradients
    with _Counting() as counting:
        step()
    return partial(_host_us, session, step, counting.operations)


def _of_collective(session: Session, what: str) -> Callable[[], float]:
    send = torch.zeros(_WIDTH, device=session.device)
    received = torch.zeros(_WIDTH * session.world_size, device=session.device)
    return partial(_host_us, session, partial(torch_function("all_gather"), received, send, group=session.world))


_OF_HOST = {"launch kernel": _of_kernel, "launch collective": _of_collective}


class _Counting(TorchDispatchMode):
    """Counts the operations that compute; views do not count, since they launch no kernel."""

    operations: int = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and count it unless it only makes a view."""
        self.operations += not function.is_view
        return function(*args, **(kwargs or {}))
