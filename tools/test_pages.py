"""The pages: figures, the complete program of the first one, lines for courses; make read."""

import html
import re
import shutil
import subprocess
import sys

import pytest

from tools import figures
from tools.check.adapters import prepare
from tools.check.check import KINDS
from tools.testing import ROOT

DIFF = "<!-- figures: reference_output.txt -->\n| | p50 |\n|---|---|\n"


def test_every_figure_is_recorded(capsys):
    assert figures.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("[34.6 ms](reference_output.txt) and [7](reference_output.txt), 9.9", []),
        ("[34.5 ms](reference_output.txt)", ["34.5"]),
        ("`[34.5](reference_output.txt)`\n\n```\n[34.5](reference_output.txt)\n```", []),
        ('[7.2](reference_output.txt "p50") [34.6](reference_output.txt "p7")', ["7.2", "34.6"]),
        (f"{DIFF}| x | 482 of 9 | 1,468 |\n", []),
        (f"{DIFF}| p75 | 34.6 | 7.2 |\n", ["34.6"]),
    ],
)
def test_figures_that_are_not_recorded_are_found(text, wrong, tmp_path):
    (tmp_path / "reference_output.txt").write_text("p50 482.1  34.6  1468.1\np75  7.2 %")
    page = tmp_path / "README.md"
    page.write_text(text)
    assert [line.split()[1] for line in figures.wrong_figures(page)] == wrong


FRONT = re.sub("  #.*", "", (ROOT / "README.md").read_text())  # without comments in code
PROGRAM = re.search(r"```python\n(.*?)```", FRONT, re.DOTALL)[1]
HUNKS = re.search(r"```diff\n(.*?)\n```", FRONT, re.DOTALL)[1].split("\n\n")


def with_the_wrapper(program: str) -> str:
    """The program, changed by the page's hunks."""
    for hunk in HUNKS:
        before = "\n".join(line[2:] for line in hunk.splitlines() if line[0] != "+")
        after = "\n".join(line[2:] for line in hunk.splitlines() if line[0] != "-")
        assert program.count(before) == 1, hunk
        program = program.replace(before, after)
    return program


def without_the_loop(program: str) -> str:
    return re.sub("    for parameter in.*\n.*\n.*\n", "", program)


@pytest.mark.parametrize("change", [str, with_the_wrapper, without_the_loop])
def test_the_program(forked, tmp_path, change):
    """Two ranks train as one process does, but where nothing is sent."""
    path = tmp_path / "train.py"
    in_float64 = "torch.set_default_dtype(torch.float64)\ntorch.manual_seed"
    path.write_text(change(PROGRAM).replace("torch.manual_seed", in_float64))
    shutil.copy(ROOT / "02_naive_ddp" / "naive_ddp.py", tmp_path)
    found = []
    for world_size in (1, 2):
        status, output = forked(world_size, path, cwd=tmp_path)
        assert status == 0, output
        found += re.findall(r"weights add up to (\d+\.\d{6})", output)
    assert len(found) == 3 and len(set(found)) == (3 if change is without_the_loop else 1), found


COURSES = (ROOT / "docs" / "courses.md").read_text()


@pytest.mark.parametrize(
    "name, kind, checks",
    [
        ("get_ddp_individual_parameters", "wrapper", ["trains_with_sgd"]),
        ("get_ddp", "wrapper", ["trains_tied_and_frozen_weights"]),
        ("get_ddp_bucketed", "wrapper", ["trains_with_sgd"]),
        ("get_sharded_optimizer", "optimizer", ["steps_like_adamw", "shares_the_state_out"]),
        ("get_fsdp", "fsdp", ["trains_with_sgd", "computes_in_another_dtype"]),
    ],
)
def test_lines_for_courses(late_ranks, tmp_path, name, kind, checks):
    """The page's adapters, as a student pastes them."""
    blocks = re.findall(r"^```python\n(.*?)^```", COURSES, re.DOTALL | re.MULTILINE)
    [block] = [block for block in blocks if f"\n{name} = " in block]
    (tmp_path / "adapters.py").write_text(block)
    late_ranks(2).run(check_adapter, f"{tmp_path}/adapters.py:{name}", kind, checks)


def check_adapter(text: str, kind: str, checks: list[str]) -> None:
    """On a rank; a check raises what it has found."""
    for name in checks:
        check = getattr(KINDS[kind], name)
        check(*prepare(text, kind))


def test_make_read_holds_the_lessons_and_needs_python_alone():
    """-S: what was installed is out of reach."""
    command = [sys.executable, "-S", "-m", "tools.read"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "written: results/read.html\n"
    page = (ROOT / "results" / "read.html").read_text()
    shown = re.sub("<.*?>", "", html.unescape(page.replace("&nbsp;", " ")))
    scripts = [folder / f"{folder.name[3:]}.py" for folder in ROOT.glob("0[2-5]_*")]
    assert len(scripts) == 4
    for script in scripts:
        text = script.read_text()
        for line in text.partition("\nif __name__")[0].splitlines():
            assert line in shown


def test_the_front_page_says_how_long_the_files_are():
    """Of each folder's file, within a tenth."""
    tree = FRONT.partition("## What is where")[2].partition("```\n")[0]
    lines = re.findall(r"^( *)(\S+)/ +(\w+\.py) +(\d+)  ", tree, re.MULTILINE)
    assert len(lines) > 15
    stage = ""
    for indent, folder, file, length in lines:
        path = f"{stage}/{folder}" if indent else folder
        if not indent:
            stage = folder
        found = len((ROOT / path / file).read_text().splitlines())
        assert abs(found - int(length)) <= found / 10, (path, found)
