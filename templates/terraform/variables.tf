variable "project" {
  description = "Google Cloud project id"
  type        = string
}

variable "region" {
  description = "Region of bucket, rollout job and learner"
  type        = string
}

variable "bucket" {
  description = "Name of the bucket to create, without gs://"
  type        = string
}

variable "run" {
  description = "Name of the run, as in the run file"
  type        = string

  validation {
    condition     = can(regex("^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$", var.run))
    error_message = "The run's name must be 1 to 40 lower-case letters, digits and hyphens, begin with a letter and not end with a hyphen."
  }
}

variable "launch_request" {
  description = "File that holds what `headrace launch RUN.toml --dry-run --json` printed. Empty: no scheduler job"
  type        = string
  default     = ""
}

variable "schedule" {
  description = "When Cloud Scheduler posts the launch request: unix-cron, five fields"
  type        = string
  default     = "*/10 * * * *"
}

variable "time_zone" {
  description = "Time zone of the schedule"
  type        = string
  default     = "Etc/UTC"
}
