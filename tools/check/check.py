r"""Is your own wrapper, sharded optimizer, FSDP or loss right? Our promises, tried on it.

    make check MINE=my_ddp.py:MyDDP [NPROC=3] [KIND=wrapper] [LEVEL=course] [LAYERS=my.model]
    make check MINE=tests/adapters.py                   (every function of a course's that is there)
    make check MINE=loss.py:loss KIND=loss              (is it the mean of the ranks' losses?)
    python tools/check/check.py my_ddp.py:MyDDP --nproc 4

A wrapper is called as Mine(module), a sharded optimizer as Mine(params, optimizer_cls, **options),
FSDP as Mine(module) or Mine(module, compute_dtype=...), ZeRO2 as a wrapper whose optimizer gets its
`shards`; a function that returns it does as well.
Exit status: 0 if all that has to hold holds, 1 if not, 2 if the class cannot be called so.
"""

import inspect
import signal
import sys
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ROOT, ROOT / "01_allreduce" / "slow_network", ROOT / "05_bucketed" / "compare"
sys.path[:0] = [str(folder) for folder in FOLDERS]

from common import setup
from tools.check import adapters, runner
from tools.check import checks_of_fsdp as fsdp
from tools.check import checks_of_losses as losses
from tools.check import checks_of_optimizers as optimizers
from tools.check import checks_of_wrappers as wrappers
from tools.check import checks_of_zero2 as zero2
from tools.check.findings import FAILED, NOT_TRIED, PASSED, UNUSABLE, WARNED, Answer

KINDS = {"wrapper": wrappers, "optimizer": optimizers, "zero2": zero2, "fsdp": fsdp, "loss": losses}
COURSE = "What a course's tests ask"
MEANING = "What data parallelism means"
BEYOND = "Beyond: right classes may fail it, as torch's do unless asked (find_unused_parameters)"
WIDTH = 89  # of a line, beside its verdict


def main() -> int:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended, too
    torch.set_num_threads(1)  # a process with more should not be forked
    setup.say(f"torch {torch.__version__}, gloo on a late network")
    # In a process of its own: a user's file may hang or end.
    found = runner.run(1, 60, adapters.find, args.mine, args.kind, args.layers)
    if found.verdict != PASSED:
        setup.fail(f"argument MINE: {args.mine}: {found.seen}")
    mine = found.seen
    if mine.absent:
        setup.say(f"not installed, and left out: {', '.join(mine.absent)}")
    torch.optim.SGD([torch.zeros(1)])  # the ranks are forked: what this imports, they have
    passed = []
    for text, kind, missing in mine.classes:
        ranks = args.nproc or KINDS[kind].RANKS
        setup.say(f"\n{text}, as {kind}, ranks: {ranks}")
        for name in missing:
            setup.say(f"not written yet: {name}")
        if not missing:
            passed.append(run_checks(args, text, kind, ranks))
        elif kind == "fsdp":
            run_steps(args, text, ranks)
    return 0 if passed and all(passed) else 1


def read_arguments():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("mine", metavar="MINE", help="FILE.py:NAME, class or function; or a course's adapters.py")
    add("--kind", choices=KINDS, help="by default what its arguments, methods and name say")
    levels = {"choices": ["course", "meaning"], "default": "meaning"}
    add("--level", **levels, help="what decides the exit status")
    own = "a module with the Linear and Embedding that your FSDP shards (default: torch.nn)"
    add("--layers", default="", metavar="MODULE", help=own)
    seconds = "in which a rank has to get on, on a machine of its own"
    add("--seconds", type=setup.positive_number, default=8.0, help=seconds)
    ranks = "ranks (default: 3 of a wrapper or ZeRO2, 4 of a loss, else 2)"
    add("--nproc", type=setup.whole_number(2, 64), help=ranks)
    return parser.parse_args()


def run_checks(args, text: str, kind: str, ranks: int) -> bool:
    """Run and print all checks in turn; return whether all pass that have to."""
    checks = KINDS[kind]
    is_of_course = args.level == "course"
    meaning = f"Beyond the course: {MEANING.lower()}" if is_of_course else MEANING
    groups = [
        (COURSE, checks.COURSE, True),
        (meaning, checks.MEANING, not is_of_course),
        (BEYOND, checks.BEYOND, False),
    ]
    answers = []
    for title, promises, has_to_hold in groups:
        if promises:
            setup.say(f"\n{title}")
        for check in promises:
            promise = inspect.getdoc(check).splitlines()[0]
            setup.progress(promise)
            answer = runner.run(ranks, args.seconds, adapters.call, check, text, kind, args.layers)
            is_first = check is checks.can_be_used
            if is_first and answer.means == UNUSABLE and text == args.mine:
                setup.fail(f"argument MINE: {text}: {answer.seen}")
            show(promise, answer, has_to_hold)
            if is_first and answer.verdict in (FAILED, NOT_TRIED):
                setup.say("nothing else was tried")
                return False
            if has_to_hold:
                answers.append(answer)
    verdicts = [answer.verdict for answer in answers]
    passed = verdicts.count(PASSED) + verdicts.count(WARNED)
    untried = verdicts.count(NOT_TRIED)
    has_to = len([answer for answer in answers if answer.verdict != NOT_TRIED or answer.means])
    rest = f", {untried} not tried" if untried else ""
    setup.say(f"\nhas to hold: {passed} of {has_to} passed{rest}")
    return passed == has_to


def run_steps(args, text: str, ranks: int) -> None:
    """Run and print the checks of the steps that are written of an FSDP."""
    for check in fsdp.STEPS:
        answer = runner.run(ranks, args.seconds, adapters.call, check, text, "fsdp", args.layers)
        if NotImplementedError.__name__ in answer.seen:
            answer = Answer(NOT_TRIED, "not written yet")
        show(inspect.getdoc(check), answer, has_to_hold=True)
        if answer.verdict != PASSED:
            return


def show(promise: str, answer: Answer, has_to_hold: bool) -> None:
    """Print what came of a check. What fails and need not hold is a warning."""
    label = answer.verdict
    texts = [": ".join(filter(None, [promise, answer.seen, answer.means]))]
    if answer.verdict in (FAILED, WARNED):
        label = "FAILED" if answer.verdict == FAILED and has_to_hold else WARNED
        texts = [promise, f"seen: {answer.seen}", f"usually: {answer.means}"]
    for text in texts:
        for line in textwrap.wrap(text, WIDTH):
            setup.say(f"{label:<10} {line}")
            label = ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the ranks are ended by then
        sys.exit("interrupted")
