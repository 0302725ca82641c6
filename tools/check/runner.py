"""Runs a check on ranks of its own: with a time limit, and with the line where a rank hangs.

On Linux the ranks are forked from this process, which has torch already; elsewhere each imports it.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from common import setup
from tools.check.findings import FAILED, NOT_TRIED, STUCK, Answer, judge, line_of_user, verdict_of
from tools.check.late import late_network

FORKS = sys.platform == "linux"
SECONDS_TO_START = 0 if FORKS else 30  # in which a rank imports torch
LOOKS = 8  # at a rank, in the time in which it has to move
PATIENCE = 4  # times that time, for a rank that moves
LONGEST_LIFE = 600  # seconds of a rank, whatever becomes of the process that started it
WAITS = "a rank waits for a collective that another one does not make"
SLOW = 'a slow or busy machine, or a loop without end: ARGS="--seconds {:.0f}" gives it more time'
OWN_CALL = "a call of the check's own"
ENDED = "the class ended it, or gloo did: do all ranks make the same calls in the same order?"


def serve(rank: int, world_size: int, limit: float, folder: str, pipe, call) -> None:
    """Join the other ranks, call the check, tell what came of it, and wait to be ended.

    It does not leave by itself: the others would miss it.
    """
    os.setsid()  # so that what the class starts can be ended with it
    signal.alarm(LONGEST_LIFE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of torch
    sys.stdout.reconfigure(line_buffering=True)  # what the class prints is shown
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="29500")  # as torchrun; nobody listens there
    torch.set_num_threads(1)
    is_done = threading.Event()
    # Not faulthandler's own timer: it reads a running thread's frames without Python's lock.
    of_thread = threading.get_ident(), limit, is_done, pipe
    watch = threading.Thread(target=tell_where_it_stands, args=of_thread, daemon=True)
    watch.start()
    store = dist.FileStore(f"{folder}/store", world_size)
    member = {"store": store, "rank": rank, "world_size": world_size}
    with late_network():
        dist.init_process_group("gloo", timeout=timedelta(seconds=LONGEST_LIFE), **member)
        answer = judge(*call)
        is_done.set()
        watch.join()
        pipe.send(answer)
        with suppress(EOFError):
            pipe.recv()


def tell_where_it_stands(thread: int, limit: float, is_done: threading.Event, pipe) -> None:
    """Send again and again where a thread stands: the user's line, else all that has called it."""
    while not is_done.wait(limit / LOOKS):
        stack = traceback.extract_stack(sys._current_frames()[thread])
        *_, begin = [number for number, frame in enumerate(stack) if frame.name == serve.__name__]
        stack = stack[begin:]  # a fork has the frames of its parent, too
        line = line_of_user(stack)
        pipe.send((line or OWN_CALL, "" if line else str(stack)))


def run(world_size: int, limit: float, check, *arguments) -> Answer:
    """Call check(*arguments) on ranks that are processes of their own, and have to move.

    A rank is stuck if it stays at one line for `limit` seconds. Ranks that take turns on a core
    are given more time.
    """
    gc.freeze()  # a fork's search for garbage would copy the memory of all that is here
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
            answers = collect(processes, pipes, limit)
        finally:
            end(processes)
    return verdict_of(answers)


def collect(processes: list, pipes: dict, limit: float) -> dict[int, Answer]:
    """Return what ranks answer until one has failed, or until all others are stuck or slow.

    Looks are counted, and not seconds, because a busy machine wakes a rank late, too. Who sends
    none is stuck.
    """
    answers, looks = {}, {rank: [] for rank in pipes.values()}
    while not all(is_stuck(looks[rank]) for rank in pipes.values()):
        ready = multiprocessing.connection.wait(list(pipes), SECONDS_TO_START + PATIENCE * limit)
        for pipe in ready:
            rank = pipes[pipe]
            try:
                told = pipe.recv()
            except EOFError:  # it is no longer there
                processes[rank].join()
                told = Answer(FAILED, f"it ended with status {processes[rank].exitcode}", ENDED)
            if not isinstance(told, Answer):
                looks[rank].append(told)
                continue
            answers[rank] = told
            del pipes[pipe]
            if told.verdict in (FAILED, NOT_TRIED):
                return answers
        if not ready or any(len(looks[rank]) >= PATIENCE * LOOKS for rank in pipes.values()):
            break
    for rank in pipes.values():
        line, _ = looks[rank][-1] if looks[rank] else (OWN_CALL, "")
        answers[rank] = Answer(STUCK, f"hangs at {line}", f"{WAITS}: see {line}")
        if looks[rank] and not is_stuck(looks[rank]):
            seen = f"it still computes after {PATIENCE * limit:.0f} s, at {line}"
            answers[rank] = Answer(NOT_TRIED, seen, SLOW.format(2 * limit))
    return answers


def is_stuck(looks: list[tuple[str, str]]) -> bool:
    return len(looks) > LOOKS and len(set(looks[-LOOKS - 1 :])) == 1


def end(processes: list) -> None:
    """End the ranks and all that they have started."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()
