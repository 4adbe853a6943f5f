"""Chat formats: messages in, token ids out; sampled ids in, an action out.

Invariant: what was sampled is never tokenised again. `prompt` makes the ids before the first turn, `continuation` the
ids between two turns, and the sampled ids stand between them untouched. Control tokens come from the format's frame
alone: no user's, tool's or model's text can spell one.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from policy.client import FinishReason
from policy.tokenizer import GGUFTokenizer, load_gguf_tokenizer, smollm2_file

ASSETS = Path(__file__).parent / "assets"


class ChatFormatError(ValueError):
    """A conversation cannot be rendered, or a model names no chat format."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the policy asked of a tool; `arguments` is None where the call is malformed, and `error` says how."""

    name: str
    arguments: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    """system, user, assistant or tool."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    """The tool that speaks."""


@dataclass(frozen=True, slots=True)
class Action:
    """One policy turn as the environment sees it."""

    text: str
    """The whole turn without its end-of-turn token."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP

    @property
    def finished(self) -> bool:
        """Whether the policy ended the turn itself; a turn that was cut runs no tool."""
        return self.finish_reason is FinishReason.STOP


class ChatFormat(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a policy turn."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids up to where the policy speaks first. `tools` are OpenAI-style JSON schemas. Raises ChatFormatError."""
        ...

    def continuation(self, messages: Sequence[Message], *, stopped: bool = True) -> list[int]:
        """Ids between a sampled turn and the next one. `stopped`: the turn ended with a stop token; without it, the ids
        begin by ending the turn. Raises ChatFormatError."""
        ...

    def parse(self, token_ids: Sequence[int], finish_reason: FinishReason = FinishReason.STOP) -> Action:
        """What one sampled turn says. Never raises: what cannot be understood becomes a `ToolCall` with an error."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; no control token is among them."""
        ...

    def decode(self, token_ids: Iterable[int]) -> str:
        """For people: text with control tokens spelled out."""
        ...


def parse_hermes(text: str) -> tuple[ToolCall, ...]:
    """The calls in a turn: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do."""
    calls = []
    for piece in text.split("<tool_call>")[1:]:
        body, closing, _ = piece.partition("</tool_call>")
        calls.append(
            _parse_call(body) if closing else ToolCall("", None, "malformed tool call: </tool_call> is missing")
        )
    return tuple(calls)


def _parse_call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", None, f"malformed tool call: no JSON ({error})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", None, 'malformed tool call: it must be {"name": "...", "arguments": {...}}')
    if not isinstance(call.get("arguments"), dict):
        return ToolCall(call["name"], None, "malformed tool call: arguments must be a JSON object")
    return ToolCall(call["name"], call["arguments"])


def render_hermes(call: ToolCall) -> str:
    return f"<tool_call>{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}</tool_call>"


@dataclass(frozen=True)
class TemplateChat:
    """A model's own chat template over its own tokenizer; tool calls in the hermes format."""

    tokenizer: GGUFTokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self.tokenizer.control[self.tokenizer.eos_token],)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        shield = _shield(messages)
        return self.tokenizer.encode_frame(self._render(messages, shield, tools, generate=True), shield)

    def continuation(self, messages: Sequence[Message], *, stopped: bool = True) -> list[int]:
        shield = _shield(messages)
        spoken = "the turn that was sampled"
        before = (Message("system", "s"), Message("user", "u"), Message("assistant", spoken))
        head = self._render(before, shield, (), generate=False)
        whole = self._render((*before, *messages), shield, (), generate=True)
        turn = spoken + self.tokenizer.eos_token
        at = head.rfind(turn)
        if at < 0 or not whole.startswith(head):
            raise ChatFormatError(
                "the chat template rewrites earlier turns when messages follow; it cannot continue a sampled turn"
            )
        ids = self.tokenizer.encode_frame(whole[at + len(turn) :], shield)
        return ids if stopped else [*self.stop_token_ids, *ids]

    def parse(self, token_ids: Sequence[int], finish_reason: FinishReason = FinishReason.STOP) -> Action:
        if len(token_ids) and int(token_ids[-1]) in self.stop_token_ids:
            token_ids = token_ids[:-1]
        text = self.decode(token_ids)
        return Action(text, parse_hermes(text), finish_reason)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, token_ids: Iterable[int]) -> str:
        return self.tokenizer.decode(token_ids)

    @functools.cached_property
    def _template(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now(datetime.UTC).strftime(form)
        return environment.from_string(self.tokenizer.chat_template)

    def _render(
        self, messages: Sequence[Message], shield: str, tools: Sequence[Mapping[str, Any]], *, generate: bool
    ) -> str:
        try:
            return str(
                self._template.render(
                    messages=[self._as_template_sees(message, shield) for message in messages],
                    tools=list(tools) or None,
                    add_generation_prompt=generate,
                    bos_token=self.tokenizer.bos_token,
                    eos_token=self.tokenizer.eos_token,
                )
            )
        except TemplateError as error:
            raise ChatFormatError(f"the model's chat template refuses the conversation: {error}") from error

    def _as_template_sees(self, message: Message, shield: str) -> dict[str, Any]:
        content = "\n".join([*([message.content] if message.content else []), *map(render_hermes, message.tool_calls)])
        return {
            "role": self._guard(message.role, shield),
            "content": self._guard(content, shield),
            **({"name": self._guard(message.name, shield)} if message.name else {}),
        }

    def _guard(self, text: str, shield: str) -> str:
        """`text` with a shield inside whatever spells a control token, so that the frame's own stay apart from it."""
        guarded = ""
        while match := self.tokenizer.find_control(text):
            cut = match.start() + 1
            guarded, text = guarded + text[:cut] + shield, text[cut:]
        return guarded + text


def _shield(messages: Sequence[Message]) -> str:
    """A character that no message contains."""
    used = {c for m in messages for c in (*m.role, *m.name, *m.content, *map(str, m.tool_calls))}
    return next(chr(code) for code in range(0xF0000, 0x10FFFF) if chr(code) not in used)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


@dataclass(frozen=True)
class TinyChat:
    """The calculator's own vocabulary, in which every character and every tag is one token.

        <q>63+58</q><calc>63+58</calc><result>121</result><answer>121</answer>

    A turn is a tool call, which `</calc>` ends, or an answer, which `</answer>` ends. What a tool says outside the
    vocabulary reads as `<error>`.
    """

    tokens: tuple[str, ...]
    ids: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", {token: index for index, token in enumerate(self.tokens)})

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.ids["</calc>"], self.ids["</answer>"]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return [token for message in messages for token in self._message(message)]

    def continuation(self, messages: Sequence[Message], *, stopped: bool = True) -> list[int]:
        if not stopped:
            raise ChatFormatError("calculator-tiny: a turn that was cut cannot be continued; only its tags end a turn")
        return [token for message in messages for token in self._message(message)]

    def parse(self, token_ids: Sequence[int], finish_reason: FinishReason = FinishReason.STOP) -> Action:
        ids = [int(token) for token in token_ids]
        text = self.decode(ids)
        if len(ids) >= 2 and ids[0] == self.ids["<calc>"] and ids[-1] == self.ids["</calc>"]:
            return Action(text, (ToolCall("calculator", {"expression": self.decode(ids[1:-1])}),), finish_reason)
        return Action(text, (), finish_reason)

    def encode(self, text: str) -> list[int]:
        unknown = self.ids["<unk>"]
        return [self.ids.get(character, unknown) for character in text]

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(self.tokens[int(token)] for token in token_ids)

    def _message(self, message: Message) -> list[int]:
        body = self.encode(message.content)
        if message.role == "user":
            return [self.ids["<q>"], *body, self.ids["</q>"]]
        if message.role == "tool":
            known = body and self.ids["<unk>"] not in body
            return [self.ids["<result>"], *(body if known else [self.ids["<error>"]]), self.ids["</result>"]]
        raise ChatFormatError(f"calculator-tiny: a message's role must be user or tool, found {message.role!r}")


def load_tiny_chat(vocabulary: Path = ASSETS / "calculator_tiny" / "vocabulary.json") -> TinyChat:
    return TinyChat(tuple(json.loads(vocabulary.read_text())["tokens"]))


_MODEL_FORMATS: dict[str, Callable[[], ChatFormat]] = {
    "smollm2-135m": lambda: TemplateChat(load_gguf_tokenizer(smollm2_file())),
    "calculator-tiny": load_tiny_chat,
}


@functools.lru_cache(maxsize=8)
def load_chat(model: str) -> ChatFormat:
    """The chat format of a model (`ModelSettings.path`): a known name, a `.gguf` file, or a folder that holds one or a
    `vocabulary.json`. Raises ChatFormatError."""
    if model in _MODEL_FORMATS:
        return _MODEL_FORMATS[model]()
    path = Path(model).expanduser()
    if path.is_file():
        return TemplateChat(load_gguf_tokenizer(path))
    if (path / "vocabulary.json").is_file():
        return load_tiny_chat(path / "vocabulary.json")
    if files := sorted(path.glob("*.gguf")):
        return TemplateChat(load_gguf_tokenizer(files[0]))
    raise ChatFormatError(
        f"model.path must be one of {', '.join(_MODEL_FORMATS)}, a .gguf file, or a folder with a .gguf file or a "
        f"vocabulary.json; found {model!r}"
    )
