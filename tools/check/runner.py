"""Calls functions on ranks that are processes of their own: where one hangs, it says at which line.

So `make check` runs its checks, and the tests what they try. On Linux a process is forked from one
that has torch already; elsewhere each imports it.
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection

import torch
import torch.distributed as dist

from common import setup
from tools.check.findings import FAILED, NOT_TRIED, STUCK, Answer, judge, line_of_user, verdict_of
from tools.check.late import late_network

FORKS = sys.platform == "linux"
SECONDS_TO_START = 30  # in which a process imports torch
LOOKS = 8  # at a rank, in the time in which it has to move
PATIENCE = 4  # times that time, for a rank that moves
LONGEST_LIFE = 600  # seconds of a call, whatever becomes of the process that asked for it
WAITS = "a rank waits for a collective that another one does not make"
SLOW = 'a slow or busy machine, or a loop without end: ARGS="--seconds {:.0f}" gives it more time'
OWN_CALL = "a call of the check's own"
ENDED = "the class ended it, or gloo did: do all ranks make the same calls in the same order?"


def start(context, output: str | None, function, *arguments) -> tuple:
    """Start a process that calls function(pipe, *arguments); return our end of the pipe, and it.

    What it prints goes into the file `output`; without one only errors, to nowhere.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=begin, args=(output, function, theirs, *arguments))
    process.start()
    theirs.close()  # so that recv() ends with EOFError when the process does
    return ours, process


def begin(output: str | None, function, *arguments) -> None:
    os.setsid()  # so that what it starts can be ended with it
    file = os.open(output or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 2)
    if output:
        os.dup2(file, 1)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # a line at once
    function(*arguments)


def end(processes) -> None:
    """End processes and all that they have started."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may have no group yet
    for process in processes:
        process.join()


class Ranks:
    """Ranks of gloo that stay, and answer one call after another.

    network: a context in which they meet. output: a file for what they print, if not here.
    """

    def __init__(self, context, world_size: int, network, output: str | None = None):
        self.context = context
        self.world_size = world_size
        self.network = network
        self.output = output
        self.processes = {}  # by our end of the pipe

    def call(self, limit: float, function, *arguments) -> dict[int, Answer]:
        """Return what a function answers on each rank. One that stays at a line so long is stuck.

        If one has not passed, the caller has to end all.
        """
        if not self.processes:
            self.folder = tempfile.TemporaryDirectory()
            for rank in range(self.world_size):
                member = rank, self.world_size, self.folder.name, self.network
                pipe, process = start(self.context, self.output, serve, *member)
                self.processes[pipe] = process
        for pipe in self.processes:
            pipe.send((limit, function, arguments))
        return collect(self.processes, limit)

    def end(self) -> None:
        end(self.processes.values())
        self.processes = {}


def serve(pipe, rank: int, world_size: int, folder: str, network) -> None:
    """Join the other ranks; call what is sent, and send the answer, until nobody asks.

    It does not leave by itself: the others would miss it.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="29500")  # as torchrun; nobody listens there
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    member = {"store": store, "rank": rank, "world_size": world_size}
    with network(), suppress(EOFError):
        with setup.without_gloo_greeting():
            dist.init_process_group("gloo", timeout=timedelta(seconds=LONGEST_LIFE), **member)
        while True:
            limit, function, arguments = pipe.recv()
            signal.alarm(LONGEST_LIFE)
            is_done = threading.Event()
            # Not faulthandler's timer: it reads a running thread's frames without Python's lock.
            of_thread = threading.get_ident(), limit, is_done, pipe
            watch = threading.Thread(target=tell_where_it_stands, args=of_thread, daemon=True)
            watch.start()
            answer = function(*arguments)
            is_done.set()
            watch.join()
            pipe.send(answer)
    os.killpg(0, signal.SIGKILL)  # and what it has started


def tell_where_it_stands(thread: int, limit: float, is_done: threading.Event, pipe) -> None:
    """Send again and again where a thread stands: the user's line, else all that has called it."""
    while not is_done.wait(limit / LOOKS):
        stack = traceback.extract_stack(sys._current_frames()[thread])
        *_, first = [number for number, frame in enumerate(stack) if frame.name == serve.__name__]
        stack = stack[first:]  # a fork has the frames of its parent, too
        line = line_of_user(stack)
        pipe.send((line or OWN_CALL, "" if line else str(stack)))


def collect(processes: dict, limit: float) -> dict[int, Answer]:
    """Return what ranks answer until one has failed, or until all others are stuck or slow.

    Looks are counted, and not seconds, because a busy machine wakes a rank late, too. Who sends
    none is stuck.
    """
    waiting = {pipe: rank for rank, pipe in enumerate(processes)}
    looks = {rank: [] for rank in waiting.values()}
    answers = {}
    while not all(is_stuck(looks[rank]) for rank in waiting.values()):
        ready = connection.wait(list(waiting), SECONDS_TO_START + PATIENCE * limit)
        for pipe in ready:
            rank = waiting[pipe]
            try:
                told = pipe.recv()
            except EOFError:  # it is no longer there
                processes[pipe].join()
                told = Answer(FAILED, f"it ended with status {processes[pipe].exitcode}", ENDED)
            if not isinstance(told, Answer):
                looks[rank].append(told)
                continue
            answers[rank] = told
            del waiting[pipe]
            if told.verdict in (FAILED, NOT_TRIED):
                return answers
        most = max(len(looks[rank]) for rank in looks)
        if not ready or most >= PATIENCE * LOOKS:
            break
    for rank in waiting.values():
        line, _ = looks[rank][-1] if looks[rank] else (OWN_CALL, "")
        answers[rank] = Answer(STUCK, f"hangs at {line}", f"{WAITS}: see {line}")
        if looks[rank] and not is_stuck(looks[rank]):
            seen = f"it still computes after {PATIENCE * limit:.0f} s, at {line}"
            answers[rank] = Answer(NOT_TRIED, seen, SLOW.format(2 * limit))
    return answers


def is_stuck(looks: list[tuple[str, str]]) -> bool:
    latest = looks[-LOOKS - 1 :]
    return len(latest) > LOOKS and len(set(latest)) == 1


def run(world_size: int, limit: float, check, *arguments) -> Answer:
    """Call check(*arguments) on new ranks, on the late network; return their verdict.

    Ranks that take turns on a core are given more time.
    """
    gc.freeze()  # a fork's search for garbage would copy the memory of all that is here
    limit *= max(1, world_size / setup.threads_per_rank(1))
    context = multiprocessing.get_context("fork" if FORKS else "spawn")
    ranks = Ranks(context, world_size, late_network)
    try:
        return verdict_of(ranks.call(limit, judge, check, *arguments))
    finally:
        ranks.end()
