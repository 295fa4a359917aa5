"""R107: a data directory of somebody else: the message names uid, owner, path and the command."""

import os
import subprocess
import sys

import pytest


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_serve_in_a_directory_of_root_says_what_to_do(tmp_path):
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    for part in [tmp_path, *tmp_path.parents]:
        if part.stat().st_uid == 0 and part != part.parent and str(part) != "/tmp":
            part.chmod(0o755)
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 12345, 12345)
    script = (
        "import os, sys\n"
        "from momentd_server.cli import main\n"
        "import momentd_server.app, momentd_server.engine.engine\n"
        "from click.testing import CliRunner\n"
        "from momentd_server.cli.root import momentd\n"
        "CliRunner().invoke(momentd, ['serve', '--help'])\n"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "sys.argv = ['momentd', 'serve', '--cache', '32MiB', '--data-dir', sys.argv[1],\n"
        "            '--address', 'unix:' + sys.argv[2]]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(data), str(tmp_path / "run" / "s")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    for part in ("12345", "uid 0", str(data), "chown"):
        assert part in done.stderr
