r"""02: all-reduce every gradient on its own, after backward.

Data parallelism in its plainest form: every rank holds the whole model and a shard of the batch.
After backward each gradient is averaged, one blocking all-reduce per parameter, so that all ranks
take the step of one process with the whole batch. Nothing is computed meanwhile, and every call
costs latency.

    make 02_naive_ddp NPROC=2                                           (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 02_naive_ddp/naive_ddp.py  (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        02_naive_ddp/naive_ddp.py    (two hosts; R is 0 on HOST0, else 1)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020, sections 3.1 and 3.2; Stanford CS336, assignment 2.
"""

import sys
import weakref
from contextlib import contextmanager
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def broadcast_from_rank_0(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        contiguous = tensor.detach().contiguous()  # as collectives need it
        dist.broadcast(contiguous, group=process_group, group_src=0)
        tensor.detach().copy_(contiguous)


class NaiveDDP(nn.Module):
    """Average gradients with one blocking all-reduce per parameter, after backward.

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

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients. Call it after backward(), before optimizer.step()."""
        if not self.synchronizing:
            return
        for parameter in trainable_parameters(self.module):
            gradient = gradient_or_zeros(parameter)  # an unused one counts as zero
            gradient.mul_(1 / self.world_size)  # before the sum, which could overflow
            dist.all_reduce(gradient, group=self.process_group)

    def no_sync(self):
        """A context in which gradients are only accumulated; nothing is communicated."""
        return accumulating(self)


def main():
    run(NaiveDDP)


# ==================================================================================================
# Below this line stages 02 to 05 are the same, to the byte: helpers, Guard, model, benchmark, run.


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@contextmanager
def accumulating(wrapper: nn.Module):
    """What no_sync() returns: within it finish_gradient_synchronization() and hooks do nothing."""
    before = wrapper.synchronizing
    wrapper.synchronizing = False
    try:
        yield
    finally:
        wrapper.synchronizing = before


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return getattr(parameter, "grad_dtype", None) or parameter.dtype  # newer torch lets one choose


def gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    """.grad, set to zeros if there is none; RuntimeError if it cannot be averaged."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    if parameter.grad.is_sparse:
        raise RuntimeError("a sparse gradient cannot be averaged: use nn.Embedding(sparse=False)")
    if parameter.grad.requires_grad:
        raise RuntimeError("backward(create_graph=True) is not supported: use torch.autograd.grad")
    parameter.grad = (
        parameter.grad.resolve_conj().resolve_neg()
    )  # flags that only one rank may have
    return parameter.grad


def view_in_layout_of(parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor:
    """Flat memory, seen in a parameter's shape and strides: fused optimizers need the same."""
    strides = torch.empty_like(parameter, device="meta").stride()  # meta: nothing is allocated
    return flat.as_strided(parameter.shape, strides)


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
    of_rank_0 = [mine]
    dist.broadcast_object_list(of_rank_0, group=process_group, group_src=0)
    pairs = zip_longest(of_rank_0[0], mine, fillvalue="nothing")
    difference = next((pair for pair in pairs if pair[0] != pair[1]), None)
    of_ranks = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(of_ranks, difference, group=process_group)
    for rank, pair in enumerate(of_ranks):
        if pair:
            raise ValueError(f"models differ: rank 0 has {pair[0]}, rank {rank} has {pair[1]}")
    # From here on the ranks have the same module, so that all of them raise or none does.
    for name, tensor in tensors.items():
        if 0 in tensor.stride() and tensor.numel() > 1:
            raise ValueError(f"{name} is expanded, so nothing can be written to it: clone() it")
    if any(hasattr(part, "no_sync") for part in module.modules()):
        raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
    if not any(tensor.requires_grad for tensor in tensors.values()):
        raise ValueError("no parameter requires a gradient, so there is nothing to synchronize")


class Reduction:
    """An all-reduce that is under way, and its tensor."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor):
        self.work = work
        self.tensor = tensor
        self.version = tensor._version  # one more whenever the tensor is written to


class WeakHook:
    """Calls a method while its object lives. Python never frees what torch's hooks refer to."""

    def __init__(self, method=None):
        self.method = weakref.WeakMethod(method) if method else lambda: None

    def __call__(self, parameter: nn.Parameter) -> None:
        if (method := self.method()) is not None:
            method(parameter)

    def __reduce__(self):
        return WeakHook, ()  # a copy of the wrapper has no hooks


class Guard:
    """Notices misuse of 04 and 05, with a RuntimeError: a forgotten finish; a second backward; a
    gradient that is written to while it travels (on a GPU nobody can tell); parameters that were
    frozen, unfrozen, replaced, copied, moved or cast after wrapping.

    It accepts gradients only from a forward of the wrapper to the finish, and lets its hooks end
    with it. So a module that trains without its wrapper, or outlives it, sends nothing.
    """

    def __init__(self, wrapper: nn.Module):
        self.module = wrapper.module
        self.layout = self._layout()
        self.expects_gradients = False  # from a forward of the wrapper to the finish
        self.accepted = set()  # parameters whose gradient came meanwhile
        self.versions = 0  # the sum of theirs, at that moment: an optimizer's step raises them
        wrapper._gradient_is_ready = WeakHook(wrapper._gradient_is_ready)

    def _layout(self) -> list[tuple]:
        """Which parameters are trained, and where and how they lie in memory."""
        parameters = self.module.parameters()  # the only walk over all of them in a step
        return [(id(p), p.dtype, p.device, p.stride()) for p in parameters if p.requires_grad]

    def before_forward(self, wrapper: nn.Module) -> None:
        """Expect gradients. What an earlier backward of this step left is averaged first."""
        layout = self._layout() if torch.is_grad_enabled() else []
        if not layout:  # or all are frozen for a while, as in a GAN
            return
        self.expects_gradients = False
        if layout != self.layout:
            changed = "frozen, unfrozen, replaced, copied, moved or cast"
            raise RuntimeError(f"parameters were {changed}: wrap the module again")
        if self.accepted:  # as in a GAN, by the generator's backward through the discriminator
            optimizer_has_stepped = sum(p._version for p in self.accepted) != self.versions
            if wrapper.waiting or optimizer_has_stepped:
                raise RuntimeError("call finish_gradient_synchronization() after every backward()")
            wrapper.finish_gradient_synchronization()
        self.expects_gradients = wrapper.synchronizing

    def accepts(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient that has just come belongs to a forward of the wrapper."""
        if self.expects_gradients and parameter in self.accepted:
            raise RuntimeError(
                "backward() ran twice: finish in between, or use no_sync(). Or a gradient came"
                " twice in one backward(), as from two re-entrant checkpoints: use_reentrant=False"
            )
        if self.expects_gradients:
            self.accepted.add(parameter)
            self.versions += parameter._version
        return self.expects_gradients

    def after_finish(self, reductions: list[Reduction]) -> None:
        """Expect no more gradients; were those that came left alone until now?"""
        self.expects_gradients = False
        self.accepted.clear()
        self.versions = 0
        if any(r.tensor.is_cpu and r.tensor._version != r.version for r in reductions):
            raise RuntimeError("gradients changed on their way: clip or zero them afterwards")


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


@cache
def helpers():
    """common's modules. Only a run needs them: a copied class can be imported with torch alone."""
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import report, setup, timing
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")
    return report, setup, timing


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
    return loss, {
        "step_seconds": watch.seconds("start", "end"),
        "exposed_comm_seconds": watch.seconds("last gradient", "synchronized"),
        "optimizer_seconds": watch.seconds("synchronized", "end"),
    }


def verify(wrap, args, device):
    """Train a classifier on shards, and a twin in one process on their union; compare weights."""
    report, setup, timing = helpers()
    tolerance = 1e-10  # of float64 weights after hundreds of steps; rounding alone stays far below
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *held_out = setup.load_equal_shares(args, device)

    def classifier(seed):
        torch.manual_seed(seed)
        hidden = [nn.Linear(images.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(50, 10)).to(device, torch.float64)

    twin = classifier(args.seed)
    wrapped = classifier(args.seed + rank)
    model = wrap(wrapped)  # rank 0's weights must win
    twin_optimizer = torch.optim.Adam(twin.parameters(), lr=1e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watch = timing.Stopwatch(device)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in (1, 2):
        order = torch.randperm(len(images), generator=shuffle)
        for step, batch in enumerate(order.split(64 * world_size), 1):
            shard = batch[rank::world_size]
            train_step(twin, twin_optimizer, watch, images[batch], labels[batch])
            loss, times = train_step(model, optimizer, watch, images[shard], labels[shard])
            report.log_step(args, epoch, step, loss, times)
        accuracy = report.evaluate(epoch, model, *held_out)
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    replicas = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(replicas, mine)
    if not all(torch.equal(replica, mine) for replica in replicas):
        sys.exit("verify: FAILED, the ranks hold different weights")
    worst = (mine - nn.utils.parameters_to_vector(twin.parameters())).abs().max().item()
    if not worst <= tolerance:
        sys.exit(f"verify: FAILED, a weight is {worst:.1e} away from single-process training")
    away = f"at most {worst:.1e} away from single-process training (allowed: {tolerance:.0e})"
    setup.say(f"verify: passed, the ranks are bitwise equal and {away}\n")
    report.save(args.save, wrapped.state_dict())
    return {"max_abs_diff": worst, "tolerance": tolerance, "passed": True, "accuracy": accuracy}


def benchmark(wraps, args, device, described, steps=None):
    """Time steps in turn: no sync, wrappers by name, torch DDP, other ways to train by name."""
    report, setup, timing = helpers()
    first = next(iter(wraps))  # the one that --trace records
    if not args.no_baseline:
        wraps = {"no sync": lambda model: model, **wraps, **timing.TORCH_DDPS}
    shape = setup.SIZES[args.size][:5]
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
        if isinstance(model, nn.parallel.DistributedDataParallel):  # it waits within backward
            timing.mark_last_gradient(watch, model.module.token_embedding.weight)
        return lambda: train_step(model, optimizer, watch, tokens, targets)[1]

    candidates = {name: candidate(wrap) for name, wrap in wraps.items()} | (steps or {})
    samples = timing.measure(candidates, args.steps, args.warmup)
    for name, step in candidates.items():
        trace = args.trace if name == first else None
        samples[name]["collectives_per_step"] = timing.count_collectives(step, trace)
    report.print_steps(samples, tokens.numel() * dist.get_world_size())
    return [{"name": name, **times} for name, times in samples.items()]


def run(wrapper, **options):
    """What main() does: verify and measure a wrapper. Its `options` become flags."""
    report, setup, _ = helpers()
    args = setup.stage_arguments(__doc__, steps=15, **options)
    wrap = partial(wrapper, **{name: getattr(args, name) for name in options})
    with setup.process_group(args) as device:
        result = report.begin(Path(__file__).resolve().parent.name, args, device)
        wraps = {wrapper.__name__: wrap} | setup.users_wrapper(args)
        replicas = len(wraps) + 3 * (not args.no_baseline)
        result["model"] = report.describe(LanguageModel, args, replicas)
        result["verify"] = None
        for name in [] if args.no_verify else reversed(wraps):  # this stage's last: it is saved
            if args.mine:
                setup.say(f"verify: {name}")
            result["verify"] = verify(wraps[name], args, device)
        result["candidates"] = benchmark(wraps, args, device, result["model"])
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
