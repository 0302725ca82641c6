"""05/compare: medians of hand-written results, a hand-written step, the controls, small runs."""

import json
import re
from pathlib import Path
from unittest import mock

import medians
import pytest
import torch
import torch.distributed as dist
from rows import rows_of_stages

from tools.testing import OVER, assert_movie, assert_png, read_json

FOLDER = Path(__file__).resolve().parent
ALL_REDUCE = dist.all_reduce


def result(**times):
    """What --json writes, in part: two ranks, two steps each of rows that take so long."""
    rows = []
    for name, step in ({"no communication": 0.5} | times).items():
        samples = {"step_seconds": [[step] * 2] * 2, "exposed_comm_seconds": [[0.2] * 2] * 2}
        rows.append({"name": name} | samples)
    return {"rows": rows}


@pytest.fixture
def medians_of(tmp_path, monkeypatch, capsys):
    """medians_of([("label=", result), …], flag, …): the tables that medians.py prints."""

    def run(results, *words):
        arguments = list(map(str, words))
        for number, (label, content) in enumerate(results):
            (tmp_path / f"{number}.json").write_text(json.dumps(content))
            arguments.append(f"{label}{tmp_path}/{number}.json")
        monkeypatch.setattr("sys.argv", ["medians.py", *arguments])
        medians.main()
        return tables(capsys.readouterr().out)

    return run


def tables(output: str) -> dict[str, dict[str, list[str]]]:
    """{title: {row: cells}}"""
    found = {}
    for block in output.split("\n\n"):
        (title, *_), *rows = [re.split("  +", line) for line in block.strip().splitlines()]
        found[title] = {row[0]: row[1:] for row in rows}
    return found


def test_several_runs_are_a_median_with_its_range_and_networks_are_columns(medians_of, tmp_path):
    """Ratios are those within a run: the median of 0.8, 0.6 and 0.9 ÷ 1.0, 0.5 and 1.0 is 0.9."""
    times = [(0.8, 1.0), (0.6, 0.5), (0.9, 1.0)]
    runs = [("loopback=", result(FlatDDP=own, **{"torch DDP": other})) for own, other in times]
    runs.append(("slow=", result(NaiveDDP=1.5)))
    found = medians_of(runs, "--plot", tmp_path / "x.png")
    ratios = found["step ÷ no communication"]
    assert list(ratios) == ["no communication", "FlatDDP", "torch DDP", "NaiveDDP"]
    assert ratios["FlatDDP"] == ["1.60 (1.20 to 1.80)", "-"] and ratios["NaiveDDP"] == ["-", "3.00"]
    assert found["step ÷ torch DDP"]["FlatDDP"] == ["0.90 (0.80 to 1.20)", "-"]
    assert found["step, ms"]["NaiveDDP"] == ["-", "1500.00"]
    assert_png(tmp_path / "x.png")


def test_speed_ups_over_one_process_which_takes_a_step_for_each_rank(medians_of, tmp_path):
    found = medians_of([("4=", result(NaiveDDP=0.8))], "--scaling", tmp_path / "png")
    assert found["speed-up over one process"]["NaiveDDP"] == ["2.50"]
    assert found["speed-up over one process"]["no communication"] == ["4.00"]
    assert_png(tmp_path / "png")


def calls_of(name: str) -> tuple[list, list]:
    """Of a step: (after backward? asynchronous? elements) of all calls, and averaged gradients."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    wrapped = rows_of_stages(0.02)[name].wrap(model)
    calls = []
    backward_is_over = False

    def all_reduce(tensor, group=None, async_op=False):
        calls.append((backward_is_over, async_op, tensor.numel()))
        return ALL_REDUCE(tensor, group=group, async_op=async_op)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        wrapped(torch.randn(2, 64)).square().sum().backward()
        backward_is_over = True
        wrapped.finish_gradient_synchronization()
    return calls, [parameter.grad for parameter in model.parameters()]


def test_a_control_makes_the_same_calls_after_backward(ranks):
    for stage, count in {"OverlapDDP": 6, "BucketedDDP": 3}.items():
        own = ranks(2).run(calls_of, stage)
        control = ranks(2).run(calls_of, f"{stage}, after backward")
        for (calls, gradients), (controls, same) in zip(own, control, strict=True):
            assert len(calls) == count and {call[:2] for call in calls} == {(False, True)}
            assert controls == [(True, True, size) for _, _, size in calls]
            assert all(map(torch.equal, gradients, same))


def test_all_stages_with_a_class_of_the_users_own_at_one_pace(forked, tmp_path):
    """A step without communication counts as 0.4 s; 99 calls take at least 99 times 4 ms."""
    (tmp_path / "mine.py").write_text("class Mine(__import__('bucketed').BucketedDDP): pass\n")
    words = "--device cpu --json x --steps 2 --warmup 1 --plot png".split()
    status, output = forked(
        2, OVER, "1gbit,1ms", FOLDER / "compare.py", *words, "--mine", "mine.py:Mine", cwd=tmp_path
    )
    assert status == 0, output
    found = read_json(tmp_path / "x", "05_bucketed/compare")
    counts = {row["name"]: row["collectives"] for row in found["rows"]}
    names = ["no communication", *rows_of_stages(5.0), "torch DDP", "Mine (mine)"]
    assert counts == dict(zip(names, [0, 99, 1, 99, 99, 7, 7, 6, 7], strict=True))
    lowest, highest = found["stretch"]
    assert 0 < lowest < highest
    steps = {name: of["step_seconds"] for name, of in medians.p50s(found).items()}
    assert steps["NaiveDDP"] > 99 * 0.004
    assert tables(output)["step ÷ no communication"]["no communication"] == ["1.00"]
    assert_png(tmp_path / "png")


def test_timeline_of_every_stage_in_one_run(forked, tmp_path):
    words = "--size nano --steps 1 --plot timeline.png --json json".split()
    status, output = forked(2, OVER, "1gbit,1ms", FOLDER / "timeline.py", *words, cwd=tmp_path)
    assert status == 0, output
    found = re.findall(r"^(.*): .* (\d+) calls?$", output, re.MULTILINE)
    assert [int(count) for _, count in found] == [0, 15, 1, 15, 1]
    assert len(list(tmp_path.glob("*.png"))) == 5
    assert_movie(tmp_path / "timeline.gif")
    drawn = read_json(tmp_path / "json", "05_bucketed/compare/timeline")["drawn"]
    assert len(drawn) == 5
    assert all(0 < one["forward_ms"] < one["step_ms"] for one in drawn.values())
