"""Do the pages say what the recordings say?

    python -m common.recordings.figures        (make reference runs it at the end)

Prints what does not, and ends with 1 if there is something. A number that is a link to a recording
occurs there, and so do those of a table right under `<!-- figures: FILE, FILE -->`, as the page
rounds them. In a table these are numbers with a decimal point or of at least 1,000, but for its
head and its first column.
"""

import re
import sys
from decimal import Decimal
from pathlib import Path

from common.setup import ROOT

CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*reference_output[^)\s]*\.txt)\)")
TABLE = re.compile(r"<!-- figures: (.*\.txt) -->\n+((?: *\|.*\n)+)")
NUMBER = re.compile(  # not in p50, 2.15.0, 2^20, ResNet-18
    r"(?<![\w.^])(?<![A-Za-z]-)(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?!\d|\.\d)"
)


def numbers_of(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in NUMBER.findall(text)]


def missing(numbers: list[Decimal], files: list[Path]) -> list[Decimal]:
    """Those that are no recorded number, rounded to as many decimals."""
    recorded = []
    for file in files:
        recorded += numbers_of(file.read_text()) if file.is_file() else []
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
    for said, target in LINK.findall(text):
        for number in missing(numbers_of(said), [page.parent / target]):
            wrong.append(f"{page}: {number} is not in {target}")
    for names, table in TABLE.findall(text):
        files = [page.parent / name.strip() for name in names.split(",")]
        for row in table.splitlines()[2:]:
            cells = LINK.sub("", row).strip(" |").split("|")
            numbers = numbers_of(" | ".join(cells[1:]))
            numbers = [n for n in numbers if n >= 1000 or n.as_tuple().exponent < 0]
            for number in missing(numbers, files):
                wrong.append(f"{page}: {number} is not in {names}")
    return wrong


def main() -> int:
    wrong = []
    for page in [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/**/*.md"))]:
        wrong += wrong_figures(page)
    print("\n".join([*wrong, f"figures of the pages that the recordings do not say: {len(wrong)}"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
