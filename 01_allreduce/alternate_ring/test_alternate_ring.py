"""Tests of the alternate ring's script; test_allreduce.py has those of its sums."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import alternate_ring

from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import masked

SCRIPT = Path(__file__).with_name("alternate_ring.py")


def test_script(forked):
    words = ["--sizes-mb", "0.5", "--nproc", "2", "--steps", "3", "--warmup", "1"]
    status, output = forked(None, SCRIPT, *words)
    assert status == 0, output
    recorded = output_of(SCRIPT.with_name("reference_output.txt"))
    assert set(masked(output)) == set(masked(recorded))
    row = output.splitlines()[2].split()
    assert row[:2] == ["2", "0.5"] and row[-2:] == ["1.00", "0"], output


def test_bad_input_is_one_line(monkeypatch, capsys):
    harness.check_wrong_input(alternate_ring.main, SCRIPT, "--nproc", "two", monkeypatch, capsys)


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)
