import dataclasses
import json
from pathlib import Path

import pytest

from pipelines import reference
from pipelines.cli import DEMO, TINY_DEMO, main
from pipelines.config import Run, load_run
from pipelines.learner import learner_spec
from pipelines.settings import SettingsError
from policy.tool_calls import FORMATS


@pytest.mark.parametrize("file", [DEMO, TINY_DEMO])
def test_the_examples_are_valid_and_survive_resolution(file: Path, tmp_path: Path) -> None:
    run = load_run(str(file), ["run_id=x-1", "storage=/tmp/somewhere"])
    resolved = tmp_path / "run.json"
    resolved.write_text(run.to_json())
    assert load_run(str(resolved)) == run
    spec = run.rollout_spec()
    assert (spec.run_id, spec.storage_url, spec.topics.tasks) == (
        "x-1",
        "/tmp/somewhere",
        "projects/headrace-local/topics/headrace-x-1-tasks",
    )


def write_run(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_an_algorithm_fills_in_what_the_run_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = '[model]\npath = "calculator-tiny"\n[sampling]\nmax_context = 300\n[loss]\nclip_high = 0.3'
    file = write_run(tmp_path, f'name = "a"\nalgorithm = "dr_grpo"\n{sections}')
    run = load_run(file)
    assert (run.advantages.estimator, run.loss.aggregation, run.loss.constant_length) == ("dr_grpo", "constant", 300)
    assert (run.loss.clip_low, run.loss.clip_high) == (0.2, 0.3)
    assert load_run(file, ["loss.constant_length=7"]).loss.constant_length == 7
    assert main(["run", file, "--dry-run", "--set", "algorithm=gspo"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["algorithm"], shown["loss"]["policy_loss"], shown["loss"]["clip_low"]) == ("gspo", "gspo", 3e-4)
    assert (shown["advantages"]["estimator"], shown["loss"]["clip_high"]) == ("grpo", 0.3)


def test_the_default_algorithm_is_the_sections_own_defaults(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, 'name = "a"'))
    assert (run.advantages, run.loss) == (Run("a").advantages, Run("a").loss)


def test_a_resolved_run_keeps_its_settings_whatever_its_algorithm_is_called(tmp_path: Path) -> None:
    resolved = tmp_path / "run.json"
    run = load_run(str(TINY_DEMO), ["run_id=x-1", "algorithm=rloo", "loss.clip_low=0.1"])
    resolved.write_text(run.to_json())
    assert load_run(str(resolved), ["algorithm=rloo"]) == run
    assert load_run(str(resolved), ["loss.policy_loss=cispo", "loss.correction=none"]).loss.policy_loss == "cispo"
    with pytest.raises(SettingsError, match=r"set the keys of \[advantages\] and \[loss\] themselves"):
        load_run(str(resolved), ["algorithm=grpo"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "a"\n[learner]\ngroup_sise = 4', "unknown key learner.group_sise; did you mean learner.group_size"),
        ('name = "a"\nslots = 4', "unknown key slots; did you mean sampling.slots"),
        ('name = "a"\n[sampling]\nsteps = 4', "unknown key sampling.steps; did you mean learner.steps"),
        ('name = "a"\nshard = 4', "did you mean rollouts.shards or packing.shards"),
        ('name = "A b"', "lower-case letters"),
        ("[model]", "name must be set"),
        ('name = "a"\n[sampling]\nmax_context = 4000', "add a bucket"),
        ('name = "a"\n[sampling]\nmax_context = 64\nmax_tokens = 64', "must be below sampling.max_context"),
        ('name = "a"\n[sampling]\ntemperature = 0.0', "above 0"),
        ('name = "a"\n[sampling]\nmin_p = 0.1\nmax_kept = 0', "could not renormalise"),
        ('name = "a"\n[sampling]\ntop_k = 80', "at least sampling.top_k"),
        ('name = "a"\n[loss]\ncorrection = "none"', "Set a correction such as 'tis', or max_staleness = 0"),
        ('name = "a"\n[loss]\npolicy_loss = "gspo"', "would count it twice"),
        ('name = "a"\nalgorithm = "grpq"', "algorithm must be one of dapo, grpo"),
        ('name = "a"\nalgorithm = "ppo"\n[loss]\nkl_coefficient = 0.1\nkl_in = "reward"', "kl_in must be 'loss'"),
        ('name = "a"\n[environment]\nepisode_timeout_s = 5000.0', "issued twice"),
        ('name = "a"\n[learner]\nno_progress_s = 60.0', "one slow group ends the run"),
        ('name = "a"\n[sharding]\nfsdp = 8', r"rows_per_call \(2\) must be a multiple of .* \(8\), .* set it to 8"),
        ('name = "a"\n[failures]\nmin_members = 9\n[learner]\ngroup_size = 8', "else every group fails"),
        ('name = "a"\n[failures]\npolicy = "retry"', "a slow member would fail its group"),
        ('name = "a"\nstorage = "gs://b/x"', "set cloud.project"),
        ('name = "a', "no TOML: Unterminated string.*close the quotes"),
        ('name = "a"\n[model]\npath = smollm2', 'line 3, column 8.*double quotes \\("like this"\\)'),
        ('name = "a"\n[learner]\nsteps: 3', "a line is key = value"),
        ('name = "a"\n[lora]\nrank = 8\n[lora]\nalpha = 8.0', "the section stands in the file twice"),
    ],
)
def test_runs_that_cannot_work_are_refused_with_the_mend(text: str, message: str, tmp_path: Path) -> None:
    file = write_run(tmp_path, text)
    with pytest.raises(SettingsError, match=message) as caught:
        load_run(file)
    assert file in str(caught.value)


def test_the_learner_keeps_what_the_sampler_keeps_and_nothing_otherwise(tmp_path: Path) -> None:
    file = write_run(tmp_path, 'name = "a"\n[sampling]\nmax_kept = 12')
    assert learner_spec(load_run(file)).max_kept == 0
    assert learner_spec(load_run(file, ["sampling.top_p=0.9"])).max_kept == 12


def test_the_command_prints_the_resolved_run_or_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(TINY_DEMO), "--dry-run", "--set", "learner.steps=3", "--seed", "5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["learner"]["steps"], printed["seed"]) == (3, 5)
    assert main(["run", str(tmp_path / "none.toml"), "--dry-run"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["demo", "--tiny", "--dry-run", "--set", "learner.stepz=3"]) == 2
    assert "did you mean learner.steps?" in capsys.readouterr().err


def test_a_syntax_error_shows_its_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_run(write_run(tmp_path, 'name = "a"\nseed = zero\n'))
    assert str(caught.value).splitlines()[1:] == ["    seed = zero", "           ^"]


def test_a_folder_is_no_run_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="it is a folder"):
        load_run(str(tmp_path))


def test_code_path_is_importable_from_the_run_file_on(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "headrace_test_environment.py").write_text("VALUE = 7\n")
    load_run(write_run(tmp_path, 'name = "a"\n[code]\npath = "mine"'))
    import headrace_test_environment  # type: ignore[import-not-found]

    assert headrace_test_environment.VALUE == 7


def test_the_reference_lists_every_choice_that_a_setting_has() -> None:
    rows = {}
    section = ""
    for line in reference.page().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## [").removesuffix("]")
        elif line.startswith("| `"):
            rows[section, line.split("`")[1]] = line
    listed = set()
    run = Run("a")
    sections = {field.name: getattr(run, field.name) for field in dataclasses.fields(Run)}
    settings = {"## At the top": run} | {name: one for name, one in sections.items() if dataclasses.is_dataclass(one)}
    for name, one in settings.items():
        for field in dataclasses.fields(one):
            for choice in reference.choices(one, field.name):
                assert f"`{choice}`" in rows[name, field.name], (name, field.name, choice)
                listed.add(field.name)
    assert listed >= {
        "algorithm",
        "dtype",
        "backend",
        "dialect",
        "estimator",
        "staleness",
        "policy_loss",
        "clip_anchor",
    }
    assert all(f"`{name}`" in rows["model", "tool_calls"] for name in FORMATS)
    assert "`drop`: No step waits" in rows["learner", "staleness"]
    assert rows["## At the top", "name"].split("|")[2].strip() == "*required*"


def test_the_reference_of_the_run_file_is_current() -> None:
    """docs/run-file.md is made from the settings' docstrings; `python -m pipelines.reference` renews it."""
    assert reference.TARGET.read_text() == reference.page()
