"""docs/run-file.md, made from the settings' own docstrings: `python -m pipelines.reference` renews it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import typing
from pathlib import Path
from typing import Any

from pipelines.config import Run
from pipelines.settings import write

TARGET = Path(__file__).resolve().parent.parent / "docs" / "run-file.md"

PREFACE = """\
# The run file

A run is one TOML file. The rollout job and the learner read the same one. `headrace run FILE --set section.key=value`
overrides a value, `--dry-run` prints the resolved run. What cannot work is refused with the key and the mend.
`examples/` holds run files to start from. This page is made from the source by `python -m pipelines.reference`.
"""


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Field name -> the docstring right under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = " ".join(text.value.value.split())
    return found


def page() -> str:
    """The whole page."""
    hints = typing.get_type_hints(Run)
    sections = [field.name for field in dataclasses.fields(Run) if dataclasses.is_dataclass(hints[field.name])]
    plain = [field.name for field in dataclasses.fields(Run) if field.name not in sections]
    values = write(Run("name"))
    del values["name"]
    parts = [PREFACE, "## At the top\n", _table(Run, plain, values)]
    for section in sections:
        cls = hints[section]
        defaults = values[section]
        parts += [f"## [{section}]\n", _table(cls, [field.name for field in dataclasses.fields(cls)], defaults)]
    return "\n".join(parts)


def _table(cls: type[Any], names: list[str], defaults: dict[str, Any]) -> str:
    docs = field_docs(cls)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name in names:
        default = f"`{json.dumps(defaults[name])}`" if name in defaults else "unset"
        rows.append(f"| `{name}` | {default} | {docs[name].replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
