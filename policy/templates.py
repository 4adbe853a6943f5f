"""A model's own chat template: OpenAI-style messages in, text out.

Invariant: a template is a stranger's program. It runs in jinja's sandbox, whatever it raises comes out as
`ChatFormatError`, and what it can show (system text, tools, calls, tool results) is found out by asking it.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatFormatError(ValueError):
    """A conversation cannot be rendered, or a model names no chat format."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model says; for rendering the marks mean nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _PRIVATE.sub(lambda escaped: str(json.loads(f'"{escaped[0]}"')), text) if ensure_ascii else text


_PRIVATE = re.compile(r"\\udb[89a-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")
"""Escaped characters of the private planes: callers mark text with them and must find them again."""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now(datetime.UTC).strftime(form)
    return environment


@dataclass(frozen=True)
class Abilities:
    """What a template shows of what it is given."""

    system: bool
    """A system message. Without it, the system text belongs into the first user turn."""
    tools: bool
    """The tools' schemas. Without it, they belong into the system text."""
    calls: bool
    """An assistant message's `tool_calls`. Without it, they belong into its text."""
    results: bool
    """Messages of role `tool`. Without it, they belong into a user turn."""
    text_arguments: bool = False
    """Whether calls must carry their arguments as JSON text, as OpenAI's API does, instead of as an object."""


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja sources and what they are given beside the conversation."""

    model: str
    """Whose template it is, for errors."""
    sources: Mapping[str, str]
    """By name: "default", and "tool_use" for conversations with tools."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """bos_token and the like, and variables that the template knows, such as enable_thinking."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, generate: bool
    ) -> str:
        """The conversation as text, with the head of the model's next turn if `generate`. Raises ChatFormatError."""
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        try:
            return str(
                self._compiled(name).render(
                    **{"tools": list(tools) or None, "documents": None, **self.constants},
                    messages=list(messages),
                    add_generation_prompt=generate,
                )
            )
        except Exception as error:  # a stranger's program raises what it likes
            what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ChatFormatError(f"the chat template of {self.model} refuses the conversation: {what}") from error

    @functools.cached_property
    def _compiled(self) -> Callable[[str], Any]:
        environment = _environment()

        @functools.cache
        def compiled(name: str) -> Any:
            if name not in self.sources:
                raise TemplateError(f"there is no template {name!r}, only {', '.join(self.sources)}")
            return environment.from_string(self.sources[name])

        return compiled

    @functools.cached_property
    def abilities(self) -> Abilities:
        """Found by rendering small conversations and looking for what was put into them."""
        user = {"role": "user", "content": "hello"}
        system = {"role": "system", "content": _PROBE}
        shows_system = self._shows([system, user])
        schema = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
        tool = {"type": "function", "function": {"name": _PROBE, "description": "f", "parameters": schema}}
        greeted = [{"role": "system", "content": "be kind"}, user] if shows_system else [user]
        as_object, as_text = (
            {"role": "assistant", "content": "", "tool_calls": [openai_call("f", arguments, CALL_ID)]}
            for arguments in ({"x": _PROBE}, json.dumps({"x": _PROBE}))
        )
        shows_calls = self._shows([user, as_object])
        text_arguments = not shows_calls and self._shows([user, as_text])
        turn = as_text if text_arguments else as_object if shows_calls else {"role": "assistant", "content": "hi"}
        called = json.loads(json.dumps(turn).replace(_PROBE, "1"))
        result = {"role": "tool", "content": _PROBE, "name": "f", "tool_call_id": CALL_ID}
        return Abilities(
            system=shows_system,
            tools=self._shows([user], [tool]) or self._shows(greeted, [tool]),
            calls=shows_calls or text_arguments,
            results=self._shows([user, called, result]),
            text_arguments=text_arguments,
        )

    def _shows(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        try:
            return _PROBE in self.render(messages, tools, generate=False)
        except ChatFormatError:
            return False


_PROBE = "xyzzyplugh"

CALL_ID = "000000000"
"""Mistral's templates want nine alphanumeric characters."""


def openai_call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """A tool call in the shape that chat templates read."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
