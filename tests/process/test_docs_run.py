"""The blocks of README, tutorial and how-tos run as they are written, on CPUs.

Blocks fenced as `bash` run in the order of their page, in a folder that has this repository's examples and samples; the
`python` blocks of a page are one program. An HTML comment before a block, which readers do not see, may say

- `<!-- not run: REASON -->`: the block needs GPUs, a network or a program that is not here;
- `<!-- before` and lines of code up to `-->`: what the block takes for granted, such as a model;
- `<!-- ranks: N -->`: the program of the page is one of N ranks.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/tutorial.md", *sorted(f"docs/how-to/{page.name}" for page in ROOT.glob("docs/how-to/*.md")))
PART = re.compile(
    r"^ *<!-- (not run: |before\n|ranks: )(.*?) ?-->\n|^ *```(\w+)\n(.*?)^ *```", re.DOTALL | re.MULTILINE
)
SETUP = 'counterpoint() { command counterpoint "$@" || { code=$?; [ "$1" = doctor ] && [ $code = 1 ]; }; }'
NOT_RUN = {  # pages: how many blocks are not run; each says why beside it
    "README.md": 2,
    "docs/tutorial.md": 2,
    "docs/how-to/diagnose-traces.md": 2,
    "docs/how-to/divide-sms.md": 4,
    "docs/how-to/find-a-hang.md": 1,
    "docs/how-to/fit-collectives.md": 2,
    "docs/how-to/gate-in-ci.md": 2,
    "docs/how-to/measure-a-machine.md": 1,
    "docs/how-to/overlap-expert-parallel.md": 5,
    "docs/how-to/place-ranks.md": 1,
    "docs/how-to/plan-a-job.md": 1,
    "docs/how-to/rehearse-on-one-gpu.md": 1,
    "docs/how-to/tune-a-job.md": 5,
    "docs/how-to/use-as-a-backend.md": 2,
    "docs/how-to/watch-a-training.md": 3,
    "docs/how-to/write-a-profile.md": 3,
}


class Blocks(NamedTuple):
    commands: str
    program: str
    ranks: int
    not_run: list[str]


def blocks(page: str) -> Blocks:
    """Return the commands and the program of a page, and the reasons of what is left out."""
    commands, program, reasons, ranks, skip = [], [], [], 1, False
    for kind, said, language, text in PART.findall((ROOT / page).read_text()):
        if kind == "ranks: ":
            ranks = int(said)
        elif kind == "before\n":
            program.append(dedent(said))
        elif kind:
            reasons.append(said)
            skip = True
        elif skip:
            skip = False
        elif language == "bash":
            commands.append(dedent(text))
        elif language == "python":
            program.append(dedent(text))
    return Blocks("".join(commands), "\n".join(program), ranks, reasons)


def run(folder: Path, *command: str) -> None:
    for name in ("examples", "samples"):
        (folder / name).symlink_to(ROOT / name)
    here = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "PET_STANDALONE": "1",  # torchrun: a port of its own for each
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=folder, env=os.environ | here, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def test_blocks_that_are_not_run_are_counted() -> None:
    """A block that is left out, or runs again, changes the table above; `make test` runs this one only."""
    assert {page: len(blocks(page).not_run) for page in PAGES} == {page: NOT_RUN.get(page, 0) for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_fenced_as_bash(page: str) -> None:
    """A block without a language is output; commands in it would neither run nor be counted."""
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    plain = [text for language, text in fences if not language]
    assert plain == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page).commands])
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    run(tmp_path, "bash", "-e", "-c", f"{SETUP}\n{blocks(page).commands}")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page).program])
def test_the_program_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """Each block after those above it, with what its comment takes for granted."""
    found = blocks(page)
    script = tmp_path / "page.py"
    script.write_text(found.program)
    launcher = () if found.ranks == 1 else ("-m", "torch.distributed.run", "--nproc-per-node", str(found.ranks))
    run(tmp_path, sys.executable, *launcher, str(script))


@pytest.mark.parametrize(("page", "end"), [("README.md", "## Fix it"), ("docs/tutorial.md", "## 4.")])
def test_what_a_page_shows_of_the_sample_is_printed(page: str, end: str) -> None:
    """Line breaks and the parts that a page leaves out ("...") aside."""
    command = ("-m", "counterpoint", "diagnose", "samples/fsdp-host-stall", "--verbose")
    environment = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run((sys.executable, *command), cwd=ROOT, env=environment, text=True, capture_output=True)
    printed = " ".join(done.stdout.split())
    shown = (ROOT / page).read_text().partition(end)[0]
    parts = [part for block in re.findall(r"```text\n(.*?)```", shown, re.DOTALL) for part in block.split("...")]
    assert [part for part in parts if " ".join(part.split()) not in printed] == []
