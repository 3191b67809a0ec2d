"""DDP's buckets through a communicator, beside DDP's own all_reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import ddp_programs as programs
from tests.support.ranks import Ranks


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
    for ours, torchs, report in two_ranks.run(programs.trained, keywords, dtype, both, None):
        if dtype is torch.float32:
            assert ours == torchs
        assert ours == pytest.approx(torchs, rel=2e-2)
        assert {(row.operation, row.path) for row in report.calls} == {("all_reduce", "zero_sm")}
        assert sum(row.calls for row in report.calls) >= 3
        assert report.modules[0].runs.endswith("MB of buckets")


@pytest.mark.parametrize("numel", [1, 1000, 4096, 100_003])
def test_bfloat16_on_the_wire_is_as_exact_as_torchs_hook(two_ranks: Ranks, numel: int) -> None:
    for ours, torchs in two_ranks.run(programs.averages, torch.bfloat16, numel):
        assert ours <= max(1.01 * torchs, 2**-8)


@pytest.mark.parametrize("numel", [1, 1000, 4096, 100_003])
def test_float8_on_the_wire_has_its_own_error(four_ranks: Ranks, numel: int) -> None:
    """Three bits of mantissa: half a unit is 1/16 of a value; averages of four errors are smaller than the largest."""
    for ours, _ in four_ranks.run(programs.averages, torch.float8_e4m3fn, numel):
        assert ours <= 1 / 16 * 2


def test_sums_are_exact_without_a_wire_dtype(four_ranks: Ranks) -> None:
    for ours, _ in four_ranks.run(programs.averages, None, 100_003):
        assert ours <= 4 * 2**-24


def test_the_hook_by_itself(two_ranks: Ranks) -> None:
    for text in two_ranks.run(programs.by_hook):
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
        (
            "wire",
            "Misconfigured: wire_dtype=torch.int8: allowed are None, torch.bfloat16, torch.float8_e4m3fn",
        ),
        ("twice", "Misconfigured: DDP takes no hook now"),
    ],
)
def test_what_cannot_work_says_so(two_ranks: Ranks, what: str, message: str) -> None:
    for said in two_ranks.run(programs.refused, what):
        assert said.startswith(message)
