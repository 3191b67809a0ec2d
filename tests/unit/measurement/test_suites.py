"""Named suites: whatever is in them can be parsed, has a unique name, and is what the issue's papers measured."""

from __future__ import annotations

from collections import Counter

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.measurement.collective import collectives
from counterpoint.measurement.dependent import DependentMatmul, find_dependent, find_exchange
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.measurement.suites import SUITES, blocks_of, capped, few_sms, scenarios_of
from counterpoint.measurement.workloads import find_workload


@pytest.mark.parametrize("suite", SUITES)
def test_everything_in_a_suite_is_known(suite: str) -> None:
    """Workloads, collectives and mechanisms all parse."""
    for scenario in scenarios_of(suite, device="cuda"):
        find_workload(scenario.workload)
        assert scenario.collective in collectives()
        assert [find_mechanism(name, "cuda").name for name in scenario.mechanisms] == list(scenario.mechanisms)


@pytest.mark.parametrize("suite", SUITES)
def test_names_are_unique(suite: str) -> None:
    """Resuming goes by name."""
    names = [scenario.name for scenario in scenarios_of(suite, device="cuda")]
    names += [block.name for block in blocks_of(suite, device="cuda", world_size=8)]
    assert max(Counter(names).values()) == 1


@pytest.mark.parametrize(("suite", "count"), [("pairs", 64), ("conccl", 30), ("resource-aware", 4), ("blocks", 0)])
def test_sizes_of_suites(suite: str, count: int) -> None:
    """4 loads x 4 collectives x 4 ratios; ConCCL's 30; both GEMMs x two collectives of 896 MiB; no pairs."""
    assert len(scenarios_of(suite, device="cuda")) == count


def test_the_forum_case_has_three_remedies_and_every_order() -> None:
    """Stock NCCL, and enough beside it."""
    for scenario in scenarios_of("forum", device="cuda"):
        assert scenario.mechanisms[0] == "nccl"
        assert len(scenario.mechanisms) > 3
        assert len(scenario.orders) == 3


def test_blocks_cover_1_kb_to_1_gb() -> None:
    """Bandwidth by size, CTAs and engines; GEMM time by SMs."""
    blocks = {block.name: block for block in blocks_of("blocks", device="cuda", world_size=8)}
    assert (min(blocks["all_gather"].sizes_bytes), max(blocks["all_gather"].sizes_bytes)) == (1 << 10, 1 << 30)
    assert any("max_ctas=1" in name for name in blocks["all_gather by CTAs"].mechanisms)
    assert any("gemm_sms=" in name for name in blocks["gemm 8192x8192x8192 by SMs"].mechanisms)


@pytest.mark.parametrize(
    ("suite", "device", "mechanisms", "said"),
    [
        ("slow", "cuda", None, "choose from: quick"),
        ("conccl", "cpu", None, "on a CPU there are quick, tensor, expert, machine"),
        ("quick", "cuda", ["smoke_signals"], "choose from: nccl"),
        ("quick", "cuda", ["nccl+volume=11"], "volume"),
        ("quick", "cpu", ["nccl"], "choose from: gloo"),
        ("quick", "cpu", ["gloo+priority=high"], "is a control of GPUs"),
        ("blocks", "cuda", ["nccl"], "takes no --mechanism"),
    ],
)
def test_bad_requests_are_refused(suite: str, device: str, mechanisms: list[str] | None, said: str) -> None:
    """Before any process is started, with what is allowed."""
    with pytest.raises(Misconfigured, match=said):
        scenarios_of(suite, device=device, mechanisms=mechanisms)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_machine_is_measured_with_all_that_a_profile_needs(device: str) -> None:
    """Both ways to run every collective at the same sizes, pairs in every order, and launches."""
    blocks = {block.what: block for block in blocks_of("machine", device=device, world_size=4)}
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "launch kernel"} <= blocks.keys()
    assert "zero_sm" in blocks["broadcast"].mechanisms
    assert {len(scenario.orders) for scenario in scenarios_of("machine", device=device)} == {3}


def test_a_machine_is_measured_whole() -> None:
    """A profile without some of the mechanisms would be another's."""
    with pytest.raises(Misconfigured, match="takes no --mechanism"):
        scenarios_of("machine", device="cuda", mechanisms=["nccl"])


def test_a_machine_is_measured_by_its_own_sms() -> None:
    """GEMMs leave 8, 16 and 24 SMs of as many as the GPU has."""
    blocks = {block.name: block for block in blocks_of("machine", device="cuda", world_size=4, num_sms=108)}
    by_sms = blocks["gemm 8192x8192x8192 by SMs"].mechanisms
    assert by_sms == ("stock", "gemm_sms=100", "gemm_sms=92", "gemm_sms=84")
    mechanisms = {name for each in scenarios_of("machine", device="cuda", num_sms=108) for name in each.mechanisms}
    assert mechanisms > {capped(108), *few_sms(108), "nccl+max_ctas=8+gemm_sms=100"}


def test_mechanisms_replace_the_suites_own() -> None:
    """In the order given, each once."""
    scenario = scenarios_of("quick", device="cuda", mechanisms=["nccl_zero_cta", "nccl", "nccl_zero_cta"])[0]
    assert scenario.mechanisms == ("nccl_zero_cta", "nccl")


def test_matmuls_of_the_results_and_of_layers() -> None:
    """On eight ranks gate and up of 70B are 7168 columns, which is a shape of the results, too: it is there once."""
    names = [block.name for block in blocks_of("tensor", device="cuda", world_size=8)]
    assert names.count("all_gather_matmul 8192x7168x8192") == 1
    wanted = {
        "matmul_reduce_scatter 8192x8192x3584",
        "all_gather_matmul 8192x768x4096",
        "all_gather_matmul 8192x1280x8192",
    }
    assert wanted <= set(names)


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_matmuls_divide_among_any_number_of_ranks(device: str, world_size: int) -> None:
    """Rows do, and whatever layers cannot be divided is not there."""
    blocks = blocks_of("tensor", device=device, world_size=world_size)
    calls = [find_dependent(block.what) for block in blocks]
    assert [call.m % world_size for call in calls] == [0] * len(blocks)
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
    blocks = blocks_of("expert", device="cuda", world_size=world_size)
    assert len(blocks) == 9 * layers
    assert all(find_exchange(block.what).sizes.experts % world_size == 0 for block in blocks)
    assert not scenarios_of("expert", device="cuda")


def test_mechanisms_of_exchanges_are_chosen_by_name() -> None:
    """Each once; a wrong one is refused with what there is."""
    block, *others = blocks_of("expert", device="cpu", world_size=2, mechanisms=["gather", "torch", "gather"])
    assert (block.what, block.mechanisms) == ("exchange tiny 128 uniform", ("gather", "torch"))
    assert len(others) == 2
    with pytest.raises(
        Misconfigured, match="no mechanism 'cuts' of suite 'expert'; choose from: torch, nccl, symm_mem"
    ):
        blocks_of("expert", device="cuda", world_size=2, mechanisms=["cuts"])


def test_mechanisms_of_matmuls_are_chosen_by_name() -> None:
    """Each once; a wrong one is refused with what there is."""
    block = blocks_of("tensor", device="cpu", world_size=2, mechanisms=["cuts", "torch", "cuts"])[0]
    assert block.mechanisms == ("cuts", "torch")
    with pytest.raises(Misconfigured, match="no mechanism 'nccl' of suite 'tensor'; choose from: torch, symm_mem"):
        blocks_of("tensor", device="cuda", world_size=2, mechanisms=["nccl"])
