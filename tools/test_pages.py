"""The pages: their figures, and the complete program of the first one."""

import re
import shutil

import pytest

from tools import figures
from tools.harness import ROOT


def test_every_figure_is_recorded(capsys):
    assert figures.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("[34.6 ms](reference_output.txt) and [7](reference_output.txt), 9.9", []),
        ("[34.5 ms](reference_output.txt)", ["34.5"]),
        ("`[34.5](reference_output.txt)`\n\n```\n[34.5](reference_output.txt)\n```", []),
        ("[34.5](reference_output_x.txt)", ["34.5"]),  # there is no such file
        ('[34.6](reference_output.txt "p50") and [7.2](reference_output.txt "p75")', []),
        (
            '[7.2](reference_output.txt "p50") and [34.6](reference_output.txt "p7")',
            ["7.2", "34.6"],
        ),
        (
            "<!-- figures: reference_output.txt -->\n| 9.9 |\n|---|\n| 9.9 | 482 of 9 | 1,468 |\n",
            [],
        ),
        ("<!-- figures: reference_output.txt -->\n\n| |\n|---|\n| x | 482.2 |\n", ["482.2"]),
        ("<!-- figures: reference_output.txt -->\n| |\n|-|\n| p75 | 34.6 | 7.2 |\n", ["34.6"]),
    ],
)
def test_figures_that_are_not_recorded_are_found(text, wrong, tmp_path):
    (tmp_path / "reference_output.txt").write_text("p50 482.1  34.6  1468.1\np75  7.2 %")
    page = tmp_path / "README.md"
    page.write_text(text)
    assert [line.split()[1] for line in figures.wrong_figures(page)] == wrong


PROGRAM_SECTION = (ROOT / "README.md").read_text().split("## A complete program")[1]
PROGRAM = re.search(r"```python\n(.*?)```", PROGRAM_SECTION, re.S)[1]
HUNKS = re.search(r"```diff\n(.*?)\n```", PROGRAM_SECTION, re.S)[1].split("\n\n")
IN_FLOAT64 = "torch.set_default_dtype(torch.float64)\n"


def with_the_wrapper(program: str) -> str:
    """The program, changed by the page's hunks."""
    for hunk in HUNKS:
        before = [line[2:] for line in hunk.splitlines() if line[0] != "+"]
        after = [line[2:] for line in hunk.splitlines() if line[0] != "-"]
        assert program.count("\n".join(before)) == 1, hunk
        program = program.replace("\n".join(before), "\n".join(after))
    return program


def weights(output: str) -> list[str]:
    """What the ranks say, even if they say it in one line."""
    return re.findall(r"rank \d of \d: loss [^,]*, weights add up to (\d+\.\d{9})", output)


@pytest.mark.parametrize("change", [str, with_the_wrapper])
def test_the_program(forked, tmp_path, change):
    """Two ranks train as one process does, to the nine digits that are printed."""
    path = tmp_path / "train.py"
    path.write_text(change(PROGRAM).replace("torch.manual_seed", IN_FLOAT64 + "torch.manual_seed"))
    shutil.copy(ROOT / "02_naive_ddp" / "naive_ddp.py", tmp_path)
    found = []
    for world_size in (1, 2):
        status, output = forked(world_size, path, cwd=tmp_path)
        assert status == 0 and len(weights(output)) == world_size, output
        found += weights(output)
    assert len(set(found)) == 1, found


@pytest.mark.full  # the one above is the fast part
def test_the_program_as_it_stands(launched, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    status, output = launched(2, path, cwd=tmp_path)
    assert status == 0 and len(weights(output)) == 2 and len(set(weights(output))) == 1, output
