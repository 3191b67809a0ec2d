"""The golden record: what the library decides, row by row; `python -m tests.golden.record` writes it again.

A record is a gzipped file of JSON lines for each group. Writing it again prints every value that has changed: a commit
that changes the record says why, and the text of its message can be taken from there.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "record"
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.golden import cases, library  # noqa: E402 the path is set above

Row = dict[str, Any]
DIGITS = 12  # significant ones of a number; the last may differ, as other CPUs and Pythons sum in another order
CLOCK_DIGITS = 6  # of the simulated time


def call_rows() -> list[Row]:
    """Return what is decided for calls on one host."""
    return [call_row(one) for one in (*cases.one_host(), *cases.otherwise())]


def coalesced_rows() -> list[Row]:
    """Return what is decided for calls of several tensors."""
    return [call_row(one) for one in cases.coalesced()]


def call_row(one: Row) -> Row:
    """Return the way, tuning, steps and predicted time of one call, and digests of what each rank does."""
    call = library.make_call(one["operation"], one["arguments"], one["options"])
    early = one.get("early_release", False)
    tuning = library.choose_tuning(
        call, one.get("executor", "cuda"), early_release=early, staging_bytes=one.get("staging_bytes")
    )
    programs = library.programs_of(call, tuning)
    if "layout" in one:
        programs = library.programs_on_tensors(programs, one["layout"])
    return {
        "row": cases.name_of(one),
        "call": digest(library.call_fields(call)),
        "path": library.path(call),
        "tuning": library.tuning_fields(tuning),
        "predicted_us": significant(library.predicted_us(programs, early_release=early), CLOCK_DIGITS),
        **program_columns(programs),
        "driver_calls": digest([library.driver_calls(program) for program in programs]),
    }


def host_rows() -> list[Row]:
    """Return what is decided for calls over several hosts."""
    found = []
    for one in cases.over_hosts():
        call = library.make_call(one["operation"], one["arguments"], one["options"])
        hosts, local = one["grid"]
        phases, programs = library.programs_over_hosts(call, hosts, local, one["slice_bytes"])
        found.append({
            "row": cases.name_of(one),
            "phases": [digest(each) for each in phases],
            "predicted_us": significant(library.predicted_us(programs, local=local), CLOCK_DIGITS),
            **program_columns(programs),
        })  # fmt: skip
    return found


def program_columns(programs: Any) -> Row:
    """Return numbers of steps and bytes by rank, and a digest of each rank's program."""
    plain = [library.program_fields(program) for program in programs]
    steps = [[*each["release"], *each["steps"], *each["finish"]] for each in plain]
    return {
        "steps": [len(each) for each in steps],
        "sent_bytes": [sum(step[3][2] for step in each if step[0] == "copy") for each in steps],
        "copied_bytes": [sum(step[2][2] for step in each if step[0] == "local_copy") for each in steps],
        "staging_bytes": max(each["staging_bytes"] for each in plain),
        "programs": [digest(each) for each in plain],
    }


def table_rows() -> list[Row]:
    """Return the tables behind the decisions: crossovers, rates of the clock, factors of bus bandwidth."""
    crossovers = library.crossover_bytes()
    ways = {
        f"path of {operation}, {op} of {dtype}" if op else f"path of {operation}": {
            str(size): library.path_of_bytes(operation, size)
            for near in (crossovers.get(operation, 0),)
            for size in (max(0, near - 1), near)
        }
        for operation in cases.OPERATIONS
        for op, dtype in cases.REDUCTIONS
        if (op is not None) == (operation in ("all_reduce", "reduce_scatter"))
    }
    return [
        {"row": "crossover bytes", **crossovers},
        {"row": "rates of the clock", **library.clock_rates()},
        *({"row": name, **way} for name, way in ways.items()),
        *(
            {"row": f"bus factor of {operation}, {ranks} ranks", **library.bus_factors(operation, ranks)}
            for operation in cases.OPERATIONS
            for ranks in (1, 2, 4, 8)
        ),
    ]


def published_rows() -> list[Row]:
    """Return the published-steps table."""
    return library.published_rows()


def pair_rows() -> list[Row]:
    """Return what is decided for pairs of GEMMs and collectives."""
    return library.gemm_sms_rows() + library.budget_rows(cases.CALIBRATIONS, cases.VIEWS)


def plan_rows() -> list[Row]:
    """Return the JSON of every plan."""
    return [{"row": name, **library.command(["plan", *how, "--json", "-"])} for name, how in cases.PLANS.items()]


def diagnosis_rows() -> list[Row]:
    """Return the JSON of the diagnosis of every sample."""
    return [
        {"row": name, **library.command(["diagnose", f"samples/{name}", "--json", "-"])} for name in cases.DIAGNOSES
    ]


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "calls": call_rows,
    "coalesced": coalesced_rows,
    "hosts": host_rows,
    "tables": table_rows,
    "pairs": pair_rows,
    "published": published_rows,
    "plans": plan_rows,
    "diagnoses": diagnosis_rows,
}


def digest(plain: Any) -> str:
    """Return 12 letters that change with anything in a plain value."""
    return blake2b(json.dumps(plain, separators=(",", ":")).encode(), digest_size=6).hexdigest()


def significant(number: float, digits: int) -> float:
    """Return the number, rounded to so many significant digits."""
    return float(f"{number:.{digits}g}")


def rounded(value: Any) -> Any:
    """Return a plain value as it is recorded: tuples as lists, numbers rounded."""
    match value:
        case dict():
            return {name: rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [rounded(each) for each in value]
        case float():
            return significant(value, DIGITS)
        case _:
            return value


def compute(group: str) -> dict[str, Row]:
    """Return the rows of a group by their names, as the library decides now. Runs at the root of the repository.

    Raises:
        ValueError: two rows have one name.
    """
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        made = [rounded(row) for row in GROUPS[group]()]
    finally:
        os.chdir(before)
    found = {row["row"]: row for row in made}
    if len(found) != len(made):
        raise ValueError(f"{group}: {len(made)} rows have {len(found)} names; give each a name of its own")
    return found


def read(group: str) -> dict[str, Row]:
    """Return the recorded rows of a group by their names."""
    with gzip.open(FOLDER / f"{group}.jsonl.gz", "rt", encoding="utf-8") as file:
        return {row["row"]: row for row in map(json.loads, file)}


def write(group: str, rows: dict[str, Row]) -> None:
    """Write the record of a group."""
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows.values())
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{group}.jsonl.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def differences(recorded: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each value that differs, with its place and both values."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*recorded, *now]):
            inner = f"{place}.{name}" if place else str(name)
            yield from differences(recorded.get(name, "absent"), now.get(name, "absent"), inner)
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        for index, (before, after) in enumerate(zip(recorded, now, strict=True)):
            yield from differences(before, after, f"{place}[{index}]")
    elif recorded != now and not is_rounding(recorded, now):
        yield f"{place}: recorded {short(recorded)}, now {short(now)}"


def is_rounding(recorded: Any, now: Any) -> bool:
    """Return whether two numbers differ in their last digit only."""
    both_floats = isinstance(recorded, float) and isinstance(now, float)
    return both_floats and math.isclose(recorded, now, rel_tol=10.0 ** (1 - DIGITS))


def short(value: Any) -> str:
    """Return a value in at most 200 letters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]} ... ({len(text)} letters)"


def changes(group: str, recorded: dict[str, Row], now: dict[str, Row]) -> list[str]:
    """Return a line for each difference of a group."""
    found = []
    for name in dict.fromkeys([*recorded, *now]):
        if name not in now or name not in recorded:
            found.append(f"{group} | {name}: {'is gone' if name not in now else 'is new'}")
        else:
            found += [f"{group} | {name} | {line}" for line in differences(recorded[name], now[name])]
    return found


def main() -> None:
    """Write every group that has changed, and print what has."""
    for group in GROUPS:
        now = compute(group)
        recorded = read(group) if (FOLDER / f"{group}.jsonl.gz").exists() else {}
        changed = changes(group, recorded, now)
        if changed:
            write(group, now)
        print("\n".join(changed) or f"{group}: {len(now)} rows, none changed")


if __name__ == "__main__":
    main()
