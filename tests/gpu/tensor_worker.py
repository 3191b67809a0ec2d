"""One rank of test_tensor.py: torch.ops.counterpoint on GPUs, beside torch's own collectives.

python tensor_worker.py FOLDER    with RANK and WORLD_SIZE; writes FOLDER/found<rank>.json
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.parallel.options import TensorOptions
from counterpoint.parallel.tensor.group import TensorGroup, tensor_group
from tests.dist import tensor_programs as programs
from tests.support.gpu_ranks import are_shared, run_scenarios

OPS = torch.ops.counterpoint
Found = dict[str, str]
LARGE = ((8192, 7168, 8192), (8192, 1280, 8192), (4096, 3584, 4096))  # m, n, k
SMALL = ((2048, 1792, 1024), (2048, 1280, 1024), (2056, 1000, 512))
SHAPES = SMALL if are_shared() else (*LARGE, SMALL[-1])  # NCCL's reference goes through a socket there


def name_of_world() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def random_shapes() -> Found:
    """The programs of the CPU tests, on this GPU."""
    session: Any = SimpleNamespace(rank=dist.get_rank())
    return {name: str(getattr(programs, name)(session, 1, 40)) for name in ("gathered", "scattered", "all_reduced")}


def scaled() -> Found:
    session: Any = SimpleNamespace(rank=dist.get_rank())
    return {"scaled": str(programs.scaled(session, 4))}


def operands(m: int, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed * 100 + dist.get_rank())
    world = dist.get_world_size()
    dtype = torch.bfloat16
    return (
        torch.randn(m // world, k, dtype=dtype),
        torch.randn(m, k, dtype=dtype),
        torch.randn(n, k, dtype=dtype).t() / k**0.5,
    )


def calls_of(group: TensorGroup, shard: torch.Tensor, rows: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    name = name_of_world()
    assert tensor_group(name) is group
    gathered, (product,) = OPS.all_gather_matmul(shard, [b], 0, name)
    return [
        gathered,
        product,
        OPS.matmul_reduce_scatter(rows, b, "sum", 0, name),
        OPS.matmul_all_reduce(rows, b, "sum", name),
    ]


def real_shapes() -> Found:
    """Errors beside torch's way, each against float64; by pieces, in one piece, and as planned by measured curves."""
    found: Found = {}
    for index, (m, n, k) in enumerate(SHAPES):
        given = operands(m, n, k, index)
        stock = calls_of(tensor_group(name_of_world(), TensorOptions(mechanism="torch")), *given)
        whole = torch.cat([torch.empty(0, k, dtype=given[0].dtype), programs.rows_of_all(given[0], 0)]).double()
        total = given[1].double() @ given[2].double()
        dist.all_reduce(total)
        own = total.chunk(dist.get_world_size())[dist.get_rank()]
        exact = [whole, whole @ given[2].double(), own, total]
        for mechanism in ("cuts", "serial", "auto"):
            group = tensor_group(name_of_world(), TensorOptions(mechanism=mechanism))
            results = calls_of(group, *given)
            torch.cuda.synchronize()
            errors = [
                (ours.double() - right).abs().max().item() / max((theirs.double() - right).abs().max().item(), 1e-9)
                for ours, theirs, right in zip(results, stock, exact, strict=True)
            ]
            found[f"{m}x{n}x{k} {mechanism}"] = str(max(errors) <= 2.0)
            found[f"{m}x{n}x{k} {mechanism} paths"] = str(sorted({row.path for row in group.report().calls}))
    return found


def delayed() -> Found:
    """300 calls before which ranks linger for random times: wrong results."""
    draw = random.Random(dist.get_rank())
    group = tensor_group(name_of_world(), TensorOptions(mechanism="cuts", measure=False))
    wrong = 0
    given = operands(1024, 512, 512, 7)
    wanted = calls_of(group, *given)
    for _ in range(100):
        torch.cuda._sleep(draw.randrange(2_000_000))
        found = calls_of(group, *given)
        wrong += not all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    return {"wrong": str(wrong)}


def captured() -> Found:
    name = name_of_world()
    tensor_group(name, TensorOptions(mechanism="cuts", measure=False))
    shard, rows, b = (one.requires_grad_() for one in operands(2048, 1024, 1024, 9))
    b = b.detach().requires_grad_()

    def step() -> list[torch.Tensor]:
        _, (product,) = OPS.all_gather_matmul(shard, [b], 0, name, return_gathered=False)
        part = OPS.matmul_reduce_scatter(rows, b, "sum", 0, name)
        whole = OPS.matmul_all_reduce(rows, b, "sum", name)
        loss = product.float().square().mean() + part.float().square().mean() + whole.float().square().mean()
        return [product, part, whole, *torch.autograd.grad(loss, [shard, rows, b])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = step()
    equal = []
    for seed in range(3):
        with torch.no_grad():
            for old, new in zip((shard, rows, b), operands(2048, 1024, 1024, 20 + seed), strict=True):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [one.clone() for one in results]
        equal.append(all(torch.equal(*pair) for pair in zip(replayed, step(), strict=True)))
    torch.cuda.synchronize()
    del graph
    return {"equal": str(equal)}


def profiled() -> Found:
    """What ran on this GPU during the operations: kernels of NCCL, and copies to peers."""
    from torch.profiler import ProfilerActivity, profile

    group = tensor_group(name_of_world(), TensorOptions(mechanism="cuts", measure=False))
    given = operands(4096, 2048, 2048, 11)
    calls_of(group, *given)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        calls_of(group, *given)
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events()]
    return {
        "nccl": str(sum("nccl" in name.lower() for name in names)),
        "copies": str(sum("PtoP" in name for name in names) > 0),
    }


SCENARIOS: dict[str, Callable[[], Found]] = {
    "random": random_shapes,
    "real": real_shapes,
    "delayed": delayed,
    "captured": captured,
    "profiled": profiled,
    "scaled": scaled,
}


def main(folder: Path) -> None:
    run_scenarios(folder, SCENARIOS, by_default=True)
    tensor_group(name_of_world()).close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
