"""One training step of DDP, forward and backward, by NCCL and by ours, above the bound of no communication.

    torchrun --nproc-per-node 2 benchmarks/ddp_step.py --out results/ddp-step-1b.json
    torchrun --nproc-per-node 2 benchmarks/ddp_step.py --model 3b --dtype bfloat16 --out results/ddp-step-3b.json
    torchrun --nproc-per-node 2 benchmarks/ddp_step.py --device cpu --model tiny --tokens 32 --rounds 2 --buckets 0.1

`bound`: a hook that reduces nothing; DDP's own copies stay. `won` is which part of (best NCCL - bound) a variant wins,
over all sizes of buckets. Variants are interleaved in rounds of `--steps` steps; median of a rank, maximum over ranks;
the first round is dropped. Host: what the launching thread needs for the first step of a round. Gradients are views of
buckets. With float32, parameters and gradients are float32 and matmuls run in bfloat16 (autocast).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_variants import SHAPES, batch
from step_rig import Step, formatted, in_turns, show, start, synchronize, write
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import counterpoint
import counterpoint.torch_backend as backend

from llama import Llama  # isort: skip - found by fsdp_variants

COLUMNS = ("tokens", "bucket MiB", "variant", "ms", "times", "won", "host ms", "loss", "norm")
STOCK, BOUND = "stock", "bound"
VARIANTS = (STOCK, "backend", "backend registered", "overlap")


def no_hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce nothing."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


no_hook.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}


class Bench:
    """This rank: the models, one for each variant, and how to time them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.rank, self.device = args, dist.get_rank(), device
        self.shape = SHAPES[args.model]
        if args.layers is not None:
            self.shape = replace(self.shape, layers=args.layers)
        self.dtype = getattr(torch, args.dtype)
        self.ours = dist.new_group(backend="counterpoint")
        self.handles: dict[str, Any] = {}

    def model(self, variant: str, bucket_mb: float) -> DistributedDataParallel:
        """The model of a variant, with equal weights in all of them."""
        torch.manual_seed(1)
        with self.device:
            plain = Llama(self.shape).to(self.dtype)
        plain.head.weight = plain.embedding.weight
        keywords: dict[str, Any] = {"bucket_cap_mb": bucket_mb, "gradient_as_bucket_view": True}
        if variant == "backend registered":
            with counterpoint.symmetric_memory(self.ours):
                return DistributedDataParallel(plain, process_group=self.ours, **keywords)
        if variant == "backend":
            return DistributedDataParallel(plain, process_group=self.ours, **keywords)
        ddp = DistributedDataParallel(plain, **keywords)
        if variant == "overlap":
            self.handles[f"{variant} {bucket_mb:g}"] = counterpoint.overlap(ddp)
        if variant == BOUND:
            ddp.register_comm_hook(None, no_hook)
        return ddp

    def variants(self) -> dict[tuple[float, str], DistributedDataParallel]:
        """All models, by bucket size and name."""
        chosen = [name for name in VARIANTS if self.device.type == "cuda" or name != "backend registered"]
        names = [(size, name) for size in self.args.buckets for name in chosen if name in self.args.variants]
        return {key: self.model(key[1], key[0]) for key in [*names, (max(self.args.buckets), BOUND)]}

    def step(self, model: torch.nn.Module, tokens: int) -> Step:
        """Forward and backward on one batch; gradients are set to zero in their buckets."""
        text = batch(self.shape, tokens, self.device, seed=self.rank)
        mixed = self.dtype is torch.float32 and self.device.type == "cuda"

        def step() -> torch.Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
                loss: torch.Tensor = model(*text)
            loss.backward()
            model.zero_grad(set_to_none=False)
            return loss

        return step

    def looked_at(self, model: torch.nn.Module, tokens: int) -> dict[str, float]:
        """Loss, and norm of the gradients, after the steps in which DDP makes its buckets anew."""
        step = self.step(model, tokens)
        for _ in range(3):
            step()
        text = batch(self.shape, tokens, self.device, seed=self.rank)
        mixed = self.dtype is torch.float32 and self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            loss = model(*text)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        model.zero_grad(set_to_none=False)
        return {"loss": loss.item(), "norm": norm.item()}

    def timed(self, models: dict[tuple[float, str], DistributedDataParallel], tokens: int) -> list[dict[str, Any]]:
        """A row for each variant."""
        steps = {key: self.step(model, tokens) for key, model in models.items()}
        looks = {key: self.looked_at(model, tokens) for key, model in models.items()}
        times = in_turns(steps, self.device, rounds=self.args.rounds, steps_each=self.args.steps)
        best = min(ms for (_, name), (ms, _) in times.items() if name == STOCK)
        room = best - next(ms for (_, name), (ms, _) in times.items() if name == BOUND)
        return [
            {"tokens": tokens, "bucket_mb": size, "variant": name, "ms": ms, "times": best / ms, "host_ms": host_ms}
            | {"won": (best - ms) / room if room > 0 else None}
            | looks[size, name]
            for (size, name), (ms, host_ms) in times.items()
        ]


def cells(row: dict[str, Any]) -> list[str]:
    """As printed, in the order of `COLUMNS`."""
    formats = {
        "tokens": "d", "bucket_mb": "g", "variant": "", "ms": ".1f", "times": ".3f", "won": ".0%", "host_ms": ".1f",
        "loss": ".6f", "norm": ".4f",
    }  # fmt: skip
    return formatted(row, formats)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--buckets", type=float, nargs="*", default=[25.0, 64.0, 128.0], help="bucket_cap_mb")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192], help="per GPU and step")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    return parser.parse_args()


def main() -> None:
    """Measure, print and keep."""
    args = parsed()
    device = start(args.device)
    bench = Bench(args, device)
    models = bench.variants()
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        new = bench.timed(models, tokens)
        rows += new
        if bench.rank == 0:
            show([list(COLUMNS), *map(cells, new)])
    said = [*str(backend.report(bench.ours)).splitlines()]
    said += [f"{name}: {handle}" for name, handle in bench.handles.items()]
    if bench.rank == 0:
        print("\n".join(said), flush=True)
        if args.out is not None:
            write(args.out, args, rows, [COLUMNS, *map(cells, rows)], said)
    synchronize(bench.device)
    for handle in bench.handles.values():
        handle.restore()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
