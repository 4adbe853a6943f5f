"""Makes fixtures/smollm2_reference.safetensors: what Hugging Face transformers computes on the same weights.

Runs apart from the project, once, on a CPU:

    python3 -m venv reference && reference/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate gguf
    reference/bin/python tests/policy/make_fixtures.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

The file holds the token ids of a real text, and in float32, at 24 positions, the logits of 512 vocabulary ids (a full
table would be 19 MB), the logsumexp over the whole vocabulary and the argmax.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = """<|im_start|>system
Use the calculator tool.<|im_end|>
<|im_start|>user
A headrace is the channel that carries water to a turbine. This one delivers 37 cubic metres each second; how many \
arrive in 48 seconds?<|im_end|>
<|im_start|>assistant
<tool_call>{"name": "calculator", "arguments": {"expression": "37*48"}}</tool_call><|im_end|>
<|im_start|>tool
1776<|im_end|>
<|im_start|>assistant
<answer>1776</answer><|im_end|>
"""
POSITIONS = 24
IDS = 512


def main() -> None:
    gguf = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    tokens = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(tokens).logits[0].float().numpy()
    generator = np.random.default_rng(0)
    positions = np.sort(generator.choice(tokens.shape[1], POSITIONS, replace=False))
    ids = np.sort(generator.choice(logits.shape[1], IDS, replace=False))
    chosen = logits[positions]
    out = Path(__file__).parent / "fixtures" / "smollm2_reference.safetensors"
    out.parent.mkdir(exist_ok=True)
    save_file(
        {
            "tokens": tokens[0].numpy().astype(np.int32),
            "positions": positions.astype(np.int32),
            "ids": ids.astype(np.int32),
            "logits": np.ascontiguousarray(chosen[:, ids], np.float32),
            "logsumexp": torch.logsumexp(torch.from_numpy(chosen).double(), -1).float().numpy(),
            "argmax": chosen.argmax(-1).astype(np.int32),
        },
        out,
    )
    print(
        f"{out}: {tokens.shape[1]} tokens, {out.stat().st_size} bytes, mean argmax hits {hits(logits, tokens[0]):.3f}"
    )


def hits(logits: np.ndarray, tokens: torch.Tensor) -> float:
    """How often the model's first choice is the text's next token: near 0 would mean that the weights were misread."""
    return float((logits[:-1].argmax(-1) == tokens[1:].numpy()).mean())


if __name__ == "__main__":
    main()
