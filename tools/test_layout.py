"""The layout: lessons of one form, alike, and which folder may import from which."""

import ast
import sys
from pathlib import Path

import pytest

from tools.testing import ROOT

LESSONS = sorted({path.parent for path in ROOT.glob("0?_*/**/*.py")})
COMPARING = [ROOT / "05_bucketed" / name for name in ("compare", "bucket_sweep", "predict")]
COMPARING.append(ROOT / "06_sharded_optimizer" / "zero2")
SHARED = {"pictures", "users_class", "timeline", "memory"}  # of 01, 05/compare and 06
SCRIPTS = [
    "02_naive_ddp/naive_ddp.py",
    "03_flat_ddp/flat_ddp.py",
    "04_overlap_ddp/overlap_ddp.py",
    "05_bucketed/bucketed.py",
    "06_sharded_optimizer/sharded_optimizer.py",
    "06_sharded_optimizer/zero2/zero2.py",
    "06_sharded_optimizer/fsdp/fsdp.py",
]


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

    What compares stages imports several, and any lesson what draws and MINE='s loader.
    """
    stages = {}  # by the names of their modules
    for folder in LESSONS:
        stages |= {path.stem: folder.relative_to(ROOT).parts[0] for path in scripts_in(folder)}
    for folder in [*LESSONS, ROOT / "common"]:
        for path in scripts_in(folder):
            names = imports_of(ast.walk(ast.parse(path.read_text())))
            assert not any(name.split(".")[0] == "tools" for name in names), path
            own = {name for name, stage in stages.items() if stage == stages.get(path.stem)}
            allowed = own | SHARED if folder in LESSONS else set()
            assert folder in COMPARING or names & stages.keys() <= allowed, path


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_lesson_imports_torch_alone(script):
    names = imports_of(ast.parse((ROOT / script).read_text()).body)
    imported = {name.split(".")[0] for name in names}
    assert imported <= {"torch"} | sys.stdlib_module_names


def test_helpers_of_one_name_are_the_same_in_all_lessons():
    """A copied class brings them along; and every lesson shows the same step of training."""
    found = {}
    for script in SCRIPTS:
        text = (ROOT / script).read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                own = ast.get_source_segment(text, node)
                assert found.setdefault(node.name, own) == own, (script, node.name)
        assert "def train_step(model, optimizer, inputs, targets):" in text
