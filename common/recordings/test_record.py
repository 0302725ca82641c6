"""make reference: what is recorded, in which order, and that it records everything."""

import os
import signal
import subprocess
import sys
import time

import pytest

from common.recordings import record
from common.recordings.record import RECORDINGS
from common.testing.harness import ROOT, make


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    """A repository of two recordings; the second one has a picture."""
    folder = tmp_path / "01_x"
    folder.mkdir()
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "abcdef123")
    monkeypatch.setattr(record.figures, "main", lambda: 0)
    commands = {
        "01_x/reference_output.txt": ["echo 0 > /dev/null", "echo 1.5", "echo 2.5"],
        "01_x/reference_output_picture.txt": ["echo p > 01_x/x.png; echo written: x.png"],
    }
    monkeypatch.setattr(record, "RECORDINGS", commands)
    return folder


def run(monkeypatch, *words) -> int:
    monkeypatch.setattr("sys.argv", ["record", *words])
    return record.main()


def test_it_records_what_the_present_code_has_not_recorded(recordings, monkeypatch, capsys):
    assert run(monkeypatch) == 0
    output = capsys.readouterr().out
    assert "2 of 2 recordings, all" in output
    assert "4 of 4, 01_x/reference_output_picture.txt: echo p" in output
    one = recordings / "reference_output.txt"
    other = recordings / "reference_output_picture.txt"
    head, text = one.read_text().split("\n\n", 1)
    assert head.startswith("commit     abcdef123\ntorch      ") and " UTC; it took 0 s" in head
    assert text == "$ echo 0 > /dev/null\n\n$ echo 1.5\n1.5\n\n$ echo 2.5\n2.5\n"
    assert record.output_of(one) == "1.5\n"
    assert other.read_text().endswith("echo written: x.png\n")  # the command, not the output
    other.unlink()
    before = one.stat().st_mtime_ns
    assert run(monkeypatch) == 0
    assert "1 of 2 recordings, all" in capsys.readouterr().out
    assert one.stat().st_mtime_ns == before and other.exists()
    assert run(monkeypatch, "01_x/reference_output.txt") == 0  # named: again
    assert one.stat().st_mtime_ns > before
    monkeypatch.setattr(record, "commit", lambda: "abcdef124")  # other code
    capsys.readouterr()
    assert run(monkeypatch) == 0 and "2 of 2 recordings" in capsys.readouterr().out


def test_the_runs_of_compare_lie_in_between_the_others(recordings, monkeypatch):
    names = {"spread": ["echo 1", "echo 2", "echo 3"], "a": ["echo a"], "b": ["echo b"]}
    commands = {}
    for name, words in names.items():
        commands[f"01_x/{name}"] = [f"{word} | tee -a results/order" for word in words]
    monkeypatch.setattr(record, "RECORDINGS", commands)
    monkeypatch.setattr(record, "SPREAD", "01_x/spread")
    assert run(monkeypatch) == 0
    assert (recordings.parent / "results" / "order").read_text().split() == list("a1b23")
    recorded = (recordings / "spread").read_text().splitlines()
    assert [line for line in recorded if line.isdigit()] == ["1", "2", "3"]


def test_what_fails_is_named_and_stops_and_repeats_nothing(recordings, monkeypatch, capsys):
    """Not even where its commands lie in between the others'."""
    (recordings / "reference_output.txt").write_text("old\n")
    commands = ["echo 1 >> results/ran", "exit 3", "echo 2 >> results/ran"]
    record.RECORDINGS["01_x/reference_output.txt"] = commands
    record.RECORDINGS["01_x/last.txt"] = ["echo last"]
    monkeypatch.setattr(record, "SPREAD", "01_x/reference_output.txt")
    assert run(monkeypatch) == 1
    output = capsys.readouterr().out
    assert "FAILED at 01_x/reference_output.txt, whose old recording stays: " in output
    assert "Command 'exit 3' returned non-zero exit status 3" in output
    assert (recordings / "reference_output.txt").read_text() == "old\n"
    assert (recordings.parent / "results" / "ran").read_text() == "1\n"
    assert (recordings / "reference_output_picture.txt").exists()
    assert (recordings / "last.txt").exists()


def all_processes() -> str:
    return subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_interrupted_it_ends_what_it_has_started(tmp_path, number):
    """The command, its child, and nothing is written."""
    sleeping = f"sleep {100000 + os.getpid()}"  # no other run of this test has it
    program = f"""
from pathlib import Path
from common.recordings import record
record.ROOT = Path({str(tmp_path)!r})
record.RECORDINGS = {{"x.txt": ["sleep $((100000 + {os.getpid()})) | cat"]}}
raise SystemExit(record.main())
"""
    command = [sys.executable, "-c", program]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as run:
        while sleeping not in all_processes():
            assert run.poll() is None
        run.send_signal(number)
        output = run.communicate(timeout=30)[0]
    assert run.returncode == 130 and "make reference goes on with the 1 left" in output
    assert not (tmp_path / "x.txt").exists()
    deadline = time.monotonic() + 10
    while sleeping in all_processes():  # it was told to end, and may need a moment
        assert time.monotonic() < deadline


def test_a_path_that_no_recording_has_ends_in_one_line():
    status, output = make("reference", f"PYTHON={sys.executable}", "ONLY=09_no")
    assert status == 2 and "error: argument ONLY: no recording's path begins with 09_no" in output


def test_every_recording_and_every_picture_has_a_command():
    commands = " ".join(sum(RECORDINGS.values(), []))
    recordings = set(ROOT.glob("[!.]*/**/reference_output*.txt"))
    for path in recordings | {*ROOT.glob("0?_*/**/*.png"), *ROOT.glob("common/**/*.png")}:
        name = path.relative_to(ROOT).as_posix()
        assert name in RECORDINGS or name in commands or "gpu" in name, name
