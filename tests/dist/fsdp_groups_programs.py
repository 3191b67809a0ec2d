"""What ranks run to test modules whose parameters lie on several meshes, as those of experts do (torch >= 2.12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from counterpoint.measurement.session import Session
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import overlap
from tests.dist.fsdp_places_programs import ALL, ORDERS, PREPARED, Model, homes, losses_and_gradients


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
