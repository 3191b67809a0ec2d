"""Pages on which nothing of a trace or a result is interpreted; three locks keep a hostile name inert.

The template escapes everything, data for scripts is JSON without `<`, and the page's own Content-Security-Policy lets
run only the scripts whose SHA-256 it names and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from counterpoint.errors import printable

if TYPE_CHECKING:
    import jinja2

__all__ = ["clean", "environment", "policy", "script", "script_json", "version"]


def environment(folder: Path) -> jinja2.Environment:
    """Templates of `folder` that escape what they show and refuse names they do not know; filter `clean`."""
    import jinja2

    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["clean"] = clean
    return pages


def policy(scripts: Iterable[str]) -> str:
    """The Content-Security-Policy: these scripts, inline styles, no request at all."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            "style-src 'unsafe-inline'",  # plotly writes style rules; text of a trace never reaches them
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def clean(text: object, limit: int = 600) -> str:
    """One line of text without control characters, cut at `limit`."""
    return printable(str(text), limit)


def script_json(value: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or a line of script."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def script(text: str) -> str:
    """A script as the browser will see it (line ends normalised), so that its hash agrees."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def version() -> str:
    """Of the installed package."""
    try:
        return metadata.version("counterpoint")
    except metadata.PackageNotFoundError:
        return "unknown"
