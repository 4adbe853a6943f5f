"""The image installs the versions that the rest of the project pins, and only files that exist and are meant for it."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "templates" / "Dockerfile").read_text()
LOCK = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))


def setup_arguments():
    (call,) = [node.value for node in ast.parse((ROOT / "setup.py").read_text()).body if isinstance(node, ast.Expr)][1:]
    return {one.arg: one.value for one in call.keywords}


def sources():
    """What the Dockerfile copies from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_versions_are_the_locked_ones():
    assert (
        re.search(r"^FROM apache/beam_python3\.11_sdk:(\S+) AS beam$", DOCKERFILE, re.MULTILINE)[1]
        == (LOCK["apache-beam"])
    )
    (beam,) = [one for one in ast.literal_eval(setup_arguments()["install_requires"]) if one.startswith("apache-beam")]
    assert LOCK["apache-beam"].startswith(beam.split("==")[1].rstrip("*"))
    assert f"uv=={LOCK['uv']} " in DOCKERFILE
    assert "FROM python:3.11-slim" in DOCKERFILE
    assert "python311-template-launcher-base" in DOCKERFILE


def test_every_source_exists_and_is_let_through():
    let_through = re.findall(r"^!(.+)$", (ROOT / "templates" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(sources()) == set(let_through)
    assert [source for source in sources() if not (ROOT / source).exists()] == []


def test_every_package_is_in_the_image():
    packages = next(
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "PACKAGES"
    )
    assert set(packages) <= set(sources())


def test_template_main_is_there_and_its_folder_shadows_nothing():
    main = re.search(r"^ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/headrace/(.+)$", DOCKERFILE, re.MULTILINE)[1]
    assert (ROOT / main).exists()
    # The launcher runs the file as a script, so Python puts the script's folder before everything else.
    installed = {name.replace("-", "_") for name in LOCK}
    names = {path.stem for path in (ROOT / main).parent.iterdir()}
    assert not names & (set(sys.stdlib_module_names) | installed)


def test_the_image_on_top_installs_with_a_command_that_is_there():
    text = (ROOT / "templates" / "code.Dockerfile").read_text()
    module, folder = re.search(r"^RUN python -m (\S+) (\S+)$", text, re.MULTILINE).groups()
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    assert f" {folder}/\n" in text
