"""01: the colors of pictures, and what saves a moving one; the timelines of 05 use both, too."""

from collections.abc import Callable
from pathlib import Path

from common.setup import say

COLORS = {  # one for one thing in all pictures; those of the stages are in 05_bucketed/compare
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "exposed communication": "#F0E442",
    "optimizer": "#999999",
    "finish": "#333333",  # but for its waits
    "all-reduce": "#D55E00",
    "all-gather": "#009E73",
    "reduce-scatter": "#D55E00",
}


def save_movie(figure, show: Callable[[float], None], moments: list[float], path: Path) -> None:
    """Save what show(moment) makes of a figure as a GIF, in few colors: it stays small.

    The last moment stays for three seconds; without motion it has to say everything.
    """
    from matplotlib.animation import FuncAnimation, PillowWriter
    from PIL import Image, ImageSequence

    FuncAnimation(figure, show, moments).save(path, writer=PillowWriter(), dpi=94)
    with Image.open(path) as movie:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(movie)]
    colors = "#000000#444444#888888#CCCCCC#FFFFFF#EBAF80#80CFB9" + "".join(COLORS.values())
    palette = Image.new("P", (1, 1))
    palette.putpalette(bytes.fromhex(colors.replace("#", "")))
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [150] * (len(frames) - 1) + [3000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)
    say(f"written: {path}")
