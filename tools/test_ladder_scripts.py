"""The scripts of stages 02 to 05 from outside: runs, faults, wrong input.

Below their markers they are the same, so most of it is tried with one of them.
"""

import importlib
import json
import os
import shlex
import signal
import sys

import pytest
import torch

from tools import testing
from tools.testing import ROOT

STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
SCRIPTS = [ROOT / stage / f"{stage[3:]}.py" for stage in STAGES]
NAIVE, FLAT, _, BUCKETED = SCRIPTS
each = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
full = pytest.mark.full
# All-reduces of a step: the model has 15 parameters, which fit in one bucket.
CALLS = {"no communication": 0, "NaiveDDP": 15, "FlatDDP": 1, "OverlapDDP": 15}
CALLS |= {"BucketedDDP": 1, "torch DDP": 1}


def check_run(run, path, folder, world_size, device="cpu", words=()) -> dict:
    """A whole script, small: it verifies itself, and its files are right.

    run: a function as the fixture `forked`. Returns the JSON.
    """
    files = ["--json", folder / "json", "--trace", folder / "trace"]
    words = [*testing.QUICK, "--device", device, *files, *words]
    status, output = run(world_size, path, *words, cwd=folder)
    assert status == 0 and "verify: passed" in output, output
    assert "\x1b" not in output, "progress is for terminals"
    result = testing.read_json(folder / "json", path.parent.name)
    gpu_per_rank = device == "cuda" and torch.cuda.device_count() >= world_size
    assert (result["backend"] == "nccl") == gpu_per_rank
    assert result["world_size"] == world_size
    assert [one["passed"] for one in result["verify"].values()] == [True]
    counts = {one["name"]: one["collectives_per_step"] for one in result["candidates"]}
    assert counts == {name: CALLS[name] for name in counts} and len(counts) == 3
    for one in result["candidates"]:
        for times in ("step_seconds", "exposed_comm_seconds", "optimizer_seconds"):
            assert [len(rank_times) for rank_times in one[times]] == world_size * [2], times
    trace = json.loads((folder / "trace").read_text())
    spans = {event["name"] for event in trace["traceEvents"]}
    assert {"forward", "backward", "sync", "optimizer", *counts} <= spans
    return result


@each
def test_run_on_a_small_mnist(forked, tmp_path, path):
    testing.write_mnist(tmp_path / "data", 320, 10)
    check_run(forked, path, tmp_path, 2, words=["--data", tmp_path / "data"])


def test_run_by_make_whatever_another_job_has_left_in_the_shell(script, tmp_path):
    """What a launcher leaves, and a pod of Kubernetes; with --nnodes 2 torchrun would wait."""
    left = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_PORT": "29511"}
    left |= {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "nowhere.invalid"}

    def run(world_size, path, *words, cwd):
        arguments = f"ARGS={shlex.join(map(str, words))}"
        variables = [f"PYTHON={sys.executable}", f"NPROC={world_size}", arguments]
        return script(["make", "-C", ROOT, path.parent.name, *variables], env=left).wait()

    result = check_run(run, BUCKETED, tmp_path, 2)
    assert result["verify"]["BucketedDDP"]["accuracy"] > 0.9


@full
@pytest.mark.parametrize("world_size", [1, 3])
def test_run_under_torchrun(launched, tmp_path, world_size):
    check_run(launched, BUCKETED, tmp_path, world_size)


@pytest.mark.cuda
@each
@pytest.mark.parametrize("world_size", [1, 2])  # with one GPU: nccl, then gloo, which can share it
def test_on_a_gpu(launched, tmp_path, path, world_size):
    check_run(launched, path, tmp_path, world_size, "cuda")


@pytest.mark.parametrize("name, status", [("Right", 0), ("SumForMean", 1)])
def test_a_class_of_the_users_own_is_verified_and_has_a_row(forked, tmp_path, name, status):
    testing.write_mnist(tmp_path / "data", 320, 10)
    words = [*testing.QUICK, "--device", "cpu", "--json", tmp_path / "json"]
    words += ["--data", tmp_path / "data", "--mine", f"{ROOT}/tools/check/mistakes.py:{name}"]
    found, output = forked(2, FLAT, *words, cwd=tmp_path)
    assert found == status and f"verify: {name} (mine)\n" in output, output
    if status == 1:
        assert "verify: FAILED, a weight is" in output, output
        return
    result = testing.read_json(tmp_path / "json", "03_flat_ddp")
    counts = {one["name"]: one["collectives_per_step"] for one in result["candidates"]}
    assert list(counts) == ["no communication", "Right (mine)", "FlatDDP", "torch DDP"]
    assert result["verify"]["Right (mine)"]["passed"] and result["verify"]["FlatDDP"]["passed"]
    assert counts["Right (mine)"] == CALLS["NaiveDDP"]


@full
@testing.needs_proc
@pytest.mark.parametrize("fault", ["SIGKILL of a rank", "SIGTERM of the launcher"])
def test_faults_end_all(script, fault):
    run = script(testing.torchrun(2, BUCKETED, "--no-verify", *testing.LONG))
    testing.wait_for_line(run, "mini model: ")
    if fault == "SIGKILL of a rank":
        os.kill(testing.rank_1(run), signal.SIGKILL)
    else:
        run.process.send_signal(signal.SIGTERM)
    status, output = run.wait(timeout=45)  # fails if a process is left
    assert status != 0, output


@full
@testing.needs_proc
def test_a_rank_that_waits_too_long_says_so(script):
    words = ["--timeout", "3", "--no-verify", *testing.LONG]
    run = script(testing.torchrun(2, BUCKETED, *words))
    victim = testing.rank_1(run)
    testing.wait_for_line(run, "mini model: ")
    os.kill(victim, signal.SIGSTOP)
    status, output = run.wait(timeout=60)
    assert status != 0 and "error: rank 0 waited more than --timeout 3 s" in output, output


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is right with a GPU")


@pytest.mark.parametrize(
    "path, option, value",
    [
        (BUCKETED, "--bucket-size-mb", "nan"),  # test_common.py has what all others are
        (NAIVE, "--mine", "nowhere.py:X"),
        pytest.param(NAIVE, "--device", "cuda", marks=without_gpu),
        pytest.param(NAIVE, "--backend", "nccl", marks=without_gpu),
    ],
)
def test_wrong_input(refusal, monkeypatch, path, option, value):
    monkeypatch.syspath_prepend(path.parent)
    said = refusal(importlib.import_module(path.stem).main, path, option, value)
    assert said.startswith(f"argument {option}: ") and value in said


def test_without_torchrun_it_says_how_to_start_it(forked, tmp_path):
    status, output = forked(None, NAIVE, cwd=tmp_path)
    assert status == 2 and output.count("\n") == 1, output
    assert "start this script with torchrun --standalone" in output
