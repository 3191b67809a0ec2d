"""Define the record that `counterpoint rehearse` prints about a script.

`Rehearsal` is the contract `counterpoint.rehearsal/1`: keys may be added, never renamed. Sizes are bytes.
"""

from __future__ import annotations

from typing import Literal

from counterpoint.records import Record

SCHEMA = "counterpoint.rehearsal/1"


class RankReport(Record, frozen=True, kw_only=True):
    """Holds the report that one rank writes at the end of its script.

    Args:
        rank: number of the rank.
        steps: optimizer steps; of several optimizers at a time, those of the first.
        peak_bytes: most memory that torch reserved on its GPU; 0 on CPUs.
        reports: what counterpoint reports of each model and group, by name: `print(overlapped)` and the like.
        calls: calls of each process group of torch, by name, as torch counts them: with gloo, messages, too.
        members: ranks of each of these groups.
    """

    rank: int
    steps: int
    peak_bytes: int
    reports: dict[str, str]
    calls: dict[str, int]
    members: dict[str, tuple[int, ...]]


class RehearsalReport(Record, frozen=True, kw_only=True):
    """Holds one report, and the ranks that all wrote this report; empty: they wrote no report of that name."""

    name: str
    ranks: tuple[int, ...]
    text: str


class Rehearsal(Record, frozen=True, kw_only=True):
    """Holds the whole answer of `counterpoint rehearse`.

    Args:
        command: as it was given.
        device: of the ranks.
        gpus: names of the GPUs that the ranks shared; empty on CPUs.
        world_size: number of ranks.
        hosts: among how many hosts they were counted.
        steps: of the optimizer, on the rank that made fewest.
        peak_bytes: most memory that torch reserved for one rank.
        reports: what counterpoint replaced and moved; equal reports of several ranks are one.
        differences: what was not the same on all ranks of a group, in sentences.
        missing_ranks: ranks that left no report, as a script does that ends by `os._exit`.
        verdict: what this shows, in a sentence, and what it cannot show.
    """

    schema: str = SCHEMA
    command: str
    device: Literal["cuda", "cpu"]
    gpus: tuple[str, ...]
    world_size: int
    hosts: int
    steps: int
    peak_bytes: int
    reports: tuple[RehearsalReport, ...]
    differences: tuple[str, ...]
    missing_ranks: tuple[int, ...]
    verdict: str
