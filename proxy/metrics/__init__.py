"""What is counted while it happens, and only there. Registries are passed in; every label has few values.

rollouts    of the data plane: cheap enough to be counted for every rollout
loads       of the control plane: announcements and how long each phase took
histogram   buckets without a lock
"""
