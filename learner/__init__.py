"""The trainer: books (ledger, credits), experience buffer, losses, compiled step, checkpoints, adapters out."""
