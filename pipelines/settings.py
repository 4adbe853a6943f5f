"""Reading nested frozen dataclasses from plain mappings, with errors that say what, where and how to mend it.

The rooms own the dataclasses of their sections; this module knows none of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, cast

T = TypeVar("T")

SAME_SECTION, OTHER_SECTION = 0.7, 0.85
"""How alike (difflib's ratio) a key must be to one of its own section, and to one of another, to be suggested."""


class SettingsError(ValueError):
    """A run file that cannot be used; the text names the key and the mend."""


def read(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls` from `values`; keys that are left out keep their defaults.

    Raises SettingsError for an unknown key, a wrong type, a missing key, or what `cls` itself refuses.
    """
    return _read(cls, values, where, _paths(cls, where))


def _read(cls: type[T], values: Mapping[str, Any], where: str, known: Sequence[str]) -> T:
    """`read` of one section; `known` are the full keys of the whole."""
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls)) if field.init}
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in fields:
            raise SettingsError(f"unknown key {_key(where, key)}{_near(where, key, value, known)}")
    found = {key: _value(value, hints[key], _key(where, key), known) for key, value in values.items()}
    missing = [
        name
        for name, field in fields.items()
        if name not in found and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SettingsError(f"{_key(where, missing[0])} must be set: it has no default")
    try:
        return cls(**found)
    except SettingsError:
        raise
    except (ValueError, TypeError) as error:
        named = not where or str(error).startswith(f"{where}.")
        raise SettingsError(str(error) if named else f"[{where}] {error}") from error


def write(settings: Any) -> dict[str, Any]:
    """The plain mapping that `read` turns into equal settings; fields that are None are left out."""
    return {
        field.name: _plain(value)
        for field in dataclasses.fields(settings)
        if field.init and (value := getattr(settings, field.name)) is not None
    }


def override(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`values` with each `section.key=value` set; a value is read as TOML where that is possible, else as text."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise SettingsError(f"--set takes section.key=value, found {assignment!r}")
        place: dict[str, Any] = result
        for key in keys[:-1]:
            inner = place.get(key, {})
            if not isinstance(inner, Mapping):
                raise SettingsError(f"--set {path}: {key} is a value and has no keys of its own")
            place[key] = dict(inner)
            place = place[key]
        place[keys[-1]] = _literal(text.strip())
    return result


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _value(value: Any, hint: Any, where: str, known: Sequence[str] = ()) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if value is None:
            return None
        return _value(value, inner[0], where, known)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise SettingsError(f"{where} must be a list, found {value!r}")
        item = typing.get_args(hint)[0]
        return tuple(_value(element, item, f"{where}[{index}]") for index, element in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise SettingsError(f"{where} must be a table, found {value!r}")
        item = typing.get_args(hint)[1]
        return {str(key): _value(element, item, f"{where}.{key}") for key, element in value.items()}
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingsError(f"{where} must be a table like [{where}], found {value!r}")
        return _read(cast(type[Any], hint), value, where, known)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [member.value for member in hint]
        if value not in choices:
            raise SettingsError(f"{where} must be one of {', '.join(map(repr, choices))}; found {value!r}")
        return hint(value)
    wanted = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}[hint]
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise SettingsError(f"{where} must be {wanted}, found {value!r}")
    return hint(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return write(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _key(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _paths(cls: type[Any], where: str) -> list[str]:
    """Every full key of `cls`, sections without a dot behind them included."""
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cast(Any, cls)):
        path = _key(where, field.name)
        found.append(path)
        if dataclasses.is_dataclass(hints[field.name]):
            found += _paths(cast(type[Any], hints[field.name]), path)
    return found


def _near(where: str, key: str, value: Any, known: Sequence[str]) -> str:
    """What may have been meant: a full key that is close enough, else what there is in the section."""
    sections = {path.rpartition(".")[0] for path in known}
    if isinstance(value, Mapping) and not where:
        here = [path for path in known if path in sections]
        near = difflib.get_close_matches(key, here, n=1, cutoff=SAME_SECTION)
        return f"; did you mean {near[0]}?" if near else f"; the sections are {', '.join(here)}"
    scores = {}
    for path in known:
        section, _, name = path.rpartition(".")
        closeness = difflib.SequenceMatcher(None, key, name).ratio()
        if path not in sections and closeness >= (SAME_SECTION if section == where else OTHER_SECTION):
            scores[path] = closeness + (section == where)
    if scores:
        best = max(scores.values())
        return f"; did you mean {' or '.join(path for path, score in scores.items() if score == best)}?"
    plain = (path for path in known if path.rpartition(".")[0] == where and path not in sections)
    keys = ", ".join(path.rpartition(".")[2] for path in plain)
    if where or not sections - {""}:
        return f"; the keys {f'of [{where}]' if where else 'here'} are {keys}"
    return f"; at the top stand {keys}, all else in a section"
