"""07: compare two results of sweep.py: is TEST faster than BASELINE?

    python 07_resnet_ddp/sweep_diff.py baseline.json test.json

Takes results of PyTorch's benchmarks/distributed/ddp, too. Needs numpy alone, no torch. Source: the
diff.py beside PyTorch's benchmark; unlike it, results are matched by model, batch size and number
of ranks, not by their place in the file, and what has no counterpart is named.
"""

import argparse
import json
import os
import sys

import numpy

PERCENTILES = (75, 95)


# Of a result of sweep.py: what says nothing about why two results differ, or says it twice.
LEFT_OUT = ["stage", "torch", "backend", "started", "seconds", "benchmark_results"]
LEFT_OUT += ["--json", "--model", "--bucket-size-mb", "--backend", "--device", "--batch-size"]


def load(path: str) -> tuple[dict, dict]:
    """The header of a file, and its times.

    The times are {"MODEL with batch size N": {"no ddp" or "N ranks": [p75, p95]}}, in seconds.
    """
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


def fail(message: str):
    """Say in one line what is wrong and exit with status 2."""
    print(f"sweep_diff.py: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def print_unmatched(baseline: dict, test: dict, before: str = "") -> None:
    """A line for every key that only one of the two has; each begins with `before`."""
    for name in baseline:
        if name not in test:
            print(f"{before}only in the baseline: {name}")
    for name in test:
        if name not in baseline:
            print(f"{before}only in the test: {name}")


def print_benchmark(name: str, baseline: dict, test: dict) -> None:
    """The table of one model: {"no ddp" or "N ranks": [p75, p95]} of both, a line for each size."""
    header = f"{'':10}"
    for percentile in PERCENTILES:
        title = f"p{percentile} sec/iter"
        header += f"{title:>16}{'ex/sec':>10}{'change':>10}"
    print(f"\nBenchmark: {name}\n\n{header}")
    batch_size = int(name.split()[-1])
    for size in baseline:
        if size in test:
            line = f"{size:10}"
            for before, after in zip(baseline[size], test[size], strict=True):
                change = 100 * (before - after) / before
                line += f"{after:>15.4f}s{batch_size / after:>8.1f}/s{change:>+9.1f}%"
            print(line)
    print_unmatched(baseline, test)


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("baseline")
    parser.add_argument("test")
    parser.error = fail
    args = parser.parse_args()
    baseline_header, baseline = load(args.baseline)
    test_header, test = load(args.test)

    rows = [("", "baseline", "test")]
    for name in dict.fromkeys([*baseline_header, *test_header]):
        rows.append((name, str(baseline_header.get(name, "-")), str(test_header.get(name, "-"))))
    widths = [2 + max(20, *map(len, column)) for column in zip(*rows, strict=True)]
    for name, before, after in rows:
        print(f"{name:{widths[0]}}{before:>{widths[1]}}{after:>{widths[2]}}")
    print_unmatched(baseline, test, before="\n")
    for name in baseline:
        if name in test:
            print_benchmark(name, baseline[name], test[name])
    print("\nthe figures are the test's; change: of the time, + the test is faster, - it is slower")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # ? for what the output's encoding has not
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
