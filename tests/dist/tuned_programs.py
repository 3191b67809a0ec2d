"""What ranks run to test models and groups that follow a tuning."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import counterpoint
import counterpoint.torch_backend as backend
from counterpoint.collectives.communicator import Communicator
from counterpoint.measurement.session import Session
from counterpoint.parallel.expert import modules as expert_modules
from counterpoint.parallel.follow_tuning import VARIABLE, this_machine
from counterpoint.parallel.options import DdpOptions, ExpertOptions, OverlapOptions
from counterpoint.parallel.overlap import Overlap, overlap
from counterpoint.parallel.report import Report
from counterpoint.parallel.tensor import TensorOptions
from counterpoint.parallel.tensor.group import tensor_group
from counterpoint.records.tuning import LEAVE, Tuned, TunedPair
from counterpoint.tuned.file import tuned_toml
from tests.dist import expert_parallel_programs as experts
from tests.dist import test_tensor_parallel
from tests.dist.fsdp_software_gpu_programs import on_software_gpu
from tests.support.example_tuned import example_tuned
from tests.support.fsdp_training import BF16, Case, differences, sharded, stock_trained, trained
from tests.support.ranks import PATIENT, error_of
from tests.support.torch_training import largest_difference


def choice(operation: str, mechanism: str, num_bytes: int = 1, **fields: Any) -> TunedPair:
    first = example_tuned().pair[0]
    given: dict[str, Any] = {"where": (), "tried": (), "why": f"{operation} says so"} | fields
    return msgspec.structs.replace(
        first, operation=operation, mechanism=mechanism, bytes_per_rank=num_bytes // 2, **given
    )


def tuning(*pairs: TunedPair, device: str = "cpu", **made: Any) -> Tuned:
    """What was tuned here, or where `made` says otherwise."""
    environment = msgspec.structs.replace(this_machine(device), **made)
    return msgspec.structs.replace(example_tuned(), pair=pairs, made=environment)


def written(folder: str, tuned: Tuned) -> str:
    """The file of a tuning, one for each rank."""
    path = Path(folder) / f"rank{dist.get_rank()}.toml"
    path.write_text(tuned_toml(tuned))
    return str(path)


MIXED = (
    choice("all_gather", LEAVE, where=("layers.0",)),
    choice("reduce_scatter", LEAVE, where=("layers.0",)),
    choice("all_gather", "zero_sm", where=("layers.1",)),
    choice("reduce_scatter", LEAVE, where=("layers.1",)),
    choice("all_gather", LEAVE, where=("layers.2",)),
    choice("reduce_scatter", "zero_sm", where=("layers.2",)),
)
CHOICES = {
    "mixed": MIXED,
    "all left": (choice("all_gather", LEAVE, where=("*",)), choice("reduce_scatter", LEAVE, where=("*",))),
    "of other models": (choice("all_gather", LEAVE, 1 << 40),),
    "too late": (choice("broadcast", "nccl+max_ctas=8"), choice("all_gather", "nccl+max_ctas=8", where=("layers.0",))),
}


def fsdp(session: Session, name: str, folder: str) -> tuple[list[str], Report]:
    """What differs from stock FSDP2 after training by a file, and the report."""
    return followed_by(session, Case(policy=BF16), written(folder, tuning(*CHOICES[name])))


def mixed(session: Session, case: Case, on_gpu: bool) -> tuple[list[str], Report]:
    """As `fsdp`, where each layer leaves something else to torch; `on_gpu`: by the communicator of GPUs."""
    with on_software_gpu() if on_gpu else nullcontext():
        return followed_by(session, case, tuning(*MIXED))


def followed_by(session: Session, case: Case, tuned: Any) -> tuple[list[str], Report]:
    """What differs from stock FSDP2 after training by a tuning, and the report."""
    expected = stock_trained(session, case)
    model = sharded(case)
    with overlap(model, options=case.options, tuned=tuned) as handle:
        got = trained(session, model, case)
        return differences(expected, got), handle.report()


def by_size(session: Session) -> list[tuple[bool, bool]]:
    """Whether each module gathers and scatters by ours, if a choice has the size of what its layers gather."""
    with overlap(sharded(Case(policy=BF16))) as handle:
        sizes = {module.name: module.gather_bytes for module in handle.report().modules}
    assert sizes["layers.0"] > 2 * sizes["(root)"]
    model, left = sharded(Case(policy=BF16)), choice("all_gather", LEAVE, sizes["layers.0"])
    with overlap(model, tuned=tuning(left)) as handle:
        modules = handle.report().modules
        both = ("all_gather", "reduce_scatter")
        return [(not module.moved(both[0]).torch_why, not module.moved(both[1]).torch_why) for module in modules]


@contextmanager
def named(file: str | None) -> Iterator[None]:
    with patch.dict(os.environ, {} if file is None else {VARIABLE: file}):
        yield


def disagreeing(_: Session, how: str, folder: str) -> tuple[str, str]:
    """What is said to this rank by overlap() of an FSDP2 model, and by the first call of a group of the backend."""
    file, rank = written(folder, tuning(*MIXED)), dist.get_rank()
    if how == "other files" and rank == 1:
        file = written(folder, tuning(*MIXED[1:]))
    if how == "missing on all" or (how == "missing on one" and rank == 1):
        Path(file).unlink()
    if how == "of another machine" and rank == 1:
        file = written(folder, tuning(*MIXED, torch="2.0"))
    given = None if how == "named on one" and rank == 1 else file
    model, group = sharded(Case()), dist.new_group(backend="counterpoint")
    with named(given):
        texts = error_of(lambda: overlap(model)), error_of(lambda: dist.all_reduce(torch.ones(8), group=group))
    dist.destroy_process_group(group)
    return texts


def disagreeing_on_a_mesh(_: Session, how: str, folder: str) -> str:
    """What is said to this rank of two axes of two, if the last rank has another file."""
    file = written(folder, tuning(*MIXED[dist.get_rank() == 3 :]))
    if how == "replicated":
        return error_of(lambda: overlap(sharded(Case(mesh=(2, 2))), tuned=file))
    case = test_tensor_parallel.CASES["with FSDP2"]
    model = test_tensor_parallel.sharded(case, test_tensor_parallel.mesh_of(case))
    return error_of(lambda: overlap(model, tuned=file))


def warned(_: Session, how: str) -> tuple[list[str], int]:
    """The warnings about a file of another machine, and how many FSDP2 modules it left."""
    made: dict[str, Any] = {"gpu": {"gpu": "NVIDIA H200"}, "counterpoint": {"counterpoint": "9"}}.get(how, {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with overlap(sharded(Case()), tuned=tuning(*MIXED, **made)) as handle:
            left = sum(bool(module.torch_why) for module in handle.report().modules)
    return [f"{one.category.__name__}: {one.message}" for one in caught], left


def turned_off(_: Session, folder: str) -> list[str]:
    """What the reports say of tunings: by the variable, by `off` beside it, and by `off` in it."""
    texts = []
    for variable, tuned in ((written(folder, tuning(*MIXED)), None), (written(folder, tuning(*MIXED)), "off")):
        with named(variable), overlap(sharded(Case()), tuned=tuned) as handle:
            texts.append(handle.report().tuned)
    with named("off"), overlap(sharded(Case())) as handle:
        return [*texts, handle.report().tuned]


def ddp(_: Session) -> tuple[list[bool], list[Report]]:
    """Whether losses are those of torch's DDP, and the reports of a model that is left and of one that is not."""
    left, ours = nn.Linear(64, 64), nn.Linear(256, 256)
    sizes = [sum(parameter.nbytes for parameter in model.parameters()) for model in (left, ours)]
    pairs = (
        choice("all_reduce", LEAVE, sizes[0], dtype="float32"),
        choice("all_reduce", "zero_sm", sizes[1], dtype="float32"),
    )
    equal, reports = [], []
    for model in (left, ours):
        expected = gradients(DistributedDataParallel(model))
        model.zero_grad()
        parallel = DistributedDataParallel(model)
        with counterpoint.overlap(parallel, tuned=tuning(*pairs)) as handle:
            equal.append(torch.equal(gradients(parallel), expected))
            reports.append(handle.report())
    return equal, reports


def gradients(model: DistributedDataParallel) -> torch.Tensor:
    weight: Any = model.module.weight
    numbers = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randn(4, weight.shape[1], generator=numbers)).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def on_the_wire(_: Session) -> Report:
    """The report of a model whose options say what gradients are sent as."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    size = sum(parameter.nbytes for parameter in model.parameters())
    options = DdpOptions(wire_dtype=torch.bfloat16)
    left = tuning(choice("all_reduce", LEAVE, size, dtype="float32"))
    with counterpoint.overlap(model, options=options, tuned=left) as handle:
        gradients(model)
        report: Report = handle.report()
    return report


def tensor_parallel(_: Session, mechanism: str) -> tuple[float, Report, str]:
    """How far a model in float32 is from torch's, the report, and that of the same model after `restore`.

    The gather before the feed-forward has `mechanism`, that before the attention is left.
    """
    case, programs = test_tensor_parallel.Case(), test_tensor_parallel
    mesh = programs.mesh_of(case)
    expected = programs.trained(case, programs.parallel(case, mesh).float(), 1)
    model = programs.parallel(case, mesh).float()
    rows, hidden = 2 * programs.LENGTH, programs.SHAPE.hidden
    fields: dict[str, Any] = {"num_bytes": rows * hidden * 4, "dtype": "float32"}
    pairs = (
        choice("all_gather_matmul", mechanism, compute=f"gemm {rows}x96x{hidden}", stock="torch", **fields),
        choice("all_gather_matmul", LEAVE, compute=f"gemm {rows}x64x{hidden}", stock="torch", **fields),
    )
    options = OverlapOptions(tensor_parallel=TensorOptions(mechanism="cuts" if mechanism == "slabs" else "auto"))
    with overlap(model, options=options, tuned=tuning(*pairs)) as handle:
        difference = largest_difference(programs.trained(case, model, 1), expected)
        report = handle.report()
    with overlap(model, options=options) as handle:
        programs.trained(case, model, 1)
        return difference, report, str(handle.report())


def operations(_: Session, folder: str, tuned: str) -> list[str]:
    """The ways of a matmul where the variable names a file: by itself, below `overlap` with this argument, after it."""
    case = test_tensor_parallel.Case()
    mesh = test_tensor_parallel.mesh_of(case)
    x, weight = torch.ones(16, 64), torch.ones(64, 32)
    left = choice("all_gather_matmul", LEAVE, 32 * 64 * 4, compute="gemm 32x32x64", stock="torch", dtype="float32")
    group = tensor_group(mesh.get_group().group_name, TensorOptions())
    model = test_tensor_parallel.parallel(case, mesh)

    def multiplied() -> str:
        before = {(row.path, row.why): row.calls for row in group.report().calls}
        torch.ops.counterpoint.all_gather_matmul(x, [weight], 0, group.group.group_name)
        [why] = [row.why for row in group.report().calls if row.calls > before.get((row.path, row.why), 0)]
        return why.partition(" by ")[0].partition(" is ")[0]

    with named(written(folder, tuning(left))):
        ways = [multiplied()]
        with overlap(model, tuned=tuned):
            ways.append(multiplied())
        return [*ways, multiplied()]


def expert_parallel(_: Session, folder: str) -> tuple[float, Report]:
    """How far a model of `transformers` is from its own run, and the report; a choice for each of its two layers."""
    spread = experts.Spread()
    pairs = (
        choice("exchange", "slabs", where=("model.layers.0.*",), stock="torch"),
        choice("exchange", LEAVE, where=("model.layers.1.*",), stock="torch"),
    )
    expected = experts.stock(spread, folder)
    found, report = experts.followed(spread, folder, options=ExpertOptions(parts=1), tuned=tuning(*pairs))
    return largest_difference(found, expected, experts.SMALL), report


def experts_by_size(_: Session, factor: float, folder: str) -> list[str]:
    """The choices of layers of experts by a pair of so many times their size, which has no names."""
    size = dist.get_world_size() * 2 * experts.LENGTH * 2 * 32 * 8  # ranks, tokens, choices of each, elements, bytes
    pair = choice("exchange", "gather", int(size * factor), dtype="float64", stock="torch")
    _found, report = experts.followed(experts.Spread(), folder, tuned=tuning(pair))
    return [module.choice for module in report.of_kind("expert")]


def experts_not_asked_for(_: Session, folder: str) -> list[tuple[str, str]]:
    """What is said of each layer of experts that is left but for a choice, where only the first has one."""
    chosen = choice("exchange", "slabs", where=("model.layers.0.*",), stock="torch")
    with patch.object(expert_modules, "_left_why", lambda *_, **__: "not measured"):
        _found, report = experts.followed(experts.Spread(), folder, tuned=tuning(chosen))
    return [(module.choice, module.torch_why) for module in report.of_kind("expert")]


def unchanged(_: Session) -> tuple[str, bool]:
    """What is said when a tensor-parallel model is to follow a file that is not there, and whether it is as before."""
    case = test_tensor_parallel.Case()
    model = test_tensor_parallel.parallel(case, test_tensor_parallel.mesh_of(case))
    before = [dict(vars(module)) for module in model.modules()]
    text = error_of(lambda: overlap(model, tuned="nowhere.toml"))
    return text, [dict(vars(module)) for module in model.modules()] == before


def of_backend(_: Session) -> Report:
    """The report of a group after an all_reduce that is left, one below a crossover, and two without a choice."""
    pairs = (choice("all_reduce", LEAVE, 4096), choice("all_gather", "zero_sm", 4096))
    crossovers = {"all_reduce": 0, "all_gather": 1 << 40}
    options = backend.BackendOptions(crossover_bytes=crossovers, tuned=tuning(*pairs), communicator=PATIENT)
    group = dist.new_group(backend="counterpoint", pg_options=options)
    for numel in (1024, 16):
        whole, mine = torch.zeros(numel), torch.full((numel // 2,), dist.get_rank() + 1.0)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, mine, group)
        assert whole.sum() == numel * 1.5
        dist.all_reduce(whole, group=group)
        assert whole.sum() == numel * 3
    report = backend.report(group)
    dist.destroy_process_group(group)
    return report


def asked(handle: Overlap) -> int:
    seen: set[int] = set()
    with patch.object(Communicator, "check", lambda communicator: seen.add(id(communicator))):
        handle.check()
    return len(seen)


def checked(_: Session) -> tuple[int, int]:
    """How many communicators `check` asks of a tensor-parallel model, before and after its first step."""
    programs, case = test_tensor_parallel, test_tensor_parallel.Case()
    model = programs.parallel(case, programs.mesh_of(case)).float()
    with overlap(model, options=OverlapOptions(tensor_parallel=TensorOptions(mechanism="serial"))) as handle:
        before = asked(handle)
        programs.trained(case, model, 1)
        return before, asked(handle)


def checked_experts(_: Session, folder: str) -> int:
    """How many communicators `check` asks of a model of experts, besides those of FSDP2."""
    spread = experts.Spread()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        model = experts.transformers_model(spread, folder)
        with overlap(model, options=OverlapOptions(expert_parallel=spread.options)) as handle:
            before = asked(handle)
            experts.trained(model, spread)
            return asked(handle) - before
