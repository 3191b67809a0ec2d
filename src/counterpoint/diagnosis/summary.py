"""Summarise a rank, so that thousands of ranks can be joined, and write its digest to a file with the summary in front.

A digest holds the data of one rank that a diagnosis needs, a hundredth of the trace's size. It is written where the
trace lies, and only digests travel.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from counterpoint.diagnosis.analysis.accounts import activity, rank_accounts, waits
from counterpoint.diagnosis.reading.digest import SUMMARY, CallKind, RankDigest, RankSummary, pack_digest
from counterpoint.diagnosis.reading.join import by_group, ids_of
from counterpoint.diagnosis.reading.packing import file_of_parts, pack, read_part, unpack
from counterpoint.diagnosis.reading.traced_job import assemble
from counterpoint.errors import BadTrace
from counterpoint.trace.source import Limits, TraceFile
from counterpoint.trace.timeline import I64, Intern, RankFacts


def summarise(digest: RankDigest) -> RankSummary:
    """Return the summary of one rank: its account, steps and collectives, and when communication is hidden."""
    job = assemble([digest])
    busy = activity(job, 0)
    back_us = float(job.zero_us)  # from the job's clock, which is the rank's own, to the digest's zero
    hidden = busy.compute & busy.comm
    kinds, kind, ident, rows = Intern[CallKind](), list[int](), list[int](), list[int]()
    for (group, ranks), members in by_group(digest.comm).items():
        numbers = _numbers(digest, members)
        for row, number in zip(members.tolist(), numbers, strict=True):
            comm = digest.comm
            kinds_of = CallKind(op=comm.op[row], group=group, ranks=ranks, bytes=int(comm.bytes[row]))
            kind.append(kinds[kinds_of])
            ident.append(number)
            rows.append(row)
    facts = {name: getattr(digest, name) for name in RankFacts.__dataclass_fields__}
    return RankSummary(
        **facts,
        largest_group=digest.largest_group,
        account=rank_accounts(job, [busy], waits(job, [busy]))[0],
        steps=digest.steps,
        kinds=tuple(kinds),
        kind=np.array(kind, np.int32),
        ident=np.array(ident, np.int64),
        start=digest.comm.start[rows],
        end=digest.comm.end[rows],
        hidden_start=hidden.start + back_us,
        hidden_end=hidden.end + back_us,
    )


def _numbers(digest: RankDigest, members: I64) -> list[int]:
    """Return an integer for each collective of a group that is equal on all of its ranks; -1 for all: no number."""
    for by in ("comms_id", "seq"):
        if ids := ids_of(digest.comm, members, by):
            return [int.from_bytes(blake2b(repr(i).encode(), digest_size=7).digest(), "little") for i in ids]
    return [-1] * len(members)


def digest_content(digest: RankDigest) -> bytes:
    """Return the content of a digest's file: a rank's summary, then its digest."""
    return file_of_parts((pack(summarise(digest)), pack_digest(digest)))


def file_name(digest: RankDigest, number: int) -> str:
    """Return the name of a digest's file: by its rank, or if the trace does not state it, by the trace and a number."""
    if digest.rank_known:
        return f"rank{digest.rank}.digest"
    return f"{Path(digest.path.rpartition('!')[2]).name.partition('.')[0]}-{number}.digest"


def read_summary(file: TraceFile, limits: Limits, groups: dict[tuple[int, ...], tuple[int, ...]]) -> RankSummary:
    """Return the summary in a digest's file, with the file's name as its path.

    `groups` holds the ranks of groups that were read before: thousands of ranks share one copy.

    Raises:
        BadTrace: the file is damaged, or no digest of this version.
    """
    found = unpack(read_part(file, SUMMARY, limits), RankSummary, file.label)
    columns = (found.kind, found.ident, found.start, found.end)
    steps = found.steps
    whole = len({len(column) for column in columns}) == 1 and len(found.hidden_start) == len(found.hidden_end)
    whole &= len({len(steps.names), len(steps.start), len(steps.end)}) == 1 and bool(steps.names)
    numbers = np.concatenate((found.start, found.end, found.hidden_start, found.hidden_end, steps.start, steps.end))
    known = not len(found.kind) or (found.kind.min() >= 0 and found.kind.max() < len(found.kinds))
    if not (whole and known and np.isfinite(numbers).all() and all(column.ndim == 1 for column in columns)):
        raise BadTrace("not a digest as counterpoint writes it: columns that do not fit together", path=file.label)
    kinds = tuple(k if k.ranks is None else replace(k, ranks=groups.setdefault(k.ranks, k.ranks)) for k in found.kinds)
    return replace(found, kinds=kinds, path=file.label)
