"""The scripts of stages 02 to 05 from outside: runs, faults, wrong input.

They share common/ladder.py, so most of it is tried with one of them.
"""

import json
import os
import re
import shlex
import shutil
import signal
import sys
from functools import partial

import naive_ddp
import pytest

from common import ladder
from tools import testing
from tools.testing import ROOT

NAIVE = ROOT / "02_naive_ddp" / "naive_ddp.py"
OVERLAP = ROOT / "04_overlap_ddp" / "overlap_ddp.py"
BUCKETED = ROOT / "05_bucketed" / "bucketed.py"
MAIN = partial(ladder.run, naive_ddp.NaiveDDP, naive_ddp.train_step, "")
full = pytest.mark.full
# All-reduces of a step: the model has 15 parameters, which fit in one bucket.
CALLS = {"OverlapDDP": 15, "BucketedDDP": 1}


@pytest.mark.parametrize(
    "stage, name, world_size",
    [
        (OVERLAP, "OverlapDDP", 2),
        pytest.param(BUCKETED, "BucketedDDP", 1, marks=full),
        pytest.param(BUCKETED, "BucketedDDP", 3, marks=full),
    ],
)
def test_run(forked, tmp_path, stage, name, world_size):
    """A whole script, small: it verifies itself, and its files are right."""
    testing.write_mnist(tmp_path / "mnist", 320, 10)
    words = "--device cpu --json json --trace trace --data mnist --log-every 0".split()
    status, output = forked(world_size, stage, *testing.QUICK, *words, cwd=tmp_path)
    assert status == 0 and "verify: passed" in output and "batch 1," not in output, output
    assert "\x1b" not in output, "progress is for terminals"
    result = testing.read_json(tmp_path / "json", stage.parent.name)
    assert result["world_size"] == world_size
    assert all(one["passed"] for one in result["verify"].values())
    counts = {row["name"]: row["collectives"] for row in result["rows"]}
    assert counts == {"no communication": 0, name: CALLS[name], "torch DDP": 1}
    for row in result["rows"]:
        for times in ("step_seconds", "exposed_comm_seconds", "optimizer_seconds"):
            assert [len(rank_times) for rank_times in row[times]] == world_size * [2], times
    for rank in range(world_size):
        trace = json.loads((tmp_path / f"trace.rank{rank}").read_text())
        spans = {event["name"] for event in trace["traceEvents"]}
        assert {"forward", "finish", "optimizer", *counts} <= spans


def test_a_stage_copied_with_common_trains_and_saves(forked, monkeypatch, tmp_path):
    shutil.copytree(ROOT / "common", tmp_path / "common")
    copied = shutil.copy(NAIVE, tmp_path)
    words = [*testing.QUICK, "--device", "cpu", "--json", "json", "--save", "digits.pt"]
    status, output = forked(2, copied, *words, cwd=tmp_path)
    assert status == 0, output
    result = testing.read_json(tmp_path / "json", tmp_path.name)
    gpus = ", ".join(result["gpus"]) or "none"
    assert f"\nCUDA {result['cuda']}, GPUs of this host: {gpus}\n" in output
    assert result["verify"]["NaiveDDP"]["accuracy"] > 0.9
    # 15,000 images in batches of 128: 236 of them in two epochs, and a line for each 50.
    numbers = re.findall(r"batch (\d+), loss \S+, (\S+) ms a step, (\S+) of these", output)
    assert [int(batch) for batch, _, _ in numbers] == [50, 100, 150, 200]
    assert all(0 < float(exposed) < float(step) for _, step, exposed in numbers)
    assert output.count("2 ranks train on 7500 samples each") == 1
    page = (ROOT / "02_naive_ddp" / "README.md").read_text()
    loads, marker, _ = page.partition('torch.load("digits.pt"))\n')
    monkeypatch.chdir(tmp_path)
    exec(loads.rpartition("```python\n")[2] + marker)  # it raises if a weight is missing


def test_run_by_make_whatever_another_job_has_left_in_the_shell(script, tmp_path):
    """What a launcher leaves, and a pod of Kubernetes; with --nnodes 2 torchrun would wait."""
    left = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_PORT": "29511"}
    left |= {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "nowhere.invalid"}

    words = [*testing.QUICK, "--device", "cpu", "--no-verify", "--json", tmp_path / "json"]
    arguments = f"ARGS={shlex.join(map(str, words))}"
    make = ["make", "-C", ROOT, BUCKETED.parent.name, "NPROC=2", f"PYTHON={sys.executable}"]
    status, output = script([*make, arguments], env=left).wait()
    assert status == 0, output
    assert testing.read_json(tmp_path / "json", BUCKETED.parent.name)["world_size"] == 2


@full
@testing.needs_proc
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_faults_end_all(script, fault):
    """Of rank 1, and SIGTERM of the launcher; a rank that waits too long says so."""
    limit = ["--timeout", 10] if fault == "SIGSTOP" else []
    run = script(testing.torchrun(2, BUCKETED, *limit, "--no-verify", *testing.LONG))
    testing.wait_for_line(run, "mini model: ")
    victim = run.process.pid if fault == "SIGTERM" else testing.rank_1(run)
    os.kill(victim, getattr(signal, fault))
    if fault == "SIGSTOP":
        assert any("--timeout 10" in line for line in run.process.stdout), "it ended silently"
        os.kill(victim, signal.SIGKILL)  # as torchrun does, but it waits for half a minute first
    status, output = run.wait()  # fails if a process is left
    assert status != 0, output


def test_what_is_not_verified_is_not_saved(refusal, tmp_path):
    said = refusal(MAIN, NAIVE, "--no-verify", "--save", tmp_path / "x")
    assert "--save" in said and "--no-verify" in said


def test_without_torchrun_it_says_how_to_start_it(refusal):
    assert "torchrun --standalone" in refusal(MAIN, NAIVE, environment={})


def test_a_single_file_is_imported_without_the_repository(script, tmp_path):
    shutil.copy(BUCKETED, tmp_path)
    words = [sys.executable, "-c", "import bucketed; print(bucketed.BucketedDDP.__name__)"]
    assert script(words, cwd=tmp_path).wait() == (0, "BucketedDDP\n")
