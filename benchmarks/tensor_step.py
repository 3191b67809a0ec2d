"""One training step of a tensor-parallel model, forward and backward, by torch and under `counterpoint.overlap`.

    torchrun --nproc-per-node 2 benchmarks/tensor_step.py --out results/tensor-step-llama.json
    torchrun --nproc-per-node 8 benchmarks/tensor_step.py --shards 2 --out results/tensor-step-fsdp.json
    torchrun --nproc-per-node 2 benchmarks/tensor_step.py --model transformers --shape 1b --layers 8
    torchrun --nproc-per-node 2 benchmarks/tensor_step.py --device cpu --shape tiny --tokens 32 --rounds 2 --steps 1

`llama`: examples/llama.py, spread as examples/train_tp.py does, with sequence parallelism; with `--shards 2` over half
of the ranks, and FSDP2 shards both halves, each of which has its own batch. `transformers`: its
`LlamaForCausalLM` of the same sizes, spread by its own plan (`tp_plan="auto"`), whose rows are on all ranks; that
package has to be installed. `stock` and `overlap` are two models with the same weights, as `overlap` changes a model
in place; the compiled variants are torch.compile of the same two.

Loss, and gradients of all weights, are compared with those of `stock`: it ends where they differ. `difference` is of
the loss or the weight that differs most, that of `stock` between two of its own steps; `norm` is of all gradients.
Variants are interleaved in rounds of `--steps` steps; median of a rank, maximum over ranks; the first round is dropped.
Host: what the launching thread needs for the first step of a round. Peak: what a step of rank 0 needs besides the
weights, of overlap with symmetric memory; empty on CPUs. At the end overlap reports which modules it runs, and how.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from fsdp_variants import SHAPES, batch
from step_rig import Step, formatted, in_turns, show, start, synchronize, write
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import counterpoint
from counterpoint.parallel.options import OverlapOptions, TensorChoice, TensorOptions

from train_tp import parallel_model  # isort: skip - found by fsdp_variants

COLUMNS = ("tokens", "variant", "ms", "times", "host ms", "peak MiB", "loss", "norm", "difference")
FORMATS = {
    "tokens": "d", "variant": "", "ms": ".2f", "times": ".3f", "host_ms": ".1f", "peak_mib": ",.0f", "loss": ".6f",
    "norm": ".6f", "difference": ".1e",
}  # fmt: skip
STOCK, OVERLAP = "stock", "overlap"
VARIANTS = (STOCK, "stock compiled", OVERLAP, "overlap compiled")  # those of overlap after those of stock
MOST_DIFFERENCE = {torch.bfloat16: 0.1, torch.float32: 1e-4}  # of ‖gradient‖; what one of two ranks leaves out is 0.7


class Bench:
    """This rank: a model for each variant, and how to time them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.shape = replace(SHAPES[args.shape], layers=args.layers, vocabulary=args.vocabulary)
        stock, ours = self.from_transformers() if args.model == "transformers" else self.from_examples()
        options = OverlapOptions(tensor_parallel=TensorOptions(mechanism=args.mechanism))
        self.handle = counterpoint.overlap(ours, options=options)
        models: list[Any] = [stock, torch.compile(stock, dynamic=False), ours, torch.compile(ours, dynamic=False)]
        named = dict(zip(VARIANTS, models, strict=True))
        self.models = {name: named[name] for name in VARIANTS if name in (STOCK, *args.variants)}
        self.outside_before: float | None = None

    def from_examples(self) -> list[nn.Module]:
        """Two models of the examples, whose weights are drawn from one seed."""
        return [parallel_model(self.shape, self.device, shards=self.args.shards) for _ in range(2)]

    def from_transformers(self) -> list[nn.Module]:
        """Two models that `transformers` spreads as it loads them, from files that rank 0 writes."""
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        config = LlamaConfig(
            hidden_size=self.shape.hidden,
            intermediate_size=self.shape.ffn,
            num_hidden_layers=self.shape.layers,
            num_attention_heads=self.shape.heads,
            num_key_value_heads=self.shape.kv_heads,
            vocab_size=self.shape.vocabulary,
            use_cache=False,
        )
        spread: dict[str, Any] = {"tp_plan": "auto"}
        if "tp_plan" in {field.name for field in fields(DistributedConfig)}:  # of late, where the keyword is deprecated
            spread = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=self.size)}
        with tempfile.TemporaryDirectory() as made:
            folder = [made]
            dist.broadcast_object_list(folder)
            if self.rank == 0:
                torch.manual_seed(1)
                with self.device:
                    LlamaForCausalLM(config).to(self.dtype).save_pretrained(made)
            synchronize(self.device)
            models = [LlamaForCausalLM.from_pretrained(folder[0], torch_dtype=self.dtype, **spread) for _ in range(2)]
            synchronize(self.device)  # before rank 0 removes them
        return [model.train() for model in models]

    def step(self, model: nn.Module, tokens: int) -> Step:
        """Forward and backward on one batch, the same on ranks that share it; gradients before are dropped."""
        seed = self.rank * self.args.shards // self.size
        text, labels, table = batch(self.shape, tokens, self.device, seed=seed)

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            if self.args.model == "transformers":
                loss: Tensor = model(input_ids=text, labels=text).loss
            else:
                loss = model(text, labels, table)
            loss.backward()
            return loss.detach()

        return step

    def looked_at(self, model: nn.Module, tokens: int) -> tuple[float, dict[str, Any], float | None]:
        """Loss, gradients, and MiB that a step needs besides the weights; after steps that plan and compile."""
        step = self.step(model, tokens)
        for _ in range(3):
            step()
        model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()  # 0 without GPUs
        loss = step().item()
        peak = (torch.cuda.max_memory_allocated() - resting) / 2**20 if self.device.type == "cuda" else None
        grads = {name.removeprefix("_orig_mod."): weight.grad for name, weight in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        assert all(grad is not None for grad in grads.values()), "a weight has no gradient"
        return loss, grads, peak

    def outside(self) -> float:
        """MiB of this GPU in use that torch's allocator does not know: symmetric memory is there."""
        if self.device.type != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info(self.device)
        return (total - free - torch.cuda.memory_reserved(self.device)) / 2**20

    def look(self, tokens: int) -> dict[str, dict[str, Any]]:
        """Loss, gradients beside those of stock, and memory of each variant; raises where one is wrong."""
        first_loss, first, _ = self.looked_at(self.models[STOCK], tokens)
        looks: dict[str, dict[str, Any]] = {}
        for name, model in self.models.items():
            if name.startswith(OVERLAP) and self.outside_before is None:
                self.outside_before = self.outside()
            loss, grads, peak = self.looked_at(model, tokens)
            if peak is not None and self.outside_before is not None:
                peak += self.outside() - self.outside_before
            differences = {key: self.norm(grads[key] - one) / self.norm(one) for key, one in first.items()}
            differences["the loss"] = abs(loss / first_loss - 1)
            where, difference = max(differences.items(), key=lambda item: item[1])
            if not all(one <= MOST_DIFFERENCE[self.dtype] for one in differences.values()):
                raise RuntimeError(
                    f"{name} differs from {STOCK} by {difference:.1e} of {where}; at most "
                    f"{MOST_DIFFERENCE[self.dtype]:.0e} is rounding"
                )
            looks[name] = {"loss": loss, "norm": self.norm(*grads.values()), "difference": difference, "peak_mib": peak}
        return looks

    def norm(self, *tensors: Tensor) -> float:
        """Of whole tensors, of which this rank has parts or copies; all ranks call it."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for tensor in tensors:
            copies = self.size
            if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
                tensor = tensor.full_tensor()
            elif isinstance(tensor, DTensor):
                sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
                copies = math.prod(size for size, placement in sizes if placement.is_replicate())
                tensor = tensor.to_local()
            total += tensor.double().square().sum() / copies
        dist.all_reduce(total)
        return total.sqrt().item()

    def timed(self, tokens: int) -> list[dict[str, Any]]:
        """A row for each variant."""
        looks = self.look(tokens)
        steps = {name: self.step(model, tokens) for name, model in self.models.items()}
        times = in_turns(steps, self.device, rounds=self.args.rounds, steps_each=self.args.steps)
        stock_ms, _ = times[STOCK]
        return [
            {"tokens": tokens, "variant": name, "ms": ms, "times": stock_ms / ms, "host_ms": host_ms} | looks[name]
            for name, (ms, host_ms) in times.items()
        ]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "transformers"), default="llama")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="whose layers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096], help="of a batch, which ranks share, and step")
    parser.add_argument("--shards", type=int, default=1, help="of FSDP2, over as many groups of tensor-parallel ranks")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=(STOCK, OVERLAP), help="stock always runs")
    parser.add_argument("--mechanism", choices=get_args(TensorChoice), default="auto", help="of overlap")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    args = parser.parse_args()
    if args.shards != 1 and args.model != "llama":
        parser.error("--shards: only --model llama can be sharded by FSDP2 as well")
    return args


def main() -> None:
    """Measure, print and keep."""
    args = parsed()
    bench = Bench(args, start(args.device))
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        rows += bench.timed(tokens)
    table = [list(COLUMNS), *(formatted(row, FORMATS) for row in rows)]
    said = str(bench.handle).splitlines()
    if bench.rank == 0:
        show(table)
        print("", *said, sep="\n", flush=True)
        if args.out is not None:
            write(args.out, args, rows, table, said)
    synchronize(bench.device)
    bench.handle.restore()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
