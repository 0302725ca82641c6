"""What scripts say, and where: progress, closed pipes, odd encodings, short errors."""

import os
import signal
import sys
import time

import pytest
import torch

from common import setup
from tools import harness
from tools.harness import QUICK, ROOT, torchrun

LADDER = ROOT / "02_naive_ddp" / "naive_ddp.py"
SMALL = [*QUICK, "--no-verify", "--no-baseline", "--device", "cpu"]


def test_a_terminal_shows_progress_and_a_pipe_does_not(forked):
    status, output, shown = forked.on_a_terminal(2, LADDER, *SMALL)
    assert status == 0 and "step 1 of 3" not in output and "\x1b" not in output, shown
    lines = [line for line in shown.split("\r\x1b[K") if line]
    assert "step 1 of 3: NaiveDDP" in lines, shown
    assert shown.endswith("\r\x1b[K"), "the last line is not cleared"


def test_a_closed_pipe_ends_nothing(forked, tmp_path):
    """`| head -1`: no traceback, no progress in a file, and the files are written."""
    os.mkfifo(tmp_path / "pipe")
    run = forked.start(2, LADDER, *SMALL, "--json", tmp_path / "x.json", stdout=tmp_path / "pipe")
    with open(tmp_path / "pipe") as output:
        output.readline()
    assert run.wait()[0] == 0
    harness.read_json(tmp_path / "x.json", "02_naive_ddp")


LESSONS = sorted(page.parent for page in ROOT.glob("0?_*/**/README.md"))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_help(forked, lesson):
    name = lesson.name.lstrip("0123456789_")
    status, output = forked(None, lesson / f"{name}.py", "--help", COLUMNS="100")
    assert status == 0 and output.startswith("usage: "), output
    assert all(len(line) <= 100 for line in output.splitlines()), output


def ours(script, ranks: int, *words, **environment):
    """What `make` starts, in processes of their own."""
    command = torchrun(ranks, *words)
    command[2] = "tools.torchrun"
    return script(command, cwd=ROOT, env=environment)


def test_too_many_ranks_are_refused_before_one_starts(script):
    status, said = ours(script, 9999, "02_naive_ddp/naive_ddp.py").wait(60)
    problem = "error: argument --nproc-per-node: '9999' ranks need more memory than is left\n"
    assert status == 2 and said.endswith(problem) and said.count("\n") == 1, said


# What `fail` does, without the seconds that importing torch takes.
LIKE_FAIL = """
import os, sys, time
if os.environ["RANK"] != "0":
    time.sleep(10)
print("naive_ddp.py: error: argument --steps: '0' is not a whole number from 1 to 2147483647")
sys.exit(2)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU ranks don't share cores so much")
def test_our_torchrun_is_short(script, tmp_path):
    """A wrong flag is said once, with status 2; more ranks than cores are warned of."""
    ranks = setup.threads_per_rank(1) + 1
    (tmp_path / "fails.py").write_text(LIKE_FAIL)
    status, output = ours(script, ranks, tmp_path / "fails.py").wait()
    assert status == 2, output
    assert output.splitlines() == [
        f"warning: {ranks} ranks on {ranks - 1} cores: their times say little",
        "naive_ddp.py: error: argument --steps: '0' is not a whole number from 1 to 2147483647",
    ]


@pytest.mark.parametrize(
    "moment", ["importing torch", pytest.param("training", marks=pytest.mark.full)]
)
def test_ctrl_c_is_said_once_and_no_log_stays(script, tmp_path, moment):
    folder = tmp_path / "temporary"
    folder.mkdir()
    run = ours(script, 2, LADDER, "--no-verify", *harness.LONG, TMPDIR=str(folder))
    if moment == "training":
        harness.wait_for_line(run, "mini model: ")
    else:
        harness.rank_1(run)
        time.sleep(0.5)  # Python itself has started
    os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    assert run.wait(45) == (128 + signal.SIGINT, "interrupted\n")
    assert not list(folder.glob("torchelastic_*"))


def test_ctrl_c_while_a_script_imports_is_short(script, tmp_path):
    """Of one that torchrun does not start."""
    path = tmp_path / "imports.py"
    path.write_text("print('imports', flush=True)\nwhile True: pass")
    command = [sys.executable, "-m", "tools.alone", path]
    run = script(command, cwd=ROOT)
    harness.wait_for_line(run, "imports")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(10) == (1, "interrupted\n")
