"""05/compare: the medians of hand-written results, a hand-written trace, and small runs."""

import json
import re
import sys
from pathlib import Path

import pytest

from common.testing.harness import NANO_CALLS, QUICK, SHORT, read_json

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import compare  # noqa: E402
import medians  # noqa: E402
import timeline  # noqa: E402


def candidate(name, step, exposed=0.0, **changes):
    """One of the candidates of a result: two ranks, two steps each."""
    times = {"step_seconds": [[step] * 2] * 2, "exposed_comm_seconds": [[exposed] * 2] * 2}
    return {"name": name, **times, **changes}


def result(own=0.8, torch_ddp=1.0, name="BucketedDDP", **changes):
    """What --json of a stage writes, in part."""
    candidates = [candidate("no communication", 0.5), candidate(name, own, 0.2)]
    candidates.append(candidate("torch DDP", torch_ddp, 0.3))
    return {
        "world_size": 2,
        "options": {"steps": 2, "json": own},
        "candidates": candidates,
    } | changes


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
    cells = ["torch DDP", "1000.0 (500.0 to 1000.0)", "300.0 (300.0 to 300.0)"]
    assert found["ms, loopback"][2] == cells
    assert found["ms, slow"][1] == ["NaiveDDP", "1500.0", "200.0"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_not_measured_is_left_out(medians_of, tmp_path):
    """As bucket_sweep writes it: nulls among the samples, figures that are no samples."""
    exposed = {"exposed_comm_seconds": [[None, 0.1, 0.2], [None, 0.3]], "formula_seconds": 0.5}
    candidates = [candidate("no communication", 0.5, None), candidate("5 MB", 0.8, **exposed)]
    candidates.append({"name": "25 MB", "optimizer_seconds": [[0.1]], "collectives_per_step": 2})
    words = ["--per-rank", "--plot", tmp_path / "x.png"]
    output = medians_of([("a=", result(candidates=candidates))], *words)
    found = tables(output)
    rows = [["no communication", "1.00"], ["5 MB", "1.60"], ["25 MB", "-"]]
    assert found["step ÷ no communication"] == rows
    per_rank = [row for row in found["ms, a"] if len(row) == 6]
    assert per_rank[-3] == ["5 MB", "exposed comm", "0", "150.0", "100.0", "200.0"]
    assert per_rank[-2] == ["5 MB", "exposed comm", "1", "300.0", "300.0", "300.0"]
    assert per_rank[-1] == ["25 MB", "optimizer", "0", "100.0", "100.0", "100.0"]


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
        (result(candidates=[candidate("x", 1, step_seconds=[])]), "is not a result of --json"),
        (result(options=None), "is not a result of --json"),
        (result(name="NaiveDDP"), "has other candidates than the first file of a"),
    ],
)
def test_what_does_not_compare_is_one_line(refusal, tmp_path, content, what):
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    for path, text in zip(paths, [result(), content], strict=True):
        path.write_text(json.dumps(text))
    said = refusal(medians.main, "medians.py", *[f"a={path}" for path in paths])
    assert said.startswith(f"{paths[1]}: {what}")


def test_a_small_run_of_all_stages(forked, tmp_path):
    raw, picture = tmp_path / "x.json", tmp_path / "x.png"
    words = [*QUICK, "--device", "cpu", "--json", raw, "--plot", picture]
    status, output = forked(2, FOLDER / "compare.py", *words, cwd=tmp_path)
    assert status == 0, output
    candidates = read_json(raw, "05_bucketed/compare")["candidates"]
    counts = {one["name"]: one["collectives_per_step"] for one in candidates}
    assert counts == NANO_CALLS | {"torch DDP, tuned": 1, "one process": 0}
    assert [len(one["step_seconds"]) for one in candidates] == 7 * [2] + [1]
    ratios = tables(output)["step ÷ no communication"]
    assert [row[0] for row in ratios[:8]] == list(counts) and ratios[0][1] == "1.00"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_flags_reach_the_rows_and_the_picture(forked, tmp_path):
    """Buckets of 5 MB for all that have some; a class of the user's own; the network's words."""
    mine = tmp_path / "mine.py"
    mine.write_text("class Mine(__import__('bucketed').BucketedDDP): pass\n")
    words = ["--size", "mini", *SHORT, "--device", "cpu", "--network", "100mbit,0", "--no-plot"]
    words += ["--json", tmp_path / "x.json", "--mine", f"{mine}:Mine"]
    status, output = forked(2, FOLDER / "compare.py", *words, cwd=tmp_path)
    assert status == 0, output
    raw = read_json(tmp_path / "x.json", "05_bucketed/compare")
    counts = {one["name"]: one["collectives_per_step"] for one in raw["candidates"]}
    assert counts["BucketedDDP"] == counts["Mine (mine)"] == 7
    assert counts["torch DDP"] == counts["torch DDP, tuned"] == 6
    assert "step ÷ no communication  100 Mbit/s, 0" in output and raw["network"] == "100mbit,0"


def span(name, ts, dur, tid=1, cat="user_annotation"):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "cat": cat}


def trace_of_two_steps():
    """Two steps of 100 and 90 µs: each has two all-reduces on thread 7 and one on thread 8."""
    events = [{"ph": "M", "name": "process_name"}, span("gloo:all_reduce", -50, 10, 7)]
    events.append(span(f"{timeline.CLOCK}2.0", -60, 1))
    for start, optimizer in ((1000, 0), (0, 10)):  # a trace is in no order
        events += [
            span("03", start - 2, 102),
            span("optimizer", start + 90, optimizer),
            span("forward", start, 30),
            span("backward", start + 30, 40),
            span("sync", start + 70, 20),
            span("gloo:all_reduce", start + 65, 20, 7),
            span("gloo:all_reduce", start + 40, 20, 7),
            span("gloo:all_reduce", start + 50, 30, 8),
            span("gloo:all_reduce", start + 150, 30, 8),  # of the barrier between two steps
            span("aten::mm", start + 5, 20, cat="cpu_op"),
        ]
    return {"traceEvents": events}


WAITS = (timeline.WAITING, 0.07, 0.09)


def test_timeline_reads_the_steps_of_a_trace():
    first, second = timeline.steps_of(trace_of_two_steps(), "03")
    phases = [("forward", 0, 0.03), ("backward", 0.03, 0.07), WAITS, ("optimizer", 0.09, 0.1)]
    assert first.phases == phases
    assert first.all_reduces == [(0.04, 0.06, 7), (0.05, 0.08, 8), (0.065, 0.085, 7)]
    assert second.phases[-1] == ("optimizer", 0.09, 0.09) and len(second.all_reduces) == 3
    assert timeline.steps_of(trace_of_two_steps(), "04") == []


@pytest.mark.parametrize("calls, packs", [([75], True), ([75, 77], False), ([35], False)])
def test_timeline_packs_around_a_single_call_in_sync(calls, packs):
    trace = trace_of_two_steps()
    trace["traceEvents"] += [span(timeline.CALL, start, 10) for start in calls]
    first, _ = timeline.steps_of(trace, "03")
    packing = [(timeline.PACKING, 0.07, 0.075), (timeline.WAITING, 0.075, 0.085)]
    packing.append((timeline.PACKING, 0.085, 0.09))
    assert first.phases[2:-1] == (packing if packs else [WAITS])


def test_timeline_draws_when_the_network_carried_a_call():
    """The clock says 2.0 s where the trace says -60 µs. Two calls overlap, the third is later."""
    trace = trace_of_two_steps()
    microseconds = [(70, 95), (90, 120), (120, 150)]
    spans = [("allreduce", 4, 0, 2 + a * 1e-6, 2 + b * 1e-6) for a, b in microseconds]
    timeline.add_network(trace, spans)
    first, second = timeline.steps_of(trace, "03")
    expected = [(0.01, 0.035, 0), (0.03, 0.06, 1), (0.06, 0.09, 0)]
    assert [pytest.approx(call, abs=1e-6) for call in expected] == first.all_reduces
    assert second.all_reduces == []


def test_timeline_takes_the_gpu_s_own_spans():
    gpu = [
        ("03", 1010, 150),
        ("forward", 1010, 50),
        ("backward", 1060, 80),
        ("optimizer", 1150, 10),
    ]
    events = [span(*times, 20, "gpu_user_annotation") for times in gpu]
    events.append(span("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1080, 30, 21, "kernel"))
    of_cpu = [event for event in trace_of_two_steps()["traceEvents"] if "gloo" not in event["name"]]
    [step] = timeline.steps_of({"traceEvents": of_cpu + events}, "03")
    assert step.phases[0] == ("forward", 0, 0.05) and step.duration() == 0.15
    assert step.all_reduces == [(0.07, 0.1, 21)]


def test_what_a_bucket_holds():
    layers = [f"layers.layers.{number}.norm1.weight" for number in (15, 14, 13)]
    assert timeline.contents(["head.weight"]) == "head"
    assert timeline.contents(["layers.norm.weight", *layers]) == "norm, layers 15 to 13"


@pytest.mark.parametrize("network", [[], ["--network", "1gbit,1ms"]])
def test_timeline_of_every_stage_in_one_run(forked, tmp_path, network):
    words = ["--size", "nano", "--device", "cpu", "--plot", tmp_path / "timeline.png", *network]
    status, output = forked(2, FOLDER / "timeline.py", *words, cwd=tmp_path)
    assert status == 0, output
    counts = re.findall(r"^(.*): (\d+) all-reduces? in", output, re.MULTILINE)
    expected = [("no communication", "0"), ("02_naive_ddp", "15"), ("03_flat_ddp", "1")]
    assert counts == [*expected, ("04_overlap_ddp", "15"), ("05_bucketed", "2")]
    pictures = list(tmp_path.glob("*.png"))
    assert len(pictures) == 5 and len(list(tmp_path.glob("timeline_*.json"))) == 3
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    if network:  # an all-reduce takes four delays, and step and call are by one clock
        trace = json.loads((tmp_path / "timeline_1.json").read_text())
        for step in timeline.steps_of(trace, "03_flat_ddp"):
            (start, end, _), (_, first, last) = step.all_reduces[0], step.phases[3]
            assert first - 1 < start < start + 4 < end < last + 1


@pytest.mark.parametrize("script", [compare, timeline])
def test_wrong_input(refusal, script):
    said = refusal(script.main, script.__file__, "--size", "huge")
    assert said.startswith("argument --size: ") and "'huge'" in said
