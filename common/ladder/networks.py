"""The rungs on several networks: one table and one picture of files that rungs.py wrote.

    python -m common.ladder.networks loopback=results/compare.json "1 Gbit/s"=results/hosts.json \\
        --plot results/networks.png

A row of the table is a rung on one network with one model, in steps without synchronization of the
same run. The picture has a row of panels for each model and a column for each network.
"""

import json
import os
import sys
from pathlib import Path

from matplotlib.figure import Figure

from common import report, rungs, setup


def read(argument: str) -> tuple[str, dict]:
    """The name of a network and its result; ends with one line if there is none."""
    name, _, path = argument.rpartition("=")
    try:
        result = json.loads(Path(path).read_text())
        for of_size in result["models"].values():
            rungs.medians(of_size)
        return name or Path(path).stem, result
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        setup.fail(f"{path}: is not a result of rungs.py --json ({type(error).__name__}: {error})")


def about(result: dict, key: str) -> str:
    """What results must share to stand beside each other, as text."""
    if key == "models":
        return str({size: of_size["model"] for size, of_size in result["models"].items()})
    return str(result[key])


def print_networks(results: dict[str, dict]) -> None:
    """A row for each model, network and rung."""
    rows = []
    for size in next(iter(results.values()))["models"]:
        for network, result in results.items():
            candidates = result["models"][size]["candidates"]
            bar = next(one for one in candidates if one["name"] == "torch DDP")["step_seconds"]
            of_size = rungs.medians(result["models"][size])
            for one in candidates:
                exposed = report.milliseconds(one["exposed_comm_seconds"])[0]
                row = [f"{size}, {network}", one["name"], f"{of_size[one['name']]['step']:.3f}"]
                row += [exposed, report.ratio(one["step_seconds"], bar)]
                rows.append([*row, str(one["collectives_per_step"])])
    header = ["model, network", "rung", "/no sync", "exposed, ms", "/torch DDP", "all-reduces"]
    report.print_table(header, rows)
    setup.say("p50 over all steps of all ranks; ratios to no sync and torch DDP of the same run.")


def draw(results: dict[str, dict], path: Path) -> None:
    """A row of panels for each model, a column for each network."""
    sizes = list(next(iter(results.values()))["models"])
    figure = Figure(figsize=(4.2 * len(results), 3.6 * len(sizes)), dpi=100, layout="constrained")
    grid = figure.subplots(len(sizes), len(results), sharey="row", squeeze=False)
    for panels, size in zip(grid, sizes, strict=True):
        for panel, (network, result) in zip(panels, results.items(), strict=True):
            rungs.draw_panel(panel, rungs.medians(result["models"][size]))
            panel.set_title(f"{size}, {network}", fontsize=11)
        panels[0].set_ylabel("median step ÷ no sync")
    rungs.finish_figure(figure, grid[0][0], "One training step of each rung on each network", path)


def main() -> None:
    os.environ["RANK"] = "0"  # whatever the shell's is: this is the only process
    parser = setup.Parser(__doc__)
    written_by = "a network's name and what rungs.py --json wrote"
    parser.add_argument("files", nargs="+", metavar="NAME=FILE.json", help=written_by)
    parser.add_argument("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    args = parser.parse_args()
    results = dict(read(argument) for argument in args.files)
    if len(results) < len(args.files):
        setup.fail("argument NAME=FILE.json: two networks have the same name")
    for key in ("world_size", "device", "backend", "models"):
        found = {network: about(result, key) for network, result in results.items()}
        if len(set(found.values())) > 1:
            shown = "; ".join(f"{network}: {value}" for network, value in found.items())
            setup.fail(f"argument NAME=FILE.json: their {key} differ: {shown}")
    print_networks(results)
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    sys.exit(main())
