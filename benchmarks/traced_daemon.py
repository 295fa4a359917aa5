"""`momentd` with its kernels' intervals recorded: python -m benchmarks.traced_daemon FILE serve ...

FILE gets the intervals as JSON when the daemon has stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from momentd_server import rules
from momentd_server.cli import main

from .tracing import Trace


def run() -> None:
    target = Path(sys.argv.pop(1))
    trace = Trace()
    trace.wrap(rules, "plan", "sort and find duplicates")
    trace.wrap(type(rules.get("sparse_adam")), "apply", "kernel")
    try:
        main()
    finally:
        target.write_text(json.dumps(trace.intervals))


if __name__ == "__main__":
    run()
