"""Sync: loads, unloads, pauses and probes, on every replica or none. Writes states into the fleet; sees no rollout.

replica_api   vLLM's dialect
announcing    what is refused, and what is known already
loading       brings a policy to every replica or to none
retiring      takes a policy away
plan          what a replica needs to hold what the fleet serves
monitor       probes replicas and lets them in
broadcast     one call to all replicas
api           what clients call
"""
