"""What is recorded: the calls, the tables and the command lines of the golden record, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, TypeAlias

Plain: TypeAlias = dict[str, Any]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WORLDS = (2, 3, 4, 5, 8)
# of the full array: nothing, a byte, odd ones, and both sides of what the library treats differently
SIZES = (0, 1, 999, 64 * KIB, MIB + 17, 8 * MIB, 32 * MIB + 4, 64 * MIB - 8, 128 * MIB, 300 * MIB + 1, GIB)
SOME = {3: SIZES[1::2], 5: SIZES[1::2], 8: SIZES[::2]}  # choosing for many ranks takes long
FEW = (999, MIB + 17, 64 * MIB - 8)
OPERATIONS = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "scatter", "gather", "send_recv", "barrier"
)  # fmt: skip
GRIDS = ((2, 2), (2, 4), (4, 2), (3, 2), (2, 3), (1, 4))


def one_host() -> Iterator[Plain]:
    """Yield the calls of the ranks of one host, by the CUDA executor, with a handshake."""
    for world in WORLDS:
        for size in SOME.get(world, SIZES):
            shard = -(-size // world)
            yield case("all_gather", [world, shard], own="in_place")
            yield case("reduce_scatter", [world, shard])
            yield case("all_reduce", [world, size], own="in_place")
            yield case("all_to_all", [[[shard] * world] * world], own="copy")
        for size in FEW:
            shard = -(-size // world)
            yield case("all_gather", [world, shard], own="copy")
            yield case("all_gather", [world, shard], own="consumer")
            yield case("all_gather", [world, uneven(world, shard)], own="copy")
            yield case("reduce_scatter", [world, uneven(world, shard)])
            yield case("all_reduce", [world, size], own="consumer")
            yield case("all_to_all", [[[shard] * world] * world], own="consumer")
            yield case("all_to_all", [splits(world, shard)], own="copy")
            yield case("all_to_all", [splits(world, shard)], own="consumer")
            yield case("scatter", [world, shard], root=0, own="copy")
            yield case("scatter", [world, shard], root=world - 1, own="in_place")
            yield case("scatter", [world, uneven(world, shard)], root=0, own="consumer")
            yield case("gather", [world, shard], root=0, own="copy")
            yield case("gather", [world, shard], root=world - 1, own="in_place")
            yield case("gather", [world, uneven(world, shard)], root=0, own="consumer")
            yield case("send_recv", [pair(world, size)])
            yield case("broadcast", [world, size], root=world - 1)
        for size in (0, 64 * KIB, 8 * MIB, GIB):
            yield case("broadcast", [world, size], root=0)
        yield case("send_recv", [splits(world, 4096)], own="consumer")
        yield case("barrier", [world])


def otherwise() -> Iterator[Plain]:
    """Yield calls with an early release, in slices of staging, and by the CPU executor."""
    for world in WORLDS:
        for size in FEW:
            shard = -(-size // world)
            yield case("all_gather", [world, shard], own="in_place") | {"early_release": True}
            yield case("all_to_all", [[[shard] * world] * world], own="consumer") | {"early_release": True}
        yield case("reduce_scatter", [world, 16 * MIB // world]) | {"staging_bytes": 2 * MIB}
        for size in (999, 3 * MIB + 1):
            shard = -(-size // world)
            for each in (
                case("all_gather", [world, shard], own="copy"),
                case("reduce_scatter", [world, shard]),
                case("all_reduce", [world, size], own="consumer"),
                case("all_to_all", [splits(world, shard)], own="copy"),
                case("broadcast", [world, size], root=1),
            ):
                yield each | {"executor": "cpu"}
        yield case("reduce_scatter", [world, 4 * MIB // world]) | {"executor": "cpu", "staging_bytes": MIB}


def coalesced() -> Iterator[Plain]:
    """Yield calls of several tensors: odd sizes, gaps, an empty one, ends that are cut, sums kept in a wider dtype."""
    for world in (2, 3, 4, 8):
        for shares in ((16, 48), (1000, 0, 24, 4096), (MIB, 2 * KIB, 48 * MIB + 16)):
            whole = [share * world for share in shares]
            cut = [max(0, size - 8) for size in whole]
            gathered = [parts("output", whole, shares, whole), parts("input", shares, shares, shares)]
            scattered = [parts("input", whole, shares, cut), parts("output", [2 * s for s in shares], shares, shares)]
            scattered[1]["parts"]["width"] = 2
            of = f" of {len(shares)} tensors"
            yield case("all_gather", [world, sum(shares)], own="in_place") | {"layout": gathered[:1], "of": of}
            yield case("all_gather", [world, sum(shares)], own="copy") | {"layout": gathered, "of": of}
            yield case("reduce_scatter", [world, sum(shares)]) | {"layout": scattered, "of": of}


def over_hosts() -> Iterator[Plain]:
    """Yield calls over several hosts."""
    for hosts, local in GRIDS:
        world = hosts * local
        for size in (960, 6 * MIB + 96, 96 * MIB):
            shard = -(-size // world)
            for each in (
                case("all_gather", [world, shard], own="in_place"),
                case("all_gather", [world, shard], own="copy"),
                case("reduce_scatter", [world, shard]),
                case("all_reduce", [world, size + 4], own="in_place"),
                case("all_to_all", [[[shard] * world] * world], own="copy"),
                case("broadcast", [world, size + 4], root=world - 1),
            ):
                sliced = 16 * MIB if each["operation"] in ("all_reduce", "broadcast") else None
                yield each | {"grid": [hosts, local], "slice_bytes": sliced}
        yield case("barrier", [world]) | {"grid": [hosts, local], "slice_bytes": None}


def case(operation: str, arguments: list[Any], **options: Any) -> Plain:
    """Return one call: what is passed to the function of its name."""
    return {"operation": operation, "arguments": arguments, "options": options}


def name_of(one: Plain) -> str:
    """Return the name of a case, such as `all_gather of 4 x 1048576, own=in_place`."""
    first, *rest = one["arguments"]
    shape = "; ".join(" ".join(map(str, row)) for row in first) if isinstance(first, list) else f"{first} ranks"
    if isinstance(first, list) and len({size for row in first for size in row}) == 1:
        shape = f"{len(first)} ranks, {first[0][0]} each"
    text = ", ".join([f"{one['operation']}{one.get('of', '')}: {shape}", *(str(each) for each in rest)])
    extra = one["options"] | {k: one[k] for k in ("executor", "early_release", "staging_bytes", "grid") if k in one}
    return ", ".join([text, *(f"{name}={value}" for name, value in extra.items())])


def uneven(world: int, shard: int) -> list[int]:
    """Return shards of different sizes, one of them empty."""
    return [shard * rank // world + (3 if rank else 0) for rank in range(world)]


def splits(world: int, block: int) -> list[list[int]]:
    """Return what each rank sends to each other: all different, and some nothing."""
    return [[block * ((3 * s + 5 * t) % 7) // 7 for t in range(world)] for s in range(world)]


def pair(world: int, size: int) -> list[list[int]]:
    """Return the sends of rank 0 and the last one to each other, of different sizes."""
    sizes = [[0] * world for _ in range(world)]
    sizes[0][world - 1], sizes[world - 1][0] = size, size // 3
    return sizes


def parts(buffer: str, lengths: Any, shares: Any, sizes: Any) -> Plain:
    """Return where the tensors of a buffer lie: one after the other, 256 bytes apart."""
    starts = [0, *accumulate(length + 256 for length in lengths)][:-1]
    return {"buffer": buffer, "parts": {"starts": tuple(starts), "shares": tuple(shares), "sizes": tuple(sizes)}}


JOBS = "tests/golden/jobs"
FSDP, TENSOR = f"{JOBS}/llama3-8b-one-node.toml", f"{JOBS}/llama3-70b-64-gpus.toml"
PIPELINE, EXPERTS = f"{JOBS}/llama3-405b-16384-gpus.toml", f"{JOBS}/mixtral-64-gpus.toml"
PLANS = {
    "fsdp": [FSDP],
    **{
        f"fsdp on 2, 4 and 8 H200, {mechanism}": [FSDP, "--mechanism", mechanism, "--sweep", "parallel.dp=2,4,8"]
        for mechanism in ("nccl", "zero_sm", "zero_sm_copied")
    },
    "tensor": [TENSOR, "--sweep", "parallel.tp=1,2,4,8"],
    "pipeline": [PIPELINE, "--sweep", "cluster.oversubscription=1,2,4,7"],
    "experts": [EXPERTS, "--sweep", "parallel.ep=1,2,4,8"],
    "search": [FSDP, "--search"],
    "from-trace": ["--from-trace", "samples/fsdp-4-ranks"],
    "from-trace, what-if": [
        "--from-trace", "samples/fsdp-4-ranks", "--weak-nodes", "2", "--network", "h100-ndr-400",
    ],
    "what-if": [
        TENSOR, "--nodes", "16", *("--set", "parallel.zero=0"), *("--set", "cluster.oversubscription=2"),
        *("--set", "ranks.slow=1.1"), *("--set", "ranks.jitter=0.02"),
        *("--set", "compression.method=quantized"), *("--set", "compression.bits=8"),
    ],
}  # fmt: skip
DIAGNOSES = ("fsdp-2-ranks", "fsdp-4-ranks", "fsdp-healthy", "fsdp-host-stall", "tail-effect")
# the second: what the pairs of results/budget-rule.md give when fitted
CALIBRATIONS: dict[str, dict[str, float] | None] = {
    "default": None,
    "fitted": {"compute_loss": 0.14, "comm_loss": 0.23, "gemm_wins": 0.9, "comm_cluster": 4, "head_start_us": 105.84},
}
VIEWS: dict[str, Plain] = {
    "mean of orders": {},
    "worst order": {"objective": "worst"},
    "compute first": {"orders": ("compute_first",)},
}
REDUCTIONS = ((None, None), ("sum", "float32"), ("avg", "bfloat16"), ("sum", "int64"))
