"""The world an agent acts in: environments, tools, the agent loop, and the orchestrator that runs many at once."""
