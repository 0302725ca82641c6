r"""The lessons of 02 to 05 side by side, as a page for the browser: make read.

    python3 -m common.read.read                    (writes results/ladder.html)

A lesson is all of a script above its marker line. The page is one file, needs nothing from a
network, and shows the neighbours without JavaScript too. Needs the standard library alone.
"""

import difflib
import html
import io
import keyword
import re
import string
import sys
import tokenize
from collections import Counter
from itertools import accumulate, combinations, groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATES = Path(__file__).with_suffix(".html")  # of the page and, below it, of a pair
LADDER = {  # rung: what travels, and when
    "02_naive_ddp": ("one all-reduce per parameter", "after backward"),
    "03_flat_ddp": ("one all-reduce of one flat tensor", "after backward"),
    "04_overlap_ddp": ("one all-reduce per parameter", "during backward"),
    "05_bucketed": ("one all-reduce per bucket", "during backward"),
}
SENTENCES = {  # what changes from each rung to the next
    "02-03": "All gradients travel in one flat tensor: a single all-reduce instead of one per "
    "parameter, still after backward.",
    "03-04": "Every gradient has an all-reduce of its own again, and it starts while backward "
    "still computes the other gradients.",
    "04-05": "Gradients share a message: one all-reduce per bucket of up to 25 MB instead of one "
    "per parameter, still during backward.",
}
CONTEXT = 3  # unchanged lines that stay in sight beside a change
SHORTEST_FOLD = 4
ALIKE = 0.5  # lines that share less than this of their characters are two lines, not one changed
Spans = list[tuple[int, int]]  # from, to: positions in a line


class Lesson(NamedTuple):
    stage: str
    number: str
    wrapper: str  # the name of its class
    path: str  # below the repository's root
    lines: list[str]
    syntax: list[list[str]]  # of each line


class Row(NamedTuple):
    """A line on each side, or None; `kind` is same, edit (one line changed) or lone."""

    kind: str
    left: int | None
    right: int | None


def read_lesson(stage: str) -> Lesson:
    path = f"{stage}/{stage[3:]}.py"
    above, _, _ = (ROOT / path).read_text(encoding="utf-8").partition("\n# ====")
    wrapper = re.findall(r"^class (\w+)", above, re.MULTILINE)[-1]
    lines = above.rstrip().split("\n")
    return Lesson(stage, stage[:2], wrapper, path, lines, syntax(lines))


def align(old: list[str], new: list[str]) -> list[Row]:
    """The rows of two texts side by side.

    As many equal lines as there can be share a row (so that `diff` counts the same), and of the
    ways to do so the one in which the changed lines beside each other are most alike.
    """
    old_bags = [bag_of_words(line) for line in old]
    new_bags = [bag_of_words(line) for line in new]
    score = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]  # of the texts from here on

    def together(i: int, j: int) -> float:
        if old[i] == new[j]:
            return score[i + 1][j + 1] + 1000
        alike = likeness(old_bags[i], new_bags[j])
        return score[i + 1][j + 1] + alike if alike >= ALIKE else -1.0

    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            score[i][j] = max(together(i, j), score[i + 1][j], score[i][j + 1])
    rows = []
    i = lone_i = 0  # lone_…: where the lines begin that have no row yet
    j = lone_j = 0
    while i < len(old) and j < len(new):
        if score[i][j] == together(i, j):
            rows += lone_rows(range(lone_i, i), range(lone_j, j))
            rows.append(Row("same" if old[i] == new[j] else "edit", i, j))
            i = lone_i = i + 1
            j = lone_j = j + 1
        elif score[i][j] == score[i + 1][j]:
            i += 1
        else:
            j += 1
    return rows + lone_rows(range(lone_i, len(old)), range(lone_j, len(new)))


def bag_of_words(line: str) -> Counter:
    """{word: how many characters of the line are in it}"""
    bag = Counter()
    for word in re.findall(r"\w+|\S", line):
        bag[word] += len(word)
    return bag


def likeness(old: Counter, new: Counter) -> float:
    """The share of characters in words that two lines have in common, from 0 to 1."""
    return 2 * (old & new).total() / max(1, old.total() + new.total())


def lone_rows(left: range, right: range) -> list[Row]:
    """Lines without a partner: beside each other as far as both sides have some."""
    return [Row("lone", *lines) for lines in zip_longest(left, right)]


def changed_words(old: str, new: str) -> tuple[Spans, Spans]:
    """Where the words stand that differ: in the old line and in the new one."""
    old_words = re.findall(r"\w+|\s+|.", old)
    new_words = re.findall(r"\w+|\s+|.", new)
    old_plain = [word.strip() or " " for word in old_words]  # blanks are alike
    new_plain = [word.strip() or " " for word in new_words]
    matcher = difflib.SequenceMatcher(None, old_plain, new_plain, autojunk=False)
    changes = []
    joined = False  # to the change before: only punctuation is between them
    for tag, *place in matcher.get_opcodes():
        if tag == "equal":
            between = "".join(old_words[place[0] : place[1]])
            joined = bool(changes) and not re.search(r"\w", between)
        elif joined:
            changes[-1][1] = place[1]  # it ends where this one does
            changes[-1][3] = place[3]
        else:
            changes.append(place)
    old_starts = list(accumulate(map(len, old_words), initial=0))
    new_starts = list(accumulate(map(len, new_words), initial=0))
    return (
        [(old_starts[start], old_starts[end]) for start, end, _, _ in changes if start < end],
        [(new_starts[start], new_starts[end]) for _, _, start, end in changes if start < end],
    )


def moved_lines(old: list[str], new: list[str], rows: list[Row]) -> tuple[dict, dict]:
    """Lone lines that the other side has elsewhere: {line: where there}, for both sides."""
    lone = [row for row in rows if row.kind == "lone"]
    there = {}
    for row in lone:
        if row.right is not None and len(new[row.right].strip()) > 15:
            there.setdefault(new[row.right].strip(), []).append(row.right)
    moved = {}
    for row in lone:
        if row.left is not None and there.get(old[row.left].strip()):
            moved[row.left] = there[old[row.left].strip()].pop(0)
    return moved, {to: origin for origin, to in moved.items()}


def stretches(rows: list[Row]) -> list[tuple[bool, list[Row]]]:
    """The rows in parts: (folded, its rows). Long unchanged stretches fold, except their ends."""
    parts = []
    for same, group in groupby(rows, lambda row: row.kind == "same"):
        part = list(group)
        start = CONTEXT if part[0] != rows[0] else 0
        end = len(part) - (CONTEXT if part[-1] != rows[-1] else 0)
        if same and end - start >= SHORTEST_FOLD:
            parts += [(False, part[:start]), (True, part[start:end]), (False, part[end:])]
        else:
            parts.append((False, part))
    return [(folded, part) for folded, part in parts if part]


def fold_label(lines: list[str]) -> str:
    """How many lines are folded, and which functions and classes begin in them."""
    names = re.findall(r"^ *(?:def|class) (\w+)", "\n".join(lines), re.MULTILINE)
    return f"{len(lines)} unchanged lines" + (": " + ", ".join(names) if names else "")


def sentence(old: Lesson, new: Lesson) -> str:
    """What changes from one lesson to the other."""
    (what, when), (new_what, new_when) = LADDER[old.stage], LADDER[new.stage]
    of_any_two = f"{new_what.capitalize()} {new_when}, instead of {what} {when}."
    return SENTENCES.get(f"{old.number}-{new.number}", of_any_two)


def syntax(lines: list[str]) -> list[list[str]]:
    """A class of the style sheet for every character of Python code, "" for most."""
    text = "\n".join(lines) + "\n"
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    classes = [""] * len(text)
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = ""
        if token.type == tokenize.COMMENT:
            kind = "c"
        elif token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING"):
            kind = "q" if token.string.endswith('"""') else "s"
        elif token.type == tokenize.NUMBER:
            kind = "n"
        elif before in ("def", "class"):
            kind = "d"
        elif keyword.iskeyword(token.string):
            kind = "k"
        before = token.string
        (first, column), (last, last_column) = token.start, token.end
        start = starts[first - 1] + column
        end = starts[last - 1] + last_column
        classes[start:end] = [kind] * (end - start)
    return [classes[start : start + len(line)] for start, line in zip(starts, lines, strict=False)]


def code_html(line: str, classes: list[str], spans: Spans) -> str:
    """A line with its syntax in <span> and its changed words in <mark>."""
    marked = {position for span in spans for position in range(*span)}
    text = ""
    for mark, of_mark in groupby(range(len(line)), lambda i: i in marked):
        inner = ""
        for kind, of_kind in groupby(of_mark, lambda i: classes[i]):
            piece = html.escape("".join(line[i] for i in of_kind), quote=False)
            inner += f"<span class={kind}>{piece}</span>" if kind else piece
        text += f"<mark>{inner}</mark>" if mark else inner
    return text


def rows_html(old: Lesson, new: Lesson, rows: list[Row]) -> list[str]:
    """The rows, each with a cell per side."""
    moved_to, moved_from = moved_lines(old.lines, new.lines, rows)
    found = []
    before = "same"
    for row in rows:
        old_spans, new_spans = [], []
        if row.kind == "edit":
            old_spans, new_spans = changed_words(old.lines[row.left], new.lines[row.right])
        left = cell("a", old, row.left, old_spans, moved_to)
        right = cell("b", new, row.right, new_spans, moved_from)
        is_first = before == "same" and row.kind != "same"  # of a change
        first = " first" if is_first else ""
        before = row.kind
        found.append(f'<div class="r {row.kind}{first}">{left}{right}</div>')
    return found


def cell(side: str, lesson: Lesson, i: int | None, spans: Spans, moved: dict[int, int]) -> str:
    """Line i of the side a or b; moved: which of its lines the other side has elsewhere."""
    if i is None:
        return f"<i class={side}></i>"
    line = lesson.lines[i]
    hang = len(line) - len(line.lstrip())
    name = side
    note = ""
    if i in moved:
        name = f'"{side} moved"'
        note = f' data-moved="{"to" if side == "a" else "from"} {moved[i] + 1}"'
    place = f'class={name} data-n={i + 1} style="--i:{hang}"{note}'
    return f"<code {place}>{code_html(line, lesson.syntax[i], spans)}</code>"


def pair_html(template: string.Template, old: Lesson, new: Lesson) -> str:
    """The section of two lessons."""
    rows = align(old.lines, new.lines)
    cells = rows_html(old, new, rows)
    body = []
    for folded, part in stretches(rows):
        text = "\n".join(cells[: len(part)])
        cells = cells[len(part) :]
        if folded:
            label = html.escape(fold_label([old.lines[row.left] for row in part]))
            text = f"<details><summary><span>{label}</span></summary>\n{text}\n</details>"
        body.append(text)
    heads = ""
    for name, lesson in (("a", old), ("b", new)):
        idea = ", ".join(LADDER[lesson.stage])
        head = f"<b>{lesson.number}</b> {lesson.wrapper} <small>{idea}</small>"
        heads += f"<h3 class={name} title={lesson.path}>{head}</h3>"
    same = sum(row.kind == "same" for row in rows)
    left = len(old.lines) - same
    right = len(new.lines) - same
    pair = f"{old.number}-{new.number}"
    sides = f"{left} of {len(old.lines)} on the left, {right} of {len(new.lines)} on the right"
    return template.substitute(
        pair=pair,
        hidden="" if pair in SENTENCES else "hidden",
        sentence=html.escape(sentence(old, new)),
        total=left + right,
        count=f"{left + right} changed lines: {sides}",
        paths=f"{old.path} {new.path}",
        heads=heads,
        rows="\n".join(body),
    )


def page() -> str:
    """The whole page: every pair of rungs, the neighbours first in sight."""
    parts = TEMPLATES.read_text(encoding="utf-8").split("<!-- a pair -->\n")
    of_page, of_pair = map(string.Template, parts)
    lessons = [read_lesson(stage) for stage in LADDER]
    links = ""
    for pair in SENTENCES:
        links += f'<a href="#{pair}">{pair.replace("-", " <span>→</span> ")}</a>'
    options = []
    for lesson in lessons:
        options.append(f"<option value={lesson.number}>{lesson.number} {lesson.wrapper}</option>")
    sections = [pair_html(of_pair, old, new) for old, new in combinations(lessons, 2)]
    return of_page.substitute(
        links=links,
        lower="".join(options[:-1]),
        upper="".join(options[1:]),
        sections="\n".join(sections),
    )


def main() -> None:
    path = ROOT / "results" / "ladder.html"
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(), encoding="utf-8")
    except OSError as error:
        print(f"error: {path}: cannot be written ({error.strerror})", file=sys.stderr)
        sys.exit(2)
    print("written: results/ladder.html (open it in a browser; ? there shows the keys)")


if __name__ == "__main__":
    main()
