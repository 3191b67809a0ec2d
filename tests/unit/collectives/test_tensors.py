"""Tensors that do not fit a call are refused before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from counterpoint.collectives.submit.tensors import (
    block_bytes,
    check,
    overlap,
    overlap_elsewhere,
    reduction_of,
    sendable,
    splits,
)
from counterpoint.errors import Misconfigured

FOUR, EIGHT = torch.zeros(4), torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: block_bytes(FOUR, FOUR, 2), "output of 4 and input of 4 elements: give 2 times as many in output"),
        (lambda: check(FOUR, FOUR.int()), "output of torch.float32, input of torch.int32"),
        (lambda: check(EIGHT[::2], None), "give a contiguous one"),
        (lambda: check(torch.zeros(4, device="meta"), None), "a tensor on meta"),
        (lambda: check(FOUR, EIGHT.to_sparse()), "torch.sparse_coo: allowed are strided ones"),
        (lambda: check(torch.zeros(4, dtype=torch.complex64).conj(), None), "give a contiguous one"),
        (lambda: splits(FOUR, [1, 2], 2), r"split sizes \[1, 2\] of 4 rows"),
        (lambda: splits(FOUR, [4], 2), "give 2 that add up to these"),
        (lambda: splits(FOUR, [5, -1], 2), "give 2 that add up to these"),
        (lambda: reduction_of("mean", 1.0, FOUR), "allowed are"),
        (lambda: reduction_of("avg", 1.0, FOUR.int()), "avg of int32"),
        (lambda: reduction_of("sum", 2.0, FOUR), "factor=2.0"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        call()


def test_blocks_and_splits_are_counted_in_bytes() -> None:
    assert block_bytes(EIGHT, FOUR, 2) == 16
    assert splits(torch.zeros(5, 3), [2, 0, 3], 3) == (24, 0, 36)


def test_what_fits() -> None:
    """A tensor may be missing, and an input may have gaps."""
    check(None, FOUR)
    check(EIGHT, None)
    check(FOUR, EIGHT[::2])
    assert sendable(torch.arange(8.0)[::2]).tolist() == [0, 2, 4, 6]


def test_a_conjugate_is_sent_as_what_it_means() -> None:
    """Its bytes lie there unconjugated."""
    lazy = torch.tensor([1 + 2j]).conj()
    assert torch.view_as_real(sendable(lazy)).tolist() == [[1, -2]]


def test_what_is_contiguous_is_sent_as_it_is() -> None:
    """No copy."""
    assert sendable(FOUR).data_ptr() == FOUR.data_ptr()


@pytest.mark.parametrize(("one", "other", "expected"), [(EIGHT[:5], EIGHT[4:], True), (EIGHT[:4], EIGHT[4:], False)])
def test_overlap_is_by_bytes(one: Any, other: Any, expected: bool) -> None:
    assert overlap(one, other) is expected


def test_reductions_of_torch_are_known() -> None:
    assert reduction_of(torch.distributed.ReduceOp.AVG, 1.0, FOUR) == reduction_of("avg", 1.0, FOUR)


@pytest.mark.parametrize(
    ("outputs", "inputs", "in_place", "wanted"),
    [
        ([(0, 8)], [(8, 4)], [False], False),
        ([(0, 8)], [(4, 4)], [True], False),
        ([(0, 8)], [(4, 4)], [False], True),
        ([(0, 8), (8, 8)], [(12, 4), (16, 4)], [True, False], True),
        ([(8, 4), (0, 4)], [(4, 4), (12, 4)], [False, False], False),
        ([(0, 8), (8, 8)], [(0, 4), (6, 4)], [True, True], True),
        ([(0, 8), (4, 0)], [(8, 8), (2, 0)], [False, False], False),
    ],
)
def test_inputs_within_outputs_are_seen(
    outputs: list[tuple[int, int]], inputs: list[tuple[int, int]], in_place: list[bool], wanted: bool
) -> None:
    """(start, size) of each: bytes are shared only where one is in place in its own output."""
    whole = torch.zeros(32, dtype=torch.uint8)
    given = [[whole[start : start + size] for start, size in places] for places in (outputs, inputs)]
    assert overlap_elsewhere(given[0], given[1], in_place) is wanted


def test_outputs_that_share_bytes_are_refused() -> None:
    with pytest.raises(Misconfigured, match="outputs 1 and 0 share bytes"):
        overlap_elsewhere([EIGHT[3:], EIGHT[:4]], [FOUR, FOUR], [False, False])
