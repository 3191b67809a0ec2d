"""Peers that benchmarks run beside us, each in an environment of its own that is made once."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

__all__ = ["hta_python"]

_HTA = ["traceinsight==0.6.1", "ijson==3.6.0"]  # ijson: its reader for large files, recommended, not a dependency


def hta_python(cache: Path) -> str:
    """A Python that has HolisticTraceAnalysis."""
    environment = cache / "-".join(["peer", *_HTA]).replace("==", "-")
    if not environment.exists():
        unfinished = environment.with_name("peer-unfinished")
        venv.create(unfinished, with_pip=True, clear=True)
        subprocess.run([unfinished / "bin" / "python", "-m", "pip", "install", "-qq", *_HTA], check=True)
        unfinished.rename(environment)
    return str(environment / "bin" / "python")
