"""The Terraform module makes exactly the topics and subscriptions that the program uses."""

import re
from pathlib import Path

import hcl2

from learner.subscriber import TYPES
from pipelines.cloud import CloudSettings, Workers, launch_request, launch_url, scheduler_job
from pipelines.topics import ACK_DEADLINE_S
from trajectories.topics import NAMES, Topics

FOLDER = Path(__file__).parents[2] / "templates" / "terraform"


def plain(value):
    """hcl2 keeps the quotes of strings and marks blocks: a tree without either."""
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items() if key != "__is_block__"}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.strip('"') if isinstance(value, str) else value


def module():
    return {path.stem: plain(hcl2.loads(path.read_text())) for path in FOLDER.glob("*.tf")}


def resources(kind):
    return {name: body for one in module()["main"]["resource"] for name, body in one.get(kind, {}).items()}


def test_topics_and_subscriptions_are_those_of_the_program():
    (local_values,) = module()["main"]["locals"]
    assert set(re.findall(r'"([^"]+)"', str(local_values["names"]))) == set(NAMES)
    for kind in ("google_pubsub_topic", "google_pubsub_subscription"):
        body = resources(kind)["run"]
        assert body["for_each"] == "${local.names}"
        made = {body["name"].replace("${var.run}", "r1").replace("${each.key}", name) for name in NAMES}
        topics = Topics("my-project", "r1")
        assert made == {topics.topic(name).split("/")[-1] for name in NAMES}
        assert made == {topics.subscription(name).split("/")[-1] for name in NAMES}


def test_the_learner_may_read_and_write_what_it_reads_and_writes():
    (local_values,) = module()["main"]["locals"]
    assert set(re.findall(r'"([^"]+)"', str(local_values["read_by_learner"]))) == set(TYPES)
    assert set(re.findall(r'"([^"]+)"', str(local_values["written_by_learner"]))) == {"tasks", "dead-letters"}
    assert resources("google_pubsub_subscription_iam_member")["learner"]["for_each"] == "${local.read_by_learner}"
    assert resources("google_pubsub_topic_iam_member")["learner"]["for_each"] == "${local.written_by_learner}"


def test_no_policy_that_dataflow_does_not_support_and_nothing_expires():
    subscription = resources("google_pubsub_subscription")["run"]
    assert not {"retry_policy", "dead_letter_policy"} & subscription.keys()
    assert subscription["expiration_policy"] == [{"ttl": ""}]
    assert subscription["ack_deadline_seconds"] == ACK_DEADLINE_S


def test_scheduler_job_is_the_one_that_headrace_prints():
    cloud = CloudSettings(
        project="my-project", region="us-central1", bucket="gs://my-runs", image="i/h:1", service_account="w@p.iam",
        scheduler_service_account="s@p.iam", schedule="*/10 * * * *",
    )  # fmt: skip
    printed = scheduler_job("r1", cloud, launch_request("r1", cloud, Workers(1, 2, 8, 8)))
    job = resources("google_cloud_scheduler_job")["launch"]
    (target,), (retry,) = job["http_target"], job["retry_config"]

    def filled(text):
        return text.replace("${var.project}", cloud.project).replace("${var.region}", cloud.region)

    assert filled(target["uri"]) == launch_url(cloud) == printed["httpTarget"]["uri"]
    assert printed["name"].endswith("/" + job["name"].replace("${var.run}", "r1"))
    assert job["attempt_deadline"] == printed["attemptDeadline"]
    assert target["oauth_token"][0]["scope"] == printed["httpTarget"]["oauthToken"]["scope"]
    camel = {re.sub(r"_(.)", lambda found: found[1].upper(), key): value for key, value in retry.items()}
    assert camel == printed["retryConfig"]
