"""Run the proxy with every logger at DEBUG: `python -m tests.support.debug_log`, its settings as ever."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import proxy.logs
from proxy.cli import main


def everything(style: Literal["text", "json"]) -> None:
    """Stand in for `proxy.logs.configure`."""
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, force=True)


if __name__ == "__main__":
    proxy.logs.configure = everything
    sys.argv = sys.argv[:1]
    main()
