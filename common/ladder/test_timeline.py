"""The timeline, on a hand-written trace, and recorded by a small run."""

import json
import sys

import pytest

from common.ladder import draw_timeline, timeline
from common.ladder.draw_timeline import PHASES, draw, read_step
from common.testing.harness import ROOT, check_wrong_input


def span(name, ts, dur, tid=1, cat="user_annotation"):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "cat": cat}


def trace_of_two_steps():
    """Two steps of 100 µs: each has two collectives on thread 7 and one on thread 8."""
    events = [{"ph": "M", "name": "process_name"}]
    for start in (0, 1000):
        events += [
            span("forward", start, 30),
            span("backward", start + 30, 40),
            span("sync", start + 70, 20),
            span("optimizer", start + 90, 10),
            span("gloo:all_reduce", start + 40, 20, 7),
            span("gloo:all_reduce", start + 65, 20, 7),
            span("gloo:all_reduce", start + 50, 30, 8),
            span("aten::mm", start + 5, 20, cat="cpu_op"),
        ]
    return {"traceEvents": events}


def test_timeline_reads_a_step():
    phases, lanes = read_step(trace_of_two_steps())
    assert [name for name, _, _ in phases] == ["forward", "backward", "sync", "optimizer"]
    assert phases[0][1:] == (0.0, 0.03) and phases[3][1:] == (0.09, 0.01)
    assert lanes == {7: [(0.04, 0.02), (0.065, 0.02)], 8: [(0.05, 0.03)]}


def test_timeline_takes_the_gpu_s_own_spans():
    trace = trace_of_two_steps()
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    trace["traceEvents"] += [
        span("forward", 1010, 50, 20, "gpu_user_annotation"),
        span("backward", 1060, 80, 20, "gpu_user_annotation"),
        span("optimizer", 1150, 10, 20, "gpu_user_annotation"),
        span(kernel, 1080, 30, 21, "kernel"),
    ]
    phases, lanes = read_step(trace)
    assert phases[0] == ("forward", 0.0, 0.05) and lanes == {21: [(0.07, 0.03)]}


def test_timeline_takes_the_step_that_is_nearest_to_the_medians():
    """Neither the quickest nor the slowest of three."""
    events = []
    for start, backward in ((0, 30), (1000, 40), (2000, 200)):
        events += [span("forward", start, 30), span("backward", start + 30, backward)]
        events += [span("sync", start + 300, 20), span("optimizer", start + 320, 10)]
    phases, _ = read_step({"traceEvents": events})
    assert phases[1] == ("backward", 0.03, 0.04)


def test_two_pictures_on_the_same_scale(tmp_path, monkeypatch):
    """--as-long-as makes the axis hold the longest of those traces."""
    short, long = tmp_path / "short.json", tmp_path / "long.json"
    short.write_text(json.dumps(trace_of_two_steps()))
    stretched = trace_of_two_steps()
    for event in stretched["traceEvents"][1:]:
        event["ts"] *= 5
        event["dur"] *= 5
    long.write_text(json.dumps(stretched))
    ends = []
    monkeypatch.setattr(draw_timeline, "draw", lambda steps, path, end: ends.append(end))
    timeline.draw([short], tmp_path / "x.png", [short, long])
    timeline.draw([short], tmp_path / "x.png")
    assert ends == [pytest.approx(1.08 * 0.5), None]


def test_timeline_marks_packing_and_draws(tmp_path):
    """Of a sync with aten::cat: what comes before its collective, and what after it."""
    trace = trace_of_two_steps()
    steps = {"no sync": ([(name, i, 1) for i, name in enumerate(PHASES)], {})}
    trace["traceEvents"] += [
        span("gloo:all_reduce", 75, 10, 7),
        span("aten::cat", 71, 3, cat="cpu_op"),
        span("aten::cat", 5, 3, cat="cpu_op"),
    ]
    steps["03"] = read_step(trace)
    names = ["forward", "backward", "sync", "pack", "unpack", "optimizer"]
    assert [name for name, _, _ in steps["03"][0]] == names
    assert steps["03"][0][3:5] == [("pack", 0.07, 0.005), ("unpack", 0.085, 0.005)]
    draw(steps, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_timeline_of_something_else_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    words = [tmp_path / "other.json", "--plot", tmp_path / "x.png"]
    monkeypatch.setattr(sys, "argv", ["timeline.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        timeline.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and len(said.splitlines()) == 1
    assert "other.json: is not a trace of --trace (no span named 'forward')" in said


def test_wrong_input(monkeypatch, capsys):
    script = ROOT / "common/ladder/timeline.py"
    check_wrong_input(timeline.main, script, "--size", "huge", monkeypatch, capsys)


def test_every_rung_is_traced_in_one_run(forked, tmp_path):
    picture = tmp_path / "timeline.png"
    words = ["--size", "nano", "--warmup", "0", "--device", "cpu", "--plot", picture]
    status, output = forked(2, ROOT / "common/ladder/timeline.py", *words, cwd=tmp_path)
    assert status == 0, output
    found = [line.partition(" in ")[0] for line in output.splitlines() if " in " in line]
    assert found == [
        "no sync: 0 all-reduces",
        "02_naive_ddp: 15 all-reduces",
        "03_flat_ddp: 1 all-reduce",
        "04_overlap_ddp: 15 all-reduces",
        "05_bucketed: 1 all-reduce",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
    words = ["timeline_no_sync.json", "timeline_03_flat_ddp.json", "--plot", "small.png"]
    status, output = forked(None, ROOT / "common/ladder/timeline.py", *words, cwd=tmp_path)
    assert status == 0 and (tmp_path / "small.png").exists(), output
    assert "03_flat_ddp: 1 all-reduce in " in output
