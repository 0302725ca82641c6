"""01: the plain ring as a moving picture, in which chunks travel from rank to rank.

    python 01_allreduce/ring.py             (draws results/ring.gif, in seconds)

Three ranks with the page's numbers send what plain_ring_all_reduce sends, step by step.
"""

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pictures import COLORS, save_movie

from common import report, setup

TENSORS = [[4, 1, 2], [5, 3, 1], [8, 2, 6]]  # of ranks 0, 1 and 2
REDUCE, GATHER = COLORS["reduce-scatter"], COLORS["all-gather"]
FRAMES_PER_STEP = 7


def schedule(tensors: list[list[int]]) -> list[tuple[list, list]]:
    """Return the ranks' tensors before each step, and the (chunk, value) that each rank sends.

    The last ones are the sums, of which nothing is sent.
    """
    world_size = len(tensors)
    steps = []
    for step in range(2 * (world_size - 1)):
        chunks = [(rank - step) % world_size for rank in range(world_size)]
        sent = [(chunk, tensors[rank][chunk]) for rank, chunk in enumerate(chunks)]
        steps.append((tensors, sent))
        tensors = [list(tensor) for tensor in tensors]
        for rank, (chunk, value) in enumerate(sent):
            right = tensors[(rank + 1) % world_size]
            right[chunk] = right[chunk] + value if step < world_size - 1 else value
    return [*steps, (tensors, [])]


def draw(path: Path) -> None:
    """Draw each rank's chunks in a row, and those that travel on circles, clockwise."""
    steps = schedule(TENSORS)
    sums, last = steps[-1][0][0], len(steps) - 1
    figure, axes = report.new_figure(8, 4.6)

    def at(rank: float, radius: float) -> tuple[float, float]:
        angle = 2 * math.pi * rank / len(TENSORS)
        return radius * math.sin(angle), radius * math.cos(angle)

    def color_of(rank: int, chunk: int, value: int, step: int) -> str:
        """Return that of a chunk: whole, a sum that was sent on and counts no more, or neither."""
        if value == sums[chunk]:
            return GATHER
        was_sent = any(sent[rank][0] == chunk for _, sent in steps[:step] if sent)
        return "lightgray" if was_sent else "white"

    def disc(rank: float, chunk: int, value: int, color: str, layer: int) -> None:
        x, y = at(rank, 1.5 + chunk)
        look = {"color": color, "markeredgecolor": "black", "zorder": layer}
        axes.plot(x, y, "o", markersize=29, **look)
        axes.text(x, y, value, ha="center", va="center", fontsize=15, zorder=layer)

    def show(moment: float) -> None:
        """Draw the ring when so many steps are over."""
        axes.clear()
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.set(xlim=(-4.8, 11.2), ylim=(-4.2, 5))
        step = int(moment)
        tensors, sent = steps[step]
        for chunk in range(len(sums)):
            circle = [at(part / 30, 1.5 + chunk) for part in range(91)]
            axes.plot(*zip(*circle, strict=True), color="lightgrey", zorder=1)
        for rank, tensor in enumerate(tensors):
            axes.text(*at(rank, 4.7), f"rank {rank}", ha="center", va="center", fontsize=13)
            for chunk, value in enumerate(tensor):
                disc(rank, chunk, value, color_of(rank, chunk, value, step), 2)
        is_reducing = step < len(TENSORS) - 1
        for rank, (chunk, value) in enumerate(sent):
            disc(rank + moment - step, chunk, value, REDUCE if is_reducing else GATHER, 3)
        title, color = f"step {step + 1} of {last}", REDUCE if is_reducing else GATHER
        text = (
            "reduce-scatter: add what arrives" if is_reducing else "all-gather: keep what arrives"
        )
        if step == last:
            title, text = f"after {last} steps", "all ranks have all sums"
        axes.text(5, 1.2, title, fontsize=18)
        axes.text(5, 0.3, text, fontsize=13, color=color)

    moments = [frame / FRAMES_PER_STEP for frame in range(last * FRAMES_PER_STEP + 1)]
    save_movie(figure, show, moments, path)


def main() -> None:
    parser = setup.Parser(__doc__)
    setup.add_plot_arguments(parser, "ring.gif")
    draw(parser.parse_args().plot)


if __name__ == "__main__":
    main()
