"""The rungs beside each other: a small run, and what is refused."""

import pytest

from common.ladder import rungs
from common.ladder.draw_rungs import LABELS
from common.testing.harness import ROOT, check_wrong_input, read_json


def test_wrong_input(monkeypatch, capsys):
    script = ROOT / "common/ladder/rungs.py"
    check_wrong_input(rungs.main, script, "--size", "huge", monkeypatch, capsys)


@pytest.mark.full
def test_run(forked, tmp_path):
    files = {name: tmp_path / name for name in ("json", "plot")}
    words = ["--size", "deep", "--steps", "1", "--warmup", "0", "--batch-size", "1"]
    for name, file in files.items():
        words += [f"--{name}", file]
    status, output = forked(2, ROOT / "common/ladder/rungs.py", *words, cwd=tmp_path)
    assert status == 0, output
    result = read_json(files["json"], "rungs")
    candidates = result["models"]["deep"]["candidates"]
    assert [one["name"] for one in candidates] == list(LABELS)
    assert [one["collectives_per_step"] for one in candidates[:4]] == [0, 195, 1, 195]
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def test_results_of_an_earlier_run_do_not_outlive_a_run_that_fails(forked, tmp_path):
    files = [tmp_path / "x.png", tmp_path / "x.json"]
    for file in files:
        file.write_text("of an earlier run")
    words = ["--size", "10b", "--device", "cpu", "--plot", files[0], "--json", files[1]]
    status, output = forked(1, ROOT / "common/ladder/rungs.py", *words, cwd=tmp_path)
    assert status == 2 and "of memory" in output, output
    assert not any(file.exists() for file in files)
