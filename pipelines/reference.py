"""docs/run-file.md, made from the settings' own docstrings: `python -m pipelines.reference` renews it.

What a setting may be is read from the settings as well: an enumeration has members with docstrings, and a text that
names a line of some table is refused with all the names there are.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from pipelines.config import Run
from pipelines.settings import write

TARGET = Path(__file__).resolve().parent.parent / "docs" / "run-file.md"

PREFACE = """\
# The run file

A run is one TOML file. The rollout job and the learner read the same one. `headrace run FILE --set section.key=value`
overrides a value. `headrace run FILE --dry-run` opens the model and its chat format, makes the environment and asks for
its tasks, all on the machine where it is called, and prints the resolved run; it starts nothing. What cannot work is
refused with the key and the mend. `examples/` holds run files to start from.

*Unset* is the default of keys without a value: TOML has none for that, so leave the key out. `model.path` and `storage`
go by the current folder, `code.path` by the run file's. This page is made from the source by
`python -m pipelines.reference`, in the repository's root.
"""
_PROBE = "no such choice"


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Name of a field, or of an enumeration's member -> the docstring right under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[name] = " ".join(str(text.value.value).split())
    return found


def choices(settings: Any, name: str) -> dict[str, str]:
    """The values that a field may have -> what each means, where that is said; empty if they are not listed."""
    hint = typing.get_type_hints(type(settings))[name]
    for kind in (hint, *typing.get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            docs = field_docs(kind)
            return {str(member.value): docs.get(member.name, "") for member in kind}
    if hint is not str:
        return {}
    try:
        dataclasses.replace(settings, **{name: _PROBE})
    except ValueError as error:
        listed = re.search(rf"must be one of (.*); found '{_PROBE}'", str(error))
        return dict.fromkeys(listed[1].split(", "), "") if listed else {}
    return {}


def page() -> str:
    """The whole page."""
    hints = typing.get_type_hints(Run)
    sections = [field.name for field in dataclasses.fields(Run) if dataclasses.is_dataclass(hints[field.name])]
    plain = [field.name for field in dataclasses.fields(Run) if field.name not in sections]
    run = Run("name")
    parts = [PREFACE, "## At the top\n", _table(run, plain)]
    for section in sections:
        settings = getattr(run, section)
        parts += [f"## [{section}]\n", _table(settings, [field.name for field in dataclasses.fields(settings)])]
    return "\n".join(parts)


def _table(settings: Any, names: list[str]) -> str:
    docs, defaults = field_docs(type(settings)), write(settings)
    required = {field.name for field in dataclasses.fields(settings) if _is_required(field)}
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name in names:
        default = f"`{json.dumps(defaults[name])}`" if name in defaults else "*unset*"
        if name in required:
            default = "*required*"
        text = docs[name] + _listed(choices(settings, name), docs[name])
        rows.append(f"| `{name}` | {default} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _listed(values: dict[str, str], doc: str) -> str:
    """The choices with their meanings; nothing if the setting's own text names them all."""
    if all(f"`{value}`" in doc for value in values):
        return ""
    if not all(values.values()):
        return f" One of {', '.join(f'`{value}`' for value in values)}."
    return " " + " ".join(f"`{value}`: {meaning}" for value, meaning in values.items())


if __name__ == "__main__":
    TARGET.write_text(page())
