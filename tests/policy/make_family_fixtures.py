"""Makes fixtures/families: tiny random models of every family as Hugging Face folders, and what transformers says of
them. `policy` is tested against these without torch.

Runs apart from the project, on a CPU, in the environment of requirements-reference.txt (`make parity` makes it):

    python tests/policy/make_family_fixtures.py           # write
    python tests/policy/make_family_fixtures.py --check   # compare with what lies there, change nothing

Each folder is what `save_pretrained` writes, and beside it:

    config_older.json       the same config with the keys that transformers 4 wrote, as most published folders have them
    expected.safetensors    tokens [2, T] whose first PROMPT ids agree, their logits [2, T, V]; of two turns of greedy
                            decoding the prompt, ids and log-probs: turn1_prompt, turn1_ids, turn1_logprobs, turn2_...;
                            turn 2's prompt begins with all of turn 1
    adapter_*/              LoRA adapters that peft wrote; their expected.safetensors has logits [2, T, V] of `tokens`

Nothing is at its neutral value (norms, biases, lora_B), scores and logits are large enough for soft caps to bend them,
windows and original contexts are shorter than the sequences. Everything is a pure function of the seeds here.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).parent / "fixtures" / "families"
LENGTH = 48
PROMPT = 20
VOCAB = 80
RESERVED = 4
"""The last ids stand for image tokens in the multimodal config; no text has them."""
TURN_PROMPTS = (18, 7)
"""Tokens of the first prompt, and of what the second turn adds to the first."""
TURN_TOKENS = 12
MARGIN = 2e-3
"""Between the best two logits wherever a greedy token is drawn: no rounding turns it over."""
TOLERANCE = 2e-5
"""Of logits between two machines."""

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA3 = SMALL | {
    "intermediate_size": 32,
    "num_hidden_layers": 7,
    "sliding_window": 10,
    "query_pre_attn_scalar": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}


def default_rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


def without(fields: dict, *names: str) -> dict:
    return {name: value for name, value in fields.items() if name not in names}


def llama2():
    fields = SMALL | {"hidden_size": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    return transformers.LlamaConfig(**without(fields, "head_dim"), rope_parameters=default_rope(10_000.0))


def llama3():
    rope = default_rope(20_000.0) | {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    return transformers.LlamaConfig(**SMALL, rms_norm_eps=1e-5, rope_parameters=rope)


def mistral():
    return transformers.MistralConfig(
        **SMALL, sliding_window=12, rms_norm_eps=1e-5, rope_parameters=default_rope(10_000.0)
    )


def smollm2():
    fields = SMALL | {"num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}
    return transformers.LlamaConfig(
        **without(fields, "head_dim"), tie_word_embeddings=True, rope_parameters=default_rope(100_000.0)
    )


def qwen2():
    fields = SMALL | {"hidden_size": 32, "sliding_window": 8, "max_window_layers": 1, "use_sliding_window": False}
    return transformers.Qwen2Config(**without(fields, "head_dim"), rope_parameters=default_rope(1_000_000.0))


def qwen3():
    return transformers.Qwen3Config(**SMALL, tie_word_embeddings=True, rope_parameters=default_rope(1_000_000.0))


def gemma():
    fields = SMALL | {"num_key_value_heads": 1}
    return transformers.GemmaConfig(**fields, rope_parameters=default_rope(10_000.0))


def gemma2():
    return transformers.Gemma2Config(
        **SMALL | {"num_hidden_layers": 3, "sliding_window": 10, "query_pre_attn_scalar": 12},
        attn_logit_softcapping=2.0,
        final_logit_softcapping=6.0,
        rope_parameters=default_rope(10_000.0),
    )


def gemma3():
    return transformers.Gemma3TextConfig(**GEMMA3)


def gemma3_multimodal():
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 4,
        "patch_size": 2,
        "vision_use_head": False,
    }
    image, begin, end = VOCAB - 1, VOCAB - 2, VOCAB - 3
    return transformers.Gemma3Config(
        text_config=without(GEMMA3, "attn_implementation"),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=begin,
        eoi_token_index=end,
        attn_implementation="eager",
    )


FAMILIES = (llama2, llama3, mistral, smollm2, qwen2, qwen3, gemma, gemma2, gemma3, gemma3_multimodal)
SHARDED = "llama2"
BFLOAT16 = "gemma3_multimodal"
"""As Google publishes it: bfloat16, text model nested under vision."""
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    ("llama3", "adapter_all"): EVERYTHING,
    ("gemma2", "adapter_all"): EVERYTHING,
    ("gemma2", "adapter_attention"): r".*\.self_attn\.(q|k|v|o)_proj",
}


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def randomise(parameters, generator: np.random.Generator, dtype: torch.dtype, *, scaled: bool = False) -> None:
    """Draw every parameter, in the order of their names: matrices of gain 1.3, vectors around their neutral value.

    With `scaled` embeddings (Gemma) theirs are small and the final norm's weight large: else the residual stream is the
    last token, and the most likely next one is that token again.
    """
    for name, parameter in sorted(parameters):
        draw = generator.standard_normal(parameter.shape).astype(np.float32)
        if name.endswith("embed_tokens.weight"):
            draw *= 0.12 if scaled else 0.35
        elif parameter.ndim > 1:
            draw *= 1.3 * parameter[0].numel() ** -0.5
        elif name.endswith("bias"):
            draw *= 0.3
        else:
            draw = draw * 0.3 + parameter.detach().float().numpy()
            if scaled and name.endswith(".norm.weight"):
                draw += 3
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(draw).to(dtype))


def make_model(name: str, config) -> torch.nn.Module:
    """Float32; the values of `BFLOAT16` are representable in bfloat16."""
    multimodal = isinstance(config, transformers.Gemma3Config)
    kind = transformers.Gemma3ForConditionalGeneration if multimodal else transformers.AutoModelForCausalLM
    model = (kind._from_config(config) if multimodal else kind.from_config(config)).float().eval()
    assert model.config._attn_implementation == "eager"
    dtype = torch.bfloat16 if name == BFLOAT16 else torch.float32
    randomise(model.named_parameters(), seeded(name), dtype, scaled=name.startswith("gemma"))
    return model


@torch.no_grad()
def logits_of(model, tokens) -> np.ndarray:
    """Float32 [B, T, V] of int [B, T]."""
    return model(input_ids=torch.tensor(np.asarray(tokens)), use_cache=False).logits.float().numpy()


def draw_tokens(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.integers(3, VOCAB - RESERVED, count)


def greedy(model, prompt: list[int]) -> tuple[list[int], list[float], float]:
    """(ids, their log-probs, the smallest margin between the best two logits)."""
    ids, logprobs, margin = [], [], np.inf
    for _ in range(TURN_TOKENS):
        last = torch.from_numpy(logits_of(model, [[*prompt, *ids]])[0, -1].astype(np.float64))
        best = last.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        logprobs.append(float(last.log_softmax(-1)[ids[-1]]))
    return ids, logprobs, margin


def expectations(model, name: str) -> dict[str, np.ndarray]:
    generator = seeded("tokens of " + name)
    tokens = draw_tokens(generator, 2 * LENGTH).reshape(2, LENGTH)
    tokens[1, :PROMPT] = tokens[0, :PROMPT]
    found = {"tokens": tokens.astype(np.int32), "logits": logits_of(model, tokens)}
    said: list[int] = []
    for turn, count in enumerate(TURN_PROMPTS, 1):
        for _ in range(400):
            prompt = [*said, *draw_tokens(generator, count).tolist()]
            ids, logprobs, margin = greedy(model, prompt)
            # Where one token repeats, a wrong cache would hardly show.
            if margin > MARGIN and len(set(ids)) > 3:
                break
        else:
            raise AssertionError(f"{name}: no prompt of 400 decodes with a margin above {MARGIN}")
        found[f"turn{turn}_prompt"] = np.array(prompt, np.int32)
        found[f"turn{turn}_ids"] = np.array(ids, np.int32)
        found[f"turn{turn}_logprobs"] = np.array(logprobs, np.float32)
        said = [*prompt, *ids]
    return found


def older(fields: dict) -> dict:
    """A config as transformers 4 wrote it: rope at the top level, no layer_types."""
    fields = {name: older(value) if name == "text_config" else value for name, value in fields.items()}
    if "dtype" in fields:
        fields["torch_dtype"] = fields.pop("dtype")
    fields.pop("layer_types", None)
    fields.pop("_sliding_window_pattern", None)
    rope = fields.pop("rope_parameters", None)
    if rope is None:
        return fields
    if "full_attention" in rope:
        fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        fields["sliding_window_pattern"] = 6
        rope = rope["full_attention"]
    scaling = without(rope, "rope_theta")
    return fields | {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
    }


def write_family(folder: Path, make) -> None:
    name = make.__name__
    model = make_model(name, make())
    expected = expectations(model, name)
    saved = model.to(torch.bfloat16) if name == BFLOAT16 else model
    saved.save_pretrained(folder, max_shard_size="40KB" if name == SHARDED else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(expected, folder / "expected.safetensors")
    fields = older(json.loads((folder / "config.json").read_text()))
    if name == "gemma":
        # Of the first release; it means the tanh approximation.
        fields["hidden_act"] = "gelu"
    (folder / "config_older.json").write_text(json.dumps(fields, indent=2) + "\n")
    check_older(folder, expected, type(model))
    for (family, adapter), targets in ADAPTERS.items():
        if family == name:
            write_adapter(folder, adapter, targets, expected["tokens"])


def check_older(folder: Path, expected: dict[str, np.ndarray], kind: type) -> None:
    """transformers itself reads both configs as the same model."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "model"
        shutil.copytree(folder, copy)
        (copy / "config_older.json").replace(copy / "config.json")
        model = kind.from_pretrained(copy, dtype=torch.float32, attn_implementation="eager")
        np.testing.assert_allclose(logits_of(model, expected["tokens"]), expected["logits"], atol=TOLERANCE)


def write_adapter(folder: Path, name: str, targets, tokens: np.ndarray) -> None:
    def base():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")
    adapted = get_peft_model(base(), config).eval()
    adapted.peft_config["default"].base_model_name_or_path = f"tiny/{folder.name}"
    lora = [(path, tensor) for path, tensor in adapted.named_parameters() if "lora_" in path]
    randomise(lora, seeded(folder.name + name), torch.float32)
    adapted.save_pretrained(folder / name)
    (folder / name / "README.md").unlink(missing_ok=True)
    again = PeftModel.from_pretrained(base(), folder / name).eval()
    logits = logits_of(again, tokens)
    assert np.abs(logits - logits_of(base(), tokens)).max() > 0.1
    save_file({"logits": logits}, folder / name / "expected.safetensors")


def differences(made: Path, present: Path) -> list[str]:
    """Files of `made` that `present` lacks or holds otherwise."""
    found = []
    for path in sorted(file for file in made.rglob("*") if file.is_file()):
        name = path.relative_to(made)
        other = present / name
        if not other.is_file():
            found.append(f"{name} is missing")
        elif path.suffix != ".safetensors":
            if path.read_bytes() != other.read_bytes():
                found.append(f"{name} differs")
        else:
            mine, theirs = (load_tensors(file) for file in (path, other))
            if mine.keys() != theirs.keys():
                found.append(f"{name} holds other tensors")
                continue
            for key in mine:
                a, b = mine[key], theirs[key]
                if a.shape != b.shape or a.dtype != b.dtype or not np.allclose(a, b, rtol=0, atol=TOLERANCE):
                    found.append(f"{name}: {key} differs")
    return found


def load_tensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file as load_torch

    tensors = load_torch(path)
    if any(tensor.dtype is torch.bfloat16 for tensor in tensors.values()):
        return {name: tensor.float().numpy() for name, tensor in tensors.items()}
    return load_file(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the fixtures that lie there")
    check = parser.parse_args().check
    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        for make in FAMILIES:
            write_family(Path(scratch) / make.__name__, make)
        if check:
            found = differences(Path(scratch), FOLDER)
            print("\n".join(found) or f"{FOLDER} is what this script writes")
            return 1 if found else 0
        shutil.copytree(scratch, FOLDER, dirs_exist_ok=True)
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{FOLDER}: {len(FAMILIES)} families, {size} bytes")
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # peft writes target_modules in the order of a set, and would look for the base model on the network.
        wanted = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    sys.exit(main())
