"""Makes fixtures/smollm2_chat.json: token ids as Hugging Face transformers makes them for SmolLM2.

Runs apart from the project, once:

    python3 -m venv reference && reference/bin/pip install torch==2.13.0 transformers==5.24.0 gguf
    reference/bin/python tests/policy/make_chat_fixtures.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

transformers drops `tokenizer.ggml.pre` when it reads a GGUF file, so the pre-tokenizer that SmolLM2's own
tokenizer.json names (single digits, then byte level) is put back; `texts` are marked where that made a difference.
"""

import json
import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

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


def main() -> None:
    gguf = Path(sys.argv[1])
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
    main()
