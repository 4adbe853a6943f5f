"""One folder of results is of one model, adapter and settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipelines.attempts import AttemptError
from pipelines.cli import TINY_DEMO
from pipelines.config import load_run
from pipelines.evaluations import claim, default_folder, finished, subject
from pipelines.settings import SettingsError
from policy.files import find_model


def of(*overrides: str, adapter: str | None = None) -> dict[str, object]:
    return subject(load_run(str(TINY_DEMO), overrides), adapter)


def adapter_in(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_results_of_something_else_are_refused_with_what_differs(tmp_path: Path) -> None:
    out, adapter = tmp_path / "out", adapter_in(tmp_path / "3.1")
    results = claim(out, of(adapter=adapter))
    assert claim(out, of(adapter=None)) == results  # nothing has ended yet
    claim(out, of(adapter=adapter))
    results.write_text("{}\n")
    moved = adapter_in(tmp_path / "elsewhere" / "3.1")
    assert claim(out, of("environment.max_concurrency=7", "learner.steps=3", adapter=moved)) == results
    assert finished(out) is None
    for other, said in [
        (of(adapter=adapter_in(tmp_path / "3.2", b"others")), "adapter was"),
        (of(), "and is unset"),
        (of("evaluation.samples=4", adapter=adapter), "evaluation.samples was 1 and is 4"),
        (of("environment.max_turns=9", adapter=adapter), "environment.max_turns was 4 and is 9"),
        (of("seed=1", "sampling.top_k=5", adapter=adapter), "sampling.top_k was 0 and is 5; seed was 0 and is 1"),
    ]:
        with pytest.raises(AttemptError, match="is of another evaluation: ") as refusal:
            claim(out, other)
        assert said in str(refusal.value)
    (out / "evaluated.json").unlink()
    with pytest.raises(AttemptError, match="does not say of what"):
        claim(out, of(adapter=adapter))


def test_a_model_with_other_weights_under_the_same_name_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_model("calculator-tiny").folder or "", folder)
    before = of(f"model.path={folder}")
    assert of(f"model.path={folder}") == before
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert of(f"model.path={folder}") != before
    with pytest.raises(SettingsError, match=r"model\.path"):
        of(f"model.path={tmp_path / 'none'}")


def test_an_adapters_evaluation_has_a_folder_of_its_own() -> None:
    assert default_folder("run", None) == Path("runs/run-eval")
    assert default_folder("run", "runs/run/latest/adapters/100.1/") == Path("runs/run-eval-100.1")
    assert default_folder("run", "gs://bucket/run/adapters/100.1") == Path("runs/run-eval-100.1")
