"""What tests of several folders share: ranks and scripts that run, and what is checked of them.

conftest.py's fixtures hand out the three classes.
"""

import contextlib
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
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from tools.check.findings import Answer, judge, verdict_of

ROOT = Path(__file__).resolve().parent.parent
QUICK = "--size nano --steps 2 --warmup 1 --batch-size 1 --context-length 8".split()
LONG = "--batch-size 1 --context-length 8 --steps 1000000".split()
ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ONLY_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY
OVER = ROOT / "01_allreduce" / "slow_network" / "slow_network.py"
on_linux = sys.platform == "linux"
needs_proc = pytest.mark.skipif(not on_linux, reason="finding the ranks needs /proc")


def new_process(function, *arguments, daemon: bool = False) -> multiprocessing.Process:
    """A process that calls this; on Linux it is forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver" if on_linux else "spawn")
    needed = ["torch", "torchvision", "torch.distributed.optim", "torch.distributed.tensor.debug"]
    context.set_forkserver_preload([*needed, "matplotlib.figure", "pytest"])
    process = context.Process(target=function, args=arguments, daemon=daemon)
    process.start()
    return process


class Ranks:
    """Processes joined by gloo that stay alive between tests, so that each imports torch once.

    is_late: on the network that is late, as `make check` runs.
    """

    def __init__(self, world_size: int, is_late: bool = False):
        self.world_size, self.is_late = world_size, is_late
        self.processes = {}  # by our end of the pipe

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            member = rank, self.world_size, self.is_late, Path(self.folder.name), theirs
            self.processes[ours] = new_process(_serve, *member, daemon=True)
            theirs.close()  # so that recv() ends with EOFError when the rank dies

    def run(self, function, *arguments, timeout: float = 180) -> list:
        """Call function(*arguments) on every rank; returns the results by rank.

        The first rank that raises or dies, or silence for so long, fails the test.
        """
        if not self.processes:
            self.start()
        answers = {}
        try:
            for pipe in self.processes:
                pipe.send(sys.path)  # first, because it may be needed to find the function
                pipe.send((function, arguments))
            while waiting := self.processes.keys() - answers.keys():
                ready = connection.wait(waiting, timeout)
                assert ready, "no answer"
                for pipe in ready:
                    answers[pipe], failure = pipe.recv()
                    assert failure is None, failure
        except BaseException:  # the end of the test's time, too
            print(Path(self.folder.name, "output").read_text())
            self.end()
            raise
        return [answers[pipe] for pipe in self.processes]

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.processes = {}


def _serve(rank: int, world_size: int, is_late: bool, folder: Path, pipe) -> None:
    _write_into(folder / "output")
    torch.set_num_threads(1)
    network = contextlib.nullcontext()
    if is_late:
        from tools.check.late import late_network

        network = late_network()
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=150)}
    with network:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", **options)
        while True:
            try:
                sys.path[:] = pipe.recv()
                function, arguments = pipe.recv()
                answer = function(*arguments), None
            except EOFError:
                return
            except BaseException:
                answer = None, f"rank {rank}: {traceback.format_exc()}"
            pipe.send(answer)


def _write_into(path: Path) -> None:
    """What this process prints, also by itself in C++."""
    file = os.open(path, APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


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
            with contextlib.suppress(OSError):  # it ended meanwhile
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class Forked:
    """A script that runs in a process per rank, which need not import torch and begins in 0.1 s.

    On two ranks it is what torchrun makes of it, without torchrun, and on None what `python path
    words` is. Options: cwd; environment variables.
    """

    def __init__(self, world_size, path, *words, cwd=ROOT, **variables):
        self.folder = tempfile.TemporaryDirectory()
        self.output = Path(self.folder.name, "output")
        shared, of_ranks = {"OMP_NUM_THREADS": 1, **variables}, [{}]
        if world_size is not None:
            # As torchrun does it: the ranks meet at a store that is there before them.
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port}
            shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
            shared |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            of_ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in range(world_size)]
        options = [str(word) for word in (path, *words)], cwd, self.output
        self.ranks = [new_process(_run_script, shared | each, *options) for each in of_ranks]

    def wait(self, timeout: float = 200) -> tuple[int, str]:
        """Exit status and output, once all have ended, or one with a failure; then all end."""
        failed = []
        try:
            while not failed and (running := [rank for rank in self.ranks if rank.is_alive()]):
                if not connection.wait([rank.sentinel for rank in running], timeout):
                    pytest.fail(f"still running after {timeout} s\n{self.output.read_text()}")
                failed = [rank.exitcode for rank in self.ranks if rank.exitcode]
        finally:
            self.kill()
        return (failed or [0])[0], self.output.read_text()

    def kill(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.kill()  # it may have no group yet
            rank.join()


def _run_script(variables, words, folder, output) -> None:
    """Run `python words` in this folder, with these environment variables, into this file."""
    os.setsid()  # all that it starts is in one group, which Ctrl-C at the tests' terminal spares
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What plain python has for a DataLoader's workers, and not what this process was made with.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    os.environ.update({name: str(value) for name, value in variables.items()})
    _write_into(output)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.chdir(folder)
    # Nothing of this repository is found where plain python would not find it; .venv is deeper.
    others = [entry for entry in sys.path if ROOT not in [Path(entry), *Path(entry).parents[:2]]]
    sys.path[:] = [str(Path(words[0]).parent), *filter(None, others)]
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
