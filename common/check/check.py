r"""Is your own wrapper, sharded optimizer or FSDP right? Every check is a promise of the stages'.

    make check MINE=my_ddp.py:MyDDP [NPROC=2] [KIND=wrapper]
    python common/check/check.py my_ddp.py:MyDDP --nproc 3 --json results/check.json

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
from torch.optim import Optimizer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import report, setup  # noqa: E402
from common.check import checks_of_fsdp, checks_of_optimizers, checks_of_wrappers, runner  # noqa: E402

KINDS = {"wrapper": checks_of_wrappers, "optimizer": checks_of_optimizers, "fsdp": checks_of_fsdp}
HEADINGS = {
    "has to hold": "What has to hold",
    "beyond": "Beyond: more than the course asks, and partly more than torch's own classes do",
    "facts": "Facts",
}
WIDTH = 89  # of a line, beside its verdict
SECONDS = 8.0  # for one check
SECONDS_ONCE_STUCK = 2.5  # for those after one that hangs


def main() -> int:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended, too
    kind = load(args)
    result = head(args, kind)
    setup.say(
        f"{args.mine}, as {kind}: torch {torch.__version__}, {args.nproc} ranks, {args.backend}"
    )
    result["checks"] = run_checks(args, kind)
    result["passed"] = summarize(result["checks"])
    report.write_json(args.json, result)
    return 0 if result["passed"] else 1


def read_arguments():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("mine", metavar="MINE", help="FILE.py:NAME, a class or a function")
    add("--kind", choices=KINDS, help="by default what its base class and its arguments say")
    add("--nproc", type=setup.whole_number(2, 64), default=2, help="ranks")
    add("--json", type=setup.output_file, metavar="FILE", help="all verdicts, raw")
    parser.set_defaults(backend="gloo")
    return parser.parse_args()


def load(args) -> str:
    """Load the class; returns its kind. Its file may hang or end, so first in another process."""
    trial = runner.run(partial(kind_of, given=args.kind), args.mine, 1, "gloo", limit=60)
    if trial["verdict"] == "failed":
        for line in trial["lines"]:
            print(line, file=sys.stderr)
        reason = trial["seen"].removeprefix("rank 0: ").removeprefix("ValueError: ")
        setup.fail(f"argument MINE: {args.mine}: {reason}")
    if runner.FORKS:
        # The ranks inherit what is imported here: the class, and what the first optimizer imports.
        torch.set_num_threads(1)  # a process with more should not be forked
        setup.load(args.mine)
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return trial["seen"]


def kind_of(mine, given: str | None) -> str:
    """Its kind, given or found; ValueError if it cannot be called as the checks call it."""
    signature = inspect.signature(mine)
    names = list(signature.parameters)
    kind = "wrapper"
    if "compute_dtype" in names or hasattr(mine, "gather_full_params"):
        kind = "fsdp"
    if "params" in names[:1] or (isinstance(mine, type) and issubclass(mine, Optimizer)):
        kind = "optimizer"
    kind = given or kind
    arguments = ["params", "optimizer_cls"] if kind == "optimizer" else ["module"]
    options = {"bucket_size_mb": 25.0} if "bucket_size_mb" in names else {}
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"cannot be called with {', '.join(arguments)}: {error}") from None
    return kind


def head(args, kind: str) -> dict:
    """What every result of --json begins with, as common/README.md lists it."""
    result = {"stage": "check", "torch": torch.__version__, "backend": args.backend}
    result |= {"device": "cpu", "device_name": report.processor_name(), "world_size": args.nproc}
    result |= {"threads_per_rank": 1, "options": dict(vars(args)), "kind": kind}
    return result | {"started": datetime.now(timezone.utc)}


def run_checks(args, kind: str) -> list[dict]:
    """All checks in turn, each printed when it is over."""
    module = KINDS[kind]
    groups = {"has to hold": module.HAS_TO_HOLD, "beyond": module.BEYOND, "facts": module.FACTS}
    left = sum(len(checks) for checks in groups.values())
    crowd = max(1, args.nproc / setup.threads_per_rank(1))  # ranks that take turns on a core
    limit = SECONDS * crowd
    results = []
    for group, checks in groups.items():
        if checks:
            setup.say(f"\n{HEADINGS[group]}")
        for check in checks:
            promise = inspect.getdoc(check).splitlines()[0]
            setup.progress(f"{left} checks left: {promise}")
            left -= 1
            result = runner.run(check, args.mine, args.nproc, args.backend, limit)
            if result["seconds"] > limit:
                limit = SECONDS_ONCE_STUCK * crowd
            if group == "facts":
                result["verdict"] = result["verdict"].replace("failed", "not tried")
            result = {"check": check.__name__, "promise": promise, "group": group, **result}
            same = [each["check"] for each in results if each["means"] == result["means"] != ""]
            result["as_in"] = same[0] if same else None  # it has failed for the same reason
            results.append(result)
            show(result)
    return results


def show(result: dict) -> None:
    """A check: its verdict and promise, and what there is to say."""
    verdict = result["verdict"].replace("failed", "FAILED").replace("fact", "")
    texts = [result["promise"]]
    if result["as_in"]:
        texts = [f"{result['promise']} (as above: {result['means'].partition(': ')[0]})"]
    elif result["verdict"] == "failed":
        texts += [f"seen: {result['seen']}", f"mostly: {result['means']}"]
    elif result["seen"]:
        texts[0] += f": {result['seen']}"
    for text in texts:
        for line in textwrap.wrap(text, WIDTH):
            setup.say(f"{verdict:<10} {line}".rstrip())
            verdict = ""
    for line in [] if result["as_in"] else result["lines"]:
        setup.say(f"{'':<10} | {line}")


def summarize(results: list[dict]) -> bool:
    """Print how many checks of each group passed; returns whether all that has to hold holds."""
    setup.say()
    for group in ("has to hold", "beyond"):
        verdicts = [result["verdict"] for result in results if result["group"] == group]
        tried = len(verdicts) - verdicts.count("not tried")
        setup.say(f"{group}: {verdicts.count('passed')} of {tried} passed")
    return not any(r["verdict"] == "failed" for r in results if r["group"] == "has to hold")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the ranks are ended by then
        sys.exit("interrupted")
