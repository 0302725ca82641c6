"""What tests share: real ranks that run a function, scripts watched from outside, wrong input."""

import contextlib
import json
import multiprocessing.connection
import os
import pty
import random
import re
import runpy
import signal
import struct
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

from common.check.runner import judge, verdict_of
from common.recordings.record import output_of
from common.testing.forked_script import run_script

ROOT = Path(__file__).resolve().parent.parent.parent


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

    `make test BACKEND=shared` joins them by that backend.
    """

    def __init__(self, world_size: int):
        context = ready_processes()
        self.folder = tempfile.TemporaryDirectory()
        self.output = Path(self.folder.name, "output")
        self.pipes = []
        self.processes = []
        store = f"{self.folder.name}/store"
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments = (rank, world_size, store, theirs, self.output)
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


def _serve(rank: int, world_size: int, store: str, pipe, output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    backend = os.environ.get("BACKEND", "gloo")
    if backend == "shared":
        runpy.run_path(str(ROOT / "01_allreduce" / "shared_memory" / "with_shared.py"))
    dist.init_process_group(
        backend,
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


def judged(ranks, mine, checks: list, world_size: int = 2) -> dict[str, dict]:
    """The verdict of each check on a class, by the checks' names; the ranks are the fixture's."""
    of_ranks = ranks(world_size).run(_judge_all, mine, checks)
    verdicts = {}
    for check, *answers in zip(checks, *of_ranks, strict=True):
        verdicts[check.__name__] = verdict_of(dict(enumerate(answers)))
    return verdicts


def _judge_all(mine, checks: list) -> list[dict]:
    return [judge(check, mine) for check in checks]


def failed(verdicts: dict[str, dict]) -> set[str]:
    return {name for name, verdict in verdicts.items() if verdict["verdict"] == "failed"}


def check_ended(run, output: str) -> None:
    """Fails if a run that is over leaves a process behind."""
    deadline = time.monotonic() + 5
    while run.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = run.left()
    run.kill()
    assert not left, f"processes left behind: {left}\n{output}"


def kill_all(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class Script:
    """A running command; a mark in the environment finds everything that it started."""

    def __init__(self, command: list, **options):
        self.mark = f"TEST_MARK={os.getpid()}.{time.monotonic_ns()}"
        name, value = self.mark.split("=")
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", name: value}
        environment |= options.pop("env", {})
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
        if not Path("/proc/self/environ").exists():
            if self.process.poll() is not None:
                return []
            return [self.process.pid]
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

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

    def check_closed_pipe(self, world_size, path, *words, **options) -> str:
        """Its output is read for one line only, as by `head -1`: the run goes on, and ends well.

        Returns what it says on standard error.
        """
        ours, pipe = os.pipe()
        run = self.start(world_size, path, *words, stdout=pipe, **options)
        os.close(pipe)
        with open(ours) as output:
            output.readline()
        status, errors = run.wait()
        assert status == 0 and "Traceback" not in errors and "Broken" not in errors, errors
        return errors

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
        self.encoding = variables.get("PYTHONIOENCODING", "utf-8")
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
        return self.output.read_text(self.encoding)

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


def torchrun(world_size: int, *words) -> list:
    """The command line that starts a script on this many ranks of this host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", world_size, *words]


def make(*words) -> tuple[int, str]:
    """Exit status and output of make, with none of the variables of a make that runs the tests."""
    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    for name in ("NPROC", "ARGS", "PYTHON"):
        environment.pop(name, None)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.run(["make", *words], cwd=ROOT, env=environment, **output)
    return run.returncode, run.stdout


def would_make(*words) -> str:
    """What make would run."""
    status, output = make("-n", f"PYTHON={sys.executable}", *words)
    assert status == 0, output
    return output


def masked(output: str) -> list[str]:
    """The lines of an output with every number as # and blanks folded.

    This is its shape, which a recorded output shares.
    """
    number = re.compile(r"[-+]?\d[\d.,]*(e[-+]\d+)?(\+[a-z]+\d*)?")
    lines = []
    for line in output.splitlines():
        if not line.startswith(("written: ", "warning: ")):
            lines.append(" ".join(number.sub("#", line).split()))
    return lines


def check_script_alone(path: Path, folder: Path) -> None:
    """Copied into an empty folder it imports with torch alone, and says what else a run needs."""
    (folder / path.name).write_text(path.read_text())
    (folder / "alone.py").write_text(f"""
import runpy, sys
others = ["numpy", "matplotlib", "torchvision"]
hidden = {{name: module for name, module in sys.modules.items() if name.split(".")[0] in others}}
sys.modules.update(dict.fromkeys([*hidden, *others, "common"]))  # None: importing it fails
import {path.stem}
for name in [*others, "common"]:
    del sys.modules[name]
sys.modules.update(hidden)
runpy.run_path("{path.name}", run_name="__main__")
""")
    status, output = Forked(folder)(None, folder / "alone.py", cwd=folder)
    assert status == 1 and output.count("\n") == 1, output
    assert output.startswith("error: "), output
    assert "copy the repository's folder common/" in output, output


SHORT = ["--steps", "2", "--warmup", "1", "--batch-size", "1", "--context-length", "8"]
QUICK = ["--size", "nano", *SHORT]


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


# All-reduces of a step: the model has 15 parameters, which fit into one bucket.
NANO_CALLS = {
    "no sync": 0,
    "NaiveDDP": 15,
    "FlatDDP": 1,
    "OverlapDDP": 15,
    "BucketedDDP": 1,
    "torch DDP": 1,
    "torch DDP, tuned": 1,
}


def check_run(run, path: Path, folder: Path, world_size: int, device: str = "cpu") -> None:
    """The whole script, small: it prints what reference_output.txt shows, and writes every file.

    run: the fixture `forked` or `launched`.
    """
    words = [*QUICK, "--device", device, *files_in(folder)]
    status, output = run(world_size, path, *words, cwd=folder)
    assert status == 0, output
    check_output(output, path, folder, world_size, device)
    assert read_json(folder / "json", path.parent.name)["verify"]["accuracy"] > 0.9


def files_in(folder: Path) -> list:
    """The flags of all files that a script of the ladder can write."""
    words = []
    for name in ("json", "trace", "save"):
        words += [f"--{name}", folder / name]
    return words


def check_output(output: str, path: Path, folder: Path, world_size: int, device: str) -> None:
    """It is what reference_output.txt shows; and the files are right."""
    result = read_json(folder / "json", path.parent.name)
    recorded = output_of(path.parent / "reference_output.txt")
    recorded = recorded.replace("gloo on cpu", f"{result['backend']} on {device}")
    recorded = recorded.replace("tiny model", f"{result['model']['size']} model")
    assert masked(output) == masked(recorded), output
    gpu_per_rank = device == "cuda" and torch.cuda.device_count() >= world_size
    assert (result["backend"] == "nccl") == gpu_per_rank
    assert result["world_size"] == world_size
    assert result["verify"]["passed"]
    counts = {one["name"]: one["collectives_per_step"] for one in result["candidates"]}
    assert counts == {name: NANO_CALLS[name] for name in counts} and len(counts) == 4
    for one in result["candidates"]:
        for times in ("step_seconds", "exposed_comm_seconds", "optimizer_seconds"):
            assert [len(of_rank) for of_rank in one[times]] == world_size * [2], times
    assert len(torch.load(folder / "save", weights_only=True)) == 6
    trace = json.loads((folder / "trace").read_text())
    spans = {event["name"] for event in trace["traceEvents"]}
    assert {"forward", "backward", "sync", "optimizer"} <= spans


SCHEMA = ROOT / "common" / "README.md"


def read_json(path: Path, stage: str) -> dict:
    """What --json wrote: strict JSON, with the head that common/README.md promises."""

    def no_constant(name):
        raise ValueError(f"{name} is not JSON")

    result = json.loads(path.read_text(), parse_constant=no_constant)
    kinds = {"text": str, "number": (int, float), "list": list, "object": dict, "null": type(None)}
    rows = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \|", SCHEMA.read_text(), re.MULTILINE)
    assert {"stage", "options", "started", "seconds"} <= {key for key, _ in rows}
    for key, types in rows:
        assert any(isinstance(result[key], kinds[kind]) for kind in types.split(", ")), key
    assert result["stage"] == stage
    assert "T" in result["started"] or " " in result["started"], result["started"]
    return result


def wait_for_line(run: Script, start: str) -> None:
    """Read the run's output up to the line that begins so."""
    for line in run.process.stdout:
        if line.startswith(start):
            return
    pytest.fail(f"it ended without a line that starts with {start!r}")


def rank_1(run: Script) -> int:
    """The process of rank 1, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and run.process.poll() is None:
        for process in run.processes():
            with contextlib.suppress(OSError):
                if b"RANK=1" in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                    return process
    pytest.fail("there is no rank 1")


no_proc = not Path("/proc/self/environ").exists()
needs_proc = pytest.mark.skipif(no_proc, reason="finding the ranks needs /proc")
FAULTS = ["SIGKILL of a rank", "SIGTERM of the launcher", "Ctrl-C"]
LADDER_MOMENTS = ["", "verify: epoch 1", "verify: passed"]
LONG = ["--batch-size", "1", "--context-length", "8", "--steps", "1000000"]


def is_probe(path: Path) -> bool:
    """Python tries its temporary folder out with such a file.

    It stays if the process is killed in that very moment.
    """
    if not re.fullmatch("[a-z0-9_]{8}", path.name) or not path.is_file():
        return False
    return path.read_bytes() in (b"", b"blat")


SHARED_MEMORY = Path("/dev/shm")


def is_of_torch(path: Path) -> bool:
    """A folder that torch itself leaves when it is killed.

    torchrun's logs; before torch 2.12 also modules that torch.distributed.nn generates at import.
    """
    if path.name.startswith("torchelastic_"):
        return True
    generated = {"_remote_module_non_scriptable.py", "__pycache__"}
    return path.is_dir() and path.name.startswith("tmp") and names_in(path) <= generated


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def left_in(folder: Path, before: set[str]) -> set[str]:
    """What is new in a folder and stays: what other tests have there comes and goes."""
    left = names_in(folder) - before
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= names_in(folder)
    return left


def check_fault(
    script, command: list, moment: str, fault: str, folder: Path, find_victim=rank_1
) -> None:
    """The run is hit at that line of its output ("": when its ranks start).

    All of it ends, and leaves nothing behind.
    """
    memory = names_in(SHARED_MEMORY)
    compiler_cache = os.path.join(tempfile.gettempdir(), "torchinductor_of_tests")  # torch makes it
    environment = {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": compiler_cache}
    run = script(command, env=environment)
    if moment:
        wait_for_line(run, moment)
    else:
        find_victim(run)
    if fault == "SIGKILL of a rank":
        os.kill(find_victim(run), signal.SIGKILL)
    elif fault == "SIGTERM of the launcher":
        run.process.send_signal(signal.SIGTERM)
    else:
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    # Python swallows a Ctrl-C in its first milliseconds; then torchrun kills, after 30 s.
    status, output = run.wait(timeout=45)
    assert status != 0, output
    assert not left_in(SHARED_MEMORY, memory)
    left = []
    for file in folder.iterdir():
        if not is_of_torch(file) and not is_probe(file):
            left.append(file.name)
    assert not left, left


def check_stopped_rank(
    script, path: Path, *words, moment: str = "tiny model: ", place: str = "main > benchmark > "
) -> None:
    """A rank stops answering: the run ends after --timeout, and says who did not answer, where."""
    run = script(torchrun(2, path, "--timeout", "3", *words))
    victim = rank_1(run)
    wait_for_line(run, moment)
    os.kill(victim, signal.SIGSTOP)
    status, output = run.wait(timeout=60)
    assert status != 0
    message = rf"error: rank 0 waited more than --timeout 3 s in {place}.*; no answer from rank 1\n"
    assert re.search(message, output), output


def check_wrong_input(main, path: Path, option: str, value: str, monkeypatch, capsys) -> None:
    """One line names option and value; exit status 2. Not under torchrun, but as its only rank."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "argv", [str(path), option, value])
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert end.value.code == 2, error
    assert error.startswith(f"{path.name}: error: argument {option}: "), error
    assert error.count("\n") == 1 and value in error, error


def check_wrong_input_under_torchrun(script, path: Path) -> None:
    """Said once for all ranks, and not a success; torchrun's own report may follow."""
    status, output = script(torchrun(3, path, "--size", "huge")).wait(60)
    assert status != 0, output
    assert output.count("error: argument --size: ") == 1, output
    assert f'File "{path}"' not in output, output


def check_not_started_by_torchrun(main, path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1, error
    assert "start this script with torchrun --standalone" in error
