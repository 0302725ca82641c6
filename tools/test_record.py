"""make reference: what is recorded, when, and in which order."""

import json
import subprocess

import pytest

from tools import record
from tools.testing import ROOT

ONE, OTHER = "05_bucketed/reference_output.txt", "02_naive_ddp/reference_output_z.txt"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*words): make reference in a repository of two recordings."""
    for name in ("05_bucketed/x.py", "02_naive_ddp/y.py", "02_naive_ddp/test_y.py", "common/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record.figures, "main", lambda: 0)
    commands = {ONE: ["echo 1.5; echo written: x.png", "echo one >> ran"]}
    commands[OTHER] = ["echo other >> ran", "echo last >> ran"]
    monkeypatch.setattr(record, "RECORDINGS", commands)
    commit(tmp_path)

    def main(*words) -> int:
        monkeypatch.setattr("sys.argv", ["record", *words])
        return record.main()

    return main


def test_a_machine_whose_speed_drifts(tmp_path):
    for stretches, has_drifted in {(2.0, 2.9): False, (2.0, 3.1): True}.items():
        (tmp_path / "x").write_text(json.dumps({"stretch": stretches}))
        assert record.has_drifted(tmp_path / "x") == has_drifted


def commit(folder) -> None:
    git = "git -c user.name=x -c user.email=x@y commit -qam x"
    subprocess.run(f"git init -q; git add .; {git}", shell=True, cwd=folder, check=True)


def test_it_records_what_the_present_code_has_not_recorded(run, tmp_path):
    assert run() == 0
    head, text = (tmp_path / ONE).read_text().split("\n\n", 1)
    assert head.startswith("commit     ") and "torch      " in head and head.endswith(" UTC")
    assert text == "$ echo 1.5; echo written: x.png\n1.5\n\n$ echo one >> ran\n"
    ran = tmp_path / "ran"
    assert ran.read_text() == "one\nother\nlast\n"
    assert run() == 0 and ran.read_text().count("one") == 1
    (tmp_path / "02_naive_ddp" / "test_y.py").write_text("1")
    assert run() == 0 and ran.read_text().count("last") == 1, "a test changes no recording"
    (tmp_path / "02_naive_ddp" / "y.py").write_text("1")  # 05 compares it
    assert run() == 0 and ran.read_text().count("one") == 2 and ran.read_text().count("last") == 2
    (tmp_path / "common" / "c.py").write_text("1")
    assert run() == 0 and ran.read_text().count("one") == 3 and ran.read_text().count("last") == 3
    assert run("02") == 0 and ran.read_text().count("last") == 4  # named: again


def test_every_recording_and_every_picture_has_a_command():
    commands = " ".join(sum(record.RECORDINGS.values(), []))
    assert all(record.RECORDINGS.values())
    by_hand = {"timeline.png", "timeline.gif", "step.png"}  # by draw_stages, and in a browser
    found = [*ROOT.glob("0?_*/**/*.png"), *ROOT.glob("0?_*/**/*.gif")]
    pictures = {path for path in found if path.name not in by_hand}
    for path in pictures.union(ROOT.glob("[!.]*/**/reference_output*.txt")):
        name = path.relative_to(ROOT).as_posix()
        assert name in record.RECORDINGS or name in commands, name
