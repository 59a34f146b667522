"""Which replica gets a rollout. Decisions are plain functions over plain data; the state is what rollouts have taught.

- request_key: a request body -> the model, hashes over pieces of its prompt's raw text, a few numbers
- prefix_index: which replica has seen which pieces, by policy
- load: how long answers are, by policy, and how many rollouts of a group are still to come
- pace: how fast replicas work, and which are slow
- choose: the rules; from candidates, and what is known, to a replica and the reason
- router: all of it together: `choose()` before a rollout, `finished()` after it, `follow()` when the fleet changes
"""
