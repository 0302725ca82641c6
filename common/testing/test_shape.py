"""The shape that lets two scripts stand side by side: lengths, one changed idea, 100 columns."""

import difflib
import itertools

from common.testing.harness import ROOT

# Script: lines at most in its lesson.
LESSONS = {
    "02_naive_ddp/naive_ddp.py": 75,
    "03_flat_ddp/flat_ddp.py": 90,
    "04_overlap_ddp/overlap_ddp.py": 118,
    "05_bucketed/bucketed.py": 165,
    "06_sharded_optimizer/sharded_optimizer.py": 140,
}
LADDER = list(LESSONS)[:4]
CHANGED_LINES = [40, 80, 90]  # at most, from each rung to the next
MARKER = "# " + 98 * "="


def lines_of(name: str) -> list[str]:
    return (ROOT / name).read_text().splitlines()


def test_lessons_are_short():
    for name, most in LESSONS.items():
        assert lines_of(name).index(MARKER) <= most, name


def test_neighbours_differ_above_the_marker_only_and_in_few_lines():
    for (one, other), most in zip(itertools.pairwise(LADDER), CHANGED_LINES, strict=True):
        lesson, rest = split_at_marker(one)
        next_lesson, next_rest = split_at_marker(other)
        assert rest == next_rest, (one, other)
        changes = list(difflib.ndiff(lesson, next_lesson))
        assert sum(line.startswith(("- ", "+ ")) for line in changes) <= most, (one, other)


def split_at_marker(name: str) -> tuple[list[str], list[str]]:
    lines = lines_of(name)
    return lines[: lines.index(MARKER)], lines[lines.index(MARKER) :]
