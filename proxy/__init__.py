"""lora-sync-proxy: one HTTP endpoint that makes N vLLM replicas behave as one server for LoRA reinforcement learning.

The rooms, and what may import what (arrows go down only; `tests/unit/test_arrows.py` holds the code to it):

    cli            the command line; starts one of: serve, sim, demo
    app            the composition root: builds every room and wires them together
    dataplane/     rollouts: plain ASGI in, one replica's HTTP out
    controlplane/  sync: loads, unloads, pauses and probes, on every replica or none
    admin          the proxy's own pages: /proxy/stats, /proxy/replicas, /proxy/policies
    routing/       which replica gets a rollout: pure functions over a snapshot
    fleet/         the state both planes share: replicas, policies, leases. No await, no I/O
    artifacts/     what a LoRA directory is: config, weights, digest, manifest          (leaf)
    contract  errors  metrics  settings  auth                                           (leaves)
    simulator/     a pretend vLLM replica; needs no torch

How a rollout travels: `dataplane.app` reads `model` and the prompt, `routing.choose` picks a replica from
`fleet.snapshot()`, a lease is taken, `dataplane.relay` carries the answer back and gives the lease back.

How a policy travels: `controlplane.api` takes the announcement, `controlplane.loading` sends it to every replica,
and one synchronous step makes it visible in `fleet` to the rollouts.
"""
