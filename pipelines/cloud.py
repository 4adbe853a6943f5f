"""From a run to its Dataflow job: how many workers, the launch request, the Cloud Scheduler job that repeats it.

Invariants: a request is a pure function of the run, and its job name is fixed, so that posting it again while the job
runs is refused by Dataflow and changes nothing; whatever is posted or printed was first parsed strictly against
Google's own protos, so that a misspelt field is an error here and never silently ignored there.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.user_code import archive, send
from trajectories.storage import NotFound, PreconditionFailed, Storage, open_storage

if TYPE_CHECKING:
    import requests

    from pipelines.config import Run

DATAFLOW = "https://dataflow.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
MOST_WORKERS = 1000
"""Dataflow's own limit on the workers of one job."""
SHARDS_PER_WORKER = 16
"""Keys of RunEpisodes per worker: enough that they spread evenly, fixed for the life of a job."""

_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_PROJECT = re.compile(r"[a-z][-a-z0-9]{4,28}[a-z0-9]")
_REGION = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+")
_BUCKET = re.compile(r"gs://[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9](/[^/\s]+)*")
_ACCOUNT = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_IMAGE = re.compile(r"[^\s@:]+(:[0-9]+/[^\s@:]+)?(@sha256:[0-9a-f]{64}|:(?!latest$)[\w][\w.-]*)")
_LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
_LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")
_CRON = re.compile(r"([0-9A-Za-z*/,-]+ ){4}[0-9A-Za-z*/,-]+")
_SUBNETWORK = re.compile(r"(https://\S+/)?regions/[^/\s]+/subnetworks/[^/\s]+")


@dataclass(frozen=True)
class CloudSettings:
    """Section [cloud] of the run file: where and how the rollout job runs on Google Cloud.

    All of it may be absent: a run on one machine needs none. `headrace launch` asks for what it needs.
    """

    project: str = ""
    """Google Cloud project id."""
    region: str = ""
    """Region of the Dataflow job, e.g. us-central1. Put the bucket and the learner in the same one."""
    bucket: str = ""
    """gs://bucket[/prefix] under which runs keep their files, each in a folder of its name."""
    image: str = ""
    """Container image of launcher and workers, with a tag or a digest: a relaunch must run the same code."""
    template_spec: str = ""
    """gs:// address of the Flex Template's spec. Empty: <bucket>/templates/rollouts.json."""
    service_account: str = ""
    """E-mail address of the account that launcher and workers run as."""
    scheduler_service_account: str = ""
    """E-mail address of the account that Cloud Scheduler posts the launch request with."""
    machine_type: str = "n2-standard-8"
    """Machine type of a worker. One sampling engine runs per worker and uses all its cores."""
    min_workers: int = 0
    """Fewest workers. 0: by Little's law from [learner] and `environment.max_concurrency` (docs/deploy.md)."""
    max_workers: int = 0
    """Most workers. 0: twice the fewest."""
    at_least_once: bool = True
    """Streaming mode. At least once is cheaper and enough: the learner drops what it sees twice."""
    schedule: str = ""
    """When Cloud Scheduler posts the launch request: unix-cron, five fields."""
    time_zone: str = "Etc/UTC"
    """Time zone of `schedule`, by its tz database name."""
    network: str = ""
    """VPC network of the workers. Empty: the project's default network."""
    subnetwork: str = ""
    """regions/REGION/subnetworks/NAME, or its full URL for a shared VPC. Empty: the network's own."""
    public_ips: bool = True
    """Whether workers have external addresses. Without them the tools reach the internet only through Cloud NAT."""
    experiments: tuple[str, ...] = ()
    """Further Dataflow experiments and service options."""
    labels: dict[str, Any] = field(default_factory=dict)
    """Labels of the job, for billing reports."""

    def __post_init__(self) -> None:
        patterns = {
            "project": (_PROJECT, "be a project id such as my-project"),
            "region": (_REGION, "be a region such as us-central1, not a zone"),
            "bucket": (_BUCKET, "be gs://bucket or gs://bucket/prefix, without a slash at its end"),
            "image": (_IMAGE, "end with a tag other than latest, or with a digest"),
            "service_account": (_ACCOUNT, "be an e-mail address"),
            "scheduler_service_account": (_ACCOUNT, "be an e-mail address"),
            "schedule": (_CRON, "have five cron fields, such as '0 6 * * *'"),
            "subnetwork": (_SUBNETWORK, "be regions/REGION/subnetworks/NAME or its full URL"),
        }
        for name, (pattern, mend) in patterns.items():
            value = getattr(self, name)
            if value and not pattern.fullmatch(value):
                raise ValueError(f"cloud.{name} must {mend}, found {value!r}")
        if self.template_spec and not (self.template_spec.startswith("gs://") and self.template_spec.endswith(".json")):
            raise ValueError(f"cloud.template_spec must be a gs:// address of a .json, found {self.template_spec!r}")
        for name in ("min_workers", "max_workers"):
            if not 0 <= getattr(self, name) <= MOST_WORKERS:
                raise ValueError(f"cloud.{name} must be 0 (from sizing) to {MOST_WORKERS}, found {getattr(self, name)}")
        if self.max_workers and self.min_workers > self.max_workers:
            raise ValueError(
                f"cloud.min_workers must not exceed cloud.max_workers, found {self.min_workers} and {self.max_workers}"
            )
        for key, value in self.labels.items():
            if not (_LABEL_KEY.fullmatch(key) and isinstance(value, str) and _LABEL_VALUE.fullmatch(value)):
                raise ValueError(
                    "cloud.labels must have keys and values of at most 63 lower-case letters, digits, - and _, "
                    f"found {key} = {value!r}"
                )

    def require(self, *names: str) -> None:
        """Raise ValueError that names all of `names` that are empty."""
        missing = [name for name in names if not getattr(self, name)]
        if missing:
            keys = ", ".join(f"cloud.{name}" for name in missing)
            raise ValueError(f"{keys} must be set, found nothing: write them under [cloud] or pass --set cloud.NAME=…")

    @property
    def spec_url(self) -> str:
        """Where the Flex Template's spec lies."""
        return self.template_spec or f"{self.bucket}/templates/rollouts.json"


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers a job has, and the episodes that this comes from."""

    minimum: int
    maximum: int
    outstanding: int
    """Episodes that may be under way at once."""
    max_concurrency: int
    """Episodes that one worker runs at once."""

    def __str__(self) -> str:
        return (
            f"{self.minimum} to {self.maximum} workers: {self.outstanding} episodes may be outstanding, "
            f"{self.max_concurrency} run at once on a worker"
        )


def size_workers(
    cloud: CloudSettings, *, max_staleness: int, groups_per_step: int, group_size: int, max_concurrency: int
) -> Workers:
    """Workers by Little's law, L = λ·W.

    The learner consumes λ = groups_per_step · group_size episodes per step time, and an episode takes W. So L = λ·W
    episodes must be under way for the learner never to wait. Its credits let at most

        L_max = (max_staleness + 1) · groups_per_step · group_size

    be outstanding, whatever W is: max_staleness was chosen from W. A worker runs at most `max_concurrency` of them;
    what does not fit waits in the job's state and only ages. So ⌈L_max / max_concurrency⌉ workers run everything the
    learner can ask for. That is the *minimum*, not a wish: episodes that wait for tools use no CPU, so Dataflow's
    autoscaler, which goes by CPU, would remove the workers that hold them, and each removal starts their episodes
    again. The maximum leaves room for the case where sampling on the workers' CPUs is what is slow.

    Raises ValueError if the job would need more workers than Dataflow allows.
    """
    outstanding = (max_staleness + 1) * groups_per_step * group_size
    minimum = cloud.min_workers or math.ceil(outstanding / max_concurrency)
    maximum = cloud.max_workers or min(2 * minimum, MOST_WORKERS)
    if minimum > maximum:
        where = "cloud.max_workers" if cloud.max_workers else "Dataflow's limit"
        raise ValueError(
            f"workers must not exceed {maximum} ({where}), found {minimum} needed for {outstanding} episodes at once: "
            f"raise environment.max_concurrency (now {max_concurrency}), or lower learner.max_staleness, "
            "learner.groups_per_step or learner.group_size"
        )
    return Workers(minimum, maximum, outstanding, max_concurrency)


def job_name(run_name: str) -> str:
    """The one name of the run's rollout job; raises ValueError where Dataflow would refuse it."""
    if not _JOB_NAME.fullmatch(run_name):
        raise ValueError(
            "name must be 1 to 40 lower-case letters, digits and hyphens, begin with a letter and not end with a "
            f"hyphen, found {run_name!r}: Dataflow allows no other job name"
        )
    return f"headrace-{run_name}"


def run_url(cloud: CloudSettings, run_name: str) -> str:
    """Where launcher, workers and learner find the resolved run."""
    return f"{cloud.bucket}/{run_name}/run.json"


def launch_request(run_name: str, cloud: CloudSettings, workers: Workers) -> dict[str, Any]:
    """Body of `flexTemplates:launch` (google.dataflow.v1beta3.LaunchFlexTemplateRequest; the URL holds project and
    region). Raises ValueError for settings that are missing or that the protos refuse.
    """
    cloud.require("project", "region", "bucket", "image", "service_account")
    environment: dict[str, Any] = {
        **job_environment(cloud.image, at_least_once=cloud.at_least_once),
        "numWorkers": workers.minimum,
        "maxWorkers": workers.maximum,
        "machineType": cloud.machine_type,
        "serviceAccountEmail": cloud.service_account,
        "tempLocation": f"{cloud.bucket}/{run_name}/dataflow/temp",
        "stagingLocation": f"{cloud.bucket}/{run_name}/dataflow/staging",
        "ipConfiguration": "WORKER_IP_PUBLIC" if cloud.public_ips else "WORKER_IP_PRIVATE",
        "additionalUserLabels": {"headrace-run": run_name, **cloud.labels},
    }
    environment["additionalExperiments"] += [f"min_num_workers={workers.minimum}", *cloud.experiments]
    if cloud.network:
        environment["network"] = cloud.network
    if cloud.subnetwork:
        environment["subnetwork"] = cloud.subnetwork
    request = {
        "launchParameter": {
            "jobName": job_name(run_name),
            "containerSpecGcsPath": cloud.spec_url,
            "parameters": {"run": run_url(cloud, run_name)},
            "environment": environment,
        }
    }
    check_message("LaunchFlexTemplateRequest", request)
    return request


def job_environment(image: str, *, at_least_once: bool) -> dict[str, Any]:
    """What every launch of the template has in common: part of FlexTemplateRuntimeEnvironment."""
    # One process per worker, so one engine with all its cores; Dataflow's default is one process per core.
    experiments = ["no_use_multiple_sdk_containers"]
    if at_least_once:
        experiments.append("streaming_mode_at_least_once")
    return {
        "sdkContainerImage": image,
        "enableStreamingEngine": True,
        "streamingMode": "STREAMING_MODE_AT_LEAST_ONCE" if at_least_once else "STREAMING_MODE_EXACTLY_ONCE",
        "additionalExperiments": experiments,
    }


def launch_url(cloud: CloudSettings, endpoint: str = DATAFLOW) -> str:
    """Where a launch request is posted."""
    return f"{endpoint}/v1b3/projects/{cloud.project}/locations/{cloud.region}/flexTemplates:launch"


def scheduler_job(run_name: str, cloud: CloudSettings, request: Mapping[str, Any]) -> dict[str, Any]:
    """Cloud Scheduler job (google.cloud.scheduler.v1.Job) that posts `request` by `cloud.schedule`.

    While the rollout job runs, Dataflow answers 409 and nothing happens; a job that ended or died is started again.
    """
    cloud.require("schedule", "scheduler_service_account")
    parent = f"projects/{cloud.project}/locations/{cloud.region}"
    return {
        "name": f"{parent}/jobs/{job_name(run_name)}",
        "description": f"Keeps the rollout job of run {run_name} running",
        "schedule": cloud.schedule,
        "timeZone": cloud.time_zone,
        "attemptDeadline": "180s",
        "retryConfig": {"retryCount": 3, "minBackoffDuration": "30s", "maxBackoffDuration": "300s", "maxDoublings": 3},
        "httpTarget": {
            "uri": launch_url(cloud),
            "httpMethod": "POST",
            "headers": {"Content-Type": "application/json"},
            "body": base64.b64encode(json.dumps(request).encode()).decode(),
            "oauthToken": {"serviceAccountEmail": cloud.scheduler_service_account, "scope": SCOPE},
        },
    }


def check_message(name: str, found: Mapping[str, Any]) -> None:
    """Parse `found` as the JSON form of the message google.dataflow.v1beta3.`name`, strictly.

    Raises ValueError for an unknown field or enum member, a wrong type, and anything that is not in the canonical form
    (field names in camelCase, enums by name), since what reads it later may be less lenient than the parser here.
    """
    from google.cloud import dataflow_v1beta3  # takes most of a second to import, and few commands need it
    from google.protobuf import json_format

    message = getattr(dataflow_v1beta3, name).pb()()
    try:
        json_format.ParseDict(found, message)
    except json_format.ParseError as error:
        raise ValueError(f"{name} must match Dataflow's API: {error}") from error
    canonical = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
    _check_canonical(name, found, canonical)


def _check_canonical(where: str, found: Any, canonical: Any) -> None:
    if isinstance(found, Mapping) and isinstance(canonical, Mapping):
        for key, value in found.items():
            _check_canonical(f"{where}.{key}", value, canonical.get(key))
    elif isinstance(found, list) and isinstance(canonical, list):
        for index, (one, other) in enumerate(zip(found, canonical, strict=True)):
            _check_canonical(f"{where}[{index}]", one, other)
    elif found != canonical:
        raise ValueError(f"{where} must be written in its canonical form {canonical!r}, found {found!r}")


class LaunchError(RuntimeError):
    """The launch did not happen; the text says why and how to mend it."""


_MENDS = {
    400: "Dataflow refused the request; --dry-run prints it",
    401: "the credentials have expired: run `gcloud auth application-default login` again",
    403: "the account needs roles/dataflow.developer on the project and roles/iam.serviceAccountUser on "
    "cloud.service_account, and the Dataflow API must be enabled",
    404: "cloud.project, cloud.region or the template spec does not exist: write the spec with "
    "`python -m templates.spec` (docs/deploy.md)",
    429: "the project's Dataflow quota is used up: wait, or ask for more",
}


def upload_run(storage: Storage, data: bytes, *, replace: bool) -> None:
    """Write `run.json`. A different one that is already there is left alone unless `replace`: a learner or a job may be
    working by it. Raises LaunchError then.
    """
    if replace:
        storage.write("run.json", data)
        return
    try:
        storage.write("run.json", data, if_generation=0)
    except PreconditionFailed:
        try:
            same = storage.read("run.json") == data
        except NotFound:  # deleted in this very moment
            same = False
        if not same:
            raise LaunchError(
                f"{storage.url} already holds a run.json that differs from this run: "
                "give the run another name, or pass --replace to change it"
            ) from None


def post_launch(session: requests.Session, url: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Post the request; the job that Dataflow answers with, or None if one of that name already runs.

    Raises LaunchError with the mend for every other refusal.
    """
    response = session.post(url, json=request, timeout=60)
    if response.status_code == 409:
        return None
    if not response.ok:
        mend = _MENDS.get(response.status_code, "try again later")
        raise LaunchError(f"Dataflow answered {response.status_code} to {url}: {mend}\n{response.text[:2000]}")
    job: dict[str, Any] = response.json().get("job", {})
    return job


def authorized_session() -> requests.Session:
    """An HTTP session with the user's or machine's Google credentials, found the way every Google client finds them."""
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    credentials, _ = google.auth.default(scopes=[SCOPE])
    session: requests.Session = AuthorizedSession(credentials)
    return session


@contextlib.contextmanager
def google_errors() -> Iterator[None]:
    """Turn what Google's clients raise for missing credentials and refusals into a LaunchError that says the mend."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError

    try:
        yield
    except DefaultCredentialsError as error:
        raise LaunchError(
            "no Google credentials were found: run `gcloud auth application-default login`, or name the key file of "
            f"a service account in GOOGLE_APPLICATION_CREDENTIALS ({error})"
        ) from error
    except GoogleAuthError as error:
        raise LaunchError(
            f"the Google credentials were not accepted: run `gcloud auth application-default login` again ({error})"
        ) from error
    except GoogleAPICallError as error:
        raise LaunchError(f"Cloud Storage refused: {error}; the account needs roles/storage.objectAdmin") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `headrace launch`."""
    parser.add_argument("run_file", help="the run's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--dry-run", action="store_true", help="print the launch request and change nothing")
    parser.add_argument(
        "--schedule",
        nargs="?",
        const="",
        metavar="CRON",
        help="print the Cloud Scheduler job that posts the request by this schedule (default: cloud.schedule)",
    )
    parser.add_argument("--replace", action="store_true", help="overwrite a run.json that differs")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """`headrace launch`: 0 when the job was launched, or already runs; 2 with a message on stderr otherwise."""
    from pipelines.config import load_run  # config composes CloudSettings, so neither can import the other above

    try:
        overrides = list(args.set)
        if args.schedule:
            overrides.append(f"cloud.schedule={json.dumps(args.schedule)}")
        return launch(args, load_run(args.run_file, overrides))
    except (LaunchError, ValueError, OSError) as error:
        print(f"headrace launch: {error}", file=sys.stderr)
        return 2


def resolve(run: Run, workers: Workers) -> Run:
    """The run as its processes in the cloud read it: identity, storage and shards filled in.

    The run's name is its id: launched again, it goes on with its topics, adapters and checkpoints.
    """
    if run.storage and not run.storage.startswith("gs://"):
        raise ValueError(
            f"storage must be a gs:// address in a cloud run, found {run.storage!r}: leave it out, and "
            f"it is {run.cloud.bucket}/{run.name}"
        )
    shards = max(run.rollouts.shards, SHARDS_PER_WORKER * workers.maximum)
    return dataclasses.replace(
        run,
        run_id=run.run_id or run.name,
        storage=run.storage or f"{run.cloud.bucket}/{run.name}",
        rollouts=dataclasses.replace(run.rollouts, shards=shards),
    )


def travelling_code(run: Run) -> Path | None:
    """The folder `code.path`, if it is here to be sent; one that is not must be in the image and on the TPU host."""
    path = run.code.path
    if not path or path.endswith(".zip"):
        return None
    if not Path(path).is_dir():
        print(
            f"code.path {path} is not here: it must lie at this place in the image and on the learner's host",
            file=sys.stderr,
        )
        return None
    return Path(path)


def launch(args: argparse.Namespace, asked: Run, endpoint: str = DATAFLOW) -> int:
    """The command, for a run that is loaded. Raises ValueError, LaunchError or OSError with the mend."""
    cloud = asked.cloud
    workers = size_workers(
        cloud,
        max_staleness=asked.learner.max_staleness,
        groups_per_step=asked.learner.groups_per_step,
        group_size=asked.learner.group_size,
        max_concurrency=asked.environment.max_concurrency,
    )
    request = launch_request(asked.name, cloud, workers)
    resolved = resolve(asked, workers)
    if not args.json:
        print(workers, file=sys.stderr)
    if args.schedule is not None:
        print(json.dumps(scheduler_job(resolved.name, cloud, request), indent=2))
        return 0
    if args.dry_run:
        if folder := travelling_code(resolved):
            print(f"{len(archive(folder)) / 1024:.0f} KiB of code travel from {folder}", file=sys.stderr)
        print(json.dumps(request, indent=2))
        return 0
    with google_errors():
        session = authorized_session()  # before the upload: without credentials nothing changes
        storage = open_storage(f"{cloud.bucket}/{resolved.name}")
        if folder := travelling_code(resolved):
            address = send(folder, storage.join("code"))
            resolved = dataclasses.replace(resolved, code=dataclasses.replace(resolved.code, path=address))
        upload_run(storage, resolved.to_json().encode(), replace=args.replace)
        job = post_launch(session, launch_url(cloud, endpoint), request)
    name = job_name(resolved.name)
    if args.json:
        print(json.dumps({"job_name": name, "already_running": job is None, "job": job}))
    elif job is None:
        print(f"{name} already runs: nothing was launched")
    else:
        console = f"https://console.cloud.google.com/dataflow/jobs/{cloud.region}/{job.get('id', '')}"
        print(f"{name} is starting: {console}?project={cloud.project}")
    return 0
