"""The Makefile, usually by what `make -n` would run."""

import sys

import pytest

from tools.testing import QUICK, ROOT, make, would_make

FOLDERS = [page.parent.relative_to(ROOT).as_posix() for page in ROOT.glob("0?_*/**/README.md")]


@pytest.mark.parametrize("name", ["05_bucketed", "05_bucketed/", "05"])
def test_a_stage_has_short_names(name):
    assert "--nproc-per-node 3 05_bucketed/bucketed.py" in would_make(name, "NPROC=3")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_lesson_is_run_and_nproc_reaches_it(folder):
    script = f"{folder}/{folder.split('/')[-1].lstrip('0123456789_')}.py"
    command = would_make(folder, "NPROC=3")
    if folder in ("01_allreduce", "08_ddp_rpc"):
        assert f" {script} --nproc 3" in command and "--nproc" not in would_make(folder)
    else:
        assert f"--standalone --nproc-per-node 3 {script}" in command
    assert f"make {folder} " in make()[1]  # the help


def test_an_interpreter_without_torch_is_one_line(tmp_path):
    python = tmp_path / "my python"  # a space, too
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    status, output = make("05_bucketed", f"PYTHON={python}")
    assert status == 2 and output.count("error: ") == 1 and str(python) in output, output


@pytest.mark.parametrize("number", ["0", "two", "-1"])
def test_a_wrong_number_of_ranks_is_one_line(number):
    status, output = make("05_bucketed", f"NPROC={number}")
    assert status == 2 and number in output and len(output.splitlines()) == 1, output


def test_variables_are_handed_on():
    given = "NETWORK=1gbit,1ms", "BACKEND=gloo", "MINE=my ddp.py:My", "ARGS=--steps 3"
    for target in ("05", "compare", "timeline", "07_resnet_ddp", "01_allreduce", "hosts"):
        command = would_make(target, *given)
        flags = "--mine 'my ddp.py:My' --backend 'gloo' --network '1gbit,1ms' --steps 3"
        assert f".py {flags}\n" in command, target
    command = would_make("check", "MINE=my ddp.py:My", "KIND=fsdp", "LAYERS=a.b", "NPROC=3")
    for words in ("'my ddp.py:My'", "--kind 'fsdp'", "--layers 'a.b'", "--nproc 3"):
        assert words in command


def test_a_stage_runs_whatever_another_job_has_left_in_the_shell(script):
    """What a launcher leaves, and a pod of Kubernetes; with --nnodes 2 torchrun would wait."""
    left = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_PORT": "29511"}
    left |= {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "nowhere.invalid"}
    stage = " ".join([*QUICK, "--no-verify", "--no-baseline", "--device cpu"])
    words = [f"PYTHON={sys.executable}", "NPROC=1", f"ARGS={stage}"]
    status, output = script(["make", "-C", ROOT, "05_bucketed", *words], env=left).wait(60)
    assert status == 0 and "BucketedDDP" in output, output


def test_a_single_run_is_no_rank_of_another_job():
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        assert f"-u {name} " in would_make("07_resnet_ddp")


def test_clean_keeps_what_was_measured():
    assert "results" not in would_make("clean")
    assert "rm -rf results " in would_make("clean", "RESULTS=1")
