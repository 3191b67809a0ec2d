"""A trace that is cut anywhere, and one that expands without end, is a BadTrace and never another exception."""

import gzip
from pathlib import Path

import pytest

from counterpoint.errors import BadTrace
from counterpoint.trace.source import Limits
from tests.support import kineto_trace as kt
from tests.support.kineto_trace import SMALL, bomb, read


@pytest.mark.parametrize("events_first", [False, True], ids=["header first", "events first"])
@pytest.mark.parametrize("layout", kt.LAYOUTS)
def test_truncated_anywhere(layout: str, events_first: bool, tmp_path: Path) -> None:
    """A trace cut after any byte before its closing bracket is refused."""
    whole = kt.text(SMALL, layout=layout, events_first=events_first).rstrip()
    accepted = []
    for end in range(len(whole)):
        try:
            read(kt.write_bytes(tmp_path / "t.json", whole[:end]))
        except BadTrace as error:
            assert error.path  # noqa: PT017
        else:
            accepted.append(end)
    assert accepted == []


def test_truncated_gzip_anywhere(tmp_path: Path) -> None:
    """So is a compressed trace, even where only its checksum is missing."""
    whole = gzip.compress(kt.text(SMALL), mtime=0)
    for end in range(len(whole)):
        with pytest.raises(BadTrace):
            read(kt.write_bytes(tmp_path / "t.json", whole[:end]))


BOMBS = {
    "spaces among the events": (b'{"traceEvents": [', b" " * (1 << 20), b"]}"),
    "zeros among the events": (b'{"traceEvents": [', bytes(1 << 20), b"]}"),
    "spaces in the header": (b'{"schemaVersion": ', b" " * (1 << 20), b'1, "traceEvents": []}'),
    "a name without end": (b'{"traceEvents": [{"ph": "X", "name": "', b"a" * (1 << 20), b'"}]}'),
    "spaces after the events": (b'{"traceEvents": [{"ph": "M"}]', b" " * (1 << 20), b"}"),
    "valid events": (b'{"traceEvents": [{"ph": "M"}', b', {"ph": "i"}' * (1 << 16), b"]}"),
}


@pytest.mark.parametrize("parts", BOMBS.values(), ids=BOMBS.keys())
def test_bombs(parts: tuple[bytes, bytes, bytes], tmp_path: Path) -> None:
    """A small file that expands beyond what is allowed is given up, whatever it expands to."""
    path = bomb(tmp_path / "t.json.gz", parts, 100)
    with pytest.raises(BadTrace) as caught:
        read(path, Limits(trace_bytes=64 << 20))
    assert caught.value.path == str(path)
