"""Choose the tuning of a call (how it is cut into chunks) that is fastest in simulation.

`best_tuning` goes by a prediction of `simulate`, and is no better than the rates that it is given. It is a pure
function: ranks that ask for the same call with the same rates get the same answer, which they must. It is cached; a new
call costs the host some simulations, 3 to 80 ms in all (8 ranks, one core, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from counterpoint.collectives.program.calls import ALIGNMENT, Call
from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import DEFAULT, OPERATIONS, plan_all
from counterpoint.collectives.program.reductions import slice_bytes, slice_of
from counterpoint.collectives.program.steps import Tuning
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Rates

TURN_BYTES = 1 << 23  # takes 22 µs to copy: a turn costs a fifth of that, two copies that meet on a link all of it
MAX_SLICES = 1024  # most slices of a reduce_scatter
_TOGETHER = Tuning(arrivals="together")
_NEVER = 1 << 62  # bytes: no broadcast is as large
_CUT_BYTES = 1 << 20  # smallest shard that is tried in chunks: a copy costs as much as megabytes on the link


@lru_cache(maxsize=1024)
def best_tuning(call: Call, rates: Rates | None = None, *, max_chunks: int = 16) -> Tuning:
    """Return the tuning of `candidates` with which the call ends earliest in simulation; of equals, the simplest.

    All ranks begin at the same time, with a handshake and with SMs free. Never slower in simulation than `Tuning()`
    if blocks have one size. A consumer that starts on the first shard needs `arrivals="each"`, not this function.
    `rates` are the machine's, equal on all ranks; None: the default profile's, H200.

    Raises:
        Misconfigured: `max_chunks`, the most chunks of one block for which there are flags, is below 1.
    """
    if max_chunks < 1:
        raise Misconfigured(f"max_chunks={max_chunks}: a block arrives at least once; give 1 or more")
    found = [tuning for tuning in candidates(call) if _num_chunks(call, tuning) <= max_chunks]
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda tuning: simulate(plan_all(call, tuning), rates).us)  # the first of equals


def chunk_bytes_of(call: Call, least: int, *, max_chunks: int) -> int:
    """Return a chunk size of at least `least` bytes that cuts no block of the call into over `max_chunks` chunks."""
    return max(least, -(-max(map(max, call.sizes)) // (max_chunks * ALIGNMENT)) * ALIGNMENT)


def with_link_turns(tuning: Tuning) -> Tuning:
    """Return `tuning` with link turns for large chunks: without a handshake, ranks begin a call at different times."""
    return replace(tuning, turn_bytes=TURN_BYTES)


def with_staging_slices(tuned: Callable[[Call], Tuning], call: Call, staging_bytes: int | None) -> Tuning:
    """Return `tuned(call)`; for a reduce_scatter that needs more than `staging_bytes`, the tuning of one slice.

    Raises:
        Misconfigured: the call would need more than `MAX_SLICES` slices; planning each takes up to a millisecond.
    """
    if staging_bytes is None or "staging_bytes" not in OPERATIONS[call.operation].tuning or call.world_size == 1:
        return tuned(call)
    shard, size = max(map(max, call.sizes)), slice_bytes(call.world_size, staging_bytes)
    if shard <= size:
        return tuned(call)
    if shard > MAX_SLICES * size:
        least = -(-shard // (MAX_SLICES * ALIGNMENT)) * ALIGNMENT * (call.world_size - 1)
        raise Misconfigured(
            f"staging_bytes={staging_bytes} for a reduce_scatter of {shard} bytes a rank: {-(-shard // size)} slices, "
            f"allowed are {MAX_SLICES}; give {least} or more"
        )
    return replace(tuned(slice_of(call, staging_bytes)), staging_bytes=staging_bytes)


def candidates(call: Call) -> tuple[Tuning, ...]:
    """Return the tunings that are worth simulating, the simplest first."""
    if call.world_size == 1 or not call.layout.has_data:
        return (DEFAULT,)
    if "relay_bytes" in OPERATIONS[call.operation].tuning:
        return (DEFAULT, *_relays(call))
    if call.reduces:
        return (DEFAULT, *_chunks(call))
    return (_TOGETHER,)  # splits may differ from call to call: a simulation costs more than it wins


def _chunks(call: Call) -> Iterator[Tuning]:
    """Yield tunings that cut a shard into one to four chunks and a small last one.

    The last chunk is small, since nothing hides its reduction, but not so small that its copies cost more than it.
    """
    shard = max(map(max, call.sizes))
    for count in (1, 2, 3, 4) if shard >= _CUT_BYTES else ():
        for share in (4, 8, 16) if count == 1 else (8, 16):
            last = _aligned(shard / share)
            yield Tuning(chunk_bytes=None if count == 1 else _aligned((shard - last) / count), last_bytes=last)


def _relays(call: Call) -> Iterator[Tuning]:
    yield Tuning(relay_bytes=_NEVER)
    part = call.output_bytes(0) / max(1, call.world_size - 1)
    for count in (1, 2, 4, 8) if part > 0 else ():
        yield Tuning(relay_bytes=0, chunk_bytes=_aligned(part / count))


def _num_chunks(call: Call, tuning: Tuning) -> int:
    """Return the largest number of chunks into which the program cuts a block, counted from the program's flags."""
    words = [number for program in plan_all(call, tuning) for number in program.num_flags.values()]
    return max(0, -(-max(words, default=0) // call.world_size) - 2)


def _aligned(num_bytes: float) -> int:
    return max(1, round(num_bytes / ALIGNMENT)) * ALIGNMENT
