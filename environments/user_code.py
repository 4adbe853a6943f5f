"""The user's own folder (`code.path`) and what it requires, on every machine of a run.

Invariant: what a run was launched with is what each of its processes imports. A folder that travels is an archive named
by the SHA-256 of its contents, checked when it is unpacked; the same files make the same archive.

    python -m environments.user_code FOLDER     installs what FOLDER requires into this Python: for images
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from trajectories.storage import PreconditionFailed, Storage, open_storage

MOST_BYTES = 64 << 20
"""Of a folder that travels, uncompressed: every process fetches it at its start."""
LEFT_OUT = ("__pycache__", "node_modules", "venv", "runs", "build", "dist")
"""Folders that do not travel, and neither does anything whose name begins with a dot."""

_folder: Path | None = None
"""That of the run that this process belongs to."""


class CodeError(ValueError):
    """The user's folder cannot be used; says why and how to mend it."""


def make_importable(url: str) -> None:
    """Put a folder, or an archive that `send` wrote, on this process's import path; nothing for "".

    What an archive requires and this Python lacks is installed beside it, at the versions that go with those that are
    here. Of a folder on this machine it is only checked. Raises CodeError.
    """
    global _folder
    _folder = None
    if not url:
        return
    if not url.endswith(".zip"):
        folder = Path(url)
        if not folder.is_dir():
            raise CodeError(f"code.path must be a folder, found nothing at {url}")
        required = requirements_of(folder)
        if lacking := missing([_local_name(line, folder) or line for line in required], unreadable=False):
            raise CodeError(
                f"code.path {url} requires {', '.join(lacking)}, which this Python lacks: install it, for example with "
                f"`python -m environments.user_code {url}`"
            )
        _put_on_path([folder])
        _folder = folder
        return
    folder = _unpacked(url, _cache())
    lacking = missing(requirements_of(folder))
    packages = folder.parent / _packages_name(lacking)
    if lacking and not packages.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            install(folder, lacking, Path(fresh) / "packages")
            _take_place(Path(fresh) / "packages", packages)
    _put_on_path([folder], [packages] if lacking else [])
    _folder = folder


def located(path: str) -> str:
    """Where a file that a run file names lies: in `code.path`'s folder, where it travels with the run, else at `path`
    from the current folder. Absolute paths and addresses are what they say."""
    if "://" in path or os.path.isabs(path):
        return path
    return str(_folder / path) if _folder is not None and (_folder / path).exists() else path


def _packages_name(lacking: Sequence[str]) -> str:
    """Another Python on the same machine may lack other packages, or take other builds of them."""
    digest = hashlib.sha256("\n".join(lacking).encode()).hexdigest()[:16]
    return f"packages-{sys.implementation.cache_tag}-{digest}"


def send(folder: Path, storage: Storage) -> str:
    """Write the folder to `storage` as an archive; its address. Raises CodeError for one that is too large."""
    data = archive(folder)
    name = f"{hashlib.sha256(data).hexdigest()}.zip"
    with contextlib.suppress(PreconditionFailed):  # it is there, and has the same contents
        storage.write(name, data, if_generation=0)
    return f"{storage.url}/{name}"


def archive(folder: Path) -> bytes:
    """A zip file of the folder: a pure function of its files' names and contents."""
    files = sorted(path for path in folder.rglob("*") if _travels(path, folder))
    sizes = {path: path.stat().st_size for path in files}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(files, key=lambda path: sizes[path])
        raise CodeError(
            f"code.path {folder} must hold at most {MOST_BYTES >> 20} MiB, found {sum(sizes.values()) >> 20} MiB, the "
            f"largest file {largest.relative_to(folder)}: keep data in a bucket and name it by its gs:// address"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in files:
            packed.writestr(zipfile.ZipInfo(path.relative_to(folder).as_posix()), path.read_bytes())
    return buffer.getvalue()


def _travels(path: Path, folder: Path) -> bool:
    """Whether the file is part of the archive. Raises CodeError for a link that would lead nowhere elsewhere."""
    name = path.relative_to(folder)
    if any(part.startswith(".") or part in LEFT_OUT or part.endswith((".egg-info", ".pyc")) for part in name.parts):
        return False
    if path.is_symlink():
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CodeError(f"code.path {folder}: {name} is a link out of the folder: copy in what it leads to")
        if path.is_dir():
            raise CodeError(f"code.path {folder}: {name} is a link to a folder: copy in what it leads to")
    return path.is_file()


def requirements_of(folder: Path) -> list[str]:
    """What the folder asks for: the lines of requirements.txt and of the files it names by `-r`, else the dependencies
    in pyproject.toml. Raises CodeError."""
    listed, project = folder / "requirements.txt", folder / "pyproject.toml"
    if listed.is_file():
        return _listed(listed, ())
    if project.is_file():
        try:
            found = tomllib.loads(project.read_text()).get("project", {}).get("dependencies", [])
        except tomllib.TOMLDecodeError as error:
            raise CodeError(f"{project}: it is no TOML: {error}") from error
        return [str(one) for one in found]
    return []


def _listed(path: Path, within: tuple[Path, ...]) -> list[str]:
    found: list[str] = []
    for whole in path.read_text().replace("\\\n", " ").splitlines():
        line = re.split(r"(?:^|\s)#", whole)[0].strip()
        if "--hash" in line:
            raise CodeError(f"{path}: hashes cannot be checked beside packages that are here: leave --hash out")
        other = re.fullmatch(r"(?:-r|--requirement)[\s=]*(\S+)", line)
        if other is None:
            found += [line] if line else []
            continue
        inner = path.parent / other[1]
        if not inner.is_file():
            raise CodeError(f"{path}: it names {other[1]}, found no such file")
        if inner.resolve() not in (path.resolve(), *within):
            found += _listed(inner, (path.resolve(), *within))
    return found


def missing(requirements: Sequence[str], *, unreadable: bool = True) -> list[str]:
    """Those that this Python does not meet, and with `unreadable` those of which only the installer knows the name."""
    return [line for line in requirements if not line.startswith("-") and not _met(line, not unreadable)]


def _met(line: str, if_unreadable: bool) -> bool:
    if line.endswith(".whl"):
        line = Path(line).name.split("-")[0]
    try:
        wanted = Requirement(line)
    except InvalidRequirement:
        return if_unreadable
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return wanted.specifier.contains(version, prereleases=True)


def _local_name(line: str, folder: Path) -> str:
    """The name under which the package is installed whose source folder the requirement names, such as ./my_package;
    "" for what is no such line, and where the folder does not say it. Raises CodeError if there is no such folder."""
    path = folder / re.sub(r"\[[^]]*\]$", "", line)
    if not line.startswith(("./", "../", "/")) or re.search(r"[\s;#]", line):  # a marker or fragment is pip's to read
        return ""
    if path.is_file() or path.resolve() == folder.resolve():
        return ""
    if not path.is_dir():
        raise CodeError(f"code.path {folder} requires {line}, found no such file or folder")
    try:
        project = tomllib.loads((path / "pyproject.toml").read_text()).get("project", {})
    except FileNotFoundError:
        return ""
    except tomllib.TOMLDecodeError as error:
        raise CodeError(f"{path / 'pyproject.toml'}: it is no TOML: {error}") from error
    return str(project.get("name", ""))


def install(folder: Path, lacking: Sequence[str], target: Path | None = None) -> None:
    """Install what `folder` requires and is `lacking`, into `target` (default: this Python), without changing a package
    that is here. Raises CodeError with what the installer said."""
    here = {canonicalize_name(one.name): one.version for one in importlib.metadata.distributions() if one.name}
    options = [word for line in requirements_of(folder) if line.startswith("-") for word in shlex.split(line)]
    with tempfile.TemporaryDirectory() as work:
        constraints = Path(work) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(here.items())))
        place = ["--target", str(target)] if target else []
        command = [*_installer(), *place, "--constraint", str(constraints), *options, *lacking]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise CodeError(f"{', '.join(lacking)}, which code.path requires, cannot be installed here:\n{said}")


def _installer() -> list[str]:
    """The command that installs into this Python."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if not found:
        raise CodeError("what code.path requires cannot be installed: this Python has neither pip nor uv")
    return [found, "pip", "install", "--quiet", "--python", sys.executable]


def _cache() -> Path:
    """Where archives are unpacked: the user's cache; where there is none, a folder that only this process knows."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "headrace" / "code"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="headrace-code-"))
    return path


def _unpacked(url: str, cache: Path) -> Path:
    """The archive's files, fetched once on each machine."""
    where, _, name = url.rpartition("/")
    digest = name.removesuffix(".zip")
    files = cache / digest / "files"
    if files.is_dir():
        return files
    data = open_storage(where).read(name)
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise CodeError(f"code.path {url}: its contents have the SHA-256 {found}: launch the run again")
    files.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=files.parent) as fresh:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            packed.extractall(Path(fresh) / "files")
        _take_place(Path(fresh) / "files", files)
    return files


def _take_place(made: Path, final: Path) -> None:
    """Rename a finished folder to its place, unless another process was first."""
    made.mkdir(exist_ok=True)
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise


def _put_on_path(first: Sequence[Path], last: Sequence[Path] = ()) -> None:
    """The user's code comes before everything, what was installed for it after everything: ours wins."""
    sources = [one / "src" if (one / "src").is_dir() else one for one in first]
    for folder in [*first, *(one for one in sources if one not in first)]:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    sys.path += [str(folder) for folder in last if str(folder) not in sys.path]
    importlib.invalidate_caches()


def main(argv: Sequence[str] | None = None) -> int:
    """Install what a folder requires."""
    parser = argparse.ArgumentParser(
        prog="python -m environments.user_code", description="Install what a folder requires into this Python."
    )
    parser.add_argument("folder", type=Path, help="code.path: a folder with requirements.txt or pyproject.toml")
    args = parser.parse_args(argv)
    try:
        if lacking := missing(requirements_of(args.folder)):
            install(args.folder, lacking)
    except CodeError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
