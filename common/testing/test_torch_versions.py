"""`make test-torch`: which versions it takes, and that it notices another one and a failed test."""

import os
import subprocess
import sys

import pytest

from common.testing import torch_versions
from common.testing.harness import ROOT

# Stands for a virtual environment's Python: its torch is $FOUND, its tests end with $STATUS.
PYTHON = """#!/bin/sh
case "$*" in
  *metadata*) echo "$FOUND" ;;
  *"-m pytest"*) echo "== 5 passed, 1 skipped in 1.00s ==" ; exit "$STATUS" ;;
esac
"""


def run_make_test(cache, version, found="", status="0"):
    """Exit status and output of make test-torch where that version seems to be installed."""
    number = "{}.{}".format(*sys.version_info)
    python = cache / "ddp-rung-by-rung" / f"torch-{version}-python{number}" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    variables = {"XDG_CACHE_HOME": str(cache), "FOUND": found or version, "STATUS": status}
    command = [sys.executable, "common/testing/torch_versions.py", "", version]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
    )
    return run.returncode, run.stdout + run.stderr


def test_the_table_begins_with_the_oldest_of_the_requirements():
    versions = torch_versions.tested()
    assert versions[0] == torch_versions.oldest()
    assert versions == sorted(versions, key=lambda version: [*map(int, version.split("."))])


@pytest.mark.parametrize("version", ["9.8.7", "9.8.7+cpu"])
def test_a_line_per_version(tmp_path, version):
    status, output = run_make_test(tmp_path, version)
    assert status == 0, output
    last = output.splitlines()[-1]
    assert last.startswith(f"torch {version}: 5 passed, 1 skipped in 1.00s; "), output


def test_a_failed_test_is_seen(tmp_path):
    status, output = run_make_test(tmp_path, "9.8.7", status="1")
    assert status == 1 and "torch 9.8.7: FAILED: 5 passed" in output, output


def test_another_version_than_asked_for_is_an_error(tmp_path):
    status, output = run_make_test(tmp_path, "9.8.7", found="9.8.6")
    assert status == 1, output
    assert output.endswith("error: torch 9.8.7 was asked for, and 9.8.6 is what runs\n"), output


def test_a_wrong_version_is_one_line(tmp_path):
    status, output = run_make_test(tmp_path, "newest")
    assert status == 2 and output == "error: TORCH='newest' is not a version such as 2.12.1\n"
