"""Chat formats: messages in, token ids out; sampled ids in, an action out.

Invariant: what was sampled is never tokenised again. `prompt` makes the ids before the first turn, `continuation` the
ids between two turns, and the sampled ids stand between them untouched. Control tokens come from the format's frame
alone: no user's or tool's text can spell one, and no author's or model's text a special one.

Conversations are rendered by the model's own template (`policy.templates`). The package `renderers` 0.1.12 writes
templates anew in Python; over the same conversations it gave the templates' ids for Qwen 3 and Llama 3, other ones for
Gemma 4, and for Qwen 2.5, Gemma 2 and Mistral it falls back on the template and continues no turn. The template in the
model's folder is what the model's maker says it is, for every family, and gave the same ids as transformers in all.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from policy.client import FinishReason
from policy.files import find_model
from policy.templates import CALL_ID, ChatFormatError, ChatTemplate, openai_call
from policy.tokenizer import Tokenizer, load_tokenizer
from policy.tool_calls import FORMATS, ToolCall, ToolCallFormat, Tools, detect_format, parse_hermes, render_hermes

__all__ = [
    "ASSETS",
    "Action",
    "ChatFormat",
    "ChatFormatError",
    "Message",
    "TemplateChat",
    "TinyChat",
    "ToolCall",
    "load_chat",
    "load_tiny_chat",
    "parse_hermes",
    "render_hermes",
]

ASSETS = Path(__file__).parent / "assets"


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
    """The whole turn, reasoning included, without its end-of-turn token."""
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
        """Tokens that end a policy turn; the first is the one that this format writes."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids up to where the policy speaks first. `tools` are OpenAI-style JSON schemas. Raises ChatFormatError."""
        ...

    def continuation(
        self, messages: Sequence[Message], *, stopped: bool = True, sampled: Sequence[int] = ()
    ) -> list[int]:
        """Ids between a sampled turn and the next one. `stopped`: the turn ended with a stop token; without it, the ids
        begin by ending the turn. `sampled`: the turn's ids, which some formats want to know to answer its calls, and
        which say better than `stopped` how it ended. Raises ChatFormatError."""
        ...

    def parse(
        self, token_ids: Sequence[int], finish_reason: FinishReason = FinishReason.STOP, tools: Tools = ()
    ) -> Action:
        """What one sampled turn says; the tools' schemas type values that are written as bare text. Never raises: what
        cannot be understood becomes a `ToolCall` with an error."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; no control token is among them."""
        ...

    def decode(self, token_ids: Iterable[int]) -> str:
        """For people: text with control tokens spelled out."""
        ...


_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|tool_response>")
"""Special tokens that end a turn in every family that has them, even where a folder's settings forget them. Gemma 4
hands over to a tool with the last one."""

_REASONING = (("<think>", "</think>"), ("<|channel>", "<channel|>"))
"""Brackets around what a model says to itself. What looks like a call there is none."""


@dataclass(frozen=True)
class TemplateChat:
    """A model's own chat template over its own tokenizer.

    What the template cannot show is told another way: without a place for the system text, it opens the first user
    turn; tools' schemas join the system text; calls are written out in the turn's text; tool results become a user
    turn, several one after another. `abilities` of the template says which of these are needed.

    Special tokens in messages become ordinary tokens. Tags such as `<tool_call>` do in what users, tools and arguments
    say, but not in system and assistant messages: those are the environment's own words, worked examples included.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    calls: ToolCallFormat

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @functools.cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        control = self.tokenizer.control
        known = [control[text].id for text in _TURN_ENDS if text in control and control[text].special]
        return tuple(dict.fromkeys((self._end, *self.tokenizer.stop_ids, *known)))

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        shield = next(_unused(messages, tools))
        return self.tokenizer.encode_frame(self._render(messages, tools, shield), shield)

    def continuation(
        self, messages: Sequence[Message], *, stopped: bool = True, sampled: Sequence[int] = ()
    ) -> list[int]:
        shield, *marks = itertools.islice(_unused(messages), 3)
        calls = self._answered(messages, sampled)
        try:
            text, at = self._behind_turn(calls, messages, shield, *marks)
        except ChatFormatError:
            if len(calls) < 2:
                raise
            text, at = self._behind_turn(calls[:1], messages, shield, *marks)  # Llama 3 allows one call a turn
        found = self.tokenizer.find(self.stop_token_ids, text, at)
        if found is None:
            raise self._rewrites("writes no end-of-turn token behind them")
        ids = self.tokenizer.encode_frame(text[found[0] :], shield)
        if not len(sampled):
            return ids[1:] if stopped else ids
        # Gemma 4 ends a turn with calls by a token that opens the results: another end does not do
        ended = sampled[-1] in self.stop_token_ids and (ids[0] == self._end or sampled[-1] == ids[0])
        return ids[1:] if ended else ids

    def parse(
        self, token_ids: Sequence[int], finish_reason: FinishReason = FinishReason.STOP, tools: Tools = ()
    ) -> Action:
        if len(token_ids) and int(token_ids[-1]) in self.stop_token_ids:
            token_ids = token_ids[:-1]
        text = self.decode(token_ids)
        return Action(text, self.calls.parse(self._aloud(text), tools), finish_reason)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, token_ids: Iterable[int]) -> str:
        return self.tokenizer.decode(token_ids)

    @functools.cached_property
    def _end(self) -> int:
        """The token with which the template ends an assistant turn."""
        turn = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "\U000f0000"})
        _, spoken, behind = self.template.render(turn, generate=False).rpartition("\U000f0000")
        special = [token.id for token in self.tokenizer.control.values() if token.special]
        found = self.tokenizer.find(special, behind) if spoken else None
        if found is None:
            raise ChatFormatError(
                f"the chat template of {self.template.model} must end an assistant turn with a special token of its "
                f"tokenizer, found {behind[:80]!r}"
            )
        return self.tokenizer.control[found[1]].id

    @functools.cached_property
    def _opened(self) -> str:
        """The bracket of reasoning that the head of a turn leaves open, "" if none."""
        head = self.template.render(({"role": "user", "content": "hello"},), generate=True)
        return next((begin for begin, end in _REASONING if head.rfind(begin) > head.rfind(end)), "")

    def _aloud(self, text: str) -> str:
        """A turn without the reasoning that it begins with."""
        text = self._opened + text
        at = 0
        for begin, end in _REASONING:
            while text[at : at + len(begin) + 8].lstrip().startswith(begin):
                closing = text.find(end, at)
                at = closing + len(end) if closing >= 0 else len(text)
        return text[at:]

    def _answered(self, messages: Sequence[Message], sampled: Sequence[int]) -> list[ToolCall]:
        """The calls of the sampled turn that the messages begin by answering, without their arguments."""
        results = list(itertools.takewhile(lambda message: message.role == "tool", messages))
        if not results or not (self.template.abilities.calls and self.template.abilities.results):
            return []
        spoken = self.parse(sampled).tool_calls
        calls = itertools.zip_longest(results, spoken[: len(results)], fillvalue=ToolCall("", None))
        return [ToolCall(result.name or call.name or "tool", {}, id=call.id) for result, call in calls]

    def _behind_turn(
        self, calls: Sequence[ToolCall], messages: Sequence[Message], shield: str, spoken: str, asked: str
    ) -> tuple[str, int]:
        """A conversation of a question, a turn that holds the mark `spoken`, and `messages`; and where the mark ends
        in it. What follows the turn does not depend on what was spoken, so it serves for what was really sampled."""
        marked = tuple(ToolCall(call.name, {"x": spoken}, id=call.id) for call in calls)
        turn = Message("assistant", "" if marked else spoken, marked)
        text = self._render((Message("user", asked), turn, *messages), (), shield)
        at = text.rfind(spoken) + len(spoken)
        if text.count(spoken) != max(1, len(calls)):
            raise self._rewrites("drops or repeats them")
        if text.find(asked, at) >= 0:
            raise self._rewrites("repeats what came before them")
        return text, at

    def _rewrites(self, how: str) -> ChatFormatError:
        return ChatFormatError(
            f"the chat template of {self.template.model} rewrites earlier turns when messages follow (it {how}); "
            "a sampled turn cannot be continued"
        )

    def _render(self, messages: Sequence[Message], tools: Tools, shield: str) -> str:
        shown = self._as_template_sees(messages, tools, shield)
        listed = _strings(tools, lambda text: self.tokenizer.guard(text, shield, tags=False))
        return self.template.render(shown, listed if self.template.abilities.tools else (), generate=True)

    def _as_template_sees(self, messages: Sequence[Message], tools: Tools, shield: str) -> list[dict[str, Any]]:
        able = self.template.abilities
        shown: list[dict[str, Any]] = []
        if tools and not able.tools:
            messages = _with_tools(messages, tools, self.calls)
        unanswered: list[ToolCall] = []
        calls = 0
        joins = False
        for message in messages:
            own = message.role in ("system", "assistant")
            content = self.tokenizer.guard(message.content, shield, tags=not own)
            if message.role == "tool" and not able.results:
                role, content = "user", self.calls.result.format(content)
            else:
                role = self.tokenizer.guard(message.role, shield)
            if joins and role == "user":
                shown[-1]["content"] += "\n" + content
                joins = message.role == "tool"
                continue
            joins = message.role == "tool" and role == "user"
            shown.append({"role": role, "content": content})
            name = self.tokenizer.guard(message.name, shield)
            if message.role == role == "tool":
                call = unanswered.pop(0) if unanswered else ToolCall(name, {}, id=CALL_ID)
                name = name or call.name
                shown[-1]["tool_call_id"] = call.id
            if name:
                shown[-1]["name"] = name
            if message.tool_calls:
                guarded = [self._guarded(call, shield, calls + i) for i, call in enumerate(message.tool_calls)]
                calls += len(guarded)
                if able.calls:
                    shown[-1]["tool_calls"] = [
                        openai_call(c.name, _json(c.arguments) if able.text_arguments else c.arguments, c.id)
                        for c in guarded
                    ]
                    unanswered = guarded
                else:
                    shown[-1]["content"] = "\n".join(filter(None, (content, self.calls.render(guarded))))
        if shown and shown[0]["role"] == "system" and not able.system:
            text = shown.pop(0)["content"]
            if shown and shown[0]["role"] == "user":
                shown[0]["content"] = f"{text}\n\n{shown[0]['content']}"
            else:
                shown.insert(0, {"role": "user", "content": text})
        return shown

    def _guarded(self, call: ToolCall, shield: str, index: int) -> ToolCall:
        def guard(text: str) -> str:
            return self.tokenizer.guard(text, shield)

        return ToolCall(
            guard(call.name), _strings(dict(call.arguments or {}), guard), id=guard(call.id or f"{index:09d}")
        )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_tools(messages: Sequence[Message], tools: Tools, calls: ToolCallFormat) -> list[Message]:
    """The conversation with the tools described in its system text."""
    opens = bool(messages) and messages[0].role == "system"
    system = messages[0].content if opens else ""
    schemas = (_json(tool.get("function", tool)) for tool in tools)
    described = "\n".join(("You may call these functions:", *schemas, calls.usage))
    return [Message("system", "\n\n".join(filter(None, (system, described)))), *messages[opens:]]


def _strings(value: Any, change: Any) -> Any:
    """A JSON value with `change` made to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_strings(key, change): _strings(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strings(part, change) for part in value]
    return value


def _unused(messages: Sequence[Message], tools: Tools = ()) -> Iterator[str]:
    """Characters that no message and no tool contains."""
    used = {c for m in messages for c in (*m.role, *m.name, *m.content, *map(str, m.tool_calls))} | set(str(tools))
    return (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in used)


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

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        return [token for message in messages for token in self._message(message)]

    def continuation(
        self, messages: Sequence[Message], *, stopped: bool = True, sampled: Sequence[int] = ()
    ) -> list[int]:
        if not stopped:
            raise ChatFormatError("calculator-tiny: a turn that was cut cannot be continued; only its tags end a turn")
        return [token for message in messages for token in self._message(message)]

    def parse(
        self, token_ids: Sequence[int], finish_reason: FinishReason = FinishReason.STOP, tools: Tools = ()
    ) -> Action:
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


def load_chat(model: str, *, variables: Mapping[str, Any] | None = None, tool_calls: str = "") -> ChatFormat:
    """The chat format of a model (`ModelSettings.path`): a known name, a GGUF file, a Hugging Face folder, or a folder
    that holds a GGUF file or a `vocabulary.json`.

    `variables` go to the chat template, such as {"enable_thinking": False} for Qwen 3. `tool_calls` names the format of
    tool calls (`policy.tool_calls.FORMATS`) where the template does not give it away. Raises ModelError and
    ChatFormatError."""
    return _load_chat(model, json.dumps(dict(variables or {}), sort_keys=True), tool_calls)


@functools.lru_cache(maxsize=8)
def _load_chat(model: str, variables: str, tool_calls: str) -> ChatFormat:
    files = find_model(model)
    if files.folder is not None and (files.folder / "vocabulary.json").is_file():
        return load_tiny_chat(files.folder / "vocabulary.json")
    tokenizer = load_tokenizer(files)
    if not tokenizer.chat_templates:
        raise ChatFormatError(
            f"model {files.name} has no chat template; in a folder it may stand in chat_template.jinja"
        )
    if tool_calls and tool_calls not in FORMATS:
        raise ChatFormatError(f"the tool-call format must be one of {', '.join(FORMATS)}, found {tool_calls!r}")
    named = FORMATS[tool_calls] if tool_calls else detect_format("\n".join(tokenizer.chat_templates.values()))
    template = ChatTemplate(files.name, tokenizer.chat_templates, {**tokenizer.named, **json.loads(variables)})
    return _checked(TemplateChat(tokenizer, template, named))


def _checked(chat: TemplateChat) -> TemplateChat:
    """The format, if it can go on after a turn: at start it is cheaper to learn than in the middle of an episode."""
    for role in ("user", "tool"):
        if "xyzzy" not in chat.decode(chat.continuation([Message(role, "xyzzy")])):
            raise chat._rewrites("ends them in another place, or shows nothing of what follows")
    return chat
