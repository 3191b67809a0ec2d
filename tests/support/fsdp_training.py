"""What ranks run to test FSDP2 with zero-SM collectives: a small Llama trained by torch's collectives and by ours."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.measurement.session import Session
from counterpoint.parallel.fsdp.modules import sharded_modules
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import Overlap, overlap

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from llama import Llama, Shape, rotary_table

SHAPE = Shape(layers=3, hidden=32, ffn=72, heads=4, kv_heads=2, vocabulary=65)  # 65 rows: shards of unequal size
TOKENS = 16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    # of mixed precision: parameters, reduction
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    mesh: tuple[int, ...] = (2,)  # sizes of its axes; two: replicated and sharded
    reshard: bool | int | None = None  # after forward
    microbatches: int = 1  # gradients are synchronised in the last of a step only
    checkpointed: bool = False  # activations are computed again
    compiled: Callable[[Any], Any] | None = None  # compiles a layer; None: eager
    meta: bool = False  # parameters are made on the meta device and filled after overlap()
    grouped: bool = False  # the last norm and the head are given to `fully_shard` together
    dtype: torch.dtype = torch.float32
    options: OverlapOptions | None = None
    prepare: Callable[[Any], object] | None = None  # called with the sharded model before `overlap`
    # called with the model that keeps torch's collectives, in place of `prepare`
    stock: Callable[[Any], object] | None = None
    steps: int = 3
    device: str = "cpu"  # of the model
    direct: tuple[bool, bool] = (True, True)  # hooks whose modules FSDP2 copies nothing for: gathers, and scatters


def separate_groups(model: Any) -> None:
    """Scatters in a process group of their own, where torch has that (2.13)."""
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group()


def compiled_with_hooks(layer: Any) -> Any:
    """In place: FSDP2's hooks are in the compiled call, as breaks of the graph."""
    layer.compile(backend="eager")
    return layer


def compiled_as_a_whole(layer: Any) -> Any:
    return torch.compile(layer, backend="aot_eager", fullgraph=True)


CASES = {
    "float32": Case(),
    "bfloat16 parameters": Case(policy=BF16),
    "float32 reduction": Case(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "float16 reduction": Case(
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16), direct=(True, False)
    ),
    "float16 sums": Case(
        policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16), direct=(True, False)
    ),
    "bfloat16 in float64": Case(
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64), direct=(True, False)
    ),
    "copied": Case(policy=BF16, options=OverlapOptions(direct=False), direct=(False, False)),
    "copied, float32 reduction": Case(
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        options=OverlapOptions(direct=False, prefetch=2),
        direct=(False, False),
    ),
    "bfloat16 model": Case(dtype=torch.bfloat16),
    "kept after forward": Case(reshard=False),
    "accumulated": Case(policy=BF16, microbatches=3),
    "checkpointed": Case(policy=BF16, checkpointed=True),
    "compiled with its hooks": Case(policy=BF16, compiled=compiled_with_hooks),
    "compiled as a whole": Case(policy=BF16, compiled=compiled_as_a_whole),
    "compiled, checkpointed": Case(policy=BF16, compiled=compiled_as_a_whole, checkpointed=True),
    "meta": Case(policy=BF16, meta=True),
    "modules together": Case(policy=BF16, grouped=True),
    "separate groups": Case(policy=BF16, prepare=separate_groups),
    "prefetch": Case(policy=BF16, options=OverlapOptions(prefetch=2)),
    "small chunks": Case(
        policy=BF16,
        options=OverlapOptions(communicator=CommunicatorOptions(debug=True, chunk_bytes=1024, staging_bytes=4096)),
    ),
}


def sharded(case: Case) -> Any:
    torch.manual_seed(7)
    with torch.device("meta" if case.meta else case.device):
        model = Llama(SHAPE).to(case.dtype)
    mesh = init_device_mesh(case.device, case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :])
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": case.policy}
    for change in filter(None, (case.compiled, checkpoint_wrapper if case.checkpointed else None)):
        model.layers = nn.ModuleList(map(change, model.layers))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=case.reshard, **options)
    if case.grouped:
        fully_shard([model.norm, model.head], reshard_after_forward=case.reshard, **options)
    fully_shard(model, **options)
    return model


def filled(model: Any, case: Case) -> None:
    """Memory and weights for a model on the meta device."""
    model.to_empty(device=case.device)
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.05)


def batch(session: Session, step: int) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.Generator().manual_seed(1000 * step + session.rank)
    text = torch.randint(SHAPE.vocabulary, (2, TOKENS + 1), generator=state)
    text = text.to(session.device)
    return text[:, :-1], text[:, 1:], rotary_table(TOKENS, SHAPE.head_dim, session.device)


def trained(session: Session, model: Any, case: Case) -> dict[str, Tensor]:
    """Everything that training gave: losses and gradients of every step, norms, and the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: dict[str, Tensor] = {}
    for step in range(case.steps):
        for micro in range(case.microbatches):
            model.set_requires_gradient_sync(micro == case.microbatches - 1)
            loss = model(*batch(session, step * case.microbatches + micro))
            loss.backward()
            seen[f"loss {step}.{micro}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            seen[f"gradient {step} {name}"] = parameter.grad.to_local().clone()
        seen[f"norm {step}"] = _whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return seen | {f"parameter {name}": one.to_local().clone() for name, one in model.named_parameters()}


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor()
    return whole


@contextmanager
def overlapped(case: Case) -> Iterator[tuple[Any, Overlap]]:
    model = sharded(case)
    if case.prepare is not None:
        case.prepare(model)
    with overlap(model, options=case.options) as handle:
        if case.meta:
            filled(model, case)
        yield model, handle


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def stock_trained(session: Session, case: Case) -> dict[str, Tensor]:
    model = sharded(case)
    for prepare in filter(None, [case.stock or case.prepare]):
        prepare(model)
    if case.meta:
        filled(model, case)
    return trained(session, model, case)


def beside_stock(session: Session, case: Case) -> tuple[list[str], list[str]]:
    """What differs from stock FSDP2 after training; which modules did not gather and scatter in place by our hooks."""
    expected = stock_trained(session, case)
    with overlapped(case) as (model, handle):
        got = trained(session, model, case)
        modules = handle.report().modules
    wrong = [
        f"{module.name}: {traffic}"
        for module in modules
        for traffic, direct in zip(map(module.moved, ("all_gather", "reduce_scatter")), case.direct, strict=True)
        if not traffic.calls or traffic.how != ("direct" if direct else "in place")
    ]
    return differences(expected, got), wrong


def rounding(session: Session, case: Case) -> list[tuple[str, float, float]]:
    """Of every gradient of one step: the errors of ours and of stock's against float64; the order of sums differs."""
    exact, stock = (
        trained(session, sharded(replace(case, dtype=dtype)), case) for dtype in (torch.float64, case.dtype)
    )
    with overlapped(case) as (model, _):
        ours = trained(session, model, case)
    errors = [[(seen[name] - exact[name]).abs().max().item() for name in exact] for seen in (ours, stock)]
    return [(name, *both) for name, *both in zip(exact, *errors, strict=True) if name.startswith("gradient")]


def curves(session: Session, steps: int) -> list[list[float]]:
    """Losses of `steps` steps on one batch, of stock twice and of ours."""
    case = Case(policy=BF16)
    seen = [_losses(session, sharded(case), steps) for _ in range(2)]
    with overlapped(case) as (model, _):
        return [*seen, _losses(session, model, steps)]


def _losses(session: Session, model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(*batch(session, 0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gathers_and_scatters(session: Session, case: Case) -> list[tuple[int, int, str]]:
    """Of each module after training: gathers, scatters, and how the latter combine."""
    with overlapped(case) as (model, handle):
        trained(session, model, case)
        both = [module.traffic for module in handle.report().modules if module.traffic]
        return [(gather.calls, scatter.calls, scatter.op) for gather, scatter in both]


def sizes(session: Session) -> list[tuple[int, int]]:
    case = Case(policy=BF16)
    with overlapped(case) as (model, handle):
        model(*batch(session, 0))
        modules = handle.report().modules
        return [(module.gather_bytes, module.moved("all_gather").num_bytes) for module in modules if module.traffic]


def premultiplied(session: Session) -> list[str]:
    """What differs if gradients are divided by 4: by PREMUL_SUM, which gloo has not, and by stock after its sum."""

    def prepare(model: Any) -> None:
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(4.0)

    def stock(model: Any) -> None:
        prepare(model)
        for module in fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(True)

    return beside_stock(session, Case(prepare=prepare, stock=stock))[0]


def fsdp_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def unsharded_ahead(session: Session) -> list[str]:
    """What differs if every layer is gathered by hand, asynchronously."""

    def by_hand(model: Any) -> None:
        for module in fsdp_modules(model):
            module._set_unshard_async_op(True)
        model.register_forward_pre_hook(lambda *_: [layer.unshard(async_op=True) for layer in model.layers] and None)

    return beside_stock(session, Case(prepare=by_hand))[0]


def saved_and_loaded(session: Session, folder: str) -> list[str]:
    """What differs between a stock model and one that loaded, into stock FSDP2, what an overlapped one has saved."""
    case = Case(policy=BF16)
    expected = trained(session, sharded(case), case)
    with overlapped(case) as (model, _):
        trained(session, model, case)
        save(get_model_state_dict(model), checkpoint_id=folder)
    loaded = sharded(case)
    state = get_model_state_dict(loaded)
    load(state, checkpoint_id=folder)
    set_model_state_dict(loaded, state)
    got = {f"parameter {name}": one.to_local() for name, one in loaded.named_parameters()}
    return differences({name: expected[name] for name in got}, got)


def limited(session: Session) -> tuple[list[str], list[str]]:
    """What differs from stock if the largest modules keep torch's collectives; the lines of the report."""
    case = Case()
    expected = trained(session, sharded(case), case)
    largest = max(module.gather_bytes for module in sharded_modules(sharded(case)))
    with overlapped(replace(case, options=OverlapOptions(limit_bytes=largest - 1, prefetch=1))) as (model, handle):
        got = trained(session, model, case)
        return differences(expected, got), str(handle).splitlines()


def evaluated(session: Session) -> list[list[float]]:
    """Losses without gradients, in each of torch's modes, before and after a step: of stock, and of ours."""
    case = Case(policy=BF16, steps=1)

    def losses(model: Any) -> list[float]:
        seen = []
        for _ in range(2):
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    seen.append(float(model(*batch(session, 5))))
            trained(session, model, case)
        return seen

    with overlapped(case) as (model, _):
        return [losses(sharded(case)), losses(model)]


def beside_tensor_parallel(session: Session) -> tuple[float, list[tuple[int, ...]]]:
    """How far gradients are from stock if layers are cut over one axis of the mesh, and the ranks of our groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def cut() -> Any:
        torch.manual_seed(7)
        model: Any = Llama(SHAPE)
        for layer in model.layers:
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer.ffn, mesh["tensor"], plan)
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        return model

    def gradients(model: Any) -> dict[str, Tensor]:
        for step in range(2):
            model(*batch(session, step)).backward()
        return {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}

    expected, model = gradients(cut()), cut()
    with overlap(model) as handle:
        found = gradients(model)
        furthest = max(float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items())
        return furthest, [module.ranks for module in handle.report().of_kind("fsdp2")]
