"""Gradients sent smaller than they are: bytes on the wire, and the time to make and undo them.

What a step gains in communication it pays in passes over memory and in small matrix products. Whether the job still
converges, and after how many more steps, is not modelled: `NOTE` is printed beside every figure that uses this.

| method | what is sent, N elements of b bytes, n ranks | source |
|---|---|---|
| powersgd | all_reduce of r (rows + columns) elements for each matrix, vectors whole | arXiv 1905.13727, alg. 1 and 2 |
| topk | all_gather of k N values and as many 32-bit indices from each rank | arXiv 1712.01887 |
| randomk | all_reduce of k N values: the ranks draw the same indices from a shared seed | arXiv 1809.07599 |
| quantized | all_to_all and all_gather of N · bits / 8 and a 32-bit scale per block | arXiv 2306.10209 (qgZ) |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.plan.cluster import Gpu
from counterpoint.plan.model import positive
from counterpoint.records.base import Record

__all__ = ["NOTE", "Compressed", "Compression", "Sent", "compress"]

NOTE = "convergence is not modelled: a step that sends less is not worth as much as a whole one"
INDEX_BYTES = SCALE_BYTES = 4
SELECT_PASSES = (
    5  # over the gradients to find the k-th largest: a radix select of 32-bit keys reads them 4 times, marks once
)

Shapes = Sequence[tuple[int, int]]


class Compression(Record, frozen=True, kw_only=True):
    """How gradients are compressed before they are reduced over dp.

    Args:
        method: see the module.
        rank: of powersgd's factors.
        keep: part of the elements that topk and randomk send, above 0 and at most 1.
        bits: of a quantized element.
        block: quantized elements that share a scale.
        error_feedback: what was left out is kept and added to the next gradient: one more buffer and two more passes.
    """

    method: Literal["powersgd", "topk", "randomk", "quantized"]
    rank: int = 4
    keep: float = 0.01
    bits: Literal[4, 8] = 8
    block: int = 256
    error_feedback: bool = True

    def __post_init__(self) -> None:
        positive("compression.rank", self.rank)
        positive("compression.block", self.block)
        if not 0 < self.keep <= 1:
            raise Misconfigured(f"compression.keep = {self.keep}: give a part above 0 and at most 1")


class Sent(Record, frozen=True, kw_only=True):
    """One collective: its operation, and the bytes of its full array, as `collective_cost.estimate` counts them."""

    operation: str
    num_bytes: float


class Compressed(Record, frozen=True, kw_only=True):
    """What stands in place of one all_reduce of the gradients.

    Args:
        sent: the collectives, one after the other.
        encode_us: before them.
        decode_us: after them.
        memory_bytes: of buffers that live from step to step.
    """

    sent: tuple[Sent, ...]
    encode_us: float
    decode_us: float
    memory_bytes: float


def compress(
    how: Compression, shapes: Shapes, *, ranks: int, element_bytes: int, gpu: Gpu, precision: str = "bf16"
) -> Compressed:
    """One rank's gradients.

    Time is that of memory at `gpu.memory_gb_per_s`, or of powersgd's matrix products at the peak of `precision` if that
    is longer: a lower bound, since thin matrices reach neither.

    Args:
        how: the method.
        shapes: (rows, columns) of every gradient on this rank; a vector is (N, 1).
        ranks: that reduce together.
        element_bytes: of a gradient element.
        gpu: its memory and its peak.
        precision: of powersgd's products.

    Raises:
        Misconfigured: no such precision on this GPU.
    """
    elements = sum(rows * columns for rows, columns in shapes)
    whole = float(elements * element_bytes)
    match how.method:
        case "powersgd":
            sent, encoding, decoding, memory = _powersgd(how, shapes, element_bytes)
        case "topk":
            kept = how.keep * elements
            sent = [("all_gather", ranks * kept * (element_bytes + INDEX_BYTES))]
            encoding, decoding, memory = SELECT_PASSES * whole, whole + ranks * kept * element_bytes, 0.0
        case "randomk":
            kept_bytes = how.keep * whole
            sent, encoding, decoding, memory = [("all_reduce", kept_bytes)], 2 * kept_bytes, whole + kept_bytes, 0.0
        case "quantized":
            small = elements * how.bits / 8 + elements / how.block * SCALE_BYTES
            sent = [("all_to_all", small), ("all_gather", small)]
            encoding = (
                whole + small + 2 * small + whole / ranks
            )  # quantize; add what came, quantize the own shard again
            decoding, memory = small + whole, 0.0
    if how.error_feedback:
        encoding, memory = encoding + 2 * whole, memory + whole
    flops = _powersgd_flops(how.rank, shapes) if how.method == "powersgd" else (0.0, 0.0)
    return Compressed(
        sent=tuple(Sent(operation=name, num_bytes=size) for name, size in sent),
        encode_us=_longer_us(encoding, flops[0], gpu, precision),
        decode_us=_longer_us(decoding, flops[1], gpu, precision),
        memory_bytes=memory,
    )


def _powersgd(
    how: Compression, shapes: Shapes, element_bytes: int
) -> tuple[list[tuple[str, float]], float, float, float]:
    """Two all_reduces, P then Q; vectors, and matrices that would not get smaller, go whole with P."""
    low, whole = _divided(how.rank, shapes)
    p = sum(rows for rows, _ in low) * how.rank * element_bytes
    q = sum(columns for _, columns in low) * how.rank * element_bytes
    rest = sum(rows * columns for rows, columns in whole) * element_bytes
    matrices = float(sum(rows * columns for rows, columns in low) * element_bytes)
    sent = [("all_reduce", float(p + rest)), ("all_reduce", float(q))]
    return sent, 2 * matrices + 3 * p + q, matrices + p + q, float(q)  # M Q; orthogonalise; M^T P; then P Q^T


def _powersgd_flops(rank: int, shapes: Shapes) -> tuple[float, float]:
    """Operations to encode (M Q, M^T P, Gram-Schmidt on P) and to decode (P Q^T)."""
    low, _ = _divided(rank, shapes)
    product = sum(2.0 * rows * columns * rank for rows, columns in low)
    return 2 * product + sum(2.0 * rows * rank**2 for rows, _ in low), product


def _divided(rank: int, shapes: Shapes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Gradients that two factors of `rank` make smaller, and the others."""

    low = [(rows, columns) for rows, columns in shapes if rank * (rows + columns) < rows * columns]
    return low, [(rows, columns) for rows, columns in shapes if rank * (rows + columns) >= rows * columns]


def _longer_us(num_bytes: float, flops: float, gpu: Gpu, precision: str) -> float:
    if flops and precision not in gpu.tflops:
        raise Misconfigured(f"{gpu.name} has no figure for {precision}: give one of {', '.join(sorted(gpu.tflops))}")
    compute = flops / (gpu.tflops[precision] * 1e6) if flops else 0.0
    return max(num_bytes / (gpu.memory_gb_per_s * 1e3), compute)
