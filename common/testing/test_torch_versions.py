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


def test_the_table_begins_with_the_oldest_of_the_requirements():
    versions = torch_versions.tested()
    assert versions[0] == torch_versions.oldest()
    assert versions == sorted(versions, key=lambda version: [*map(int, version.split("."))])


@pytest.mark.parametrize(
    "version, found, tests_end_with, status, last_line",
    [
        ("9.8.7", "9.8.7", 0, 0, "torch 9.8.7: 5 passed, 1 skipped in 1.00s"),
        ("9.8.7+cpu", "9.8.7+cpu", 0, 0, "torch 9.8.7+cpu: 5 passed, 1 skipped in 1.00s"),
        ("9.8.7", "9.8.7", 1, 1, "torch 9.8.7: FAILED: 5 passed, 1 skipped in 1.00s"),
        ("9.8.7", "9.8.6", 0, 1, "error: torch 9.8.7 was asked for, and 9.8.6 is what runs"),
        ("newest", "", 0, 2, "error: TORCH='newest' is not a version such as 2.12.1"),
    ],
)
def test_one_version(tmp_path, version, found, tests_end_with, status, last_line):
    number = "{}.{}".format(*sys.version_info)
    folder = tmp_path / "ddp-rung-by-rung" / f"torch-{version}-python{number}" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    variables = {"XDG_CACHE_HOME": str(tmp_path), "FOUND": found, "STATUS": str(tests_end_with)}
    command = [sys.executable, "common/testing/torch_versions.py", "", version]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.run(command, cwd=ROOT, env=os.environ | variables, **output)
    assert run.returncode == status and run.stdout.endswith(f"{last_line}\n"), run.stdout
