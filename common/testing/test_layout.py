"""The layout: what a lesson's folder has, and which folder may import from which."""

import ast
import graphlib
from pathlib import Path

import pytest

from common.testing.harness import ROOT

LESSONS = sorted({path.parent for path in ROOT.glob("0?_*/**/*.py")})
# What compares stages may import them all, and nothing may import it, but for the sweep's model.
COMPARING = {"05_bucketed/compare", "05_bucketed/bucket_sweep", "05_bucketed/predict"}


def folder_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def may_import(folder: str) -> set[str]:
    """A folder may import from itself, its stage and common's own files."""
    allowed = {folder, folder.partition("/")[0], "common"}
    if folder in COMPARING:
        allowed |= {lesson.name for lesson in LESSONS if lesson.parent == ROOT}
    if folder == "05_bucketed/bucket_sweep":
        allowed.add("05_bucketed/predict")
    return allowed


def scripts() -> dict[str, Path]:
    """Every script by the name under which others import it."""
    found = {}
    for path in sorted([*ROOT.glob("0?_*/**/*.py"), *ROOT.glob("common/**/*.py")]):
        if path.name.startswith(("test_", "__")) or path.parent.name == "testing":
            continue
        name = path.stem
        if folder_of(path).startswith("common"):
            name = f"{folder_of(path).replace('/', '.')}.{path.stem}"
        assert name not in found, f"{path} and {found[name]} have the same name"
        found[name] = path
    return found


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


def test_imports_go_to_the_own_folder_the_stage_and_common_only_and_in_no_circle():
    paths = scripts()
    graph = {}
    wrong = []
    for name, path in paths.items():
        graph[name] = imports_of(path) & paths.keys()
        for imported in graph[name]:
            if folder_of(paths[imported]) not in may_import(folder_of(path)):
                wrong.append(f"{path.relative_to(ROOT)} imports {imported}")
    assert not wrong, "\n".join(sorted(wrong))
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("folder", LESSONS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_lesson_has_a_page_a_script_of_its_name_a_recording_and_tests(folder):
    script = folder.name
    if folder.parent == ROOT:
        script = script.partition("_")[2]
    names = {path.name for path in folder.iterdir()}
    needed = {"README.md", f"{script}.py", "reference_output.txt", f"test_{script}.py"}
    assert needed <= names, f"missing: {needed - names}"
