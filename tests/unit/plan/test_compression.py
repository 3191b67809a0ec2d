"""CompressedExchange gradients: what goes over the wire, and what it costs to make it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.cluster import Cluster, ClusterGpu, find_gpu
from counterpoint.plan.job.fields import parse_record
from counterpoint.plan.job.job import parse_job
from counterpoint.plan.job.parallel import Compression
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.group import Group
from counterpoint.plan.network.network import levels, network_of
from counterpoint.plan.step.data_parallel import CompressedExchange, compress
from counterpoint.plan.step.step import predict_step

GPU = ClusterGpu(name="made up", tflops={"bf16": 1000.0}, sms=100, memory_gib=80, memory_gb_per_s=2000.0)
SHAPES = [(4096, 4096), (4096, 14336), (4096, 1)]
WHOLE_BYTES = sum(rows * columns for rows, columns in SHAPES) * 4


def compressed(how: Compression, *, ranks: int = 8) -> CompressedExchange:
    return compress(how, SHAPES, ranks=ranks, element_bytes=4, gpu=GPU)


def test_powersgd_sends_two_factors_unless_they_save_nothing() -> None:
    """P with what cannot be factored, then Q: r (rows + columns) elements of each matrix."""
    sent = compressed(Compression(method="powersgd", rank=4)).sent
    p, q = 4 * (4 * (4096 + 4096) + 4096), 4 * 4 * (4096 + 14336)
    assert [each[:2] for each in sent] == [("all_reduce", p), ("all_reduce", q)]
    # factors larger than the matrix are not made
    first, second = compressed(Compression(method="powersgd", rank=4096)).sent
    assert (first[1], second[1]) == (WHOLE_BYTES, 0)


def test_topk_grows_with_the_ranks_and_randomk_does_not() -> None:
    """Every rank keeps other elements with topk, so all of them have to be gathered."""
    by_ranks = {
        method: [compressed(Compression(method=method, keep=0.01), ranks=n).sent[0][1] for n in (8, 64)]
        for method in ("topk", "randomk")
    }
    assert by_ranks["topk"][1] == pytest.approx(8 * by_ranks["topk"][0])
    assert by_ranks["randomk"][0] == by_ranks["randomk"][1] == pytest.approx(0.01 * WHOLE_BYTES)


def test_a_quantized_reduction_sends_its_bits_twice_and_goes_through_each_node_first() -> None:
    """All_to_all of the pieces, all_gather of their sums, each with a scale per block."""
    sent = compressed(Compression(method="quantized", bits=4, block=256)).sent
    assert [each.operation for each in sent] == ["all_to_all", "all_gather"]
    assert sent[0][1] == sent[1][1] == pytest.approx(WHOLE_BYTES / 8 + WHOLE_BYTES / 256)
    # qgZ: all_to_all of all bytes in a node, of an eighth between nodes; then everybody gets the sums
    small = WHOLE_BYTES / 8 + WHOLE_BYTES / 256
    how = Compression(method="quantized", bits=4, block=256)
    flat = compress(how, SHAPES, ranks=64, element_bytes=4, gpu=GPU)
    deep = compress(how, SHAPES, ranks=64, in_node=8, element_bytes=4, gpu=GPU)
    assert deep.sent == (
        ("all_to_all", small, "node"),
        ("all_to_all", small / 8, "nodes"),
        ("all_gather", small, "all"),
    )
    assert deep.encode_us > flat.encode_us


def test_between_nodes_quantized_gradients_are_faster_by_way_of_the_node() -> None:
    """64 ranks on 8 nodes: the NICs carry an eighth of what a flat all_to_all sends over them."""
    job = {
        "model": {"name": "llama3-8b"},
        "training": {"sequence": 4096, "global_batch": 64},
        "parallel": {"dp": 64, "overlap_dp": False},
        "cluster": {"gpu": "H100", "network": "h100-ndr-400"},
    }
    none = predict_step(parse_job(job)).parts["gradients_us"]
    quantized = predict_step(parse_job(job | {"compression": {"method": "quantized"}})).parts["gradients_us"]
    flat = quantized_flat_us(8.03e9)
    assert quantized < none
    assert quantized < flat


def quantized_flat_us(parameters: float) -> float:
    """The exchange alone with one all_to_all over all 64 ranks, without any pass over memory."""
    network = network_of(Cluster(gpu=find_gpu("H100"), levels=levels("h100-ndr-400", 64)))
    small = parameters * (1 + 4 / 256)
    return sum(estimate(name, small, Group(ranks=64), network).us for name in ("all_to_all", "all_gather"))


@pytest.mark.parametrize("method", ["powersgd", "topk", "randomk", "quantized"])
def test_error_feedback_costs_time(method: str) -> None:
    """A buffer as large as the gradients is read and written; its memory is that of `compute/memory.py`."""
    without, with_ = (
        compressed(Compression(method=method, error_feedback=on))  # type: ignore[arg-type]
        for on in (False, True)
    )
    assert with_.encode_us >= without.encode_us
    assert with_.sent == without.sent


@given(st.floats(0.001, 0.5), st.floats(1.0, 2.0))
def test_keeping_more_never_sends_less(keep: float, factor: float) -> None:
    for method in ("topk", "randomk"):
        less, more = (compressed(Compression(method=method, keep=part)) for part in (keep, keep * factor))
        assert more.sent[0][1] >= less.sent[0][1]


def test_passes_over_memory_bound_the_time() -> None:
    """Topk reads 235 MB of gradients five times at 2 TB/s."""
    assert compressed(Compression(method="topk", error_feedback=False)).encode_us == pytest.approx(
        5 * WHOLE_BYTES / 2000e3
    )


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("keep", 0.0), ("keep", 1.5), ("block", -1)])
def test_options_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(Misconfigured, match=rf"compression\.{field} = {value}"):
        parse_record("compression", {"method": "topk", field: value}, Compression)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(Misconfigured, match="no figure for fp8: give one of bf16"):
        compress(Compression(method="powersgd"), SHAPES, ranks=8, element_bytes=4, gpu=GPU, precision="fp8")
