"""What ranks run to test where parameters are gathered to: layers of one size, called in any order, beside stock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from counterpoint.measurement.session import Session
from counterpoint.parallel.fsdp.slots import ModuleParameters
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import Overlap, overlap
from tests.support.ranks import error_of

Prepare = Callable[[Any, int], object]
"""The model and the number of the step."""
WIDTH, LAYERS = 16, 6


class Layer(nn.Module):
    """A linear layer that may call another one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden: Tensor, inner: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        hidden = hidden @ self.weight
        if inner is not None:
            hidden = inner(hidden)
        return torch.tanh(hidden) @ self.weight.t() + self.bias


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden: Tensor, inner: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        hidden = torch.tanh(hidden) * self.scale
        return (hidden if inner is None else inner(hidden)) + self.shift


class Model(nn.Module):
    """Layers in the order that is asked for; of a pair the second is called inside the first."""

    def __init__(self, kind: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, hidden: Tensor, order: Sequence[int | tuple[int, int]]) -> Tensor:
        for one in order:
            outer, inner = (one, None) if isinstance(one, int) else (one[0], self.layers[one[1]])
            hidden = hidden + self.layers[outer](hidden, inner)
        return hidden.square().mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    """How layers are sharded and trained."""

    orders: str = "the same"  # of the layers in each step
    prepared: str = "as they come"  # what is set before each step
    options: OverlapOptions | None = None
    kind: type[nn.Module] = Layer  # of the layers
    whole: bool = False  # `fully_shard` is called on the model only, not on its layers
    # sizes of two axes: biases are sharded over the second, weights over the first; None: one axis for all
    mesh: tuple[int, int] | None = None
    placement: Any = None  # of weights on a mesh of two axes


def model(case: Case = Case()) -> Any:  # nobody changes it
    torch.manual_seed(3)
    made, options = Model(case.kind), dict[str, Any]()
    if case.mesh is not None:
        mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("weights", "biases"))
        options = {"mesh": mesh["biases"], "shard_placement_fn": _placed_on(mesh["weights"], case.placement)}
    for layer in () if case.whole else made.layers:
        fully_shard(layer, **options)
    fully_shard(made, **{"mesh": options["mesh"]} if options else {})
    return made


def _placed_on(mesh: Any, placement: Any) -> Callable[[Any], Any]:
    from torch.distributed.fsdp._fully_shard import _fsdp_common  # torch 2.11 has less in it

    weights = _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return lambda one: _fsdp_common.ShardPlacementResult(placement, weights) if one.dim() == 2 else None


def losses_and_gradients(made: Any, session: Session, orders: Sequence[Sequence[Any]], prepare: Prepare) -> list[Any]:
    """Of a step in each of the orders; without gradients, and those kept, in every third."""
    seen: list[Any] = []
    shards = list(made.parameters())  # kept whole after backward, the model's parameters are others
    for step, order in enumerate(orders):
        prepare(made, step)
        hidden = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + session.rank))
        if step % 3 == 2:
            with torch.no_grad():
                seen.append(made(hidden, order).item())
        loss = made(hidden, order)
        loss.backward()
        seen.append(loss.item())
        seen += [one.grad.to_local().clone() for one in shards if one.grad is not None]
        for one in shards:
            one.grad = None
    return seen


def _nothing(made: Any, step: int) -> None:
    pass


def _kept_after_backward(made: Any, step: int) -> None:
    for layer in made.layers:
        layer.set_reshard_after_backward(step % 2 == 0)


def _kept_after_forward(made: Any, step: int) -> None:
    for layer in made.layers:
        layer.set_reshard_after_forward(step % 2 == 0)


def _all_at_once(made: Any, step: int) -> None:
    if step == 1:
        for layer in made.layers:
            layer.unshard()


def _prefetched_in_vain(made: Any, step: int) -> None:
    for index, layer in enumerate(made.layers):
        layer.set_modules_to_forward_prefetch(list(made.layers[index + 1 : index + 3]))
        layer.set_modules_to_backward_prefetch(list(made.layers[index - 2 : index]) if index > 1 else [])


PREPARED: dict[str, Prepare] = {
    "as they come": _nothing,
    "kept after backward": _kept_after_backward,
    "kept after forward": _kept_after_forward,
    "all at once": _all_at_once,
    "prefetched in vain": _prefetched_in_vain,
}
ALL = list(range(LAYERS))
ORDERS: dict[str, list[list[Any]]] = {
    "the same": [ALL] * 5,
    "backwards": [ALL, ALL[::-1], ALL],
    "every other": [ALL, ALL[::2], ALL[1::2], ALL, ALL[::3]],
    "again": [ALL, [*ALL, 0, 1], [0, 0, 0, 2, 2]],
    "inside": [ALL, [0, (2, 4), 1, (5, 3)], ALL, [(0, 2), (1, 3)], [(4, 0), 2]],
}


def beside_stock(session: Session, case: Case) -> list[int]:
    """Which of the losses and gradients differ from stock's."""
    what = ORDERS[case.orders], PREPARED[case.prepared]
    expected, made = losses_and_gradients(model(case), session, *what), model(case)
    with overlap(made, options=case.options):
        got = losses_and_gradients(made, session, *what)
    return different(got, expected)


def viewed_on_one(session: Session, orders: str) -> list[int]:
    """Which losses and gradients differ from stock's if rank 0 still has views of parameters, in cycles for example."""
    real = ModuleParameters._storage_references

    def references(self: ModuleParameters) -> int:
        return real(self) + (session.rank == 0 and self.slot is not None)

    with patch.object(ModuleParameters, "_storage_references", references):
        return beside_stock(session, Case(orders=orders))


def different(got: list[Any], expected: list[Any]) -> list[int]:
    pairs = enumerate(zip(got, expected, strict=True))
    return [at for at, (one, other) in pairs if not torch.equal(torch.as_tensor(one), torch.as_tensor(other))]


def places(session: Session, case: Case) -> list[int]:
    """At how many places layers were after each of three steps."""
    made, seen = model(case), []
    with overlap(made, options=case.options) as handle:
        for step in range(3):
            losses_and_gradients(made, session, [ALL] * (step + 1), _nothing)
            seen.append(len({id(home.slot) for home in homes(handle) if home.layout}))
    return seen


def homes(handle: Overlap) -> list[Any]:
    return [hooked._gather.parameters for hooked in handle._shards._hooked.values() if hooked._gather is not None]


def cast_before_the_first_step(session: Session) -> list[int]:
    """Which losses and gradients differ from stock's in a model whose parameters become twice as large after
    `overlap`."""

    def seen(made: Any) -> list[Any]:
        made.double()
        torch.set_default_dtype(torch.float64)
        try:
            return losses_and_gradients(made, session, [ALL] * 2, _nothing)
        finally:
            torch.set_default_dtype(torch.float32)

    expected, made = seen(model()), model()
    with overlap(made):
        got = seen(made)
    return different(got, expected)


class Mixed(nn.Module):
    """Parameters of three dtypes, two of them frozen, which FSDP2 gathers as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.scale = nn.Parameter(torch.rand(WIDTH + 1, dtype=torch.bfloat16), requires_grad=False)
        self.shift = nn.Parameter(torch.arange(3 * WIDTH, dtype=torch.int32), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scaled = self.layer(hidden) * self.scale[:WIDTH]
        loss: Tensor = (scaled + self.shift[-WIDTH:]).square().mean()
        return loss


def mixed_dtypes(session: Session) -> list[bool]:
    """Whether losses and gradients of three steps are those of stock, and gathers were direct."""

    def made() -> Any:
        torch.manual_seed(5)
        whole = Mixed()
        fully_shard(whole)
        return whole

    def steps(whole: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            loss = whole(torch.full((2, WIDTH), float(step + session.rank)))
            loss.backward()
            seen += [loss.detach(), *(one.grad.to_local() for one in whole.layer.parameters())]
            whole.zero_grad()
        return seen

    expected, ours = steps(made()), made()
    with overlap(ours) as handle:
        equal = all(map(torch.equal, expected, steps(ours)))
        gather = handle.report().modules[0].moved("all_gather")
    return [equal, gather.how == "direct"]


def in_use_at_once(session: Session) -> str:
    """What is said if a layer that autograd has views of is needed while another one is in use at its place."""
    made = model()
    with overlap(made):
        losses_and_gradients(made, session, [ALL], _nothing)
        return error_of(lambda: made(torch.ones(1, WIDTH), [0, (2, 0)]))


def left_in_use(session: Session) -> list[int]:
    """Which losses and gradients differ from stock's after `restore`, with layers that were kept after forward."""
    made = model()
    handle = overlap(made)
    _kept_after_forward(made, 1)
    with torch.no_grad():
        made(torch.ones(1, WIDTH), ALL)
    handle.restore()
    got = losses_and_gradients(made, session, [ALL] * 2, _nothing)
    expected = losses_and_gradients(model(), session, [ALL] * 2, _nothing)
    return different(got, expected)
