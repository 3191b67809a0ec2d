"""Train a small Llama with FSDP2 on Python's own source code, with or without zero-SM collectives.

An ordinary training script: sharded layers, AdamW, a DataLoader, the loss read once in ten steps. One line of it is
counterpoint's, `counterpoint.overlap(model)`, and `--overlap` switches that line on. docs/tutorial.md goes through it.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --device cpu
    torchrun --nproc-per-node 2 examples/train_fsdp.py --device cpu --overlap --trace traces/overlap
    torchrun --nproc-per-node 8 examples/train_fsdp.py --overlap
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from llama import Llama, Shape, rotary_table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, IterableDataset

import counterpoint

SHAPES = {
    "tiny": Shape(layers=4, hidden=128, ffn=384, heads=4, kv_heads=2, vocabulary=256),
    "8b": Shape(layers=8, vocabulary=256),  # 8 of the 32 layers of Llama-3-8B
}
RECORDED_STEPS = 3


class SourceCode(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields random pieces of Python's standard library as bytes, and the same pieces one byte later as labels."""

    def __init__(self, tokens: int, rank: int, delay_ms: float) -> None:
        self.tokens, self.rank, self.delay_ms = tokens, rank, delay_ms
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw other pieces on each rank."""
        draw = torch.Generator().manual_seed(self.rank)
        while True:
            time.sleep(self.delay_ms / 1e3)
            start = int(torch.randint(len(self.text) - self.tokens - 1, (1,), generator=draw))
            piece = self.text[start : start + self.tokens + 1].long()[None]
            yield piece[:, :-1], piece[:, 1:]


def sharded_model(shape: Shape, device: torch.device) -> Llama:
    """Build the model on the meta device, shard it, then draw the weights shard by shard."""
    with torch.device("meta"):
        model = Llama(shape)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device.type == "cuda" else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return drawn(model, device)


def drawn(model: Llama, device: torch.device) -> Llama:
    """Draw the weights of a model on the meta device, each rank its own shards."""
    model.to_empty(device=device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            shard = parameter.to_local()
            shard.fill_(1.0) if parameter.dim() == 1 else shard.normal_(std=0.02)
    return model


def train(
    args: argparse.Namespace,
    device: torch.device,
    build: Callable[[Shape, torch.device], Llama] = sharded_model,
    *,
    readers: int | None = None,
) -> None:
    """Train, print loss and speed every ten steps, and record the last steps if asked to.

    Ranks are so many `readers`, each of which reads another text; by default each rank does.
    """
    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), args.sizes
    readers = readers or ranks
    model = build(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    table = rotary_table(args.tokens, shape.head_dim, device)
    data = SourceCode(args.tokens, rank * readers // ranks, args.slow_input_ms if rank == ranks - 1 else 0.0)
    batches = iter(DataLoader(data, batch_size=None, num_workers=args.workers))

    overlapped = counterpoint.overlap(model) if args.overlap else None  # the one line

    with recorder(args.trace, args.steps, device) as profiler:
        started, steps_before = time.perf_counter(), 0
        for step in range(1, args.steps + 1):
            text, labels = (part.to(device) for part in next(batches))
            loss = model(text, labels, table)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == args.steps:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                elapsed, value = time.perf_counter() - started, mean.item() / ranks  # .item() waits for the GPU
                if rank == 0:
                    rate = args.tokens * readers * (step - steps_before) / elapsed
                    print(f"step {step:4d}  loss {value:.3f}  {rate:,.0f} tokens/s", flush=True)
                started, steps_before = time.perf_counter(), step
            profiler.step()
    if overlapped is not None and rank == 0:
        print(overlapped, flush=True)


def recorder(folder: Path | None, steps: int, device: torch.device) -> profile:
    """Make a profiler that writes the last steps to `folder`, one trace for each rank; without a folder it is idle."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    if folder is None:
        return profile(activities=activities, schedule=schedule(wait=steps + 1, warmup=1, active=1))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank{dist.get_rank()}.json.gz"
    return profile(
        activities=activities,
        schedule=schedule(wait=steps - RECORDED_STEPS - 1, warmup=1, active=RECORDED_STEPS, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(file)),
        record_shapes=True,
    )


def arguments(
    description: str | None = __doc__,
    shapes: Mapping[str, Shape] = SHAPES,
    *,
    on_gpu: str = "8b",
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """Read the command line; sizes that are not given follow from the device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--overlap", action="store_true", help="use counterpoint's collectives")
    parser.add_argument("--trace", type=Path, help="folder for traces of the last 3 steps, one for each rank")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shape", choices=tuple(shapes), help=f"by default {on_gpu} on GPUs and tiny on CPUs")
    parser.add_argument("--tokens", type=int, help="per rank and step: by default 2048 on GPUs and 256 on CPUs")
    parser.add_argument("--lr", type=float, help="by default 3e-4 on GPUs and 3e-3 on CPUs")
    parser.add_argument("--slow-input-ms", type=float, default=0.0, help="a fault to find: the last rank's batches")
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare batches ahead")
    if extend is not None:
        extend(parser)
    args = parser.parse_args()
    is_gpu = args.device == "cuda"
    args.sizes = shapes[args.shape or (on_gpu if is_gpu else "tiny")]
    args.tokens = args.tokens or (2048 if is_gpu else 256)
    args.lr = args.lr or (3e-4 if is_gpu else 3e-3)
    if args.trace and args.steps <= RECORDED_STEPS:
        parser.error(f"--steps {args.steps}: --trace needs {RECORDED_STEPS + 1} or more")
    if "RANK" not in os.environ:
        parser.error("start this with torchrun --nproc-per-node N")
    return args


def main(args: argparse.Namespace, training: Callable[[argparse.Namespace, torch.device], None]) -> None:
    """Join the other ranks, train, leave."""
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        training(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(arguments(), train)
