"""The table of operators: GPU time by operator, inputs and place, and rates beside what the card can do."""

from pathlib import Path

import pytest

from counterpoint.diagnosis.analysis.operators import card_rates
from counterpoint.diagnosis.api import diagnose
from counterpoint.diagnosis.comparison import compare
from counterpoint.records.operators import OperatorTime
from counterpoint.trace.timeline import Device
from tests.support import kineto_trace as kt
from tests.support.operator_trace import ADD, BF16, FP32, GEMM, Call, call, diagnosed

SQUARE = [[4096, 4096], [4096, 4096]]
FLOPS = 2 * 4096**3


def one(folder: Path, each: Call, *, gpu: str = "NVIDIA H200") -> OperatorTime:
    found = diagnosed(folder, [each], gpu=gpu).diagnosis.operators
    assert len(found) == 1
    return found[0]


def test_all_kernels_of_a_call_share_its_flops(tmp_path: Path) -> None:
    """A product split along k has a second kernel, which adds up the parts."""
    kernels = [(GEMM, 190.0), ("void splitKreduce_kernel<32, 16, int>(float)", 10.0)]
    row = one(tmp_path, Call(operator="aten::mm", kernels=kernels, shapes=SQUARE))
    assert (row.calls, row.us) == (1.0, 200.0)
    assert row.tflops == pytest.approx(FLOPS / 200.0 / 1e6)
    assert [(kernel.us, kernel.count) for kernel in row.kernels] == [(190.0, 1.0), (10.0, 1.0)]


def test_lost_time_is_what_the_card_would_not_need(tmp_path: Path) -> None:
    card = card_rates(Device(name="NVIDIA H200"))
    row = one(tmp_path, call("aten::mm", GEMM, 300.0, *SQUARE))
    assert card is not None
    assert row.lost_us == pytest.approx(300.0 - FLOPS / card.tflops["bf16"] / 1e6)


def test_memory_bound_operators_are_held_against_bandwidth(tmp_path: Path) -> None:
    row = one(tmp_path, call("aten::add", ADD, 100.0, [1 << 24], [1 << 24], dtype=BF16))
    assert row.gb_per_s == pytest.approx(3 * 2 * (1 << 24) / 100.0 / 1e3)
    assert row.tflops is None


@pytest.mark.parametrize(
    ("kernel", "precision"),
    [
        ("ampere_sgemm_128x64_tn", "fp32"),
        ("void cutlass_80_simt_sgemm_128x64_8x5_nn_align1", "fp32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3", "fp32"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", "tf32"),
        ("cutlass_80_tensorop_s1688gemm_256x128_16x3_nn_align4", "tf32"),
    ],
)
def test_float32_is_held_against_the_units_that_the_kernel_uses(kernel: str, precision: str, tmp_path: Path) -> None:
    card = card_rates(Device(name="NVIDIA A100-SXM4-80GB"))
    row = one(tmp_path, call("aten::mm", kernel, 10_000.0, *SQUARE, dtype=FP32), gpu="NVIDIA A100-SXM4-80GB")
    assert card is not None
    assert row.of_card == pytest.approx(FLOPS / 10_000.0 / 1e6 / card.tflops[precision])


def test_a_rate_above_the_cards_is_not_shown(tmp_path: Path) -> None:
    """An expanded input has more elements in its shape than in memory; small tensors come from caches."""
    add = one(tmp_path / "add", call("aten::add", ADD, 1.0, [1 << 24], [1 << 24]))
    mm = one(tmp_path / "mm", call("aten::mm", GEMM, 10.0, *SQUARE))
    assert (add.gb_per_s, add.of_card, mm.tflops, mm.lost_us) == (None, None, None, None)


def test_the_profile_of_a_chip_counts_before_its_data_sheet() -> None:
    measured, sheet = (card_rates(Device(name=name)) for name in ("NVIDIA H200", "AMD Instinct MI300X"))
    assert measured is not None
    assert sheet is not None
    assert measured.source.startswith("profile")
    assert measured.tflops["bf16"] < 989.4
    assert (sheet.source, sheet.tflops["bf16"]) == ("data sheet", 1307.4)


def test_the_table_adds_up_to_the_time_of_all_kernels(tmp_path: Path) -> None:
    """Kernels without an operation count by themselves, and every layer of a model counts in one row."""
    calls = [call("aten::mm", GEMM, 200.0, *SQUARE), call(None, "my_kernel", 50.0), call("aten::add", ADD, 25.0)] * 4
    found = diagnosed(tmp_path, calls).diagnosis.operators
    assert [(row.operator, row.calls, row.us) for row in found] == [
        ("aten::mm", 4.0, 800.0),
        (None, 4.0, 200.0),
        ("aten::add", 4.0, 100.0),
    ]


def test_backward_comes_from_the_module_and_the_functions_of_forward(tmp_path: Path) -> None:
    """Autograd gives both one sequence number; its thread has no Python functions of its own."""

    def launch(name: str, at: float, correlation: int, external: int, *, tid: int) -> list[kt.Event]:
        return [kt.op(name, at, 4.0, external=external, dims=SQUARE, types=[BF16, BF16], tid=tid,
                      sequence=7 if external == 1 else None),
                kt.runtime("cudaLaunchKernel", at + 1.0, 2.0, correlation=correlation, tid=tid),
                kt.kernel(GEMM, at + 10.0, 150.0, correlation=correlation, external=external)]  # fmt: skip

    python = [
        kt.event("python_function", "train.py(40): step", 1001.0, 700.0),
        kt.event("python_function", "torch/nn/modules/module.py(1): _call_impl", 1005.0, 90.0),
        kt.event("python_function", "nn.Module: Linear_3", 1010.0, 80.0),
        kt.event("python_function", "model.py(12): forward", 1020.0, 60.0),
    ]
    autograd = kt.op("autograd::engine::evaluate_function: MmBackward0", 1200.0, 50.0, external=9, sequence=7, tid=77)
    path = kt.write(
        tmp_path / "rank0.json",
        [kt.annotation("ProfilerStep#0", 1000.0, 1000.0), *python, *launch("aten::mm", 1030.0, 1, 1, tid=kt.PID),
         autograd, *launch("aten::mm", 1210.0, 2, 2, tid=77)],
        kt.header(world_size=1),
    )  # fmt: skip
    found = {row.phase: row for row in diagnose(path).diagnosis.operators}
    assert {(row.module, row.stack) for row in found.values()} == {
        ("Linear_*", "model.py(12): forward < train.py(40): step")
    }
    assert set(found) == {"forward", "backward"}


def test_two_runs_are_compared_by_operator_and_kernel(tmp_path: Path) -> None:
    before = diagnosed(tmp_path / "before", [call("aten::mm", GEMM, 200.0, *SQUARE), call("aten::add", ADD, 30.0)])
    now = diagnosed(tmp_path / "now", [call("aten::mm", GEMM, 260.0, *SQUARE), call("aten::mul", ADD, 40.0)])
    changes = compare(now.diagnosis, before.diagnosis).operators
    assert [(c.name, c.kernel, c.before_us, c.now_us, c.change_us) for c in changes] == [
        ("aten::mm", GEMM, 200.0, 260.0, 60.0),
        ("aten::mul", ADD, None, 40.0, 40.0),
        ("aten::add", ADD, 30.0, None, -30.0),
    ]


def test_a_cpu_has_operators_but_no_card(tmp_path: Path) -> None:
    path = kt.write(
        tmp_path / "rank0.json",
        [kt.annotation("ProfilerStep#0", 1000.0, 500.0),
         kt.op("aten::mm", 1010.0, 400.0, external=1, dims=[[64, 96], [96, 32]], types=[FP32, FP32])],
        kt.header(world_size=1, devices=[]),
    )  # fmt: skip
    found = diagnose(path).diagnosis
    (row,) = found.operators
    assert (found.card, row.of_card, row.kernels, row.us) == (None, None, (), 400.0)
    assert row.tflops == pytest.approx(2 * 64 * 96 * 32 / 400.0 / 1e6)
    assert not {"GPU", "kernel", "card"} & set(found.verdict.replace(".", " ").split())
