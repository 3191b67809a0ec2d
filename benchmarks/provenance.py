"""Where a result came from: without it a number proves nothing later."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tables import markdown

__all__ = ["gpu_provenance", "provenance", "write_result"]

ROOT = Path(__file__).resolve().parents[1]


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
    """The same of a run on `world_size` GPUs of this host."""
    import torch

    return provenance(packages) | {
        "gpu": f"{world_size} x {torch.cuda.get_device_name()}",
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
    """Keep a measurement: its JSON, and beside it a table made from the same run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    facts = record["provenance"]
    origin = f"`{' '.join(facts['command'])}`, {facts['date']}, commit {(facts['commit'] or '?')[:12]}"
    lines = [*markdown(columns, rows), "", f"From [{path.name}]({path.name}): {origin}.", ""]
    path.with_suffix(".md").write_text("\n".join(lines))
