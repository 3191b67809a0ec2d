"""Named suites: whatever is in them can be parsed, has a unique name, and is what the issue's papers measured."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.measurement.collective import collectives
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.measurement.suites import SUITES, capped, few_sms, parts_of
from counterpoint.measurement.workloads import DependentMatmul, find_dependent, find_exchange, find_workload
from counterpoint.records.measurement import Block, Scenario


def pairs(suite: str, *, device: str = "cuda", num_sms: int = 132) -> list[Scenario]:
    return [part for part in parts_of(suite, device=device, num_sms=num_sms) if isinstance(part, Scenario)]


def blocks(suite: str, *, device: str = "cuda", world_size: int = 8, num_sms: int = 132) -> dict[str, Block]:
    parts = parts_of(suite, device=device, world_size=world_size, num_sms=num_sms)
    return {part.name: part for part in parts if isinstance(part, Block)}


@pytest.mark.parametrize("suite", SUITES)
def test_everything_in_a_suite_is_known(suite: str) -> None:
    for scenario in pairs(suite):
        find_workload(scenario.workload)
        assert scenario.collective in collectives()
        assert [find_mechanism(name, "cuda").name for name in scenario.mechanisms] == list(scenario.mechanisms)
    assert max(Counter(part.name for part in parts_of(suite, device="cuda", world_size=8)).values()) == 1


@pytest.mark.parametrize(
    ("suite", "scenarios", "others"),
    [("pairs", 64, 0), ("conccl", 30, 0), ("resource-aware", 4, 0), ("tensor", 0, 18), ("expert", 0, 27)],
)
def test_sizes_of_suites(suite: str, scenarios: int, others: int) -> None:
    """4 loads x 4 collectives x 4 ratios; ConCCL's 30; both GEMMs x two collectives of 896 MiB; no pairs."""
    assert (len(pairs(suite)), len(blocks(suite))) == (scenarios, others)


def test_the_forum_case_has_three_remedies_and_every_order() -> None:
    """Stock NCCL, and enough beside it."""
    for scenario in pairs("forum"):
        assert scenario.mechanisms[0] == "nccl"
        assert len(scenario.mechanisms) > 3
        assert len(scenario.orders) == 3


@pytest.mark.parametrize(
    ("suite", "device", "mechanisms", "said"),
    [
        ("slow", "cuda", None, "choose from: quick"),
        ("conccl", "cpu", None, "on a CPU there are quick, tensor, expert, machine"),
        ("quick", "cuda", ["smoke_signals"], "choose from: nccl"),
        ("quick", "cuda", ["nccl+volume=11"], "volume"),
        ("quick", "cpu", ["nccl"], "choose from: gloo"),
        ("quick", "cpu", ["gloo+priority=high"], "is a control of GPUs"),
        ("machine", "cuda", ["nccl"], "takes no --mechanism"),
        ("expert", "cuda", ["cuts"], "no mechanism 'cuts' of suite 'expert'; choose from: torch, gather, slabs, auto"),
        ("tensor", "cuda", ["nccl"], "no mechanism 'nccl' of suite 'tensor'; choose from: torch, serial"),
    ],
)
def test_bad_requests_are_refused(suite: str, device: str, mechanisms: list[str] | None, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        parts_of(suite, device=device, mechanisms=mechanisms)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_machine_is_measured_with_all_that_a_profile_needs(device: str) -> None:
    """Both ways to run every collective at the same sizes, pairs in every order, and launches."""
    found = blocks("machine", device=device)
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "launch kernel"} <= found.keys()
    assert "zero_sm" in found["broadcast"].mechanisms
    assert {len(scenario.orders) for scenario in pairs("machine", device=device)} == {3}


def test_a_machine_is_measured_by_its_own_sms() -> None:
    """GEMMs leave 8, 16 and 24 SMs of as many as the GPU has."""
    by_sms = blocks("machine", num_sms=108)["gemm 8192x8192x8192 by SMs"].mechanisms
    assert by_sms == ("stock", "gemm_sms=100", "gemm_sms=92", "gemm_sms=84")
    mechanisms = set(chain.from_iterable(each.mechanisms for each in pairs("machine", num_sms=108)))
    assert mechanisms > {capped(108), *few_sms(108), "nccl+max_ctas=8+gemm_sms=100"}


@pytest.mark.parametrize(
    ("suite", "device", "asked"),
    [
        ("quick", "cuda", ["nccl_zero_cta", "nccl", "nccl_zero_cta"]),
        ("expert", "cpu", ["gather", "torch", "gather"]),
        ("tensor", "cpu", ["cuts", "torch", "cuts"]),
    ],
)
def test_mechanisms_replace_the_suites_own(suite: str, device: str, asked: Sequence[str]) -> None:
    """In the order given, each once."""
    assert {part.mechanisms for part in parts_of(suite, device=device, mechanisms=asked)} == {tuple(asked[:2])}


def test_matmuls_of_the_results_and_of_layers() -> None:
    """On eight ranks gate and up of 70B are 7168 columns, which is a shape of the results, too: it is there once."""
    assert blocks("tensor").keys() >= {
        "all_gather_matmul 8192x7168x8192",
        "matmul_reduce_scatter 8192x8192x3584",
        "all_gather_matmul 8192x768x4096",
        "all_gather_matmul 8192x1280x8192",
    }


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_matmuls_divide_among_any_number_of_ranks(device: str, world_size: int) -> None:
    """Rows do, and whatever layers cannot be divided is not there."""
    calls = [find_dependent(what) for what in blocks("tensor", device=device, world_size=world_size)]
    assert {call.m % world_size for call in calls} == {0}
    assert {call.operation for call in calls} == {"all_gather_matmul", "matmul_reduce_scatter"}


def test_a_matmul_is_read_from_its_name() -> None:
    """What moves is the input of one and the output of the other."""
    gathered, scattered = (find_dependent(f"{name} 16x3x5") for name in ("all_gather_matmul", "matmul_reduce_scatter"))
    assert gathered == DependentMatmul(operation="all_gather_matmul", m=16, n=3, k=5)
    assert (gathered.moved, scattered.moved, gathered.flops) == (16 * 5, 16 * 3, 480)
    with pytest.raises(Misconfigured, match="write one of: all_gather_matmul MxNxK"):
        find_dependent("all_gather_matmul 16x3")


@pytest.mark.parametrize(("world_size", "layers"), [(2, 3), (8, 3), (16, 2), (3, 0)])
def test_exchanges_are_of_layers_that_ranks_can_share(world_size: int, layers: int) -> None:
    """16 ranks cannot share the 8 experts of Mixtral; each layer has three numbers of tokens, routed in three ways."""
    found = blocks("expert", world_size=world_size)
    assert len(found) == 9 * layers
    assert all(find_exchange(what).sizes.experts % world_size == 0 for what in found)
