"""Two threads of a new process read a file of a kind that nobody has read before."""

import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.tuned.file import tuned_toml
from tests.support.example_tuned import example_tuned

TIMES = 8  # processes, of which more than half crashed
PROGRAM = """
import sys, threading
from counterpoint.{module} import {function} as read
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(2)
def both():
    barrier.wait()
    read({argument!r})
threads = [threading.Thread(target=both) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("kind", ["profile", "tuning"])
def test_two_threads_may_read_it_first(kind: str, tmp_path: Path) -> None:
    """Both at the same time: msgspec learns the fields of a kind when it is first read, and cannot do so twice."""
    path = tmp_path / "counterpoint.toml"
    path.write_text(tuned_toml(example_tuned()))
    of_kind: dict[str, tuple[str, str, object]] = {
        "profile": ("machine.profile", "profile_of", None),
        "tuning": ("tuned.file", "read_tuned", str(path)),
    }
    module, function, argument = of_kind[kind]
    program = PROGRAM.format(module=module, function=function, argument=argument)
    codes = [subprocess.run([sys.executable, "-c", program], check=False).returncode for _ in range(TIMES)]
    assert codes == [0] * TIMES
