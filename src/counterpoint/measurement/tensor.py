"""Measure matmuls that depend on communication: matmul and collective alone, and both by every mechanism.

All of them take turns in the same rounds. A result is compared with that of float64 before it is timed, and the way
that calls went comes from the report of the group that made them: what did not take effect is marked.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._symmetric_memory  # noqa: F401 - registers torch's fused operations

from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.tensors import dtype_name
from counterpoint.errors import Misconfigured, Unsupported, printable
from counterpoint.machine.bus_bandwidth import bus_gb_per_s
from counterpoint.machine.profile import profile_of
from counterpoint.measurement.collective import Comm, allocate, relative_error
from counterpoint.measurement.dependent import DependentMatmul, find_dependent
from counterpoint.measurement.rows import comm_time, compute_time, play_rounds, time_of, why_late
from counterpoint.measurement.session import Session
from counterpoint.measurement.suites import SYMM_MEM
from counterpoint.measurement.trial import Trial
from counterpoint.pair.arrivals import ShardedMatmul, hiding_of
from counterpoint.pair.curves import RowCurve
from counterpoint.parallel.options import TensorOptions
from counterpoint.parallel.tensor.group import TensorGroup
from counterpoint.parallel.tensor.overlapped import Weight
from counterpoint.records.measurement import Block, BlockRow, Outcome, Plan

if TYPE_CHECKING:
    from torch import Tensor

_FORCED = ("serial", "cuts", "flagged")  # mechanisms that a call may be unable to take
_MATMUL = "matmul alone"


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Holds what one matmul reads on this rank: random numbers, never zeros, which would make it faster."""

    call: DependentMatmul
    rows: Tensor  # [m, k], on each rank others
    shard: Tensor  # its part of the rows, before they are gathered
    weight: Tensor  # [k, n], the transposed view that nn.Linear multiplies by

    @classmethod
    def random(cls, session: Session, call: DependentMatmul, seed: int) -> Operands:
        """Return operands of this rank."""
        generator = torch.Generator(device=session.device).manual_seed(seed + session.rank)
        make = partial(torch.empty, device=session.device, dtype=session.dtype)
        rows = make(call.m, call.k).normal_(generator=generator)
        weight = make(call.n, call.k).normal_(generator=generator).div_(math.sqrt(call.k)).t()
        return cls(call=call, rows=rows, shard=rows[: call.m // session.world_size], weight=weight)

    def by(self, group: TensorGroup) -> Callable[[], Tensor]:
        """Return the call by the way that a group takes."""
        weight = Weight(matrix=self.weight)
        if self.call.collective == "all_gather":
            return lambda: group.all_gather_matmul(self.shard, [weight], 0)[1][0]
        return lambda: group.matmul_reduce_scatter(self.rows, weight, "sum", 0)

    def by_symm_mem(self, group_name: str) -> Callable[[], Tensor]:
        """Return the call by torch's fused operation."""
        ops: Any = torch.ops.symm_mem
        if self.call.collective == "all_gather":
            fused = ops.fused_all_gather_matmul
            return lambda: fused(self.shard, [self.weight], 0, group_name, return_A=False)[1][0]
        return lambda: ops.fused_matmul_reduce_scatter(self.rows, self.weight, "sum", 0, group_name)

    def plain(self, session: Session, dtype: torch.dtype) -> Tensor:
        """Return the result in a dtype, by torch's collective and one matmul. All ranks call it."""
        weight, ranks = self.weight.to(dtype), session.world_size
        if self.call.collective == "all_gather":
            whole = torch.empty_like(self.rows)
            torch_function("all_gather")(whole, self.shard, group=session.world)
            return whole.to(dtype) @ weight
        product = self.rows.to(dtype) @ weight
        own = product.new_empty(self.call.m // ranks, self.call.n)
        torch_function("reduce_scatter")(own, product, group=session.world)
        return own


@dataclass(kw_only=True)
class _Opened:
    """Holds mechanisms that are ready: their calls, the groups of ours, and why others cannot run or are wrong."""

    calls: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    groups: dict[str, TensorGroup] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def measure_dependent(session: Session, block: Block, plan: Plan) -> Outcome:
    """Return the rows of a matmul and its collective, alone and by each mechanism. All ranks call it alike.

    Raises:
        Misconfigured: there is no such matmul, its rows do not divide, or memory does not suffice.
    """
    call = find_dependent(block.what)
    if call.m % session.world_size:
        raise Misconfigured(f"{block.what} on {session.world_size} ranks: give a multiple of their number as M")
    session.require_memory(call.memory_bytes(session.dtype.itemsize), block.what)
    operands = Operands.random(session, call, plan.seed)
    opened = _open(session, operands, block.mechanisms, plan)
    rows = _timed(session, block, operands, opened, plan)
    for group in opened.groups.values():
        group.close()
    outcome = Outcome(scenario=block.name, blocks=rows, unavailable=opened.unavailable)
    del operands, opened
    _free(session)
    return outcome


def _open(session: Session, operands: Operands, mechanisms: tuple[str, ...], plan: Plan) -> _Opened:
    """Prepare each mechanism, and compare its first result with float64: at most twice the error of torch's own."""
    opened = _Opened()
    exact = operands.plain(session, torch.float64)
    allowed = session.gather(2 * relative_error(operands.plain(session, session.dtype), exact))
    for name in mechanisms:
        try:
            if name == SYMM_MEM:
                call, result = _symm_mem(session, operands)
            else:
                options = TensorOptions(mechanism=name, communicator=CommunicatorOptions(timeout_s=plan.timeout_s))  # type: ignore[arg-type]
                opened.groups[name] = TensorGroup(session.world, options)
                call = operands.by(opened.groups[name])
                result = session.raise_together(call)
        except Unsupported as error:
            opened.unavailable[name] = str(error)
            continue
        opened.calls[name] = call
        errors = session.gather(relative_error(result, exact))
        rank = next((rank for rank, error in enumerate(errors) if not error <= allowed[rank]), None)
        if rank is not None:
            opened.wrong[name] = (
                f"wrong on rank {rank}: relative error {errors[rank]:.2e}, and {allowed[rank]:.2e}, twice that of "
                "torch's own, is allowed"
            )
        del result
    del exact
    _free(session)
    return opened


def _symm_mem(session: Session, operands: Operands) -> tuple[Callable[[], Tensor], Tensor]:
    """Return the call by torch's fused operation and its first result; raise Unsupported if a rank cannot run it."""
    call = operands.by_symm_mem(session.world.group_name)
    result, reason = operands.shard, None if session.is_cuda else "torch's fused operations run on GPUs only"
    if reason is None:
        try:
            result = call()
            torch.cuda.synchronize(session.device)
        except (RuntimeError, AttributeError) as error:
            reason = f"torch's fused operation failed: {printable(str(error), 200)}"
    reasons = [one for one in session.gather(reason) if one is not None]
    if reasons:
        raise Unsupported(reasons[0])
    return call, result


def _timed(session: Session, block: Block, operands: Operands, opened: _Opened, plan: Plan) -> tuple[BlockRow, ...]:
    call, alone = operands.call, f"{'nccl' if session.is_cuda else 'gloo'} alone"
    product = operands.rows.new_empty(call.m, call.n)
    buffers = allocate(
        call.collective,
        numel=call.moved,
        dtype=session.dtype,
        rank=session.rank,
        world_size=session.world_size,
        seed=1,
        empty=partial(torch.empty, dtype=session.dtype, device=session.device),
    )
    comm = Comm(buffers=buffers, group=session.world)
    session.raise_together(comm.check)
    matmul = partial(torch.mm, operands.rows, operands.weight, out=product)
    trials = {_MATMUL: _trial(session, matmul)}
    trials |= {name: _trial(session, run) for name, run in opened.calls.items()}
    lanes = session.lanes(lambda: None, comm.launch)
    trials[alone] = lambda: session.stage.run(lanes, "comm_alone")
    samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
    times = {name: time_of(of, comm_time if name == alone else compute_time) for name, of in samples.items()}
    size, us = call.moved * session.dtype.itemsize, times[_MATMUL].us
    longer_us, can_hide = max(us, times[alone].us), _can_hide(session, operands, us)

    def row(name: str, **more: Any) -> BlockRow:
        return BlockRow(what=block.what, mechanism=name, time=times[name], can_hide=can_hide, **more)

    def rate(name: str) -> float:
        return call.flops / times[name].us / 1e6

    bandwidth = bus_gb_per_s(call.collective, size, session.world_size, times[alone].us)
    rows = [
        row(_MATMUL, tflops=rate(_MATMUL), marked=why_late(samples[_MATMUL])),
        row(alone, size_bytes=size, gb_per_s=bandwidth, marked=why_late(samples[alone])),
    ]
    for name in opened.calls:
        path, why = _way(session, opened.groups.get(name))
        failed = f"ran as {path}: {why}" if name in _FORCED and path != name else None
        late = why_late(samples[_MATMUL], samples[alone], samples[name])
        rows.append(
            row(
                name,
                size_bytes=size,
                tflops=rate(name),
                over_longer=times[name].us / longer_us - 1,
                path=path,
                why=why,
                marked="; ".join(filter(None, (opened.wrong.get(name), failed, late))) or None,
            )
        )
    return tuple(rows)


def _trial(session: Session, run: Callable[[], Any]) -> Callable[[], Trial]:
    lanes = session.lanes(torch.no_grad()(run), lambda: None)  # a CPU's trials run in threads of their own
    return lambda: session.stage.run(lanes, "compute_alone")


def _can_hide(session: Session, operands: Operands, matmul_us: float) -> bool:
    """Return what the rule says, by the matmul as measured and the links of the profile."""
    call = operands.call
    curve = RowCurve(n=call.n, k=call.k, dtype=dtype_name(operands.rows.dtype), points=((call.m, matmul_us),))
    shards = (call.m // session.world_size,) * session.world_size
    task = ShardedMatmul(operation=call.operation, curves=(curve,), shard_rows=shards)
    return hiding_of(task, profile_of(session.gpu_name)).hides


def _way(session: Session, group: TensorGroup | None) -> tuple[str | None, str | None]:
    """Return which way all calls of a group went, on all ranks, and why; None for a mechanism that is not ours."""
    found: Mapping[str, str] = {} if group is None else {str(row.path): row.why for row in group.report().calls}
    ways = {path: why for rank in session.gather(found) for path, why in rank.items()}
    return (" and ".join(ways), "; ".join(dict.fromkeys(ways.values()))) if ways else (None, None)


def _free(session: Session) -> None:
    gc.collect()
    if session.is_cuda:
        torch.cuda.empty_cache()
