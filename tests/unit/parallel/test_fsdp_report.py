"""What `overlap` says it did."""

from __future__ import annotations

import msgspec

from counterpoint.parallel.report import HookTraffic, OverlappedModule, OverlapReport

GATHER = HookTraffic(calls=2, num_bytes=16_000_000, dtype="bfloat16")
NONE = HookTraffic()
SCATTER = HookTraffic(calls=1, num_bytes=32_000_000, dtype="float32", op="avg", copied_bytes=4_000_000)
REPORT = OverlapReport(
    modules=(
        OverlappedModule(name="(root)", ranks=(0, 1), gather_bytes=99, torch_why="one rank"),
        OverlappedModule(name="layers.0", ranks=(0, 1), gather_bytes=8, all_gather=GATHER, reduce_scatter=SCATTER),
        OverlappedModule(name="layers.1", ranks=(0, 1), gather_bytes=8, all_gather=NONE, reduce_scatter=NONE),
    ),
    prefetch="1 ahead",
    unmanaged_bytes=2_500_000,
)


def test_the_table() -> None:
    """Bytes, dtype and operation of the latest call, how many there were, and what stayed with torch and why."""
    assert str(REPORT).splitlines() == [
        "module    ranks  all_gather                      reduce_scatter",
        "(root)    2      torch's: one rank               torch's",
        "layers.0  2      2 x 16.0 MB bfloat16, in place  1 x 32.0 MB float32 avg, 4.0 MB copied",
        "layers.1  2      no call yet                     no call yet",
        "prefetch: 1 ahead",
        "2.5 MB of parameters are in no FSDP2 module",
    ]


def test_copies_of_fsdp2_are_shown() -> None:
    """None where a call was direct; else why they stay, in a line of its own."""
    direct = HookTraffic(calls=1, num_bytes=1_000_000, dtype="bfloat16", direct=True)
    modules = (
        OverlappedModule(name="a", ranks=(0, 1), gather_bytes=8, all_gather=direct, reduce_scatter=direct),
        OverlappedModule(
            name="b", ranks=(0, 1), gather_bytes=8, all_gather=GATHER, reduce_scatter=direct, copied_why="axis 1"
        ),
    )
    assert str(OverlapReport(modules=modules)).splitlines()[1:] == [
        "a       2      1 x 1.0 MB bfloat16, direct     1 x 1.0 MB bfloat16, direct",
        "b       2      2 x 16.0 MB bfloat16, in place  1 x 1.0 MB bfloat16, direct",
        "b: FSDP2 copies: axis 1",
    ]


def test_replicas_are_shown() -> None:
    """Ranks of a shard group x groups, and whose the all-reduce between them is."""
    module = OverlappedModule(
        name="layers.0",
        ranks=(0, 1),
        replicas=4,
        gather_bytes=8,
        all_gather=HookTraffic(),
        reduce_scatter=HookTraffic(),
    )
    assert str(OverlapReport(modules=(module,))).splitlines()[1:] == [
        "layers.0  2 x 4  no call yet  no call yet",
        "all_reduce between replicas: torch's",
    ]


def test_it_is_data() -> None:
    """JSON and back is the same."""
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=OverlapReport) == REPORT
