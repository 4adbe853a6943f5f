"""A durable local server of the google.pubsub.v1 API; useful alone."""
