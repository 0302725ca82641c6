"""The exercises: what `make check` says of them as they are, and filled with the stages' lines."""

import importlib
import inspect
import sys

import pytest

from common.check.check import KINDS
from common.check.loading import load_module
from common.check.runner import judge, verdict_of
from common.testing.harness import ROOT

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


def judge_filled(folder: str, name: str, missing: list[str], checks: list) -> list[dict]:
    """On a rank: the stage's class, with those of its methods that the exercise has."""
    stage = ROOT / folder
    sys.path[:0] = [str(stage), str(stage.parent)]
    lesson = getattr(importlib.import_module(stage.name.lstrip("0123456789_")), name)
    exercise = getattr(load_module(str(stage / "exercise.py")), name)
    methods = {key: each for key, each in vars(exercise).items() if inspect.isfunction(each)}
    for key in ("__init__", *missing):
        methods.pop(key, None)
    filled = type(name, (lesson,), methods)
    return [judge(check, filled) for check in checks]


@pytest.mark.parametrize("folder, name, missing", EXERCISES)
def test_filled_with_the_lesson_it_holds(late_ranks, folder, name, missing):
    kind = {"ShardedOptimizer": "optimizer", "FSDP": "fsdp"}.get(name, "wrapper")
    checks = KINDS[kind].HAS_TO_HOLD
    of_ranks = late_ranks(2).run(judge_filled, folder, name, missing, checks)
    for check, *answers in zip(checks, *of_ranks, strict=True):
        assert verdict_of(dict(enumerate(answers)))["verdict"] == "passed", (check, answers)
