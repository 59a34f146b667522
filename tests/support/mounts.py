"""A mount of its own for every process: one path that shows each of them other files, early, late, torn or none at all.

The path leads through the working directory of whoever opens it, so that nobody needs the right to mount anything.
Start replicas and proxy with `cwd=` their directory, put files there, and announce `MOUNT / name`.
"""

from __future__ import annotations

from pathlib import Path

MOUNT = Path("/proc/self/cwd")
"""Linux only, as the rest of what the tests start."""
