"""What an import leaves out: each statement runs in an interpreter of its own, which says what it has loaded."""

import os
import sys
from subprocess import CompletedProcess

import pytest

from tests.support.command import program

HEAVY = ("torch", "polars", "jinja2", "numpy")
HELP = "import sys; sys.argv = ['counterpoint', '--help']; from counterpoint.cli import main; main()"
PROGRAMS = (
    "from counterpoint.collectives import program; from counterpoint.collectives.program import clock, operations"
)
REFUSED = (
    "import counterpoint\n"
    "try:\n    counterpoint.measure('nonsense', device='cpu')\n"
    "except counterpoint.Misconfigured:\n    pass"
)
STATEMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "the package": ("import counterpoint", HEAVY),
    "--help": (HELP, HEAVY),
    "programs": (PROGRAMS, ("torch", "numpy")),
    "overlap": ("import counterpoint.parallel.overlap", ("torch",)),
    "a bad suite": (REFUSED, ("torch",)),
    "the report on a terminal": ("import counterpoint.rendering.diagnosis_terminal", ("polars",)),
    "the report as a page": ("import counterpoint.rendering.diagnosis_html", ("polars",)),
    "the report for Perfetto": ("import counterpoint.rendering.diagnosis_perfetto", ("polars",)),
    "the process beside a training": ("import counterpoint.monitoring.beside", ("torch", "polars", "plotly")),
    "a rank that is to die with its launcher": ("import counterpoint.tuning.script_rank", ("torch",)),
    "the proof from traces": ("import counterpoint.tuning.check", ("torch", "polars")),
    "data frames": ("import counterpoint.diagnosis.frames", ("polars",)),
}


def run(code: str) -> CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "RANK"}
    return program([sys.executable, "-c", code], variables=variables)


@pytest.mark.parametrize(("statement", "absent"), STATEMENTS.values(), ids=STATEMENTS)
def test_heavy_packages_stay_out(statement: str, absent: tuple[str, ...]) -> None:
    probe = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('LOADED', [name for name in {absent!r} if name in sys.modules]))\n"
        f"{statement}\n"
    )
    done = run(probe)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["LOADED []"]), done.stderr


@pytest.mark.parametrize("verb", ["diagnose", "measure", "tune"])
def test_a_verb_stays_a_function_when_its_package_is_imported(verb: str) -> None:
    """Imports of the verb's own modules and of its command leave `counterpoint.<verb>` the function."""
    package = {"diagnose": "diagnosis", "measure": "measurement", "tune": "tuning"}[verb]
    done = run(
        f"import counterpoint, counterpoint.{package}.api, counterpoint.commands.{verb}, types\n"
        f"assert isinstance(counterpoint.{verb}, types.FunctionType), counterpoint.{verb}\n"
        f"assert counterpoint.{verb} is counterpoint.{package}.api.{verb}\n"
    )
    assert done.returncode == 0, done.stderr
