"""make reference: medians, what is recorded and what is not, and that it records everything."""

import os
import signal
import subprocess
import sys

import pytest

from common.recordings import record, spread
from common.recordings.record import RECORDINGS, Recording
from common.testing.harness import ROOT, make

OUTPUT = """\
{0}: torch 2.15.0+cu132, 2 ranks

step, ms      p50    p75  share
NaiveDDP  {1:>7}  484.1  {2} %
torch DDP   500.0  501.0  8.5 %
took {3} s in all

verify: passed
"""
RUNS = [
    OUTPUT.format("x", "999.5", "7.1", "9"),
    OUTPUT.format("x", "1,002.0", "9.9", "8"),
    OUTPUT.format("x", "417.4", "8.0", "10"),
]


def test_medians_and_range_of_runs():
    expected = OUTPUT.format("x", "999.5", "8.0", "9")
    table = OUTPUT.split("\n\n")[1] + "\n"
    lowest = "\nlowest of 3 runs\n" + table.format("", "417.4", "7.1", "8")
    highest = "\nhighest of 3 runs\n" + table.format("", "1,002.0", "9.9", "10")
    assert spread.are_alike(RUNS)
    assert spread.summary(RUNS) == expected + lowest + highest
    assert spread.most_typical(RUNS) == 0


def test_what_is_not_alike_has_no_median():
    assert not spread.are_alike([RUNS[0], OUTPUT.format("y", "417.4", "8.0", "10")])
    assert not spread.are_alike([RUNS[0], RUNS[1] + "one line more\n"])


def test_a_number_that_is_wider_than_in_the_first_run_stays_in_its_column():
    assert spread.merge(("a    9.5   1", "a   10.5  12"), max) == "a   10.5  12"
    assert spread.merge(("a  -9.5  1e-3", "a  10.5  2e-3"), max) == "a  10.5  2e-3"
    assert spread.merge(("in 9.5 s", "in 10.5 s"), max) == "in 10.5 s"


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    """A repository of two recordings; the second one is of three runs and has a picture."""
    folder = tmp_path / "01_x"
    folder.mkdir()
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "abcdef123")
    monkeypatch.setattr(record.figures, "main", lambda: 0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.2, 3.0, 3.0))
    count = "echo $(($(cat n) + 1)) > n; cp n results/x.png; echo run $(cat n); echo 'written: n'"
    (tmp_path / "n").write_text("0\n")
    chosen = {
        "01_x/reference_output.txt": Recording(["echo 1.5", "echo 2.5"]),
        "01_x/reference_output_three.txt": Recording([count], 3, {"x.png": "x.png"}),
    }
    monkeypatch.setattr(record, "RECORDINGS", chosen)
    return folder


def run(monkeypatch, *words) -> int:
    monkeypatch.setattr("sys.argv", ["record", *words])
    return record.main()


def test_it_records_what_is_not_there_and_goes_on_where_it_was(recordings, monkeypatch, capsys):
    assert run(monkeypatch) == 0
    assert "2 of 2 recordings, commit abcdef123" in capsys.readouterr().out
    one = recordings / "reference_output.txt"
    three = recordings / "reference_output_three.txt"
    assert one.read_text().startswith("commit     abcdef123\ntorch      ")
    assert record.output_of(one) == "$ echo 1.5\n1.5\n\n$ echo 2.5\n2.5\n"
    assert record.output_of(three) == "run 2\n"
    assert three.read_text().endswith("\nlowest of 3 runs\nrun 1\n\nhighest of 3 runs\nrun 3\n")
    assert (recordings / "x.png").read_text() == "2\n"
    three.unlink()
    before = one.stat().st_mtime_ns
    assert run(monkeypatch) == 0
    assert "1 of 2 recordings" in capsys.readouterr().out
    assert one.stat().st_mtime_ns == before and record.output_of(three) == "run 5\n"
    monkeypatch.setattr(record, "commit", lambda: "abcdef124")  # other code
    assert run(monkeypatch) == 0
    assert "2 of 2 recordings" in capsys.readouterr().out
    assert run(monkeypatch, "01_x/reference_output.txt") == 0  # named: again
    assert "1 of 2 recordings" in capsys.readouterr().out


def test_what_fails_is_named_and_the_old_recording_stays(recordings, monkeypatch, capsys):
    (recordings / "reference_output.txt").write_text("old\n")
    record.RECORDINGS["01_x/reference_output.txt"] = Recording(["echo new; exit 3"])
    assert run(monkeypatch) == 1
    output = capsys.readouterr().out
    assert "FAILED, the old one stays: 01_x/reference_output.txt: " in output
    assert "exit status 3" in output
    assert (recordings / "reference_output.txt").read_text() == "old\n"
    assert (recordings / "reference_output_three.txt").exists()


def test_it_does_not_begin_on_a_busy_machine(recordings, monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.7, 0.0, 0.0))
    with pytest.raises(SystemExit) as end:
        run(monkeypatch)
    error = capsys.readouterr().err
    assert end.value.code == 2 and "the load is 0.70" in error and "FORCE=1" in error
    assert not list(recordings.iterdir())
    assert run(monkeypatch, "--force") == 0


def all_processes() -> str:
    return subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_interrupted_it_ends_what_it_has_started(tmp_path, number):
    """The command, its child, and nothing is written."""
    program = f"""
from pathlib import Path
from common.recordings import record
record.ROOT = Path({str(tmp_path)!r})
record.RECORDINGS = {{"x.txt": record.Recording(["sleep 1234.$((5)) | cat"])}}
raise SystemExit(record.main())
"""
    command = [sys.executable, "-c", program, "--force"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as run:
        while "sleep 1234.5" not in all_processes():
            assert run.poll() is None
        run.send_signal(number)
        output = run.communicate(timeout=30)[0]
    assert run.returncode == 130 and "make reference goes on with the 1 that are left" in output
    assert not (tmp_path / "x.txt").exists()
    assert "sleep 1234.5" not in all_processes()


def test_a_path_that_no_recording_has_ends_in_one_line():
    status, output = make("reference", f"PYTHON={sys.executable}", "ONLY=09_no", "FORCE=1")
    assert status == 2 and "error: argument ONLY: no recording's path begins with 09_no" in output


def test_every_recording_and_every_picture_has_a_command():
    found = {path for path in ROOT.glob("[!.]*/**/reference_output*.txt") if "gpu" not in path.name}
    assert {ROOT / name for name in RECORDINGS} == found
    pictures = set()
    for name, recording in RECORDINGS.items():
        files = [*recording.files, *filter(None, [recording.picture])]
        pictures |= {(ROOT / name).parent.joinpath(file).resolve() for file in files}
    drawn = {path for path in pictures if path.suffix == ".png"}
    assert drawn == set(ROOT.glob("0?_*/**/*.png")) | set(ROOT.glob("common/**/*.png"))
