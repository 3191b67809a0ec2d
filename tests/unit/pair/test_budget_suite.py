"""The suites that rules and fits are made from: all in them can be measured, and is what is needed."""

from collections import Counter

import pytest
from measure_suites import BUDGET, SUITES, blocks, budget_blocks, budget_pairs

from counterpoint.measurement.collective import collectives
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.measurement.workloads import find_workload
from counterpoint.pair.sm_split import SmSplit
from counterpoint.records.measurement import Scenario

PAIRS, BLOCKS = budget_pairs(), budget_blocks()


@pytest.mark.parametrize("mechanism", BUDGET)
def test_every_mechanism_divides_sms(mechanism: str) -> None:
    assert find_mechanism(mechanism, "cuda").name == SmSplit.parse(mechanism).mechanism


@pytest.mark.parametrize("suite", SUITES)
def test_all_parts_are_known(suite: str) -> None:
    parts = SUITES[suite]()
    for part in parts:
        if isinstance(part, Scenario):
            find_workload(part.workload)
            assert [find_mechanism(name, "cuda").name for name in part.mechanisms] == list(part.mechanisms)
        elif part.what not in collectives():
            find_workload(part.what)
    assert max(Counter(part.name for part in parts).values()) == 1


def test_both_sides_of_every_pair_are_measured_alone() -> None:
    alone = {(block.what, setting) for block in BLOCKS for setting in block.mechanisms}
    needed = set()
    for pair in PAIRS:
        for choice in map(SmSplit.parse, pair.mechanisms):
            limited = SmSplit(max_ctas=choice.max_ctas, cga_cluster=choice.cga_cluster).mechanism
            setting = f"gemm_sms={choice.gemm_sms}" if choice.gemm_sms else "stock"
            needed |= {(pair.workload, setting), (pair.collective, limited)}
    assert needed <= alone


def test_collectives_take_turns() -> None:
    """24 pairs, 8 with each collective, and each GEMM meets all three."""
    by_gemm = {(pair.workload, pair.collective) for pair in PAIRS}
    assert (set(Counter(pair.collective for pair in PAIRS).values()), len(by_gemm)) == ({8}, 18)


def test_blocks_cover_1_kb_to_1_gb() -> None:
    """Bandwidth by size, CTAs and engines; GEMM time by SMs."""
    found = {block.name: block for block in blocks()}
    assert (min(found["all_gather"].sizes_bytes), max(found["all_gather"].sizes_bytes)) == (1 << 10, 1 << 30)
    assert any("max_ctas=1" in name for name in found["all_gather by CTAs"].mechanisms)
    assert any("gemm_sms=" in name for name in found["gemm 8192x8192x8192 by SMs"].mechanisms)
