"""Workloads: names, FLOPs, memory, and that what is prepared really computes."""

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.measurement.workloads import find_workload


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("gemm 8192x57344x8192", 2 * 8192 * 57344 * 8192),
        ("gemm 64x128x256*3", 3 * 2 * 64 * 128 * 256),
        ("llama-8b layer 4096", 2 * 4096 * 218_103_808),  # a layer of Llama-3 8B has 218.1 M weights in its products
        ("llama-70b layer 2048", 2 * 2048 * 855_638_016),
        ("attention 2x4x1024x64", 2 * 2 * 4 * 1024 * 1024 * 64),
        ("elementwise 1000", 1000),
    ],
)
def test_flops(name: str, flops: int) -> None:
    """Two per multiply-add; a causal mask halves attention."""
    assert find_workload(name).flops == flops


@pytest.mark.parametrize(
    "name", ["", "gemm", "gemm 0x1x1", "gemm 1x1", "gemm 1x1x1*0", "llama-7b layer 1", "gemm 1x1x1\n", "GEMM 1x1x1"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(Misconfigured, match="gemm MxNxK"):
        find_workload(name)


def test_memory_is_that_of_all_operands() -> None:
    assert find_workload("gemm 2x3x5*2").memory_bytes(2) == 2 * 2 * (2 * 5 + 3 * 5 + 2 * 3)


def test_prepared_workloads_compute() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from counterpoint.measurement.workloads import prepare

    workload = find_workload("gemm 64x32x16*2")
    run = prepare(workload, torch.device("cpu"), torch.float32, seed=0)
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == workload.flops
