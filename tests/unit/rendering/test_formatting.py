"""Numbers as they are said."""

import math

import pytest

from counterpoint.rendering import formatting as say


@pytest.mark.parametrize(("us", "said"), [(1234.5, "1.23"), (0.0, "0.00"), (1e9, "1,000,000.00"), (None, "–")])
def test_milliseconds(us: float | None, said: str) -> None:
    assert say.milliseconds(us) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (436_224_000, "416.0 MiB"), (1 << 50, "1024.0 TiB")],
)
def test_size(count: int, said: str) -> None:
    assert say.size(count) == said


@pytest.mark.parametrize("say_it", [say.milliseconds, say.percent, say.factor, say.bandwidth])
@pytest.mark.parametrize("unknown", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash(say_it: object, unknown: float | None) -> None:
    assert callable(say_it)
    assert say_it(unknown) == "–"
