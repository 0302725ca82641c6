r"""A growing model: what synchronization costs while the work grows.

Runs stage 05 with models of several sizes, beside `no sync` and torch DDP where three replicas fit
into memory, else alone.

    make growth                                                      (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 common/ladder/growth.py --sizes tiny,small
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "05_bucketed")]

import bucketed  # noqa: E402
import torch  # noqa: E402
from bucket_sweep import all_fit  # noqa: E402

from common import report, setup  # noqa: E402
from common.ladder.rungs import read_arguments  # noqa: E402


def measure(args, device: torch.device) -> dict | None:
    """Stage 05 with one model: "model" and "candidates" of the JSON; None without memory for it."""
    with torch.device("meta"):
        model = bucketed.LanguageModel(*bucketed.SIZES[args.size][:5])
        model = model.to(getattr(torch, args.dtype))
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the model before
    args.no_baseline = not all_fit(3, gradient_bytes, device)
    if not all_fit(1, gradient_bytes, device):
        setup.say(f"{args.size} model: not measured, there is no memory for a replica per rank")
        return None
    replicas = 1 if args.no_baseline else 3
    model = report.describe(bucketed.LanguageModel, bucketed.SIZES, args, replicas)
    candidates = bucketed.benchmark(args, {}, device, model)
    return {"model": model, "candidates": candidates}


def print_growth(models: dict[str, dict], world_size: int) -> None:
    """A row for each model."""
    rows = []
    for size, of_size in models.items():
        if of_size is None:
            rows.append([size, *"--------"])
            continue
        model = of_size["model"]
        by_name = {one["name"]: one for one in of_size["candidates"]}
        times = by_name["BucketedDDP"]
        step = report.percentiles(times["step_seconds"])[0]
        exposed = report.percentiles(times["exposed_comm_seconds"])[0]
        tokens = world_size * model["batch_size"] * model["context_length"]
        row = [size, f"{model['parameters'] / 1e6:.1f}", str(tokens)]
        row += [f"{1000 * step:.0f}", f"{tokens / step:.0f}"]
        for other in ("no sync", "torch DDP"):
            bar = by_name.get(other, {}).get("step_seconds")
            row.append(report.ratio(times["step_seconds"], bar))
        rows.append([*row, f"{1000 * exposed:.0f}", f"{100 * exposed / step:.1f} %"])
    setup.say()
    header = ["BucketedDDP", "M parameters", "tokens", "step, ms", "tokens/s", "/no sync"]
    report.print_table([*header, "/torch DDP", "exposed, ms", "share"], rows)
    setup.say(
        "p50 over all steps of all ranks; tokens: of all ranks in a step; -: no memory for it."
    )


def main():
    args = read_arguments(setup.Parser(__doc__), "tiny,small,medium", steps=4, warmup=1)

    with setup.process_group(args) as device:
        result = report.begin("growth", args, device)
        result["models"] = {}
        for size in args.sizes:
            setup.say()
            args.size = size
            result["models"][size] = measure(args, device)
        print_growth(result["models"], result["world_size"])
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
