"""make reference: what is recorded, and that it records everything."""

import signal
import subprocess
import sys
import time

import pytest

from common.recordings import record
from tools.record import RECORDINGS
from tools.harness import ROOT, make

ONE, OTHER = "01_x/reference_output.txt", "01_x/reference_output_picture.txt"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*words): make reference in a repository of two recordings."""
    (tmp_path / "01_x").mkdir()
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "abcdef123")
    monkeypatch.setattr(record.figures, "main", lambda: 0)
    commands = {
        ONE: ["echo 0 > /dev/null", "echo 1.5; echo written: x.png", "echo 2.5 | tee -a ran"],
        OTHER: ["echo p", "echo q"],
    }
    monkeypatch.setattr(record, "RECORDINGS", commands)
    monkeypatch.setattr(record, "COMPARE", OTHER)

    def main(*words) -> int:
        monkeypatch.setattr("sys.argv", ["record", *words])
        return record.main()

    return main


def test_it_records_what_the_present_code_has_not_recorded(run, tmp_path, monkeypatch):
    assert run() == 0
    head, text = (tmp_path / ONE).read_text().split("\n\n", 1)
    assert head.startswith("commit     abcdef123\ntorch      ") and head.endswith(" UTC")
    outputs = "$ echo 1.5; echo written: x.png\n1.5\n\n$ echo 2.5 | tee -a ran\n2.5\n"
    assert text == f"$ echo 0 > /dev/null\n\n{outputs}"
    assert record.output_of(tmp_path / ONE) == "1.5\n"
    (tmp_path / OTHER).unlink()
    assert run() == 0 and (tmp_path / OTHER).exists()
    assert (tmp_path / "ran").read_text() == "2.5\n"  # ONE was there
    assert run(ONE) == 0  # named: again
    monkeypatch.setattr(record, "commit", lambda: "abcdef124")  # other code
    assert run() == 0
    assert (tmp_path / "ran").read_text() == 3 * "2.5\n"


def test_the_runs_of_compare_lie_in_between_all_others(run):
    commands = record.in_order([OTHER, ONE])
    assert [command for name, command in commands if name == ONE] == record.RECORDINGS[ONE]
    assert [commands[1], commands[4]] == [(OTHER, "echo p"), (OTHER, "echo q")]
    assert len(record.in_order([ONE])) == 3


def test_what_fails_is_named_and_its_recording_stays(run, tmp_path, capsys):
    (tmp_path / ONE).write_text("old\n")
    record.RECORDINGS[ONE][1] = "exit 3"
    assert run() == 1
    output = capsys.readouterr().out
    assert f"FAILED at {ONE}, whose old recording stays: Command 'exit 3' returned" in output
    assert (tmp_path / ONE).read_text() == "old\n" and not (tmp_path / "ran").exists()
    assert (tmp_path / OTHER).exists()


def test_interrupted_it_ends_what_it_has_started(tmp_path):
    """The command and its child; nothing is written.

    What it prints first is more than a pipe holds, so record reads it already.
    """
    program = f"""
from pathlib import Path
from common.recordings import record
record.ROOT = Path({str(tmp_path)!r})
record.RECORDINGS = {{"x.txt": ["seq 99999; sleep 1000 & echo $! > {tmp_path}/child; wait"]}}
raise SystemExit(record.main())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            assert run.poll() is None
        run.send_signal(signal.SIGTERM)  # as Ctrl-C does
        output = run.communicate(timeout=30)[0]
    assert run.returncode == 130 and "make reference goes on with the 1 left" in output
    assert not (tmp_path / "x.txt").exists()
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while is_alive(child):  # it was told to end, and may need a moment
        assert time.monotonic() < deadline


def is_alive(process: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True).stdout
    return bool(state.strip()) and not state.startswith(b"Z")


def test_a_path_that_no_recording_has_ends_in_one_line():
    status, output = make("reference", f"PYTHON={sys.executable}", "ONLY=09_no")
    assert status == 2 and "error: argument ONLY: no recording's path begins with 09_no" in output


def test_every_recording_and_every_picture_has_a_command():
    commands = " ".join(sum(RECORDINGS.values(), []))
    recordings = set(ROOT.glob("[!.]*/**/reference_output*.txt"))
    for path in recordings | {*ROOT.glob("0?_*/**/*.png"), *ROOT.glob("common/**/*.png")}:
        name = path.relative_to(ROOT).as_posix()
        assert name in RECORDINGS or name in commands or "gpu" in name, name
