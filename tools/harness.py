"""Until all tests import tools.testing: its names, and those that are gone."""

import os
import re
from pathlib import Path

from tools.testing import *  # noqa: F403

SHARED_MEMORY = Path("/dev/shm")


def masked(output: str) -> list[str]:
    number = re.compile(r"[-+]?\d[\d.,]*(e[-+]\d+)?(\+[a-z]+\d*)?")
    lines = []
    for line in output.splitlines():
        if not line.startswith(("written: ", "warning: ")):
            lines.append(" ".join(number.sub("#", line).split()))
    return lines


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def left_in(folder: Path, before: set[str]) -> set[str]:
    return names_in(folder) - before
