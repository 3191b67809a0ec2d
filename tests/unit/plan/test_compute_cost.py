"""One operation on one GPU: roofline, waves, and GEMMs that were measured."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import shipped_profile
from counterpoint.plan.compute.operations import FlashAttentionOp, MatmulOp, MemoryBoundOp
from counterpoint.plan.compute.roofline import GpuRates, cost, total_us
from counterpoint.plan.job.cluster import GPUS, ClusterGpu, find_gpu

H200 = GpuRates.of(find_gpu("h200"), burst=True)
MEASURED = [  # m, n, k, µs on H200: measured pairs and the profile in samples/fsdp-healthy, 2026-11-20 and 21
    (4096, 14336, 4096, 620), (4096, 4096, 14336, 630), (14336, 4096, 4096, 643), (4096, 4096, 4096, 184),
    (4096, 1024, 4096, 44.7), (4096, 4096, 1024, 54.9), (1024, 4096, 4096, 50), (4096, 128256, 4096, 5530),
    (8192, 8192, 8192, 1408), (8192, 7168, 8192, 1133), (8192, 6144, 12288, 1630), (8192, 13312, 16384, 4345),
    (8192, 3584, 4096, 311), (8192, 4096, 3584, 312), (8192, 8192, 7168, 1243), (8192, 16384, 13312, 4807),
]  # fmt: skip


def matmul(m: int, n: int, k: int, batch: int = 1) -> MatmulOp:
    return MatmulOp(name="x", m=m, n=n, k=k, batch=batch)


def test_measured_matmuls_come_out() -> None:
    """16 GEMMs of H200: mean error at most 4.5 %, worst 11 %, with four constants."""
    errors = [abs(cost(matmul(m, n, k), H200).us / us - 1) for m, n, k, us in MEASURED]
    assert (sum(errors) / len(errors) <= 0.045, max(errors) <= 0.11) == (True, True)


def test_one_tile_too_many_costs_a_wave() -> None:
    """One row more than 132 SMs hold in one round: 5 % longer at least, though other tiles are taken for it."""
    full, over = (cost(matmul(11 * 256 + more, 12 * 128, 8192), H200) for more in (0, 1))
    assert over.us / full.us > 1.05


THIN = [(4096, 512, 4096, 27.6), (4096, 256, 4096, 21.9), (512, 512, 8192, 16.6), (2048, 1536, 12288, 101.0)]


@pytest.mark.parametrize(("m", "n", "k", "us"), THIN)
def test_thin_matmuls_come_out(m: int, n: int, k: int, us: float) -> None:
    """Fewer tiles of 256 x 128 than SMs, one H200, 2026-11-21 (results/kernel-efficiency.json): within 10 %."""
    assert cost(matmul(m, n, k), H200).us == pytest.approx(us, rel=0.1)


def test_a_product_cut_along_k_pays_for_its_sums() -> None:
    """512 x 512 x 8192 is too small for 132 SMs whole; cut in parts it still takes longer than its parts' waves."""
    product, free = matmul(512, 512, 8192), msgspec.structs.replace(H200, memory=H200.memory * 1e6)
    assert cost(product, H200).math_us > cost(product, free).math_us + 1.0


@pytest.mark.parametrize(("n", "k"), [(4096, 64), (64, 4096)])
def test_thin_products_reach_less(n: int, k: int) -> None:
    """With small K or N, less of the peak is reached than with neither."""
    thin, large = matmul(8192, n, k), matmul(8192, 4096, 4096)
    assert thin.flops / cost(thin, H200).us < 0.8 * large.flops / cost(large, H200).us


def test_what_has_little_arithmetic_is_bound_by_memory() -> None:
    """Attention's scores without flash: 64 operations per byte written, on A100."""
    found = cost(matmul(2048, 2048, 64, batch=64), GpuRates.of(GPUS["A100"]))
    assert found.memory_us > found.math_us


def test_the_terms_make_up_the_time_of_one_and_of_several() -> None:
    """us = max(math, memory) + launch, of every kind of operation."""
    flash = FlashAttentionOp(name="f", batch=32, queries=4096, keys=4096, width=128, causal=True)
    for operation in (matmul(512, 512, 512), flash, MemoryBoundOp(name="t", num_bytes=1e8, kernels=3)):
        found = cost(operation, H200)
        assert found.us == max(found.math_us, found.memory_us) + found.launch_us
    assert total_us((matmul(512, 512, 512),) * 3, H200) == pytest.approx(3 * cost(matmul(512, 512, 512), H200).us)


def test_attention_of_the_profile_comes_out() -> None:
    """cuDNN's kernels at 4096 tokens, 32 heads of 128: 261 µs forward, 910 µs backward with its small kernels."""
    forward, backward = (
        cost(FlashAttentionOp(name="", batch=32, queries=4096, keys=4096, width=128, causal=True, backward=b), H200).us
        for b in (False, True)
    )
    assert [forward, backward] == pytest.approx([261, 819 + 35 + 30 + 26], rel=0.06)


@given(m=st.integers(1, 1 << 14), n=st.integers(1, 1 << 14), k=st.integers(1, 1 << 14), more=st.integers(1, 1 << 12))
def test_more_work_never_takes_less_time(m: int, n: int, k: int, more: int) -> None:
    us, larger = cost(matmul(m, n, k), H200).us, ((m + more, n, k), (m, n + more, k), (m, n, k + more))
    assert all(cost(matmul(*shape), H200).us >= us for shape in larger)


@given(m=st.integers(1, 1 << 15), n=st.integers(1, 1 << 15), k=st.integers(1, 1 << 15))
def test_no_matmul_beats_the_data_sheet(m: int, n: int, k: int) -> None:
    product = matmul(m, n, k)
    us = cost(product, H200).us
    assert (product.flops / us < H200.peak, product.num_bytes / us < H200.memory) == (True, True)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(Misconfigured, match="A100 computes in bf16, fp16, fp32"):
        GpuRates.of(GPUS["A100"], "fp8")
    with pytest.raises(Misconfigured, match="gpu = 'V100': known are A100, A100-40, A800, B200"):
        find_gpu("V100")


def test_a_generation_has_one_set_of_constants() -> None:
    """Both kinds of A100 share theirs."""
    assert (
        shipped_profile("A100-40").efficiency
        == shipped_profile("A100").efficiency
        != shipped_profile("H100").efficiency
    )


H100 = find_gpu("H100")


def test_a_product_in_fp8_is_less_than_twice_as_fast() -> None:
    """Half of k for the tensor cores, filling and draining as in bf16, and less of the peak is reached."""
    rates = GpuRates.of(H100, "fp8")
    bf16, fp8 = (cost(msgspec.structs.replace(matmul(8192, 8192, 8192), fp8=which), rates) for which in (False, True))
    assert 0.95 * rates.efficiency.fp8 < bf16.math_us / fp8.math_us / 2 < rates.efficiency.fp8
    assert fp8.memory_us == pytest.approx(bf16.memory_us * (1 + 1 + 2) / 6)


def test_a_job_in_fp8_has_its_other_products_in_bf16() -> None:
    """Rates of a job in fp8 and in bf16 differ in nothing else."""
    fp8, bf16 = GpuRates.of(H100, "fp8"), GpuRates.of(H100)
    assert msgspec.structs.replace(fp8, fp8_peak=0.0) == bf16
    assert cost(matmul(4096, 4096, 4096), fp8) == cost(matmul(4096, 4096, 4096), bf16)


def test_a_locked_clock_scales_the_arithmetic() -> None:
    """At half the clock a large product takes twice as long; memory keeps its bandwidth."""
    whole, half = (GpuRates.of(msgspec.structs.replace(H100, clock_ghz=clock)) for clock in (None, 0.99))
    assert half.peak == pytest.approx(989.4e6 / 2)
    assert half.bandwidth == whole.bandwidth
    slow, fast = (cost(matmul(8192, 8192, 8192), rates).math_us for rates in (half, whole))
    assert slow / fast == pytest.approx(whole.peak / half.peak)


def test_a_power_limit_lowers_the_clock_by_the_cube_root() -> None:
    """A quarter of 700 W stays whatever the clock; the limit of the data sheet changes nothing."""
    whole, same, less = (
        GpuRates.of(msgspec.structs.replace(H100, power_watts=watts)).peak for watts in (None, 700.0, 500.0)
    )
    assert same == whole
    assert less / whole == pytest.approx(((500 - 175) / (700 - 175)) ** (1 / 3))


@pytest.mark.parametrize(
    ("gpu", "limit", "said"),
    [
        ("H100", {"power_watts": 900.0}, "give 210 to 700 for H100"),
        ("H100", {"clock_ghz": 0.1}, "give 0.594 to 1.98 for H100"),
        ("GB200", {"clock_ghz": 1.5}, "what GB200 has without it is not known"),
    ],
)
def test_limits_that_are_not_known_are_refused(gpu: str, limit: dict[str, float], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        GpuRates.of(msgspec.structs.replace(find_gpu(gpu), **limit))


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_a_sheet_is_dense_and_has_a_source(gpu: ClusterGpu) -> None:
    """Twice the rate at half the width: a sheet with sparsity in one of its figures fails."""
    assert gpu.source
    assert gpu.tflops["fp32"] == pytest.approx(gpu.tflops["bf16"] / 2, rel=0.02)
    assert gpu.tflops.get("fp8", 2 * gpu.tflops["bf16"]) == pytest.approx(2 * gpu.tflops["bf16"], rel=0.02)
    assert 30 <= gpu.tflops["bf16"] * 1e3 / gpu.memory_gb_per_s <= 450


@pytest.mark.parametrize(("gpu", "slower"), [("A100", [0.5, 1.0, 1.0]), ("H100", [0.3, 0.6, 1.0])])
def test_older_flash_attention_is_slower(gpu: str, slower: list[float]) -> None:
    """FlashAttention 3 is for Hopper: on Ampere 2 is the fastest."""
    rates = GpuRates.of(find_gpu(gpu))
    newest = FlashAttentionOp(name="", batch=32, queries=8192, keys=8192, width=128, causal=True)
    us = [cost(msgspec.structs.replace(newest, version=version), rates).math_us for version in (1, 2, 3)]
    assert [us[2] / each for each in us] == pytest.approx(slower)
