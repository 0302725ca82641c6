"""05/bucket_sweep: the formula, the table, and the script from outside."""

import sys
from pathlib import Path

import numpy
import pytest

from tools.record import output_of
from tools import harness

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import bucket_sweep  # noqa: E402

SCRIPT = FOLDER / "bucket_sweep.py"


@pytest.mark.parametrize("size, bandwidth, call", [(1e8, 1e9, 5e-4), (1e6, 1e9, 1e-3)])
def test_best_number_of_buckets_is_the_minimum_of_the_overhead(size, bandwidth, call):
    best = bucket_sweep.best_number_of_buckets(size, bandwidth, call)
    numbers = [best, 0.99 * best, 1.01 * best]
    least, *others = [bucket_sweep.overhead(n, size, bandwidth, call) for n in numbers]
    assert least < min(others)
    assert least == pytest.approx(2 * (size * call / bandwidth) ** 0.5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_run(forked, tmp_path, device):
    """It prints the table that is recorded, and writes both files; medians.py reads the JSON."""
    files = ["--json", tmp_path / "sweep.json", "--plot", tmp_path / "sweep.png"]
    words = [*harness.QUICK, "--device", device, *files]
    status, output = forked(2, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    recorded = output_of(FOLDER / "reference_output.txt").replace("mini model", "nano model")
    assert harness.masked(output)[1:] == harness.masked(recorded)[1:], output
    rows = {line.split("  ")[0]: line.split()[-3:] for line in output.splitlines()}
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")

    result = harness.read_json(tmp_path / "sweep.json", "05_bucketed/bucket_sweep")
    alone, *candidates = result["candidates"]
    floor = numpy.median(alone["step_seconds"])
    assert result["gradient_bytes"] == 4 * result["model"]["parameters"]
    for one, row in zip(candidates, result["overheads"], strict=True):
        assert row["name"] == one["name"]
        assert row["measured"] == pytest.approx(numpy.median(one["step_seconds"]) - floor)
        assert row["formula"] > 0
        assert (row["simulated"] is None) == one["name"].startswith("torch")
        cells = [row["measured"], row["formula"], row["simulated"]]
        said = ["-" if seconds is None else f"{1000 * seconds:.1f}" for seconds in cells]
        assert rows[row["name"]] == said

    medians = FOLDER.parent / "compare" / "medians.py"
    status, output = forked(None, medians, tmp_path / "sweep.json", "--per-rank")
    assert status == 0 and "BucketedDDP, 25 MB" in output, output


@pytest.mark.parametrize("value", ["0", "", "nan", "1e30"])
def test_wrong_input(refusal, value):
    said = refusal(bucket_sweep.main, SCRIPT, "--bucket-sizes-mb", value)
    assert said.startswith("argument --bucket-sizes-mb: ") and value in said
