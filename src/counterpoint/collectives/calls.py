"""How each operation is asked for, and where its blocks lie: `Call`s, checked, and their layout in input and output.

Sizes are bytes; ranks count within the group. Blocks lie one after the other by rank, as torch puts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from counterpoint.collectives.program import ALIGNMENT, Buffer, Call, Operation, Own, Span
from counterpoint.errors import Misconfigured

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "input_bytes",
    "output_bytes",
    "parts",
    "reduce_scatter",
    "scatter",
    "send_recv",
    "source_span",
    "target_span",
    "transfers",
]


def all_gather(world_size: int, shard_bytes: int | Sequence[int], *, own: Own = "in_place") -> Call:
    """Every rank's shard to every rank. In place: input is the rank's block of output."""
    shards = _per_rank(world_size, shard_bytes)
    return _call("all_gather", [[shard] * world_size for shard in shards], own=own)


def all_to_all(splits: Sequence[Sequence[int]], *, own: Own = "copy") -> Call:
    """`splits[s][t]` bytes from rank s to rank t: even, uneven, or none.

    Raises:
        Misconfigured: own="in_place": input and output have different layouts.
    """
    if own == "in_place":
        raise Misconfigured("all_to_all with own='in_place': its layouts differ; allowed are 'copy' and 'consumer'")
    return _call("all_to_all", splits, own=own)


def reduce_scatter(world_size: int, shard_bytes: int | Sequence[int]) -> Call:
    """Shard t of every rank's input, combined, to rank t. The own shard is read where it is: nothing to copy."""
    shards = _per_rank(world_size, shard_bytes)
    return _call("reduce_scatter", [shards] * world_size, own="consumer")


def all_reduce(world_size: int, num_bytes: int, *, own: Own = "in_place") -> Call:
    """Every rank's input, combined, to every rank: a reduce_scatter of shards cut at 16 bytes and an all_gather.

    `own` says where input is: `in_place` in output, else in a buffer of its own; there is no own block to copy.
    """
    shards = [size for _, size in parts(num_bytes, world_size)]
    return _call("all_reduce", [shards] * world_size, own="in_place" if own == "in_place" else "consumer")


def broadcast(world_size: int, num_bytes: int, *, root: int = 0) -> Call:
    """Output of `root` to the output of every rank; always in place."""
    sizes = [[num_bytes if source == root else 0] * world_size for source in range(world_size)]
    return _call("broadcast", sizes, root=root, own="in_place")


def scatter(world_size: int, shard_bytes: int | Sequence[int], *, root: int = 0, own: Own = "copy") -> Call:
    """Block t of the root's input to rank t. In place: the root's output is its block of input."""
    shards, nothing = _per_rank(world_size, shard_bytes), [0] * world_size
    return _call("scatter", [shards if s == root else nothing for s in range(world_size)], root=root, own=own)


def gather(world_size: int, shard_bytes: int | Sequence[int], *, root: int = 0, own: Own = "copy") -> Call:
    """Every rank's shard to the output of `root`. In place: the root's input is its block of output."""
    shards = _per_rank(world_size, shard_bytes)
    sizes = [[shard if target == root else 0 for target in range(world_size)] for shard in shards]
    return _call("gather", sizes, root=root, own=own)


def send_recv(splits: Sequence[Sequence[int]], *, own: Own = "copy") -> Call:
    """A batch of sends: `splits[s][t]` bytes from rank s to rank t. Only ranks that send or receive take part."""
    if own == "in_place":
        raise Misconfigured("send_recv with own='in_place': its layouts differ; allowed are 'copy' and 'consumer'")
    return _call("send_recv", splits, own=own)


def barrier(world_size: int) -> Call:
    """No rank passes before every rank has come."""
    return _call("barrier", [[0] * world_size] * world_size, own="in_place")


def _per_rank(world_size: int, shard_bytes: int | Sequence[int]) -> list[int]:
    shards = [shard_bytes] * world_size if isinstance(shard_bytes, int) else list(shard_bytes)
    if len(shards) != world_size:
        raise Misconfigured(f"{len(shards)} shards for {world_size} ranks: give one size, or one for each rank")
    return shards


def _call(operation: Operation, sizes: Sequence[Sequence[int]], *, root: int | None = None, own: Own) -> Call:
    world_size = len(sizes)
    if world_size < 1 or any(len(row) != world_size for row in sizes):
        raise Misconfigured(f"{operation} of {world_size} ranks: needs at least one, and a row of sizes for each")
    if any(size < 0 for row in sizes for size in row):
        raise Misconfigured(f"{operation} with a negative size: sizes are bytes, 0 or more; got {sizes}")
    if root is not None and not 0 <= root < world_size:
        raise Misconfigured(f"{operation} with root={root}: allowed are 0 to {world_size - 1}")
    if own not in ("in_place", "copy", "consumer"):
        raise Misconfigured(f"{operation} with own={own!r}: allowed are 'in_place', 'copy' and 'consumer'")
    return Call(operation=operation, sizes=tuple(tuple(row) for row in sizes), root=root, own=own)


def parts(num_bytes: int, count: int) -> tuple[tuple[int, int], ...]:
    """(offset, size) of `count` parts, as equal as multiples of 16 bytes allow; some may be empty."""
    units = -(-num_bytes // ALIGNMENT)
    cuts = [min(num_bytes, units * index // count * ALIGNMENT) for index in range(count)] + [num_bytes]
    return tuple((low, high - low) for low, high in pairwise(cuts))


def transfers(call: Call, source: int, target: int) -> bool:
    """Whether `source` pushes into `target`. Where all ranks take part they do so with zero bytes, too: then every call
    has the same `pushers`, and credits of different calls can be told from each other by their order."""
    if source == target or (call.operation != "barrier" and not any(map(any, call.sizes))):
        return False
    return call.operation not in ("broadcast", "scatter", "gather", "send_recv") or call.sizes[source][target] > 0


def source_span(call: Call, source: int, target: int) -> Span:
    """Where rank `source` has what it gives to `target`."""
    size, own = call.sizes[source][target], call.own == "in_place"
    if call.operation == "all_gather" and own:
        return Span("output", _above(call, source, target), size)
    if call.operation == "broadcast":
        return Span("output", 0, size)
    if call.operation in ("all_gather", "gather"):
        in_output = own and source == target == call.root
        return Span("output", _above(call, source, target), size) if in_output else Span("input", 0, size)
    buffer: Buffer = "output" if own and call.operation == "all_reduce" else "input"
    return Span(buffer, sum(call.sizes[source][:target]), size)


def target_span(call: Call, source: int, target: int) -> Span:
    """Where in the output of `target` it belongs; of reductions: the target's own combined shard."""
    if call.operation == "reduce_scatter":
        return Span("output", 0, call.sizes[source][target])
    if call.operation == "all_reduce":
        return Span("output", sum(call.sizes[source][:target]), call.sizes[source][target])
    return Span("output", _above(call, source, target), call.sizes[source][target])


def _above(call: Call, source: int, target: int) -> int:
    """Bytes that ranks below `source` put into the output of `target`."""
    return sum(row[target] for row in call.sizes[:source])


def input_bytes(call: Call, rank: int) -> int:
    """Size of the input of `rank`, in place or not."""
    row = call.sizes[rank]
    return max(row) if call.operation in ("all_gather", "broadcast", "gather") else sum(row)


def output_bytes(call: Call, rank: int) -> int:
    """Size of the output of `rank`."""
    if call.operation == "reduce_scatter":
        return call.sizes[rank][rank]
    if call.operation == "all_reduce":
        return sum(call.sizes[rank])
    return sum(row[rank] for row in call.sizes)
