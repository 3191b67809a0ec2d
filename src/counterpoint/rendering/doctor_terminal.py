"""Print a checkup on a terminal: first the problems, each with its meaning and fix; then the checks that passed.

Texts come from drivers, /sys and the environment: printed as `rich.text.Text`, with control characters escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.records.doctor import Check, Checkup
from counterpoint.rendering.print_table import QUIET, line, text

STYLES = {"problem": "bold red", "warning": "yellow", "ok": "green", "not_seen": QUIET}
MARKS = {"problem": "✗", "warning": "!", "ok": "✓", "not_seen": "?"}
WORDS = {"problem": "In the way of overlap", "warning": "Worth a look", "ok": "In order", "not_seen": "Not seen"}
NAME_WIDTH = 19


def verdict(checkup: Checkup) -> str:
    """Return one line that counts the problems and warnings."""
    count = {status: sum(check.status == status for check in checkup.checks) for status in MARKS}
    problems, warnings = count["problem"], count["warning"]
    if problems:
        first = f"{problems} {'thing keeps' if problems == 1 else 'things keep'} this machine from overlapping"
    elif not checkup.gpus:
        first = "No GPU seen: most of what decides about overlap could not be looked at"
    else:
        first = "Nothing keeps this machine from overlapping"
    also = f", {warnings} worth a look" if warnings else ""
    return f"{first}{also} ({count['ok']} in order, {count['not_seen']} not seen)."


def render_checkup(checkup: Checkup, console: Console) -> None:
    """Print a checkup, the verdict first; it stays readable at 80 columns, without colour, and piped."""
    line(console, verdict(checkup), "bold")
    driver = [f"driver {checkup.driver}"] if checkup.driver else []
    models = [f"{checkup.gpus.count(name)} × {name}" for name in dict.fromkeys(checkup.gpus)]
    line(console, " · ".join([checkup.host, *models, *driver]), QUIET)
    for status, render in RENDERERS.items():
        found = [check for check in checkup.checks if check.status == status]
        if found:
            console.print()
            console.print(Text(WORDS[status], "bold underline"))
            render(found, console)


def _advise(checks: Sequence[Check], console: Console) -> None:
    """Print each check's observation, meaning and fix."""
    for check in checks:
        _print(console, _mark(check), check.name, "bold")
        for value, style in ((check.seen, ""), (check.means, QUIET), ("→ " + check.fix, "")):
            _print(console, Text("   "), value, style)


def _list(checks: Sequence[Check], console: Console) -> None:
    """Print one line for each check: its name and the observation."""
    for check in checks:
        head = Text.assemble(_mark(check), text(f"{check.name:{NAME_WIDTH}}", "bold"))
        _print(console, head, check.seen)


def _gather(checks: Sequence[Check], console: Console) -> None:
    """Print the checks that could not be made; checks with the same reason share one entry."""
    for reason in dict.fromkeys(check.seen for check in checks):
        _print(console, _mark(checks[0]), reason)
        _print(console, Text("   "), ", ".join(check.name for check in checks if check.seen == reason), QUIET)


RENDERERS: dict[str, Callable[[Sequence[Check], Console], None]] = {
    "problem": _advise,
    "warning": _advise,
    "ok": _list,
    "not_seen": _gather,
}


def _mark(check: Check) -> Text:
    return Text(MARKS[check.status] + " ", STYLES[check.status])


def _print(console: Console, head: Text, value: str, style: str = "") -> None:
    """Print `head` and, to its right, `value` wrapped to the terminal, without spaces at the ends of lines."""
    for part in text(value, style).wrap(console, max(20, console.width - head.cell_len)) or [Text()]:
        part.rstrip()
        console.print(Text.assemble(head, part), soft_wrap=True)
        head = Text(" " * head.cell_len)
