"""The layout: lessons of one form, short and alike, and which folder may import from which."""

import ast
import difflib
import itertools
import sys
from pathlib import Path

import pytest

from tools.testing import ROOT

LESSONS = sorted({path.parent for path in ROOT.glob("0?_*/**/*.py")})
COMPARING = [ROOT / "05_bucketed" / name for name in ("compare", "bucket_sweep", "predict")]
COMPARING.append(ROOT / "06_sharded_optimizer" / "zero2")
MARKER = "\n# " + 98 * "=" + "\n"  # below it is what is not the lesson
LADDER = {  # script: lines at most above the marker, in all, and changed by the next one
    "02_naive_ddp/naive_ddp.py": (65, 215, 40),
    "03_flat_ddp/flat_ddp.py": (75, 225, 70),
    "04_overlap_ddp/overlap_ddp.py": (95, 250, 75),
    "05_bucketed/bucketed.py": (135, 300, None),
}
SHORT = LADDER | {
    "06_sharded_optimizer/sharded_optimizer.py": (120, 420, None),
    "06_sharded_optimizer/fsdp/fsdp.py": (215, 450, None),
    "06_sharded_optimizer/zero2/zero2.py": (180, 430, None),
}


def imports_of(nodes) -> set[str]:
    """The names of the modules that these statements import, and of what they import from them."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def scripts_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if not path.name.startswith("test_")]


def test_arrows_point_one_way():
    """A lesson imports from its stage and common/, common/ from itself, and none from tools/.

    What compares stages imports several, and any lesson the emulated network and MINE='s loader.
    """
    stages = {}  # by the names of their modules
    for folder in LESSONS:
        stages |= {path.stem: folder.relative_to(ROOT).parts[0] for path in scripts_in(folder)}
    for folder in [*LESSONS, ROOT / "common"]:
        for path in scripts_in(folder):
            names = imports_of(ast.walk(ast.parse(path.read_text())))
            assert not any(name.split(".")[0] == "tools" for name in names), path
            own = {name for name, stage in stages.items() if stage == stages.get(path.stem)}
            allowed = {*own, "network", "users_class", "timeline"} if folder in LESSONS else set()
            assert folder in COMPARING or names & stages.keys() <= allowed, path


@pytest.mark.parametrize("script", SHORT)
def test_a_lesson_is_short_and_imports_torch_alone(script):
    text = (ROOT / script).read_text()
    lesson, marker, _ = text.partition(MARKER)
    most_above, most, _ = SHORT[script]
    assert marker and len(lesson.splitlines()) <= most_above
    assert len(text.splitlines()) <= most
    imported = {name.split(".")[0] for name in imports_of(ast.parse(text).body)}
    assert imported <= {"torch"} | sys.stdlib_module_names


def test_neighbours_differ_above_the_marker_only_and_in_few_lines():
    for one, other in itertools.pairwise(LADDER):
        texts = [(ROOT / script).read_text() for script in (one, other)]
        (lesson, _, rest), (next_lesson, _, next_rest) = (text.partition(MARKER) for text in texts)
        assert rest == next_rest, (one, other)
        changes = difflib.ndiff(lesson.splitlines(), next_lesson.splitlines())
        changed = [line for line in changes if line.startswith(("- ", "+ "))]
        assert len(changed) <= LADDER[one][2], (one, other)
