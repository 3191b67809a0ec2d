"""Programs name backend `counterpoint` without importing it: torch calls an entry point of the installed package."""

import os
import sys
import tomllib
from pathlib import Path

from tests.support.command import ROOT, program

PROGRAM = """
import sys
import torch
import torch.distributed as dist
print(sorted(name for name in sys.modules if name.startswith("counterpoint")))
dist.init_process_group("counterpoint", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
import counterpoint
print(type(dist.group.WORLD).__name__, counterpoint.report().calls[0].why)
dist.destroy_process_group()  # else gloo's thread may drop the tensor, which is Python's, after Python has ended
"""
LOADED = ["", ".errors", ".parallel", ".parallel.backend", ".parallel.backend.registration", ".version"]


def test_torch_knows_the_backend_by_name(tmp_path: Path) -> None:
    """`import torch` then loads nothing of this package but what registers the name."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    installed = tmp_path / "counterpoint-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: counterpoint\nVersion: 0\n")
    lines = [f"{name} = {target}\n" for name, target in entries.items()]
    (installed / "entry_points.txt").write_text("[torch.backends]\n" + "".join(lines))
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = program([sys.executable, "-c", PROGRAM], variables={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    loaded, made = done.stdout.splitlines()
    assert loaded == str([f"counterpoint{name}" for name in LOADED])
    assert made == "CounterpointGroup one rank"
