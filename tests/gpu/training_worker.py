"""Train by stock and by counterpoint in one launch: the examples, pipelines, scripts of transformers and accelerate.

    counterpoint rehearse "torchrun --nproc-per-node 4 tests/gpu/training_worker.py --device cpu"

Rank 0 prints a JSON object for each program: the losses of both, and how many calls counterpoint took.
"""

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous

import counterpoint
import counterpoint.torch_backend as backend

sys.path += [str(Path(__file__).parents[2] / "examples"), str(Path(__file__).parents[2])]
import train_ddp
import train_fsdp
import train_moe
import train_tp

from tests.support.torch_training import drawn, pipelined

STOCK = {"cuda": "nccl", "cpu": "gloo"}
EVERYTHING = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"), 0)
Losses = tuple[list[float], int]
EXAMPLES: dict[str, tuple[Callable[[], argparse.Namespace], Callable[..., None]]] = {
    "fsdp": (train_fsdp.arguments, train_fsdp.train),
    "ddp": (partial(train_fsdp.arguments, train_ddp.__doc__, train_ddp.OURS, on_gpu="1b"), train_ddp.training),
    "tp": (train_tp.arguments_of_tp, train_tp.training),
    "moe": (train_moe.arguments_of_moe, train_moe.training),
}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")


def example(name: str, device: torch.device, *, ours: bool) -> Losses:
    """The losses that an example prints, and how many lines of its report tell of what was taken."""
    arguments, training = EXAMPLES[name]
    words = [f"train_{name}.py", "--device", device.type, "--shape", "tiny", "--tokens", "256", "--lr", "3e-3"]
    words += ["--steps", "20", *(["--overlap"] if ours else [])]
    full = patch.object(train_moe, "MixedPrecisionPolicy", lambda **_: MixedPrecisionPolicy())  # else roundings route
    with patch.object(sys, "argv", words), full, redirect_stdout(io.StringIO()) as printed:
        training(arguments(), device)
    lines = printed.getvalue().splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step ")]
    return losses, sum(not line.startswith("step ") for line in lines)


def taken(group: Any) -> int:
    """Calls that a group of backend `counterpoint` took."""
    return backend.report(group).taken


def hybrid(device: torch.device, *, ours: bool) -> Losses:
    """FSDP2 over two replicas, each of them sharded, in groups of the backend: two hosts in a rehearsal of two."""
    options = backend.BackendOptions(crossover_bytes=EVERYTHING)
    names = ("copies", "shards") if ours else ("replicate", "shard")  # DTensor takes equal meshes for one
    override: Any = dict.fromkeys(names, ("counterpoint", options)) if ours else {}
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=override)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = steps(model, drawn(dist.get_rank(), 64, 256, device=device))
    return losses, sum(taken(mesh.get_group(axis)) for axis in names) if ours else 0


def steps(model: nn.Module, batch: Tensor) -> list[float]:
    """The losses of five steps that learn nothing but zeros."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pipeline(schedule: str, device: torch.device, *, ours: bool) -> Losses:
    """The losses of two steps of a pipeline of torch, and the sum of this rank's gradients."""
    options = backend.BackendOptions(crossover_bytes=EVERYTHING)
    group: Any = dist.new_group(backend="counterpoint", pg_options=options) if ours else dist.group.WORLD
    size = dist.get_world_size()
    found: list[Any] = [None] * size
    here = pipelined(group, schedule, width=512, rows=16 * size, microbatches=2 * size, device=device)
    dist.all_gather_object(found, here)
    return [value for values in found for value in values], taken(group) if ours else 0


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def texts(count: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(128, (count, 32), generator=draw)
    return [{"input_ids": row, "labels": row} for row in rows]


@contextmanager
def accelerated(device: torch.device, *, ours: bool) -> Iterator[str]:
    """The name of the backend that accelerate and transformers are to begin; on CPUs they take none but gloo and MPI.

    What they remember of it, and the group, are gone afterwards.
    """
    from accelerate.state import AcceleratorState

    name = "counterpoint" if ours else STOCK[device.type]
    if device.type == "cpu":
        dist.init_process_group(name)
    try:
        yield name
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        dist.destroy_process_group()


def trainer(device: torch.device, *, ours: bool) -> Losses:
    from transformers import Trainer, TrainingArguments

    with accelerated(device, ours=ours) as name, tempfile.TemporaryDirectory() as folder:
        on_gpu = {"ddp_backend": name} if device.type == "cuda" else {"use_cpu": True}
        arguments = TrainingArguments(
            folder, max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, seed=0, **on_gpu,
        )  # fmt: skip
        training = Trainer(llama(), arguments, train_dataset=texts(64))
        with redirect_stdout(io.StringIO()):
            training.train()
        losses = [float(row["loss"]) for row in training.state.log_history if "loss" in row]
        return losses, sum(row.calls for row in backend.report(None).calls) if ours else 0


def accelerate_fsdp(device: torch.device, *, ours: bool) -> Losses:
    """FSDP2 by accelerate, with `counterpoint.overlap` of the model that it prepares."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    with accelerated(device, ours=False):
        accelerator = Accelerator(fsdp_plugin=plugin, cpu=device.type == "cpu")
        model = llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        handle = counterpoint.overlap(model) if ours else None
        losses = []
        for row in texts(4 * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]:
            batch = {name: value[None].to(device) for name, value in row.items()}
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, len(str(handle.report()).splitlines()) if handle is not None else 0


OF_LIBRARIES: dict[str, Callable[..., Losses]] = {"trainer": trainer, "accelerate": accelerate_fsdp}
PROGRAMS: dict[str, Callable[..., Losses]] = {
    **{name: partial(example, name) for name in EXAMPLES},
    "hsdp": hybrid,
    **{f"pipeline {name}": partial(pipeline, name) for name in SCHEDULES},
    **OF_LIBRARIES,
}


@contextmanager
def own_store(name: str) -> Iterator[None]:
    """Let a default group that begins inside have a part of torchrun's store: torch takes old entries for new."""
    begin = dist.init_process_group

    def beginning(*args: Any, **options: Any) -> None:
        store, rank, size = next(rendezvous("env://"))
        options |= {"store": PrefixStore(name, store), "rank": rank, "world_size": size}
        begin(*args, **options)

    with patch.object(dist, "init_process_group", beginning):
        yield


def main() -> None:
    """Run the programs of the command line, by default all; those of libraries begin groups of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=tuple(PROGRAMS))
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    for name in [name for name in args.programs if name in OF_LIBRARIES]:
        with own_store(f"{name} stock"):
            stock, _ = PROGRAMS[name](device, ours=False)
        with own_store(f"{name} ours"):
            ours, calls = PROGRAMS[name](device, ours=True)
        show(name, stock, ours, calls)
    others = [name for name in args.programs if name not in OF_LIBRARIES]
    if others:
        place: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(STOCK[device.type], **place)
        for name in others:
            stock, _ = PROGRAMS[name](device, ours=False)
            ours, calls = PROGRAMS[name](device, ours=True)
            show(name, stock, ours, calls)
        dist.destroy_process_group()


def show(name: str, stock: list[float], ours: list[float], calls: int) -> None:
    if os.environ["RANK"] == "0":
        print(json.dumps({"program": name, "stock": stock, "ours": ours, "calls": calls}), flush=True)


if __name__ == "__main__":
    main()
