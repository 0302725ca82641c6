"""The exercises: what `make check` says of them as they are, and filled with the stages' lines."""

import ast

import pytest

from common.check import adapters
from common.check.check import KINDS
from common.check.runner import judge, verdict_of
from common.testing.harness import ROOT, failed

CHECK = ROOT / "common" / "check" / "check.py"
EXERCISES = [
    ("02_naive_ddp", "NaiveDDP", ["__init__", "finish_gradient_synchronization"]),
    ("03_flat_ddp", "FlatDDP", ["finish_gradient_synchronization"]),
    ("04_overlap_ddp", "OverlapDDP", ["__init__", "finish_gradient_synchronization"]),
    ("05_bucketed", "BucketedDDP", ["__init__", "finish_gradient_synchronization"]),
    ("06_sharded_optimizer", "ShardedOptimizer", ["add_param_group", "step"]),
    (
        "06_sharded_optimizer/fsdp",
        "FSDP",
        ["__init__", "finish_gradient_synchronization", "gather_full_params"],
    ),
]


@pytest.mark.parametrize("folder, name, missing", EXERCISES)
def test_what_is_not_written_is_said_in_a_line_each(forked, folder, name, missing):
    exercise = ROOT / folder / "exercise.py"
    assert len(exercise.read_text().splitlines()) <= 40
    status, output = forked(None, CHECK, f"{exercise}:{name}")
    said = [line for line in output.splitlines() if line.startswith("not written yet: ")]
    assert status == 1 and said == [f"not written yet: {name}.{each}" for each in missing], output
    assert len(output.splitlines()) < 10, output
    command = f"make check MINE={folder}/exercise.py:{name}"
    page = (ROOT / folder / "README.md").read_text()
    assert command in exercise.read_text() and command in page.split("## ")[2], page[:2000]


def filled(folder: str, name: str) -> str:
    """The exercise, with the stage's methods for what is not written and what it lacks."""
    script = next((ROOT / folder).glob(f"{folder.split('/')[-1].lstrip('0123456789_')}.py"))
    (lesson,) = [part for part in parts_of(script.read_text()) if part.name == name]
    text = (ROOT / folder / "exercise.py").read_text()
    (exercise,) = [part for part in parts_of(text) if part.name == name]
    body = {part.name: part for part in exercise.body if isinstance(part, ast.FunctionDef)}
    for method in lesson.body:
        if isinstance(method, ast.FunctionDef):
            theirs = body.get(method.name)
            if (
                theirs is None
                or method.name == "__init__"
                or isinstance(theirs.body[-1], ast.Raise)
            ):
                body[method.name] = method
    exercise.body = list(body.values())
    stages = [ROOT, script.parent, script.parent.parent]
    lines = [
        "import sys",
        f"sys.path[:0] = {list(map(str, stages))}",
        f"from {script.stem} import *",
    ]
    lines += [f"from {script.stem} import {name}"]
    others = [part for part in parts_of(text) if part is not exercise and part.name != name]
    return "\n".join([*lines, *map(ast.unparse, others), ast.unparse(exercise)])


def parts_of(text: str) -> list:
    return [part for part in ast.parse(text).body if hasattr(part, "name")]


def judge_file(text: str, kind: str) -> list[dict]:
    mine = adapters.prepare(text, kind)
    return [judge(check, mine) for check in KINDS[kind].HAS_TO_HOLD]


@pytest.mark.parametrize("folder, name, missing", EXERCISES)
def test_filled_with_the_lesson_it_holds(late_ranks, tmp_path, folder, name, missing):
    file = tmp_path / f"{name}_filled.py"
    file.write_text(filled(folder, name))
    kind = {"ShardedOptimizer": "optimizer", "FSDP": "fsdp"}.get(name, "wrapper")
    of_ranks = late_ranks(2).run(judge_file, f"{file}:{name}", kind)
    verdicts = {}
    for check, *answers in zip(KINDS[kind].HAS_TO_HOLD, *of_ranks, strict=True):
        verdicts[check.__name__] = verdict_of(dict(enumerate(answers)))
    assert not failed(verdicts), verdicts
    assert sum(each["verdict"] == "passed" for each in verdicts.values()) >= 9
