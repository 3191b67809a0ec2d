"""One training step of a pipeline (1F1B), its messages by NCCL and by mailboxes, which need no SM on the sender.

    torchrun --nproc-per-node 2 benchmarks/pipeline_step.py --out results/pipeline-step.json
    torchrun --nproc-per-node 2 benchmarks/pipeline_step.py --device cpu --activations 0.02 --hidden 32 --rounds 2

Each rank is a stage of `--layers` matmuls of `--hidden` squared in bfloat16, each followed by a GELU; a microbatch has
as many tokens as an activation of that size holds. Variants have equal weights and are interleaved in rounds of
`--steps` steps; median of a rank, maximum over ranks; the first round is dropped. `times` is NCCL's time over the
variant's. `alone`: a step of this rank's stage without messages or bubbles, all microbatches forward and backward.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_rig import Step, formatted, in_turns, show, start, synchronize, write
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import counterpoint.torch_backend as backend

COLUMNS = ("activation MiB", "variant", "ms", "times", "host ms", "loss")
STOCK, OURS, ALONE = "stock", "counterpoint", "alone"


class Bench:
    """This rank: a stage for each variant, and how to time them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.ours = dist.new_group(backend="counterpoint")
        self.groups: dict[str, Any] = {STOCK: dist.group.WORLD, OURS: self.ours}

    def stage(self) -> nn.Module:
        """This rank's layers, with equal weights in all variants."""
        torch.manual_seed(self.rank)
        layers: list[nn.Module] = []
        for _ in range(self.args.layers):
            layers += [nn.Linear(self.args.hidden, self.args.hidden, bias=False), nn.GELU()]
        return nn.Sequential(*layers).to(self.device, self.dtype)

    def tokens(self, mib: float) -> int:
        """Tokens of a microbatch whose activation has so many MiB."""
        num_bytes = round(mib * (1 << 20))
        return max(1, num_bytes // (int(self.args.hidden) * self.dtype.itemsize))

    def batch(self, tokens: int) -> torch.Tensor:
        """All microbatches, equal on all ranks."""
        numbers = torch.Generator().manual_seed(1)
        made = torch.randn(tokens * self.args.microbatches, self.args.hidden, generator=numbers)
        return made.to(self.device, self.dtype)

    def steps(self, mib: float) -> dict[str, Step]:
        """A training step of each variant; the last rank's returns the loss."""
        batch = self.batch(self.tokens(mib))
        found = {name: self.pipelined(group, batch) for name, group in self.groups.items()}
        alone, parts = self.stage(), batch.detach().chunk(self.args.microbatches)

        def step() -> None:
            for part in parts:
                alone(part).square().mean().backward()
            alone.zero_grad(set_to_none=False)

        return {**found, ALONE: step}

    def pipelined(self, group: Any, batch: torch.Tensor) -> Step:
        """A step of the schedule over this group."""
        model = self.stage()
        stage = PipelineStage(model, self.rank, self.size, self.device, group=group)
        schedule = Schedule1F1B(stage, self.args.microbatches, loss_fn=nn.functional.mse_loss)
        is_last = self.rank == self.size - 1

        def step() -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            if self.rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch if is_last else None, losses=losses)
            model.zero_grad(set_to_none=False)
            return torch.stack(losses).detach().mean() if losses else None

        return step

    def timed(self, mib: float) -> list[dict[str, Any]]:
        """A row for each variant."""
        steps = self.steps(mib)
        losses = {name: step() for name, step in steps.items()}
        times = in_turns(steps, self.device, rounds=self.args.rounds, steps_each=self.args.steps)
        ranks: list[Any] = [None] * self.size
        dist.all_gather_object(ranks, {name: _number(loss) for name, loss in losses.items()})
        return [
            {"activation_mib": mib, "variant": name, "ms": ms, "host_ms": host_ms}
            | {"times": times[STOCK][0] / ms if name != ALONE else None, "loss": ranks[-1][name]}
            for name, (ms, host_ms) in times.items()
        ]


def _number(loss: Any) -> float | None:
    return None if loss is None else float(loss)


def cells(row: dict[str, Any]) -> list[str]:
    """As printed, in the order of `COLUMNS`."""
    formats = {"activation_mib": "g", "variant": "", "ms": ".2f", "times": ".3f", "host_ms": ".1f", "loss": ".6f"}
    return formatted(row, formats)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", type=float, nargs="*", default=[4.0, 16.0, 64.0, 128.0], help="MiB")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4, help="of a stage")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    return parser.parse_args()


def main() -> None:
    """Measure, print and keep."""
    args = parsed()
    device = start(args.device)
    bench = Bench(args, device)
    rows: list[dict[str, Any]] = []
    for mib in args.activations:
        new = bench.timed(mib)
        rows += new
        if bench.rank == 0:
            show([list(COLUMNS), *map(cells, new)])
    said = str(backend.report(bench.ours)).splitlines()
    if bench.rank == 0:
        print("\n".join(said), flush=True)
        if args.out is not None:
            write(args.out, args, rows, [COLUMNS, *map(cells, rows)], said)
    synchronize(bench.device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
