"""Collectives are named by what the program says of them, and by nothing where it says nothing."""

import pytest

from counterpoint.records.diagnosis import Diagnosis
from counterpoint.trace.timeline import CollectiveInfo, HostKind
from tests.support.job_builder import Host, Op, comm, diagnosed, host, op, rank

ANNOTATION, PYTHON = HostKind.ANNOTATION, HostKind.PYTHON


def first_of_two(*parts: Op | Host) -> Diagnosis:
    return diagnosed(rank(*parts, steps=()), world_size=2)


def at(time: float, *, thread: int = 0, desc: str | None = None) -> Op:
    info = CollectiveInfo(op="all_reduce", group="3", group_desc=desc, in_nelems=64, out_nelems=64, dtype="Float")
    return comm("all_reduce", time + 10, time + 60, launch=time, thread=thread, info=info)


def places(d: Diagnosis) -> list[tuple[str | None, str | None]]:
    return [(c.phase, c.module) for c in d.collectives]


def test_ranges_around_the_launch_name_phase_and_module() -> None:
    """The innermost module counts; what lies beside a launch does not."""
    d = first_of_two(
        host("nn.Module: Llama_0", 0, 200, PYTHON),
        host("nn.Module: LlamaDecoderLayer_3", 50, 150, PYTHON),
        host("nn.Module: Linear_9", 60, 70, PYTHON),
        host("FSDP::pre_backward (layers.3)", 300, 400, ANNOTATION),
        host("Optimizer.step#AdamW.step", 500, 600, ANNOTATION),
        at(100),
        at(180),
        at(350),
        at(550),
        at(650),
    )
    assert places(d) == [
        ("forward", "LlamaDecoderLayer_3"),
        ("forward", "Llama_0"),
        ("backward", "layers.3"),
        ("optimizer", None),
        (None, None),
    ]


def test_what_is_recomputed_in_backward_is_backward() -> None:
    """Activation checkpointing runs modules forward inside autograd."""
    d = first_of_two(
        host("autograd::engine::evaluate_function: CheckpointBackward", 0, 200, HostKind.OP),
        host("nn.Module: Block_1", 50, 150, PYTHON),
        at(100),
    )
    assert places(d) == [("backward", "Block_1")]


def test_the_thread_of_autograd_is_backward_and_other_threads_are_not() -> None:
    """Hooks at the end of backward run outside any range."""
    d = first_of_two(
        host("Optimizer.step#SGD.step", 500, 600, ANNOTATION),
        host("autograd::engine::evaluate_function: MmBackward0", 0, 50, HostKind.OP, thread=1),
        at(100, thread=1),
        at(200, thread=0),
        at(300, thread=2),
    )
    assert places(d) == [("backward", None), (None, None), (None, None)]


def test_the_table_holds_operation_size_group_and_phase() -> None:
    """Kinds differ in phase; a group's best is what its links can do at least."""
    parts: list[Op | Host] = [host("FSDP::post_backward (layers.0)", 0, 450, ANNOTATION)]
    parts += [op("matmul", 0, 10), at(100, desc="mesh_dp"), at(200, desc="mesh_dp"), at(500, desc="mesh_dp")]
    twice, once = first_of_two(*parts).collective_kinds
    assert (twice.op, twice.parallel, twice.bytes, twice.phase, twice.count) == ("all_reduce", "dp", 256, "backward", 2)
    assert (once.phase, once.count, once.wait_us) == (None, 1, None)
    assert twice.bus_gb_per_s == pytest.approx(256 / 50 / 1e3)
    assert twice.best_gb_per_s == twice.bus_gb_per_s
    assert twice.exposed_us == pytest.approx(100.0)
