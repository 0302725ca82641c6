"""compare.py on hand-written results: of a stage, and of the rungs on several networks."""

import json
import sys
from pathlib import Path

import pytest

import common.ladder.compare
from common.ladder import draw_rungs, draw_runs
from common.recordings.record import output_of


def candidate(name, step, exposed, **changes):
    """One of the candidates of a result: two ranks, two steps each."""
    return {
        "name": name,
        "step_seconds": [[step] * 2] * 2,
        "exposed_comm_seconds": [[exposed] * 2] * 2,
        "optimizer_seconds": [[0.1] * 2] * 2,
        "collectives_per_step": 4,
        **changes,
    }


def result(name="BucketedDDP", step=0.8, **changes):
    """What --json of a stage writes, by hand."""
    head = {"stage": "05_bucketed", "world_size": 2, "device": "cpu", "backend": "gloo"}
    floor = candidate("no sync", 0.5, 0.0)
    candidates = [floor, candidate(name, step, 0.2), candidate("torch DDP", 1.0, 0.3)]
    return head | {"model": {"size": "tiny"}, "candidates": candidates} | changes


NO_SAMPLES = candidate("no sync", 0.5, 0.0, step_seconds=[])
RAGGED = candidate("no sync", 0.5, 0.0, step_seconds=[[0.5], []])


def of_rungs(step=0.8, **changes):
    """What rungs.py writes."""
    both = result("NaiveDDP", step)
    measured = {"model": both.pop("model"), "candidates": both.pop("candidates")}
    return both | {"stage": "rungs", "models": {"tiny": measured}} | changes


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(result, …): what the command line does with these: exit status, output, errors."""

    def run(*results, words=()):
        arguments = []
        for label, content in zip("ab", results, strict=False):
            file = tmp_path / f"{label}.json"
            file.write_text(content if isinstance(content, str) else json.dumps(content))
            arguments.append(f"{label}={file}")
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, *map(str, words)])
        try:
            status = common.ladder.compare.main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def rows_of(output):
    return [line.split() for line in output.splitlines()]


def test_stages_stand_beside_each_other(compare, tmp_path):
    picture = tmp_path / "compare.png"
    after = result("NaiveDDP", step=0.6)
    del after["candidates"][0]["exposed_comm_seconds"]
    status, output, errors = compare(result(), after, words=["--plot", picture])
    assert not status, errors
    rows = rows_of(output)
    assert rows[0][-5:] == ["/torch", "DDP", "all-reduces", "step,", "ms"]
    assert rows[1] == "tiny, a no sync 1.000 0.0 0.500 4 500.0".split()
    assert rows[2] == "tiny, a BucketedDDP 1.600 200.0 0.800 4 800.0".split()
    assert rows[4] == "tiny, b no sync 1.000 - 0.500 4 500.0".split()
    assert rows[5] == "tiny, b NaiveDDP 1.200 200.0 0.600 4 600.0".split()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_baselines_the_ms_are_left(compare):
    alone = result(candidates=[candidate("BucketedDDP", 0.8, 0.2)])
    _, output, _ = compare(alone, alone)
    assert rows_of(output)[2] == "tiny, b BucketedDDP 1.000 200.0 - 4 800.0".split()
    assert "ratios to BucketedDDP" in output


def test_networks_stand_beside_each_other(compare, tmp_path):
    """The table has the columns of the recording."""
    picture = tmp_path / "networks.png"
    status, output, errors = compare(of_rungs(), of_rungs(1.5), words=["--plot", picture])
    assert not status, errors
    recorded = output_of(Path(__file__).with_name("reference_output_hosts.txt")).splitlines()
    lines = output.splitlines()
    assert lines[0].split() in [line.split() for line in recorded] and lines[-2] in recorded
    assert rows_of(output)[2] == "tiny, a NaiveDDP 1.600 200.0 0.800 4".split()
    assert rows_of(output)[5] == "tiny, b NaiveDDP 3.000 200.0 1.500 4".split()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_of_networks_it_shows_what_all_have(compare):
    """Over a backend of one's own `make compare` has more candidates than over gloo."""
    over_shared = of_rungs(backend="shared")
    over_shared["models"]["tiny"]["candidates"].append(candidate("05 over gloo", 1.0, 0.1))
    status, output, errors = compare(of_rungs(), over_shared)
    assert not status, errors
    names = [row[2] for row in rows_of(output)[1:7]]
    assert names == 2 * ["no", "NaiveDDP", "torch"]


def test_medians_are_in_steps_without_synchronization():
    naive = draw_rungs.medians(of_rungs()["models"]["tiny"])["NaiveDDP"]
    parts = {"compute": 1.0, "exposed communication": 0.4, "optimizer": 0.2}
    assert naive == pytest.approx(parts | {"step": 1.6, "collectives": 4})


@pytest.mark.parametrize(
    "first, other, what",
    [
        (result(), result(world_size=3), "b: cannot be compared with a, their world_size differ"),
        (result(), result(device="cuda"), "their device differ: cuda and cpu"),
        (result(), result(model={"size": "xl"}), "their models differ"),
        (result(), result(candidates=[candidate("NaiveDDP", 1, 0)]), "their baselines differ"),
        (of_rungs(), of_rungs(world_size=3), "their world_size differ: 3 and 2"),
        (of_rungs(), result(model={"size": "deep"}), "their models differ"),
        (result(), {"stage": "05"}, "b.json: is not a result of --json (KeyError('model'))"),
        (of_rungs(), of_rungs(models={"tiny": {"model": 0}}), "'candidates'"),
        (result(), "[]", "b.json: is not a result of --json"),
        (result(), "{", "b.json: is not a result of --json"),
        (result(), '"tiny"', "b.json: is not a result of --json"),
        (result(), result(options=None), "b.json: is not a result of --json"),
        (result(), result(candidates=[]), "b.json: is not a result of --json"),
        (result(), result(candidates=None), "b.json: is not a result of --json"),
        (result(), result(candidates=[NO_SAMPLES]), "b.json: is not a result of --json"),
        (result(), result(candidates=[RAGGED]), "b.json: is not a result of --json"),
    ],
)
def test_what_does_not_compare_is_one_line(compare, first, other, what):
    status, _, errors = compare(first, other)
    assert status == 2 and what in errors and errors.count("\n") == 1, errors


def test_a_missing_file_is_one_line(compare):
    status, _, errors = compare(words=["nothing.json"])
    assert status == 2 and "nothing.json: is not a result" in errors and errors.count("\n") == 1


def test_what_else_differs_is_said_first(compare):
    before = result(torch="2.9", threads_per_rank=1, options={"bucket_size_mb": 25.0, "json": "a"})
    after = result(torch="2.9", threads_per_rank=2, options={"bucket_size_mb": 1.0, "json": "b"})
    _, output, _ = compare(before, after)
    assert output.splitlines()[:2] == [
        "threads_per_rank differs: a: 1; b: 2",
        "--bucket-size-mb differs: a: 25.0; b: 1.0",
    ]
    assert output.splitlines()[2].startswith("model, network")


def test_per_rank(compare):
    floor = candidate("no sync", 0.5, 0.0, step_seconds=[[0.1, 0.3], [0.2, 0.6]])
    del floor["exposed_comm_seconds"]
    by_rank = {"exposed_comm_seconds": [[0, 0.2], [0, 0]]}
    own = candidate("BucketedDDP", 0.4, 0.0, **by_rank)
    status, output, _ = compare(result(candidates=[floor, own]), words=["--per-rank"])
    rows = rows_of(output)
    rows = rows[rows.index("tiny, a, by rank, in ms".split()) + 1 :]
    assert not status and rows[0] == "rank step min max exposed min max".split()
    assert rows[1] == "no sync 0 200.0 100.0 300.0 - - -".split()
    assert rows[2] == "no sync 1 400.0 200.0 600.0 - - -".split()
    assert rows[3] == "BucketedDDP 0 400.0 400.0 400.0 100.0 0.0 200.0".split()
    assert rows[4] == "BucketedDDP 1 400.0 400.0 400.0 0.0 0.0 0.0".split()


def test_the_picture_of_make_compare_comes_from_its_recording(tmp_path):
    recording = Path(__file__).with_name("reference_output_compare.txt")
    ratios, lowest, highest = draw_runs.tables(recording.read_text(), "step ÷ no sync")
    assert list(ratios) == list(lowest) == list(highest)
    draw_runs.draw(recording, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
