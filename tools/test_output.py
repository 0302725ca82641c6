"""What scripts say: help, short errors, nothing twice."""

import os
import shutil
import signal

import pytest

from common.setup import ROOT
from tools import testing
from tools.testing import torchrun

LADDER = ROOT / "02_naive_ddp" / "naive_ddp.py"
LESSONS = sorted(page.parent for page in ROOT.glob("0?_*/**/README.md"))
SCRIPTS = [lesson / f"{lesson.name.lstrip('0123456789_')}.py" for lesson in LESSONS]
STAGES = [path for path in SCRIPTS if path.parent.parent == ROOT or path.stem == "fsdp"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help(forked, path):
    status, output = forked(None, path, "--help", COLUMNS="100")
    assert status == 0 and output.startswith("usage: "), output
    assert all(len(line) <= 100 for line in output.splitlines()), output


@pytest.mark.parametrize("path", STAGES, ids=lambda path: path.stem)
def test_a_copy_of_a_script_alone_says_what_else_a_run_needs(forked, tmp_path, path):
    shutil.copy(path, tmp_path)
    status, output = forked(None, tmp_path / path.name, cwd=tmp_path)
    assert status == 1 and output.count("\n") == 1, output
    assert "copy the repository's folder common/" in output, output


def ours(script, *words, **environment):
    """What `make` starts, in processes of their own."""
    command = torchrun(2, *words)
    command[2] = "tools.torchrun"
    return script(command, cwd=ROOT, env=environment)


@pytest.mark.parametrize(
    "code, status, said",
    [
        ("print(f'error: rank {rank}'); sys.exit(2)", 2, "error: rank 0\n"),
        ("os.kill(os.getpid(), 9)", 9, "error: rank 0 was ended by SIGKILL, then all others\n"),
    ],
)
def test_our_torchrun_is_short(script, tmp_path, code, status, said):
    """Rank 0 fails, and rank 1 waits."""
    path = tmp_path / "fails.py"
    path.write_text(
        f"import os, sys, time\nrank = int(os.environ['RANK'])\ntime.sleep(10 * rank)\n{code}"
    )
    assert ours(script, path).wait(60) == (status, said)


def test_ctrl_c_is_said_once_and_no_log_stays(script, tmp_path):
    run = ours(script, LADDER, "--no-verify", *testing.LONG, TMPDIR=str(tmp_path))
    testing.wait_for_line(run, "mini model: ")
    os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    assert run.wait(45) == (128 + signal.SIGINT, "interrupted\n")
    assert not list(tmp_path.glob("torchelastic_*"))
