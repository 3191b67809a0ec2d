"""Train for test_rehearse.py by FSDP2, or HSDP on two hosts, and DDP, each by torch and by counterpoint."""

import copy
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import counterpoint
from counterpoint.torch_backend import BackendOptions


def losses(model: nn.Module, steps: int = 3) -> list[float]:
    """Trains on inputs that differ between ranks; the mean losses of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        loss = model(torch.randn(8, 32, generator=random)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        found.append(mean.item())
    return found


def main() -> None:
    dist.init_process_group("gloo")
    ranks, here = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    mesh = init_device_mesh("cpu", (ranks // here, here), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if ranks > here else mesh["shard"]
    sharded: list[Any] = [fully_shard(copy.deepcopy(model), mesh=mesh) for _ in range(2)]
    found = {"fsdp": losses(sharded[0])}
    with counterpoint.overlap(sharded[1]):
        found["fsdp by counterpoint"] = losses(sharded[1])
    found["ddp"] = losses(DistributedDataParallel(copy.deepcopy(model)))
    options = BackendOptions(crossover_bytes={"all_reduce": 0})
    ours = dist.new_group(backend="counterpoint", pg_options=options)
    found["ddp by counterpoint"] = losses(DistributedDataParallel(model, process_group=ours))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
