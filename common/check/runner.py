"""Runs a check on ranks of its own: with a time limit, and with the line where a rank stands.

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
SECONDS_TO_START = 120  # where a rank has to import torch; a fork takes a tenth of a second
SECONDS_TO_FOLLOW = 1.0  # of the other ranks, once one has failed
LONGEST_LIFE = 300  # seconds of a rank, whatever becomes of the process that started it
ENDING = {signal.SIGINT, signal.SIGTERM}
KEPT_LINES = 3  # of what a rank prints
OTHER_SIZE = "Received data size doesn't match expected size"  # what gloo says of mixed calls
WAITS_IN_VAIN = "a rank waits for a collective that another one does not make"
NOISE = "CPUAllocator.cpp"  # what torch's profiler says of memory from before it
COMMON = Path(__file__).resolve().parent.parent


def judge(check, mine) -> dict:
    """Call a check on this rank: its verdict, what was seen, what that means."""
    try:
        facts = check(mine)
    except NotTried as reason:
        return {"verdict": "not tried", "seen": str(reason), "means": ""}
    except Failed as failure:
        return {"verdict": "failed", "seen": failure.seen, "means": failure.means}
    except BaseException as error:  # sys.exit(), too
        return {"verdict": "failed", **in_words(error)}
    verdict = "fact" if facts else "passed"
    return {"verdict": verdict, "seen": "; ".join(facts or []), "means": ""}


def in_words(error: BaseException) -> dict:
    """An exception: its message, and the lines that led to it, the innermost first."""
    message = "".join(traceback.format_exception_only(error))
    if isinstance(error, SyntaxError):
        message = f"SyntaxError: {error.msg} in line {error.lineno}: {error.text}"
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    own = [frame for frame in frames if is_of_user(frame.filename)]
    place = place_of((own or frames)[0])
    lines = [f"{place_of(frame)}: {frame.line}" for frame in own]
    return {"seen": " ".join(message.split())[:300], "means": f"see {place}", "lines": lines}


def place_of(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def is_of_user(filename: str) -> bool:
    """Neither of torch, nor of Python, nor of the checks."""
    of_python = {"site-packages", "dist-packages", Path(os.__file__).parent.name}
    if filename.startswith("<") or of_python & set(Path(filename).parts):
        return False
    return not is_of_checks(filename)


def is_of_checks(filename: str) -> bool:
    return COMMON in Path(filename).parents and Path(filename).name != "mistakes.py"


def serve(check, mine: str, rank: int, world_size: int, backend: str, folder: str, pipe) -> None:
    """A rank: joins the others, calls the check, tells what came of it, and waits to be let go."""
    os.setsid()  # Ctrl-C is for the process that started this one; and what it starts can be ended
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    signal.alarm(LONGEST_LIFE)
    sys.stdout = sys.stderr = output = open(f"{folder}/output{rank}", "a", buffering=1)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    stack = open(f"{folder}/stack{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    pipe.send("started")
    answer = judge(lambda text: join_and_call(check, text, rank, world_size, backend, folder), mine)
    sys.stdout.flush()
    pipe.send(answer)
    with suppress(EOFError):
        pipe.recv()  # until all have answered: who leaves early is missed
    if dist.is_initialized():
        dist.destroy_process_group()


def join_and_call(check, mine: str, rank: int, world_size: int, backend: str, folder: str):
    """Join the ranks, where there are some, and call the check."""
    if world_size > 1:
        with setup.without_gloo_greeting():
            dist.init_process_group(
                backend,
                store=dist.FileStore(f"{folder}/store", world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=LONGEST_LIFE),
            )
    return check(setup.load(mine))


def run(check, mine: str, world_size: int, backend: str, limit: float) -> dict:
    """Run a check on so many ranks, each a process; at most `limit` seconds."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork" if FORKS else "spawn")
        processes = []
        pipes = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                arguments = (check, mine, rank, world_size, backend, folder, theirs)
                processes.append(context.Process(target=serve, args=arguments, daemon=True))
                # Python ignores what a signal raises while it forks, and nobody would hear of it.
                signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
                processes[-1].start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
                theirs.close()
                pipes.append(ours)
            answers = collect(processes, pipes, limit)
            for rank in range(world_size):
                if rank not in answers:
                    answers[rank] = ask_where(processes[rank], Path(folder, f"stack{rank}"))
            for pipe in pipes:
                with suppress(OSError):
                    pipe.send("end")
            if all(answer["verdict"] not in ("failed", "stuck") for answer in answers.values()):
                for process in processes:
                    process.join(SECONDS_TO_FOLLOW)
        finally:
            end(processes)
        result = verdict_of(answers)
        result["lines"] += output_of(folder, world_size)
        if any(OTHER_SIZE in line for line in result["lines"]):
            result["means"] = MIXED
        return result | {"seconds": time.perf_counter() - began}


def collect(processes: list, pipes: list, limit: float) -> dict[int, dict]:
    """What the ranks answer until the limit, in the order of time; who does not is missing."""
    answers = {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + SECONDS_TO_START
    starting = len(pipes)
    while waiting and time.monotonic() < deadline:
        left = deadline - time.monotonic()
        for pipe in multiprocessing.connection.wait(list(waiting), left):
            try:
                answer = pipe.recv()
            except EOFError:
                answer = ended(processes[waiting[pipe]])
            if answer == "started":
                starting -= 1
                if starting == 0:
                    deadline = time.monotonic() + limit
                continue
            answers[waiting.pop(pipe)] = answer
            if answer["verdict"] == "failed":
                deadline = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW)
    return answers


def ended(process) -> dict:
    """A rank that is no longer there."""
    process.join()
    status = process.exitcode
    how = f"ended with status {status}"
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    return {"verdict": "failed", "seen": f"it {how}", "means": "the process ended in the class"}


def ask_where(process, file: Path) -> dict:
    """Where a rank stands that has not answered: its stack, written by faulthandler."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2
    text = ""
    while time.monotonic() < deadline and " in serve\n" not in text:
        time.sleep(0.01)
        text = file.read_text() if file.exists() else ""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', text.partition(" in serve\n")[0])
    own = [frame for frame in frames if is_of_user(frame[0])]
    checks = [frame for frame in frames if is_of_checks(frame[0])]
    if not own and not checks:  # it has answered meanwhile
        return {"verdict": "stuck", "seen": "has answered late", "means": ""}
    filename, line, name = (own or checks)[0]
    place = f"{Path(filename).name}:{line} in {name}"
    code = linecache.getline(filename, int(line)).strip()
    return {"verdict": "stuck", "seen": f"stands at {place}: {code}", "means": place}


def verdict_of(answers: dict[int, dict]) -> dict:
    """One verdict of all ranks: the failure that came first; a rank that is stuck says where."""
    stuck = {rank: answers[rank] for rank in answers if answers[rank]["verdict"] == "stuck"}
    places = [f"rank {rank} {answer['seen']}" for rank, answer in sorted(stuck.items())]
    failed = [rank for rank in answers if answers[rank]["verdict"] == "failed"]
    result = {"lines": []}
    if failed:
        first = answers[failed[0]]
        result |= first | {"seen": "; ".join([f"rank {failed[0]}: {first['seen']}", *places])}
    elif stuck:
        through = [f"rank {rank} is through" for rank in sorted(answers) if rank not in stuck]
        means = f"{WAITS_IN_VAIN}: see {next(iter(stuck.values()))['means']}"
        seen = f"it hangs: {'; '.join([*places, *through])}"
        result |= {"verdict": "failed", "seen": seen, "means": means}
    else:
        result |= answers[0]
    return result


def output_of(folder: str, world_size: int) -> list[str]:
    """The last lines that the ranks have printed, the last one first."""
    lines = []
    for rank in range(world_size):
        file = Path(folder, f"output{rank}")
        text = file.read_text(errors="replace") if file.exists() else ""
        printed = [line for line in text.splitlines() if line.strip() and NOISE not in line]
        lines += [f"rank {rank} printed: {line}" for line in printed[: -KEPT_LINES - 1 : -1]]
    return lines


def end(processes: list) -> None:
    """End the ranks and all that they have started."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()
        process.close()
