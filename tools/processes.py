"""How tests run ranks and scripts: in processes that have torch already, or watched from outside.

The fixtures of conftest.py hand them out.
"""

import contextlib
import multiprocessing.connection
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tools.check.runner import late_network
from tools.forked_script import run_script


def ready_processes():
    """multiprocessing, with processes that are forked from one that has imported all this."""
    if sys.platform != "linux":  # macOS has libraries that hate fork
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    needed = ["torch", "torchvision", "torch.distributed.optim", "torch.distributed.tensor.debug"]
    needed += ["matplotlib.figure", "pytest"]
    context.set_forkserver_preload(needed)
    forkserver.ensure_running()
    return context


class Ranks:
    """Processes joined by gloo that stay alive between tests, so that each imports torch once.

    is_late: on the network that is late, as `make check` runs.
    """

    def __init__(self, world_size: int, is_late: bool = False):
        context = ready_processes()
        self.folder = tempfile.TemporaryDirectory()
        self.output = Path(self.folder.name, "output")
        self.pipes = []
        self.processes = []
        store = f"{self.folder.name}/store"
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments = (rank, world_size, store, theirs, self.output, is_late)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
            theirs.close()  # so that recv() ends with EOFError when the rank dies
            self.pipes.append(mine)

    def run(self, function, *arguments, timeout: float = 60) -> list:
        """Call function(*arguments) on every rank; returns the results by rank.

        Any rank's exception fails the test.
        """
        for pipe in self.pipes:
            pipe.send(sys.path)  # first, because it may be needed to find the function
            pipe.send((function, arguments))
        results = []
        failures = []
        deadline = time.monotonic() + timeout
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {timeout} s")
                result, failure = pipe.recv()
            except (EOFError, TimeoutError) as error:
                result, failure = None, repr(error)
            results.append(result)
            if failure:
                failures.append(f"rank {rank}: {failure}")
                # The others may wait for this one in vain.
                deadline = min(deadline, time.monotonic() + 5)
        if failures:
            failures.append(self.output.read_text())
            self.end()
            pytest.fail("\n".join(failures), pytrace=False)
        return results

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []
        self.folder.cleanup()


def _serve(rank: int, world_size: int, store: str, pipe, output: Path, is_late: bool) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        late_network() if is_late else "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    while True:
        try:
            sys.path[:] = pipe.recv()
            function, arguments = pipe.recv()
            answer = function(*arguments), None
        except EOFError:
            return
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)


def kill_all(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def check_ended(run, output: str) -> None:
    """Fails if a run that is over leaves a process behind."""
    deadline = time.monotonic() + 5
    while run.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = run.left()
    kill_all(left)
    assert not left, f"processes left behind: {left}\n{output}"


class Script:
    """A running command; a mark in the environment finds everything that it started."""

    def __init__(self, command: list, **options):
        mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self.mark = f"TEST_MARK={mark}".encode()
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"MAKEFLAGS": "", "MFLAGS": ""}  # of a make that runs the tests
        environment |= {"TEST_MARK": mark} | options.pop("env", {})
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def processes(self) -> list[int]:
        """The processes of this command that are alive; only on Linux all of them are known."""
        found = {self.process.pid} if self.process.poll() is None else set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if self.mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
        return sorted(found)

    def wait(self, timeout: float = 120) -> tuple[int, str]:
        """Exit status and output, once it has ended.

        Fails if it does not end in time or leaves a process behind.
        """
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            output, _ = self.process.communicate()
            pytest.fail(f"still running after {timeout} s: {self.process.args}\n{output}")
        check_ended(self, output)
        return self.process.returncode, output

    left = processes

    def kill(self) -> None:
        kill_all(self.processes())


class Forked:
    """Runs scripts in processes that need not import torch: a run has begun after 0.1 s.

    forked(2, path, *words) is what torchrun makes of it on two ranks, without torchrun, and
    forked(None, path, *words) what `python path words` is; (exit status, output).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs = []

    def __call__(self, world_size, path, *words, timeout: float = 100, **options):
        return self.start(world_size, path, *words, **options).wait(timeout)

    def start(self, world_size, path, *words, **options) -> "ForkedRun":
        """The run that has begun; options: cwd; stdout and stderr, file descriptors; variables."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        self.runs.append(ForkedRun(folder, world_size, path, words, **options))
        return self.runs[-1]

    def on_a_terminal(self, world_size, path, *words, **options) -> tuple[int, str, str]:
        """Exit status, standard output, and what a terminal gets on standard error."""
        ours, terminal = pty.openpty()
        run = self.start(world_size, path, *words, stderr=terminal, **options)
        os.close(terminal)
        killer = threading.Timer(100, run.kill)
        killer.start()
        shown = b""
        with contextlib.suppress(OSError):  # when the last process has closed it
            while piece := os.read(ours, 65536):
                shown += piece
        os.close(ours)
        status, output = run.wait()
        killer.cancel()
        return status, output, shown.decode()

    def end(self) -> None:
        for run in self.runs:
            run.kill()


class ForkedRun:
    """A script that runs in a process per rank. When one of them fails the others are ended."""

    def __init__(
        self, folder: Path, world_size, path, words, cwd=None, stdout=None, stderr=None, **variables
    ):
        self.output = folder / "output"
        file = os.open(self.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        variables = {"OMP_NUM_THREADS": "1"} | variables
        of_ranks = [{}]
        if world_size is not None:
            # As torchrun does it: the ranks meet at a store that is there before them.
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port}
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
            variables |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            of_ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in range(world_size)]
        forks = sys.platform == "linux" and not torch.cuda.is_available()
        words = [str(word) for word in words]
        self.processes = []
        for of_rank in of_ranks:
            # A connection can be handed to such a process, and a file cannot.
            pipes = []
            for given in (stdout, stderr):
                pipes.append(Connection(os.dup(file if given is None else given)))
            arguments = (Path(path), words, variables | of_rank, cwd, *pipes, forks)
            self.processes.append(ready_processes().Process(target=run_script, args=arguments))
            self.processes[-1].start()
            for pipe in pipes:
                pipe.close()
        os.close(file)

    def wait(self, timeout: float = 100) -> tuple[int, str]:
        """Exit status and output, once all have ended, or one with a failure.

        Fails if they do not end in time or leave a process behind.
        """
        deadline = time.monotonic() + timeout
        while alive := [process for process in self.processes if process.is_alive()]:
            if any(process.exitcode for process in self.processes):
                break
            if time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"still running after {timeout} s\n{self.read()}")
            sentinels = [process.sentinel for process in alive]
            multiprocessing.connection.wait(sentinels, deadline - time.monotonic())
        failed = [process.exitcode for process in self.processes if process.exitcode]
        if alive:
            self.kill()
        check_ended(self, self.read())
        return (failed or [0])[0], self.read()

    def read(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Wait until this text has been printed."""
        deadline = time.monotonic() + timeout
        while text not in self.read():
            if time.monotonic() > deadline or not self.processes[0].is_alive():
                pytest.fail(f"it has not said {text!r}\n{self.read()}")
            time.sleep(0.01)

    def left(self) -> list[int]:
        """The processes that it started, and that are alive; known on Linux."""
        leaders = {process.pid for process in self.processes}
        found = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                state, _, _, session, *_ = file.read_text().rpartition(")")[2].split()
                if int(session) in leaders and state != "Z":
                    found.append(int(file.parent.name))
        return found

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        kill_all(self.left())
