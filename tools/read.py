r"""The lessons of 02 to 05 side by side, as a page for the browser: make read.

    python3 -m tools.read                    (writes results/ladder.html)

A lesson is all of a script above its marker line. The page is one file, needs nothing from a
network, and shows the neighbours without JavaScript too. Needs the standard library alone.
"""

import difflib
import html
import keyword
import re
import string
import sys
from itertools import accumulate, combinations, groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = Path(__file__).with_suffix(".html")  # of the page and, below it, of a pair
LADDER = {  # rung: what travels, and when
    "02_naive_ddp": "one all-reduce per parameter, after backward",
    "03_flat_ddp": "one all-reduce of one flat tensor, after backward",
    "04_overlap_ddp": "one all-reduce per parameter, during backward",
    "05_bucketed": "one all-reduce per bucket, during backward",
}
SENTENCES = {  # what changes from one rung to another
    "02-03": "All gradients travel in one flat tensor: a single all-reduce instead of one per "
    "parameter, still after backward.",
    "02-04": "The all-reduce of a gradient starts while backward still computes the other "
    "gradients, and not after backward.",
    "02-05": "Gradients share a message, one all-reduce per bucket of up to 25 MB, and it starts "
    "while backward still computes the others.",
    "03-04": "Every gradient has an all-reduce of its own again, and it starts while backward "
    "still computes the other gradients.",
    "03-05": "The flat tensor is cut into buckets of up to 25 MB, and the all-reduce of each "
    "starts while backward still computes the others.",
    "04-05": "Gradients share a message: one all-reduce per bucket of up to 25 MB instead of one "
    "per parameter, still during backward.",
}
NEIGHBOURS = ["02-03", "03-04", "04-05"]
CONTEXT = 3  # unchanged lines that stay in sight beside a change
SHORTEST_FOLD = 4
SYNTAX = re.compile(  # a class of the style sheet: what it colours
    r'(?P<q>r?"""(?s:.*?)""")'
    r"|(?P<c>#.*)"
    r'|(?P<s>[rf]?"(?:\\.|[^"\\\n])*")'
    r"|(?P<d>(?<=def )\w+|(?<=class )\w+)"
    rf"|(?P<k>\b(?:{'|'.join(keyword.kwlist)})\b)"
    r"|(?P<n>\b\d[\w.]*)"
)


class Lesson(NamedTuple):
    idea: str
    path: str  # below the repository's root
    number: str
    wrapper: str  # the name of its class
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
    return Lesson(LADDER[stage], path, stage[:2], wrapper, lines, syntax(lines))


def syntax(lines: list[str]) -> list[list[str]]:
    """A class of the style sheet for every character of Python code, "" for most."""
    text = "\n".join(lines)
    classes = [""] * len(text)
    for match in SYNTAX.finditer(text):
        classes[match.start() : match.end()] = [match.lastgroup] * len(match[0])
    starts = accumulate((len(line) + 1 for line in lines), initial=0)
    return [classes[start : start + len(line)] for start, line in zip(starts, lines, strict=False)]


def align(old: list[str], new: list[str]) -> list[Row]:
    """The rows of two texts side by side."""
    # "- " and "+ " begin a line of one text, "  " one of both, and where "? " lines point at a
    # difference the "- " and the "+ " line beside them are one line that has changed.
    marks = "".join(line[0] for line in difflib.ndiff(old, new))
    rows = []
    left = right = 0
    for part in re.findall(r" |-\?\+\??|-\+\?|(?:\+|-(?!\?|\+\?))+", marks):
        kind = "same" if part == " " else "edit" if "?" in part else "lone"
        next_left = left + len(part.replace("+", "").replace("?", ""))
        next_right = right + len(part.replace("-", "").replace("?", ""))
        for lines in zip_longest(range(left, next_left), range(right, next_right)):
            rows.append(Row(kind, *lines))
        left, right = next_left, next_right
    return rows


def changed_words(old: str, new: str) -> tuple[set[int], set[int]]:
    """Where the words stand that differ: positions in the old line and in the new one."""
    words = [re.findall(r"\w+|\s+|.", line) for line in (old, new)]
    starts = [list(accumulate(map(len, of_line), initial=0)) for of_line in words]
    plain = [[word.strip() for word in of_line] for of_line in words]  # blanks are alike
    in_old, in_new = set(), set()
    matcher = difflib.SequenceMatcher(None, *plain, autojunk=False)
    for tag, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if tag != "equal":
            in_old.update(range(starts[0][old_from], starts[0][old_to]))
            in_new.update(range(starts[1][new_from], starts[1][new_to]))
    return in_old, in_new


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


def code_html(line: str, classes: list[str], marked: set[int]) -> str:
    """A line with its syntax in <span> and its changed words in <mark>."""
    text = ""
    for mark, of_mark in groupby(range(len(line)), lambda i: i in marked):
        inner = ""
        for kind, of_kind in groupby(of_mark, lambda i: classes[i]):
            piece = html.escape("".join(line[i] for i in of_kind), quote=False)
            inner += f"<span class={kind}>{piece}</span>" if kind else piece
        text += f"<mark>{inner}</mark>" if mark else inner
    return text


def cell(side: str, lesson: Lesson, i: int | None, marked: set[int]) -> str:
    """Line i of the side a or b."""
    if i is None:
        return f"<i class={side}></i>"
    line = lesson.lines[i]
    hang = len(line) - len(line.lstrip())
    code = code_html(line, lesson.syntax[i], marked)
    return f'<code class={side} data-n={i + 1} style="--i:{hang}">{code}</code>'


def row_html(old: Lesson, new: Lesson, row: Row) -> str:
    """A row with a cell per side."""
    in_old, in_new = set(), set()
    if row.kind == "edit":
        in_old, in_new = changed_words(old.lines[row.left], new.lines[row.right])
    cells = cell("a", old, row.left, in_old) + cell("b", new, row.right, in_new)
    return f'<div class="r {row.kind}">{cells}</div>'


def pair_html(template: string.Template, old: Lesson, new: Lesson) -> str:
    """The section of two lessons."""
    rows = align(old.lines, new.lines)
    body = []
    for folded, part in stretches(rows):
        text = "\n".join(row_html(old, new, row) for row in part)
        if folded:
            label = html.escape(fold_label([old.lines[row.left] for row in part]))
            text = f"<details><summary><span>{label}</span></summary>\n{text}\n</details>"
        body.append(text)
    heads = ""
    for name, lesson in (("a", old), ("b", new)):
        head = f"<b>{lesson.number}</b> {lesson.wrapper} <small>{lesson.idea}</small>"
        heads += f"<h3 class={name} title={lesson.path}>{head}</h3>"
    same = sum(row.kind == "same" for row in rows)
    left = len(old.lines) - same
    right = len(new.lines) - same
    pair = f"{old.number}-{new.number}"
    sides = f"{left} of {len(old.lines)} on the left, {right} of {len(new.lines)} on the right"
    return template.substitute(
        pair=pair,
        hidden="" if pair in NEIGHBOURS else "hidden",
        sentence=html.escape(SENTENCES[pair]),
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
    for pair in NEIGHBOURS:
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
