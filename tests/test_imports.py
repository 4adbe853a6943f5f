"""The table of docs/architecture.md: which room may import which, lazily or not."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "trajectories": set(),
    "policy": {"trajectories"},
    "environments": {"trajectories", "policy"},
    "transforms": {"trajectories", "policy", "environments"},
    "learner": {"trajectories", "policy"},
    "emulator": set(),
    "pipelines": {"trajectories", "policy", "environments", "transforms", "learner", "emulator"},
}
OURS = {*MAY_IMPORT, "benchmarks", "examples", "templates", "tests"}


def imported(source: str) -> set[str]:
    """Modules that `source` names in an import anywhere, also inside functions, and in `import_module("…")`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute: a room is named where it is used"
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {one.value for one in node.args[:1] if isinstance(one, ast.Constant)}
    return found


def rooms(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported(source)} & OURS


def test_lazy_and_dynamic_imports_are_seen():
    source = (
        "def f():\n    from learner.step import x\n    import os, policy.engine\n    import_module('emulator.pubsub')"
    )
    assert rooms(source) == {"learner", "policy", "emulator"}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    forbidden = {
        str(path.relative_to(ROOT)): found
        for path in files
        if (found := rooms(path.read_text()) - MAY_IMPORT[room] - {room})
    }
    assert forbidden == {}


@pytest.mark.parametrize("room", ["trajectories", "emulator"])
def test_the_contract_and_the_server_need_neither_beam_nor_jax(room):
    needed = {name.split(".")[0] for path in (ROOT / room).rglob("*.py") for name in imported(path.read_text())}
    assert not needed & {"apache_beam", "jax", "flax", "optax", "orbax"}
