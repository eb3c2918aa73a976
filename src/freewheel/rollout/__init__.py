"""What runs inside a rollout worker process: rendering, environments, rewards, and user code."""
