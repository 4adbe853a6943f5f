"""Every family against what transformers computes on the same folder: whole sequences, packed rows, cached decoding.

The folders under fixtures/families and what is expected of them come from make_family_fixtures.py.
"""

import asyncio
import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from policy.client import SamplingParams
from policy.engine import Engine
from policy.families import FAMILIES
from policy.settings import SamplingSettings
from policy.transformer import hidden_states, stack_layers, unembed, visible
from policy.weights import Dtype, ModelError, ModelSettings, load_model
from trajectories.schema import Version

FOLDER = Path(__file__).parent / "fixtures" / "families"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TOLERANCE = 1e-4
PROMPT = 20
"""Leading tokens that both reference sequences share."""


@functools.cache
def load(name):
    return load_model(ModelSettings(path=str(FOLDER / name)))


@functools.cache
def expected(name):
    return load_file(FOLDER / name / "expected.safetensors")


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens_BT, positions_BT, segments_BT, parents_BT):
    mask = visible(segments_BT, parents_BT)
    return unembed(config, params, hidden_states(config, params, None, 1.0, tokens_BT, positions_BT, mask))


def whole(config, params, tokens_BT):
    """Logits of sequences without any packing."""
    segments = np.ones_like(tokens_BT)
    positions = np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return np.asarray(forward(config, params, tokens_BT, positions, segments, np.zeros_like(segments)))


def copied(name, path):
    """A copy of the folder, to be damaged."""
    shutil.copytree(FOLDER / name, path)
    return path


def configured(name, path, changes):
    """A copy of the folder with other values in its config.json."""
    folder = copied(name, path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return folder


def test_every_family_has_fixtures():
    assert {load(name).config.family for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize("layout", ["unrolled", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, layout):
    model, reference = load(name), expected(name)
    params = stack_layers(model.params) if layout == "stacked" else model.params
    difference = np.abs(whole(model.config, params, reference["tokens"]) - reference["logits"]).max()
    print(f"{name}, {layout}: max |Δlogit| = {difference:.1e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_the_older_style_are_the_same_model(name, tmp_path):
    folder = copied(name, tmp_path / "older")
    (folder / "config_older.json").replace(folder / "config.json")
    assert load_model(ModelSettings(path=str(folder))).config == load(name).config


@pytest.mark.parametrize("name", NAMES)
def test_sequences_packed_into_a_row_keep_their_logits(name):
    model, reference = load(name), expected(name)
    first, second = 27, 19
    tokens = np.concatenate([reference["tokens"][0, :first], reference["tokens"][1, :second], [0, 0]])
    segments = np.repeat([1, 2, 0], [first, second, 2])
    positions = np.concatenate([np.arange(first), np.arange(second), [0, 0]])
    row = [array[None].astype(np.int32) for array in (tokens, positions, segments, np.zeros_like(segments))]
    logits = np.asarray(forward(model.config, stack_layers(model.params), *row))[0]
    np.testing.assert_allclose(logits[:first], reference["logits"][0, :first], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits[first : first + second], reference["logits"][1, :second], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_members_that_share_a_prompt_keep_their_logits(name):
    """A window is measured in positions: the second member lies farther from its prompt in the row than it is."""
    model, reference = load(name), expected(name)
    prompt, members = reference["tokens"][0, :PROMPT], reference["tokens"][:, PROMPT:]
    length = members.shape[1]
    tokens = np.concatenate([prompt, *members, [0]])
    segments = np.repeat([1, 2, 3, 0], [PROMPT, length, length, 1])
    member_positions = PROMPT + np.arange(length)
    positions = np.concatenate([np.arange(PROMPT), member_positions, member_positions, [0]])
    row = [array[None].astype(np.int32) for array in (tokens, positions, segments, np.where(segments > 1, 1, 0))]
    for params in (model.params, stack_layers(model.params)):
        logits = np.asarray(forward(model.config, params, *row))[0]
        np.testing.assert_allclose(logits[:PROMPT], reference["logits"][0, :PROMPT], rtol=0, atol=TOLERANCE)
        for i in range(2):
            found = logits[PROMPT + i * length :][:length]
            np.testing.assert_allclose(found, reference["logits"][i, PROMPT:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_is_that_of_transformers(name):
    """Two turns of one episode, greedy. The second finds the first in the cache; windows slide past both."""
    model, reference = load(name), expected(name)
    settings = SamplingSettings(
        slots=1, small_batch=0, max_context=72, prefill_chunk=8, extend_rows=1, extend_chunk=4, steps_per_call=1
    )

    async def play():
        turns = []
        for turn in ("turn1", "turn2"):
            params = SamplingParams(temperature=0.0, max_tokens=len(reference[f"{turn}_ids"]))
            turns.append(await engine.sample("episode", reference[f"{turn}_prompt"], params))
        return turns

    engine = Engine(model.config, model.params, None, Version(0, 1), settings, 1.0)
    try:
        turns = asyncio.run(play())
    finally:
        engine.close()
    for turn, completion in zip(("turn1", "turn2"), turns, strict=True):
        np.testing.assert_array_equal(completion.token_ids_N, reference[f"{turn}_ids"])
        np.testing.assert_allclose(completion.logprobs_N, reference[f"{turn}_logprobs"], rtol=0, atol=TOLERANCE)
    added = len(reference["turn2_prompt"]) - len(reference["turn1_prompt"]) - len(reference["turn1_ids"])
    assert engine.tokens_prefilled == len(reference["turn1_prompt"]) - 1 + added


FEATURES = {
    "llama3": [{"rope_scaling": None}],
    "mistral": [{"sliding_window": None, "local_layers": ()}, {"sliding_window": 13}],
    "smollm2": [{"rope_theta": 10_000.0}],
    "gemma": [{"scale_embedding": False}, {"activation": "silu"}],
    "gemma2": [
        {"attention_softcap": None},
        {"final_softcap": None},
        {"query_scale": None},
        {"local_layers": (1,)},
        {"sliding_window": 11},
    ],
    "gemma3": [
        {"rope_scaling": None},
        {"local_rope_theta": None},
        {"query_scale": None},
        {"local_layers": (0, 1, 2, 3, 4, 5, 6)},
        {"sliding_window": 11},
    ],
}


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, changes in FEATURES.items() for change in changes], ids=str
)
def test_the_fixtures_see_each_feature(name, change):
    """Without it the logits are far outside the tolerance: parity is parity with the feature. Biases and the norms of
    queries, keys and outputs are parameters, which no model does without."""
    model, reference = load(name), expected(name)
    logits = whole(dataclasses.replace(model.config, **change), model.params, reference["tokens"])
    assert np.abs(logits - reference["logits"]).max() > 100 * TOLERANCE


def test_missing_extra_and_misshapen_tensors_are_listed_together(tmp_path):
    folder = copied("qwen2", tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.1.self_attn.k_proj.bias", "model.norm.weight"):
        del tensors[name]
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((41, 32), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(ModelSettings(path=str(folder)))
    message = str(caught.value)
    assert "missing model.layers.1.self_attn.k_proj.bias [16]" in message
    assert "missing model.norm.weight [32]" in message
    assert "unexpected model.layers.0.self_attn.o_proj.bias [32]" in message
    assert "model.layers.0.mlp.up_proj.weight has shape [41, 32], expected [40, 32]" in message


def test_a_missing_shard_is_named(tmp_path):
    folder = copied("llama2", tmp_path / "sharded")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_model(ModelSettings(path=str(folder)))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", None])
def test_unknown_architectures_list_the_supported_ones(model_type, tmp_path):
    folder = configured("llama2", tmp_path / "unknown", {"model_type": model_type})
    with pytest.raises(ModelError) as caught:
        load_model(ModelSettings(path=str(folder)))
    for text in (repr(model_type), *FAMILIES):
        assert text in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("name", "changes", "option"),
    [
        ("qwen3", {"num_experts": 8}, "num_experts = 8"),
        ("mistral", {"num_local_experts": 8}, "num_local_experts = 8"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        ("llama2", {"hidden_act": "relu"}, "activation 'relu'"),
        ("llama2", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama2", {"rope_parameters": YARN}, "rope type 'yarn'"),
        ("qwen2", {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ("llama2", {"attention_bias": True}, "attention_bias = true"),
        ("llama2", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_unsupported_options_are_named(name, changes, option, tmp_path):
    folder = configured(name, tmp_path / "unsupported", changes)
    with pytest.raises(ModelError) as caught:
        load_model(ModelSettings(path=str(folder)))
    assert option in str(caught.value)


def test_a_config_that_lacks_a_size_names_it(tmp_path):
    folder = copied("llama2", tmp_path / "lacking")
    fields = json.loads((folder / "config.json").read_text())
    del fields["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="intermediate_size"):
        load_model(ModelSettings(path=str(folder)))


@pytest.mark.parametrize("name", NAMES)
def test_every_family_runs_in_bfloat16_in_the_learner_and_in_the_engine(name):
    """Stacked and scanned, as training compiles it, and decoding; near the float32 logits."""
    model = load_model(ModelSettings(path=str(FOLDER / name), dtype=Dtype.BFLOAT16))
    tokens = expected(name)["tokens"]
    logits = whole(model.config, stack_layers(model.params), tokens)
    scale = np.abs(expected(name)["logits"]).max()
    assert np.abs(logits - expected(name)["logits"]).max() < 0.2 * scale
    settings = SamplingSettings(slots=2, small_batch=1, max_context=40, max_tokens=4)
    engine = Engine(model.config, model.weights, None, Version(0, 1), settings, 1.0)
    try:
        done = asyncio.run(engine.sample("s", tokens[0, :20], SamplingParams(max_tokens=4, temperature=0)))
        assert len(done.token_ids_N) == 4
    finally:
        engine.close()
