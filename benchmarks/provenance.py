"""Write results with where they came from, without which a number proves nothing later, and read them again.

A result is `NAME.json` and a table, `NAME.md`. Where the JSON would be longer than 40 kB, all of it goes to
`NAME.json.gz`, and `NAME.json` keeps a summary that names that file. What `counterpoint measure` has written to
results/ is treated the same by

    python benchmarks/provenance.py results/pairs-4xh200.json
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tables import markdown

if TYPE_CHECKING:
    from counterpoint.records.measurement import Measurement

__all__ = [
    "gpu_provenance",
    "provenance",
    "read_measurement",
    "read_result",
    "write_json",
    "write_result",
    "write_table",
]

ROOT = Path(__file__).resolve().parents[1]
LONGEST_BYTES = 40_000  # of a JSON that is kept as it is
LONGEST_LIST = 4_000  # letters of a list that a summary keeps


def provenance(packages: Sequence[str]) -> dict[str, Any]:
    """Machine, versions, commit, command and date of this run; COUNTERPOINT_COMMIT names that of an exported tree."""
    exported = os.environ.get("COUNTERPOINT_COMMIT")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", *(_relative(argument) for argument in sys.argv)],
        "commit": exported or _git("rev-parse", "HEAD"),
        "uncommitted_changes": not exported and bool(_git("status", "--porcelain", "--untracked-files=no")),
        "gpu": None,  # a benchmark of what GPUs did says which, with driver and torch
        "driver": None,
        "torch": None,
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def gpu_provenance(packages: Sequence[str], *, world_size: int) -> dict[str, Any]:
    """The same of a run of `world_size` ranks on GPUs of this host; where ranks share them it says so."""
    import torch

    count = torch.cuda.device_count()
    shared = f"{count} x {torch.cuda.get_device_name()}, shared by {world_size} ranks: no times"
    return provenance(packages) | {
        "gpu": f"{world_size} x {torch.cuda.get_device_name()}" if count >= world_size else shared,
        "driver": Path("/proc/driver/nvidia/version").read_text().split("x86_64")[-1].split()[0],
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _relative(argument: str) -> str:
    path = Path(argument).absolute()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and path.exists() else argument


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_result(path: Path, record: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a measurement as JSON, and next to it a table made from the same run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    facts = record["provenance"]
    origin = f"`{' '.join(facts['command'])}`, {facts['date']}, commit {(facts['commit'] or '?')[:12]}"
    lines = [*markdown(columns, rows), "", f"From [{path.name}]({path.name}): {origin}.", ""]
    path.with_suffix(".md").write_text("\n".join(lines))


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]], **facts: Any) -> None:
    """Write a table, and as JSON its cells behind the `facts`, of which `provenance` is one."""
    write_result(path, {**facts, "columns": columns, "rows": rows}, columns, rows)


def read_result(path: Path) -> bytes:
    """Return the JSON of a result, with all rows wherever they are kept."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(content)
    whole = json.loads(content).get("whole")
    return content if whole is None else gzip.decompress((path.parent / whole).read_bytes())


def read_measurement(path: Path) -> Measurement:
    """Return what `counterpoint measure` has written, from results/ too."""
    import msgspec

    from counterpoint.records.measurement import Measurement

    return msgspec.json.decode(read_result(path), type=Measurement)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write the JSON of a result, and its rows to a file of their own if it is long."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    whole = path.with_name(f"{path.name}.gz")
    whole.unlink(missing_ok=True)
    if len(text) > LONGEST_BYTES:
        whole.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), 9, mtime=0))
        text = json.dumps(_summary(record) | {"whole": whole.name}, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text)


def _summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its long lists as their lengths, and the means of each mechanism of a measurement."""
    short = {key: f"{len(value)} in the whole" if _is_long(value) else value for key, value in record.items()}
    if record.get("schema") != "counterpoint.measurement/1":
        return short
    import msgspec

    from counterpoint.records.measurement import Measurement
    from counterpoint.rendering.measurement_tables import summary

    return short | {"summary": msgspec.to_builtins(summary(msgspec.convert(record, Measurement), None))}


def _is_long(value: object) -> bool:
    return isinstance(value, list | dict) and len(json.dumps(value)) > LONGEST_LIST


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each, digits) for each in value]
    return round(value, digits) if isinstance(value, float) else value


def main() -> None:
    """Keep the rows of long results apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--digits", type=int, help="round numbers to so many digits; 3: times to 0.001 us")
    asked = parser.parse_args()
    for path in asked.results:
        record = json.loads(read_result(path))
        write_json(path, record if asked.digits is None else _rounded(record, asked.digits))


if __name__ == "__main__":
    main()
