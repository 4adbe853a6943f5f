"""The template's spec is what Dataflow's API accepts, and its parameters are those that the template's main reads."""

import ast
import copy
import json
import re
from pathlib import Path

import pytest
from google.cloud import dataflow_v1beta3
from google.protobuf import json_format

from pipelines.cloud import CloudSettings, Workers, launch_request
from templates.spec import METADATA, container_spec, main

IMAGE = "us-central1-docker.pkg.dev/my-project/headrace/rollouts:1"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def metadata():
    return json.loads(METADATA.read_text())


def test_written_spec_is_a_streaming_container_spec(tmp_path):
    out = tmp_path / "templates" / "rollouts.json"
    assert main(["--image", IMAGE, "--out", str(out)]) == 0
    spec = json_format.Parse(out.read_text(), dataflow_v1beta3.ContainerSpec.pb()())
    assert spec.image == spec.default_environment.sdk_container_image == IMAGE
    assert spec.sdk_info.language == dataflow_v1beta3.SDKInfo.Language.PYTHON
    # gcloud's own build command loses these.
    assert spec.metadata.streaming
    assert spec.metadata.supports_at_least_once
    assert spec.metadata.default_streaming_mode == "AT_LEAST_ONCE"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda found: found.update(stremaing=True), "stremaing"),
        (lambda found: found["parameters"][0].update(paramType="GCS_FILE"), "GCS_FILE"),
        (lambda found: found["parameters"][0].update(paramType=4), "canonical form 'GCS_READ_FILE'"),
        (lambda found: found["parameters"][0].update(help_text=found["parameters"][0].pop("helpText")), "help_text"),
        (lambda found: found.update(streaming="yes"), "streaming"),
    ],
)
def test_invalid_metadata_is_refused(metadata, break_it, message):
    broken = copy.deepcopy(metadata)
    break_it(broken)
    with pytest.raises(ValueError, match=message):
        container_spec(IMAGE, broken)


def test_an_image_whose_tag_moves_is_refused(capsys):
    assert main(["--image", "us-docker.pkg.dev/my-project/headrace/rollouts:latest"]) == 2
    assert "tag other than latest" in capsys.readouterr().err


def test_parameters_are_those_of_the_main_and_of_the_launch_request(metadata):
    tree = ast.parse((ROOT / "pipelines" / "rollouts.py").read_text())
    options = [
        node.args[0].value.removeprefix("--")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    parameters = {one["name"]: one for one in metadata["parameters"]}
    assert sorted(options) == sorted(parameters)

    cloud = CloudSettings("my-project", "us-central1", "gs://my-runs", IMAGE, service_account="w@p.iam")
    sent = launch_request("r1", cloud, Workers(1, 2, 8, 8))["launchParameter"]["parameters"]
    assert sent.keys() <= parameters.keys()
    assert {name for name, one in parameters.items() if not one.get("isOptional")} <= sent.keys()
    for name, value in sent.items():
        for pattern in parameters[name].get("regexes", []):
            assert re.fullmatch(pattern, value)
