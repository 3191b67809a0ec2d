"""Write columns and records to bytes and to files, and read them again, as MessagePack and zlib.

Bytes are decoded by the types that the reader names, which cannot name code to run; a column of another type or length
than it says is refused. A digest's file has two parts, a rank's summary and its digest, so that a reader of thousands
of ranks expands only the first.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from counterpoint.errors import BadTrace
from counterpoint.trace.source import DIGEST_MAGIC, Limits, TraceFile, reading

T = TypeVar("T")

_HEAD = DIGEST_MAGIC + b"1\n"
_LENGTH_BYTES = 8  # of the number before a part, which says how long the part is
_LARGEST_FILE_BYTES = 1 << 30  # those of a step with a million GPU operations have some 40 MB


class _Column(msgspec.Struct, array_like=True, frozen=True):
    """Holds one packed column: its shape, and its values as bytes."""

    shape: tuple[int, ...]
    data: bytes


def pack(value: object) -> bytes:
    """Serialize a dataclass or record, whose columns are numpy arrays, to bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_encode)


def unpack(data: bytes, kind: type[T], path: str) -> T:
    """Return the value of type `kind` that `pack` serialized to these bytes.

    Raises:
        BadTrace: the bytes hold no such value; the error names their source `path`.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise BadTrace(f"not a digest of this version: {error}; write it anew", path=path) from None


def file_of_parts(parts: Sequence[bytes]) -> bytes:
    """Return the content of a digest's file: a head, then each part with its length in front, compressed."""
    packed = [zlib.compress(part, 6) for part in parts]
    return _HEAD + b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in packed)


def read_part(file: TraceFile, number: int, limits: Limits) -> bytes:
    """Return part `number` of a digest's file, expanded; other parts are not read.

    Raises:
        BadTrace: the file cannot be read, is of another version, is damaged, or expands to more than `limits` allow.
    """
    with reading(file.label), file.path.open("rb") as stream:
        if stream.read(len(_HEAD)) != _HEAD:
            raise BadTrace("a digest of another version of counterpoint; write it anew from its trace", path=file.label)
        for _ in range(number):
            stream.seek(int.from_bytes(stream.read(_LENGTH_BYTES), "little") & (1 << 62) - 1, 1)
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > _LARGEST_FILE_BYTES:
            raise BadTrace(f"a part of {length} bytes; at most {_LARGEST_FILE_BYTES} are read", path=file.label)
        packed = stream.read(length)
    most, expand = limits.allow(length), zlib.decompressobj()
    try:
        content = expand.decompress(packed, most)
    except zlib.error as error:
        raise BadTrace(f"the digest is damaged: {error}; write it anew", path=file.label) from None
    if expand.eof:
        return content
    what = f"expands to more than {most >> 20} MiB" if expand.unconsumed_tail else "ends too early: truncated"
    raise BadTrace(f"the digest {what}; write it anew", path=file.label)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _Column(value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} in a digest")


def _decode(kind: Any, value: Any) -> Any:
    if get_origin(kind) is not np.ndarray:
        raise NotImplementedError(f"{kind} in a digest")
    dtype = np.dtype(get_args(get_args(kind)[1])[0])
    column = msgspec.convert(value, _Column)
    if len(column.data) != math.prod(column.shape) * dtype.itemsize:
        raise ValueError(f"a column of {len(column.data)} bytes for shape {column.shape} of {dtype}")
    return np.frombuffer(column.data, dtype).reshape(column.shape).copy()
