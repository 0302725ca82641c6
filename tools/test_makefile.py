"""The Makefile, by what `make -n` would run."""

import os
import subprocess
import sys

import pytest

from tools.testing import ROOT

FOLDERS = [page.parent.relative_to(ROOT).as_posix() for page in ROOT.glob("0?_*/**/README.md")]


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_is_run_by_each_of_its_names(folder):
    script = f" {folder}/{folder.split('/')[-1].lstrip('0123456789_')}.py "
    command = would_make(folder, "NPROC=3", "ARGS=--steps 3")
    assert command.endswith(" --steps 3\n")
    if folder in ("01_allreduce", "08_ddp_rpc"):
        assert f"{script}--nproc '3' " in command and "--nproc" not in would_make(folder)
    else:
        assert " --standalone --nproc-per-node 3 " in command and script in command
    others = [f"{folder}/"]
    if "/" not in folder:
        others.append(folder[:2])
        assert script in would_make("all")
    if folder.endswith(("/compare", "/predict")):
        others.append(folder.rpartition("/")[2])
    for name in others:
        assert would_make(name, "NPROC=3", "ARGS=--steps 3") == command, name
    assert f"make {folder} " in make()[1]  # the help


def test_an_interpreter_without_torch_is_one_line(tmp_path):
    python = tmp_path / "my python"  # a space, too
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    status, output = make("05_bucketed", f"PYTHON={python}")
    assert status == 2 and output.count("error: ") == 1 and str(python) in output, output


@pytest.mark.parametrize("number", ["0", "two", "-1", "it's"])
def test_a_wrong_number_of_ranks_is_one_line(number):
    status, output = make("05_bucketed", f"NPROC={number}")
    assert status == 2 and number in output and output.count("\n") == 1, output


MINE = "MINE=my ddp's.py:My"


@pytest.mark.parametrize(
    "target, script",
    [
        ("05", "05_bucketed/bucketed.py --backend 'gloo'"),
        ("compare", "05_bucketed/compare/compare.py --backend 'gloo'"),
        ("07_resnet_ddp", "07_resnet_ddp/resnet_ddp.py --backend 'gloo'"),
    ],
)
def test_a_network_and_a_backend_are_handed_on(target, script):
    command = " ".join(would_make(target, "NETWORK=1gbit,1ms", "BACKEND=gloo").split())
    assert f" 2 01_allreduce/slow_network/slow_network.py '1gbit,1ms' {script}" in command


@pytest.mark.parametrize("target", ["timeline", "01_allreduce/slow_network/"])
def test_these_always_have_a_network(target):
    assert " 2 01_allreduce/slow_network/slow_network.py '1gbit,1ms' " in would_make(target)


@pytest.mark.parametrize(
    "target", ["compare", "predict", "hosts", "06_sharded_optimizer", "06_sharded_optimizer/fsdp/"]
)
def test_a_class_is_handed_on(target):
    assert r" --mine 'my ddp'\''s.py:My' " in would_make(target, MINE)


def test_what_check_and_hosts_are_told():
    command = would_make("check", MINE, "KIND=fsdp", "LAYERS=a.b", "NPROC=3")
    words = r"check.py 'my ddp'\''s.py:My' --kind 'fsdp' --layers 'a.b' --nproc '3'"
    assert words in " ".join(command.split())
    assert " '9mbit' '1ms' " in would_make("hosts", "RATE=9mbit", "DELAY=1ms")


@pytest.mark.parametrize(
    "variable, targets",
    [
        ("NETWORK=1gbit,1ms", "01 01_allreduce 01_allreduce/ 08_ddp_rpc/ all hosts check read"),
        ("BACKEND=gloo", "01_allreduce/slow_network 08 all hosts check test"),
        ("NPROC=3", "hosts test read setup"),
        ("MINE=my.py:My", "02_naive_ddp 05_bucketed/ 06_sharded_optimizer/zero2 timeline all"),
        ("RATE=1gbit", "compare"),
        ("DELAY=1ms", "compare"),
    ],
)
def test_a_variable_that_a_target_does_not_use_is_refused(variable, targets):
    for target in targets.split():
        status, output = make("-n", target, variable)
        assert status == 2 and output.count("\n") == 1, output
        assert variable.partition("=")[2] in output and target.rstrip("/") in output


def test_a_single_run_is_no_rank_of_another_job():
    command = would_make("07_resnet_ddp")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        assert f"-u {name} " in command.partition("resnet_ddp.py")[0]


def test_clean_keeps_what_was_measured():
    assert "results" not in would_make("clean")
    assert "rm -rf results " in would_make("clean", "RESULTS=1")
