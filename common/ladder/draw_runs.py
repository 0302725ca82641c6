"""The picture of several runs of make compare, drawn from their recording.

    python -m common.ladder.draw_runs common/ladder/reference_output_compare.txt \\
        --plot common/ladder/compare.png

Bars are medians, the lines on them go from the lowest run to the highest. (A run of make compare
draws its own picture, which has the optimizer's part, too.)
"""

import re
import sys
from pathlib import Path

from common.ladder.draw_rungs import COLORS, LABELS
from common.setup import Parser, output_file, say


def tables(text: str, head: str) -> list[dict[str, list[str]]]:
    """Every table whose first line begins so: its cells by the first one of their row."""
    found = []
    for table in re.findall(rf"^{head}.*\n((?:.+\n)+)", text, re.MULTILINE):
        rows = [re.split("  +", line) for line in table.splitlines()]
        found.append({cells[0]: cells[1:] for cells in rows if len(cells) > 1})
    return found


def draw(recording: Path, picture: Path) -> None:
    """A panel per model: a bar per candidate."""
    from matplotlib.figure import Figure

    text = recording.read_text()
    models = re.findall(r"^(\w+) model: (\S+ million parameters)", text, re.MULTILINE)[:2]
    steps = tables(text, "step, ms")
    medians, lowest, highest = tables(text, "step ÷ no sync")
    figure = Figure(figsize=(10, 4.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True)
    for number, (panel, (size, parameters)) in enumerate(zip(panels, models, strict=True)):
        column = 2 * number  # beside each ratio stands the number of all-reduces
        ratios = {name: float(cells[column]) for name, cells in medians.items()}
        exposed = []
        below = []
        above = []
        for name, ratio in ratios.items():
            exposed.append(ratio * float(steps[number][name][6].removesuffix(" %")) / 100)
            below.append(ratio - float(lowest[name][column]))
            above.append(float(highest[name][column]) - ratio)
        heights = list(ratios.values())
        rest = [height - part for height, part in zip(heights, exposed, strict=True)]
        labels = [LABELS[name] for name in ratios]
        if len(labels) > 8:  # narrow: neighbours would meet
            labels = [label.replace("bucketed", "25 MB") for label in labels]
        panel.bar(labels, rest, color=COLORS["compute"], width=0.65, label="compute, optimizer")
        panel.bar(
            labels,
            exposed,
            bottom=rest,
            yerr=[below, above],
            color=COLORS["exposed communication"],
            width=0.65,
            label="exposed: communication that is not hidden",
            error_kw={"linewidth": 1, "capsize": 3},
        )
        small = min(10, 100 / len(ratios))
        for place, (height, up) in enumerate(zip(heights, above, strict=True)):
            text_of = {"ha": "center", "va": "bottom", "fontsize": small}
            panel.text(place, height + up + 0.03, f"{height:.2f}", **text_of)
        panel.tick_params(axis="x", labelsize=small - 1.5)
        panel.axhline(1, color="black", linestyle=":", linewidth=1)
        panel.margins(y=0.1)
        tensors = medians["NaiveDDP"][column + 1]  # one all-reduce for each
        panel.set_title(f"{size}: {tensors} tensors, {parameters}", fontsize=11)
    panels[0].set_ylabel("step ÷ no sync")
    ranks = re.search(r"^rungs: .*, (\d+) ranks", text, re.MULTILINE)[1]
    runs = re.search(r"^lowest of (\d+) runs", text, re.MULTILINE)[1]
    spread = f"medians of {runs} runs, lines from the lowest to the highest"
    figure.suptitle(f"One training step of {ranks} processes: {spread}", fontsize=11)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(picture, format="png")
    say(f"written: {picture}")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("recording", type=Path, help="of several runs of make compare")
    plot = {"type": output_file, "metavar": "FILE", "required": True}
    parser.add_argument("--plot", **plot, help="picture, PNG")
    args = parser.parse_args()
    draw(args.recording, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
