"""Blocks per SM and waves against the CUDA occupancy calculator, each derivation written out."""

import pytest

from counterpoint.machine.gpus import find_gpu, peak_tflops
from counterpoint.machine.occupancy import SmLimits, blocks_per_sm, most_ctas_without_extra_wave, waves

H200 = SmLimits(num_sms=132, regs=65536, smem=233472, threads=2048)
A100 = SmLimits(num_sms=108, regs=65536, smem=167936, threads=2048)
V100 = SmLimits(num_sms=80, regs=65536, smem=98304, threads=2048, smem_reserved=0)
L40 = SmLimits(num_sms=142, regs=65536, smem=102400, threads=1536, blocks=24)


@pytest.mark.parametrize(
    ("sm", "threads", "regs", "smem", "expected"),
    [
        # 12 warps; 168 x 32 = 5376 registers a warp; 65536 / 5376 = 12 warps: 1 block
        pytest.param(H200, 384, 168, 0, 1, id="nvjet-registers"),
        # 233472 / (213248 + 1024) = 1
        pytest.param(H200, 128, 32, 213248, 1, id="smem"),
        # 2048 / 256 threads
        pytest.param(A100, 256, 32, 0, 8, id="threads"),
        # 128 x 32 = 4096 a warp: 16 warps, 8 a block: 2; 167936 / 33792 = 4
        pytest.param(A100, 256, 128, 32768, 2, id="gemm-registers-before-smem"),
        # 98304 / 49152 = 2: compute capability 7 reserves nothing
        pytest.param(V100, 128, 32, 49152, 2, id="volta-reserves-no-smem"),
        # 167936 / (49152 + 1024) = 3
        pytest.param(A100, 128, 32, 49152, 3, id="ampere-reserves-1-kib"),
        # 80 x 32 = 2560 a warp: 25 warps, in fours 24; 5 warps a block: 4
        pytest.param(A100, 160, 80, 0, 4, id="warps-in-fours"),
        # 33 x 32 = 1056, by 256: 1280 a warp: 51 warps, in fours 48; 4 a block: 12
        pytest.param(A100, 128, 33, 0, 12, id="registers-by-256"),
        # 2048 / 32 = 64 warps of one block each, but at most 32 blocks
        pytest.param(A100, 32, 16, 0, 32, id="blocks"),
        pytest.param(L40, 32, 16, 0, 24, id="blocks-of-ada"),
        # 100 threads are 4 warps: 2048 / 128
        pytest.param(A100, 100, 0, 0, 16, id="part-of-a-warp"),
        # it did run
        pytest.param(V100, 1024, 255, 98304, 1, id="at-least-one"),
    ],
)
def test_blocks_per_sm(sm: SmLimits, threads: int, regs: int, smem: int, expected: int) -> None:
    assert blocks_per_sm(threads=threads, regs_per_thread=regs, smem_bytes=smem, sm=sm) == expected


@pytest.mark.parametrize(
    ("blocks", "num_sms", "fit", "expected"),
    [(132, 132, 1, 1), (133, 132, 1, 2), (132, 108, 1, 2), (264, 132, 2, 1), (265, 132, 2, 2), (1, 80, 4, 1)],
)
def test_waves(blocks: int, num_sms: int, fit: int, expected: int) -> None:
    assert waves(blocks, num_sms=num_sms, blocks_per_sm=fit) == expected


@pytest.mark.parametrize(
    ("blocks", "num_sms", "fit", "expected"),
    [
        (132, 132, 1, 0),  # every SM is in the first wave
        (100, 132, 1, 32),  # 100 SMs are enough for one wave
        (200, 132, 1, 32),  # two waves of 100
        (216, 108, 2, 0),  # one wave of 108 x 2
        (210, 108, 2, 3),  # one wave of 105 x 2
    ],
)
def test_most_ctas_without_extra_wave(blocks: int, num_sms: int, fit: int, expected: int) -> None:
    """SMs that the last of the waves alone leaves free in each."""
    assert most_ctas_without_extra_wave(blocks, num_sms=num_sms, blocks_per_sm=fit) == expected


@pytest.mark.parametrize("blocks", [1, 80, 108, 131, 132, 133, 500, 1000])
@pytest.mark.parametrize("fit", [1, 2, 3])
def test_one_cta_more_costs_a_wave(blocks: int, fit: int) -> None:
    """The advised number keeps the waves, one more does not."""
    most = most_ctas_without_extra_wave(blocks, num_sms=132, blocks_per_sm=fit)
    alone = waves(blocks, num_sms=132, blocks_per_sm=fit)
    at_most, one_more = (waves(blocks, num_sms=132 - n, blocks_per_sm=fit) for n in (most, most + 1))
    assert (at_most == alone, one_more > alone or most == 131) == (True, True)


@pytest.mark.parametrize(
    ("name", "num_sms"),
    [("NVIDIA A100-SXM4-80GB", 108), ("Tesla V100-SXM2-32GB", 80), ("NVIDIA H200", 132), ("NVIDIA GH200 480GB", 132),
     ("NVIDIA H20", 78), ("NVIDIA H100 80GB HBM3", 132), ("NVIDIA L4", 58), ("NVIDIA L40S", 142)],
)  # fmt: skip
def test_gpu_is_told_by_its_name(name: str, num_sms: int) -> None:
    """The names that drivers print; one may hold another (H20 in H200)."""
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.sm.num_sms == num_sms


def test_unknown_gpu_has_no_peak() -> None:
    assert peak_tflops("Some Accelerator") is None
