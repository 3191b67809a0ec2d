"""One rank of test_backend.py: backend `counterpoint` on real GPUs beside NCCL; writes down what came out.

Started by path with RANK, WORLD_SIZE and an argument: a folder for the rendezvous and the answers.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import counterpoint
import counterpoint.torch_backend as backend
from counterpoint.collectives.options import CommunicatorOptions
from tests.dist.torch_backend_programs import EVERYTHING, OPERATIONS, called
from tests.support.gpu_ranks import own_gpu, run_scenarios

TAKING = backend.BackendOptions(crossover_bytes=EVERYTHING, communicator=CommunicatorOptions(timeout_s=60))
SIZES = (1 << 12, 1 << 20, 1 << 24, 1 << 26)
Seen = dict[str, str]


class Rank:
    def __init__(self, device: torch.device, other: str) -> None:
        self.device, self.other = device, other
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ours: Any = dist.new_group(backend="counterpoint", pg_options=TAKING)
        self.theirs: Any = dist.new_group(backend=other)

    def numbers(self, numel: int, seed: int = 0) -> torch.Tensor:
        """Small integers as float32, so that sums have one value; others on each rank."""
        made = torch.randint(-8, 8, (numel,), generator=torch.Generator().manual_seed(100 * seed + self.rank))
        return made.float().to(self.device)

    def losses(self, model: nn.Module, forward: Callable[[int], torch.Tensor]) -> list[float]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(6):
            loss = forward(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found


def calls(one: Rank) -> Seen:
    """Every operation at every size, on the current stream and beside it, with futures: equal to NCCL's."""
    wrong = count = 0
    for num_bytes in SIZES:
        for operation in OPERATIONS[:5]:  # those that the backend takes
            for async_op in (False, True):
                full, found = one.numbers(num_bytes // 4, count), []
                for group in (one.ours, one.theirs):
                    output, work = called(operation, full.clone(), group, async_op)
                    if async_op:
                        work.get_future().wait() if group is one.ours and count % 3 else work.wait()
                    found.append(output)
                wrong += not torch.equal(*found)
                count += 1
    return {"wrong": str(wrong), "taken": str(one.ours.report().taken == count)}


def data_parallel(one: Rank) -> Seen:
    """DDP by NCCL, by the backend, with registered buckets, and by `overlap`: losses, and what was in place."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 8))
    found: dict[str, list[float]] = {}
    report = ""
    for way in ("stock", "backend", "registered", "overlap"):
        model = copy.deepcopy(plain).to(one.device)
        keywords: dict[str, Any] = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}
        if way == "registered":
            with counterpoint.symmetric_memory(one.ours):
                ddp = DistributedDataParallel(model, process_group=one.ours, **keywords)
        else:
            group = one.ours if way == "backend" else one.theirs
            ddp = DistributedDataParallel(model, process_group=group, **keywords)
        handle = counterpoint.overlap(ddp) if way == "overlap" else None

        def forward(step: int, ddp: nn.Module = ddp) -> torch.Tensor:
            loss: torch.Tensor = ddp(one.numbers(1024, step).view(16, 64)).square().mean()
            return loss

        found[way] = one.losses(ddp, forward)
        if handle is not None:
            report = str(handle)
            handle.restore()
    places = {row.why for row in one.ours.report().calls if row.operation == "all_reduce"}
    return {
        "equal": str([way for way, losses in found.items() if losses == found["stock"]]),
        "in place": str("in place" in places),
        "overlap": report,
    }


def tensor_parallel(one: Rank) -> Seen:
    """A block with sequence parallelism on an axis of its own, beside the same by NCCL."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    found, taken = [], 0
    for axis, override in (
        ("ours", ("counterpoint", TAKING)),
        ("theirs", one.other),
    ):  # DTensor takes equal meshes for one
        chosen: Any = {axis: override}
        mesh = init_device_mesh(one.device.type, (one.size,), mesh_dim_names=(axis,), backend_override=chosen)
        styles = {
            "0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }  # fmt: skip
        model = parallelize_module(copy.deepcopy(block).to(one.device), mesh, styles)

        def forward(step: int, model: Any = model) -> torch.Tensor:
            whole = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(step)).to(one.device)
            loss: torch.Tensor = model(whole.chunk(one.size, 1)[one.rank]).to_local().square().mean()
            return loss

        found.append(one.losses(model, forward))
        if axis == "ours":
            taken = backend.report(mesh.get_group(axis)).taken
    furthest = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(*found, strict=True))
    return {"close": str(furthest < 1e-5), "taken": str(taken > 0)}


def compiled(one: Rank) -> Seen:
    """Functional collectives, eager and compiled in one graph."""

    def step(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = functional.all_reduce(x * 2, "sum", one.ours)
        whole = functional.all_gather_tensor(x, 0, one.ours).sum()
        part = functional.reduce_scatter_tensor(x, "sum", 0, one.ours).sum()
        result: torch.Tensor = total + whole + part
        return result

    before = one.ours.report().taken
    x = one.numbers(4096).view(64, 64)
    kind: dict[str, Any] = {} if one.device.type == "cuda" else {"backend": "aot_eager"}
    eager, graph = step(x), torch.compile(step, fullgraph=True, **kind)(x)
    return {"equal": str(torch.equal(eager, graph)), "taken": str(one.ours.report().taken - before)}


def captured(one: Rank) -> Seen:
    if one.device.type != "cuda":
        return {"value": "as it should be"}
    tensor, stream = torch.ones(1 << 20, device=one.device), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            dist.all_reduce(tensor, group=one.ours)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        dist.all_reduce(tensor, group=one.ours)
    tensor.fill_(1)
    torch.cuda.synchronize()
    dist.barrier(one.theirs)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    right = tensor.eq(one.size**3).all().item()
    return {"value": "as it should be" if right else str(tensor[0].item())}


def ended(one: Rank) -> Seen:
    """Groups that are destroyed or aborted with calls under way, and one that is made after them."""
    for how in ("destroy", "abort"):
        group: Any = dist.new_group(backend="counterpoint", pg_options=TAKING)
        tensor = torch.ones(1 << 22, device=one.device)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(20)]
        if how == "abort":
            group.abort()
        dist.destroy_process_group(group)
        del works
    group = dist.new_group(backend="counterpoint", pg_options=TAKING)
    tensor = torch.ones(1000, device=one.device)
    dist.all_reduce(tensor, group=group)
    right = tensor.eq(one.size).all().item()
    dist.destroy_process_group(group)
    return {"right": str(bool(right))}


SCENARIOS = {
    "calls": calls, "data parallel": data_parallel, "tensor parallel": tensor_parallel, "compiled": compiled,
    "captured": captured, "ended": ended,
}  # fmt: skip


def main(folder: Path) -> None:
    made: list[Rank] = []

    def begun(scenario: Callable[[Rank], Seen]) -> Seen:
        made[:] = made or [Rank(own_gpu(), "nccl")]
        return scenario(made[0])

    run_scenarios(folder, {name: partial(begun, scenario) for name, scenario in SCENARIOS.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
