"""Cut a JSON trace of any layout and size into blocks of whole events that can be decoded.

The array of events is cut at the last `}, {` of each block, and decoding proves the cut: JSON is read from left to
right, so bytes that start with an event and decode as a list of objects also end with one. Where a cut falls into a
nested list or a string, decoding fails, and a slower walk over the tokens finds the right cut. Memory is bounded by the
size of a block, not of the file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from counterpoint.errors import BadTrace

BLOCK_BYTES = 1 << 18  # a block and its decoded events fit into a core's cache
_LARGEST = 64 << 20  # bytes; no trace has a header, a trailer or an event larger than this
_HEADERS = 16  # tries: a "traceEvents" key may lie inside the value of another key
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoders raise on malformed bytes
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]|"', re.DOTALL)
_INDEX = re.compile(r"\$\[(\d+)\]")
_BYTE = re.compile(r"\(byte (\d+)\)")

E = TypeVar("E")


class EventRuns(Generic[E]):
    """Iterates over blocks of whole events as (bytes, typed events); then `header` holds all other keys of the file.

    Args:
        stream: decompressed bytes.
        label: name of the file in errors.
        event: the msgspec type of one event.
        lenient: decoder for lists in which an event is not of that type; raises if it cannot read them either.

    Raises:
        BadTrace: the file is truncated, malformed or no trace, or an event cannot be read; with the byte offset.
    """

    def __init__(
        self,
        stream: io.RawIOBase,
        label: str,
        event: type[E],
        *,
        lenient: Callable[[bytes], list[E]] | None = None,
    ) -> None:
        self._stream, self._label = stream, label
        self._strict = msgspec.json.Decoder(list[event], strict=False).decode  # type: ignore[valid-type]
        self._lenient = lenient
        self._offset = 0  # of the first byte of the buffer in the file
        self._bare = False  # whether the file is the array alone, without an object around it
        self.header: dict[str, Any] = {}

    def bad(self, reason: str, at: int = 0) -> BadTrace:
        """Return the error for damage at byte `at` of the buffer."""
        return BadTrace(reason, path=self._label, offset=self._offset + at)

    def offset_of(self, run: bytes, index: int) -> int:
        """Return the byte offset in the file of event `index` of `run`, which must be the block yielded last."""
        return self._run_offset + _element(run, index)

    def __iter__(self) -> Iterator[tuple[bytes, list[E]]]:
        buffer, eof = self._read_header()
        while True:
            cut = 0 if eof else _last_boundary(buffer)
            events = self._try(buffer[:cut]) if cut else None
            if events is None:
                cut, closed = _walk(buffer)
                if closed is not None:
                    if cut:
                        yield self._run(buffer, cut)
                    if buffer[closed : closed + 1] != b"]" or buffer[cut:closed].strip(b" \t\r\n,"):
                        raise self.bad("malformed JSON after this event", cut)
                    return self._read_trailer(buffer, closed + 1)
                if not cut and eof:
                    raise self.bad("the trace ends inside its events: truncated", len(buffer))
                if not cut and len(buffer) > _LARGEST:
                    raise self.bad("an event longer than 64 MiB: not a trace, or damaged")
                if cut:
                    yield self._run(buffer, cut)
            else:
                self._run_offset = self._offset
                yield buffer[:cut], events
            rest = buffer[cut:]
            block = self._stream.read(max(BLOCK_BYTES, len(rest))) or b""  # doubles: few scans of a huge event
            eof = not block
            rest += block
            buffer = rest.lstrip(b" \t\r\n,")  # the comma after an event may come with the next block
            self._offset += cut + len(rest) - len(buffer)

    def _decode(self, run: bytes) -> list[E]:
        whole = b"[" + run + b"]"
        try:
            return self._strict(whole)
        except msgspec.ValidationError:
            if self._lenient is None:
                raise
        return self._lenient(whole)

    def _try(self, run: bytes) -> list[E] | None:
        try:
            return self._decode(run)
        except _MALFORMED:
            return None  # cut at the wrong place, or damaged: the caller scans all tokens to find out

    def _run(self, buffer: bytes, cut: int) -> tuple[bytes, list[E]]:
        self._run_offset = self._offset
        run = buffer[:cut]
        try:
            return run, self._decode(run)
        except msgspec.ValidationError as error:
            found = _INDEX.search(str(error))
            at = _element(run, int(found.group(1))) if found else 0
            raise self.bad(f"an event of an unexpected form: {error}", at) from None
        except UnicodeDecodeError as error:  # error.start counts from the start of the string
            at = max(run.find(error.object), 0) + error.start
            raise self.bad(f"a byte that is not UTF-8: {run[at]:#04x}", at) from None
        except msgspec.DecodeError as error:
            found = _BYTE.search(str(error))
            at = int(found.group(1)) - 1 if found else 0
            near = run[at : at + 12].decode("utf-8", "replace")
            raise self.bad(f"malformed JSON near {near!r}", at) from None
        except RecursionError:
            raise self.bad("nested too deeply: not a trace") from None

    def _read_header(self) -> tuple[bytes, bool]:
        buffer, eof, searched, tried = b"", False, 0, 0
        while True:
            block = self._stream.read(max(BLOCK_BYTES, len(buffer))) or b""  # doubles, since each round copies it
            eof = not block
            buffer += block
            start = len(buffer) - len(buffer.lstrip(b"\xef\xbb\xbf \t\r\n"))
            if buffer[start : start + 1] == b"[":  # the bare array form of the Chrome trace format
                self._offset, self._bare = start + 1, True
                return buffer[start + 1 :], eof
            for found in _EVENTS_KEY.finditer(buffer, searched):
                head = buffer[: found.start()].lstrip(b"\xef\xbb\xbf")
                if self._absorb(head + b'"traceEvents":[]}'):
                    self._offset = found.end()
                    return buffer[found.end() :], eof
                tried += 1
                if tried > _HEADERS:
                    raise self.bad("traceEvents again and again inside other keys: not a trace", found.start())
            if eof:
                raise self.bad("no traceEvents in this file: not a trace, or truncated", len(buffer))
            if len(buffer) > _LARGEST:
                raise self.bad("no traceEvents in the first 64 MiB: not a trace")
            searched = max(0, len(buffer) - 64)

    def _read_trailer(self, buffer: bytes, start: int) -> None:
        self._offset += start
        rest = buffer[start:]
        while block := self._stream.read(max(BLOCK_BYTES, len(rest))):
            rest += block
            if len(rest) > _LARGEST:
                raise self.bad("more than 64 MiB after the events: not a trace")
        if self._bare:
            if rest.strip():
                raise self.bad("something follows the array of events: not a trace, or damaged")
            return
        if not self._absorb(b'{"traceEvents":[]' + rest.strip()):
            raise self.bad("what follows the events is not the end of a JSON object: truncated or damaged", len(rest))
        if self.header.pop("traceEvents", None):
            raise self.bad("traceEvents twice: two traces in one file, or damaged")

    def _absorb(self, text: bytes) -> bool:
        try:
            found = msgspec.json.decode(text)
        except _MALFORMED:
            return False
        if not isinstance(found, dict):
            return False
        self.header.update(found)
        return True


def _last_boundary(buffer: bytes) -> int:
    """Return the offset after the last `}` that another event seems to follow; 0 if no such `}` is near the end."""
    at = len(buffer)
    for _ in range(64):
        at = buffer.rfind(b"}", 0, at)
        if at < 0:
            return 0
        if _BETWEEN.match(buffer, at):
            return at + 1
    return 0


def _walk(buffer: bytes) -> tuple[int, int | None]:
    """Scan all tokens; return the offset after the last whole event, and the offset of the closing `]` (or None)."""
    depth, last = 0, 0
    for token in _TOKEN.finditer(buffer):
        mark = token.group()
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            if depth == 0:
                return last, token.start()
            depth -= 1
            if depth == 0:
                last = token.end()
        elif mark == b'"':
            break  # a string that does not end here
    return last, None


def _element(run: bytes, index: int) -> int:
    """Return the byte offset of event number `index` in the block `run`."""
    depth = 0
    for token in _TOKEN.finditer(run):
        mark = token.group()
        if mark in (b"{", b"["):
            if depth == 0:
                if index == 0:
                    return token.start()
                index -= 1
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
    return 0
