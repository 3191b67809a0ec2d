"""One MoE layer forward, and a step of 4 layers forward and backward: by torch, by NCCL and by every mechanism of ours.

    torchrun --nproc-per-node 2 benchmarks/expert_layer.py --out results/expert-layer.json
    torchrun --nproc-per-node 2 benchmarks/expert_layer.py --only layer --shapes mixtral --mechanisms torch slabs auto
    torchrun --nproc-per-node 2 benchmarks/expert_layer.py --only step --mechanisms gather --parts 2 --run graph
    torchrun --nproc-per-node 2 benchmarks/expert_layer.py --device cpu --shapes tiny --tokens 32 --rounds 1 --steps 1

The layer is the one of the physics: `experts alone` has the rows already and moves none; `all_to_all_single` is plain
torch as everybody has it, with counts that the host waits for; `NCCL` gathers all tokens and scatters sums with our
kernels around; all others go by `expert_parallel.Dispatcher`, `torch` with all_to_all_single between our kernels. In a
step `2 parts` are half-batches, one's communication beside the other's experts, by `overlapped_moe`. `graph` replays
what was captured of the same variant, the step with its derivatives, so that the host does nothing but launch it.

Routing is random and the same for all variants, and all have one set of weights. Outputs, or loss and gradients, are
compared with those of a wider dtype (float32 of bfloat16, on CPUs float64 of float32); it ends where an error is more
than twice that of `all_to_all_single` (column: × error). Variants are interleaved in rounds of `--steps` steps; median
of a rank, maximum over ranks; the first round is dropped. Host: what the launching thread needs for the first step of a
round. Syncs: calls in which the host waits for the device within a step, and SM kernels: those of transport, by a trace
of one step; where `gather` has any, the exit status is 1. Peak: GB that torch's allocator had in use within a step.
Buffers: GB outside of it.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from step_rig import Step, formatted, in_turns, show, start, synchronize, write
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from counterpoint import expert_parallel
from counterpoint.collectives.host.group import torch_function
from counterpoint.errors import Unsupported
from counterpoint.pair.expert_choice import CAPTURED
from counterpoint.parallel.expert.permute import assign, combine, permute
from counterpoint.trace.classify import kernel_kind
from counterpoint.trace.timeline import Kind

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from llama import Llama, rotary_table
from moe import MoeShape, exchanged

__all__ = ["Bench", "FixedRouting", "Seen", "errors", "looked_at"]

COLUMNS = (
    "shape", "what", "variant", "ms", "times", "host ms", "syncs", "SM kernels", "peak GB", "buffers GB", "× error",
    "ran as",
)  # fmt: skip
ALONE, PLAIN, NCCL = "experts alone", "all_to_all_single", "NCCL"
MECHANISMS = get_args(expert_parallel.ExpertChoice)
RUNS = ("eager", "graph")
GRAPH = ", graph"  # behind the name of a variant
WARM_UPS = 3  # before a capture: kernels are compiled and memory is there
SHAPES = {  # how many layers is an option
    "qwen3": MoeShape(hidden=2048, ffn=768, heads=32, kv_heads=4, vocabulary=256, experts=128, top_k=8),
    "mixtral": MoeShape(vocabulary=256, experts=8, top_k=2),
    "tiny": MoeShape(
        hidden=64, ffn=32, heads=4, kv_heads=2, head_size=16, vocabulary=128, experts=8, top_k=2
    ),
}  # fmt: skip
MOST_ERROR = 2.0  # over that of PLAIN, or of one rounding where that is more
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
STEP = "one step"
Route = Callable[[Tensor, Tensor, Tensor, expert_parallel.LocalExperts], Tensor]
"""Takes tokens, their experts, the weights of these and this rank's experts; returns what they make."""


Found = dict[str, Tensor]  # what a step makes, by its name


class FixedRouting(nn.Module):
    """A layer of experts whose tokens always go to the same: rounding must not send them elsewhere."""

    def __init__(self, shape: MoeShape, ranks: int, ids: Tensor) -> None:
        super().__init__()
        self.ids, self.router = ids, nn.Linear(shape.hidden, shape.experts, bias=False)
        self.local = expert_parallel.LocalExperts(shape.experts // ranks, shape.hidden, shape.ffn)
        self.route: Route | None = None  # of the variant that runs

    def weighed(self, rows: Tensor) -> Tensor:
        """The weights of the experts of each token."""
        weights: Tensor = self.router(rows).float().softmax(-1).gather(1, self.ids)
        return weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        """As any feed-forward."""
        rows = x.flatten(0, 1)
        assert self.route is not None
        return self.route(rows, self.ids, self.weighed(rows), self.local).view_as(x)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a trace of one step shows."""

    syncs: int | None  # None: there is no GPU
    sm_kernels: int | None


def on_gpu(one: FunctionEvent) -> bool:
    """Whether an event is of the device, not of the host."""
    return str(one.device_type) == "DeviceType.CUDA"


def looked_at(step: Step, device: torch.device) -> Seen:
    """Counts waits of the host within a step, and kernels of transport."""
    if device.type != "cuda":
        step()
        return Seen(syncs=None, sm_kernels=None)
    step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        with record_function(STEP):
            step()
        torch.cuda.synchronize(device)
    events = recorded.events() or []
    inside = next(one.time_range for one in events if one.name == STEP and not on_gpu(one))
    waits = [one for one in events if one.name in SYNCS and inside.start <= one.time_range.start < inside.end]
    kernels = {one.name for one in events if on_gpu(one) and one.name != STEP}
    if not kernels:
        raise RuntimeError("the profiler saw nothing on the GPU: CUPTI is missing, or in use by another tool")
    transport = {name for name in kernels if kernel_kind(name) == Kind.COMM}
    count = sum(on_gpu(one) and one.name in transport for one in events)
    return Seen(syncs=len(waits), sm_kernels=count)


def routings(model: Llama) -> list[FixedRouting]:
    """The layers of experts of a model, in their order."""
    return [one for one in model.modules() if isinstance(one, FixedRouting)]


def graphed(step: Callable[[], Found], device: torch.device) -> Callable[[], Found]:
    """Returns what replays a step, whose results are always in the same memory."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = step()
    synchronize(device)

    def replay() -> Found:
        graph.replay()
        return found

    return replay


def errors(found: Found, exact: Found) -> dict[str, float]:
    """Relative errors by name; raises where something is missing."""
    if found.keys() != exact.keys():
        raise RuntimeError(f"gradients of {sorted(found.keys() ^ exact.keys())} are missing or too many")
    return {name: float((found[name].to(one.dtype) - one).norm() / one.norm()) for name, one in exact.items()}


def gathered_by_nccl(x: Tensor, ids: Tensor, weights: Tensor, experts: Any, *, experts_in_all: int) -> Tensor:
    """Forward only: every rank gets all tokens, and sums of its experts are reduced and scattered."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    every = []
    for one in (x, ids, weights):
        every.append(one.new_empty(ranks * len(one), *one.shape[1:]))
        torch_function("all_gather")(every[-1], one.contiguous())
    local = experts_in_all // ranks
    capacity = len(every[1]) * min(ids.shape[1], local)
    there = assign(every[1], first_expert=rank * local, num_experts=local, capacity=capacity)
    rows = experts(permute(every[0], there), there.offsets)
    out = torch.empty_like(x)
    torch_function("reduce_scatter")(out, combine(rows, there, weights=every[2]))
    return out


class Bench:
    """This rank: one model, the ways that its tokens may take, and how to time them."""

    def __init__(self, args: argparse.Namespace, device: torch.device, name: str) -> None:
        self.args, self.device, self.name, self.shape = args, device, name, SHAPES[name]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(self.rank)  # experts differ, as do tokens
        with device:
            self.model = self.made()
            tokens = torch.randint(self.shape.vocabulary, (args.tokens // args.length, args.length))
            self.batch = tokens, tokens.roll(-1, 1), rotary_table(args.length, self.shape.head_dim, device)
            self.x = torch.randn(args.tokens, self.shape.hidden).to(self.dtype)
        self.dispatchers: dict[tuple[str, int], expert_parallel.Dispatcher] = {}
        self.buffers: dict[tuple[str, int], float] = {}
        self.missing: list[str] = []

    def made(self) -> Llama:
        """The model, each layer with a routing of its own."""
        model = Llama(replace(self.shape, layers=self.args.layers, ffn=1))  # its feed-forwards are replaced
        for layer in model.layers:
            ids = torch.rand(self.args.tokens, self.shape.experts).topk(self.shape.top_k).indices
            layer.ffn = FixedRouting(self.shape, self.ranks, ids)
        return model.to(self.dtype)

    @property
    def first(self) -> FixedRouting:
        """The layer of experts that is timed alone."""
        return routings(self.model)[0]

    def dispatcher(self, mechanism: str, parts: int) -> expert_parallel.Dispatcher | None:
        """That of all layers, for parts of the tokens; None, and the reason is kept, where it does not run here."""
        if (mechanism, parts) not in self.dispatchers:
            free = self.free_gb()
            made = expert_parallel.Dispatcher(
                experts=self.shape.experts, top_k=self.shape.top_k, max_tokens=-(-self.args.tokens // parts),
                hidden=self.shape.hidden,
                options=expert_parallel.ExpertOptions(
                    mechanism=mechanism, equal_tokens=self.args.tokens % parts == 0  # type: ignore[arg-type]
                ),
            )  # fmt: skip
            try:
                with torch.no_grad():
                    self.routed(made, parts)(self.x, self.first.ids, self.first.weighed(self.x), self.first.local)
            except Unsupported as error:
                self.missing.append(f"{mechanism}, {parts} part{'s' * (parts > 1)}: {error}")
                return None
            synchronize(self.device)
            self.dispatchers[mechanism, parts] = made
            self.buffers[mechanism, parts] = free - self.free_gb()
        return self.dispatchers[mechanism, parts]

    def routed(self, dispatcher: expert_parallel.Dispatcher, parts: int) -> Route:
        """The way of tokens by a dispatcher."""
        return partial(expert_parallel.overlapped_moe, dispatcher=dispatcher, parts=parts)

    def free_gb(self) -> float:
        """GB that neither torch's allocator nor anybody else holds; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0] / 1e9 + torch.cuda.memory_reserved(self.device) / 1e9

    def routes(self, what: str) -> Iterator[tuple[str, Route, tuple[str, int] | None]]:
        """Every variant of the layer or the step: its name, the way of tokens, and the dispatcher."""
        assert dist.group.WORLD is not None
        yield PLAIN, partial(exchanged, group=dist.group.WORLD, shared=None), None
        if what == "layer":
            yield NCCL, partial(gathered_by_nccl, experts_in_all=self.shape.experts), None
        for mechanism in self.args.mechanisms:
            for parts in self.args.parts:
                dispatcher = self.dispatcher(mechanism, parts)
                if dispatcher is not None:
                    name = f"{mechanism}, 2 parts" if parts == 2 else mechanism
                    yield name, self.routed(dispatcher, parts), (mechanism, parts)

    def variants(
        self, what: str, make: Callable[[Route, Llama], Callable[[], Found]]
    ) -> Iterator[tuple[str, tuple[Callable[[], Found], tuple[str, int] | None]]]:
        """Every step by its name, with the dispatcher: as it is, and in a graph where one can hold it."""
        for name, route, key in self.routes(what):
            step = make(route, self.model)
            if key is None or "eager" in self.args.run:
                yield name, (step, key)
            if key is None or "graph" not in self.args.run:
                continue
            if self.device.type != "cuda":
                self.missing.append(f"{name}{GRAPH}: there is no GPU")
            elif self.path(key) in CAPTURED:
                self.say(f"{what} by {name}: capture begins")
                yield name + GRAPH, (graphed(step, self.device), key)
                self.say(f"{what} by {name}: captured")

    def say(self, what: str) -> None:
        """Prints where this is, for who waits."""
        if self.rank == 0:
            print(what, file=sys.stderr, flush=True)

    def layer_step(self, route: Route, model: Llama) -> Callable[[], Found]:
        """One layer forward, the weights of tokens given."""
        with torch.no_grad():
            weights = self.first.weighed(self.x)
        ffn = routings(model)[0]
        x = self.x.to(ffn.router.weight.dtype)

        @torch.no_grad()
        def step() -> Found:
            return {"output": route(x, self.first.ids, weights, ffn.local)}

        return step

    def alone(self) -> Step:
        """The experts on rows that are there, as many as come to this rank."""
        local, ids = self.first.local, self.first.ids
        every = ids.new_empty(self.ranks * len(ids), ids.shape[1])
        torch_function("all_gather")(every, ids)
        own = self.shape.experts // self.ranks
        counts = torch.bincount(every.flatten(), minlength=self.shape.experts)[self.rank * own :][:own]
        rows = torch.randn(int(counts.sum()), self.shape.hidden, device=self.device).to(self.dtype)
        offsets = counts.cumsum(0).int()

        @torch.no_grad()
        def step() -> Tensor:
            out: Tensor = local(rows, offsets)
            return out

        return step

    def train_step(self, route: Route, model: Llama) -> Callable[[], Found]:
        """All layers forward and backward; gradients are returned and taken away."""

        def step() -> Found:
            for ffn in routings(model):
                ffn.route = route
            loss = model(*self.batch)
            loss.backward()
            found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
            model.zero_grad(set_to_none=True)
            return found | {"loss": loss.detach()}

        return step

    def times_error(self, found: dict[str, float], plain: dict[str, float]) -> float:
        """The largest error over that of PLAIN, or over one rounding, of any rank."""
        least = torch.finfo(self.dtype).eps
        worst = torch.tensor(max(error / max(plain[name], least) for name, error in found.items()), device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst.item()

    def peak_gb(self, step: Step) -> float | None:
        """GB that torch's allocator had in use within a step, at most."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) / 1e9

    def timed(self, what: str) -> list[dict[str, Any]]:
        """A row for each variant of the layer, or of the step; raises where one is wrong."""
        make = self.layer_step if what == "layer" else self.train_step
        plain_route = next(route for name, route, _ in self.routes(what) if name == PLAIN)
        exact = make(plain_route, copy.deepcopy(self.model).to(WIDER[self.dtype]))()
        variants = dict(self.variants(what, make))  # after the copy: a step leaves its route in the model
        plain = errors(variants[PLAIN][0](), exact)
        rows: dict[str, dict[str, Any]] = {}
        for name, (step, key) in variants.items():
            self.say(f"{what} by {name}: checked and looked at")
            times_error = self.times_error(errors(step(), exact), plain)
            if not times_error <= MOST_ERROR:
                raise RuntimeError(
                    f"{what} by {name} has {times_error:.2f} times the error of {PLAIN}; {MOST_ERROR:g} are allowed"
                )
            seen = looked_at(step, self.device)
            rows[name] = {
                "error": times_error, "syncs": seen.syncs, "sm_kernels": seen.sm_kernels,
                "peak_gb": None if name.endswith(GRAPH) else self.peak_gb(step),  # a graph has memory of its own
                "buffers_gb": self.buffers[key] if key is not None and self.device.type == "cuda" else None,
                "ran_as": None if key is None else self.path(key),
            }  # fmt: skip
        del exact
        steps = {name: step for name, (step, _) in variants.items()}
        if what == "layer":
            steps[ALONE] = self.alone()
        times = in_turns(steps, self.device, rounds=self.args.rounds, steps_each=self.args.steps)
        plain_ms, _ = times[PLAIN]
        return [
            {"shape": self.name, "what": what, "variant": name, "ms": ms, "times": plain_ms / ms, "host_ms": host_ms}
            | rows.get(name, {})
            for name, (ms, host_ms) in times.items()
        ]

    def path(self, key: tuple[str, int]) -> str:
        """Which ways the calls of a dispatcher went."""
        return " and ".join(dict.fromkeys(row.path for row in self.dispatchers[key].report().calls))

    def report(self) -> list[str]:
        """Which way the calls of ours went and why, and what could not run."""
        reports = [
            f"{mechanism}, {parts}: {row.path}, as {row.why}" if row.why else f"{mechanism}, {parts}: {row.path}"
            for (mechanism, parts), one in self.dispatchers.items()
            for row in one.report().calls
        ]
        return [*dict.fromkeys(f"{self.name}, {one}" for one in reports), *(f"not run: {one}" for one in self.missing)]

    def close(self) -> None:
        """Give back what the dispatchers hold."""
        synchronize(self.device)
        for dispatcher in self.dispatchers.values():
            dispatcher.close()


def cells(row: dict[str, Any]) -> list[str]:
    """As printed, in the order of `COLUMNS`."""
    formats = {
        "shape": "", "what": "", "variant": "", "ms": ".3f", "times": ".3f", "host_ms": ".2f", "syncs": "d",
        "sm_kernels": "d", "peak_gb": ".2f", "buffers_gb": ".2f", "error": ".2f", "ran_as": "",
    }  # fmt: skip
    return formatted(row, formats)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3", "mixtral"], help="of the layer")
    parser.add_argument("--step-shapes", nargs="*", choices=SHAPES, help="of the step; default: the first of --shapes")
    parser.add_argument("--only", choices=("layer", "step"), help="default: both")
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=["torch", "gather", "slabs", "auto"])
    parser.add_argument("--parts", nargs="+", type=int, choices=(1, 2), default=[1, 2], help="of a layer's tokens")
    parser.add_argument("--run", nargs="+", choices=RUNS, default=list(RUNS), help="how our variants are run")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--length", type=int, default=4096, help="of a sequence")
    parser.add_argument("--layers", type=int, default=4, help="of the step")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--out", type=Path, help="where to keep the result")
    args = parser.parse_args()
    args.length = min(args.length, args.tokens)
    if args.tokens % args.length:
        parser.error(f"--tokens {args.tokens}: give a multiple of --length {args.length}")
    args.step_shapes = args.shapes[:1] if args.step_shapes is None else args.step_shapes
    return args


def main() -> None:
    """Measure, print and keep."""
    args = parsed()
    device = start(args.device)
    rows: list[dict[str, Any]] = []
    said: list[str] = []
    for name in dict.fromkeys([*args.shapes, *args.step_shapes]):
        bench = Bench(args, device, name)
        for what, shapes in (("layer", args.shapes), ("step", args.step_shapes)):
            if name in shapes and args.only in (None, what):
                new = bench.timed(what)
                rows += new
                if bench.rank == 0:
                    show([list(COLUMNS), *map(cells, new)])
        said += bench.report()
        bench.close()
        del bench
    broken = [
        f"{row['shape']}, {row['what']}, {row['variant']}: {row['syncs']} waits of the host and {row['sm_kernels']} SM "
        "kernels of transport, and none of either is wanted"
        for row in rows
        if row.get("ran_as") == "gather" and (row["syncs"] or row["sm_kernels"])
    ]
    said += broken
    if dist.get_rank() == 0:
        print("\n".join(said), flush=True)
        if args.out is not None:
            write(args.out, args, rows, [COLUMNS, *map(cells, rows)], said)
    dist.destroy_process_group()
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
