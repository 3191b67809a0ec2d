"""The suite that the rule is judged on: what it measures is what the rule needs."""

from __future__ import annotations

from collections import Counter

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.measurement.suites import BUDGET, BUDGET_GEMMS, blocks_of, scenarios_of
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.sm_split import SmSplit

PAIRS = scenarios_of("budget", device="cuda")
BLOCKS = blocks_of("budget", device="cuda", world_size=8)


@pytest.mark.parametrize("mechanism", BUDGET)
def test_every_mechanism_divides_sms(mechanism: str) -> None:
    """It is one of this package, and the rule can read its name."""
    assert find_mechanism(mechanism, "cuda").name == SmSplit.parse(mechanism).mechanism


@pytest.mark.parametrize("gemm", BUDGET_GEMMS)
def test_every_gemm_exists(gemm: str) -> None:
    """Its name is that of a workload."""
    assert find_workload(gemm).name == gemm


def test_both_sides_of_every_pair_are_measured_alone() -> None:
    """What a mechanism leaves of either side is among the building blocks."""
    alone = {(block.what, setting) for block in BLOCKS for setting in block.mechanisms}
    needed = set()
    for pair in PAIRS:
        for choice in map(SmSplit.parse, pair.mechanisms):
            limited = SmSplit(max_ctas=choice.max_ctas, cga_cluster=choice.cga_cluster).mechanism
            setting = f"gemm_sms={choice.gemm_sms}" if choice.gemm_sms else "stock"
            needed |= {(pair.workload, setting), (pair.collective, limited)}
    assert needed <= alone


def test_names_are_unique() -> None:
    """Progress is kept by name."""
    names = [*(pair.name for pair in PAIRS), *(block.name for block in BLOCKS)]
    assert len(names) == len(set(names))


def test_collectives_take_turns() -> None:
    """24 pairs, 8 with each collective, and each GEMM meets all three."""
    by_gemm = {(pair.workload, pair.collective) for pair in PAIRS}
    assert (set(Counter(pair.collective for pair in PAIRS).values()), len(by_gemm)) == ({8}, 18)


def test_other_suites_of_pairs_have_no_blocks() -> None:
    """Building blocks belong to `blocks`, `budget` and `tensor`."""
    found = [bool(blocks_of(suite, device="cuda", world_size=8)) for suite in ("quick", "blocks")]
    assert found == [False, True]


def test_it_is_refused_on_cpus() -> None:
    """There are no SMs to divide."""
    with pytest.raises(Misconfigured, match="'budget' is about GPUs"):
        scenarios_of("budget", device="cpu")
