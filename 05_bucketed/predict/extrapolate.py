r"""05: when does data parallelism stop scaling? The model of simulate.py, for a thousand ranks.

Nothing of that size runs here. A step is built from the floating-point operations and bytes of a
named model, the speed of this core and the factor by which an accelerator is faster. simulate.py
plays it on a ring of any number of ranks. The global batch stays the same, so that more ranks have
less to compute each, and as much to send.

    python 05_bucketed/predict/extrapolate.py                                   (see also --help)
    python 05_bucketed/predict/extrapolate.py --size xl --compute 5000 --bandwidth 100gbit,400gbit

A closed form stands beside it: up to how many ranks can all communication hide under backward? The
README derives it, for FSDP as well.

What is assumed, beyond simulate.py's list, and was never checked on hardware: a network of its own
card, so that neither side slows the other; no Python, no copies; one call at a time, as NCCL does;
a flat ring (NCCL takes trees for small tensors on many ranks); attention scores cost nothing.

Source: Stanford CS336, assignment 2 (2026), "data parallel calculations"; simulate.py's.
"""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

KEPT = 0.9  # "it scales": the step without communication is at least this part of the step
MOST_RANKS = 2**16


@dataclass(frozen=True)
class Machine:
    """What one rank can do."""

    operations_per_second: float  # floating-point ones, of forward and backward
    optimizer_seconds_per_parameter: float

    def times(self, factor: float) -> "Machine":
        """A rank that is so much faster."""
        operations = self.operations_per_second * factor
        return Machine(operations, self.optimizer_seconds_per_parameter / factor)


def build_step(model, tokens: float, machine: Machine):
    """A Step of a transformer whose weights are on the meta device, with `tokens` per rank.

    A weight with rows and columns costs 2 operations per token and element in forward and 4 in
    backward; the embedding none.
    """
    from simulate import Step

    backward = 0.0
    parameters = 0
    gradients = []
    for name, parameter in reversed(list(model.named_parameters())):
        parameters += parameter.numel()
        if parameter.dim() == 2 and name != "token_embedding.weight":
            backward += 4 * tokens * parameter.numel() / machine.operations_per_second
        gradients.append((float(parameter.nbytes), backward))
    optimizer = machine.optimizer_seconds_per_parameter * parameters
    return Step(backward / 2, backward, optimizer, gradients)


def closed_form(tokens: float, parameters: int, bytes_sent: float, bandwidth, operations) -> float:
    """The number of ranks up to which backward is as long as the ring's transfer, or longer."""
    return 1 + 2 * tokens * parameters * bandwidth / (operations * bytes_sent)


def efficiency(step, network, rung: str, bucket_size_mb: float) -> float:
    """The step without communication ÷ the step of the rung."""
    from simulate import simulate

    no_sync = step.forward + step.backward + step.optimizer
    return no_sync / simulate(step, network, rung, bucket_size_mb).step_seconds


def most_ranks(is_enough) -> int:
    """The largest number of ranks, up to MOST_RANKS, for which `is_enough`; 1 if 2 are too many."""
    below = 1
    above = 2
    while above <= MOST_RANKS and is_enough(above):
        below = above
        above = 2 * above
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

COLORS = {"02": "#CC79A7", "03": "#E69F00", "04": "#009E73", "05": "#0072B2"}
MARKERS = "Dv^osP*X"
UNITS = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "us": 1e-6, "ms": 1e-3}  # in bytes/s or seconds


def measure_core() -> Machine:
    """This core: medians of six steps of `tiny` on one thread."""
    from bucketed import SIZES, LanguageModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    *shape, batch_size, context_length = SIZES["tiny"]
    model = LanguageModel(*shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length))
    compute = []
    update = []
    for _ in range(6):
        start = time.perf_counter()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        computed = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        updated = time.perf_counter()
        compute.append(computed - start)
        update.append(updated - computed)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    multiplied = sum(p.numel() for p in matrices) - model.token_embedding.weight.numel()
    parameters = sum(p.numel() for p in model.parameters())
    operations = 6 * tokens.numel() * multiplied
    return Machine(operations / sorted(compute)[3], sorted(update)[3] / parameters)


def quantity(*units: str):
    """A type for argparse: a number above 0 with one of these units."""
    from common.setup import checked

    def convert(text: str) -> float:
        found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([a-z]+)", text.strip())
        if found is None or found[2] not in units:
            raise ValueError
        return float(found[1]) * UNITS[found[2]]

    allowed = f"a number above 0 with its unit, {' or '.join(units)}, such as 10{units[0]}"
    return checked(convert, lambda number: number > 0, allowed)


def label(rung: str, bucket_size_mb: float) -> str:
    return f"{rung}, {bucket_size_mb:g} MB" if rung == "05" else rung


def simulate_network(args, model, machine: Machine, bandwidth: float) -> dict:
    """All rungs on one network: an entry of "networks"."""
    from simulate import Network

    from common.setup import progress

    def efficiency_at(ranks, rung, bucket_size_mb):
        step = build_step(model, args.global_batch / ranks, machine)
        network = Network(ranks, args.latency, bandwidth, call=args.call, calls_at_once=1)
        return efficiency(step, network, rung, bucket_size_mb)

    def curve(rung, bucket_size_mb):
        """The efficiency by number of ranks, and up to how many ranks it is kept."""
        powers_of_two = [2**power for power in range(1, 17)]  # for the picture
        between = [n for n in powers_of_two if min(args.ranks) < n < max(args.ranks)]
        by_ranks = {}
        for ranks in sorted({*args.ranks, *between}):
            by_ranks[ranks] = efficiency_at(ranks, rung, bucket_size_mb)
        kept = most_ranks(lambda ranks: efficiency_at(ranks, rung, bucket_size_mb) >= KEPT)
        return by_ranks, kept

    parameters = sum(parameter.numel() for parameter in model.parameters())
    sent = sum(parameter.nbytes for parameter in model.parameters())
    limit = closed_form(
        args.global_batch, parameters, sent, bandwidth, machine.operations_per_second
    )
    entry = {"bandwidth": bandwidth, "closed_form": limit, "efficiency": {}, "most_ranks": {}}
    rows = [("02", 25.0), ("03", 25.0), ("04", 25.0)]  # the size counts for 05 only
    rows += [("05", megabytes) for megabytes in args.bucket_sizes_mb]
    for row in rows:
        name = label(*row)
        progress(f"{bandwidth / UNITS['gbit']:g} Gbit/s: {name}")
        entry["efficiency"][name], entry["most_ranks"][name] = curve(*row)
    return entry


def print_network(args, entry: dict) -> None:
    """The table of one network."""
    from common import report
    from common.setup import say

    gbit = entry["bandwidth"] / UNITS["gbit"]
    say(f"\n{gbit:g} Gbit/s, {1e6 * args.latency:g} µs from rank to rank")
    rows = []
    for name, by_ranks in entry["efficiency"].items():
        cells = [f"{100 * by_ranks[ranks]:.1f} %" for ranks in args.ranks]
        most = entry["most_ranks"][name]
        rows.append([name, *cells, f"{most}" if most < MOST_RANKS else f"≥ {most}"])
    header = ["no sync ÷ step", *(f"{ranks} ranks" for ranks in args.ranks)]
    report.print_table([*header, f"≥ {100 * KEPT:.0f} % up to"], rows)
    say(f"closed form: all can hide up to N = {entry['closed_form']:.0f}")


def run(args) -> dict:
    """Simulate everything and print a table for each bandwidth; returns what `draw` needs."""
    from bucketed import SIZES, LanguageModel

    from common.setup import progress, say

    with torch.device("meta"):
        model = LanguageModel(*SIZES[args.size][:5])
    progress("measuring this core")
    core = measure_core()
    machine = core.times(args.compute)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"05_bucketed/extrapolate: {args.size} model, {parameters / 1e6:.0f} million parameters")
    this_core = f"{core.operations_per_second / 1e9:.0f} GFLOP/s (this core)"
    speed = f"{args.compute:g} × {this_core} = {machine.operations_per_second / 1e12:.1f} TFLOP/s"
    say(f"global batch {args.global_batch:g} tokens; a rank: {speed}")
    networks = []
    for bandwidth in args.bandwidth:
        entry = simulate_network(args, model, machine, bandwidth)
        print_network(args, entry)
        networks.append(entry)
    say("\nThe global batch is the same for all numbers of ranks. Simulated, never measured.")
    return {"machine": machine, "networks": networks}


def draw_panel(panel, entry: dict, ranks: list[int]) -> None:
    """Efficiency over the number of ranks on one network; marks at those that the table has."""
    for number, (name, by_ranks) in enumerate(entry["efficiency"].items()):
        look = {"color": COLORS[name[:2]], "marker": MARKERS[number % len(MARKERS)], "label": name}
        if number > 3:  # another bucket size of 05
            look |= {"linestyle": "--", "markerfacecolor": "none"}
        marked = [list(by_ranks).index(number_of_ranks) for number_of_ranks in ranks]
        percent = [100 * value for value in by_ranks.values()]
        panel.plot(list(by_ranks), percent, markevery=marked, **look)
    panel.axhline(100 * KEPT, color="black", linestyle=":", linewidth=1)
    if entry["closed_form"] >= min(ranks):
        label = "closed form: all of it can hide, left of the line"
        panel.axvline(entry["closed_form"], color="black", linestyle="--", label=label)
    panel.set_xscale("log", base=2)
    panel.set_xticks(ranks, [str(number_of_ranks) for number_of_ranks in ranks])
    panel.set_xticks([], minor=True)
    panel.set(xlabel="ranks", title=f"{entry['bandwidth'] / UNITS['gbit']:g} Gbit/s")
    panel.set_xlim(min(ranks) / 1.3, max(ranks) * 1.3)
    panel.grid(alpha=0.3)


def draw(args, result: dict, path: Path) -> None:
    """A panel per bandwidth."""
    from matplotlib.figure import Figure

    networks = result["networks"]
    figure = Figure(figsize=(3.6 * len(networks) + 0.6, 4.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    legend = {}
    for panel, entry in zip(panels, networks, strict=True):
        draw_panel(panel, entry, args.ranks)
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            legend[label] = handle
    panels[0].set_ylabel("efficiency: no sync ÷ step, %")
    panels[0].set_ylim(0, 104)
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=6, frameon=False)
    tokens = f"{args.global_batch:g} tokens in all"
    speed = f"{result['machine'].operations_per_second / 1e12:.0f} TFLOP/s per rank"
    figure.suptitle(f"Simulated: {args.size} model, {tokens}, {speed}")
    figure.savefig(path, format="png")


def main():
    folder = Path(__file__).resolve().parent
    stage = folder.parent
    sys.path[:0] = [str(folder), str(stage), str(stage.parent)]
    try:
        import simulate  # noqa: F401
        from bucketed import SIZES

        from common import setup
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/, bucketed.py and simulate.py"
        sys.exit(f"error: {error}: copy {needed} beside this script")

    parser = setup.Parser(__doc__)
    add = parser.add_argument
    ranks = setup.list_of(setup.whole_number(2, MOST_RANKS))
    rates = setup.list_of(quantity("gbit", "mbit"))
    megabytes = setup.list_of(setup.positive_number)
    finite = setup.checked(float, lambda number: 0 < number < 1e18, "a number above 0, below 1e18")
    add("--size", choices=SIZES, default="xl", help="CS336 2025: xl, 2.7b; 2026: xl-2026, 10b")
    add("--ranks", type=ranks, default="2,8,64,512,1024", metavar="N,…")
    add("--bandwidth", type=rates, default="10gbit,100gbit,400gbit", metavar="RATE,…")
    add("--latency", type=quantity("us", "ms"), default="20us", help="from rank to rank")
    add("--call", type=quantity("us", "ms"), default="10us", help="fixed cost of an all-reduce")
    add("--compute", type=finite, default=100.0, help="× as fast as this core is a rank")
    add("--global-batch", type=finite, default=2.0**19, help="tokens of all ranks in a step")
    add("--bucket-sizes-mb", type=megabytes, default="25,400", metavar="MB,…", help="of 05")
    setup.add_plot_arguments(parser, "extrapolate.png")
    args = parser.parse_args()
    args.ranks = sorted(set(args.ranks))
    result = run(args)
    if args.plot:
        draw(args, result, args.plot)
        setup.say(f"written: {args.plot}")


if __name__ == "__main__":
    main()
