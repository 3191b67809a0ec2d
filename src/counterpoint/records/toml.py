"""Write values as TOML; `tomllib` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec


def toml_value(value: object) -> str:
    """Return a value as TOML text; strings are written as in JSON, which TOML reads too."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml_key(key)} = {toml_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def toml_table(header: str | None, fields: Mapping[str, object]) -> str:
    """Return a TOML table: its header (`[made]`, `[[pair]]`; None: the top of a file) and a line for each field."""
    lines = [f"{toml_key(key)} = {toml_value(value)}" for key, value in fields.items()]
    return "\n".join([header, *lines] if header else lines)


def toml_key(key: str) -> str:
    """Return a key as TOML text, in quotes where TOML requires them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)
