"""Models by name, from models.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.plan.model import Model

__all__ = ["model", "models", "source"]


def model(name: str) -> Model:
    """The model of that name.

    Raises:
        Misconfigured: there is none.
    """
    if name not in models():
        raise Misconfigured(f'model "{name}" is not known: give one of {", ".join(sorted(models()))}, or its widths')
    return models()[name]


@cache
def models() -> dict[str, Model]:
    """All of them."""
    return {
        name: msgspec.convert({key: value for key, value in fields.items() if key != "source"} | {"name": name}, Model)
        for name, fields in _tables().items()
    }


def source(name: str) -> str:
    """Where its widths are from."""
    return str(_tables()[name]["source"])


@cache
def _tables() -> dict[str, dict[str, object]]:
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))
