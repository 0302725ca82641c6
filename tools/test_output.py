"""What scripts say, and where: progress, help, short errors."""

import os
import signal

import pytest

from common.setup import ROOT
from tools import testing
from tools.testing import QUICK, torchrun

LADDER = ROOT / "02_naive_ddp" / "naive_ddp.py"
SMALL = [*QUICK, "--no-verify", "--no-baseline", "--device", "cpu"]
LESSONS = sorted(page.parent for page in ROOT.glob("0?_*/**/README.md"))


def test_a_terminal_shows_progress_and_a_pipe_does_not(forked):
    status, output, shown = forked.on_a_terminal(2, LADDER, *SMALL)
    assert status == 0 and "step 1 of 3" not in output and "\x1b" not in output, shown
    assert "step 1 of 3: NaiveDDP" in shown
    assert shown.endswith("\r\x1b[K"), "the last line is not cleared"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_help(forked, lesson):
    name = lesson.name.lstrip("0123456789_")
    status, output = forked(None, lesson / f"{name}.py", "--help", COLUMNS="100")
    assert status == 0 and output.startswith("usage: "), output
    assert all(len(line) <= 100 for line in output.splitlines()), output


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
