"""The wire format: safetensors layout for arrays, JSON metadata with a schema version, zstd level 1.

    bytes = MAGIC ("HRC1") + zstd( safetensors( arrays; __metadata__ = {"headrace": JSON of {schema, type, body}} ) )

Invariant: `decode(encode(x), type(x))` equals x bit for bit, and bytes that are not exactly such a message raise a
named CodecError; nothing is ever unpickled.

A message is written in the oldest schema version that can express it, without the fields that came later; where they
are missing they are empty. So old messages stay readable, and old readers read all that does not need the new fields.

    1   the first
    2   kept ids (`Episode`, `Row`)
    3   members that do not train (`Closing`), truncated members (`Verdict`)
"""

from __future__ import annotations

import base64
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import numpy as np
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trajectories.packing import restore, without_arrays
from trajectories.schema import SINCE, Closing, DeadLetter, Episode, Heartbeat, Pack, Row, Task, Verdict, Version

MAGIC = b"HRC1"
SCHEMA_VERSION = 3
METADATA_KEY = "headrace"
MAX_MESSAGE_BYTES = 3_500_000
"""Of an encoded message: under gRPC's 4 MiB default, with room for the envelope."""
MAX_DECODED_BYTES = 256_000_000
"""A bound on what a small malicious message may unfold to."""
MAX_DEPTH = 64
"""Of free JSON such as a task's payload: what is decoded is encoded again on its way, and that recurses."""

Message = Task | Episode | Closing | Pack | Verdict | Heartbeat | DeadLetter
MESSAGE_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (Task, Episode, Closing, Pack, Verdict, Heartbeat, DeadLetter, Row)
}
M = TypeVar("M")


class CodecError(ValueError):
    """These bytes are no message that this version of Headrace can read."""


class Truncated(CodecError):
    """The message ends too early."""


class Oversized(CodecError):
    """The message is larger than a message may be."""


class Foreign(CodecError):
    """The bytes are no Headrace message, or one of another type than was expected."""


class FutureVersion(CodecError):
    """Written by a schema version that this reader does not know."""


class Malformed(CodecError):
    """The frame is right, and what it holds is not."""


def encode(message: Message, *, limit: int | None = MAX_MESSAGE_BYTES) -> bytes:
    """Bytes of one message; raises Oversized beyond `limit` bytes (None: no bound, for storage)."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    schema = schema_of(message)
    body = _pack(without_arrays(message) if isinstance(message, Pack) else message, arrays, schema)
    envelope = {"schema": schema, "type": type(message).__name__, "body": body}
    # One metadata key: safetensors writes several in random order, and equal messages should be equal bytes.
    metadata = {METADATA_KEY: json.dumps(envelope, separators=(",", ":"), ensure_ascii=False)}
    data = MAGIC + zstandard.ZstdCompressor(level=1, write_content_size=True).compress(save(arrays, metadata))
    if limit is not None and len(data) > limit:
        raise Oversized(
            f"a {type(message).__name__} of {len(data)} bytes exceeds the limit of {limit}: "
            "lower group_size, the episode length or closings_per_pack, or sampling.max_kept where draws are truncated"
        )
    return data


def decode(data: bytes, expect: type[M], *, limit: int | None = MAX_MESSAGE_BYTES) -> M:
    """The message in `data`, which must be of type `expect`; raises a CodecError that names the fault."""
    if limit is not None and len(data) > limit:
        raise Oversized(f"a message of {len(data)} bytes exceeds the limit of {limit}")
    if len(data) < len(MAGIC):
        raise Truncated(f"{len(data)} bytes are too few for a message")
    if data[: len(MAGIC)] != MAGIC:
        raise Foreign(f"a message begins with {MAGIC!r}, these bytes with {bytes(data[:8])!r}")
    content = _decompress(data[len(MAGIC) :])
    metadata = _metadata(content)
    try:
        envelope = json.loads(metadata[METADATA_KEY])
        schema, name, body = int(envelope["schema"]), envelope["type"], envelope["body"]
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Malformed(f"the message's metadata lack schema, type or body: {error!r}") from error
    if schema < 1:
        raise Malformed(f"a message's schema version is at least 1, found {schema}")
    if schema > SCHEMA_VERSION:
        raise FutureVersion(
            f"the message has schema version {schema}, this process reads up to {SCHEMA_VERSION}: "
            "update it, or restart both sides from one image"
        )
    if name != expect.__name__:
        raise Foreign(f"expected a {expect.__name__}, found a {name}")
    try:
        arrays = load(content)
        result = _unpack(body, expect, arrays, schema)
        if isinstance(result, Pack):
            result = dataclasses.replace(result, closings=restore(result.rows, result.closings))
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise Malformed(f"the {name} does not have the fields or arrays of its type: {error!r}") from error
    return typing.cast(M, result)


def attributes(message: Message) -> dict[str, str]:
    """Message attributes: run id and type, and bucket and oldest version where they exist."""
    found = {"run_id": message.run_id, "type": type(message).__name__, "schema": str(schema_of(message))}
    if isinstance(message, Pack):
        found["bucket"] = str(message.bucket)
    if isinstance(message, Pack | Episode | Closing | Verdict) and message.oldest_version is not None:
        found["oldest_version"] = str(message.oldest_version)
    if isinstance(message, DeadLetter):
        found["stage"] = message.stage
    return found


def schema_of(message: Any) -> int:
    """The oldest schema version that can express the message."""
    if isinstance(message, tuple):
        return max((schema_of(item) for item in message if dataclasses.is_dataclass(item)), default=1)
    schema, cls = 1, typing.cast(Any, type(message))
    for field in _fields(cls):
        value = getattr(message, field.name)
        if field.since > schema and len(value):
            schema = field.since
        elif isinstance(value, tuple):
            schema = max(schema, schema_of(value))
    return schema


def _decompress(data: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise Truncated(f"the compressed frame is cut short: {error}") from error
    if size < 0:
        raise Malformed("the compressed frame does not state its size")
    if size > MAX_DECODED_BYTES:
        raise Oversized(f"the message unfolds to {size} bytes, more than {MAX_DECODED_BYTES}")
    try:
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        content = decompressor.decompress(data)
    except zstandard.ZstdError as error:
        raise Malformed(f"the compressed frame is damaged: {error}") from error
    if len(content) != size or not decompressor.eof:
        raise Truncated(f"the message should unfold to {size} bytes and gave {len(content)}")
    if decompressor.unused_data:
        raise Malformed(f"{len(decompressor.unused_data)} bytes follow the end of the message")
    return content


def _metadata(content: bytes) -> dict[str, str]:
    try:
        size = int.from_bytes(content[:8], "little")
        if len(content) < 8 + size:
            raise Truncated("the safetensors header is cut short")
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        if not isinstance(metadata, dict):
            raise TypeError(type(metadata).__name__)
    except CodecError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Malformed(f"the safetensors header cannot be read: {error!r}") from error
    return metadata


def _pack(value: Any, arrays: dict[str, np.ndarray[Any, Any]], schema: int) -> Any:
    """JSON for `value`, its arrays moved into `arrays` and named there by number."""
    if isinstance(value, np.ndarray):
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(value)
        return name
    if isinstance(value, Version):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in _fields(type(value)) if field.since <= schema]
        return [_pack(getattr(value, field.name), arrays, schema) for field in fields]
    if isinstance(value, Mapping):
        return {str(key): _pack(item, arrays, schema) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item, arrays, schema) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


class _Field(typing.NamedTuple):
    name: str
    hint: Any
    since: int
    """Schema version."""


@cache
def _fields(cls: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    return tuple(_Field(f.name, hints[f.name], f.metadata.get(SINCE, 1)) for f in dataclasses.fields(cls))


_SCALARS: dict[type[Any], tuple[type[Any], ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
}


def _unpack(value: Any, hint: Any, arrays: Mapping[str, np.ndarray[Any, Any]], schema: int) -> Any:
    """The inverse of `_pack` for a value of type `hint`; raises TypeError or ValueError where the JSON has another."""
    origin = typing.get_origin(hint)
    if origin is np.ndarray:
        dtype = np.dtype(typing.get_args(typing.get_args(hint)[1])[0])
        array = arrays[value]
        if array.dtype != dtype or array.ndim != 1:
            raise TypeError(f"array {value} is {array.dtype}{array.shape}, expected one axis of {dtype}")
        return array
    if origin in (types.UnionType, typing.Union):
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        return None if value is None else _unpack(value, inner, arrays, schema)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, found {type(value).__name__}")
        return tuple(_unpack(item, typing.get_args(hint)[0], arrays, schema) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, found {type(value).__name__}")
        return {_text(key): _unpack(item, typing.get_args(hint)[1], arrays, schema) for key, item in value.items()}
    if hint is Any:
        return free_json(value)
    if hint is Version:
        return Version.parse(value)
    if hint is bytes:
        return base64.b64decode(value, validate=True)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if dataclasses.is_dataclass(hint):
        make = typing.cast(type[Any], hint)
        fields = [field for field in _fields(make) if field.since <= schema]  # type: ignore[arg-type]
        if not isinstance(value, list) or len(value) != len(fields):
            raise TypeError(f"a {make.__name__} has {len(fields)} fields")
        found = (_unpack(item, field.hint, arrays, schema) for item, field in zip(value, fields, strict=True))
        return make(**dict(zip((field.name for field in fields), found, strict=True)))
    if not isinstance(value, _SCALARS[hint]) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"expected {hint.__name__}, found {value!r:.80}")
    return _text(value) if hint is str else hint(value)


def _text(value: str) -> str:
    """The text, if it can be encoded again; JSON's escapes can spell halves of surrogate pairs, UTF-8 cannot."""
    value.encode()
    return value


def free_json(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Free JSON, if it can be encoded again: valid text, nested `depth` deep at the most. Raises ValueError."""
    if depth < 0:
        raise ValueError(f"its JSON is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_text(key): free_json(item, depth - 1) for key, item in value.items()}
    return [free_json(item, depth - 1) for item in value] if isinstance(value, list) else value
