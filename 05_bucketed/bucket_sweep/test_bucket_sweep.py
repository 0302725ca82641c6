"""05/bucket_sweep: the formula, the guard of memory, and the script from outside."""

import argparse
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.testing import harness

FOLDER = Path(__file__).resolve().parent
STAGE = FOLDER.parent
OTHERS = [STAGE / "predict", STAGE.parent / "02_naive_ddp", STAGE.parent / "04_overlap_ddp"]
sys.path[:0] = [str(path) for path in (FOLDER, STAGE, *OTHERS)]

import bucket_sweep  # noqa: E402
from simulate import Network, Step, simulate  # noqa: E402

SCRIPT = FOLDER / "bucket_sweep.py"


@pytest.mark.parametrize(
    "size, bandwidth, call", [(1e8, 1e9, 5e-4), (4e9, 1e11, 2e-5), (1e6, 1e9, 1e-3)]
)
def test_best_number_of_buckets_is_the_minimum_of_the_overhead(size, bandwidth, call):
    def overhead(buckets):
        return bucket_sweep.overhead(buckets, size, bandwidth, call)

    best = bucket_sweep.best_number_of_buckets(size, bandwidth, call)
    grid = [best * 1.001**step for step in range(-3000, 3001)]
    assert min(grid, key=overhead) == pytest.approx(best, rel=2e-3)
    assert overhead(best) == pytest.approx(2 * (size * call / bandwidth) ** 0.5)
    assert size / best == pytest.approx((size * bandwidth * call) ** 0.5)


@pytest.mark.parametrize("ranks", [2, 8])
def test_constants_are_those_of_a_call_by_itself(ranks):
    network = Network(ranks, hop=2e-4, bandwidth=1e9, call=5e-4)
    bandwidth, call = bucket_sweep.constants(network)
    step = Step(1.0, 1.0, 1.0, gradients=[(1e6, 1.0)])
    exposed = simulate(step, network, "02").exposed_seconds
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


def sweep_one_at_a_time(folder):
    options = {"size": "nano", "batch_size": 1, "context_length": 8, "dtype": "float32", "seed": 0}
    options |= {"steps": 1, "warmup": 0, "bucket_sizes_mb": [0.01, 25.0, 25.0], "device": "cpu"}
    options |= {"no_baseline": True, "gradient_as_bucket_view": False, "plot": None}
    args = argparse.Namespace(**options, json=folder / "sweep.json")
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        with mock.patch.object(bucket_sweep, "all_fit", return_value=False):
            bucket_sweep.sweep(args, torch.device("cpu"))


def test_what_does_not_fit_is_measured_one_at_a_time(ranks, tmp_path):
    """Each with a `no sync` of its own; without the baseline only BucketedDDP."""
    ranks(2).run(sweep_one_at_a_time, tmp_path)
    result = harness.read_json(tmp_path / "sweep.json", "05_bucketed/bucket_sweep")
    rows = [(row["kind"], row["bucket_size_mb"]) for row in result["rows"]]
    assert rows == [("BucketedDDP", None), ("BucketedDDP", 25.0), ("BucketedDDP", 0.01)]
    assert len(result["no_sync"]) == len(result["simulated"]) == 3
    assert [row["buckets"] for row in result["rows"][:2]] == [1, 1] < [result["rows"][2]["buckets"]]


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_run(forked, tmp_path, device):
    """It prints what is recorded, and writes both files."""
    files = ["--json", tmp_path / "sweep.json", "--plot", tmp_path / "sweep.png"]
    words = [*harness.SHORT, "--device", device, *files]
    status, output = forked(2, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    result = harness.read_json(tmp_path / "sweep.json", "05_bucketed/bucket_sweep")
    recorded = (FOLDER / "reference_output.txt").read_text()
    recorded = recorded.replace("gloo on cpu", f"{result['backend']} on {device}")
    for shown, expected in zip(shape_of(output), shape_of(recorded), strict=True):
        assert shown == expected
    rows = [(row["kind"], row["bucket_size_mb"], row["buckets"]) for row in result["rows"]]
    assert rows[:3] == [
        ("NaiveDDP", None, 195),
        ("OverlapDDP", None, 195),
        ("BucketedDDP", None, 1),
    ]
    assert [kind for kind, _, _ in rows[3:]] == ["BucketedDDP", "torch DDP"] * 4
    assert [size for _, size, _ in rows[3:]] == [25, 25, 5, 5, 1, 1, 0.25, 0.25]
    for row in result["rows"]:
        assert [len(of_rank) for of_rank in row["step_seconds"]] == [2, 2]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def shape_of(output: str) -> list[str]:
    """The lines, masked; which size is best differs from run to run."""
    return [line.replace("inf MB", "# MB") for line in harness.masked(output)]


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


def test_one_rank_is_refused(forked):
    status, output = forked(1, SCRIPT)
    assert status == 2 and output.count("error: ") == 1, output
    assert "'1' rank sends nothing; allowed are 2 and more" in output, output


SIZES = ["0", "-1", "x", "", "nan", "inf", "1e30"]
WRONG = [("--steps", "0"), ("--plot", "/"), *(("--bucket-sizes-mb", size) for size in SIZES)]


@pytest.mark.parametrize("option, value", WRONG)
def test_wrong_input(option, value, monkeypatch, capsys):
    main = bucket_sweep.main
    harness.check_wrong_input(main, SCRIPT, option, value, monkeypatch, capsys)
