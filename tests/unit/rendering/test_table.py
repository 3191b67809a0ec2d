"""A table in each medium: at every width, without a column lost in silence, and with names that stay text."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from counterpoint.rendering import formatting as say
from counterpoint.rendering.print_table import print_table
from counterpoint.rendering.safe_html import Page, write_page
from counterpoint.rendering.table import BarPart, Cell, Column, LengthBar, Table, markdown, row

HOSTILE = "[red]</td><script>alert(1)</script>|\x1b[31m"
TABLE = Table(
    title="Steps",
    unit="ms",
    columns=(
        Column("name"), Column("", is_bar=True), Column("time", say.milliseconds),
        Column("share", say.percent, optional=True), Column("very\nlong head", say.count, optional=True),
        Column("why"),
    ),
    rows=[
        row(
            "first", LengthBar([BarPart(look="compute", share=0.5)]), 1500.0, 0.5, 12345, Cell(value="so", note="small")
        ),
        row("second", LengthBar([BarPart(look="wait", share=1.0)]), None, "", 1, "", tone="marked"),
        row("third", LengthBar([]), "it cannot be"),
    ],
    notes=("second: made up",),
    legend=(("compute", "compute"), ("wait", "waiting")),
)  # fmt: skip


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_table_on_a_terminal() -> None:
    """Numbers align right, None is a dash, "" is empty, a short row ends in its text, a marked one has its sign."""
    assert printed(TABLE, 100) == [
        "",
        "Steps  ms",
        "                                                  very",
        "name                              time share long head why",
        "first    ████████████             1.50   50%    12,345 so",
        "! second ░░░░░░░░░░░░░░░░░░░░░░░░    –               1",
        "third                                                  it cannot be",
        "█ compute  ░ waiting",
        "· second: made up",
    ]


@pytest.mark.parametrize(
    ("width", "head", "left_out"),
    [
        (80, "name                              time share long head why", ""),
        (60, "name                              time share why", "   a wider terminal shows very long head"),
        (55, "name                              time why", "   a wider terminal shows share, very long head"),
    ],
)
def test_optional_columns_go_from_the_right_and_are_named(width: int, head: str, left_out: str) -> None:
    lines = printed(TABLE, width)
    assert head in lines
    assert [line for line in lines if "wider terminal" in line] == [left_out] * bool(left_out)
    assert max(map(len, lines)) <= width


def test_long_names_wrap_and_numbers_do_not() -> None:
    """At 80 columns each name keeps all its letters, and each number its line."""
    name = "a_name_without_any_space_" * 4
    columns = (Column("name"), *(Column(f"number {place}", say.count) for place in range(6)))
    lines = printed(Table(title="", columns=columns, rows=[row(name, *[1_000_000] * 6)]), 80)
    assert max(map(len, lines)) <= 80
    assert "".join(line.split()[0] for line in lines[3:]) == name
    assert lines[3].split()[1:] == ["1,000,000"] * 6


def test_what_cannot_fit_makes_lines_longer() -> None:
    assert "1.50" in printed(TABLE, 20)[3]


def test_rows_that_a_terminal_leaves_out_are_counted() -> None:
    assert "   and 9 more" in printed(Table(title="", columns=(Column("name"),), rows=[row("x")] * 12, most=3), 80)


def test_a_table_in_markdown() -> None:
    """Without bars and breaks in heads; all characters of a name are text."""
    hostile = Table(title=HOSTILE, columns=TABLE.columns[:1], rows=[row(HOSTILE)])
    assert markdown(TABLE).splitlines() == [
        "## Steps (ms)",
        "",
        "| name | time | share | very long head | why |",
        "| --- | ---: | ---: | ---: | --- |",
        "| first | 1.50 | 50% | 12,345 | so |",
        "| ! second | – |  | 1 |  |",
        "| third |  |  |  | it cannot be |",
        "",
        "- second: made up",
    ]
    escaped = r"\[red\]\</td\>\<script\>alert(1)\</script\>\|\\x1b\[31m"
    assert markdown(hostile).splitlines() == [f"## {escaped}", "", "| name |", "| --- |", f"| {escaped} |"]


def test_a_table_on_a_page(tmp_path: Path) -> None:
    """Each number with its value to sort by, bars with their widths, the text of a short row over the other columns."""
    hostile = Table(title=HOSTILE, unit=HOSTILE, columns=TABLE.columns[:1], rows=[row(HOSTILE)], notes=[HOSTILE])
    page = Page(title="t", kind="k", scope=HOSTILE, headline=HOSTILE, lines=[HOSTILE], tables=[TABLE, hostile])
    write_page(tmp_path / "page.html", page)
    text = (tmp_path / "page.html").read_text()
    for part in (
        '<th scope="col">very long head</th>',
        '<th scope="row" class="text">first</th><td><span class="bar"><i class="compute" style="width:50.000%"',
        '<td data-value="1500.0">1.50</td><td data-value="0.5">50%</td><td data-value="12345">12,345</td>',
        '<td class="text">so<small>small</small></td>',
        '<td data-value="-Infinity">–</td><td data-value="-Infinity"></td>',
        '<td class="text" colspan="4"',
        '<tr class="marked">',
        "<li>second: made up</li>",
    ):
        assert part in text
    assert ("<script>alert" in text, "\x1b" in text, text.count("<script>")) == (False, False, 1)
