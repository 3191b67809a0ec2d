# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Define Triton matmuls that poll flags in memory; `flagged.py` imports this file when it binds a matmul.

A program takes every `num_programs`-th tile of C, in the order of a table of `TileRun`s, in which `flagged.py` puts
runs first whose rows arrive first. The rows of a run arrive together, and no tile spans two runs.

One thread polls, by reads with acquire at system scope; a block barrier passes the order on to the other threads, and a
proxy fence passes it on to TMA, which loads through another proxy than the one that has read the word. Results that a
copy engine sends are written by plain stores, then counted with release at system scope. A program whose polling times
out writes 1 plus the index of its word at `error`, unless another program has done so before.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(8)  # of the table: begin and end in tiles of rows, source, target, rows, peer, chunk, unused


@triton.jit
def _place(tile, row_tiles, column_tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return a tile's first row and column; tiles go down `GROUP` tiles of rows, then to the next column of tiles."""
    group = tile // (GROUP * column_tiles)
    height = min(row_tiles - group * GROUP, GROUP)
    tile -= group * GROUP * column_tiles
    return (group * GROUP + tile % height) * BLOCK_M, tile // height * BLOCK_N


@triton.jit
def _operand(source, stride, row, end, column, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """Return a block of an operand, 0 out of bounds; `source` is a tensor descriptor if `TMA`, else a pointer."""
    if TMA:
        block = source.load([row, column])
    else:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, WIDTH)
        pointers = source + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        block = tl.load(pointers, mask=(rows < end)[:, None] & (columns < width)[None, :], other=0)
    return block


@triton.jit
def _product(a, a_stride, row, end, b, b_stride, column, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Return a tile of A @ B in float32; with `TRANSPOSED`, B is stored as [N, K]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = _operand(a, a_stride, row, end, k, K, BLOCK_M, BLOCK_K, TMA)
        if TRANSPOSED:
            right = _operand(b, b_stride, column, N, k, K, BLOCK_N, BLOCK_K, TMA).T
        else:
            right = _operand(b, b_stride, k, K, column, N, BLOCK_K, BLOCK_N, TMA)
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _store(target, stride, row, end, column, N, values, bias):
    """Store a tile plus its columns' bias, except rows from `end` on, which belong to the next `TileRun`."""
    rows, columns = row + tl.arange(0, values.shape[0]), column + tl.arange(0, values.shape[1])
    if bias is not None:
        values += tl.load(bias + columns, mask=columns < N, other=0).to(tl.float32)[None, :]
    pointers = target + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, values.to(target.dtype.element_ty), mask=(rows < end)[:, None] & (columns < N)[None, :])


@triton.jit
def _wait(words, word, error, patience, COMPILED: tl.constexpr):
    """Poll until a flag is at least 1, at most `patience` times; return the polls allowed for the next flag."""
    pointer = (words + word * 4).to(tl.pointer_type(tl.int32))
    value = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    left = patience
    while (value < 1) & (left > 0):
        value = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        left -= 1
    if value < 1:  # go on with wrong data, and poll no more: the kernel has to end
        tl.atomic_cas(error.to(tl.pointer_type(tl.int32)), 0, word + 1, sem="relaxed", scope="sys")
        patience = 0
    tl.debug_barrier()
    if COMPILED:
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
    return patience


@triton.jit(do_not_specialize=["words", "error", "patience", "row_tiles", "rank", "world_size"])
def all_gather_matmul(own, own_stride, gathered, gathered_stride, b, b_stride, bias, out, out_stride, table,
                      words: tl.int64, error: tl.int64, patience, row_tiles, rank, world_size, N, K,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
                      TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
                      COMPILED: tl.constexpr):  # fmt: skip
    """Compute out = gathered @ B: own rows from `own`, each peer's chunk once a flag says that it has arrived."""
    column_tiles = tl.cdiv(N, BLOCK_N)
    run, seen = 0, -1
    end = tl.load(table + 1)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        while tile >= end * column_tiles:
            run += 1
            end = tl.load(table + run * COLUMNS + 1)
        entry = table + run * COLUMNS
        begin, source, target = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
        rows, peer, chunk = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
        row, column = _place(tile - begin * column_tiles, end - begin, column_tiles, BLOCK_M, BLOCK_N, GROUP)
        if peer == rank:
            a, a_stride = own, own_stride
        else:
            a, a_stride = gathered, gathered_stride
            word = chunk * world_size + peer
            if word != seen:
                patience = _wait(words, word, error, patience, COMPILED)
                seen = word
        total = _product(a, a_stride, source + row, source + rows, b, b_stride, column, N, K,
                         BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, TMA)  # fmt: skip
        _store(out, out_stride, target + row, target + rows, column, N, total, bias)


@triton.jit
def _halves(values):
    """Return the left half and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _store_sum(total, staged, slot_rows, row, end, column, N, out, out_stride, bias, rank, world_size,
               AVERAGE: tl.constexpr):  # fmt: skip
    """Store a tile plus the tiles that peers have staged for it, which are summed first, in float32, in rank order."""
    rows, columns = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    peers = tl.zeros(total.shape, tl.float32)
    for peer in tl.range(world_size, num_stages=3):
        lines = (rows + slot_rows.to(tl.int64) * peer)[:, None] * N
        peers += tl.load(staged + lines + columns[None, :], mask=mask & (peer != rank), other=0).to(tl.float32)
    total += peers
    if AVERAGE:
        total /= world_size
    _store(out, out_stride, row, end, column, N, total, bias)


@triton.jit(do_not_specialize=["slot_rows", "stored", "words", "error", "patience", "row_tiles", "rank", "world_size"])
def matmul_reduce_scatter(a, a_stride, b, b_stride, bias, partial, partial_stride, staged, slot_rows,
                          out, out_stride, table, stored: tl.int64, words: tl.int64, error: tl.int64, patience,
                          row_tiles, rank, world_size, N, K,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
                          TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
                          COMPILED: tl.constexpr, AVERAGE: tl.constexpr):  # fmt: skip
    """Compute A @ B: peers' rows go to `partial`, counted in `stored`; own rows plus staged rows go to `out`."""
    column_tiles = tl.cdiv(N, BLOCK_N)
    run, seen = 0, -1
    end = tl.load(table + 1)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        while tile >= end * column_tiles:
            run += 1
            end = tl.load(table + run * COLUMNS + 1)
        entry = table + run * COLUMNS
        begin, source, target = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3)
        rows, peer, chunk = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
        row, column = _place(tile - begin * column_tiles, end - begin, column_tiles, BLOCK_M, BLOCK_N, GROUP)
        total = _product(a, a_stride, source + row, source + rows, b, b_stride, column, N, K,
                         BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, TMA)  # fmt: skip
        if peer != rank:
            _store(partial, partial_stride, target + row, target + rows, column, N, total, None)
            tl.debug_barrier()
            counter = (stored + (chunk * world_size + peer) * 4).to(tl.pointer_type(tl.int32))
            tl.atomic_add(counter, 1, sem="release", scope="sys")
        else:
            if chunk != seen:
                for other in range(world_size):
                    if other != rank:
                        patience = _wait(words, chunk * world_size + other, error, patience, COMPILED)
                seen = chunk
            left, right = _halves(total)  # quarters of a tile need fewer registers
            for half in tl.static_range(2):
                quarters = _halves(right if half else left)
                for quarter in tl.static_range(2):
                    _store_sum(quarters[quarter], staged, slot_rows, target + row, target + rows,
                               column + (2 * half + quarter) * (BLOCK_N // 4), N,
                               out, out_stride, bias, rank, world_size, AVERAGE)  # fmt: skip
