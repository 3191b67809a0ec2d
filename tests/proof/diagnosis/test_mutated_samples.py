"""The shipped samples, damaged as other machines, profilers and people damage traces: the verdict must stay.

Each mutation decodes every rank, changes it, writes it anew and diagnoses the folder. What is compared: the straggler,
its cause, and the transfer of every collective.
"""

import gzip
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.diagnosis.api import diagnose
from counterpoint.diagnosis.reading.digest import Engine
from counterpoint.records.diagnosis import Diagnosis

SAMPLES = Path(__file__).parents[3] / "samples"
STALL, HEALTHY = "fsdp-host-stall", "fsdp-healthy"
Trace = dict[str, Any]
Mutation = Callable[[int, Trace], Trace | None]
_IN_PROCESS = Engine(workers=1)


PLANTED = [(5, "host_stall", "tokenizer.encode")]


@cache
def encoded(sample: str) -> tuple[bytes, ...]:
    return tuple(gzip.decompress((SAMPLES / sample / f"rank{r}.json.gz").read_bytes()) for r in range(8))


@cache
def original(sample: str) -> Diagnosis:
    return diagnose(SAMPLES / sample, engine=_IN_PROCESS).diagnosis


def mutated(
    sample: str, folder: Path, mutation: Mutation, *, only: int | None = None, name: str = "rank{}.json"
) -> Diagnosis:
    """Diagnosis of the mutated sample; `only`: the one rank that is changed; a mutation to None leaves a rank out."""
    for rank, text in enumerate(encoded(sample)):
        if only is None or rank == only:
            trace = mutation(rank, msgspec.json.decode(text))
            if trace is None:
                continue
            text = msgspec.json.encode(trace)
        (folder / name.format(rank)).write_bytes(text)
    return diagnose(folder, engine=_IN_PROCESS).diagnosis


def clock(*, shift_us: float = 0.0, drift_ppm: float = 0.0, about_first: bool = True) -> Mutation:
    """Every timed event of a rank on a clock that is off; drift about the trace's first event, else about 0."""

    def change(rank: int, trace: Trace) -> Trace:
        timed = [e for e in trace["traceEvents"] if "ts" in e]
        pivot = min(e["ts"] for e in timed) if about_first else 0.0
        scale = 1 + 1e-6 * drift_ppm
        for e in timed:
            e["ts"] = pivot + (e["ts"] - pivot) * scale + shift_us
            if "dur" in e:
                e["dur"] *= scale
        return trace

    return change


def without_collective(number: int) -> Mutation:
    """The n-th large collective of a rank is not in its trace: kernel, launch and host record."""

    def change(rank: int, trace: Trace) -> Trace:
        events = trace["traceEvents"]
        kernels = sorted((e for e in events if is_collective(e)), key=lambda e: e["ts"])
        args = kernels[number]["args"]
        gone = {("correlation", args["correlation"]), ("External id", args["External id"])}
        trace["traceEvents"] = [e for e in events if not any(e.get("args", {}).get(k) == v for k, v in gone)]
        return trace

    return change


def is_collective(e: dict[str, Any]) -> bool:
    return e.get("cat") == "kernel" and e["name"].startswith("nccl") and e["args"].get("In msg nelems", 0) > 1000


def without_metadata(rank: int, trace: Trace) -> Trace:
    for e in trace["traceEvents"]:
        if e.get("name") == "record_param_comms" or is_nccl(e):
            kept = ("External id", "correlation", "device", "stream", "grid", "block", "registers per thread")
            e["args"] = {k: v for k, v in e["args"].items() if k in kept}
    return trace


def is_nccl(e: dict[str, Any]) -> bool:
    return e.get("cat") == "kernel" and e["name"].startswith("nccl")


def without_distributed_info(rank: int, trace: Trace) -> Trace:
    del trace["distributedInfo"]
    return trace


def renamed(names: dict[str, str]) -> Mutation:
    """NCCL kernels as other versions and vendors call them, without metadata."""

    def change(rank: int, trace: Trace) -> Trace:
        for e in without_metadata(rank, trace)["traceEvents"]:
            if is_nccl(e):
                e["name"] = next(new for op, new in names.items() if op in e["name"])
        return trace

    return change


OLD = {
    "AllGather": "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)",
    "ReduceScatter": "ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)",
    "AllReduce": "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
}
RCCL = dict.fromkeys(OLD, "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)")


def without_profiler_step(rank: int, trace: Trace) -> Trace:
    trace["traceEvents"] = [e for e in trace["traceEvents"] if not str(e.get("name")).startswith("ProfilerStep")]
    return trace


def gpu_only(rank: int, trace: Trace) -> Trace:
    gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") in gpu]
    return trace


def unchanged(rank: int, trace: Trace) -> Trace:
    return trace


@cache
def damaged(sample: str, change: str, rank: int | None = None) -> Diagnosis:
    """The diagnosis of a sample after one of CLOCKS or LOOKS, or with a collective deleted, on one rank or on all."""
    mutation = without_collective(int(change)) if change.lstrip("-").isdigit() else (CLOCKS | LOOKS)[change]
    with tempfile.TemporaryDirectory() as folder:
        return mutated(sample, Path(folder), mutation, only=rank)


def suspects(d: Diagnosis) -> list[tuple[int, str, str | None]]:
    return [(s.rank, s.cause, s.detail) for s in d.stragglers]


def worst_transfer_error(new: Diagnosis, old: Diagnosis, *, uncertain: bool = False, lost: int = 0) -> float:
    """Largest relative error of the transfer of any large collective; beyond the stated uncertainty if `uncertain`."""
    ours = [c for c in new.collectives if c.transfer_us > 500.0]
    theirs = [c for c in old.collectives if c.transfer_us > 500.0]
    assert len(ours) == len(theirs) - lost, "a collective was torn apart or is missing"
    known = [u for u in new.clock_uncertainty_us.values() if u is not None] if uncertain else [0.0]
    return max(
        max(abs(a.transfer_us - b.transfer_us) - max(known), 0.0) / b.transfer_us
        for a, b in zip(ours, theirs, strict=True)
    )


CLOCKS = {
    "ahead": clock(shift_us=5_000.0),
    "behind": clock(shift_us=-5_000.0),
    "fast": clock(drift_ppm=50.0),
    "slow": clock(drift_ppm=-50.0),
    "fast_since_boot": clock(drift_ppm=50.0, about_first=False),
}
LOOKS = {
    "without_distributed_info": without_distributed_info,
    "without_metadata": without_metadata,
    "old_names": renamed(OLD),
    "rccl_names": renamed(RCCL),
    "without_profiler_step": without_profiler_step,
    "gpu_only": gpu_only,
}
CLOCK_CASES = [
    ("ahead", 0), ("behind", 0), ("ahead", 3), ("behind", 3), ("ahead", 5), ("fast", 3), ("slow", 5),
    ("fast_since_boot", 3),
]  # fmt: skip
DELETED = ("0", "1", "13", "26", "27", "-2", "-1")


@pytest.mark.parametrize(("change", "rank"), CLOCK_CASES)
def test_clock_of_one_rank_keeps_verdict_and_transfers(change: str, rank: int) -> None:
    """5 ms or 50 ppm off, on any rank: transfers move by 2 % at most, beyond the uncertainty that is stated."""
    found = damaged(STALL, change, rank)
    assert suspects(found) == PLANTED
    assert worst_transfer_error(found, original(STALL), uncertain=True) < 0.02


@pytest.mark.parametrize("change", ["ahead", "fast"])
def test_clock_of_one_rank_raises_no_alarm(change: str) -> None:
    assert suspects(damaged(HEALTHY, change, 3)) == []


def test_shift_is_found_and_noted() -> None:
    """5 ms to within the 40 µs by which the ranks of one host leave a collective apart (measured on 8 x H200)."""
    found = damaged(HEALTHY, "ahead", 3)
    assert found.clock_offsets_us["3"] == pytest.approx(5_000.0, abs=40.0)
    assert any(note.startswith("clock of rank 3 is") for note in found.notes)


@pytest.mark.parametrize("number", DELETED)
def test_deleted_collective_changes_nothing_and_is_noted(number: str) -> None:
    found = damaged(STALL, number, 2)
    assert worst_transfer_error(found, original(STALL)) < 0.02
    assert suspects(found) == PLANTED
    assert number != "13" or any(note.startswith("rank 2: 1 collective of the other ranks") for note in found.notes)


@pytest.mark.parametrize("look", [name for name in LOOKS if name != "gpu_only"])
def test_other_profilers_give_the_same_verdict(look: str) -> None:
    assert suspects(damaged(STALL, look)) == PLANTED


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("sample", [STALL, "tail-effect"])
def test_other_profilers_give_the_same_transfers(sample: str, look: str) -> None:
    assert worst_transfer_error(damaged(sample, look), original(sample)) < 0.02


@pytest.mark.parametrize("look", ["without_metadata", "without_profiler_step"])
def test_other_profilers_raise_no_alarm(look: str) -> None:
    assert suspects(damaged(HEALTHY, look)) == []


def test_kernels_without_host_events_still_name_the_rank() -> None:
    """Without events of its host nobody knows what it did, and no cause is claimed."""
    assert suspects(damaged(STALL, "gpu_only")) == [(5, "no_host_events", None)]


def test_straggler_costs_its_delay_where_nothing_can_be_replayed() -> None:
    """Without launches the replay cannot move a late host: the finding then costs what the others felt."""
    d = damaged(STALL, "gpu_only")
    cost = next(f.cost_us for f in d.findings if f.kind == "straggler")
    assert cost == pytest.approx(d.stragglers[0].delay_us / len(d.steps))


def test_steps_are_found_from_repetition() -> None:
    """Without ProfilerStep the two steps are found again, each as long to within 1 %."""
    d, o = damaged(STALL, "without_profiler_step"), original(STALL)
    assert [s.duration_us for s in d.steps] == pytest.approx([s.duration_us for s in o.steps], rel=0.01)


def test_file_names_without_rank_are_numbered_and_noted(tmp_path: Path) -> None:
    """In the order of their names, if the traces themselves do not say."""

    def change(rank: int, trace: Trace) -> Trace:
        return without_distributed_info(rank, without_metadata(rank, trace))

    d = mutated(STALL, tmp_path, change, name="host_{}a.json")
    assert (d.stragglers[0].rank, any("without a rank" in note for note in d.notes)) == (5, True)


def test_one_rank_alone_is_diagnosed(tmp_path: Path) -> None:
    """No waits can be told, and the notes say so."""
    d = mutated(STALL, tmp_path, lambda rank, trace: trace if rank == 5 else None)
    assert (d.ranks, d.stragglers, any("no trace of ranks 0-4" in note for note in d.notes)) == ((5,), (), True)


@pytest.mark.parametrize(("kept", "expected"), [(range(4), []), (range(4, 8), [5])])
def test_missing_ranks_are_named(kept: range, expected: list[int], tmp_path: Path) -> None:
    """Half of the ranks: the straggler is found if it is among them, and nobody else is blamed if not."""
    d = mutated(STALL, tmp_path, lambda rank, trace: trace if rank in kept else None)
    missing = tuple(r for r in range(8) if r not in kept)
    assert (d.missing_ranks, [s.rank for s in d.stragglers]) == (missing, expected)
