r"""Is your own wrapper, sharded optimizer, FSDP or loss right? Our promises, tried on it.

    make check MINE=my_ddp.py:MyDDP [NPROC=2] [KIND=wrapper] [LEVEL=course] [LAYERS=my.model]
    make check MINE=tests/adapters.py                   (every function of a course's that is there)
    make check MINE=loss.py:loss KIND=loss              (is it the mean of the ranks' losses?)
    python tools/check/check.py my_ddp.py:MyDDP --nproc 3 --json results/check.json

A wrapper is called as Mine(module), a sharded optimizer as Mine(params, optimizer_cls, **options),
FSDP as Mine(module) or Mine(module, compute_dtype=...); a function that returns it does as well.
Exit status: 0 if all that has to hold holds, 1 if not, 2 if the class cannot be called so.
"""

import inspect
import re
import signal
import sys
import textwrap
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import report, setup  # noqa: E402
from tools.check import adapters, runner  # noqa: E402
from tools.check import checks_of_fsdp as fsdp  # noqa: E402
from tools.check import checks_of_functions as functions  # noqa: E402
from tools.check import checks_of_losses as losses  # noqa: E402
from tools.check import checks_of_optimizers as optimizers  # noqa: E402
from tools.check import checks_of_wrappers as wrappers  # noqa: E402
from tools.check.findings import FAILED, NOT_TRIED, PASSED, UNUSABLE  # noqa: E402

KINDS = {"wrapper": wrappers, "function": functions, "optimizer": optimizers, "fsdp": fsdp}
KINDS["loss"] = losses
GROUPS = {
    "course": "What a course's tests ask",
    "data parallelism": "What data parallelism means",
    "beyond": "Beyond, partly more than torch's own classes do",
    "facts": "Facts",
}
FACT = "fact"  # a verdict that is none
LABELS = {PASSED: "passed", FAILED: "FAILED", NOT_TRIED: "not tried", FACT: ""}
WIDTH = 89  # of a line, beside its verdict
SECONDS = 8.0  # for one check


def main() -> int:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended, too
    place = "one process" if args.kind == "loss" else f"{args.nproc} ranks, gloo on a late network"
    setup.say(f"torch {torch.__version__}, {place}")
    result = {"stage": "check", "torch": torch.__version__, "backend": "gloo", "device": "cpu"}
    result |= {"device_name": report.processor_name(), "world_size": args.nproc}
    result |= {"threads_per_rank": 1, "options": dict(vars(args))}
    result |= {"started": datetime.now(timezone.utc), "not_written": [], "checks": []}
    passed = []
    for text, kind, missing in find(args):
        setup.say(f"\n{text}, as {kind}")
        for name in missing:
            setup.say(f"not written yet: {name}")
        result["not_written"] += missing
        if not missing:
            checks = run_checks(args, KINDS[kind], *choose_form(args, text, kind))
            result["checks"] += [{"mine": text, "kind": kind, **check} for check in checks]
            passed.append(summarize(args, checks))
    result["passed"] = bool(passed) and all(passed)
    report.write_json(args.json, result)
    return 0 if result["passed"] else 1


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
    add("--json", type=setup.output_file, metavar="FILE", help="all verdicts, raw")
    return parser.parse_args()


def find(args) -> list[tuple[str, str, list[str]]]:
    """What adapters.describe says, in a process of its own: a user's file may hang or end."""
    described = adapters.describe, args.mine, args.kind, args.layers
    is_loss = args.kind == "loss"
    found = runner.judge(*described) if is_loss else runner.run(1, "gloo", 60, *described)
    if found["verdict"] == FAILED:
        for line in found["lines"]:
            print(line, file=sys.stderr)
        cannot_be_used(args.mine, found)
    return found["seen"]


def cannot_be_used(text: str, found: dict) -> None:
    reason = re.sub(r"^(rank \d+: )?(ValueError: )?", "", found["seen"])
    setup.fail(f"argument MINE: {text}: {reason}")


def run_check(args, network: str, check, *form) -> dict:
    if args.kind == "loss":  # nothing of it needs ranks
        return runner.judge(adapters.call, check, *form)
    return runner.run(args.nproc, network, SECONDS, adapters.call, check, *form)


def choose_form(args, text: str, kind: str) -> tuple:
    """What adapters.prepare is given: an FSDP may shard only its own layers, or keep float32."""
    if runner.FORKS:
        # The ranks inherit what is imported here: the class, and what the first optimizer imports.
        torch.set_num_threads(1)  # a process with more should not be forked
        adapters.load(text)
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
    layers = args.layers
    if kind == "fsdp" and not layers:
        found = run_check(args, "late", fsdp.own_layers, text, kind)
        layers = found["seen"] if found["verdict"] == PASSED else ""
    if layers:
        setup.say(f"models of the layers of {layers}")
    form = text, kind, layers
    tried = run_check(args, "late", KINDS[kind].can_be_used, *form)
    if kind == "fsdp" and tried["verdict"] == FAILED:
        with_float32 = *form, torch.float32
        if run_check(args, "late", fsdp.can_be_used, *with_float32)["verdict"] == PASSED:
            setup.say("judged in float32, to 0.001 of a gradient, as it keeps float32 weights")
            return with_float32
    if tried["means"] == UNUSABLE and text == args.mine:
        cannot_be_used(text, tried)
    return form


def run_checks(args, module, *form) -> list[dict]:
    """All checks in turn, each printed when it is over."""
    groups = [module.COURSE, module.MEANING, module.BEYOND, module.FACTS]
    results, first_with = [], {}  # what a failure means: the check that has failed so first
    for group, checks in zip(GROUPS, groups, strict=True):
        if checks:
            setup.say(f"\n{GROUPS[group]}")
        for check in checks:
            promise = inspect.getdoc(check).splitlines()[0]
            setup.progress(promise)
            network = "gloo" if group == "facts" else "late"
            result = {"check": check.__name__, "promise": promise, "group": group, "as_in": None}
            result |= run_check(args, network, check, *form)
            has_failed = result["verdict"] == FAILED
            if group == "facts":
                if has_failed:
                    continue
                result |= {"verdict": FACT, "lines": []}  # what it prints was shown above
            if has_failed and result["means"] in first_with:
                result["as_in"] = first_with[result["means"]]
            first_with.setdefault(result["means"], check.__name__)
            known = {line for each in results for line in each["lines"]}  # such as a warning
            result["lines"] = [line for line in result["lines"] if line not in known]
            results.append(result)
            show(result)
            if has_failed and check in (module.can_be_used, fsdp.splits_weights):
                setup.say("nothing else was tried")
                return results
    return results


def show(result: dict) -> None:
    """A check: its verdict and promise, and what there is to say."""
    texts = [result["promise"]]
    if result["as_in"]:
        texts[0] += f" (as above: {result['means'].partition(': ')[0]})"
    elif result["verdict"] == FAILED:
        texts += [f"seen: {result['seen']}", f"usually: {result['means']}"]
    elif result["seen"]:
        texts[0] += f": {result['seen']}"
    if not result["as_in"]:
        texts += [f"| {line}" for line in result["lines"]]
    label = LABELS[result["verdict"]]
    for text in texts:
        for line in textwrap.wrap(text, WIDTH):
            setup.say(f"{label:<10} {line}".rstrip())
            label = ""


def summarize(args, results: list[dict]) -> bool:
    """Print what passed of each group, and what did not; whether all that decides holds."""
    setup.say()
    decides = ["course"] if args.level == "course" else ["course", "data parallelism"]
    for groups in (["course"], ["data parallelism"], ["beyond"], decides):
        some = [result for result in results if result["group"] in groups]
        wrong = [result["promise"] for result in some if result["verdict"] == FAILED]
        passed = sum(result["verdict"] == PASSED for result in some)
        what = "has to hold" if groups is decides else GROUPS[groups[0]]
        text = f"{what}: {passed} of {passed + len(wrong)} passed"
        if wrong and groups is not decides:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            text += f"; not: {wrong[0]}{more}"
        for line in textwrap.wrap(text, WIDTH, subsequent_indent="    "):
            setup.say(line)
    return bool(some) and not wrong


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the ranks are ended by then
        sys.exit("interrupted")
