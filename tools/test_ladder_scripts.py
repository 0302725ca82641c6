"""The scripts of stages 02 to 05 from outside: runs, faults, wrong input.

Below their markers they are the same, so most of it is tried with one of them.
"""

import importlib
import json
import os
import signal

import pytest
import torch

from tools import testing
from tools.record import output_of
from tools.testing import FAULTS, ROOT

STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
SCRIPTS = [ROOT / stage / f"{stage[3:]}.py" for stage in STAGES]
NAIVE, FLAT, _, BUCKETED = SCRIPTS
each = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


def check_run(run, path, folder, world_size, device="cpu", words=()) -> dict:
    """A whole script, small: its output is what is recorded, and its files are right.

    run: the fixture `forked` or `launched`. Returns the JSON.
    """
    words = [*testing.QUICK, "--device", device, *testing.files_in(folder), *words]
    status, output = run(world_size, path, *words, cwd=folder)
    assert status == 0, output
    result = testing.read_json(folder / "json", path.parent.name)
    recorded = output_of(path.parent / "reference_output.txt")
    recorded = recorded.replace("gloo on cpu", f"{result['backend']} on {device}")
    recorded = recorded.replace("mini model", "nano model")
    assert testing.masked(output) == testing.masked(recorded), output
    gpu_per_rank = device == "cuda" and torch.cuda.device_count() >= world_size
    assert (result["backend"] == "nccl") == gpu_per_rank
    assert result["world_size"] == world_size
    assert [one["passed"] for one in result["verify"].values()] == [True]
    counts = {one["name"]: one["collectives_per_step"] for one in result["candidates"]}
    assert counts == {name: testing.NANO_CALLS[name] for name in counts} and len(counts) == 3
    for one in result["candidates"]:
        for times in ("step_seconds", "exposed_comm_seconds", "optimizer_seconds"):
            assert [len(rank_times) for rank_times in one[times]] == world_size * [2], times
    assert len(torch.load(folder / "save", weights_only=True)) == 6
    trace = json.loads((folder / "trace").read_text())
    spans = {event["name"] for event in trace["traceEvents"]}
    assert {"forward", "backward", "sync", "optimizer", *counts} <= spans
    return result


@each
def test_file_alone(path, tmp_path):
    testing.check_script_alone(path, tmp_path)


@each
def test_run_on_a_small_mnist(forked, tmp_path, path):
    testing.write_mnist(tmp_path / "data", 320, 10)
    check_run(forked, path, tmp_path, 2, words=["--data", tmp_path / "data"])


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(other, marks=pytest.mark.full) for other in (1, 3))]
)
def test_run_under_torchrun(launched, tmp_path, world_size):
    result = check_run(launched, BUCKETED, tmp_path, world_size)
    assert result["verify"]["BucketedDDP"]["accuracy"] > 0.9


@pytest.mark.cuda
@each
@pytest.mark.parametrize("world_size", [1, 2])  # with one GPU: nccl, then gloo, which can share it
def test_on_a_gpu(launched, tmp_path, path, world_size):
    check_run(launched, path, tmp_path, world_size, "cuda")


@pytest.mark.parametrize("name, status", [("Right", 0), ("SumForMean", 1)])
def test_a_class_of_the_users_own_is_verified_and_has_a_row(forked, tmp_path, name, status):
    mine = f"{ROOT}/tools/check/mistakes.py:{name}"
    words = [*testing.QUICK, "--device", "cpu", "--json", tmp_path / "json", "--mine", mine]
    found, output = forked(2, FLAT, *words, cwd=tmp_path)
    assert found == status and f"verify: {name} (mine)\n" in output, output
    if status == 1:
        assert "verify: FAILED, a weight is" in output, output
        return
    result = testing.read_json(tmp_path / "json", "03_flat_ddp")
    names = [candidate["name"] for candidate in result["candidates"]]
    assert names == ["no communication", "Right (mine)", "FlatDDP", "torch DDP"]
    assert result["verify"]["Right (mine)"]["passed"] and result["verify"]["FlatDDP"]["passed"]
    assert result["candidates"][1]["collectives_per_step"] == testing.NANO_CALLS["NaiveDDP"]


FULL = pytest.mark.full
QUICKLY = "mini model: ", ["--no-verify", "--no-baseline"]  # these lead to it


@testing.needs_proc
@pytest.mark.parametrize("moment, words", [QUICKLY, pytest.param("", [], marks=FULL)])
@pytest.mark.parametrize(
    "fault", [FAULTS[0], *(pytest.param(other, marks=FULL) for other in FAULTS[1:])]
)
def test_faults(script, fault, moment, words, tmp_path):
    command = testing.torchrun(2, BUCKETED, *words, *testing.LONG)
    testing.check_fault(script, command, moment, fault, tmp_path)


@pytest.mark.full
@testing.needs_proc
def test_a_rank_that_stops_answering_is_named(script):
    words = ["--timeout", "3", "--no-verify", *testing.LONG]
    run = script(testing.torchrun(2, BUCKETED, *words))
    victim = testing.rank_1(run)
    testing.wait_for_line(run, "mini model: ")
    os.kill(victim, signal.SIGSTOP)
    status, output = run.wait(timeout=60)
    message = "error: rank 0 waited more than --timeout 3 s; no answer from rank 1\n"
    assert status != 0 and message in output, output


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is right with a GPU")


@pytest.mark.parametrize(
    "path, option, value",
    [
        (BUCKETED, "--bucket-size-mb", "nan"),  # test_setup.py has what all others are
        (NAIVE, "--mine", "nowhere.py:X"),
        pytest.param(NAIVE, "--device", "cuda", marks=without_gpu),
        pytest.param(NAIVE, "--backend", "nccl", marks=without_gpu),
    ],
)
def test_wrong_input(refusal, monkeypatch, path, option, value):
    monkeypatch.syspath_prepend(path.parent)
    said = refusal(importlib.import_module(path.stem).main, path, option, value)
    assert said.startswith(f"argument {option}: ") and value in said


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "start this script with torchrun --standalone"),
        (["--no-verify", "--save", "x"], "argument --save: not with --no-verify"),
    ],
)
def test_a_run_that_cannot_begin_is_one_line(forked, tmp_path, words, said):
    status, output = forked(None, NAIVE, *words, cwd=tmp_path)
    assert status == 2 and output.count("\n") == 1 and said in output, output
