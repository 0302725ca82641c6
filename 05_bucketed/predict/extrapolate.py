"""05: when does data parallelism stop scaling? The model of simulate.py, for a thousand ranks.

Nothing of that size runs here. A step is built from the floating-point operations and bytes of a
named model and the speed of an accelerator. simulate.py plays it on a ring of any number of ranks.
The global batch stays the same, so that more ranks have less to compute each, and as much to send.

    python 05_bucketed/predict/extrapolate.py                                   (see also --help)
    python 05_bucketed/predict/extrapolate.py --size 10b --tflops 350 --bandwidth 100,400

A closed form stands beside it: up to how many ranks can all communication hide under backward? The
README derives it, for FSDP as well.

What is assumed, beyond simulate.py's list, and was never checked on hardware: a network of its own
card, so that neither side slows the other; no Python, no copies; one call at a time, as NCCL does;
a flat ring (NCCL takes trees for small tensors on many ranks); attention scores cost nothing.

Source: Stanford CS336, assignment 2 (2026), "data parallel calculations"; simulate.py's.
"""

import sys
from bisect import bisect_left
from pathlib import Path

import torch

GLOBAL_BATCH = 2**19  # tokens of all ranks in a step
LATENCY = 20e-6  # seconds from rank to rank
CALL = 10e-6  # seconds of fixed cost of an all-reduce
UPDATE = 1e-11  # seconds of the optimizer for each parameter
RANKS = [2, 8, 64, 512, 1024]
MOST_RANKS = 2**16
KEPT = 0.9  # "it scales": the step without communication is at least this part of the step


def build_step(model, tokens: float, operations_per_second: float):
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
            backward += 4 * tokens * parameter.numel() / operations_per_second
        gradients.append((float(parameter.nbytes), backward))
    return Step(backward / 2, backward, UPDATE * parameters, gradients)


def closed_form(tokens: float, parameters: int, bytes_sent: float, bandwidth, operations) -> float:
    """The number of ranks up to which backward is as long as the ring's transfer, or longer."""
    return 1 + 2 * tokens * parameters * bandwidth / (operations * bytes_sent)


def most_ranks(is_enough) -> int:
    """The largest number of ranks, up to MOST_RANKS, for which `is_enough`; 1 if 2 are too many."""

    def is_too_much(ranks):
        return not is_enough(ranks)

    return 1 + bisect_left(range(2, MOST_RANKS + 1), True, key=is_too_much)


# ==================================================================================================
# Below this line: the table, the picture.

ROWS = {  # rung, bucket size in MB (which counts for 05 only), colour and mark in the picture
    "02": ("02", 25.0, "#CC79A7", "D"),
    "03": ("03", 25.0, "#E69F00", "v"),
    "04": ("04", 25.0, "#009E73", "^"),
    "05, 25 MB": ("05", 25.0, "#0072B2", "o"),
    "05, 400 MB": ("05", 400.0, "#0072B2", "s"),
}
GBIT = 1e9 / 8  # bytes


def simulate_network(model, operations_per_second: float, gbit: float) -> dict:
    """All rungs on one network: {row: {number of ranks: efficiency}}, and how far they scale."""
    from simulate import Network, simulate

    from common.setup import progress

    def efficiency(row, ranks):
        """The step without communication ÷ the step of the rung."""
        rung, bucket_size_mb, *_ = ROWS[row]
        step = build_step(model, GLOBAL_BATCH / ranks, operations_per_second)
        network = Network(ranks, LATENCY, gbit * GBIT, call=CALL, calls_at_once=1)
        return step.seconds_alone / simulate(step, network, rung, bucket_size_mb).step_seconds

    def scales_to(row):
        return most_ranks(lambda ranks: efficiency(row, ranks) >= KEPT)

    parameters = sum(map(torch.numel, model.parameters()))
    sent = sum(parameter.nbytes for parameter in model.parameters())
    limit = closed_form(GLOBAL_BATCH, parameters, sent, gbit * GBIT, operations_per_second)
    entry = {"gbit": gbit, "closed_form": limit, "efficiency": {}, "most_ranks": {}}
    for row in ROWS:
        progress(f"{gbit:g} Gbit/s: {row}")
        powers_of_two = [2**power for power in range(1, 11)]  # for the picture
        by_ranks = {ranks: efficiency(row, ranks) for ranks in powers_of_two}
        entry["efficiency"][row] = by_ranks
        entry["most_ranks"][row] = scales_to(row)
    return entry


def print_network(entry: dict) -> None:
    """The table of one network."""
    from common import report
    from common.setup import say

    say(f"\n{entry['gbit']:g} Gbit/s, {1e6 * LATENCY:g} µs from rank to rank")
    rows = []
    for name, by_ranks in entry["efficiency"].items():
        cells = [f"{100 * by_ranks[ranks]:.1f} %" for ranks in RANKS]
        most = entry["most_ranks"][name]
        rows.append([name, *cells, f"{most}" if most < MOST_RANKS else f"≥ {most}"])
    header = ["no sync ÷ step", *(f"{ranks} ranks" for ranks in RANKS)]
    report.print_table([*header, f"≥ {100 * KEPT:.0f} % up to"], rows)
    say(f"closed form: all can hide up to N = {entry['closed_form']:.0f}")


def draw(networks: list[dict], title: str, path: Path) -> None:
    """A panel per network: efficiency over the number of ranks; marks at those of the table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(networks) + 0.6, 4.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for panel, entry in zip(panels, networks, strict=True):
        for name, by_ranks in entry["efficiency"].items():
            _, _, color, marker = ROWS[name]
            look = {"color": color, "marker": marker, "label": name}
            if name == "05, 400 MB":
                look |= {"linestyle": "--", "markerfacecolor": "none"}
            marked = [list(by_ranks).index(ranks) for ranks in RANKS]
            percent = [100 * value for value in by_ranks.values()]
            panel.plot(list(by_ranks), percent, markevery=marked, **look)
        panel.axhline(100 * KEPT, color="black", linestyle=":", linewidth=1)
        label = "closed form: all of it can hide, left of the line"
        panel.axvline(entry["closed_form"], color="black", linestyle="--", label=label)
        if entry["closed_form"] > max(RANKS):
            away = {"ha": "right", "va": "bottom", "fontsize": 9, "transform": panel.transAxes}
            panel.text(0.97, 0.02, f"closed form: {entry['closed_form']:.0f} ranks →", **away)
        panel.set_xscale("log", base=2)
        panel.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        panel.set_xticks([], minor=True)
        panel.set(xlabel="ranks", title=f"{entry['gbit']:g} Gbit/s")
        panel.set_xlim(min(RANKS) / 1.3, max(RANKS) * 1.3)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("efficiency: no sync ÷ step, %")
    panels[0].set_ylim(0, 104)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, format="png")


def main():
    folder = Path(__file__).resolve().parent
    stage = folder.parent
    sys.path[:0] = [str(folder), str(stage), str(stage.parent)]
    try:
        import simulate  # noqa: F401
        from bucketed import LanguageModel

        from common import setup
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/, bucketed.py and simulate.py"
        sys.exit(f"error: {error}: copy {needed} beside this script")

    parser = setup.Parser(__doc__)
    add = parser.add_argument
    finite = setup.checked(float, lambda number: 0 < number < 1e18, "a number above 0, below 1e18")
    rates = setup.list_of(finite)
    sizes = {"choices": setup.SIZES, "default": "xl"}
    add("--size", **sizes, help="CS336 2025: xl, 2.7b; 2026: xl-2026, 10b")
    add("--bandwidth", type=rates, default="10,100,400", metavar="Gbit/s,…", help="of a rank")
    add("--tflops", type=finite, default=7.0, help="10^12 operations per second of a rank")
    setup.add_plot_arguments(parser, "extrapolate.png")
    args = parser.parse_args()

    with torch.device("meta"):
        model = LanguageModel(*setup.SIZES[args.size][:5])
    parameters = sum(map(torch.numel, model.parameters()))
    millions = f"{parameters / 1e6:.0f} million parameters"
    setup.say(f"05_bucketed/extrapolate: {args.size} model, {millions}")
    speed = f"{args.tflops:g} TFLOP/s"
    setup.say(f"global batch {GLOBAL_BATCH} tokens; a rank: {speed}")
    networks = []
    for gbit in args.bandwidth:
        networks.append(simulate_network(model, 1e12 * args.tflops, gbit))
        print_network(networks[-1])
    setup.say("\nThe global batch is the same for all numbers of ranks. Simulated, never measured.")
    if args.plot:
        batch = f"{GLOBAL_BATCH} tokens in all"
        draw(networks, f"Simulated: {args.size} model, {batch}, {speed} per rank", args.plot)
        setup.say(f"written: {args.plot}")


if __name__ == "__main__":
    main()
