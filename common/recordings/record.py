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
import shutil
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


def make(target: str, flags: str = "", **variables) -> str:
    words = ["make", target]
    words += [f"{name}={value}" for name, value in variables.items()]
    if flags:
        words.append(f'ARGS="{flags}"')
    return " ".join(words)


def runs(count: int, name: str, target: str, **variables) -> list[str]:
    """Runs that leave a JSON file each; only the last one's output is recorded."""
    commands = []
    for number in range(1, count + 1):
        command = make(target, f"--json results/{name}_{number}.json", **variables)
        commands.append(command if number == count else f"{command} > /dev/null")
    return commands


def medians(count: int, name: str, label: str) -> str:
    """What medians.py needs to know of these runs."""
    return "".join(f" '{label}=results/{name}_{number}.json'" for number in range(1, count + 1))


def three_runs(target: str) -> list[str]:
    return [*runs(3, "run", target), MEDIANS + medians(3, "run", "three runs")]


def networks() -> list[str]:
    """make compare on loopback, on an emulated network and on a real one like it, in turn."""
    loopback = runs(5, "loopback", "compare")
    emulated = runs(3, "emulated", "compare", NETWORK=EMULATED)
    hosts = runs(3, "slow", "hosts", **SLOW)
    commands = []
    for turn in zip_longest(loopback, emulated, hosts):
        commands += [command for command in turn if command]
    two = medians(5, "loopback", "loopback") + medians(3, "emulated", "1 Gbit/s, 1 ms")
    between_hosts = medians(3, "slow", "between hosts")
    commands.append(MEDIANS + two + between_hosts)
    return [*commands, f"{MEDIANS}{two} --plot results/networks.png > /dev/null"]


MEDIANS = "python 05_bucketed/compare/medians.py"
LADDER = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
EMULATED = "1gbit,1ms"
SLOW = {"RATE": "1gbit", "DELAY": "1ms"}
SHARED = "01_allreduce/shared_memory"
NETWORK = "01_allreduce/slow_network"
COMPARE = "05_bucketed/compare"
SPREAD = f"{COMPARE}/reference_output.txt"
SWEEP = "05_bucketed/bucket_sweep"
PREDICT = "05_bucketed/predict"
FSDP = "06_sharded_optimizer/fsdp"
TORCHRUN = "python -m common.launch.torchrun --standalone --nproc-per-node 2"
RESNET = "07_resnet_ddp/resnet_ddp.py --results results/07_loading --epochs 1 --log-every 1000"
ON_ONE = f"python {RESNET}"
ON_TWO = f"{TORCHRUN} {RESNET}"
WATERFALL = f"{TORCHRUN} 07_resnet_ddp/waterfall.py"
JPEGS = "--data synthetic --decode 500 --steps-per-epoch 12 --held-out 64"


def loading() -> list[str]:
    """One device and two ranks, without and with processes that decode pictures."""
    commands = []
    for workers in (0, 2):
        commands += [f"{command} {JPEGS} --workers {workers}" for command in (ON_ONE, ON_TWO)]
    return commands


RECORDINGS = {  # the commands whose output is recorded
    SPREAD: networks(),
    f"{COMPARE}/reference_output_timeline.txt": [make("timeline", NETWORK="1gbit,1ms")],
    "06_sharded_optimizer/reference_output.txt": three_runs("06_sharded_optimizer"),
    f"{FSDP}/reference_output.txt": three_runs(FSDP),
    "07_resnet_ddp/reference_output.txt": 3 * [make("07_resnet_ddp")],
    "08_ddp_rpc/reference_output_8x8.txt": 3
    * [make("08_ddp_rpc", "--lookup both --steps 100", NPROC=8)],
    "01_allreduce/reference_output.txt": [make("01_allreduce")],
    f"{SHARED}/reference_output.txt": [make(SHARED)],
    f"{NETWORK}/reference_output.txt": [make(NETWORK)],
    **{f"{stage}/reference_output.txt": [make(stage)] for stage in LADDER},
    **{f"{stage}/reference_output_1gbit.txt": [make(stage, NETWORK=EMULATED)] for stage in LADDER},
    f"{SWEEP}/reference_output.txt": [make(SWEEP)],
    f"{SWEEP}/reference_output_1gbit.txt": [make(SWEEP, NETWORK="1gbit,1ms")],
    f"{PREDICT}/reference_output.txt": [make(PREDICT)],
    f"{PREDICT}/reference_output_1gbit.txt": [make(PREDICT, NETWORK="1gbit,1ms")],
    f"{PREDICT}/reference_output_hosts.txt": [
        make("hosts", SCRIPT=f"{PREDICT}/predict.py", **SLOW)
    ],
    f"{PREDICT}/reference_output_extrapolate.txt": [make(PREDICT, "--extrapolate 10,100,400")],
    f"{FSDP}/reference_output_accounting.txt": [
        make(FSDP, f"--accounting --size {size}") for size in ("xl", "10b")
    ],
    "07_resnet_ddp/reference_output_waterfall.txt": [
        WATERFALL,
        f"{WATERFALL} --image-size 224 --steps 3 --warmup 1 --no-plot",
    ],
    "07_resnet_ddp/reference_output_loading.txt": loading(),
    "07_resnet_ddp/sweep/reference_output.txt": [make("07_resnet_ddp/sweep")],
    "07_resnet_ddp/sweep/reference_output_full.txt": [
        make("07_resnet_ddp/sweep", "--full --batch-size 2 --steps 2 --warmup 1")
    ],
    "07_resnet_ddp/sweep/reference_output_hosts.txt": [
        make("hosts", SCRIPT="07_resnet_ddp/sweep/sweep.py")
    ],
    "07_resnet_ddp/compile_ddp/reference_output.txt": [make("07_resnet_ddp/compile_ddp")],
    "07_resnet_ddp/compile_ddp/reference_output_variants.txt": [
        make("07_resnet_ddp/compile_ddp", "--variants --batch-size 8 --steps 3")
    ],
    "08_ddp_rpc/reference_output.txt": [make("08_ddp_rpc")],
    "08_ddp_rpc/reference_output_round_trip.txt": 3
    * [make("08_ddp_rpc", "--trainers 1 --servers 8 --lookup both --round-trip 2ms --steps 100")],
    "08_ddp_rpc/reference_output_tables.txt": [
        make("08_ddp_rpc", f"--steps 100 --embeddings {rows}") for rows in (300, 100_000)
    ],
    "common/docs/reference_output_hang.txt": ["bash common/docs/hang.sh python"],
}
PICTURES = {  # of a recording: what lies beside it, and what its commands leave in results/
    SPREAD: {"compare.png": "networks.png"},
    f"{COMPARE}/reference_output_timeline.txt": {
        "timeline.png": "timeline.png",
        **{f"../../{stage}/timeline.png": f"timeline_{stage}.png" for stage in LADDER},
    },
    f"{FSDP}/reference_output.txt": {"fsdp.png": "fsdp.png"},
    "07_resnet_ddp/reference_output.txt": {"speedup.png": "speedup.png"},
    "07_resnet_ddp/reference_output_waterfall.txt": {"waterfall.png": "waterfall.png"},
    "01_allreduce/reference_output.txt": {"allreduce.png": "01_allreduce.png"},
    f"{SHARED}/reference_output.txt": {"shared_memory.png": "shared_memory.png"},
    f"{SWEEP}/reference_output.txt": {"bucket_sweep.png": "bucket_sweep.png"},
    f"{SWEEP}/reference_output_1gbit.txt": {"bucket_sweep_1gbit.png": "bucket_sweep.png"},
}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def commit() -> str:
    """The last commit that changed more than pages and recordings, and whether more is changed."""
    code = [".", ":!*.md", ":!*.png", ":!*reference_output*.txt"]
    changed = git("status", "--porcelain", "--", *code)
    return git("log", "-1", "--format=%h", "--abbrev=9", "--", *code) + ", changed" * bool(changed)


def head(seconds: float) -> str:
    now = datetime.now(timezone.utc)
    return (
        f"commit     {commit()}\n"
        f"torch      {torch.__version__}\n"
        f"processor  {processor_name()}, {os.cpu_count()} cores\n"
        f"date       {now:%Y-%m-%d %H:%M} UTC; it took {seconds:.0f} s\n"
    )


def printed_by(command: str) -> str:
    """What a shell prints; all that it has started ends with this process."""
    command = re.sub(r"(?<!\S)python(?!\S)", shlex.quote(sys.executable), command)
    command = re.sub(r"^make ", "make --silent --no-print-directory ", command)
    options = {"stdout": subprocess.PIPE, "encoding": "utf-8", "start_new_session": True}
    with subprocess.Popen(command, shell=True, cwd=ROOT, **options) as shell:
        try:
            output, _ = shell.communicate()
        except KeyboardInterrupt:
            os.killpg(shell.pid, signal.SIGTERM)
            raise
    if shell.returncode:
        raise subprocess.CalledProcessError(shell.returncode, command)
    return output


def run(command: str) -> tuple[str, float]:
    """A command and what it prints, but for names of files; and the seconds that it took."""
    began = time.monotonic()
    text = f"\n$ {command}\n"
    for line in printed_by(command).splitlines():
        if not line.startswith("written: "):
            text += f"{line}\n"
    return text, time.monotonic() - began


def write(name: str, outputs: list[tuple[str, float]]) -> None:
    """A recording: what run() gave of each command, and the pictures that they have left."""
    path = ROOT / name
    for picture, result in PICTURES.get(name, {}).items():
        shutil.copy(ROOT / "results" / result, path.parent / picture)
    texts, seconds = zip(*outputs, strict=True)
    path.write_text(head(sum(seconds)) + "".join(texts))


def output_of(path: Path) -> str:
    """What the first command that prints something has printed."""
    _, _, text = path.read_text().partition("\n\n")
    outputs = re.split(r"^\$ .*\n", text, flags=re.MULTILINE)
    return next(output.rstrip("\n") + "\n" for output in outputs if output.strip())


def is_recorded(path: Path) -> bool:
    """Whether the present code has recorded it."""
    return path.exists() and f"\ncommit     {commit()}\n" in "\n" + path.read_text()


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
    all_of_them = f"{len(RECORDINGS)} recordings, all within an hour and a half"
    say(f"{len(names)} of {all_of_them}, commit {commit()}")
    failed = []
    names.sort(key=lambda name: name == SPREAD)  # it comes last
    spread = RECORDINGS[SPREAD] if SPREAD in names else []
    done = []  # of its commands
    for number, name in enumerate(names, 1):
        say(f"{number} of {len(names)}: {name}")
        try:
            if name != SPREAD:
                write(name, [run(command) for command in RECORDINGS[name]])
            due = spread[len(done) : len(spread) * number // len(names)]
            done += [run(command) for command in due]
            if name == SPREAD:
                write(name, done)
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(f"FAILED at {name}, old recordings stay: {error}")
        except KeyboardInterrupt:
            say(f"interrupted: make reference goes on with the {len(names) - number + 1} left")
            return 130
    for line in failed:
        say(line)
    return figures.main() or bool(failed)


if __name__ == "__main__":
    sys.exit(main())
