"""`overlap` of a tensor-parallel model, beside torch's own run of it."""

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from counterpoint import overlap, tensor_parallel
from counterpoint.measurement.session import Session
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import Overlap
from counterpoint.parallel.report import CallRow, Report
from counterpoint.parallel.tensor import linear
from counterpoint.parallel.tensor.group import tensor_group
from tests.support.ranks import Ranks, error_of, finding
from tests.support.torch_training import language_trained, largest_difference, pretrained, whole

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from llama import Llama, Shape, rotary_table

SHAPE = Shape(layers=2, hidden=64, ffn=96, heads=8, kv_heads=4, vocabulary=128)
LENGTH = 16
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    sequence: bool = True  # sequence parallel
    bias: bool = False
    keywords: bool = False  # the attention gets its input by keyword
    local_inputs: bool = False  # gathered inputs are no DTensors
    dtensors: bool = False  # the feed-forward hands DTensors on
    checkpoint: bool = False
    compiled: bool = False
    loss_parallel: bool = False
    sharded: bool = False  # by FSDP2 as well, on the mesh's other axis
    autocast: bool = False
    styles: bool = False  # counterpoint's own, in the plan
    own_gathers: bool = False  # each layer gathers for itself


CASES = {
    "sequence parallel": Case(),
    "bias": Case(bias=True),
    "keywords": Case(keywords=True),
    "local inputs": Case(local_inputs=True),
    "DTensors": Case(dtensors=True, bias=True),
    "checkpointed": Case(checkpoint=True),
    "compiled": Case(compiled=True, bias=True),
    "compiled, replicated": Case(compiled=True, sequence=False),
    "loss parallel": Case(loss_parallel=True),
    "replicated": Case(sequence=False, bias=True),
    "replicated, checkpointed": Case(sequence=False, checkpoint=True),
    "autocast": Case(autocast=True, bias=True),
    "autocast, replicated": Case(autocast=True, sequence=False),
    "styles": Case(styles=True, bias=True),
    "own gathers": Case(own_gathers=True),
    "with FSDP2": Case(sharded=True, bias=True),
    "replicated, with FSDP2": Case(sharded=True, sequence=False),
}


class ByKeyword(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.inner(x=x, table=table)
        return out


def made(case: Case) -> Llama:
    """The whole model, equal on all ranks."""
    torch.manual_seed(5)
    model = Llama(SHAPE)
    layers: Any = model.layers
    for layer in layers:
        attention, ffn = layer.attention, layer.ffn
        if case.bias:
            for one in (attention.query, attention.key, attention.value, attention.output, ffn.up, ffn.down):
                one.bias = nn.Parameter(torch.randn(one.out_features) / 8)
        if case.keywords:
            layer.attention = ByKeyword(attention)
    return model.to(torch.float32 if case.autocast else torch.float64)


def parallel(case: Case, mesh: DeviceMesh) -> Llama:
    """The model over the ranks of a mesh, by torch's own means."""
    model = made(case)
    mesh = mesh["tensor"] if case.sharded else mesh
    column: Any = tensor_parallel.Colwise if case.styles else ColwiseParallel
    row: Any = tensor_parallel.Rowwise if case.styles else RowwiseParallel
    whole, rows = Replicate(), Shard(1)
    plan: dict[str, ParallelStyle] = {"head": ColwiseParallel(output_layouts=Replicate())}
    if case.sequence:
        vocabulary = Shard(-1) if case.loss_parallel else Replicate()
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            "norm": SequenceParallel(),
            "head": column(input_layouts=rows, output_layouts=vocabulary, use_local_output=not case.loss_parallel),
        }
    parallelize_module(model, mesh, plan)
    attention = "attention.inner" if case.keywords else "attention"
    locally: dict[str, Any] = {"use_local_output": case.local_inputs}
    takes = rows if case.own_gathers else whole
    gives = rows if case.sequence else whole
    by_layer: dict[str, ParallelStyle] = {
        **{f"{attention}.{name}": column(input_layouts=takes) for name in ("query", "key", "value")},
        f"{attention}.output": row(output_layouts=gives),
        "ffn.gate": column(input_layouts=takes, use_local_output=not case.dtensors),
        "ffn.up": column(input_layouts=takes, use_local_output=not case.dtensors),
        "ffn.down": row(output_layouts=gives),
    }
    if case.sequence:
        by_layer |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        if not case.own_gathers:
            by_layer["ffn"] = PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole, **locally)
            by_layer[attention] = PrepareModuleInput(
                input_layouts=(rows, None), desired_input_layouts=(whole, None), **locally
            )
            if case.keywords:
                by_layer[attention] = PrepareModuleInput(
                    input_kwarg_layouts={"x": rows}, desired_input_kwarg_layouts={"x": whole}, **locally
                )
    for layer in model.layers:
        parallelize_module(layer, mesh, by_layer)
    return model


def mesh_of(case: Case) -> DeviceMesh:
    if case.sharded:
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(case: Case, mesh: DeviceMesh) -> Any:
    model: Any = parallel(case, mesh)
    if case.sharded:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


class _Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        return checkpoint(self.layer, *inputs, use_reentrant=False)


def trained(case: Case, model: Any, steps: int = STEPS) -> dict[str, Tensor]:
    """Losses and gradients of some steps of AdamW, with the same data on all ranks of tensor parallelism."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data_rank = dist.get_rank() * 2 // dist.get_world_size() if case.sharded else 0
    numbers = torch.Generator().manual_seed(data_rank)
    table = rotary_table(LENGTH, SHAPE.head_dim, torch.device("cpu"))
    run = model
    if case.checkpoint:
        layers, model.layers = model.layers, nn.ModuleList(_Checkpointed(layer) for layer in model.layers)
    if case.compiled:
        torch._dynamo.reset()
        warnings.filterwarnings("ignore", message=".*should not be instantiated")  # torch's compiler does so itself
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = {}
    for step in range(steps):
        text = torch.randint(SHAPE.vocabulary, (2, LENGTH + 1), generator=numbers)
        with loss_parallel() if case.loss_parallel else nullcontext(), torch.autocast("cpu", enabled=case.autocast):
            loss = run(text[:, :-1], text[:, 1:], table)
            loss.backward()
        found[f"{step} loss"] = loss.detach()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            found[f"{step} {name}"] = whole(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    if case.checkpoint:
        model.layers = layers
    return {name: whole(value) for name, value in found.items()}


def overlapped(model: nn.Module, **options: Any) -> Any:
    """The handle; calls are counted from here on."""
    return overlap(model, options=OverlapOptions(tensor_parallel=tensor_parallel.TensorOptions(**options)))


def reported(handle: Overlap | None) -> Report:
    assert handle is not None
    return handle.report()


def calls(rows: Sequence[CallRow]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.operation] += row.calls
    return dict(counts)


def beside_stock(_: Session, name: str) -> tuple[float, dict[str, int], Report]:
    """How far losses and gradients are from those of torch, how often each operation ran, and what is reported."""
    case = CASES[name]
    mesh = mesh_of(case)
    expected = trained(case, sharded(replace(case, styles=False), mesh))
    model = sharded(case, mesh)
    with overlapped(model) as handle:
        found = trained(case, model)
        report = reported(handle)
    return largest_difference(found, expected), calls(report.calls), report


def by_styles(_: Session) -> tuple[float, dict[str, int], str]:
    """How far a model of our styles is from torch's without `overlap`, its calls, and how an embedding is refused."""
    case = CASES["styles"]
    mesh = mesh_of(case)
    expected, model = trained(case, parallel(replace(case, styles=False), mesh)), parallel(case, mesh)
    group = tensor_group(mesh.get_group().group_name, tensor_parallel.TensorOptions())
    found = trained(case, model)
    said = error_of(lambda: parallelize_module(nn.Embedding(4, 4), mesh, tensor_parallel.Rowwise()))
    return largest_difference(found, expected), calls(group.report().calls), said


def copied_gradients(_: Session) -> list[str]:
    """Functions whose derivative of a weight lies otherwise than the weight, so that autograd would copy it."""
    group = mesh_of(Case()).get_group().group_name
    x, weight = torch.randn(2, 4, 6, requires_grad=True), torch.randn(8, 6, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    outs = {
        "all_gather_linear": linear.all_gather_linear(x, [weight], [bias], 1, group)[1][0],
        "linear_reduce_scatter": linear.linear_reduce_scatter(x, weight, bias, 1, group),
        "linear_all_reduce": linear.linear_all_reduce(x, weight, bias, group),
        "replicated_linear": linear.replicated_linear(x, [weight], [bias], group)[0],
    }
    found = {name: torch.autograd.grad(out.sum(), [x, weight, bias]) for name, out in outs.items()}
    return [name for name, gradients in found.items() if not all(one.is_contiguous() for one in gradients)]


def errors(_: Session, name: str, mechanism: str) -> tuple[float, float, set[str]]:
    """Errors of float32 against float64, ours and torch's, and the ways that calls went."""
    case = CASES[name]
    mesh = mesh_of(case)
    exact = trained(case, parallel(case, mesh), 1)
    torchs = largest_difference(trained(case, parallel(case, mesh).float(), 1), exact)
    model = parallel(case, mesh).float()
    with overlapped(model, mechanism=mechanism) as handle:
        ours = largest_difference(trained(case, model, 1), exact)
        return ours, torchs, {row.path for row in reported(handle).calls}


def restored(_: Session) -> list[bool]:
    """Whether `restore` leaves a model as before, in bits, state and optimizer, and it can be overlapped anew."""
    case = CASES["bias"]
    mesh = mesh_of(case)
    expected = trained(case, parallel(case, mesh))
    model = parallel(case, mesh)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = [(dict(module._forward_pre_hooks), dict(module._forward_hooks)) for module in model.modules()]
    state, parameters = list(model.state_dict()), [id(one) for one in model.parameters()]
    handle = overlap(model)
    kept = [list(model.state_dict()) == state, [id(one) for one in model.parameters()] == parameters]
    kept.append("overlapped already" in error_of(lambda: overlap(model)))
    handle.restore()
    handle.restore()
    kept += [
        {name: dict(vars(module)) for name, module in model.named_modules()} == before,
        [(dict(module._forward_pre_hooks), dict(module._forward_hooks)) for module in model.modules()] == hooks,
    ]
    with overlap(model):
        pass
    found = trained(case, model)
    return [*kept, all(torch.equal(found[name], one) for name, one in expected.items())]


class Odd(nn.Module):
    """Calls its layers twice, with other inputs for some, and without gradients; two of them have one weight."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.one, self.two, self.other = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.back = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.back(self.one(x) * self.two(x))
            if self.in_place:
                changed = y + 0.0
                seen = seen + self.back(self.one(changed) * self.two(changed.mul_(2.0)))
        first = self.back(self.one(x).sin() * self.two(x) + self.other(y))
        second = self.back(self.one(y) + self.two(y).cos() * self.other(x))
        out: Tensor = first * second + seen
        return out


def odd_model(column: ParallelStyle, row: ParallelStyle, in_place: bool) -> Odd:
    torch.manual_seed(1)
    model = Odd(in_place).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"one": column, "two": column, "other": column, "back": row})
    model.two.weight = model.one.weight
    return model


def odd_values(model: nn.Module, dtensors: bool) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, y = (torch.randn(2, 8, 16, dtype=torch.float64, generator=numbers) for _ in range(2))
    given: list[Any] = [distribute_tensor(one, mesh, [Shard(1)]).requires_grad_() for one in (x, y)]
    used = given if dtensors else [one.to_local() for one in given]
    out = model(*used)
    (out.full_tensor() if dtensors else out).square().sum().backward()
    found = {"out": whole(out.detach()), "x": whole(given[0].grad), "y": whole(given[1].grad)}
    return found | {name: whole(one.grad) for name, one in model.named_parameters()}


def odd(_: Session, dtensors: bool, in_place: bool) -> tuple[float, float, dict[str, tuple[str, ...]]]:
    rows = Shard(1)
    styles = (
        ColwiseParallel(input_layouts=rows, use_local_output=not dtensors),
        RowwiseParallel(output_layouts=rows, use_local_output=not dtensors),
    )
    expected, model = odd_values(odd_model(*styles, in_place), dtensors), odd_model(*styles, in_place)
    with overlap(model) as handle:
        found = []
        for _step in range(2):
            found.append(largest_difference(odd_values(model, dtensors), expected))
            model.zero_grad()
        shared = {row.name: row.shared_with for row in reported(handle).modules}
    return found[0], found[1], shared


def copied(_: Session) -> tuple[bool, bool]:
    """Whether a deep copy of an overlapped model has its own weights, and leaves those of the first alone."""
    case = Case()
    model = parallel(case, mesh_of(case))
    numbers = torch.randint(SHAPE.vocabulary, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    inputs = (numbers[:, :-1], numbers[:, 1:], rotary_table(LENGTH, SHAPE.head_dim, torch.device("cpu")))
    with torch.no_grad(), overlap(model):
        before = model(*inputs)
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(1.5)
        changed, again = other(*inputs), model(*inputs)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        return torch.equal(before, again), torch.equal(changed, model(*inputs))


class _Stranger(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(module.named_parameters()):
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

        def before(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Replicate()])

        def after(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.full_tensor()

        return distribute_module(module, device_mesh, split, before, after)


class _OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def strangers(_: Session) -> tuple[bool, dict[str, str], str, str]:
    """Whether values stay, why layers are left to torch, and what is said if all of them are, or none is parallel."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 8), _OwnLinear(8, 8), nn.Linear(8, 8), nn.Linear(8, 7), nn.Linear(8, 8), nn.Linear(8, 8)
        )
        whole = ColwiseParallel(output_layouts=Replicate())
        plan: dict[str, ParallelStyle] = {"0": _Stranger(), "1": whole, "2": whole, "5": whole}
        parallelize_module(model, mesh, plan)
        model[2].register_forward_hook(lambda _, inputs, output: output * 2)
        return model

    def run(model: nn.Sequential) -> list[Tensor]:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for layer in (model[0], model[1], model[2], model[5]):
            x = layer(x)
        x.sum().backward()
        return [x.detach(), *(whole(one.grad) for one in model.parameters() if one.grad is not None)]

    expected, model = run(made()), made()
    with overlap(model) as handle:
        same = all(torch.equal(*pair) for pair in zip(run(model), expected, strict=True))
        why = {row.name: row.torch_why for row in reported(handle).modules}
    left = error_of(lambda: overlap(model[0:2]))
    return same, why, left, error_of(lambda: overlap(nn.Sequential(nn.Linear(8, 8))))


def uneven(_: Session) -> tuple[float, str]:
    """How far a layer is from stock whose rows do not divide by the ranks, and why torch runs it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        rows = Shard(1)
        plan: dict[str, ParallelStyle] = {
            "0": ColwiseParallel(input_layouts=rows),
            "1": RowwiseParallel(output_layouts=rows, use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
        handle = overlap(model) if ours else None
        x = torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        out = model(distribute_tensor(x, mesh, [rows])).full_tensor()
        out.square().sum().backward()
        found.append({"out": out.detach()} | {name: whole(one.grad) for name, one in model.named_parameters()})
    return largest_difference(found[1], found[0]), reported(handle).modules[1].torch_why


def with_transformers(_: Session, folder: str) -> tuple[float, dict[str, int], Report]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"vocab_size": 128, "attention_bias": True, "mlp_bias": True}
    spread = {"tp_plan": "auto", "tp_size": dist.get_world_size()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        stock, model = (pretrained("Llama", folder, spread, "bias", sizes, dtype=torch.float64) for _ in range(2))
        expected = language_trained(stock, 1, [LENGTH] * STEPS)
        with overlapped(model) as handle:
            found = language_trained(model, 1, [LENGTH] * STEPS)
            report = reported(handle)
    return largest_difference(found, expected), calls(report.calls), report


BITS = 1e-11  # of float64, after steps of AdamW; a missing sum or a bias added twice is at 1e-3 and more
GATHERED = [name for name, case in CASES.items() if case.sequence and not case.sharded]
REPLICATED = [name for name, case in CASES.items() if not case.sequence and not case.sharded]


@pytest.mark.parametrize("name", GATHERED)
def test_sequence_parallel_layers_share_a_gather(two_ranks: Ranks, name: str) -> None:
    """Losses and gradients of three steps; in each step a gather for each attention, feed-forward and the head."""
    per_step = 2 * 2 + 1 + 2 * 2  # gathers before matmuls forward, and for sums backward
    if name == "autocast":  # which multiplies in another dtype than it gathers
        per_step = 1 + 2 * 2
    if name == "checkpointed":
        per_step += 2 * 2
    for difference, calls, report in two_ranks.run(beside_stock, name):
        assert difference < (0.05 if name == "autocast" else BITS)
        assert calls["all_gather_matmul"] == STEPS * per_step
        assert "matmul_all_reduce" not in calls
        assert {row.name for row in report.modules if not row.runs} == {"embedding"}


@pytest.mark.parametrize("name", REPLICATED)
def test_replicated_layers_share_an_all_reduce(two_ranks: Ranks, name: str) -> None:
    """Two for each layer forward, two and that of the head backward."""
    per_step = 4 + 5 + (2 * 2 if "checkpointed" in name else 0)
    for difference, calls, report in two_ranks.run(beside_stock, name):
        assert difference < (0.05 if "autocast" in name else BITS)
        assert calls == {"matmul_all_reduce": STEPS * per_step}
        assert all(row.runs and not row.torch_why for row in report.modules)


@pytest.mark.parametrize("name", ["with FSDP2", "replicated, with FSDP2"])
def test_fsdp2_on_the_other_axis_is_overlapped_too(four_ranks: Ranks, name: str) -> None:
    for difference, calls, report in four_ranks.run(beside_stock, name):
        assert difference < BITS
        assert sum(calls.values()) == STEPS * (9 if "replicated" in name else 18)
        assert {len(row.ranks) for row in report.modules if row.runs} == {2}


@pytest.mark.parametrize("mechanism", ["torch", "serial", "cuts"])
@pytest.mark.parametrize("name", ["bias", "replicated"])
def test_float32_is_as_exact_as_torch(two_ranks: Ranks, name: str, mechanism: str) -> None:
    for ours, torchs, paths in two_ranks.run(errors, name, mechanism):
        assert ours <= 2 * torchs
        assert paths == {mechanism} or mechanism == "cuts"


test_what_ranks_find = finding({
    "no derivative of a weight is copied": (2, copied_gradients, (), []),
    "restore gives torch back": (2, restored, (), [True] * 6),
    "a copy of the model has its own weights": (2, copied, (), (True, True)),
})  # fmt: skip


def test_styles_work_by_themselves(two_ranks: Ranks) -> None:
    """Without `overlap` only layers below `PrepareModuleInput` wait for a gather of torch's."""
    for difference, calls, refused in two_ranks.run(by_styles):
        assert difference < BITS
        assert calls == {"all_gather_matmul": 3 * (1 + 4), "matmul_reduce_scatter": 3 * (4 + 1)}
        assert (
            refused
            == "Unsupported: Rowwise: it is no nn.Linear, but Embedding; use torch's RowwiseParallel for this module"
        )


def test_the_report_names_every_module(two_ranks: Ranks) -> None:
    [(_, _, report), _] = two_ranks.run(beside_stock, "bias")
    rows = {row.name: row for row in report.modules}
    assert rows["layers.1.attention"].shared_with == tuple(f"layers.1.attention.{x}" for x in ("query", "key", "value"))
    assert rows["layers.0.ffn.up"].shared_with == ("layers.0.ffn.gate",)
    assert rows["layers.0.ffn.down"].runs == "matmul_reduce_scatter"
    assert rows["embedding"].torch_why == "it is no nn.Linear, but Embedding"
    assert "layers.0.ffn.gate" in str(report)


@pytest.mark.parametrize("dtensors", [False, True], ids=["local tensors", "DTensors"])
@pytest.mark.parametrize("in_place", [False, True], ids=["as it was", "changed in place"])
def test_layers_with_other_inputs_come_apart(two_ranks: Ranks, dtensors: bool, in_place: bool) -> None:
    """Layers that are called twice, that have one weight, and one whose input is not that of its siblings."""
    pair = {"one": (), "two": ()} if in_place else {"one": ("two",), "two": ("one",)}
    for first, second, shared in two_ranks.run(odd, dtensors, in_place):
        assert max(first, second) < BITS
        assert shared == pair | {"other": (), "back": ()}


def test_strangers_are_left_alone_and_named(two_ranks: Ranks) -> None:
    for same, why, all_left, none in two_ranks.run(strangers):
        assert same
        assert why["0"].startswith("its style is not torch's: tests.dist.test_tensor_parallel._Stranger")
        assert why["1"] == "it is no nn.Linear, but _OwnLinear"
        assert why["2"].startswith("it has a hook that is not torch's: tests.dist.test_tensor_parallel.strangers")
        assert why["5"] == ""
        assert all_left.startswith("Unsupported: nothing to overlap: 0: its style is not torch's")
        assert none.startswith("Misconfigured: no module of this model is sharded")


@pytest.mark.needs("torch-2.13")
def test_rows_that_do_not_divide_are_torchs(two_ranks: Ranks) -> None:
    """By stock torch 2.11 they fail."""
    for difference, why in two_ranks.run(uneven):
        assert (difference < BITS, why) == (True, "7 rows do not divide by 2 ranks")


@pytest.mark.needs("transformers")
def test_a_plan_of_transformers(two_ranks: Ranks, tmp_path: Path) -> None:
    for difference, calls, report in two_ranks.run(with_transformers, str(tmp_path)):
        assert difference < BITS
        assert calls == {"matmul_all_reduce": STEPS * 9 + 4}  # and four of an evaluation
        assert len(report.modules) == 2 * 7 + 2
        assert {row.name for row in report.modules if not row.runs} == {"model.embed_tokens"}
