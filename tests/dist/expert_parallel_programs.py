"""What ranks run to test layers of experts: a small model beside stock and beside all of it on one rank."""

import argparse
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from counterpoint import overlap
from counterpoint.measurement.session import Session
from counterpoint.parallel.options import ExpertOptions, OverlapOptions
from counterpoint.parallel.report import Report
from tests.support.ranks import error_of
from tests.support.torch_training import language_trained, largest_difference, pretrained, whole

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import train_moe
from llama import Llama, rotary_table
from moe import MoeShape, moe

LENGTH = 16
STEPS = 3
VOCABULARY = 128
SMALL = 1e-6  # the largest element of a tensor, below which its error is not relative to that


BY_GATHER = ExpertOptions(mechanism="gather")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How `transformers` spreads a model of experts."""

    kind: str = "Qwen3Moe"  # of the model
    sizes: tuple[tuple[str, Any], ...] = (("ep_size", 2), ("fsdp_size", 2))  # keywords of its `DistributedConfig`
    options: ExpertOptions | None = BY_GATHER  # of layers of experts
    checkpoint: bool = False  # activations are recomputed
    compiled: bool = False  # each layer is
    lengths: tuple[int, ...] = (LENGTH,) * STEPS  # of the text in each step; the same on all ranks


SPREADS = {
    "Qwen3-MoE": Spread(),
    "Mixtral": Spread(kind="Mixtral", options=None),
    "checkpointed": Spread(checkpoint=True),
    "compiled": Spread(compiled=True),
    "whole": Spread(options=ExpertOptions(mechanism="gather", parts=1)),
    "by torch": Spread(options=ExpertOptions(mechanism="torch", parts=3)),
    "one batch": Spread(sizes=(("ep_size", 2), ("tp_size", 2))),
    "one batch, all_to_all": Spread(sizes=(("ep_size", 2), ("tp_size", 2), ("ep_implementation", "all_to_all"))),
    "other lengths": Spread(options=ExpertOptions(mechanism="gather", max_tokens=64), lengths=(7, 32, 9)),
}
SPREADS_OF_FOUR = {
    "two meshes": Spread(sizes=(("ep_size", 2), ("fsdp_size", 4))),
    "tensor parallel": Spread(sizes=(("ep_size", 4), ("fsdp_size", 2), ("tp_size", 2))),
}


def transformers_model(spread: Spread, folder: str) -> Any:
    """A small model of `transformers`, spread by its own plan."""
    own: dict[str, Any] = {"num_local_experts": 4}
    if spread.kind == "Qwen3Moe":
        own = {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, **own}
    sizes |= {"vocab_size": VOCABULARY, "num_experts_per_tok": 2}
    made = pretrained(  # drawn: otherwise all tokens may go to the same experts
        spread.kind, folder, dict(spread.sizes), "gate.weight", sizes, dtype=torch.float64,
        experts_implementation="eager",
    )  # fmt: skip
    if spread.checkpoint:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made


def followed(
    spread: Spread, folder: str, *, options: ExpertOptions | None = None, tuned: Any = None
) -> tuple[dict[str, Tensor], Report]:
    """What a model of `transformers` found in training under `overlap`, and the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        model = transformers_model(spread, folder)
        with overlap(model, options=OverlapOptions(expert_parallel=options), tuned=tuned) as handle:
            if spread.compiled:
                for layer in model.model.layers:
                    layer.compile(backend="aot_eager")
            return trained(model, spread), handle.report()


def stock(spread: Spread, folder: str) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        return trained(transformers_model(spread, folder), spread)


def with_transformers(_: Session, name: str, folder: str) -> tuple[float, Report]:
    """How far losses, gradients and an evaluation are from those without `overlap`, and the report."""
    spread = (SPREADS | SPREADS_OF_FOUR)[name]
    expected = stock(spread, folder)
    found, report = followed(spread, folder, options=spread.options)
    return largest_difference(found, expected, SMALL), report


def refusals(_: Session, folder: str) -> tuple[list[str], list[str], bool, str]:
    """What a second `overlap` says, a longer text, and strange experts; and whether `restore` took everything back."""
    spread, said = Spread(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        model = transformers_model(spread, folder)
        stock = [vars(module).get("forward") for module in model.modules()]
        handle = overlap(model)
        said.append(error_of(lambda: overlap(model)))
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
        said.append(error_of(lambda: model(input_ids=torch.zeros(1, 5, dtype=torch.long))))
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))
        autocast = str(handle.report().of_kind("expert")[0])
        handle.restore()
        is_restored = stock == [vars(module).get("forward") for module in model.modules()]
        left = []
        for sizes, change in LEFT:
            model = transformers_model(Spread(sizes=sizes), folder)
            for module in model.modules():
                if hasattr(module, "down_proj"):
                    change(module)
            with overlap(model) as handle:
                left += [row.torch_why for row in handle.report().of_kind("expert")[:1]]
    return said, left, is_restored, autocast


LEFT: list[tuple[tuple[tuple[str, Any], ...], Any]] = [
    ((("ep_size", 2), ("tp_size", 2), ("ep_implementation", "all_reduce")), lambda _: None),
    (Spread().sizes, lambda module: setattr(module, "has_bias", True)),
    (Spread().sizes, lambda module: setattr(module, "has_gate", False)),
    (Spread().sizes, lambda module: setattr(module.config, "_experts_implementation", "sonicmoe")),
]


def trained(model: Any, spread: Spread) -> dict[str, Tensor]:
    shares_text = dict(spread.sizes).get("tp_size", 1)
    return language_trained(model, 1 + dist.get_rank() // shares_text, spread.lengths, VOCABULARY)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model of examples/train_moe.py is spread and run."""

    ep: int = 2  # ranks among which experts are divided; FSDP2 shards them over the others
    ours: bool = True  # tokens travel by a dispatcher
    parts: int = 2  # of the tokens
    mechanism: str = "gather"  # of the dispatcher
    overlapped: bool = True  # FSDP2 communicates by ours
    graphed: bool = False  # without FSDP2, as CUDA graphs want it
    dtype: torch.dtype = torch.float64  # of the model. FSDP2 divides float64 twice where it has one rank


LAYOUTS = {
    "stock": Layout(ours=False, overlapped=False),
    "overlap": Layout(),
    "torch's FSDP2": Layout(overlapped=False),
    "by torch": Layout(mechanism="torch", parts=3),
    "slabs": Layout(mechanism="slabs"),
    "graph": Layout(ep=4, graphed=True, overlapped=False),
    "experts on all": Layout(ep=4, parts=1, dtype=torch.float32),
}
SHAPE = MoeShape(
    layers=2, hidden=32, ffn=24, heads=4, kv_heads=2, head_size=8, vocabulary=64, experts=8, top_k=2, shared_ffn=24
)


def beside_one_process(session: Session, name: str) -> tuple[float, Report | None]:
    """How far losses and gradients are from those of a model that has all experts and sees all ranks' texts."""
    layout = LAYOUTS[name]
    args = argparse.Namespace(
        ep=layout.ep, overlap=layout.ours, tokens=LENGTH, parts=layout.parts, mechanism=layout.mechanism
    )
    torch.set_default_dtype(layout.dtype)
    make: Any = train_moe.graphed_model if layout.graphed else train_moe.expert_parallel_model
    try:
        with patch("torch.cuda.make_graphed_callables", lambda model, sample: model):  # there is no GPU
            model = make(args, SHAPE, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    reference = moe(SHAPE, 1, _every_expert).double()
    copies = dict(reference.named_parameters())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            copies[key].copy_(_of_all(key, parameter, layout.ep))
    expected = _steps(reference, list(range(session.world_size)), 1)
    if not layout.overlapped:
        return largest_difference(_steps(model, [session.rank], layout.ep), expected, SMALL), None
    with overlap(model) as handle:
        found = _steps(model, [session.rank], layout.ep)
        report = handle.report()
    return largest_difference(found, expected, SMALL), report


def _steps(model: Llama, ranks: list[int], ep: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    table = rotary_table(LENGTH, SHAPE.head_dim, torch.device("cpu"))
    found = {}
    for step in range(STEPS):
        losses = []
        for rank in ranks:
            numbers = torch.Generator().manual_seed(100 * step + rank)
            text = torch.randint(SHAPE.vocabulary, (1, LENGTH + 1), generator=numbers)
            losses.append(model(text[:, :-1], text[:, 1:], table))
        loss = torch.stack(losses).mean()
        loss.backward()
        mean = loss.detach().clone()
        if len(ranks) == 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found[f"{step} loss"] = mean
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[f"{step} {name}"] = _of_all(name, parameter.grad, ep)
        optimizer.step()
        optimizer.zero_grad()
    return found


def _of_all(name: str, x: Tensor, ep: int) -> Tensor:
    part = whole(x)
    if ".experts." not in name or ep == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(ep)]
    dist.all_gather(parts, part, group=_group_of_experts(ep))
    return torch.cat(parts)


@cache  # threads of gloo stay as long as their group
def _group_of_experts(ep: int) -> dist.ProcessGroup:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("copies", "experts"))
    return mesh["experts"].get_group()


def _every_expert(x: Tensor, ids: Tensor, weights: Tensor, experts: Any, shared: nn.Module | None) -> Tensor:
    gate, up = torch.einsum("th,efh->tef", x, experts.gate_up).chunk(2, dim=-1)
    every = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, experts.down)
    chosen = every.gather(1, ids[..., None].expand(-1, -1, x.shape[1]))
    assert shared is not None
    out: Tensor = (chosen * weights[..., None]).sum(1).to(x.dtype) + shared(x)
    return out
