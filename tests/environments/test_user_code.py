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


def wheel(folder, package="tiny_dependency"):
    """A wheel of a package that nobody has, as a build backend would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{package}-1.0"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as packed:
        packed.writestr(f"{package}.py", "REWARD = 0.5\n")
        packed.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
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


BOTH = f"""
import sys
sys.path += [{str(ROOT)!r}, *sys.argv[2:]]
from environments.user_code import make_importable
make_importable(sys.argv[1])
import other_dependency, tiny_dependency
print(tiny_dependency.__file__, other_dependency.__file__)
"""


def test_two_environments_of_a_machine_that_lack_other_packages_share_no_packages(folder, tmp_path):
    with (folder / "requirements.txt").open("a") as listed:
        listed.write(wheel(folder / "wheels", "other_dependency"))
    url, inside, cache = send(folder, open_storage(str(tmp_path / "bucket"))), tmp_path / "inside", tmp_path / "cache"
    with zipfile.ZipFile(folder / "wheels" / "other_dependency-1.0-py3-none-any.whl") as packed:
        packed.extractall(inside)
    home = {**os.environ, "XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path / "home")}
    for more, place in [([str(inside)], inside), ([], cache)]:
        command = [sys.executable, "-I", "-c", BOTH, url, *more]
        done = subprocess.run(command, cwd=tmp_path, env=home, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        tiny, other = done.stdout.split()
        assert tiny.startswith(str(cache))
        assert other.startswith(str(place))


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


def test_links_that_would_lead_nowhere_elsewhere_are_refused_and_those_of_a_venv_stay_here(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    packed = archive(folder)
    for name in (".venv", "venv"):
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin" / "python").symlink_to(sys.executable)
        (folder / name / "lib64").symlink_to(tmp_path / "elsewhere")
    assert archive(folder) == packed
    (folder / "same").symlink_to(folder / "wheels")
    with pytest.raises(CodeError, match="same is a link to a folder: copy in"):
        archive(folder)
    (folder / "same").unlink()
    (folder / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CodeError, match="data is a link out of the folder"):
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


def test_a_package_folder_that_is_required_is_looked_for_by_the_name_it_installs(tmp_path, monkeypatch):
    monkeypatch.setattr(user_code, "_folder", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    listed = tmp_path / "requirements.txt"
    for name in ("nobody-has-this", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "1.0"\n')
    listed.write_text("./numpy\n./nobody-has-this[more]\n")
    with pytest.raises(CodeError, match=r"requires nobody-has-this, which this Python lacks: install it"):
        make_importable(str(tmp_path))
    listed.write_text("./numpy\n./elsewhere; sys_platform == 'win32'\n.\n")
    make_importable(str(tmp_path))
    listed.write_text("./not-here\n")
    with pytest.raises(CodeError, match=r"requires \./not-here, found no such file or folder"):
        make_importable(str(tmp_path))


def test_what_is_met_and_what_is_missing(tmp_path):
    lines = ["numpy", "numpy<1", "nobody-has-this", "pywin32; sys_platform == 'win32'", "git+https://example.com/x"]
    assert missing(lines) == ["numpy<1", "nobody-has-this", "git+https://example.com/x"]
    assert missing(lines, unreadable=False) == ["numpy<1", "nobody-has-this"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\ndependencies = ["nobody-has-this"]\n')
    assert user_code.requirements_of(tmp_path) == ["nobody-has-this"]


def test_requirements_may_lie_in_several_files(tmp_path):
    listed, more = tmp_path / "requirements.txt", tmp_path / "more" / "base.txt"
    more.parent.mkdir()
    listed.write_text("numpy  # is here\n-r more/base.txt\n--find-links ./wheels\ngit+https://example.com/x#egg=x\n")
    more.write_text("# base\nnobody-has-this \\\n  >=1\n-r ../requirements.txt\n")
    found = user_code.requirements_of(tmp_path)
    assert [" ".join(line.split()) for line in found] == [
        "numpy",
        "nobody-has-this >=1",
        "--find-links ./wheels",
        "git+https://example.com/x#egg=x",
    ]
    assert len(missing(found, unreadable=False)) == 1
    more.write_text("numpy==2.4 --hash=sha256:00\n")
    with pytest.raises(CodeError, match=r"base\.txt: hashes cannot be checked .* leave --hash out"):
        user_code.requirements_of(tmp_path)
    more.unlink()
    with pytest.raises(CodeError, match=r"it names more/base\.txt, found no such file"):
        user_code.requirements_of(tmp_path)


def test_what_cannot_be_installed_says_what_the_installer_said(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "requirements.txt").write_text("./wheels/not-there.whl\n")
    with pytest.raises(CodeError, match=r"not-there\.whl, which code\.path requires, cannot be installed here"):
        make_importable(send(folder, open_storage(str(tmp_path / "bucket"))))
