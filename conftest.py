"""What the tests share: real ranks that run a function, and a way to run a script and see that nothing is left of it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent


class Ranks:
    """`world_size` processes joined by gloo that stay alive between tests, so that torch is imported only once."""

    def __init__(self, world_size: int):
        spawn = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            mine, theirs = spawn.Pipe()
            self.processes.append(spawn.Process(
                target=_serve, args=(rank, world_size, f"{self.folder.name}/store", theirs), daemon=True))
            self.processes[-1].start()
            theirs.close()  # so that recv() ends with EOFError when the rank dies
            self.pipes.append(mine)

    def run(self, function, *arguments, timeout: float = 60) -> list:
        """Call function(*arguments) on every rank; the results by rank. Any rank's exception fails the test."""
        for pipe in self.pipes:
            pipe.send(sys.path)  # first, for it may be needed to find the function
            pipe.send((function, arguments))
        results, failures = [], []
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
                deadline = min(deadline, time.monotonic() + 5)  # the others may wait for this one in vain
        if failures:
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


def _serve(rank: int, world_size: int, store: str, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=30))
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


@pytest.fixture(scope="session")
def ranks():
    """ranks(n).run(function, *arguments): call a module-level function on n ranks of one gloo process group."""
    started = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started or not started[world_size].processes:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield get
    for group in started.values():
        group.end()


class Script:
    """A command that is running; everything it starts can be found again by a mark in the environment."""

    def __init__(self, command: list, **options):
        self.mark = f"TEST_MARK={os.getpid()}.{time.monotonic_ns()}"
        name, value = self.mark.split("=")
        environment = os.environ | {name: value, "PYTHONUNBUFFERED": "1"} | options.pop("env", {})
        self.process = subprocess.Popen([str(word) for word in command], env=environment, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **options)

    def processes(self) -> list[int]:
        """The processes of this command that are alive now (Linux; elsewhere only the first one is known)."""
        if not Path("/proc/self/environ").exists():
            return [] if self.process.poll() is not None else [self.process.pid]
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass  # it ended meanwhile
        return found

    def wait(self, timeout: float = 120) -> tuple[int, str]:
        """Exit status and output, once it has ended. Fails if it does not end in time or leaves a process behind."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"still running after {timeout} s: {self.process.args}\n{self.process.communicate()[0]}")
        deadline = time.monotonic() + 5
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self.processes()
        self.kill()
        assert not left, f"processes left behind: {left}\n{output}"
        return self.process.returncode, output

    def kill(self) -> None:
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture
def script():
    """script(command, …) starts a command as a Script and ends it with the test."""
    started = []

    def start(command: list, **options) -> Script:
        started.append(Script(command, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def torchrun(world_size: int, *words) -> list:
    """The command line that starts a script on this many ranks of this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world_size, *words]


def masked(output: str) -> list[str]:
    """The lines of an output with every number as # and blanks folded: its shape, which a recorded output shares."""
    return [" ".join(re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?(\+cu\d+)?", "#", line).split()) for line in output.splitlines()]
