"""Read `pairs.toml`: the pairs of a step, one table `[[pair]]` each; docs/reference/tune.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from counterpoint.errors import Misconfigured, printable
from counterpoint.read_file import parse_toml, read_text
from counterpoint.records import Record
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.check_pair import check_pair

MAX_BYTES = 1 << 20
_ADVICE = "give tables [[pair]] with operation, compute, bytes_per_rank and ranks (docs/reference/tune.md)"


class _PairsFile(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Represents the content of the file."""

    pair: Annotated[tuple[StepPair, ...], Meta(min_length=1, max_length=10_000)]


def read_pairs(path: str | Path) -> tuple[StepPair, ...]:
    """Return the pairs in a file; raise Misconfigured, with the pair and what is allowed, if one cannot be measured."""
    text = read_text(Path(path), limit=MAX_BYTES, advice=_ADVICE)
    name = printable(str(path))
    content = parse_toml(text, f"{name} holds no pairs", _ADVICE)
    if "schema" in content:
        raise Misconfigured(f"{name} is what tune has chosen; give the pairs that it was made from, or --to FORM")
    try:
        pairs = msgspec.convert(content, _PairsFile).pair
    except msgspec.ValidationError as error:
        raise Misconfigured(f"{name} holds no pairs: {printable(str(error))}; {_ADVICE}") from None
    for number, pair in enumerate(pairs, 1):
        try:
            check_pair(pair)
        except Misconfigured as error:
            raise Misconfigured(f"{name}, pair {number}: {error}") from None
    return pairs
