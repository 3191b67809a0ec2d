"""What ranks do with a dispatcher of expert parallelism: each function runs on every rank."""

import ctypes
import math
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.lower import ReduceLaunch
from counterpoint.collectives.memory import Location
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.errors import Unsupported
from counterpoint.measurement.session import Session
from counterpoint.parallel import group as rank_groups
from counterpoint.parallel.expert import Dispatcher, ExpertOptions, LocalExperts, overlapped_moe
from counterpoint.parallel.expert.permute import narrowed
from counterpoint.parallel.expert.token_mechanism import ExpertLayout
from tests.dist.communicator_cuda_programs import delays
from tests.dist.tensor_programs import on_software_gpu
from tests.support.ranks import PATIENT, error_of
from tests.support.routing import ROUTINGS, routing
from tests.support.software_gpu import Action, SoftwareDriver, SoftwareGpu


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dispatch and combine with their derivatives, of which every rank can make everybody's part."""

    layout: ExpertLayout
    tokens: tuple[int, ...]  # of each rank
    kinds: tuple[str, ...]  # of routing, of each rank
    dtype: torch.dtype
    seed: int

    def ids(self, rank: int) -> Tensor:
        layout = self.layout
        with torch.device("cpu"):
            ids = routing(self.kinds[rank], self.tokens[rank], layout.top_k, layout.experts, self.seed + rank)
        return ids.to(torch.get_default_device())

    def part(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, weights and the derivative of the sums."""
        dice = torch.Generator().manual_seed(self.seed * 1009 + rank)
        tokens, hidden, device = self.tokens[rank], self.layout.hidden, torch.get_default_device()
        x, grad = torch.randn(2, tokens, hidden, generator=dice, device="cpu").to(device, self.dtype)
        return x, torch.rand(tokens, self.layout.top_k, generator=dice, device="cpu").to(device), grad

    @property
    def factors(self) -> Tensor:
        return 0.7 + 0.3 * torch.arange(self.layout.experts, dtype=torch.float32)


def drawn(draw: random.Random, seed: int, layout: ExpertLayout, *, equal: bool = False) -> Case:
    """A case whose ranks differ, or are all without tokens but one."""
    n = layout.world_size
    tokens = [draw.choice([0, 1, layout.max_tokens, draw.randint(0, layout.max_tokens)]) for _ in range(n)]
    kinds = [draw.choice(ROUTINGS)] * n if draw.random() < 0.5 else [draw.choice(ROUTINGS) for _ in range(n)]
    return Case(
        layout=layout,
        tokens=(tokens[0],) * n if equal else tuple(tokens),
        kinds=tuple(kinds),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        seed=seed,
    )


@contextmanager
def opened(layout: ExpertLayout, **options: Any) -> Iterator[Dispatcher]:
    made = Dispatcher(
        experts=layout.experts,
        top_k=layout.top_k,
        max_tokens=layout.max_tokens,
        hidden=layout.hidden,
        options=ExpertOptions(**options, communicator=PATIENT),
    )
    yield made
    made.close()


def experts_of(rows: Tensor, offsets: Tensor, case: Case) -> Tensor:
    """What the experts make of rows: each multiplies its own by its factor."""
    layout = case.layout
    expert = torch.searchsorted(offsets, torch.arange(len(rows)), right=True).clamp(max=layout.local_experts - 1)
    return rows * case.factors[layout.first_expert + expert].to(rows.dtype)[:, None]


@dataclass
class Found:
    rows: Tensor
    offsets: Tensor
    y: Tensor
    grad_x: Tensor
    grad_weights: Tensor


def run(made: Dispatcher, case: Case) -> Found:
    x, weights, grad = case.part(made.layout.rank)
    x.requires_grad_()
    weights.requires_grad_()
    rows, offsets, handle = made.dispatch(x, case.ids(made.layout.rank), weights)
    y = made.combine(experts_of(rows, offsets, case), handle)
    y.backward(grad)
    assert x.grad is not None
    assert weights.grad is not None
    return Found(rows.detach()[: offsets[-1]].clone(), offsets, y.detach(), x.grad, weights.grad)


def rows_wanted(case: Case) -> tuple[Tensor, list[int]]:
    """The rows of this rank's experts, by expert, rank, token and choice, and where each expert's end."""
    layout, rows, ends = case.layout, [], []
    parts = [(case.part(rank)[0], case.ids(rank)) for rank in range(layout.world_size)]
    for expert in range(layout.first_expert, layout.first_expert + layout.local_experts):
        for x, ids in parts:
            rows.append(x[(ids == expert).nonzero()[:, 0]])
        ends.append(sum(map(len, rows)))
    return torch.cat(rows), ends


def added(values: Tensor, ids: Tensor, layout: ExpertLayout, by: str) -> Tensor:
    total = torch.zeros(len(values), values.shape[2])
    groups = range(layout.world_size) if by == "ranks" else [None]
    for rank in groups:
        part = torch.zeros_like(total)
        for choice in range(layout.top_k):
            here = (ids[:, choice] >= 0) & (ids[:, choice] < layout.experts)
            if rank is not None:
                here &= ids[:, choice] // layout.local_experts == rank
            part[here] += values[here, choice]
        total = total + part
    return total


def wanted(case: Case, rank: int, by: str, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sums of a case and the derivative of its tokens, of one rank; float32 in the order that `by` names."""
    x, weights, grad = (one.to(kind) for one in case.part(rank))
    ids, factors = case.ids(rank), case.factors.to(case.dtype).to(kind)
    valid = ids.clamp(0, case.layout.experts - 1)
    made = x[:, None] * factors[valid][..., None] * weights[..., None].to(kind)
    back = grad[:, None] * weights[..., None].to(kind) * factors[valid][..., None]
    if kind == torch.float64:
        here = ((ids >= 0) & (ids < case.layout.experts))[..., None]
        return (made * here).sum(1), (back * here).sum(1)
    return added(made, ids, case.layout, by), added(back, ids, case.layout, by)


ORDERS = {"torch": "choices", "gather": "ranks", "slabs": "choices"}


def check(case: Case, found: dict[str, Found], rank: int) -> None:
    """Every mechanism beside what is wanted, and beside the first one."""
    rows, ends = rows_wanted(case)
    reference = found["torch"]
    for name, one in found.items():
        assert torch.equal(one.rows, rows), (name, case)
        assert one.offsets.tolist() == ends, (name, case)
        torch.testing.assert_close(one.grad_weights, reference.grad_weights, rtol=2e-6, atol=1e-5)
        if case.dtype == torch.float32:
            y, grad_x = wanted(case, rank, ORDERS[name], torch.float32)
            assert torch.equal(one.y, y), (name, case)
            assert torch.equal(one.grad_x, grad_x), (name, case)
        else:
            exact = wanted(case, rank, "", torch.float64)
            size = case.layout.top_k * max(1.0, *(largest(values) for values in case.part(rank)))
            rounded = torch.finfo(case.dtype).eps / 2 * size * largest(case.factors)  # a rank's sum, on its way
            for ours, theirs, true in zip((one.y, one.grad_x), (reference.y, reference.grad_x), exact, strict=True):
                assert worst(ours, true) <= 2 * worst(theirs, true) + rounded, (name, case)


def worst(value: Tensor, true: Tensor) -> float:
    return largest(value.double() - true)


def largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def random_routings(
    session: Session, seed: int, sizes: int, calls: int, names: tuple[str, ...], gpu: bool = False
) -> None:
    """Any routing of any numbers of tokens: rows, sums and derivatives by each mechanism."""
    draw, n = random.Random(seed), dist.get_world_size()
    for number in range(sizes):
        experts = n * draw.randint(1, 3)
        layout = ExpertLayout(
            rank=session.rank, world_size=n, experts=experts, top_k=draw.randint(1, min(4, experts)),
            max_tokens=draw.randint(1, 9), hidden=draw.choice([8, 16, 40]),
        )  # fmt: skip
        equal = draw.random() < 0.3
        with ExitStack() as stack:
            if gpu:
                stack.enter_context(on_software_gpu(session.rank))
            made = {name: stack.enter_context(opened(layout, mechanism=name, equal_tokens=equal)) for name in names}
            for call in range(calls):
                case = drawn(draw, 100_000 * seed + 1000 * number + call, layout, equal=equal)
                check(case, {name: run(one, case) for name, one in made.items()}, session.rank)


def layout_of(session: Session, **sizes: int) -> ExpertLayout:
    n = dist.get_world_size()
    given = {"experts": 2 * n, "top_k": 2, "max_tokens": 6, "hidden": 16} | sizes
    return ExpertLayout(rank=session.rank, world_size=n, **given)


def case_of(layout: ExpertLayout, kind: str = "random", dtype: torch.dtype = torch.float32, seed: int = 7) -> Case:
    n = layout.world_size
    tokens = tuple(max(0, layout.max_tokens - rank) for rank in range(n))
    return Case(layout=layout, tokens=tokens, kinds=(kind,) * n, dtype=dtype, seed=seed)


def in_halves(session: Session, name: str, count: int, gpu: bool = False) -> None:
    """Several dispatches under way at once, then several combines: the same as one after the other."""
    layout = layout_of(session)
    cases = [case_of(layout, "distinct", seed=number) for number in range(count)]
    with on_software_gpu(session.rank) if gpu else nullcontext(), opened(layout, mechanism=name) as made:
        apart = [run(made, case) for case in cases]
        inputs = [[one.requires_grad_() for one in case.part(layout.rank)[:2]] for case in cases]
        handles = [
            made.start_dispatch(x, case.ids(layout.rank), weights)
            for (x, weights), case in zip(inputs, cases, strict=True)
        ]
        for handle, case in zip(handles, cases, strict=True):
            rows, offsets = made.finish_dispatch(handle)
            made.start_combine(experts_of(rows, offsets, case), handle)
        sums = [made.finish_combine(handle) for handle in handles]
        torch.autograd.backward(sums, [case.part(layout.rank)[2] for case in cases])
    for (x, weights), y, one in zip(inputs, sums, apart, strict=True):
        assert torch.equal(y, one.y)
        assert x.grad is not None
        assert torch.equal(x.grad, one.grad_x)
        assert weights.grad is not None
        assert torch.equal(weights.grad, one.grad_weights)


def checkpointed(session: Session, name: str, reentrant: bool) -> None:
    """A layer that is computed again in the backward pass: the same derivatives, twice as many dispatches."""
    layout = layout_of(session)
    case = case_of(layout)
    with opened(layout, mechanism=name) as made:
        once = run(made, case)
        x, weights, grad = case.part(layout.rank)
        x.requires_grad_()
        weights.requires_grad_()

        def layer(x: Tensor, weights: Tensor) -> Tensor:
            rows, offsets, handle = made.dispatch(x, case.ids(layout.rank), weights)
            return x.detach() + made.combine(experts_of(rows, offsets, case), handle)

        y = checkpoint(layer, x, weights, use_reentrant=reentrant)
        y.backward(grad)
        assert torch.equal(y.detach() - x.detach(), (once.y + x.detach()) - x.detach())
        assert x.grad is not None
        assert torch.equal(x.grad, once.grad_x)
        assert weights.grad is not None
        assert torch.equal(weights.grad, once.grad_weights)
        assert sum(row.calls for row in made.report().calls if row.operation == "dispatch") == 3


def narrow(session: Session, name: str) -> Tensor:
    """Tokens that travel in float8 arrive as they are rounded; derivatives of tokens do not depend on it."""
    layout = layout_of(session)
    case = case_of(layout, dtype=torch.bfloat16)
    with opened(layout, mechanism=name) as made:
        wide = run(made, case)
    with opened(layout, mechanism=name, wire_dtype=torch.float8_e4m3fn, pad_multiple=16) as made:
        found = run(made, case)
    assert all(end % 16 == 0 for end in found.offsets.tolist())
    sent = [narrowed(case.part(rank)[0], torch.float8_e4m3fn) for rank in range(layout.world_size)]
    rounded = [values.float() * scales for values, scales in sent]
    wanted, begin, at = rows_wanted(replace_tokens(case, rounded)), 0, 0
    for end, padded in zip(wanted[1], found.offsets.tolist(), strict=True):
        assert torch.equal(found.rows[at : at + end - begin], wanted[0][begin:end])
        assert not found.rows[at + end - begin : padded].any()
        begin, at = end, padded
    assert torch.equal(found.grad_x, wide.grad_x)
    assert worst(found.y, wide.y.double()) < 0.1 * max(1.0, wide.y.abs().max().item())
    return found.y


def replace_tokens(case: Case, tokens: list[Tensor]) -> Any:
    class Replaced(Case):
        def part(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
            return tokens[rank].to(case.dtype), *super().part(rank)[1:]

    return Replaced(**{name: getattr(case, name) for name in Case.__dataclass_fields__})


def dropped(session: Session, names: tuple[str, ...]) -> list[tuple[int, int, list[float]]]:
    """How many rows came, how many had no room, and the sum of what did, by each mechanism."""
    layout = layout_of(session, max_tokens=8, top_k=3)
    case = replace(case_of(layout, "one-hot"), tokens=(8,) * layout.world_size)
    found = []
    for name in names:
        with opened(layout, mechanism=name, capacity_factor=0.5, overflow="drop") as made:
            one = run(made, case)
            sums = [values.sum().item() for values in (one.y, one.grad_x, one.grad_weights)]
            found.append((len(one.rows), made.dropped(), sums))
    return found


def too_many(session: Session, name: str) -> list[str]:
    """What two calls say of which the first has no room, and the end."""
    layout = layout_of(session)
    case = replace(case_of(layout, "one-hot"), tokens=(6,) * layout.world_size)
    with opened(layout, mechanism=name, capacity_factor=0.5, overflow="raise") as made:
        x, weights, _ = case.part(layout.rank)
        said = [error_of(lambda: made.dispatch(x, case.ids(layout.rank), weights)) for _ in range(2)]
        return [*said, error_of(made.close)]


def first_of_two_has_no_room(session: Session, name: str, then: str) -> str:
    """What is said of two dispatches under way of which the first alone has no room, by what comes then."""
    layout = layout_of(session)
    case = replace(case_of(layout), tokens=(6,) * layout.world_size)
    x, weights, _ = case.part(layout.rank)
    for_one = torch.zeros(6, layout.top_k, dtype=torch.int64)
    for_all = (torch.arange(6 * layout.top_k) % layout.experts).view(6, -1)
    with opened(layout, mechanism=name, capacity_factor=1.0, overflow="raise") as made:
        under_way = [made.start_dispatch(x, ids, weights) for ids in (for_one, for_all)]
        for handle in under_way:
            rows, _ = made.finish_dispatch(handle)
            made.start_combine(rows, handle)
        for handle in under_way:
            made.finish_combine(handle)
        calls = {"dispatch": lambda: made.dispatch(x, for_all, weights), "check": made.check, "close": made.close}
        return error_of(calls[then])


def more_tokens(session: Session, name: str, calls_before: int) -> str:
    layout = layout_of(session)
    case = case_of(layout)
    more = replace(case, tokens=(*case.tokens[:-1], layout.max_tokens + 1))
    with opened(layout, mechanism=name) as made:
        for _ in range(calls_before):
            run(made, case)
        return error_of(lambda: run(made, more))


def unequal(session: Session, options: list[dict[str, Any]]) -> str:
    """Return what the first call says where ranks have these options."""
    layout = layout_of(session)
    with opened(layout, **options[session.rank]) as made:
        return error_of(lambda: run(made, case_of(layout)))


def ids_of_no_expert(session: Session, name: str) -> list[list[float]]:
    """Sums of two tokens of which the first has an expert, for ids of the other that are none."""
    layout = layout_of(session, top_k=1)
    x, weights = torch.ones(2, layout.hidden), torch.ones(2, 1)
    found = []
    with opened(layout, mechanism=name) as made:
        for none in (-1, layout.experts, -(2**31), 2**31, 2**32 + 1, -(2**40), -(2**63), 2**63 - 1):
            rows, _, handle = made.dispatch(x, torch.tensor([[0], [none]]), weights)
            found.append(made.combine(rows, handle)[:, 0].tolist())
    return found


def one_rank(session: Session, name: str) -> None:
    group, _ = dist.new_subgroups(1)
    layout = ExpertLayout(rank=0, world_size=1, experts=4, top_k=2, max_tokens=5, hidden=8)
    case = Case(layout=layout, tokens=(5,), kinds=("distinct",), dtype=torch.float32, seed=session.rank)
    made = Dispatcher(group, experts=4, top_k=2, max_tokens=5, hidden=8, options=ExpertOptions(mechanism=name))  # type: ignore[arg-type]
    check(case, {"torch": run(made, case)}, 0)
    made.close()


def odd_tokens(session: Session) -> str:
    """Tokens that are no multiple of 16 bytes are left to torch."""
    layout = layout_of(session, hidden=5)
    with opened(layout, mechanism="gather") as made:
        check(case_of(layout), {"torch": run(made, case_of(layout))}, session.rank)
        return str(made.report())


def no_shared_memory(session: Session) -> str:
    def refused(*_: Any, **__: Any) -> None:
        raise Unsupported("ranks on two hosts")

    layout = layout_of(session)
    with patch.object(rank_groups, "Communicator", refused), opened(layout, mechanism="gather") as made:
        check(case_of(layout), {"torch": run(made, case_of(layout))}, session.rank)
        return str(made.report())


def chosen(session: Session, max_tokens: int, hidden: int, beside_us: float) -> str:
    layout = layout_of(session, max_tokens=max_tokens, hidden=hidden, experts=128, top_k=8)
    with opened(layout, beside_us=beside_us, capacity_factor=0.01, overflow="drop") as made:
        case = replace(case_of(layout, "distinct"), tokens=(1,) * layout.world_size)
        run(made, case)
        (row,) = {(row.path, row.why) for row in made.report().calls}
        return " ".join(row)


def reported(session: Session) -> str:
    layout = layout_of(session)
    with opened(layout, mechanism="gather") as made:
        run(made, case_of(layout))
        return str(made.report())


def killed(session: Session, name: str, half: str) -> str:
    layout = layout_of(session)
    case = case_of(layout)
    with opened(layout, mechanism=name) as made:
        for _ in range(2):
            run(made, case)
        if session.rank == layout.world_size - 1:
            if half == "finish":
                x, weights, _ = case.part(layout.rank)
                made.start_dispatch(x, case.ids(layout.rank), weights)
            os.kill(os.getpid(), signal.SIGKILL)
        return error_of(lambda: run(made, case))


def misused(session: Session) -> list[str]:
    layout = layout_of(session)
    x, weights, _ = case_of(layout).part(0)
    ids = case_of(layout).ids(0)
    with opened(layout, mechanism="gather") as made:
        said = [
            error_of(lambda: made.dispatch(x[:, 1:], ids, weights)),
            error_of(lambda: made.dispatch(x, ids[1:], weights)),
            error_of(lambda: made.dispatch(x, ids.short(), weights)),
            error_of(lambda: made.dispatch(x, ids.to("meta"), weights)),
            error_of(lambda: made.dispatch(x.int(), ids, weights)),
        ]
        rows, _, handle = made.dispatch(x, ids, weights)
        said += [error_of(lambda: made.finish_dispatch(handle)), error_of(lambda: made.combine(rows[1:], handle))]
        rows, _, handle = made.dispatch(x, ids, weights)
        said.append(error_of(lambda: made.combine(rows.double(), handle)))
        rows, _, handle = made.dispatch(x, ids, weights)
        made.combine(rows, handle)
        said.append(error_of(lambda: made.combine(rows, handle)))
    return [
        *said,
        error_of(lambda: ExpertOptions(mechanism="fast")),  # type: ignore[arg-type]
        error_of(lambda: ExpertOptions(overflow="wait")),  # type: ignore[arg-type]
        error_of(lambda: ExpertOptions(capacity_factor=0)),
        error_of(lambda: ExpertOptions(capacity_factor=math.inf)),
        error_of(lambda: ExpertOptions(wire_dtype=torch.int8)),
        error_of(lambda: ExpertOptions(pad_multiple=0)),
        error_of(lambda: ExpertOptions(beside_us=-1)),
        error_of(lambda: ExpertOptions(communicator=CommunicatorOptions(channels=3))),
        error_of(lambda: ExpertOptions(communicator=CommunicatorOptions(mailbox_bytes=4096))),
        error_of(lambda: ExpertOptions(parts=0)),
        error_of(lambda: Dispatcher(experts=2, top_k=1, max_tokens=1, hidden=1, options=ExpertOptions(parts=2))),
        error_of(lambda: Dispatcher(experts=2, top_k=3, max_tokens=1, hidden=1)),
        error_of(lambda: Dispatcher(experts=3, top_k=1, max_tokens=1, hidden=1)),
        error_of(lambda: Dispatcher(experts=2, top_k=0, max_tokens=1, hidden=1)),
    ]


def compiled(session: Session) -> list[tuple[bool, bool]]:
    """Whether sums and derivatives of a compiled function are those of the function, for two numbers of tokens."""
    layout = layout_of(session)
    found = []
    with opened(layout, mechanism="gather") as made:

        def doubled(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            rows, _, handle = made.dispatch(x * 2, ids, weights)
            return made.combine(rows * 2, handle).relu()

        function = torch.compile(doubled, backend="eager")
        for tokens in (6, 3):
            case = case_of(layout)
            x, weights, _ = (part[:tokens].requires_grad_() for part in case.part(session.rank))
            ids = case.ids(session.rank)[:tokens]
            whole, parts = function(x, ids, weights), doubled(x, ids, weights)
            grads, wanted = (torch.autograd.grad(one.sum(), (x, weights)) for one in (whole, parts))
            found.append((torch.equal(whole, parts), all(map(torch.equal, grads, wanted))))
    return found


def after_close(session: Session, name: str) -> str:
    """What a backward pass says whose dispatcher was closed."""
    layout = layout_of(session)
    x, weights, _ = case_of(layout).part(session.rank)
    with opened(layout, mechanism=name) as made:
        rows, _, handle = made.dispatch(x.requires_grad_(), case_of(layout).ids(session.rank), weights)
        total = made.combine(rows, handle).sum()
    return error_of(total.backward)


class OnlyFlags(SoftwareDriver):
    """Copies nothing: torch's memory on CPUs is not kept for a graph."""

    def cuMemcpyDtoDAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[int]:
        self.enqueue(stream, "copy", lambda: None)
        return (0,)


class FlagGpu(SoftwareGpu):
    def bind_reduction(self, call: ReduceLaunch, stream: int, reduction: Reduction) -> Action:
        return lambda: self.driver.enqueue(stream, "reduce", lambda: None)


def replayed(session: Session) -> list[int]:
    """How many flags are not at rest after each replay of two layers in two parts, forward and backward, in a graph.

    Here a graph does all in the order in which it was captured, as if a GPU had one queue.
    """
    gpu, layout, communicators = FlagGpu(delays(7, session.rank), OnlyFlags), layout_of(session), list[Communicator]()

    def open_one(group: Any, device: Any, options: Any) -> Communicator:
        communicators.append(Communicator(group, device=gpu, options=options))
        return communicators[0]

    experts = [LocalExperts(layout.local_experts, layout.hidden, 8) for _ in range(2)]

    def step() -> None:
        y = torch.randn(layout.max_tokens, layout.hidden, requires_grad=True)
        for layer in experts:
            weights, ids = y[:, : layout.experts].softmax(-1).topk(layout.top_k)
            y = y + overlapped_moe(y, ids, weights, layer, made, parts=2)
        y.sum().backward()

    def not_at_rest() -> int:
        transport: Any = communicators[0]._transport
        context = transport.context
        at, count = Location(context.flags.region, 0), context.flags.captured_bytes // 4
        words = torch.tensor((ctypes.c_int32 * count).from_address(context.memory.address(session.rank, at, 4 * count)))
        words = words.view(2 * communicators[0].channels, -1)
        words[1::2, : layout.world_size] -= 1  # staging is free
        return int(words.count_nonzero())

    found, stream = [], gpu.current_stream()
    with opened(layout, mechanism="gather", equal_tokens=True) as made:
        with patch.object(rank_groups, "Communicator", open_one):
            step()
        gpu.synchronize()
        gpu.driver.cuStreamBeginCapture(stream, 2)
        step()
        graph = gpu.driver.cuStreamEndCapture(stream)[1]
        for _ in range(3):
            gpu.driver.cuGraphLaunch(graph, stream)
            gpu.synchronize()
            session.gather(None)
            found.append(not_at_rest())
            session.gather(None)
    return found
