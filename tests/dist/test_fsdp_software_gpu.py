"""FSDP2 on the communicator of GPUs without one: pools, early releases, streams and graphs in FSDP2's own order."""

import pytest

from tests.dist import fsdp_software_gpu_programs as software
from tests.dist.fsdp_programs import mapped_bytes
from tests.support.fsdp_training import BF16, CASES, Case, beside_stock
from tests.support.ranks import Ranks

EAGER = {name: case for name, case in CASES.items() if case.compiled is None}


@pytest.mark.parametrize("case", EAGER.values(), ids=EAGER)
def test_training_is_that_of_stock(two_ranks: Ranks, case: Case) -> None:
    """Every bit, in place, and no buffer at another place than at the peer, which would raise."""
    assert two_ranks.run(software.run_on_software_gpu, beside_stock, case) == [([], [])] * 2


def test_hybrid_sharding_is_that_of_stock(four_ranks: Ranks) -> None:
    assert four_ranks.run(software.run_on_software_gpu, beside_stock, Case(policy=BF16, mesh=(2, 2))) == [([], [])] * 4


def test_two_groups_of_one_rank_gather_in_place(four_ranks: Ranks) -> None:
    """Sharded over four ranks, over two after forward: each group has early releases of its own."""
    case = Case(mesh=(4,), reshard=2, steps=1, direct=(False, True))
    seen = four_ranks.run(software.run_on_software_gpu, beside_stock, case)
    assert [[line.split(":")[0] for line in wrong] for _, wrong in seen] == [["(root)"]] * 4


def test_memory_does_not_grow(two_ranks: Ranks) -> None:
    for seen in two_ranks.run(software.run_on_software_gpu, mapped_bytes, 300):
        assert seen == [seen[0]] * 10
