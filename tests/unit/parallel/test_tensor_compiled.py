"""The pass in inductor's configuration beside the passes of others, and its report."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from counterpoint import tensor_parallel
from counterpoint.errors import Misconfigured
from counterpoint.parallel.tensor.compiled import FusedCompilations, fuse_compiled


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """No test leaves a pass behind."""
    with config.patch(post_grad_custom_pre_pass=None):
        yield


class Theirs(CustomGraphPass):
    """A pass of the user's."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, 0

    def __call__(self, graph: Graph) -> None:
        self.seen += 1

    def uuid(self) -> Any:
        return self.name


def installed() -> Any:
    return config.post_grad_custom_pre_pass


def test_it_is_public() -> None:
    assert tensor_parallel.fuse_compiled is fuse_compiled
    with pytest.raises(AttributeError, match="fuse_compile'"):
        _ = tensor_parallel.fuse_compile


def test_removed_it_leaves_what_was_there_before() -> None:
    befores: list[Any] = [None, Theirs("a"), [Theirs("a"), Theirs("b")]]
    for before in befores:
        config.post_grad_custom_pre_pass = before
        handle = fuse_compiled()
        assert installed() is not before
        handle.remove()
        assert installed() is before
        handle.remove()
        assert installed() is before


def test_passes_of_the_user_run_first() -> None:
    for before in ([Theirs("a")], [Theirs("a"), Theirs("b")]):
        passes: Any = before if len(before) > 1 else before[0]
        config.post_grad_custom_pre_pass = passes
        with fuse_compiled():
            installed()(Graph())
        assert [one.seen for one in before] == [1] * len(before)


def test_a_plain_function_is_called_and_keeps_inductor_from_caching() -> None:
    seen: list[Graph] = []
    config.post_grad_custom_pre_pass = seen.append
    with fuse_compiled():
        graph = Graph()
        installed()(graph)
        assert installed().uuid() is None
    assert seen == [graph]


@pytest.mark.needs("torch-2.13")
def test_a_pass_that_asks_whether_it_is_inference_is_told() -> None:
    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):
        seen: list[bool] = []  # noqa: RUF012

        def __call__(self, graph: Graph, is_inference: bool = False) -> None:
            self.seen.append(is_inference)

        def uuid(self) -> Any:
            return "aware"

    config.post_grad_custom_pre_pass = Aware()
    with fuse_compiled():
        assert isinstance(installed(), custom_graph_pass.CustomInferenceAwareGraphPass)
        installed()(Graph(), is_inference=True)
        installed()(Graph(), is_inference=False)
    assert Aware.seen == [True, False]


def test_put_into_another_pass_it_does_nothing_once_removed() -> None:
    handle = fuse_compiled()
    inner, other = installed(), Theirs("around")
    config.post_grad_custom_pre_pass = other
    uuid = inner.uuid()
    handle.remove()
    assert installed() is other
    assert inner.uuid() != uuid
    inner(Graph())
    assert handle.report().modules == ()


def test_a_second_call_is_refused_until_the_first_is_removed() -> None:
    with fuse_compiled(), pytest.raises(Misconfigured, match=r"called already: call remove\(\)"):
        fuse_compiled()
    fuse_compiled().remove()


def test_inductors_cache_tells_options_and_other_passes_apart() -> None:
    uuids = []
    for before, groups in ((None, None), (Theirs("a"), None), (Theirs("b"), None), (None, {"0"}), (None, {"1"})):
        config.post_grad_custom_pre_pass = before
        with FusedCompilations(None if groups is None else frozenset(groups)):
            uuids.append(installed().uuid())
        with FusedCompilations(None if groups is None else frozenset(groups)):
            assert installed().uuid() == uuids[-1]
    assert len(set(uuids)) == 5
