"""Faults to plant in one rank of a training job, so that a diagnosis has a known answer.

| kind | what happens on the faulty rank | unit of the amount |
|---|---|---|
| host_stall | the CPU spins in the middle of the forward pass, in an operation with a name or without one | ms |
| late_input | the data pipeline delivers late | ms |
| garbage_collection | Python collects garbage in the middle of the forward pass | thousands of live objects |
| allocator | `empty_cache()` before every layer: memory is freed and allocated again and again | 1 |
| uneven_batch | the rank has more tokens than the others | factor |
| hot_experts | tokens of all ranks prefer the rank's experts | added to the router's scores of them |
| slow_gpu | another process multiplies matrices on the rank's GPU | fraction of the time |

The first three happen in the chosen steps, the others last for the whole run. A garbage collection has no event of its
own in these traces: torch's profiler shows it only when it records Python stacks, so it looks like an unnamed stall.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

DEFAULT_AMOUNT = {
    "none": 0.0,
    "host_stall": 30.0,
    "late_input": 30.0,
    "garbage_collection": 80.0,
    "allocator": 1.0,
    "uneven_batch": 1.5,
    "hot_experts": 1.0,
    "slow_gpu": 0.8,
}
UNIT = {
    "host_stall": "ms",
    "late_input": "ms",
    "garbage_collection": "thousand objects",
    "uneven_batch": "times tokens",
    "hot_experts": "added to scores",
    "slow_gpu": "fraction of the time",
}
EXPECTED_CAUSE = {
    "slow_gpu": "slow_kernels",
    "uneven_batch": "more_work",
    "hot_experts": "more_work",
    "late_input": "late_input",
}
OF_EXPERTS = ("hot_experts",)
KINDS = tuple(kind for kind in DEFAULT_AMOUNT if kind not in ("none", *OF_EXPERTS))  # of any model
IN_CHOSEN_STEPS = ("host_stall", "late_input", "garbage_collection")


def add_arguments(parser: argparse.ArgumentParser, kinds: Iterable[str] = KINDS) -> None:
    """The options that choose a fault, one of `kinds`."""
    parser.add_argument("--fault", choices=("none", *kinds), default="none")
    parser.add_argument("--fault-rank", type=int, default=5)
    parser.add_argument("--fault-amount", type=float, help="how much, see the table in faults.py; default per kind")
    parser.add_argument("--fault-steps", default="1", help="recorded steps that have it, 0 is the first; or 'all'")
    parser.add_argument("--fault-unnamed", action="store_true", help="host_stall: under no named operation")


@dataclass(kw_only=True)
class Fault:
    """One planted fault as one rank sees it. `step` is moved on by the training loop."""

    kind: str
    rank: int
    amount: float
    steps: tuple[int, ...]
    named: bool
    here: bool
    step: int = 0
    garbage: list[Any] = field(default_factory=list)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, *, rank: int, world_size: int, warmup: int, steps: int) -> Fault:
        """The fault that the options ask for, as `rank` sees it; ends the program where the job has no such rank."""
        if not 0 <= args.fault_rank < world_size and args.fault != "none":
            raise SystemExit(f"--fault-rank {args.fault_rank}: this job has ranks 0 to {world_size - 1}")
        chosen = range(steps) if args.fault_steps == "all" else (int(part) for part in args.fault_steps.split(","))
        return cls(
            kind=args.fault,
            rank=args.fault_rank,
            amount=DEFAULT_AMOUNT[args.fault] if args.fault_amount is None else args.fault_amount,
            steps=tuple(warmup + index for index in chosen),
            named=not args.fault_unnamed,
            here=args.fault != "none" and rank == args.fault_rank,
        )

    def now(self, kind: str) -> bool:
        """Whether this rank has this fault in the present step."""
        return self.here and self.kind == kind and (kind not in IN_CHOSEN_STEPS or self.step in self.steps)

    def describe(self) -> dict[str, Any] | None:
        """For provenance.json."""
        if self.kind == "none":
            return None
        in_steps = [f"ProfilerStep#{step}" for step in self.steps] if self.kind in IN_CHOSEN_STEPS else "all"
        return {
            "kind": self.kind,
            "rank": self.rank,
            "amount": self.amount,
            "unit": UNIT.get(self.kind),
            "steps": in_steps,
            "named_operation": "tokenizer.encode" if self.kind == "host_stall" and self.named else None,
            "expected_cause": EXPECTED_CAUSE.get(self.kind, "host_stall"),
        }

    def tokens(self, tokens: int, *, multiple: int) -> int:
        """How many tokens this rank has, rounded to a multiple that keeps matrix shapes regular."""
        if not self.now("uneven_batch"):
            return tokens
        return round(tokens * self.amount / multiple) * multiple

    def in_input(self) -> None:
        """Called by the data pipeline for every batch."""
        if self.now("late_input"):
            time.sleep(self.amount / 1e3)

    def plant(self, layers: nn.ModuleList) -> None:
        """Hook the faults of the forward pass into the layers."""
        layers[len(layers) // 2].register_forward_pre_hook(lambda *_: self.in_forward())
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self.before_layer())
        if self.here and self.kind == "garbage_collection":
            self.garbage = [{"index": index} for index in range(int(self.amount * 1e3))]

    def plant_in_routers(self, routers: Iterable[nn.Module], ranks: int) -> None:
        """Hook a preference for the experts of the faulty one of `ranks` into routers; called on all ranks."""
        if self.kind != "hot_experts":
            return

        def prefer(module: nn.Module, inputs: Any, scores: Tensor) -> Tensor:
            local = scores.shape[-1] // ranks
            hot = torch.arange(scores.shape[-1], device=scores.device) // local == self.rank % ranks
            return scores + self.amount * hot

        for router in routers:
            router.register_forward_hook(prefer)

    def in_forward(self) -> None:
        """Called in the middle of the forward pass."""
        if self.now("host_stall"):
            with record_function("tokenizer.encode") if self.named else nullcontext():
                until = time.perf_counter() + self.amount / 1e3
                while time.perf_counter() < until:
                    pass
        if self.now("garbage_collection"):
            gc.collect()

    def before_layer(self) -> None:
        """Called before every layer."""
        if self.now("allocator"):
            torch.cuda.empty_cache()

    @contextmanager
    def neighbour(self, device: torch.device) -> Iterator[None]:
        """While it lasts, another process shares this rank's GPU, if that is the fault."""
        if not self.now("slow_gpu"):
            yield
            return
        script = Path(__file__).with_name("busy_neighbour.py")
        command = [sys.executable, str(script), "--gpu", str(device.index), "--busy", str(self.amount)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline().strip() != b"ready":
            raise RuntimeError(f"the other process on GPU {device.index} did not start: {command}")
        try:
            yield
        finally:
            process.stdin.close()  # it ends when its input does, also when this process dies
            process.wait(timeout=30)
