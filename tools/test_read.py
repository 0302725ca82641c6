"""`make read`: the page, and what it is made of."""

import html
import re
import shutil
import subprocess
import sys
from itertools import combinations

import pytest

from tools import read
from tools.harness import ROOT

PAIRS = list(combinations(read.LADDER, 2))


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    return dict(re.findall(r'<section id="(.*?)"(.*?)</section>', read.page(), re.DOTALL))


def lines_of(section: str, side: str) -> list[tuple]:
    """The lines of a side: (kind of row, number, text, changed words)."""
    found = []
    for kind, row in re.findall(r'<div class="r (\w+).*?>(.*?)</div>', section, re.DOTALL):
        cells = re.findall(rf"<code class={side} data-n=(\d+) .*?>(.*?)</code>", row)
        for number, code in cells:
            marks = [plain(mark) for mark in re.findall("<mark>(.*?)</mark>", code)]
            found.append((kind, int(number), plain(code), marks))
    return found


def plain(code: str) -> str:
    return html.unescape(re.sub("<.*?>", "", code))


@pytest.mark.skipif(not shutil.which("diff"), reason="needs diff")
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_every_line_is_there_once_and_those_that_differ_are_nearly_those_of_diff(pair, sections):
    section = sections["-".join(stage[:2] for stage in pair)]
    assert section.startswith(" hidden") == (int(pair[1][1]) - int(pair[0][1]) > 1)
    changed = 0
    same = []
    for side, stage in zip("ab", pair, strict=True):
        above, _, _ = (ROOT / stage / f"{stage[3:]}.py").read_text().partition("\n# ====")
        lines = lines_of(section, side)
        shown = [(number, line) for _, number, line, _ in lines]
        assert shown == list(enumerate(above.rstrip().split("\n"), 1))
        changed += sum(kind != "same" for kind, *_ in lines)
        same.append([line for kind, _, line, _ in lines if kind == "same"])
    assert same[0] == same[1] and f"{changed} changed lines" in plain(section)
    folded = "".join(re.findall("<details>(.*?)</details>", section, re.DOTALL))
    assert 'class="r edit' not in folded and 'class="r lone' not in folded
    paths = [f"{stage}/{stage[3:]}.py" for stage in pair]
    diff = subprocess.run(["diff", *paths], cwd=ROOT, capture_output=True, text=True).stdout
    assert changed <= 1.1 * len(re.findall("^[<>]", diff, re.MULTILINE))


def test_a_new_name_is_a_small_change(sections):
    marks = {line: words for _, _, line, words in lines_of(sections["02-03"], "b") if words}
    assert marks["class FlatDDP(nn.Module):"] == ["FlatDDP"]
    assert marks["            dist.all_reduce(flat, group=self.process_group)"] == ["flat"]


def test_code_in_the_page():
    found = read.code_html('if a < "&":', read.syntax(['if a < "&":'])[0], {3, 4, 5})
    assert found == '<span class=k>if</span> <mark>a &lt;</mark> <span class=s>"&amp;"</span>:'
    kinds = read.syntax(["def f(x=1):  # why", '    """What', '    more."""'])
    lines = ["".join(kind or "." for kind in line) for line in kinds]
    assert lines == ["kkk.d...n....ccccc", "....qqqqqqq", "qqqqqqqqqqqq"]


def test_needs_python_alone_and_no_network():
    """-S: what was installed is out of reach."""
    command = [sys.executable, "-S", "-m", "tools.read"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("written: results/ladder.html"), run.stderr
    text = (ROOT / "results" / "ladder.html").read_text()
    assert "content=\"default-src 'none';" in text  # the browser holds it, too
