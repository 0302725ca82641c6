"""Records every reference_output*.txt and every picture again.

    make reference                        what the present code has not recorded yet
    make reference ONLY=05_bucketed       everything whose path begins so, again

Use the machine for nothing else meanwhile: it would be in the figures. Its speed changes within
minutes, so the runs of `make compare` lie in between all others. What fails is named in the end,
and its old recording stays. Those on two "hosts" need Linux, that of runs that hang py-spy.

A recording is what its commands printed, one after another. Of what ran several times either every
output is there, or that of the last run and, from the JSON files of all, the medians with their
range (05_bucketed/compare/medians.py).
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from datetime import datetime, timezone
from itertools import chain, zip_longest
from pathlib import Path

import torch

from tools import figures
from common.report import processor_name
from common.setup import ROOT, Parser, fail, say

TORCHRUN = "python -m tools.torchrun --standalone --nproc-per-node 2"
RESNET = "07_resnet_ddp/resnet_ddp.py --results results/07_loading --epochs 1 --log-every 1000"
JPEGS = "--data synthetic --decode 500 --steps-per-epoch 12 --held-out 64"
MEDIANS = "python 05_bucketed/compare/medians.py"
NETWORKS = "loopback=results/loopback_{1..5}.json '1 Gbit/s, 1 ms='results/emulated_{1..3}.json"


def runs(count: int, name: str, command: str) -> list[str]:
    """Runs that leave results/NAME_1.json and so on; only the last one's output is recorded."""
    commands = []
    for number in range(1, count + 1):
        commands.append(f'{command} ARGS="--json results/{name}_{number}.json"')
    return [f"{command} > /dev/null" for command in commands[:-1]] + commands[-1:]


COMPARE = "05_bucketed/compare/reference_output.txt"
LOOPBACK = runs(5, "loopback", "make compare")
ON_1GBIT = runs(3, "emulated", "make compare NETWORK=1gbit,1ms")
BETWEEN_HOSTS = runs(3, "slow", "make hosts RATE=1gbit DELAY=1ms")
RECORDINGS = {  # the commands whose output is recorded, and those that put pictures beside it
    "01_allreduce/reference_output.txt": [
        "make 01_allreduce",
        "cp results/01_allreduce.png 01_allreduce/allreduce.png",
    ],
    "01_allreduce/shared_memory/reference_output.txt": [
        "make 01_allreduce/shared_memory",
        "cp results/shared_memory.png 01_allreduce/shared_memory/shared_memory.png",
    ],
    "01_allreduce/slow_network/reference_output.txt": ["make 01_allreduce/slow_network"],
    "02_naive_ddp/reference_output.txt": ["make 02_naive_ddp"],
    "02_naive_ddp/reference_output_1gbit.txt": ["make 02_naive_ddp NETWORK=1gbit,1ms"],
    "03_flat_ddp/reference_output.txt": ["make 03_flat_ddp"],
    "03_flat_ddp/reference_output_1gbit.txt": ["make 03_flat_ddp NETWORK=1gbit,1ms"],
    "04_overlap_ddp/reference_output.txt": ["make 04_overlap_ddp"],
    "04_overlap_ddp/reference_output_1gbit.txt": ["make 04_overlap_ddp NETWORK=1gbit,1ms"],
    "05_bucketed/reference_output.txt": ["make 05_bucketed"],
    "05_bucketed/reference_output_1gbit.txt": ["make 05_bucketed NETWORK=1gbit,1ms"],
    "05_bucketed/bucket_sweep/reference_output.txt": [
        "make 05_bucketed/bucket_sweep",
        "cp results/bucket_sweep.png 05_bucketed/bucket_sweep/bucket_sweep.png",
    ],
    "05_bucketed/bucket_sweep/reference_output_1gbit.txt": [
        "make 05_bucketed/bucket_sweep NETWORK=1gbit,1ms",
        "cp results/bucket_sweep.png 05_bucketed/bucket_sweep/bucket_sweep_1gbit.png",
    ],
    COMPARE: [
        *filter(None, chain(*zip_longest(LOOPBACK, ON_1GBIT, BETWEEN_HOSTS))),  # in turn
        f"{MEDIANS} {NETWORKS} 'between hosts='results/slow_{{1..3}}.json",
        f"{MEDIANS} {NETWORKS} --plot 05_bucketed/compare/compare.png > /dev/null",
    ],
    "05_bucketed/compare/reference_output_timeline.txt": [
        "make timeline NETWORK=1gbit,1ms",
        "cp results/timeline.png 05_bucketed/compare/timeline.png",
        "cp results/timeline_02_naive_ddp.png 02_naive_ddp/timeline.png",
        "cp results/timeline_03_flat_ddp.png 03_flat_ddp/timeline.png",
        "cp results/timeline_04_overlap_ddp.png 04_overlap_ddp/timeline.png",
        "cp results/timeline_05_bucketed.png 05_bucketed/timeline.png",
    ],
    "05_bucketed/predict/reference_output.txt": ["make 05_bucketed/predict"],
    "05_bucketed/predict/reference_output_1gbit.txt": [
        "make 05_bucketed/predict NETWORK=1gbit,1ms"
    ],
    "05_bucketed/predict/reference_output_hosts.txt": [
        "make hosts SCRIPT=05_bucketed/predict/predict.py RATE=1gbit DELAY=1ms"
    ],
    "05_bucketed/predict/reference_output_extrapolate.txt": [
        'make 05_bucketed/predict ARGS="--extrapolate 10,100,400"'
    ],
    "06_sharded_optimizer/reference_output.txt": [
        *runs(3, "run", "make 06_sharded_optimizer"),
        f"{MEDIANS} 'three runs='results/run_{{1..3}}.json",
    ],
    "06_sharded_optimizer/fsdp/reference_output.txt": [
        *runs(3, "run", "make 06_sharded_optimizer/fsdp"),
        f"{MEDIANS} 'three runs='results/run_{{1..3}}.json",
        "cp results/fsdp.png 06_sharded_optimizer/fsdp/fsdp.png",
    ],
    "06_sharded_optimizer/fsdp/reference_output_accounting.txt": [
        'make 06_sharded_optimizer/fsdp ARGS="--accounting --size xl"',
        'make 06_sharded_optimizer/fsdp ARGS="--accounting --size 10b"',
    ],
    "07_resnet_ddp/reference_output.txt": [
        "make 07_resnet_ddp",
        "make 07_resnet_ddp",
        "make 07_resnet_ddp",
        "cp results/speedup.png 07_resnet_ddp/speedup.png",
    ],
    "07_resnet_ddp/reference_output_waterfall.txt": [
        f"{TORCHRUN} 07_resnet_ddp/waterfall.py",
        f"{TORCHRUN} 07_resnet_ddp/waterfall.py --image-size 224 --steps 3 --warmup 1 --no-plot",
        "cp results/waterfall.png 07_resnet_ddp/waterfall.png",
    ],
    "07_resnet_ddp/reference_output_loading.txt": [
        f"python {RESNET} {JPEGS} --workers 0",
        f"{TORCHRUN} {RESNET} {JPEGS} --workers 0",
        f"python {RESNET} {JPEGS} --workers 2",
        f"{TORCHRUN} {RESNET} {JPEGS} --workers 2",
    ],
    "07_resnet_ddp/sweep/reference_output.txt": ["make 07_resnet_ddp/sweep"],
    "07_resnet_ddp/sweep/reference_output_full.txt": [
        'make 07_resnet_ddp/sweep ARGS="--full --batch-size 2 --steps 2 --warmup 1"'
    ],
    "07_resnet_ddp/sweep/reference_output_hosts.txt": [
        "make hosts SCRIPT=07_resnet_ddp/sweep/sweep.py"
    ],
    "07_resnet_ddp/compile_ddp/reference_output.txt": ["make 07_resnet_ddp/compile_ddp"],
    "07_resnet_ddp/compile_ddp/reference_output_variants.txt": [
        'make 07_resnet_ddp/compile_ddp ARGS="--variants --batch-size 8 --steps 3"'
    ],
    "08_ddp_rpc/reference_output.txt": ["make 08_ddp_rpc"],
    "08_ddp_rpc/reference_output_8x8.txt": 3
    * ['make 08_ddp_rpc NPROC=8 ARGS="--lookup both --steps 100"'],
    "08_ddp_rpc/reference_output_round_trip.txt": 3
    * [
        'make 08_ddp_rpc ARGS="--trainers 1 --servers 8 --lookup both --round-trip 2ms --steps 100"'
    ],
    "08_ddp_rpc/reference_output_tables.txt": [
        'make 08_ddp_rpc ARGS="--steps 100 --embeddings 300"',
        'make 08_ddp_rpc ARGS="--steps 100 --embeddings 100000"',
    ],
    "docs/reference_output_hang.txt": ["bash docs/hang.sh python"],
}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def commit() -> str:
    """The last commit that changed more than pages and recordings, and whether more is changed."""
    code = [".", ":!*.md", ":!*.png", ":!*reference_output*.txt"]
    last = git("log", "-1", "--format=%h", "--abbrev=9", "--", *code)
    return f"{last}, changed" if git("status", "--porcelain", "--", *code) else last


def run(command: str) -> str:
    """A command and what it prints, but for names of files; CalledProcessError if it fails.

    All that it has started ends with this process.
    """
    words = re.sub(r"(?<!\S)python(?!\S)", shlex.quote(sys.executable), command)
    words = re.sub(r"^make ", "make --silent --no-print-directory ", words)
    options = {"stdout": subprocess.PIPE, "encoding": "utf-8", "start_new_session": True}
    with subprocess.Popen(["bash", "-c", words], cwd=ROOT, **options) as shell:
        try:
            output, _ = shell.communicate()
        except KeyboardInterrupt:
            os.killpg(shell.pid, signal.SIGTERM)
            raise
    if shell.returncode:
        raise subprocess.CalledProcessError(shell.returncode, command)
    lines = [line for line in output.splitlines() if not line.startswith("written: ")]
    return "\n".join(["", f"$ {command}", *lines, ""])


def in_order(names: list[str]) -> list[tuple[str, str]]:
    """(recording, command) for all commands; COMPARE's runs lie evenly in between all others."""
    commands = [
        (name, command) for name in names if name != COMPARE for command in RECORDINGS[name]
    ]
    runs = [(COMPARE, command) for command in RECORDINGS[COMPARE]] if COMPARE in names else []
    others = len(commands)
    for number, run in enumerate(runs):
        commands.insert(number + others * (number + 1) // len(runs), run)
    return commands


def write(name: str, texts: list[str]) -> None:
    """A recording: what its commands have printed, below the code and the machine they ran on."""
    head = (
        f"commit     {commit()}\n"
        f"torch      {torch.__version__}\n"
        f"processor  {processor_name()}, {os.cpu_count()} cores\n"
        f"date       {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC\n"
    )
    (ROOT / name).write_text(head + "".join(texts))


def output_of(path: Path) -> str:
    """What the first command that prints something has printed."""
    _, _, text = path.read_text().partition("\n\n")
    outputs = re.split(r"^\$ .*\n", text, flags=re.MULTILINE)
    return next(output.rstrip("\n") + "\n" for output in outputs if output.strip())


def is_recorded(path: Path) -> bool:
    """Whether the present code has recorded it."""
    return path.exists() and path.read_text().startswith(f"commit     {commit()}\n")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("only", nargs="?", metavar="PATH", help="what their paths begin with")
    args = parser.parse_args()
    names = [name for name in RECORDINGS if name.startswith(args.only or "")]
    if not names:
        fail(f"argument ONLY: no recording's path begins with {args.only}")
    if not args.only:
        names = [name for name in names if not is_recorded(ROOT / name)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    (ROOT / "results").mkdir(exist_ok=True)
    say(f"{len(names)} of {len(RECORDINGS)} recordings, all within 50 minutes, commit {commit()}")
    texts = {name: [] for name in names}
    failures = {}
    commands = in_order(names)
    for number, (name, command) in enumerate(commands, 1):
        if name in failures:
            continue
        say(f"{number} of {len(commands)}, {name}: {command}")
        try:
            texts[name].append(run(command))
        except subprocess.CalledProcessError as error:
            failures[name] = f"FAILED at {name}, whose old recording stays: {error}"
        except KeyboardInterrupt:
            left = [name for name in names if len(texts[name]) < len(RECORDINGS[name])]
            say(f"interrupted: make reference goes on with the {len(left)} left")
            return 130
        if len(texts[name]) == len(RECORDINGS[name]):
            write(name, texts[name])
    for failure in failures.values():
        say(failure)
    return figures.main() or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
