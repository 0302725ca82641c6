"""What tests of several folders check: classes on ranks, a script's output and files, faults."""

import contextlib
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tools.check.runner import judge, verdict_of
from common.setup import ROOT
from tools.processes import Forked, Script


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
LONG = ["--batch-size", "1", "--context-length", "8", "--steps", "1000000"]
# All-reduces of a step: the model has 15 parameters, and the first bucket is small.
NANO_CALLS = {
    "no communication": 0,
    "NaiveDDP": 15,
    "FlatDDP": 1,
    "OverlapDDP": 15,
    "BucketedDDP": 2,
    "torch DDP": 1,
}


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


def files_in(folder: Path) -> list:
    """The flags of all files that a script of the ladder can write."""
    words = []
    for name in ("json", "trace", "save"):
        words += [f"--{name}", folder / name]
    return words


HEAD = {  # of every JSON file; common/README.md explains it
    "stage": str,
    "torch": str,
    "backend": str | list,
    "device": str | list,
    "device_name": str | list,
    "world_size": int | list,
    "threads_per_rank": int | None,
    "options": dict,
    "started": str,
    "seconds": float,
}


def read_json(path: Path, stage: str) -> dict:
    """What --json wrote: strict JSON with the head that all have."""

    def no_constant(name):
        raise ValueError(f"{name} is not JSON")

    result = json.loads(path.read_text(), parse_constant=no_constant)
    for key, kind in HEAD.items():
        assert isinstance(result[key], kind), key
    assert result["stage"] == stage
    return result


ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ONLY_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


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
SHARED_MEMORY = Path("/dev/shm")


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


def is_of_others(path: Path) -> bool:
    """What Python and torch themselves leave in the temporary folder when they are killed.

    torchrun's logs; a file with which Python tries the folder out; before torch 2.12 modules that
    torch.distributed.nn generates at import.
    """
    if path.is_file():
        probe = re.fullmatch("[a-z0-9_]{8}", path.name)
        return bool(probe) and path.read_bytes() in (b"", b"blat")
    generated = {"_remote_module_non_scriptable.py", "__pycache__"}
    of_import = path.name.startswith("tmp") and names_in(path) <= generated
    return path.name.startswith("torchelastic_") or of_import


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
    left = [file.name for file in folder.iterdir() if not is_of_others(file)]
    assert not left, left
