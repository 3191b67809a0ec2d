# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="assignment, var-annotated"
"""Define the Triton kernels of expert parallelism; `permute.triton_kernels` imports this file at the first launch.

Assigning takes three: `count` the choices of each expert in each block of choices, `scan` each expert's counts, and
`place` every choice. All of it is in the order of choices, so that no row depends on which program was first.

`permute`, `combine` and `weight_grads` run a program for each token and `BLOCK` of its elements, so that a token, or
the rows of its sum, are read once; the slots of its choices are all that they follow. `pack` and `narrow` prepare what
is sent. `swiglu` and its derivative take every `num_programs`-th tile of the rows before the last offset.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(-1)


@triton.jit
def _local(ids, stride, first_expert, at, choices, EXPERTS: tl.constexpr, TOP_K: tl.constexpr):
    """Return the local index of each choice's expert; -1 for experts of other ranks and past the last choice."""
    places = ids + at // TOP_K * stride + at % TOP_K
    chosen = tl.load(places, mask=at < choices, other=-1) - first_expert
    return tl.where((at < choices) & (chosen >= 0) & (chosen < EXPERTS), chosen, NONE).to(tl.int32)


@triton.jit(do_not_specialize=["stride", "first_expert", "choices", "blocks", "capacity"])
def count(ids, stride, first_expert, choices, counts, blocks, sources, capacity, EXPERTS: tl.constexpr,
          BINS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Count how often a block of choices names each expert, and initialise the sources of all rows to -1 (none)."""
    block, lanes, bins = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BINS)
    experts = _local(ids, stride, first_expert, block * BLOCK + lanes, choices, EXPERTS, TOP_K)
    found = tl.histogram(experts, BINS, mask=experts >= 0)
    tl.store(counts + bins * blocks + block, found, mask=bins < EXPERTS)
    for start in range(block * BLOCK, capacity, blocks * BLOCK):
        tl.store(sources + start + lanes, tl.full([BLOCK], -1, tl.int32), mask=start + lanes < capacity)


@triton.jit(do_not_specialize=["blocks"])
def scan(counts, totals, blocks, WIDTH: tl.constexpr):
    """Replace one expert's counts, one for each block, by their exclusive prefix sums, and store the total."""
    counts += tl.program_id(0) * blocks
    before = 0
    for start in range(0, blocks, WIDTH):
        at = start + tl.arange(0, WIDTH)
        values = tl.load(counts + at, mask=at < blocks, other=0)
        tl.store(counts + at, before + tl.cumsum(values) - values, mask=at < blocks)
        before += tl.sum(values)
    tl.store(totals + tl.program_id(0), before)


@triton.jit(do_not_specialize=["stride", "first_expert", "choices", "blocks", "capacity"])
def place(ids, stride, first_expert, choices, counts, totals, blocks, slots, sources, offsets, missing, capacity,
          pad_multiple, EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Assign a row to every choice of a block, after the rows of earlier experts, blocks and choices."""
    block, lanes, bins = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BINS)
    total = tl.load(totals + bins, mask=bins < EXPERTS, other=0)
    padded = (total + pad_multiple - 1) // pad_multiple * pad_multiple
    ends = tl.cumsum(padded)
    at = block * BLOCK + lanes
    experts = _local(ids, stride, first_expert, at, choices, EXPERTS, TOP_K)
    known = tl.maximum(experts, 0)
    earlier = (experts[:, None] == experts[None, :]) & (lanes[:, None] < lanes[None, :])
    rows = tl.sum(earlier.to(tl.int32), axis=0) + tl.load(counts + known * blocks + block)
    rows += tl.gather(ends - padded, known, axis=0)
    has_row = (experts >= 0) & (rows < capacity)
    tl.store(slots + at, tl.where(has_row, rows, NONE), mask=at < choices)
    tl.store(sources + rows, at, mask=has_row)
    if block == 0:
        tl.store(offsets + bins, tl.minimum(ends, capacity), mask=bins < EXPERTS)
        tl.store(missing, tl.maximum(tl.sum(padded) - capacity, 0))


@triton.jit
def _columns(block, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the columns of a block, and a mask of the columns below `HIDDEN`."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    return columns, columns < HIDDEN


@triton.jit
def _wide(values):
    """Return values cast to the dtype of sums: float64 for float64, else float32."""
    return values if values.dtype == tl.float64 else values.to(tl.float32)


@triton.jit
def _zero(rows, sources, first, end, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to the rows that have no source, among `ROWS` rows from `first` on."""
    lines = first + tl.arange(0, ROWS)
    unused = tl.load(sources + lines, mask=lines < end, other=0) < 0
    if tl.max(unused.to(tl.int32)) > 0:
        starts = rows + lines.to(tl.int64)[:, None] * HIDDEN
        for block in range(tl.cdiv(HIDDEN, BLOCK)):
            columns, mask = _columns(block, HIDDEN, BLOCK)
            zeros = tl.zeros([ROWS, BLOCK], tl.float32).to(rows.dtype.element_ty)
            tl.store(starts + columns[None, :], zeros, mask=unused[:, None] & mask[None, :])


@triton.jit(
    do_not_specialize=["token_programs", "experts", "capacity"], do_not_specialize_on_alignment=["slots", "weights"]
)
def permute(tokens, token_stride, slots, weights, weight_stride, choice_stride, rows, sources, offsets, token_programs,
            experts, capacity, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ZERO_TAIL: tl.constexpr,
            ZERO_ROWS: tl.constexpr, ZERO_BLOCK: tl.constexpr):  # fmt: skip
    """Copy a token to the rows of its choices; extra programs write zeros to unused rows, `ZERO_ROWS` rows each."""
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    if program < token_programs:
        token = program // blocks
        columns, mask = _columns(program % blocks, HIDDEN, BLOCK)
        chosen, factors, last = (), (), -1
        for choice in tl.static_range(TOP_K):  # load all before the first store: later loads could not overtake it
            slot = tl.load(slots + token * TOP_K + choice)
            last = tl.maximum(last, slot)
            chosen += (slot,)
            if weights is not None:
                factors += (tl.load(weights + token * weight_stride + choice * choice_stride),)
        here = mask & (last >= 0)  # with many ranks, a third of the tokens has no expert here
        values = tl.load(tokens + token.to(tl.int64) * token_stride + columns, mask=here)
        for choice in tl.static_range(TOP_K):
            slot = chosen[choice]
            if slot >= 0:
                copy = values
                if weights is not None:
                    copy = _wide(values)
                    copy *= factors[choice].to(copy.dtype)
                copy = copy.to(rows.dtype.element_ty)
                tl.store(rows + slot.to(tl.int64) * HIDDEN + columns, copy, mask=mask)
    else:
        end = capacity if ZERO_TAIL else tl.load(offsets + experts - 1)
        first = (program - token_programs) * ZERO_ROWS
        if first < end:
            _zero(rows, sources, first, end, HIDDEN, ZERO_ROWS, ZERO_BLOCK)


@triton.jit(do_not_specialize_on_alignment=["slots", "weights"])
def combine(rows, slots, weights, weight_stride, choice_stride, sums, sum_stride, TOP_K: tl.constexpr,
            HIDDEN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum one block of elements over the rows of a token, in the order of its choices, times the weights if given."""
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // blocks
    columns, mask = _columns(tl.program_id(0) % blocks, HIDDEN, BLOCK)
    total = tl.zeros([BLOCK], tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slots + token * TOP_K + choice)
        here = slot >= 0  # a mask, not a branch: loads of all choices are in flight together
        values = tl.load(rows + tl.maximum(slot, 0).to(tl.int64) * HIDDEN + columns, mask=mask & here, other=0)
        values = values.to(total.dtype)
        if weights is not None:
            weight = tl.load(weights + token * weight_stride + choice * choice_stride, mask=here, other=0)
            values *= weight.to(total.dtype)
        total += values
    tl.store(sums + token.to(tl.int64) * sum_stride + columns, total.to(sums.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def weight_grads(rows, grads, grad_stride, slots, out, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
                 HIDDEN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store the dot products of a token's rows with the gradient of its sum; `CHOICES` >= `TOP_K` is a power of 2."""
    token = tl.program_id(0)
    choices = tl.arange(0, CHOICES)
    slot = tl.load(slots + token * TOP_K + choices, mask=choices < TOP_K, other=-1)
    here = slot >= 0
    lines = rows + tl.maximum(slot, 0).to(tl.int64)[:, None] * HIDDEN
    # broadcast to the shape of rows, which avoids a barrier
    gradients = grads + token.to(tl.int64) * grad_stride + tl.zeros([CHOICES, 1], tl.int32)
    total = tl.zeros([CHOICES, BLOCK], out.dtype.element_ty)
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for block in tl.static_range(blocks):
        columns, mask = _columns(block, HIDDEN, BLOCK)
        used = here[:, None] & mask[None, :]
        values = tl.load(lines + columns[None, :], mask=used, other=0)
        total += values.to(total.dtype) * tl.load(gradients + columns[None, :], mask=used, other=0).to(total.dtype)
    tl.store(out + token * TOP_K + choices, tl.sum(total, axis=1), mask=choices < TOP_K)


@triton.jit(do_not_specialize=["choices", "first", "room", "width", "local_experts"])
def pack(ids, compact, ends, weights, scales, choices, first, room, width, local_experts, entries, slots, table,
         N: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, HEAD: tl.constexpr, SECOND: tl.constexpr,
         LACKING: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the expert choices of one program to the tables of their experts' ranks; program 0 writes all headers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < choices
    row = tl.load(compact + at, mask=mask, other=NONE)
    has_rank = row >= 0
    rank = tl.where(has_rank, tl.load(ids + at, mask=mask, other=0) // local_experts, N)
    position = row - tl.load(ends + rank - 1, mask=has_rank & (rank > 0), other=0)
    has_entry = has_rank & (position < room)
    tl.store(entries + at, tl.where(has_entry, rank * room + position, NONE), mask=mask)
    tl.store(slots + at, tl.where(has_rank & (position < first), rank * first + position, NONE), mask=mask)
    entry = table + rank.to(tl.int64) * width + HEAD + position
    tl.store(entry, tl.load(ids + at, mask=has_entry, other=NONE), mask=has_entry)
    weight = tl.load(weights + at, mask=has_entry, other=0)
    tl.store(entry + room, weight.to(tl.int32, bitcast=True), mask=has_entry)
    if scales is not None:
        scale = tl.load(scales + at // TOP_K, mask=has_entry, other=0)
        tl.store(entry + 2 * room, scale.to(tl.int32, bitcast=True), mask=has_entry)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        is_rank = bins < N
        before = tl.load(ends + bins - 1, mask=is_rank & (bins > 0), other=0)
        chosen = tl.load(ends + bins, mask=is_rank, other=0) - before
        lacking = tl.sum(tl.maximum(chosen - room, 0))
        second = tl.minimum(tl.maximum(tl.max(chosen) - first, 0), room - first)
        heads = table + bins.to(tl.int64) * width
        tl.store(heads + SECOND, tl.full([BINS], 0, tl.int32) + second, mask=is_rank)
        tl.store(heads + LACKING, tl.full([BINS], 0, tl.int32) + lacking, mask=is_rank)


@triton.jit
def _part(x, start, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns of a token from `start` on, a mask of the columns below `HIDDEN`, and their values in float32."""
    columns = start + tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    return columns, mask, tl.load(x + columns, mask=mask, other=0).to(tl.float32)


@triton.jit
def narrow(x, values, scales, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr):
    """Divide a token by its scale, such that its largest magnitude becomes `LARGEST`."""
    token = tl.program_id(0).to(tl.int64)
    source, target = x + token * HIDDEN, values + token * HIDDEN
    columns, mask, part = _part(source, 0, HIDDEN, BLOCK)
    largest = tl.max(tl.abs(part))
    for start in tl.static_range(BLOCK, HIDDEN, BLOCK):
        largest = tl.maximum(largest, tl.max(tl.abs(_part(source, start, HIDDEN, BLOCK)[2])))
    scale = tl.where(largest > 0, tl.div_rn(largest, LARGEST), 1.0)
    tl.store(scales + token, scale)
    tl.store(target + columns, tl.div_rn(part, scale).to(values.dtype.element_ty), mask=mask)
    for start in tl.static_range(BLOCK, HIDDEN, BLOCK):
        columns, mask, part = _part(source, start, HIDDEN, BLOCK)
        tl.store(target + columns, tl.div_rn(part, scale).to(values.dtype.element_ty), mask=mask)


@triton.jit
def _tile(tile, end, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the row numbers, the column numbers and the mask of a tile."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    rows = (tile // across * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tile % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return rows.to(tl.int64), columns, (rows < end) & (columns < WIDTH)


@triton.jit
def _gate_up(gate_up, rows, columns, mask, WIDTH: tl.constexpr):
    """Return the gate, the sigmoid of the gate, and up, in float32 or float64."""
    places = gate_up + rows * (2 * WIDTH) + columns
    gate, up = tl.load(places, mask=mask, other=0), tl.load(places + WIDTH, mask=mask, other=0)
    if gate_up.dtype.element_ty != tl.float64:
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    return gate, 1 / (1 + tl.exp(-gate)), up


@triton.jit(do_not_specialize=["experts"])
def swiglu(gate_up, out, offsets, experts, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute `silu(gate) * up` for the rows before the last offset."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    end = tl.load(offsets + experts - 1)
    for tile in range(tl.program_id(0), tl.cdiv(end, ROWS) * across, tl.num_programs(0)):
        rows, columns, mask = _tile(tile, end, WIDTH, ROWS, COLUMNS)
        gate, sigmoid, up = _gate_up(gate_up, rows, columns, mask, WIDTH)
        tl.store(out + rows * WIDTH + columns, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["experts"])
def swiglu_backward(
    gate_up, grads, out, offsets, experts, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute the derivatives of gate and up, for the rows before the last offset."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    end = tl.load(offsets + experts - 1)
    for tile in range(tl.program_id(0), tl.cdiv(end, ROWS) * across, tl.num_programs(0)):
        rows, columns, mask = _tile(tile, end, WIDTH, ROWS, COLUMNS)
        gate, sigmoid, up = _gate_up(gate_up, rows, columns, mask, WIDTH)
        gradient = tl.load(grads + rows * WIDTH + columns, mask=mask, other=0).to(gate.dtype)
        of_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
        places = out + rows * (2 * WIDTH) + columns
        tl.store(places, of_gate.to(out.dtype.element_ty), mask=mask)
        tl.store(places + WIDTH, (gradient * gate * sigmoid).to(out.dtype.element_ty), mask=mask)
