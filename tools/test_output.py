"""What scripts say: help, short errors, nothing twice."""

import importlib
import os
import re
import shutil
import signal
from functools import partial

import bucketed
import naive_ddp
import pytest
import torch

from common import ladder
from common.setup import ROOT
from tools.testing import torchrun, wait_for_line

LESSONS = sorted(page.parent for page in ROOT.glob("0?_*/**/README.md"))
SCRIPTS = [lesson / f"{lesson.name.lstrip('0123456789_')}.py" for lesson in LESSONS]
COPIED = ["allreduce", "naive_ddp", "sharded_optimizer", "fsdp", "zero2", "resnet_ddp", "ddp_rpc"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help(forked, path):
    status, output = forked(None, path, "--help", COLUMNS="100")
    assert status == 0 and output.startswith("usage: "), output
    assert all(len(line) <= 100 for line in output.splitlines()), output


@pytest.mark.parametrize("name", COPIED)  # 03 to 05 end as 02 does
def test_a_copy_of_a_script_alone_says_what_else_a_run_needs(forked, tmp_path, name):
    [path] = [path for path in SCRIPTS if path.stem == name]
    status, output = forked(None, shutil.copy(path, tmp_path), cwd=tmp_path)
    assert status == 1 and output.count("\n") == 1 and "common/" in output, output


WRONG = """allreduce --sizes-mb nan, allreduce --nproc 0, allreduce --backends mpi,
compare --mine nowhere.py:X, bucketed --bucket-size-mb nan, bucket_sweep --bucket-sizes-mb nan,
sweep --model resnet1, sweep --model nowhere.py:X,
compile_ddp --compile gcc, ddp_rpc --trainers 100000,
ddp_rpc --nproc 8 --embedding-dim 100, ddp_rpc --round-trip-ms nan,
ddp_rpc --round-trip-ms -5, ddp_rpc --master-port 70000"""
if not torch.cuda.is_available():
    WRONG += ", naive_ddp --device cuda, naive_ddp --backend nccl"


MAINS = {
    "naive_ddp": partial(ladder.run, naive_ddp.NaiveDDP, naive_ddp.train_step, ""),
    "bucketed": partial(ladder.run, bucketed.BucketedDDP, bucketed.train_step, "", True),
}


@pytest.mark.parametrize("line", re.split(r",\s+", WRONG))
def test_wrong_input_names_flag_and_value(refusal, line):
    """What all scripts have: test_common.py."""
    name, *words = line.split()
    main = MAINS.get(name) or importlib.import_module(name).main
    said = refusal(main, f"{name}.py", *words)
    flag = [word for word in words if word.startswith("--")][-1]
    assert said.startswith(f"argument {flag}") and words[-1] in said


BEGINS = """
import os, sys, time
os.chdir(os.path.dirname(__file__))
if os.environ["RANK"] == "1":
    open("1", "w").close()
    time.sleep(100)
"""


@pytest.mark.parametrize(
    "code, status, said",
    [
        ("print('error: rank 0'); sys.exit(2)", 2, "error: rank 0\n"),
        ("os.kill(os.getpid(), 9)", 9, "error: rank 0 was ended by SIGKILL, then all others\n"),
        # Ctrl-C once both ranks run: while torch's agent starts them, it can hang.
        (
            "while not os.path.exists('1'): time.sleep(0.01)\nprint('waits'); time.sleep(100)",
            128 + signal.SIGINT,
            "interrupted\n",
        ),
    ],
)
def test_our_torchrun_is_short(script, tmp_path, code, status, said):
    """Rank 0 fails, or all are interrupted, and rank 1 waits; no log stays."""
    path = tmp_path / "ends.py"
    path.write_text(f"{BEGINS}{code}")
    command = torchrun(2, path)
    command[2] = "tools.torchrun"  # what `make` starts
    run = script(command, cwd=ROOT, env={"TMPDIR": str(tmp_path)})
    if said == "interrupted\n":
        wait_for_line(run, "waits")
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    assert run.wait() == (status, said)
    assert not list(tmp_path.glob("torchelastic_*"))
