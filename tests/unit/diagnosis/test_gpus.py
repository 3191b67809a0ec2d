"""What is said of one process that drives several GPUs."""

from dataclasses import replace

import pytest

from counterpoint.diagnosis.api import diagnose_digests
from counterpoint.records.diagnosis import Diagnosis, Finding
from counterpoint.trace.timeline import DEVICE_BITS
from tests.support.job_builder import Op, comm, diagnosed, digested, op, rank


def on(gpu: int, stream: int = 7) -> int:
    """The stream as readers number it."""
    return (gpu << DEVICE_BITS) + stream


def worked(*ops: Op, until: float) -> Diagnosis:
    return diagnosed(rank(*ops, steps=((0.0, until),)))


def turns(d: Diagnosis) -> Finding | None:
    return next((f for f in d.findings if f.kind == "gpu_turns"), None)


def in_turn(gpus: int, us: float = 10_000.0) -> Diagnosis:
    """Each GPU works for as long, one after another, without a pause."""
    ops = [op("matmul", i * us, (i + 1) * us, stream=on(i), launch=0.0) for i in range(gpus)]
    return worked(*ops, until=gpus * us)


@pytest.mark.parametrize("gpus", [2, 4])
def test_gpus_that_take_turns_idle(gpus: int) -> None:
    """Each idles while the others work, though no moment passes without work: that is told, with its cost."""
    d = in_turn(gpus)
    step = gpus * 10_000.0
    assert d.totals.compute_us == pytest.approx(step / gpus)
    assert d.totals.idle_us == pytest.approx(step - step / gpus)
    assert [(gpu.gpu, gpu.compute_us) for gpu in d.per_gpu] == [(i, 10_000.0) for i in range(gpus)]
    assert d.idle is not None
    assert {c.category: c.us for c in d.idle.causes if c.us > 1} == {"other_gpu": pytest.approx(step - step / gpus)}
    found = turns(d)
    assert found is not None
    assert found.cost_us == pytest.approx(step - step / gpus)
    assert f"{gpus} GPUs of one process take turns: each is busy {1 / gpus:.0%} of the step" in d.verdict
    assert f"one process that drives {gpus} GPUs" in str(d.notes)


def test_gpus_of_several_processes_are_not_taken_for_one_process() -> None:
    """They may wait for one another, so no advice against one process with many GPUs."""
    ops = [op("matmul", i * 1e4, (i + 1) * 1e4, stream=on(i), launch=0.0) for i in range(2)]
    both = replace(digested(rank(*ops, steps=((0.0, 2e4),))), processes=2)
    d = diagnose_digests([both], ["rank0"]).diagnosis
    assert turns(d) is None
    assert "one process" not in str(d.notes)
    assert "2 processes, which the file does not tell apart, that drive 2 GPUs" in str(d.notes)


def test_gpus_that_work_at_once_are_accounted_for_one_by_one() -> None:
    """Nothing to find, and no time counts twice."""
    d = worked(*(op("matmul", 0, 10_000, stream=on(i), launch=0.0) for i in range(2)), until=10_000)
    assert turns(d) is None
    assert (d.totals.compute_us, d.totals.idle_us) == (10_000.0, 0.0)
    assert "2 GPUs" in str(d.notes)


def test_gpus_that_work_at_once_in_part() -> None:
    """The second one works for half as long: one process per GPU is advised, not another schedule."""
    ops = (op("matmul", 0, 10_000, stream=on(0), launch=0.0), op("matmul", 0, 5000, stream=on(1), launch=1.0))
    found = turns(worked(*ops, until=10_000))
    assert found is not None
    assert found.cost_us == pytest.approx(2500.0)
    assert "only in part: each is busy 50% to 100%" in found.title
    assert "DataParallel" in found.advice


def test_a_context_on_another_gpu_is_no_second_gpu() -> None:
    """A few µs on GPU 0 by the process of GPU 1."""
    ops = (op("fill", 0, 5, stream=on(0), launch=0.0), op("matmul", 5, 10_000, stream=on(1), launch=1.0))
    d = worked(*ops, until=10_000)
    assert d.per_gpu == ()
    assert d.totals.compute_us == pytest.approx(10_000)


def test_compute_of_another_gpu_hides_no_communication() -> None:
    """GPU 0 waits for its collective alone, whatever GPU 1 computes meanwhile."""
    ops = (
        op("matmul", 0, 1000, stream=on(0), launch=0.0), comm("broadcast", 1000, 2000, stream=on(0, 20), launch=1.0),
        op("matmul", 0, 2000, stream=on(1), launch=2.0),
    )  # fmt: skip
    d = worked(*ops, until=2000)
    assert d.totals.hidden == 0.0
    assert d.totals.exposed_comm_us == pytest.approx(500.0)  # of the mean GPU
    assert sum(kind.exposed_us for kind in d.collective_kinds) == pytest.approx(500.0)
    assert d.totals.wait_us == 0.0  # there is no other rank, so that all of it is transfer
    assert "one rank only" not in str(d.notes)
