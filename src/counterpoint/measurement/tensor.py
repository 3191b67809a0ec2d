"""Measure matmuls that depend on a collective: matmul and collective alone, and together by every mechanism.

All of them take turns in the same rounds. A result is compared with that of float64 before it is timed, and the
report of the group that ran its calls says by which path: a mechanism that did not take effect is marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.submit.tensors import dtype_name
from counterpoint.errors import Misconfigured
from counterpoint.machine.bus_bandwidth import bus_gb_per_s
from counterpoint.machine.profile import profile_of
from counterpoint.measurement.collective import Comm, allocate, relative_error
from counterpoint.measurement.mechanisms import joined
from counterpoint.measurement.open_mechanisms import Checked, open_checked
from counterpoint.measurement.rounds import Experiment, SamplesOf, comm_time, compute_time, time_of, why_late
from counterpoint.measurement.session import Session
from counterpoint.measurement.trial import Trial
from counterpoint.measurement.workloads import DependentMatmul, find_dependent
from counterpoint.pair.arrivals import ShardedMatmul, hiding_of
from counterpoint.pair.curves import RowCurve
from counterpoint.parallel.options import TensorOptions
from counterpoint.parallel.tensor.group import TensorGroup
from counterpoint.parallel.tensor.overlapped import Weight
from counterpoint.records.measurement import Block, BlockRow, Plan

if TYPE_CHECKING:
    from torch import Tensor

_MATMUL = "matmul alone"


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Holds a matmul's operands on this rank: random numbers, since zeros would speed the matmul up."""

    call: DependentMatmul
    rows: Tensor  # [m, k], different on each rank
    shard: Tensor  # its part of the rows, before they are gathered
    weight: Tensor  # [k, n], the transposed view that nn.Linear multiplies by

    @classmethod
    def random(cls, session: Session, call: DependentMatmul, seed: int) -> Operands:
        """Return random operands for this rank."""
        generator = torch.Generator(device=session.device).manual_seed(seed + session.rank)
        make = partial(torch.empty, device=session.device, dtype=session.dtype)
        rows = make(call.m, call.k).normal_(generator=generator)
        weight = make(call.n, call.k).normal_(generator=generator).div_(math.sqrt(call.k)).t()
        return cls(call=call, rows=rows, shard=rows[: call.m // session.world_size], weight=weight)

    def by(self, group: TensorGroup) -> Callable[[], Tensor]:
        """Return a function that runs the matmul and its collective by the mechanism of `group`."""
        weight = Weight(matrix=self.weight)
        if self.call.collective == "all_gather":
            return lambda: group.all_gather_matmul(self.shard, [weight], 0)[1][0]
        return lambda: group.matmul_reduce_scatter(self.rows, weight, "sum", 0)

    def plain(self, session: Session, dtype: torch.dtype) -> Tensor:
        """Return the result of torch's collective and one matmul, computed in `dtype`. All ranks call it together."""
        weight, ranks = self.weight.to(dtype), session.world_size
        if self.call.collective == "all_gather":
            whole = torch.empty_like(self.rows)
            torch_function("all_gather")(whole, self.shard, group=session.world)
            return whole.to(dtype) @ weight
        product = self.rows.to(dtype) @ weight
        own = product.new_empty(self.call.m // ranks, self.call.n)
        torch_function("reduce_scatter")(own, product, group=session.world)
        return own


@torch.no_grad()
def dependent_matmul(session: Session, block: Block, plan: Plan, unavailable: dict[str, str]) -> Iterator[Experiment]:
    """Yield the experiment of a matmul and its collective: each alone, and both together by each mechanism.

    Raises:
        Misconfigured: there is no such matmul, its rows do not divide, or memory does not suffice.
    """
    call = find_dependent(block.what)
    if call.m % session.world_size:
        raise Misconfigured(f"{block.what} on {session.world_size} ranks: give a multiple of their number as M")
    session.require_memory(call.memory_bytes(session.dtype.itemsize), block.what)
    operands = Operands.random(session, call, plan.seed)
    checked = _checked(session, block, operands, plan, unavailable)
    session.give_memory_back()
    yield _in_turns(session, block, operands, checked)
    for one in checked:
        one.caller.close()


def _checked(
    session: Session, block: Block, operands: Operands, plan: Plan, unavailable: dict[str, str]
) -> list[Checked[TensorGroup]]:
    """Open each mechanism, and check its first result against float64: at most twice the error of torch's result."""
    exact = operands.plain(session, torch.float64)
    most = 2 * relative_error(operands.plain(session, session.dtype), exact)
    communicator = CommunicatorOptions(timeout_s=plan.timeout_s)
    return open_checked(
        session,
        block.mechanisms,
        lambda name: TensorGroup(session.world, TensorOptions(mechanism=name, communicator=communicator)),  # type: ignore[arg-type]
        lambda group: operands.by(group)(),
        lambda result: (relative_error(result, exact), most),
        unavailable,
        allowed="that of torch's own",
    )


def _in_turns(
    session: Session, block: Block, operands: Operands, checked: Sequence[Checked[TensorGroup]]
) -> Experiment:
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
    trials |= {one.name: _trial(session, operands.by(one.caller)) for one in checked}
    size, lanes = call.moved * session.dtype.itemsize, session.lanes(lambda: None, comm.launch)
    trials[alone] = lambda: session.stage.run(lanes, "comm_alone")

    def rows(samples: SamplesOf[str]) -> list[BlockRow]:
        times = {name: time_of(of, comm_time if name == alone else compute_time) for name, of in samples.items()}
        us = {name: time.us for name, time in times.items()}
        longer_us, can_hide = max(us[_MATMUL], us[alone]), _can_hide(session, operands, us[_MATMUL])
        paths = {one.name: one.path(session) for one in checked}
        marks = {one.name: one.marked(*paths[one.name]) for one in checked}
        found = []
        for name in (_MATMUL, alone, *paths):
            path, why = paths.get(name, (None, None))
            compared = (_MATMUL, alone, name) if name in paths else (name,)
            row = BlockRow(
                what=block.what,
                mechanism=name,
                size_bytes=None if name == _MATMUL else size,
                time=times[name],
                gb_per_s=bus_gb_per_s(call.collective, size, session.world_size, us[name]) if name == alone else None,
                tflops=None if name == alone else call.flops / us[name] / 1e6,
                can_hide=can_hide,
                over_longer=us[name] / longer_us - 1 if name in paths else None,
                path=path,
                why=why,
                marked=joined(marks.get(name), why_late(*(samples[each] for each in compared))),
            )
            found.append(row)
        return found

    return Experiment(trials=trials, rows=rows)


def _trial(session: Session, run: Callable[[], Any]) -> Callable[[], Trial]:
    lanes = session.lanes(torch.no_grad()(run), lambda: None)  # a CPU's trials run in threads of their own
    return lambda: session.stage.run(lanes, "compute_alone")


def _can_hide(session: Session, operands: Operands, matmul_us: float) -> bool:
    """Return whether, by `hiding_of` and the profile's links, communication can hide behind a matmul of `matmul_us`."""
    call = operands.call
    curve = RowCurve(n=call.n, k=call.k, dtype=dtype_name(operands.rows.dtype), points=((call.m, matmul_us),))
    shards = (call.m // session.world_size,) * session.world_size
    task = ShardedMatmul(operation=call.operation, curves=(curve,), shard_rows=shards)
    return hiding_of(task, profile_of(session.gpu_name)).hides
