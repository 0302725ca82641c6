"""05/compare: the medians of hand-written results, a hand-written step, and small runs."""

import json
import re
import sys
from pathlib import Path
from statistics import median

import pytest

from tools.harness import SHORT, read_json

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import medians  # noqa: E402
import timeline  # noqa: E402


def result(own=0.8, torch_ddp=1.0, name="BucketedDDP", **changes):
    """What --json writes, in part: two ranks, two steps each."""
    candidates = []
    for each, step in (("no communication", 0.5), (name, own), ("torch DDP", torch_ddp)):
        times = {"step_seconds": [[step] * 2] * 2, "exposed_comm_seconds": [[0.2, 0.3], [0.1, 0.2]]}
        candidates.append({"name": each, **times})
    options = {"steps": 2, "json": own}
    return {"world_size": 2, "options": options, "candidates": candidates} | changes


@pytest.fixture
def medians_of(tmp_path, monkeypatch, capsys):
    """medians_of([("label=", result), …], flag, …): what medians.py prints."""

    def run(results, *words):
        arguments = []
        for number, (label, content) in enumerate(results):
            file = tmp_path / f"{number}.json"
            file.write_text(json.dumps(content))
            arguments.append(f"{label}{file}")
        monkeypatch.setattr(sys, "argv", ["medians.py", *arguments, *map(str, words)])
        medians.main()
        return capsys.readouterr().out

    return run


def tables(output: str) -> dict[str, list[list[str]]]:
    """The rows of each table by its title."""
    found = {}
    for block in output.split("\n\n"):
        lines = [line.split("  ") for line in block.strip().splitlines()]
        rows = [[cell.strip() for cell in line if cell] for line in lines]
        if " differs: " not in block:
            found[rows[0][0]] = rows[1:]
    return found


def test_several_runs_are_a_median_with_its_range_and_networks_are_columns(medians_of, tmp_path):
    """Ratios are those within a run: the median of 0.8, 0.6 and 0.9 ÷ 1.0, 0.5 and 1.0 is 0.9."""
    loopback = [("loopback=", result(*times)) for times in ((0.8, 1.0), (0.6, 0.5), (0.9, 1.0))]
    other = result(1.5, name="NaiveDDP")
    del other["candidates"][2]
    output = medians_of([*loopback, ("slow=", other)], "--plot", tmp_path / "x.png")
    found = tables(output)
    assert found["step ÷ no communication"] == [
        ["no communication", "1.00 (1.00 to 1.00)", "1.00"],
        ["BucketedDDP", "1.60 (1.20 to 1.80)", "-"],
        ["torch DDP", "2.00 (1.00 to 2.00)", "-"],
        ["NaiveDDP", "-", "3.00"],
    ]
    assert found["step ÷ torch DDP"][1] == ["BucketedDDP", "0.90 (0.80 to 1.20)", "-"]
    cells = ["torch DDP", "1000.0 (500.0 to 1000.0)", "200.0 (200.0 to 200.0)"]
    assert found["ms, loopback"][2] == cells
    assert found["ms, slow"][1] == ["NaiveDDP", "1500.0", "200.0"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_every_rank(medians_of):
    """Mean, least and most of its steps."""
    output = medians_of([("a=", result())], "--per-rank")
    rows = [re.split("  +", line) for line in output.splitlines()]
    assert ["BucketedDDP", "step", "1", "800.0", "800.0", "800.0"] in rows
    assert ["BucketedDDP", "exposed comm", "1", "150.0", "100.0", "200.0"] in rows


def test_what_else_differs_is_said_first(medians_of):
    before = result(torch="2.9", threads_per_rank=1, options={"bucket_size_mb": 25.0, "json": "a"})
    after = result(torch="2.9", threads_per_rank=2, options={"bucket_size_mb": 1.0, "json": "b"})
    output = medians_of([("a=", before), ("b=", after)])
    assert output.split("\n\n")[0].splitlines() == [
        "threads_per_rank differs: a: 1; b: 2",
        "--bucket-size-mb differs: a: 25.0; b: 1.0",
    ]


@pytest.mark.parametrize(
    "content, what",
    [
        ("", "is not a result of --json"),
        (result(name="NaiveDDP"), "has other candidates than the first file of a"),
    ],
)
def test_what_does_not_compare_is_one_line(refusal, tmp_path, content, what):
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    for path, text in zip(paths, [result(), content], strict=True):
        path.write_text(json.dumps(text))
    said = refusal(medians.main, "medians.py", *[f"a={path}" for path in paths])
    assert said.startswith(f"{paths[1]}: {what}")


def test_all_stages_with_a_class_of_the_users_own(forked, tmp_path):
    """Buckets of 5 MB for all that have some; the network's words head the table."""
    raw, picture, mine = tmp_path / "x.json", tmp_path / "x.png", tmp_path / "mine.py"
    mine.write_text("class Mine(__import__('bucketed').BucketedDDP): pass\n")
    words = [*SHORT, "--device", "cpu", "--network", "1gbit,0", "--mine", f"{mine}:Mine"]
    words += ["--json", raw, "--plot", picture]
    status, output = forked(2, FOLDER / "compare.py", *words, cwd=tmp_path)
    assert status == 0, output
    candidates = read_json(raw, "05_bucketed/compare")["candidates"]
    counts = {one["name"]: one["collectives_per_step"] for one in candidates}
    ours = {"NaiveDDP": 99, "FlatDDP": 1, "OverlapDDP": 99, "BucketedDDP": 7, "Mine (mine)": 7}
    others = {"torch DDP": 6, "torch DDP, tuned": 6, "one process": 0}
    assert counts == {"no communication": 0, **ours, **others}
    assert [len(one["step_seconds"]) for one in candidates] == 8 * [2] + [1]
    tokens_per_second = 2 * 8 / median(sum(candidates[0]["step_seconds"], []))
    assert f" {tokens_per_second:.0f} " in output.splitlines()[3]
    ratios = tables(output)["step ÷ no communication"]
    assert [row[0] for row in ratios[:9]] == list(counts) and ratios[0][1] == "1.00"
    assert "step ÷ no communication  1 Gbit/s, 0" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "launched, packs, rows",
    [([8.625], True, [0]), ([8.625, 8.75], False, [0, 1]), ([8.25, 8.375, 8.45], False, [0, 1, 0])],
)
def test_a_step_of_the_timeline(launched, packs, rows):
    """What surrounds a single call in sync packs. Calls that overlap take two rows."""
    marks = {}
    start = 8.0
    for name, end in (("forward", 8.25), ("backward", 8.5), ("sync", 9.0), ("optimizer", 9.5)):
        marks |= {f"{name} starts": start, f"{name} ends": end}
        start = end
    calls = [(moment, moment + 0.0625, moment + 0.25) for moment in launched]
    step = timeline.step_of(marks, calls)
    waits = [(timeline.WAITING, 500, 1000)]
    if packs:
        waits = [(timeline.PACKING, 500, 625), (timeline.WAITING, 625, 875)]
        waits.append((timeline.PACKING, 875, 1000))
    assert step.phases[2:-1] == waits and step.phases[-1] == ("optimizer", 1000, 1500)
    first = 1000 * (launched[0] - 8)
    assert step.all_reduces[0][:2] == (first + 62.5, first + 250)
    assert [row for *_, row in step.all_reduces] == rows


def test_what_a_bucket_holds():
    layers = [f"layers.layers.{number}.norm1.weight" for number in (15, 14, 13)]
    assert timeline.contents(["head.weight"]) == "head"
    assert timeline.contents(["layers.norm.weight", *layers]) == "norm, layers 15 to 13"


def test_timeline_of_every_stage_in_one_run(forked, tmp_path):
    """An all-reduce takes four delays of the network."""
    words = ["--size", "nano", "--plot", tmp_path / "timeline.png"]
    status, output = forked(2, FOLDER / "timeline.py", *words, cwd=tmp_path)
    assert status == 0, output
    found = re.findall(r"^(.*): (\d+) all-reduces? in (\d+) ms", output, re.MULTILINE)
    counts = {name: int(count) for name, count, _ in found}
    expected = {"02_naive_ddp": 15, "03_flat_ddp": 1, "04_overlap_ddp": 15, "05_bucketed": 2}
    assert counts == {"no communication": 0, **expected}
    assert int(found[1][2]) > 15 * 4 and int(found[2][2]) > 4
    pictures = list(tmp_path.glob("*.png"))
    assert len(pictures) == 5
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
