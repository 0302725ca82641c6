"""05/bucket_sweep: the formula, the guard of memory, and the script from outside."""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

from common import timing
from common.recordings.record import output_of
from common.testing import harness

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "predict")]

import bucket_sweep  # noqa: E402
from simulate import Network, Step, simulate  # noqa: E402

SCRIPT = FOLDER / "bucket_sweep.py"


@pytest.mark.parametrize("size, bandwidth, call", [(1e8, 1e9, 5e-4), (1e6, 1e9, 1e-3)])
def test_best_number_of_buckets_is_the_minimum_of_the_overhead(size, bandwidth, call):
    def overhead(buckets):
        return bucket_sweep.overhead(buckets, size, bandwidth, call)

    best = bucket_sweep.best_number_of_buckets(size, bandwidth, call)
    grid = [best * 1.001**step for step in range(-3000, 3001)]
    assert min(grid, key=overhead) == pytest.approx(best, rel=2e-3)
    assert overhead(best) == pytest.approx(2 * (size * call / bandwidth) ** 0.5)


@pytest.mark.parametrize("ranks", [2, 8])
def test_constants_are_those_of_a_call_by_itself(ranks):
    network = Network(ranks, hop=2e-4, bandwidth=1e9, call=5e-4)
    bandwidth, call = bucket_sweep.constants(network)
    exposed = simulate(Step(0.0, 0.0, 0.0, gradients=[(1e6, 0.0)]), network, "02")
    assert exposed == pytest.approx(call + 1e6 / bandwidth)


def memory_is_enough_on_all_or_none():
    cpu = torch.device("cpu")
    too_much = 10**18
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        assert bucket_sweep.all_fit(1, 1000, cpu)
        assert not bucket_sweep.all_fit(1, too_much, cpu)
        assert not bucket_sweep.all_fit(1, too_much if dist.get_rank() == 1 else 1000, cpu)


def test_memory_is_enough_on_all_or_none(ranks):
    ranks(2).run(memory_is_enough_on_all_or_none)


def sweep_in_little_memory(folder):
    options = {"size": "nano", "batch_size": 1, "context_length": 8, "dtype": "float32", "seed": 0}
    options |= {"steps": 1, "warmup": 0, "bucket_sizes_mb": [0.01, 25.0, 25.0], "device": "cpu"}
    options |= {"trace": folder, "backend": "gloo", "network": None}
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"),
        mock.patch.object(bucket_sweep, "all_fit", return_value=False),
        mock.patch.object(timing, "measure", wraps=timing.measure) as measure,
    ):
        result = bucket_sweep.sweep(argparse.Namespace(**options), torch.device("cpu"))
    return result["candidates"], measure.call_count


def test_what_does_not_fit_is_measured_one_at_a_time(ranks, tmp_path):
    """Each beside a `no sync` of its own."""
    candidates, groups = ranks(2).run(sweep_in_little_memory, tmp_path)[0]
    names = ["NaiveDDP", "FlatDDP", "OverlapDDP", "BucketedDDP inf MB"]
    names += ["BucketedDDP 25 MB", "torch DDP 25 MB", "BucketedDDP 0.01 MB", "torch DDP 0.01 MB"]
    rows = [candidate for candidate in candidates if candidate["name"] != "no sync"]
    assert [row["name"] for row in rows] == names
    assert len(candidates) - len(rows) == groups == len(names)
    assert [row["collectives_per_step"] for row in rows[:5]] == [15, 1, 15, 1, 1]
    assert rows[6]["collectives_per_step"] > 1
    for candidate in candidates:
        p50 = numpy.median(candidate["step_seconds"])
        if candidate["name"] == "no sync":
            floor = p50
        assert candidate["ratio_to_no_sync"] == pytest.approx(p50 / floor)
        assert candidate["overhead_seconds"] == pytest.approx(p50 - floor)
    traces = {path.name for path in tmp_path.iterdir()}
    assert traces == {name.lower().replace(" ", "-") + ".json" for name in names}
    events = json.loads((tmp_path / "bucketedddp-0.01-mb.json").read_text())["traceEvents"]
    assert "gloo:all_reduce" in {event.get("name") for event in events}


def row(kind, megabytes, step):
    """Of the table; a step without synchronization takes 0.2 s."""
    times = {"step_seconds": [[step] * 2] * 2, "exposed_comm_seconds": [[0.03] * 2] * 2}
    times |= {"overhead_seconds": step - 0.2, "formula_seconds": 0.01, "simulated_seconds": step}
    names = {"kind": kind, "bucket_size_mb": megabytes, "collectives_per_step": 7}
    return names | times | {"ratio_to_no_sync": step / 0.2}


def test_table_and_last_line(capsys):
    rows = [row("BucketedDDP", megabytes, step) for megabytes, step in ((math.inf, 0.3), (5, 0.25))]
    rows.append(row("torch DDP", 5, 0.24) | {"simulated_seconds": None})
    bucket_sweep.print_rows(rows)
    bucket_sweep.say_the_best(rows, 4.0)
    _, first, second, third, *_, last = capsys.readouterr().out.splitlines()
    assert first.split()[:4] == "BucketedDDP inf 7 300.0".split()
    assert first.split()[-6:] == "1.500 30.0 100.0 10.0 300.0 1.000".split()
    assert second.split()[-6:] == "1.250 30.0 50.0 10.0 250.0 1.200".split()
    assert third.split()[-6:] == "1.200 30.0 40.0 10.0 - 1.250".split()
    assert last == (
        "best BucketedDDP: 5 MB, by the formula 4.0 MB, by the model 5 MB; "
        "1.042 × the best torch DDP (5 MB)"
    )


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_run(forked, tmp_path, device):
    """It prints the table that is recorded, and writes both files."""
    files = ["--json", tmp_path / "sweep.json", "--plot", tmp_path / "sweep.png"]
    words = [*harness.SHORT, "--device", device, *files]
    status, output = forked(2, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    result = harness.read_json(tmp_path / "sweep.json", "05_bucketed/bucket_sweep")
    assert table_of(output) == table_of(output_of(FOLDER / "reference_output.txt"))
    candidates = result["candidates"]
    assert [one["collectives_per_step"] for one in candidates[:5]] == [0, 195, 1, 195, 1]
    assert [one["kind"] for one in candidates[5:]] == ["BucketedDDP", "torch DDP"] * 4
    assert [one["bucket_size_mb"] for one in candidates[5:]] == [25, 25, 5, 5, 1, 1, 0.25, 0.25]
    for one in candidates:
        assert [len(of_rank) for of_rank in one["step_seconds"]] == [2, 2]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def table_of(output: str) -> list[str]:
    """The table, masked, and all below it; which size is best differs from run to run."""
    _, _, table = output.partition("step, ms")
    return [line.replace("inf MB", "# MB") for line in harness.masked(table)]


def test_one_rank_is_refused(forked):
    status, output = forked(1, SCRIPT)
    assert status == 2 and output.count("error: ") == 1, output
    assert "'1' rank sends nothing; allowed are 2 and more" in output, output


@pytest.mark.parametrize("value", ["0", "", "nan", "1e30"])
def test_wrong_input(value, monkeypatch, capsys):
    option = "--bucket-sizes-mb"
    harness.check_wrong_input(bucket_sweep.main, SCRIPT, option, value, monkeypatch, capsys)
