"""Write the result of a search as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from counterpoint.records.prediction import SearchResult
from counterpoint.rendering.plan_tables import setting

FIGURES = ("step_us", "low_us", "high_us", "mfu", "tokens_per_s", "memory_gib", "fits_probability", "on_front")


def search_csv(searches: Sequence[SearchResult]) -> str:
    """Return CSV with a line for each choice, grouped by number of GPUs: its settings, then its figures."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = next(list(search.choices[0].settings) for search in searches if search.choices)
    writer.writerow(["gpus", *names, *FIGURES])
    for search in searches:
        for choice in search.choices:
            figures = (getattr(choice, name) for name in FIGURES)
            writer.writerow([search.gpus, *(setting(choice.settings[name]) for name in names), *figures])
    return text.getvalue()
