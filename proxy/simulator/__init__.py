"""A pretend vLLM replica, without torch or a GPU: same paths, statuses and texts as vLLM 0.32, measured side by side.

Its tokens are a pure function of (weights, prompt, seed, position), so that whoever knows which weights a rollout asked
for can tell which weights answered. `tests/vllm` runs one contract suite on this and on the real server.
"""
