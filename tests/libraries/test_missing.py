"""A library that is not installed is named with the extra that brings it, when the run is checked."""

import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "module", "extra", "options"),
    [
        ("reasoning_gym:ReasoningGym", "reasoning_gym", "reasoning-gym", {}),
        ("gymnasium_text:GymnasiumText", "gymnasium", "gymnasium", {"id": "FrozenLake-v1"}),
        ("textarena:TextArena", "textarena", "textarena", {"id": "TicTacToe-v0"}),
        ("mcp:MCP", "mcp", "mcp", {"tasks_file": "tasks.jsonl", "reward": "m:f", "url": "http://127.0.0.1:1/mcp"}),
        ("openenv:OpenEnv", "openenv", "openenv", {"urls": "http://127.0.0.1:1"}),
        ("verifiers:Verifiers", "verifiers", "verifiers", {"taskset": "any"}),
    ],
)
def test_the_extra_is_named(play, monkeypatch, adapter, module, extra, options):
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # as Python marks what cannot be imported
    with pytest.raises(ValueError, match=rf"package {module} is not installed: pip install 'headrace\[{extra}\]'"):
        play.spec(adapter, **options)


def test_a_function_that_is_not_there_is_named_with_its_option(play):
    options = {"id": "FrozenLake-v1", "act": "no_such_module:act"}
    with pytest.raises(ValueError, match=r"environment\.options\.act 'no_such_module:act': there is no module"):
        play.spec("gymnasium_text:GymnasiumText", **options)
