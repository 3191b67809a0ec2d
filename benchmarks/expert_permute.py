"""Claim: rows go to experts and back about as fast as memory can be read and written. One GPU; a minute.

    python benchmarks/expert_permute.py --json results/expert-permute-h200.json

Every operation of `parallel/expert/` that is no communication and no matmul, on what one rank of several has after the
tokens of all were gathered: alone, in a CUDA graph, beside what plain operations of torch take for the same. These are
told how many rows there are, for which a host would have to wait. The floor is the least that memory must move (each
token, each row that is used once) at the rate of a copy in the same run. Results have to be those of the same
operations on the CPU, bit by bit; dot products and activations those of torch in float32, up to rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import gpu_provenance, provenance, write_result
from tables import print_table
from torch import Tensor
from torch.nn import functional

from counterpoint.parallel.expert import permute as module
from counterpoint.parallel.expert.layers import swiglu
from counterpoint.parallel.expert.permute import Assignment, assign, combine, permute, weight_grads

COPY_BYTES = 1 << 30
CALLS = 5  # in a graph
COLUMNS = ("shape", "routing", "operation", "µs", "GB/s", "floor µs", "of floor", "torch µs", "×", "host µs", "equal")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one rank has: the tokens of all ranks, and its part of the experts."""

    tokens: int
    top_k: int
    experts: int
    ranks: int
    hidden: int
    ffn: int

    @property
    def local(self) -> int:
        return self.experts // self.ranks


SHAPES = {
    "Qwen3-30B, 2 GPUs": Shape(tokens=16384, top_k=8, experts=128, ranks=2, hidden=2048, ffn=768),
    "Qwen3-30B, 8 GPUs": Shape(tokens=65536, top_k=8, experts=128, ranks=8, hidden=2048, ffn=768),
    "Mixtral, 2 GPUs": Shape(tokens=16384, top_k=2, experts=8, ranks=2, hidden=4096, ffn=14336),
    "tiny": Shape(tokens=200, top_k=3, experts=8, ranks=2, hidden=96, ffn=40),
}
Operation = Callable[[], Any]


@dataclass(kw_only=True)
class Case:
    """One shape and routing on one device."""

    shape: Shape
    ids: Tensor
    x: Tensor
    weights: Tensor
    found: Assignment
    used: int
    rows: Tensor
    gate_up: Tensor
    grads: Tensor

    @classmethod
    def of(cls, shape: Shape, routing: str, device: str) -> Case:
        """Tokens, a routing in which no token chooses an expert twice, and everything that follows from them."""
        scores = torch.rand(shape.tokens, shape.experts)
        if routing == "zipf":
            scores = scores.log() * torch.arange(1, shape.experts + 1)  # the least of exponentials, by their rates
        ids = scores.topk(shape.top_k).indices.to(device)
        x = torch.randn(shape.tokens, shape.hidden).to(device, torch.bfloat16)
        capacity = shape.tokens * min(shape.top_k, shape.local)
        found = assign(ids, first_expert=0, num_experts=shape.local, capacity=capacity)
        used = int(found.offsets[-1])
        rows = permute(x, found, zero_tail=False)
        gate_up = torch.randn(capacity, 2 * shape.ffn, device=device, dtype=torch.bfloat16).requires_grad_()
        return cls(
            shape=shape,
            ids=ids,
            x=x,
            weights=torch.rand(shape.tokens, shape.top_k).to(device),
            found=found,
            used=used,
            rows=rows,
            gate_up=gate_up,
            grads=torch.randn(capacity, shape.ffn, device=device, dtype=torch.bfloat16),
        )

    def ours(self) -> dict[str, Operation]:
        """Each returns what it computed, as far as it is defined."""
        shape, found, used = self.shape, self.found, self.used

        def assigned() -> tuple[Tensor, ...]:
            new = assign(self.ids, first_expert=0, num_experts=shape.local, capacity=found.capacity)
            return new.offsets, new.slots, new.sources, new.missing

        return {
            "assign": assigned,
            "permute": lambda: permute(self.x, found, zero_tail=False)[:used],
            "permute, weighted": lambda: permute(self.x, found, weights=self.weights, zero_tail=False)[:used],
            "combine": lambda: combine(self.rows, found),
            "combine, weighted": lambda: combine(self.rows, found, weights=self.weights),
            "weight_grads": lambda: weight_grads(self.rows, self.x, found),
            "swiglu": lambda: swiglu(self.gate_up.detach(), found.offsets)[:used],
            "swiglu and backward": lambda: derivative(
                swiglu(self.gate_up, found.offsets), self.gate_up, self.grads
            )[:used],
        }  # fmt: skip

    def stock(self) -> dict[str, Operation]:
        """The same with operations of torch; sums have float32 weights, but are rounded at each addition."""
        local, used, top_k = self.shape.local, self.used, self.shape.top_k
        sources = self.found.sources[:used].long()
        tokens, factors = sources // top_k, self.weights.flatten()[sources].unsqueeze(1)
        gate_up, grads, ffn = self.gate_up[:used].detach().requires_grad_(), self.grads[:used], self.shape.ffn

        def assigned() -> tuple[Tensor, Tensor]:
            flat = self.ids.flatten()
            order = torch.where(flat < local, flat, local).argsort(stable=True)
            return order, torch.histc(flat.float(), bins=local, min=0, max=local).cumsum(0).int()

        def activated() -> Tensor:
            return functional.silu(gate_up[:, :ffn]) * gate_up[:, ffn:]

        def added(rows: Tensor) -> Tensor:
            return torch.zeros_like(self.x).index_add_(0, tokens, rows)

        return {
            "assign": assigned,
            "permute": lambda: self.x.index_select(0, tokens),
            "permute, weighted": lambda: self.x.index_select(0, tokens) * factors.bfloat16(),
            "combine": lambda: added(self.rows[:used]),
            "combine, weighted": lambda: added(self.rows[:used] * factors.bfloat16()),
            "weight_grads": lambda: (self.rows[:used].float() * self.x.index_select(0, tokens).float()).sum(1),
            "swiglu": lambda: activated().detach(),
            "swiglu and backward": lambda: derivative(activated(), gate_up, grads),
        }

    def expected(self) -> dict[str, Operation]:
        """The results, by other means."""
        names = ("offsets", "slots", "sources", "missing")
        on_cpu = Case(
            shape=self.shape,
            found=Assignment(**{name: getattr(self.found, name).cpu() for name in names}),
            used=self.used,
            **{name: getattr(self, name).detach().cpu() for name in ("ids", "x", "weights", "rows")},
            gate_up=torch.empty(0),
            grads=torch.empty(0),
        ).ours()
        gate_up, ffn = self.gate_up[: self.used].detach().float().requires_grad_(), self.shape.ffn
        sources = self.found.sources[: self.used].long()

        def dots() -> Tensor:
            values = self.rows[: self.used].float() * self.x.float()[sources // self.shape.top_k]
            found = torch.zeros_like(self.weights)
            found.view(-1)[sources] = values.sum(1)
            return found

        def activated() -> Tensor:
            return functional.silu(gate_up[:, :ffn]) * gate_up[:, ffn:]

        return on_cpu | {
            "weight_grads": dots,
            "swiglu": lambda: activated().detach(),
            "swiglu and backward": lambda: derivative(activated(), gate_up, self.grads[: self.used].float()),
        }

    def num_bytes(self) -> dict[str, int]:
        """What memory has to move."""
        token, row = self.x.nbytes, self.used * self.shape.hidden * self.x.itemsize
        middle = self.used * self.shape.ffn * self.x.itemsize
        return {
            "assign": self.ids.nbytes + self.found.slots.nbytes + self.found.sources.nbytes,
            "permute": token + row,
            "permute, weighted": token + row + self.weights.nbytes,
            "combine": row + token,
            "combine, weighted": row + token + self.weights.nbytes,
            "weight_grads": row + token + self.weights.nbytes,
            "swiglu": 3 * middle,
            "swiglu and backward": 8 * middle,
        }


def derivative(out: Tensor, of: Tensor, grads: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(out, of, grads)
    return found


def same(got: Any, wanted: Any) -> bool:
    """Return whether results are those of the CPU, or of float32."""
    if isinstance(got, tuple):
        return all(same(one, other) for one, other in zip(got, wanted, strict=True))
    if wanted.dtype == torch.float32:
        scale = wanted.abs().mean().item()
        return torch.allclose(got.float(), wanted, rtol=2**-7, atol=scale * 2**-7)
    return torch.equal(got.cpu(), wanted)


def device_us(operation: Operation, rounds: int, device: str) -> float:
    """Median µs of one call, of graphs that hold several; on a CPU, of calls."""
    operation()
    if device == "cpu":
        return host_us(operation, rounds)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        operation()  # loads what a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            operation()
    times: list[float] = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return median(times[2:])


def host_us(operation: Operation, rounds: int) -> float:
    """µs of the host for a call, of which a GPU has done none when the clock starts."""
    times: list[float] = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        operation()
        times.append((time.perf_counter() - begin) * 1e6)
    return median(times)


def copy_rate(rounds: int, device: str) -> float:
    """Bytes read and written in a µs."""
    source = torch.empty(COPY_BYTES if device == "cuda" else COPY_BYTES >> 6, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = device_us(lambda: target.copy_(source), rounds, device)
    return 2.0 * int(source.nbytes) / us


def measured(case: Case, rate: float, rounds: int, device: str) -> list[dict[str, Any]]:
    """One row for each operation."""
    ours, stock, sizes, reference = case.ours(), case.stock(), case.num_bytes(), case.expected()
    rows = []
    for name, operation in ours.items():
        equal = same(operation(), reference[name]())
        us = device_us(operation, rounds, device)
        rows.append(
            {
                "operation": name,
                "us": us,
                "gb_per_s": sizes[name] / us / 1e3,
                "floor_us": sizes[name] / rate,
                "torch_us": device_us(stock[name], rounds, device),
                "host_us": host_us(operation, rounds),
                "equal": equal,
            }
        )
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    us, floor, other = row["us"], row["floor_us"], row["torch_us"]
    times = [f"{us:.1f}", f"{row['gb_per_s']:.0f}", f"{floor:.1f}", f"{us / floor:.2f}", f"{other:.1f}"]
    found = [row["shape"], row["routing"], row["operation"], *times, f"{other / us:.1f}", f"{row['host_us']:.0f}"]
    return [*found, "yes" if row["equal"] else "NO"]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if any result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--shapes", nargs="*", choices=list(SHAPES), default=[name for name in SHAPES if name != "tiny"]
    )
    parser.add_argument("--routings", nargs="*", choices=["uniform", "zipf"], default=["uniform"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block-bytes", type=int, default=module.BLOCK_BYTES, help="of a token, for each program")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)
    module.BLOCK_BYTES = asked.block_bytes
    rate, rows = copy_rate(asked.rounds, asked.device), []
    for name in asked.shapes:
        for routing in asked.routings:
            case = Case.of(SHAPES[name], routing, asked.device)
            new = measured(case, rate, asked.rounds, asked.device)
            rows += [{"shape": name, "routing": routing, "rows": case.used, **row} for row in new]
    table = [cells(row) for row in rows]
    print_table(COLUMNS, table, title=f"a copy moves {rate / 1e3:.0f} GB/s, block of {asked.block_bytes} bytes")
    if asked.json is not None:
        packages = ["torch", "triton"]
        origin = gpu_provenance(packages, world_size=1) if asked.device == "cuda" else provenance(packages)
        record = {"provenance": origin, "block_bytes": asked.block_bytes, "copy_gb_per_s": rate / 1e3, "rows": rows}
        write_result(asked.json, record, COLUMNS, table)
    return int(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
