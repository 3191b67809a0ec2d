"""Add up the calls of a step whose pairs are alike, and say which pair stands for them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from counterpoint.records.measurement import LEGS, Order
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.traced_exchanges import Product, TracedExchange

_REPEATS = 99  # most that a workload's name can say
_AGREE = 0.75  # share of a class's calls in which the same side came first
_MODULES = 64


@dataclass(frozen=True, slots=True)
class PairKind:
    """Tells the collectives of one class from all others."""

    operation: str
    bytes_per_rank: int
    ranks: int
    dtype: str
    phase: str | None
    depends: Product | TracedExchange | None  # the matmul or exchange of which the collective is a part


@dataclass(slots=True)
class PairClass:
    """Adds up the calls of one class."""

    calls: int = 0
    comm_us: float = 0.0
    beside_us: defaultdict[Product, float] = field(default_factory=lambda: defaultdict(float))
    alone_us: dict[Product, float] = field(default_factory=dict)  # mean time of such a matmul
    dtypes: dict[Product, str] = field(default_factory=dict)  # where the trace says that of such a matmul
    first: Counter[Order | None] = field(default_factory=Counter)
    uneven: float = 0.0  # sum over calls of what a rank receives more or less than it sends, over what it sends
    modules: set[str | None] = field(default_factory=set)

    def pair(self, kind: PairKind) -> StepPair:
        """Return the pair that stands for all calls, as if it were one a step."""
        order, votes = self.first.most_common(1)[0]
        dtype = None
        if isinstance(kind.depends, TracedExchange):
            compute = kind.depends.compute(self.uneven / self.calls)
        elif kind.depends:
            compute = _gemm(kind.depends)
        else:
            compute, dtype = self._longest()
        return StepPair(
            operation=kind.operation,
            compute=compute,
            bytes_per_rank=kind.bytes_per_rank,
            ranks=kind.ranks,
            dtype=kind.dtype,
            compute_dtype=None if dtype == kind.dtype else dtype,
            first=order if votes >= _AGREE * self.calls and not kind.depends else None,
            where=_patterns(self.modules),
        )

    def pairs(self, kind: PairKind) -> float:
        """Return of how many pairs these are the calls: an exchange of tokens is a dispatch and a combine."""
        return self.calls / (len(LEGS) if isinstance(kind.depends, TracedExchange) else 1)

    def _longest(self) -> tuple[str, str | None]:
        """Return the longest matmul, repeated until it takes as long as all of a call, and its dtype; None: unknown."""
        longest = max(self.beside_us, key=lambda product: self.beside_us[product])
        us = sum(self.beside_us.values()) / self.calls
        times = min(max(round(us / self.alone_us[longest]), 1), _REPEATS)
        return _gemm(longest, times), self.dtypes.get(longest)


def _gemm(product: Product, times: int = 1) -> str:
    return f"gemm {'x'.join(map(str, product))}" + (f"*{times}" if times > 1 else "")


def _patterns(modules: set[str | None]) -> tuple[str, ...]:
    """Return the modules as patterns of fnmatch, `layers.*`; () if one is not known, or there are too many."""
    names = sorted({re.sub(r"\d+", "*", name) for name in modules if name})
    return () if None in modules or len(names) > _MODULES else tuple(names)
