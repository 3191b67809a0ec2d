"""What is reached of a data sheet: one set of constants per generation of GPUs, none of them per model or job.

    constant         Ampere        where from
    matmul, memory   0.95, 0.64    fitted to 18 published steps (arXiv 2205.05198, table 5; 2104.04473, table 1)
    edge, depth      12, 64        chosen from 12 or 16 with the same rows; two stages of CUTLASS' k-loop to fill a tile
    load, tiles      41, powers    5,120 bytes of L2 per clock (data sheet): no tile here is so small; CUTLASS' sizes
    flash_*          0.64, 0.58    arXiv 2307.08691, figures 4 to 6: 178 and 161 TFLOP/s at 2048 tokens, causal
    constant         Hopper        where from
    matmul ...       0.945, 8, 256 least squares of 16 GEMMs on H200, 4 % mean error (8 layers' GEMMs of
                                   `samples/fsdp-healthy`, 8 of measured pairs; 2026-11-20 and 21)
    load             88            chosen in steps of 8 with the thin ones of 30 other GEMMs (results/kernel-efficiency)
    tiles            steps of 64   cuBLAS' names in the same profile end at 320 x 128; 192 x 192 by two of those GEMMs
    memory, strided  0.82, 0.4     elementwise kernels of the same profile: 3.8 to 4.6 TB/s; transposed 1.4 TB/s
    flash_*          0.65, 0.465   cuDNN's kernels of the same profile: 525 and 377 TFLOP/s at 4096 tokens; that longer
                                   sequences reach more (flash_length 768): arXiv 2407.08608, figure 5, by eye
    both
    launch_us        2             from the end of one kernel to the start of the next that was queued
    spread           0.02          GPUs of a cluster differ by 8 % in the mean (Sinha et al., SC 22, "Not all GPUs are
                                   created equal"): taken as ± 2 standard deviations, assumed

Ampere has two constants that were fitted to whole steps, and one that was chosen from two values with them; Hopper has
none. Hopper's were measured as the slowest of 8 GPUs and are given for the mean one (E[slowest of 8] = 1.028).
Blackwell has Hopper's constants, which nobody has checked.
"""

from __future__ import annotations

import msgspec

from counterpoint.records.base import Record

__all__ = ["AMPERE", "HOPPER", "UNMEASURED", "Efficiency", "efficiency_of"]


class Efficiency(Record, frozen=True, kw_only=True):
    """Constants of `compute_cost.py`, `overlap.py` and `stragglers.py` for one generation.

    Args:
        matmul: part of the peak that a large tile reaches with endless k.
        depth: elements of k that filling and draining a tile costs.
        edge: elements of a tile's edge that loading operands costs.
        load: elements of a tile's edge at which it would wait for its operands, had it no sum to compute.
        tiles: rows and columns that matmuls are cut into; of two that take as long, the first.
        memory: part of the bandwidth that streaming kernels reach; strided: of that, with a transposed view.
        flash_forward, flash_backward: part of the peak of flash attention, for endless sequences.
        flash_length: tokens at which it has half of that.
        launch_us: of every kernel.
        persistent: matmuls hold their SMs to their end, and collectives wait (`overlap.py`).
        spread: standard deviation of a GPU's speed over the mean.
        source: for `notes`.
    """

    matmul: float
    depth: float
    edge: float
    load: float
    tiles: tuple[tuple[int, int], ...]
    memory: float
    strided: float
    flash_forward: float
    flash_backward: float
    flash_length: float
    launch_us: float
    persistent: bool
    spread: float
    source: str


POWERS = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
STEPS = tuple((64 * m, 64 * n) for m in range(5, 0, -1) for n in range(1, 6) if m * n <= 10)
AMPERE = Efficiency(
    matmul=0.95,
    depth=64,
    edge=12,
    load=41,
    tiles=POWERS,
    memory=0.64,
    strided=0.4,
    flash_forward=0.64,
    flash_backward=0.58,
    flash_length=256,
    launch_us=2.0,
    persistent=False,
    spread=0.02,
    source="A100: two constants fitted to 18 published steps, the others from kernels",
)
HOPPER = Efficiency(
    matmul=0.945,
    depth=256,
    edge=8,
    load=88,
    tiles=STEPS,
    memory=0.82,
    strided=0.4,
    flash_forward=0.65,
    flash_backward=0.465,
    flash_length=768,
    launch_us=2.0,
    persistent=True,
    spread=0.02,
    source="measured kernels of H200",
)
UNMEASURED = msgspec.structs.replace(HOPPER, source="constants of H200, not measured on this GPU")
GENERATIONS = {"A100": AMPERE, "A800": AMPERE, "H100": HOPPER, "H200": HOPPER, "H800": HOPPER}


def efficiency_of(gpu: str) -> Efficiency:
    """By the GPU's name; what nobody measured has Hopper's constants, and says so."""
    return next((known for name, known in GENERATIONS.items() if name in gpu), UNMEASURED)
