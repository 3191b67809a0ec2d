"""What `overlap` returns and refuses; ranks that die; memory."""

import signal

import pytest

from tests.dist import fsdp_programs as programs
from tests.support.ranks import Ranks, finding, run_once

test_what_ranks_find = finding({
    "restore gives torch back": (2, programs.restored, (), []),
    "the handle need not be kept": (2, programs.closed_by_itself, (), True),
    "what was not sharded is told": (2, programs.unmanaged, (), ("0.6 MB of parameters are in no FSDP2 module",)),
    "older torch is read the same": (2, programs.as_in_torch_2_11, (), True),
    "a forked child leaves the model alone": (2, programs.forks, (), True),
    "norm and head are one": (2, programs.named, (), ["(root)", *(f"layers.{n}" for n in range(3)), "norm, head"]),
})  # fmt: skip


def test_prefetch_follows_the_order_that_was_seen(two_ranks: Ranks) -> None:
    """Nothing before the first step; then two ahead, forward and backward; nothing after `restore`."""
    nothing: dict[str, tuple[list[str], list[str]]]
    nothing = {name: ([], []) for name in ("(root)", "layers.0", "layers.1", "layers.2")}
    learned = {
        "(root)": (["layers.0", "layers.1"], ["layers.2", "layers.1"]),
        "layers.0": (["layers.1", "layers.2"], []),
        "layers.1": (["layers.2"], ["layers.0"]),
        "layers.2": ([], ["layers.1", "layers.0"]),
    }
    said = "prefetch: 2 ahead, 4 of 4 modules, in the order in which they ran"
    expected = {"before": nothing, "after": learned, "restored": nothing, "said": said}
    assert two_ranks.run(programs.prefetch_lists) == [expected] * 2


def test_memory_does_not_grow(two_ranks: Ranks) -> None:
    for seen in two_ranks.run(programs.mapped_bytes, 1000):
        assert seen == [seen[0]] * 10


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_killed_rank_ends_training(where: str) -> None:
    assert run_once(2, programs.one_is_killed, where) == [["(1,) soon"] * 2, -signal.SIGKILL]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("before fully_shard", "Misconfigured: no module of this model is sharded by FSDP2: call"),
        ("FSDP1", "Misconfigured: (root) is wrapped by FSDP1 (FullyShardedDataParallel); use fully_shard"),
        ("CPU offload", "Unsupported: (root) offloads its parameters to the CPU"),
        ("one rank", "Unsupported: nothing to overlap: (root): one rank has nothing to gather"),
        ("twice", "Misconfigured: (root) is overlapped already: call restore()"),
        (
            "other collectives",
            "Misconfigured: (root) communicates by ProcessGroupAllocAllGather; leave out set_custom_*",
        ),
        ("two prefetches", "Misconfigured: prefetch=1, and (root) has modules to prefetch already"),
        ("other ranks", "Misconfigured: FSDP2 communicates over ranks ["),
        (
            "different hosts",
            "Unsupported: FSDP2's group of ranks [0, 1]: different hosts (ranks of several hosts: a mesh",
        ),
        ("all too large", "Unsupported: nothing to overlap: (root): it gathers"),
    ],
)
def test_what_cannot_work_is_refused(two_ranks: Ranks, name: str, said: str) -> None:
    for text in two_ranks.run(programs.refused, name):
        assert text.startswith(said), text
