"""Tool calls as model families write them: text of a turn in, calls out, and back.

Invariant: `parse` never raises and takes time linear in the text, whatever a policy writes. What looks like a call and
is none becomes a `ToolCall` without arguments whose `error` says what is wrong, so that the model can be told.

    hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>          Hermes, Qwen 2.5, Qwen 3
    llama3        {"name": "f", "parameters": {"x": 1}}, also after <|python_tag|>      Llama 3.x
    pythonic      ```tool_code                                                         Gemma 3
                  f(x=1)
                  ```, or the whole turn is [f(x=1), g()]
    gemma4        <|tool_call>call:f{x:1,s:<|"|>text<|"|>}<tool_call|>                 Gemma 4
    qwen3-coder   <tool_call><function=f><parameter=x>                                 Qwen 3 Coder, Qwen 3.5
                  1
                  </parameter></function></tool_call>
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "..."}],      Mistral
                  or [TOOL_CALLS]f[ARGS]{"x": 1}

Several calls follow one another in every format.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""OpenAI-style JSON schemas."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the policy asked of a tool; `arguments` is None where the call is malformed, and `error` says how."""

    name: str
    arguments: Mapping[str, Any] | None
    error: str = ""
    id: str = ""
    """The model's own name for this call, where its format has one (Mistral)."""


@dataclass(frozen=True)
class ToolCallFormat:
    name: str
    parse: Callable[[str, Tools], tuple[ToolCall, ...]]
    """Calls of one turn, without its reasoning. The tools' schemas type values that a format writes as bare text."""
    render: Callable[[Sequence[ToolCall]], str]
    """The calls as the model would write them: for templates that show no calls."""
    usage: str
    """How to call, for templates that show no tools."""
    result: str = "<tool_response>\n{}\n</tool_response>"
    """A tool's answer inside a user turn, for templates without a tool role."""


class _Malformed(ValueError):
    """Says what is wrong with a call; `name` is the tool's where it could be read."""

    def __init__(self, what: str, name: str = "") -> None:
        super().__init__(what)
        self.name = name

    @property
    def call(self) -> ToolCall:
        return ToolCall(self.name, None, f"malformed tool call: {self}")


# --- JSON -------------------------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is no finite number")
    return value


_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_SPACE = re.compile(r"\s*")


def _ahead(pattern: re.Pattern[str], text: str, at: int) -> str:
    """What `pattern` matches at `at`, "" if nothing."""
    found = pattern.match(text, at)
    return found[0] if found else ""


def _skip_space(text: str, at: int) -> int:
    return at + len(_ahead(_SPACE, text, at))


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends. Raises _Malformed."""
    try:
        return _JSON.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else f"{type(error).__name__}: {error}"
        raise _Malformed(f"no JSON ({what[:200]})") from error


_WORDS: Mapping[str, Any] = MappingProxyType(
    {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
)
"""Templates write these constants as Python does or as JSON does."""


def _read_word(word: str) -> Any:
    """A value that takes up the whole word. Raises _Malformed."""
    if word in _WORDS:
        return _WORDS[word]
    value, end = _read_json(word, 0)
    if end != len(word):
        raise _Malformed("more than one value")
    return value


def _as_call(value: Any, key: str) -> ToolCall:
    """The call that a JSON object describes, its arguments under `key`. Raises _Malformed."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _Malformed(f'it must be {{"name": "...", "{key}": {{...}}}}')
    if not isinstance(value.get(key), dict):
        raise _Malformed(f"{key} must be a JSON object", value["name"])
    given = value.get("id")
    return ToolCall(value["name"], value[key], id=given if isinstance(given, str) else "")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- hermes -----------------------------------------------------------------------------------------------------------

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def parse_hermes(text: str, tools: Tools = ()) -> tuple[ToolCall, ...]:
    """The calls in a turn: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do."""
    calls, at = [], 0
    while (found := text.find(_OPEN, at)) >= 0:
        at = start = found + len(_OPEN)
        try:
            value, end = _read_json(text, _skip_space(text, start))
            end = _skip_space(text, end)
            if not text.startswith(_CLOSE, end):
                raise _Malformed(f"{_CLOSE} must follow the JSON object")
            at = end + len(_CLOSE)
            calls.append(_as_call(value, "arguments"))
        except _Malformed as problem:
            calls.append(_or_cut(text, start, problem).call)
    return tuple(calls)


def _or_cut(text: str, start: int, problem: _Malformed) -> _Malformed:
    """The problem of the call that begins at `start`, unless a simpler one explains it: the call was cut."""
    following = text.find(_OPEN, start)
    closing = text.find(_CLOSE, start, following if following >= 0 else len(text))
    return problem if closing >= 0 else _Malformed(f"{_CLOSE} is missing")


def render_hermes(call: ToolCall) -> str:
    return f"{_OPEN}{_dump({'name': call.name, 'arguments': call.arguments})}{_CLOSE}"


# --- llama3 -----------------------------------------------------------------------------------------------------------

_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:name|function|parameters|type"\s*:\s*"function)"')


def _parse_llama3(text: str, tools: Tools) -> tuple[ToolCall, ...]:
    """A turn that begins with a JSON object or holds <|python_tag|>. A JSON object that neither is nor nearly is a call
    is an answer. Llama's own tools are called in Python: `<|python_tag|>brave_search.call(query="...")`."""
    before, tag, rest = text.partition(_PYTHON_TAG)
    if not tag:
        rest = before
    calls: list[ToolCall] = []
    at = _skip_space(rest, 0)
    if not rest.startswith("{", at):
        wanted = _python_calls(rest.strip(), method="call") or [_Malformed(f"no call follows {_PYTHON_TAG}").call]
        return tuple(wanted) if tag else ()
    while rest.startswith("{", at):
        try:
            value, end = _read_json(rest, at)
        except _Malformed as problem:
            if tag or calls or _LOOKS_LIKE_CALL.match(rest, at):
                calls.append(problem.call)
            break
        if not (tag or calls or isinstance(value.get("name"), str)):
            break  # a JSON answer
        try:
            calls.append(_as_call(value, "parameters" if "arguments" not in value else "arguments"))
        except _Malformed as problem:
            calls.append(problem.call)
        at = _skip_space(rest, end)
        for separator in (";", ",", _PYTHON_TAG):
            if rest.startswith(separator, at):
                at = _skip_space(rest, at + len(separator))
                break
    return tuple(calls)


def _render_llama3(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_dump({"name": call.name, "parameters": call.arguments}) for call in calls)


# --- pythonic ---------------------------------------------------------------------------------------------------------

_CODE_OPEN = re.compile(r"```(?:tool_code|tool_call)\b")
_LIST_OF_CALLS = re.compile(r"\[\s*[^\W\d][\w.]*\s*\(")


def _parse_pythonic(text: str, tools: Tools) -> tuple[ToolCall, ...]:
    """Calls in ```tool_code blocks, bare, in `print(...)` or in lists; without a block, a turn that is one list of
    calls. Arguments are literals and given by name."""
    blocks = _CODE_OPEN.split(text)[1:]
    if not blocks:
        bare = text.strip()
        return tuple(_python_calls(bare)) if _LIST_OF_CALLS.match(bare) else ()
    calls: list[ToolCall] = []
    for block in blocks:
        code, closing, _ = block.partition("```")
        if not closing:
            calls.append(_Malformed("the closing ``` is missing").call)
        else:
            calls += _python_calls(code.strip()) or [_Malformed("the ```tool_code block holds no call").call]
    return tuple(calls)


def _python_calls(code: str, method: str = "") -> list[ToolCall]:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        return [_Malformed(f"no Python ({str(what)[:200]})").call]
    calls: list[ToolCall] = []
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        parts = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        for part in parts:
            try:
                calls.append(_python_call(part, method))
            except _Malformed as problem:
                calls.append(problem.call)
    return calls


def _python_call(node: ast.expr | None, method: str) -> ToolCall:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and node.args:
        node = node.args[0]
    if not isinstance(node, ast.Call):
        raise _Malformed("it must be a function call such as f(x=1)")
    name = _dotted(node.func).removesuffix(f".{method}") if method else _dotted(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise _Malformed("arguments must be given by name, as in f(x=1)", name)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        try:
            arguments[str(keyword.arg)] = _plain(ast.literal_eval(keyword.value))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise _Malformed(f"argument {keyword.arg} must be a literal", name) from error
    return ToolCall(name, arguments)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise _Malformed("a function must be called by its name")
    return ".".join((node.id, *reversed(parts)))


def _plain(value: Any) -> Any:
    """A Python literal as JSON has it. Raises ValueError."""
    if value is None or isinstance(value, str | bool | int | float):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("not a finite number")
        return value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(part) for key, part in value.items()}
    raise ValueError("no JSON value")


def _render_pythonic(calls: Sequence[ToolCall]) -> str:
    lines = []
    for call in calls:
        arguments = ", ".join(f"{key}={_python_literal(value)}" for key, value in (call.arguments or {}).items())
        lines.append(f"{call.name}({arguments})")
    return "```tool_code\n{}\n```".format("\n".join(lines))


def _python_literal(value: Any) -> str:
    """Like `repr`, but it escapes no character that JSON would not."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_dump(key)}: {_python_literal(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_python_literal, value)) + "]"
    return _dump(value) if isinstance(value, str) else repr(value)


# --- gemma4 -----------------------------------------------------------------------------------------------------------

_GEMMA_OPEN, _GEMMA_CLOSE, _GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_GEMMA_HEAD = re.compile(r"\s*call:([^{}\s]*)\s*\{")
_GEMMA_KEY = re.compile(r"[^{}\[\],:<>]+:")
_GEMMA_BARE = re.compile(r"[^{}\[\],<>]*")
_DEEPEST = 64


def _parse_gemma4(text: str, tools: Tools) -> tuple[ToolCall, ...]:
    calls, at = [], 0
    while (found := text.find(_GEMMA_OPEN, at)) >= 0:
        at = found + len(_GEMMA_OPEN)
        name = ""
        try:
            head = _GEMMA_HEAD.match(text, at)
            if not head or not head[1]:
                raise _Malformed("call:name{...} must follow " + _GEMMA_OPEN)
            name = head[1]
            at = head.end()
            arguments, at = _gemma_object(text, at, 0)
            if not text.startswith(_GEMMA_CLOSE, _skip_space(text, at)):
                raise _Malformed(f"{_GEMMA_CLOSE} is missing")
            calls.append(ToolCall(name, arguments))
        except _Malformed as problem:
            calls.append(_Malformed(str(problem), name).call)
    return tuple(calls)


def _gemma_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    """Pairs from behind a `{` to behind its `}`."""
    found: dict[str, Any] = {}
    at = _skip_space(text, at)
    while not text.startswith("}", at):
        if found:
            at = _gemma_comma(text, at)
        if text.startswith(_GEMMA_QUOTE, at):
            key, at = _gemma_string(text, at)
            at = _skip_space(text, at)
            if not text.startswith(":", at):
                raise _Malformed(f"a colon must follow the key {key[:40]!r}")
            at += 1
        elif named := _ahead(_GEMMA_KEY, text, at):
            key, at = named[:-1].strip(), at + len(named)
        else:
            raise _Malformed("the arguments must be key:value pairs between { and }")
        found[key], at = _gemma_value(text, at, depth)
        at = _skip_space(text, at)
    return found, at + 1


def _gemma_comma(text: str, at: int) -> int:
    if not text.startswith(",", at):
        raise _Malformed("values must be separated by commas")
    return _skip_space(text, at + 1)


def _gemma_string(text: str, at: int) -> tuple[str, int]:
    start = at + len(_GEMMA_QUOTE)
    end = text.find(_GEMMA_QUOTE, start)
    if end < 0:
        raise _Malformed(f"a string's closing {_GEMMA_QUOTE} is missing")
    return text[start:end], end + len(_GEMMA_QUOTE)


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise _Malformed(f"values must be nested at most {_DEEPEST} deep")
    at = _skip_space(text, at)
    if text.startswith(_GEMMA_QUOTE, at):
        return _gemma_string(text, at)
    if text.startswith("{", at):
        return _gemma_object(text, at + 1, depth + 1)
    if text.startswith("[", at):
        items: list[Any] = []
        at = _skip_space(text, at + 1)
        while not text.startswith("]", at):
            if items:
                at = _gemma_comma(text, at)
            item, at = _gemma_value(text, at, depth + 1)
            items.append(item)
            at = _skip_space(text, at)
        return items, at + 1
    bare = _ahead(_GEMMA_BARE, text, at)
    try:
        return _read_word(bare.strip()), at + len(bare)
    except _Malformed:
        said = f"text must stand between {_GEMMA_QUOTE} and {_GEMMA_QUOTE}, found {bare.strip()[:40]!r}"
        raise _Malformed(said) from None


def _render_gemma4(calls: Sequence[ToolCall]) -> str:
    return "".join(
        f"{_GEMMA_OPEN}call:{call.name}{_gemma_show(dict(call.arguments or {}))}{_GEMMA_CLOSE}" for call in calls
    )


def _gemma_show(value: Any) -> str:
    if isinstance(value, str):
        return f"{_GEMMA_QUOTE}{value}{_GEMMA_QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma_show(part)}" for key, part in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_gemma_show, value)) + "]"
    return json.dumps(value)


# --- qwen3-coder ------------------------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?")
_END_PARAMETER, _END_FUNCTION = "</parameter>", "</function>"


def _parse_qwen3_coder(text: str, tools: Tools) -> tuple[ToolCall, ...]:
    """Values are text; those that a tool's schema wants otherwise are read as JSON, and stay text where they are
    none, so that the tool can say so."""
    if _OPEN not in text:
        wild = "<function=" in text
        return (_Malformed(f"the call must stand between {_OPEN} and {_CLOSE}").call,) if wild else ()
    schemas = dict(map(_parameters_of, tools))
    last = text.rfind(_END_PARAMETER)
    calls, at = [], 0
    while (found := text.find(_OPEN, at)) >= 0:
        at = found + len(_OPEN)
        name = ""
        try:
            head = _FUNCTION.match(text, at)
            if not head or not head[1].strip():
                raise _Malformed(f"<function=name> must follow {_OPEN}")
            name, at = head[1].strip(), head.end()
            arguments: dict[str, Any] = {}
            while parameter := _PARAMETER.match(text, at):
                at = parameter.end()
                if at > last:
                    raise _Malformed(f"{_END_PARAMETER} is missing")
                end = text.find(_END_PARAMETER, at)
                key = parameter[1].strip()
                raw = text[at:end].removesuffix("\n")
                arguments[key] = _typed(raw, schemas.get(name, {}).get(key, {}))
                at = end + len(_END_PARAMETER)
            for closing in (_END_FUNCTION, _CLOSE):
                at = _skip_space(text, at)
                if not text.startswith(closing, at):
                    raise _Malformed(f"{closing} is missing, or something else stands before it")
                at += len(closing)
            calls.append(ToolCall(name, arguments))
        except _Malformed as problem:
            calls.append(_Malformed(str(problem), name).call)
    return tuple(calls)


def _parameters_of(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name of a tool and the schemas of its parameters; schemas come from users and may lack anything."""
    function = tool.get("function", tool)
    function = function if isinstance(function, Mapping) else {}
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return str(function.get("name", "")), properties if isinstance(properties, Mapping) else {}


_KINDS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
        "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": lambda value: isinstance(value, bool),
        "null": lambda value: value is None,
        "array": lambda value: isinstance(value, list),
        "object": lambda value: isinstance(value, dict),
    }
)


def _typed(raw: str, schema: Any) -> Any:
    kinds, listed = _kinds(schema)
    if raw in listed or not (kinds or listed):
        return raw
    try:
        value = _read_word(raw.strip())
    except _Malformed:
        return raw
    return value if value in listed or any(_KINDS[kind](value) for kind in kinds if kind in _KINDS) else raw


def _kinds(schema: Any) -> tuple[list[str], list[Any]]:
    """Types and enumerated values that a schema allows."""
    if not isinstance(schema, Mapping):
        return [], []
    kind = schema.get("type")
    kinds = [k for k in (kind if isinstance(kind, list | tuple) else [kind]) if isinstance(k, str)]
    listed = list(schema["enum"]) if isinstance(schema.get("enum"), list | tuple) else []
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list | tuple) else ():
            more = _kinds(option)
            kinds += more[0]
            listed += more[1]
    return kinds, listed


def _render_qwen3_coder(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"{_OPEN}\n<function={call.name}>\n"
        + "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else _dump(value)}\n{_END_PARAMETER}\n"
            for key, value in (call.arguments or {}).items()
        )
        + f"{_END_FUNCTION}\n{_CLOSE}"
        for call in calls
    )


# --- mistral ----------------------------------------------------------------------------------------------------------

_MISTRAL_OPEN = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*([^\[\]\s]*)\s*)?\[ARGS\]\s*")


def _parse_mistral(text: str, tools: Tools) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for piece in text.split(_MISTRAL_OPEN)[1:]:
        try:
            if head := _MISTRAL_HEAD.match(piece):
                value, _ = _read_json(piece, head.end())
                calls.append(_as_call({"name": head[1], "arguments": value, "id": head[2] or ""}, "arguments"))
                continue
            value, _ = _read_json(piece, _skip_space(piece, 0))
        except _Malformed as problem:
            calls.append(problem.call)
            continue
        for part in value if isinstance(value, list) and value else [value]:
            try:
                calls.append(_as_call(part, "arguments"))
            except _Malformed as problem:
                calls.append(problem.call)
    return tuple(calls)


def _render_mistral(calls: Sequence[ToolCall]) -> str:
    parts = [{"name": c.name, "arguments": c.arguments} | ({"id": c.id} if c.id else {}) for c in calls]
    return _MISTRAL_OPEN + _dump(parts)


# --- which format a model uses ----------------------------------------------------------------------------------------

FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            ToolCallFormat(
                "hermes",
                parse_hermes,
                lambda calls: "\n".join(map(render_hermes, calls)),
                'To call one, write <tool_call>{"name": "NAME", "arguments": {"PARAMETER": VALUE}}</tool_call>.',
            ),
            ToolCallFormat(
                "llama3",
                _parse_llama3,
                _render_llama3,
                'To call one, answer with nothing but {"name": "NAME", "parameters": {"PARAMETER": VALUE}}.',
            ),
            ToolCallFormat(
                "pythonic",
                _parse_pythonic,
                _render_pythonic,
                "To call one, write a block such as\n```tool_code\nNAME(PARAMETER=VALUE)\n```",
                "```tool_output\n{}\n```",
            ),
            ToolCallFormat(
                "gemma4",
                _parse_gemma4,
                _render_gemma4,
                'To call one, write <|tool_call>call:NAME{PARAMETER:VALUE}<tool_call|>, text as <|"|>TEXT<|"|>.',
            ),
            ToolCallFormat(
                "qwen3-coder",
                _parse_qwen3_coder,
                _render_qwen3_coder,
                "To call one, write\n<tool_call>\n<function=NAME>\n<parameter=PARAMETER>\nVALUE\n</parameter>\n"
                "</function>\n</tool_call>",
            ),
            ToolCallFormat(
                "mistral",
                _parse_mistral,
                _render_mistral,
                'To call one, write [TOOL_CALLS][{"name": "NAME", "arguments": {"PARAMETER": VALUE}}].',
            ),
        )
    }
)

_SIGNS = (
    (_GEMMA_OPEN, "gemma4"),
    ("<function=", "qwen3-coder"),
    (_OPEN, "hermes"),
    (_MISTRAL_OPEN, "mistral"),
    (_PYTHON_TAG, "llama3"),
    ("<|start_header_id|>", "llama3"),
    ("<start_of_turn>", "pythonic"),
)
"""What a chat template contains -> its format; the first that is found counts."""


def detect_format(template: str) -> ToolCallFormat:
    """The format of a chat template's family; hermes where the template shows nothing of any."""
    return FORMATS[next((name for sign, name in _SIGNS if sign in template), "hermes")]
