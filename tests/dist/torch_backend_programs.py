"""What ranks run to test backend `counterpoint`: torch's own calls, beside the same of a gloo group."""

import copy
import datetime
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import counterpoint.torch_backend as backend
from counterpoint.measurement.session import Session
from counterpoint.parallel import ddp
from counterpoint.parallel.background import all_reduce_in_pieces
from tests.support.ranks import PATIENT, TIMEOUT_S, error_of
from tests.support.torch_training import learned

EVERYTHING = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"), 0)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def taking(**options: Any) -> backend.BackendOptions:
    """Options of a group that takes every call that it can, unless `options` say something else."""
    return backend.BackendOptions(**{"crossover_bytes": EVERYTHING, **options}, communicator=PATIENT)


def made(**options: Any) -> Any:
    """A new group with these options of `taking`."""
    return dist.new_group(
        backend="counterpoint", pg_options=taking(**options), timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )


@functools.cache
def groups(ranks_per_host: int | None = None) -> tuple[Any, Any]:
    """A group of the backend, on hosts of so many ranks, and one of gloo; made once, since torch keeps them."""
    return made(ranks_per_host=ranks_per_host), dist.new_group(backend="gloo")


def newest(*names: str) -> Callable[..., Any]:
    """The function of torch.distributed by the first of these names that it has: old names warn."""
    found: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


def random_calls(_: Session, ranks_per_host: int | None, seed: int, count: int) -> tuple[int, int]:
    """Random calls of both groups with equal tensors; how many were equal, and how many ours took."""
    ours, gloo = groups(ranks_per_host)
    chance, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    numbers = torch.Generator().manual_seed(1000 * seed + rank)
    before = ours.report().taken
    for _number in range(count):
        dtype, blocks = chance.choice(DTYPES), chance.choice((1, 3, 17, 1000))
        full = torch.randint(0, 5, (size * blocks,), generator=numbers).to(dtype)
        operation = chance.choice(OPERATIONS)
        async_op = chance.random() < 0.5
        results = []
        for group in (ours, gloo):
            output, work = called(operation, full.clone(), group, async_op)
            if async_op:
                work.wait()
            results.append(output)
        assert torch.equal(*results), (operation, dtype, blocks)
    return count, ours.report().taken - before


OPERATIONS = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "split all_to_all", "listed all_gather"
)  # fmt: skip
"""Of these the backend's communicator takes the first five."""


def started(
    operation: str, output: torch.Tensor, given: torch.Tensor, group: Any, async_op: bool, root: int = 0
) -> Any:
    """Begin a call of torch; what is reduced or broadcast in place is copied to `output` first."""
    match operation:
        case "all_reduce":
            op = dist.ReduceOp.MAX if given.numel() % 2 else dist.ReduceOp.SUM
            return dist.all_reduce(output.copy_(given), op, group, async_op)
        case "broadcast":
            return dist.broadcast(output.copy_(given), root, group, async_op)
        case "all_gather":
            return newest("all_gather_single", "all_gather_into_tensor")(output, given, group, async_op)
        case "reduce_scatter":
            function = newest("reduce_scatter_single", "reduce_scatter_tensor")
            return function(output, given, dist.ReduceOp.SUM, group, async_op)
        case "listed all_gather":
            return dist.all_gather(list(output.chunk(dist.get_world_size())), given, group, async_op)
    splits = [len(given) // dist.get_world_size()] * dist.get_world_size() if "split" in operation else None
    return dist.all_to_all_single(output, given, splits, splits, group, async_op)


def called(operation: str, full: torch.Tensor, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    """Begin a call on a part of `full` for each rank, or of it; return its output and its work."""
    size = dist.get_world_size()
    given = full.chunk(size)[dist.get_rank()].clone() if "gather" in operation else full
    output = full.new_empty(len(full) // size if operation == "reduce_scatter" else len(full))
    return output, started(operation, output, given, group, async_op, root=size - 1)


def other_calls(_: Session) -> None:
    """What no communicator takes: objects, barriers, scatter, gather, reduce, messages."""
    ours, _gloo = groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    values: list[Any] = [None] * size
    dist.all_gather_object(values, {"rank": rank}, group=ours)
    assert values == [{"rank": other} for other in range(size)]
    dist.barrier(ours)
    mine = torch.zeros(2)
    dist.scatter(mine, [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None, 0, ours)
    assert mine.tolist() == [rank, rank]
    seen = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, seen, 0, ours)
    dist.reduce(mine, 0, group=ours)
    other = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % size, ours),
        dist.P2POp(dist.irecv, other, (rank - 1) % size, ours),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert other.tolist() == [float((rank - 1) % size)] * 3


def short_forms(_: Session) -> None:
    """Calls of the group itself, with one option in place of all; a sparse tensor, which only torch reduces."""
    ours, _gloo = groups()
    rank, size, before = dist.get_rank(), dist.get_world_size(), ours.report().taken
    one = torch.full((3,), float(rank))
    ours.allreduce(one, dist.ReduceOp.MAX).wait()
    assert one.tolist() == [size - 1.0] * 3
    ours.allreduce([one], op=dist.ReduceOp.SUM).wait()
    assert one.tolist() == [size * (size - 1.0)] * 3
    two = torch.full((3,), float(rank))
    ours.broadcast(two, size - 1).wait()
    assert two.tolist() == [size - 1.0] * 3
    assert ours.report().taken == before + 3
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse, group=ours)
    assert torch.equal(sparse.to_dense(), size * torch.eye(3))


def barrier_after_calls(_: Session) -> bool:
    """Calls that nobody waits for, then a barrier: whether they have ended."""
    ours, _gloo = groups()
    tensors = [torch.full((100, 1000), float(i)) for i in range(16)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=ours, async_op=True)
    dist.barrier(ours)
    return all(torch.all(tensor == i * dist.get_world_size()) for i, tensor in enumerate(tensors))


def compared_calls(_: Session) -> tuple[str, str]:
    """What torch says of calls that differ, where it is to compare them, and why the backend takes none then."""
    level = dist.get_debug_level()  # type: ignore[attr-defined]
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    try:
        ours = made()
    finally:
        dist.set_debug_level(level)  # type: ignore[attr-defined]
    dist.all_reduce(torch.ones(4), group=ours)
    message = ""
    try:
        dist.all_reduce(torch.ones(4 + dist.get_rank()), group=ours)
    except RuntimeError as error:
        message = str(error).split(" with ")[0]
    return message, ours.report().calls[0].why


def futures(_: Session, ranks_per_host: int | None) -> list[float]:
    ours, _gloo = groups(ranks_per_host)
    work = dist.all_reduce(torch.ones(100), group=ours, async_op=True)
    chained = work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())
    value: list[float] = chained.wait()[:2].tolist()
    return value


def trained(
    model: torch.nn.Module, group: Any, prepare: Callable[[DistributedDataParallel], object] = id
) -> list[float]:
    """Losses of a few steps, and the sum of the parameters; `prepare` gets the DDP model first."""
    dtype = next(model.parameters()).dtype
    numbers = torch.Generator().manual_seed(dist.get_rank())
    made = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1, gradient_as_bucket_view=True)
    prepare(made)
    batches = ((torch.randn(16, 64, generator=numbers).to(dtype),) for _ in range(6))
    return [*learned(made, batches, accumulates=True), sum(p.double().sum().item() for p in model.parameters())]


class Branches(torch.nn.Module):
    """Has a layer that only some steps use; the last layer is of float32."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(48, 96).to(dtype)
        self.left = torch.nn.Linear(96, 64).to(dtype)
        self.right = torch.nn.Linear(96, 64).to(dtype)
        self.last = torch.nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.first(x.to(self.first.weight.dtype)).relu()
        out = self.left(hidden) + self.right(hidden) if both else self.left(hidden)
        last: torch.Tensor = self.last(out.float())
        return last


def ddp_errors(_: Session, ranks_per_host: int | None, hooked: bool = False) -> tuple[float, float, int]:
    """Largest error of losses and parameters of DDP against float64: ours and gloo's; how many calls ours took.

    `hooked`: by the hook of `counterpoint.parallel.ddp`, which says how many it has taken.
    """
    ours, gloo = groups(ranks_per_host)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    state, before = ddp.HookState(ours), ours.report().taken
    prepare: Any = (lambda made: made.register_comm_hook(state, ddp.hook)) if hooked else id
    exact = trained(copy.deepcopy(model).double(), gloo)
    found = trained(copy.deepcopy(model), ours, prepare), trained(copy.deepcopy(model), gloo)
    mine, theirs = (max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in found)
    return mine, theirs, state.report().taken if hooked else ours.report().taken - before


def shorter_timeout(_: Session) -> str:
    """The error of a rank that waits in vain, after the group's timeout was set."""
    group = dist.new_group(backend="counterpoint", pg_options=backend.BackendOptions(crossover_bytes=EVERYTHING))
    dist.all_reduce(torch.ones(10), group=group)
    group.set_timeout(datetime.timedelta(seconds=1))
    text = "came not"
    if dist.get_rank() == 0:
        text = error_of(lambda: dist.all_reduce(torch.ones(10), group=group))
    dist.barrier(groups()[1])
    dist.destroy_process_group(group)
    return text


def abort_with_buckets(_: Session) -> list[str]:
    """What the futures of buckets end with that nobody else reduces, when the group is aborted."""
    group = dist.new_group(backend="counterpoint", pg_options=backend.BackendOptions(crossover_bytes=EVERYTHING))
    dist.all_reduce(torch.ones(10), group=group)
    if dist.get_rank() == 0:
        buckets = [torch.ones(1000) for _bucket in range(5)]
        communicator, background = group.rank_group.open(), group.rank_group.background()
        run = functools.partial(all_reduce_in_pieces, communicator)
        futures = [background.start(functools.partial(run, one, "sum", 1.0), 0, one).future for one in buckets]
        group.abort()
        seen = [error_of(future.wait) for future in futures]
    else:
        seen = []
    dist.barrier(groups()[1])
    dist.destroy_process_group(group)
    return seen


def _other_options() -> None:
    others: Any = dist.ProcessGroupGloo
    dist.new_group(backend="counterpoint", pg_options=others._Options())


def _none_taken() -> None:
    untaken = dist.new_group(backend="counterpoint")
    dist.all_reduce(torch.ones(4), group=untaken)
    backend.report(untaken).require()


REFUSED: dict[str, Callable[[], object]] = {
    "other options": _other_options,
    "other group": lambda: backend.report(groups()[1]),
    "none taken": _none_taken,
}


def refused(_: Session, what: str) -> str:
    return error_of(REFUSED[what])
