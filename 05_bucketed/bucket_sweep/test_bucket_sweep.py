"""05/bucket_sweep: the formula, the table, and the script from outside."""

from pathlib import Path

import bucket_sweep
import numpy
import pytest
from predict import Network

from tools import testing

SCRIPT = Path(__file__).with_name("bucket_sweep.py")


def test_best_number_of_buckets_is_the_minimum_of_the_overhead():
    network = Network(5e-4, 1e9)
    best = bucket_sweep.best_number_of_buckets(1e8, network)
    numbers = [best, 0.99 * best, 1.01 * best]
    least, *others = [bucket_sweep.overhead(n, 1e8, network) for n in numbers]
    assert least < min(others) and least == pytest.approx(2 * (1e8 * 5e-4 / 1e9) ** 0.5)


def test_run(forked, tmp_path):
    """What it says of every size is what it has measured."""
    words = "--bucket-sizes-mb 5,0.25 --json json --plot png".split()
    words += [*testing.QUICK, "--device", "cpu"]
    status, output = forked(2, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    testing.assert_png(tmp_path / "png")
    result = testing.read_json(tmp_path / "json", "05_bucketed/bucket_sweep")
    none, *p50s = [float(numpy.median(one["step_seconds"])) for one in result["rows"]]
    _, *rows = result["overheads"]
    assert [row["measured"] for row in rows] == pytest.approx([p50 - none for p50 in p50s])
    assert all(row["formula"] > 0 for row in rows)
    for candidate, row in zip(result["rows"], result["overheads"], strict=True):
        for samples, each in zip(candidate["step_seconds"], row["ranks"], strict=True):
            assert [each["min"], each["max"]] == [min(samples), max(samples)]
            assert each["mean"] == pytest.approx(sum(samples) / len(samples))
    assert [row["buckets"] for row in rows][:3] == [1, 1, 4]
