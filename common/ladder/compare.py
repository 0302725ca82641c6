"""One table and one picture of several --json files: of stages, or of `make compare`.

    python -m common.ladder.compare results/before.json results/after.json --plot results/change.png
    python -m common.ladder.compare results/run.json --per-rank        (is one of the ranks slower?)

The rungs on several networks, each with its label:

    python -m common.ladder.compare "shared memory"=results/shared.json \\
        loopback=results/compare.json "1 Gbit/s"=results/hosts.json --plot results/networks.png
"""

import json
import os
from pathlib import Path
from statistics import fmean

from common.ladder import draw_rungs
from common.report import milliseconds, print_table, ratio
from common.setup import Parser, fail, output_file, say

# Where these differ, the reader must know; of the options all but those that name files.
NOTED = ("torch", "backend", "device_name", "threads_per_rank")
FILES = ("json", "plot", "trace", "save")


def read(arguments: list[str]) -> dict[str, dict]:
    """The results by label, in order; each has "models" by size.

    Ends with one line if a file is no result or was measured on something else than the first.
    """
    results = {}
    for argument in arguments:
        label, _, path = argument.rpartition("=")  # [LABEL=]FILE
        label = label or path
        try:
            result = json.loads(Path(path).read_text())
            if "models" not in result:
                result["models"] = {result["model"]["size"]: result}
            results[label] = result
            found = conditions(result)
            check_samples(result)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            fail(f"{path}: is not a result of --json ({error!r})")
        first = next(iter(results))
        for key, expected in conditions(results[first]).items():
            if found[key] != expected:
                differ = f"their {key} differ: {found[key]} and {expected}"
                fail(f"{label}: cannot be compared with {first}, {differ}")
    return results


def conditions(result: dict) -> dict:
    """Where these differ, step times say nothing about the stages."""
    models = result["models"]
    found = {key: result[key] for key in ("world_size", "device")}
    found["models"] = {size: models[size]["model"] for size in models}
    found["baselines"] = [measured["candidates"][0]["name"] for measured in models.values()]
    return found


def check_samples(result: dict) -> None:
    """ValueError or TypeError, if a candidate has no numbers from some rank."""
    if result.get("options", {}) is None:
        raise ValueError("no options")
    for measured in result["models"].values():
        for candidate in measured["candidates"]:
            if not candidate["step_seconds"]:
                raise ValueError(f"no steps of {candidate['name']}")
            for steps in candidate["step_seconds"]:
                fmean(steps)  # raises if there is none, or something that is no number


def differences(results: dict[str, dict]) -> list[str]:
    """A line for everything else that is not the same in all of these results."""
    found = {}  # by what it is: the value in each result
    for label, result in results.items():
        for key in NOTED:
            found.setdefault(key, {})[label] = result.get(key)
        for key, value in result.get("options", {}).items():
            if key not in FILES:
                found.setdefault("--" + key.replace("_", "-"), {})[label] = value
    lines = []
    for key, values in found.items():
        shown = [f"{label}: {values.get(label)}" for label in results]
        if len({str(values.get(label)) for label in results}) > 1:
            lines.append(f"{key} differs: " + "; ".join(shown))
    return lines


def keep_what_all_have(results: dict[str, dict]) -> None:
    """Of runs of `make compare`: over another backend there are more candidates than over gloo."""
    measured = [of_size for result in results.values() for of_size in result["models"].values()]
    names = [{candidate["name"] for candidate in each["candidates"]} for each in measured]
    in_all = set.intersection(*names)
    for each in measured:
        each["candidates"] = [one for one in each["candidates"] if one["name"] in in_all]


def print_candidates(results: dict[str, dict], of_stages: bool) -> None:
    """A row for each model, file and candidate; of stages with the step in ms, too."""
    first = next(iter(results.values()))
    rows = []
    for size in first["models"]:
        for label, result in results.items():
            candidates = result["models"][size]["candidates"]
            seconds = {candidate["name"]: candidate["step_seconds"] for candidate in candidates}
            for candidate in candidates:
                step = candidate["step_seconds"]
                exposed = candidate.get("exposed_comm_seconds")
                row = [f"{size}, {label}", candidate["name"]]
                row.append(ratio(step, candidates[0]["step_seconds"]))
                row.append(milliseconds(exposed)[0] if exposed else "-")
                row.append(ratio(step, seconds.get("torch DDP")))
                row.append(str(candidate["collectives_per_step"]))
                if of_stages:
                    row.append(milliseconds(step)[0])
                rows.append(row)
    baseline = conditions(first)["baselines"][0]
    header = ["model, network", "rung", f"/{baseline}", "exposed, ms", "/torch DDP", "all-reduces"]
    if of_stages:
        header.append("step, ms")
    print_table(header, rows)
    say(f"p50 over all steps of all ranks; ratios to {baseline} and torch DDP of the same run.")


def spread(seconds: list[float]) -> list[str]:
    """Mean, min and max, in ms."""
    return [f"{1000 * value:.1f}" for value in (fmean(seconds), min(seconds), max(seconds))]


def print_per_rank(label: str, candidates: list[dict]) -> None:
    """A row for every candidate and rank: mean, min and max of its steps."""
    rows = []
    for candidate in candidates:
        for rank, steps in enumerate(candidate["step_seconds"]):
            row = [candidate["name"], str(rank), *spread(steps)]
            if "exposed_comm_seconds" in candidate:
                row += spread(candidate["exposed_comm_seconds"][rank])
            else:
                row += ["-"] * 3
            rows.append(row)
    say(f"\n{label}, by rank, in ms")
    print_table(["", "rank", "step", "min", "max", "exposed", "min", "max"], rows)
    say("step, exposed: means over the steps of one rank. In an all-reduce the ranks wait for the")
    say("slowest: its steps are as long as theirs, but it is the one that exposes least.")


def main() -> None:
    os.environ["RANK"] = "0"  # whatever the shell's is: this is the only process
    parser = Parser(__doc__)
    written_by = "written by --json, of one stage or of one `make compare` each"
    parser.add_argument("files", nargs="+", metavar="[LABEL=]FILE.json", help=written_by)
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="the picture, a PNG")
    per_rank = "also mean, min and max of every rank"
    parser.add_argument("--per-rank", action="store_true", help=per_rank)
    args = parser.parse_args()
    results = read(args.files)
    of_stages = all("candidates" in result for result in results.values())
    if of_stages:  # networks differ on purpose
        for line in differences(results):
            say(line)
    else:
        keep_what_all_have(results)
    print_candidates(results, of_stages)
    if args.per_rank:
        for label, result in results.items():
            for size, measured in result["models"].items():
                print_per_rank(f"{size}, {label}", measured["candidates"])
    if args.plot:
        draw_rungs.draw_networks(results, args.plot)


if __name__ == "__main__":
    main()
