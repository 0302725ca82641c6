"""Do the figures in the READMEs still say what the reference outputs say?

    python -m common.recordings.figures        (make reference runs it at the end)

Prints a line per figure that does not, and ends with 1 if there are any. There are two rules, which
test_readmes.py holds every page to:

- A figure that is a link to a reference output occurs in that file.
- In a table right under `<!-- figures: FILE, FILE -->` every figure occurs in one of the files.
  `<!-- figures: none -->` stands above a table without measurements. A table with decimals needs
  one of the two.

A figure is a number with a decimal point or of at least 1,000. It occurs in a file if a number
there is the same, rounded as the page prints it. Code, heads and the first column have no figures.
"""

import re
import sys
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

MARKER = re.compile(r"<!-- figures: (.*) -->")
FENCED = re.compile(r"^ *(?:[-*] )?(```+|~~~+).*?^ *\1", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--(?! figures: ).*?-->", re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
NUMBER = re.compile(
    r"(?<![\w.^])(?<![A-Za-z]-)"  # not in p50, 2.15.0, 2^20, ResNet-18
    r"(?:(?<![^\s(|\[])[-+−])?"  # a sign only after a blank or an opening bracket
    r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?!\d|\.\d)"
)


def without(text: str, *patterns: re.Pattern) -> str:
    """The text without what the patterns find; all lines keep their numbers."""
    for pattern in patterns:
        text = pattern.sub(lambda found: " " + "\n" * found[0].count("\n"), text)
    return text


def numbers_of(text: str) -> list[Decimal]:
    return [Decimal(found.replace(",", "").replace("−", "-")) for found in NUMBER.findall(text)]


def has_decimals(number: Decimal) -> bool:
    return number.as_tuple().exponent < 0


def is_figure(number: Decimal) -> bool:
    return has_decimals(number) or abs(number) >= 1000


def missing_in(files: list[Path], figures: list[Decimal]) -> list[Decimal]:
    """Those that are no recorded number, rounded to as many decimals."""
    recorded = []
    for file in files:
        if file.is_file():
            recorded += numbers_of(file.read_text())
    missing = []
    for figure in figures:
        rounding = Decimal((0, (5,), figure.as_tuple().exponent - 1))
        if not any(abs(figure - number) <= rounding for number in recorded):
            missing.append(figure)
    return missing


def is_recording(target: str) -> bool:
    return "reference_output" in target and target.endswith(".txt")


def wrong_links(folder: Path, text: str) -> list[tuple[int, str]]:
    """Rule one: (line number, complaint) for each. A link without figures is checked whole."""
    wrong = []
    for link in LINK.finditer(text):
        said, target = link.groups()
        if is_recording(target) and (folder / target).is_file():  # else the test of links says so
            numbers = numbers_of(said)
            figures = list(filter(is_figure, numbers)) or numbers
            for figure in missing_in([folder / target], figures):
                wrong.append((text.count("\n", 0, link.start()) + 1, f"{figure}: not in {target}"))
    return wrong


def numbers_beside_links(row: str) -> list[Decimal]:
    """The numbers of a table's row, but not of its first cell and of links to recordings."""
    row = LINK.sub(lambda link: "" if is_recording(link[2]) else link[1], row)
    cells = row.strip().strip("|").split("|")
    return numbers_of(" | ".join(cells[1:]))


def wrong_in_table(folder: Path, marker: str | None, table: list[tuple[int, str]]) -> list[tuple]:
    """Rule two; `table`: its lines with their numbers, `marker`: what stands above it."""
    wrong = []
    for line_number, row in table[2:]:  # below the heads and the rule under them
        numbers = numbers_beside_links(row)
        if marker is None:
            for number in numbers:
                if has_decimals(number):
                    complaint = f"{number}: no marker <!-- figures: FILE --> right above the table"
                    wrong.append((line_number, complaint))
        elif marker != "none":
            files = [folder / name.strip() for name in marker.split(",")]
            for figure in missing_in(files, list(filter(is_figure, numbers))):
                wrong.append((line_number, f"{figure}: not in {marker}"))
    return wrong


def wrong_figures(page: Path) -> list[str]:
    """What in this README does not agree with the reference outputs: "README.md:12: …" each."""
    text = without(page.read_text(), FENCED, COMMENT, CODE)
    wrong = wrong_links(page.parent, text)
    marker = None
    table = []
    for line_number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("|"):
            table.append((line_number, line))
        elif table:
            wrong += wrong_in_table(page.parent, marker, table)
            marker = None
            table = []
        elif line.strip():
            found = MARKER.search(line)
            marker = found[1] if found else None
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name
    return [f"{name}:{line_number}: {complaint}" for line_number, complaint in sorted(wrong)]


def pages() -> list[Path]:
    """Every page of the repository; pytest has one of its own in a hidden folder."""
    found = [ROOT / "README.md"]
    for pattern in ("[!.]*/*.md", "[!.]*/*/*.md"):
        found += sorted(ROOT.glob(pattern))
    return found


def main() -> int:
    complaints = []
    for page in pages():
        complaints += wrong_figures(page)
    for complaint in complaints:
        print(complaint)
    print(f"figures of the READMEs that the recordings do not say: {len(complaints)}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
