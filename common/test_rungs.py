"""The rungs beside each other: the figures on a hand-written result, and a small run."""

import pytest

from common import rungs
from common.testing import ROOT, check_wrong_input, read_json, torchrun


def a_candidate(name, step, exposed, optimizer, collectives=0):
    times = {"step_seconds": [step], "exposed_comm_seconds": [exposed]}
    times |= {"optimizer_seconds": [optimizer], "collectives_per_step": collectives}
    return {"name": name, **times}


def test_medians_are_in_steps_without_synchronization():
    candidates = [a_candidate("no sync", 0.2, 0, 0.02), a_candidate("FlatDDP", 0.3, 0.08, 0.02, 1)]
    flat = rungs.medians({"candidates": candidates})["FlatDDP"]
    parts = {"compute": 1.0, "exposed communication": 0.4, "optimizer": 0.1}
    assert flat == pytest.approx(parts | {"step": 1.5, "collectives": 1})


@pytest.mark.parametrize("option, value", [("--sizes", "huge"), ("--steps", "0"), ("--plot", "/")])
def test_wrong_input(option, value, monkeypatch, capsys):
    check_wrong_input(rungs.main, ROOT / "common/rungs.py", option, value, monkeypatch, capsys)


@pytest.mark.full
def test_run(script, tmp_path):
    files = {name: tmp_path / name for name in ("json", "plot")}
    words = ["--sizes", "deep", "--steps", "1", "--warmup", "0", "--batch-size", "1"]
    words += [word for name in files for word in (f"--{name}", files[name])]
    status, output = script(torchrun(2, ROOT / "common/rungs.py", *words), cwd=tmp_path).wait()
    assert status == 0, output
    result = read_json(files["json"], "rungs")
    candidates = result["models"]["deep"]["candidates"]
    assert [one["name"] for one in candidates] == list(rungs.LABELS)
    assert [one["collectives_per_step"] for one in candidates[:4]] == [0, 195, 1, 195]
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
