"""The layout: lessons of one form, short and alike, and which folder may import from which."""

import ast
import difflib
import itertools
from pathlib import Path

import pytest

from tools.harness import ROOT

LESSONS = sorted({path.parent for path in ROOT.glob("0?_*/**/*.py")})
# What compares stages may import them all.
COMPARING = [ROOT / "05_bucketed" / name for name in ("compare", "bucket_sweep", "predict")]
COMMON = {
    "setup",
    "timing",
    "report",
    "memory",
    "network",
    "spawn",
}  # what a lesson needs of common
SHORT = {  # script: lines at most in its lesson
    "02_naive_ddp/naive_ddp.py": 75,
    "03_flat_ddp/flat_ddp.py": 85,
    "04_overlap_ddp/overlap_ddp.py": 110,
    "05_bucketed/bucketed.py": 145,
    "06_sharded_optimizer/sharded_optimizer.py": 130,
    "06_sharded_optimizer/fsdp/fsdp.py": 175,
}
LADDER = list(SHORT)[:4]
CHANGED_LINES = [40, 81, 87]  # at most, from each rung to the next
OWN = "\n# " + 98 * "-" + "\n"  # below it a stage's own helpers, if it has some
MARKER = "\n# " + 98 * "=" + "\n"  # below it what stages share


def imports_of(path: Path) -> set[str]:
    """The names of all modules that it imports somewhere, and of what it imports from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_a_lesson_imports_from_its_stage_and_common_only_and_common_from_no_stage():
    stages = {}  # by the names of their modules
    for folder in LESSONS:
        stages |= {path.stem: folder.relative_to(ROOT).parts[0] for path in folder.glob("*.py")}
    for folder in LESSONS:
        for path in set(folder.glob("*.py")) - set(folder.glob("test_*.py")):
            names = imports_of(path)
            imported = {stages[name] for name in names & stages.keys()}
            assert folder in COMPARING or imported <= {stages[path.stem]}, path
            of_common = {name.split(".")[1] for name in names if name.startswith("common.")}
            assert of_common <= COMMON, path
    for name in COMMON - {"spawn", "network"}:
        of_stages = imports_of(ROOT / "common" / f"{name}.py") & stages.keys()
        assert of_stages == ({"slow_network"} if name == "setup" else set()), name


@pytest.mark.parametrize("folder", LESSONS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_lesson_has_a_page_a_script_of_its_name_a_recording_and_tests(folder):
    script = folder.name
    if folder.parent == ROOT:
        script = script.partition("_")[2]
    names = {path.name for path in folder.iterdir()}
    needed = {"README.md", f"{script}.py", "reference_output.txt", f"test_{script}.py"}
    assert needed <= names, f"missing: {needed - names}"


def halves(script: str) -> tuple[list[str], str]:
    """The lines above the marker, and what is below it."""
    lesson, marker, rest = (ROOT / script).read_text().partition(MARKER)
    assert marker, script
    return lesson.splitlines(), rest


@pytest.mark.parametrize("script", SHORT)
def test_a_lesson_is_short(script):
    lesson = "\n".join(halves(script)[0]).partition(OWN)[0]
    assert len(lesson.splitlines()) <= SHORT[script]


def test_neighbours_differ_above_the_marker_only_and_in_few_lines():
    for (one, other), most in zip(itertools.pairwise(LADDER), CHANGED_LINES, strict=True):
        (lesson, rest), (next_lesson, next_rest) = halves(one), halves(other)
        assert rest == next_rest, (one, other)
        changes = list(difflib.ndiff(lesson, next_lesson))
        assert sum(line.startswith(("- ", "+ ")) for line in changes) <= most, (one, other)
