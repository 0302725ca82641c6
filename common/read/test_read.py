"""`make read`: the page, the terminal, wrong names; in a real browser where there is one."""

import html
import itertools
import json
import random
import re
import shutil
import subprocess
import sys

import pytest

from common.read import read
from common.testing.harness import ROOT, make

PAIRS = list(itertools.combinations(read.LADDER, 2))
OLD = """class NaiveDDP(nn.Module):
    first = 1
    for p in parameters:
        average(p.grad)
        all_reduce(p.grad, group=group)
    done = True""".split("\n")
NEW = """class FlatDDP(nn.Module):
    first = 1
    flat = cat(gradients)
    all_reduce(flat, group=group)
    done = True
    for p in parameters:""".split("\n")


@pytest.fixture(scope="module")
def text() -> str:
    return read.page()


def sections_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'<section id="(.*?)"(.*?)</section>', text, re.DOTALL))


def lines_of(section: str, side: str) -> list[tuple]:
    """The lines of a side: (kind of row, number, text, changed words)."""
    found = []
    for kind, row in re.findall(r'<div class="r (\w+).*?>(.*?)</div>', section, re.DOTALL):
        cells = re.findall(r'<code class="?(\w).*? data-n=(\d+) .*?>(.*?)</code>', row)
        for name, number, code in cells:
            if name == side:
                marks = [plain(mark) for mark in re.findall("<mark>(.*?)</mark>", code)]
                found.append((kind, int(number), plain(code), marks))
    return found


def plain(code: str) -> str:
    return html.unescape(re.sub("<.*?>", "", code))


def test_every_line_of_both_lessons_is_there_once(text):
    sections = sections_of(text)
    assert list(sections) == [f"{old[:2]}-{new[:2]}" for old, new in PAIRS]
    for (old, new), section in zip(PAIRS, sections.values(), strict=True):
        for side, stage in (("a", old), ("b", new)):
            whole = (ROOT / stage / f"{stage[3:]}.py").read_text()
            lesson = whole[: whole.index("\n# ====")].rstrip().split("\n")
            shown = [(number, line) for _, number, line, _ in lines_of(section, side)]
            assert shown == list(enumerate(lesson, 1))
        assert section.startswith(" hidden") == ((old, new) not in read.NEIGHBOURS)
        folded = re.findall("<details>(.*?)</details>", section, re.DOTALL)
        assert set(re.findall(r'class="r (.*?)"', "".join(folded))) == {"same"}
        assert read.sentence(*lessons(old, new)) in plain(section)


def test_a_new_name_is_a_small_change(text):
    marks = {}
    for kind, _, line, words in lines_of(sections_of(text)["02-03"], "b"):
        if words:
            assert kind == "edit"
            marks[line] = words
    assert marks["class FlatDDP(nn.Module):"] == ["FlatDDP"]
    assert marks["            dist.all_reduce(flat, group=self.process_group)"] == ["flat"]


@pytest.mark.skipif(not shutil.which("diff"), reason="needs diff")
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_changed_lines_are_those_of_diff(pair, text):
    paths = [f"{stage}/{stage[3:]}.py" for stage in pair]
    run = subprocess.run(["diff", *paths], cwd=ROOT, capture_output=True, text=True)
    count = sum(line.startswith(("<", ">")) for line in run.stdout.splitlines())
    section = sections_of(text)["-".join(stage[:2] for stage in pair)]
    assert f"{count} changed lines" in plain(section)
    lines = [*lines_of(section, "a"), *lines_of(section, "b")]
    assert count == sum(kind != "same" for kind, *_ in lines)


def test_rows_of_a_pair_made_by_hand():
    rows = read.align(OLD, NEW)
    found = [(row.kind, row.left, row.right) for row in rows]
    assert found == [
        ("edit", 0, 0),
        ("same", 1, 1),
        ("lone", 2, 2),
        ("lone", 3, None),
        ("edit", 4, 3),
        ("same", 5, 4),
        ("lone", None, 5),
    ]
    assert read.count_changes(rows) == (4, 4)
    assert read.moved_lines(OLD, NEW, rows) == ({2: 5}, {5: 2})


@pytest.mark.parametrize(
    "old, new, old_words, new_words",
    [
        ("f(a, b)", "f(c, d)", ["a, b"], ["c, d"]),  # punctuation alone does not divide
        ("make 02     (see)", "make 03_flat (see)", ["02"], ["03_flat"]),  # nor do blanks count
        ("x = 1", "x = 1  # one", [], ["  # one"]),
        ("        y = 1", "    y = 2", ["1"], ["2"]),  # nor does indentation
        ("", "z", [], ["z"]),
    ],
)
def test_changed_words(old, new, old_words, new_words):
    spans = read.changed_words(old, new)
    found = [
        [line[slice(*span)] for span in of] for line, of in zip((old, new), spans, strict=True)
    ]
    assert found == [old_words, new_words]


def test_a_line_in_the_page():
    line = 'if a < "&":'
    found = read.code_html(line, read.syntax([line + " pass"])[0][: len(line)], [(3, 6)])
    assert found == '<span class=k>if</span> <mark>a &lt;</mark> <span class=s>"&amp;"</span>:'
    kinds = read.syntax(["def f(x=1):  # why", '    """What', '    more."""'])
    assert ["".join(kind or "." for kind in line) for line in kinds] == [
        "kkk.d...n....ccccc",
        "....qqqqqqq",
        "qqqqqqqqqqqq",
    ]


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("02_naive_ddp", "04_overlap_ddp", "One all-reduce per parameter during backward, instead"),
        ("03_flat_ddp", "04_overlap_ddp", "Every gradient has an all-reduce of its own again, and"),
    ],
)
def test_a_sentence_says_what_changes(old, new, sentence):
    found = read.sentence(*lessons(old, new))
    assert found.startswith(sentence) and found.endswith(".") and found.count("\n") == 0


def test_any_two_texts_keep_their_lines_and_share_as_many_as_they_can():
    dice = random.Random(0)
    for _ in range(50):
        old, new = ([dice.choice("abcde ") * 3 for _ in range(dice.randrange(12))] for _ in "ab")
        rows = read.align(old, new)
        assert [row.left for row in rows if row.left is not None] == [*range(len(old))]
        assert [row.right for row in rows if row.right is not None] == [*range(len(new))]
        longest = {(): 0}  # common subsequence, of texts that begin at these lines
        for i, j in itertools.product(range(len(old), -1, -1), range(len(new), -1, -1)):
            below, beside = longest.get((i + 1, j), 0), longest.get((i, j + 1), 0)
            both = i < len(old) and j < len(new) and old[i] == new[j]
            longest[i, j] = max(below, beside, longest.get((i + 1, j + 1), 0) + 1 if both else 0)
        assert sum(row.kind == "same" for row in rows) == longest[0, 0]


def test_long_unchanged_stretches_fold_except_three_lines_beside_a_change():
    rows = [read.Row("same", i, i) for i in range(20)]
    rows[10] = read.Row("edit", 10, 10)
    assert [(folded, len(part)) for folded, part in read.stretches(rows)] == [
        (True, 7),
        (False, 3),
        (False, 1),
        (False, 3),
        (True, 6),
    ]


def test_nothing_comes_from_a_network(text):
    for name, value in re.findall(r' (src|href|srcset|action|data|poster)="?([^" >]*)', text):
        assert value.startswith("#") or value == "data:,", (name, value)
    assert "url(" not in text and "@import" not in text and "http:" not in text
    assert "content=\"default-src 'none';" in text  # the browser holds it, too


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_that_of_wcag_aa(scheme, text):
    block = re.search(rf":root {{\s*color-scheme: {scheme};(.*?)}}", text, re.DOTALL)[1]
    colors = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    code = ["text", "comment", "keyword", "string", "number", "name"]
    backgrounds = ["page", "old", "new", "old-word", "new-word", "moved"]
    together = [*itertools.product(code, backgrounds), ("on-accent", "accent"), ("accent", "page")]
    together += itertools.product(["quiet"], ["page", "old", "new", "moved", "bar", "soft"])
    together += [("text", "bar"), ("text", "soft")]
    for front, back in together:
        one, other = sorted(luminance(colors[name]) for name in (front, back))
        assert (other + 0.05) / (one + 0.05) >= 4.5, (front, back)


def test_the_ideas_are_those_of_make_help():
    for stage, idea in read.LADDER.items():
        assert re.search(rf"## +make {stage} +{', '.join(idea)}\n", (ROOT / "Makefile").read_text())


def lessons(*stages: str) -> list[read.Lesson]:
    return [read.read_lesson(stage) for stage in stages]


def test_the_page_is_written_or_one_line_says_why_not(monkeypatch, capsys, tmp_path, text):
    monkeypatch.setattr(read, "page", lambda: text)
    monkeypatch.setattr(read, "ROOT", tmp_path)
    read.main()
    assert (tmp_path / "results" / "ladder.html").read_text() == text
    assert capsys.readouterr().out.startswith("written: results/ladder.html (open it in a browser")
    monkeypatch.setattr(read, "ROOT", tmp_path / "is" / "not" / "there")
    with pytest.raises(SystemExit) as end:
        read.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and "ladder.html: cannot be" in said, said


@pytest.mark.parametrize(
    "words, command",
    [
        ([], "python3 -m common.read.read"),
        (["PYTHON=my python"], '"my python" -m common.read.read'),
    ],
)
def test_make_needs_no_environment(words, command):
    status, output = make("-n", "read", *words)
    assert status == 0 and output.splitlines()[-1] == command, output
    assert ".venv" not in output and "check-python" not in output


def test_needs_python_alone():
    """-S: what was installed is out of reach."""
    command = [sys.executable, "-S", "-m", "common.read.read"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and "written: " in run.stdout, run.stderr


BROWSERS = map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])
CHROMIUM = next(filter(None, BROWSERS), "")
PROBE_ERRORS = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
document.addEventListener("securitypolicyviolation", (event) => errors.push(event.blockedURI));
</script>"""
PROBE = """<script>
const wait = () => new Promise((done) => setTimeout(done, 50));
const seen = () => sections.filter((one) => !one.hidden).map((one) => one.id).join();
const keydown = (key) => document.body.dispatchEvent(
  new KeyboardEvent("keydown", {key: key, bubbles: true}));
async function probe() {
  const found = {widths: {}, wrapped: {}, order: [seen()]};
  for (const section of sections) {
    location.hash = section.id;
    await wait();
    found.widths[seen()] = document.documentElement.scrollWidth - innerWidth;
    for (const one of section.querySelectorAll("details")) one.open = true;
    const cells = [...section.querySelectorAll("code:not(.moved)")];
    const height = Math.min(...cells.map((cell) => cell.firstChild ? 1e9 : cell.offsetHeight));
    found.wrapped[section.id] = cells.filter((cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return range.getBoundingClientRect().height > 1.5 * height;
    }).length;
  }
  location.hash = "02-03";
  await wait();
  for (const key of ["ArrowRight", "j", "j", "k", "ArrowLeft"]) {
    keydown(key);
    await wait();
    found.order.push(seen());
  }
  upper.value = "05";
  upper.dispatchEvent(new Event("change"));
  await wait();
  found.order.push(seen());
  keydown("ArrowLeft");
  await wait();
  found.order.push(seen());
  lower.value = "04";
  lower.dispatchEvent(new Event("change"));
  await wait();
  found.order.push(seen());
  const closed = () => shown.querySelectorAll("details:not([open])").length;
  for (const one of shown.querySelectorAll("details")) one.open = false;
  found.folds = [closed()];
  keydown("f");
  found.folds.push(closed());
  keydown("?");
  found.keys = [by("keys").open];
  keydown("?");
  found.keys.push(by("keys").open);
  keydown("n");
  await wait();
  found.errors = errors;
  found.inner = innerWidth;
  const pre = document.createElement("pre");
  pre.id = "found";
  pre.textContent = JSON.stringify(found);
  document.body.append(pre);
}
probe();
</script>"""


@pytest.mark.full
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize("width", [900, 1920])
def test_in_a_browser(width, text, tmp_path):
    page = tmp_path / "ladder.html"
    page.write_text(text.replace("<style>", PROBE_ERRORS + "<style>", 1) + PROBE, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--window-size={width},900", "--virtual-time-budget=20000", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}/profile", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="found">(.*?)</pre>', run.stdout, re.DOTALL)
    assert match, run.stderr
    assert "CONSOLE" not in run.stderr, run.stderr
    found = json.loads(match[1])
    assert found["errors"] == [] and width - 20 <= found["inner"] <= width
    assert len(found["widths"]) == 6 and max(found["widths"].values()) <= 0
    if width >= 1600:  # two columns of 100 characters fit
        assert set(found["wrapped"].values()) == {0}, found
    order = ["02-03", "03-04", "04-05", "04-05", "03-04", "02-03", "02-05", "02-03", "04-05"]
    assert found["order"] == order
    assert found["folds"][0] > 0 and found["folds"][1] == 0
    assert found["keys"] == [True, False]
