"""The pages: their figures, links and hunks, the outputs and the program that they show."""

import re
import shutil
import urllib.parse
from pathlib import Path

import pytest

from common.recordings import figures
from common.recordings.record import output_of
from common.testing.harness import ROOT

PAGES = [str(path.relative_to(ROOT)) for path in figures.pages()]
LADDER = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]


@pytest.mark.parametrize("name", PAGES)
def test_figures_and_links(name):
    page = ROOT / name
    assert figures.wrong_figures(page) == [] and dead_links(page) == []


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("[34.6 ms](reference_output.txt) and [7](reference_output.txt), 9.9", []),
        ("[34.5 ms](reference_output.txt)", ["34.5"]),
        ("`[34.5](reference_output.txt)`\n\n```\n[34.5](reference_output.txt)\n```", []),
        ("[34.5](reference_output_x.txt)", ["34.5"]),  # there is no such file
        (
            "<!-- figures: reference_output.txt -->\n| 9.9 |\n|---|\n| 9.9 | 482 of 9 | 1,468 |\n",
            [],
        ),
        ("<!-- figures: reference_output.txt -->\n\n| |\n|---|\n| x | 482.2 |\n", ["482.2"]),
        ("<!-- figures: none -->\n| x |\n|---|\n| x | 482.2 |\n", []),
    ],
)
def test_figures_that_are_not_recorded_are_found(text, wrong, tmp_path):
    (tmp_path / "reference_output.txt").write_text("p50 482.1  34.6  7.2 %  1468.1")
    page = tmp_path / "README.md"
    page.write_text(text)
    assert [line.split()[1] for line in figures.wrong_figures(page)] == wrong


def dead_links(page: Path) -> list[str]:
    """Of links and pictures: those whose file or heading is not there."""
    text = figures.CODE.sub("", page.read_text())
    targets = re.findall(r"\]\(([^)\s]*)\)", text) + re.findall(r'(?:href|src)="([^"]*)"', text)
    dead = []
    for target in targets:
        name, _, anchor = urllib.parse.unquote(target).partition("#")
        other = page.parent / name if name else page
        if other.is_dir():
            other = other / "README.md" if anchor else other
        if re.match("[a-z]+:", target):
            continue
        if not other.exists() or (anchor and anchor not in anchors_of(other)):
            dead.append(target)
    return dead


def anchors_of(page: Path) -> list[str]:
    """What GitHub makes of its headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M
    )
    return [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        "# The `idea`: x\n[a](#the-idea-x) [b](#no) [c](README.md) [d](no.txt) `[e](no)`"
    )
    assert dead_links(page) == ["#no", "no.txt"]


@pytest.mark.parametrize("stage", [*LADDER, "06_sharded_optimizer"])
def test_a_page_shows_the_recorded_output(stage):
    recorded = output_of(ROOT / stage / "reference_output.txt")
    assert recorded in (ROOT / stage / "README.md").read_text()


@pytest.mark.parametrize("stage", LADDER[1:])
def test_hunks_are_the_lesson_s_code(stage):
    """What a hunk adds stands in the script, but for types and comments."""

    def plain(line: str) -> str:
        return re.sub(r"(def \w+).*", r"\1", line.partition("  #")[0]).strip()

    page = (ROOT / stage / "README.md").read_text().split("## How it works")[1].split("\n## ")[0]
    script = ROOT / stage / f"{stage.partition('_')[2]}.py"
    code = [plain(line) for line in script.read_text().splitlines()]
    added = re.findall(r"^\+ (.*)", "".join(re.findall(r"```diff\n(.*?)```", page, re.S)), re.M)
    assert added and [line for line in added if plain(line) not in code] == []


def test_the_page_about_hangs_shows_what_was_recorded():
    """Every line of its blocks of output; … stands for what is left out."""
    folder = ROOT / "common" / "docs"
    recorded = (folder / "reference_output_hang.txt").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (folder / "hangs.md").read_text(), re.S | re.M)
    parts = re.split("[\n…]", "".join(text for language, text in blocks if not language))
    assert len(parts) > 10 and [part for part in parts if part not in recorded] == []


PAGE = (ROOT / "README.md").read_text()
PROGRAM, WRAPPED = re.findall(r"```python\n(.*?)```", PAGE.split("## A complete program")[1], re.S)
IN_FLOAT64 = "torch.set_default_dtype(torch.float64)\n"


def with_the_wrapper(program: str) -> str:
    """The program as the page says: its three lines, each in the place that its comment names."""
    imported, wrap, finish = [line.partition("  #")[0] for line in WRAPPED.splitlines() if line]
    program = f"{imported}\n{program}".replace("\nfor step", f"{wrap}\n\nfor step")
    loop = re.search(r"    for parameter in .*?\n(?=    optimizer\.step)", program, re.S)[0]
    assert loop.count("\n") == 3
    return program.replace(loop, f"    {finish}\n")


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
