"""The rungs beside each other: a small run, and what is refused."""

from common.ladder import rungs
from common.testing.harness import NANO_CALLS, QUICK, ROOT, check_wrong_input, read_json


def test_wrong_input(monkeypatch, capsys):
    script = ROOT / "common/ladder/rungs.py"
    check_wrong_input(rungs.main, script, "--size", "huge", monkeypatch, capsys)


def test_run(forked, tmp_path):
    json, picture = tmp_path / "x.json", tmp_path / "x.png"
    words = [*QUICK, "--device", "cpu", "--json", json, "--plot", picture]
    status, output = forked(2, ROOT / "common/ladder/rungs.py", *words, cwd=tmp_path)
    assert status == 0, output
    candidates = read_json(json, "rungs")["models"]["nano"]["candidates"]
    counts = {one["name"]: one["collectives_per_step"] for one in candidates}
    assert list(counts.items()) == [*NANO_CALLS.items(), ("one process", 0)]
    ranks = {one["name"]: len(one["step_seconds"]) for one in candidates}
    assert ranks.pop("one process") == 1 and set(ranks.values()) == {2}
    summary = output[output.index("step ÷ no sync") :].splitlines()
    assert [int(line.split()[-1]) for line in summary[1:9]] == list(counts.values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_results_of_an_earlier_run_do_not_outlive_a_run_that_fails(forked, tmp_path):
    files = [tmp_path / "x.png", tmp_path / "x.json"]
    for file in files:
        file.write_text("of an earlier run")
    words = ["--size", "10b", "--device", "cpu", "--plot", files[0], "--json", files[1]]
    status, output = forked(1, ROOT / "common/ladder/rungs.py", *words, cwd=tmp_path)
    assert status == 2 and "of memory" in output, output
    assert not any(file.exists() for file in files)
