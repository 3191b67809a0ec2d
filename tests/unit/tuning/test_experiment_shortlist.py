"""What is worth measuring: stock and the best by the model."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Unsupported
from counterpoint.machine.profile import default_profile, profile_of, shipped_profile
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.records.measurement import Order
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.experiment import best_of, shortlist
from counterpoint.tuning.predictions import predicted_times

H200 = default_profile()
COMPUTE = ("gemm 8192x8192x8192", "llama-8b layer 4096", "attention 4x32x4096x128", "elementwise 1048576")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


def pair(operation: str = "all_gather", compute: str = COMPUTE[0], **fields: object) -> StepPair:
    given_fields = {"operation": operation, "compute": compute, "bytes_per_rank": 64 << 20, "ranks": 4} | fields
    return msgspec.convert(given_fields, StepPair)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_stock_comes_first_and_every_name_is_a_mechanism(operation: str, compute: str, device: str) -> None:
    """At most three others, no name twice, all known where they are to run."""
    found = list(shortlist(pair(operation, compute), H200, device=device))
    assert found[0] == {"cuda": "nccl", "cpu": "gloo"}[device]
    assert len(set(found)) == len(found) <= 4
    assert [find_mechanism(name, device).name for name in found] == found


def test_the_others_are_those_with_the_least_predicted_time() -> None:
    """Ascending, and each with its prediction."""
    times = predicted_times(pair(), H200)
    found = list(shortlist(pair(), H200).values())[1:]
    assert found == sorted(us for name, us in times.items() if name != "nccl")[:3]


@pytest.mark.parametrize(
    ("operation", "compute", "names"),
    [
        ("all_gather_matmul", "gemm 8192x7168x4096", {"torch", "serial", "cuts"}),
        ("matmul_reduce_scatter", "gemm 8192x7168x4096", {"torch", "serial", "cuts"}),
        ("exchange", "mixtral-8x7b 4096 zipf", {"torch", "gather", "slabs"}),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_depends_on_communication_has_its_own_mechanisms(
    operation: str, compute: str, names: set[str], device: str
) -> None:
    found = list(shortlist(pair(operation, compute), H200, device=device))
    assert (found[0], set(found)) == ("torch", names)


def test_a_gpu_without_a_data_sheet_is_measured_without_the_model() -> None:
    """By a few mechanisms of different kinds, none with a prediction."""
    found = shortlist(pair(), shipped_profile("Riva 128"))
    assert list(found)[:2] == ["nccl", "zero_sm"]
    assert set(found.values()) == {None}


@given(st.dictionaries(st.sampled_from([f"m{n}" for n in range(9)]), st.floats(1, 1e6), min_size=1), st.integers(0, 5))
def test_a_model_that_is_wrong_never_drops_stock(times: dict[str, float], most: int) -> None:
    """Stock is there whatever is predicted, and nothing that was left out is predicted to be faster than what is in."""
    kept = list(best_of({"nccl": 1e9, **times}, "nccl", most))
    assert kept[0] == "nccl"
    assert all(times[out] >= times[name] for out in times.keys() - set(kept) for name in kept[1:])


@pytest.mark.parametrize("first", get_args(Order))
def test_a_pair_of_known_order_is_predicted_in_it(first: Order) -> None:
    """NCCL behind a GEMM takes longer than before it, and the mean over orders lies between."""
    us = predicted_times(pair(first=first), H200)["nccl"]
    orders = [predicted_times(pair(first=each), H200)["nccl"] for each in get_args(Order)]
    assert min(orders) <= us <= max(orders)
    assert predicted_times(pair(), H200)["nccl"] == pytest.approx(sum(orders) / 3)


@pytest.mark.parametrize("compute", COMPUTE)
def test_computation_is_predicted_in_its_own_dtype(compute: str) -> None:
    """In float32 it takes longer beside the same bytes; what a data sheet has no peak of is not predicted."""
    plain, float32 = (predicted_times(pair(compute=compute, compute_dtype=one), H200) for one in (None, "float32"))
    assert float32["nccl"] > plain["nccl"]
    with pytest.raises(Unsupported, match="has no peak of float32"):
        predicted_times(pair(compute=compute, dtype="float32"), profile_of("NVIDIA GH200 480GB"))
