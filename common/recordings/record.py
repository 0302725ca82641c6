"""Records every reference_output*.txt and every picture again.

    make reference                        what the present code has not recorded yet
    make reference ONLY=05_bucketed       everything whose path begins so, again

Use the machine for nothing else meanwhile: it would be in the figures. An interrupted run goes on
where it was. What fails is named in the end, and its old recording stays. Those on two "hosts" need
Linux, that of runs that hang needs py-spy.

The top of a recording says of which commit it is: the last one that changed more than pages and
recordings. In what ran several times every number is the median of the runs, and those at their
lowest and highest follow; runs that say different words stand one after another. A picture is drawn
from the medians, or is that of the run nearest to them, or of the first.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from common.recordings import figures, spread
from common.report import processor_name
from common.setup import ROOT, Parser, fail, say


class Recording(NamedTuple):
    """The commands whose output is recorded; how often; which files come from results/."""

    commands: list[str]
    runs: int = 1
    files: dict[str, str] = {}  # beside the recording: in results/
    picture: str = ""  # drawn from the recording by common/ladder/draw_runs.py


def make(target: str, flags: str = "", **variables) -> str:
    words = ["make", target]
    words += [f"{name}={value}" for name, value in variables.items()]
    if flags:
        words.append(f'ARGS="{flags}"')
    return " ".join(words)


LADDER = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
FAST = {"RATE": "4gbit", "DELAY": 0}
SLOW = {"RATE": "1gbit", "DELAY": "1ms"}
SWEEP = "05_bucketed/bucket_sweep"
PREDICT = "05_bucketed/predict"
FSDP = "06_sharded_optimizer/fsdp"
DRAW = "python -m common.ladder.timeline"
THREADS = max(1, (os.cpu_count() or 1) // 2)
RESNET = (
    f"07_resnet_ddp/resnet_ddp.py --threads {THREADS} --results results/07_parts --epochs 1 "
    "--log-every 1000"
)
ON_ONE = f"python {RESNET}"
ON_TWO = f"python -m common.launch.torchrun --standalone --nproc-per-node 2 {RESNET}"
JPEGS = "--data synthetic --decode 500 --steps-per-epoch 12 --held-out 64"


def parts(image_size: str) -> list[str]:
    """One device, two ranks, one device with half of the batch, two ranks without all-reduces."""
    return [
        f"{ON_ONE} --image-size {image_size}",
        f"{ON_TWO} --image-size {image_size}",
        f"{ON_ONE} --global-batch 32 --image-size {image_size}",
        f"{ON_TWO} --no-sync --image-size {image_size}",
    ]


def loading(workers: int) -> list[str]:
    return [f"{command} {JPEGS} --workers {workers}" for command in (ON_ONE, ON_TWO)]


def one_step_each() -> list[str]:
    """The timeline of all stages, then that of each beside a step without synchronization."""
    commands = [make("timeline")]
    for stage in LADDER:
        traces = f"results/timeline_no_sync.json results/timeline_{stage}.json"
        command = f"{DRAW} {traces} --as-long-as results/timeline_0*.json"
        commands.append(f"{command} --plot results/timeline_{stage}.png > /dev/null")
    return commands


RECORDINGS = {
    "common/ladder/reference_output_compare.txt": Recording(
        [make("compare")],
        runs=5,
        files={"../../results/recorded/loopback.json": "compare.json"},
        picture="compare.png",
    ),
    "06_sharded_optimizer/reference_output.txt": Recording([make("06_sharded_optimizer")], runs=5),
    f"{FSDP}/reference_output.txt": Recording([make(FSDP)], runs=5, files={"fsdp.png": "fsdp.png"}),
    "07_resnet_ddp/reference_output.txt": Recording(
        [make("07_resnet_ddp")], runs=3, files={"speedup.png": "speedup.png"}
    ),
    "08_ddp_rpc/reference_output_8x8.txt": Recording(
        [make("08_ddp_rpc", "--lookup both --steps 200", NPROC=8)], runs=3
    ),
    "01_allreduce/reference_output.txt": Recording(
        [make("01_allreduce")], files={"allreduce.png": "01_allreduce.png"}
    ),
    "01_allreduce/shared_memory/reference_output.txt": Recording(
        [make("01_allreduce/shared_memory")],
        runs=3,
        files={"shared_memory.png": "shared_memory.png"},
    ),
    "01_allreduce/shared_memory/reference_output_backend.txt": Recording(
        [make("compare", BACKEND="shared")], runs=3, picture="backend.png"
    ),
    "01_allreduce/alternate_ring/reference_output.txt": Recording(
        [make("01_allreduce/alternate_ring")]
    ),
    **{f"{stage}/reference_output.txt": Recording([make(stage, "--steps 20")]) for stage in LADDER},
    "common/ladder/reference_output_timeline.txt": Recording(
        one_step_each(),
        files={"timeline.png": "timeline.png"}
        | {f"../../{stage}/timeline.png": f"timeline_{stage}.png" for stage in LADDER},
    ),
    # Compared with the typical run of make compare, above.
    "common/ladder/reference_output_hosts.txt": Recording(
        [
            make("hosts", "--json results/slow.json", **SLOW),
            "python -m common.ladder.compare loopback=results/recorded/loopback.json "
            '"1 Gbit/s, 1 ms"=results/slow.json --plot results/hosts.png',
        ],
        files={"hosts.png": "hosts.png"},
    ),
    f"{SWEEP}/reference_output.txt": Recording(
        [make(SWEEP)], files={"bucket_sweep.png": "bucket_sweep.png"}
    ),
    f"{PREDICT}/reference_output.txt": Recording(
        [make(PREDICT)], runs=3, files={"predict.png": "predict.png"}
    ),
    f"{PREDICT}/reference_output_extrapolate.txt": Recording(
        [f"python {PREDICT}/extrapolate.py"], files={"extrapolate.png": "extrapolate.png"}
    ),
    f"{FSDP}/reference_output_shared.txt": Recording(
        [make(FSDP, "--no-verify --no-memory", BACKEND="shared")], runs=3
    ),
    f"{FSDP}/reference_output_accounting.txt": Recording(
        [make(FSDP, f"--accounting --size {size}") for size in ("xl", "10b")]
    ),
    "07_resnet_ddp/reference_output_parts.txt": Recording(
        parts("64 --steps-per-epoch 23") + parts("224 --steps-per-epoch 4"), runs=3
    ),
    "07_resnet_ddp/reference_output_loading.txt": Recording(
        [*loading(0), *loading(1), *loading(2), *loading(4)], runs=3
    ),
    "07_resnet_ddp/balance/reference_output.txt": Recording([make("07_resnet_ddp/balance")]),
    "07_resnet_ddp/sweep/reference_output.txt": Recording([make("07_resnet_ddp/sweep")]),
    "07_resnet_ddp/compile_ddp/reference_output.txt": Recording(
        [make("07_resnet_ddp/compile_ddp")]
    ),
    "08_ddp_rpc/reference_output.txt": Recording([make("08_ddp_rpc")]),
    "common/docs/reference_output_hang.txt": Recording(["bash common/docs/hang.sh python"]),
    f"{SWEEP}/reference_output_1gbit.txt": Recording(
        [make("hosts", SCRIPT=f"{SWEEP}/bucket_sweep.py", **SLOW)],
        files={"bucket_sweep_1gbit.png": "bucket_sweep.png"},
    ),
    f"{PREDICT}/reference_output_hosts.txt": Recording(
        [
            make("hosts", "--no-plot --steps 8", SCRIPT=f"{PREDICT}/predict.py", **FAST),
            make("hosts", "--no-plot --steps 5 --warmup 1", SCRIPT=f"{PREDICT}/predict.py", **SLOW),
        ]
    ),
    "07_resnet_ddp/sweep/reference_output_hosts.txt": Recording(
        [make("hosts", SCRIPT="07_resnet_ddp/sweep/sweep.py")]
    ),
    "07_resnet_ddp/sweep/reference_output_full.txt": Recording(
        [make("07_resnet_ddp/sweep", "--full --batch-size 2 --steps 3 --warmup 1")]
    ),
    "07_resnet_ddp/compile_ddp/reference_output_variants.txt": Recording(
        [make("07_resnet_ddp/compile_ddp", "--variants --batch-size 8 --steps 6")]
    ),
    f"{SWEEP}/reference_output_large.txt": Recording(
        [
            make(
                SWEEP,
                "--size 0.5b --batch-size 1 --context-length 128 --steps 3 --warmup 2 "
                "--bucket-sizes-mb 1,10,100,1000",
            )
        ],
        files={"bucket_sweep_large.png": "bucket_sweep.png"},
    ),
}


def git(*words: str) -> str:
    answer = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def commit() -> str:
    """The last commit that changed more than pages and recordings, and whether more is changed."""
    code = [".", ":!*.md", ":!*.png", ":!*reference_output*.txt"]
    found = git("log", "-1", "--format=%h", "--abbrev=9", "--", *code)
    changed = git("status", "--porcelain", "--", *code)
    return (found or "unknown") + (", changed" if changed else "")


def parts_of(recording: str) -> tuple[dict[str, str], str]:
    """What the head says, by its first word; and what the commands printed, in all their runs."""
    if not recording.startswith(("command ", "commit ")):
        return {}, recording
    head, _, output = recording.partition("\n\n")
    return dict(line.split(None, 1) for line in head.splitlines()), output


def output_of(path: Path) -> str:
    """What a command has printed, or the medians of several runs of it."""
    return re.split(r"^\nlowest of ", parts_of(path.read_text())[1], flags=re.MULTILINE)[0]


def head(recording: Recording, seconds: float, have_medians: bool) -> str:
    lines = {}
    if len(recording.commands) == 1:
        lines["command"] = recording.commands[0]
    lines["commit"] = commit()
    lines["torch"] = f"{torch.__version__}, torchvision {version('torchvision')}"
    lines["processor"] = f"{processor_name()}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        lines["GPU"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    now = datetime.now(timezone.utc)
    lines["date"] = f"{now:%Y-%m-%d %H:%M} UTC; it took {seconds:.0f} s"
    if have_medians:
        lines["runs"] = (
            f"{recording.runs}: every number is the median, the lowest and highest follow"
        )
    return "".join(f"{key:9}  {text}\n" for key, text in lines.items()) + "\n"


def printed_by(command: str) -> str:
    """What a shell prints; all that it has started ends with this process."""
    options = {"stdout": subprocess.PIPE, "encoding": "utf-8", "start_new_session": True}
    with subprocess.Popen(command, shell=True, cwd=ROOT, **options) as shell:
        try:
            output, _ = shell.communicate()
        except BaseException:  # Ctrl-C, SIGTERM
            os.killpg(shell.pid, signal.SIGTERM)
            raise
    if shell.returncode:
        raise subprocess.CalledProcessError(shell.returncode, command)
    return output


def output_of_run(commands: list[str]) -> str:
    """Run the commands one after another: what they print, without the names of files.

    Raises CalledProcessError.
    """
    printed = ""
    lines = []
    for command in commands:
        if len(commands) > 1:
            printed += "\n" if lines else ""
            printed += f"$ {command}\n"
        words = re.sub(r"(?<!\S)python(?!\S)", shlex.quote(sys.executable), command)
        words = re.sub(r"^make ", "make --no-print-directory ", words)
        output = printed_by(words)
        lines = [line for line in output.splitlines() if not line.startswith("written: ")]
        printed += "".join(f"{line}\n" for line in lines)
    return printed


def record(path: Path, recording: Recording) -> None:
    """Run the commands and write the recording and its pictures. Raises CalledProcessError."""
    began = time.monotonic()
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(recording.runs):
            outputs.append(output_of_run(recording.commands))
            for name in recording.files.values():
                shutil.copy(ROOT / "results" / name, Path(folder) / f"{number} {name}")
        typical = 0
        have_medians = recording.runs > 1 and spread.are_alike(outputs)
        if have_medians:
            text = spread.summary(outputs)
            typical = spread.most_typical(outputs)
        elif recording.runs > 1:
            text = "\n".join(f"run {number}\n{output}" for number, output in enumerate(outputs, 1))
        else:
            text = outputs[0]
        for target, name in recording.files.items():
            target = path.parent / target
            target.parent.mkdir(exist_ok=True)
            shutil.copy(Path(folder) / f"{typical} {name}", target)
    path.write_text(head(recording, time.monotonic() - began, have_medians) + text)
    if recording.picture:
        plot = path.with_name(recording.picture)
        output_of_run([f"python -m common.ladder.draw_runs {path} --plot {plot}"])


def is_recorded(path: Path) -> bool:
    """Whether it is of the present code and torch."""
    if not path.exists():
        return False
    said = parts_of(path.read_text())[0]
    return said.get("commit") == commit() and said.get("torch", "").startswith(torch.__version__)


def duration(path: Path) -> float | None:
    """How many seconds it took when it was recorded last; None where it does not say so."""
    if path.exists():
        found = re.search(r"took (\d+) s", parts_of(path.read_text())[0].get("date", ""))
        return float(found[1]) if found else None
    return None


def plan(only: list[str]) -> list[str]:
    """Those whose path begins so; without that, all that the present code has not recorded."""
    chosen = [name for name in RECORDINGS if name.startswith(tuple(only or [""]))]
    if only and not chosen:
        fail(f"argument ONLY: no recording's path begins with {' or '.join(only)}")
    return [name for name in chosen if only or not is_recorded(ROOT / name)]


def announce(names: list[str]) -> None:
    known = {name: duration(ROOT / name) for name in names}
    took = sum(seconds for seconds in known.values() if seconds)
    unknown = [name for name in names if known[name] is None]
    text = f"{len(names)} of {len(RECORDINGS)} recordings, commit {commit()}"
    if took:
        text += f"; about {took / 60:.0f} minutes, as they took last time"
    say(text + (f"; how long {len(unknown)} take is not known" if unknown else ""))


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("only", nargs="*", metavar="PATH", help="what their paths begin with")
    parser.add_argument("--force", action="store_true", help="even if the cores are busy")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    if load > 0.5 and not args.force:
        fail(f"the load is {load:.2f}: something else keeps the cores busy; wait, or FORCE=1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    (ROOT / "results").mkdir(exist_ok=True)
    names = plan(args.only)
    announce(names)
    failed = []
    for number, name in enumerate(names, 1):
        began = time.monotonic()
        say(f"{number} of {len(names)}: {name}")
        try:
            record(ROOT / name, RECORDINGS[name])
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(f"{name}: {error}")
        except KeyboardInterrupt:
            left = len(names) - number + 1
            say(f"interrupted: make reference goes on with the {left} that are left")
            return 130
        say(f"  {time.monotonic() - began:.0f} s")
    for line in failed:
        say(f"FAILED, the old one stays: {line}")
    stale = figures.main()
    return 1 if failed or stale else 0


if __name__ == "__main__":
    sys.exit(main())
