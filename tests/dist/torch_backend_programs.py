"""What ranks run to test backend `counterpoint`: torch's own calls, beside the same of a gloo group."""

from __future__ import annotations

import copy
import datetime
import functools
import gc
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import counterpoint.torch_backend as backend
from counterpoint.errors import CounterpointError
from counterpoint.measurement.session import Session
from counterpoint.parallel.background import all_reduce_in_pieces
from tests.support.ranks import PATIENT

EVERYTHING = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"), 0)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
_GROUPS: dict[str, Any] = {}


def groups() -> tuple[Any, Any]:
    """A group of the backend that takes every call that it can, and one of gloo; made once, since torch keeps them."""
    if not _GROUPS:
        taking = backend.BackendOptions(crossover_bytes=EVERYTHING, communicator=PATIENT)
        _GROUPS["ours"] = dist.new_group(backend="counterpoint", pg_options=taking)
        _GROUPS["gloo"] = dist.new_group(backend="gloo")
    return _GROUPS["ours"], _GROUPS["gloo"]


def newest(*names: str) -> Callable[..., Any]:
    """The function of torch.distributed by the first of these names that it has: old names warn."""
    found: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


def random_calls(session: Session, seed: int, count: int) -> tuple[int, int]:
    """Random calls of both groups with equal tensors; how many were equal, and how many ours took."""
    del session
    return compared(*groups(), seed, count)


def compared(ours: Any, gloo: Any, seed: int, count: int) -> tuple[int, int]:
    chance, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    numbers = torch.Generator().manual_seed(1000 * seed + rank)
    before = ours.report().taken
    for _ in range(count):
        dtype, blocks = chance.choice(DTYPES), chance.choice((1, 3, 17, 1000))
        full = torch.randint(0, 5, (size * blocks,), generator=numbers).to(dtype)
        call = chance.choice(CALLS)
        async_op = chance.random() < 0.5
        results = []
        for group in (ours, gloo):
            output, work = call(full.clone(), size, group, async_op)
            if async_op:
                work.wait()
            results.append(output)
        assert torch.equal(*results), (call.__name__, dtype, blocks)
    return count, ours.report().taken - before


def all_reduce(full: torch.Tensor, size: int, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    return full, dist.all_reduce(full, dist.ReduceOp.MAX if full.numel() % 2 else dist.ReduceOp.SUM, group, async_op)


def broadcast(full: torch.Tensor, size: int, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    return full, dist.broadcast(full, size - 1, group, async_op)


def all_gather(full: torch.Tensor, size: int, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    output, mine = torch.empty_like(full), full.chunk(size)[dist.get_rank()].clone()
    return output, newest("all_gather_single", "all_gather_into_tensor")(output, mine, group, async_op)


def reduce_scatter(full: torch.Tensor, size: int, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    output = full.new_empty(full.numel() // size)
    function = newest("reduce_scatter_single", "reduce_scatter_tensor")
    return output, function(output, full, dist.ReduceOp.SUM, group, async_op)


def all_to_all(full: torch.Tensor, size: int, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    output = torch.empty_like(full)
    return output, dist.all_to_all_single(output, full, group=group, async_op=async_op)


def split_all_to_all(full: torch.Tensor, size: int, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    splits = [full.numel() // size] * size
    output = torch.empty_like(full)
    return output, dist.all_to_all_single(output, full, splits, splits, group, async_op)


def listed_all_gather(full: torch.Tensor, size: int, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    output = torch.empty_like(full)
    return output, dist.all_gather(list(output.chunk(size)), full.chunk(size)[0].clone(), group, async_op)


CALLS = (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, split_all_to_all, listed_all_gather)


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
        taking = backend.BackendOptions(crossover_bytes=EVERYTHING, communicator=PATIENT)
        ours: Any = dist.new_group(backend="counterpoint", pg_options=taking)
    finally:
        dist.set_debug_level(level)  # type: ignore[attr-defined]
    dist.all_reduce(torch.ones(4), group=ours)
    message = ""
    try:
        dist.all_reduce(torch.ones(4 + dist.get_rank()), group=ours)
    except RuntimeError as error:
        message = str(error).split(" with ")[0]
    return message, ours.report().calls[0].why


def futures(_: Session) -> list[float]:
    ours, _gloo = groups()
    work = dist.all_reduce(torch.ones(100), group=ours, async_op=True)
    chained = work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())
    value: list[float] = chained.wait()[:2].tolist()
    return value


def functional_calls(_: Session) -> tuple[bool, int]:
    """Eager and compiled in one graph: whether both are right, and how many calls ours took."""
    ours, _gloo = groups()
    before, size = ours.report().taken, dist.get_world_size()

    def step(x: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = functional.all_reduce(x * 2, "sum", ours)
        return reduced + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler of itself
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        right = all(torch.equal(f(torch.ones(64)), torch.full((64,), 2.0 * size + 1)) for f in (step, compiled))
    return right, ours.report().taken - before


def ddp_losses(_: Session) -> tuple[list[float], list[float], int]:
    """Training by DDP on both groups, with `no_sync` and buckets that are rebuilt; how many calls ours took."""
    ours, gloo = groups()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    before = ours.report().taken
    found = [trained(copy.deepcopy(model), group) for group in (ours, gloo)]
    return found[0], found[1], ours.report().taken - before


def trained(
    model: torch.nn.Module, group: Any, prepare: Callable[[DistributedDataParallel], object] = id
) -> list[float]:
    """Losses of a few steps, and the sum of the parameters; `prepare` gets the DDP model first."""
    dtype = next(model.parameters()).dtype
    numbers = torch.Generator().manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1, gradient_as_bucket_view=True)
    prepare(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        batch = torch.randn(16, 64, generator=numbers).to(dtype)
        if step % 3 == 1:
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
            continue
        loss = ddp(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    losses.append(sum(p.double().sum().item() for p in model.parameters()))
    return losses


def ddp_errors(_: Session) -> tuple[float, float, int]:
    return errors_of_ddp(*groups())


def errors_of_ddp(ours: Any, gloo: Any) -> tuple[float, float, int]:
    """Largest error of losses and parameters of DDP against float64: ours and gloo's; how many calls ours took."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    before = ours.report().taken
    exact = trained(copy.deepcopy(model).double(), gloo)
    found = [trained(copy.deepcopy(model), group) for group in (ours, gloo)]
    mine, theirs = (max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in found)
    return mine, theirs, ours.report().taken - before


def tensor_parallel(_: Session) -> tuple[list[float], list[float], int]:
    """A block split over an axis of a mesh with its own backend, and over gloo's: losses, and calls that ours took."""
    taking = backend.BackendOptions(crossover_bytes=EVERYTHING, communicator=PATIENT)
    shape = (dist.get_world_size() // 2, 2)
    override: Any = {"by_ours": ("counterpoint", taking)}  # names of their own: DTensor takes equal meshes for one
    ours = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "by_ours"), backend_override=override)["by_ours"]
    gloo = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "by_gloo"))["by_gloo"]
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    found = []
    for mesh in (ours, gloo):
        model = parallelize_module(copy.deepcopy(block), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
        losses = []
        for _step in range(3):
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
        found.append(losses)
    return found[0], found[1], backend.report(ours.get_group()).taken


def pipeline(_: Session) -> float | None:
    """1F1B of as many stages as ranks: the last one's loss."""
    ours, _gloo = groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage = PipelineStage(torch.nn.Linear(16, 16), rank, size, torch.device("cpu"), group=ours)
    schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=torch.nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    batch = torch.randn(4 * size, 16, generator=torch.Generator().manual_seed(1))
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch if rank == size - 1 else None, losses=losses)
    return sum(loss.item() for loss in losses) if losses else None


def made_and_destroyed(_: Session, count: int) -> int:
    """How many threads `count` groups with communicators leave."""
    gc.collect()
    before = threading.active_count()
    for _time in range(count):
        group = dist.new_group(backend="counterpoint", pg_options=backend.BackendOptions(crossover_bytes=EVERYTHING))
        dist.all_reduce(torch.ones(10), group=group)
        assert backend.report(group).require().taken == 1
        dist.destroy_process_group(group)
    return threading.active_count() - before


def shorter_timeout(_: Session) -> str:
    """The error of a rank that waits in vain, after the group's timeout was set."""
    group = dist.new_group(backend="counterpoint", pg_options=backend.BackendOptions(crossover_bytes=EVERYTHING))
    dist.all_reduce(torch.ones(10), group=group)
    group.set_timeout(datetime.timedelta(seconds=1))
    text = "came not"
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(10), group=group)
        except CounterpointError as error:
            text = f"{type(error).__name__}: {error}"
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
        seen = [_ended_with(future) for future in futures]
    else:
        seen = []
    dist.barrier(groups()[1])
    dist.destroy_process_group(group)
    return seen


def _ended_with(future: Any) -> str:
    try:
        future.wait()
    except Exception as error:
        return type(error).__name__
    return "no error"


def refused(_: Session, what: str) -> str:
    try:
        if what == "other options":
            others: Any = dist.ProcessGroupGloo
            dist.new_group(backend="counterpoint", pg_options=others._Options())
        elif what == "other group":
            backend.report(groups()[1])
        else:
            untaken = dist.new_group(backend="counterpoint")
            dist.all_reduce(torch.ones(4), group=untaken)
            backend.report(untaken).require()
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
