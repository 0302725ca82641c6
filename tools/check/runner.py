"""Runs a check on ranks of its own: with a time limit, and with the line where a rank hangs.

On Linux the ranks are forked from this process, which has torch already; elsewhere each imports it.
"""

import linecache
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common import setup
from tools.check.findings import (
    FAILED,
    MIXED,
    NOT_TRIED,
    OF_TORCH,
    PASSED,
    STUCK,
    UNUSABLE,
    Failed,
    NotTried,
)
from tools.check.late import late_network

FORKS = sys.platform == "linux"
SECONDS_TO_START = 0 if FORKS else 30  # in which a rank imports torch
SECONDS_TO_WRITE = 0.5  # of a rank that hangs
SECONDS_TO_FOLLOW = 1.0  # of the other ranks, once one has failed
LONGEST_LIFE = 300  # seconds of a rank, whatever becomes of the process that started it
HANGS_AT = "Where the rank hangs:"
OTHER_SIZE = "Received data size doesn't match expected size"  # what gloo says of mixed calls
OF_TORCHS_C = re.compile(r"\[(rank\d+\]:\[)?[WIE]\d{4} ")  # how a line of torch's own log begins
NOT_THE_USERS = Path(__file__).parent, Path(os.__file__).parent, Path(torch.__file__).parents[1]


def answer(verdict: str, seen: str = "", means: str = "", lines=()) -> dict:
    """What comes of a check: a verdict, what was seen, what that means, lines to show."""
    return {"verdict": verdict, "seen": seen, "means": means, "lines": list(lines)}


def judge(check, *arguments) -> dict:
    """Call a check on this rank; its answer."""
    try:
        return answer(PASSED, check(*arguments) or "")
    except NotTried as reason:
        return answer(NOT_TRIED, str(reason))
    except Failed as failure:
        return answer(FAILED, *failure.args)
    except BaseException as error:  # sys.exit(), too
        seen = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        lines = lines_of_user("".join(traceback.format_tb(error.__traceback__)[::-1]))
        if lines:
            return answer(FAILED, seen, f"see {lines[0]}", lines[1:])
        return answer(FAILED, seen, UNUSABLE if isinstance(error, TypeError) else OF_TORCH)


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
    is_ours = set(NOT_THE_USERS).intersection(path.parents) and path.name != "mistakes.py"
    return path.is_file() and not is_ours


def serve(rank: int, world_size: int, limit: float, output: Path, pipe, call) -> None:
    """A rank: joins the others, calls the check, tells what came of it, and waits for its end.

    It does not leave by itself: the others would miss it.
    """
    os.setsid()  # so that what the class starts can be ended with it
    signal.alarm(LONGEST_LIFE)
    file = open(output, "a")
    for descriptor in (1, 2):
        os.dup2(file.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    # Not faulthandler's own timer: it reads a running thread's frames without Python's lock.
    where = threading.Timer(limit, print_stack, (threading.get_ident(), file))
    where.daemon = True
    where.start()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about the user's calls
    warnings.filterwarnings("ignore", module="torch")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    store = dist.FileStore(str(output.with_name("store")), world_size)
    member = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(late_network(), timeout=timedelta(seconds=LONGEST_LIFE), **member)
    pipe.send(judge(*call))
    with suppress(EOFError):
        pipe.recv()


def print_stack(thread: int, file) -> None:
    """Print where a thread stands, its innermost line first."""
    stack = traceback.format_stack(sys._current_frames()[thread])
    print(HANGS_AT, *stack[::-1], file=file, flush=True)


def run(world_size: int, limit: float, check, *arguments) -> dict:
    """Call check(*arguments) on ranks that are processes of their own, for at most limit seconds.

    Ranks that have to take turns on a core are given more time.
    """
    limit *= max(1, world_size / setup.threads_per_rank(1))
    context = multiprocessing.get_context("fork" if FORKS else "spawn")
    processes, pipes = [], {}  # a pipe to its rank
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"rank{rank}") for rank in range(world_size)]
        try:
            for rank, output in enumerate(outputs):
                output.touch()
                ours, theirs = context.Pipe()
                pipes[ours] = rank
                member = rank, world_size, limit, output, theirs, (check, *arguments)
                processes.append(context.Process(target=serve, args=member))
                processes[-1].start()
                theirs.close()
            answers = collect(processes, pipes, SECONDS_TO_START + limit + SECONDS_TO_WRITE)
            texts = [output.read_text(errors="replace") for output in outputs]
        finally:
            end(processes)
    printed = []
    for rank, text in enumerate(texts):
        of_rank, _, stack_then = text.partition(HANGS_AT)
        if rank not in answers:
            stack = lines_of_user(stack_then)
            place = stack[0] if stack else "a call of the check's own"
            means = f"a rank waits for a collective that another one does not make: see {place}"
            answers[rank] = answer(STUCK, f"hangs at {place}", means)
        lines = [line for line in of_rank.splitlines() if line.strip()]
        lines = [line for line in lines if not OF_TORCHS_C.match(line) and "[Gloo]" not in line]
        printed += [f"rank {rank} printed: {line[:120]}" for line in lines[:-4:-1]]
    result = verdict_of(answers)
    if any(OTHER_SIZE in text for text in texts):
        result["means"] = MIXED
    result["lines"] += printed
    return result


def collect(processes: list, pipes: dict, limit: float) -> dict[int, dict]:
    """What ranks answer until the limit, in the order of time; who does not is missing."""
    answers = {}
    deadline = time.monotonic() + limit
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(pipes), left):
            rank = pipes.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:  # it is no longer there
                processes[rank].join()
                code = processes[rank].exitcode
                how = f"status {code}" if code >= 0 else signal.Signals(-code).name
                means = "the process ended in the class"
                answers[rank] = answer(FAILED, f"it ended with {how}", means)
            if answers[rank]["verdict"] == FAILED:
                deadline = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW)
    return answers


def verdict_of(answers: dict[int, dict]) -> dict:
    """One verdict of all ranks: the failure that came first, else where some are stuck."""
    failed = [rank for rank in answers if answers[rank]["verdict"] == FAILED]
    told = failed[:1] or [rank for rank in answers if answers[rank]["verdict"] == STUCK]
    if not told:
        return answers[0]
    seen = "; ".join(f"rank {rank}: {answers[rank]['seen']}" for rank in told)
    return answers[told[0]] | {"verdict": FAILED, "seen": seen}


def end(processes: list) -> None:
    """End the ranks and all that they have started."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()
