"""Claim: `overlap` costs the host at most 0.3 ms of Python per FSDP2 module and step.

    torchrun --nproc-per-node 2 benchmarks/fsdp_host.py --out results/fsdp-host-2xh200.json
    torchrun --nproc-per-node 2 benchmarks/fsdp_host.py --device cpu --model tiny --tokens 32

Two figures for stock FSDP2 and for `overlap`, on one model in one process, in alternating rounds:

- `step ms`: the time that the launching thread needs for one step, with nothing queued before it, without a profiler.
- our Python: time inside the functions of this package and of what they call in C, by cProfile, less what torch and the
  CUDA driver need (torch: operations that we ask for, such as the copy of the shards; driver: the functions that do
  nothing but call it). From Python 3.12 on, cProfile sees all threads; before, autograd's thread of a GPU is missing.
  The profiler makes every call slower, so the figure is an upper bound.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from fsdp_variants import SHAPES, Sharded, Variant, batch
from provenance import gpu_provenance, provenance, write_result
from step_rig import NO_MULTICAST
from tables import print_table

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.parallel.options import OverlapOptions

COLUMNS = ("variant", "step ms", "our Python, ms", "torch, ms", "driver, ms", "our Python, ms / module")
PACKAGE = f"{os.sep}counterpoint{os.sep}"
DRIVER = ("collectives/cuda/driver.py",)  # does little but call the driver
Step = Callable[[], object]


def kind(label: str) -> str:
    """Return whose time a function's own is: the CUDA driver's, torch's, or that of our Python."""
    if label.startswith("<"):
        return "torch" if "torch" in label else "ours"
    return "driver" if label.startswith(DRIVER) else "ours"


def profiled(step: Step, steps: int) -> tuple[dict[str, float], list[tuple[str, int, float]]]:
    """Milliseconds a step in this package and in C that it calls, by kind; and the functions that take most."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    by_function: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for (file, line, name), (_, calls, own_s, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if PACKAGE in file:
            label = f"{file.rpartition(PACKAGE)[2]}:{line} {name}"
        elif file == "~":
            mine = [entry for caller, entry in callers.items() if PACKAGE in caller[0]]
            calls, own_s = sum(entry[1] for entry in mine), sum(entry[2] for entry in mine)
            label = name
        else:
            continue
        by_function[label][0] += calls
        by_function[label][1] += own_s
    found = {"ours": 0.0, "torch": 0.0, "driver": 0.0}
    for label, (_, own_s) in by_function.items():
        found[kind(label)] += 1e3 * own_s / steps
    most = sorted(by_function.items(), key=lambda item: -item[1][1])
    return found, [(label, int(calls / steps), 1e3 * own_s / steps) for label, (calls, own_s) in most if own_s]


class Bench:
    """One rank's model, switched between stock FSDP2 and `overlap`."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        shape = replace(SHAPES[args.model], layers=args.layers, vocabulary=1024)
        torch.manual_seed(dist.get_rank())
        self.sharded = Sharded(shape, device, reduce_dtype=torch.bfloat16, compiled=False, head_apart=False)
        self.text = batch(shape, args.tokens, device, seed=dist.get_rank())
        self.stock = next(iter(self.sharded.stock_variants()))
        self.handle, ours = self.sharded.overlapped(OverlapOptions(communicator=CommunicatorOptions(timeout_s=120.0)))
        self.variants: list[Variant] = [self.stock, ours[0]]

    def step(self) -> None:
        """Run forward and backward once; gradients are dropped."""
        self.sharded.model(*self.text).backward()
        self.sharded.model.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        """Bring all ranks, GPUs included, to one moment."""
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def host_ms(self) -> float:
        """Return what the launching thread needs for one step, with nothing queued before it."""
        self.synchronize()
        started = time.perf_counter()
        self.step()
        return (time.perf_counter() - started) * 1e3

    def rows(self) -> list[dict[str, Any]]:
        """Measure both variants: the host's time in rounds, then the profile."""
        times: dict[str, list[float]] = defaultdict(list)
        for index in range(self.args.rounds + 1):
            for variant in self.variants:
                self.sharded.use(variant)
                for _ in range(3):
                    self.step()
                if index:
                    times[variant.name] += [self.host_ms() for _ in range(3)]
        rows = []
        for variant in self.variants:
            self.sharded.use(variant)
            for _ in range(3):
                self.step()
            self.synchronize()
            spent, functions = profiled(self.step, self.args.steps)
            rows.append(
                {
                    "variant": variant.name,
                    "step_ms": median(times[variant.name]),
                    **{f"{name}_ms": ms for name, ms in spent.items()},
                    "ours_ms_per_module": spent["ours"] / len(self.sharded.modules),
                    "functions": functions[:40],
                }
            )
        return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048, help="per GPU and step")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="that are profiled")
    parser.add_argument("--functions", type=int, default=0, help="print as many of our functions, the slowest first")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    os.environ.update(NO_MULTICAST)
    on_gpus = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    bench = Bench(args, device)
    rows = bench.rows()
    if dist.get_rank() == 0:
        numbers = [
            [row[name] for name in ("step_ms", "ours_ms", "torch_ms", "driver_ms", "ours_ms_per_module")]
            for row in rows
        ]
        cells = [
            [row["variant"], *(f"{number:.3f}" for number in line)] for row, line in zip(rows, numbers, strict=True)
        ]
        print_table(COLUMNS, cells)
        for label, calls, own_ms in rows[1]["functions"][: args.functions]:
            print(f"{own_ms:8.3f} ms  {calls:5d} calls  {label}")
        if args.out is not None:
            packages = ["torch", "triton", "cuda-bindings"]
            facts = gpu_provenance(packages, world_size=dist.get_world_size()) if on_gpus else provenance(packages)
            options = {name: value for name, value in vars(args).items() if name != "out"}
            write_result(args.out, {"provenance": facts, "options": options, "rows": rows}, COLUMNS, cells)
    bench.sharded.use(bench.stock)
    bench.synchronize()
    bench.handle.restore()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
