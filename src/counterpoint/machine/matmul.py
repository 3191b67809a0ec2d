"""Compute the µs of a matrix product's arithmetic from waves of tiles and the share of the peak that is reached.

    math = waves · tile,   waves = ceil(batch · ceil(m / tile_m) · ceil(n / tile_n) / SMs)
    tile = 2 · tile_m · tile_n · (k + depth) · max(1 + edge · e, load · e) / (peak · matmul / SMs)
    e = 1 / tile_m + 1 / tile_n, what is loaded over what is computed

depth: filling and draining the pipeline of a tile, in elements of k; edge: loading operands costs more the smaller the
tile is; load: tiles that are smaller still wait for their operands. Of the tile sizes the fastest is taken, as cuBLAS
does; where waves are few, also with k cut (split-k): each part writes its sums in float32, and one more kernel adds
them up. depth, edge, load, matmul and the tile sizes are the group `efficiency` of the GPU's profile.
"""

from __future__ import annotations

from counterpoint.machine.profile import Efficiency

SPLITS = (1, 2, 4, 8)
SUM_BYTES = 8  # of an element in float32, written and read again


def matmul_math_us(
    m: int, n: int, k: float, *, batch: int = 1, peak: float, sms: int, bandwidth: float, known: Efficiency
) -> float:
    """Return the µs that the arithmetic of `batch` products x[m, k] @ w[k, n] takes with the fastest tile size.

    `peak` is the data sheet's, in FLOP per µs; `bandwidth` is what streaming kernels reach, in bytes per µs; `known`
    says which share of the peak the GPU reaches.
    """
    per_sm = peak * known.matmul / sms
    sums_us = SUM_BYTES * batch * m * n / bandwidth
    best = float("inf")
    for high, wide in known.tiles:
        tiles = batch * -(-m // high) * -(-n // wide)
        loaded = 1.0 / high + 1.0 / wide
        depth_us = 2.0 * high * wide * max(1.0 + known.edge * loaded, known.load * loaded) / per_sm
        for split in SPLITS if tiles < 2 * sms else SPLITS[:1]:
            waves = -(-tiles * split // sms)
            us = waves * (k / split + known.depth) * depth_us
            best = min(best, us + (split * sums_us + known.launch_us if split > 1 else 0.0))
    return best
