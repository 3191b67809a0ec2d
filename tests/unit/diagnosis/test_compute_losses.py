"""A compute-bound job is told what takes longer than its GPU needs, and what that costs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from counterpoint.records.diagnosis import Finding
from tests.support.operator_trace import ADD, FP32, GEMM, SOFTMAX, Call, call, diagnosed

A100 = "NVIDIA A100-SXM4-80GB"
SGEMM = "ampere_sgemm_128x64_tn"
TENSOR = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda(x)>>"
)
SQUARE = [[4096, 4096], [4096, 4096]]
SIZE = [8, 4096, 4096]
LONG = call(None, "my_kernel", 2_000.0)  # work that no cause concerns


def found(folder: Path, calls: Sequence[Call], kind: str, *, gpu: str = "NVIDIA H200") -> Finding | None:
    findings = diagnosed(folder, calls, gpu=gpu).diagnosis.findings
    return next((finding for finding in findings if finding.kind == kind), None)


def test_products_in_fp32_cost_what_tensor_cores_would_save(tmp_path: Path) -> None:
    """19.5 TFLOP/s against 156 in TF32, by the A100's data sheet."""
    finding = found(tmp_path, [call("aten::mm", SGEMM, 8_000.0, *SQUARE, dtype=FP32)], "fp32_products", gpu=A100)
    assert finding is not None
    assert finding.cost_us == pytest.approx(8_000.0 * (1 - 19.5 / 156), rel=0.01)
    assert "set_float32_matmul_precision" in finding.advice
    assert "aten::mm 4096x4096, 4096x4096" in finding.evidence


def test_products_in_fp32_are_known_by_the_kernel_without_shapes(tmp_path: Path) -> None:
    assert found(tmp_path, [call(None, SGEMM, 8_000.0)], "fp32_products", gpu=A100) is not None


@pytest.mark.parametrize(
    ("kernel", "gpu"),
    [
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_cublas", "NVIDIA H200"),
        (TENSOR, A100),
        ("fused_layer_norm_fp32_kernel", A100),
        ("volta_sgemm_128x64_nn", "Tesla V100-SXM2-32GB"),
        ("Cijk_Ailk_Bljk_SB_MT128x64x16_SE", "AMD Instinct MI300X"),
    ],
)
def test_tf32_advice_is_for_fp32_kernels_on_gpus_that_have_it(kernel: str, gpu: str, tmp_path: Path) -> None:
    assert found(tmp_path, [call("aten::mm", kernel, 8_000.0, *SQUARE, dtype=FP32)], "fp32_products", gpu=gpu) is None


def test_a_chain_costs_all_but_its_longest_kernel(tmp_path: Path) -> None:
    calls = [LONG, *(call("aten::add", ADD, us, SIZE, SIZE) for us in (200.0, 300.0, 250.0))]
    finding = found(tmp_path, calls, "elementwise_chains")
    assert finding is not None
    assert finding.cost_us == pytest.approx(450.0, rel=0.01)


def test_a_chain_ends_where_the_size_changes_or_another_kernel_runs(tmp_path: Path) -> None:
    apart = [call("aten::add", ADD, 300.0, SIZE), LONG, call("aten::add", ADD, 300.0, SIZE)]
    resized = [LONG, call("aten::add", ADD, 300.0, SIZE), call("aten::add", ADD, 300.0, [64, 4096])]
    assert found(tmp_path / "apart", apart, "elementwise_chains") is None
    assert found(tmp_path / "resized", resized, "elementwise_chains") is None


BMM = [[64, 1024, 128], [64, 128, 1024]]
SCORES = [64, 1024, 1024]


def attention(product: str = "aten::bmm", softmax: str = SOFTMAX) -> list[Call]:
    return [
        call(product, TENSOR, 400.0, *BMM),
        call("aten::mul", ADD, 150.0, SCORES),
        call("aten::_softmax", softmax, 350.0, SCORES),
        call(product, TENSOR, 400.0, *BMM),
    ]


def test_attention_by_single_kernels_costs_what_runs_between_its_products(tmp_path: Path) -> None:
    finding = found(tmp_path, attention(), "unfused_attention")
    assert finding is not None
    assert finding.cost_us == pytest.approx(500.0, rel=0.01)
    assert "scaled_dot_product_attention" in finding.advice


@pytest.mark.parametrize(
    "calls",
    [
        attention(softmax=SOFTMAX.replace("10, false", "10, true")),  # of the loss
        attention(product="aten::mm"),  # of a router of experts
        [*attention()[:3], call("aten::topk", "void at::native::sbtopk::gatherTopK<float>", 20.0), attention()[3]],
    ],
    ids=["log_softmax", "mm", "topk"],
)
def test_another_softmax_is_not_attention(calls: list[Call], tmp_path: Path) -> None:
    assert found(tmp_path, calls, "unfused_attention") is None


def test_casts_and_copies_cost_their_time(tmp_path: Path) -> None:
    finding = found(tmp_path, [LONG, call("aten::copy_", COPY, 400.0, SIZE, SIZE), LONG], "layout_copies")
    assert finding is not None
    assert finding.cost_us == pytest.approx(400.0, rel=0.01)


def test_tiny_kernels_in_a_row_are_found_and_single_ones_are_not(tmp_path: Path) -> None:
    tiny = [call("my::op", "tiny_kernel", 4.0)]
    few = call(None, "my_kernel", 300.0)
    many = found(tmp_path / "many", [few, *tiny * 60], "tiny_kernels")
    assert many is not None
    assert many.cost_us == pytest.approx(59 * 4.0, rel=0.02)
    assert found(tmp_path / "few", [few, *tiny * 3] * 20, "tiny_kernels") is None


def test_a_wave_that_is_hardly_filled_costs_the_idle_sms(tmp_path: Path) -> None:
    """34 x 4 tiles of 128 x 256 are one wave of 132 and four tiles more."""
    calls = [call("aten::mm", GEMM, 100.0, [34 * 128, 8192], [8192, 4 * 256])]
    finding = found(tmp_path / "bad", calls, "partial_waves")
    assert finding is not None
    assert finding.cost_us == pytest.approx(100.0 * (1 - 136 / 264), rel=0.05)
    filled = [call("aten::mm", GEMM, 100.0, [33 * 128, 8192], [8192, 4 * 256])]
    assert found(tmp_path / "good", filled, "partial_waves") is None


def test_an_operator_far_below_the_cards_rate_is_named_with_its_rate(tmp_path: Path) -> None:
    finding = found(tmp_path, [call("aten::native_batch_norm_backward", "bn_kernel", 5_000.0, SIZE, SIZE)],
                    "far_below_rate")  # fmt: skip
    assert finding is not None
    assert "aten::native_batch_norm_backward 8x4096x4096, 8x4096x4096 in backward: 161 GB/s, 4% of the card's rate" in (
        finding.evidence
    )


def test_no_time_is_counted_twice(tmp_path: Path) -> None:
    """Products in FP32, a chain with a cast, attention and tiny kernels: all costs together stay below the step."""
    calls = [
        *attention(),
        call("aten::mm", SGEMM, 500.0, *SQUARE, dtype=FP32),
        *[call("aten::add", ADD, 3.0, SIZE)] * 30,
        call("aten::copy_", COPY, 300.0, SIZE, SIZE),
    ]
    d = diagnosed(tmp_path, calls, gpu=A100).diagnosis
    assert len(d.findings) >= 3
    assert sum(finding.cost_us for finding in d.findings) < d.totals.duration_us / len(d.steps)


def test_a_healthy_compute_bound_job_is_told_what_takes_its_time(tmp_path: Path) -> None:
    calls = [call("aten::mm", GEMM, 170.0, [33 * 128, 8192], [8192, 1024])] * 8
    assert diagnosed(tmp_path, calls).diagnosis.verdict.endswith(
        "Nothing stands out. Compute takes 99% of the step; of its operators the longest, with 1.36 ms a step and "
        "rank, is aten::mm 4224x8192, 8192x1024: 417 TFLOP/s, 45% of the card's rate."
    )
