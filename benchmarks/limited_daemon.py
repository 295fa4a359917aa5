"""`momentd` in a cgroup: python -m benchmarks.limited_daemon GROUP serve ..."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    group = Path(sys.argv.pop(1))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    # Only now: what is imported is in the group's account.
    from momentd_server.cli import main

    main()
