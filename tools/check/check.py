r"""Is your own wrapper, sharded optimizer or FSDP right? Every check is a promise of the stages'.

    make check MINE=my_ddp.py:MyDDP [NPROC=2] [KIND=wrapper] [LEVEL=course] [LAYERS=my.model]
    make check MINE=tests/adapters.py                   (every function of a course's that is there)
    python tools/check/check.py my_ddp.py:MyDDP --nproc 3 --json results/check.json

A wrapper is called as Mine(module), a sharded optimizer as Mine(params, optimizer_cls, **options),
FSDP as Mine(module) or Mine(module, compute_dtype=...); a function that returns it does as well.
Exit status: 0 if all that has to hold holds, 1 if not, 2 if the class cannot be called so.
"""

import inspect
import signal
import sys
import textwrap
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import report, setup  # noqa: E402
from tools.check import adapters, runner  # noqa: E402
from tools.check import checks_of_fsdp as fsdp  # noqa: E402
from tools.check import checks_of_functions as functions  # noqa: E402
from tools.check import checks_of_optimizers as optimizers  # noqa: E402
from tools.check import checks_of_wrappers as wrappers  # noqa: E402
from tools.check.findings import UNUSABLE  # noqa: E402

KINDS = {"wrapper": wrappers, "function": functions, "optimizer": optimizers, "fsdp": fsdp}
HEADINGS = {
    "course": "What a course's tests ask",
    "data parallelism": "What data parallelism means",
    "beyond": "Beyond, partly more than torch's own classes do",
    "facts": "Facts",
}
WIDTH = 89  # of a line, beside its verdict
SECONDS = 8.0  # for one check


def main() -> int:
    setup.forget_launcher()
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended, too
    setup.say(f"torch {torch.__version__}, {args.nproc} ranks, gloo on a network that is late")
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
    found = runner.run(1, "gloo", 60, adapters.describe, args.mine, args.kind, args.layers)
    if found["verdict"] == "failed":
        for line in found["lines"]:
            print(line, file=sys.stderr)
        reason = found["seen"].removeprefix("rank 0: ").removeprefix("ValueError: ")
        setup.fail(f"argument MINE: {args.mine}: {reason}")
    return found["seen"]


def choose_form(args, text: str, kind: str) -> tuple:
    """What adapters.prepare is given: an FSDP may shard only its own layers, or keep float32."""
    if runner.FORKS:
        # The ranks inherit what is imported here: the class, and what the first optimizer imports.
        torch.set_num_threads(1)  # a process with more should not be forked
        setup.load(text)
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
    on_ranks = partial(runner.run, args.nproc, "late", SECONDS, adapters.call)
    layers = args.layers
    if kind == "fsdp" and not layers:
        found = on_ranks(fsdp.own_layers, text, kind)
        layers = found["seen"] if found["verdict"] == "passed" else ""
    if layers:
        setup.say(f"models of the layers of {layers}")
    form = text, kind, layers
    tried = on_ranks(KINDS[kind].can_be_used, *form)
    if kind == "fsdp" and tried["verdict"] == "failed":
        with_float32 = *form, torch.float32
        if on_ranks(fsdp.can_be_used, *with_float32)["verdict"] == "passed":
            setup.say("judged in float32, to 0.001 of a gradient, as it keeps float32 weights")
            return with_float32
    if tried["means"] == UNUSABLE and text == args.mine:
        setup.fail(f"argument MINE: {text}: {tried['seen'].partition(': ')[2]}")
    return form


def run_checks(args, module, *form) -> list[dict]:
    """All checks in turn, each printed when it is over."""
    groups = [module.COURSE, module.MEANING, module.BEYOND, module.FACTS]
    results = []
    for group, checks in zip(HEADINGS, groups, strict=True):
        if checks:
            setup.say(f"\n{HEADINGS[group]}")
        for check in checks:
            promise = inspect.getdoc(check).splitlines()[0]
            setup.progress(promise)
            network = "gloo" if group == "facts" else "late"
            result = {"check": check.__name__, "promise": promise, "group": group}
            result |= runner.run(args.nproc, network, SECONDS, adapters.call, check, *form)
            known = {line for each in results for line in each["lines"]}  # such as a warning
            result["lines"] = [line for line in result["lines"] if line not in known]
            same = [each["check"] for each in results if each["means"] == result["means"] != ""]
            result["as_in"] = same[0] if same else None  # it has failed for the same reason
            if group == "facts":
                if result["verdict"] == "failed":
                    continue
                result |= {"verdict": "fact", "lines": []}  # what it prints was shown above
            results.append(result)
            show(result)
            if result["verdict"] == "failed" and check in (module.can_be_used, fsdp.splits_weights):
                setup.say("nothing else was tried")
                return results
    return results


def show(result: dict) -> None:
    """A check: its verdict and promise, and what there is to say."""
    verdict = result["verdict"].replace("failed", "FAILED").replace("fact", "")
    texts = [result["promise"]]
    if result["as_in"]:
        texts[0] += f" (as above: {result['means'].partition(': ')[0]})"
    elif result["verdict"] == "failed":
        texts += [f"seen: {result['seen']}", f"mostly: {result['means']}"]
    elif result["seen"]:
        texts[0] += f": {result['seen']}"
    if not result["as_in"]:
        texts += [f"| {line}" for line in result["lines"]]
    for text in texts:
        for line in textwrap.wrap(text, WIDTH):
            setup.say(f"{verdict:<10} {line}".rstrip())
            verdict = ""


def summarize(args, results: list[dict]) -> bool:
    """Print what passed of each group, and what did not; whether all that decides holds."""
    setup.say()
    decides = ["course"] if args.level == "course" else ["course", "data parallelism"]
    for groups in (["course"], ["data parallelism"], ["beyond"], decides):
        some = [result for result in results if result["group"] in groups]
        wrong = [result["promise"] for result in some if result["verdict"] == "failed"]
        passed = sum(result["verdict"] == "passed" for result in some)
        what = "has to hold" if groups is decides else HEADINGS[groups[0]]
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
