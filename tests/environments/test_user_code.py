"""A user's folder travels: what it holds and requires is importable in a process that has seen neither."""

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from environments import user_code
from environments.user_code import CodeError, archive, make_importable, missing, send
from trajectories.storage import open_storage

ROOT = Path(__file__).parents[2]
ENVIRONMENT = """
from pathlib import Path

import tiny_dependency
from environments.tasks import task_file
from environments.verifiable import Verifiable


def Mine(seed=0):
    tasks = task_file(Path(__file__).with_name("tasks.jsonl"), held_out=0.0)
    return Verifiable(tasks, lambda payload, answer: tiny_dependency.REWARD)
"""
PROCESS = f"""
import json, sys
sys.path.append({str(ROOT)!r})
from environments.user_code import make_importable
from environments.environment import EnvironmentSettings, load_environment
make_importable(sys.argv[1])
spec = load_environment(EnvironmentSettings(name="mine_travels:Mine"), 0)
import tiny_dependency, mine_travels
print(json.dumps([spec.tasks.task(0), spec.reward({{}}, ""), tiny_dependency.__file__, mine_travels.__file__]))
"""


def wheel(folder):
    """A wheel of a package that nobody has, as a build backend would write it."""
    folder.mkdir(parents=True)
    name = "tiny_dependency-1.0"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as packed:
        packed.writestr("tiny_dependency.py", "REWARD = 0.5\n")
        packed.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny_dependency\nVersion: 1.0\n")
        packed.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{name}.dist-info/RECORD", "")
    return f"./wheels/{name}-py3-none-any.whl"


@pytest.fixture
def folder(tmp_path):
    mine = tmp_path / "mine"
    line = wheel(mine / "wheels")
    (mine / "requirements.txt").write_text(f"numpy>=1  # is here\n{line}\n")
    (mine / "mine_travels.py").write_text(ENVIRONMENT)
    (mine / "tasks.jsonl").write_text('{"question": "1+1"}\n')
    return mine


def test_a_clean_process_imports_the_environment_and_what_it_requires(folder, tmp_path):
    storage = open_storage(str(tmp_path / "bucket"))
    url = send(folder, storage)
    empty = tmp_path / "empty"
    empty.mkdir()
    home = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    command = [sys.executable, "-I", "-c", PROCESS, url]

    def process():
        done = subprocess.run(command, cwd=empty, env=home, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found = process()
    assert found[:2] == [{"question": "1+1"}, 0.5]
    assert all(path.startswith(str(tmp_path / "cache")) for path in found[2:])
    storage.delete(url.rpartition("/")[2])
    assert process() == found  # the machine has it


def test_an_archive_says_what_it_holds_and_holds_no_secret(folder, tmp_path):
    (folder / ".env").write_text("KEY=1")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "mine.pyc").write_bytes(b"")
    packed = archive(folder)
    names = zipfile.ZipFile(io.BytesIO(packed)).namelist()
    assert names == [
        "mine_travels.py",
        "requirements.txt",
        "tasks.jsonl",
        "wheels/tiny_dependency-1.0-py3-none-any.whl",
    ]
    (folder / "tasks.jsonl").touch()
    assert archive(folder) == packed
    storage = open_storage(str(tmp_path / "bucket"))
    url = send(folder, storage)
    assert url == send(folder, storage) == f"{storage.url}/{hashlib.sha256(packed).hexdigest()}.zip"
    (folder / "stolen.txt").symlink_to("/etc/hostname")
    with pytest.raises(CodeError, match=r"stolen\.txt is a link out of the folder"):
        archive(folder)


def test_a_folder_that_is_too_large_names_its_largest_file(folder, monkeypatch):
    (folder / "corpus.txt").write_text("x" * 5000)
    monkeypatch.setattr(user_code, "MOST_BYTES", 4000)
    with pytest.raises(CodeError, match=r"largest file corpus\.txt: keep data in a bucket"):
        archive(folder)


def test_an_archive_that_was_changed_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    storage = open_storage(str(tmp_path / "bucket"))
    url = send(folder, storage)
    storage.write(url.rpartition("/")[2], b"something else")
    with pytest.raises(CodeError, match="its contents have the SHA-256"):
        make_importable(url)


def test_what_a_folder_on_this_machine_lacks_is_said_and_not_installed(folder):
    with pytest.raises(CodeError, match=r"requires \./wheels/tiny.*python -m environments\.user_code"):
        make_importable(str(folder))
    with pytest.raises(CodeError, match="found nothing at"):
        make_importable(str(folder / "none"))


def test_what_is_met_and_what_is_missing(tmp_path):
    lines = ["numpy", "numpy<1", "nobody-has-this", "pywin32; sys_platform == 'win32'", "git+https://example.com/x"]
    assert missing(lines) == ["numpy<1", "nobody-has-this", "git+https://example.com/x"]
    assert missing(lines, unreadable=False) == ["numpy<1", "nobody-has-this"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\ndependencies = ["nobody-has-this"]\n')
    assert user_code.requirements_of(tmp_path) == ["nobody-has-this"]


def test_what_cannot_be_installed_says_what_the_installer_said(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "requirements.txt").write_text("./wheels/not-there.whl\n")
    with pytest.raises(CodeError, match=r"not-there\.whl, which code\.path requires, cannot be installed here"):
        make_importable(send(folder, open_storage(str(tmp_path / "bucket"))))
