"""The order of prefetching, from the order in which modules began and what is inside what."""

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.parallel.fsdp.hooks import PrefetchTargets, prefetch_targets

Path = tuple[int, ...]
"""A module of a tree: the numbers of the children on the way to it."""


def parts(order: list[Path]) -> dict[Path, list[Path]]:
    return {
        whole: [part for part in order if len(part) > len(whole) and part[: len(whole)] == whole] for whole in order
    }


def test_layers_of_a_root() -> None:
    """Forward: the next ones; backward: root first, then the layers from the last to the first."""
    assert prefetch_targets([(), (0,), (1,)], 1, parts=parts([(), (0,), (1,)])) == [
        PrefetchTargets(module=0, forward=(1,), backward=(2,)),
        PrefetchTargets(module=1, forward=(2,), backward=()),
        PrefetchTargets(module=2, forward=(), backward=(1,)),
    ]


def test_modules_in_layers() -> None:
    """A layer's backward pass begins before those of the modules inside it."""
    order: list[Path] = [(), (0,), (0, 0), (0, 1), (1,)]
    assert [one.backward for one in prefetch_targets(order, 4, parts=parts(order))] == [
        (4, 1, 3, 2),
        (3, 2),
        (),
        (2,),
        (1, 3, 2),
    ]


def forward_of(tree: list[object], path: Path = ()) -> Iterator[Path]:
    yield path
    for number, child in enumerate(tree):
        assert isinstance(child, list)
        yield from forward_of(child, (*path, number))


def backward_of(tree: list[object], path: Path = ()) -> Iterator[Path]:
    yield path
    for number, child in reversed(list(enumerate(tree))):
        assert isinstance(child, list)
        yield from backward_of(child, (*path, number))


@given(
    tree=st.recursive(st.just([]), lambda children: st.lists(children, max_size=4), max_leaves=12),
    depth=st.integers(1, 5),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_any_nesting(tree: list[object], depth: int) -> None:
    """Of every tree of modules: the next `depth` in the order of forward and backward passes, found by recursion."""
    order, backward = list(forward_of(tree)), list(backward_of(tree))
    for one in prefetch_targets(order, depth, parts=parts(order)):
        module = order[one.module]
        assert [order[number] for number in one.forward] == order[one.module + 1 :][:depth]
        assert [order[number] for number in one.backward] == backward[backward.index(module) + 1 :][:depth]
