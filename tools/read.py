"""The lessons of 02 to 05 beside each other, as one page for a browser: make read.

A lesson is all of a script but its last lines, which call common/ladder.py. Needs
Python alone, and no network.
"""

import difflib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>02 to 05, side by side</title>
<style>
body { margin: 2em; font: 15px/1.5 system-ui, sans-serif; color: #222 }
table { border-collapse: collapse; margin-bottom: 4em }
td { padding: 0 .5em; font: 12px/1.45 ui-monospace, Consolas, monospace; white-space: nowrap }
th { position: sticky; top: 0; padding: .4em .5em; background: #eee; text-align: left !important }
.diff_header, .diff_next { color: #999; text-align: right }
.diff_add { background: #c9f0d0 } .diff_sub { background: #ffd3d0 }
.diff_chg { background: #fff0a8 }
</style>
"""


def main() -> None:
    paths = [f"{folder.name}/{folder.name[3:]}.py" for folder in sorted(ROOT.glob("0[2-5]_*"))]
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
    lessons = [text.partition("\nif __name__")[0].splitlines() for text in texts]
    tables = []
    for (path, lesson), (next_path, next_lesson) in pairwise(zip(paths, lessons, strict=True)):
        diff = difflib.HtmlDiff(tabsize=4)
        table = diff.make_table(lesson, next_lesson, path, next_path)
        tables.append(f"<h2>{path[:2]} → {next_path[:2]}</h2>\n{table}")
    page = ROOT / "results" / "read.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join([PAGE, *tables]), encoding="utf-8")
    print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
