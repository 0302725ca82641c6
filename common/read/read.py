r"""The lessons of 02 to 05 side by side, as a page for the browser: make read.

    python3 -m common.read.read                    (writes results/ladder.html)

A lesson is all of a script above its marker line. The page is one file, needs nothing from a
network, and shows the neighbours without JavaScript too. Needs the standard library alone.
"""

import difflib
import html
import io
import itertools
import keyword
import re
import string
import sys
import tokenize
from collections import Counter
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
NEIGHBOURS = list(itertools.pairwise(LADDER))
SENTENCES = [  # what changes from each rung to the next
    "All gradients travel in one flat tensor: a single all-reduce instead of one per parameter, "
    "still after backward.",
    "Every gradient has an all-reduce of its own again, and it starts while backward still "
    "computes the other gradients.",
    "Gradients share a message: one all-reduce per bucket of up to 25 MB instead of one per "
    "parameter, still during backward.",
]
CONTEXT = 3  # unchanged lines that stay in sight beside a change
SHORTEST_FOLD = 4
ALIKE = 0.5  # lines that share less than this of their characters are two lines, not one changed
Spans = list[tuple[int, int]]  # from, to: positions in a line


class Lesson(NamedTuple):
    stage: str
    path: str  # below the repository's root
    lines: list[str]

    @property
    def number(self) -> str:
        return self.stage[:2]

    @property
    def wrapper(self) -> str:
        return re.findall(r"^class (\w+)", "\n".join(self.lines), re.MULTILINE)[-1]


class Row(NamedTuple):
    """A line on each side, or None; `kind` is same, edit (one line changed) or lone."""

    kind: str
    left: int | None
    right: int | None


def read_lesson(stage: str) -> Lesson:
    path = ROOT / stage / f"{stage[3:]}.py"
    above, _, _ = path.read_text(encoding="utf-8").partition("\n# ====")
    return Lesson(stage, f"{stage}/{path.name}", above.rstrip().split("\n"))


def words(line: str) -> list[str]:
    return re.findall(r"\w+|\s+|.", line)


def likeness(old: Counter, new: Counter) -> float:
    """The share of characters in words that two lines have in common, from 0 to 1."""
    return 2 * characters(old & new) / max(1, characters(old) + characters(new))


def characters(bag: Counter) -> int:
    return sum(len(word) * count for word, count in bag.items())


def align(old: list[str], new: list[str]) -> list[Row]:
    """The rows of two texts side by side.

    As many equal lines as there can be share a row (so that `diff` counts the same), and of the
    ways to do so the one in which the changed lines beside each other are most alike.
    """
    old_bags = [Counter(re.findall(r"\w+|\S", line)) for line in old]
    new_bags = [Counter(re.findall(r"\w+|\S", line)) for line in new]
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
    i = 0
    j = 0
    lone_left = []  # lines that have no row yet
    lone_right = []
    while i < len(old) or j < len(new):
        at_end = i == len(old) or j == len(new)
        if not at_end and score[i][j] == together(i, j):
            rows += lone_rows(lone_left, lone_right)
            lone_left = []
            lone_right = []
            rows.append(Row("same" if old[i] == new[j] else "edit", i, j))
            i += 1
            j += 1
        elif j == len(new) or (not at_end and score[i][j] == score[i + 1][j]):
            lone_left.append(i)
            i += 1
        else:
            lone_right.append(j)
            j += 1
    return rows + lone_rows(lone_left, lone_right)


def lone_rows(left: list[int], right: list[int]) -> list[Row]:
    """Lines without a partner: beside each other as far as both sides have some."""
    return [Row("lone", *lines) for lines in itertools.zip_longest(left, right)]


def changed_words(old: str, new: str) -> tuple[Spans, Spans]:
    """Where the words stand that differ: in the old line and in the new one."""
    old_words = words(old)
    new_words = words(new)
    old_plain = [word.strip() or " " for word in old_words]  # blanks are alike
    new_plain = [word.strip() or " " for word in new_words]
    matcher = difflib.SequenceMatcher(None, old_plain, new_plain, autojunk=False)
    changes = []
    joined = False  # to the change before: only punctuation is between them
    for tag, *place in matcher.get_opcodes():
        if tag == "equal":
            joined = bool(changes) and not re.search(r"\w", "".join(old_words[place[0] : place[1]]))
        elif joined:
            changes[-1] = [changes[-1][0], place[1], changes[-1][2], place[3]]
        else:
            changes.append(place)

    def span(parts: list[str], start: int, end: int) -> tuple[int, int]:
        return len("".join(parts[:start])), len("".join(parts[:end]))

    return (
        [span(old_words, start, end) for start, end, _, _ in changes if start < end],
        [span(new_words, start, end) for _, _, start, end in changes if start < end],
    )


def sides(old: list[str], new: list[str], row: Row) -> list[tuple]:
    """Left and right: the text, which line of it, and its changed words."""
    old_spans, new_spans = [], []
    if row.kind == "edit":
        old_spans, new_spans = changed_words(old[row.left], new[row.right])
    return [(old, row.left, old_spans), (new, row.right, new_spans)]


def moved_lines(old: list[str], new: list[str], rows: list[Row]) -> tuple[dict, dict]:
    """Lone lines that the other side has elsewhere: {line: where there}, for both sides."""
    there = {}
    for row in rows:
        if row.kind == "lone" and row.right is not None and len(new[row.right].strip()) > 15:
            there.setdefault(new[row.right].strip(), []).append(row.right)
    moved = {}
    for row in rows:
        if row.kind == "lone" and row.left is not None and there.get(old[row.left].strip()):
            moved[row.left] = there[old[row.left].strip()].pop(0)
    return moved, {to: origin for origin, to in moved.items()}


def stretches(rows: list[Row]) -> list[tuple[bool, list[Row]]]:
    """The rows in parts: (folded, its rows). Long unchanged stretches fold, except their ends."""
    parts = []
    groups = []
    for same, group in itertools.groupby(rows, lambda row: row.kind == "same"):
        groups.append((same, list(group)))
    for number, (same, group) in enumerate(groups):
        start = CONTEXT if number > 0 else 0
        end = len(group) - (CONTEXT if number < len(groups) - 1 else 0)
        if same and end - start >= SHORTEST_FOLD:
            parts += [(False, group[:start]), (True, group[start:end]), (False, group[end:])]
        else:
            parts.append((False, group))
    return [(folded, part) for folded, part in parts if part]


def fold_label(lines: list[str], rows: list[Row]) -> str:
    """How many lines are folded, and which functions and classes begin in them."""
    text = "\n".join(lines[row.left] for row in rows)
    names = re.findall(r"^ *(?:def|class) (\w+)", text, re.MULTILINE)
    return f"{len(rows)} unchanged lines" + (": " + ", ".join(names) if names else "")


def count_changes(rows: list[Row]) -> tuple[int, int]:
    """Lines that differ on the left and on the right; their sum is what `diff` counts."""
    changed = [row for row in rows if row.kind != "same"]
    on_the_left = sum(row.left is not None for row in changed)
    on_the_right = sum(row.right is not None for row in changed)
    return on_the_left, on_the_right


def describe_count(old: Lesson, new: Lesson, rows: list[Row]) -> str:
    left, right = count_changes(rows)
    sides = f"{left} of {len(old.lines)} on the left, {right} of {len(new.lines)} on the right"
    return f"{left + right} changed lines: {sides}"


def sentence(old: Lesson, new: Lesson) -> str:
    """What changes from one lesson to the other."""
    if (old.stage, new.stage) in NEIGHBOURS:
        return SENTENCES[NEIGHBOURS.index((old.stage, new.stage))]
    (what, when), (new_what, new_when) = LADDER[old.stage], LADDER[new.stage]
    return f"{new_what.capitalize()} {new_when}, instead of {what} {when}."


def syntax(lines: list[str]) -> list[list[str]]:
    """A class of the style sheet for every character of Python code, "" for most."""
    classes = [[""] * len(line) for line in lines]
    before = ""
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
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
        if not kind:
            continue
        first, start = token.start  # line and column
        last, end = token.end
        for row in range(first, last + 1):
            line = classes[row - 1]
            begin = start if row == first else 0
            stop = end if row == last else len(line)
            line[begin:stop] = [kind] * (stop - begin)
    return classes


def templates() -> list[string.Template]:
    parts = TEMPLATES.read_text(encoding="utf-8").split("<!-- a pair -->\n")
    return [string.Template(part) for part in parts]


def code_html(line: str, classes: list[str], spans: Spans) -> str:
    """A line with its syntax in <span> and its changed words in <mark>."""
    marked = {position for span in spans for position in range(*span)}
    characters = [(i in marked, kind, line[i]) for i, kind in enumerate(classes)]
    text = ""
    for mark, of_mark in itertools.groupby(characters, lambda character: character[0]):
        inner = ""
        for kind, group in itertools.groupby(of_mark, lambda character: character[1]):
            piece = html.escape("".join(character for _, _, character in group), quote=False)
            inner += f"<span class={kind}>{piece}</span>" if kind else piece
        text += f"<mark>{inner}</mark>" if mark else inner
    return text


def pair_html(old: Lesson, new: Lesson) -> str:
    """The section of two lessons."""
    rows = align(old.lines, new.lines)
    moved = moved_lines(old.lines, new.lines, rows)
    colours = syntax(old.lines), syntax(new.lines)

    def row_html(row: Row, first: bool) -> str:
        cells = []
        for side, (text, i, spans) in enumerate(sides(old.lines, new.lines, row)):
            name = "ab"[side]
            if i is None:
                cells.append(f"<i class={name}></i>")
                continue
            line = text[i]
            hang = len(line) - len(line.lstrip())
            note = ""
            if i in moved[side]:
                name = f'"{name} moved"'
                note = f' data-moved="{"to" if side == 0 else "from"} {moved[side][i] + 1}"'
            code = code_html(line, colours[side][i], spans)
            place = f'class={name} data-n={i + 1} style="--i:{hang}"{note}'
            cells.append(f"<code {place}>{code}</code>")
        return f'<div class="r {row.kind}{" first" if first else ""}">{"".join(cells)}</div>'

    body = []
    unchanged = True
    for folded, part in stretches(rows):
        lines = []
        for row in part:
            lines.append(row_html(row, unchanged and row.kind != "same"))
            unchanged = row.kind == "same"
        text = "\n".join(lines)
        if folded:
            label = html.escape(fold_label(old.lines, part))
            text = f"<details><summary><span>{label}</span></summary>\n{text}\n</details>"
        body.append(text)
    heads = []
    for name, lesson in (("a", old), ("b", new)):
        idea = ", ".join(LADDER[lesson.stage])
        head = f"<b>{lesson.number}</b> {lesson.wrapper} <small>{idea}</small>"
        heads.append(f"<h3 class={name} title={lesson.path}>{head}</h3>")
    return templates()[1].substitute(
        pair=f"{old.number}-{new.number}",
        hidden="" if (old.stage, new.stage) in NEIGHBOURS else "hidden",
        sentence=html.escape(sentence(old, new)),
        total=sum(count_changes(rows)),
        count=describe_count(old, new, rows),
        paths=f"{old.path} {new.path}",
        heads="".join(heads),
        rows="\n".join(body),
    )


def page() -> str:
    """The whole page: every pair of rungs, the neighbours first in sight."""
    lessons = {stage: read_lesson(stage) for stage in LADDER}
    links = []
    for one, other in NEIGHBOURS:
        links.append(f'<a href="#{one[:2]}-{other[:2]}">{one[:2]} <span>→</span> {other[:2]}</a>')
    options = []
    for stage, lesson in lessons.items():
        options.append(f"<option value={stage[:2]}>{stage[:2]} {lesson.wrapper}</option>")
    pairs = itertools.combinations(lessons.values(), 2)
    return templates()[0].substitute(
        links="".join(links),
        lower="".join(options[:-1]),
        upper="".join(options[1:]),
        sections="\n".join(pair_html(old, new) for old, new in pairs),
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
