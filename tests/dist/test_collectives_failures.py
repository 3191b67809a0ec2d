"""No rank hangs in silence: ranks that die, stay away, close, fail or call something else are named to the others."""

import signal
from typing import Any

import msgspec
import pytest

from counterpoint.machine.profile import default_profile
from tests.dist import collective_programs as programs
from tests.support.ranks import SOON_S, Ranks, run_once
from tests.support.software_gpu import SoftwareGpu

H200 = default_profile()
SLOWER = msgspec.structs.replace(H200, rates=msgspec.structs.replace(H200.rates, copy_us=9.0))


STEPS = [(at, None) for at in (0, 1, 2, 3, 5, 8, 13, 34, 150)]
ACTIONS = [(at, SoftwareGpu) for at in (0, 1, 2, 5, 13, 60, 300)]


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "even all_to_all"])
@pytest.mark.parametrize(("at", "device"), [*STEPS, *ACTIONS])
def test_a_killed_rank_ends_the_others(operation: str, at: int, device: Any) -> None:
    first, killed, last = run_once(3, programs.one_is_killed, operation, at, device)
    assert killed == -signal.SIGKILL
    for text, ranks, seconds in (first, last):
        assert (text[:11], ranks, seconds < SOON_S) == ("PeerTimeout", (1,), True), text


def test_a_rank_that_stays_away_is_named(three_ranks: Ranks) -> None:
    told = three_ranks.run(programs.one_stays_away, 2)
    assert [("waiting for rank 2 (has not come" in text, ranks) for text, ranks, _ in told] == [(True, (2,))] * 3, told


MISMATCHES = [
    ("all_reduce", "all_gather"), ("all_reduce", "all_reduce max"), ("all_reduce", "shorter all_reduce"),
    ("all_reduce", "int32 all_reduce"), ("premul_sum 2", "premul_sum 3"), ("broadcast", "broadcast of 1"),
    ("barrier", "all_reduce"), ("send", "send"), ("send", "shorter recv"), ("send", "all_gather"),
    ("even all_to_all", "uneven all_to_all"), ("all to rank 0", "all to rank 0"),
]  # fmt: skip
ON_CPUS_ONLY = [names for names in MISMATCHES if names[1] in ("int32 all_reduce", "send", "shorter recv", names[0])]
ON_GPUS = [names for names in MISMATCHES if names not in ON_CPUS_ONLY]


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize(
    ("names", "device"), [*((names, None) for names in MISMATCHES), *((names, SoftwareGpu) for names in ON_GPUS)]
)
def test_calls_that_do_not_match_are_told(
    two_ranks: Ranks, names: tuple[str, str], device: type[SoftwareGpu] | None, debug: bool
) -> None:
    """Every rank raises within seconds, and at least one says that the calls differ."""
    told = two_ranks.run(programs.call_each_its_own, names, debug, device)
    assert all(text and seconds < SOON_S for text, _, seconds in told), told
    assert any(text.startswith("Misconfigured") for text, _, _ in told), told


def test_debug_mode_tells_before_anything_was_written(two_ranks: Ranks) -> None:
    """At the call itself: within the time of a look, not of a call that does not end."""
    told = two_ranks.run(programs.call_each_its_own, ("all_reduce", "all_gather"), True)
    assert all(text.startswith("Misconfigured") and seconds < SOON_S for text, _, seconds in told), told


def test_matching_calls_are_not_told_anything(two_ranks: Ranks) -> None:
    for name in ("all_reduce", "premul_sum 2", "all_gather", "broadcast of 1", "uneven all_to_all"):
        assert [text for text, _, _ in two_ranks.run(programs.call_each_its_own, (name, name), True)] == [""] * 2


def test_a_closed_communicator_is_told(two_ranks: Ranks) -> None:
    (text, ranks, seconds), _ = two_ranks.run(programs.one_closes)
    assert ("has closed its communicator" in text, ranks, seconds < SOON_S) == (True, (1,), True)


def test_a_fault_of_one_rank_is_told_to_the_others(two_ranks: Ranks) -> None:
    told = two_ranks.run(programs.one_has_a_fault)
    assert told[1] == "OSError: the disk is on fire"
    assert "PeerTimeout: all_reduce" in told[0]
    assert "rank 1 gave up: the disk is on fire" in told[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{"channels": 2}, {"channels": 3}], "the ranks do not match: {'channels': 2"),
        ([{"chunk_bytes": 64}, {"chunk_bytes": 128}], "{'chunk_bytes': 64} on rank 0, {'chunk_bytes': 128} on rank 1"),
        ([{"staging_bytes": 0}] * 2, "staging_bytes=0: give 1 or more"),
        ([{"channels": 0}] * 2, "channels=0"),
        ([{"timeout_s": 0.0}] * 2, "timeout_s=0.0"),
        ([{"chunk_bytes": 24}] * 2, "chunk_bytes=24"),
        ([{"max_bytes": 1 << 40}, {"max_bytes": 1 << 41}], ""),
        ([{"graphs": True}] * 2, "graphs=True on a CPU"),
        ([{"sum_sms": 8}] * 2, "sum_sms=8 on a CPU"),
        ([{"sum_sms": 0}] * 2, "sum_sms=0: give 1 or more"),
        ([{"reserve_bytes": 0}] * 2, "reserve_bytes=0"),
        ([{"mailbox_bytes": 100}] * 2, "mailbox_bytes=100: give a positive multiple of 64"),
        ([{"mailbox_bytes": 6400}] * 2, "mailbox_bytes=6400 on a CPU"),
        ([{"share_gpu": True}] * 2, "share_gpu=True on a CPU"),
        ([{"device": "meta"}] * 2, "device=meta"),
        ([{"profile": H200}, {"profile": SLOWER}], "the ranks do not match: "),
        ([{"profile": "nowhere.json"}] * 2, "nowhere.json: No such file or directory; give a profile as JSON"),
    ],
)
def test_options_that_cannot_work_are_refused(two_ranks: Ranks, options: list[dict[str, object]], said: str) -> None:
    for text in two_ranks.run(programs.made_with, options):
        assert (text.startswith("Misconfigured"), said in text) == (bool(said), True), text


def test_a_communicator_says_what_was_not_measured(two_ranks: Ranks) -> None:
    """Once, where it is printed: the figures of a GPU that was measured need no word more."""
    groups = "rates, nccl, nccl_rates, sums, chip, contention, mechanisms, efficiency"
    told = f"not measured on this device, assumed: {groups} of H200"
    assert [
        f"rank {rank} of 2 on cpu, profile: {told} (" in text
        for rank, text in enumerate(two_ranks.run(programs.repr_with, None))
    ] == [True] * 2
    assert [text.endswith("measured on H200, 2026-11-21)") for text in two_ranks.run(programs.repr_with, H200)] == [
        True
    ] * 2


def test_bad_arguments_are_refused_before_anything_is_sent(two_ranks: Ranks) -> None:
    assert two_ranks.run(programs.bad_calls) == [[], []]


def test_staging_that_is_far_too_small_is_refused(two_ranks: Ranks) -> None:
    """At the call, with what is enough; the communicator works on."""
    said = "staging_bytes=4096 for a reduce_scatter of 8388608 bytes a rank: 2048 slices, allowed are 1024; give 8192"
    assert [(said in text, value) for text, value in two_ranks.run(programs.too_many_slices)] == [(True, 2.0)] * 2


@programs.DEVICES
@pytest.mark.parametrize("how", programs.CHILDREN)
def test_a_forked_child_leaves_the_communicator_alone(two_ranks: Ranks, how: str, device: Any) -> None:
    assert two_ranks.run(programs.forks, how, device) == [(True, 16.0)] * 2


@programs.DEVICES
def test_outputs_that_are_not_contiguous_are_refused(two_ranks: Ranks, device: Any) -> None:
    assert two_ranks.run(programs.outputs_that_cannot_be_written, device) == [[], []]


def test_split_sizes_that_do_not_match_are_told(two_ranks: Ranks) -> None:
    for text in two_ranks.run(programs.other_splits):
        assert "ranks send (4, 4) bytes to rank" in text, text


def test_a_closed_communicator_says_so(two_ranks: Ranks) -> None:
    assert (
        two_ranks.run(programs.called_after_closing)
        == ["Misconfigured: this communicator was closed; make a new one"] * 2
    )


def test_a_wait_may_be_shorter_than_its_call(two_ranks: Ranks) -> None:
    (told, early, well), (_, _, too) = two_ranks.run(programs.an_impatient_wait)
    assert ("has not ended within 0.05 s" in told, early, well, too) == (True, False, True, True)


def test_a_rank_outside_the_group_is_refused(two_ranks: Ranks) -> None:
    assert "not in the group" in two_ranks.run(programs.outsider)[1]
