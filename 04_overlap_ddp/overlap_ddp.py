r"""04: all-reduce every gradient on its own, while backward is still running.

Backward computes the gradients of the last layers first, and nothing changes a complete one. So
its all-reduce starts as soon as it is ready, in the background, while backward goes on to the
layers below: one call per parameter again, but most of the communication is hidden.

    make 04_overlap_ddp NPROC=2                                             (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 04_overlap_ddp/overlap_ddp.py  (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        04_overlap_ddp/overlap_ddp.py    (two hosts; R is 0 on HOST0, else 1)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020, sections 3.1 and 3.2; Stanford CS336, assignment 2.
"""

import hashlib
import sys
import weakref
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def broadcast_from_rank_0(module: nn.Module, process_group: dist.ProcessGroup | None):
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().contiguous()  # a collective takes no memory with gaps
        dist.broadcast(dense, group=process_group, group_src=0)
        tensor.detach().copy_(dense)


def fill_if_unused(parameter: nn.Parameter) -> None:
    """Zeros for a parameter that this rank did not use; RuntimeError if it cannot be averaged."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    if parameter.grad.is_sparse:
        raise RuntimeError("a sparse gradient cannot be averaged: use nn.Embedding(sparse=False)")
    if parameter.grad.requires_grad:
        raise RuntimeError("backward(create_graph=True) is not supported: use torch.autograd.grad")


class OverlapDDP(nn.Module):
    """Average gradients with one all-reduce per parameter, during backward.

    `process_group`: the ranks that train together; None: all of them.
    ValueError if the module cannot be wrapped, RuntimeError if a gradient cannot be averaged.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.synchronizing = True  # False within no_sync()
        check_module(module, process_group)
        broadcast_from_rank_0(module, process_group)

        # All ranks launch in this order: on arrival they might add up different parameters.
        self.order = trainable_parameters(module)[::-1]
        self._start_over()
        wrapper = weakref.ref(self)  # weak: the hooks keep no wrapper alive

        def gradient_is_accumulated(parameter: nn.Parameter):
            wrapper()._gradient_is_ready(parameter)

        for parameter in self.order:
            handle = parameter.register_post_accumulate_grad_hook(gradient_is_accumulated)
            weakref.finalize(self, handle.remove)  # the hooks end with the wrapper

    def forward(self, *inputs, **kwargs):
        if torch.is_grad_enabled() and trainable_parameters(self.module):
            check_forward(self)
            if self.ready:  # by a backward that trained another module, as in a GAN
                self.finish_gradient_synchronization()
            self.armed = self.synchronizing
            self.writes = in_place_writes(self.order)
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self):
        """Within this context gradients are only accumulated; nothing is communicated."""
        before = self.synchronizing
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = before

    def _start_over(self):
        self.armed = False  # hooks act only from a forward of this wrapper to the finish
        self.writes = 0  # in place, to the parameters, as of that forward
        self.ready = set()  # parameters whose gradient is complete
        self.waiting = list(self.order)  # what is not launched yet
        self.in_flight = []  # (all-reduce, its tensor, the tensor's version at the launch)

    def _gradient_is_ready(self, parameter: nn.Parameter):
        if not self.armed or not self.synchronizing:
            return
        check_first_backward(parameter, self.ready)
        self.ready.add(parameter)
        while self.waiting and self.waiting[0] in self.ready:
            self._launch_next()

    def _launch_next(self):
        parameter = self.waiting.pop(0)
        fill_if_unused(parameter)
        parameter.grad.mul_(1 / self.world_size)  # before the sum, which could overflow
        work = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)
        self.in_flight.append((work, parameter.grad, parameter.grad._version))

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients. Call it after backward(), before optimizer.step()."""
        if not self.synchronizing:
            return
        try:
            while self.waiting:  # what backward did not reach
                self._launch_next()
            for work, _, _ in self.in_flight:
                work.wait()
            check_unchanged(self.in_flight)
        finally:
            self._start_over()


# What main() below trains and measures; the flags that only this stage has.
WRAPPER, WRAPPER_OPTIONS = OverlapDDP, {}

# ==================================================================================================
# Below this line stages 02 to 05 are the same, to the byte: guards, model, verify, benchmark, main.


def check_module(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """ValueError, on all ranks, if their modules differ or cannot be wrapped."""
    if dist.get_rank(process_group) < 0:
        raise ValueError("this rank is not a member of process_group: wrap on its members only")
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors.values()):
        raise ValueError("a lazy module has no shapes yet: run one forward before you wrap it")
    mine = []
    for name, tensor in tensors.items():
        layout = f"{tuple(tensor.shape)} {tensor.dtype} strides={tensor.stride()}"
        mine.append(f"{name} {layout} requires_grad={tensor.requires_grad}")
    of_ranks = [None] * dist.get_world_size(process_group)
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    dist.all_gather_object(of_ranks, digest, group=process_group)
    if len(set(of_ranks)) > 1:
        dist.all_gather_object(of_ranks, mine, group=process_group)
        for rank, theirs in enumerate(of_ranks):
            for expected, found in zip_longest(of_ranks[0], theirs, fillvalue="nothing"):
                if expected != found:
                    differ = f"rank 0 has {expected}, rank {rank} has {found}"
                    raise ValueError(f"models differ: {differ}")
    # From here on the ranks have the same module, so that all of them raise or none does.
    if any(hasattr(part, "no_sync") for part in module.modules()):
        raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
    if not any(tensor.requires_grad for tensor in tensors.values()):
        raise ValueError("no parameter requires a gradient, so there is nothing to synchronize")


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The parameter's own; newer versions of torch let one choose another."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


# Guards and helpers of stages 04 and 05, which communicate during backward; 02 and 03 need none.


def in_place_writes(parameters: list[nn.Parameter]) -> int:
    """How often they were written to in place: every optimizer step counts."""
    return sum(parameter._version for parameter in parameters)


def check_forward(wrapper: nn.Module) -> None:
    """RuntimeError before a forward whose gradients could not be averaged."""
    if set(trainable_parameters(wrapper.module)) != set(wrapper.order):
        raise RuntimeError("parameters were frozen, thawed or replaced: wrap the module again")
    optimizer_has_stepped = in_place_writes(wrapper.order) != wrapper.writes
    if wrapper.ready and (wrapper.waiting or optimizer_has_stepped):
        raise RuntimeError("call finish_gradient_synchronization() after every backward()")


def check_first_backward(parameter: nn.Parameter, ready: set[nn.Parameter]) -> None:
    if parameter in ready:
        raise RuntimeError("backward() ran twice: finish in between, or use no_sync()")


def check_unchanged(in_flight: list[tuple]) -> None:
    """RuntimeError if a tensor was written to while it was reduced; on a GPU nobody can tell."""
    for _, tensor, version in in_flight:
        if tensor.is_cpu and tensor._version != version:
            raise RuntimeError("gradients changed on their way: clip or zero them afterwards")


def bucket_limit(bucket_size_mb: float | None) -> float:
    """In bytes; ValueError for what is no size."""
    if bucket_size_mb is None:
        return torch.inf
    if not bucket_size_mb > 0:
        raise ValueError(f"bucket_size_mb={bucket_size_mb} is not above 0; None means no limit")
    return bucket_size_mb * 2**20


def view_in_layout_of(parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor:
    """Flat memory, seen in a parameter's shape and strides: fused optimizers need the same."""
    strides = torch.empty_like(parameter, device="meta").stride()  # meta: nothing is allocated
    return flat.as_strided(parameter.shape, strides)


def memory_layout(parameters: list[nn.Parameter]) -> list[tuple]:
    return [(id(p), p.dtype, p.device, p.stride()) for p in parameters]


def check_layout(parameters: list[nn.Parameter], expected: list[tuple]) -> None:
    if memory_layout(parameters) != expected:
        raise RuntimeError("parameters were copied, moved or cast: wrap the module again")


TOLERANCE = 1e-10  # of float64 weights after hundreds of steps; rounding alone stays far below
SIZES = {  # d_model, d_ff, layers, heads, vocabulary, sequences per rank and step, tokens in each
    "nano": (64, 256, 2, 2, 1_000, 4, 64),
    "tiny": (512, 2048, 4, 8, 10_000, 4, 64),
    "deep": (128, 512, 32, 4, 1_000, 4, 64),
    "small": (768, 3072, 12, 12, 10_000, 4, 128),
    "medium": (1024, 4096, 24, 16, 10_000, 4, 128),
    "large": (1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": (1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": (2560, 10_240, 32, 32, 10_000, 4, 128),
    "xl-2026": (2560, 10_240, 32, 32, 10_000, 4, 512),
    "10b": (4608, 12_288, 50, 36, 10_000, 4, 512),
    "0.5b": (1024, 4096, 24, 16, 50_000, 2, 512),
}


class LanguageModel(nn.Module):
    """Causal transformer: tokens int64 [batch, context] -> logits [batch, context, vocabulary]."""

    def __init__(self, d_model, d_ff, layers, heads, vocabulary):
        super().__init__()
        options = {"batch_first": True, "norm_first": True, "bias": False}
        layer = nn.TransformerEncoderLayer(d_model, heads, d_ff, 0.0, F.gelu, **options)
        norm = nn.LayerNorm(d_model, bias=False)
        self.token_embedding = nn.Embedding(vocabulary, d_model)  # no positions: random tokens
        self.layers = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        return self.head(self.layers(x, mask, is_causal=True)).float()


def train_step(model, optimizer, watch, inputs, targets):
    """The step that is verified, then measured: returns its loss and the seconds of its parts."""
    watch.mark("start")
    with torch.profiler.record_function("forward"):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    with torch.profiler.record_function("backward"):
        loss.backward()
    if not isinstance(model, nn.parallel.DistributedDataParallel):  # that one has a hook for it
        watch.mark("last gradient")
    with torch.profiler.record_function("sync"):
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
    watch.mark("synchronized")
    with torch.profiler.record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    watch.mark("end")
    step, exposed = watch.seconds("start", "end"), watch.seconds("last gradient", "synchronized")
    times = {"step_seconds": step, "exposed_comm_seconds": exposed}
    return loss, times | {"optimizer_seconds": watch.seconds("synchronized", "end")}


def verify(args, options, device):
    """Train a classifier on shards, and a twin in one process on their union; compare weights."""
    from common.setup import load_images, say
    from common.timing import Stopwatch

    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load_images(args.data, args.download, device)
    used = len(images) // world_size * world_size  # equal shards, in the last batch too
    if args.log_every or used < len(images):
        share = f"rank r takes images r, r + {world_size}, … of every {64 * world_size}"
        say(f"verify: {share}; {used} of {len(images)} are used")

    def classifier(seed):
        torch.manual_seed(seed)
        hidden = [nn.Linear(images.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(50, 10)).to(device, torch.float64)

    twin = classifier(args.seed)
    model = WRAPPER(classifier(args.seed + rank), **options)  # rank 0's weights must win
    twin_optimizer = torch.optim.Adam(twin.parameters(), lr=1e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watch = Stopwatch(device)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in (1, 2):
        order = torch.randperm(len(images), generator=shuffle)[:used]
        for step, batch in enumerate(order.split(64 * world_size), 1):
            shard = batch[rank::world_size]
            twin_optimizer.zero_grad()
            F.cross_entropy(twin(images[batch]), labels[batch]).backward()
            twin_optimizer.step()
            loss, times = train_step(model, optimizer, watch, images[shard], labels[shard])
            if args.log_every and step % args.log_every == 0:
                ms = f"{1000 * times['step_seconds']:.2f} ms"
                exposed = f"{1000 * times['exposed_comm_seconds']:.2f} ms"
                say(f"verify: epoch {epoch}, step {step}: loss {loss:.4f}, {ms}, exposed {exposed}")
        with torch.no_grad():
            logits = model(test_images)
        loss = F.cross_entropy(logits, test_labels).item()
        accuracy = (logits.argmax(1) == test_labels).double().mean().item()
        say(f"verify: epoch {epoch}, held-out loss {loss:.4f}, accuracy {100 * accuracy:.2f} %")
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    replicas = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(replicas, mine)
    if not all(torch.equal(replica, mine) for replica in replicas):
        sys.exit("verify: FAILED, the ranks hold different weights")
    worst = (mine - nn.utils.parameters_to_vector(twin.parameters())).abs().max().item()
    if not worst <= TOLERANCE:
        sys.exit(f"verify: FAILED, a weight is {worst:.1e} away from single-process training")
    away = f"at most {worst:.1e} away from single-process training (allowed: {TOLERANCE:.0e})"
    say(f"verify: passed, the ranks are bitwise equal and {away}\n")
    if args.save and rank == 0:
        torch.save(model.module.state_dict(), args.save)
        say(f"written: {args.save}")
    return {"max_abs_diff": worst, "tolerance": TOLERANCE, "passed": True, "accuracy": accuracy}


def benchmark(args, options, device, described, others=None, steps=None):
    """Time steps of a language model: no sync, this stage, `others`, torch DDP, and `steps`.

    By name: `others` are wrappers, `steps` functions that train for a step and return its times.
    """
    from common import report, timing

    def torch_ddp(model):
        view = args.gradient_as_bucket_view
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)

    wraps = {WRAPPER.__name__: lambda model: WRAPPER(model, **options), **(others or {})}
    if not args.no_baseline:
        wraps = {"no sync": lambda model: model, **wraps, "torch DDP": torch_ddp}
    shape = SIZES[args.size][:5]
    torch.manual_seed(args.seed + dist.get_rank())
    batch_shape = described["batch_size"], described["context_length"]
    tokens, targets = torch.randint(shape[-1], (2, *batch_shape), device=device)

    def candidate(wrap):
        """A model of its own, and the function that trains it for a step and returns its times."""
        torch.manual_seed(args.seed)
        with device:
            model = wrap(LanguageModel(*shape).to(getattr(torch, args.dtype)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        watch = timing.Stopwatch(device)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # It waits within backward: what it exposes begins at the last gradient.
            last = model.module.token_embedding.weight
            last.register_post_accumulate_grad_hook(lambda _: watch.mark("last gradient"))
        return lambda: train_step(model, optimizer, watch, tokens, targets)[1]

    candidates = {name: candidate(wrap) for name, wrap in wraps.items()} | (steps or {})
    samples = timing.measure(candidates, args.steps, args.warmup)
    for name, step in candidates.items():
        trace = args.trace if name == WRAPPER.__name__ else None
        samples[name]["collectives_per_step"] = timing.count_collectives(step, trace)
    report.print_steps(samples, tokens.numel() * dist.get_world_size())
    return [{"name": name, **times} for name, times in samples.items()]


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")

    parser = setup.Parser(__doc__)
    add = parser.add_argument
    for name, value in WRAPPER_OPTIONS.items():
        add("--" + name.replace("_", "-"), type=setup.positive_number, default=value)
    setup.add_training_arguments(parser, SIZES, steps=15)
    setup.add_verify_arguments(parser)
    add("--gradient-as-bucket-view", action="store_true", help="torch DDP's option of that name")
    args = parser.parse_args()
    if args.save and args.no_verify:
        parser.error("argument --save: not with --no-verify, which trains no classifier")

    with setup.process_group(args) as device:
        options = {name: getattr(args, name) for name in WRAPPER_OPTIONS}
        result = report.begin(folder.name, args, device)
        result["model"] = report.describe(LanguageModel, SIZES, args, 1 if args.no_baseline else 3)
        result["verify"] = None if args.no_verify else verify(args, options, device)
        result["candidates"] = benchmark(args, options, device, result["model"])
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
