"""Claim: `counterpoint.watch(every=500)` costs at most 1 % of the mean step.

    torchrun --nproc-per-node 2 benchmarks/watch_cost.py --out results/watch-cost-2xh200.json
    torchrun --nproc-per-node 2 benchmarks/watch_cost.py --width 1024 --layers 12 --batch 32
    torchrun --nproc-per-node 4 benchmarks/watch_cost.py --device cpu --width 256 --layers 6 --batch 64

One model trains in one process group, in blocks of `--block` steps with and without a watch, in turn; each block with a
watch has one recording, after two thirds of it. `recording` is the time of a watched block less that of the unwatched
ones before and behind it (their mean), `cost` that time over the one of `--every` unwatched steps. `held` is how long
rank 0's training thread was in the watch's code. What a watch does once, at the end of its first step, is timed apart
(`first`), as are the steps before any profiler ran in these processes (`never`).
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from provenance import gpu_provenance, provenance, write_result
from step_rig import start
from tables import print_table
from torch.nn.parallel import DistributedDataParallel

import counterpoint

COLUMNS = ("block", "before, ms", "watched, ms", "behind, ms", "recording, ms", "held, ms", "cost, %")


class Training:
    """A model of equal transformer layers under DDP, and its steps."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        layer = torch.nn.TransformerEncoderLayer(
            options.width, options.width // 64, 4 * options.width, batch_first=True
        )
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        encoder = torch.nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        self.model = DistributedDataParallel(encoder.to(device, dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(options.batch, 64, options.width, device=device, dtype=dtype)
        self.device = device

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps: int) -> float:
        """The mean time of a step."""
        self._settle()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._settle()
        return (time.perf_counter() - begin) / steps

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def watched(training: Training, block: int) -> tuple[float, float, float]:
    """Seconds of a step in a block with a recording in its middle, all those in the watch, and of its first step."""
    with counterpoint.watch(every=2 * block // 3) as watch:
        first = training.seconds(1)
        advance, held = watch._advance, 0.0

        def timed() -> None:
            nonlocal held
            begin = time.perf_counter()
            advance()
            held += time.perf_counter() - begin

        watch._advance = timed  # type: ignore[method-assign]
        return training.seconds(block), held, first


def measured(training: Training, options: argparse.Namespace) -> dict[str, Any]:
    """All blocks, and what they say."""
    training.seconds(20)
    never = training.seconds(options.block)
    blocks, firsts = [], []
    before = never
    for _ in range(options.blocks):
        with_watch, held, first = watched(training, options.block)
        behind = training.seconds(options.block)
        firsts.append(first)
        blocks.append({"before_s": before, "watched_s": with_watch, "behind_s": behind, "held_s": held})
        before = behind
    for b in blocks:
        usual = mean((b["before_s"], b["behind_s"]))
        b["recording_s"] = (b["watched_s"] - usual) * options.block
        b["cost"] = b["recording_s"] / (options.every * usual)
    return {
        "every": options.every,
        "block": options.block,
        "never_s": never,
        "first_s": firsts,
        "blocks": blocks,
        "cost_median": median(b["cost"] for b in blocks),
        "cost_mean": mean(b["cost"] for b in blocks),
    }


def parsed() -> argparse.Namespace:
    """What the command line says."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--every", type=int, default=500, help="steps from one recording to the next")
    options.add_argument("--block", type=int, default=100, help="steps that are timed together")
    options.add_argument("--blocks", type=int, default=5, help="blocks with a watch")
    options.add_argument("--width", type=int, default=4096)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--batch", type=int, default=64, help="sequences of 64 tokens for each rank")
    options.add_argument("--out", type=Path, help="write the result here")
    return options.parse_args()


def main() -> None:
    options = parsed()
    on_gpu = options.device == "cuda"
    device = start(options.device)
    logging.basicConfig(format="%(message)s")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    result = measured(Training(options, device), options)
    dist.destroy_process_group()
    if rank > 0:
        return
    rows = [
        (
            str(i),
            *(f"{b[key] * 1e3:.2f}" for key in ("before_s", "watched_s", "behind_s")),
            *(f"{b[key] * 1e3:.0f}" for key in ("recording_s", "held_s")),
            f"{b['cost'] * 100:+.2f}",
        )
        for i, b in enumerate(result["blocks"])
    ]
    print_table(COLUMNS, rows)
    print(
        f"never profiled: {result['never_s'] * 1e3:.2f} ms; first step of a watch: {result['first_s'][0] * 1e3:.0f} ms"
    )
    print(f"cost at every={options.every}: median {result['cost_median']:.2%}, mean {result['cost_mean']:.2%}")
    if options.out is not None:
        packages = ("torch", "numpy", "msgspec")
        where = gpu_provenance(packages, world_size=world_size) if on_gpu else provenance(packages)
        write_result(options.out, {"provenance": where, **result}, COLUMNS, rows)


if __name__ == "__main__":
    main()
