"""What fsdp_step.py compares, on one model: FSDP2 with torch's collectives, with ours and with none; and no sharding.

Variants differ in the hooks and prefetch lists of the same modules, so all of them compute on the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from counterpoint.parallel.fsdp.hooks import GatherHook, prefetch_targets
from counterpoint.parallel.fsdp.modules import present_hooks, sharded_modules
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import Overlap, overlap

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from llama import Llama, Shape, rotary_table

__all__ = ["SHAPES", "Sharded", "Variant", "batch", "unsharded"]

SHAPES = {  # how many layers is an option
    "1b": Shape(layers=16, hidden=2048, ffn=8192),
    "3b": Shape(layers=28, hidden=3072, ffn=8192, heads=24),
    "8b": Shape(),
    "70b": Shape(hidden=8192, ffn=28672, heads=64, kv_heads=8),
    "tiny": Shape(hidden=64, ffn=128, heads=8, kv_heads=8, vocabulary=512),  # for up to 8 ranks
}
REPLICATE = "replicate"  # the axis of a mesh
Hooks = Sequence[tuple[Any, Any]]
"""Gather and scatter of every module, in the order of `sharded_modules`."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run the model: its hooks, and how many modules to gather ahead (None: as FSDP2 does by itself).

    `replicating` is the process group of ranks that have the same shards (HSDP); None: torch's own.
    """

    name: str
    hooks: Hooks
    prefetch: int | None = None
    replicating: Any = None


@dataclass
class NoGather:
    """Gathers nothing: copies in and out stay. The other ranks' shards are noise that never changes."""

    buffers: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = int(size[0]), dtype
        if key not in self.buffers:
            self.buffers[key] = torch.empty(*size, dtype=dtype, device=device).normal_(std=0.02)
        return self.buffers[key]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Nothing."""


class NoScatter:
    """Scatters nothing: gradients are whatever is there."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Nothing."""


class Sharded:
    """The model under FSDP2, which can be switched from variant to variant between steps.

    With several `replicas` it is HSDP: sharded within each, and gradients are added up between them.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        *,
        reduce_dtype: torch.dtype,
        compiled: bool,
        head_apart: bool,
        replicas: int = 1,
    ) -> None:
        with torch.device("meta"):
            self.model: Any = Llama(shape)
        self.device, self.replicas = device, replicas
        mesh = self.mesh() if replicas > 1 else init_device_mesh(device.type, (dist.get_world_size(),))
        self.replicating: Any = mesh.get_group(REPLICATE) if replicas > 1 else None
        self.backend_group: Any = None  # the same ranks' group of backend `counterpoint`
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        if compiled:
            _compile(self.model)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        if head_apart:
            fully_shard(self.model.embedding, mesh=mesh, mp_policy=precision)
            head = [self.model.norm, self.model.head]
            fully_shard(head, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)
        self.model.to_empty(device=device)
        shards: Iterable[Any] = self.model.parameters()
        _filled(parameter.to_local() for parameter in shards)
        self.modules = sharded_modules(self.model)
        self.stock = self.hooks()

    def mesh(self, **options: Any) -> DeviceMesh:
        """The mesh of HSDP."""
        shape = self.replicas, dist.get_world_size() // self.replicas
        return init_device_mesh(self.device.type, shape, mesh_dim_names=(REPLICATE, "shard"), **options)

    def hooks(self) -> Hooks:
        """Those in use now."""
        return [present_hooks(module) for module in self.modules]

    def use(self, variant: Variant) -> None:
        """Sets its hooks and lists, between two steps."""
        for module, (gather, scatter) in zip(self.modules, variant.hooks, strict=True):
            before, _ = present_hooks(module)
            if isinstance(before, GatherHook) and before is not gather:
                module.module.reshard()
                before.restore()
            module.module.set_custom_all_gather(gather)
            module.module.set_custom_reduce_scatter(scatter)
            if self.replicas > 1:
                mesh_info: Any = module.parameters.mesh_info
                mesh_info.replicate_process_group = variant.replicating or self.replicating
        order = [module.module for module in self.modules]
        parts = {module: order if module is self.model else [] for module in order}
        for one in prefetch_targets(order, variant.prefetch or 0, parts=parts):
            order[one.module].set_modules_to_forward_prefetch([order[number] for number in one.forward])
            order[one.module].set_modules_to_backward_prefetch([order[number] for number in one.backward])

    def stock_variants(self) -> Iterator[Variant]:
        """torch's collectives, as they come and in what may be their best configurations."""
        yield Variant(name="stock", hooks=self.stock)
        yield Variant(name="stock, prefetch 2", hooks=self.stock, prefetch=2)
        if self.device.type == "cuda" and hasattr(self.model, "set_allocate_memory_from_process_group_for_comm"):
            self.use(Variant(name="stock", hooks=self.stock))
            for module in self.modules:
                module.module.set_allocate_memory_from_process_group_for_comm(True)
            yield Variant(name="stock, registered buffers", hooks=self.hooks())

    def overlapped(self, options: OverlapOptions) -> tuple[Overlap, list[Variant]]:
        """Ours; the handle has to be kept."""
        self.use(Variant(name="stock", hooks=self.stock))
        handle = overlap(self.model, options=options)
        hooks = self.hooks()
        variants = [
            Variant(name="overlap", hooks=hooks),
            Variant(name="overlap, prefetch 2", hooks=hooks, prefetch=2),
        ]
        if self.replicas > 1:
            self.backend_group = self.mesh(backend_override={REPLICATE: "counterpoint"}).get_group(REPLICATE)
            variants.append(Variant(name="overlap, backend", hooks=hooks, replicating=self.backend_group))
        return handle, variants

    def bound(self) -> Variant:
        """No communication, all copies; of HSDP, each rank adds up with itself."""
        gather, scatter = NoGather(), NoScatter()
        alone = dist.new_subgroups(1)[0] if self.replicas > 1 else None
        return Variant(name="bound", hooks=[(gather, scatter)] * len(self.modules), replicating=alone)


def unsharded(shape: Shape, device: torch.device, *, compiled: bool) -> Any:
    """The same model, whole on every rank, in bfloat16: neither communication nor copies."""
    with torch.device(device):
        model: Any = Llama(shape).to(torch.bfloat16)
    if compiled:
        _compile(model)
    _filled(model.parameters())
    return model


def _compile(model: Any) -> None:
    """Every layer as one graph, without FSDP2's hooks in it."""
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, fullgraph=True)


@torch.no_grad()
def _filled(weights: Iterable[Any]) -> None:
    for weight in weights:
        weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(std=0.02)


def batch(shape: Shape, tokens: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence of random tokens, its labels, and the angles."""
    state = torch.Generator().manual_seed(seed)
    text = torch.randint(shape.vocabulary, (1, tokens + 1), generator=state).to(device)
    return text[:, :-1], text[:, 1:], rotary_table(tokens, shape.head_dim, device).to(torch.bfloat16)
