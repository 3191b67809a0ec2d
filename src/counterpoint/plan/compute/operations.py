"""Describe one operation of a GPU by its shapes and bytes: a matmul, fused attention, or memory traffic."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from counterpoint.records import Record


class MatmulOp(Record, frozen=True, kw_only=True):
    """Describes a batched matrix multiplication: `batch` products [m, k] x [k, n]."""

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    element_bytes: int = 2
    weight_gradient: bool = False
    fp8: bool = False  # operands are in fp8; the result has two bytes per element
    grouped: bool = False  # one kernel multiplies each expert's rows, whose number the host does not know
    kernels: ClassVar[int] = 1  # that the host launches, for all products of the batch

    @property
    def flops(self) -> float:
        """Return the number of floating-point operations: 2 for each multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def num_bytes(self) -> float:
        """Return the bytes that the matmuls read and write if each matrix is read or written once."""
        operands, product = self.m * self.k + self.k * self.n, self.m * self.n
        return float(self.batch) * ((1 if self.fp8 else self.element_bytes) * operands + self.element_bytes * product)


class FlashAttentionOp(Record, frozen=True, kw_only=True):
    """Describes fused attention, whose scores stay on chip: 2 matmuls forward, 5 backward (arXiv 2307.08691).

    One product forward and three backward are as wide as queries and keys, the others as wide as values.
    """

    name: str
    batch: int  # samples · heads
    queries: int
    keys: int
    width: int
    causal: bool
    value_width: int | None = None  # None: as wide as queries and keys
    seen: float | None = None  # fraction of (query, key) pairs computed; None: half if causal, else all
    backward: bool = False
    element_bytes: int = 2
    fp8: bool = False
    version: int = 3  # of FlashAttention

    @property
    def kernels(self) -> int:
        """Return the number of kernels launched; backward has two more: one sums the output gradient, one casts dq."""
        return 3 if self.backward else 1

    @property
    def flops(self) -> float:
        """Return the floating-point operations; a causal mask halves them, a sliding window lowers them further."""
        widths = 3 * self.width + 2 * self.of_values if self.backward else self.width + self.of_values
        seen = (0.5 if self.causal else 1.0) if self.seen is None else self.seen
        return 2.0 * self.batch * self.queries * self.keys * widths * seen

    @property
    def num_bytes(self) -> float:
        """Return the bytes of queries, keys, values and output that are read and written."""
        passes = 2.0 if self.backward else 1.0
        widths = self.width + self.of_values
        return passes * self.element_bytes * self.batch * widths * (self.queries + self.keys)

    @property
    def of_values(self) -> int:
        """Return the width of one head's values."""
        return self.width if self.value_width is None else self.value_width


class MemoryBoundOp(Record, frozen=True, kw_only=True):
    """Describes an operation that memory bandwidth limits: how many bytes all its kernels read and write."""

    name: str
    num_bytes: float
    kernels: int = 1
    strided: bool = False  # input or output is a transposed view


Operation: TypeAlias = MatmulOp | FlashAttentionOp | MemoryBoundOp
