"""02: all-reduce every gradient on its own, after backward.

Data parallelism in its plainest form: every rank holds the whole model and its own shard of the batch. After backward
each gradient is averaged over the ranks, one blocking all-reduce per parameter, so that all ranks take the same step
as one process with the whole batch would. While a gradient travels nothing is computed, and every call pays its latency.

    make 02_naive_ddp NPROC=2                                                  (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 02_naive_ddp/naive_ddp.py         (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        02_naive_ddp/naive_ddp.py                                              (two hosts; R is 0 on HOST0, else 1)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
section 3.1; Stanford CS336, assignment 2, "naive DDP".
"""

import argparse
import sys
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function


def broadcast_from_rank_0(
    module: nn.Module, process_group: dist.ProcessGroup | None = None
) -> None:
    """Give every rank the parameters and buffers of rank 0. ValueError on all ranks if their models differ."""
    if any(parameter._post_accumulate_grad_hooks for parameter in module.parameters()):
        raise ValueError(
            "the parameters have gradient hooks: wrap a module only once, or copy.deepcopy(module), without them"
        )
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad}"
        for name, tensor in tensors
    ]
    everyones = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyones, mine, group=process_group)
    for rank, theirs in enumerate(everyones):
        for expected, found in zip_longest(everyones[0], theirs, fillvalue="nothing"):
            if expected != found:
                raise ValueError(
                    f"the ranks' models differ: rank 0 has {expected}, rank {rank} has {found}"
                )
    for _, tensor in tensors:
        dense = (
            tensor.detach().contiguous()
        )  # a collective reads memory front to back, whatever the strides
        dist.broadcast(dense, group=process_group, group_src=0)
        tensor.detach().copy_(dense)


def prepare_gradient(parameter: nn.Parameter) -> None:
    """Zeros for a parameter that this rank did not use: its part of the mean over the global batch."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise RuntimeError(
            "a gradient is sparse and cannot be averaged here: use nn.Embedding(..., sparse=False)"
        )


class NaiveDDP(nn.Module):
    """Average gradients with one blocking all-reduce per parameter, after backward.

    Raises ValueError if the ranks' models differ or are wrapped already, RuntimeError for sparse gradients.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        broadcast_from_rank_0(module, process_group)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients over the ranks. Call it after backward(), before optimizer.step()."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                prepare_gradient(parameter)
                dist.all_reduce(parameter.grad, group=self.process_group)
                parameter.grad.mul_(1 / self.world_size)


WRAPPER, WRAPPER_OPTIONS = NaiveDDP, {}


# ======================================================================================================================
# Below this line stages 02 to 05 are the same, to the byte: the language model, verify, benchmark, main.

TOLERANCE = 1e-10  # of weights in float64 after hundreds of steps; rounding alone stays some orders of magnitude below
SIZES = {  # d_model, d_ff, layers, heads, vocabulary, sequences per rank and step, tokens per sequence
    "tiny": (512, 2048, 4, 8, 10_000, 4, 64),
    "small": (768, 3072, 12, 12, 10_000, 4, 128),
    "medium": (1024, 4096, 24, 16, 10_000, 4, 128),
    "large": (1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": (1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": (2560, 10_240, 32, 32, 10_000, 4, 128),
    "0.5b": (1024, 4096, 24, 16, 50_000, 2, 512),
}


class LanguageModel(nn.Module):
    """A causal transformer: token ids int64 [batch, context] -> logits [batch, context, vocabulary].

    Pre-norm and without biases, as the course's model; no position embedding, for the tokens are random.
    """

    def __init__(self, d_model, d_ff, layers, heads, vocabulary):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                d_model, heads, d_ff, 0.0, F.gelu, batch_first=True, norm_first=True, bias=False
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(self.norm(x))


def verify(args, options, device):
    """Train a classifier on shards with the wrapper, and a twin in one process on their union; compare all weights."""
    from common.images import load_images

    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = (
        part.to(device) for part in load_images(args.data, args.download)
    )

    def classifier(seed):
        torch.manual_seed(seed)
        layers = (
            nn.Linear(images.shape[1], 50),
            nn.ReLU(),
            nn.Linear(50, 50),
            nn.ReLU(),
            nn.Linear(50, 10),
        )
        return nn.Sequential(*layers).to(device, torch.float64)

    twin, model = (
        classifier(args.seed),
        WRAPPER(classifier(args.seed + rank), **options),
    )  # rank 0's weights must win
    twin_optimizer, optimizer = (
        torch.optim.Adam(one.parameters(), lr=1e-3) for one in (twin, model)
    )
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in range(2):
        batches = torch.randperm(len(images), generator=shuffle).split(64 * world_size)
        for batch in batches[
            : len(images) // (64 * world_size)
        ]:  # a last one that is not full is left out
            twin_optimizer.zero_grad()
            F.cross_entropy(twin(images[batch]), labels[batch]).backward()
            twin_optimizer.step()

            shard = batch[rank::world_size]
            optimizer.zero_grad()
            F.cross_entropy(model(images[shard]), labels[shard]).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
        with torch.no_grad():
            logits = model(test_images)
        loss, accuracy = (
            F.cross_entropy(logits, test_labels),
            (logits.argmax(1) == test_labels).double().mean().item(),
        )
        if rank == 0:
            print(
                f"verify: epoch {epoch + 1}, held-out loss {loss:.4f}, accuracy {100 * accuracy:.2f} %",
                flush=True,
            )

    differences = {}
    for (name, mine), expected in zip(
        model.module.named_parameters(), twin.parameters(), strict=True
    ):
        replicas = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(replicas, mine.detach())
        if not all(torch.equal(replica, replicas[0]) for replica in replicas):
            sys.exit(f"verify: FAILED, the ranks hold different values of {name}")
        differences[name] = (replicas[0] - expected).abs().max().item()
    worst = max(differences, key=differences.get)
    if not differences[worst] <= TOLERANCE:
        sys.exit(
            f"verify: FAILED, {worst} is {differences[worst]:.1e} away from single-process training"
        )
    if rank == 0:
        print(
            f"verify: passed, the ranks are bitwise equal and at most {differences[worst]:.1e} away from single-process "
            f"training (allowed: {TOLERANCE:.0e})\n",
            flush=True,
        )
        if args.save:
            torch.save(model.module.state_dict(), args.save)
    return {
        "max_abs_diff": differences[worst],
        "tolerance": TOLERANCE,
        "passed": True,
        "accuracy": accuracy,
    }


def benchmark(args, options, device):
    """Time training steps of a language model: without synchronisation, with this stage's wrapper, with torch DDP."""
    from common.report import percentiles, print_table
    from common.timing import Stopwatch, measure

    rank, world_size, stage = dist.get_rank(), dist.get_world_size(), WRAPPER.__name__
    *shape, batch_size, context_length = SIZES[args.size]
    batch_size, context_length = (
        args.batch_size or batch_size,
        args.context_length or context_length,
    )
    torch.manual_seed(args.seed + rank)
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length), device=device)

    def candidate(wrap):
        """A replica of its own, and the function that trains it for one step and returns the step's times."""
        torch.manual_seed(args.seed)
        with device:
            model = wrap(LanguageModel(*shape).to(getattr(torch, args.dtype)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        watch = Stopwatch(device)
        waits_in_backward = isinstance(model, DistributedDataParallel)
        if (
            waits_in_backward
        ):  # so what it exposes begins at the last gradient, the first layer's, within backward
            weight = model.module.token_embedding.weight
            weight.register_post_accumulate_grad_hook(lambda _: watch.mark("gradients are there"))

        def step():
            watch.mark("start")
            with record_function("forward"):
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
            with record_function("backward"):
                loss.backward()
            if not waits_in_backward:
                watch.mark("gradients are there")
            with record_function("sync"):
                if isinstance(model, WRAPPER):
                    model.finish_gradient_synchronization()
            watch.mark("gradients are synchronized")
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            watch.mark("end")
            return {
                "step_seconds": watch.seconds("start", "end"),
                "exposed_comm_seconds": watch.seconds(
                    "gradients are there", "gradients are synchronized"
                ),
                "optimizer_seconds": watch.seconds("gradients are synchronized", "end"),
            }

        return step

    wrappers = {
        "no sync": lambda model: model,
        stage: lambda model: WRAPPER(model, **options),
        "torch DDP": lambda model: DistributedDataParallel(
            model,
            [device] if device.type == "cuda" else None,
            gradient_as_bucket_view=args.gradient_as_bucket_view,
        ),
    }
    candidates = {
        name: candidate(wrap)
        for name, wrap in wrappers.items()
        if name == stage or not args.no_baseline
    }
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in LanguageModel(*shape).parameters())
    if rank == 0:
        print(
            f"benchmark: {args.size} model, {parameters / 1e6:.1f} million parameters, {args.dtype}, {batch_size} × "
            f"{context_length} tokens per rank; {args.steps} steps, {args.warmup} before them to warm up",
            flush=True,
        )
    samples = measure(candidates, args.steps, args.warmup)

    for (
        name,
        step,
    ) in (
        candidates.items()
    ):  # count the collectives, and record the trace, outside of the measurement
        with torch.profiler.profile() as profiler:
            step(), step(), step()
        calls = sum(
            event.count for event in profiler.key_averages() if event.key == "c10d::allreduce_"
        )
        samples[name]["collectives_per_step"] = calls // 3
        if args.trace and rank == 0 and name == stage:
            profiler.export_chrome_trace(str(args.trace))

    p50 = {name: percentiles(times["step_seconds"])[0] for name, times in samples.items()}
    header = [
        "step, ms",
        "p50",
        "p75",
        "p90",
        "p95",
        "tokens/s",
        "exposed",
        "share",
        "all-reduces",
        "/torch DDP",
    ]
    rows = []
    for name, times in samples.items():
        exposed = percentiles(times["exposed_comm_seconds"])[0]
        rows.append(
            [
                name,
                *(f"{1000 * seconds:.1f}" for seconds in percentiles(times["step_seconds"])),
                f"{batch_size * context_length * world_size / p50[name]:.0f}",
                f"{1000 * exposed:.1f}",
                f"{100 * exposed / p50[name]:.1f} %",
                str(times["collectives_per_step"]),
                f"{p50[name] / p50['torch DDP']:.3f}" if "torch DDP" in p50 else "-",
            ]
        )
    if rank == 0:
        print_table(header, rows)
        print(
            "Percentiles over all steps of all ranks; tokens/s of all ranks; exposed: communication that is not hidden\n"
            "under backward, ms and share of the step (p50); /torch DDP: ratio of the p50s, below 1 is faster.",
            flush=True,
        )
    return {
        "model": {
            "size": args.size,
            "parameters": parameters,
            "batch_size": batch_size,
            "context_length": context_length,
            "dtype": args.dtype,
        },
        "candidates": [{"name": name, **times} for name, times in samples.items()],
    }


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import setup
        from common.report import environment, write_json
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")

    parser = setup.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default in WRAPPER_OPTIONS.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), type=setup.positive_number, default=default
        )
    parser.add_argument(
        "--size", choices=SIZES, default="tiny", help="of the language model (default: tiny)"
    )
    parser.add_argument(
        "--batch-size", type=setup.whole_number(1), help="sequences per rank and step"
    )
    parser.add_argument("--context-length", type=setup.whole_number(1), help="tokens per sequence")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--steps", type=setup.whole_number(1), default=15, help="measured (default: 15)"
    )
    parser.add_argument(
        "--warmup", type=setup.whole_number(0), default=5, help="steps not measured (default: 5)"
    )
    parser.add_argument("--seed", type=setup.whole_number(0), default=0)
    parser.add_argument("--no-verify", action="store_true", help="only benchmark")
    parser.add_argument(
        "--no-baseline", action="store_true", help="benchmark this stage alone, to save memory"
    )
    parser.add_argument(
        "--gradient-as-bucket-view", action="store_true", help="torch DDP's option of that name"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="verify on MNIST from this folder instead of the digits"
    )
    parser.add_argument("--download", action="store_true", help="fetch MNIST into --data first")
    parser.add_argument(
        "--save",
        type=setup.output_file,
        metavar="FILE",
        help="the verified classifier's state_dict",
    )
    parser.add_argument(
        "--json", type=setup.output_file, metavar="FILE", help="everything measured, raw"
    )
    parser.add_argument(
        "--trace",
        type=setup.output_file,
        metavar="FILE",
        help="Chrome trace of three steps of rank 0",
    )
    setup.add_process_group_arguments(parser)
    args = parser.parse_args()

    with setup.process_group(args) as device:
        options = {name: getattr(args, name) for name in WRAPPER_OPTIONS}
        result = {"stage": folder.name, **environment(device), "options": options}
        if dist.get_rank() == 0:
            print(
                "{stage}: torch {torch}, {backend} on {device}, {world_size} ranks, {threads_per_rank} threads per rank".format(
                    **result
                ),
                flush=True,
            )
        result["verify"] = None if args.no_verify else verify(args, options, device)
        result |= benchmark(args, options, device)
        if args.json and dist.get_rank() == 0:
            write_json(args.json, result)


if __name__ == "__main__":
    main()
