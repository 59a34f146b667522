"""A training run in small: simulated replicas, the proxy, a trainer that publishes, GRPO rollouts that are checked.

`processes` starts the servers, `rollouts` asks and checks, `run` is the story and its summary.
"""
