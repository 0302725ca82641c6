"""07: compare two results of sweep.py (or of PyTorch's benchmarks/distributed/ddp): is TEST faster than BASELINE?

    python 07_resnet_ddp/sweep_diff.py baseline.json test.json

Needs numpy alone, no torch. Source: the diff.py beside PyTorch's benchmark; unlike it, results are matched by model,
batch size and number of ranks, not by their place in the file, and what has no counterpart is named.
"""

import argparse
import json
import sys

import numpy

PERCENTILES = (75, 95)


def load(path: str) -> tuple[dict, dict]:
    """The header of a file, and its times: {"MODEL with batch size N": {"no ddp" or "N ranks": (p75, p95)}}, seconds."""
    try:
        with open(path) as file:
            header = json.load(file)
        benchmarks = {}
        for benchmark in header.pop("benchmark_results"):
            times = {}
            for i, entry in enumerate(benchmark["result"]):
                name = "no ddp" if i == 0 else f"{len(entry['ranks'])} ranks"
                times[name] = [
                    float(time) for time in numpy.percentile(entry["measurements"], PERCENTILES)
                ]
            benchmarks[f"{benchmark['model']} with batch size {int(benchmark['batch_size'])}"] = (
                times
            )
    except OSError as error:
        fail(f"{path!r} cannot be read: {error.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fail(f"{path!r} is not a result of sweep.py ({type(error).__name__}: {error})")
    return header, benchmarks


def fail(message: str):
    print(f"sweep_diff.py: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def unmatched(baseline: dict, test: dict) -> list[str]:
    """The keys that only one of the two has, and which."""
    return [
        f"only in the {'baseline' if name in baseline else 'test'}: {name}"
        for name in [*baseline, *test]
        if (name in baseline) != (name in test)
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("baseline")
    parser.add_argument("test")
    parser.error = fail
    args = parser.parse_args()
    (baseline_header, baseline), (test_header, test) = load(args.baseline), load(args.test)

    print(f"{'':22}{'baseline':>22}{'test':>22}")
    for key in dict.fromkeys([*baseline_header, *test_header]):
        print(f"{key:22}{baseline_header.get(key, '-')!s:>22}{test_header.get(key, '-')!s:>22}")
    for line in unmatched(baseline, test):
        print(f"\n{line}")
    for name in baseline:
        if name not in test:
            continue
        batch_size = int(name.split()[-1])
        print(f"\nBenchmark: {name}\n")
        print(
            f"{'':10}"
            + "".join(f"{f'p{p} sec/iter':>16}{'ex/sec':>10}{'change':>10}" for p in PERCENTILES)
        )
        for size in baseline[name]:
            if size in test[name]:
                cells = [
                    f"{after:>15.4f}s{batch_size / after:>8.1f}/s{100 * (before - after) / before:>+9.1f}%"
                    for before, after in zip(baseline[name][size], test[name][size], strict=True)
                ]
                print(f"{size:10}" + "".join(cells))
        for line in unmatched(baseline[name], test[name]):
            print(line)
    print("\nthe figures are the test's; change: of the time, + the test is faster, - it is slower")


if __name__ == "__main__":
    main()
