"""Named suites: whatever is in them can be parsed, has a unique name, and is what the issue's papers measured."""

from __future__ import annotations

from collections import Counter

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.measurement.collective import collectives
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.measurement.suites import SUITES, blocks_of, scenarios_of
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
    names += [block.name for block in blocks_of(suite)]
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
    blocks = {block.name: block for block in blocks_of("blocks")}
    assert (min(blocks["all_gather"].sizes_bytes), max(blocks["all_gather"].sizes_bytes)) == (1 << 10, 1 << 30)
    assert any("max_ctas=1" in name for name in blocks["all_gather by CTAs"].mechanisms)
    assert any("gemm_sms=" in name for name in blocks["gemm 8192x8192x8192 by SMs"].mechanisms)


@pytest.mark.parametrize(
    ("suite", "device", "mechanisms", "said"),
    [
        ("slow", "cuda", None, "choose from: quick"),
        ("conccl", "cpu", None, "on a CPU there is only quick"),
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


def test_mechanisms_replace_the_suites_own() -> None:
    """In the order given, each once."""
    scenario = scenarios_of("quick", device="cuda", mechanisms=["nccl_zero_cta", "nccl", "nccl_zero_cta"])[0]
    assert scenario.mechanisms == ("nccl_zero_cta", "nccl")
