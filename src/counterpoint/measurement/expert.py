"""Measure tokens that travel to their experts and back: by every mechanism alone, and beside compute and gathers.

A dispatch begins with tokens and ends with rows in the order of this rank's experts; a combine begins with such rows
and ends with sums. All mechanisms take turns in the same rounds. Before it is timed, a dispatch and a combine are
compared with float64; what is wrong, what went another way than asked, and transport that took SMs is marked.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from counterpoint.collectives.host.group import torch_function
from counterpoint.controls.observe import communicates, sides_of_all
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.gpus import peak_tflops
from counterpoint.measurement.dependent import TokenExchange, find_exchange
from counterpoint.measurement.exchange_mechanisms import FORCED, ExchangeMechanism, NcclExchange, opened_mechanism
from counterpoint.measurement.gpu_usage import Observed, combine, read_device
from counterpoint.measurement.rows import Samples, comm_time, play_rounds, row, time_of, why_late
from counterpoint.measurement.sample_tokens import SampleTokens, expert_scales
from counterpoint.measurement.session import Session
from counterpoint.measurement.trial import Case, Trial
from counterpoint.measurement.workloads import find_workload, prepare
from counterpoint.parallel.expert.layers import ExpertWeights
from counterpoint.records.measurement import LEGS, Block, BlockRow, Outcome, Plan, Row, Scenario, Usage

if TYPE_CHECKING:
    from torch import Tensor

_GATHERED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}  # of a layer's other parameters, as FSDP2 gathers them
_BESIDE: tuple[Case, ...] = ("serial", "together")
_DENSE = {"cuda": "gemm 8192x8192x8192", "cpu": "gemm 256x256x256*4"}


@dataclass(kw_only=True)
class _Opened:
    """Holds mechanisms that are ready, and why others cannot run or are wrong."""

    each: dict[str, ExchangeMechanism] = field(default_factory=dict)
    ways: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)  # which way calls went, and why
    seen: dict[str, Observed] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def marked(self, name: str) -> str | None:
        """Return why results of a mechanism must not be believed; None if nothing speaks against them."""
        path, why = self.ways[name]
        went = f"ran as {path}: {why}" if name in FORCED and path != name else None
        return _both(self.wrong.get(name), went, self.seen[name].marked)


@torch.no_grad()
def measure_exchange(session: Session, block: Block, plan: Plan) -> Outcome:
    """Return the rows of an exchange alone and beside other work, by each mechanism. All ranks call it alike.

    Raises:
        Misconfigured: there is no such exchange, the ranks cannot share its experts, or memory does not suffice.
    """
    exchange = find_exchange(block.what)
    if exchange.sizes.experts % session.world_size:
        raise Misconfigured(
            f"{block.what} on {session.world_size} ranks: give a number that divides {exchange.sizes.experts} experts"
        )
    needed = exchange.memory_bytes(session.dtype.itemsize, session.world_size, len(block.mechanisms))
    session.require_memory(needed, block.what)
    tokens = SampleTokens.random(session, exchange, plan.seed)
    opened = _open(session, exchange, tokens, block.mechanisms, plan.timeout_s)
    rows: list[Row] = []
    alone: list[BlockRow] = []
    if opened.each:
        beside = _Beside(session, exchange, plan.seed)
        works = beside.works(tokens)
        for leg in LEGS:
            pairs, blocks = _timed(session, exchange, leg, tokens, opened, works, plan)
            rows += pairs
            alone += blocks
        beside.close()
    for mechanism in opened.each.values():
        mechanism.close()
    outcome = Outcome(scenario=block.name, rows=tuple(rows), blocks=tuple(alone), unavailable=opened.unavailable)
    del tokens, opened
    _free(session)
    return outcome


def _open(
    session: Session, exchange: TokenExchange, tokens: SampleTokens, names: Sequence[str], timeout_s: float
) -> _Opened:
    """Prepare each mechanism, and compare what it makes of tokens with float64; see how calls went."""
    opened = _Opened()
    for name in names:
        others = [one for one in names if one != name]
        try:
            mechanism = session.raise_together(partial(opened_mechanism, session, exchange, name, others, timeout_s))
            sums = session.raise_together(partial(_round_trip, session, exchange, mechanism, tokens))
        except Unsupported as error:
            opened.unavailable[name] = str(error)
            continue
        opened.each[name], opened.ways[name] = mechanism, _way(session, mechanism)
        errors = session.gather(tokens.errors(sums))
        rank = next((rank for rank, (found, allowed) in enumerate(errors) if not found <= allowed), None)
        if rank is not None:
            found, allowed = errors[rank]
            what = f"wrong on rank {rank}: relative error {found:.2e}"
            opened.wrong[name] = f"{what}, and {allowed:.2e}, twice that of rounding, is allowed"
    opened.seen = _observed(session, opened.each, tokens)
    return opened


def _round_trip(
    session: Session, exchange: TokenExchange, mechanism: ExchangeMechanism, tokens: SampleTokens
) -> Tensor:
    """Return what a mechanism makes of tokens whose experts multiply by `expert_scales`."""
    rows, offsets, handle = mechanism.dispatch(tokens)
    experts = torch.bucketize(torch.arange(len(rows), device=rows.device), offsets.long(), right=True)
    first = session.rank * (exchange.sizes.experts // session.world_size)
    sums = mechanism.combine((rows * expert_scales(first + experts)[:, None]).to(rows.dtype), handle)
    if session.is_cuda:
        torch.cuda.synchronize(session.device)
    return sums


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Holds what runs beside an exchange."""

    name: str
    run: Callable[[], Any]
    flops: int = 0  # of this rank


class _Beside:
    """Holds what runs beside an exchange: the experts of as many tokens, a dense matmul, and a gather of parameters."""

    def __init__(self, session: Session, exchange: TokenExchange, seed: int) -> None:
        self._session, self._exchange = session, exchange
        layer, kind = exchange.sizes, session.device.type
        make = partial(torch.empty, device=session.device, dtype=session.dtype)
        generator = torch.Generator(device=session.device).manual_seed(seed + 1)
        local = layer.experts // session.world_size
        self._experts = ExpertWeights(
            gate_up=make(local, 2 * layer.ffn, layer.hidden).normal_(generator=generator).div_(layer.hidden**0.5),
            down=make(local, layer.hidden, layer.ffn).normal_(generator=generator).div_(layer.ffn**0.5),
        )
        size = _GATHERED_BYTES[kind]
        shard = make(size // session.dtype.itemsize // session.world_size).normal_(generator=generator)
        whole = shard.new_empty(session.world_size * len(shard))
        self._group = dist.new_group(backend="nccl" if session.is_cuda else "gloo")  # as FSDP2 has one
        gather = partial(torch_function("all_gather"), whole, shard, group=self._group)
        session.raise_together(gather)  # makes the communicator
        dense = find_workload(_DENSE[kind])
        run = prepare(dense, session.device, session.dtype, seed)
        self._others = [
            _Work(name=dense.name, run=run, flops=dense.flops),
            _Work(name=f"all_gather {size >> 20} MiB", run=gather),
        ]

    def works(self, tokens: SampleTokens) -> list[_Work]:
        """Return them; the experts have the rows of tokens that are routed like these."""
        rows, offsets, _ = NcclExchange(self._session, self._exchange).dispatch(tokens)
        count, layer = int(offsets[-1]), self._exchange.sizes
        rows = rows[:count].clone()
        experts = _Work(
            name=f"experts {self._exchange.name}",
            run=lambda: self._experts(rows, offsets),
            flops=6 * count * layer.hidden * layer.ffn,
        )
        return [experts, *self._others]

    def close(self) -> None:
        """Give back the group."""
        dist.destroy_process_group(self._group)


@dataclass(kw_only=True)
class _Leg:
    """Runs one leg of a mechanism again and again; a combine has a dispatch before it, which is not timed."""

    session: Session
    mechanism: ExchangeMechanism
    leg: str
    tokens: SampleTokens
    host_waits: bool = False  # the host waits within the call, so that what follows is queued late
    _dispatched: tuple[Tensor, Any] | None = None

    def prepare(self) -> None:
        """Make rows to combine."""
        if self.leg == "combine":
            rows, _, handle = self.mechanism.dispatch(self.tokens)
            self._dispatched = rows, handle

    @torch.no_grad()  # a CPU's trials run in threads of their own
    def run(self) -> None:
        """Queue the leg on the current stream."""
        if self._dispatched is None:
            self.mechanism.dispatch(self.tokens)
            return
        (rows, handle), self._dispatched = self._dispatched, None
        self.mechanism.combine(rows, handle)

    def trial(self, work: Callable[[], Any], case: Case) -> Trial:
        """Run one trial beside `work`."""
        self.prepare()
        lanes = self.session.lanes(torch.no_grad()(work), self.run)
        return self.session.stage.run(lanes, case, host_waits=self.host_waits)


def _timed(
    session: Session,
    exchange: TokenExchange,
    leg: str,
    tokens: SampleTokens,
    opened: _Opened,
    works: Sequence[_Work],
    plan: Plan,
) -> tuple[list[Row], list[BlockRow]]:
    """Return the rows of a leg beside each work, and alone."""
    legs = {
        name: _Leg(
            session=session,
            mechanism=mechanism,
            leg=leg,
            tokens=tokens,
            host_waits=leg == "dispatch" and "torch" in (opened.ways[name][0] or ""),
        )
        for name, mechanism in opened.each.items()
    }
    trials: dict[tuple[str, str, Case], Callable[[], Trial]] = {}
    for name, one in legs.items():
        trials[name, "", "comm_alone"] = partial(one.trial, lambda: None, "comm_alone")
    for work in works:
        lanes = session.lanes(torch.no_grad()(work.run), lambda: None)
        trials["", work.name, "compute_alone"] = partial(session.stage.run, lanes, "compute_alone")
        for (name, one), case in product(legs.items(), _BESIDE):
            trials[name, work.name, case] = partial(one.trial, work.run, case)
    samples = play_rounds(session, trials, rounds=plan.rounds, dropped=plan.dropped_rounds, seed=plan.seed)
    device = combine(session.gather(read_device(session.gpu_uuid) if session.is_cuda else None))
    alone = {name: time_of(samples[name, "", "comm_alone"], comm_time) for name in legs}
    best = min(alone, key=lambda name: alone[name].us)
    size, what = exchange.size_bytes(session.dtype.itemsize), f"{leg} {exchange.name}"
    blocks = [
        BlockRow(
            what=what,
            mechanism=name,
            size_bytes=size,
            num_ctas=usage.comm_ctas if (usage := opened.seen[name].usage) else None,
            time=time,
            path=opened.ways[name][0],
            why=opened.ways[name][1],
            marked=_both(opened.marked(name), why_late(samples[name, "", "comm_alone"])),
        )
        for name, time in alone.items()
    ]
    rows = []
    for work in works:
        scenario = Scenario(
            name=f"{what} | {work.name}",
            workload=work.name,
            collective=what,
            mechanisms=tuple(legs),
            orders=("together",),
        )
        plain = samples["", work.name, "compute_alone"]
        cases: dict[tuple[str, str], Samples] = {("", "compute_alone"): plain}
        for name in legs:
            cases |= {(name, "compute_alone"): plain, (name, "comm_alone"): samples[name, "", "comm_alone"]}
            cases |= {(name, "serial"): samples[name, work.name, "serial"]}
            cases |= {(name, "together"): samples[name, work.name, "together"]}
        rows += [
            row(
                scenario,
                mechanism=name,
                order="together",
                size_bytes=size,
                flops=work.flops,
                peak_tflops=peak_tflops(session.gpu_name) if work.flops else None,
                samples=cases,
                best=(best, alone[best].us),
                observed=Observed(usage=opened.seen[name].usage, marked=opened.marked(name)),
                device=device,
            )
            for name in legs
        ]
    return rows, blocks


def _both(*reasons: str | None) -> str | None:
    return "; ".join(filter(None, reasons)) or None


def _way(session: Session, mechanism: ExchangeMechanism) -> tuple[str | None, str | None]:
    """Return which way the calls of a mechanism went, on all ranks, and why; None where there is only one way."""
    ways = {path: why for rank in session.gather(mechanism.way()) for path, why in rank.items()}
    return (" and ".join(ways), "; ".join(dict.fromkeys(ways.values()))) if ways else (None, None)


def _observed(
    session: Session, mechanisms: Mapping[str, ExchangeMechanism], tokens: SampleTokens
) -> dict[str, Observed]:
    """Return the blocks of the largest kernel of each mechanism's transport; marks ours where it has any."""
    if not session.is_cuda:
        return {name: Observed() for name in mechanisms}

    def trip(mechanism: ExchangeMechanism) -> None:
        rows, _, handle = mechanism.dispatch(tokens)
        mechanism.combine(rows, handle)

    def look() -> list[int]:
        lanes = [session.lanes(lambda: None, partial(trip, mechanism)) for mechanism in mechanisms.values()]
        sides = sides_of_all(lanes, session.device)
        return [max((one.num_blocks for one in comm if communicates(one)), default=0) for _, comm in sides]

    try:
        blocks = session.raise_together(look)
    except Unsupported as error:
        return {name: Observed(marked=f"nobody could look at what ran: {error}") for name in mechanisms}
    return {
        name: Observed(
            usage=Usage(comm_ctas=ctas),
            marked=f"its transport took SMs: a kernel of {ctas} blocks" if ctas and name in FORCED else None,
        )
        for name, ctas in zip(mechanisms, blocks, strict=True)
    }


def _free(session: Session) -> None:
    gc.collect()
    if session.is_cuda:
        torch.cuda.empty_cache()
