r"""Is your own wrapper, sharded optimizer, FSDP or loss right? Our promises, tried on it.

    make check MINE=my_ddp.py:MyDDP [NPROC=2] [KIND=wrapper] [LEVEL=course] [LAYERS=my.model]
    make check MINE=tests/adapters.py                   (every function of a course's that is there)
    make check MINE=loss.py:loss KIND=loss              (is it the mean of the ranks' losses?)
    python tools/check/check.py my_ddp.py:MyDDP --nproc 3

A wrapper is called as Mine(module), a sharded optimizer as Mine(params, optimizer_cls, **options),
FSDP as Mine(module) or Mine(module, compute_dtype=...); a function that returns it does as well.
Exit status: 0 if all that has to hold holds, 1 if not, 2 if the class cannot be called so.
"""

import inspect
import re
import signal
import sys
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import setup  # noqa: E402
from tools.check import adapters, runner  # noqa: E402
from tools.check import checks_of_fsdp as fsdp  # noqa: E402
from tools.check import checks_of_functions as functions  # noqa: E402
from tools.check import checks_of_losses as losses  # noqa: E402
from tools.check import checks_of_optimizers as optimizers  # noqa: E402
from tools.check import checks_of_wrappers as wrappers  # noqa: E402
from tools.check.findings import FAILED, PASSED, UNUSABLE  # noqa: E402

KINDS = {"wrapper": wrappers, "function": functions, "optimizer": optimizers, "fsdp": fsdp}
KINDS["loss"] = losses
COURSE = "What a course's tests ask"
MEANING = "What data parallelism means"
BEYOND = "Beyond, partly more than torch's own classes do"
WIDTH = 89  # of a line, beside its verdict
SECONDS = 8.0  # for one check


def main() -> int:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended, too
    torch.set_num_threads(1)  # a process with more should not be forked
    place = "one process" if args.kind == "loss" else f"{args.nproc} ranks, gloo on a late network"
    setup.say(f"torch {torch.__version__}, {place}")
    passed = []
    for text, kind, missing in find(args):
        setup.say(f"\n{text}, as {kind}")
        for name in missing:
            setup.say(f"not written yet: {name}")
        if not missing:
            form = choose_form(args, text, kind)
            passed.append(summarize(args, run_checks(args, KINDS[kind], form)))
    return 0 if passed and all(passed) else 1


def read_arguments():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("mine", metavar="MINE", help="FILE.py:NAME, class or function; or a course's adapters.py")
    add("--kind", choices=KINDS, help="by default what its base class and its arguments say")
    levels = {"choices": ["course", "meaning"], "default": "meaning"}
    add("--level", **levels, help="what decides the exit status")
    own = "a module with the Linear and Embedding that your FSDP shards (default: found)"
    add("--layers", default="", metavar="MODULE", help=own)
    add("--nproc", type=setup.whole_number(2, 64), default=2, help="ranks")
    return parser.parse_args()


def find(args) -> list[tuple[str, str, list[str]]]:
    """What adapters.describe says, in a process of its own: a user's file may hang or end."""
    found = runner.run(1, 60, adapters.describe, args.mine, args.kind, args.layers)
    if found["verdict"] == FAILED:
        for line in found["lines"]:
            print(line, file=sys.stderr)
        cannot_be_used(args.mine, found)
    return found["seen"]


def cannot_be_used(text: str, found: dict) -> None:
    reason = re.sub(r"^(rank \d+: )?(ValueError: )?", "", found["seen"])
    setup.fail(f"argument MINE: {text}: {reason}")


def run_check(args, check, form: tuple) -> dict:
    if args.kind == "loss":  # nothing of it needs ranks
        return runner.judge(adapters.call, check, *form)
    return runner.run(args.nproc, SECONDS, adapters.call, check, *form)


def choose_form(args, text: str, kind: str) -> tuple:
    """What adapters.prepare is given: an FSDP may shard only its own layers, or keep float32."""
    adapters.load(text)  # so that the ranks, which are forked, have it and what optimizers import
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    layers = args.layers
    if kind == "fsdp" and not layers:
        found = run_check(args, fsdp.own_layers, (text, kind))
        layers = found["seen"] if found["verdict"] == PASSED else ""
    if layers:
        setup.say(f"models of the layers of {layers}")
    form = text, kind, layers
    tried = run_check(args, KINDS[kind].can_be_used, form)
    if kind == "fsdp" and tried["verdict"] == FAILED:
        with_float32 = *form, torch.float32
        if run_check(args, fsdp.can_be_used, with_float32)["verdict"] == PASSED:
            setup.say("judged in float32, to 0.001 of a gradient, as it keeps float32 weights")
            return with_float32
    if tried["means"] == UNUSABLE and text == args.mine:
        cannot_be_used(text, tried)
    return form


def run_checks(args, module, form: tuple) -> dict[str, list[str]]:
    """All checks in turn, each printed when it is over; the verdicts by their groups."""
    groups = {COURSE: module.COURSE, MEANING: module.MEANING, BEYOND: module.BEYOND}
    verdicts = {group: [] for group in groups}
    meanings = set()  # of failures that stand above
    for group, checks in groups.items():
        if checks:
            setup.say(f"\n{group}")
        for check in checks:
            promise = inspect.getdoc(check).splitlines()[0]
            setup.progress(promise)
            result = run_check(args, check, form)
            verdict, seen, means = result["verdict"], result["seen"], result["means"]
            verdicts[group].append(verdict)
            if verdict != FAILED:
                show(verdict, f"{promise}: {seen}" if seen else promise)
            elif means in meanings:
                show("FAILED", f"{promise} (as above: {means.partition(': ')[0]})")
            else:
                lines = [f"| {line}" for line in result["lines"]]
                show("FAILED", promise, f"seen: {seen}", f"usually: {means}", *lines)
                meanings.add(means)
            if verdict == FAILED and check in (module.can_be_used, fsdp.splits_weights):
                setup.say("nothing else was tried")
                return verdicts
    return verdicts


def show(label: str, *texts: str) -> None:
    for text in texts:
        for line in textwrap.wrap(text, WIDTH):
            setup.say(f"{label:<10} {line}".rstrip())
            label = ""


def summarize(args, verdicts: dict[str, list[str]]) -> bool:
    """Print how many of each group passed; whether all that decides holds."""
    setup.say()
    decides = [COURSE] if args.level == "course" else [COURSE, MEANING]
    right = of = 0
    for group, some in verdicts.items():
        passed = some.count(PASSED)
        tried = passed + some.count(FAILED)
        if some:
            setup.say(f"{group}: {passed} of {tried} passed")
        if group in decides:
            right, of = right + passed, of + tried
    setup.say(f"has to hold: {right} of {of} passed")
    return right == of


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the ranks are ended by then
        sys.exit("interrupted")
