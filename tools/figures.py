"""Do the pages say what the recordings say?

    python -m tools.figures        (make reference runs it at the end)

Prints what does not, and ends with 1 if there is something. A number that is a link to a recording
occurs there, as the page rounds it: in a row that is named, [34.6](reference_output.txt "FlatDDP"),
or else anywhere. So do the numbers of a table right under `<!-- figures: FILE, FILE -->`, each in
the rows that have the name in its first column, if some have. In a table these are numbers with a
decimal point or of at least 1,000, but for its head and its first column.
"""

import re
import sys
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r'\[([^\]]*)\]\(([^)\s]*reference_output[^)\s]*\.txt)(?:\s+"([^"]*)")?\)')
TABLE = re.compile(r"<!-- figures: (.*\.txt) -->\n+((?: *\|.*\n)+)")
NUMBER = re.compile(  # not in p50, 2.15.0, 2^20, ResNet-18
    r"(?<![\w.^])(?<![A-Za-z]-)(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?!\d|\.\d)"
)


def numbers_of(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in NUMBER.findall(text)]


def rows_of(files: list[Path], name: str) -> list[str]:
    """The lines of recordings in which this name stands as words of its own; "": all lines."""
    lines = []
    for file in files:
        lines += file.read_text().splitlines() if file.is_file() else []
    whole_words = re.compile(rf"(?<!\S){re.escape(name)}(?!\S)" if name else "")
    return [line for line in lines if whole_words.search(line)]


def missing(numbers: list[Decimal], rows: list[str]) -> list[Decimal]:
    """Those that are no number of these rows, rounded to as many decimals."""
    recorded = numbers_of("\n".join(rows))
    found = []
    for number in numbers:
        rounding = Decimal((0, (5,), number.as_tuple().exponent - 1))
        if not any(abs(number - other) <= rounding for other in recorded):
            found.append(number)
    return found


def wrong_figures(page: Path) -> list[str]:
    """A line for each number of the page that is not in the recording that it names."""
    wrong = []
    text = CODE.sub("", page.read_text())
    for said, target, name in LINK.findall(text):
        row = f", row {name}" if name else ""
        for number in missing(numbers_of(said), rows_of([page.parent / target], name)):
            wrong.append(f"{page}: {number} is not in {target}{row}")
    for names, table in TABLE.findall(text):
        files = [page.parent / name.strip() for name in names.split(",")]
        for line in table.splitlines()[2:]:
            _, name, *cells = LINK.sub("", line).split("|")
            numbers = numbers_of(" | ".join(cells))
            numbers = [n for n in numbers if n >= 1000 or n.as_tuple().exponent < 0]
            rows = rows_of(files, name.strip()) or rows_of(files, "")
            for number in missing(numbers, rows):
                wrong.append(f"{page}: {number} is not in {names}, row {name.strip()}")
    return wrong


def main() -> int:
    wrong = []
    for page in [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/**/*.md"))]:
        wrong += wrong_figures(page)
    for line in wrong:
        print(line)
    print(f"figures of the pages that the recordings do not say: {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
