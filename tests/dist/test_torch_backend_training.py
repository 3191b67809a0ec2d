"""Backend `counterpoint` under what users of torch write: DTensor, HSDP, pipelines, DDP, compiled functions.

Sums of two ranks have one order: losses, gradients and parameters are those of gloo, bit by bit.
"""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import counterpoint.torch_backend as backend
from counterpoint.measurement.session import Session
from tests.dist.torch_backend_programs import Branches, groups, taking
from tests.support.ranks import Ranks, error_of, run_once
from tests.support.torch_training import drawn, learned, pipelined

Found = tuple[list[float], list[float], dict[str, int]]


def taken(group: Any) -> dict[str, int]:
    """How many calls of each operation a group's communicator took."""
    counts: dict[str, int] = {}
    for row in backend.report(group).calls:
        if row.path != "torch":
            counts[row.operation] = counts.get(row.operation, 0) + row.calls
    return counts


class Block(nn.Module):
    """What every layer of a transformer has: a norm, and a product to a wider space and back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _steps(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> list[float]:
    losses = learned(model, ((batch(step),) for step in range(3)))
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [*losses, sum(p.detach().double().sum().item() for p in whole)]


def sequence_parallel(_: Session) -> Found:
    """Two blocks with tensor and sequence parallelism over one axis of a mesh."""
    shape = (dist.get_world_size() // 2, 2)
    # names of their own: DTensor's caches take equal meshes for one
    override: Any = {"ours": ("counterpoint", taking())}
    ours = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ours"), backend_override=override)["ours"]
    gloo = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "gloo"))["gloo"]
    found = [_steps(_in_sequence(mesh), lambda step: drawn(step, 2, 8, 32)) for mesh in (ours, gloo)]
    return found[0], found[1], taken(ours.get_group())


def _in_sequence(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    plan: dict[str, Any] = {}
    for number in "01":
        plan[f"{number}.norm"] = SequenceParallel()
        plan[f"{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{number}.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan["0"] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    plan["1"] = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    return parallelize_module(nn.Sequential(Block(), Block()), mesh, plan)


def hybrid_sharded(_: Session, axes: list[str]) -> Found:
    """FSDP2 over a mesh with two axes, `axes` of them on our backend: HSDP."""
    names, shape = ("replicate", "shard"), (2, dist.get_world_size() // 2)
    override: Any = {axis: ("counterpoint", taking()) for axis in axes}
    ours = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)
    gloo = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = []
    for mesh in (ours, gloo):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found.append(_steps(model, lambda step: drawn(100 * step + dist.get_rank(), 4, 32)))
    counts: dict[str, int] = {}
    for axis in axes:
        counts |= taken(ours.get_group(axis))
    return found[0], found[1], counts


def pipeline(_: Session, schedule: str) -> tuple[list[float], list[float]]:
    """Losses and gradients of a schedule with two stages on each rank, by our group and by gloo's."""
    size = dist.get_world_size()
    ours, gloo = (pipelined(one, schedule, width=16, rows=4 * size, microbatches=2 * size) for one in groups())
    return ours, gloo


def data_parallel(_: Session, how: str) -> Found:
    """DDP in one of the ways that its users choose."""
    torch.manual_seed(0)
    model = Branches()
    ours, gloo = groups()
    before = taken(ours).get("all_reduce", 0)
    found = [_data_parallel(copy.deepcopy(model), group, how) for group in (ours, gloo)]
    return found[0], found[1], {"all_reduce": taken(ours)["all_reduce"] - before}


def _data_parallel(model: nn.Module, group: Any, how: str) -> list[float]:
    rank = dist.get_rank()
    options: dict[str, Any] = {
        "static graph": {"static_graph": True},
        "unused parameters": {"find_unused_parameters": True},
    }.get(how, {})
    ddp = DistributedDataParallel(model, process_group=group, **options)
    called: Any = torch.compile(ddp, backend="aot_eager") if how == "compiled" else ddp
    steps = 3 + 2 * rank if how == "uneven inputs" else 4
    batches = ((drawn(10 * step + rank, 8, 48), how != "unused parameters" or step % 2 == 0) for step in range(steps))
    with warnings.catch_warnings(), Join([ddp], enable=how == "uneven inputs"):
        warnings.simplefilter("ignore")  # torch's compiler of itself
        losses = learned(called, batches)
    return [*losses, sum(p.detach().double().sum().item() for p in model.parameters())]


def full_graph(_: Session) -> tuple[bool, dict[str, int]]:
    """Functional collectives of every kind, eager and in one graph: whether equal, and calls that ours took."""
    ours, _gloo = groups()
    before, size = taken(ours), dist.get_world_size()
    gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)  # old names warn
    scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)

    def step(x: torch.Tensor) -> torch.Tensor:
        gathered = gather(x, 0, ours)
        reduced = functional.all_reduce(gathered, "sum", ours)
        mine: torch.Tensor = scatter(reduced, "avg", 0, ours)
        return mine + x

    x = torch.arange(8.0) + dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler of itself
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        right = all(torch.equal(f(x), x + size * x) for f in (step, compiled))
    after = taken(ours)
    return right, {name: after[name] - before.get(name, 0) for name in ("all_gather", "all_reduce", "reduce_scatter")}


def part_of_the_ranks(_: Session) -> Any:
    """What the first and last rank find in a group of their own, and what a rank outside of it is told."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, size - 1], backend="counterpoint", pg_options=taking())
    if rank not in (0, size - 1):
        return error_of(lambda: backend.report(group))
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    sent = torch.full((4,), float(rank))
    dist.broadcast(sent, src=size - 1, group=group)
    found = tensor[0].item(), sent[0].item(), dist.get_process_group_ranks(group), taken(group)
    dist.destroy_process_group(group)
    return found


def begun_as(_: Session, spelling: str, path: str) -> Any:
    """What the default group finds, made by the name that a program gives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = torch._C._distributed_c10d.FileStore(path, size)
    dist.init_process_group(spelling, store=store, rank=rank, world_size=size, pg_options=taking())
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor)
    values: list[Any] = [None] * size
    dist.all_gather_object(values, rank)
    dist.barrier()
    half = dist.new_group([0, 1], backend=spelling, pg_options=taking())
    dist.barrier(half)  # a rank may not leave while another still connects
    again = init_device_mesh("cpu", (size,)).get_group()
    found = tensor[0].item(), values, taken(None), again is dist.group.WORLD, backend.report(half).taken
    dist.destroy_process_group()
    return found


def test_tensor_and_sequence_parallel(four_ranks: Ranks) -> None:
    """DTensor's gathers and reduce_scatters are taken, too, though they arrive as coalesced calls."""
    for ours, gloo, taken in four_ranks.run(sequence_parallel):
        assert ours == gloo
        assert min(taken["all_gather"], taken["reduce_scatter"]) >= 12, taken


@pytest.mark.parametrize(
    ("axes", "operations"),
    [(["replicate"], ["all_reduce"]), (["replicate", "shard"], ["all_gather", "all_reduce", "reduce_scatter"])],
)
def test_hybrid_sharding(four_ranks: Ranks, axes: list[str], operations: list[str]) -> None:
    for ours, gloo, taken in four_ranks.run(hybrid_sharded, axes):
        assert ours == gloo
        assert sorted(taken) == operations
        assert min(taken.values()) >= 3


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_pipelines_with_several_stages_on_a_rank(two_ranks: Ranks, schedule: str) -> None:
    for ours, gloo in two_ranks.run(pipeline, schedule):
        assert ours == gloo


@pytest.mark.parametrize("how", ["static graph", "unused parameters", "uneven inputs", "compiled"])
def test_data_parallel_in_every_way(two_ranks: Ranks, how: str) -> None:
    for ours, gloo, taken in two_ranks.run(data_parallel, how):
        assert ours == gloo
        assert taken["all_reduce"] >= 3, taken


def test_functional_collectives_in_a_full_graph(two_ranks: Ranks) -> None:
    expected = {"all_gather": 2, "all_reduce": 2, "reduce_scatter": 2}
    assert two_ranks.run(full_graph) == [(True, expected)] * 2


def test_a_group_of_some_ranks(three_ranks: Ranks) -> None:
    """The others have a placeholder of torch, which has no report."""
    first, outside, last = three_ranks.run(part_of_the_ranks)
    assert first == last == (4.0, 2.0, [0, 2], {"all_reduce": 1, "broadcast": 1})
    assert "this rank is not in the group" in outside


@pytest.mark.parametrize(
    "spelling", ["counterpoint", "cpu:counterpoint", "cuda:counterpoint,cpu:gloo", "cpu:gloo,cuda:counterpoint"]
)
def test_the_default_group_by_every_spelling(tmp_path: Path, spelling: str) -> None:
    found = run_once(2, begun_as, spelling, str(tmp_path / "store"))
    for total, values, taken, is_world, of_half in found:
        assert (total, values, taken["all_reduce"], is_world, of_half) == (3.0, [0, 1], 1, True, 0)
