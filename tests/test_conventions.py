"""What no module may contain, since it would hurt where nobody looks: code in data, and paths of one machine."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("trajectories", "policy", "environments", "transforms", "learner", "emulator", "pipelines", "benchmarks")
MORE = ("examples", "templates", "docs", "tests")

CODE_IN_DATA = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
PICKLING_CODERS = {"PickleCoder", "DillCoder", "CloudpickleCoder", "FastPrimitivesCoder", "MemoizingPickleCoder"}


def unpickling(source: str) -> list[str]:
    """Everything in `source` that would run code out of bytes from a wire or from storage."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.split(".")[0] in CODE_IN_DATA]
            case ast.ImportFrom(module=str(module), names=names):
                full = {*module.split("."), *(alias.name for alias in names)}
                found += sorted(full & (CODE_IN_DATA | PICKLING_CODERS))
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in PICKLING_CODERS:
                found.append(name)
            case ast.keyword(arg="allow_pickle", value=value) if not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                found.append("allow_pickle")
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                found.append(name)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "from apache_beam.coders import PickleCoder",
        "beam.coders.FastPrimitivesCoder()",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "eval(text)",
    ],
)
def test_code_in_data_is_seen(source):
    assert unpickling(source)


RUNS_CODE = {"environments/sandbox/server.py": ["eval", "exec", "exec"]}
"""Where a policy's code runs: in a process that locked itself up before it read it."""


@pytest.mark.parametrize("room", ROOMS)
def test_no_code_in_data(room):
    found = {
        str(path.relative_to(ROOT)): sorted(names)
        for path in sorted((ROOT / room).rglob("*.py"))
        if (names := unpickling(path.read_text()))
    }
    assert found == {name: names for name, names in RUNS_CODE.items() if name.startswith(f"{room}/")}


def test_no_paths_of_one_machine():
    """Absolute paths of somebody's machine or of the workplace; /headrace and /opt are the image's own."""
    pattern = re.compile(r"""(?<![\w.~$}-])/(home|root|Users|work|farm|mnt)/\w""")
    found = []
    for folder in (*ROOMS, *MORE):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".toml", ".md", ".tf", ".json", ""} and path.is_file():
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    if pattern.search(line):
                        found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
