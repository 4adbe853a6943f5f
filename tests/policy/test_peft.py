"""Adapters travel both ways between this project and peft: the same files, the same logits.

What peft says was computed by make_family_fixtures.py and parity.py; `make parity` computes it again.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load, load_file, save

from policy.adapters import AdapterStore, BadAdapter, load_peft
from policy.families import ATTENTION, PROJECTIONS
from policy.transformer import hidden_states, stack_layers, unembed, visible
from policy.weights import ModelSettings, load_model
from trajectories.schema import Version
from trajectories.storage import open_storage

FOLDER = Path(__file__).parent / "fixtures" / "families"
ADAPTERS = sorted(f"{path.parent.name}/{path.name}" for path in FOLDER.glob("*/adapter_*"))
OURS = [name for name in ADAPTERS if name.endswith("/adapter_headrace")]
FILES = ("adapter_config.json", "adapter_model.safetensors")
TOLERANCE = 1e-4


@functools.cache
def model(family):
    return load_model(ModelSettings(path=str(FOLDER / family)))


def read(name):
    """(adapter, settings, config of its model)."""
    config = model(name.partition("/")[0]).config
    return *load_peft(open_storage(str(FOLDER / name)), config), config


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_gives_the_logits_that_peft_gives(name):
    adapter, settings, config = read(name)
    family = name.partition("/")[0]
    tokens = load_file(FOLDER / family / "expected.safetensors")["tokens"]
    reference = load_file(FOLDER / name / "expected.safetensors")["logits"]
    segments = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    mask = visible(segments, np.zeros_like(segments))
    run = jax.jit(hidden_states, static_argnums=0)
    for params in (model(family).params, stack_layers(model(family).params)):
        hidden = run(config, params, adapter, settings.scale, tokens, positions, mask)
        difference = np.abs(np.asarray(unembed(config, params, hidden)) - reference).max()
        print(f"{name}: max |Δlogit| = {difference:.1e}")
        assert difference <= TOLERANCE


@pytest.mark.parametrize("name", OURS)
def test_adapters_are_written_as_they_were_when_peft_read_them(name, tmp_path):
    """Byte for byte: `make parity` has shown these files to peft."""
    adapter, settings, config = read(name)
    store = AdapterStore(open_storage(str(tmp_path)), config, settings, base_model=f"tiny/{name.partition('/')[0]}")
    store.publish(Version(1, 1), adapter, step_ended_at=0.0)
    for file in FILES:
        assert (tmp_path / "adapters" / "1.1" / file).read_bytes() == (FOLDER / name / file).read_bytes()


def test_a_regular_expression_of_peft_names_the_projections():
    fields = json.loads((FOLDER / "gemma2" / "adapter_attention" / "adapter_config.json").read_text())
    assert isinstance(fields["target_modules"], str)
    adapter, settings, _ = read("gemma2/adapter_attention")
    assert settings.projections == ATTENTION
    assert adapter.keys() == set(ATTENTION)
    adapter, settings, _ = read("gemma2/adapter_all")
    assert settings.projections == PROJECTIONS
    assert (settings.rank, settings.alpha) == (4, 8.0)


@pytest.mark.parametrize("root", ["model", "model.language_model", "language_model.model"])
@pytest.mark.parametrize("name", ["gemma2/adapter_all", "gemma3_multimodal/adapter_headrace"])
def test_adapters_of_text_and_multimodal_models_fit_either(name, root, tmp_path):
    """The same language model lies elsewhere in a model that sees pictures too, and names say where."""
    for file in FILES:
        (tmp_path / file).write_bytes((FOLDER / name / file).read_bytes())
    adapter, settings, config = read(name)
    tensors = load((FOLDER / name / FILES[1]).read_bytes())
    own = f"base_model.model.{config.module_root}."
    assert all(key.startswith(own) for key in tensors)
    renamed = {f"base_model.model.{root}.{key.removeprefix(own)}": array for key, array in tensors.items()}
    (tmp_path / FILES[1]).write_bytes(save(renamed))
    found, found_settings = load_peft(open_storage(str(tmp_path)), config)
    assert found_settings == settings
    for target, parts in adapter.items():
        for part, array in parts.items():
            np.testing.assert_array_equal(found[target][part], array)


def test_an_adapter_of_a_vision_tower_is_refused(tmp_path):
    name = "gemma3_multimodal/adapter_headrace"
    tensors = load((FOLDER / name / FILES[1]).read_bytes())
    tensors["base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"] = np.zeros((4, 8))
    (tmp_path / FILES[0]).write_bytes((FOLDER / name / FILES[0]).read_bytes())
    (tmp_path / FILES[1]).write_bytes(save(tensors))
    with pytest.raises(BadAdapter, match=r"unexpected .*vision_tower"):
        load_peft(open_storage(str(tmp_path)), model("gemma3_multimodal").config)
