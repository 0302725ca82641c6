"""The READMEs: their figures and links, page by page."""

import itertools
import re
import urllib.parse
from pathlib import Path

import pytest

from common.recordings import figures
from common.recordings.record import output_of
from common.testing.harness import ROOT

PAGES = [str(path.relative_to(ROOT)) for path in figures.pages()]
LADDER = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]


@pytest.mark.parametrize("name", PAGES)
def test_figures(name):
    wrong = figures.wrong_figures(ROOT / name)
    assert not wrong, "\n" + "\n".join(wrong)


RUN = """\
step, ms      p50  exposed    share  calls
OverlapDDP  482.1     34.6    7.2 %     27
torch DDP  1468.1    -51.4  +11.0 %      3
"""


def page(folder: Path, text: str) -> Path:
    """A README in a folder of its own, with a recording beside it."""
    (folder / "reference_output_x.txt").write_text(RUN)
    path = folder / "README.md"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "cells, wrong",
    [
        ("482.1 ms | 34.6 and **7.2 %**", []),
        ("1,468 | −51.4 ms, [11.0 %](x.html)", []),
        ("482 of 900 ms | 27 calls, `1.5`", []),  # no figures
        ("34.6 | 482.1", []),
        ("482.2 | 34.6", ["482.2"]),
        ("1,467 | 35.0", ["1467", "35.0"]),
        ("[34.6](reference_output_x.txt) | 3.5 %", ["3.5"]),
    ],
)
def test_figures_of_a_table_occur_in_the_recording(cells, wrong, tmp_path):
    head = "<!-- figures: reference_output_x.txt -->\n\n| 25.5 MB | p50 | |\n|---|---|---|\n"
    found = figures.wrong_figures(page(tmp_path, f"{head}| 04, 25.5 MB | {cells} |\n"))
    expected = [f"README.md:5: {figure}: not in reference_output_x.txt" for figure in wrong]
    assert found == expected


LINES = "| a | b |\n|---|---|\n| c | 1.5 |\n"


@pytest.mark.parametrize(
    "text, complaint",
    [
        (LINES, "README.md:3: 1.5: no marker"),
        ("- x\n\n" + LINES.replace("|", "  |", 1), "README.md:5: 1.5: no marker"),
        (LINES.replace("1.5", "15 and `1.5`"), ""),
        (f"```\n{LINES}```\n", ""),
        (f"<!-- not\n{LINES}-->\n", ""),
        (f"<!-- figures: none -->\n{LINES}", ""),
        (f"<!-- figures: none -->\n\nText.\n\n{LINES}", "README.md:7: 1.5: no marker"),
        (LINES.replace("1.5", "[34.6 ms](reference_output_x.txt)"), ""),
        (
            LINES.replace("1.5", "[34.5 ms](reference_output_x.txt)"),
            "README.md:3: 34.5: not in ref",
        ),
        (
            "Text, [3](reference_output_x.txt)\n[4](reference_output_x.txt).\n",
            "README.md:2: 4: not",
        ),
        (
            "[34.5\nms](reference_output_x.txt), 1.5\n",
            "README.md:1: 34.5: not in reference_output_",
        ),
        ("`[34.5](reference_output_x.txt)`\n", ""),
    ],
)
def test_what_needs_a_marker_or_a_recording(text, complaint, tmp_path):
    wrong = figures.wrong_figures(page(tmp_path, text))
    assert bool(wrong) == bool(complaint) and " ".join(wrong).startswith(complaint), wrong


def test_figures_of_a_file_that_is_not_there_are_wrong(tmp_path):
    text = "<!-- figures: reference_output_y.txt -->\n" + LINES
    wrong = figures.wrong_figures(page(tmp_path, text))
    assert wrong == ["README.md:4: 1.5: not in reference_output_y.txt"]


def test_the_command_prints_what_is_wrong(tmp_path, monkeypatch, capsys):
    path = page(tmp_path, "[34.7](reference_output_x.txt)")
    monkeypatch.setattr(figures, "pages", lambda: [path])
    assert figures.main() == 1
    assert "README.md:1: 34.7: not in reference_output_x.txt\n" in capsys.readouterr().out
    page(tmp_path, "[34.6](reference_output_x.txt)")
    assert figures.main() == 0


@pytest.mark.parametrize("stage", [*LADDER, "06_sharded_optimizer"])
def test_a_page_shows_the_recorded_output(stage):
    recorded = output_of(ROOT / stage / "reference_output.txt")
    assert recorded in (ROOT / stage / "README.md").read_text()


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings, and those that the text sets itself."""
    anchors = set()
    text = figures.without(text, figures.FENCED, figures.COMMENT)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        heading = figures.LINK.sub(r"\1", heading.strip())
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        same = (f"{slug}-{number}" for number in itertools.count(1))
        anchors.add(slug if slug not in anchors else next(s for s in same if s not in anchors))
    return anchors | set(re.findall(r'(?:id|name)="([^"]*)"', text))


def dead_links(path: Path) -> list[str]:
    text = figures.without(path.read_text(), figures.FENCED, figures.COMMENT, figures.CODE)
    pictures = re.compile(r"!\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
    targets = [target for _, target in pictures.findall(text)]
    text = pictures.sub("a picture", text)  # which may be a link
    targets += [target for _, target in figures.LINK.findall(text)]
    targets += re.findall(r'(?:href|src|srcset)="([^"]*)"', text)
    return [target for target in dict.fromkeys(targets) if is_dead(path, target)]


def is_dead(path: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return False
    name, _, anchor = urllib.parse.unquote(target).partition("#")
    other = path.parent / name if name else path
    if other.is_dir() and anchor:
        other = other / "README.md"
    if not other.exists():
        return True
    return bool(anchor) and other.suffix == ".md" and anchor not in anchors_of(other.read_text())


@pytest.mark.parametrize("name", PAGES)
def test_links(name):
    dead = dead_links(ROOT / name)
    assert not dead, f"{name}: {', '.join(dead)}"


@pytest.mark.parametrize(
    "link, is_dead",
    [
        ("[a](#the-idea)", False),
        ("[a](#the-ideas)", True),
        ("[a](#the-idea-1)", False),
        ("[a](#which-size-make-05_bucketedbucket_sweep)", False),
        ("[a](#01--allreduce-one-line)", False),
        ("[a](reference_output_x.txt)", False),
        ("[a](reference_output_y.txt)", True),
        ("[two\nlines](reference_output_y.txt)", True),
        ("![a](picture.png)", True),
        ("[![a](reference_output_x.txt)](reference_output_y.txt)", True),
        ("[a](README.md#the-idea)", False),
        ("[a](https://example.org/x#y)", False),
        ("`[a](no.txt)`", False),
        ("`[a]\n(no.txt)` and `x`", False),
        ("`x\ny` [a](no.txt) and `z`", True),
        ("| `a` | `b` [c](no.txt) |", True),
        ("| `[c](no.txt)` |", False),
        ('<img src="no.png">', True),
    ],
)
def test_dead_links_are_found(link, is_dead, tmp_path):
    text = "# 01 · Allreduce: one line\n## The idea\n## The `idea`\n"
    text += "## Which size? `make 05_bucketed/bucket_sweep`\n"
    assert bool(dead_links(page(tmp_path, text + link + "\n"))) == is_dead
