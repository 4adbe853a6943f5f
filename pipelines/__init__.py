"""What a person starts: the rollout job, the local stack, cloud launch, the run file, the `headrace` command."""
