"""lora-sync-proxy: one HTTP endpoint that makes N vLLM replicas behave as one server for LoRA reinforcement learning.

The rooms, and what may import what (arrows go down only; `tests/unit/test_arrows.py` holds the code to it):

    cli            the command line; starts one of: serve, sim, demo
    app            the composition root: builds every room and wires them together
    dataplane/     rollouts: plain ASGI in, one replica's HTTP out
    controlplane/  sync: loads, unloads, pauses and probes, on every replica or none
    discovery/     which replicas there are: Hugging Face Jobs, a host name's addresses, or a file
    admin          the proxy's own pages: /proxy/stats, /proxy/replicas, /proxy/policies
    dashboard/     the status page: static files, and what it shows as one stream of events
    tracing/       OpenTelemetry spans of rollouts and syncs (extra `otel`); extends the planes' classes while it is on
    telemetry/     what Prometheus is told of the fleet: reads everything, changes nothing
    routing/       which replica gets a rollout: pure functions over a snapshot
    fleet/         the state both planes share: replicas, policies, leases. No await, no I/O
    artifacts/     what a LoRA directory is: config, weights, digest, manifest, landing (leaf)
    metrics/       what is counted while it happens                                     (leaf)
    contract  errors  settings  sources  auth  access  logs  descriptors  threads       (leaves)
    simulator/     a pretend vLLM replica; needs no torch
    demo/          a training in small: simulated replicas, the proxy, `trainer_client`, checked rollouts

How a rollout travels: `dataplane.app` reads it, `routing.router` picks one of `fleet.candidates()`, a lease is taken,
`dataplane.upstream` sends it on, `dataplane.verdict` judges the whole answer, `dataplane.relay` delivers it or tries
another replica, and gives the lease back.

How a policy travels: `controlplane.api` takes the announcement, `controlplane.loading` sends it to every replica,
and one synchronous step makes it visible in `fleet` to the rollouts.
"""
