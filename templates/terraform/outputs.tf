output "cloud" {
  description = "Values for the [cloud] section of the run file"
  value = {
    project                   = var.project
    region                    = var.region
    bucket                    = google_storage_bucket.runs.url
    service_account           = google_service_account.worker.email
    scheduler_service_account = google_service_account.scheduler.email
  }
}

output "learner_service_account" {
  description = "Account to attach to the machine that runs the learner"
  value       = google_service_account.learner.email
}
