"""Adapters in storage: what the learner publishes, and what workers follow.

    adapters/<version>/adapter_model.safetensors    PEFT's names and orientation: any PEFT loader reads it
    adapters/<version>/adapter_config.json
    adapters/<version>/manifest.json                sizes and SHA-256 of the two, written when they are whole
    latest.json                                     the version in force, written last
    lease.json                                      the newest incarnation of the learner

Invariants: a folder that has its manifest never changes; a reader that goes through latest.json or the manifest never
sees a half-written adapter, and never uses one whose bytes, names, shapes or values are wrong; an old incarnation never
overwrites the latest.json of a newer one.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policy.families import peft_module
from policy.lora import Adapter, LoraSettings, adapter_shapes
from policy.transformer import ModelConfig
from trajectories.schema import Version
from trajectories.storage import NotFound, PreconditionFailed, Storage

FORMAT = 1
"""Of manifest.json, latest.json and lease.json."""

_LATEST = "latest.json"
_LEASE = "lease.json"
_FOLDER = "adapters"
_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
ADAPTER_FILES = (_CONFIG, _WEIGHTS)
"""What an adapter in PEFT layout is made of."""
_MANIFEST = "manifest.json"
_ROOT = re.compile(r"base_model\.model\.(model\.language_model|language_model\.model|model)\.(?=layers\.)")
"""How a name in an adapter begins: of a text model, and of one that sees pictures too, by new and old transformers."""


class AdapterError(RuntimeError):
    """An adapter could not be published or read."""


class BadAdapter(AdapterError):
    """An adapter, or a file that leads to one, is not what it must be."""


class MissingAdapter(BadAdapter):
    """There is no complete adapter of that version: never published, or pruned."""


class Fenced(AdapterError):
    """A newer incarnation of the learner has taken over; this one must stop writing."""


@dataclass(frozen=True)
class LatestAdapter:
    """What latest.json says."""

    version: Version
    sha256: str
    """Of adapter_model.safetensors."""
    published_at: float
    """Unix seconds."""
    step_ended_at: float
    """Unix seconds at which the optimizer step that made it ended."""


@dataclass(frozen=True)
class Lease:
    """One incarnation's claim on a run's storage."""

    storage: Storage
    incarnation: int

    def still_mine(self) -> bool:
        """Whether no newer incarnation has claimed the storage since."""
        return _leased(self.storage)[0] <= self.incarnation


def claim_incarnation(storage: Storage, *, clock: Callable[[], float] = time.time) -> int:
    """Claim the next incarnation, from 1 up, in lease.json. Of any number of racers each gets its own."""
    token = secrets.token_hex(16)
    while True:
        incarnation, holder, generation = _leased(storage)
        if holder == token:
            return incarnation
        claim = {"format": FORMAT, "incarnation": incarnation + 1, "claimed_at": clock(), "holder": token}
        try:
            storage.write(_LEASE, _dumps(claim), if_generation=generation)
        except PreconditionFailed:
            # Somebody was faster, or a retried upload met its own first try: the holder tells which.
            continue
        return incarnation + 1


class AdapterStore:
    """Publishes and reads the adapters of one run. One thread at a time; any number of stores and processes."""

    def __init__(
        self,
        storage: Storage,
        config: ModelConfig,
        lora: LoraSettings,
        *,
        base_model: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`storage` is the run's; `base_model` is what the adapters name as their base."""
        self._storage = storage
        self._folder = storage.join(_FOLDER)
        self._config = config
        self._lora = lora
        self._base_model = base_model
        self._clock = clock
        self._generation: int | None = None
        """Of latest.json as this store wrote it last."""

    def publish(self, version: Version, adapter: Adapter, *, step_ended_at: float) -> LatestAdapter:
        """Write the adapter's folder, then put it in force.

        Raises BadAdapter if the adapter has wrong shapes or values that are not finite, or if the version was published
        before with other contents; Fenced if a newer incarnation has claimed the lease or owns latest.json.
        """
        self._refuse_if_fenced(version)
        files = {
            _WEIGHTS: encode_adapter(adapter, self._config, self._lora),
            _CONFIG: _dumps(peft_config(self._lora, self._base_model)),
        }
        digests = {name: _sha256(data) for name, data in files.items()}
        self._write_folder(version, files, digests)
        latest = LatestAdapter(version, digests[_WEIGHTS], self._clock(), step_ended_at)
        self._write_latest(latest)
        return latest

    def latest(self) -> LatestAdapter | None:
        """The adapter in force, None before the first. One small read; BadAdapter if latest.json is not readable."""
        return self._latest()[0]

    def load(self, version: Version, *, sha256: str = "") -> Adapter:
        """The adapter as numpy float32, [L, in, r] and [L, r, out], every byte and value checked.

        With `sha256`, only the weights that latest.json meant. Raises MissingAdapter or BadAdapter.
        """
        manifest = self._manifest(version)
        files = {}
        for name, (size, digest) in manifest.items():
            data = self._read(version, name)
            if len(data) != size or _sha256(data) != digest:
                raise BadAdapter(
                    f"adapter {version}: {name} is not what its manifest says; the file was changed or cut"
                )
            files[name] = data
        if sha256 and manifest[_WEIGHTS][1] != sha256:
            raise BadAdapter(f"adapter {version}: its weights are not those that latest.json names")
        settings = read_peft_config(files[_CONFIG], where=f"adapter {version}")
        if _shape_of(settings) != _shape_of(self._lora):
            raise BadAdapter(
                f"adapter {version} was trained with {_describe(settings)}, this run uses {_describe(self._lora)}"
            )
        return decode_adapter(files[_WEIGHTS], self._config, self._lora, where=f"adapter {version}")

    def versions(self) -> list[Version]:
        """The complete adapters, oldest first: by incarnation, then by step."""
        return _by_age(v for v, names in self._folders().items() if _MANIFEST in names)

    def prune(self, keep: int, *, protect: Collection[Version] = ()) -> list[Version]:
        """Delete all but the newest `keep` folders, the one in force and the protected; returns what was deleted.

        Folders that a crash left without a manifest go the same way. The manifest is deleted first, so that a folder
        is whole or absent for every reader.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, found {keep}")
        folders = self._folders()
        latest = self.latest()
        kept = {*_by_age(folders)[-keep:], *protect, *([latest.version] if latest else [])}
        doomed = [version for version in _by_age(folders) if version not in kept]
        for version in doomed:
            for name in sorted(folders[version], key=lambda name: name != _MANIFEST):
                self._folder.delete(f"{version}/{name}")
        return doomed

    def _folders(self) -> dict[Version, list[str]]:
        folders: dict[Version, list[str]] = {}
        for path in self._folder.list():
            text, slash, name = path.partition("/")
            if slash and re.fullmatch(r"\d+\.\d+", text):
                folders.setdefault(Version.parse(text), []).append(name)
        return folders

    def _refuse_if_fenced(self, version: Version) -> None:
        owner = _leased(self._storage)[0]
        if owner > version.incarnation:
            raise Fenced(f"incarnation {owner} has claimed {self._storage.url}; {version} is not published")

    def _write_folder(self, version: Version, files: Mapping[str, bytes], digests: Mapping[str, str]) -> None:
        manifest = {
            "format": FORMAT,
            "version": str(version),
            "files": {name: {"bytes": len(data), "sha256": digests[name]} for name, data in files.items()},
        }
        try:
            found = self._manifest(version)
        except MissingAdapter:
            for name, data in files.items():
                self._folder.write(f"{version}/{name}", data)
            self._folder.write(f"{version}/{_MANIFEST}", _dumps(manifest))
            return
        if found != {name: (len(data), digests[name]) for name, data in files.items()}:
            raise BadAdapter(f"adapter {version} was published before with other contents, and versions never change")

    def _write_latest(self, latest: LatestAdapter) -> None:
        data = _dumps(
            {
                "format": FORMAT,
                "version": str(latest.version),
                "sha256": latest.sha256,
                "published_at": latest.published_at,
                "step_ended_at": latest.step_ended_at,
            }
        )
        while True:
            generation = self._generation
            if generation is None:
                current, generation = self._latest()
                if current == latest:  # a retried upload met its own first try
                    self._generation = generation
                    return
                if current is not None and current.version.incarnation > latest.version.incarnation:
                    raise Fenced(
                        f"incarnation {current.version.incarnation} has published {current.version} to "
                        f"{self._storage.url}; {latest.version} is not put in force"
                    )
            try:
                self._generation = self._storage.write(_LATEST, data, if_generation=generation)
                return
            except PreconditionFailed:
                self._generation = None

    def _latest(self) -> tuple[LatestAdapter | None, int]:
        try:
            data, generation = self._storage.read_with_generation(_LATEST)
        except NotFound:
            return None, 0
        fields = _loads(data, f"{_LATEST} in {self._storage.url}")
        try:
            latest = LatestAdapter(
                Version.parse(fields["version"]),
                str(fields["sha256"]),
                float(fields["published_at"]),
                float(fields["step_ended_at"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadAdapter(f"{_LATEST} in {self._storage.url} is not readable: {error!r}") from error
        return latest, generation

    def _manifest(self, version: Version) -> dict[str, tuple[int, str]]:
        """File name -> (bytes, SHA-256)."""
        fields = _loads(self._read(version, _MANIFEST), f"adapter {version}: {_MANIFEST}")
        try:
            files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in fields["files"].items()}
            found = Version.parse(fields["version"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadAdapter(f"adapter {version}: {_MANIFEST} is not readable: {error!r}") from error
        if found != version or files.keys() != {_WEIGHTS, _CONFIG}:
            raise BadAdapter(f"adapter {version}: {_MANIFEST} describes {found} with {sorted(files)}")
        return files

    def _read(self, version: Version, name: str) -> bytes:
        try:
            return self._folder.read(f"{version}/{name}")
        except NotFound as error:
            raise MissingAdapter(
                f"adapter {version} lacks {name} in {self._folder.url}: not yet published, or pruned"
            ) from error


def load_peft(folder: Storage, config: ModelConfig) -> tuple[Adapter, LoraSettings]:
    """The adapter in a PEFT folder, ours or another's, and its settings. Raises BadAdapter."""
    files = {}
    for name in (_CONFIG, _WEIGHTS):
        try:
            files[name] = folder.read(name)
        except NotFound as error:
            raise MissingAdapter(f"{folder.url} is no adapter: it lacks {name}") from error
    settings = read_peft_config(files[_CONFIG], where=folder.url)
    return decode_adapter(files[_WEIGHTS], config, settings, where=folder.url), settings


def encode_adapter(adapter: Adapter, config: ModelConfig, lora: LoraSettings) -> bytes:
    """adapter_model.safetensors: lora_A [r, in] and lora_B [out, r] of each layer, float32. Raises BadAdapter."""
    from safetensors.numpy import save

    arrays = {
        target: {part: np.asarray(array, np.float32) for part, array in parts.items()}
        for target, parts in adapter.items()
    }
    found = {target: {part: array.shape for part, array in parts.items()} for target, parts in arrays.items()}
    expected = adapter_shapes(config, lora)
    if found != expected:
        raise BadAdapter(f"the adapter has shapes {found}, expected {expected}")
    tensors = {}
    for target, part, i, name in _tensor_names(config, lora):
        array = arrays[target][part][i]
        if not np.isfinite(array).all():
            raise BadAdapter(f"{target}.{part} of layer {i} has values that are not finite")
        tensors[name] = np.ascontiguousarray(array.T)
    data: bytes = save(tensors, metadata={"format": "pt"})
    return data


def decode_adapter(data: bytes, config: ModelConfig, lora: LoraSettings, *, where: str) -> Adapter:
    """The inverse of `encode_adapter`. Raises BadAdapter, which names `where` and lists every wrong tensor."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise BadAdapter(f"{where}: {_WEIGHTS} is not readable: {error}") from error
    tensors = {_ROOT.sub(f"base_model.model.{config.module_root}.", name): array for name, array in tensors.items()}
    shapes = adapter_shapes(config, lora)
    names = {name: (target, part, i) for target, part, i, name in _tensor_names(config, lora)}
    faults = [f"missing {name}" for name in sorted(names.keys() - tensors.keys())]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - names.keys())]
    adapter: Adapter = {
        target: {part: np.empty(shape, np.float32) for part, shape in parts.items()} for target, parts in shapes.items()
    }
    for name, (target, part, i) in names.items():
        if name not in tensors:
            continue
        array: NDArray[Any] = tensors[name]
        expected = shapes[target][part][:0:-1]
        if array.shape != expected:
            faults.append(f"{name} has shape {list(array.shape)}, expected {list(expected)}")
        elif not np.issubdtype(array.dtype, np.floating):
            faults.append(f"{name} has dtype {array.dtype}, expected a float")
        elif not np.isfinite(array).all():
            faults.append(f"{name} has values that are not finite")
        else:
            adapter[target][part][i] = array.T
    if faults:
        raise BadAdapter(f"{where}: {_WEIGHTS} does not fit the model:\n  " + "\n  ".join(faults))
    return adapter


def peft_config(lora: LoraSettings, base_model: str) -> dict[str, Any]:
    """adapter_config.json as PEFT reads it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "target_modules": list(lora.projections),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def read_peft_config(data: bytes, *, where: str) -> LoraSettings:
    """The settings in an adapter_config.json. Raises BadAdapter for anything but plain LoRA on projections we know."""
    fields = _loads(data, f"{where}: {_CONFIG}", format_=None)
    unsupported = [
        f"{name} = {fields[name]!r}"
        for name, plain in (
            ("peft_type", ("LORA",)),
            ("bias", ("none",)),
            ("use_rslora", (False,)),
            ("use_dora", (False,)),
            ("modules_to_save", (None, [])),
            ("rank_pattern", (None, {})),
            ("alpha_pattern", (None, {})),
            ("layers_to_transform", (None,)),
        )
        if name in fields and fields[name] not in plain
    ]
    if unsupported:
        raise BadAdapter(f"{where}: only plain LoRA is supported, found {', '.join(unsupported)}")
    try:
        targets = fields["target_modules"]
        if isinstance(targets, str):
            targets = [targets]
        if not isinstance(targets, list):
            raise ValueError(f"target_modules must be a list of names or a regular expression, found {targets!r}")
        return LoraSettings(rank=int(fields["r"]), alpha=float(fields["lora_alpha"]), targets=tuple(targets))
    except (KeyError, TypeError, ValueError) as error:
        raise BadAdapter(f"{where}: {_CONFIG} must hold r, lora_alpha and target_modules: {error}") from error


def _tensor_names(config: ModelConfig, lora: LoraSettings) -> list[tuple[str, str, int, str]]:
    """(target, part, layer, PEFT's tensor name)."""
    return [
        (target, part, i, f"base_model.model.{peft_module(target, i, config.module_root)}.lora_{part.upper()}.weight")
        for target in lora.projections
        for i in range(config.num_layers)
        for part in ("a", "b")
    ]


def _shape_of(lora: LoraSettings) -> tuple[int, float, frozenset[str]]:
    return lora.rank, lora.alpha, frozenset(lora.projections)


def _describe(lora: LoraSettings) -> str:
    return f"rank {lora.rank}, alpha {lora.alpha} on {', '.join(lora.projections)}"


def _by_age(versions: Any) -> list[Version]:
    return sorted(versions, key=lambda version: (version.incarnation, version.step))


def _leased(storage: Storage) -> tuple[int, str, int]:
    """(incarnation, holder, generation) of lease.json; zeros if nobody has claimed."""
    try:
        data, generation = storage.read_with_generation(_LEASE)
    except NotFound:
        return 0, "", 0
    fields = _loads(data, f"{_LEASE} in {storage.url}")
    try:
        return int(fields["incarnation"]), str(fields["holder"]), generation
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"{_LEASE} in {storage.url} is not readable: {error!r}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _dumps(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2) + "\n").encode()


def _loads(data: bytes, where: str, *, format_: int | None = FORMAT) -> dict[str, Any]:
    """A JSON object of our format; BadAdapter names `where`."""
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise BadAdapter(f"{where} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadAdapter(f"{where} is no JSON object")
    if format_ is not None and fields.get("format") != format_:
        raise BadAdapter(f"{where} has format {fields.get('format')!r}, this version of Headrace reads {format_}")
    return fields
