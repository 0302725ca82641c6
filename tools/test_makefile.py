"""The Makefile, by what `make -n` would run."""

import os
import subprocess
import sys

import pytest

from tools.testing import ROOT


def make(*words) -> tuple[int, str]:
    """Exit status and output of make, with none of the variables of a make that runs the tests."""
    names = [name for name in os.environ if "MAKE" in name or name in ("NPROC", "ARGS", "PYTHON")]
    command = ["env", *(f"--unset={name}" for name in names), "make", *words]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.run(command, cwd=ROOT, **output)
    return run.returncode, run.stdout


def would_make(*words) -> str:
    """What make would run."""
    status, output = make("-n", f"PYTHON={sys.executable}", *words)
    assert status == 0, output
    return output


FOLDERS = [page.parent.relative_to(ROOT).as_posix() for page in ROOT.glob("0?_*/**/README.md")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_lesson_is_run_and_nproc_reaches_it(folder):
    script = f"{folder}/{folder.split('/')[-1].lstrip('0123456789_')}.py"
    command = would_make(folder, "NPROC=3")
    if folder in ("01_allreduce", "08_ddp_rpc"):
        assert f" {script} --nproc 3" in command and "--nproc" not in would_make(folder)
    else:
        assert "--standalone --nproc-per-node 3 " in command and f" {script}" in command
    assert f"make {folder} " in make()[1]  # the help
    short = "05", "05_bucketed/"
    assert folder != "05_bucketed" or all(would_make(name, "NPROC=3") == command for name in short)


def test_an_interpreter_without_torch_is_one_line(tmp_path):
    python = tmp_path / "my python"  # a space, too
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    status, output = make("05_bucketed", f"PYTHON={python}")
    assert status == 2 and output.count("error: ") == 1 and str(python) in output, output


def test_a_wrong_number_of_ranks_is_one_line():
    for number in ("0", "two", "-1"):
        status, output = make("05_bucketed", f"NPROC={number}")
        assert status == 2 and number in output and len(output.splitlines()) == 1, output


def test_variables_are_handed_on():
    for target in ("05", "compare", "timeline", "07_resnet_ddp"):
        command = would_make(target, "NETWORK=1gbit,1ms", "BACKEND=gloo", "ARGS=--steps 3")
        assert "over.py '1gbit,1ms' 0" in command, target
        assert ".py --backend 'gloo' --steps 3\n" in command, target
    for target in ("compare", "hosts", "06_sharded_optimizer/fsdp"):
        assert ".py --mine 'my ddp.py:My' " in would_make(target, "MINE=my ddp.py:My"), target
    command = would_make("check", "MINE=my ddp.py:My", "KIND=fsdp", "LAYERS=a.b", "NPROC=3")
    for words in ("'my ddp.py:My'", "--kind 'fsdp'", "--layers 'a.b'", "--nproc 3"):
        assert words in command


@pytest.mark.parametrize(
    "target, variable, instead",
    [
        ("02_naive_ddp", "MINE=my.py:My", "make compare"),
        ("08_ddp_rpc", "NETWORK=1gbit,1ms", "slow_network"),
        ("hosts", "NETWORK=1gbit,1ms", "slow_network"),
        ("check", "NETWORK=1gbit,1ms", "slow_network"),
    ],
)
def test_a_variable_that_means_nothing_is_refused(target, variable, instead):
    status, output = make("-n", target, variable)
    assert status == 2 and output.count("\n") == 1, output
    assert variable.partition("=")[2] in output and instead in output


def test_a_single_run_is_no_rank_of_another_job():
    command = would_make("07_resnet_ddp")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        assert f"-u {name} " in command


def test_clean_keeps_what_was_measured():
    assert "results" not in would_make("clean")
    assert "rm -rf results " in would_make("clean", "RESULTS=1")
