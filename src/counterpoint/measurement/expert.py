"""Measure tokens that travel to their experts and back: by every mechanism alone, and beside compute and gathers.

A dispatch begins with tokens and ends with rows in the order of this rank's experts; a combine begins with such rows
and ends with sums. All mechanisms take turns in the same rounds. Before it is timed, a dispatch and a combine are
compared with float64; what is wrong, what went another way than asked, and transport that took SMs is marked.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from counterpoint.collectives.host.group import torch_function
from counterpoint.controls.observe import communicates, sides_of_all
from counterpoint.errors import Misconfigured, Unsupported, printable
from counterpoint.machine.gpus import peak_tflops
from counterpoint.measurement.collective import relative_error
from counterpoint.measurement.dependent import ExpertLayer, TokenExchange, find_exchange
from counterpoint.measurement.gpu_usage import Observed, combine, read_device
from counterpoint.measurement.rows import Samples, comm_time, play_rounds, row, time_of, why_late
from counterpoint.measurement.session import Session
from counterpoint.measurement.suites import SYMM_MEM
from counterpoint.measurement.trial import Case, Trial
from counterpoint.measurement.workloads import find_workload, prepare
from counterpoint.parallel.expert import permute as routing
from counterpoint.parallel.expert.dispatcher import Dispatcher
from counterpoint.parallel.expert.layers import ExpertWeights
from counterpoint.parallel.expert.options import ExpertOptions
from counterpoint.records.measurement import LEGS, Block, BlockRow, Outcome, Plan, Row, Scenario, Usage

if TYPE_CHECKING:
    from torch import Tensor

_OURS = ("gather", "push", "slabs", "auto")  # copies by copy engines: their memory is of torch's kind CUDA
_FORCED = ("gather", "push", "slabs")  # mechanisms that a call may be unable to take
_SCALES = 128  # experts with another factor each, exact in bfloat16, so that a row at a wrong expert shows
_GATHERED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}  # of a layer's other parameters, as FSDP2 gathers them
_NVSHMEM: Literal["NVSHMEM"] = "NVSHMEM"  # a backend of torch's symmetric memory
_BESIDE: tuple[Case, ...] = ("serial", "together")
_DENSE = {"cuda": "gemm 8192x8192x8192", "cpu": "gemm 256x256x256*4"}


def routed(way: str, tokens: int, layer: ExpertLayer, generator: torch.Generator) -> Tensor:
    """Return the experts of random tokens, int64 `[tokens, top_k]`, no expert twice.

    Args:
        way: `uniform`; `zipf`, the i-th expert being wanted 1 / i times as much as the first, and experts lying in a
            random order on the ranks, the same everywhere; or `one-hot`, all tokens going to the first experts.
        tokens: of this rank.
        layer: number of experts, and choices of a token.
        generator: of random numbers; its device is that of the result.
    """
    if way == "one-hot":
        return torch.arange(layer.top_k, device=generator.device).repeat(tokens, 1)
    noise = torch.empty(tokens, layer.experts, device=generator.device).exponential_(generator=generator)
    if way == "zipf":
        places = torch.randperm(layer.experts, generator=torch.Generator().manual_seed(0)).to(generator.device)
        noise *= 1.0 + places  # the first of several that wait, each for a time of this mean
    return noise.topk(layer.top_k, largest=False).indices


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Holds what a rank dispatches."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def random(cls, session: Session, exchange: TokenExchange, seed: int) -> _Tokens:
        generator = torch.Generator(device=session.device).manual_seed(seed + session.rank)
        layer = exchange.sizes
        ids = routed(exchange.routing, exchange.tokens, layer, generator)
        x = torch.empty(exchange.tokens, layer.hidden, device=session.device, dtype=session.dtype)
        weights = torch.empty(exchange.tokens, layer.top_k, device=session.device).uniform_(generator=generator)
        return cls(x=x.normal_(generator=generator), ids=ids, weights=weights / weights.sum(1, keepdim=True))

    def errors(self, sums: Tensor) -> tuple[float, float]:
        """Return the relative error of sums, whose experts multiply by `_scales`, and twice that of plain rounding."""
        exact, plain = torch.zeros_like(self.x, dtype=torch.float64), torch.zeros_like(self.x, dtype=torch.float32)
        for ids, weights in zip(self.ids.t(), self.weights.t(), strict=True):
            scales = _scales(ids)[:, None]
            exact += self.x.double() * (scales * weights[:, None]).double()
            plain += (self.x * scales).to(self.x.dtype).float() * weights[:, None]
        allowed = 2 * relative_error(plain.to(self.x.dtype), exact)
        return relative_error(sums, exact), max(allowed, torch.finfo(self.x.dtype).eps)


def _scales(experts: Tensor) -> Tensor:
    return 1.0 + (experts % _SCALES).float() / _SCALES


class _Mechanism(Protocol):
    """Does one way of moving tokens; the handle is of one dispatch and one combine."""

    def dispatch(self, tokens: _Tokens) -> tuple[Tensor, Tensor, Any]: ...

    def combine(self, rows: Tensor, handle: Any) -> Tensor: ...

    def way(self) -> dict[str, str]:
        """Return which ways calls went, and why; empty where there is only one."""

    def close(self) -> None: ...


class _Ours:
    """Goes by a `Dispatcher`, whose mechanism `torch` is that of all_to_all_single."""

    def __init__(self, session: Session, exchange: TokenExchange, name: str, timeout_s: float) -> None:
        options = ExpertOptions(mechanism=name, timeout_s=timeout_s, equal_tokens=True)  # type: ignore[arg-type]
        layer = exchange.sizes
        self._dispatcher = Dispatcher(
            session.world, experts=layer.experts, top_k=layer.top_k, max_tokens=exchange.tokens, hidden=layer.hidden,
            options=options,
        )  # fmt: skip

    def dispatch(self, tokens: _Tokens) -> tuple[Tensor, Tensor, Any]:
        return self._dispatcher.dispatch(tokens.x, tokens.ids, tokens.weights)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return self._dispatcher.combine(rows, handle)

    def way(self) -> dict[str, str]:
        return {str(one.path): one.why for one in self._dispatcher.report().rows}

    def close(self) -> None:
        self._dispatcher.close()


class _Nccl:
    """Gathers all tokens and scatters sums as `gather` does, with the same kernels, but by torch's collectives."""

    def __init__(self, session: Session, exchange: TokenExchange) -> None:
        self._session, self._exchange = session, exchange

    def dispatch(self, tokens: _Tokens) -> tuple[Tensor, Tensor, Any]:
        x, ids, weights = map(self._gathered, (tokens.x, tokens.ids, tokens.weights))
        experts = self._exchange.sizes.experts // self._session.world_size
        rows = self._exchange.capacity(self._session.world_size)
        first = self._session.rank * experts
        there = routing.assign(ids, first_expert=first, num_experts=experts, capacity=rows)
        return routing.permute(x, there, zero_tail=False), there.offsets, (there, weights)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        there, weights = handle
        partial_sums = routing.combine(rows, there, weights=weights)
        out = rows.new_empty(self._exchange.tokens, rows.shape[1])
        torch_function("reduce_scatter")(out, partial_sums, group=self._session.world)
        return out

    def _gathered(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(self._session.world_size * len(tensor), *tensor.shape[1:])
        torch_function("all_gather")(out, tensor, group=self._session.world)
        return out

    def way(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


class _SymmMem:
    """Goes by torch's all_to_all_vdev_2d, which reads counts on the device; experts write where it reads.

    Raises:
        Unsupported: it does not run here, or other mechanisms of this measurement need another kind of memory.
    """

    def __init__(self, session: Session, exchange: TokenExchange, others: Sequence[str]) -> None:
        reason = _no_symm_mem(session, others)
        reasons = [one for one in session.gather(reason) if one is not None]
        if reasons:
            raise Unsupported(reasons[0])
        with suppress(RuntimeError):  # it is in use already
            symm_mem.set_backend(_NVSHMEM)
        if symm_mem.get_backend(session.device) != _NVSHMEM:
            raise Unsupported(f"this process has symmetric memory of another kind: set TORCH_SYMMMEM={_NVSHMEM}")
        layer, tokens = exchange.sizes, exchange.tokens
        self._experts, self._local = layer.experts, layer.experts // session.world_size
        self._group = session.world.group_name
        empty = partial(symm_mem.empty, device=session.device)
        self._home = empty(tokens * layer.top_k, layer.hidden, dtype=session.dtype)
        self._there = empty(exchange.capacity(session.world_size), layer.hidden, dtype=session.dtype)
        self._counts = empty(layer.experts, dtype=torch.int64)
        self._at_home, self._at_experts = (empty(2, layer.experts, dtype=torch.int64) for _ in range(2))
        dist.barrier(group=session.world)

    def dispatch(self, tokens: _Tokens) -> tuple[Tensor, Tensor, Any]:
        home = routing.assign(tokens.ids, first_expert=0, num_experts=self._experts, capacity=len(self._home))
        self._counts.copy_(home.offsets.diff(prepend=home.offsets.new_zeros(1)))
        routing.permute(tokens.x, home, out=self._home, zero_tail=False)
        ops: Any = torch.ops.symm_mem
        ops.all_to_all_vdev_2d(self._home, self._there, self._counts, self._at_experts, self._group)
        offsets = self._at_experts[0].view(self._local, -1).sum(1).cumsum(0).int()
        return self._there, offsets, (home, tokens.weights)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        home, weights = handle
        if rows is not self._there:
            self._there.copy_(rows)
        ops: Any = torch.ops.symm_mem
        ops.all_to_all_vdev_2d_offset(self._there, self._home, self._at_experts, self._at_home, self._group)
        return routing.combine(self._home, home, weights=weights)

    def way(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        del self._home, self._there, self._counts, self._at_home, self._at_experts


def _no_symm_mem(session: Session, others: Sequence[str]) -> str | None:
    """Return why torch's operation cannot be measured here; None if it can."""
    if not session.is_cuda:
        return "torch's all_to_all_vdev_2d runs on GPUs only"
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset"):
        return f"torch {torch.__version__} has no all_to_all_vdev_2d_offset"
    if not symm_mem.is_nvshmem_available():
        return "torch's all_to_all_vdev_2d needs NVSHMEM, and libnvshmem_host.so.3 cannot be loaded"
    if os.environ.get("NVSHMEM_DISABLE_NVLS") != "1":
        return "NVLink multicast has to be off: set NVSHMEM_DISABLE_NVLS=1, or leave it unset"
    if any(name in _OURS for name in others):
        return (
            "a process has symmetric memory of one kind, NVSHMEM's or that of our mechanisms: measure it in a run of "
            "its own, with --mechanism torch --mechanism nccl --mechanism symm_mem"
        )
    return None


@dataclass(kw_only=True)
class _Opened:
    """Holds mechanisms that are ready, and why others cannot run or are wrong."""

    each: dict[str, _Mechanism] = field(default_factory=dict)
    ways: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)  # which way calls went, and why
    seen: dict[str, Observed] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def marked(self, name: str) -> str | None:
        """Return why results of a mechanism must not be believed; None if nothing speaks against them."""
        path, why = self.ways[name]
        went = f"ran as {path}: {why}" if name in _FORCED and path != name else None
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
    tokens = _Tokens.random(session, exchange, plan.seed)
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
    session: Session, exchange: TokenExchange, tokens: _Tokens, names: Sequence[str], timeout_s: float
) -> _Opened:
    """Prepare each mechanism, and compare what it makes of tokens with float64; see how calls went."""
    opened = _Opened()
    for name in names:
        others = [one for one in names if one != name]
        try:
            mechanism = session.raise_together(partial(_made, session, exchange, name, others, timeout_s))
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


def _made(session: Session, exchange: TokenExchange, name: str, others: Sequence[str], timeout_s: float) -> _Mechanism:
    """Return the mechanism called so; `others` are measured in the same process."""
    if name == SYMM_MEM:
        try:
            return _SymmMem(session, exchange, others)
        except (RuntimeError, AttributeError) as error:
            raise Unsupported(f"NVSHMEM failed: {printable(str(error), 200)}") from error
    return _Nccl(session, exchange) if name == "nccl" else _Ours(session, exchange, name, timeout_s)


def _round_trip(session: Session, exchange: TokenExchange, mechanism: _Mechanism, tokens: _Tokens) -> Tensor:
    """Return what a mechanism makes of tokens whose experts multiply by `_scales`."""
    rows, offsets, handle = mechanism.dispatch(tokens)
    experts = torch.bucketize(torch.arange(len(rows), device=rows.device), offsets.long(), right=True)
    first = session.rank * (exchange.sizes.experts // session.world_size)
    sums = mechanism.combine((rows * _scales(first + experts)[:, None]).to(rows.dtype), handle)
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

    def works(self, tokens: _Tokens) -> list[_Work]:
        """Return them; the experts have the rows of tokens that are routed like these."""
        rows, offsets, _ = _Nccl(self._session, self._exchange).dispatch(tokens)
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
    mechanism: _Mechanism
    leg: str
    tokens: _Tokens
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
    tokens: _Tokens,
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


def _way(session: Session, mechanism: _Mechanism) -> tuple[str | None, str | None]:
    """Return which way the calls of a mechanism went, on all ranks, and why; None where there is only one way."""
    ways = {path: why for rank in session.gather(mechanism.way()) for path, why in rank.items()}
    return (" and ".join(ways), "; ".join(dict.fromkeys(ways.values()))) if ways else (None, None)


def _observed(session: Session, mechanisms: Mapping[str, _Mechanism], tokens: _Tokens) -> dict[str, Observed]:
    """Return the blocks of the largest kernel of each mechanism's transport; marks ours where it has any."""
    if not session.is_cuda:
        return {name: Observed() for name in mechanisms}

    def trip(mechanism: _Mechanism) -> None:
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
            marked=f"its transport took SMs: a kernel of {ctas} blocks" if ctas and name in _FORCED else None,
        )
        for name, ctas in zip(mechanisms, blocks, strict=True)
    }


def _free(session: Session) -> None:
    gc.collect()
    if session.is_cuda:
        torch.cuda.empty_cache()
