"""Sync: what replicas hold follows what is wanted, on all or on none. Writes states into the fleet; sees no rollout.

One loop: something changes, `plan` compares what is wanted with what is there, one thing is done, and it begins anew.

announcing    what is refused, and how an announcement relates to what is known
loading       from an announcement to the moment in which a policy is wanted, and its report
storage       waits until a store has all files; phases: how long each part of an announcement took
plan          what a replica needs, and what becomes of a policy: pure
reconciler    settles policies
keeper        looks after one replica: look, plan, act
verify        proves that a replica serves what it lists
monitor       asks a replica whether it lives
members       replicas come and go
pausing       pauses, recorded and real
changes       waits until something about the fleet is true
replica_api   vLLM's dialect; answer: what a replica said, as data
broadcast     one call to all replicas
federation    the replicas' own metrics on one page
api, members_api, forwarding   what clients call; guard: who may
"""
