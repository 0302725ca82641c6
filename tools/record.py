"""Record every reference output and picture again: make reference [ONLY=05_bucketed]

A recording whose folder's scripts and common/ have not changed since is made again only if it is
named, so an interrupted run goes on where it stopped. Leave the machine alone meanwhile: its speed
changes within minutes, so compare's runs lie in between all others. What fails is named in the end,
and its old recording stays. At last the figures of the pages are checked.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

import torch

from common.report import processor_name
from common.setup import ROOT, Parser, fail, say
from tools import figures

SLOW = "NETWORK=1gbit,1ms"
MEDIANS = "python 05_bucketed/compare/medians.py"
WATERFALL = "python -m tools.torchrun --standalone --nproc-per-node 2 07_resnet_ddp/waterfall.py"
COURSE = "--size medium --bucket-sizes-mb 1,10,100,1000 --batch-size 1 --steps 3 --warmup 1"
RUNS = {  # of compare: how many, and by which command
    "loopback": (5, "make compare"),
    "slow": (3, f"make compare {SLOW}"),
    "one_call": (3, f"make compare {SLOW},1"),
    "rate": (1, "make compare NETWORK=1gbit,0"),
    "hosts": (3, "make hosts RATE=1gbit"),
    "of_4": (3, f"make compare NPROC=4 {SLOW}"),
    "of_8": (3, f"make compare NPROC=8 {SLOW}"),
}


def in_turn(**runs: tuple[int, str]) -> Iterator[str]:
    """Runs that leave results/NAME_1.json and so on, and print nothing."""
    for number in range(1, 1 + max(count for count, _ in runs.values())):
        for name, (count, command) in runs.items():
            if number <= count:
                yield f'{command} ARGS="--json results/{name}_{number}.json" > /dev/null'


def left_by(name: str, label: str) -> str:
    """The results of these RUNS, as medians.py takes them."""
    return f"'{label}'=results/{name}_{{1..{RUNS[name][0]}}}.json"


COMPARE = "05_bucketed/compare/reference_output.txt"
ON_1GBIT = f"{left_by('slow', '1 Gbit/s, 1 ms')} {left_by('one_call', 'one call at a time')}"
RECORDINGS = {  # besides those below that are one command
    COMPARE: [
        *in_turn(**RUNS),
        f"{MEDIANS} {left_by('loopback', 'loopback')} {ON_1GBIT} {left_by('rate', '1 Gbit/s')} "
        + left_by("hosts", "hosts"),
        f"{MEDIANS} {ON_1GBIT} --plot 05_bucketed/compare/compare.png > /dev/null",
        f"{MEDIANS} {left_by('slow', '2')} {left_by('of_4', '4')} {left_by('of_8', '8')} "
        "--predicted results/predict_1gbit.json --scaling 05_bucketed/compare/scaling.png",
    ],
    "05_bucketed/compare/reference_output_timeline.txt": [
        f"make timeline {SLOW}",
        "cp results/timeline.png 05_bucketed/compare/timeline.png",
        "for stage in 0[2-5]*; do cp results/timeline_$stage.png $stage/timeline.png; done",
    ],
    "05_bucketed/predict/reference_output_1gbit.txt": [
        f"make 05_bucketed/predict {SLOW}",
        "cp results/predict.json results/predict_1gbit.json",  # which compare draws, too
        "cp results/step.html 05_bucketed/predict/step.html",
        "cp results/gradients.png 04_overlap_ddp/gradients.png",
    ],
    "06_sharded_optimizer/reference_output.txt": [
        *in_turn(sharded=(2, "make 06_sharded_optimizer")),
        'make 06_sharded_optimizer ARGS="--json results/sharded_3.json"',
        f"{MEDIANS} 'three runs'=results/sharded_{{1..3}}.json",
    ],
    "06_sharded_optimizer/fsdp/reference_output.txt": [
        *in_turn(fsdp=(2, "make 06_sharded_optimizer/fsdp")),
        'make 06_sharded_optimizer/fsdp ARGS="--json results/fsdp_3.json"',
        f"{MEDIANS} 'three runs'=results/fsdp_{{1..3}}.json",
        "cp results/fsdp.png 06_sharded_optimizer/fsdp/fsdp.png",
    ],
    "06_sharded_optimizer/fsdp/reference_output_accounting.txt": [
        'make 06_sharded_optimizer/fsdp ARGS="--accounting --size xl"',
        'make 06_sharded_optimizer/fsdp ARGS="--accounting --size 10b"',
    ],
    "07_resnet_ddp/reference_output.txt": [
        *3 * ["make 07_resnet_ddp"],
        "cp results/speedup.png 07_resnet_ddp/speedup.png",
    ],
    "07_resnet_ddp/reference_output_waterfall.txt": [
        f"{WATERFALL} --plot 07_resnet_ddp/waterfall.png",
        f"{WATERFALL} --image-size 224 --steps 3 --no-plot",
    ],
    "07_resnet_ddp/compile_ddp/reference_output_variants.txt": [
        f'make 07_resnet_ddp/compile_ddp ARGS="--batch-size 8 --steps 3 --fsdp{more}"'
        for more in ("", " --fsdp-wrap", " --fsdp-checkpoint", " --fsdp-wrap --fsdp-checkpoint")
    ],
    "08_ddp_rpc/reference_output_tables.txt": [
        'make 08_ddp_rpc ARGS="--steps 100 --embeddings 300"',
        'make 08_ddp_rpc ARGS="--steps 100 --embeddings 100000"',
    ],
    "08_ddp_rpc/reference_output_round_trip.txt": 3
    * ['make 08_ddp_rpc ARGS="--trainers 1 --servers 8 --round-trip-ms 2 --steps 100"'],
    "docs/reference_output_hang.txt": ["bash docs/hang.sh python"],
}
BOTH = {"": "", "_1gbit": SLOW}  # what follows reference_output in the file's name: words of make
for folder, variants in {
    "01_allreduce": {"": 'ARGS="--plot 01_allreduce/allreduce.png"'},
    "01_allreduce/slow_network": {"": ""},
    "02_naive_ddp": BOTH,
    "03_flat_ddp": BOTH,
    "04_overlap_ddp": BOTH,
    "05_bucketed": BOTH,
    "05_bucketed/bucket_sweep": {
        "": 'ARGS="--plot 05_bucketed/bucket_sweep/bucket_sweep.png"',
        "_1gbit": f'{SLOW} ARGS="--plot 05_bucketed/bucket_sweep/bucket_sweep_1gbit.png"',
        "_course": f'NETWORK=5gbit,1ms ARGS="{COURSE}"',
    },
    "05_bucketed/predict": {"": ""},
    "06_sharded_optimizer": {"_1gbit": f'{SLOW} ARGS="--no-verify"'},
    "07_resnet_ddp/compile_ddp": {"": "", "_1gbit": f'{SLOW} ARGS="--steps 5"'},
    "07_resnet_ddp/sweep": {"": "", "_full": 'ARGS="--full --batch-size 2 --steps 2 --warmup 1"'},
    "08_ddp_rpc": {"": "", "_8": 'NPROC=8 ARGS="--steps 100"'},
}.items():
    for suffix, words in variants.items():
        RECORDINGS[f"{folder}/reference_output{suffix}.txt"] = [f"make {folder} {words}".strip()]


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def is_recorded(name: str) -> bool:
    """Whether the scripts of its folder, those of the folders above, and common/ are as then."""
    folders = [str(folder) for folder in Path(name).parents[:-1]]
    code = [f":(glob){folder}/*.py" for folder in (*folders, "common")]
    path = ROOT / name
    commit = re.match(r"commit +(\w+)\n", path.read_text() if path.exists() else "")
    return bool(commit) and git("diff", "--quiet", commit[1], "--", *code).returncode == 0


def run(command: str) -> str:
    """A command and what it prints, but for names of files; CalledProcessError if it fails."""
    words = re.sub("^make ", "make --silent --no-print-directory ", command)
    words = re.sub("^python ", f"{shlex.quote(sys.executable)} ", words)
    options = {"stdout": subprocess.PIPE, "text": True, "check": True}
    output = subprocess.run(["bash", "-c", words], cwd=ROOT, **options).stdout
    lines = [line for line in output.splitlines() if not line.startswith("written: ")]
    return "\n".join(["", f"$ {command}", *lines, ""])


def record(name: str) -> Iterator[str]:
    """Run its commands, one whenever it is asked for the next; write the recording at the end.

    Yields "" for each, or what has failed: then the old recording stays.
    """
    changed = git("status", "--porcelain", "--", "*.py").stdout and ", changed"
    text = (
        f"commit     {git('rev-parse', '--short=9', 'HEAD').stdout.strip()}{changed}\n"
        f"torch      {torch.__version__}\n"
        f"processor  {processor_name()}, {os.cpu_count()} cores\n"
        f"date       {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC\n"
    )
    for command in RECORDINGS[name]:
        say(f"{name}: {command}")
        try:
            text += run(command)
        except subprocess.CalledProcessError as error:
            yield f"FAILED, and the old recording of {name} stays: {error}"
            return
        yield ""
    (ROOT / name).write_text(text)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("only", nargs="?", metavar="PATH", help="what their paths begin with")
    only = parser.parse_args().only
    names = [name for name in RECORDINGS if name.startswith(only or "")]
    if not names:
        fail(f"argument ONLY: no recording's path begins with {only}")
    if not only:
        names = [name for name in names if not is_recorded(name)]
    say(f"{len(names)} of {len(RECORDINGS)} recordings; all take about an hour")
    (ROOT / "results").mkdir(exist_ok=True)
    of_compare = record(COMPARE) if COMPARE in names else iter(())
    failures = []
    for name in names:
        if name != COMPARE:
            failures += [*record(name), *islice(of_compare, 1)]
    failures += of_compare
    say("\n".join(filter(None, failures)))
    return figures.main() or any(failures)


if __name__ == "__main__":
    sys.exit(main())
