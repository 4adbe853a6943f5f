"""GGUF files of every family and quantisation, written here as llama.cpp's converter writes them."""

import dataclasses
import functools
from pathlib import Path

import gguf
import numpy as np
import pytest

from policy.families import family_of, gguf_config, llama3_frequency
from policy.transformer import RopeScaling
from policy.weights import ModelError, ModelSettings, load_model

FOLDER = Path(__file__).parent / "fixtures" / "families"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.name != "gemma3_multimodal")
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@functools.cache
def folder(name):
    return load_model(ModelSettings(path=str(FOLDER / name)))


def interleave(weight_oi, heads):
    """What the converter does to q and k of Llama: the rotary halves of a head side by side, pair by pair."""
    rows, columns = weight_oi.shape
    return weight_oi.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def as_gguf_can_say(config):
    """The config as far as a file of its family tells it: what the family fixes takes the family's value."""
    rope = LLAMA3 if config.rope_scaling is not None and config.rope_scaling.kind == "llama3" else config.rope_scaling
    scale = config.head_dim**-0.5 if config.query_scale is not None else None
    family = "llama" if config.family == "mistral" else config.family
    return dataclasses.replace(config, rope_scaling=rope, query_scale=scale, family=family)


def write(path, config, tensors, *, change=None, quantised=None):
    """`tensors`: GGUF name -> array; `quantised`: GGUF name -> (raw blocks, type)."""
    writer = gguf.GGUFWriter(path, config.family)
    arch = config.family
    numbers = {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.embed_dim,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        "rope.freq_base": config.rope_theta,
        "rope.freq_base_swa": config.local_rope_theta,
    }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        numbers["rope.scaling.factor"] = config.rope_scaling.factor
    for name, value in (numbers | (change or {})).items():
        if isinstance(value, int):
            writer.add_uint32(f"{arch}.{name}", value)
        elif value is not None:
            writer.add_float32(f"{arch}.{name}", value)
    if config.rope_scaling == LLAMA3:
        half = config.head_dim // 2
        plain = [config.rope_theta ** (-i / half) for i in range(half)]
        factors = [f / llama3_frequency(f, 8.0, 1.0, 4.0, 8192) for f in plain]
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    for name, (blocks, kind) in (quantised or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(config, params):
    """GGUF name -> array, [out, in]. Norms hold what the model multiplies by, as they do here."""
    family, tensors = family_of(config.family), {}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for (name, layer), foreign in family.gguf_names(config.num_layers).items():
        place = params if layer is None else params["layers"][layer]
        if name not in place:
            continue
        array = place[name]
        if array.ndim == 2 and name not in ("embed", "unembed"):
            array = array.T
        tensors[foreign] = interleave(array, heads[name]) if name in family.gguf_permuted else array
    return tensors


def leaves(params):
    for name, array in params.items():
        if name != "layers":
            yield name, array
    for i, layer in enumerate(params["layers"]):
        for name, array in layer.items():
            yield f"{i}.{name}", array


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_what_the_folder_of_the_same_model_says(tmp_path, name):
    config, params = as_gguf_can_say(folder(name).config), folder(name).params
    loaded = load_model(ModelSettings(str(write(tmp_path / "model.gguf", config, converted(config, params)))))
    told = dataclasses.asdict(loaded.config)
    for field, value in dataclasses.asdict(config).items():
        assert told[field] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), field
    ours, expected = dict(leaves(loaded.params)), dict(leaves(params))
    assert ours.keys() == expected.keys()
    for place, array in expected.items():
        np.testing.assert_array_equal(ours[place], array, err_msg=place)


@pytest.mark.parametrize(("layers", "name"), [(46, "gemma2"), (62, "gemma3")])
def test_the_largest_gemmas_scale_queries_by_their_own_rule(layers, name):
    """27B: the width of the residual stream per head, which no field says."""
    config = as_gguf_can_say(folder(name).config)
    fields = {
        "embedding_length": config.embed_dim,
        "attention.head_count": config.num_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "block_count": layers,
        "feed_forward_length": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 8,
    }
    told = gguf_config(name, lambda field, default=None: fields.get(field, default), None)
    assert told["query_scale"] == pytest.approx((config.embed_dim / config.num_heads) ** -0.5)


def test_rope_factors_that_are_not_llama_3s_are_refused(tmp_path):
    config, params = as_gguf_can_say(folder("llama2").config), folder("llama2").params
    strange = {**converted(config, params), "rope_freqs.weight": np.full(config.head_dim // 2, 3.0)}
    with pytest.raises(ModelError, match="factors that are not Llama 3"):
        load_model(ModelSettings(str(write(tmp_path / "model.gguf", config, strange))))


def blocks_of(kind, rows, columns, seed):
    """Random blocks of a type whose every bit pattern means a number, with scales of ordinary size."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // values, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    blocks[..., :2] = scale
    if kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q4_K):
        blocks[..., 2:4] = scale
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "F16", "BF16"])
def test_quantised_tensors_are_read_whole_and_in_slices(tmp_path, kind):
    """A matrix of 64 rows of 256, against the whole tensor as the gguf library gives it."""
    kind = gguf.GGMLQuantizationType[kind]
    config = dataclasses.replace(
        as_gguf_can_say(folder("llama2").config), embed_dim=256, mlp_dim=64, num_layers=1, vocab_size=16
    )
    generator = np.random.default_rng(1)

    def draw(shape):
        return generator.standard_normal(shape).astype(np.float32)

    params = {name: draw(shape) for name, shape in config.model_shapes().items()}
    params["layers"] = [{name: draw(shape) for name, shape in config.layer_shapes().items()}]
    tensors = converted(config, params)
    del tensors["blk.0.ffn_up.weight"]
    if kind.name == "F16":
        raw = draw((64, 256)).astype(np.float16)
    elif kind.name == "Q6_K":  # its scale lies at the end
        raw = blocks_of(kind, 64, 256, 2)
        raw[:, -2:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    elif kind.name == "BF16":
        raw = gguf.quantize(draw((64, 256)), kind)
    else:
        raw = blocks_of(kind, 64, 256, 2)
    path = write(tmp_path / "model.gguf", config, tensors, quantised={"blk.0.ffn_up.weight": (raw, kind)})
    weights = load_model(ModelSettings(str(path))).weights
    expected = np.asarray(gguf.dequantize(raw, kind), np.float32).T
    assert expected.shape == (256, 64)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(weights.read("up_proj", 0), expected)
    part = (slice(32, 96), slice(8, 24))
    np.testing.assert_array_equal(weights.read("up_proj", 0, part), expected[part])
    fused = weights.fused()["layers"][0]["gate_up_proj"]
    np.testing.assert_array_equal(fused[64:], expected.T)
