"""Do the pages say what the recordings say? Prints what does not, and ends with 1 if there is any.

    python -m tools.figures        (make reference runs it at the end)

A number that is a link to a recording occurs there, as the page rounds it: in a row that is named,
[34.6](reference_output.txt "FlatDDP"), or else anywhere. So do the numbers of a table right under
`<!-- figures: FILE, FILE -->`, each in the rows that have the name in its first column, if some
have. There these are numbers with a decimal point or a comma.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r'\[([^\]]*)\]\(([^)\s]*reference_output[^)\s]*\.txt)(?:\s+"([^"]*)")?\)')
TABLE = re.compile(r"<!-- figures: (.*\.txt) -->\n+((?: *\|.*\n)+)")
NUMBER = re.compile(  # not in p50, 2.15.0, 2^20, ResNet-18
    r"(?<![\w.^])(?<![A-Za-z]-)(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?!\d|\.\d)"
)


def claims_of(text: str):
    """Yields (files, row, numbers, whether there may be no such row) of links and of tables."""
    for said, file, row in LINK.findall(text):
        yield file, row, NUMBER.findall(said), not row
    for files, table in TABLE.findall(text):
        for line in table.splitlines()[2:]:
            _, row, *cells = LINK.sub("", line).split("|")
            numbers = NUMBER.findall(" | ".join(cells))
            yield files, row.strip(), [n for n in numbers if re.search("[.,]", n)], True


def occurs_in(number: str, recorded: list[str]) -> bool:
    """Tell whether one of these is this number, when it is rounded to as many decimals."""
    decimals = len(number.partition("e")[0].partition(".")[2])
    power = int(number.partition("e")[2] or 0)
    rounding = 0.5001 * 10 ** (power - decimals)
    value = float(number.replace(",", ""))
    return any(abs(value - float(other.replace(",", ""))) <= rounding for other in recorded)


def wrong_figures(page: Path) -> list[str]:
    """Return a line for each number of the page that is not in the recording that it names."""
    wrong = []
    for files, row, numbers, is_optional in claims_of(CODE.sub("", page.read_text())):
        paths = [page.parent / file.strip() for file in files.split(",")]
        lines = "\n".join(path.read_text() for path in paths if path.is_file()).splitlines()
        name = re.compile(rf"(?<!\S){re.escape(row)}(?!\S)")
        rows = [line for line in lines if row and name.search(line)]
        recorded = NUMBER.findall("\n".join(lines if is_optional and not rows else rows))
        for number in numbers:
            if not occurs_in(number, recorded):
                wrong.append(f"{page}: {number} is not in {files}, row {row or 'any'}")
    return wrong


def main() -> int:
    pages = [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/**/*.md"))]
    wrong = [line for page in pages for line in wrong_figures(page)]
    print("\n".join([*wrong, f"figures of the pages that no recording says: {len(wrong)}"]))
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())
