"""Partition ranks into units with little traffic between units: by boxes of a job's mesh, and by spectral bisection.

**Boxes** (`mesh_order`). On a regular tree, a unit of U GPUs holds a box of the mesh, whose extents e, Π e = U, divide
the axes; the box of a unit is made of boxes of the units below. With cut(e) the traffic between boxes and d the
distances,

    C = Σ over levels l of (d(l + 1) - d(l)) · cut(e of l) + d(0) · (all traffic)

is a shortest path through the levels, found exactly: of all such orders none is better. (Others may be.)

**Bisection** (`arrange`) needs no mesh. A cut of a graph is small where the Fiedler vector f changes little across it:
f minimises Σ M(i, j) (f_i - f_j)² over vectors that are orthogonal to 1 and of length 1, so ranks that talk much have
close values. Sorting by f and cutting where the capacity of the first half of a unit's children ends gives both halves,
exactly as large as they must be; swaps across the cut improve on the sort. (Fiedler 1973; Pothen, Simon and Liou
1990; Kernighan and Lin 1970.) On the mesh of a job, f is constant along every axis but the one with the least traffic:
the cut goes through that one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import lobpcg

from counterpoint.plan.placement.topology import Topology
from counterpoint.plan.placement.traffic import AxisTraffic, RankTraffic

I64 = NDArray[np.int64]
Box = tuple[int, ...]
MAX_BOXES = 400  # per level; beyond, only every so-many-th is looked at
F64 = NDArray[np.float64]
Csr = Any  # scipy.sparse.csr_array, which has no types
DENSE = 100  # vertices up to which all eigenvectors are computed
GAPS, GAP = 8, 1.2  # gaps of the sorted weights that are tried, and what counts as one
SPACE = 7  # eigenvectors that are looked at together
NEAR = 1.5  # times the smallest eigenvalue: what counts as equally smooth
DIRECTIONS, TURNS, MENDED = 16, 6, 3  # in that space; see `_sides`


def mesh_order(traffic: RankTraffic, topology: Topology) -> I64 | None:
    """Return ranks in the order in which they fill the tree; None: no box of this mesh fits any level.

    The most frequent size of a unit counts where the tree is not regular.
    """
    lengths = tuple(length for _, length in traffic.mesh)
    coordinates = np.unravel_index(np.arange(traffic.world_size), lengths[::-1])[::-1]  # the first axis is the fastest
    best: dict[Box, tuple[float, tuple[Box, ...]]] = {(1,) * len(lengths): (0.0, ())}
    distances = [level.distance for level in topology.levels]
    for index, size in enumerate(_sizes(topology)[:-1]):
        boxes = boxes_of(lengths, size)
        if not boxes:
            continue  # this level is filled as it comes
        rise = distances[index + 1] - distances[index]
        cuts = {box: rise * _between_boxes(traffic, coordinates, lengths, box) for box in boxes}
        best = {
            box: min((cost + cuts[box], (*path, box)) for below, (cost, path) in best.items() if _divides(below, box))
            for box in boxes
            if any(_divides(below, box) for below in best)
        } or best
    _, path = min(best.values())
    if not path:
        return None
    keys = [coordinates[axis] for axis in range(len(lengths))]
    for box in path:
        keys += [coordinates[axis] // box[axis] for axis in range(len(lengths))]
    return np.lexsort(keys)


def boxes_of(lengths: tuple[int, ...], size: int) -> list[Box]:
    """Return the boxes of `size` ranks, or of all if fewer, whose extents divide the axes; at most `MAX_BOXES`."""
    size = min(size, int(np.prod(lengths)))
    divisors = [[e for e in range(1, length + 1) if length % e == 0 and size % e == 0] for length in lengths[1:]]
    found = []
    for rest in product(*divisors):
        first, left = divmod(size, int(np.prod(rest)))
        if left == 0 and first and lengths[0] % first == 0:
            found.append((first, *rest))
    return found[:: -(-len(found) // MAX_BOXES)] if found else []


def _between_boxes(traffic: RankTraffic, coordinates: tuple[I64, ...], lengths: tuple[int, ...], box: Box) -> float:
    """Return the bytes that ranks of different boxes exchange."""
    label = np.zeros(traffic.world_size, dtype=np.int64)
    for at, length, extent in zip(coordinates, lengths, box, strict=True):
        label = label * length + at // extent
    return sum(part.num_bytes - _inside(part, label) for part in traffic.parts)


def _inside(part: AxisTraffic, label: I64) -> float:
    if part.in_pairs:
        first, second, num_bytes = part.pairs()
        return float(num_bytes[label[first] == label[second]].sum())
    group = np.arange(len(part.members))[:, None]
    keys, counts = np.unique(group * (label.max() + 1) + label[part.members], return_counts=True)
    return float((counts * (counts - 1) / 2) @ part.pair_bytes[keys // (label.max() + 1)])


def _divides(below: Box, box: Box) -> bool:
    return all(large % small == 0 for small, large in zip(below, box, strict=True))


def _sizes(topology: Topology) -> list[int]:
    """Return the GPUs of a host, then those of the most frequent unit size of each level."""
    counts = [np.bincount(np.bincount(row)).argmax() for row in topology.units]
    return [topology.gpus, *(int(count) * topology.gpus for count in counts)]


def arrange(matrix: Csr, units: I64) -> I64:
    """Return vertices, `[n]`, in an order that gives each unit of the tree those with little traffic to other units.

    `matrix` is the traffic, `[n, n]`, symmetric. `units`, `[levels, n]`, has the unit of each position 0..n-1 at each
    level, inside out; units are contiguous.
    """
    order = np.arange(matrix.shape[0])
    work = [(0, matrix.shape[0], len(units) - 1)]
    while work:
        start, end, level = work.pop()
        row = units[level, start:end]
        if level < 0 or end - start < 2:
            continue
        edges = np.flatnonzero(np.diff(row)) + 1  # where a child ends
        if not len(edges):
            work.append((start, end, level - 1))
            continue
        middle = int(edges[np.argmin(abs(edges - (end - start) / 2))])
        vertices = order[start:end]
        order[start:end] = vertices[_bisect(matrix[vertices][:, vertices], middle)]
        work += [(start, start + middle, level), (start + middle, end, level)]
    return order


def heavy_groups(matrix: Csr, most: int) -> I64 | None:
    """Return groups of equal size whose members exchange more with each other than with others, to keep in one host.

    Bisection alone can cut them: halving a tensor-parallel pair is cheaper than halving a clique of shards, although
    that clique is too large for a host anyway. The groups, `[groups, size]`, are the largest connected parts above a
    gap in the sorted weights of `matrix`, `[n, n]` and symmetric, whose size divides `most`, the vertices of a host;
    vertices without traffic count in groups of their own. None: there are none above one vertex.
    """
    weights = np.sort(matrix.data)[::-1]
    gaps = weights[:-1] / np.maximum(weights[1:], 1e-300)
    places = np.argsort(-gaps, kind="stable")[:GAPS]
    best: I64 | None = None
    for place in places[gaps[places] > GAP]:
        strong = matrix.copy()
        strong.data *= strong.data >= weights[place]
        strong.eliminate_zeros()
        label = connected_components(strong, directed=False)[1]
        busy = np.diff(matrix.indptr) > 0
        sizes = np.bincount(label[busy])
        sizes = sizes[sizes > 0]
        if not len(sizes) or sizes.min() != sizes.max() or sizes[0] == 1 or most % sizes[0]:
            continue
        if (len(label) - busy.sum()) % sizes[0] == 0 and (best is None or sizes[0] > best.shape[1]):
            order = np.lexsort([np.arange(len(label)), label, ~busy])
            best = order.reshape(-1, sizes[0])
    return best


def arrange_groups(matrix: Csr, units: I64, groups: I64) -> I64:
    """Return the order of `arrange`, with the vertices of each group kept together; units hold whole groups."""
    count, size = groups.shape
    label = np.empty(groups.size, dtype=np.int64)
    label[groups] = np.arange(count)[:, None]
    order = arrange(contracted(matrix, label, count), units[:, ::size])
    return groups[order].ravel()


def contracted(matrix: Csr, label: I64, count: int) -> Csr:
    """Return the traffic between the sets of vertices of equal label, `[count, count]`, without that inside a set."""
    one_hot = sparse.csr_array((np.ones(len(label)), label, np.arange(len(label) + 1)), shape=(len(label), count))
    found = sparse.coo_array(one_hot.T @ matrix @ one_hot)
    row, column = found.coords
    keep = row != column
    return sparse.csr_array((found.data[keep], (row[keep], column[keep])), shape=found.shape)


def _bisect(matrix: Csr, size: int) -> I64:
    """Return the vertices in an order whose first `size` are one side of the best cut found."""
    found = sorted(_sides(matrix, size), key=lambda each: each[0])[:MENDED]
    mended = [_mend(matrix, side) for _, side in found]
    best = min(mended, key=lambda side: _cut(matrix, side))
    return np.argsort(~best, kind="stable")


def _sides(matrix: Csr, size: int) -> Iterator[tuple[float, NDArray[np.bool_]]]:
    """Yield the traffic across a cut and a mask of one side, for each direction in the space of the smoothest vectors.

    Where axes weigh the same (a cube, a torus), the eigenvectors are any mixture of them, and cut diagonally. Putting
    the side's own projection in the vector's place, again and again, turns a direction towards the nearest cut that
    lies in the space.
    """
    space = _smooth_vectors(matrix, SPACE)
    directions = np.eye(space.shape[1])
    if space.shape[1] > 1:
        more = np.random.default_rng(size).standard_normal((DIRECTIONS, space.shape[1]))
        directions = np.vstack([directions, more])
    for direction in directions:
        for _ in range(TURNS):
            side = np.zeros(len(space), dtype=bool)
            side[np.argsort(space @ direction, kind="stable")[:size]] = True
            turned = space.T @ (side - size / len(side))
            if space.shape[1] == 1 or np.allclose(turned, direction):
                break
            direction = -turned
        yield _cut(matrix, side), side


def _cut(matrix: Csr, side: NDArray[np.bool_]) -> float:
    """Return the traffic between the two sides."""
    return float((matrix @ side.astype(np.float64))[~side].sum())


def _mend(matrix: Csr, side: NDArray[np.bool_], rounds: int = 20) -> NDArray[np.bool_]:
    """Return the side after swaps of equal numbers across the cut, the largest gains first, while its traffic falls."""
    cut = _cut(matrix, side)
    for _ in range(rounds):
        sign = np.where(side, 1.0, -1.0)
        pull = -sign * (matrix @ sign)  # traffic to the other side less that to the own
        left, right = (np.flatnonzero(each) for each in (side, ~side))
        left, right = left[np.argsort(-pull[left], kind="stable")], right[np.argsort(-pull[right], kind="stable")]
        count = min(len(left), len(right))
        gain = pull[left[:count]] + pull[right[:count]]
        count = int((gain > 1e-9 * max(cut, 1e-300)).sum())
        while count:
            trial = side.copy()
            trial[left[:count]], trial[right[:count]] = False, True
            found = _cut(matrix, trial)
            if found < cut * (1 - 1e-9):
                break
            count //= 2
        if not count:
            break
        side, cut = trial, found
    return side


def _smooth_vectors(matrix: Csr, count: int) -> F64:
    """Return the smoothest vectors, `[n, some]`; where parts have no traffic between them, one that sorts the parts."""
    parts, label = connected_components(matrix, directed=False)
    if parts > 1:
        sizes = np.bincount(label)
        rank = np.empty(parts)
        rank[np.argsort(-sizes, kind="stable")] = np.arange(parts)
        values: F64 = rank[label]
        largest = np.flatnonzero(label == np.argmax(sizes))
        if len(largest) > 2:
            inner = _smooth_vectors(matrix[largest][:, largest], 1)[:, 0]
            values[largest] += 0.5 * (inner - inner.min()) / (np.ptp(inner) or 1.0)
        return values[:, None]
    n = matrix.shape[0]
    count = min(count, n - 1)
    eigenvalues, vectors = _laplacian_vectors(matrix, count + 1)
    return vectors[:, 1:][:, eigenvalues[1:] <= NEAR * eigenvalues[1] + 1e-12]


def _laplacian_vectors(matrix: Csr, count: int) -> tuple[F64, F64]:
    """Return the smallest eigenvalues of the graph's Laplacian and their vectors, ascending."""
    degree = np.asarray(matrix.sum(axis=1)).ravel()
    if matrix.shape[0] <= DENSE:
        values, vectors = np.linalg.eigh(np.diag(degree) - matrix.toarray())
        return values[:count], vectors[:, :count]
    laplacian = sparse.csr_array(sparse.diags_array(degree) - matrix) / degree.max()
    start = np.random.default_rng(matrix.shape[0]).standard_normal((matrix.shape[0], count - 1))
    ones = np.ones((matrix.shape[0], 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # says so when not all have converged: any smooth vector will do
        values, vectors = lobpcg(laplacian, start, Y=ones, largest=False, tol=1e-5, maxiter=200)
    order = np.argsort(values)  # a block method: Lanczos from one vector finds only one of several equal eigenvalues
    return np.append(0.0, values[order]), np.hstack([ones, vectors[:, order]])
