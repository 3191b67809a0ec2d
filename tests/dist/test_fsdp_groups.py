"""Modules whose parameters lie on several meshes, beside stock FSDP2: ours communicate for each group of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from counterpoint.measurement.session import Session
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import overlap
from tests.dist.fsdp_places_programs import ALL, ORDERS, PREPARED, Model, homes, losses_and_gradients
from tests.support.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Case:
    """Where parameters lie, and how they are trained.

    Args:
        mesh: sizes of its two axes: biases are sharded over the second, weights over the first.
        orders: of the layers in each step.
        prepared: what is set before each step.
        placement: of weights.
    """

    mesh: tuple[int, int] = (2, 2)
    orders: str = "the same"
    prepared: str = "as they come"
    options: OverlapOptions | None = None
    placement: Any = None


def model(case: Case) -> Any:
    """Layers of two groups of parameters each, the same weights every time."""
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("weights", "biases"))
    weights = _fsdp_common.FSDPMeshInfo(mesh["weights"], shard_mesh_dim=0)

    def placed(parameter: Any) -> Any:
        return _fsdp_common.ShardPlacementResult(case.placement, weights) if parameter.dim() == 2 else None

    torch.manual_seed(3)
    made = Model()
    for layer in made.layers:
        fully_shard(layer, mesh=mesh["biases"], shard_placement_fn=placed)
    fully_shard(made, mesh=mesh["biases"])
    return made


def beside_stock(session: Session, case: Case) -> list[int]:
    """Which losses and gradients differ from stock's, or are of another number."""
    how = ORDERS[case.orders], PREPARED[case.prepared]
    expected, made = losses_and_gradients(model(case), session, *how), model(case)
    with overlap(made, options=case.options):
        got = losses_and_gradients(made, session, *how)
    pairs = enumerate(zip(expected, got, strict=True))
    return [at for at, (one, other) in pairs if not torch.equal(torch.as_tensor(one), torch.as_tensor(other))]


def reported(session: Session, case: Case) -> list[tuple[str, tuple[int, ...], bool, bool]]:
    """Of each group of the first layer after two steps: name, ranks, whether gathers and scatters were direct."""
    made = model(case)
    with overlap(made, options=case.options) as handle:
        losses_and_gradients(made, session, [ALL] * 2, PREPARED["as they come"])
        return [
            (
                one.name,
                one.ranks,
                one.moved("all_gather").how == "direct",
                one.moved("reduce_scatter").how == "direct",
            )
            for one in handle.report().modules[:2]
        ]


def prefetched(session: Session) -> tuple[str, list[int]]:
    """What is said of prefetching, and how many modules each layer gathers ahead in the forward pass."""
    made = model(Case())
    with overlap(made, options=OverlapOptions(prefetch=2)) as handle:
        losses_and_gradients(made, session, [ALL], PREPARED["as they come"])
        ahead = [len(layer._get_fsdp_state()._states_to_forward_prefetch) for layer in made.layers]
        return handle.report().notes[-1], ahead


def places(session: Session, mesh: tuple[int, int]) -> int:
    """At how many places the groups of all layers were after three steps."""
    made = model(Case(mesh=mesh))
    with overlap(made) as handle:
        losses_and_gradients(made, session, [ALL] * 3, PREPARED["as they come"])
        return len({id(home.slot) for home in homes(handle) if home is not None and home.layout})


def restored(session: Session) -> list[bool]:
    """Whether every group has torch's own collectives after `restore`."""
    made = model(Case())
    overlap(made).restore()
    groups = [group for layer in made.layers for group in layer._get_fsdp_state()._fsdp_param_groups]
    hooks = [hook for group in groups for hook in (group._all_gather_comm, group._reduce_scatter_comm)]
    return [type(hook).__name__.startswith("Default") for hook in hooks]


BY_COLUMNS = Shard(1)


pytestmark = pytest.mark.needs("torch-2.13")
WAYS = [*(("the same", prepared) for prepared in PREPARED), *((orders, "as they come") for orders in ORDERS)]


@pytest.mark.parametrize(("orders", "prepared"), WAYS)
def test_training_on_two_meshes_is_that_of_stock(four_ranks: Ranks, orders: str, prepared: str) -> None:
    """Weights over one axis, biases over the other: the same bits."""
    assert four_ranks.run(beside_stock, Case(orders=orders, prepared=prepared)) == [[]] * 4


@pytest.mark.parametrize(
    "options", [OverlapOptions(prefetch=1), OverlapOptions(prefetch=2), OverlapOptions(direct=False)], ids=str
)
def test_options_hold_for_each_group(four_ranks: Ranks, options: OverlapOptions) -> None:
    """Gathered ahead, or copied: the same bits."""
    assert four_ranks.run(beside_stock, Case(options=options)) == [[]] * 4


def test_a_group_may_be_sharded_along_another_axis(four_ranks: Ranks) -> None:
    """Weights by columns, which FSDP2 copies; biases are gathered to where they are used."""
    case = Case(placement=BY_COLUMNS)
    assert four_ranks.run(beside_stock, case) == [[]] * 4
    for rows in four_ranks.run(reported, case):
        assert {direct for _, _, direct, _ in rows} == {False, True}


def test_each_group_is_reported(four_ranks: Ranks) -> None:
    """By its number and its own ranks; both gather and scatter without a copy."""
    for rank, rows in enumerate(four_ranks.run(reported, Case())):
        weights, biases = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert rows == [
            ("layers.0 (group 1 of 2)", weights, True, True),
            ("layers.0 (group 2 of 2)", biases, True, True),
        ]


def test_a_group_of_one_rank_stays_with_torch(two_ranks: Ranks) -> None:
    """It has nothing to gather; the other group is ours."""
    assert two_ranks.run(beside_stock, Case(mesh=(1, 2))) == [[], []]
    for rows in two_ranks.run(reported, Case(mesh=(1, 2))):
        assert [direct for _, _, direct, _ in rows] == [False, True]


def test_modules_are_prefetched_once(four_ranks: Ranks) -> None:
    """FSDP2 gathers all groups of a module that is named to it: each module is named once."""
    said = "prefetch: 2 ahead, 6 of 6 modules, in the order in which they ran"
    assert four_ranks.run(prefetched) == [(said, [2, 2, 2, 2, 1, 0])] * 4


def test_each_group_has_places_of_its_own(four_ranks: Ranks) -> None:
    """Two for each: the layer that computes, and the one that is gathered ahead."""
    assert four_ranks.run(places, (2, 2)) == [4] * 4


def test_restore_gives_torch_back_in_each_group(four_ranks: Ranks) -> None:
    """Both hooks of both groups of all layers."""
    assert four_ranks.run(restored) == [[True] * 24] * 4
