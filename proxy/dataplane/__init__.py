"""Rollouts: plain ASGI in, one replica's HTTP out. Reads the fleet and writes leases and observations into it."""
