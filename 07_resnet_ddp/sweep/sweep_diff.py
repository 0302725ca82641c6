"""07: compare two results of sweep.py: is TEST faster than BASELINE?

    python 07_resnet_ddp/sweep/sweep_diff.py baseline.json test.json

It takes results of PyTorch's benchmarks/distributed/ddp, too. Unlike diff.py beside PyTorch's
benchmark, its source, it matches results by model, batch size and number of ranks, not by their
place in the file, and names what has no counterpart.
"""

import json
import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from common.report import print_table
from common.setup import Parser, fail, say


def read_result(path: str) -> tuple[dict, dict]:
    """Return a result, and {(model, batch size, "no ddp" or "N ranks"): [p75, p95] in s} of it."""
    try:
        result = json.loads(Path(path).read_text())
        times = {}
        for benchmark in result["benchmark_results"]:
            for i, entry in enumerate(benchmark["result"]):
                ranks = f"{len(entry['ranks'])} ranks" if i > 0 else "no ddp"
                key = (benchmark["model"], str(benchmark["batch_size"]), ranks)
                times[key] = numpy.percentile(entry["measurements"], (75, 95))
    except Exception as error:  # no file, no JSON, or another one
        fail(f"{path!r} is not a result of sweep.py ({error!r})")
    return result, times


def main():
    parser = Parser(__doc__)
    parser.add_argument("baseline", metavar="BASELINE", help="what sweep.py --json wrote")
    parser.add_argument("test", metavar="TEST", help="the same, later or elsewhere")
    args = parser.parse_args()
    result, baseline = read_result(args.baseline)
    test_result, test = read_result(args.test)
    names = "pytorch_version", "cuda_version", "distributed_backend", "bucket_size"
    settings = [[name, str(result[name]), str(test_result[name])] for name in names]
    print_table(["", "baseline", "test"], settings)

    header = ["model", "batch size", "ranks"]
    header += ["p75 sec/iter", "ex/sec", "change", "p95 sec/iter", "ex/sec", "change"]
    rows = []
    for key in [key for key in baseline if key in test]:
        row = [*key]
        for before, after in zip(baseline[key], test[key], strict=True):
            change = 100 * (before - after) / before
            row += [f"{after:.4f}s", f"{int(key[1]) / after:.1f}/s", f"{change:+.1f}%"]
        rows.append(row)
    say()
    print_table(header, rows)
    for key in sorted(baseline.keys() ^ test.keys()):
        say(f"only in the {'baseline' if key in baseline else 'test'}: {' '.join(key)}")
    say("\nseconds and examples are TEST's; change of the time: + is faster, - is slower")


if __name__ == "__main__":
    main()
