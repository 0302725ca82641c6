"""make read: every line of the four lessons is in the page."""

import html
import re
import subprocess
import sys

from tools.read import LADDER
from tools.testing import ROOT


def test_the_page_holds_the_lessons_and_needs_python_alone():
    """-S: what was installed is out of reach."""
    command = [sys.executable, "-S", "-m", "tools.read"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "written: results/read.html\n", run.stderr
    page = (ROOT / "results" / "read.html").read_text()
    shown = re.sub("<.*?>", "", html.unescape(page.replace("&nbsp;", " ")))
    for number, name in enumerate(LADDER, 2):
        text = (ROOT / f"{number:02}_{name}" / f"{name}.py").read_text()
        for line in text.partition("\n# ====")[0].splitlines():
            assert line in shown
