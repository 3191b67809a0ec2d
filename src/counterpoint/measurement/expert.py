"""Measure token exchanges (dispatch to experts, and combine) by every mechanism, alone and beside other work.

A dispatch begins with tokens and ends with rows in the order of this rank's experts; a combine begins with such rows
and ends with sums. All mechanisms take turns in the same rounds. Before it is timed, a dispatch and a combine are
compared with float64; a row is marked if a result is wrong, a path is not the one asked for, or transport takes SMs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.controls.observe import communicates, sides_of_all
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.gpus import peak_tflops
from counterpoint.measurement.collective import relative_error
from counterpoint.measurement.gpu_usage import Observed, device_state
from counterpoint.measurement.mechanisms import joined
from counterpoint.measurement.open_mechanisms import FORCED, Checked, open_checked
from counterpoint.measurement.rounds import Experiment, Samples, SamplesOf, comm_time, row, time_of, why_late
from counterpoint.measurement.session import Session
from counterpoint.measurement.trial import Case, Trial
from counterpoint.measurement.workloads import ExpertLayer, TokenExchange, find_exchange, find_workload, prepare
from counterpoint.parallel.expert import permute as routing
from counterpoint.parallel.expert.dispatcher import Dispatcher
from counterpoint.parallel.expert.layers import ExpertWeights
from counterpoint.parallel.options import ExpertOptions
from counterpoint.records.measurement import LEGS, Block, BlockRow, Plan, Row, Scenario, Usage

if TYPE_CHECKING:
    from torch import Tensor

_GATHERED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}  # of a layer's other parameters, as FSDP2 gathers them
_DENSE = {"cuda": "gemm 8192x8192x8192", "cpu": "gemm 256x256x256*4"}
_SCALES = 128  # number of different expert factors, exact in bfloat16, so that a row at a wrong expert shows


def routed(way: str, tokens: int, layer: ExpertLayer, generator: torch.Generator) -> Tensor:
    """Return distinct random experts for each token, int64 `[tokens, top_k]` on the generator's device.

    By `zipf` the i-th expert is wanted 1 / i times as much as the first, and experts lie in a random order on the
    ranks, the same everywhere; by `one-hot` all tokens go to the first experts; by `uniform` experts are wanted
    equally.
    """
    if way == "one-hot":
        return torch.arange(layer.top_k, device=generator.device).repeat(tokens, 1)
    noise = torch.empty(tokens, layer.experts, device=generator.device).exponential_(generator=generator)
    if way == "zipf":
        places = torch.randperm(layer.experts, generator=torch.Generator().manual_seed(0)).to(generator.device)
        noise *= 1.0 + places  # the first of several that wait, each for a time of this mean
    return noise.topk(layer.top_k, largest=False).indices


@dataclass(frozen=True, kw_only=True)
class SampleTokens:
    """Holds the tokens that one rank dispatches, and each token's experts and weights."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def random(cls, session: Session, exchange: TokenExchange, seed: int) -> SampleTokens:
        """Return random tokens for this rank."""
        generator = torch.Generator(device=session.device).manual_seed(seed + session.rank)
        layer = exchange.sizes
        ids = routed(exchange.routing, exchange.tokens, layer, generator)
        x = torch.empty(exchange.tokens, layer.hidden, device=session.device, dtype=session.dtype)
        weights = torch.empty(exchange.tokens, layer.top_k, device=session.device).uniform_(generator=generator)
        return cls(x=x.normal_(generator=generator), ids=ids, weights=weights / weights.sum(1, keepdim=True))

    def dispatch(self, dispatcher: Dispatcher) -> tuple[Tensor, Tensor, Any]:
        """Return the rows for this rank's experts, the offset where each expert's rows end, and a `combine` handle."""
        return dispatcher.dispatch(self.x, self.ids, self.weights)

    def errors(self, sums: Tensor) -> tuple[float, float]:
        """Return the relative error of the combined `sums`, and the allowed error: twice the error of rounding."""
        exact, plain = torch.zeros_like(self.x, dtype=torch.float64), torch.zeros_like(self.x, dtype=torch.float32)
        for ids, weights in zip(self.ids.t(), self.weights.t(), strict=True):
            scales = expert_scales(ids)[:, None]
            exact += self.x.double() * (scales * weights[:, None]).double()
            plain += (self.x * scales).to(self.x.dtype).float() * weights[:, None]
        allowed = 2 * relative_error(plain.to(self.x.dtype), exact)
        return relative_error(sums, exact), max(allowed, torch.finfo(self.x.dtype).eps)


def expert_scales(experts: Tensor) -> Tensor:
    """Return, for each expert's number, the factor by which this expert multiplies rows in a check."""
    return 1.0 + (experts % _SCALES).float() / _SCALES


@torch.no_grad()
def exchange(session: Session, block: Block, plan: Plan, unavailable: dict[str, str]) -> Iterator[Experiment]:
    """Yield an experiment for the dispatch and one for the combine: every mechanism, alone and with other work.

    Raises:
        Misconfigured: there is no such exchange, the ranks cannot share its experts, or memory does not suffice.
    """
    asked = find_exchange(block.what)
    layer = asked.sizes
    if layer.experts % session.world_size:
        raise Misconfigured(
            f"{block.what} on {session.world_size} ranks: give a number that divides {layer.experts} experts"
        )
    needed = asked.memory_bytes(session.dtype.itemsize, session.world_size, len(block.mechanisms))
    session.require_memory(needed, block.what)
    tokens = SampleTokens.random(session, asked, plan.seed)

    def open_dispatcher(mechanism: str) -> Dispatcher:
        of_communicator = CommunicatorOptions(timeout_s=plan.timeout_s)
        options = ExpertOptions(mechanism=mechanism, equal_tokens=True, communicator=of_communicator)  # type: ignore[arg-type]
        return Dispatcher(
            session.world, experts=layer.experts, top_k=layer.top_k, max_tokens=asked.tokens, hidden=layer.hidden,
            options=options,
        )  # fmt: skip

    checked = open_checked(
        session, block.mechanisms, open_dispatcher, partial(_round_trip, session, tokens), tokens.errors, unavailable,
        allowed="that of rounding",
    )  # fmt: skip
    if checked:
        seen = _observed(session, checked, tokens)
        with _other_works(session, asked, tokens, plan.seed) as works:
            for leg in LEGS:
                yield _of_leg(session, asked, [_Leg(session, one, leg, tokens) for one in checked], seen, works)
    for one in checked:
        one.caller.close()


def _round_trip(session: Session, tokens: SampleTokens, dispatcher: Dispatcher) -> Tensor:
    """Dispatch tokens to experts that multiply by `expert_scales`; return the combined tokens."""
    rows, offsets, handle = tokens.dispatch(dispatcher)
    experts = torch.bucketize(torch.arange(len(rows), device=rows.device), offsets.long(), right=True)
    first = session.rank * len(offsets)
    sums = dispatcher.combine((rows * expert_scales(first + experts)[:, None]).to(rows.dtype), handle)
    if session.is_cuda:
        torch.cuda.synchronize(session.device)
    return sums


class _Work(NamedTuple):
    """Holds one kind of work to run beside a token exchange."""

    name: str
    run: Callable[[], Any]
    flops: int  # of this rank


@contextmanager
def _other_works(
    session: Session, exchange: TokenExchange, tokens: SampleTokens, seed: int
) -> Iterator[tuple[_Work, ...]]:
    """Yield the work to run beside an exchange: experts on similarly routed tokens, a dense matmul, an all-gather."""
    layer, kind = exchange.sizes, session.device.type
    make = partial(torch.empty, device=session.device, dtype=session.dtype)
    generator = torch.Generator(device=session.device).manual_seed(seed + 1)
    local = layer.experts // session.world_size
    experts = ExpertWeights(
        gate_up=make(local, 2 * layer.ffn, layer.hidden).normal_(generator=generator).div_(layer.hidden**0.5),
        down=make(local, layer.hidden, layer.ffn).normal_(generator=generator).div_(layer.ffn**0.5),
    )
    size = _GATHERED_BYTES[kind]
    shard = make(size // session.dtype.itemsize // session.world_size).normal_(generator=generator)
    whole = shard.new_empty(session.world_size * len(shard))
    group = dist.new_group(backend="nccl" if session.is_cuda else "gloo")  # as FSDP2 has one
    gather = partial(torch_function("all_gather"), whole, shard, group=group)
    session.raise_together(gather)  # makes the communicator
    dense = find_workload(_DENSE[kind])
    run = prepare(dense, session.device, session.dtype, seed)
    rows, offsets = _rows_at_experts(session, exchange, tokens)
    yield (
        _Work(f"experts {exchange.name}", lambda: experts(rows, offsets), 6 * len(rows) * layer.hidden * layer.ffn),
        _Work(dense.name, run, dense.flops),
        _Work(f"all_gather {size >> 20} MiB", gather, 0),
    )
    dist.destroy_process_group(group)


def _rows_at_experts(session: Session, exchange: TokenExchange, tokens: SampleTokens) -> tuple[Tensor, Tensor]:
    """Gather all ranks' tokens; return the rows of this rank's experts, and the offset where each expert's rows end."""

    def gathered(tensor: Tensor) -> Tensor:
        out = tensor.new_empty(session.world_size * len(tensor), *tensor.shape[1:])
        torch_function("all_gather")(out, tensor, group=session.world)
        return out

    experts = exchange.sizes.experts // session.world_size
    there = routing.assign(
        gathered(tokens.ids), first_expert=session.rank * experts, num_experts=experts,
        capacity=exchange.capacity(session.world_size),
    )  # fmt: skip
    rows = routing.permute(gathered(tokens.x), there, zero_tail=False)
    return rows[: int(there.offsets[-1])].clone(), there.offsets


class _Leg:
    """Runs one leg of an exchange, dispatch or combine, repeatedly; dispatches untimed before each combine."""

    def __init__(self, session: Session, mechanism: Checked[Dispatcher], leg: str, tokens: SampleTokens) -> None:
        self.name, self.leg = mechanism.name, leg
        self.path, self.why = mechanism.path(session)
        self.marked = mechanism.marked(self.path, self.why)
        self._session, self._dispatcher, self._tokens = session, mechanism.caller, tokens
        self._host_waits = leg == "dispatch" and "torch" in self.path  # so that what follows it is queued late
        self._dispatched: tuple[Tensor, Any] | None = None

    @torch.no_grad()  # a CPU's trials run in threads of their own
    def run(self) -> None:
        """Launch the leg on the current stream."""
        if self._dispatched is None:
            self._tokens.dispatch(self._dispatcher)
            return
        (rows, handle), self._dispatched = self._dispatched, None
        self._dispatcher.combine(rows, handle)

    @torch.no_grad()
    def trial(self, work: Callable[[], Any], case: Case) -> Trial:
        """Run one trial of the leg together with `work`."""
        if self.leg == "combine":
            rows, _, handle = self._tokens.dispatch(self._dispatcher)
            self._dispatched = rows, handle
        lanes = self._session.lanes(torch.no_grad()(work), self.run)
        return self._session.stage.run(lanes, case, host_waits=self._host_waits)


def _of_leg(
    session: Session, exchange: TokenExchange, legs: Sequence[_Leg], seen: Sequence[Observed], works: Sequence[_Work]
) -> Experiment:
    """Return the experiment of one leg (dispatch or combine) by each mechanism, alone and together with each work."""
    cases: tuple[Case, ...] = ("serial", "together")
    trials: dict[tuple[str, str, str], Callable[[], Trial]] = {}
    for one in legs:
        trials[one.name, "", "comm_alone"] = partial(one.trial, lambda: None, "comm_alone")
    for work in works:
        lanes = session.lanes(torch.no_grad()(work.run), lambda: None)
        trials["", work.name, "compute_alone"] = partial(session.stage.run, lanes, "compute_alone")
        for one, case in product(legs, cases):
            trials[one.name, work.name, case] = partial(one.trial, work.run, case)
    size, what = exchange.size_bytes(session.dtype.itemsize), f"{legs[0].leg} {exchange.name}"

    def rows(samples: SamplesOf[tuple[str, str, str]]) -> list[Row | BlockRow]:
        device = device_state(session)
        alone = {one.name: time_of(samples[one.name, "", "comm_alone"], comm_time) for one in legs}
        best = min(alone, key=lambda name: alone[name].us)
        marks = [joined(one.marked, observed.marked) for one, observed in zip(legs, seen, strict=True)]
        found: list[Row | BlockRow] = []
        for work in works:
            scenario = Scenario(
                name=f"{what} | {work.name}",
                workload=work.name,
                collective=what,
                mechanisms=tuple(alone),
                orders=("together",),
            )
            plain = samples["", work.name, "compute_alone"]
            of_pair: dict[tuple[str, str], Samples] = {("", "compute_alone"): plain}
            for name in alone:
                of_pair |= {(name, "compute_alone"): plain, (name, "comm_alone"): samples[name, "", "comm_alone"]}
                of_pair |= {(name, case): samples[name, work.name, case] for case in cases}
            found += [
                row(
                    scenario, mechanism=one.name, order="together", size_bytes=size, flops=work.flops,
                    peak_tflops=peak_tflops(session.gpu_name) if work.flops else None, samples=of_pair,
                    best=(best, alone[best].us), observed=Observed(usage=observed.usage, marked=marked), device=device,
                )
                for one, observed, marked in zip(legs, seen, marks, strict=True)
            ]  # fmt: skip
        return [
            *found,
            *(
                BlockRow(
                    what=what, mechanism=one.name, size_bytes=size,
                    num_ctas=observed.usage.comm_ctas if observed.usage else None, time=alone[one.name], path=one.path,
                    why=one.why, marked=joined(marked, why_late(samples[one.name, "", "comm_alone"])),
                )
                for one, observed, marked in zip(legs, seen, marks, strict=True)
            ),
        ]  # fmt: skip

    return Experiment(trials=trials, rows=rows)


def _observed(session: Session, mechanisms: Sequence[Checked[Dispatcher]], tokens: SampleTokens) -> list[Observed]:
    """Return the number of blocks of each mechanism's largest transport kernel; mark our mechanisms if they run one."""
    if not session.is_cuda:
        return [Observed() for _ in mechanisms]

    def trip(dispatcher: Dispatcher) -> None:
        rows, _, handle = tokens.dispatch(dispatcher)
        dispatcher.combine(rows, handle)

    def look() -> list[int]:
        lanes = [session.lanes(lambda: None, partial(trip, one.caller)) for one in mechanisms]
        sides = sides_of_all(lanes, session.device)
        return [max((one.num_blocks for one in comm if communicates(one)), default=0) for _, comm in sides]

    try:
        blocks = session.raise_together(look)
    except Unsupported as error:
        return [Observed(marked=f"nobody could look at what ran: {error}") for _ in mechanisms]
    return [
        Observed(
            usage=Usage(comm_ctas=ctas),
            marked=f"its transport took SMs: a kernel of {ctas} blocks" if ctas and one.name in FORCED else None,
        )
        for one, ctas in zip(mechanisms, blocks, strict=True)
    ]
