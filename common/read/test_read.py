"""`make read`: the page, the terminal, wrong names; in a real browser where there is one."""

import fcntl
import itertools
import json
import os
import pty
import random
import re
import shutil
import struct
import subprocess
import sys
import termios
from html.parser import HTMLParser

import pytest

from common.read import read
from common.testing.harness import ROOT

PAIRS = list(itertools.combinations(read.LADDER, 2))
COMMAND = [sys.executable, "-S", "-m", "common.read.read"]  # -S: what was installed is out of reach
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


class Page(HTMLParser):
    """Of each section: the lines of both sides as [number, text, marked words, kind of row]."""

    def __init__(self, text: str):
        super().__init__()
        self.sections = {}
        self.attributes = []  # (tag, name, value), of everything
        self.row = self.line = None
        self.folded = self.marked = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        attrs = dict(attrs)
        if tag == "section":
            self.section = {"hidden": "hidden" in attrs, "a": [], "b": [], "folded": [], "text": ""}
            self.sections[attrs["id"]] = self.section
        elif tag == "details":
            assert "open" not in attrs
            self.folded = True
        elif tag == "div" and attrs.get("class", "").startswith("r "):
            self.row = attrs["class"].split()[1]
            self.section["folded"] += [self.row] if self.folded else []
        elif tag == "code":
            self.line = [int(attrs["data-n"]), "", [], self.row]
            self.section[attrs["class"].split()[0]].append(self.line)
        elif tag == "mark":
            self.marked = True
            self.line[2].append("")

    def handle_endtag(self, tag):
        if tag == "code":
            self.line = None
        elif tag == "mark":
            self.marked = False
        elif tag == "details":
            self.folded = False

    def handle_data(self, data):
        if self.line:
            self.line[1] += data
            if self.marked:
                self.line[2][-1] += data
        elif self.sections:
            self.section["text"] += data


@pytest.fixture(scope="module")
def text() -> str:
    return read.page()


def test_every_line_of_both_lessons_is_there_once(text):
    sections = Page(text).sections
    assert list(sections) == [f"{old[:2]}-{new[:2]}" for old, new in PAIRS]
    for (old, new), section in zip(PAIRS, sections.values(), strict=True):
        for side, stage in (("a", old), ("b", new)):
            whole = (ROOT / stage / f"{stage[3:]}.py").read_text()
            lesson = whole[: whole.index("\n# ====")].rstrip().split("\n")
            assert [line[:2] for line in section[side]] == [[*n] for n in enumerate(lesson, 1)]
        assert section["hidden"] == ((old, new) not in read.NEIGHBOURS)
        assert set(section["folded"]) == {"same"}
        assert read.sentence(read.read_lesson(old), read.read_lesson(new)) in section["text"]


def test_a_new_name_is_a_small_change(text):
    sections = Page(text).sections
    marks = {line[1]: line[2] for line in sections["02-03"]["b"] if line[2]}
    assert marks["class FlatDDP(nn.Module):"] == ["FlatDDP"]
    assert marks["            dist.all_reduce(flat, group=self.process_group)"] == ["flat"]
    assert marks["WRAPPER, WRAPPER_OPTIONS = FlatDDP, {}"] == ["FlatDDP"]
    assert all(line[3] == "edit" for line in sections["02-03"]["b"] if line[2])


@pytest.mark.skipif(not shutil.which("diff"), reason="needs diff")
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_changed_lines_are_those_of_diff(pair, text):
    paths = [f"{stage}/{stage[3:]}.py" for stage in pair]
    run = subprocess.run(["diff", *paths], cwd=ROOT, capture_output=True, text=True)
    count = sum(line.startswith(("<", ">")) for line in run.stdout.splitlines())
    section = Page(text).sections["-".join(stage[:2] for stage in pair)]
    assert f"{count} changed lines" in section["text"]
    assert count == sum(line[3] != "same" for side in "ab" for line in section[side])


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
        (OLD[0], NEW[0], ["NaiveDDP"], ["FlatDDP"]),
        (OLD[4].strip(), NEW[3].strip(), ["p.grad"], ["flat"]),
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
        ("02", "04", "Still one all-reduce per parameter, but during backward instead of after"),
        ("05", "04", "Still during backward, but one all-reduce per parameter instead of one all-"),
        ("03", "05", "One all-reduce per bucket during backward, instead of one all-reduce of one"),
        ("03", "04", "Every gradient has an all-reduce of its own again, and it starts while"),
        (
            "01",
            "02",
            "01: all-reduce, shown, opened up and measured. 02: all-reduce every gradient",
        ),
    ],
)
def test_a_sentence_says_what_changes(old, new, sentence):
    found = read.sentence(*lessons(*read.find_pair(old, new)))
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
    for tag, name, value in Page(text).attributes:
        if name in ("src", "href", "srcset", "action", "data", "poster"):
            assert value.startswith("#") or value == "data:,", (tag, name, value)
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


@pytest.mark.parametrize("width", [80, 160, 205])
@pytest.mark.parametrize("pair", [PAIRS[2], PAIRS[2][::-1]], ids=" ".join)
def test_the_terminal_shows_every_changed_line(pair, width):
    old, new = lessons(*pair)
    plain = read.comparison(old, new, width, colour=False)
    coloured = read.comparison(old, new, width, colour=True)
    uncoloured = re.sub(r"\x1b\[\d+m", "", coloured)
    assert [line.rstrip() for line in uncoloured.split("\n")] == plain.split("\n")
    assert "\x1b" not in plain and "\x1b[7m" in coloured
    assert "… 22 unchanged lines: broadcast_from_rank_0, fill_if_unused" in plain
    if width >= 160:
        assert max(map(len, plain.splitlines())) <= width
    squeezed = re.sub(r"\s", "", plain)
    for row in read.align(old.lines, new.lines):
        if row.kind != "same" and width == 80:  # in columns the two sides alternate
            for lesson, i in ((old, row.left), (new, row.right)):
                assert i is None or re.sub(r"\s", "", lesson.lines[i]) in squeezed


def test_a_long_word_wraps_too():
    cells = read.wrap(7, 4 * " " + 50 * "x" + " y", [(4, 54)], "", 30)
    assert "".join(cell.strip() for cell in cells) == "7 " + 4 * " " + 50 * "x" + " y"
    assert {len(cell) for cell in cells} == {30}


def on_a_terminal(columns: int, **variables) -> str:
    """What a terminal of this width gets on standard output."""
    terminal, ours = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    command = [*COMMAND, "--from=02_naive_ddp", "--to=03"]
    run = subprocess.Popen(command, cwd=ROOT, env=environment | variables, stdout=ours)
    os.close(ours)
    shown = b""
    try:
        while piece := os.read(terminal, 65536):
            shown += piece
    except OSError:
        pass  # it is closed
    os.close(terminal)
    assert run.wait() == 0
    return shown.decode().replace("\r\n", "\n")


def test_colour_on_a_terminal_only_and_two_columns_where_they_fit():
    wide, narrow = on_a_terminal(160), on_a_terminal(159)
    assert "\x1b[31m" in wide and "\x1b[31m" in narrow
    without = on_a_terminal(160, NO_COLOR="1")
    assert "\x1b" not in without and " | " in without
    piped = subprocess.run(
        [*COMMAND, "--from=02_naive_ddp", "--to=03"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert piped.returncode == 0 and "\x1b" not in piped.stdout, piped.stderr
    for sign, lesson in zip("-+", lessons("02_naive_ddp", "03_flat_ddp"), strict=True):
        line = f"class {lesson.wrapper}(nn.Module):"
        number = lesson.lines.index(line) + 1
        assert f"{number:4} {sign} {line}\n" in piped.stdout
    plain = re.sub(r"\x1b\[\d+m", "", narrow).replace("→", "?").replace("…", "?")
    assert [line.rstrip() for line in plain.split("\n")][3:] == piped.stdout.split("\n")[3:]


def test_a_closed_pipe_is_no_error():
    words, pipe = COMMAND + ["--from=01", "--to=06"], subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == 0


def test_short_names_and_neighbours():
    assert read.find_pair("2", "05") == ("02_naive_ddp", "05_bucketed")
    assert read.find_pair("05_bucketed/", "02_naive_ddp") == ("05_bucketed", "02_naive_ddp")
    assert read.find_pair("03", "") == ("03_flat_ddp", "04_overlap_ddp")
    assert read.find_pair("", "03") == ("02_naive_ddp", "03_flat_ddp")
    assert read.find_pair("06_sharded_optimizer/sharded_optimizer.py", "08")[1] == "08_ddp_rpc"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--from=09"], "FROM=09 is not a stage: 01_allreduce, 02_naive_ddp, "),
        (["--from=02", "--to=bucketed"], "TO=bucketed is not a stage: "),
        (["--from=02", "--to=2"], "FROM=02_naive_ddp and TO=02_naive_ddp are the same"),
        (["--from=05"], "FROM=05_bucketed has no next rung: name TO too"),
        (["--to=02"], "TO=02_naive_ddp has no rung before it: name FROM too"),
        (["--to=06"], "TO=06_sharded_optimizer has no rung before it: name FROM too"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--output=/no/such/folder/x.html"], "/no/such/folder/x.html: cannot be written"),
    ],
)
def test_wrong_input_is_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["read.py", *words])
    with pytest.raises(SystemExit) as end:
        read.main()
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.out == ""
    assert captured.err.startswith(f"read.py: error: {message}"), captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "words, command",
    [
        ([], "python3 -m common.read.read"),
        (["FROM=02", "TO=5"], "python3 -m common.read.read --from='02' --to='5'"),
        (["TO=03", "PYTHON=my python"], "\"my python\" -m common.read.read --to='03'"),
    ],
)
def test_make_needs_no_environment(words, command):
    environment = {k: v for k, v in os.environ.items() if "MAKE" not in k}
    for name in ("FROM", "TO", "ARGS", "PYTHON"):
        environment.pop(name, None)
    command_line = ["make", "-n", "read", "ARGS=", *words]
    run = subprocess.run(command_line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert " ".join(run.stdout.splitlines()[-1].split()) == command, run.stdout + run.stderr
    assert ".venv" not in run.stdout and "check-python" not in run.stdout


CHROMIUM = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), ""
)
PROBE_ERRORS = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
document.addEventListener("securitypolicyviolation", (event) => errors.push(event.blockedURI));
</script>"""
PROBE = """<script>
const press = (key) => dispatchEvent(new KeyboardEvent("keydown", {key: key}));
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
  lower.value = "05" ; lower.value = "04";
  lower.dispatchEvent(new Event("change"));
  await wait();
  found.order.push(seen());
  const closed = () => shown.querySelectorAll("details:not([open])").length;
  for (const one of shown.querySelectorAll("details")) one.open = false;
  found.folds = [closed()];
  keydown("f");
  found.folds.push(closed());
  const before = isDark();
  keydown("t");
  found.themed = before !== isDark();
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
@pytest.mark.parametrize("width", [900, 1280, 1600, 1920])
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
    assert found["folds"][0] > 0 and found["folds"][1] == 0 and found["themed"]
    assert found["keys"] == [True, False]
