"""Modules whose parameters lie on several meshes, beside stock FSDP2: ours communicate for each group of them."""

from dataclasses import replace

import pytest
from torch.distributed.tensor import Shard

from counterpoint.measurement.session import Session
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import overlap
from tests.dist.fsdp_places_programs import (
    ALL,
    ORDERS,
    PREPARED,
    Case,
    beside_stock,
    losses_and_gradients,
    model,
    places,
)
from tests.support.ranks import Ranks, finding

TWO_MESHES = Case(mesh=(2, 2))


def reported(session: Session, case: Case) -> list[tuple[str, tuple[int, ...], bool, bool]]:
    """Of each group of the first layer after two steps: name, ranks, whether gathers and scatters were direct."""
    made = model(case)
    with overlap(made, options=case.options) as handle:
        losses_and_gradients(made, session, [ALL] * 2, PREPARED["as they come"])
        return [
            (one.name, one.ranks, one.moved("all_gather").how == "direct", one.moved("reduce_scatter").how == "direct")
            for one in handle.report().modules[:2]
        ]


def prefetched(session: Session) -> tuple[str, list[int]]:
    """What is said of prefetching, and how many modules each layer gathers ahead in the forward pass."""
    made = model(TWO_MESHES)
    with overlap(made, options=OverlapOptions(prefetch=2)) as handle:
        losses_and_gradients(made, session, [ALL], PREPARED["as they come"])
        ahead = [len(layer._get_fsdp_state()._states_to_forward_prefetch) for layer in made.layers]
        return handle.report().notes[-1], ahead


def restored(session: Session) -> list[bool]:
    made = model(TWO_MESHES)
    overlap(made).restore()
    groups = [group for layer in made.layers for group in layer._get_fsdp_state()._fsdp_param_groups]
    hooks = [hook for group in groups for hook in (group._all_gather_comm, group._reduce_scatter_comm)]
    return [type(hook).__name__.startswith("Default") for hook in hooks]


pytestmark = pytest.mark.needs("torch-2.13")
WAYS = [*(("the same", prepared) for prepared in PREPARED), *((orders, "as they come") for orders in ORDERS)]


@pytest.mark.parametrize(("orders", "prepared"), WAYS)
def test_training_on_two_meshes_is_that_of_stock(four_ranks: Ranks, orders: str, prepared: str) -> None:
    assert four_ranks.run(beside_stock, Case(mesh=(2, 2), orders=orders, prepared=prepared)) == [[]] * 4


def test_a_group_may_be_sharded_along_another_axis(four_ranks: Ranks) -> None:
    """Weights by columns, which FSDP2 copies; biases are gathered to where they are used."""
    case = Case(mesh=(2, 2), placement=Shard(1))
    assert four_ranks.run(beside_stock, case) == [[]] * 4
    for rows in four_ranks.run(reported, case):
        assert {direct for _, _, direct, _ in rows} == {False, True}


def test_each_group_is_reported(four_ranks: Ranks) -> None:
    for rank, rows in enumerate(four_ranks.run(reported, TWO_MESHES)):
        weights, biases = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert rows == [
            ("layers.0 (group 1 of 2)", weights, True, True),
            ("layers.0 (group 2 of 2)", biases, True, True),
        ]


def test_a_group_of_one_rank_stays_with_torch(two_ranks: Ranks) -> None:
    assert two_ranks.run(beside_stock, Case(mesh=(1, 2))) == [[], []]
    for rows in two_ranks.run(reported, Case(mesh=(1, 2))):
        assert [direct for _, _, direct, _ in rows] == [False, True]


PREFETCHED = "prefetch: 2 ahead, 6 of 6 modules, in the order in which they ran"
test_what_ranks_find = finding({
    "gathered one ahead": (4, beside_stock, (replace(TWO_MESHES, options=OverlapOptions(prefetch=1)),), []),
    "gathered two ahead": (4, beside_stock, (replace(TWO_MESHES, options=OverlapOptions(prefetch=2)),), []),
    "copied": (4, beside_stock, (replace(TWO_MESHES, options=OverlapOptions(direct=False)),), []),
    "modules are prefetched once": (4, prefetched, (), (PREFETCHED, [2, 2, 2, 2, 1, 0])),
    "two places for each group": (4, places, (TWO_MESHES,), [4] * 3),
    "restore gives torch back": (4, restored, (), [True] * 24),
})  # fmt: skip
