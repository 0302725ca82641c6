r"""Is your own wrapper, sharded optimizer or FSDP right? Every check is a promise of the stages'.

    make check MINE=my_ddp.py:MyDDP [NPROC=2] [KIND=wrapper] [LEVEL=course] [LAYERS=my.model]
    make check MINE=tests/adapters.py                   (every function of a course's that is there)
    python common/check/check.py my_ddp.py:MyDDP --nproc 3 --json results/check.json

A wrapper is called as Mine(module), a sharded optimizer as Mine(params, optimizer_cls, **options),
FSDP as Mine(module) or Mine(module, compute_dtype=...); a function that returns it does as well.
Exit status: 0 if all that has to hold holds, 1 if not, 2 if the class cannot be called so.
"""

import importlib
import inspect
import signal
import sys
import textwrap
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import report, setup  # noqa: E402
from common.check import adapters, findings, runner  # noqa: E402
from common.check import checks_of_fsdp as fsdp  # noqa: E402
from common.check import checks_of_functions as functions  # noqa: E402
from common.check import checks_of_optimizers as optimizers  # noqa: E402
from common.check import checks_of_wrappers as wrappers  # noqa: E402

KINDS = {"wrapper": wrappers, "function": functions, "optimizer": optimizers, "fsdp": fsdp}
HEADINGS = {
    "course": "What a course's tests ask",
    "data parallelism": "What data parallelism means",
    "beyond": "Beyond, partly more than torch's own classes do",
    "facts": "Facts",
}
DECIDES = {"course": ["course"], "meaning": ["course", "data parallelism"]}  # by --level
WIDTH = 89  # of a line, beside its verdict
SECONDS = 8.0  # for one check
SECONDS_ONCE_STUCK = 2.5  # for those after one that hangs


def main() -> int:
    setup.forget_launcher()
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended, too
    setup.say(f"torch {torch.__version__}, {args.nproc} ranks, gloo on a network that is late")
    result = head(args)
    texts = [args.mine]
    if args.mine.endswith(".py"):
        names = trial(args.mine, adapters.names_in, setup.load_module)
        texts = [f"{args.mine}:{name}" for name in names]
    verdicts = [check_one(args, text, result) for text in texts]
    written = [verdict for verdict in verdicts if verdict is not None]
    result["passed"] = bool(written) and all(written)
    report.write_json(args.json, result)
    return 0 if result["passed"] else 1


def read_arguments():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("mine", metavar="MINE", help="FILE.py:NAME, class or function; or a course's adapters.py")
    add("--kind", choices=KINDS, help="by default what its base class and its arguments say")
    add("--level", choices=DECIDES, default="meaning", help="what decides the exit status")
    own = "a module with the Linear and Embedding that your FSDP shards (default: found)"
    add("--layers", default="", metavar="MODULE", help=own)
    add("--nproc", type=setup.whole_number(2, 64), default=2, help="ranks")
    add("--json", type=setup.output_file, metavar="FILE", help="all verdicts, raw")
    return parser.parse_args()


def head(args) -> dict:
    """What every result of --json begins with, as common/README.md lists it."""
    result = {"stage": "check", "torch": torch.__version__, "backend": "gloo"}
    result |= {"device": "cpu", "device_name": report.processor_name(), "world_size": args.nproc}
    result |= {"threads_per_rank": 1, "options": dict(vars(args))}
    return result | {"started": datetime.now(timezone.utc), "not_written": [], "checks": []}


def trial(text: str, function, load):
    """What a function says of what is loaded, in a process of its own: files may hang or end."""
    tried = runner.run(function, partial(load, text), 1, "gloo", limit=60)
    if tried["verdict"] == "failed":
        for line in tried["lines"]:
            print(line, file=sys.stderr)
        reason = tried["seen"].removeprefix("rank 0: ").removeprefix("ValueError: ")
        setup.fail(f"argument MINE: {text}: {reason}")
    return tried["seen"]


def check_one(args, text: str, result: dict) -> bool | None:
    """Whether what has to hold holds; None for what is not written yet."""
    kind, missing = trial(text, partial(describe, args.kind, args.layers), adapters.load_all)
    setup.say(f"\n{text}, as {kind}")
    for name in missing:
        setup.say(f"not written yet: {name}")
    if missing:
        result["not_written"] += missing
        return None
    if runner.FORKS:
        # The ranks inherit what is imported here: the class, and what the first optimizer imports.
        torch.set_num_threads(1)  # a process with more should not be forked
        setup.load(text)
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
    checks = run_checks(args, choose_form(args, text, kind), KINDS[kind])
    result["checks"] += [{"mine": text, "kind": kind, **check} for check in checks]
    return summarize(args, checks)


def describe(given: str | None, layers: str, found: list) -> tuple[str, list[str]]:
    """Its kind, given or found, and what of it is not written yet.

    ValueError if it cannot be called as the checks call it; any error if layers cannot.
    """
    if layers:
        importlib.import_module(layers).Linear(2, 2)
    kind = given or adapters.kind_of(found[0])
    arguments = ["params", "optimizer_cls"] if kind == "optimizer" else ["module"]
    signature = inspect.signature(setup.with_bucket_size(found[0], 25.0))
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(f"cannot be called with {', '.join(arguments)}: {error}") from None
    return kind, [name for each in found for name in adapters.not_written(each)]


def choose_form(args, text: str, kind: str):
    """A function that loads the class on a rank, with models that it bears, if there are some.

    An FSDP may shard only its own layers, keep float32, or refuse sizes that ranks do not divide.
    """

    def try_it(check, *form):
        load = partial(adapters.prepare, text, kind, *form)
        return load, runner.run(check, load, args.nproc, "late", SECONDS)

    layers = args.layers
    forms = [(bool(layers), torch.float64)]
    if kind == "fsdp":
        layers = layers or try_it(fsdp.own_layers)[1]["seen"]
        forms = product([True] if layers else [False, True], [torch.float64, torch.float32])
    tried = []
    for is_even, dtype in forms:
        tried.append(try_it(KINDS[kind].can_be_used, layers, is_even, dtype))
        load, result = tried[-1]
        if result["verdict"] == "passed":
            if layers:
                setup.say(f"models of the layers of {layers}, in sizes that the ranks divide")
            elif is_even:
                setup.say(f"refuses sizes that the ranks do not divide: {tried[0][1]['seen']}")
            if dtype == torch.float32:
                setup.say(
                    "judged in float32, gradients to 0.001 of their size, as it keeps float32 weights"
                )
            return load
    load, result = tried[0]
    if result["means"] == findings.UNUSABLE and text == args.mine:
        setup.fail(f"argument MINE: {text}: {result['seen'].partition(': ')[2]}")
    return load


def run_checks(args, load, module) -> list[dict]:
    """All checks in turn, each printed when it is over."""
    groups = [module.COURSE, module.MEANING, module.BEYOND, module.FACTS]
    crowd = max(1, args.nproc / setup.threads_per_rank(1))  # ranks that take turns on a core
    limit = SECONDS * crowd
    results = []
    for group, checks in zip(HEADINGS, groups, strict=True):
        if checks:
            setup.say(f"\n{HEADINGS[group]}")
        for check in checks:
            promise = inspect.getdoc(check).splitlines()[0]
            setup.progress(promise)
            network = "gloo" if group == "facts" else "late"
            result = runner.run(check, load, args.nproc, network, limit)
            if result["seconds"] > limit:
                limit = SECONDS_ONCE_STUCK * crowd
            if group == "facts" and result["verdict"] == "failed":
                continue
            result = {"check": check.__name__, "promise": promise, "group": group, **result}
            same = [each["check"] for each in results if each["means"] == result["means"] != ""]
            result["as_in"] = same[0] if same else None  # it has failed for the same reason
            results.append(result)
            show(result)
            if result["verdict"] == "failed" and check in (module.can_be_used, fsdp.splits_weights):
                setup.say("nothing else was tried")
                return results
    return results


def show(result: dict) -> None:
    """A check: its verdict and promise, and what there is to say."""
    verdict = result["verdict"].replace("failed", "FAILED")
    texts = [result["promise"]]
    lines = result["lines"]
    if result["group"] == "facts":
        verdict, lines = "", []  # what it prints was shown above
    if result["as_in"]:
        texts[0] += f" (as above: {result['means'].partition(': ')[0]})"
        lines = []
    elif result["verdict"] == "failed":
        texts += [f"seen: {result['seen']}", f"mostly: {result['means']}"]
    elif result["seen"]:
        texts[0] += f": {result['seen']}"
    for text in texts:
        for line in textwrap.wrap(text, WIDTH):
            setup.say(f"{verdict:<10} {line}".rstrip())
            verdict = ""
    for line in lines:
        setup.say(f"{'':<10} | {line}")


def summarize(args, results: list[dict]) -> bool:
    """Print what passed of each group, and what did not; whether all that decides holds."""
    setup.say()
    for group in ("course", "data parallelism", "beyond"):
        count(HEADINGS[group], [result for result in results if result["group"] == group])
    decisive = [result for result in results if result["group"] in DECIDES[args.level]]
    return count("has to hold", decisive)


def count(what: str, results: list[dict]) -> bool:
    verdicts = [result["verdict"] for result in results]
    tried = len(verdicts) - verdicts.count("not tried")
    text = f"{what}: {verdicts.count('passed')} of {tried} passed"
    wrong = [result["promise"] for result in results if result["verdict"] == "failed"]
    if wrong and what != "has to hold":
        text += f"; not: {wrong[0]}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
    for line in textwrap.wrap(text, WIDTH, subsequent_indent="    "):
        setup.say(line)
    return bool(results) and not wrong


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the ranks are ended by then
        sys.exit("interrupted")
