"""Which collectives are fused with which matmuls, on small graphs; tests/dist runs them."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.tensor_graphs import CASES, fused


@pytest.fixture(scope="module", autouse=True)
def group_of_two() -> Iterator[None]:
    """A process group that does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_what_is_fused_and_why_the_rest_is_left(name: str) -> None:
    case = CASES[name]
    result = fused(case, 0)
    assert [(one.collective, one.matmuls) for one in result.found] == [found[:2] for found in case.found]
    for one, (_, _, why) in zip(result.found, case.found, strict=True):
        assert why in one.why
        assert (one.why == "") == (why == "")
        assert one.group == "0"


@pytest.mark.parametrize("name", CASES)
def test_a_fused_collective_leaves_no_node_behind(name: str) -> None:
    case = CASES[name]
    counts = fused(case, 0).counts
    space = {"all_gather": "all_gather_", "reduce_scatter": "_reduce_scatter", "all_reduce": "_all_reduce"}
    taken = Counter(collective for collective, matmuls, _ in case.found if matmuls)
    for collective, part in space.items():
        ours = sum(count for name, count in counts.items() if name.startswith("counterpoint::") and part in name)
        assert ours == taken[collective]
    left = len(case.found) - taken.total()
    torchs = {name: count for name, count in counts.items() if name.startswith("_c10d") and "wait" not in name}
    assert sum(torchs.values()) == left


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not any(found[1] for found in case.found)])
def test_a_graph_in_which_nothing_is_fused_is_unchanged(name: str) -> None:
    result = fused(CASES[name], 0)
    assert str(result.before.graph) == str(result.after.graph)


def test_gathered_rows_are_returned_only_where_they_are_used() -> None:
    for name, is_needed in {"three weights": False, "rows are used elsewhere": True, "rows are a result": True}.items():
        nodes = fused(CASES[name], 0).after.graph.find_nodes(
            op="call_function", target=torch.ops.counterpoint.all_gather_matmul.default
        )
        assert [node.kwargs["return_gathered"] for node in nodes] == [is_needed]


@pytest.mark.parametrize("name", CASES)
def test_every_node_knows_its_shape(name: str) -> None:
    """Inductor's other passes read it; the shapes of the results are those of before."""
    result = fused(CASES[name], 0)
    for node in result.after.graph.nodes:
        assert node.op == "output" or "val" in node.meta
    before, after = (
        [str(one.meta["val"].shape) for one in torch.utils._pytree.tree_leaves(module.graph.output_node().args)]
        for module in (result.before, result.after)
    )
    assert before == after
