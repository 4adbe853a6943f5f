"""Run files name environments; what is wrong with a name is said with what was found instead."""

import re
import sys
from pathlib import Path

import pytest

from environments.environment import EnvironmentSettings, find_named, load_environment


def load(name, **options):
    return load_environment(EnvironmentSettings(name=name, options=options), seed=3)


def test_the_runs_seed_and_the_options_reach_the_environment():
    assert load("environments.calculator:WordCalculator", latency_s=0.25).latency_s == 0.25
    assert load("environments.calculator:Calculator").seed == 3
    assert load("environments.calculator:Calculator", seed=9).seed == 9


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("environments.calculator:Calculater", {}, "no such name.*near it: Calculator"),
        (
            "environments.calculater:Calculator",
            {},
            "no module environments.calculater.*near it: environments.calculator",
        ),
        ("enviroments.calculator:Calculator", {}, "no module enviroments.*code.path"),
        ("environments.calculator:_NAMES", {}, "a tuple, which cannot be called"),
        ("environments.calculator:Calculator", {"latency": 1}, "latency.*options may hold latency_s, operations, seed"),
        (
            "environments.calculator:Calculator",
            {"latency_s": -1, "operations": 3},
            r"^environment\.name '[\w.:]+': environment\.options\.latency_s must be 0 or more seconds, found -1$",
        ),
        ("environments.tools:Score", {"reward_parts": {}, "success": True}, "`make` and `tasks`, found a Score"),
    ],
)
def test_a_wrong_name_says_what_was_found(name, options, says):
    with pytest.raises(ValueError, match=says):
        load(name, **options)


def test_a_module_that_lacks_a_library_is_told_from_a_missing_module(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_library_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError, match=re.escape("importing needs_more failed: No module named 'a_library_nobody_has'")
    ):
        load("needs_more:Env")
    sys.modules.pop("needs_more", None)


def test_what_the_environments_own_code_raises_names_the_setting_and_the_line(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("x = 1\n\nx.nothing\n")
    (tmp_path / "broken_call.py").write_text("def Env(path):\n    return open(path)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"environment\.name 'broken_module:Env'.*AttributeError.*_module\.py, line 3"):
        load("broken_module:Env")
    with pytest.raises(ValueError, match=r"'broken_call:Env': FileNotFoundError.*broken_call\.py, line 2"):
        load("broken_call:Env", path="/no/file")
    sys.modules.pop("broken_call", None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "calculator:"), ("name", ""), ("max_turns", 0), ("step_timeout_s", float("inf")), ("max_concurrency", 0)],
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"environment\.{field} must .*found"):
        EnvironmentSettings(**{field: value})


def install(folder, package, **points):
    """A package's metadata, as an installer leaves it."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[headrace.environments]\n{lines}")


def test_an_installed_name_stands_for_a_module_and_a_name(tmp_path, monkeypatch):
    install(tmp_path, "mine", headrace_sums="environments.calculator:Calculator")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("headrace_sums", operations=1).operations == 1
    with pytest.raises(ValueError, match=r"is it headrace_sums\?; installed are .*headrace_sums"):
        load("headrace_sum")
    with pytest.raises(ValueError, match=r"no package has installed it; installed are [^;]*headrace_sums[^;]*$"):
        load("zzzzzz")
    with pytest.raises(
        ValueError, match=r"'headrace_sums': environment\.options\.operations must be at least 1, found 0$"
    ):
        load("headrace_sums", operations=0)
    install(tmp_path / "more", "theirs", headrace_sums="environments.calculator:WordCalculator")
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    with pytest.raises(ValueError, match=r"several packages have installed it: name one of environments\.calculator:C"):
        load("headrace_sums")


def test_the_built_in_names_stand_for_what_is_there():
    setup = (Path(__file__).parents[2] / "setup.py").read_text()
    names = dict(re.findall(r'"(\w+)=(environments\.\w+:\w+)"', setup))
    assert set(names) >= {"calculator", "word_calculator", "verifiable"}
    assert all(callable(find_named(value, name)) for name, value in names.items())
