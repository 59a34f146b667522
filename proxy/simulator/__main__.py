"""`python -m proxy.simulator --port 0 --settings '{"max_loras": 2}'`: one replica, for tests and benchmarks."""

from __future__ import annotations

import argparse
import json

from proxy.simulator.server import run
from proxy.simulator.settings import SimulatorSettings


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m proxy.simulator", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--settings", type=json.loads, default={}, help="other SimulatorSettings, as a JSON object")
    arguments = parser.parse_args()
    run(SimulatorSettings.model_validate({**arguments.settings, "port": arguments.port}))


if __name__ == "__main__":
    main()
