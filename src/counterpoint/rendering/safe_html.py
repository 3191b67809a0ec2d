"""Write pages that interpret no text of a trace or result; three measures keep a hostile name from running as code.

The template escapes everything, data for scripts is JSON without `<`, and the page's own Content-Security-Policy lets
run only the scripts whose SHA-256 it names and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from counterpoint.errors import printable
from counterpoint.rendering.files import replacing
from counterpoint.rendering.table import Table

if TYPE_CHECKING:
    import jinja2


PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Holds the content of a page from top to bottom."""

    title: str  # of the window
    kind: str  # such as measurement
    scope: str  # machine or job, in a line
    headline: str
    figures: Sequence[tuple[str, str, str]] = ()  # name, number, unit
    lines: Sequence[str] = ()  # below the figures
    tables: Sequence[Table]


def write_page(
    path: Path, page: Page, *, name: str = "page", data: object = None, plot: bool | None = None, **shown: Any
) -> None:
    """Fill in the template `page/NAME.html`; `path` appears complete or not at all.

    Args:
        path: the page, of 0.1 MB and what `data` takes.
        page: what the template shows.
        name: of the template and, if it is not `page`, of its own script.
        data: for the script, in the element `data`; None: the figures of the page's tables.
        plot: whether there is something to draw, which needs uPlot; None: where there is data.
        shown: what else the template shows, by name.

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    from markupsafe import Markup

    if data is None:
        data = {f"part-{place}-plot": it.figure for place, it in enumerate(page.tables, 1) if it.figure is not None}
    own = ("chart", "tables", "figures" if name == "page" else name)
    scripts, styles = ["".join(_own_text(f"{each}.js") for each in own)], [_own_text("page.css")]
    if data if plot is None else plot:
        licence = f"/*! uPlot\n\n{_own_text('vendor/uPlot.LICENSE')}*/\n"  # it has to go with every copy
        scripts.insert(0, licence + _own_text("vendor/uPlot.iife.min.js"))
        styles.insert(0, _own_text("vendor/uPlot.min.css"))
    scripts = [script(text) for text in scripts]
    written = (
        _environment()
        .get_template(f"{name}.html")
        .render(
            page=page,
            policy=policy(scripts),
            version=_version(),
            css=Markup("\n".join(styles)),
            data=Markup(script_json(data)),
            scripts=[Markup(text) for text in scripts],
            **shown,
        )
    )
    with replacing(path) as file:
        file.write(written.encode("utf-8", "replace"))  # a lone surrogate in a name must not stop the page


def _own_text(name: str) -> str:
    """Return the text of a file in `page/`."""
    return (PAGE / name).read_text("utf-8")


def _environment() -> jinja2.Environment:
    """Return a Jinja environment that escapes its output, refuses undefined names and has the filter `clean`."""
    import jinja2

    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["clean"] = clean
    return pages


def policy(scripts: Iterable[str]) -> str:
    """Return a Content-Security-Policy that allows these scripts and inline styles, but no request."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(f"'sha256-{each}'" for each in hashes),
            "style-src 'unsafe-inline'",  # lengths of bars are style attributes; text of a trace never reaches them
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def clean(text: object, limit: int = 600) -> str:
    """Return one line of text without control characters, cut at `limit`."""
    return printable(str(text), limit)


def script_json(value: object) -> str:
    """Return JSON that is safe inside a script element: nothing in it can end the element or a line of script."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def script(text: str) -> str:
    """Return a script as the browser will see it (line ends normalised), so that its hash matches."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _version() -> str:
    """Return the version of the installed package."""
    try:
        return metadata.version("counterpoint")
    except metadata.PackageNotFoundError:
        return "unknown"
