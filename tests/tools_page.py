"""The folder that docs/tools.md begins with, as it stands there."""

from __future__ import annotations

import contextlib
import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "tools.md"


def write_shop(folder: Path) -> Path:
    """Write the page's files and run its program in `folder`; returns the run file."""
    blocks = [textwrap.dedent(block) for block in re.findall(r"\n\n((?:    .*\n|\n(?=    ))+)", PAGE.read_text())]
    names = ("shop.toml", "questions.jsonl", "corpus.jsonl")
    folder.mkdir()
    for name, text in zip(names, blocks, strict=False):
        (folder / name).write_text(text)
    with contextlib.chdir(folder):
        exec(blocks[len(names)], {})
    return folder / names[0]
