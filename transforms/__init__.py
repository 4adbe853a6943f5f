"""The Beam transforms of the rollout job, one file per stage, in the order the data meets them."""
