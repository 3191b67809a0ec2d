"""Bind matmuls that poll flags in memory and compute tiles in the order in which rows arrive, without a barrier.

- `all_gather_matmul`: a tile begins when the flag word of its rows' chunk says that the rows have arrived.
- `matmul_reduce_scatter`: tiles for peers come first and are counted, so that a stream wait releases each chunk's copy;
  tiles for this rank come last, and add what peers have sent.

`ShardedRows` says which rank has which rows, and determines the order of tiles. The words at `words` and `stored` are
32 bits wide; the word of a peer's chunk is at `4 * word(peer, chunk)`, as in `CudaWork`. The matmuls do not reset the
words: after them the stream does, by waits that reset (`collectives/cuda/lower.py`).

Copies for which a matmul polls are issued before it, on another stream. A matmul must be bound before any kernel of
this process polls: compiling and loading may wait for the device, and so for a kernel that polls for work that is not
issued yet. A matmul that polls may hold all SMs until the matmul of a peer has come as far, so all ranks launch them in
the same order. A bound matmul keeps its tensors alive; the caller keeps the words alive.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from counterpoint.errors import Misconfigured, Unsupported, needs_triton
from counterpoint.pair.arrivals import ShardedRows, TensorOperation

MAX_SPINS = 1 << 30  # polls of at most a microsecond each, more than the watchdog waits
HOPPER = 9  # major compute capability
TMA_BYTES = 16  # addresses and strides must be multiples of this
_MAX_LAYOUTS = 1024  # number of layouts whose tables are kept
_CAPTURED: set[torch.Tensor] = set()  # tables that CUDA graphs may still read: nothing tells when a graph is gone
TYPES = (torch.bfloat16, torch.float16)
_ROWS: dict[TensorOperation, tuple[str, ...]] = {  # by operation, the tensors whose rows are multiplied
    "all_gather_matmul": ("own", "gathered"),
    "matmul_reduce_scatter": ("a",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulTiles:
    """Holds a matmul's tile sizes: `rows` and `columns` of C, `depth` of K at a time; all of them powers of two.

    `group` tiles of rows share the columns of B in the cache. What Hopper holds: `rows * columns` of 32,768 with 8
    warps; `stages * depth * (rows + columns)` elements in 227 KiB of shared memory.

    Raises:
        Misconfigured: a number is out of its range.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    stages: int = 3
    warps: int = 8
    group: int = 8

    def __post_init__(self) -> None:
        sizes = (self.rows, self.columns, self.depth)
        if min(*sizes, self.stages, self.warps, self.group) < 1 or any(size & (size - 1) for size in sizes):
            raise Misconfigured(f"{self}: give rows, columns and depth as powers of two, and all of it 1 or more")


DEFAULT_TILES = MatmulTiles()


class TileRun(NamedTuple):
    """Describes consecutive rows that arrive together; `begin` and `end` count tiles."""

    begin: int
    end: int
    source: int
    target: int
    rows: int
    peer: int
    chunk: int


@functools.lru_cache(maxsize=_MAX_LAYOUTS)
def tile_runs(layout: ShardedRows, operation: TensorOperation, tile_rows: int) -> tuple[TileRun, ...]:
    """Return the `TileRun`s of C's rows, in the order in which the matmul computes their tiles.

    all_gather_matmul: own rows first (source: the shard), then those of rank - 1, rank - 2, ... (source: the gathered
    matrix). matmul_reduce_scatter: rows for rank + 1, rank + 2, ..., own last (target: the shard). All other sources
    and targets are rows of the whole matrix.
    """
    found: list[TileRun] = []
    gathers = operation == "all_gather_matmul"
    for turn in range(layout.world_size) if gathers else range(1, layout.world_size + 1):
        peer = (layout.rank + (-turn if gathers else turn)) % layout.world_size
        own = peer == layout.rank
        chunks = (range(layout.shard(peer)),) if own and gathers else layout.chunks(peer)
        for chunk, block in enumerate(chunks):
            in_shard = block.start
            for in_matrix, rows in layout.slabs(peer, block):
                begin = found[-1].end if found else 0
                found.append(
                    TileRun(
                        begin=begin,
                        end=begin - (-rows // tile_rows),
                        source=in_shard if own and gathers else in_matrix,
                        target=in_shard if own and not gathers else in_matrix,
                        rows=rows,
                        peer=peer,
                        chunk=chunk,
                    )
                )
                in_shard += rows
    return tuple(found)


def stored_tiles(layout: ShardedRows, columns: int, tiles: MatmulTiles = DEFAULT_TILES) -> dict[tuple[int, int], int]:
    """Return, by (peer, chunk), the number of stored tiles at which that chunk of `partial` may be sent."""
    counts: Counter[tuple[int, int]] = Counter()
    for run in tile_runs(layout, "matmul_reduce_scatter", tiles.rows):
        if run.peer != layout.rank:
            counts[run.peer, run.chunk] += (run.end - run.begin) * -(-columns // tiles.columns)
    return dict(counts)


def bind_flagged(
    operation: TensorOperation,
    tensors: Mapping[str, torch.Tensor],
    layout: ShardedRows,
    *,
    words: int,
    error: int,
    stored: int = 0,
    bias: torch.Tensor | None = None,
    average: bool = False,
    num_sms: int | None = None,
    tiles: MatmulTiles = DEFAULT_TILES,
    max_spins: int = MAX_SPINS,
) -> Callable[[], None]:
    """Compile a matmul that polls flags, and return a function that launches this matmul on torch's current stream.

    all_gather_matmul: `out = gathered @ b + bias`, where `out` is `[rows, N]`. Peers' rows are copied into `gathered`,
    `[rows, K]`. Own rows are read from `own`, this rank's shard `[rows of the shard, K]`, and never from `gathered`.

    matmul_reduce_scatter: this rank's part of the sum of all ranks' `a @ b`, plus `bias` once at last, where `a` is
    `[rows, K]`. Peers' rows go to `partial`, `[rows, N]`. A chunk of them may be sent to the peer's `staged[rank]`,
    `[ranks, rows of the shard, N]`, when its word at `stored`, to which each tile adds 1, has reached `stored_tiles`
    (`PartitionedCudaWork.ready_when`). Own rows go to `out`, `[rows of the shard, N]`: the tile in float32, plus what
    peers have sent, added up in float32 in the order of their ranks. Own rows of `partial` and `staged` are never
    touched.

    Args:
        operation: `all_gather_matmul` or `matmul_reduce_scatter`.
        tensors: tensors by the names above, and `b`, `[K, N]`, rows or columns adjacent (a weight is `weight.t()`).
        layout: layout of the rows over ranks.
        words: address of the flag words, one for each chunk.
        error: address of a word that is 0. After `max_spins` polls in vain polling ends, `out` is wrong, and this word
            says which chunk was missing (`ShardedRows.missing`).
        stored: address of the counts of stored tiles, which are 0.
        bias: `[N]`.
        average: divide the sum by the number of ranks.
        num_sms: number of programs, each of which takes an SM of its own; None: all SMs.
        tiles: sizes of the tile.
        max_spins: number of times that a word is polled at most.

    Returns:
        A function that launches the matmul; it may be called again, and captured in a CUDA graph.

    Raises:
        Misconfigured: shapes, strides or dtypes do not fit.
        Unsupported: Triton is not installed, or the GPU is older than Hopper.
    """
    b = tensors["b"]
    depth, columns = b.shape
    _check(operation, tensors, layout)
    if b.dtype not in TYPES or not depth or 1 not in b.stride():
        raise Misconfigured(f"b of {tuple(b.shape)}, {b.dtype}, strides {b.stride()}: give a matrix of {TYPES}")
    if num_sms is not None and num_sms < 1:
        raise Misconfigured(f"num_sms={num_sms}: give 1 or more, or None for all SMs")
    if bias is not None and bias.shape != (columns,):
        raise Misconfigured(f"bias of {tuple(bias.shape)}: give {columns} elements")
    with needs_triton("matmuls that poll"):
        from triton import knobs
        from triton.tools.tensor_descriptor import TensorDescriptor

        from counterpoint.parallel.tensor import flagged_kernels
    runs = tile_runs(layout, operation, tiles.rows)
    row_tiles = runs[-1].end if runs else 0
    programs = row_tiles * -(-columns // tiles.columns)
    if not programs:
        return lambda: None
    table = _table(layout, operation, tiles.rows, b.device)
    if b.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.add(table)
        else:
            table.record_stream(torch.cuda.current_stream(b.device))
        properties = torch.cuda.get_device_properties(b.device)
        num_sms = min(num_sms or programs, properties.multi_processor_count)  # all programs have to run at once
        if properties.major < HOPPER:
            raise Unsupported(f"{properties.name}: matmuls that poll need Hopper or newer, for its proxy fence")
    transposed = b.stride(1) != 1
    rows, across = [tiles.rows, tiles.depth], [tiles.depth, tiles.columns]
    operands = {name: (tensors[name], rows) for name in _ROWS[operation]}
    operands["b"] = (b.t(), across[::-1]) if transposed else (b, across)
    if "own" in operands and not layout.shard(layout.rank):
        operands["own"] = operands["gathered"]  # a tensor without rows has no descriptor, so give another
    tma = all(_fits_tma(tensor) for tensor, _ in operands.values())
    values: dict[str, Any] = {
        **tensors,
        **{name: TensorDescriptor.from_tensor(*each) if tma else each[0] for name, each in operands.items()},
        **{f"{name}_stride": tensor.stride(0) for name, tensor in tensors.items()},
        **{f"{name}_stride": tensor.stride(0) for name, (tensor, _) in operands.items()},
        "bias": bias,
        "slot_rows": layout.shard(layout.rank),
        "table": table,
        "stored": stored,
        "words": words,
        "error": error,
        "patience": max_spins,
        "row_tiles": row_tiles,
        "rank": layout.rank,
        "world_size": layout.world_size,
        "N": columns,
        "K": depth,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.depth,
        "GROUP": tiles.group,
        "TRANSPOSED": transposed,
        "TMA": tma,
        "COMPILED": not knobs.runtime.interpret,
        "AVERAGE": average,
    }
    kernel = getattr(flagged_kernels, operation)
    arguments, grid = [values[name] for name in kernel.arg_names], (min(programs, num_sms or programs), 1, 1)
    if knobs.runtime.interpret:
        return functools.partial(kernel[grid], *arguments)
    compiled = kernel.warmup(*arguments, grid=grid, num_warps=tiles.warps, num_stages=tiles.stages)
    return functools.partial(compiled[grid], *arguments)  # indexing by the grid loads the kernel


@functools.lru_cache(maxsize=_MAX_LAYOUTS)
def _table(layout: ShardedRows, operation: TensorOperation, tile_rows: int, device: torch.device) -> torch.Tensor:
    """Return the `TileRun`s as a table on the device; wait for the copy, so that any stream may use the table."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Misconfigured(f"{layout} is new in a CUDA graph capture: bind the matmul once before the capture")
    rows = [(*run, 0) for run in tile_runs(layout, operation, tile_rows)]
    return torch.tensor(rows, dtype=torch.int32).to(device)


def _check(operation: TensorOperation, tensors: Mapping[str, torch.Tensor], layout: ShardedRows) -> None:
    """Raise if a tensor lacks the shape, strides or dtype that the matmul needs."""
    b = tensors["b"]
    (depth, columns), shard = b.shape, layout.shard(layout.rank)
    shapes = {
        "own": (shard, depth),
        "gathered": (layout.total, depth),
        "a": (layout.total, depth),
        "partial": (layout.total, columns),
        "staged": (layout.world_size, shard, columns),
        "out": (layout.total if operation == "all_gather_matmul" else shard, columns),
    }
    for name, tensor in tensors.items():
        shape = shapes.get(name, b.shape)
        fits = tensor.is_contiguous() if name == "staged" else tensor.stride(1) == 1 or name == "b"
        if tensor.shape != shape or not fits or (name in _ROWS[operation] and tensor.dtype != b.dtype):
            dtype = b.dtype if name in _ROWS[operation] else "any dtype"
            raise Misconfigured(
                f"{name} of {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}: give {shape} of {dtype}, "
                f"with the elements of a row adjacent{', and rows' if name == 'staged' else ''}"
            )


def _fits_tma(tensor: torch.Tensor) -> bool:
    """Return whether a TMA tensor descriptor can describe this tensor."""
    return not (tensor.data_ptr() % TMA_BYTES or tensor.stride(0) * tensor.itemsize % TMA_BYTES)
