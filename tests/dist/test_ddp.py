"""DDP's buckets through a communicator, beside DDP's own all_reduce."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import counterpoint
from counterpoint.errors import CounterpointError
from counterpoint.measurement.session import Session
from counterpoint.parallel.ddp import HookState, hook
from counterpoint.parallel.options import DdpOptions, OverlapOptions
from counterpoint.parallel.report import Report
from tests.dist.torch_backend_programs import Branches
from tests.support.ranks import PATIENT, Ranks
from tests.support.torch_training import learned


def trained(
    _: Session, keywords: dict[str, Any], dtype: torch.dtype, both: bool, wire: torch.dtype | None
) -> tuple[list[float], list[float], Report]:
    """Losses of both ways, of equal models on equal data, and what the hook did."""
    torch.manual_seed(3)
    model = Branches(dtype=dtype)
    found, report = [], None
    for ours in (True, False):
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.02, **keywords)
        handle = counterpoint.overlap(ddp, options=DdpOptions(wire_dtype=wire, communicator=PATIENT)) if ours else None
        found.append(_losses(ddp, both))
        if handle is not None:
            report = handle.report()
            handle.restore()
        found[-1] += _losses(ddp, both)
    assert report is not None
    return found[0], found[1], report


def _losses(ddp: DistributedDataParallel, both: bool) -> list[float]:
    numbers = torch.Generator().manual_seed(10 + dist.get_rank())
    batches = ((torch.randn(16, 48, generator=numbers), both) for _ in range(5))
    return learned(ddp, batches, lr=0.05, accumulates=True)


def averages(_: Session, wire: torch.dtype | None, numel: int) -> tuple[float, float]:
    """The largest error of a hook's average, over the largest value, and the same of torch's own bfloat16 hook."""
    state = HookState(options=DdpOptions(wire_dtype=wire, communicator=PATIENT))
    values = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    exact = values.double()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    narrow = values.bfloat16() / dist.get_world_size()
    dist.all_reduce(narrow)
    state.average(values, 0).wait()
    state.close()
    largest = exact.abs().max().item()
    return (values - exact).abs().max().item() / largest, (narrow.double() - exact).abs().max().item() / largest


def by_hook(_: Session) -> str:
    state = HookState(options=DdpOptions(communicator=PATIENT))
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    ddp.register_comm_hook(state, hook)
    ddp(torch.ones(2, 8)).sum().backward()
    text = str(state.report())
    state.close()
    return text


def refused(_: Session, what: str) -> str:
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    handle: Any = None
    try:
        if what == "options":
            counterpoint.overlap(ddp, options=OverlapOptions())
        elif what == "wire":
            DdpOptions(wire_dtype=torch.int8)
        else:
            handle = counterpoint.overlap(ddp)
            counterpoint.overlap(ddp)
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if handle is not None:
            handle.restore()
    return "no error"


@pytest.mark.parametrize(
    ("keywords", "both"),
    [
        ({}, True),
        ({"gradient_as_bucket_view": True}, True),
        ({"static_graph": True, "gradient_as_bucket_view": True}, False),
        ({"find_unused_parameters": True}, False),
    ],
    ids=["plain", "views", "static graph", "unused parameters"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_are_those_of_ddp(two_ranks: Ranks, keywords: dict[str, Any], both: bool, dtype: torch.dtype) -> None:
    """Sums of two have one order, so that float32 is equal bit by bit; bfloat16 is rounded once instead of twice.

    The second half of the losses comes after `restore`.
    """
    for ours, torchs, report in two_ranks.run(trained, keywords, dtype, both, None):
        if dtype is torch.float32:
            assert ours == torchs
        assert ours == pytest.approx(torchs, rel=2e-2)
        assert {(row.operation, row.path) for row in report.calls} == {("all_reduce", "zero_sm")}
        assert sum(row.calls for row in report.calls) >= 3
        assert report.modules[0].runs.endswith("MB of buckets")


MOST: dict[torch.dtype | None, Callable[[float], float]] = {
    None: lambda torchs: 4 * 2**-24,
    torch.bfloat16: lambda torchs: max(1.01 * torchs, 2**-8),  # as torch's hook
    torch.float8_e4m3fn: lambda torchs: 1 / 16 * 2,  # three bits of mantissa: half a unit is 1/16 of a value
}


@pytest.mark.parametrize("numel", [1, 1000, 4096, 100_003])
@pytest.mark.parametrize("wire", MOST, ids=str)
def test_averages_have_the_error_of_what_is_sent(four_ranks: Ranks, wire: torch.dtype | None, numel: int) -> None:
    for ours, torchs in four_ranks.run(averages, wire, numel):
        assert ours <= MOST[wire](torchs)


def test_the_hook_by_itself(two_ranks: Ranks) -> None:
    for text in two_ranks.run(by_hook):
        assert text.splitlines() == [
            "module   ranks  runs",
            "(model)  2      0.0 MB of buckets",
            "",
            "operation   size         path     calls  why",
            "all_reduce  below 1 MiB  zero_sm  1      copied from its landing",
        ]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("options", "Misconfigured: options of type OverlapOptions for DDP: give counterpoint.ddp.DdpOptions"),
        ("wire", "Misconfigured: wire_dtype=torch.int8: allowed are None, torch.bfloat16, torch.float8_e4m3fn"),
        ("twice", "Misconfigured: DDP takes no hook now"),
    ],
)
def test_what_cannot_work_says_so(two_ranks: Ranks, what: str, message: str) -> None:
    for said in two_ranks.run(refused, what):
        assert said.startswith(message)
