"""Write docs/reference/cli.md from the commands themselves: `python docs/write_cli.py`.

A test holds that the page is current.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from counterpoint.cli import app

PAGE = Path(__file__).resolve().parent / "reference" / "cli.md"
HEAD = """# The command line

Generated from the commands by `docs/write_cli.py`; do not edit.
`counterpoint COMMAND --help` says the same.
"""


def text() -> str:
    """Return the page."""
    group: Any = typer.main.get_command(app)
    return "\n".join([HEAD, *(section(name, command) for name, command in group.commands.items())])


def section(name: str, command: Any) -> str:
    """Return the section of one command: what it is for, and a table of its arguments and options."""
    options = [parameter for parameter in command.params if parameter.name != "help"]
    arguments = [parameter.name for parameter in options if parameter.param_type_name == "argument"]
    use = " ".join(["counterpoint", name, *(argument.upper() for argument in arguments), "[OPTIONS]"])
    table = ["| option | meaning | default |", "|---|---|---|", *map(row, options)]
    return "\n".join([f"## {name}", "", f"`{use}`", "", command.help.strip(), "", *table, ""])


def row(parameter: Any) -> str:
    """Return the line of one argument or option."""
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    default = parameter.default
    shown = f"`{default}`" if isinstance(default, str | int | float) and not isinstance(default, bool) else ""
    return f"| {', '.join(f'`{name}`' for name in names)} | {(parameter.help or '').replace('|', '&#124;')} | {shown} |"


if __name__ == "__main__":
    PAGE.write_text(text())
