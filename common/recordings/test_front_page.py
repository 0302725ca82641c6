"""The front page: its program runs, with and without the wrapper, and it stays short. hangs.md."""

import re
import shutil

import pytest

from common.recordings import figures
from common.testing.harness import ROOT

PAGE = (ROOT / "README.md").read_text()
PROGRAM, WRAPPED = re.findall(r"```python\n(.*?)```", PAGE.split("## A complete program")[1], re.S)
IN_FLOAT64 = "torch.set_default_dtype(torch.float64)\n"


def with_the_wrapper(program: str) -> str:
    """The program as the page says: its three lines, each in the place that its comment names."""
    lines = [line.partition("  #")[0] for line in WRAPPED.splitlines() if line]
    imported, wrap, finish = lines
    program = f"{imported}\n{program}".replace("(10, 1)\n", f"(10, 1)\n{wrap}\n")
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


def test_it_stays_short():
    """Prose is what is in no code, table, comment, link's target or picture."""
    text = figures.without(PAGE, figures.FENCED, figures.COMMENT)
    text = re.sub(r"!\[.*?\]\(.*?\)", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    words = re.findall(r"[^\W\d_][\w'’-]*", " ".join(prose))
    assert len(words) <= 700
    assert len(PAGE.splitlines()) <= 150


def test_the_page_about_hangs_shows_what_was_recorded():
    """Every line of its blocks of output; … stands for what is left out."""
    folder = ROOT / "common" / "docs"
    recorded = (folder / "reference_output_hang.txt").read_text()
    page = (folder / "hangs.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code, *outputs = [text for _, text in blocks]
    assert [language for language, _ in blocks] == ["python", "", "", "", "", ""]
    for line in "".join(outputs).splitlines():
        for part in line.split("…"):
            assert part in recorded, part
    assert code in (folder / "hang.py").read_text()
