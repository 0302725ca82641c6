"""One training step of each rung on one time axis, as torch.profiler recorded it.

    make timeline                                                       (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 common/ladder/timeline.py
    python -m common.ladder.timeline FILE.json … --plot FILE.png        (traces that are there)

Without files: `no sync` and stages 02 to 05 train in turn in one process group, and steps of each
are profiled. Their traces (timeline_02_naive_ddp.json, …) lie beside the
picture; chrome://tracing and ui.perfetto.dev show them, too. With files: only draws what --trace of
a stage has recorded.

Each rung has a compute lane and a communication lane, with a sub-lane per thread of gloo's or CUDA
stream of NCCL's; gloo's all-gathers and all-to-alls, which FSDP needs, have a sub-lane each.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import setup, timing  # noqa: E402
from common.ladder import draw_timeline, rungs  # noqa: E402
from common.ladder.rungs import naive_ddp  # noqa: E402

ROUNDS = 3


def no_sync(module):
    """The module as it is: every rank trains alone."""
    return module


def record(args, device: torch.device) -> list[Path]:
    """Profile each rung; returns the traces, which rank 0 writes.

    All take turns, in rounds of three steps, because the machine's speed changes from second to
    second. The round of middle length is kept.
    """
    wrappers = {"no_sync": no_sync, **rungs.WRAPPERS}
    traces = {}
    for name in wrappers:
        traces[name] = args.plot.with_name(f"timeline_{name}.json")
    rungs.remove_earlier(args.plot, *traces.values())
    steps = {name: training(wrapper, args.size, device) for name, wrapper in wrappers.items()}
    of_rounds = {name: [] for name in wrappers}
    for number in range(ROUNDS):
        for name, step in steps.items():
            setup.progress(f"round {number + 1} of {ROUNDS}: {name}")
            for _ in range(args.warmup):
                step()
            of_rounds[name].append(traces[name].with_suffix(f".{number}"))
            timing.profile(step, of_rounds[name][-1])
    if dist.get_rank() == 0:
        for name, files in of_rounds.items():
            files.sort(key=length)
            files.pop(ROUNDS // 2).replace(traces[name])
            for file in files:
                file.unlink()
            setup.say(f"written: {traces[name]}")
    return list(traces.values())


def length(trace: Path) -> float:
    """Of the step that is drawn, in ms."""
    return draw_timeline.summary(*draw_timeline.read_trace(trace))[1]


def training(wrapper, size: str, device: torch.device):
    """A model of its own, and the function that trains it for a step."""
    *shape, batch_size, context_length = setup.SIZES[size]
    torch.manual_seed(0)
    with device:
        model = wrapper(naive_ddp.LanguageModel(*shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = timing.Stopwatch(device)
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length), device=device)

    def step():
        naive_ddp.train_step(model, optimizer, watch, tokens, targets)

    return step


def draw(traces: list[Path], picture: Path, as_long_as: list[Path] | None = None) -> None:
    """The picture, and a line for each trace; the axis is `as_long_as` the steps of other ones."""
    steps = {}
    for trace in traces:
        label = trace.stem.removeprefix("timeline_").replace("no_sync", "no sync")
        steps[label] = draw_timeline.read_trace(trace)
    durations = []
    for trace in as_long_as or []:
        durations.append(length(trace))
    draw_timeline.draw(steps, picture, end=1.08 * max(durations) if durations else None)
    for label, (phases, lanes) in steps.items():
        collectives, duration = draw_timeline.summary(phases, lanes)
        setup.say(f"{label}: {collectives} in {duration:.0f} ms")
    setup.say(f"written: {picture}")


def main() -> None:
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="FILE.json", help="written by --trace")
    scale = {"nargs": "+", "type": Path, "metavar": "FILE.json"}
    add("--as-long-as", **scale, help="traces whose longest step the axis has to hold")
    setup.add_plot_arguments(parser, "timeline.png")
    add("--size", choices=setup.SIZES, default="tiny", help="the model of stages 02 to 05")
    warmup = "steps before those that are profiled"
    add("--warmup", type=setup.whole_number(0), default=5, help=warmup)
    setup.add_process_group_arguments(parser)
    args = parser.parse_args()
    if args.plot is None:
        parser.error("argument --plot: a picture is needed, and the traces lie beside it")
    if args.traces:
        draw(args.traces, args.plot, args.as_long_as)
        return
    with setup.process_group(args) as device:
        traces = record(args, device)
        if dist.get_rank() == 0:
            draw(traces, args.plot)


if __name__ == "__main__":
    main()
