"""The other side of `benchmarks.decode`: `transformers.generate`, in an environment of its own.

Reads one JSON request per line from standard input and answers each with one JSON line:

    {"dtype": "float32" | "bfloat16", "prompts": [[id, ...], ...], "new_tokens": n}  ->  {"seconds": s}

All prompts of a request have one length and are generated as one batch, sampled at temperature 1, stop tokens off.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    gguf, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    models = {}
    print(json.dumps({"ready": torch.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        dtype = request["dtype"]
        if dtype not in models:
            models[dtype] = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype)
            ).eval()
        prompts = torch.tensor(request["prompts"])
        new = request["new_tokens"]
        began = time.perf_counter()
        with torch.inference_mode():
            models[dtype].generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
