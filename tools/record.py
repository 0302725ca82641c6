"""Record every reference output and picture again: make reference [ONLY=05_bucketed]

A recording whose stage's scripts, and common/, have not changed since is made again only if it is
named, so an interrupted run goes on where it stopped. Leave the machine alone meanwhile: a run in
which its speed drifts is made again, once. What fails is named in the end, and its old recording
stays. At last the figures of the pages are checked.
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

from common.report import processor_name
from common.setup import ROOT, Parser, fail, say
from common.timing import NO_COMMUNICATION
from tools import figures

sys.path += [str(ROOT / "05_bucketed" / "compare"), str(ROOT / "01_allreduce" / "slow_network")]

import medians
from network import MOST_DRIFT

SLOW = "NETWORK=1gbit,1ms"
MEDIANS = "python 05_bucketed/compare/medians.py"
TORCHRUN = "python -m tools.torchrun --standalone --nproc-per-node 2"
OVER = "01_allreduce/slow_network/over.py"
WATERFALL = f"{TORCHRUN} 07_resnet_ddp/waterfall.py"
PREFETCH = "06_sharded_optimizer/fsdp/prefetch.png"
ZERO2 = "make 06_sharded_optimizer/zero2"
TWO_STEPS = "06_sharded_optimizer/zero2/zero2.png"
LESS = "make 05_bucketed/send_less NPROC=4"
COURSE = "--size medium --bucket-sizes-mb 1,10,100,1000 --batch-size 1 --steps 3 --warmup 1"
RUNS = {  # of compare, three of each
    "loopback": 'make compare ARGS="--json {}"',
    "slow": f'make compare {SLOW} ARGS="--json {{}}"',
    "two_calls": f'make compare {SLOW},2 ARGS="--json {{}}"',
    "of_4": f'make compare NPROC=4 {SLOW} ARGS="--json {{}}"',
    "of_8": f'make compare NPROC=8 {SLOW} ARGS="--json {{}}"',
}
TCP_RUNS = {  # three of each; the last two are four times slower, as docs/hosts.md says
    "emulated": 'make compare NETWORK=1gbit,0,2 ARGS="--pace 0 --steps 3 --warmup 1 --json {}"',
    "hosts": 'make hosts RATE=1gbit ARGS="--steps 3 --warmup 1 --json {}"',
    "emulated_delay": "make compare NETWORK=250mbit,4ms,2 "
    'ARGS="--batch-size 40 --pace 0 --steps 2 --warmup 1 --json {}"',
    "hosts_delay": 'make hosts RATE=1gbit DELAY=1ms ARGS="--steps 2 --warmup 1 --json {}"',
}
TCP_COLUMNS = {"emulated": "emulated", "hosts": "TCP"}
TCP_COLUMNS |= {"emulated_delay": "emulated, 1 ms", "hosts_delay": "TCP, 1 ms"}


def in_turn(count: int, **runs: str) -> list[str]:
    """Return commands of so many runs, which leave results/NAME_1.json and so on."""
    return [
        f"{command.format(f'results/{name}_{number}.json')} > /dev/null"
        for number in range(1, 1 + count)
        for name, command in runs.items()
    ]


def left_by(name: str, label: str) -> str:
    """Return the results of three such runs, as medians.py takes them."""
    return f"'{label}'=results/{name}_{{1..3}}.json"


COMPARE = "05_bucketed/compare/reference_output.txt"
TCP = "05_bucketed/compare/reference_output_tcp.txt"
TIMELINE = "05_bucketed/compare/reference_output_timeline.txt"
STAGES = {
    "02_naive_ddp": "NaiveDDP",
    "03_flat_ddp": "FlatDDP",
    "04_overlap_ddp": "OverlapDDP",
    "05_bucketed": "BucketedDDP",
}
ON_1GBIT = f"{left_by('slow', '1 Gbit/s, 1 ms')} {left_by('two_calls', 'two calls at once')}"
RECORDINGS = {  # besides those below that are one command
    COMPARE: [
        *in_turn(3, **RUNS),
        f"{MEDIANS} {left_by('loopback', 'loopback')} {ON_1GBIT}",
        f"{MEDIANS} {ON_1GBIT} --plot 05_bucketed/compare/compare.png > /dev/null",
        f"{MEDIANS} {left_by('slow', '2')} {left_by('of_4', '4')} {left_by('of_8', '8')} "
        "--scaling 05_bucketed/compare/scaling.png",
    ],
    TCP: [
        *in_turn(3, **TCP_RUNS),
        " ".join([MEDIANS, *[left_by(*column) for column in TCP_COLUMNS.items()]]),
    ],
    TIMELINE: 3 * [f'make timeline {SLOW} ARGS="--json results/timeline.json"'],
    "05_bucketed/predict/reference_output_1gbit.txt": [
        f'make 05_bucketed/predict {SLOW} ARGS="--json results/predict.json"',
        "cp results/step.html 05_bucketed/predict/step.html",
        "cp results/gradients.png 04_overlap_ddp/gradients.png",
    ],
    "05_bucketed/predict/reference_output_ranks.txt": [
        f'make 05_bucketed/predict {SLOW} NPROC={ranks} ARGS="--steps 2 --warmup 1"'
        for ranks in (4, 8)
    ],
    "05_bucketed/send_less/reference_output.txt": [
        f'{LESS} ARGS="--seeds 3 --plot 05_bucketed/send_less/send_less.png"',
        *[f'{LESS} ARGS="--lr-times {times} --no-plot"' for times in (2, 4)],
    ],
    "05_bucketed/send_less/reference_output_check.txt": [f'{LESS} {SLOW} ARGS="--seconds 30"'],
    "06_sharded_optimizer/reference_output.txt": [
        *in_turn(2, sharded='make 06_sharded_optimizer ARGS="--json {}"'),
        'make 06_sharded_optimizer ARGS="--json results/sharded_3.json"',
        f"{MEDIANS} {left_by('sharded', 'three runs')}",
    ],
    "06_sharded_optimizer/fsdp/reference_output.txt": [
        *in_turn(2, fsdp='make 06_sharded_optimizer/fsdp ARGS="--json {}"'),
        'make 06_sharded_optimizer/fsdp ARGS="--json results/fsdp_3.json"',
        f"{MEDIANS} {left_by('fsdp', 'three runs')}",
        "cp results/fsdp.png 06_sharded_optimizer/fsdp/fsdp.png",
    ],
    "06_sharded_optimizer/fsdp/reference_output_1gbit.txt": [
        f'make 06_sharded_optimizer/fsdp {SLOW} ARGS="--no-verify --json results/fsdp_slow.json"',
        f"{TORCHRUN} {OVER} 1gbit,1ms 06_sharded_optimizer/fsdp/prefetch.py --plot {PREFETCH}",
    ],
    "06_sharded_optimizer/zero2/reference_output.txt": [
        *in_turn(2, zero2=f'{ZERO2} ARGS="--no-verify --json {{}}"'),
        f'{ZERO2} ARGS="--json results/zero2_3.json"',
        f"{MEDIANS} {left_by('zero2', 'loopback')}",
    ],
    "06_sharded_optimizer/zero2/reference_output_1gbit.txt": [
        *in_turn(2, zero2_slow=f'{ZERO2} {SLOW} ARGS="--no-verify --json {{}}"'),
        f'{ZERO2} {SLOW} ARGS="--no-verify --json results/zero2_slow_3.json"',
        f"{MEDIANS} {left_by('zero2_slow', '1 Gbit/s, 1 ms')}",
        f"{TORCHRUN} {OVER} 1gbit,1ms 06_sharded_optimizer/zero2/two_steps.py --plot {TWO_STEPS}",
    ],
    "06_sharded_optimizer/zero2/reference_output_4_ranks.txt": [
        *in_turn(2, zero2_of_4=f'{ZERO2} {SLOW} NPROC=4 ARGS="--no-verify --json {{}}"'),
        f'{ZERO2} {SLOW} NPROC=4 ARGS="--no-verify --json results/zero2_of_4_3.json"',
        f"{MEDIANS} {left_by('zero2_of_4', '4 ranks at 1 Gbit/s, 1 ms')}",
    ],
    "06_sharded_optimizer/fsdp/reference_output_accounting.txt": [
        'make 06_sharded_optimizer/fsdp ARGS="--accounting --size xl"',
        'make 06_sharded_optimizer/fsdp ARGS="--accounting --size 10b"',
    ],
    "07_resnet_ddp/reference_output.txt": [
        "mkdir -p results/pair_{1..3}",
        *[f'make 07_resnet_ddp ARGS="--results results/pair_{n}"' for n in (1, 2, 3)],
        "python 07_resnet_ddp/compare_runs.py results/pair_{1..3} --plot 07_resnet_ddp/speedup.png",
    ],
    "07_resnet_ddp/reference_output_waterfall.txt": [
        *[f"{WATERFALL} --plot 07_resnet_ddp/waterfall.png"] * 3,
        f"{WATERFALL} --image-size 224 --steps 3 --no-plot --fresh-memory",
        f"{WATERFALL} --image-size 224 --steps 3 --no-plot",
    ],
    "07_resnet_ddp/compile_ddp/reference_output_variants.txt": [
        f'make 07_resnet_ddp/compile_ddp ARGS="--batch-size 8 --steps 3 --fsdp{more}"'
        for more in ("", " --fsdp-wrap", " --fsdp-checkpoint", " --fsdp-wrap --fsdp-checkpoint")
    ],
    "08_ddp_rpc/reference_output_tables.txt": [
        'make 08_ddp_rpc ARGS="--tables --plot 08_ddp_rpc/tables.png"',
        *2 * ['make 08_ddp_rpc ARGS="--tables --no-plot"'],
    ],
    "docs/reference_output_hang.txt": ["bash docs/hang.sh python"],
}
SIZES = "0.01,0.1,1,10,100,1000"
RING = "01_allreduce/allreduce.png"
SWEEP = "05_bucketed/bucket_sweep/bucket_sweep_1gbit.png"
# What follows reference_output in the file's name: words of make.
BOTH = {"": "", "_1gbit": f'{SLOW} ARGS="--json results/stage.json"'}
for folder, variants in {
    "01_allreduce": {"": f'ARGS="--sizes-mb {SIZES} --steps 10 --warmup 2 --plot {RING}"'},
    "01_allreduce/slow_network": {"": ""},
    **dict.fromkeys(STAGES, BOTH),
    "05_bucketed/bucket_sweep": {
        "": 'ARGS="--no-plot"',
        "_1gbit": f'{SLOW} ARGS="--json results/sweep.json --plot {SWEEP}"',
        "_course": f'NETWORK=5gbit,1ms ARGS="{COURSE}"',
    },
    "05_bucketed/predict": {"": ""},
    "06_sharded_optimizer": {"_1gbit": f'{SLOW} ARGS="--no-verify --json results/stage.json"'},
    "07_resnet_ddp/compile_ddp": {"": "", "_1gbit": f'{SLOW} ARGS="--steps 5"'},
    "07_resnet_ddp/sweep": {"": "", "_full": 'ARGS="--full --batch-size 2 --steps 5 --warmup 2"'},
    "08_ddp_rpc": {"": "", "_8": 'NPROC=8 ARGS="--steps 100"'},
}.items():
    for suffix, words in variants.items():
        RECORDINGS[f"{folder}/reference_output{suffix}.txt"] = [f"make {folder} {words}".strip()]


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def is_up_to_date(name: str) -> bool:
    """Tell whether common/ and the scripts of its stage are as they were then; of 05, 02 to 05.

    Stage 06 draws as compare does.
    """
    path = ROOT / name
    commit = re.match(r"commit +(\w+)\n", path.read_text() if path.exists() else "")
    stage = name.partition("/")[0]
    folders = ["common", *(STAGES if stage == "05_bucketed" else [stage])]
    if stage == "06_sharded_optimizer":
        folders.append("05_bucketed/compare")
    code = [*[f"{folder}/*.py" for folder in folders], ":!*/test_*.py"]
    return bool(commit) and git("diff", "--quiet", commit[1], "--", *code).returncode == 0


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
    candidates = json.loads(file.read_text()).get("candidates", [])
    of_ranks = [rank for one in candidates for rank in one.get("stretch", [])]
    stretches = [stretch for rank in of_ranks for stretch in rank] or [1.0]
    return max(stretches) > MOST_DRIFT * min(stretches)


def draw_stages(drawn: set[str], is_last_run: bool) -> None:
    """Copy the timelines of the stages that are not drawn yet, and agree with compare's runs.

    A step agrees if its ratio lies in the range of compare's, and if its forward is within 15 % of
    that of `no communication`. Those of the last run are copied in any case.
    """
    found = json.loads((ROOT / "results/timeline.json").read_text())["drawn"]
    floor = found[NO_COMMUNICATION]
    # compare's runs have to be there
    of_compare = [medians.read_run(ROOT / f"results/slow_{n}.json") for n in (1, 2, 3)]
    for folder in STAGES.keys() - drawn:
        expected = medians.ratios(of_compare, STAGES[folder], NO_COMMUNICATION)
        ratio = found[folder]["step_ms"] / floor["step_ms"]
        forward = found[folder]["forward_ms"] / floor["forward_ms"]
        agrees = min(expected) <= ratio <= max(expected) and abs(forward - 1) < 0.15
        if agrees or is_last_run:
            shutil.copy(ROOT / f"results/timeline_{folder}.png", ROOT / folder / "timeline.png")
        if agrees:
            drawn.add(folder)
        else:
            say(
                f"{folder}: {ratio:.2f} in the timeline, {min(expected):.2f} to {max(expected):.2f}"
            )
    shutil.copy(ROOT / "results/timeline.png", ROOT / "05_bucketed/compare/timeline.png")


def record(name: str) -> str:
    """Run its commands and write the recording; return what has failed: then the old one stays."""
    changed = git("status", "--porcelain", "--", "*.py").stdout and ", changed"
    text = (
        f"commit     {git('rev-parse', '--short=9', 'HEAD').stdout.strip()}{changed}\n"
        f"torch      {torch.__version__}\n"
        f"processor  {processor_name()}, {os.cpu_count()} cores\n"
        f"date       {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC\n"
    )
    drawn = set()  # stages whose timeline agrees with compare
    for number, command in enumerate(RECORDINGS[name], 1):
        say(f"{name}: {command}")
        try:
            text += run(command)
        except subprocess.CalledProcessError as error:
            return f"FAILED, and the old recording of {name} stays: {error} {error.output or ''}"
        if name == TIMELINE:
            draw_stages(drawn, number == len(RECORDINGS[name]))
            if len(drawn) == len(STAGES):
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
    say(f"{len(names)} of {len(RECORDINGS)} recordings; all take nearly two hours")
    (ROOT / "results").mkdir(exist_ok=True)
    failures = list(filter(None, map(record, names)))
    say("\n".join(failures))
    return figures.main() or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
