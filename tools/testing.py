"""What tests of several folders share: ranks and scripts that run, and what is checked of them.

conftest.py's fixtures hand out the three classes.
"""

import atexit
import json
import multiprocessing
import os
import random
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext, suppress
from multiprocessing import connection
from pathlib import Path

import pytest
import torch.distributed as dist
from PIL import Image

from tools.check.findings import Answer, judge, verdict_of
from tools.check.runner import FORKS, Ranks, end, start

ROOT = Path(__file__).resolve().parent.parent
QUICK = "--size nano --steps 2 --warmup 1 --batch-size 1 --context-length 8".split()
ONE_STEP = "--size nano --device cpu --batch-size 1 --context-length 8 --steps 1 --warmup 0".split()
LONG = "--batch-size 1 --context-length 8 --steps 1000000".split()
ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ONLY_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
OVER = ROOT / "01_allreduce" / "slow_network" / "slow_network.py"  # runs a script over a network
needs_proc = pytest.mark.skipif(not FORKS, reason="finding the ranks needs /proc")


CONTEXT = multiprocessing.get_context("forkserver" if FORKS else "spawn")
needed = ["torch", "torchvision", "torch.distributed.optim", "torch.distributed.tensor.debug"]
CONTEXT.set_forkserver_preload([*needed, "matplotlib.figure", "pytest"])


class LastingRanks(Ranks):
    """Ranks that stay alive between tests, so that each imports torch once."""

    def __init__(self, world_size: int, network=nullcontext):
        self.printed = tempfile.NamedTemporaryFile(mode="r")
        super().__init__(CONTEXT, world_size, network, self.printed.name)
        atexit.register(self.end)  # a failed test's traceback keeps their pipes open

    def run(self, function, *arguments) -> list:
        """Return what a function returns, by rank; fail if a rank raises, ends or hangs."""
        try:
            answers = self.call(60, attempt, function, *arguments)
            verdict = verdict_of(answers)
            assert verdict.verdict == "passed", verdict.seen
        except BaseException:  # the end of the test's time, too
            self.end()
            print(self.printed.read())
            raise
        return [answers[rank].seen for rank in range(self.world_size)]


def attempt(function, *arguments) -> Answer:
    try:
        return Answer("passed", function(*arguments))
    except BaseException:
        return Answer("failed", traceback.format_exc())


class Script:
    """A running command; a mark in the environment finds everything that it started."""

    def __init__(self, command: list, env=None, **options):
        self.mark = f"TEST_MARK={os.getpid()}.{time.monotonic_ns()}"
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"MAKEFLAGS": "", "MFLAGS": ""}  # of a make that runs the tests
        environment |= dict([self.mark.split("=")], **(env or {}))
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = [str(word) for word in command]
        self.process = subprocess.Popen(words, env=environment, start_new_session=True, **options)

    def processes(self, *marks: str) -> list[int]:
        """Its processes that are alive, with these variables in their environment; on Linux."""
        wanted = {mark.encode() for mark in (self.mark, *marks)}
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it ended meanwhile
                if wanted <= set(file.read_bytes().split(b"\0")):
                    found.append(int(file.parent.name))
        return found

    def wait(self, timeout: float = 200) -> tuple[int, str]:
        """Exit status and output; fails if it does not end in time or leaves a process behind."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"still running after {timeout} s\n{self.process.communicate()[0]}")
        deadline = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        assert not left, f"processes left behind: {left}\n{output}"
        return self.process.returncode, output

    def kill(self) -> None:
        self.process.kill()
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class Forked:
    """A script that runs in a process per rank, which need not import torch and begins in 0.1 s.

    On two ranks it is what torchrun makes of it, without torchrun, and on None what `python path
    words` is. Options: cwd; environment variables.
    """

    def __init__(self, world_size, path, *words, cwd=ROOT, **variables):
        self.folder = tempfile.TemporaryDirectory()
        self.output = Path(self.folder.name, "output")
        shared = {"OMP_NUM_THREADS": 1, **variables}
        of_ranks = [{}]
        if world_size is not None:
            # As torchrun does it: the ranks meet at a store that is there before them.
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port}
            shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
            shared |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            of_ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in range(world_size)]
        command = [str(word) for word in (path, *words)], cwd
        self.ranks = []
        for own in of_ranks:
            _, rank = start(CONTEXT, self.output, run_script, shared | own, *command)
            self.ranks.append(rank)

    def wait(self) -> tuple[int, str]:
        """Exit status and output, once all have ended, or one with a failure; then all end."""
        failed = []
        try:
            while not failed and (running := [rank for rank in self.ranks if rank.is_alive()]):
                if not connection.wait([rank.sentinel for rank in running], 200):
                    pytest.fail(f"still running after 200 s\n{self.output.read_text()}")
                failed = [rank.exitcode for rank in self.ranks if rank.exitcode]
        finally:
            end(self.ranks)
        return (failed or [0])[0], self.output.read_text()


def run_script(_, variables: dict, words: list[str], folder) -> None:
    """Run `python words` in this folder, with these environment variables."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What plain python has for a DataLoader's workers, and not what this process was made with.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.chdir(folder)
    # Nothing of this repository is found where plain python would not find it; .venv is deeper.
    others = [entry for entry in sys.path if ROOT not in [Path(entry), *Path(entry).parents[:2]]]
    sys.path[:] = [str(Path(words[0]).parent), *filter(None, others)]
    for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
        del sys.modules[name]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def judged(ranks, mine, checks: list, world_size: int = 2) -> dict[str, Answer]:
    """The verdict of each check on a class, by the checks' names; the ranks are the fixture's."""
    of_ranks = ranks(world_size).run(_judge_all, mine, checks)
    verdicts = [verdict_of(dict(enumerate(answers))) for answers in zip(*of_ranks, strict=True)]
    return {check.__name__: verdict for check, verdict in zip(checks, verdicts, strict=True)}


def _judge_all(mine, checks: list) -> list[Answer]:
    return [judge(check, mine) for check in checks]


def failed(verdicts: dict[str, Answer]) -> set[str]:
    return {name for name, verdict in verdicts.items() if verdict.verdict == "failed"}


def torchrun(world_size: int, *words) -> list:
    """The command line that starts a script on this many ranks of this host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", world_size, *words]


def write_mnist(folder: Path, train: int, test: int) -> list[Path]:
    """A small MNIST of noise, in its own format; returns its files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        images = struct.pack(">4I", 2051, count, 28, 28) + random.Random(0).randbytes(784 * count)
        labels = struct.pack(">2I", 2049, count) + bytes(number % 10 for number in range(count))
        (raw / f"{name}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return sorted(raw.iterdir())


HEAD = """torch backend network device device_name cuda gpus world_size
threads_per_rank options started seconds""".split()


def read_json(path: Path, stage: str) -> dict:
    """What --json wrote: strict JSON with the head that all have."""
    result = json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN
    assert result.keys() >= {*HEAD} and result["stage"] == stage
    return result


def assert_png(*files: Path) -> None:
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG"), file


def assert_movie(file: Path) -> None:
    """It moves, is small, and its last frame stays for three seconds."""
    with Image.open(file) as movie:
        assert movie.n_frames > 20 and file.stat().st_size < 250_000, file
        movie.seek(movie.n_frames - 1)
        assert movie.info["duration"] == 3000, file


def wait_for_line(run: Script, start: str) -> None:
    """Read the run's output up to the line that begins so."""
    found = any(line.startswith(start) for line in run.process.stdout)
    assert found, f"it ended without a line that starts with {start!r}"


def rank_1(run: Script) -> int:
    """The process of rank 1, once it is there."""
    while not (found := run.processes("RANK=1")):
        assert run.process.poll() is None, "there is no rank 1"
    return found[0]
