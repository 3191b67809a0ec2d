"""Who sends how much to whom in one step: the matrix M of a placement, kept as groups.

    "all"   every two ranks of a group exchange the same (a collective, whatever its algorithm);
            a rank that sends b bytes sends b / (n - 1) to each of the others
    "line"  each rank exchanges with the next one only (pipeline stages)
    "ring"  the same, and the last with the first (interleaved stages)

M(i, j) is the sum of both ways, in bytes of one step. A group of thousands of ranks is a handful of numbers this way,
where its matrix would have millions; `pairs` expands it for those who need the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.groups import AXES, Axis, axes
from counterpoint.plan.parallel import Parallel

__all__ = ["MAX_RANKS", "Block", "Pattern", "Traffic"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Pattern = Literal["all", "line", "ring"]
MAX_RANKS = 131_072
MAX_PARTNERS = 64  # of a rank in one group, when a group is expanded for the search
FEW_PAIRS = 1 << 18  # that the search takes as they are


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """Equal groups of one axis.

    Args:
        axis: a name for people.
        members: `[groups, ranks]`.
        pair_bytes: `[groups]`, of each pair that exchanges, both ways together.
        pattern: which pairs do.
    """

    axis: str
    members: I64
    pair_bytes: F64
    pattern: Pattern = "all"

    def pairs(self, most: int | None = None) -> tuple[I64, I64, F64]:
        """First rank, second rank and bytes of every pair, each pair once.

        Args:
            most: partners of a rank; in larger groups it exchanges with so many, evenly drawn by distance in the
                group, and more with each: cuts keep their size in the mean, at a fraction of the pairs.
        """
        groups, ranks = self.members.shape
        if self.pattern != "all":
            step = 1 if self.pattern == "line" or ranks < 3 else 0
            first, second = self.members, np.roll(self.members, -1, axis=1)
            first, second = first[:, : ranks - step], second[:, : ranks - step]
            return first.ravel(), second.ravel(), np.repeat(self.pair_bytes, first.shape[1])
        if most is None or ranks - 1 <= most:
            i, j = np.triu_indices(ranks, 1)
            return self.members[:, i].ravel(), self.members[:, j].ravel(), np.repeat(self.pair_bytes, len(i))
        offsets = np.random.default_rng(ranks).choice(np.arange(1, (ranks + 1) // 2), size=most // 2, replace=False)
        second = self.members[:, (np.arange(ranks)[:, None] + offsets) % ranks].reshape(groups, -1)
        first = np.repeat(self.members, len(offsets), axis=1)
        share = (ranks - 1) / (2 * len(offsets))
        return first.ravel(), second.ravel(), np.repeat(self.pair_bytes * share, first.shape[1])

    @property
    def in_pairs(self) -> bool:
        """No more pairs than ranks in groups: better gone through one by one than counted."""
        return self.pattern != "all" or self.members.shape[1] == 2

    @property
    def num_bytes(self) -> float:
        """Of all pairs of the block."""
        ranks = self.members.shape[1]
        per_group = {"all": ranks * (ranks - 1) // 2, "line": ranks - 1, "ring": ranks if ranks > 2 else ranks - 1}
        return float(self.pair_bytes.sum() * per_group[self.pattern])


@dataclass(frozen=True, eq=False, kw_only=True)
class Traffic:
    """All exchanges of one step.

    Args:
        world_size: ranks.
        blocks: the exchanges; a given matrix is one block of groups of two.
        mesh: axes of a job and their lengths, the fastest first; empty where the ranks form no mesh.
    """

    world_size: int
    blocks: tuple[Block, ...]
    mesh: tuple[tuple[str, int], ...] = ()

    @property
    def num_bytes(self) -> float:
        return sum(block.num_bytes for block in self.blocks)

    @cached_property
    def sampled(self) -> Any:
        """M for the search: `scipy.sparse.csr_array` `[world_size, world_size]`, symmetric.

        Groups above 65 ranks stand in it with a sample of their pairs, and a matrix with many more entries than that
        by a sample of its entries.
        """
        parts = [block.pairs(MAX_PARTNERS) for block in self.blocks]
        i, j, num_bytes = (np.concatenate([part[k] for part in parts] or [np.empty(0)]) for k in range(3))
        keep, num_bytes = thin(num_bytes, max(FEW_PAIRS, 2 * MAX_PARTNERS * self.world_size))
        i, j = i[keep], j[keep]
        both = np.concatenate([i, j]).astype(np.int64), np.concatenate([j, i]).astype(np.int64)
        shape = (self.world_size, self.world_size)
        return sparse.csr_array((np.concatenate([num_bytes, num_bytes]), both), shape=shape)

    def permuted(self, to: Sequence[int] | I64) -> Traffic:
        """The same exchanges with rank r called `to[r]`; no mesh any more."""
        name = np.asarray(to, dtype=np.int64)
        blocks = tuple(
            Block(axis=b.axis, members=name[b.members], pair_bytes=b.pair_bytes, pattern=b.pattern) for b in self.blocks
        )
        return Traffic(world_size=self.world_size, blocks=blocks)

    @classmethod
    def of_job(cls, parallel: Parallel, sent_bytes: Mapping[Axis, float]) -> Traffic:
        """Exchanges of a job.

        Args:
            parallel: its mesh.
            sent_bytes: by axis, what each rank sends in one step: of an all_gather of S bytes (n - 1) / n · S,
                of an all_reduce twice as much; on pp, what goes to *one* neighbour.

        Raises:
            Misconfigured: an axis that does not exist, a negative number of bytes.
        """
        blocks = []
        for axis, num_bytes in sent_bytes.items():
            if axis not in AXES:
                raise Misconfigured(f"axis {printable(str(axis), 40)}: choose from {', '.join(AXES)}")
            _check_bytes(f"bytes of {axis}", num_bytes)
            group = axes(parallel)[axis]
            if group.ranks == 1 or not num_bytes:
                continue
            pattern: Pattern = "all" if axis != "pp" else "ring" if parallel.virtual > 1 else "line"
            each = 2 * num_bytes / (group.ranks - 1 if pattern == "all" else 1)
            members = group.members(parallel.world_size)
            blocks.append(
                Block(axis=axis, members=members, pair_bytes=np.full(len(members), each), pattern=pattern)
            )  # fmt: skip
        mesh = tuple((axis, axes(parallel)[axis].ranks) for axis in AXES[:4])
        return cls(world_size=parallel.world_size, blocks=tuple(blocks), mesh=mesh)

    @classmethod
    def of_groups(cls, world_size: int, sent_bytes: Mapping[Sequence[int], float], *, axis: str = "group") -> Traffic:
        """Exchanges of groups as a trace has them: ranks of a group -> bytes that each of them sends.

        Raises:
            Misconfigured: a rank outside the job or twice in a group, a negative number of bytes.
        """
        check_world_size(world_size)
        by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for group, num_bytes in sent_bytes.items():
            ranks = tuple(group)
            if len(set(ranks)) != len(ranks) or not all(0 <= rank < world_size for rank in ranks):
                raise Misconfigured(
                    f"group {printable(str(ranks), 80)}: give different ranks, each from 0 to {world_size - 1}"
                )
            _check_bytes(f"bytes of group {printable(str(ranks), 80)}", num_bytes)
            if len(ranks) > 1 and num_bytes:
                by_length.setdefault(len(ranks), []).append((ranks, 2 * num_bytes / (len(ranks) - 1)))
        blocks = []
        for found in by_length.values():
            members = np.array([ranks for ranks, _ in found], dtype=np.int64)
            blocks.append(Block(axis=axis, members=members, pair_bytes=np.array([each for _, each in found])))
        return cls(world_size=world_size, blocks=tuple(blocks))

    @classmethod
    def of_matrix(cls, matrix: Any) -> Traffic:
        """A given matrix of bytes, dense or of scipy.sparse: entry (i, j) is what rank i sends to rank j.

        Raises:
            Misconfigured: it is not square, or has entries that are negative or no numbers.
        """
        if getattr(matrix, "ndim", 2) != 2 or len(set(matrix.shape)) != 1:
            shape = " x ".join(map(str, matrix.shape))
            raise Misconfigured(f"traffic matrix is {shape}: give one row and one column per rank")
        check_world_size(matrix.shape[0])
        values = np.asarray(matrix.data if sparse.issparse(matrix) else matrix, dtype=np.float64)
        if not np.isfinite(values).all() or values.min(initial=0.0) < 0:
            raise Misconfigured("traffic matrix has an entry that is negative or no number: give bytes, 0 or more")
        both: Any = (
            sparse.coo_array(sparse.triu(matrix + matrix.T, 1)) if sparse.issparse(matrix) else values + values.T
        )
        i, j = both.coords if sparse.issparse(both) else np.nonzero(np.triu(both, 1))
        num_bytes = np.asarray(both.data if sparse.issparse(both) else both[i, j], dtype=np.float64)
        block = Block(axis="given", members=np.stack([i, j], axis=1).astype(np.int64), pair_bytes=num_bytes)
        return cls(world_size=matrix.shape[0], blocks=(block,) if len(num_bytes) else ())


def thin(weights: F64, count: int) -> tuple[NDArray[np.bool_] | slice, F64]:
    """About `count` of many weights, so that every sum over some of them stays what it was, in the mean.

    Weights above a threshold t stay; a smaller one w stays with probability w / t, as t. (Threshold sampling: Duffield,
    Lund and Thorup 2007, arXiv cs/0509026.) Drawn the same way every time.

    Returns:
        Which stay, and their weights.
    """
    if len(weights) <= count:
        return slice(None), weights
    falling = np.sort(weights)[::-1]
    rest = falling.sum() - np.cumsum(falling)[: count - 1]  # what is left when the largest 1, 2, ... stay as they are
    thresholds = rest / (count - np.arange(1, count))
    enough = np.flatnonzero(falling[1:count] <= thresholds)
    threshold = thresholds[enough[0]] if len(enough) else falling[count - 1]
    keep = np.random.default_rng(len(weights)).random(len(weights)) * threshold < weights
    return keep, np.maximum(weights[keep], threshold)


def check_world_size(world_size: int) -> None:
    """Raises Misconfigured where a job is too small or too large to be placed."""
    if not 1 <= world_size <= MAX_RANKS:
        raise Misconfigured(f"world_size = {world_size}: give 1 to {MAX_RANKS} ranks")


def _check_bytes(name: str, num_bytes: float) -> None:
    if not 0 <= num_bytes < float("inf"):
        raise Misconfigured(f"{name} = {num_bytes}: give a number of bytes, 0 or more")
