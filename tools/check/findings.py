"""What a check has found: a sentence of what was seen, and one of what that usually means.

A check is a function that takes the user's class. It raises Failed, Warned or NotTried, or it
passes; a text that it returns is shown. The first line of its docstring is the promise.
"""

import gc
import os
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

PASSED, WARNED, FAILED, NOT_TRIED, STUCK = "passed", "warning", "failed", "not tried", "stuck"
GRAVEST_FIRST = FAILED, NOT_TRIED, STUCK, WARNED, PASSED  # a rank that refuses makes others wait
NOT_REDUCED = "never reduced, or read before it arrived: is the all-reduce called, and waited for?"
NOT_WAITED = "read before it arrived: an asynchronous call is not waited for, or not every one"
OF_TORCH = "an error from within torch: no line of the class was being run"
OWN_PART = "save one file per rank, and load it on the same rank, of as many"
UNUSABLE = "it cannot be called as the checks call it"
CHECK = Path(__file__).parent
LIBRARIES = Path(os.__file__).parent, Path(torch.__file__).parents[1]
OURS = CHECK, CHECK.parents[1] / "common", CHECK.parents[1] / "01_allreduce" / "slow_network"


class Answer(NamedTuple):
    """Holds what comes of a check."""

    verdict: str
    seen: str = ""
    means: str = ""


class Failed(Exception):
    """Raised as Failed(seen, means): what was seen, what that usually means."""


class Warned(Exception):
    """Raised as Failed is, for what its user has to know, and what is not wrong."""


class NotTried(Exception):
    """Raised as NotTried(why), or as NotTried(why, what to do) where it has to be tried."""


@contextmanager
def may_be_refused():
    """Within it a check need not hold if the class raises an error: only silence is wrong."""
    try:
        yield
    except (Failed, Warned, NotTried):
        raise
    except Exception as error:
        raise NotTried(f"it refuses: {type(error).__name__}: {error}") from error


def is_close(found: torch.Tensor, expected: torch.Tensor, of_float32: float = 1e-3) -> bool:
    """Say whether they differ by rounding alone, measured by the size of the whole tensor."""
    # A gradient in float32 is read from the step that it made, which is rounded, too.
    tolerance = 1e-10 if found.dtype == torch.float64 else of_float32
    return bool((found - expected).norm() <= tolerance * expected.norm())


def failure_of(names: list[str], found: dict, what: str, seen: str, means: str) -> Failed:
    """Return a Failed: the named ones of the found tensors are not what is expected."""
    some = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    return Failed(f"{len(names)} of {len(found)} {what} ({some}) {seen}", means)


def check_arrived(found: dict[str, torch.Tensor]) -> None:
    """Raise Failed if one of them holds NaN, which is what the late network leaves."""
    unread = [name for name, tensor in found.items() if tensor.isnan().any()]
    if unread:
        raise failure_of(unread, found, "tensors", "hold NaN", NOT_WAITED)


def alive(kind: type) -> list:
    """Return all objects of a class that came with the check, wherever they are kept."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def storages(dtype: torch.dtype | None = None) -> dict[int, int]:
    """Return {address: bytes} of the memory of all tensors, or of those of one dtype."""
    tensors = [each for each in alive(torch.Tensor) if not hasattr(each, "to_local")]
    found = [each.untyped_storage() for each in tensors if dtype in (None, each.dtype)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def judge(check, *arguments) -> Answer:
    """Call a check on this rank and return its answer."""
    gc.collect()
    gc.freeze()  # so that alive() finds only what comes with the check, and quickly
    try:
        return Answer(PASSED, check(*arguments) or "")
    except NotTried as reason:
        return Answer(NOT_TRIED, *reason.args)
    except Warned as warning:
        return Answer(WARNED, *warning.args)
    except Failed as failure:
        return Answer(FAILED, *failure.args)
    except BaseException as error:  # sys.exit(), too
        seen = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if line := line_of_user(traceback.extract_tb(error.__traceback__)):
            return Answer(FAILED, seen, f"see {line}")
        return Answer(
            FAILED, seen, UNUSABLE if isinstance(error, TypeError | AttributeError) else OF_TORCH
        )


def line_of_user(stack: traceback.StackSummary) -> str:
    """Return the user's own innermost line; empty if all are ours, torch's or Python's."""
    for frame in reversed(stack):
        path = Path(frame.filename)
        is_ours = is_within(path, (*LIBRARIES, *OURS)) and path.name != "mistakes.py"
        if path.is_file() and not is_ours:
            return f"{path.name}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


def is_within(file: str | Path, folders) -> bool:
    return not set(folders).isdisjoint(Path(file).parents)


def verdict_of(answers: dict[int, Answer]) -> Answer:
    """Return one verdict of all ranks: the gravest, and what was seen by those that have it."""
    verdict = min((each.verdict for each in answers.values()), key=GRAVEST_FIRST.index)
    ranks = [rank for rank in answers if answers[rank].verdict == verdict]
    told = answers[ranks[0]]
    if verdict in (FAILED, STUCK):
        ranks = ranks[:1] if verdict == FAILED else ranks
        seen = "; ".join(f"rank {rank}: {answers[rank].seen}" for rank in ranks)
        return Answer(FAILED, seen, told.means)
    return told
