"""Claim: whole steps by what `tune` chose are as fast as by the best single mechanism, or faster.

    python benchmarks/tune_step.py --out results/tune-step.json
    python benchmarks/tune_step.py --device cpu --nproc 2 --models fsdp --rounds 5 --budget 5

Three training scripts, unchanged: FSDP2 of 8B-shaped layers, DDP of a 1B model, a model of tensor-parallel blocks.
Each is tuned as by `counterpoint tune --run`. Then these run in turns: `stock`; each mechanism for all pairs that were
measured with it, of which the fastest is shown; `tuned`; and for --oracle every combination of the mechanisms of its
choices. The fastest three of these run once more, since the least of many noisy times is too small.

`tuned again`, with --again, is a second file, made by a second run; `same` counts its pairs with an equal mechanism.
`times` is stock / ms; sigma is the standard error of a median over rounds. The file of each model is kept beside --out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace
from provenance import gpu_provenance, provenance, write_result
from tables import print_table

from counterpoint.records.tuning import LEAVE, Tuned, TunedPair
from counterpoint.tuned.file import tuned_toml
from counterpoint.tuning.exporters import variables_of
from counterpoint.tuning.script import (
    Choice,
    ScriptComparison,
    StepTimes,
    choices,
    difference,
    record_script,
    sigma_of_median,
    tune_script,
)
from counterpoint.tuning.script_launch import ScriptVariant, parse_command

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODELS = {  # script, and its arguments on GPUs
    "fsdp": ("train_fsdp.py", "--tokens 4096"),
    "ddp": ("train_ddp.py", "--tokens 2048"),
    "tp": ("train_tp.py", "--tokens 8192"),
}
STOCK, TUNED, AGAIN = "stock", "tuned", "tuned again"
STAYS = ("nccl", "nccl_zero_cta", "gloo", "torch")  # torch runs these; their settings are made with process groups
COLUMNS = ("model", "variant", "ms", "sigma", "times", "rounds", "over tuned, ms", "2 sigma", "same")
FINAL = 3  # combinations whose times are taken once more


def set_all(tuned: Tuned, picks: Mapping[Choice, str]) -> Tuned:
    """Return the tuning with the pairs of each choice by the mechanism that is picked for it; others are left."""
    pairs = [replace(pair, mechanism=LEAVE) for pair in tuned.pair]
    for choice, mechanism in picks.items():
        for index in choice:
            pairs[index] = replace(pairs[index], mechanism=mechanism)
    return replace(tuned, pair=tuple(pairs))


def offered(tuned: Tuned, choice: Choice) -> list[str]:
    """Return the mechanisms that were measured for a choice, are believed, and can be set in a process that runs."""
    pairs: list[TunedPair] = [tuned.pair[index] for index in choice]
    names = (each.mechanism for pair in pairs for each in pair.tried if each.marked is None)
    return [name for name in dict.fromkeys(names) if name.partition("+")[0] not in STAYS or "gemm_sms" in name]


def singles(tuned: Tuned) -> dict[str, Tuned]:
    """Return, for each mechanism, all pairs by it that were measured with it."""
    by_choice = {choice: offered(tuned, choice) for choice in choices(tuned)}
    names = dict.fromkeys(name for found in by_choice.values() for name in found)
    return {
        f"all {name}": set_all(tuned, {choice: name for choice, found in by_choice.items() if name in found})
        for name in names
    }


def combinations(tuned: Tuned, most: int) -> dict[str, Tuned]:
    """Return every combination of mechanisms of the choices, the most useful choices first, as long as they are few."""
    ways: list[tuple[Choice, list[str]]] = []
    number = 1
    for choice in choices(tuned):
        found = [LEAVE, *offered(tuned, choice)]
        if len(found) > 1 and number * len(found) <= most:
            ways.append((choice, found))
            number *= len(found)
    rest = {c: tuned.pair[c[0]].mechanism for c in choices(tuned) if c not in dict(ways)}
    made: dict[str, Tuned] = {}
    for picked in itertools.product(*(found for _, found in ways)):
        picks = dict(zip((choice for choice, _ in ways), picked, strict=True))
        name = ", ".join(f"{tuned.pair[choice[0]].operation} {way}" for choice, way in picks.items())
        made[f"combination {len(made)}: {name}"] = set_all(tuned, rest | picks)
    return made


def same(first: Tuned, second: Tuned) -> str:
    """Return how many pairs of both have an equal mechanism, of how many that both have."""
    mechanisms = [
        {(p.operation, p.bytes_per_rank, p.compute): p.mechanism for p in one.pair} for one in (first, second)
    ]
    both = mechanisms[0].keys() & mechanisms[1].keys()
    return f"{sum(mechanisms[0][key] == mechanisms[1][key] for key in both)} of {len(both)}"


class Bench:
    """One model: its script, what was chosen for it, and its variants."""

    def __init__(self, args: argparse.Namespace, model: str, folder: Path) -> None:
        script, on_gpu = MODELS[model]
        sizes = on_gpu if args.device == "cuda" else "--tokens 64"
        launcher = f"torchrun --standalone --nproc-per-node {args.nproc}"
        self.command = f"{launcher} {EXAMPLES / script} --device {args.device} --overlap --steps 1000000 {sizes}"
        self.args, self.model, self.folder = args, model, folder
        folder.mkdir()
        self.tuned = tune_script(self.command, rounds=args.rounds, budget_s=args.budget)
        run = parse_command(self.command)
        recorded = record_script(run, folder)
        self.steps = ScriptComparison(
            run, folder, recorded, sets_variables=bool(variables_of(self.tuned)), budget_s=args.budget
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield stock, the best single mechanism, what was tuned, and the oracle where it is asked for."""
        alone = singles(self.tuned)
        sets = {TUNED: self.tuned, **alone}
        if self.args.again:
            sets[AGAIN] = tune_script(self.command, rounds=self.args.rounds, budget_s=self.args.budget)
        times = self.compare(sets)
        single = sorted(alone, key=lambda name: median(times[name]))[:1]
        for name in (STOCK, *single, TUNED, *([AGAIN] if self.args.again else [])):
            yield self.row(name, times, name) | ({"same": same(self.tuned, sets[AGAIN])} if name == AGAIN else {})
        if self.args.oracle == self.model:
            every = combinations(self.tuned, self.args.combinations)
            first = self.compare(every)
            fastest = sorted(every, key=lambda name: median(first[name]))[:FINAL]
            again = self.compare({TUNED: self.tuned} | {name: every[name] for name in fastest})
            best = min(fastest, key=lambda name: median(again[name]))
            yield self.row(f"oracle of {len(every)}: {best.partition(': ')[2]}", again, best)

    def compare(self, sets: Mapping[str, Tuned]) -> StepTimes:
        """Return µs of a step by stock and each of these; what leaves all pairs is stock."""
        variants = [ScriptVariant(name=STOCK, file=None)]
        for number, (name, tuned) in enumerate(sets.items()):
            if any(pair.mechanism != LEAVE for pair in tuned.pair):
                path = self.folder / f"{len(list(self.folder.iterdir()))}-{number}.toml"
                path.write_text(tuned_toml(tuned))
                variants.append(ScriptVariant(name=name, file=str(path)))
        times = dict(self.steps.compare(variants))
        return {STOCK: times[STOCK]} | {name: times.get(name, times[STOCK]) for name in sets}

    def row(self, shown: str, times: StepTimes, name: str) -> dict[str, Any]:
        """Return a line of the table."""
        over_us, sigma_us = difference(times[name], times[TUNED])
        return {
            "model": self.model,
            "variant": shown,
            "ms": median(times[name]) / 1e3,
            "sigma_ms": sigma_of_median(times[name]) / 1e3,
            "times": median(times[STOCK]) / median(times[name]),
            "rounds": len(times[name]),
            "over_tuned_ms": over_us / 1e3,
            "two_sigma_ms": 2 * sigma_us / 1e3,
        }


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row as printed, in the order of `COLUMNS`."""
    figures = (f"{row['ms']:.2f}", f"{row['sigma_ms']:.2f}", f"{row['times']:.3f}", str(row["rounds"]))
    over = (f"{row['over_tuned_ms']:+.2f}", f"{row['two_sigma_ms']:.2f}", row.get("same", ""))
    return [row["model"], row["variant"], *figures, *over]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--oracle", choices=tuple(MODELS), default="fsdp", help="which model is searched in full")
    parser.add_argument("--combinations", type=int, default=27, help="at most, of the oracle")
    parser.add_argument("--again", action="store_true", help="tune twice, and run both files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="of pairs")
    parser.add_argument(
        "--budget", type=float, default=120.0, help="seconds of a model's pairs, and of each comparison"
    )
    parser.add_argument("--out", type=Path, help="where to keep the result")
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    rows: list[dict[str, Any]] = []
    files: dict[str, Tuned] = {}
    with TemporaryDirectory() as folder:
        for model in args.models:
            bench = Bench(args, model, Path(folder) / model)
            rows += bench.rows()
            files[model] = bench.tuned
    table = [cells(row) for row in rows]
    print_table(COLUMNS, table)
    if args.out is not None:
        packages = ["torch", "triton", "cuda-bindings", "nvidia-nccl-cu13"]
        on_gpu = args.device == "cuda"
        facts = gpu_provenance(packages, world_size=args.nproc) if on_gpu else provenance(packages)
        options = {name: value for name, value in vars(args).items() if name != "out"}
        write_result(args.out, {"provenance": facts, "options": options, "rows": rows}, COLUMNS, table)
        for model, tuned in files.items():
            args.out.with_name(f"{args.out.stem}-{model}.toml").write_text(tuned_toml(tuned))


if __name__ == "__main__":
    main()
