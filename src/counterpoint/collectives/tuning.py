"""The fastest tuning of a call on the clock: which algorithm, which chunks, one signal or many.

What it says is a prediction of `simulate` with the rates it is given, and no better than these. It is a pure function:
ranks that ask for the same call with the same rates get the same answer, which they must. Cached; a call that was not
seen before costs the host some simulations of it, 3 to 80 ms in all (8 ranks, one core, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from counterpoint.collectives.calls import output_bytes, reduce_scatter
from counterpoint.collectives.plan import DEFAULT, DOUBLING, plan_all
from counterpoint.collectives.program import ALIGNMENT, Call, Tuning
from counterpoint.collectives.reduction import slice_bytes
from counterpoint.collectives.simulate import H200, Rates, simulate
from counterpoint.errors import Misconfigured

__all__ = ["TURN_BYTES", "best_tuning", "candidates", "in_slices", "in_turns"]

TURN_BYTES = 1 << 23  # a copy of 22 µs: a turn costs a fifth of it, a meeting all of it
_TOGETHER = Tuning(arrivals="together")
_NEVER = 1 << 62  # bytes: no broadcast is as large
_CUT_BYTES = 1 << 20  # a copy costs as much as megabytes on the link: smaller shards are not tried in chunks
_DOUBLED_BYTES = 1 << 25  # above, an all_reduce or broadcast that doubles is slower by far


@lru_cache(maxsize=1024)
def best_tuning(call: Call, rates: Rates = H200, *, max_chunks: int = 16) -> Tuning:
    """The tuning of `candidates` with which the slowest rank has its output first; of equals the simplest.

    All ranks begin at the same time, with a handshake and with SMs free. Never slower on that clock than `Tuning()`,
    where blocks have one size. A consumer that starts on the first shard wants `arrivals="each"` and should not ask.

    Args:
        call: equal on all ranks.
        rates: of the machine, equal on all ranks.
        max_chunks: for how many arrivals of one block there are flags.

    Raises:
        Misconfigured: `max_chunks` is below 1.
    """
    if max_chunks < 1:
        raise Misconfigured(f"max_chunks={max_chunks}: a block arrives at least once; give 1 or more")
    found = [tuning for tuning in candidates(call) if _num_chunks(call, tuning) <= max_chunks]
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda tuning: simulate(plan_all(call, tuning), rates).us)  # the first of equals


def in_turns(tuning: Tuning) -> Tuning:
    """The same with turns for large chunks: for calls that begin without a handshake, so that ranks may be apart."""
    return tuning if tuning.algorithm == "doubling" else replace(tuning, turn_bytes=TURN_BYTES)


def in_slices(tuned: Callable[[Call], Tuning], call: Call, staging_bytes: int | None) -> Tuning:
    """What `tuned` says of `call`; of a reduce_scatter that needs more staging, what it says of one slice."""
    if staging_bytes is None or call.operation != "reduce_scatter" or call.world_size == 1:
        return tuned(call)
    size = slice_bytes(call.world_size, staging_bytes)
    if max(map(max, call.sizes)) <= size:
        return tuned(call)
    one = reduce_scatter(call.world_size, [min(size, shard) for shard in call.sizes[0]])
    return replace(tuned(one), staging_bytes=staging_bytes)


def candidates(call: Call) -> tuple[Tuning, ...]:
    """What is worth trying, the simplest first."""
    if call.world_size == 1 or call.operation == "barrier":
        return (DEFAULT,)
    if call.operation == "broadcast":
        return (DEFAULT, *_relays(call), *_doubled(call))
    if call.reduces:
        return (DEFAULT, *_chunks(call), *_doubled(call))
    return (_TOGETHER, *_doubled(call))  # splits may differ from call to call: a simulation costs more than it wins


def _doubled(call: Call) -> Iterator[Tuning]:
    """An all_gather that doubles moves no more bytes than one that does not."""
    if call.operation in DOUBLING and (call.operation == "all_gather" or output_bytes(call, 0) <= _DOUBLED_BYTES):
        yield Tuning(algorithm="doubling")


def _chunks(call: Call) -> Iterator[Tuning]:
    """A shard in one to four chunks, and a last one: small, since nothing hides its reduction, but not so small that
    its copies cost more than that."""
    shard = max(map(max, call.sizes))
    for count in (1, 2, 3, 4) if shard >= _CUT_BYTES else ():
        for share in (4, 8, 16) if count == 1 else (8, 16):
            last = _aligned(shard / share)
            yield Tuning(chunk_bytes=None if count == 1 else _aligned((shard - last) / count), last_bytes=last)


def _relays(call: Call) -> Iterator[Tuning]:
    yield Tuning(relay_bytes=_NEVER)
    part = output_bytes(call, 0) / max(1, call.world_size - 1)
    for count in (1, 2, 4, 8) if part > 0 else ():
        yield Tuning(relay_bytes=0, chunk_bytes=_aligned(part / count))


def _num_chunks(call: Call, tuning: Tuning) -> int:
    """Arrivals of the block that has most: rows of flags, less the one of `ready`."""
    words = [number for program in plan_all(call, tuning) for number in program.num_flags.values()]
    return max(0, -(-max(words, default=0) // call.world_size) - 2)


def _aligned(num_bytes: float) -> int:
    return max(1, round(num_bytes / ALIGNMENT)) * ALIGNMENT
