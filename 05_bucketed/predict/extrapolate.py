r"""05: when does data parallelism stop scaling? The model of simulate.py, for a thousand ranks.

Nothing of that size runs here. A step is built from the floating-point operations and bytes of a
named model, the speed of this core and the factor by which an accelerator is faster. simulate.py
plays it on a ring of any number of ranks. The global batch stays the same, so that more ranks have
less to compute each, and as much to send.

    make 05_bucketed/extrapolate                                        (see also ARGS="--help")
    python 05_bucketed/extrapolate.py --size xl --compute 5000 --bandwidth 100gbit,400gbit

The closed form beside it: a token costs 4 operations per parameter in backward, so with B tokens, P
parameters and N ranks of C operations a second, backward takes 4·B·P / (N·C) seconds. A ring sends
2(N-1)/N · S bytes per rank at W bytes a second. All of it can hide under backward while

    2(N-1)/N · S/W  ≤  4·B·P / (N·C),   or   N ≤ 1 + 2·B·P·W / (C·S)

With S = 4·P bytes this is N ≤ 1 + B·W / (2·C): the size of the model does not matter. If parameters
are sharded as well (FSDP), forward hides an all-gather of (N-1)/N · S/W under 2·B·P / (N·C), and
backward hides an all-gather and a reduce-scatter under twice that: the limit is the same.

What is assumed, beyond simulate.py's list, and was never checked on hardware: a network of its own
card, so that neither side slows the other; no Python, no copies; one call at a time, as NCCL does;
a flat ring (NCCL takes trees for small tensors on many ranks); attention scores cost nothing.

Source: Stanford CS336, assignment 2 (2026), "data parallel calculations"; simulate.py's.
"""

import argparse
import math
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

COLORS = {"02": "#CC79A7", "03": "#E69F00", "04": "#009E73", "05": "#0072B2"}
KEPT = 0.9  # "it scales": the step without communication is at least this part of the step
MOST_RANKS = 2**16


def build_step(model, tokens: float, operations: float, optimizer_seconds: float):
    """A Step of a transformer whose weights are on the meta device, with `tokens` per rank.

    `operations`: floating-point operations per second of a rank. A weight with rows and columns
    costs 2 of them per token and element in forward and 4 in backward; the embedding none.
    """
    from simulate import Step

    seconds = 0.0
    gradients = []
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.dim() == 2 and name != "token_embedding.weight":
            seconds += 4 * tokens * parameter.numel() / operations
        gradients.append((float(parameter.nbytes), seconds))
    return Step(seconds / 2, seconds, optimizer_seconds, gradients)


def closed_form(tokens: float, parameters: int, bytes_sent: float, bandwidth, operations) -> float:
    """The number of ranks up to which backward is as long as the ring's transfer, or longer."""
    return 1 + 2 * tokens * parameters * bandwidth / (operations * bytes_sent)


def efficiency(rung: str, megabytes: float, ranks: int, args, bandwidth: float, machine, model):
    """The step without communication ÷ the step of the rung, both simulated."""
    from simulate import Network, simulate

    operations = machine["operations_per_second"] * args.compute
    optimizer = machine["optimizer_seconds_per_parameter"] / args.compute
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step = build_step(model, args.global_batch / ranks, operations, optimizer * parameters)
    network = Network(ranks, args.latency, bandwidth, call=args.call, calls_at_once=1)
    no_sync = step.forward + step.backward + step.optimizer
    return no_sync / simulate(step, network, rung, megabytes).step_seconds


def most_ranks(is_enough) -> int:
    """The largest number of ranks, up to MOST_RANKS, for which `is_enough`; 1 if 2 are too many."""
    below, above = 1, 2
    while above <= MOST_RANKS and is_enough(above):
        below, above = above, 2 * above
    if above > MOST_RANKS:
        return MOST_RANKS
    while above - below > max(1, below // 100):  # to a hundredth
        middle = (below + above) // 2
        if is_enough(middle):
            below = middle
        else:
            above = middle
    return below


# ==================================================================================================
# Below this line: the speed of this core, the table, the picture.


def measure_core(seed: int) -> dict:
    """Operations per second of forward and backward, and the optimizer's seconds, on one thread."""
    from bucketed import SIZES, LanguageModel

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    *shape, batch_size, context_length = SIZES["tiny"]
    model = LanguageModel(*shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length))
    compute, update = [], []
    for _ in range(6):
        start = time.perf_counter()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        computed = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        compute.append(computed - start)
        update.append(time.perf_counter() - computed)
    weights = [p for p in model.parameters() if p.dim() == 2]
    multiplied = sum(p.numel() for p in weights) - model.token_embedding.weight.numel()
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "operations_per_second": 6 * tokens.numel() * multiplied / sorted(compute)[3],
        "optimizer_seconds_per_parameter": sorted(update)[3] / parameters,
    }


def rows_of(args) -> list[tuple[str, float]]:
    """(rung, bucket size in MB): the size counts for 05 only."""
    return [("02", 25.0), ("03", 25.0), ("04", 25.0), *(("05", mb) for mb in args.bucket_sizes_mb)]


def label(rung: str, megabytes: float) -> str:
    return f"{rung}, {megabytes:g} MB" if rung == "05" else rung


UNITS = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "us": 1e-6, "ms": 1e-3}


def quantity(*units: str):
    """A type for argparse: a positive number with one of these units, in bytes/s or seconds."""

    def read(text: str) -> float:
        found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([a-z]+)", text.strip())
        try:
            number = float(found[1]) * UNITS[found[2]]
            if number > 0 and found[2] in units:
                return number
        except (TypeError, KeyError, ValueError):
            pass
        allowed = f"a number above 0 with its unit, {' or '.join(units)}, such as 10{units[0]}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")

    return read


def several(read):
    """A type for argparse: values with commas between them, each read by `read`."""
    return lambda text: [read(word) for word in text.split(",")]


def run(args) -> dict:
    """Simulate everything, print a table for each bandwidth; returns what `draw` needs."""
    from bucketed import SIZES, LanguageModel

    from common import report
    from common.setup import progress, say

    with torch.device("meta"):
        model = LanguageModel(*SIZES[args.size][:5])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    bytes_sent = sum(parameter.nbytes for parameter in model.parameters())
    progress("measuring this core")
    machine = measure_core(args.seed)
    operations = machine["operations_per_second"] * args.compute
    result = {"machine": machine, "networks": []}
    say(f"05_bucketed/extrapolate: {args.size} model, {parameters / 1e6:.0f} million parameters")
    gigaflops = machine["operations_per_second"] / 1e9
    rank = (
        f"{args.compute:g} × {gigaflops:.0f} GFLOP/s (this core) = {operations / 1e12:.1f} TFLOP/s"
    )
    doublings = [2**power for power in range(1, 17)]  # for the curves
    between = [ranks for ranks in doublings if min(args.ranks) < ranks < max(args.ranks)]
    points = sorted({*args.ranks, *between})
    say(f"global batch {args.global_batch:g} tokens; a rank: {rank}")
    for bandwidth in args.bandwidth:
        network = {"bandwidth": bandwidth, "efficiency": {}, "most_ranks": {}}
        result["networks"].append(network)
        limit = closed_form(args.global_batch, parameters, bytes_sent, bandwidth, operations)
        network["closed_form"] = limit
        gbit = bandwidth / UNITS["gbit"]
        say(f"\n{gbit:g} Gbit/s, {1e6 * args.latency:g} µs from rank to rank")
        for rung, megabytes in rows_of(args):
            name = label(rung, megabytes)
            progress(f"{gbit:g} Gbit/s: {name}")

            def at(ranks, rung=rung, megabytes=megabytes, bandwidth=bandwidth):
                return efficiency(rung, megabytes, ranks, args, bandwidth, machine, model)

            network["efficiency"][name] = {ranks: at(ranks) for ranks in points}
            network["most_ranks"][name] = most_ranks(lambda ranks, at=at: at(ranks) >= KEPT)
        rows = []
        for name, values in network["efficiency"].items():
            most = network["most_ranks"][name]
            shown = f"{most}" if most < MOST_RANKS else f"≥ {most}"
            cells = [f"{100 * values[ranks]:.1f} %" for ranks in args.ranks]
            rows.append([name, *cells, shown])
        header = ["no sync ÷ step", *(f"{ranks} ranks" for ranks in args.ranks)]
        report.print_table([*header, f"≥ {100 * KEPT:.0f} % up to"], rows)
        say(f"closed form: all can hide up to N = {limit:.0f}")
    say("\nThe global batch is the same for all numbers of ranks. Simulated, never measured.")
    return result


def draw(args, result: dict, path: Path) -> None:
    """A panel per bandwidth: efficiency over the number of ranks."""
    from matplotlib.figure import Figure

    networks = result["networks"]
    figure = Figure(figsize=(3.6 * len(networks) + 0.6, 4.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for panel, network in zip(panels, networks, strict=True):
        for number, (name, values) in enumerate(network["efficiency"].items()):
            look = {"color": COLORS[name[:2]], "marker": "Dv^osP*X"[number % 8], "label": name}
            if number > 3:
                look |= {"linestyle": "--", "markerfacecolor": "none"}
            where = [list(values).index(ranks) for ranks in args.ranks]
            panel.plot(list(values), [100 * v for v in values.values()], markevery=where, **look)
        panel.axhline(100 * KEPT, color="black", linestyle=":", linewidth=1)
        if network["closed_form"] >= min(args.ranks):
            label = "closed form: all of it can hide, left of the line"
            panel.axvline(network["closed_form"], color="black", linestyle="--", label=label)
        panel.set_xscale("log", base=2)
        panel.set_xticks(args.ranks, [str(ranks) for ranks in args.ranks])
        panel.set_xticks([], minor=True)
        panel.set(xlabel="ranks", title=f"{network['bandwidth'] / UNITS['gbit']:g} Gbit/s")
        panel.set_xlim(min(args.ranks) / 1.3, max(args.ranks) * 1.3)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("efficiency: no sync ÷ step, %")
    panels[0].set_ylim(0, 104)
    handles = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, frameon=False)
    tokens = f"{args.global_batch:g} tokens in all"
    speed = result["machine"]["operations_per_second"] * args.compute / 1e12
    figure.suptitle(f"Simulated: {args.size} model, {tokens}, {speed:.0f} TFLOP/s per rank")
    figure.savefig(path, format="png")


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from bucketed import SIZES

        from common import setup
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/, bucketed.py and simulate.py"
        sys.exit(f"error: {error}: copy {needed} beside this script")

    parser = setup.Parser(__doc__)
    add, positive = parser.add_argument, setup.positive_number
    ranks = setup.whole_number(2, MOST_RANKS)
    add("--size", choices=SIZES, default="xl", help="CS336 2025: xl, 2.7b; 2026: xl-2026, 10b")
    add("--ranks", type=several(ranks), default="2,8,64,512,1024", metavar="N,…")
    speeds = several(quantity("gbit", "mbit"))
    add("--bandwidth", type=speeds, default="10gbit,100gbit,400gbit", metavar="RATE,…")
    add("--latency", type=quantity("us", "ms"), default="20us", help="from rank to rank")
    add("--call", type=quantity("us", "ms"), default="10us", help="fixed cost of an all-reduce")
    add("--compute", type=positive, default=100.0, help="× as fast as this core is a rank")
    add("--global-batch", type=positive, default=2.0**19, help="tokens of all ranks in a step")
    add("--bucket-sizes-mb", type=several(positive), default="25,400", metavar="MB,…", help="of 05")
    add("--seed", type=setup.whole_number(0), default=0)
    add("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    args = parser.parse_args()
    if not math.isfinite(args.compute * args.global_batch):
        parser.error("argument --compute, --global-batch: inf is not a finite number")
    args.ranks = sorted(set(args.ranks))
    result = run(args)
    if args.plot:
        draw(args, result, args.plot)
        setup.say(f"written: {args.plot}")


if __name__ == "__main__":
    main()
