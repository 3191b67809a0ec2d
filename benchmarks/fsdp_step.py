"""One training step of FSDP2, forward and backward, by torch's collectives and by ours, between bound and floor.

    torchrun --nproc-per-node 8 benchmarks/fsdp_step.py --out results/fsdp-step.json
    torchrun --nproc-per-node 8 benchmarks/fsdp_step.py --model 70b --layers 4 --out results/fsdp-step-70b.json
    torchrun --nproc-per-node 8 benchmarks/fsdp_step.py --vocabulary 1024 --out results/fsdp-step-layers.json
    torchrun --nproc-per-node 8 benchmarks/fsdp_step.py --replicas 2 --out results/fsdp-step-hsdp.json
    torchrun --nproc-per-node 2 benchmarks/fsdp_step.py --device cpu --model tiny --tokens 32 --rounds 2

`bound`: all collectives do nothing, FSDP2's copies stay; `floor`: not sharded at all. `won` is which part of
(best stock - bound) a variant wins. With `--replicas` it is HSDP, whose all-reduce between replicas stays with torch
but in `overlap, backend`, where that axis of the mesh is of backend `counterpoint`. Variants are interleaved in rounds
of `--steps` steps; median of a rank, maximum over ranks; the first round is dropped. Host: what the launching thread
needs for the first step of a round, with nothing queued before. Memory, losses and norms come from a pass before, in
which nothing else is on the GPU; it ends where losses or norms differ.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from fsdp_variants import SHAPES, Sharded, Variant, batch, unsharded
from step_rig import Step, block, formatted, show, start, synchronize, write

import counterpoint
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.parallel.fsdp.hooks import STAGING_BYTES
from counterpoint.parallel.options import OverlapOptions

MOST_DIFFERENCE = {"loss": 1e-3, "norm": 1e-2}  # of stock's; what one of eight ranks leaves out is more
COLUMNS = ("tokens", "variant", "ms", "times", "won", "host ms", "peak GB", "of stock", "loss", "norm")


class Bench:
    """This rank: the model, its variants, and how to time them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.rank, self.device = args, dist.get_rank(), device
        self.shape = replace(SHAPES[args.model], layers=args.layers)
        if args.vocabulary is not None:
            self.shape = replace(self.shape, vocabulary=args.vocabulary)
        reduce_dtype = getattr(torch, args.reduce_dtype)
        torch.manual_seed(self.rank)
        self.sharded = Sharded(
            self.shape,
            self.device,
            reduce_dtype=reduce_dtype,
            compiled=args.compile,
            head_apart=args.head_apart,
            replicas=args.replicas,
        )
        self.variants = list(self.sharded.stock_variants())
        self.handle: Any = None
        self.floor: Any = None

    def step(self, model: Any, tokens: int) -> Step:
        """Forward and backward on one batch; gradients are dropped."""
        text = batch(self.shape, tokens, self.device, seed=self.rank)

        def step() -> None:
            model(*text).backward()
            model.zero_grad(set_to_none=True)

        return step

    def looked_at(self, variant: Variant, tokens: int) -> dict[str, float]:
        """Loss, norm of the gradients and peak memory of torch's allocator, after two steps; GB."""
        self.sharded.use(variant)
        step, model = self.step(self.sharded.model, tokens), self.sharded.model
        for _ in range(2):
            step()
        self.reset_peak()
        loss = model(*batch(self.shape, tokens, self.device, seed=self.rank))
        loss.backward()
        peak = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else 0.0
        norm: Any = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
        seen = {"loss": loss.item(), "norm": norm.full_tensor().item(), "peak_gb": peak}
        model.zero_grad(set_to_none=True)
        return seen

    def reset_peak(self) -> None:
        synchronize(self.device)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def outside_gb(self) -> float:
        """Device memory in use that torch's allocator does not know: symmetric memory is there."""
        if self.device.type != "cuda":
            return 0.0
        synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return (total - free - torch.cuda.memory_reserved(self.device)) / 1e9

    def look(self) -> dict[int, dict[str, dict[str, float]]]:
        """Of stock alone on the GPU, at every number of tokens, then of ours, whose symmetric memory counts: of each
        variant before the next one, which may need more of it."""
        seen: dict[int, dict[str, dict[str, float]]] = {tokens: {} for tokens in self.args.tokens}
        for variant in self.variants:
            for tokens in self.args.tokens:
                seen[tokens][variant.name] = self.looked_at(variant, tokens)
        self.before_gb = self.outside_gb()
        of_communicator = CommunicatorOptions(timeout_s=120.0, staging_bytes=self.args.staging_bytes or STAGING_BYTES)
        options = OverlapOptions(direct=not self.args.copied, communicator=of_communicator)
        self.handle, ours = self.sharded.overlapped(options)
        self.variants += ours
        for variant in ours:
            for tokens in self.args.tokens:
                seen[tokens][variant.name] = self.looked_at(variant, tokens)
                seen[tokens][variant.name]["peak_gb"] += self.outside_gb() - self.before_gb
        for looks in seen.values():
            check_alike(looks)
        return seen

    def timed(self, tokens: int) -> dict[str, tuple[float, float]]:
        """ms and host ms of every variant."""
        if self.floor is None:
            self.variants.append(self.sharded.bound())
            self.floor = unsharded(self.shape, self.device, compiled=self.args.compile)
        step, floor = self.step(self.sharded.model, tokens), self.step(self.floor, tokens)
        found: dict[str, list[tuple[float, float]]] = {}
        for index in range(self.args.rounds + 1):
            for variant in self.variants:
                self.sharded.use(variant)
                found.setdefault(variant.name, []).append(block(step, self.device, self.args.steps))
            found.setdefault("floor", []).append(block(floor, self.device, self.args.steps))
            if index == 0:
                found.clear()
        mine = {name: tuple(median(column) for column in zip(*times, strict=True)) for name, times in found.items()}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        return {name: (max(r[name][0] for r in ranks), max(r[name][1] for r in ranks)) for name in mine}

    def report(self) -> list[str]:
        """What overlap has moved, and which way the calls between replicas went on the backend."""
        group = self.sharded.backend_group
        return [
            *str(self.handle).splitlines(),
            *([] if group is None else str(counterpoint.report(group)).splitlines()),
        ]


def check_alike(looks: dict[str, dict[str, float]]) -> None:
    """Raise RuntimeError where a variant's loss or norm of gradients is not that of stock, up to rounding."""
    for name, seen in looks.items():
        for what, most in MOST_DIFFERENCE.items():
            ours, stock = seen[what], looks["stock"][what]
            if not abs(ours - stock) <= most * abs(stock):
                raise RuntimeError(f"{name}: the {what} is {ours}, that of stock {stock}; rounding is {most:g} of it")


def summary(
    tokens: int, times: dict[str, tuple[float, float]], looks: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """A row for each variant: how it stands between the best stock and the bound, and its memory beside plain stock."""
    best = min(ms for name, (ms, _) in times.items() if name.startswith("stock"))
    room = best - times["bound"][0]
    rows = []
    for name, (ms, host_ms) in times.items():
        row = {"tokens": tokens, "variant": name, "ms": ms, "times": best / ms, "host_ms": host_ms}
        row["won"] = (best - ms) / room if room > 0 else None
        if name in looks:
            stock_gb = looks["stock"]["peak_gb"]
            row |= looks[name] | {"of_stock": looks[name]["peak_gb"] / stock_gb if stock_gb else None}
        rows.append(row)
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """As printed, in the order of `COLUMNS`."""
    formats = {
        "tokens": "d", "variant": "", "ms": ".1f", "times": ".3f", "won": ".0%", "host_ms": ".1f", "peak_gb": ".2f",
        "of_stock": ".3f", "loss": ".6f", "norm": ".4f",
    }  # fmt: skip
    return formatted(row, formats)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, help="1024: no embedding and head to speak of, layers alone")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 8192], help="per GPU and step")
    parser.add_argument("--reduce-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument(
        "--head-apart", action="store_true", help="embedding, and norm with head, are modules of their own (torchtitan)"
    )
    parser.add_argument(
        "--replicas", type=int, default=1, help="HSDP: so many, each sharded over its part of the ranks"
    )
    parser.add_argument("--copied", action="store_true", help="ours with direct=False: FSDP2's own copies stay")
    parser.add_argument("--staging-bytes", type=int, help="of ours; default: the library's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    device = start(args.device)
    bench = Bench(args, device)
    looks = bench.look()
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        new = summary(tokens, bench.timed(tokens), looks[tokens])
        rows += new
        if bench.rank == 0:
            show([COLUMNS, *map(cells, new)])
    said = bench.report()
    if bench.rank == 0:
        print("\n".join(said), flush=True)
        if args.out is not None:
            write(args.out, args, rows, [COLUMNS, *map(cells, rows)], said)
    bench.sharded.use(bench.variants[0])
    synchronize(bench.device)
    bench.handle.restore()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
