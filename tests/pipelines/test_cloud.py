"""From a run to its launch request, to the scheduler job around it, and to an HTTP answer."""

import argparse
import base64
import dataclasses
import importlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud import dataflow_v1beta3, scheduler_v1
from google.protobuf import json_format

from environments.environment import EnvironmentSettings
from environments.user_code import make_importable
from learner.settings import LearnerSettings
from pipelines import cli, cloud, settings
from pipelines.cloud import CloudSettings, LaunchError
from pipelines.config import CodeSettings, Run, load_run
from templates.spec import main as write_spec
from tests.gcs import fake_gcs
from trajectories.storage import open_storage

SETTINGS = CloudSettings(
    project="my-project",
    region="us-central1",
    bucket="gs://my-runs/team",
    image="us-central1-docker.pkg.dev/my-project/headrace/rollouts:1",
    service_account="headrace-worker@my-project.iam.gserviceaccount.com",
    scheduler_service_account="headrace-scheduler@my-project.iam.gserviceaccount.com",
)
RUN = Run(
    name="calc-1",
    cloud=SETTINGS,
    learner=LearnerSettings(max_staleness=8, groups_per_step=64, group_size=16),
    environment=EnvironmentSettings(name="environments.calculator:Calculator", max_concurrency=512),
)


def sized(asked=SETTINGS, **changes):
    return cloud.size_workers(
        asked, **{"max_staleness": 8, "groups_per_step": 64, "group_size": 16, "max_concurrency": 512, **changes}
    )


def arguments(*argv):
    parser = argparse.ArgumentParser()
    cloud.add_arguments(parser)
    return parser.parse_args(["run.toml", *argv])


@pytest.mark.parametrize(
    ("changes", "minimum"),
    [({}, 18), ({"max_concurrency": 500}, 19), ({"max_staleness": 0, "groups_per_step": 1, "group_size": 2}, 1)],
)
def test_the_fewest_workers_run_everything_the_credits_allow(changes, minimum):
    workers = sized(**changes)
    assert workers.minimum == minimum
    assert workers.maximum == 2 * minimum
    assert (workers.minimum - 1) * workers.max_concurrency < workers.outstanding <= minimum * workers.max_concurrency


def test_a_bound_on_workers_that_the_run_does_not_fit_is_refused_with_the_mend():
    with pytest.raises(ValueError, match=r"18 needed for 9216 episodes.*raise environment\.max_concurrency"):
        sized(dataclasses.replace(SETTINGS, max_workers=10))


def test_request_is_what_dataflow_parses():
    private = dataclasses.replace(
        SETTINGS, subnetwork="regions/us-central1/subnetworks/s", public_ips=False, labels={"team": "agents"}
    )
    request = cloud.launch_request("calc-1", private, sized())
    parsed = json_format.ParseDict(request, dataflow_v1beta3.LaunchFlexTemplateRequest.pb()()).launch_parameter
    assert parsed.job_name == "headrace-calc-1"
    assert dict(parsed.parameters) == {"run": "gs://my-runs/team/calc-1/run.json"}
    assert parsed.container_spec_gcs_path == "gs://my-runs/team/templates/rollouts.json"
    environment = parsed.environment
    assert environment.sdk_container_image == SETTINGS.image
    assert (environment.num_workers, environment.max_workers) == (18, 36)
    assert environment.ip_configuration == dataflow_v1beta3.WorkerIPAddressConfiguration.WORKER_IP_PRIVATE
    assert environment.streaming_mode == dataflow_v1beta3.StreamingMode.STREAMING_MODE_AT_LEAST_ONCE
    assert {"min_num_workers=18", "streaming_mode_at_least_once"} <= set(environment.additional_experiments)
    assert dict(environment.additional_user_labels) == {"headrace-run": "calc-1", "team": "agents"}
    assert cloud.launch_request("calc-1", private, sized()) == request


def test_exactly_once_asks_for_no_experiment():
    request = cloud.launch_request("calc-1", dataclasses.replace(SETTINGS, at_least_once=False), sized())
    environment = request["launchParameter"]["environment"]
    assert environment["streamingMode"] == "STREAMING_MODE_EXACTLY_ONCE"
    assert "streaming_mode_at_least_once" not in environment["additionalExperiments"]


def test_scheduler_job_posts_the_request():
    request = cloud.launch_request("calc-1", SETTINGS, sized())
    body = cloud.scheduler_job("calc-1", dataclasses.replace(SETTINGS, schedule="*/10 * * * *"), request)
    job = json_format.ParseDict(body, scheduler_v1.Job.pb()())
    assert job.name == "projects/my-project/locations/us-central1/jobs/headrace-calc-1"
    assert job.http_target.uri == (
        "https://dataflow.googleapis.com/v1b3/projects/my-project/locations/us-central1/flexTemplates:launch"
    )
    assert job.http_target.http_method == scheduler_v1.HttpMethod.POST
    assert job.http_target.oauth_token.service_account_email == SETTINGS.scheduler_service_account
    assert json.loads(job.http_target.body) == request == json.loads(base64.b64decode(body["httpTarget"]["body"]))


def test_everything_that_is_missing_is_named_at_once():
    with pytest.raises(ValueError, match=r"cloud\.project, cloud\.region, cloud\.bucket, cloud\.image"):
        cloud.launch_request("calc-1", CloudSettings(), sized())


@pytest.mark.parametrize(
    "changes",
    [
        {"project": "My Project"},
        {"region": "us-central1-a"},
        {"bucket": "my-runs"},
        {"bucket": "gs://my-runs/"},
        {"image": "gcr.io/p/rollouts"},
        {"image": "gcr.io/p/rollouts:latest"},
        {"service_account": "worker"},
        {"schedule": "hourly"},
        {"template_spec": "gs://my-runs/templates"},
        {"min_workers": 5, "max_workers": 4},
        {"max_workers": 1001},
        {"subnetwork": "my-subnet"},
        {"labels": {"Team": "x"}},
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"cloud\.{next(iter(changes))} must"):
        CloudSettings(**changes)


@pytest.mark.parametrize("image", ["localhost:5000/h/r:1", "gcr.io/p/r@sha256:" + "0" * 64])
def test_images_with_a_fixed_version_are_accepted(image):
    assert CloudSettings(image=image).image == image


@pytest.mark.parametrize("name", ["Calc", "1calc", "calc_1", "calc-", "c" * 41])
def test_a_run_name_that_dataflow_refuses_is_refused(name):
    with pytest.raises(ValueError, match="name must be"):
        cloud.launch_request(name, SETTINGS, sized())


RUN_FILE = Path(__file__).parents[2] / "examples" / "calculator.toml"
IN_THE_CLOUD = [f"--set=cloud.{key}={json.dumps(value)}" for key, value in settings.write(SETTINGS).items() if value]


def test_dry_run_of_an_example_prints_the_request_alone(capsys):
    assert cli.main(["launch", str(RUN_FILE), "--dry-run", *IN_THE_CLOUD]) == 0
    out, err = capsys.readouterr()
    run = load_run(str(RUN_FILE))
    per_group = run.learner.group_size * run.learner.groups_per_step
    episodes = (run.learner.max_staleness + 1) * per_group
    assert f"{episodes} episodes may be outstanding" in err
    environment = json.loads(out)["launchParameter"]["environment"]
    assert environment["numWorkers"] == -(-episodes // run.environment.max_concurrency)
    cloud.check_message("LaunchFlexTemplateRequest", json.loads(out))


def test_a_run_that_is_not_for_the_cloud_is_refused_with_the_mend(capsys):
    assert cli.main(["launch", str(RUN_FILE), "--dry-run"]) == 2
    assert "cloud.project, cloud.region" in capsys.readouterr().err


def test_schedule_prints_the_scheduler_job(capsys):
    assert cli.main(["launch", str(RUN_FILE), "--json", *IN_THE_CLOUD, "--schedule", "0 6 * * *"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schedule"] == "0 6 * * *"
    assert err == ""


def test_uploaded_run_says_where_topics_and_files_are(tmp_path):
    resolved = cloud.resolve(RUN, sized())
    (tmp_path / "run.json").write_text(resolved.to_json())
    read = load_run(str(tmp_path / "run.json"))
    assert read == resolved
    assert read.topics.tasks == "projects/my-project/topics/headrace-calc-1-tasks"
    assert read.storage == "gs://my-runs/team/calc-1"
    assert read.rollout_spec().rollouts.shards == 16 * 36
    with pytest.raises(ValueError, match="storage must be a gs://"):
        cloud.resolve(dataclasses.replace(RUN, storage="runs/here"), sized())


def test_without_credentials_nothing_is_written_and_the_mend_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(LaunchError, match="gcloud auth application-default login"):
        cloud.launch(arguments(), RUN)


def test_a_run_that_differs_is_not_overwritten(tmp_path):
    storage = open_storage(str(tmp_path))
    cloud.upload_run(storage, b"one", replace=False)
    cloud.upload_run(storage, b"one", replace=False)
    with pytest.raises(LaunchError, match="--replace"):
        cloud.upload_run(storage, b"two", replace=False)
    assert storage.read("run.json") == b"one"
    cloud.upload_run(storage, b"two", replace=True)
    assert storage.read("run.json") == b"two"


@pytest.fixture
def dataflow(tmp_path, monkeypatch):
    """A server that hands out OAuth tokens and answers launches with `status`, and credentials that lead to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/token":
                self.answer(200, {"access_token": "t0ken", "expires_in": 3600, "token_type": "Bearer"})
                return
            server.seen.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.answer(server.status, {"job": {"id": "job-1"}} if server.status == 200 else {"error": "no"})

        def answer(self, status, value):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.status, server.seen = 200, []
    server.url = f"http://127.0.0.1:{server.server_port}"
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "project_id": "my-project",
        "client_email": "me@my-project.iam.gserviceaccount.com",
        "private_key": key.decode(),
        "token_uri": f"{server.url}/token",
    }
    (tmp_path / "key.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_launch_uploads_the_run_and_posts_and_again_is_harmless(dataflow, capsys):
    with fake_gcs("my-runs"):
        assert write_spec(["--image", SETTINGS.image, "--out", SETTINGS.spec_url]) == 0
        assert cloud.launch(arguments(), RUN, dataflow.url) == 0
        assert "headrace-calc-1 is starting: https://console.cloud.google.com/" in capsys.readouterr().out
        ((path, token, request),) = dataflow.seen
        assert path == "/v1b3/projects/my-project/locations/us-central1/flexTemplates:launch"
        assert token == "Bearer t0ken"
        asked = request["launchParameter"]
        assert load_run(asked["parameters"]["run"]) == cloud.resolve(RUN, sized())
        folder, _, name = asked["containerSpecGcsPath"].rpartition("/")
        assert json.loads(open_storage(folder).read(name))["image"] == SETTINGS.image

        dataflow.status = 409
        assert cloud.launch(arguments("--json"), RUN, dataflow.url) == 0
        assert json.loads(capsys.readouterr().out)["already_running"] is True

        changed = dataclasses.replace(RUN, seed=1)
        with pytest.raises(LaunchError, match="--replace"):
            cloud.launch(arguments(), changed, dataflow.url)
        assert len(dataflow.seen) == 2


def test_a_launch_sends_the_users_folder_with_the_run(dataflow, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "headrace_test_sent.py").write_text("VALUE = 7\n")
    asked = dataclasses.replace(RUN, name="calc-2", code=CodeSettings(str(mine)))
    with fake_gcs("my-runs"):
        assert cloud.launch(arguments("--dry-run"), asked) == 0
        assert f"0 KiB of code travel from {mine}" in capsys.readouterr().err
        assert cloud.launch(arguments(), asked, dataflow.url) == 0
        sent = load_run("gs://my-runs/team/calc-2/run.json")
        assert re.fullmatch(r"gs://my-runs/team/calc-2/code/[0-9a-f]{64}\.zip", sent.code.path)
        make_importable(sent.rollout_spec().code_path)
        module = importlib.import_module("headrace_test_sent")
        assert Path(module.__file__).is_relative_to(tmp_path / "cache")
        (mine / "headrace_test_sent.py").write_text("VALUE = 8\n")
        with pytest.raises(LaunchError, match="--replace"):
            cloud.launch(arguments(), asked, dataflow.url)
    elsewhere = dataclasses.replace(asked, code=CodeSettings("/opt/not_here"))
    assert cloud.launch(arguments("--dry-run"), elsewhere) == 0
    assert "it must lie at this place in the image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "mend"), [(403, "roles/dataflow.developer"), (404, "templates.spec"), (400, "--dry-run")]
)
def test_a_refusal_says_how_to_mend_it(dataflow, status, mend):
    dataflow.status = status
    with pytest.raises(LaunchError, match=mend):
        cloud.post_launch(cloud.authorized_session(), cloud.launch_url(SETTINGS, dataflow.url), {})
