"""The what-if of zero-SM collectives against step times worked out by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import even_call, plan_all
from counterpoint.collectives.program.tuning import best_tuning
from counterpoint.diagnosis.analysis.replay import LAUNCH_ORDER, NO_FSDP2_COPIES, ZERO_SM, replay
from counterpoint.diagnosis.reading.traced_job import traced_stack
from counterpoint.machine import profile
from counterpoint.machine.profile import default_profile
from counterpoint.records.diagnosis import Replay
from counterpoint.trace.timeline import CollectiveInfo, Device
from tests.support.job_builder import Op, Rank, comm, diagnosed, job, op, rank

ELEMENTS = 1 << 27  # of the full array
CHUNK_CAT = "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**)"
CAST = "void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor, at::native::Copy<c10::BFloat16, float> >"
COPY_IN = CAST.replace("float", "c10::BFloat16")


def collective(
    name: str, start: float, end: float, dtype: str = "BFloat16", elements: int = ELEMENTS, ranks: int = 2
) -> Op:
    size = {"in_nelems": elements // 2, "out_nelems": elements}
    info = CollectiveInfo(op=name, group="0", group_size=ranks, dtype=dtype, **size)  # type: ignore[arg-type]
    return comm(name, start, end, info=info, launch=0.0)


def alone_us(name: str, num_bytes: int) -> float:
    call, rates = even_call(name, 2, num_bytes), default_profile().rates
    return simulate(plan_all(call, best_tuning(call, rates)), rates).us


def played(one: Rank, **more: Any) -> dict[str, float]:
    """The step and each what-if of two ranks that do the same."""
    j = job(one, one)
    found = replay(j, stack=traced_stack(j), **more)
    assert isinstance(found, Replay)
    return {"replayed": found.replayed_us} | {w.name: w.step_us for w in found.what_if}


def test_a_collective_takes_what_its_program_takes() -> None:
    """It began at 200, so the step ends 200 µs after what the clock says."""
    took = played(rank(op("matmul", 10, 200, launch=0.0), collective("all_gather", 200, 1800)))
    assert took["replayed"] == pytest.approx(1800)
    assert took[ZERO_SM] == pytest.approx(200 + alone_us("all_gather", 2 * ELEMENTS), rel=1e-3)


def test_float32_gradients_of_bfloat16_parameters_are_sent_as_they_are() -> None:
    """Twice the bytes of the parameters that were gathered: half of them are sent."""
    ops = (
        op(CHUNK_CAT, 10, 20, launch=0.0),
        collective("all_gather", 20, 500),
        collective("reduce_scatter", 500, 3000, "Float"),
    )
    sent = alone_us("all_gather", 2 * ELEMENTS) + alone_us("reduce_scatter", 2 * ELEMENTS)
    assert played(rank(*ops))[ZERO_SM] == pytest.approx(20 - 10 + sent, rel=1e-3)


def test_kernels_get_back_what_nccl_took_and_lose_what_copies_take() -> None:
    """3000 µs where 2000 were enough alone; beside copies, which end long before, a little more than 2000."""
    one = rank(op("matmul", 10, 3010, launch=0.0), collective("all_gather", 12, 2500))
    lost = alone_us("all_gather", 2 * ELEMENTS) * (1.0 - default_profile().mechanisms["zero_sm"].compute_kept)
    known, unknown = ([np.array([value, np.nan])] * 2 for value in (2000.0, np.nan))
    assert played(one, alone_us=known)[ZERO_SM] == pytest.approx(10 + 2000 + lost, abs=1.0)
    given_back = (2500 - 12) * (1.0 - default_profile().mechanisms["nccl"].compute_kept)
    assert played(one, alone_us=unknown)[ZERO_SM] == pytest.approx(3010 - given_back + lost, abs=1.0)


def test_a_collective_held_back_by_a_kernel_starts_at_once() -> None:
    """Launched at 0, begun at 1000 as the kernel left the SMs."""
    one = rank(op("matmul", 10, 1000, launch=0.0), collective("all_gather", 1001, 2500))
    held = [np.array([False, True])] * 2
    freed, kept = played(one, held={LAUNCH_ORDER: held})[ZERO_SM], played(one)[ZERO_SM]
    took = alone_us("all_gather", 2 * ELEMENTS)
    assert kept == pytest.approx(1001 + took, abs=25.0)
    assert freed == pytest.approx(max(1000 * 1.03, took), rel=0.05)


def test_copies_of_fsdp2_vanish_and_casts_stay() -> None:
    """300 µs of copies and 100 of a cast, one after the other, before a gather."""
    one = rank(
        op(COPY_IN, 10, 110, launch=0.0), op(CAST, 110, 210, launch=0.0), op(CHUNK_CAT, 210, 410, launch=0.0),
        collective("all_gather", 410, 2000),
    )  # fmt: skip
    took = played(one)
    assert took[NO_FSDP2_COPIES] == pytest.approx(2000 - 300)
    assert took[ZERO_SM] == pytest.approx(410 - 300 + alone_us("all_gather", 2 * ELEMENTS), rel=1e-3)


GATHER = collective("all_gather", 200, 1800)


@pytest.mark.parametrize(
    ("gather", "device"),
    [
        (collective("all_gather", 200, 230, elements=1 << 10), "NVIDIA H200"),  # NCCL is faster
        (replace(GATHER, info=CollectiveInfo(op="all_gather", group="0", group_size=2)), "NVIDIA H200"),  # of any size
        (collective("all_gather", 200, 1800, ranks=16), "NVIDIA H200"),  # more ranks than a host has
        (GATHER, "NVIDIA B200"),  # without measured rates
        (GATHER, "AMD Instinct MI300X"),
    ],
)
def test_nothing_is_promised_where_nothing_is_known(gather: Op, device: str) -> None:
    one = rank(op("matmul", 10, 200, launch=0.0), gather, device=Device(name=device, num_sms=132))
    assert ZERO_SM not in played(one)


def test_a_profile_of_another_gpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    one = rank(op("matmul", 10, 200, launch=0.0), collective("all_gather", 200, 1800))
    plain = played(one)
    monkeypatch.setenv("COUNTERPOINT_PROFILE", str(Path(profile.__file__).parent / "profiles" / "a100.json"))
    assert played(one) == plain


def test_the_advice_says_what_the_replay_says() -> None:
    """The line that a user can copy, and both step times."""
    last = op("matmul", 2000, 2400, launch=1.0)
    one = rank(op(CHUNK_CAT, 10, 410, launch=0.0), collective("all_gather", 410, 2000), last)
    found = diagnosed(one, one)
    copies = next(f for f in found.findings if f.kind == "fsdp2_copies")
    assert copies.cost_us == pytest.approx(400)
    assert "counterpoint.overlap(model) after fully_shard" in copies.advice
    assert found.replay is not None
    would = next(w.step_us for w in found.replay.what_if if w.name == ZERO_SM)
    assert f"replayed: {would / 1e3:.1f} instead of {found.replay.replayed_us / 1e3:.1f} ms a step" in copies.advice
