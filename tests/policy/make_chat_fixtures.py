"""Makes the fixtures of the chat tests: token ids as Hugging Face transformers makes them.

Runs apart from the project, once:

    python3 -m venv reference && reference/bin/pip install torch==2.13.0 transformers==5.24.0 gguf
    reference/bin/python -m tests.policy.make_chat_fixtures families
    reference/bin/python -m tests.policy.make_chat_fixtures PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

`families` writes fixtures/chat/: tokenizer.json of two tiny tokenizers (byte-level BPE as in Qwen and Llama 3, BPE of
SentencePiece as in Mistral and Gemma), and for each family the ids of a shared set of conversations, as
`apply_chat_template` makes them from a folder with that family's special tokens and chat template. The tests build the
same folders with `build_folder`. Templates in `published/` are the MIT collection `chat_templates`; those in `written/`
were written for these tests and follow the frames of the families' own.

The GGUF file makes fixtures/smollm2_chat.json. transformers drops `tokenizer.ggml.pre` when it reads a GGUF file, so
the pre-tokenizer that SmolLM2's own tokenizer.json names (single digits, then byte level) is put back; `texts` are
marked where that made a difference.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHAT = Path(__file__).parent / "fixtures" / "chat"


@dataclass(frozen=True)
class Family:
    template: str
    base: str
    special: tuple[str, ...]
    tags: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    eos: str = ""
    stops: tuple[str, ...] = ()
    """What generation_config.json lists."""
    tools: bool = True
    """Whether the template shows tools, calls and results."""
    parallel: bool = True


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
_GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
_GEMMA4 = (*_GEMMA[:3], "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>")
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_BLANKS = ("\n\n", "\n\n\n", "  ", "   ", "<b>", "</b>")
"""Gemma's runs of white space and HTML tags, which are text."""

FAMILIES = {
    "chatml": Family("published/chatml", "bytes", _CHATML, bos="<|endoftext|>", eos="<|im_end|>", tools=False),
    "qwen2.5": Family(
        "published/qwen2.5-instruct", "bytes", _CHATML, _TAGS, eos="<|im_end|>", stops=("<|im_end|>", "<|endoftext|>")
    ),
    "qwen3": Family("written/qwen3", "bytes", _CHATML, _TAGS, eos="<|im_end|>", stops=("<|im_end|>", "<|endoftext|>")),
    "qwen3-coder": Family("written/qwen3-coder", "bytes", _CHATML, _TAGS, eos="<|im_end|>"),
    "llama-3": Family(
        "published/llama-3-instruct", "bytes", _LLAMA, bos="<|begin_of_text|>", eos="<|end_of_text|>", tools=False
    ),
    "llama-3.1": Family(
        "written/llama-3.1",
        "bytes",
        (*_LLAMA, "<|python_tag|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        parallel=False,
    ),
    "gemma-1": Family("published/gemma-it", "pieces", _GEMMA, _BLANKS, bos="<bos>", eos="<eos>", tools=False),
    "gemma-2": Family("written/gemma-2", "pieces", _GEMMA, _BLANKS, bos="<bos>", eos="<eos>", tools=False),
    "gemma-4": Family(
        "written/gemma-4",
        "pieces",
        (*_GEMMA4, "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
        _BLANKS,
        bos="<bos>",
        eos="<eos>",
        stops=("<eos>", "<turn|>", "<|tool_response>"),
    ),
    "mistral-1": Family("published/mistral-instruct", "prefixed", ("<s>", "</s>"), bos="<s>", eos="</s>", tools=False),
    "mistral": Family(
        "written/mistral", "prefixed", (*_MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), bos="<s>", eos="</s>"
    ),
}
"""Gemma's GGUF and Hugging Face tokenizers put no space before the first word; Mistral's (`prefixed`) do."""


def build_folder(name: str, folder: Path) -> Path:
    """A Hugging Face folder (without weights) of a family's tiny tokenizer."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    data = json.loads((CHAT / f"{'bytes' if family.base == 'bytes' else 'pieces'}.json").read_text())
    if family.base == "prefixed":
        data["normalizer"] = None
        data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        data["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    taken = len(data["model"]["vocab"])
    data["added_tokens"] = [
        {
            "id": data["model"]["vocab"].get(text, taken + index),
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text in family.special,
        }
        for index, text in enumerate((*family.special, *family.tags))
    ]
    template = (CHAT / f"{family.template}.jinja").read_text()
    if "{%- " not in template:  # the collection's loose ones are to be used without their line ends and indents
        template = template.replace("    ", "").replace("\n", "")
    ids = {token["content"]: token["id"] for token in data["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": {"__type": "AddedToken", "content": family.eos, "special": True},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if family.stops:
        stops = {"eos_token_id": [ids[text] for text in family.stops]}
        (folder / "generation_config.json").write_text(json.dumps(stops))
    return folder


def _call(name: str, arguments: dict[str, Any], id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _asks(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def _result(text: str, call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": call["function"]["name"], "tool_call_id": call["id"]}


def _says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks something up. “Été”",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "deep": {"type": "object"},
                },
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
    },
]
_ONE = _call("look_up", {"query": "cats", "limit": 3}, "abcdefgh1")
_DEEP = _call(
    "look_up", {"query": 'Ünïcödé 日本 🚀 "q"', "deep": {"a": [1, 2.5, None], "b": {"c": "<b>"}}}, "abcdefgh2"
)
_NOW = _call("now", {}, "abcdefgh3")

SHARED = {
    "hello": (False, [_says("user", "Hello!")]),
    "turns": (
        False,
        [
            _says("system", "Answer in French, s'il te plaît."),
            _says("user", "How are you?\n\n\nWell?  Say it."),
            _says("assistant", "Bien, merci. 日本"),
            _says("user", "What is 12345 + 1?"),
            _says("assistant", "12346"),
            _says("user", "Thanks"),
        ],
    ),
    "call": (True, [_says("user", "Find cats."), _asks(_ONE), _result("3 cats", _ONE), _says("assistant", "Three.")]),
    "error": (
        True,
        [
            _says("system", "Use tools."),
            _says("user", "Find cats."),
            _asks(_ONE),
            _result("error: look_up did not answer within 5 s", _ONE),
            _asks(_NOW),
            _result("12:00", _NOW),
            _says("assistant", "It is noon."),
        ],
    ),
    "unicode": (
        True,
        [_says("user", "?"), _asks(_DEEP), _result('{"é": "日本\\n🚀"}', _DEEP), _says("assistant", "Oui.")],
    ),
    "parallel": (
        True,
        [
            _says("user", "Both."),
            _asks(_ONE, _NOW),
            _result("3 cats", _ONE),
            _result("12:00", _NOW),
            _says("assistant", "Three cats at noon."),
        ],
    ),
    "goes on": (
        True,
        [
            _says("user", "Time?"),
            _asks(_NOW),
            _result("12:00", _NOW),
            _says("assistant", "Noon."),
            _says("user", "And cats?"),
            _asks(_ONE),
            _result("3 cats", _ONE),
            _says("assistant", "Three."),
        ],
    ),
}
"""Name -> whether tools are shown, and OpenAI-style messages."""
VARIABLES = {"date_string": "26 Jul 2024"}

TEXTS = [
    "Tom has 37 boxes with 48 pens each. How many pens in total?",
    '<tool_call>{"name": "calculator", "arguments": {"expression": "37*48"}}</tool_call>',
    "<answer>1776</answer>",
    " leading, trailing  and   runs of spaces   ",
    "digits after spaces:  12   345\t6\n 78",
    "\n\n\ttabs and\r\nline ends\n",
    "it's we'll they've I'm you'd can't",
    "naïve café — “quotes” … €5",
    "日本語のテキスト и русский текст ١٢٣ ½",
    "emoji 👩‍🚀🔥 and a combining e\u0301",
    "def f(x):\n    return x**2  # comment\n",
    "\x00\x01 control \x7f \ufffd",
    "a" * 40,
    "",
]

WORKED = [
    {"role": "system", "content": "Use the calculator tool."},
    {"role": "user", "content": "Lea has 69 boxes with 59 eggs each. How many eggs in total?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "calculator", "arguments": {"expression": "69*59"}}</tool_call>',
    },
    {"role": "tool", "content": "4071"},
    {"role": "assistant", "content": "<answer>4071</answer>"},
    {"role": "user", "content": "Sam has 80 stamps and gives away 17. How many stamps are left?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "calculator", "arguments": {"expression": "80-17"}}</tool_call>',
    },
    {"role": "tool", "content": "63"},
    {"role": "assistant", "content": "<answer>63</answer>"},
    {"role": "user", "content": "Leo has 86 cards and gets 46 more. How many cards now?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "calculator", "arguments": {"expression": "86+46"}}</tool_call>',
    },
    {"role": "tool", "content": "132"},
    {"role": "assistant", "content": "<answer>132</answer>"},
    {"role": "user", "content": "Ian has 35 boxes with 46 coins each. How many coins in total?"},
]
CONVERSATIONS = [
    WORKED,
    [{"role": "user", "content": "Hello!"}],
    [
        {"role": "system", "content": "Sprich Deutsch. 日本語も。"},
        {"role": "user", "content": "Wie viel ist 12 + 30?\n\nBitte genau."},
        {"role": "assistant", "content": "Ich rechne.\n<tool_call>{}</tool_call> "},
        {"role": "tool", "content": "  42\n"},
    ],
]


def conversations(name: str) -> dict[str, tuple[bool, list[dict[str, Any]]]]:
    """Those of the shared ones that the family's template takes; Gemma 2's takes no system message."""
    family = FAMILIES[name]
    return {
        title: (tools, messages[1:] if name == "gemma-2" and messages[0]["role"] == "system" else messages)
        for title, (tools, messages) in SHARED.items()
        if (family.tools or not tools) and (family.parallel or title != "parallel")
    }


def make_bases() -> None:
    """The two tiny tokenizers."""
    texts = [json.dumps(SHARED, ensure_ascii=False), json.dumps(TOOLS), *TEXTS, *(m["content"] for m in WORKED)] * 3
    words = r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    plain = Tokenizer(models.BPE())
    plain.normalizer = normalizers.NFC()
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    plain.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    _write("bytes", json.loads(plain.to_str()))

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    texts = [text for text in texts if text.isascii()]
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    data = json.loads(pieces.to_str())
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *data["model"]["vocab"]]
    data["model"] |= {
        "vocab": {piece: index for index, piece in enumerate(vocabulary)},
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    data["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    data["pre_tokenizer"] = None
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    data["decoder"] = {"type": "Sequence", "decoders": steps}
    _write("pieces", data)


def _write(name: str, value: Any) -> None:
    (CHAT / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def make_families() -> None:
    from transformers import AutoTokenizer

    make_bases()
    expected: dict[str, dict[str, list[int]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in FAMILIES:
            tokenizer = AutoTokenizer.from_pretrained(build_folder(name, Path(place) / name))
            expected[name] = {
                title: tokenizer.apply_chat_template(
                    messages[:end],
                    tools=TOOLS if tools else None,
                    add_generation_prompt=True,
                    return_dict=False,
                    **VARIABLES,
                )
                for title, (tools, talk) in conversations(name).items()
                for messages, end in [(talk, len(talk) - (talk[-1]["role"] == "assistant"))]
            }
            print(name, {title: len(ids) for title, ids in expected[name].items()})
    _write("expected", expected)


def make_smollm2(gguf: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    stock = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    fixture = {
        "texts": [
            {"text": text, "ids": ours, "digits_matter": ours != theirs}
            for text, ours, theirs in zip(TEXTS, ids, stock, strict=True)
        ],
        "conversations": [
            {
                "messages": messages,
                "ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
            }
            for messages in CONVERSATIONS
        ],
    }
    target = Path(__file__).parent / "fixtures" / "smollm2_chat.json"
    target.write_text(json.dumps(fixture, indent=None, separators=(",", ":")) + "\n")
    print([entry["digits_matter"] for entry in fixture["texts"]], [len(c["ids"]) for c in fixture["conversations"]])


if __name__ == "__main__":
    if sys.argv[1] == "families":
        make_families()
    else:
        make_smollm2(Path(sys.argv[1]))
