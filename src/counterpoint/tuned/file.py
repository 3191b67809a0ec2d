"""Read and write `counterpoint.toml`, the choices of `counterpoint tune`; docs/reference/tune.md describes the file."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.read_file import parse_toml, read_text
from counterpoint.records.toml import toml_table
from counterpoint.records.tuning import TUNING_SCHEMA, Tuned
from counterpoint.tuned.choices import check_choices

MAX_BYTES = 1 << 22
_TUNED = msgspec.json.Decoder(Tuned)  # made on import: msgspec crashes if two threads do it at once


def read_tuned(path: str | Path) -> Tuned:
    """Return the tuning in a file; if it is not valid, raise Misconfigured with the field and its allowed values."""
    text = read_text(Path(path), limit=MAX_BYTES, advice="give a file that `counterpoint tune` wrote")
    return parse_tuned(text, printable(str(path)))


def parse_tuned(text: str, name: str = "the text") -> Tuned:
    """Return the tuning in the text of a file; error messages call the file `name`.

    Raises:
        Misconfigured: the text is no TOML, or a field is missing, unknown or has a value that is not allowed.
    """
    what, see = f"{name} is no tuning", "see docs/reference/tune.md"
    content = parse_toml(text, what, see)
    if content.get("schema") != TUNING_SCHEMA:
        given = printable(repr(content.get("schema")))
        raise Misconfigured(f"{what}: schema = {given}; this version reads {TUNING_SCHEMA!r}; {see}")
    try:
        found = msgspec.convert(content, Tuned)
        check_choices(found)
    except (msgspec.ValidationError, Misconfigured) as error:
        raise Misconfigured(f"{what}: {printable(str(error), 600)}; {see}") from None
    return found


def tuned_toml(tuning: Tuned) -> str:
    """Return a tuning as TOML text that `parse_tuned` reads back unchanged; defaults and None are left out."""
    fields = _without_none({"schema": TUNING_SCHEMA} | msgspec.to_builtins(tuning))
    made, step, pairs = fields.pop("made"), fields.pop("step", None), fields.pop("pair", [])
    tables = [toml_table(None, fields), toml_table("[made]", made)]
    tables += [toml_table("[step]", step)] if step else []
    tables += [toml_table("[[pair]]", pair) for pair in pairs]
    return "\n\n".join(tables) + "\n"


def tuned_digest(tuning: Tuned) -> str:
    """Return a hash (16 hexadecimal digits) of a tuning's choices and of the machine for which they were made."""
    return blake2b(msgspec.json.encode(tuning, order="deterministic"), digest_size=8).hexdigest()


def _without_none(value: Any) -> Any:
    """Return nested mappings and lists without entries that are None, since TOML has no value for None."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value
