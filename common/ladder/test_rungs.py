"""The rungs beside each other: the figures on a hand-written result, and a small run."""

import argparse
import json

import pytest

from common.ladder import growth, networks, rungs
from common.testing import harness
from common.testing.harness import ROOT, check_wrong_input, read_json


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
    check_wrong_input(
        rungs.main, ROOT / "common/ladder/rungs.py", option, value, monkeypatch, capsys
    )


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
    words += [word for name in files for word in (f"--{name}", files[name])]
    status, output = forked(2, ROOT / "common/ladder/rungs.py", *words, cwd=tmp_path)
    assert status == 0, output
    result = read_json(files["json"], "rungs")
    candidates = result["models"]["deep"]["candidates"]
    assert [one["name"] for one in candidates] == list(rungs.LABELS)
    assert [one["collectives_per_step"] for one in candidates[:4]] == [0, 195, 1, 195]
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def a_result(world_size=2, step=0.3):
    candidates = [
        a_candidate("no sync", 0.2, 0, 0.02),
        a_candidate("NaiveDDP", step, 0.08, 0.02, 27),
        a_candidate("torch DDP", 0.25, 0.04, 0.02, 3),
    ]
    of_size = {"model": {"size": "tiny", "parameters": 10**6}, "candidates": candidates}
    head = {"world_size": world_size, "device": "cpu", "backend": "gloo"}
    return head | {"models": {"tiny": of_size}}


def run_networks(monkeypatch, tmp_path, results: dict, *words) -> None:
    files = []
    for number, (name, result) in enumerate(results.items()):
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
        files.append(f"{name.strip()}={tmp_path}/{number}.json")
    monkeypatch.setattr("sys.argv", ["networks.py", *files, *words])
    networks.main()


def test_networks_stand_beside_each_other(monkeypatch, tmp_path, capsys):
    results = {"loopback": a_result(), "1 Gbit/s": a_result(step=0.9)}
    run_networks(monkeypatch, tmp_path, results, "--plot", str(tmp_path / "n.png"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2] == ["tiny,", "loopback", "NaiveDDP", "1.500", "80.0", "1.200", "27"]
    assert rows[5][-5:] == ["NaiveDDP", "4.500", "80.0", "3.600", "27"]
    assert (tmp_path / "n.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "results, message",
    [
        ({"a": a_result(), "b": a_result(3)}, "their world_size differ: a: 2; b: 3"),
        ({"a": a_result(), "a ": a_result()}, "two networks have the same name"),
        ({"a": {"models": {"tiny": {}}}}, "is not a result of rungs.py --json"),
    ],
)
def test_networks_that_do_not_compare_are_one_line(results, message, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run_networks(monkeypatch, tmp_path, results)
    said = capsys.readouterr().err
    assert end.value.code == 2 and message in said and said.count("\n") == 1, said


def test_rungs_are_refused_before_the_first_is_measured(monkeypatch, capsys):
    """`deep` fits, `2.7b` does not: nothing that is measured is lost."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    args = argparse.Namespace(device="cpu", dtype="float32")
    with pytest.raises(SystemExit):
        rungs.check_memory(["deep", "2.7b"], args)
    assert "1 ranks × (2.7b: 6 replicas × 2567.9 million" in capsys.readouterr().err


@pytest.mark.full
def test_growth(forked, tmp_path):
    words = ["--sizes", "deep,tiny", "--steps", "1", "--warmup", "0", "--batch-size", "1"]
    words += ["--context-length", "8", "--json", tmp_path / "json", "--device", "cpu"]
    status, output = forked(2, ROOT / "common/ladder/growth.py", *words, cwd=tmp_path)
    assert status == 0, output
    rows = [line.split()[:3] for line in output.splitlines()[-5:]]
    assert ["deep", "6.6", "16"] in rows and ["tiny", "22.8", "16"] in rows, output
    models = read_json(tmp_path / "json", "growth")["models"]
    assert [len(one["candidates"]) for one in models.values()] == [3, 3]


def test_growth_leaves_out_what_does_not_fit(capsys):
    growth.print_growth({"xl": None}, 2)
    assert capsys.readouterr().out.splitlines()[2].split() == ["xl", *"--------"]
