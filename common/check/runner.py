"""Runs a check on ranks of its own: with a time limit, and with the line where a rank hangs.

On Linux the ranks are forked from this process, which has torch already; elsewhere each imports it.
"""

import faulthandler
import linecache
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common import setup
from common.check.findings import MIXED, Failed, NotTried

FORKS = sys.platform == "linux"
SECONDS_TO_START = 0 if FORKS else 30  # in which a rank imports torch
SECONDS_TO_FOLLOW = 1.0  # of the other ranks, once one has failed
LONGEST_LIFE = 300  # seconds of a rank, whatever becomes of the process that started it
ENDING = {signal.SIGINT, signal.SIGTERM}
KEPT_LINES = 3  # of what a rank prints
OTHER_SIZE = "Received data size doesn't match expected size"  # what gloo says of mixed calls
NOISE = "CPUAllocator.cpp"  # what torch's profiler says of memory from before it
CHECKS = Path(__file__).resolve().parent
NETWORK = CHECKS.parent.parent / "01_allreduce" / "slow_network"
NOT_OF_USERS = {
    CHECKS.parent,
    NETWORK,
    Path(os.__file__).parent,
    Path(torch.__file__).parent.parent,
}


def answer(verdict: str, seen="", means="", evidence=(), lines=()) -> dict:
    """What comes of a check: a verdict, what was seen, what that means, numbers, lines to show."""
    texts = {"verdict": verdict, "seen": seen, "means": means}
    return texts | {"evidence": list(evidence), "lines": list(lines)}


def judge(check, mine) -> dict:
    """Call a check on this rank; its answer."""
    try:
        return answer("passed", check(mine) or "")
    except NotTried as reason:
        return answer("not tried", str(reason))
    except Failed as failure:
        return answer("failed", *failure.args)
    except BaseException as error:  # sys.exit(), too
        seen = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        lines = lines_of_user("".join(traceback.format_tb(error.__traceback__)[::-1]))
        means = f"see {lines[0]}" if lines else "the class cannot be used as the check uses it"
        if isinstance(error, NotImplementedError) and lines and not str(error):
            seen, means = f"not written yet: {lines[0]}", "not written yet"
        return answer("failed", seen, means, lines=lines[1:])


def lines_of_user(stack: str) -> list[str]:
    """The user's lines in a stack, whose innermost is its first; never one of ours or torch's."""
    lines = []
    for file, line, name in re.findall(r'File "(.*)", line (\d+),? in (.*)', stack):
        if is_of_user(file):
            code = linecache.getline(file, int(line)).strip()
            lines.append(f"{Path(file).name}:{line} in {name}: {code}")
    return lines


def is_of_user(file: str) -> bool:
    """Neither of Python and its packages nor of the checks."""
    path = Path(file)
    is_ours = NOT_OF_USERS.intersection(path.parents) and path.name != "mistakes.py"
    return path.is_file() and not is_ours


def serve(check, load, rank: int, world_size: int, network: str, folder: Path, pipe) -> None:
    """A rank: joins the others, calls the check, tells what came of it, and waits for its end.

    It does not leave by itself: the others would miss it.
    """
    os.setsid()  # so that what the class starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    signal.alarm(LONGEST_LIFE)
    output = open(folder / f"output{rank}", "a")
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    stack = open(folder / f"stack{rank}", "a")
    # SIGUSR1 makes it write where it stands, and then it ends.
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False, chain=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    with setup.without_gloo_greeting():
        dist.init_process_group(
            setup.late_network() if network == "late" else "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=LONGEST_LIFE),
        )
    pipe.send(judge(lambda load: check(load()), load))
    with suppress(EOFError):
        pipe.recv()


def run(check, load, world_size: int, network: str, limit: float) -> dict:
    """Run a check on so many ranks, each a process; at most `limit` seconds.

    load(), on each of them, returns the user's class. network: gloo, or late.
    """
    began = time.perf_counter()
    context = multiprocessing.get_context("fork" if FORKS else "spawn")
    processes = []
    pipes = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            # Python ignores what a signal raises while it forks, and nobody would hear of it.
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            for rank in range(world_size):
                for file in (f"output{rank}", f"stack{rank}"):
                    (folder / file).touch()
                ours, theirs = context.Pipe()
                arguments = (check, load, rank, world_size, network, folder, theirs)
                processes.append(context.Process(target=serve, args=arguments))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            answers = collect(processes, pipes, SECONDS_TO_START + limit)
            stuck = [rank for rank in range(world_size) if rank not in answers]
            for rank in stuck:
                os.kill(processes[rank].pid, signal.SIGUSR1)
            for rank in stuck:
                processes[rank].join(2)
                answers[rank] = where_it_stood((folder / f"stack{rank}").read_text())
        finally:
            end(processes)
        result = verdict_of(answers)
        for rank in range(world_size):
            text = (folder / f"output{rank}").read_text(errors="replace")
            if OTHER_SIZE in text:
                result["means"] = MIXED
            lines = [line for line in text.splitlines() if line.strip() and NOISE not in line]
            last = lines[: -KEPT_LINES - 1 : -1]  # the last one first
            result["lines"] += [f"rank {rank} printed: {line[:120]}" for line in last]
    return result | {"seconds": time.perf_counter() - began}


def collect(processes: list, pipes: list, limit: float) -> dict[int, dict]:
    """What the ranks answer until the limit, in the order of time; who does not is missing."""
    answers = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + limit
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:  # it is no longer there
                processes[rank].join()
                code = processes[rank].exitcode
                how = f"ended with status {code}"
                if code < 0:
                    how = f"was ended by {signal.Signals(-code).name}"
                answers[rank] = answer("failed", f"it {how}", "the process ended in the class")
            if answers[rank]["verdict"] == "failed":
                deadline = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW)
    return answers


def where_it_stood(stack: str) -> dict:
    """The answer of a rank that has given none, from what faulthandler has written."""
    place = [*lines_of_user(stack), "a call of the check's own"][0]
    means = f"a rank waits for a collective that another one does not make: see {place}"
    return answer("stuck", f"hangs at {place}", means)


def verdict_of(answers: dict[int, dict]) -> dict:
    """One verdict of all ranks: the failure that came first, and where the others are stuck."""
    failed = [rank for rank in answers if answers[rank]["verdict"] == "failed"]
    told = failed[:1] + [rank for rank in answers if answers[rank]["verdict"] == "stuck"]
    if not told:
        return answers[0]
    seen = "; ".join(f"rank {rank}: {answers[rank]['seen']}" for rank in told)
    evidence = [numbers for rank in failed for numbers in answers[rank]["evidence"]]
    return answers[told[0]] | {"verdict": "failed", "seen": seen, "evidence": evidence}


def end(processes: list) -> None:
    """End the ranks and all that they have started."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()
