"""compare.py on hand-written results: of a stage, and of the rungs on several networks."""

import json
import sys

import pytest

import common.ladder.compare
from common.ladder import draw_rungs
from common.ladder.compare import summarize


def result(stage="05_bucketed", name="BucketedDDP", step=0.8, **changes):
    """What --json writes, by hand: three candidates, ten samples each."""

    def candidate(name, step, exposed):
        return {
            "name": name,
            "step_seconds": [step] * 10,
            "exposed_comm_seconds": [exposed] * 10,
            "optimizer_seconds": [0.1] * 10,
            "collectives_per_step": 4,
        }

    return {
        "stage": stage,
        "world_size": 2,
        "device": "cpu",
        "backend": "gloo",
        "model": {"size": "tiny"},
        "candidates": [
            candidate("no sync", 0.5, 0.0),
            candidate(name, step, 0.2),
            candidate("torch DDP", 1.0, 0.3),
        ],
        **changes,
    }


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(result, …): what the command line does with these: exit status, output, errors."""

    def run(*results, words=(), labels=()):
        arguments = []
        for number, content in enumerate(results):
            file = tmp_path / f"{number}.json"
            file.write_text(content if isinstance(content, str) else json.dumps(content))
            arguments.append(f"{labels[number]}={file}" if labels else str(file))
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, *map(str, words)])
        try:
            status = common.ladder.compare.main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def test_summary():
    row = summarize("a.json", result())
    assert row["name"] == "BucketedDDP" and row["collectives"] == 4
    times = [round(row[key], 6) for key in ("step", "exposed", "optimizer", "compute")]
    assert times == [800, 200, 100, 500]
    assert (row["no sync"], row["torch DDP"]) == (1.6, 0.8)


def test_summary_without_baselines():
    row = summarize("a.json", result(candidates=result()["candidates"][1:2]))
    assert row["no sync"] is None and row["torch DDP"] is None


def test_compare_draws_and_says_the_change(compare, tmp_path):
    results = [result(), result(stage="02_naive_ddp", name="NaiveDDP"), result(step=0.6)]
    words = ["--plot", str(tmp_path / "compare.png")]
    status, output, errors = compare(*results, words=words)
    assert not status, errors
    rows = [line.split() for line in output.splitlines()]
    assert rows[1] == ["0.json", "BucketedDDP", "800.0", "1.600", "0.800", "200.0", "4", "-"]
    assert rows[2][:2] == ["1.json", "NaiveDDP"] and rows[2][-1] == "-"
    assert rows[3][0] == "2.json" and rows[3][-2:] == ["-25.0", "%"]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "other, what",
    [
        (result(world_size=3), "world_size differ: 3 and 2"),
        (result(device="cuda"), "device differ: cuda and cpu"),
        (result(model={"size": "xl"}), "model differ"),
        ({"stage": "05"}, "no 'candidates'"),
        ("{", "cannot be read"),
    ],
)
def test_compare_names_what_differs(compare, other, what):
    status, _, errors = compare(result(), other)
    assert status == 2 and what in errors and "1.json" in errors and len(errors.splitlines()) == 1


def test_compare_says_first_what_else_differs(compare):
    before = result(torch="2.9", threads_per_rank=1, options={"bucket_size_mb": 25.0, "json": "a"})
    after = result(torch="2.9", threads_per_rank=2, options={"bucket_size_mb": 1.0, "json": "b"})
    _, output, _ = compare(before, after)
    assert output.splitlines()[:3] == [
        "threads_per_rank differs: 0.json: 1; 1.json: 2",
        "--bucket-size-mb differs: 0.json: 25.0; 1.json: 1.0",
        "file        wrapper  step ms  /no sync  /torch DDP  exposed ms  collectives  change",
    ]


def test_compare_per_rank(compare):
    by_rank = {"step_seconds": [[0.1, 0.3], [0.2, 0.6]], "exposed_comm_seconds": [[0, 0.2], [0, 0]]}
    own = result()["candidates"][1] | by_rank
    floor = own | {"name": "no sync"}
    del floor["exposed_comm_seconds"]
    status, output, _ = compare(result(candidates=[floor, own]), words=["--per-rank"])
    rows = [line.split() for line in output.splitlines()]
    rows = rows[rows.index(["0.json,", "by", "rank,", "in", "ms"]) + 1 :]
    assert not status and rows[0] == "rank step min max exposed min max".split()
    assert rows[1] == ["no", "sync", "0", "200.0", "100.0", "300.0", "-", "-", "-"]
    assert rows[3] == ["BucketedDDP", "0", "200.0", "100.0", "300.0", "100.0", "0.0", "200.0"]
    assert rows[4] == ["BucketedDDP", "1", "400.0", "200.0", "600.0", "0.0", "0.0", "0.0"]


def test_compare_per_rank_needs_samples_by_rank(compare):
    status, _, errors = compare(result(), words=["--per-rank"])
    assert status == 2 and "argument --per-rank: 0.json holds no samples by rank\n" in errors


def test_compare_refuses_a_missing_file(compare):
    status, _, errors = compare(words=["nothing.json"])
    assert status == 2 and "nothing.json: cannot be read" in errors


def of_rungs(world_size=2, step=0.3):
    """What rungs.py writes, by hand: one model, three candidates."""

    def candidate(name, step, exposed, collectives):
        times = {"step_seconds": [step], "exposed_comm_seconds": [exposed]}
        times |= {"optimizer_seconds": [0.02], "collectives_per_step": collectives}
        return {"name": name, **times}

    candidates = [
        candidate("no sync", 0.2, 0, 0),
        candidate("NaiveDDP", step, 0.08, 27),
        candidate("torch DDP", 0.25, 0.04, 3),
    ]
    measured = {"model": {"size": "tiny", "parameters": 10**6}, "candidates": candidates}
    head = {"stage": "rungs", "world_size": world_size, "device": "cpu", "backend": "gloo"}
    return head | {"models": {"tiny": measured}}


def test_medians_are_in_steps_without_synchronization():
    naive = draw_rungs.medians(of_rungs()["models"]["tiny"])["NaiveDDP"]
    parts = {"compute": 1.0, "exposed communication": 0.4, "optimizer": 0.1}
    assert naive == pytest.approx(parts | {"step": 1.5, "collectives": 27})


def test_networks_stand_beside_each_other(compare, tmp_path):
    picture = tmp_path / "networks.png"
    labels = ["loopback", "1 Gbit/s"]
    status, output, errors = compare(
        of_rungs(), of_rungs(step=0.9), labels=labels, words=["--plot", picture]
    )
    assert not status, errors
    rows = [line.split() for line in output.splitlines()]
    assert rows[2] == ["tiny,", "loopback", "NaiveDDP", "1.500", "80.0", "1.200", "27"]
    assert rows[5] == ["tiny,", "1", "Gbit/s", "NaiveDDP", "4.500", "80.0", "3.600", "27"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "other, what",
    [
        (of_rungs(3), "b: cannot be compared with a, their world_size differ: 3 and 2"),
        (result(), "their models differ"),
        ({"stage": "rungs", "models": {"tiny": {}}}, "has no 'candidates'"),
    ],
)
def test_networks_that_do_not_compare_are_one_line(compare, other, what):
    status, _, errors = compare(of_rungs(), other, labels="ab")
    assert status == 2 and what in errors and errors.count("\n") == 1, errors
