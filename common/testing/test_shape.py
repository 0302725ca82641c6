"""The shape that lets two scripts stand side by side: lengths, one changed idea, 100 columns."""

import difflib
import itertools

from common.testing.harness import ROOT

# Script: lines at most in its lesson.
LADDER = {
    "02_naive_ddp/naive_ddp.py": 100,
    "03_flat_ddp/flat_ddp.py": 110,
    "04_overlap_ddp/overlap_ddp.py": 150,
    "05_bucketed/bucketed.py": 190,
}
CHANGED_LINES = [40, 80, 90]  # at most, from each rung to the next
MARKER = "# " + 98 * "="


def lines_of(name: str) -> list[str]:
    return (ROOT / name).read_text().splitlines()


def test_lessons_are_short():
    for name, most in LADDER.items():
        assert lines_of(name).index(MARKER) <= most, name


def test_neighbours_differ_above_the_marker_only_and_in_few_lines():
    for (one, other), most in zip(itertools.pairwise(LADDER), CHANGED_LINES, strict=True):
        lesson, rest = split_at_marker(one)
        next_lesson, next_rest = split_at_marker(other)
        assert rest == next_rest, (one, other)
        changes = list(difflib.ndiff(lesson, next_lesson))
        assert sum(line.startswith(("- ", "+ ")) for line in changes) <= most, (one, other)


def test_all_language_models_come_in_the_same_sizes():
    """xl, 2.7b: CS336 of 2025; xl-2026, 10b: of 2026 (assignment 2, the table of model sizes)."""
    sizes = lines_of_sizes("02_naive_ddp/naive_ddp.py")
    assert len(sizes) == 11
    for path in [*LADDER, "06_sharded_optimizer/sharded_optimizer.py"]:
        assert lines_of_sizes(path) == sizes, path


def lines_of_sizes(name: str) -> list[str]:
    lines = lines_of(name)
    start = next(number for number, line in enumerate(lines) if line.startswith("SIZES = {"))
    return lines[start + 1 : lines.index("}", start)]


def split_at_marker(name: str) -> tuple[list[str], list[str]]:
    lines = lines_of(name)
    return lines[: lines.index(MARKER)], lines[lines.index(MARKER) :]
