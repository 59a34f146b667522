"""Finds out which replicas there are, where PROXY_DISCOVER says, and lets them join and leave.

`follow` asks again and again; `jobs`, `dns` and `file` are what it can ask; `plan` decides what follows from an answer.
"""
