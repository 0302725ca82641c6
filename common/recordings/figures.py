"""Do the figures in the READMEs still say what the reference outputs say?

    python -m common.recordings.figures        (make reference runs it at the end)

Prints a line per figure that does not, and ends with 1 if there are any. How a README names the
source of a table is described in common/README.md; test_readmes.py holds every page to it.
"""

import itertools
import re
import statistics
import sys
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Line(NamedTuple):
    """A line of a README, and where it stands."""

    number: int
    text: str  # without HTML comments
    kind: str  # "code", "table", "heading", "figures" (a marker) or "prose"
    section: str  # the text of the last heading that begins with "## "
    folded: bool  # within <details>


MARKER = re.compile(r"\s*<!-- figures: (.*) -->\s*")
FENCE = re.compile(r"\s*(?:[-*] )?(`{3,}|~{3,})")


def parse(text: str) -> list[Line]:
    lines, fence, section, depth, comment = [], None, "", 0, False
    for number, line in enumerate(text.splitlines(), 1):
        opens = FENCE.match(line)
        kind = "prose"
        if fence:
            kind = "code"
            if opens and opens[1].startswith(fence):
                fence = None
        elif opens and not comment:
            kind, fence = "code", opens[1]
        elif MARKER.fullmatch(line):
            kind, line = "figures", MARKER.fullmatch(line)[1].strip()
        else:
            line, comment = without_comments(line, comment)
            if re.match("#+ ", line):
                kind = "heading"
                if line.startswith("## "):
                    section = line[3:].strip()
            elif line.lstrip().startswith("|"):
                kind = "table"
        if kind == "prose":
            depth += line.count("<details")
        lines.append(Line(number, line, kind, section, depth > 0))
        if kind == "prose":
            depth -= line.count("</details>")
    return lines


def without_comments(line: str, open_already: bool) -> tuple[str, bool]:
    """The line without its HTML comments, and whether one goes on in the next line."""
    if open_already:
        before, end, line = line.partition("-->")
        if not end:
            return "", True
    line = re.sub("<!--.*?-->", "", line)
    line, begin, _ = line.partition("<!--")
    return line, bool(begin)


NUMBER = re.compile(
    r"(?<![\w.^])(?<![A-Za-z]-)"  # not in p50, 2.15.0, 2^20, ResNet-18
    r"(?:(?<![^\s(|\[])[-+−])?"  # a sign only after a blank or an opening bracket
    r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?!\d|\.\d)"
)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)


def numbers_of(text: str) -> list[Decimal]:
    return [Decimal(found.replace(",", "").replace("−", "-")) for found in NUMBER.findall(text)]


def is_figure(number: Decimal) -> bool:
    return number.as_tuple().exponent < 0 or abs(number) >= 1000


def same(figure: Decimal, recorded: Decimal) -> bool:
    """Whether the figure is the recorded number, rounded to the figure's decimals."""
    return abs(figure - recorded) <= Decimal((0, (5,), figure.as_tuple().exponent - 1))


def matched(figures: list[Decimal], line: list[Decimal]) -> list[bool]:
    """Which of the figures stand in the line, in their order: as many as possible."""
    best = [[[] for _ in range(len(line) + 1)] for _ in range(len(figures) + 1)]
    for i in reversed(range(len(figures))):
        for j in reversed(range(len(line))):
            options = [best[i + 1][j], best[i][j + 1]]
            if same(figures[i], line[j]):
                options.append([i, *best[i + 1][j + 1]])
            best[i][j] = max(options, key=len)
    return [i in best[0][0] for i in range(len(figures))]


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def plain(cell: str) -> str:
    """A cell's text without bold, code and link marks."""
    return LINK.sub(r"\1", cell).replace("**", "").replace("`", "").strip()


def cited(text: str) -> list[tuple[str, str]]:
    """Links to reference outputs: what they say, and which file."""
    links = LINK.findall(CODE.sub(" ", text))
    return [(said, to) for said, to in links if "reference_output" in to and to.endswith(".txt")]


def without_code(lines: list[Line]) -> list[Line]:
    """The same lines without code spans, which may be wrapped in prose."""
    result = []
    for kind, group in itertools.groupby(lines, lambda line: line.kind if line.text else ""):
        group = list(group)
        texts = [line.text for line in group]
        if kind == "prose":
            text = CODE.sub(lambda span: " " + "\n" * span[0].count("\n"), "\n".join(texts))
            texts = text.split("\n")
        elif kind != "code":
            texts = [CODE.sub(" ", text) for text in texts]
        result += [line._replace(text=text) for line, text in zip(group, texts, strict=True)]
    return result


def numbers_beside_links(text: str) -> list[Decimal]:
    """The numbers outside code and link targets, without those that are links to a recording."""
    text = CODE.sub(" ", text)
    text = LINK.sub(lambda link: " " if "reference_output" in link[2] else f" {link[1]} ", text)
    return numbers_of(text)


def wrong_figures(path: Path) -> list[str]:
    """What in this README does not agree with the reference outputs: "README.md:12: …" each."""
    lines = parse(path.read_text())
    found = []
    for start, table in tables_of(lines):
        marker = next((line for line in reversed(lines[:start]) if line.text.strip()), None)
        marker = marker.text if marker and marker.kind == "figures" else None
        found += wrong_in_table(path.parent, marker, table)
    for line in lines:
        if line.kind == "figures":
            after = next((one for one in lines[line.number :] if one.text.strip()), line)
            if after.kind != "table":
                found.append((line.number, "a marker of figures, and no table right after it"))
    for line in without_code(lines):
        if line.kind in ("table", "prose"):
            found += [(line.number, complaint) for complaint in wrong_links(path.parent, line.text)]
    found += wrong_in_prose(path.parent, without_code(lines))
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return [f"{name}:{number}: {complaint}" for number, complaint in sorted(found)]


def tables_of(lines: list[Line]) -> list[tuple[int, list[Line]]]:
    """The index of each table's first line, and its lines."""
    tables = []
    for index, line in enumerate(lines):
        if line.kind == "table":
            if not index or lines[index - 1].kind != "table":
                tables.append((index, []))
            tables[-1][1].append(line)
    return tables


def sources(marker: str) -> list[str]:
    """The files that a marker names."""
    return [name.strip() for name in marker.removeprefix("median of ").split(",")]


def wrong_in_table(folder: Path, marker: str | None, table: list[Line]) -> list[tuple[int, str]]:
    if marker is None:
        for line in table:
            for number in numbers_beside_links(line.text):
                if number.as_tuple().exponent < 0:
                    how = "no marker <!-- figures: FILE --> right before the table"
                    return [(line.number, f"{number}: {how}")]
        return []
    if marker == "none":
        return []
    names = sources(marker)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return [(table[0].number, f"the marker names {missing[0]!r}, which is no file")]
    recorded = [line for name in names for line in (folder / name).read_text().splitlines()]
    wrong = []
    for line in table[2:]:  # after the heads and the rule under them
        label, *cells = cells_of(line.text)
        figures = [number for cell in cells for number in numbers_beside_links(cell)]
        if cited(line.text) or any(map(is_figure, figures)):
            figures = [number for number in figures if is_figure(number)]
        check = not_a_median if marker.startswith("median of ") else not_in_a_line
        if complaint := figures and check(figures, plain(label), recorded, ", ".join(names)):
            wrong.append((line.number, complaint))
    return wrong


def not_in_a_line(figures, label: str, recorded: list[str], names: str) -> str:
    def how_near(line):
        words = len(set(label.split()) & set(line.split()))
        return sum(matched(figures, numbers_of(line))), words

    nearest = max(recorded, key=how_near, default="")
    there = matched(figures, numbers_of(nearest))
    if all(there):
        return ""
    missing = [str(figure) for figure, is_there in zip(figures, there, strict=True) if not is_there]
    return f"{', '.join(missing)}: in no line of {names}; nearest: {' '.join(nearest.split())}"


def not_a_median(figures, label: str, recorded: list[str], names: str) -> str:
    entry = re.compile(rf"(^|  ){re.escape(label)}(  |$)")
    lines = [line for line in recorded if entry.search(line)]
    lines = lines or [line for line in recorded if label in line]
    if not lines:
        return f"no line of {names} says {label!r}"
    columns = zip(*map(numbers_of, lines), strict=False)
    medians = [statistics.median(column) for column in columns]
    missing = [str(one) for one in figures if not any(same(one, median) for median in medians)]
    if not missing:
        return ""
    said = " ".join(map(str, medians))
    return f"{', '.join(missing)}: no median of the lines {label!r} in {names}, which are {said}"


def wrong_links(folder: Path, text: str) -> list[str]:
    """Figures that are links to a recording, and do not occur in it."""
    wrong = []
    for said, target in cited(text):
        if (folder / target).is_file():  # else the test of links says so
            recorded = numbers_of((folder / target).read_text())
            said = numbers_of(said)
            figures = [number for number in said if is_figure(number)] or said
            missing = [one for one in figures if not any(same(one, other) for other in recorded)]
            wrong += [f"{number}: not in {target}" for number in missing]
    return wrong


CHECKED_SECTIONS = "Result", "The rungs", "Several hosts"  # the last two: of the front page


def wrong_in_prose(folder: Path, lines: list[Line]) -> list[tuple[int, str]]:
    """Numbers with a decimal point in the checked sections' prose that nobody recorded."""
    wrong = []
    for section in CHECKED_SECTIONS:
        here = [line for line in lines if line.section == section]
        prose = [line for line in here if line.kind == "prose"]
        targets = ["reference_output.txt"]
        targets += [to for _, to in cited("\n".join(line.text for line in prose))]
        for line in here:
            targets += sources(line.text) if line.kind == "figures" else []
        files = [folder / target for target in dict.fromkeys(targets)]
        recorded = [number for file in files if file.is_file() for number in numbers_in(file)]
        for line in prose:
            for number in numbers_beside_links(line.text):
                if line.folded or number.as_tuple().exponent >= 0:
                    continue
                if not any(same(number, other) for other in recorded):
                    where = "reference_output.txt or a recording that the section names"
                    wrong.append((line.number, f"{number}: not in {where}"))
    return wrong


def numbers_in(file: Path) -> list[Decimal]:
    return numbers_of(file.read_text())


def pages() -> list[Path]:
    """Every README of the repository; pytest has one of its own in a hidden folder."""
    return sorted([*ROOT.glob("README.md"), *ROOT.glob("[!.]*/README.md")])


def main() -> int:
    complaints = [complaint for page in pages() for complaint in wrong_figures(page)]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    rows = "1 place" if len(complaints) == 1 else f"{len(complaints) or 'no'} places"
    print(f"figures of the READMEs that the recordings do not say: {rows}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
