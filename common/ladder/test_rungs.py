"""The rungs beside each other: a small run, and what is refused."""

import argparse

import pytest

from common.ladder import rungs
from common.ladder.draw_rungs import LABELS
from common.testing import harness
from common.testing.harness import ROOT, check_wrong_input, read_json


@pytest.mark.parametrize("option, value", [("--sizes", "huge"), ("--sizes", ""), ("--plot", "/")])
def test_wrong_input(option, value, monkeypatch, capsys):
    script = ROOT / "common/ladder/rungs.py"
    check_wrong_input(rungs.main, script, option, value, monkeypatch, capsys)


# Three scripts after one another under one torchrun: each again would import torch for seconds.
SCRIPTS = ["02_naive_ddp/naive_ddp.py", "03_flat_ddp/flat_ddp.py", "04_overlap_ddp/overlap_ddp.py"]
ALL_OF_THEM = """
import os, runpy, sys

for number, path in enumerate(sys.argv[1:]):
    print("=== ", path, flush=True)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # a place of its own in the store
    with open(f"{number}/words") as words:
        sys.argv = [path, *words.read().splitlines()]
    runpy.run_path(path, run_name="__main__")
"""


def test_scripts_of_the_rungs_under_torchrun(launched, tmp_path):
    """As 05's own test runs it: what is printed and written. The data are a small MNIST."""
    harness.write_mnist(tmp_path / "data", 320, 10)
    (tmp_path / "all.py").write_text(ALL_OF_THEM)
    for number in range(len(SCRIPTS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = [*harness.QUICK, "--device", "cpu", "--data", tmp_path / "data"]
        words += harness.files_in(folder)
        (folder / "words").write_text("\n".join(map(str, words)))
    paths = [ROOT / script for script in SCRIPTS]
    status, output = launched(1, tmp_path / "all.py", *paths, cwd=tmp_path)
    assert status == 0, output
    _, *outputs = output.split("=== ")
    for number, (path, of_script) in enumerate(zip(paths, outputs, strict=True)):
        of_script = of_script.partition("\n")[2]
        harness.check_output(of_script, path, tmp_path / str(number), 1, "cpu")


@pytest.mark.full
def test_run(forked, tmp_path):
    files = {name: tmp_path / name for name in ("json", "plot")}
    words = ["--sizes", "deep", "--steps", "1", "--warmup", "0", "--batch-size", "1"]
    for name, file in files.items():
        words += [f"--{name}", file]
    status, output = forked(2, ROOT / "common/ladder/rungs.py", *words, cwd=tmp_path)
    assert status == 0, output
    result = read_json(files["json"], "rungs")
    candidates = result["models"]["deep"]["candidates"]
    assert [one["name"] for one in candidates] == list(LABELS)
    assert [one["collectives_per_step"] for one in candidates[:4]] == [0, 195, 1, 195]
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def test_rungs_are_refused_before_the_first_is_measured(monkeypatch, capsys):
    """`deep` fits, `2.7b` does not: nothing that is measured is lost."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    args = argparse.Namespace(device="cpu", dtype="float32", sizes=["deep", "2.7b"])
    with pytest.raises(SystemExit):
        rungs.check_memory(args)
    assert "1 ranks × (2.7b: 6 replicas × 2567.9 million" in capsys.readouterr().err


def test_results_of_an_earlier_run_do_not_outlive_a_run_that_fails(forked, tmp_path):
    files = [tmp_path / "x.png", tmp_path / "x.json"]
    for file in files:
        file.write_text("of an earlier run")
    words = ["--sizes", "10b", "--device", "cpu", "--plot", files[0], "--json", files[1]]
    status, output = forked(1, ROOT / "common/ladder/rungs.py", *words, cwd=tmp_path)
    assert status == 2 and "of memory" in output, output
    assert not any(file.exists() for file in files)
