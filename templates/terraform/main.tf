# What one run needs on Google Cloud: its topics and subscriptions, the accounts of its three parties with just the
# rights they use, and the Cloud Scheduler job that keeps its rollout job running. docs/deploy.md walks through it.

terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.0"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.region
}

locals {
  # The same names as trajectories/topics.py; tests/templates/test_terraform.py compares them.
  names = toset(["tasks", "rows", "verdicts", "results", "heartbeats", "dead-letters"])

  # Who reads and writes what: learner/subscriber.py. The learner refuses unusable rows by a dead letter of its own, and
  # records everybody's.
  read_by_learner    = toset(["rows", "verdicts", "results", "heartbeats", "dead-letters"])
  written_by_learner = toset(["tasks", "dead-letters"])
}

resource "google_pubsub_topic" "run" {
  for_each = local.names
  name     = "headrace-${var.run}-${each.key}"
  labels   = { headrace-run = var.run }
}

resource "google_pubsub_subscription" "run" {
  for_each             = local.names
  name                 = "headrace-${var.run}-${each.key}"
  topic                = google_pubsub_topic.run[each.key].id
  labels               = { headrace-run = var.run }
  ack_deadline_seconds = 60

  # The learner acknowledges after a checkpoint and a stopped run may wait for days: nothing may expire meanwhile.
  # No retry or dead-letter policy: Dataflow supports neither on a subscription that it reads.
  message_retention_duration = "604800s"
  expiration_policy {
    ttl = ""
  }
}

resource "google_storage_bucket" "runs" {
  name                        = var.bucket
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  # Adapters and checkpoints are written and pruned all the time: kept deletions would multiply the bill.
  soft_delete_policy {
    retention_duration_seconds = 0
  }
}

resource "google_service_account" "worker" {
  account_id   = "headrace-worker"
  display_name = "Headrace rollout job: launcher and workers"
}

resource "google_service_account" "learner" {
  account_id   = "headrace-learner"
  display_name = "Headrace learner"
}

resource "google_service_account" "scheduler" {
  account_id   = "headrace-scheduler"
  display_name = "Cloud Scheduler, which launches the rollout job"
}

# The rollout job.

resource "google_project_iam_member" "worker" {
  for_each = toset(["roles/dataflow.worker", "roles/artifactregistry.reader", "roles/viewer"])
  project  = var.project
  role     = each.key
  member   = google_service_account.worker.member
}

resource "google_pubsub_subscription_iam_member" "worker" {
  subscription = google_pubsub_subscription.run["tasks"].name
  role         = "roles/pubsub.subscriber"
  member       = google_service_account.worker.member
}

resource "google_pubsub_topic_iam_member" "worker" {
  for_each = setsubtract(local.names, ["tasks"])
  topic    = google_pubsub_topic.run[each.key].name
  role     = "roles/pubsub.publisher"
  member   = google_service_account.worker.member
}

# The learner.

resource "google_pubsub_topic_iam_member" "learner" {
  for_each = local.written_by_learner
  topic    = google_pubsub_topic.run[each.key].name
  role     = "roles/pubsub.publisher"
  member   = google_service_account.learner.member
}

resource "google_pubsub_subscription_iam_member" "learner" {
  for_each     = local.read_by_learner
  subscription = google_pubsub_subscription.run[each.key].name
  role         = "roles/pubsub.subscriber"
  member       = google_service_account.learner.member
}

resource "google_storage_bucket_iam_member" "runs" {
  for_each = {
    worker  = google_service_account.worker.member
    learner = google_service_account.learner.member
  }
  bucket = google_storage_bucket.runs.name
  role   = "roles/storage.objectAdmin"
  member = each.value
}

# Cloud Scheduler: it posts the launch request, as nothing but a launcher of jobs that run as the worker account.

resource "google_project_iam_member" "scheduler" {
  project = var.project
  role    = "roles/dataflow.developer"
  member  = google_service_account.scheduler.member
}

resource "google_service_account_iam_member" "scheduler" {
  service_account_id = google_service_account.worker.name
  role               = "roles/iam.serviceAccountUser"
  member             = google_service_account.scheduler.member
}

resource "google_storage_bucket_iam_member" "scheduler" {
  bucket = google_storage_bucket.runs.name
  role   = "roles/storage.objectViewer"
  member = google_service_account.scheduler.member
}

resource "google_cloud_scheduler_job" "launch" {
  count            = var.launch_request == "" ? 0 : 1
  name             = "headrace-${var.run}"
  description      = "Keeps the rollout job of run ${var.run} running"
  schedule         = var.schedule
  time_zone        = var.time_zone
  attempt_deadline = "180s"

  retry_config {
    retry_count          = 3
    min_backoff_duration = "30s"
    max_backoff_duration = "300s"
    max_doublings        = 3
  }

  http_target {
    http_method = "POST"
    uri         = "https://dataflow.googleapis.com/v1b3/projects/${var.project}/locations/${var.region}/flexTemplates:launch"
    headers     = { "Content-Type" = "application/json" }
    body        = base64encode(file(var.launch_request))

    oauth_token {
      service_account_email = google_service_account.scheduler.email
      scope                 = "https://www.googleapis.com/auth/cloud-platform"
    }
  }
}
