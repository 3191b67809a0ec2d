"""What ranks run to stress all of counterpoint at once: FSDP2, tensor and expert parallelism, and the backend.

A small decoder with experts is trained on meshes as a user lays them over 8 ranks: FSDP2 over 4 by tensor parallelism
over 2, experts over 4, of which FSDP2 shards each over 2. Meanwhile the backend makes collectives of all ranks, begun
in hooks of layers, forward and backward, and waited for somewhere else. What comes when is drawn, equally on all ranks.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from counterpoint import overlap
from counterpoint.measurement.session import Session
from counterpoint.parallel.expert import Dispatcher, ExpertOptions, overlapped_moe
from counterpoint.parallel.options import OverlapOptions, TensorOptions
from counterpoint.torch_backend import BackendOptions, report
from tests.dist.tensor_programs import cut_anywhere
from tests.dist.torch_backend_programs import EVERYTHING, OPERATIONS, started
from tests.support.ranks import PATIENT
from tests.support.routing import routing

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from llama import Llama, rotary_table
from moe import MoeShape, Route, RoutedExperts, exchanged

SHAPE = MoeShape(layers=2, hidden=32, ffn=16, heads=4, kv_heads=2, head_size=8, vocabulary=64, experts=8, top_k=2)
TENSOR = 2  # ranks of tensor parallelism
LENGTHS = (8, 16)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a run found."""

    error: float  # of losses, gradients and parameters against a stock run in float64, relative to the largest
    stock: float  # that of a stock run in the same dtype
    paths: list[set[str]]  # by which tokens, matmuls and calls of the backend went
    copied: list[str]  # why FSDP2's modules were left, or copied


class RoutedFeedForward(nn.Module):
    """Experts that the seed chooses, so that rounding changes no choice, with weights that a router learns."""

    def __init__(self, ranks: int, route: Route, draw: random.Random) -> None:
        super().__init__()
        self.router = nn.Linear(SHAPE.hidden, SHAPE.experts, bias=False)
        self.experts = RoutedExperts(SHAPE, ranks, route)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        kind = self.draw.choice(("distinct", "distinct", "zipf", "one-hot"))
        seed = self.draw.randrange(1 << 30) + dist.get_rank()
        ids = routing(kind, len(rows), SHAPE.top_k, SHAPE.experts, seed).to(x.device)
        weights = self.router(rows).softmax(-1).gather(1, ids)
        out: Tensor = self.experts(rows, ids, weights, None)
        return out.view_as(x)


class Meshes:
    def __init__(self, device: str) -> None:
        n = dist.get_world_size()
        self.dense = init_device_mesh(device, (n // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
        self.expert = init_device_mesh(device, (2, n // 2), mesh_dim_names=("copies", "experts"))


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Spread all but the experts, whose tokens are those of this rank's part of the text."""
    rows: Any = Shard(1)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(rows, None), desired_input_layouts=(Replicate(), None), use_local_output=False
                ),
                **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
                "attention.output": RowwiseParallel(output_layouts=rows),
                "ffn_norm": SequenceParallel(use_local_output=True),
                "ffn.router": SequenceParallel(sequence_dim=0, use_local_output=True),
            },
        )


def made(seed: int, meshes: Meshes, route: Route, dtype: torch.dtype) -> Any:
    """The model, by torch's own means but for the route of tokens."""
    torch.manual_seed(seed)
    ranks, draw = meshes.expert["experts"].size(), random.Random(seed)
    model: Any = Llama(SHAPE, lambda _: RoutedFeedForward(ranks, route, draw)).to(dtype)
    for layer in model.layers:  # other experts on each rank, whatever the device
        for weight in layer.ffn.experts.parameters():
            weight.data.mul_(1 + meshes.expert["experts"].get_local_rank())
    model.to(meshes.dense.device_type)
    tensor_parallel(model, meshes.dense["tensor"])
    data = meshes.dense["data"]
    for layer in model.layers:
        experts = fully_shard(layer.ffn.experts, mesh=meshes.expert["copies"])
        experts.set_gradient_divide_factor(data.size())  # the tokens of all ranks came to them
        experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return model


Begun: TypeAlias = tuple[Sequence[Any], Tensor, Tensor]
"""Works, what they write, and what it has to be."""


class Calls:
    """Collectives of one group, begun and ended where `here` is called; draws are equal on all ranks.

    Values are small integers, so that sums are exact in any order.
    """

    def __init__(self, group: Any, seed: int, device: str) -> None:
        self.group, self.device, self.draw = group, device, random.Random(seed)
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.under_way: list[tuple[str, Begun]] = []

    def here(self, *_: object) -> None:
        """Begin one call, or end some, or neither."""
        if self.draw.random() < 0.5:
            self.begin()
        while self.under_way and self.draw.random() < 0.4:
            self.end(self.draw.randrange(len(self.under_way)))

    def given(self, rank: int, size: int, salt: int) -> Tensor:
        return ((torch.arange(size) * (rank + 1) + salt) % 17).float()

    def begin(self) -> None:
        operation, rank, n = self.draw.choice((*OPERATIONS[:5], "ring")), self.rank, self.n
        size, salt = n * self.draw.choice((16, 1000, 20_000)), self.draw.randrange(17)
        given = size // n if operation == "all_gather" else size
        everyone = torch.stack([self.given(peer, given, salt) for peer in range(n)])
        own, root = everyone[rank].to(self.device, copy=True), salt % n
        out = own.new_empty(size // n if operation == "reduce_scatter" else size)
        wanted: dict[str, Callable[[], Tensor]] = {
            "all_reduce": lambda: everyone.sum(0),
            "broadcast": lambda: everyone[root],
            "all_gather": everyone.flatten,
            "reduce_scatter": lambda: everyone.sum(0).chunk(n)[rank],
            "all_to_all": lambda: everyone.view(n, n, -1)[:, rank].flatten(),
            "ring": lambda: everyone[(rank - 1) % n],
        }
        if operation == "ring":
            sent = dist.isend(own, (rank + 1) % n, group=self.group)
            works = [sent, dist.irecv(out, (rank - 1) % n, group=self.group)]
        else:
            works = [started(operation, out, own, self.group, True, root)]
        self.under_way.append((f"{operation} of {size}", (works, out, wanted[operation]())))

    def end(self, which: int) -> None:
        name, (works, found, wanted) = self.under_way.pop(which)
        for work in works:
            work.wait()
        wrong = (found.cpu() != wanted).nonzero().flatten().tolist()
        assert wrong == [], f"{name}: {len(wrong)} elements from {wrong[0]} to {wrong[-1]}"

    def end_all(self) -> None:
        while self.under_way:
            self.end(0)


def trained(
    model: Any, seed: int, steps: int, calls: Calls | None, mesh: DeviceMesh, check: Callable[[], object]
) -> list[Tensor]:
    """Losses, gradients of each step, and parameters in the end: this rank's.

    Draws are those of the seed, whatever runs the model: microbatches, lengths, evaluations, and when weights are
    freed; `calls` and `check` draw for themselves.
    """
    draw, device = random.Random(seed), mesh.device_type
    numbers = torch.Generator().manual_seed(1000 * seed + mesh["data"].get_local_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[Tensor] = []
    here: Callable[..., None] = (lambda *_: None) if calls is None else calls.here
    for layer in model.layers:
        layer.register_forward_hook(here)
        layer.attention_norm.register_full_backward_hook(here)
    for _ in range(steps):
        for layer in model.layers:
            layer.set_reshard_after_forward(draw.random() < 0.5)
        microbatches = draw.randint(1, 2)
        for number in range(microbatches):
            model.set_requires_gradient_sync(number == microbatches - 1)
            length = draw.choice(LENGTHS)
            text = torch.randint(SHAPE.vocabulary, (2, length + 1), generator=numbers).to(device)
            given = text[:, :-1], text[:, 1:], rotary_table(length, SHAPE.head_size, torch.device(device))
            if draw.random() < 0.2:
                with torch.no_grad():
                    found.append(model(*given))
            here()
            loss = model(*given)
            here()
            loss.backward()
            here()
            found.append(loss.detach())
        found.append(_own([one.grad for one in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
        check()
    if calls is not None:
        calls.end_all()
    return [one.double().cpu() for one in (*found, _own([one.detach() for one in model.parameters()]))]


def _own(tensors: list[Any]) -> Tensor:
    return torch.cat([one.to_local().flatten() for one in tensors])


def by_counterpoint(dispatcher: Dispatcher, parts: int) -> Route:
    def route(x: Tensor, ids: Tensor, weights: Tensor, experts: Any, shared: nn.Module | None) -> Tensor:
        return overlapped_moe(x, ids, weights, experts, dispatcher, parts=parts, shared=shared)

    return route


def stressed(session: Session, seed: int, steps: int) -> Seen:
    """Train by torch in float64 and float32, then by counterpoint, with calls of the backend in between.

    Stock runs on CPUs: ranks that share a GPU take turns on it, which NCCL waits for.
    """
    draw, device, on_cpus = random.Random(seed), session.device.type, Meshes("cpu")
    meshes = on_cpus if device == "cpu" else Meshes(device)

    def stock(dtype: torch.dtype) -> list[Tensor]:
        model = made(seed, on_cpus, partial(exchanged, group=on_cpus.expert["experts"].get_group()), dtype)
        return trained(model, seed, steps, None, on_cpus.dense, lambda: None)

    exact, torchs = stock(torch.float64), stock(torch.float32)
    parts = draw.randint(1, 3)
    dispatcher = Dispatcher(
        meshes.expert["experts"].get_group(),
        experts=SHAPE.experts,
        top_k=SHAPE.top_k,
        max_tokens=2 * max(LENGTHS) // TENSOR,
        hidden=SHAPE.hidden,
        options=ExpertOptions(
            mechanism=draw.choice(("gather", "slabs")), equal_tokens=draw.random() < 0.5, communicator=PATIENT
        ),
    )
    model = made(seed, meshes, by_counterpoint(dispatcher, parts), torch.float32)
    options = BackendOptions(crossover_bytes=dict.fromkeys(EVERYTHING, 1), communicator=PATIENT)
    everyone = dist.new_group(backend="counterpoint", pg_options=options)
    matmuls = TensorOptions(mechanism=draw.choice(("cuts", "cuts", "serial", "auto")), communicator=PATIENT)
    options_of_model = OverlapOptions(tensor_parallel=matmuls, prefetch=draw.choice((None, 1, 2)), communicator=PATIENT)
    with cut_anywhere(seed + session.rank), overlap(model, options=options_of_model) as handle:
        calls = Calls(everyone, seed, device)
        ours = trained(model, seed, steps, calls, meshes.dense, handle.check)
        said = handle.report()
        rows = [dispatcher.report().calls, said.calls, report(everyone).calls]
    dispatcher.close()
    session.synchronize()
    dist.destroy_process_group(everyone)
    return Seen(
        error=largest(ours, exact),
        stock=largest(torchs, exact),
        paths=[{str(row.path) for row in each} for each in rows],
        copied=[one.torch_why for one in said.of_kind("fsdp2") if one.torch_why]
        + [n for n in said.notes if "copies" in n],
    )


def largest(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((one - wanted).abs().max() / wanted.abs().max()) for one, wanted in zip(found, exact, strict=True))
