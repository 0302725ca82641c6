"""Record every reference output and picture again: make reference [ONLY=05_bucketed]

recordings.txt lists each file with its commands. A recording is made again if a command of it has
changed, or what it runs, or if it is named; so an interrupted run goes on where it stopped. Leave
the machine alone meanwhile: a run in which its speed drifts is made again, once. What fails is
named in the end, and its old recording stays. At last the figures of the pages are checked.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from common.ladder import MOST_DRIFT, NO_COMMUNICATION
from common.report import processor_name
from common.setup import ROOT, Parser, fail, say
from tools import figures

sys.path += [str(ROOT / "05_bucketed" / "compare"), str(ROOT / "01_allreduce" / "slow_network")]

import medians
from rows import STAGES


def read_list() -> dict[str, list[str]]:
    """Return {file: commands whose output it holds}, of recordings.txt."""
    name, recordings = "", {}
    for line in Path(__file__).with_name("recordings.txt").read_text().splitlines():
        if line.startswith(" "):
            recordings[name].append(line.strip())
        else:
            name = line
            recordings[name] = []
    return recordings


RECORDINGS = read_list()
TIMELINE = "05_bucketed/compare/reference_output_timeline.txt"
# Besides the scripts of its stage a recording may depend on these.
ALWAYS = ["common/*.py", "Makefile", "01_allreduce/slow_network/*.py", "tools/*.sh", "docs/*.sh"]
ALWAYS += ["tools/torchrun.py", ":!*/test_*.py"]


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def is_up_to_date(name: str) -> bool:
    """Tell whether it holds these commands, and what they run has not changed since."""
    path = ROOT / name
    text = path.read_text() if path.exists() else ""
    commit = re.match(r"commit +(\w+)\n", text)
    commands = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    if not commit or not commands or commands != RECORDINGS[name][: len(commands)]:
        return False
    stage = name[:2]  # 05 compares 02 to 05, and 06 trains in turn with 05
    stages = {"05": "0[2-5]_*/*.py", "06": "0[56]_*/*.py"}.get(stage, f"{stage}*/*.py")
    return git("diff", "--quiet", commit[1], "--", stages, *ALWAYS).returncode == 0


def run(command: str) -> str:
    """Return a command and what it prints, but for names of files.

    CalledProcessError if it fails, or if the machine's speed has drifted twice.
    """
    words = re.sub("^make ", "make --silent --no-print-directory ", command)
    words = re.sub("^python ", f"{shlex.quote(sys.executable)} ", words)
    options = {"stdout": subprocess.PIPE, "text": True, "check": True}
    file = re.search(r"--json (\S+\.json)", command)
    for _ in range(2):
        output = subprocess.run(["bash", "-c", words], cwd=ROOT, **options).stdout
        if not (file and command.startswith("make ") and has_drifted(ROOT / file[1])):
            lines = [line for line in output.splitlines() if not line.startswith("written: ")]
            return "\n".join(["", f"$ {command}", *lines, ""])
    raise subprocess.CalledProcessError(1, command, "the machine's speed drifts")


def has_drifted(file: Path) -> bool:
    """Tell whether the stretch of the network has changed by too much within a run."""
    lowest, highest = json.loads(file.read_text())["stretch"]
    return highest > MOST_DRIFT * lowest


def draw_stages(is_last_run: bool) -> bool:
    """Copy the timelines of a run if all agree with compare's; those of the last one in any case.

    A step agrees if its ratio lies in the range of compare's, and if its forward is within 15 % of
    that of `no communication`. compare's runs have to be there.
    """
    found = json.loads((ROOT / "results/timeline.json").read_text())["drawn"]
    floor = found[NO_COMMUNICATION]
    of_compare = [medians.read_run(ROOT / f"results/slow_{n}.json") for n in (1, 2, 3)]
    all_agree = True
    for stage in STAGES:
        drawn = found[stage.folder]
        expected = medians.ratios(of_compare, stage.name, NO_COMMUNICATION)
        ratio = drawn["step_ms"] / floor["step_ms"]
        forward = drawn["forward_ms"] / floor["forward_ms"]
        if not (min(expected) <= ratio <= max(expected) and abs(forward - 1) < 0.15):
            all_agree = False
            lowest, highest = min(expected), max(expected)
            say(f"{stage.folder}: {ratio:.2f} in the timeline, {lowest:.2f} to {highest:.2f}")
    if all_agree or is_last_run:
        for stage in STAGES:
            picture = ROOT / f"results/timeline_{stage.folder}.png"
            shutil.copy(picture, ROOT / stage.folder / "timeline.png")
        shutil.copy(ROOT / "results/timeline.gif", ROOT / "05_bucketed/compare/timeline.gif")
    return all_agree


def record(name: str) -> str:
    """Run its commands and write the recording; return what has failed: then the old one stays."""
    changed = git("status", "--porcelain", "--", "*.py").stdout and ", changed"
    text = (
        f"commit     {git('rev-parse', '--short=9', 'HEAD').stdout.strip()}{changed}\n"
        f"torch      {torch.__version__}\n"
        f"processor  {processor_name()}, {os.cpu_count()} cores\n"
        f"date       {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC\n"
    )
    for number, command in enumerate(RECORDINGS[name], 1):
        say(f"{name}: {command}")
        try:
            text += run(command)
        except subprocess.CalledProcessError as error:
            return f"FAILED, and the old recording of {name} stays: {error} {error.output or ''}"
        if name == TIMELINE and draw_stages(is_last_run=number == len(RECORDINGS[name])):
            break
    (ROOT / name).write_text(text)
    return ""


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("only", nargs="?", metavar="PATH", help="what their paths begin with")
    only = parser.parse_args().only
    names = [name for name in RECORDINGS if name.startswith(only or "")]
    if not names:
        fail(f"argument ONLY: no recording's path begins with {only}")
    if not only:
        names = [name for name in names if not is_up_to_date(name)]
    say(f"{len(names)} of {len(RECORDINGS)} recordings; all take two and a half hours")
    (ROOT / "results").mkdir(exist_ok=True)
    failures = list(filter(None, map(record, names)))
    say("\n".join(failures))
    return figures.main() or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
