"""The state that both planes share: replicas, policies and leases, in memory only. Nothing here awaits or does I/O.

The control plane writes states, the data plane writes leases and observations, and each reads snapshots. Every change
of more than one thing is one synchronous call, so that nobody sees half of it. Values that
are made for every rollout are msgspec Structs: frozen, and cheap to make.
"""
