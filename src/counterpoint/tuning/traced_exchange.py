"""Find the all_to_alls in a trace that bring tokens to their experts, and back, which a tuning calls `exchange`.

A layer of experts routes M tokens by a matmul
[M, hidden] @ [hidden, experts] and a topk of [M, experts]. The layer's dispatch sends each token once to each of the
token's experts, and the layer's combine brings equally many bytes back; so do the derivatives of both:

    bytes sent by a dispatch = bytes received by a combine = M · top_k · hidden · bytes of an element

so top_k follows from the bytes. A rank receives another number of bytes than it sends, unlike in all_to_alls of equal
parts. The width of an expert is `ffn` of a grouped matmul [rows, ffn] @ [experts / ranks, ffn, hidden]; without such a
matmul the width is taken to be `hidden`, since the times of an exchange do not depend on it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
import numpy as np

from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.trace.classify import dtype_bytes
from counterpoint.trace.timeline import I64, Kind

LARGEST = 1 << 24  # longest tensor dimension of a training; longer ones in a trace are ignored
_MOST_READ = 4096  # different shapes that are read per rank
_MOST_ROUTERS = 16
_UNEVEN = 0.25  # from this mean |received - sent| / sent of a rank, routing counts as uneven

Product = tuple[int, int, int]  # M, N, K


@dataclass(frozen=True, slots=True)
class TracedExchange:
    """Represents the token exchange of an MoE layer: tokens, experts and sizes."""

    tokens: int  # of a rank
    hidden: int
    ffn: int
    experts: int
    top_k: int

    def compute(self, uneven: float) -> str:
        """Return the exchange's name; `uneven` is a rank's mean |received - sent| / sent."""
        routing = "zipf" if uneven > _UNEVEN else "uniform"
        return f"{self.hidden}x{self.ffn}x{self.experts}x{self.top_k} {self.tokens} {routing}"


def exchanges_of(digest: RankDigest, rows: I64, products: Iterable[Product]) -> dict[int, TracedExchange]:
    """Return, by row, the token exchange of each all_to_all among `rows`, given the rank's matmul shapes."""
    if not any(digest.comm.op[row] == "all_to_all" for row in rows.tolist()):
        return {}
    shapes = list(_tensors(digest))
    routed = {_routed(tensors) for is_topk, tensors in shapes if is_topk}
    routers = [matmul for matmul in products if matmul[:2] in routed][:_MOST_ROUTERS]
    downs = {(down[0], down[2]): down[1] for _, tensors in shapes if (down := _grouped(tensors)) is not None}
    fitting = {row: _fitting(digest, row, routers, downs) for row in rows.tolist()} if routers else {}
    votes = Counter(exchange for each in fitting.values() for exchange in each)
    sent, received = digest.comm.sent, digest.comm.received
    uneven = {exchange for row, each in fitting.items() if sent[row] != received[row] for exchange in each}
    known = {row: [exchange for exchange in each if exchange in uneven] for row, each in fitting.items()}
    return {row: max(each, key=lambda exchange: votes[exchange]) for row, each in known.items() if each}


def _fitting(
    digest: RankDigest, row: int, routers: Iterable[Product], downs: dict[tuple[int, int], int]
) -> set[TracedExchange]:
    """Return the token exchanges that fit the bytes that this all_to_all sends or receives.

    What comes to a rank may be a multiple of its tokens by chance: the exchange of most calls is the right one.
    """
    comm = digest.comm
    item, ranks = dtype_bytes(comm.dtype[row]), int(comm.size[row])
    found: set[TracedExchange] = set()
    if comm.op[row] != "all_to_all" or item is None or ranks < 2:
        return found
    for (tokens, experts, hidden), moved in product(routers, (int(comm.sent[row]), int(comm.received[row]))):
        top_k, rest = divmod(moved, tokens * hidden * item)
        if rest == 0 and 1 <= top_k <= experts and experts % ranks == 0:
            ffn = downs.get((experts // ranks, hidden), hidden)
            found.add(TracedExchange(tokens=tokens, hidden=hidden, ffn=ffn, experts=experts, top_k=top_k))
    return found


def _tensors(digest: RankDigest) -> Iterator[tuple[bool, list[tuple[int, ...]]]]:
    """Yield, for each kind of compute operation, whether it is a topk, and the shapes of its inputs."""
    gpu = digest.gpu
    is_topk = np.array(["topk" in name.lower() for name in digest.names], bool)
    computes = np.flatnonzero((gpu.kind == Kind.COMPUTE) & (gpu.shape >= 0))
    kinds = np.unique(2 * gpu.shape[computes].astype(np.int64) + is_topk[gpu.name[computes]])
    for shape, topk in zip(*divmod(kinds[:_MOST_READ], 2), strict=True):
        try:
            dims = msgspec.json.decode(digest.shapes[shape], type=list[Any])
        except (msgspec.DecodeError, RecursionError):
            continue
        yield bool(topk), [tuple(one) for one in dims if isinstance(one, list) and one and all(map(_is_length, one))]


def _is_length(value: object) -> bool:
    return type(value) is int and 0 < value < LARGEST


def _routed(tensors: list[tuple[int, ...]]) -> tuple[int, int] | None:
    """Return the numbers of tokens and experts if `tensors` fit a topk over experts, else None."""
    if not tensors or not 2 <= len(tensors[0]) <= 3:
        return None
    return math.prod(tensors[0][:-1]), tensors[0][-1]


def _grouped(tensors: list[tuple[int, ...]]) -> Product | None:
    """Return experts, width and columns if `tensors` fit a grouped matmul, else None."""
    if len(tensors) < 2 or (len(tensors[0]), len(tensors[1])) != (2, 3) or tensors[0][1] != tensors[1][1]:
        return None
    experts, width, columns = tensors[1]
    return experts, width, columns
