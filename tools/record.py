"""Record every reference output and picture again: make reference [ONLY=05_bucketed]

What its folder's scripts and common/ have not changed since is recorded again only if it is named,
so it goes on where it was interrupted. Leave the machine alone meanwhile: its speed changes within
minutes, so compare's runs lie in between all others. What fails is named in the end, and its old
recording stays. At last it checks the figures of the pages.
"""

import os
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

import torch

from common.report import processor_name
from common.setup import ROOT, Parser, fail, say
from tools import figures

SLOW = "NETWORK=1gbit,1ms"
TORCHRUN = "python -m tools.torchrun --standalone --nproc-per-node 2"
MEDIANS = "python 05_bucketed/compare/medians.py"
ON_1GBIT = (
    "'1 Gbit/s, 1 ms'=results/slow_{1..3}.json 'one call at a time'=results/one_call_{1..3}.json"
)


def in_turn(**candidates: tuple[int, str]) -> list[str]:
    """Runs that leave results/NAME_1.json and so on, and print nothing."""
    commands = []
    for number in range(1, 4):
        for name, (count, command) in candidates.items():
            if number <= count:
                words = f'ARGS="{WORDS.get(name, "")}--json results/{name}_{number}.json"'
                commands.append(f"{command} {words} > /dev/null")
    return commands


# The machine ran at half its usual speed: with half the batch backward takes as long as usual.
HALF = "--batch-size 5"
WORDS = dict.fromkeys(
    ["loopback", "slow", "one_call", "rate", "hosts"], f"{HALF} --steps 4 --warmup 2 "
)
WORDS |= dict.fromkeys(["of_4", "of_8"], f"{HALF} ")
COMPARE = "05_bucketed/compare/reference_output.txt"
RECORDINGS = {  # besides those below that are one command
    "01_allreduce/reference_output.txt": [
        "make 01_allreduce",
        "cp results/01_allreduce.png 01_allreduce/allreduce.png",
    ],
    COMPARE: [
        *in_turn(
            loopback=(3, "make compare"),
            slow=(3, f"make compare {SLOW}"),
            one_call=(3, f"make compare {SLOW},1"),
            rate=(1, "make compare NETWORK=1gbit,0"),
            hosts=(2, "make hosts RATE=1gbit"),
            of_4=(2, f"make compare NPROC=4 {SLOW}"),
            of_8=(1, f"make compare NPROC=8 {SLOW}"),
        ),
        f"{MEDIANS} loopback=results/loopback_{{1..3}}.json {ON_1GBIT} "
        "'1 Gbit/s'=results/rate_1.json hosts=results/hosts_{1..2}.json",
        f"{MEDIANS} {ON_1GBIT} --plot 05_bucketed/compare/compare.png > /dev/null",
        f"{MEDIANS} 2=results/slow_{{1..3}}.json 4=results/of_4_{{1..2}}.json "
        "8=results/of_8_1.json --predicted results/predict_1gbit.json "
        "--scaling 05_bucketed/compare/scaling.png",
    ],
    "05_bucketed/compare/reference_output_timeline.txt": [
        f'make timeline {SLOW} ARGS="{HALF}"',
        "cp results/timeline.png 05_bucketed/compare/timeline.png",
        "for stage in 0[2-5]*; do cp results/timeline_$stage.png $stage/timeline.png; done",
    ],
    "06_sharded_optimizer/reference_output.txt": [
        *in_turn(sharded=(2, "make 06_sharded_optimizer")),
        'make 06_sharded_optimizer ARGS="--json results/sharded_3.json"',
        f"{MEDIANS} 'three runs='results/sharded_{{1..3}}.json",
    ],
    "06_sharded_optimizer/fsdp/reference_output.txt": [
        *in_turn(fsdp=(2, "make 06_sharded_optimizer/fsdp")),
        'make 06_sharded_optimizer/fsdp ARGS="--json results/fsdp_3.json"',
        f"{MEDIANS} 'three runs='results/fsdp_{{1..3}}.json",
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
        f"{TORCHRUN} 07_resnet_ddp/waterfall.py",
        f"{TORCHRUN} 07_resnet_ddp/waterfall.py --image-size 224 --steps 3 --no-plot",
        "cp results/waterfall.png 07_resnet_ddp/waterfall.png",
    ],
    "08_ddp_rpc/reference_output_tables.txt": [
        'make 08_ddp_rpc ARGS="--steps 100 --embeddings 300"',
        'make 08_ddp_rpc ARGS="--steps 100 --embeddings 100000"',
    ],
    "08_ddp_rpc/reference_output_round_trip.txt": 3
    * ['make 08_ddp_rpc ARGS="--trainers 1 --servers 8 --round-trip-ms 2 --steps 100"'],
    "07_resnet_ddp/compile_ddp/reference_output_variants.txt": [
        f'make 07_resnet_ddp/compile_ddp ARGS="--batch-size 8 --steps 3 --fsdp{more}"'
        for more in ("", " --fsdp-wrap", " --fsdp-checkpoint", " --fsdp-wrap --fsdp-checkpoint")
    ],
    "docs/reference_output_hang.txt": ["bash docs/hang.sh python"],
}
BOTH = {"": "", "_1gbit": SLOW}  # what follows reference_output in the file's name: words of make
HALVES = {suffix: f'{words} ARGS="{HALF}"'.strip() for suffix, words in BOTH.items()}
COURSE = "--size medium --bucket-sizes-mb 1,10,100,1000 --batch-size 1 --steps 3 --warmup 1"
for folder, variants in {
    "01_allreduce/slow_network": {"": ""},
    "02_naive_ddp": HALVES,
    "03_flat_ddp": HALVES,
    "04_overlap_ddp": HALVES,
    "05_bucketed": HALVES,
    "05_bucketed/bucket_sweep": HALVES | {"_course": f'NETWORK=5gbit,1ms ARGS="{COURSE}"'},
    "05_bucketed/predict": HALVES,
    "06_sharded_optimizer": {"_1gbit": f'{SLOW} ARGS="{HALF} --no-verify"'},
    "07_resnet_ddp/compile_ddp": {"": "", "_1gbit": f'{SLOW} ARGS="--steps 5"'},
    "07_resnet_ddp/sweep": {"": "", "_full": 'ARGS="--full --batch-size 2 --steps 2 --warmup 1"'},
    "08_ddp_rpc": {"": ""},
}.items():
    for suffix, words in variants.items():
        RECORDINGS[f"{folder}/reference_output{suffix}.txt"] = [f"make {folder} {words}".strip()]
for suffix in BOTH:
    picture = f"cp results/bucket_sweep.png 05_bucketed/bucket_sweep/bucket_sweep{suffix}.png"
    RECORDINGS[f"05_bucketed/bucket_sweep/reference_output{suffix}.txt"].append(picture)

PREDICT = "05_bucketed/predict/reference_output_1gbit.txt"  # which compare draws, too
RECORDINGS[PREDICT] += [
    "cp results/predict.json results/predict_1gbit.json",
    "cp results/step.html 05_bucketed/predict/step.html",
    "cp results/gradients.png 04_overlap_ddp/gradients.png",
]


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


def record(name: str):
    """Run its commands, one whenever it is asked for the next; write the recording at the end."""
    changed = git("status", "--porcelain", "--", "*.py").stdout and ", changed"
    text = (
        f"commit     {git('rev-parse', '--short=9', 'HEAD').stdout.strip()}{changed}\n"
        f"torch      {torch.__version__}\n"
        f"processor  {processor_name()}, {os.cpu_count()} cores\n"
        f"date       {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC\n"
    )
    for command in RECORDINGS[name]:
        say(f"{name}: {command}")
        text += run(command)
        yield
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
    parts = []
    for name in names:
        if name != COMPARE:
            parts += [record(name), islice(of_compare, 1)]
    failures = []
    for part in [*parts, of_compare]:
        try:
            for _ in part:
                pass
        except subprocess.CalledProcessError as error:
            failures.append(f"FAILED, and the old recording stays: {error}")
    say("\n".join(failures))
    return figures.main() or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
