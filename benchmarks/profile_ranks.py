"""Claim: choices by a profile that was measured on two GPUs are about as good on more of them.

From what `counterpoint measure` kept of 2 and of 4 x H200:

    python benchmarks/profile_ranks.py     # prints a table, writes results/profile-ranks.*

On a machine with eight GPUs, whose pairs and collectives alone were measured:

    counterpoint tune --machine --nproc 2 --out profile-2.json
    counterpoint tune --machine --out profile-8.json
    counterpoint measure machine --out results/machine-8xh200.json
    python benchmarks/profile_ranks.py results/pairs-8xh200.json --alone results/machine-8xh200.json \
        --profile profile-2.json --profile profile-8.json --out results/profile-ranks-8xh200.json

Regret is over the fastest of all mechanisms that were measured. `by the model`: of the one with the least predicted
time; `as chosen`: once stock and the shortlist were measured. Of collectives alone a profile says by size whether NCCL
or zero_sm runs. The kept rows of 2 GPUs have no pairs: there only rates, NCCL's rates and crossovers are fitted, to
collectives alone of 2 or of 4 GPUs, and all other figures are the shipped ones, which are of 4.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from provenance import provenance, read_measurement, write_table
from tables import print_table
from tune_machine import GPU, RESULTS, alone_rows, read, without_exchanges
from tune_pairs import near, stored_cases

from counterpoint.machine.profile import Profile, profile_of, read_profile
from counterpoint.records.measurement import BlockRow
from counterpoint.tuning.machine import fit_profile

COLUMNS = ("choices", "figures of", "cases", "within 2 %", "mean regret", "worst")
STORED = ("pairs", "reductions", "forum", "budget-pairs")
STORED_RANKS = 4


def fitted_alone(ranks: int) -> Profile:
    """Return the shipped figures with those that the kept rows of collectives alone tell, of so many GPUs."""
    kept = read(f"blocks-{ranks}xh200")
    blocks = [row for row in kept.blocks if not row.what.startswith("gemm ")]
    measured = msgspec.structs.replace(kept, rows=(), blocks=(*blocks, *alone_rows(ranks)))
    return fit_profile(without_exchanges(measured), known=profile_of(GPU))


def pair_lines(path: Path, profiles: Mapping[str, Profile]) -> Iterator[tuple[str, ...]]:
    """Yield the regret of the choices for the pairs of a measurement, by each profile."""
    name = path.name.partition(".")[0]
    for figures, profile in profiles.items():
        cases = list(stored_cases(path, profile))
        yield line(f"{name}, by the model", figures, [case.regret(case.predicted) for case in cases])
        yield line(f"{name}, as chosen", figures, [case.regret(case.picked) for case in cases])


def alone_lines(rows: Sequence[BlockRow], profiles: Mapping[str, Profile]) -> Iterator[tuple[str, ...]]:
    """Yield the regret of crossovers: of the way that each size goes by a profile over the faster one."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row.mechanism in ("nccl", "zero_sm") and row.size_bytes and row.marked is None:
            times.setdefault((row.what, row.size_bytes), {})[row.mechanism] = row.time.us
    both = {key: us for key, us in times.items() if len(us) == 2}
    for figures, profile in profiles.items():
        crossovers: Mapping[str, int] = profile.nccl.crossover_bytes  # type: ignore[assignment]
        regrets = [
            us["nccl" if size < crossovers[operation] else "zero_sm"] / min(us.values()) - 1
            for (operation, size), us in both.items()
            if operation in crossovers
        ]
        if regrets:
            yield line("collectives alone, by size", figures, regrets)


def line(what: str, figures: str, regrets: Sequence[float]) -> tuple[str, ...]:
    """Return a line of the table."""
    return what, figures, str(len(regrets)), near(regrets), f"{fmean(regrets):.2%}", f"{max(regrets):.1%}"


def main() -> None:
    """Print the table, and write it with the figures that chose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="*", help="files of counterpoint measure, with every mechanism")
    parser.add_argument("--alone", type=Path, help="the file of `counterpoint measure machine`")
    parser.add_argument("--profile", type=Path, action="append", default=[], help="of counterpoint tune --machine")
    parser.add_argument("--out", type=Path, default=RESULTS / "profile-ranks.json")
    asked = parser.parse_args()
    if bool(asked.measured) != bool(asked.profile):
        parser.error("give files of measure and their --profile together, or none for the kept rows")
    if asked.profile:
        profiles = {path.name: read_profile(path) for path in asked.profile}
        alone: Sequence[BlockRow] = ()
        if asked.alone is not None:
            alone = read_measurement(asked.alone).blocks
    else:
        profiles = {f"{ranks} GPUs": fitted_alone(ranks) for ranks in (2, STORED_RANKS)}
        alone = [*read(f"blocks-{STORED_RANKS}xh200").blocks, *alone_rows(STORED_RANKS)]
    paths = asked.measured or [RESULTS / f"{name}-{STORED_RANKS}xh200.json" for name in STORED]
    table = [each for path in paths for each in pair_lines(path, profiles)] + list(alone_lines(alone, profiles))
    print_table(COLUMNS, table, width=140)
    figures = {
        name: {group: msgspec.to_builtins(getattr(profile, group)) for group in ("rates", "nccl", "nccl_rates")}
        for name, profile in profiles.items()
    }
    facts, names = provenance(["counterpoint", "numpy"]), [path.name for path in paths]
    write_table(asked.out, COLUMNS, table, provenance=facts, measured=names, figures=figures)


if __name__ == "__main__":
    main()
