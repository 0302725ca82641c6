"""07: compare two results of sweep.py: is TEST faster than BASELINE?

    python 07_resnet_ddp/sweep/sweep_diff.py baseline.json test.json

Takes results of PyTorch's benchmarks/distributed/ddp, too. Source: the diff.py beside PyTorch's
benchmark; unlike it, results are matched by model, batch size and number of ranks, not by their
place in the file, and what has no counterpart is named.
"""

import json
import sys
from pathlib import Path

import numpy

PERCENTILES = (75, 95)

# Of a result of sweep.py: what says nothing about why two results differ, or says it twice.
LEFT_OUT = ["stage", "torch", "backend", "started", "seconds", "benchmark_results"]
LEFT_OUT += ["--json", "--model", "--bucket-size-mb", "--backend", "--device", "--batch-size"]


def load(path: str) -> tuple[dict, dict]:
    """The header of a file, and its times.

    The times are {"MODEL with batch size N": {"no ddp" or "N ranks": [p75, p95]}}, in seconds.
    """
    from common.setup import fail

    try:
        with open(path) as file:
            result = json.load(file)
        header = dict(result)
        for name, value in header.pop("options", {}).items():
            header["--" + name.replace("_", "-")] = value
        header = {name: value for name, value in header.items() if name not in LEFT_OUT}
        benchmarks = {}
        for benchmark in result["benchmark_results"]:
            times = {}
            for i, entry in enumerate(benchmark["result"]):
                if i == 0:
                    name = "no ddp"
                else:
                    name = f"{len(entry['ranks'])} ranks"
                found = numpy.percentile(entry["measurements"], PERCENTILES)
                times[name] = [float(seconds) for seconds in found]
            name = f"{benchmark['model']} with batch size {int(benchmark['batch_size'])}"
            benchmarks[name] = times
    except OSError as error:
        fail(f"{path!r} cannot be read: {error.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fail(f"{path!r} is not a result of sweep.py ({type(error).__name__}: {error})")
    return header, benchmarks


def print_unmatched(baseline: dict, test: dict, before: str = "") -> None:
    """A line for every key that only one of the two has; each begins with `before`."""
    from common.setup import say

    for name in baseline:
        if name not in test:
            say(f"{before}only in the baseline: {name}")
    for name in test:
        if name not in baseline:
            say(f"{before}only in the test: {name}")


def print_benchmark(name: str, baseline: dict, test: dict) -> None:
    """The table of one model: {"no ddp" or "N ranks": [p75, p95]} of both, a line for each size."""
    from common.report import print_table
    from common.setup import say

    header = [""]
    for percentile in PERCENTILES:
        header += [f"p{percentile} sec/iter", "ex/sec", "change"]
    batch_size = int(name.split()[-1])
    rows = []
    for size in baseline:
        if size in test:
            row = [size]
            for before, after in zip(baseline[size], test[size], strict=True):
                change = 100 * (before - after) / before
                row += [f"{after:.4f}s", f"{batch_size / after:.1f}/s", f"{change:+.1f}%"]
            rows.append(row)
    say(f"\nBenchmark: {name}\n")
    print_table(header, rows)
    print_unmatched(baseline, test)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent), str(folder.parent.parent)]
    try:
        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ into {folder}")

    parser = setup.Parser(__doc__)
    parser.add_argument("baseline", metavar="BASELINE", help="what sweep.py --json wrote")
    parser.add_argument("test", metavar="TEST", help="the same, later or elsewhere")
    args = parser.parse_args()
    baseline_header, baseline = load(args.baseline)
    test_header, test = load(args.test)

    rows = []
    for name in dict.fromkeys([*baseline_header, *test_header]):
        rows.append([name, str(baseline_header.get(name, "-")), str(test_header.get(name, "-"))])
    report.print_table(["", "baseline", "test"], rows)
    print_unmatched(baseline, test, before="\n")
    for name in baseline:
        if name in test:
            print_benchmark(name, baseline[name], test[name])
    setup.say(
        "\nthe figures are TEST's; change: of the time, + is faster than BASELINE, - is slower"
    )


if __name__ == "__main__":
    main()
