"""What ranks do with `torch.ops.counterpoint`: each function runs on every rank."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist

import counterpoint.parallel.tensor.operations  # noqa: F401 - registers them
from counterpoint.collectives.communicator import Communicator
from counterpoint.machine.profile import Profile
from counterpoint.measurement.session import Session
from counterpoint.pair import matmul_choice
from counterpoint.pair.arrivals import ShardedMatmul
from counterpoint.pair.matmul_choice import Cuts, RowAxis
from counterpoint.parallel import group as rank_groups
from counterpoint.parallel.options import TensorOptions
from counterpoint.parallel.tensor import group as group_of_ranks
from counterpoint.parallel.tensor import plans
from counterpoint.parallel.tensor.group import TensorGroup, tensor_group
from tests.dist.communicator_cuda_programs import delays
from tests.support.ranks import PATIENT, error_of
from tests.support.software_gpu import SoftwareDriver, SoftwareGpu

OPS = torch.ops.counterpoint


class HostStreamDriver(SoftwareDriver):
    """The host waits for what is given to stream `host`, as if torch's own work on host memory ran there."""

    host = 0

    def enqueue(self, stream: int, name: str, action: Callable[[], object]) -> None:
        super().enqueue(stream, name, action)
        self._join(stream)

    def cuStreamWaitEvent(self, stream: int, event: Any, flags: int) -> tuple[int]:
        result = super().cuStreamWaitEvent(stream, event, flags)
        self._join(stream)
        return result

    def _join(self, stream: int) -> None:
        if stream == self.host:
            done = threading.Event()
            self.streams[stream].put(done.set)
            done.wait()


def on_software_gpu(rank: int) -> Any:
    """Communicators of ranks are on a GPU made of threads, some of whose actions come late."""
    gpu = SoftwareGpu(delays(7, rank), HostStreamDriver)
    assert isinstance(gpu.driver, HostStreamDriver)
    gpu.driver.host = gpu.current_stream()
    return patch.object(
        rank_groups, "Communicator", lambda group, device, options: Communicator(group, device=gpu, options=options)
    )


def cut_anywhere(seed: int) -> Any:
    draw = random.Random(seed)

    def anywhere(task: ShardedMatmul, rank: int, profile: Profile) -> Cuts:
        chip = msgspec.structs.replace(profile.chip, matmul_tile=(draw.choice([1, 2, 3, 5]), 1))
        with patch.object(matmul_choice, "MAX_CELLS", task.rows):
            axis = RowAxis(task, rank, msgspec.structs.replace(profile, chip=chip))
        inside = range(1, len(axis.cells))
        bounds = sorted(draw.sample(inside, min(len(inside), draw.randint(0, 6))))
        return Cuts(pieces=axis.pieces([0, *bounds, len(axis.cells)]), us=1.0)

    return patch.object(plans, "cut", anywhere)


@contextmanager
def opened(session: Session, seed: int, gpu: bool = False) -> Iterator[tuple[TensorGroup, random.Random, str]]:
    """Run calls in pieces that are cut anywhere, on each rank differently; draws are equal on all ranks."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    group = tensor_group(name, TensorOptions(mechanism="cuts", measure=False, communicator=PATIENT))
    with cut_anywhere(seed * 100 + session.rank), on_software_gpu(session.rank) if gpu else nullcontext():
        yield group, random.Random(seed), name
    group.close()


def rows_of_all(own: torch.Tensor, dim: int) -> torch.Tensor:
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own.contiguous())
    return torch.cat(found, dim=dim)


def close(found: torch.Tensor, wanted: torch.Tensor, terms: int) -> None:
    """A result of bfloat16 or float32 beside that of float64, whose terms are of size 1."""
    eps = torch.finfo(found.dtype).eps
    assert found.dtype != torch.float64
    error = (found.double() - wanted).abs().max().item()
    assert error <= 4 * eps * max(1.0, wanted.abs().max().item()) + 4e-7 * terms, (error, eps, terms)


def drawn(draw: random.Random, n: int) -> tuple[tuple[int, ...], int, torch.dtype]:
    """A shape whose rows are gathered along a dimension, and that dimension."""
    shape, dim = draw.choice(
        [
            ((draw.randint(1, 9), 16), 0),
            ((2, draw.randint(1, 7), 8), 1),
            ((3, 2, 3, 8), 1),
            ((2, 2, 2, 8), 2),
            ((4, 3, 8), 0),
        ]
    )
    return shape, dim, draw.choice([torch.bfloat16, torch.float32])


def gathered(session: Session, seed: int, calls: int, gpu: bool = False) -> list[str]:
    """Results and derivatives of random all_gather_matmuls; return by which paths they went."""
    n = dist.get_world_size()
    with opened(session, seed, gpu) as (group, draw, name):
        for number in range(calls):
            torch.manual_seed(1000 * number + session.rank)
            shape, dim, dtype = drawn(draw, n)
            columns = [8 * draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
            a = torch.randn(shape, dtype=dtype, requires_grad=True)
            weights = [torch.randn(shape[-1], one, dtype=dtype, requires_grad=True) for one in columns]
            biases = (
                [torch.randn(one, dtype=dtype, requires_grad=True) for one in columns] if draw.random() < 0.5 else None
            )
            keep = draw.random() < 0.5
            if biases is None:
                rows, outs = OPS.all_gather_matmul(a, weights, dim, name, return_gathered=keep)
            else:
                rows, outs = OPS.all_gather_linear(a, weights, biases, dim, name, keep)
            whole = rows_of_all(a.detach(), dim)
            assert (rows is None) != keep
            if keep:
                assert torch.equal(rows, whole)
            wide = whole.double().requires_grad_()
            wide_weights = [one.detach().double().requires_grad_() for one in weights]
            wanted = [wide @ one for one in wide_weights]
            for index, (out, want) in enumerate(zip(outs, wanted, strict=True)):
                close(out, want + (0 if biases is None else biases[index].double()), shape[-1])
            grads = [torch.randn_like(out) for out in outs]
            used = draw.choice([list(range(len(outs))), [0]])
            extra = torch.randn_like(rows) if keep and draw.random() < 0.5 else None
            torch.autograd.backward(
                [outs[index] for index in used] + ([] if extra is None else [rows]),
                [grads[index] for index in used] + ([] if extra is None else [extra]),
            )
            torch.autograd.backward([wanted[index] for index in used], [grads[index].double() for index in used])
            assert wide.grad is not None
            assert a.grad is not None
            total = wide.grad if extra is None else wide.grad + extra.double()
            dist.all_reduce(total)
            close(a.grad, total.chunk(n, dim=dim)[session.rank], n * sum(columns))
            for index in used:
                grad = wide_weights[index].grad
                found = weights[index].grad
                assert grad is not None
                assert found is not None
                close(found, grad, whole.numel() // shape[-1])
                if biases is not None:
                    bias_grad = biases[index].grad
                    assert bias_grad is not None
                    close(bias_grad, grads[index].double().flatten(0, -2).sum(0), 100)
            assert all(weights[index].grad is None for index in range(len(weights)) if index not in used)
        return sorted({row.path for row in group.report().calls})


def reduced(session: Session, seed: int, calls: int, gpu: bool = False, *, scatter: bool) -> list[str]:
    """Results of random matmuls, some with a bias, whose sums are scattered or stay with all ranks, and derivatives.

    Sums that all ranks keep have equal bits on all of them. Return by which paths the calls went.
    """
    n = dist.get_world_size()
    with opened(session, seed, gpu) as (group, draw, name):
        for number in range(calls):
            torch.manual_seed(1000 * number + session.rank)
            shape, dim, dtype = drawn(draw, n)
            given = [*shape]
            given[dim if scatter else 0] *= n if scatter or draw.random() < 0.8 else 1
            columns, op = 8 * draw.randint(1, 3), draw.choice(["sum", "avg"])
            sizes = given, (shape[-1], columns), *([(columns,)] if draw.random() < 0.3 else [])
            leaves = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
            wide = [one.detach().double().requires_grad_() for one in leaves]
            factor = 1.0 if op == "sum" else 1.0 / n
            product = wide[0] @ wide[1] + (wide[2] if len(wide) > 2 else 0)
            total = product.detach() * factor
            dist.all_reduce(total)
            function = f"{'linear' if len(wide) > 2 else 'matmul'}_{'reduce_scatter' if scatter else 'all_reduce'}"
            out = getattr(OPS, function)(*leaves, op, *([dim] if scatter else []), name)
            close(out, total.chunk(n, dim=dim)[session.rank] if scatter else total, n * shape[-1])
            if not scatter:
                assert torch.equal(rows_of_all(out.detach()[None], 0), out.detach()[None].expand(n, *out.shape))
                torch.manual_seed(number)
            grad = torch.randn_like(out)
            out.backward(grad)
            product.backward((rows_of_all(grad, dim) if scatter else grad).double() * factor)
            rows = product.numel() // columns
            for narrow, exact, terms in zip(leaves, wide, (columns, rows, 100), strict=False):
                assert narrow.grad is not None
                assert exact.grad is not None
                close(narrow.grad, exact.grad, terms)
            del out, grad
        return sorted({row.path for row in group.report().calls})


scattered, all_reduced = partial(reduced, scatter=True), partial(reduced, scatter=False)


def scaled(session: Session, seed: int) -> list[str]:
    """Float8 rows and weights with one scale and with one for each row; return by which paths they went."""
    n, me = dist.get_world_size(), session.rank
    float8 = torch.float8_e4m3fn
    with opened(session, seed) as (group, _, name):
        torch.manual_seed(me)
        a, w = torch.randn(16, 32).to(float8), torch.randn(48, 32).to(float8).t()
        rows = rows_of_all(a.view(torch.uint8), 0).view(float8)
        one = torch.tensor(0.5)
        each, columns = torch.rand(16, 1) + 0.5, torch.rand(1, 48) + 0.5
        for a_scale, b_scale in ((one, one), (each, columns)):
            found, (out,) = OPS.all_gather_scaled_matmul(
                a, [w], a_scale, [b_scale], 0, name, [None], [None], [torch.bfloat16], [False]
            )
            whole_scale = a_scale if a_scale.dim() == 0 else rows_of_all(a_scale, 0)
            assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
            close(out, (rows.double() * whole_scale.double()) @ (w.double() * b_scale.double()), 32)
            b_rows = torch.randn(16 * n, 32).to(float8)
            scale = one if a_scale.dim() == 0 else torch.rand(16 * n, 1) + 0.5
            part = OPS.scaled_matmul_reduce_scatter(
                b_rows, w, scale, b_scale, "sum", 0, 0, name, None, out_dtype=torch.bfloat16
            )
            total = (b_rows.double() * scale.double()) @ (w.double() * b_scale.double())
            dist.all_reduce(total)
            error = (part.double() - total.chunk(n)[me]).abs().max().item()
            assert error < 0.02 * total.abs().max().item(), error
        return sorted({row.path for row in group.report().calls})


def killed(session: Session, name_of_call: str) -> str:
    """Return the error of a call where the last rank died before its third one."""
    n, name = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    tensor_group(name, TensorOptions(mechanism="cuts", communicator=PATIENT))
    a, b = torch.randn(64 * n, 32), torch.randn(32, 16)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_matmul": lambda: OPS.all_gather_matmul(a[:64], [b], 0, name),
        "matmul_reduce_scatter": lambda: OPS.matmul_reduce_scatter(a, b, "sum", 0, name),
        "matmul_all_reduce": lambda: OPS.matmul_all_reduce(a, b, "sum", name),
    }
    for number in range(3):
        if number == 2 and session.rank == n - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        said = error_of(calls[name_of_call])
    return said


def shapes_that_do_not_fit(session: Session) -> list[str]:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    a, b = torch.zeros(3, 8), torch.zeros(8, 16)
    return [
        error_of(lambda: OPS.all_gather_matmul(a, [b], 1, name)),
        error_of(lambda: OPS.all_gather_matmul(a, [b.t()], 0, name)),
        error_of(lambda: OPS.matmul_reduce_scatter(a, b, "sum", 0, name)),
        error_of(lambda: OPS.matmul_reduce_scatter(torch.zeros(6, 8), b, "max", 0, name)),
        error_of(lambda: OPS.matmul_all_reduce(a, b, "sum", "nobody")),
        error_of(lambda: OPS.all_gather_matmul(a, [b], -2, name)),
    ]


def operands_that_do_not_fit(session: Session, operands: str) -> list[str]:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    a, b = torch.zeros(4, 8), torch.zeros(8, 16)
    a, b = (a[0], b) if operands == "row" else (a.int(), b.int())
    return [
        error_of(lambda: OPS.all_gather_matmul(a, [b], 0, name)),
        error_of(lambda: OPS.matmul_reduce_scatter(a, b, "sum", 0, name)),
        error_of(lambda: OPS.matmul_all_reduce(a, b, "sum", name)),
    ]


def options_that_differ(session: Session) -> str:
    """The error of the first call of ranks of which one asks for torch."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    group = tensor_group(name, TensorOptions(mechanism="cuts" if session.rank else "torch"))
    said = error_of(lambda: OPS.all_gather_matmul(torch.zeros(4, 8), [torch.zeros(8, 16)], 0, name))
    group.close()
    return said


def ended_with_its_group(session: Session) -> tuple[bool, bool]:
    ours: Any = dist.new_group()
    group = tensor_group(ours.group_name, TensorOptions(mechanism="cuts", communicator=PATIENT))
    OPS.all_gather_matmul(torch.zeros(4, 8), [torch.zeros(8, 16)], 0, ours.group_name)
    before = group._communicator is not None
    dist.destroy_process_group(ours)
    return before, group._communicator is not None


def bounded(session: Session) -> tuple[int, int]:
    """How many plans a group keeps of calls of five shapes, if it may keep two, and how many calls it counted."""
    with opened(session, 1) as (group, _, name), patch.object(group_of_ranks, "_MAX_ROUTES", 2):
        for rows in (8, 16, 24, 32, 40):
            OPS.all_gather_matmul(torch.ones(rows, 16), [torch.ones(16, 8)], 0, name)
        return len(group._routes), sum(row.calls for row in group.report().calls)


def empty(_: Session, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of products and derivatives of rows of which there are none."""
    n, name = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    tensor_group(name, TensorOptions(measure=False))
    a = torch.empty(shape, requires_grad=True)
    b = torch.randn(shape[-1], 4 * n, requires_grad=True)
    outs = [
        OPS.all_gather_matmul(a, [b], 1, name, return_gathered=False)[1][0],
        OPS.matmul_reduce_scatter(a, b, "sum", 1, name),
        OPS.matmul_all_reduce(a, b, "sum", name),
    ]
    torch.cat([out.flatten() for out in outs]).sum().backward()
    assert a.grad is not None
    return [tuple(one.shape) for one in (*outs, a.grad)]


def left_to_torch(session: Session) -> list[tuple[str, str, str]]:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    group = tensor_group(name, TensorOptions())
    n = group.world_size
    OPS.all_gather_matmul(torch.zeros(4, 8), [torch.zeros(8, 16)], 0, name)
    OPS.matmul_reduce_scatter(torch.zeros(n, 8), torch.zeros(8, 3), "sum", 0, name)
    OPS.matmul_reduce_scatter(torch.zeros(n, 8, dtype=torch.float64), torch.zeros(8, 4).double(), "sum", 0, name)
    found = [(row.operation, str(row.path), row.why) for row in group.report().calls]
    group.close()
    return found


def reported(session: Session) -> str:
    with opened(session, 3) as (group, _, name):
        OPS.all_gather_matmul(torch.randn(64, 32), [torch.randn(32, 16)], 0, name)
        return str(group.report())
