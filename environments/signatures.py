"""What a typed Python function says of itself: description, JSON schema of its arguments, and how to read them.

Invariant: `coerced` changes only how a value is written (the text "3" where an integer is asked for), never which
value it is; what `mismatch` then finds nothing wrong with, `Signature.read` can turn into the function's arguments.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTIONS = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?|References?)\s*:\s*", re.IGNORECASE
)
_ARGUMENT = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")


@dataclass(frozen=True)
class Signature:
    """How a function is called by someone who speaks JSON."""

    description: str
    """The docstring up to its first section."""
    parameters: Mapping[str, Any]
    """JSON schema: an object."""
    kinds: Mapping[str, Any]
    """Annotation of each parameter in the schema."""

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The Python values of arguments that fit the schema: enum members, dataclasses. Raises what a dataclass does
        that refuses its values, and OverflowError for an integer that no float can hold."""
        kinds = self.kinds
        return {name: _read(value, kinds[name]) if name in kinds else value for name, value in arguments.items()}


def signature_of(function: Callable[..., Any], *, given: tuple[type, ...] = ()) -> Signature:
    """The function's signature without parameters of the types `given`, which the policy does not choose.

    Raises TypeError for a parameter that JSON cannot carry or that has no annotation, and for a docstring that
    describes one that is not there.
    """
    name = getattr(function, "__name__", type(function).__name__)
    kinds = hints_of(function)
    description, told = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = kinds.get(parameter.name)
        if isinstance(kind, type) and kind in given:
            told.pop(parameter.name, None)
            continue
        where = f"tool {name}: parameter {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{where} must be given by name")
        if parameter.name not in kinds:
            example = type(parameter.default) if type(parameter.default) in (int, float, bool) else str
            raise TypeError(
                f"{where} has no annotation: say what it holds, for example `{parameter.name}: {example.__name__}`; "
                f"there are {_ANNOTATIONS}"
            )
        schema = schema_of(kind, where)
        if parameter.name in told:
            schema = {**schema, "description": told.pop(parameter.name)}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None and type(parameter.default) in _SCALARS:
            schema = {**schema, "default": parameter.default}
        properties[parameter.name] = schema
    if told:
        other = next(iter(told))
        near = difflib.get_close_matches(other, properties, n=1)
        raise TypeError(
            f"tool {name}: its docstring describes {other}, which is no parameter"
            + (f"; is it {near[0]}?" if near else "")
        )
    parameters = {"type": "object", "properties": properties, "required": required}
    return Signature(description, parameters, {one: kinds[one] for one in properties})


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of a function, a partial or an object that can be called, without the result's."""
    while isinstance(function, functools.partial):
        function = function.func
    target = function if inspect.isroutine(function) else type(function).__call__
    hints = typing.get_type_hints(target, include_extras=True)
    hints.pop("return", None)
    return hints


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and what a section `Args:` in Google's style says of each parameter."""
    description: list[str] = []
    told: dict[str, str] = {}
    section, current, depth = "", "", 0
    for line in text.splitlines():
        heading = _SECTIONS.fullmatch(line)
        if heading:
            section, current = heading[1].lower(), ""
        elif not section:
            description.append(line)
        elif section in ("args", "arguments", "parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            begins = _ARGUMENT.fullmatch(line.strip())
            if begins and (not current or indent <= depth):
                current, depth = begins["name"], indent
                told[current] = begins["text"].strip()
            elif current:
                told[current] = f"{told[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), told


# --- types and schemas ------------------------------------------------------------------------------------------------


def schema_of(kind: Any, where: str) -> dict[str, Any]:
    """JSON schema of an annotation; raises TypeError that begins with `where` for what JSON cannot carry."""
    return _schema(kind, where, ())


def _schema(kind: Any, where: str, inside: tuple[type, ...]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if origin is typing.Annotated:
        notes = [note for note in args[1:] if isinstance(note, str)]
        return {**_schema(args[0], where, inside), **({"description": notes[0]} if notes else {})}
    if isinstance(kind, type) and kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if origin is Literal:
        return _enumeration(list(args))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enumeration(_names(kind))
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(arg, where, inside) for arg in args]}
    if kind in (list, Sequence) or origin in (list, Sequence):
        return {"type": "array", **({"items": _schema(args[0], where, inside)} if args else {})}
    if kind in (dict, Mapping) or origin in (dict, Mapping):
        return {"type": "object", **({"additionalProperties": _schema(args[1], where, inside)} if args else {})}
    if _is_record(kind) and kind not in inside:
        fields, required = _fields(kind)
        properties = {name: _schema(one, f"{where}.{name}", (*inside, kind)) for name, one in fields.items()}
        return {"type": "object", "properties": properties, "required": required}
    raise TypeError(f"{where} must be annotated {_ANNOTATIONS}, found {kind}")


_ANNOTATIONS = "str, int, float, bool, list, dict, Literal, an Enum, a dataclass, a TypedDict or a union of these"


def _enumeration(values: Sequence[Any]) -> dict[str, Any]:
    kinds = {type(value) for value in values}
    named = _SCALARS.get(next(iter(kinds))) if len(kinds) == 1 else None
    return {**({"type": named} if named else {}), "enum": list(values)}


def _names(kind: type[enum.Enum]) -> list[Any]:
    """What the policy writes for each member: its value, or its name where JSON cannot carry the value."""
    plain = all(isinstance(member.value, str | int) for member in kind)
    return [member.value if plain else member.name for member in kind]


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind))


def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Annotations of a dataclass or TypedDict, and the fields that must be given."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if typing.is_typeddict(kind):
        plain = {
            name: typing.get_args(one)[0] if typing.get_origin(one) in (typing.Required, typing.NotRequired) else one
            for name, one in hints.items()
        }
        return plain, [name for name in plain if name in kind.__required_keys__]
    missing = dataclasses.MISSING
    given = [one for one in dataclasses.fields(kind) if one.init]
    required = [one.name for one in given if one.default is missing and one.default_factory is missing]
    return {one.name: hints[one.name] for one in given}, required


def _read(value: Any, kind: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _read(value, args[0])
    if origin in (typing.Union, types.UnionType):
        fitting = (arg for arg in args if not mismatch(value, schema_of(arg, "")))
        return _read(value, next(fitting, type(value)))
    if kind is float:
        return float(value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return dict(zip(_names(kind), kind, strict=True))[value]
    if isinstance(value, list) and args:
        return [_read(part, args[0]) for part in value]
    if isinstance(value, Mapping) and _is_record(kind):
        fields, _ = _fields(kind)
        return kind(**{name: _read(part, fields[name]) for name, part in value.items()})
    if isinstance(value, Mapping) and len(args) == 2:
        return {name: _read(part, args[1]) for name, part in value.items()}
    return value


# --- values and schemas -----------------------------------------------------------------------------------------------

_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def mismatch(value: Any, schema: Mapping[str, Any], where: str = "arguments") -> str:
    """What is wrong with `value` under a JSON schema, "" if nothing. Knows type, enum, required, properties, items,
    anyOf and additionalProperties (false unless it says otherwise); other keywords are for the policy to read."""
    if options := _options(schema):
        problems = [mismatch(value, option, where) for option in options]
        return "" if "" in problems else problems[0]
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        return f"{where} must be one of {', '.join(map(repr, schema['enum']))}, found {_shown(value)}"
    kind = schema.get("type")
    if kind in _JSON_TYPES:
        number_like_bool = isinstance(value, bool) and kind in ("integer", "number")
        if number_like_bool or not isinstance(value, _JSON_TYPES[kind]):
            return f"{where} must be of type {kind}, found {_shown(value)}"
    if isinstance(value, Mapping):
        return _mismatch_inside(value, schema, where)
    if isinstance(value, list) and "items" in schema:
        items = ((f"{where}[{i}]", part) for i, part in enumerate(value))
        return next((problem for at, part in items if (problem := mismatch(part, schema["items"], at))), "")
    return ""


def _options(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The schemas of which one must fit: those of anyOf, or one for each of several types."""
    kind = schema.get("type")
    return [{**schema, "type": one} for one in kind] if isinstance(kind, list) else schema.get("anyOf", ())


def _mismatch_inside(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> str:
    properties = schema.get("properties", {})
    more = schema.get("additionalProperties", False)
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{where} lacks {', '.join(missing)}"
    unknown = [name for name in value if name not in properties]
    if unknown and "properties" in schema and more is False:
        return f"{where} has unknown {', '.join(unknown)[:200]}; it may have {', '.join(properties) or 'nothing'}"
    rules = {**(dict.fromkeys(unknown, more) if isinstance(more, Mapping) else {}), **properties}
    inner = ((f"{where}.{name}", value[name], rule) for name, rule in rules.items() if name in value)
    return next((problem for at, part, rule in inner if (problem := mismatch(part, rule, at))), "")


def coerced(value: Any, schema: Mapping[str, Any]) -> Any:
    """`value` as the schema writes it, where a model wrote the same value another way: a number, true, false or null as
    text, a whole number with a fraction of 0, an object or a list as JSON text. All else comes back as it was."""
    if options := _options(schema):
        if any(not mismatch(value, option) for option in options):
            return value
        tried = (coerced(value, option) for option in options)
        return next((one for one, option in zip(tried, options, strict=True) if not mismatch(one, option)), value)
    kind = schema.get("type")
    if isinstance(value, str) and kind not in (None, "string"):
        value = _parsed(value, _JSON_TYPES.get(kind, str))
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        properties, more = schema.get("properties", {}), schema.get("additionalProperties")
        other = more if isinstance(more, Mapping) else {}
        return {name: coerced(part, properties.get(name, other)) for name, part in value.items()}
    if isinstance(value, list) and "items" in schema:
        return [coerced(part, schema["items"]) for part in value]
    return value


def _parsed(text: str, kind: type | tuple[type, ...]) -> Any:
    try:
        found = json.loads(text.strip().lower() if kind is bool else text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return text
    fits = isinstance(found, kind) or (kind is int and isinstance(found, float))
    return found if fits and (kind is bool or not isinstance(found, bool)) else text


def _no_json(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
