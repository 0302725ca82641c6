"""Runs a check on ranks of its own: with a time limit, and with the line where a rank hangs.

On Linux the ranks are forked from this process, which has torch already; elsewhere each imports it.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from common import setup
from tools.check.findings import FAILED, STUCK, Answer, judge, line_of_user, verdict_of
from tools.check.late import late_network

FORKS = sys.platform == "linux"
SECONDS_TO_START = 0 if FORKS else 30  # in which a rank imports torch
SECONDS_TO_TELL = 0.5  # where a rank hangs
LONGEST_LIFE = 300  # seconds of a rank, whatever becomes of the process that started it
WAITS = "a rank waits for a collective that another one does not make"
ENDED = "the class ended it, or gloo did: do all ranks make the same calls in the same order?"


def serve(rank: int, world_size: int, limit: float, folder: str, pipe, call) -> None:
    """Join the other ranks, call the check, tell what came of it, and wait to be ended.

    It does not leave by itself: the others would miss it.
    """
    os.setsid()  # so that what the class starts can be ended with it
    signal.alarm(LONGEST_LIFE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of torch
    sys.stdout.reconfigure(line_buffering=True)  # what the class prints is shown
    # Not faulthandler's own timer: it reads a running thread's frames without Python's lock.
    where = threading.Timer(limit, tell_where, (threading.get_ident(), pipe))
    where.daemon = True
    where.start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    member = {"store": store, "rank": rank, "world_size": world_size}
    with late_network():
        with setup.without_gloo_greeting():
            dist.init_process_group("gloo", timeout=timedelta(seconds=LONGEST_LIFE), **member)
        pipe.send(judge(*call))
        with suppress(EOFError):
            pipe.recv()


def tell_where(thread: int, pipe) -> None:
    """Send where a thread stands, as the rank's answer."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    line = line_of_user(stack) or "a call of the check's own"
    pipe.send(Answer(STUCK, f"hangs at {line}", f"{WAITS}: see {line}"))


def run(world_size: int, limit: float, check, *arguments) -> Answer:
    """Call check(*arguments) on ranks that are processes of their own, for at most limit seconds.

    Ranks that have to take turns on a core are given more time.
    """
    limit *= max(1, world_size / setup.threads_per_rank(1))
    context = multiprocessing.get_context("fork" if FORKS else "spawn")
    processes, pipes = [], {}  # a pipe to its rank
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                pipes[ours] = rank
                member = rank, world_size, limit, folder, theirs, (check, *arguments)
                processes.append(context.Process(target=serve, args=member))
                processes[-1].start()
                theirs.close()
            answers = collect(processes, pipes, SECONDS_TO_START + limit + SECONDS_TO_TELL)
        finally:
            end(processes)
    return verdict_of(answers)


def collect(processes: list, pipes: dict, limit: float) -> dict[int, Answer]:
    """Return what ranks answer until one has failed. Who is silent until the limit is stuck."""
    answers = {}
    deadline = time.monotonic() + limit
    while pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(pipes), left):
            rank = pipes.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:  # it is no longer there
                processes[rank].join()
                seen = f"it ended with status {processes[rank].exitcode}"
                answers[rank] = Answer(FAILED, seen, ENDED)
            if answers[rank].verdict == FAILED:
                return answers
    return answers | {rank: Answer(STUCK, "hangs", WAITS) for rank in pipes.values()}


def end(processes: list) -> None:
    """End the ranks and all that they have started."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()
