"""Token ids of a model's text, from a GGUF file or from a Hugging Face folder.

Invariant: `encode` never yields a control token. Text that spells one ("<|im_end|>" in a tool's output) becomes
ordinary tokens; only whoever writes the conversation's frame may ask for control tokens, by `encode_frame`.

Control tokens are those that the model marks as special, and its *tags*: added tokens that are not special but that its
chat template or its tool-call format writes (`<tool_call>`, `<think>`). Other added tokens (Gemma's runs of newlines
and HTML tags) are text like any other.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from policy.files import ModelError, ModelFiles


class TokenizerError(ModelError):
    """The tokenizer's description is missing or of a kind that is not known here."""


@dataclass(frozen=True, slots=True)
class Control:
    """One control token."""

    id: int
    special: bool = True
    """False for a tag."""
    lstrip: bool = False
    """Whether it takes the white space before it along, and `rstrip` that behind it, as the model's maker chose."""
    rstrip: bool = False


@dataclass(frozen=True)
class Tokenizer:
    """A text tokenizer, and the control tokens beside it."""

    first: Any
    """The `tokenizers.Tokenizer` of text with which a conversation begins."""
    inner: Any
    """That of text behind a control token: some tokenizers put a space before the very first word."""
    control: Mapping[str, Control]
    """Text of each control token -> the token."""
    vocab_size: int
    """Ids lie below it; models may have more rows than the tokenizer has tokens."""
    named: Mapping[str, str]
    """bos_token, eos_token, unk_token, ... -> its text, those that the model has; chat templates are shown them."""
    stop_ids: tuple[int, ...]
    """Tokens that end a generation as the model's own settings say."""
    chat_templates: Mapping[str, str]
    """Jinja sources by name: "default", and perhaps "tool_use"."""

    def find(self, token_ids: Iterable[int], text: str, start: int = 0) -> tuple[int, str] | None:
        """Where the first of these control tokens is spelled in `text` from `start` on, and its text."""
        spelled = frozenset(self._texts[id] for id in token_ids if id in self._texts)
        found = _spelling(spelled).search(text, start)
        return (found.start(), found[0]) if found else None

    @functools.cached_property
    def _texts(self) -> Mapping[int, str]:
        return {token.id: spelled for spelled, token in self.control.items()}

    @functools.cached_property
    def _frame(self) -> re.Pattern[str]:
        return re.compile(_alternatives(frozenset(self.control)))

    @functools.cached_property
    def _beginnings(self) -> Mapping[bool, re.Pattern[str]]:
        """With tags and without: the first character of each control token, also where they overlap."""
        special = frozenset(spelled for spelled, token in self.control.items() if token.special)
        sets = {True: frozenset(self.control), False: special}
        return {tags: re.compile(f"(?={_alternatives(texts)}).", re.DOTALL) for tags, texts in sets.items()}

    def guard(self, text: str, shield: str, *, tags: bool = True) -> str:
        """`text` with `shield` inside whatever spells a control token, so that `encode_frame` takes it for text.
        Without `tags`, only special tokens are guarded against."""
        return self._beginnings[tags].sub(lambda match: match[0] + shield, text)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them a control token. Lone surrogates, which are no text, read as U+FFFD."""
        return self._plain(text, self.first)

    def encode_frame(self, text: str, shield: str = "") -> list[int]:
        """Ids of `text` in which spelled control tokens are control tokens, except where `shield` stands inside them;
        the shields themselves are removed."""
        ids: list[int] = []
        at = 0
        for match in self._frame.finditer(text):
            token = self.control[match.group()]
            before = text[at : match.start()].replace(shield, "")
            ids += self._plain(before.rstrip() if token.lstrip else before, self.inner if at else self.first)
            ids.append(token.id)
            at = _behind_space(text, match.end()) if token.rstrip else match.end()
        return ids + self._plain(text[at:].replace(shield, ""), self.inner if at else self.first)

    def _plain(self, text: str, backend: Any) -> list[int]:
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if len(text) < _LONG:
            return list(backend.encode(text, add_special_tokens=False).ids) if text else []
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the ids, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return str(self.inner.decode([int(token) for token in token_ids], skip_special_tokens=False))


_LONG = 1 << 14
"""Characters from which on a text is encoded as a batch of one, which lets other Python threads run meanwhile."""
_SPACE = re.compile(r"\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _alternatives(texts: frozenset[str]) -> str:
    """Matches the longest of `texts`. The look at the first character keeps thousands of reserved tokens from being
    tried everywhere."""
    if not texts:
        return "(?!)"
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    heads = "".join(map(re.escape, sorted({text[0] for text in texts})))
    return f"(?=[{heads}])(?:{'|'.join(map(re.escape, longest_first))})"


@functools.lru_cache(maxsize=32)
def _spelling(texts: frozenset[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(texts))


_TAGS = frozenset(
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "[TOOL_CALLS]")
)


def _is_tag(text: str, templates: Iterable[str]) -> bool:
    """Whether an added token that is not special frames conversations; what holds white space never does."""
    return (
        len(text) > 1
        and not re.search(r"\s", text)
        and (text in _TAGS or any(text in template for template in templates))
    )


def _checked(tokenizer: Tokenizer, where: Path) -> Tokenizer:
    """The tokenizer, if plain text cannot make its control tokens. Raises TokenizerError."""
    ids = {token.id for token in tokenizer.control.values()}
    forged = [text for text in tokenizer.control if not ids.isdisjoint(tokenizer.encode(text))]
    if forged:
        raise TokenizerError(f"{where}: the plain text of control tokens is encoded as control tokens: {forged[:5]}")
    return tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model. Raises TokenizerError."""
    if files.gguf is not None:
        return load_gguf_tokenizer(files.gguf)
    if files.folder is not None:
        return load_folder_tokenizer(files.folder)
    raise TokenizerError(f"model {files.name}: there are no files")


# --- Hugging Face folders ---------------------------------------------------------------------------------------------

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@functools.lru_cache(maxsize=4)
def load_folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder: tokenizer.json, with names and chat template from tokenizer_config.json
    or the template's own files, stop tokens from generation_config.json and config.json. Raises TokenizerError."""
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(
            f"{folder}: tokenizer.json is missing; make it from the model's other tokenizer files with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    data = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    templates = _folder_templates(folder, config)
    named = _named_tokens(folder, config)
    added = data.setdefault("added_tokens", [])
    _add_configured(data, config)
    for token in added:
        token["special"] = bool(token["special"] or token["content"] in named.values())
    control = {
        token["content"]: Control(token["id"], token["special"], token["lstrip"], token["rstrip"])
        for token in added
        if token["special"] or _is_tag(token["content"], templates.values())
    }
    for token in added:
        token["special"] = token["content"] in control  # the backend keeps its hands off special tokens in plain text
    first = _backend(data)
    inner_data = _without_first_space(data)
    settings = [_read_json(folder / name) for name in ("generation_config.json", "config.json")]
    rows = [each.get("vocab_size", 0) for config in settings for each in (config, config.get("text_config") or {})]
    stops = [id for config in settings for id in _ids(config.get("eos_token_id"))]
    if eos := control.get(named.get("eos_token", "")):
        stops.append(eos.id)
    tokenizer = Tokenizer(
        first=first,
        inner=first if inner_data is None else _backend(inner_data),
        control=control,
        vocab_size=max(first.get_vocab_size(), *(row for row in rows if isinstance(row, int)), 0),
        named=named,
        stop_ids=tuple(dict.fromkeys(stops)),
        chat_templates=templates,
    )
    return _checked(tokenizer, folder)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is none. Raises TokenizerError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: no JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must hold a JSON object, found a {type(value).__name__}")
    return value


def _backend(data: Mapping[str, Any]) -> Any:
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"tokenizer.json cannot be used: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. A file of its own overrides what tokenizer_config.json says, as in transformers."""
    found: dict[str, str] = {}
    for source in (config.get("chat_template"), _read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(source, str):
            found["default"] = source
        elif isinstance(source, dict):
            found |= source
        elif isinstance(source, list):
            found |= {each["name"]: each["template"] for each in source}
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("chat_templates/*.jinja"))):
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            found[name] = path.read_text(encoding="utf-8")
    return found


def _named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    fallback = _read_json(folder / "special_tokens_map.json")
    named = {}
    for name in _NAMED:
        value = config[name] if name in config else fallback.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _add_configured(data: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Give `data` the added tokens that only tokenizer_config.json lists."""
    known = {token["id"] for token in data["added_tokens"]}
    for text_id, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if int(text_id) not in known:
            flags = {
                flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            data["added_tokens"].append({"id": int(text_id), "content": token["content"], **flags})


def _without_first_space(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same tokenizer for text behind a control token; None where nothing differs."""
    changed = copy.deepcopy(data.get("pre_tokenizer")) or {}
    metaspaces = [
        part
        for part in (changed, *changed.get("pretokenizers", ()))
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first"
    ]
    for part in metaspaces:
        part["prepend_scheme"] = "never"
    return {**data, "pre_tokenizer": changed} if metaspaces else None


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else [id for id in value or () if isinstance(id, int)]


# --- GGUF files -------------------------------------------------------------------------------------------------------

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Token types of the GGUF specification."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen 2 cut text into words."""


def _split(digits: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclass(frozen=True)
class _BytePairs:
    """How a kind of byte-level BPE works around its table of merges."""

    cut: Callable[[], Any]
    """Makes the pre-tokenizer."""
    composed: bool = False
    """Whether text is put into NFC first."""
    whole_words: bool = False
    """Whether a word that is a token is not built by merges."""


_BYTE_PAIRS: Mapping[str, _BytePairs] = {
    "gpt-2": _BytePairs(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": _BytePairs(
        lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "llama-bpe": _BytePairs(lambda: _split(r"\p{N}{1,3}"), whole_words=True),
    "qwen2": _BytePairs(lambda: _split(r"\p{N}"), composed=True),
}
"""`tokenizer.ggml.pre` -> the kind."""


@functools.lru_cache(maxsize=4)
def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer described in a GGUF file: byte-level BPE, or the BPE of SentencePiece. Raises TokenizerError."""
    from gguf import GGUFReader  # slow to import, and the tiny model needs none of it

    fields = GGUFReader(path).fields

    def value(name: str, default: Any = None) -> Any:
        key = f"tokenizer.{name}"
        if key in fields:
            return fields[key].contents()
        if default is None:
            raise TokenizerError(f"{path}: the field {key} is missing; the file describes no usable tokenizer")
        return default

    kind, pre = value("ggml.model"), value("ggml.pre", "gpt-2")
    tokens, types = value("ggml.tokens"), value("ggml.token_type")
    if kind == "gpt2" and pre in _BYTE_PAIRS:
        backend = _byte_pairs(tokens, value("ggml.merges"), _BYTE_PAIRS[pre])
    elif kind == "llama":
        merges = value("ggml.merges", ())
        pairs = list(map(_pair, merges)) or _ranked(tokens, value("ggml.scores"), types)
        backend = _sentence_pieces(tokens, types, pairs, prefix=bool(value("ggml.add_space_prefix", True)))
    else:
        raise TokenizerError(
            f"{path}: tokenizer.ggml.model must be llama, or gpt2 with tokenizer.ggml.pre one of "
            f"{', '.join(sorted(_BYTE_PAIRS))}; found {kind} with {pre}"
        )
    names = {"default": "chat_template", "tool_use": "chat_template.tool_use"}
    templates = {name: source for name, field in names.items() if (source := value(field, ""))}
    control: dict[str, Control] = {}
    for index, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if type_ == _CONTROL or (type_ == _USER_DEFINED and _is_tag(token, templates.values())):
            control[token] = Control(index, special=type_ == _CONTROL)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    text_tokens = [t for t, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED and t not in control]
    backend.add_tokens([AddedToken(token, normalized=False) for token in text_tokens])
    backend.encode_special_tokens = True
    ids = {name: value(f"ggml.{field}_token_id", -1) for name, field in _GGUF_NAMED.items()}
    tokenizer = Tokenizer(
        first=backend,
        inner=backend,
        control=control,
        vocab_size=len(tokens),
        named={name: tokens[id] for name, id in ids.items() if 0 <= id < len(tokens) and name in _NAMED},
        stop_ids=tuple(dict.fromkeys(ids[name] for name in ("eos_token", "eot", "eom") if ids[name] >= 0)),
        chat_templates=templates,
    )
    return _checked(tokenizer, path)


_GGUF_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "eot": "eot",
    "eom": "eom",
}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _byte_pairs(tokens: Sequence[str], merges: Sequence[str], kind: _BytePairs) -> Any:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = list(map(_pair, merges))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=kind.whole_words))
    if kind.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = kind.cut()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(
    tokens: Sequence[str], types: Sequence[int], pairs: Sequence[tuple[str, str]], *, prefix: bool
) -> Any:
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _ranked(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece prefers them: whatever makes the piece of the highest score first."""
    pieces = {token: score for token, score, type_ in zip(tokens, scores, types, strict=True) if type_ == _NORMAL}
    merges = [
        (-score, len(piece[:cut]), piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]
