"""The demo on a part of the tree, as a user runs it: one command, judged by its exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# The small model's operations are too short for two threads that take turns with other tests.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb"}


def run_demo(*arguments, work_dir):
    command = [sys.executable, "-m", "examples.taxonomy", *arguments, "--work-dir", str(work_dir)]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def number(pattern, output):
    found = re.search(pattern, output)
    assert found, f"{pattern!r} is not in:\n{output}"
    return float(found[1].replace(",", ""))


@pytest.mark.slow
def test_demo_learns_held_out_ancestors_of_a_subset_and_leaves_nothing_behind(tmp_path):
    done = run_demo("--rows", "60000", work_dir=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert number(r"more descendants first\D+([\d.]+)", done.stdout) < 0.15
    assert number(r"before training\D+([\d.]+)", done.stdout) < 0.25
    assert number(r"after pass 2\D+([\d.]+)", done.stdout) >= 0.33
    assert number(r"rows touched for the first time\D+([\d,]+)", done.stdout) > 60_000
    assert "GPU memory taken by the state" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_demo_exits_with_1_where_the_goal_is_missed(tmp_path):
    done = run_demo("--rows", "20000", "--pairs", "500", "--lr", "1e-9", work_dir=tmp_path)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "MRR after training is 0.1" in done.stdout


def test_demo_that_is_cut_short_is_not_judged(tmp_path):
    done = run_demo("--rows", "60000", "--seconds", "0.5", work_dir=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not judged" in done.stdout


def test_demo_says_which_option_is_impossible(tmp_path):
    done = run_demo("--rows", "60000", "--negatives", "5000", work_dir=tmp_path)

    assert done.returncode == 1
    assert "5000 distinct negatives" in done.stderr
    assert "Traceback" not in done.stderr
