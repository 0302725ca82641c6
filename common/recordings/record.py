"""Records every reference_output*.txt and every picture again.

    make reference                        what the present code has not recorded yet
    make reference ONLY=05_bucketed       everything whose path begins so, again

Use the machine for nothing else meanwhile: it would be in the figures. Its speed changes within
minutes: the runs of `make compare` lie in between all others. What fails is named in the end, and
its old recording stays. Those on two "hosts" need Linux, that of runs that hang py-spy.

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
import time
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path

import torch

from common.recordings import figures
from common.report import processor_name
from common.setup import ROOT, Parser, fail, say

COMPARE = "05_bucketed/compare"
SWEEP = "05_bucketed/bucket_sweep"
PREDICT = "05_bucketed/predict"
FSDP = "06_sharded_optimizer/fsdp"
LADDER = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
ONCE = [*LADDER, PREDICT, "01_allreduce/slow_network", "08_ddp_rpc"]
ONCE += ["07_resnet_ddp/sweep", "07_resnet_ddp/compile_ddp"]
TORCHRUN = "python -m common.launch.torchrun --standalone --nproc-per-node 2"
RESNET = "07_resnet_ddp/resnet_ddp.py --results results/07_loading --epochs 1 --log-every 1000"
JPEGS = "--data synthetic --decode 500 --steps-per-epoch 12 --held-out 64"
EMULATED = "NETWORK=1gbit,1ms"
HOSTS = "RATE=1gbit DELAY=1ms"
MEDIANS = "python 05_bucketed/compare/medians.py"
NETWORKS = "loopback=results/loopback_{1..5}.json '1 Gbit/s, 1 ms='results/emulated_{1..3}.json"


def runs(count: int, name: str, command: str) -> list[str]:
    """Runs that leave results/NAME_1.json and so on; only the last one's output is recorded."""
    commands = []
    for number in range(1, count + 1):
        commands.append(f'{command} ARGS="--json results/{name}_{number}.json"')
    return [f"{command} > /dev/null" for command in commands[:-1]] + commands[-1:]


def networks() -> list[str]:
    """make compare on loopback, on an emulated network and on a real one like it, in turn."""
    commands = []
    for turn in zip_longest(
        runs(5, "loopback", "make compare"),
        runs(3, "emulated", f"make compare {EMULATED}"),
        runs(3, "slow", f"make hosts {HOSTS}"),
    ):
        commands += filter(None, turn)
    return commands


SPREAD = f"{COMPARE}/reference_output.txt"  # its commands lie in between those of all others
RECORDINGS = {  # the commands whose output is recorded, and those that put pictures beside it
    SPREAD: [
        *networks(),
        f"{MEDIANS} {NETWORKS} 'between hosts='results/slow_{{1..3}}.json",
        f"{MEDIANS} {NETWORKS} --plot {COMPARE}/compare.png > /dev/null",
    ],
    f"{COMPARE}/reference_output_timeline.txt": [
        f"make timeline {EMULATED}",
        f"cp results/timeline.png {COMPARE}/timeline.png",
        *[f"cp results/timeline_{stage}.png {stage}/timeline.png" for stage in LADDER],
    ],
    "06_sharded_optimizer/reference_output.txt": [
        *runs(3, "run", "make 06_sharded_optimizer"),
        f"{MEDIANS} 'three runs='results/run_{{1..3}}.json",
    ],
    f"{FSDP}/reference_output.txt": [
        *runs(3, "run", f"make {FSDP}"),
        f"{MEDIANS} 'three runs='results/run_{{1..3}}.json",
        f"cp results/fsdp.png {FSDP}/fsdp.png",
    ],
    "07_resnet_ddp/reference_output.txt": [
        *3 * ["make 07_resnet_ddp"],
        "cp results/speedup.png 07_resnet_ddp/speedup.png",
    ],
    "08_ddp_rpc/reference_output_8x8.txt": [
        *3 * ['make 08_ddp_rpc NPROC=8 ARGS="--lookup both --steps 100"']
    ],
    "01_allreduce/reference_output.txt": [
        "make 01_allreduce",
        "cp results/01_allreduce.png 01_allreduce/allreduce.png",
    ],
    "01_allreduce/shared_memory/reference_output.txt": [
        "make 01_allreduce/shared_memory",
        "cp results/shared_memory.png 01_allreduce/shared_memory/shared_memory.png",
    ],
    f"{SWEEP}/reference_output.txt": [
        f"make {SWEEP}",
        f"cp results/bucket_sweep.png {SWEEP}/bucket_sweep.png",
    ],
    f"{SWEEP}/reference_output_1gbit.txt": [
        f"make {SWEEP} {EMULATED}",
        f"cp results/bucket_sweep.png {SWEEP}/bucket_sweep_1gbit.png",
    ],
    **{f"{folder}/reference_output.txt": [f"make {folder}"] for folder in ONCE},
    **{
        f"{folder}/reference_output_1gbit.txt": [f"make {folder} {EMULATED}"]
        for folder in [*LADDER, PREDICT]
    },
    f"{PREDICT}/reference_output_hosts.txt": [f"make hosts SCRIPT={PREDICT}/predict.py {HOSTS}"],
    f"{PREDICT}/reference_output_extrapolate.txt": [
        f'make {PREDICT} ARGS="--extrapolate 10,100,400"'
    ],
    f"{FSDP}/reference_output_accounting.txt": [
        f'make {FSDP} ARGS="--accounting --size xl"',
        f'make {FSDP} ARGS="--accounting --size 10b"',
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
    "07_resnet_ddp/sweep/reference_output_full.txt": [
        'make 07_resnet_ddp/sweep ARGS="--full --batch-size 2 --steps 2 --warmup 1"'
    ],
    "07_resnet_ddp/sweep/reference_output_hosts.txt": [
        "make hosts SCRIPT=07_resnet_ddp/sweep/sweep.py"
    ],
    "07_resnet_ddp/compile_ddp/reference_output_variants.txt": [
        'make 07_resnet_ddp/compile_ddp ARGS="--variants --batch-size 8 --steps 3"'
    ],
    "08_ddp_rpc/reference_output_round_trip.txt": 3
    * [
        'make 08_ddp_rpc ARGS="--trainers 1 --servers 8 --lookup both --round-trip 2ms --steps 100"'
    ],
    "08_ddp_rpc/reference_output_tables.txt": [
        'make 08_ddp_rpc ARGS="--steps 100 --embeddings 300"',
        'make 08_ddp_rpc ARGS="--steps 100 --embeddings 100000"',
    ],
    "common/docs/reference_output_hang.txt": ["bash common/docs/hang.sh python"],
}


def in_order(names: list[str]) -> list[tuple[str, str]]:
    """(recording, command) for all commands: those of SPREAD evenly in between the others."""
    names = sorted(names, key=lambda name: name == SPREAD)
    spread = []
    if SPREAD in names:
        spread = [(SPREAD, command) for command in RECORDINGS[SPREAD]]
    commands = []
    for number, name in enumerate(names, 1):
        if name != SPREAD:
            commands += [(name, command) for command in RECORDINGS[name]]
        due = len(spread) // (len(names) - number + 1)
        commands += spread[:due]
        del spread[:due]
    return commands


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def commit() -> str:
    """The last commit that changed more than pages and recordings, and whether more is changed."""
    code = [".", ":!*.md", ":!*.png", ":!*reference_output*.txt"]
    last = git("log", "-1", "--format=%h", "--abbrev=9", "--", *code)
    return f"{last}, changed" if git("status", "--porcelain", "--", *code) else last


def run(command: str) -> tuple[str, float]:
    """A command and what it prints, but for names of files; and the seconds that it took.

    All that it has started ends with this process. CalledProcessError if it fails.
    """
    began = time.monotonic()
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
    return "\n".join(["", f"$ {command}", *lines, ""]), time.monotonic() - began


def write(name: str, outputs: list[tuple[str, float]]) -> None:
    """A recording: what run() gave of each command."""
    texts, seconds = zip(*outputs, strict=True)
    now = datetime.now(timezone.utc)
    head = (
        f"commit     {commit()}\n"
        f"torch      {torch.__version__}\n"
        f"processor  {processor_name()}, {os.cpu_count()} cores\n"
        f"date       {now:%Y-%m-%d %H:%M} UTC; it took {sum(seconds):.0f} s\n"
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
    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"warning: the load is {load:.2f}: what keeps the cores busy will be in the figures")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    (ROOT / "results").mkdir(exist_ok=True)
    say(f"{len(names)} of {len(RECORDINGS)} recordings, all within 50 minutes, commit {commit()}")
    outputs = {name: [] for name in names}
    failures = {}
    commands = in_order(names)
    for number, (name, command) in enumerate(commands, 1):
        if name in failures:
            continue
        say(f"{number} of {len(commands)}, {name}: {command}")
        try:
            outputs[name].append(run(command))
            if len(outputs[name]) == len(RECORDINGS[name]):
                write(name, outputs.pop(name))
        except (subprocess.CalledProcessError, OSError) as error:
            failures[name] = error
        except KeyboardInterrupt:
            say(f"interrupted: make reference goes on with the {len(outputs)} left")
            return 130
    for name, error in failures.items():
        say(f"FAILED at {name}, whose old recording stays: {error}")
    return figures.main() or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
