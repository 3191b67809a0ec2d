"""The only door from the golden record to the library: plain values in, plain values out.

Everything that a rebuilding may rename or move is named in this file and nowhere else in `tests/golden`. What comes
out holds no name of a class, a module or an attribute, so that a new name changes no record.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import budget_rule
import msgspec
import plan_published
import sum_sms
from typer.testing import CliRunner

from counterpoint.cli import app
from counterpoint.collectives.cpu.transport import CpuTransport
from counterpoint.collectives.cuda.lower import (
    Addresses,
    CopyAsync,
    DriverCall,
    MemoryOperations,
    ReduceLaunch,
    lower,
)
from counterpoint.collectives.cuda.transport import CudaTransport
from counterpoint.collectives.multihost.phases import Grid, Phase
from counterpoint.collectives.program import clock as simulate
from counterpoint.collectives.program import operations
from counterpoint.collectives.program.calls import Call, Span
from counterpoint.collectives.program.coalesced import Parts, place_on_tensors
from counterpoint.collectives.program.operations import plan_all
from counterpoint.collectives.program.steps import (
    AwaitEvent,
    Batch,
    Copy,
    Flag,
    LocalCopy,
    Program,
    RecordEvent,
    Reduce,
    Signal,
    Step,
    Tuning,
)
from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.machine.profile import Contention, default_profile
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.choice import choose_gemm_sms, choose_split
from counterpoint.pair.curves import curves_from
from counterpoint.pair.sm_split import SmLayout
from counterpoint.pair.together import Pair
from counterpoint.records.measurement import Measurement
from tests.support.flatten import flatten, phases_all

Plain: TypeAlias = dict[str, Any]

RESULTS = Path(__file__).resolve().parents[2] / "results"
TUNING_FIELDS = (
    "chunk_bytes", "last_bytes", "arrivals", "relay_bytes", "turn_bytes", "staging_bytes"
)  # fmt: skip
RATES_FIELDS = (
    "push_gb_per_s", "link_gb_per_s", "hbm_gb_per_s", "copy_us", "kernel_us", "batch_us", "signal_us", "event_us",
    "call_us", "launch_us",
)  # fmt: skip


# one call


def make_call(operation: str, arguments: Sequence[Any], options: Plain) -> Call:
    """Return the call of an operation, as the library checks and describes it."""
    return getattr(operations, operation)(*arguments, **options)  # type: ignore[no-any-return]


def call_fields(call: Call) -> Plain:
    """Return what a call asks for."""
    return {"operation": call.operation, "sizes": call.sizes, "root": call.root, "own": call.own}


def choose_tuning(call: Call, executor: str, *, early_release: bool, staging_bytes: int | None) -> Tuning:
    """Return the tuning that the transport of `executor` (cuda or cpu) chooses."""
    transport: Any = {"cuda": CudaTransport, "cpu": CpuTransport}[executor]
    made = object.__new__(transport)  # neither a GPU nor another rank is needed to choose
    made._staging_bytes, made._rates = staging_bytes, default_profile().rates
    made._chunk_bytes = None if executor == "cuda" else 1 << 16
    return made.tuning(call, early_release=early_release)  # type: ignore[no-any-return]


def tuning_fields(tuning: Tuning) -> Plain:
    """Return every field of a tuning."""
    return {name: getattr(tuning, name) for name in TUNING_FIELDS}


def path(call: Call) -> str:
    """Return whether torch makes the call where both can."""
    return path_of_bytes(call.operation, sum(call.sizes[0]) if call.root is None else call.output_bytes(0))


def path_of_bytes(operation: str, num_bytes: int) -> str:
    """Return the way that a call of so many bytes of the full array takes."""
    return "torch" if num_bytes < crossover_bytes().get(operation, 0) else "zero_sm"


# programs


def programs_of(call: Call, tuning: Tuning) -> tuple[Program, ...]:
    """Return the programs of all ranks."""
    return plan_all(call, tuning)


def programs_on_tensors(programs: Sequence[Program], layout: Sequence[Plain]) -> tuple[Program, ...]:
    """Return the programs of a coalesced call: `layout` says which buffers are several tensors, and where they lie."""
    parts = tuple((each["buffer"], Parts(**each["parts"])) for each in layout)
    return tuple(place_on_tensors(program, parts) for program in programs)


def programs_over_hosts(
    call: Call, hosts: int, local: int, slice_bytes: int | None
) -> tuple[list[list[Any]], tuple[Program, ...]]:
    """Return the phases of every rank of a call over several hosts, and the one program made out of them."""
    grid = Grid(hosts=hosts, local=local)
    made = phases_all(call, grid, slice_bytes=slice_bytes)
    return [[_phase(phase) for phase in found] for found in made], flatten(call, grid, made)


def predicted_us(programs: Sequence[Program], *, early_release: bool = False, local: int | None = None) -> float:
    """Return the simulated time of the slowest rank; `local`: ranks of each host, None: all on one."""
    network = None if local is None else simulate.HostNetwork(local=local)
    return simulate.simulate(programs, early_release=early_release, network=network).us


def program_fields(program: Program) -> Plain:
    """Return what one rank does, step by step, and the memory that it takes."""
    return {
        "release": [_step(step) for step in program.release],
        "steps": [_step(step) for step in program.steps],
        "finish": [_step(step) for step in program.finish],
        "staging_bytes": program.staging_bytes,
        "network_bytes": program.reduced_bytes("network"),
        "scratch_bytes": program.scratch_bytes,
        "flags": dict(sorted(program.num_flags.items())),
        "pushers": sorted(program.pushers),
    }


def driver_calls(program: Program) -> list[Any]:
    """Return the driver calls of one rank, with buffers at addresses that are made up and easy to tell apart."""
    ranks = range(program.world_size)
    addresses = Addresses(
        input=1 << 40,
        output=tuple((2 << 40) + (rank << 36) for rank in ranks),
        staging=tuple((4 << 40) + (rank << 36) for rank in ranks),
        output_flags=tuple((6 << 40) + (rank << 36) for rank in ranks),
        staging_flags=tuple((8 << 40) + (rank << 36) for rank in ranks),
    )
    return [_driver_call(call) for call in lower(program, addresses)]


def _span(span: Span | None) -> list[Any] | None:
    return None if span is None else [span.buffer, span.offset, span.num_bytes]


def _flag(flag: Flag) -> list[Any]:
    return [flag.buffer, flag.kind, flag.peer, flag.chunk]


def _step(step: Step) -> list[Any]:
    match step:
        case Copy():
            return ["copy", step.lane, step.peer, _span(step.source), _span(step.target)]
        case LocalCopy():
            return ["local_copy", step.lane, _span(step.source), _span(step.target)]
        case Reduce():
            return ["reduce", step.lane, [_span(source) for source in step.sources], _span(step.target)]
        case RecordEvent():
            return ["record", step.lane, step.event]
        case AwaitEvent():
            return ["await", step.lane, step.event]
        case Batch():
            return ["batch", step.lane, [
                ["signal", one.peer, _flag(one.flag)] if isinstance(one, Signal)
                else ["wait", _flag(one.flag), _span(one.brings)]
                for one in step.operations
            ]]  # fmt: skip


def _phase(phase: Phase) -> list[Any]:
    return [phase.level, call_fields(phase.call), _span(phase.input), _span(phase.output), phase.after]


def _driver_call(call: DriverCall) -> list[Any]:
    match call:
        case CopyAsync():
            return ["copy", call.lane, call.target, call.source, call.num_bytes, call.local]
        case MemoryOperations():
            return ["memory", call.lane, [[one.kind, one.address, one.value] for one in call.operations]]
        case ReduceLaunch():
            return ["reduce", call.lane, call.sources, call.target, call.num_bytes]
        case _:
            return ["record" if isinstance(call, RecordEvent) else "await", call.lane, call.event]


# tables


def crossover_bytes() -> dict[str, int]:
    """Return the size below which torch makes calls, by operation."""
    return operations.crossovers(default_profile())


def clock_rates() -> dict[str, float]:
    """Return the rates of the simulator's machine."""
    return {name: getattr(default_profile().rates, name) for name in RATES_FIELDS}


def bus_factors(operation: str, ranks: int) -> dict[str, float]:
    """Return bus bandwidth over bytes / time."""
    return {"factor": bus_factor(operation, ranks)}


# pairs


@cache
def _measured(name: str) -> Measurement:
    zipped = RESULTS / f"{name}.json.gz"
    text = gzip.decompress(zipped.read_bytes()) if zipped.exists() else (RESULTS / f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=Measurement)


def gemm_sms_rows() -> list[Plain]:
    """Return how many SMs the GEMM of each measured pair gets beside the sums of a collective, and all predictions."""
    measured, found = _measured("reductions-4xh200"), []
    for pair in sum_sms.pairs_of(measured, 132):
        row = pair.by_sms[sum_sms.ALL][0]
        chosen = choose_gemm_sms(
            Pair(
                products=find_workload(row.workload).products, compute_us=row.compute_alone.us,
                collective=row.collective, size_bytes=row.size_bytes, comm_us=row.comm_alone.us, mechanism="zero_sm",
                num_ctas=0, world_size=measured.environment.world_size, layout=SmLayout.even(132),
            ),
            default_profile(),
        )  # fmt: skip
        predictions = {str(sms): us for sms, us in chosen.together_us.items()}
        found.append({"row": pair.scenario, "gemm_sms": chosen.gemm_sms, "together_us": predictions})
    return found


def budget_rows(calibrations: dict[str, dict[str, float] | None], views: dict[str, Plain]) -> list[Plain]:
    """Return the division of SMs that the rule of budgets chooses for each pair that was measured."""
    measured = _measured("budget-pairs-4xh200")
    curves = curves_from(measured.blocks, budget_rule.products_of(measured.blocks), layout=SmLayout.even(132))
    rows = [*measured.rows, *_measured("forum-4xh200").rows]
    pairs = {(row.workload, row.collective, row.size_bytes) for row in rows}
    found = []
    for (workload, collective, size), (name, numbers), (view, options) in (
        (pair, calibration, view)
        for pair in sorted(pairs)
        if curves.cover(*pair, budget_rule.STOCK)
        for calibration in calibrations.items()
        for view in views.items()
    ):
        contention = None if numbers is None else Contention(**numbers)  # type: ignore[arg-type]
        best = choose_split(curves, workload, collective, size, contention=contention, **options)
        found.append({
            "row": f"{workload}, {collective} of {size}, {name}, {view}",
            "max_ctas": best.split.max_ctas, "cga_cluster": best.split.cga_cluster,
            "gemm_sms": best.split.gemm_sms, "compute_us": best.compute_us, "comm_us": best.comm_us,
            "together_us": dict(best.together_us), "objective_us": best.objective_us, "hidden": best.hidden,
            "waves_alone": best.waves_alone, "waves_together": best.waves_together, "fits": best.fits,
        })  # fmt: skip
    return found


# plans and diagnoses


@cache
def published() -> tuple[tuple[plan_published.Row, Any], ...]:
    """Return every row of the published-steps table with its predicted step; computed once in a process."""
    predictions = plan_published.Predictions()
    return tuple((row, predictions.step(row)) for row in plan_published.rows())


def published_rows() -> list[Plain]:
    """Return the predicted value and the parts of the step for every row of the published-steps table."""
    return [
        {"row": f"{row.group}: {row.name}", "unit": row.unit, "predicted": row.read(row.job, step),
         "step_us": step.step_us, "exposed_comm_us": step.exposed_comm_us, "parts_us": dict(step.parts)}
        for row, step in published()
    ]  # fmt: skip


def command(arguments: Sequence[str]) -> Plain:
    """Return the JSON that `counterpoint ARGUMENTS` prints; paths are relative to the root of the repository."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    if result.exit_code != 0:
        raise AssertionError(f"counterpoint {' '.join(arguments)}: exit code {result.exit_code}: {result.output}")
    return json.loads(result.stdout)  # type: ignore[no-any-return]
