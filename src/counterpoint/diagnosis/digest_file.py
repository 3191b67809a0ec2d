"""Turn a rank's digest into bytes and back, so that ranks of several hosts can be diagnosed in one place.

The bytes are MessagePack and are decoded by the digest's own types. They cannot name code to run, and a column of
another type or length than the digest says is refused.
"""

from __future__ import annotations

import math
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from counterpoint.diagnosis.digest import RankDigest
from counterpoint.errors import BadTrace


class _Column(msgspec.Struct, array_like=True, frozen=True):
    """Holds one column of a digest: its shape, and its values as bytes."""

    shape: tuple[int, ...]
    data: bytes


def pack_digest(digest: RankDigest) -> bytes:
    """Return a digest as bytes."""
    return msgspec.msgpack.encode(digest, enc_hook=_encode)


def unpack_digest(data: bytes, path: str) -> RankDigest:
    """Return the digest in bytes that `pack_digest` made.

    Raises:
        BadTrace: the bytes are anything else; names `path`, from where they came.
    """
    try:
        return msgspec.msgpack.decode(data, type=RankDigest, dec_hook=_decode)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise BadTrace(f"not a digest of this version: {error}", path=path) from None


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
