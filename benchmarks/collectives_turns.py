"""Claim: ranks that begin apart end a collective sooner if they push in turns. On the clock; no GPU is needed.

    python benchmarks/collectives_turns.py

Each case is timed in step and with arrivals drawn up to 1.5 copies apart, from the moment when the last rank came.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from provenance import provenance, write_table
from tables import print_table

from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.clock import simulate
from counterpoint.collectives.program.operations import all_gather, plan_all, reduce_scatter
from counterpoint.collectives.program.steps import Tuning
from counterpoint.collectives.program.tuning import TURN_BYTES
from counterpoint.machine.profile import default_profile

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
DRAWS, APART = 12, 1.5
COLUMNS = ("operation", "ranks", "MiB to each", "turns", "in step, µs", "apart, mean", "apart, worst")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call in which no rank waits for a handshake."""

    name: str
    call: Call
    tuning: Tuning
    early_release: bool

    def us(self, turns: bool, arrive_us: Sequence[float] = ()) -> float:
        """From the moment when the last rank has come until the last has its output."""
        programs = plan_all(self.call, replace(self.tuning, turn_bytes=TURN_BYTES if turns else None))
        ended = simulate(programs, early_release=self.early_release, arrive_us=arrive_us).us
        return ended - max(arrive_us, default=0.0)


def cases(world_size: int, mib: int) -> tuple[Case, Case]:
    """Sums in one large chunk and a small one, as `best_tuning` cuts them."""
    gather, scatter = all_gather(world_size, mib * MIB), reduce_scatter(world_size, mib * MIB)
    tapered = Tuning(arrivals="together", last_bytes=mib * MIB // 8)
    return (
        Case(name="all_gather, early release", call=gather, tuning=Tuning(arrivals="together"), early_release=True),
        Case(name="reduce_scatter", call=scatter, tuning=tapered, early_release=False),
    )


def lines() -> list[tuple[str, ...]]:
    """The table."""
    found = []
    for world_size in (4, 8):
        for mib in (16, 54, 109):
            for case in cases(world_size, mib):
                copy_us = mib * MIB / default_profile().rates.push_gb_per_s / 1000
                dice = random.Random(1)
                late = [[dice.random() * APART * copy_us for _ in range(world_size)] for _ in range(DRAWS)]
                for turns in (False, True):
                    apart = [case.us(turns, each) for each in late]
                    times = case.us(turns), fmean(apart), max(apart)
                    head = case.name, str(world_size), str(mib), "yes" if turns else "no"
                    found.append((*head, *(f"{us:.0f}" for us in times)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "collectives-turns.json")
    asked = parser.parse_args()
    table = lines()
    print_table(COLUMNS, table, width=120)
    write_table(asked.out, COLUMNS, table, provenance=provenance([]))


if __name__ == "__main__":
    main()
