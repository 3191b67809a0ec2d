"""One tensor-parallel decoder block with sequence parallelism, forward and backward, by torch and by ours.

    torchrun --nproc-per-node 2 benchmarks/tensor_block.py --out results/tensor-block.json
    torchrun --nproc-per-node 2 benchmarks/tensor_block.py --device cpu --model tiny --tokens 32 --rounds 2

`eager`: `parallelize_module` of examples/llama.py's layer. `compiled`: the same under torch.compile; `async TP`: with
torch's `_micro_pipeline_tp`, `fused`: with our `fuse_compiled`. `direct`: the same layer by hand, its matmuls by
`torch.ops.counterpoint`; `torch's way`: as `direct`, but by torch's collectives and one matmul, so that what DTensor
costs can be told from overlap. No variant sums the gradients of norms over ranks within a step.

All variants have one set of weights. Loss, and gradients of weights and input, are compared with those of `eager`: it
ends where they differ. `fused` counts those matmuls of a step whose collective was not left to torch's own.
Variants are interleaved in rounds of `--steps` steps; median of a rank, maximum over ranks; the first round is dropped.
Host: what the launching thread needs for the first step of a round.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_variants import SHAPES
from step_rig import Step, formatted, in_turns, show, start, synchronize, write
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile

import counterpoint.parallel.tensor.operations  # noqa: F401 - registers them
from counterpoint.parallel.options import TensorChoice, TensorOptions
from counterpoint.parallel.tensor.compiled import fuse_compiled
from counterpoint.parallel.tensor.group import tensor_group

from llama import Layer, Shape, rotary_table, rotate  # isort: skip - found by fsdp_variants

__all__ = ["Bench", "DirectLayer"]

COLUMNS = ("tokens", "variant", "ms", "times", "host ms", "fused", "loss", "difference")
EAGER, COMPILED, ASYNC_TP, FUSED = "eager", "compiled", "compiled, async TP", "compiled, fused"
DIRECT, DIRECT_COMPILED, DIRECT_TORCH = "direct", "direct, compiled", "direct, torch's way"
VARIANTS = (EAGER, COMPILED, ASYNC_TP, FUSED, DIRECT_TORCH, DIRECT, DIRECT_COMPILED)
MOST_DIFFERENCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # of ‖gradient‖, between any two variants


def plan() -> dict[str, ParallelStyle]:
    """How `parallelize_module` divides a layer: every gather feeds three or two matmuls."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    with_table = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    columns = {f"{name}": ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value",
                                                         "ffn.gate", "ffn.up")}  # fmt: skip
    rows = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.output", "ffn.down")}
    norms = {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    return {**norms, "attention": with_table, "ffn": gathered, **columns, **rows}


class DirectLayer(nn.Module):
    """The same layer by hand, on this rank's part of the weights of a parallelized one."""

    def __init__(self, layer: nn.Module, shape: Shape, group_name: str) -> None:
        super().__init__()
        self.head_dim, self.group_name = shape.head_dim, group_name
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(local(one.detach())) for name, one in layer.named_parameters()}
        )

    def gathered(self, x: Tensor, *names: str) -> list[Tensor]:
        """The rows of all ranks, by each of these weights."""
        weights = [self.weights[f"{name}_weight"].t() for name in names]
        found: list[Tensor] = torch.ops.counterpoint.all_gather_matmul(
            x, weights, 1, self.group_name, return_gathered=False
        )[1]
        return found

    def scattered(self, x: Tensor, name: str) -> Tensor:
        """This rank's rows of the sum over ranks, by this weight."""
        weight = self.weights[f"{name}_weight"].t()
        found: Tensor = torch.ops.counterpoint.matmul_reduce_scatter(x, weight, "sum", 1, self.group_name)
        return found

    def normed(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm, as in the layer."""
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}_weight"])

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """As the layer."""
        projected = self.gathered(
            self.normed(x, "attention_norm"), "attention_query", "attention_key", "attention_value"
        )
        query, key, value = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in projected)
        query, key = rotate(query, table), rotate(key, table)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.scattered(mixed.transpose(1, 2).flatten(2), "attention_output")
        gate, up = self.gathered(self.normed(x, "ffn_norm"), "ffn_gate", "ffn_up")
        return x + self.scattered(F.silu(gate) * up, "ffn_down")


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


class Bench:
    """This rank: a block for each variant, on the same weights, and how to time them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.shape = SHAPES[args.model]
        torch.manual_seed(1)
        with device:
            layer = Layer(self.shape).to(self.dtype)
        for weight in layer.parameters():
            nn.init.ones_(weight) if weight.dim() == 1 else nn.init.normal_(weight, std=0.02)
        self.mesh = init_device_mesh(device.type, (self.size,))
        self.layer = parallelize_module(layer, self.mesh, plan())
        self.names = {name: dist.new_group().group_name for name in (DIRECT, DIRECT_TORCH)}
        self.names[FUSED] = self.mesh.get_group().group_name
        for name, group_name in self.names.items():
            mechanism: TensorChoice = "torch" if name == DIRECT_TORCH else args.mechanism
            tensor_group(group_name, TensorOptions(mechanism=mechanism))
        makers: dict[str, Callable[[], nn.Module]] = {
            EAGER: lambda: self.layer,
            COMPILED: lambda: compiled(self.layer),
            ASYNC_TP: self.async_tp,
            FUSED: lambda: compiled(self.layer, _micro_pipeline_tp=False),  # apart from `compiled` in torch's cache
            DIRECT_TORCH: lambda: DirectLayer(self.layer, self.shape, self.names[DIRECT_TORCH]),
            DIRECT: lambda: DirectLayer(self.layer, self.shape, self.names[DIRECT]),
            DIRECT_COMPILED: lambda: compiled(DirectLayer(self.layer, self.shape, self.names[DIRECT])),
        }
        self.models = {name: makers[name]() for name in (EAGER, *args.variants)}

    def async_tp(self) -> nn.Module:
        """The layer with torch's fused matmuls, which need symmetric memory that is still enabled by hand."""
        if self.device.type != "cuda":
            raise SystemExit(f"{ASYNC_TP}: torch's fused operations run on GPUs only; leave it out of --variants")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(self.mesh.get_group().group_name)
        return compiled(self.layer, _micro_pipeline_tp=True)

    def batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of one sequence, and the angles of all."""
        torch.manual_seed(10 + self.rank)
        rows = torch.randn(1, tokens // self.size, self.shape.hidden, device=self.device, dtype=self.dtype)
        return rows.requires_grad_(), rotary_table(tokens, self.shape.head_dim, self.device).to(self.dtype)

    def step(self, model: nn.Module, tokens: int) -> Step:
        """Forward and backward; gradients are dropped. Returns the loss of this rank's rows."""
        x, table = self.batch(tokens)

        def step() -> Tensor:
            loss: Tensor = model(x, table).float().square().mean()
            loss.backward()
            x.grad = None
            model.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    def looked_at(self, name: str, tokens: int) -> tuple[float, dict[str, Tensor], int]:
        """The loss over all ranks, this rank's gradients, and how many calls of a step are fused."""
        model, (x, table) = self.models[name], self.batch(tokens)
        step = self.step(model, tokens)
        with fuse_compiled([self.mesh]) if name == FUSED else nullcontext():
            for _ in range(2):
                step()
        fused = self.fused_by_torch(step) if name == ASYNC_TP else self.fused_by_us(name, step)
        loss = model(x, table).float().square().mean()
        loss.backward()
        total = loss.detach() / self.size
        dist.all_reduce(total)
        assert x.grad is not None
        found = {"x": x.grad}
        for key, weight in model.named_parameters():
            assert weight.grad is not None, key
            found[key.removeprefix("_orig_mod.").removeprefix("weights.").replace(".", "_")] = self.reduced(weight.grad)
        model.zero_grad(set_to_none=True)
        return total.item(), found, fused

    def fused_by_torch(self, step: Step) -> int:
        """How many of torch's fused operations a step calls."""
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            step()
        return sum(one.count for one in recorded.key_averages() if one.key.startswith("symm_mem::fused_"))

    def fused_by_us(self, name: str, step: Step) -> int:
        """How many calls of a step the group of this variant does not leave to torch."""
        group_name = self.names.get(DIRECT if name == DIRECT_COMPILED else name)
        if group_name is None:
            return 0
        before = tensor_group(group_name).report().taken
        step()
        return tensor_group(group_name).report().taken - before

    def reduced(self, grad: Tensor) -> Tensor:
        """A gradient of this rank's part of a weight; of a norm, which all ranks have, the sum over their rows."""
        if isinstance(grad, DTensor):
            return grad.full_tensor() if grad.dim() == 1 else grad.to_local()
        if grad.dim() == 1:
            dist.all_reduce(grad)
        return grad

    def look(self, tokens: int) -> dict[str, dict[str, Any]]:
        """Loss, fused calls and the largest difference of a gradient from that of `eager`; raises where it is wrong."""
        found = {name: self.looked_at(name, tokens) for name in self.models}
        first_loss, first, _ = found[EAGER]
        looks: dict[str, dict[str, Any]] = {}
        for name, (loss, grads, fused) in found.items():
            if grads.keys() != first.keys():
                raise RuntimeError(
                    f"{name}: gradients of {sorted(grads.keys() ^ first.keys())} are missing or too many"
                )
            differences = [float((grads[key] - one).norm() / one.norm()) for key, one in first.items()]
            differences.append(abs(loss - first_loss) / first_loss)
            worst = torch.tensor(max(differences), device=self.device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if not worst.item() <= MOST_DIFFERENCE[self.dtype]:
                raise RuntimeError(
                    f"{name} differs from {EAGER} by {worst.item():.1e} of a gradient or the loss; at most "
                    f"{MOST_DIFFERENCE[self.dtype]:.0e} is rounding"
                )
            forced = (FUSED, DIRECT, DIRECT_COMPILED) if self.args.mechanism in ("serial", "cuts") else ()
            if not fused and name in (ASYNC_TP, *forced):
                raise RuntimeError(f"{name}: every matmul of its step waits for torch's own collective")
            looks[name] = {"loss": loss, "difference": worst.item(), "fused": fused}
        return looks

    def timed(self, tokens: int) -> list[dict[str, Any]]:
        """A row for each variant."""
        looks = self.look(tokens)
        steps = {name: self.step(model, tokens) for name, model in self.models.items()}
        times = in_turns(steps, self.device, rounds=self.args.rounds, steps_each=self.args.steps)
        eager_ms, _ = times[EAGER]
        return [
            {"tokens": tokens, "variant": name, "ms": ms, "times": eager_ms / ms, "host_ms": host_ms} | looks[name]
            for name, (ms, host_ms) in times.items()
        ]

    def report(self) -> list[str]:
        """Which way the calls of ours went."""
        reports = [(name, str(tensor_group(self.names[name]).report()).splitlines()) for name in (FUSED, DIRECT)]
        return [line for name, lines in reports for line in (f"{name}:", *lines)]

    def close(self) -> None:
        """Give back what the groups hold."""
        synchronize(self.device)
        for name in self.names.values():
            tensor_group(name).close()


def compiled(layer: nn.Module, **options: bool) -> nn.Module:
    """The layer as one graph, by inductor with these of its options."""
    return cast(nn.Module, torch.compile(layer, fullgraph=True, dynamic=False, options=dict(options)))


def cells(row: dict[str, Any]) -> list[str]:
    """As printed, in the order of `COLUMNS`."""
    formats = {
        "tokens": "d", "variant": "", "ms": ".2f", "times": ".3f", "host_ms": ".1f", "fused": "d", "loss": ".6f",
        "difference": ".1e",
    }  # fmt: skip
    return formatted(row, formats)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="70b", help="whose layer")
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 8192], help="of all ranks together")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, help="besides eager; default: all that run here")
    parser.add_argument("--mechanism", choices=get_args(TensorChoice), default="auto", help="of ours")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    args = parser.parse_args()
    if args.variants is None:
        args.variants = [name for name in VARIANTS[1:] if args.device == "cuda" or name != ASYNC_TP]
    return args


def main() -> None:
    """Measure, print and keep."""
    args = parsed()
    device = start(args.device)
    bench = Bench(args, device)
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        new = bench.timed(tokens)
        rows += new
        if bench.rank == 0:
            show([list(COLUMNS), *map(cells, new)])
    said = bench.report()
    if bench.rank == 0:
        print("\n".join(said), flush=True)
        if args.out is not None:
            write(args.out, args, rows, [COLUMNS, *map(cells, rows)], said)
    bench.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
