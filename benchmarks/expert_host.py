"""What the host needs to issue a layer of experts, in µs and in those of plain torch.

    torchrun --nproc-per-node 2 benchmarks/expert_host.py --out results/expert-host.json
    torchrun --nproc-per-node 2 benchmarks/expert_host.py --device cpu --tokens 16 --hidden 32 --rounds 1 --calls 2

Layers of few and narrow tokens are issued behind one another; what one takes is the median over rounds of `--calls`,
each begun when all GPUs are idle, on the slowest rank. `all_to_all_single`: plain torch as everybody has it, whose host
also waits for counts; `experts`: the experts alone, whose rows are there, in each of the others, too. All else goes by
`expert_parallel.overlapped_moe`. On CPUs the work itself is part of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_rig import finish, formatted, start
from tensor_host import host_us
from torch import Tensor

from counterpoint import expert_parallel

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from moe import exchanged

MECHANISMS = ("torch", "gather", "slabs")
COLUMNS = ("what", "variant", "µs", "× plain")
FORMATS = {"what": "", "variant": "", "us": ".0f", "times": ".2f"}
ALONE, PLAIN = "experts", "all_to_all_single"
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Bench:
    """This rank: its experts and tokens, and the layers that they are given to."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(dist.get_rank())
        with device:
            self.experts = expert_parallel.LocalExperts(
                args.experts // dist.get_world_size(), args.hidden, args.hidden, dtype=dtype
            )
            self.x = torch.randn(args.tokens, args.hidden).to(dtype).requires_grad_()
            self.weights = torch.rand(args.tokens, args.top_k).requires_grad_()
            self.ids = torch.rand(args.tokens, args.experts).topk(args.top_k).indices
        self.dispatchers: list[expert_parallel.Dispatcher] = []

    def layers(self) -> dict[str, Layer]:
        """Each variant, by its name."""
        assert dist.group.WORLD is not None
        rows = self.x.detach().repeat(self.args.top_k, 1)
        ends = torch.linspace(0, len(rows), len(self.experts.down) + 1, device=rows.device)[1:].int()
        found: dict[str, Layer] = {
            PLAIN: partial(exchanged, experts=self.experts, shared=None, group=dist.group.WORLD),
            ALONE: lambda x, ids, weights: self.experts(rows, ends),
        }
        for mechanism in self.args.mechanisms:
            for parts in (1, 2):
                name = f"{mechanism}, 2 parts" if parts == 2 else mechanism
                found[name] = partial(
                    expert_parallel.overlapped_moe,
                    experts=self.experts, dispatcher=self.dispatcher(mechanism, parts), parts=parts,
                )  # fmt: skip
        return found

    def dispatcher(self, mechanism: str, parts: int) -> expert_parallel.Dispatcher:
        """One of all ranks."""
        options = expert_parallel.ExpertOptions(
            mechanism=mechanism, equal_tokens=self.args.tokens % parts == 0  # type: ignore[arg-type]
        )  # fmt: skip
        made = expert_parallel.Dispatcher(
            experts=self.args.experts, top_k=self.args.top_k, max_tokens=-(-self.args.tokens // parts),
            hidden=self.args.hidden, options=options,
        )  # fmt: skip
        self.dispatchers.append(made)
        return made

    def forward(self, layer: Layer) -> None:
        """As in inference."""
        with torch.no_grad():
            layer(self.x, self.ids, self.weights)

    def step(self, layer: Layer) -> None:
        """Forward and backward; gradients are dropped."""
        layer(self.x, self.ids, self.weights).sum().backward()
        for one in (self.x, self.weights, *self.experts.parameters()):
            one.grad = None


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="of a rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=MECHANISMS)
    parser.add_argument("--calls", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    args = parser.parse_args()
    device = start(args.device)
    bench = Bench(args, device)
    layers, rows = bench.layers(), list[dict[str, Any]]()
    for what, run in (("forward", bench.forward), ("forward and backward", bench.step)):
        found = {name: host_us(partial(run, layer), args, device) for name, layer in layers.items()}
        rows += [{"what": what, "variant": name, "us": us, "times": us / found[PLAIN]} for name, us in found.items()]
    for dispatcher in bench.dispatchers:
        dispatcher.close()
    finish(args, device, rows, [list(COLUMNS), *(formatted(row, FORMATS) for row in rows)])


if __name__ == "__main__":
    main()
