"""`headrace plan`: its figures as JSON, what it refuses, and what it says where nothing can be compiled."""

import importlib.util
import json

import pytest

from learner import planning
from pipelines.cli import main
from policy.files import find_model
from policy.presets import PRESETS


def plan(capsys, *arguments):
    """(exit status, output, the JSON of the last line)."""
    status = main(["plan", *arguments, "--json"])
    out = capsys.readouterr().out
    return status, out, json.loads(out.splitlines()[-1])


def test_an_estimate_says_that_it_is_one(capsys):
    arguments = ("--model", "llama-3.1-70b", "--topology", "v5e-64", "--bucket", "4096", "--rows", "8")
    status, out, found = plan(capsys, *arguments, "--mesh", "fsdp=8,tensor=8", "--compile", "0")
    assert status == 0
    assert "An estimate from shapes, nothing was compiled" in out
    assert (found["fits"], found["source"], found["compile_s"]) == (True, "estimated", None)
    assert found["mesh"] == {"data": 1, "fsdp": 8, "tensor": 8}
    assert 3 < found["peak_gib_per_device"] < 5
    assert found["hbm_gib_per_device"] == 15.75
    assert found["step_s_roofline"] == pytest.approx(max(found["step_s"].values()), rel=1e-3)
    for assumption in ("197 TFLOP/s", "819 GB/s", "50 GB/s"):
        assert assumption in out


def test_a_search_recommends_a_mesh_and_the_settings_for_it(capsys):
    status, out, found = plan(capsys, "--model", "gemma-2-2b", "--topology", "v5e-8", "--compile", "0")
    assert status == 0
    mesh = ",".join(f"{name}={size}" for name, size in found["mesh"].items() if size > 1)
    assert f"Recommended: --mesh {mesh}; in the run file sharding." in out
    assert 'learner.rows_per_call = 8, learner.remat = "layer"' in out


def test_what_does_not_fit_is_said_with_what_would(capsys):
    status, out, found = plan(capsys, "--model", "llama-3.1-70b", "--topology", "v5e-8", "--compile", "0")
    assert (status, found["fits"]) == (1, False)
    assert found["peak_gib_per_device"] > 15.75
    assert "OUT OF MEMORY" in out
    assert any(how.startswith("--topology v5e-16") for how in found["would_fit"])


def test_a_quantised_base_takes_less_and_is_said_in_the_run_file(capsys):
    arguments = ("--model", "llama-3.1-8b", "--topology", "v5e-8", "--compile", "0", "--quantize")
    taken = {}
    for format in ("none", "int8", "nf4"):
        status, out, found = plan(capsys, *arguments, format, "--mesh", "fsdp=2,tensor=4")
        assert (status, found["quantize"]) == (0, format)
        assert f"on {'bfloat16' if format == 'none' else format}, remat" in out
        taken[format] = found["argument_gib_per_device"]
    assert taken["nf4"] < 0.7 * taken["int8"] < 0.7 * 0.7 * taken["none"]
    assert (
        'learner.remat = "layer", model.dtype = "bfloat16", model.quantize = "nf4"'
        in plan(capsys, *arguments, "nf4")[1]
    )
    # Where a dense base does not fit and one in 4 bits does, that is said.
    _, _, found = plan(capsys, "--model", "llama-3.1-70b", "--topology", "v5e-8", "--compile", "0")
    assert any(how.startswith("--quantize nf4 --mesh ") for how in found["would_fit"])


def test_without_a_compiler_it_says_how_to_get_one_and_estimates(capsys, monkeypatch):
    found_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "libtpu" else found_spec(name, *more)
    )
    status, out, found = plan(capsys, "--model", "smollm2-135m", "--topology", "v5e-4")
    assert (status, found["source"]) == (0, "estimated")
    assert "pip install 'headrace[plan]'" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mesh", "fsdp=4,tensor=4"), "must have the 64 chips of v5e-64, found fsdp=4,tensor=4 = 16"),
        (("--mesh", "rows=8"), "such as fsdp=8,tensor=8; found 'rows=8'"),
        (("--mesh", "fsdp=0,tensor=8"), "sharding.fsdp must be at least 1"),
        (("--mesh", "fsdp=64"), "multiple of data × fsdp = 64, found 8"),
        (("--topology", "v5e-63"), "slices of v5e are v5e-4, v5e-8"),
        (("--model", "llama-9"), "none of gemma-2b"),
        (("--rows", "0"), "at least 1"),
        (("--lora-rank", "0"), "lora.rank must be at least 1"),
        (("--compile", "-1"), "--compile must be 0"),
        (("--mesh", "fsdp=²"), "such as fsdp=8,tensor=8; found 'fsdp=²'"),
        (("--topology", "v5p:2x2"), "slices of v5p are v5p-8 (2x2x1), v5p-16 (2x2x2)"),
        (("--model", ""), "--model '' is no folder"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_mend(arguments, words, capsys):
    given = ["--model", "llama-3.1-70b", "--topology", "v5e-64", *arguments]
    assert main(["plan", *given]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_needs_no_weights(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "vocab_size": 1000,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, _, found = plan(capsys, "--model", str(tmp_path), "--topology", "v5e-4", "--compile", "0")
    assert (status, found["model"]) == (0, str(tmp_path))
    folder = str(find_model("calculator-tiny").folder)
    assert plan(capsys, "--model", folder, "--topology", "v5e-4", "--compile", "0")[0] == 0
    for change, words in (
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"intermediate_size": 99}, "model.quantize is nf4, which down_proj does not allow: nf4 packs inputs in pairs"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert main(["plan", "--model", str(tmp_path), "--topology", "v5e-4", "--quantize", "nf4"]) == 2
        assert words in capsys.readouterr().err


def test_every_published_model_has_a_plan():
    for name, config in PRESETS.items():
        topology = planning.Topology.parse("v5p-256")
        best = planning.ranked(planning.Plan(config, topology, 4096, 128))[0]
        assert best.fits(topology), name
