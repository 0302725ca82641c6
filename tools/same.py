"""Say whether a training does what one process would do. Copy this file beside your script:

    from same import same
    same(model, optimizer, "one.json")  # after wrapping, before the first step

The first run, usually one process with the whole batch, records steps 1 to 3 into the file. A run
that finds the file, usually N ranks with 1/N of the batch each, compares; both need five steps.
Then rank 0 says in one sentence what differs first and what usually causes it, or that nothing
does. The ranks' numbers go through the store through which they have met: there is no collective
call, and nobody waits. An error in here ends the comparison alone. See docs/everyday.md.
"""

import atexit
import functools
import json
import math
import os
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

STEPS = 3
COLUMNS = 4096  # of a sample that has more numbers, every second one is taken, or third …
PATIENCE = timedelta(seconds=10)  # at the program's end, for the numbers of other ranks
PERIOD = 2**18  # the length of the patterns of signs with which a tensor's numbers are added up
SHARDS = "placements", "is_shard", "_fsdp_flattened"  # of fully_shard, stage 06, torch's old FSDP
HALVES = {torch.float16, torch.bfloat16}
BATCH_NORMS = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d
# The largest relative differences that count as rounding, of:
CLOSE_RANKS = 1e-6  # what all ranks should have alike
CLOSE_START = 1e-5  # the weights before the first step
CLOSE_GRADIENTS = 0.01
CLOSE_UPDATES = 0.02  # what a step does to the weights
CLOSE_HALVES = 0.03, 0.3, 0.3  # gradients in half precision, in steps 1 to 3
SMALL = 1e-3  # of the size of all: a smaller tensor counts as if it were so large
NOISE = 1e-4  # of it: what a step does with a smaller gradient may be chance
CAUSES = {
    "start": "Nothing broadcasts the initial weights, or one rank has loaded others",
    "gradients": "Gradients are not averaged over all ranks: the model is not wrapped, the loss "
    "comes from model.module, the last micro-batch runs in no_sync(), or weights are unfrozen, "
    "added or replaced after wrapping, or outside the wrapper",
    "updates": "The ranks' optimizers have other rates, options, state or random numbers, or a "
    "rank changes weights by itself",
    "shared": "Ranks share samples, as without a DistributedSampler or with one of fewer ranks",
    "order": "The samples come in another order, by a shuffle of the loader's own, contiguous "
    "shares or a sampler seeded by rank, or are augmented at random",
    "half": "One run alone computes in half precision",
    "random": "The model draws random numbers, as dropout does: switch this off in both runs",
    "BatchNorm": "BatchNorm sees one rank's samples: use SyncBatchNorm, or eval() in both runs",
    "some": "Some gradients are averaged twice, or left out, or those of one rank alone",
    "others": "Each rank's loss is a mean over its own tokens or class weights, or pairs its own "
    "samples, or gradients are clipped before they are averaged, or a part is missing, or some are "
    "from an earlier step, without zero_grad(), or samples of various lengths are others",
}


def safely(method):
    """Return a method that calls this one, and ends the comparison if it raises."""

    @torch.compiler.disable
    @functools.wraps(method)
    def call(self, *arguments):
        try:
            if self.is_on:
                method(self, *arguments)
        except Exception as error:
            self.is_on = False
            print(f"{self.name} ends after step {len(self.rates)}: {error!r}", flush=True)

    return call


class same:
    """Record three steps into the file, or compare them with it if it is there.

    say: a function that rank 0 calls with the verdict, a sentence, when step 4 or 5 begins.
    """

    made = 0  # in this process: all ranks make theirs in the same order

    def __init__(self, model, optimizer, file, say=print):
        same.made += 1
        self.name = f"same {same.made}"
        self.model = model
        self.module = getattr(model, "module", model)
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self.file = file
        self.say = say
        self.is_on = True
        self.samples = [[]]  # of each step: a tensor of checksums for each micro-batch
        self.lengths = set()  # of samples
        self.rates = []
        self.weights = []  # numbers of them, before the first step and after each
        self.gradients = []
        self.facts = set()
        self.start()

    @safely
    def start(self):
        """Find the store, and set the hooks."""
        group = getattr(self.model, "process_group", None) or dist.group.WORLD
        self.rank = 0
        self.world_size = 1
        self.store = dist.HashStore()
        if group:
            self.rank = group.rank()
            self.world_size = group.size()
            self.store = group.get_group_store().clone()  # with a connection of its own
        self.hooks = [
            self.module.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            self.module.register_forward_hook(self.after_forward),
            self.optimizer.register_step_pre_hook(self.before_step),
            self.optimizer.register_step_post_hook(self.after_step),
        ]

    @safely
    def before_forward(self, module, *inputs):
        """Note which samples there are."""
        if len(self.weights) > STEPS:
            self.leave()
        elif torch.is_grad_enabled():
            rows = rows_of(inputs)
            self.samples[-1].append(checksums(rows))
            self.lengths.add(rows.shape[1])
            self.random = states_of_random()

    @safely
    def after_forward(self, module, inputs, outputs):
        """Note whether the model computes in half precision, and draws random numbers."""
        if torch.is_grad_enabled():
            self.note_dtypes(tree_leaves(outputs))
            if states_of_random() != self.random:
                self.facts.add("random")

    def note_dtypes(self, values):
        if HALVES & {getattr(value, "dtype", None) for value in values}:
            self.facts.add("half")

    @safely
    def before_step(self, *_):
        """Note the gradients, as they are when the optimizer gets them."""
        self.find_weights()
        if not self.weights:
            self.weights.append(self.numbers())
        self.gradients.append(self.numbers(of_gradients=True))
        self.rates.append([float(group.get("lr") or 0) for group in self.optimizer.param_groups])
        self.samples.append([])

    @safely
    def after_step(self, *_):
        """Note the weights; after the last step give the numbers to rank 0."""
        self.weights.append(self.numbers())
        if len(self.rates) == STEPS:
            self.post()

    def find_weights(self):
        """Find by name the weights of the model, and those that the optimizer alone has."""
        shards = getattr(self.model, "shard_of", {})  # of stage 06's ZeRO2
        self.found = {}
        self.starts = {}  # of shards: the number of the weight with which they begin
        for name, weight in self.module.named_parameters():
            name = name.replace("_orig_mod.", "")  # of a compiled module
            self.found[name] = shards.get(weight, weight)
            if weight in shards:
                self.starts[name] = shards[weight].storage_offset() - weight.storage_offset()
            elif any(hasattr(weight, mark) for mark in SHARDS):
                self.starts[name] = start_of(weight)
        known = {*self.module.parameters(), *shards.values()}
        for group in self.optimizer.param_groups:
            for number, weight in enumerate(group["params"]):
                if weight not in known:
                    self.found[f"the optimizer's weight {number}"] = weight

    def numbers(self, of_gradients=False):
        """Return the numbers of all weights, or of their gradients: [weights, 5]."""
        rows = []
        for name, weight in self.found.items():
            tensor = weight
            if of_gradients:
                tensor = torch.zeros_like(weight) if weight.grad is None else weight.grad
            rows.append(numbers_of(tensor, self.starts.get(name, 0)))
        return torch.stack(rows)

    def post(self):
        """Copy the numbers to the host, and write them into the store."""
        numbers = torch.stack([*self.weights, *self.gradients]).tolist()
        self.note_dtypes(self.found.values())
        for module in self.module.modules():
            if isinstance(module, BATCH_NORMS) and module.training:
                self.facts.add("BatchNorm")
        samples = []
        for batches in self.samples[:STEPS]:
            samples.append(torch.cat(batches).tolist() if batches else [])
        post = {
            "names": [*self.found],
            "are_parts": [name in self.starts for name in self.found],
            "weights": numbers[: STEPS + 1],
            "gradients": numbers[STEPS + 1 :],
            "rates": self.rates,
            "samples": samples,
            "micro_batches": [max(1, len(batches)) for batches in self.samples[:STEPS]],
            "lengths": [*self.lengths],
            "facts": [*self.facts],
        }
        self.store.set(f"{self.name} {self.rank}", json.dumps(post))

    def leave(self):
        """Remove the hooks; on rank 0 one stays until the verdict."""
        for hook in self.hooks:
            hook.remove()
        if self.rank == 0:
            self.keys = [f"{self.name} {rank}" for rank in range(self.world_size)]
            self.waiting = self.module.register_forward_pre_hook(self.read)
            atexit.register(self.read_at_exit)
            self.read()

    @safely
    def read(self, *_):
        """Give the verdict, once the numbers of all ranks are there."""
        if self.store.check(self.keys):
            self.waiting.remove()
            atexit.unregister(self.read_at_exit)
            self.say(verdict(self.file, [json.loads(self.store.get(key)) for key in self.keys]))

    @safely
    def read_at_exit(self):
        """Give the verdict at the program's end: without collectives rank 0 may be far ahead."""
        self.store.wait(self.keys, PATIENCE)
        self.read()


# ----------------------------------------------------------------------- on the device: numbers


def rows_of(inputs):
    """Return a batch's samples, [samples, numbers]: the rows of its first tensor."""
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.numel() > 0:
            rows = tensor.detach().reshape(len(tensor), -1)
            return rows[:, :: rows.shape[1] // COLUMNS + 1]
    return torch.empty(0, 1)


def checksums(rows):
    """Return a number for each row; zeros at its end, as from padding, do not change it."""
    bits = rows.double().contiguous().view(torch.int64)
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    factors = places * 0x9E3779B97F4A7C1
    factors ^= factors >> 29
    return (bits * factors).sum(1)


def start_of(weight):
    """Return with which of a weight's numbers this rank's rows begin, if fully_shard cuts it."""
    if getattr(weight, "placements", None) != (Shard(0),):
        raise RuntimeError("weights are cut up in a way that it does not know")
    mesh = weight.device_mesh
    rows = math.ceil(weight.shape[0] / mesh.size())  # on each rank, as torch.chunk() cuts
    return mesh.get_local_rank() * rows * math.prod(weight.shape[1:])


def numbers_of(tensor, start):
    """Return a tensor's sum of squares, and its sums with four patterns of signs.

    Those of all parts of a weight add up to those of the weight.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    flat = tensor.detach().flatten()
    size = torch.linalg.vector_norm(flat, dtype=torch.float64)
    sums = torch.zeros(4, dtype=torch.float64, device=flat.device)
    signs = patterns(flat.device).roll(-start, 1)
    for piece in flat.split(PERIOD):
        sums += (piece * signs[:, : len(piece)]).sum(1, dtype=torch.float64)
    return torch.cat([size.square().view(1), sums]).nan_to_num(torch.inf, torch.inf, -torch.inf)


@functools.cache
def patterns(device):
    """Return four rows of 1 and -1, the same in all runs."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (4, PERIOD), generator=generator, device="cpu")
    signs = 2 * bits - 1
    return signs.to(device, torch.int8)


def states_of_random():
    """Return the states of the generators; asking for them does not wait for a device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [state.numpy().tobytes() for state in states]


# ----------------------------------------------------------------------- on rank 0: the verdict


def verdict(file, posts):
    """Record what the ranks have posted, or compare it with what is recorded; return a sentence."""
    new = whole_run(posts)
    if not os.path.exists(file):
        return record(file, posts, new)
    with open(file) as text:
        recorded = json.load(text)
    old = whole_run(recorded["posts"])
    origin = f"{file}, made by {old.ranks} on {recorded['made']}"
    if old.world_size > 1:
        origin += ", so a mistake of both runs is not seen"
    if found := first_difference(old, new):
        return f"{found}; compared with {origin}."
    compared = "samples, rates, gradients and weights"
    not_compared = "buffers and later steps"
    if old.samples != new.samples or not all(old.samples):
        compared = "rates, gradients and weights"
        not_compared += ", and samples, which have other padding or bits, or no rows"
    return (
        f"The same as {old.ranks}: {compared} of {STEPS} steps on {new.ranks} are those of "
        f"{origin}; not compared: {not_compared}."
    )


def record(file, posts, run):
    """Write the file, unless the ranks differ from each other; return a sentence."""
    if found := first_difference(run, run):
        return f"{found}; so nothing is recorded."
    made = time.strftime("%Y-%m-%d at %H:%M")
    with open(f"{file}.part", "w") as text:
        json.dump({"made": made, "posts": posts}, text)
    os.replace(f"{file}.part", file)
    return f"Steps 1 to {STEPS} of {run.ranks} are recorded in {file}."


def whole_run(posts):
    """Return what the ranks have done together."""
    run = SimpleNamespace(**posts[0])
    run.world_size = len(posts)
    run.ranks = "one process" if len(posts) == 1 else f"{len(posts)} ranks"
    run.facts = {fact for post in posts for fact in post["facts"]}
    run.lengths = {length for post in posts for length in post["lengths"]}
    run.samples = []
    for batches in zip(*[post["samples"] for post in posts], strict=True):
        run.samples.append(sum(map(Counter, batches), Counter()))
    are_parts = torch.tensor(run.are_parts)
    run.weights, run.weights_apart = together([post["weights"] for post in posts], are_parts)
    run.gradients, run.gradients_apart = together([post["gradients"] for post in posts], are_parts)
    return run


def together(of_ranks, are_parts):
    """Return the numbers of whole tensors, and which ones differ between ranks but should not.

    of_ranks: [ranks, steps, weights, 5]
    """
    of_ranks = torch.tensor(of_ranks, dtype=torch.float64)
    whole = torch.where(are_parts[:, None], of_ranks.sum(0), of_ranks[0])
    whole[:, :, 0].sqrt_()  # the first number is now the size
    sums = of_ranks[:, :, :, 1:]
    differ = differing(sums[0], sums, CLOSE_RANKS) & ~are_parts
    return whole, differ.any(0)


def first_difference(old, new):
    """Return what differs first, after its usual cause; None if nothing does."""
    if old.names != new.names:
        return "The models, or which weights their optimizers have, differ"
    for number in range(STEPS):
        different = (
            difference_between_ranks(new, number)
            or difference_of_start(old, new)
            or difference_of_gradients(old, new, number)
        )
        found = (
            difference_of_samples(old, new, number, different)
            or difference_of_rates(old, new, number)
            or different
            or difference_of_updates(old, new, number)
        )
        if found:
            return f"{found} in step {number + 1}"
    return None


def difference_of_samples(old, new, number, is_different):
    """Say that each sample comes several times, or, if results differ, how the samples do."""
    was = old.samples[number]
    now = new.samples[number]
    if was == now or not was or not now:
        return None
    times = now.total() / was.total()
    if times > 1 and all(now[sample] == times * was[sample] for sample in was):
        return f"Every rank reads all samples instead of its share: each comes {times:g} times"
    if not is_different:
        return None
    if times != 1:
        cause = "The batch is not divided by the number of ranks, or there are more micro-batches"
        return f"{cause}: there are {now.total()} samples instead of {was.total()}"
    if len(old.lengths | new.lengths) > 1:
        return None  # the same sample may be padded to another length
    again = len(sum(old.samples, Counter())) - len(sum(new.samples, Counter()))
    seen = f"{(was & now).total()} of {was.total()} samples are those of the other run"
    if again > 0:
        return f"{CAUSES['shared']}: {again} more come again within {STEPS} steps, and {seen}"
    return f"{CAUSES['order']}: {seen}"


def difference_of_rates(old, new, number):
    """Say how a step's learning rates differ."""
    for was, now in zip(old.rates[number], new.rates[number], strict=False):
        if not math.isclose(was, now, rel_tol=1e-6):
            cause = "The learning rate depends on the number of ranks, or a scheduler's steps do"
            return f"{cause}: it is {now:.3g} instead of {was:.3g}"
    return None


def difference_between_ranks(new, number):
    """Say where ranks differ that should be alike."""
    checks = {
        "begin with different values of": ("start", new.weights_apart[number]),
        "have different gradients of": ("gradients", new.gradients_apart[number]),
        "end with different values of": ("updates", new.weights_apart[number + 1]),
    }
    for what, (cause, apart) in checks.items():
        if apart.any():
            return f"{CAUSES[cause]}: the ranks {what} {words(new, apart)}"
    return None


def difference_of_start(old, new):
    """Say how the weights differ before the first step."""
    differ = differing(old.weights[0], new.weights[0], CLOSE_START)
    if differ.any():
        cause = "Another seed or checkpoint, or random numbers are drawn before the model is made"
        return f"{cause}: the initial values of {words(new, differ)} differ"
    return None


def difference_of_gradients(old, new, number):
    """Say how a step's gradients differ."""
    was = old.gradients[number]
    now = new.gradients[number]
    if now.isinf().any():
        return "A bad batch, or an overflow: there are gradients that are not finite"
    facts = old.facts | new.facts
    differ = differing(was, now, CLOSE_HALVES[number] if "half" in facts else CLOSE_GRADIENTS)
    if not differ.any():
        return None
    were_zero = not was[differ].any()
    factor = ((was * now)[differ].sum() / was[differ].square().sum()).item()
    is_factor = not were_zero and not differing(factor * was, now, 0.02)[differ].any()
    are_large = size_of(was) > SMALL * size_of(was).norm()
    are_most = differ.sum() >= 0.6 * are_large.sum()
    if "half" in old.facts ^ new.facts:
        cause = CAUSES["half"]
    elif is_factor and are_most:
        cause = cause_of_factor(old, new, number, factor)
    elif "random" in facts:
        cause = CAUSES["random"]
    elif "BatchNorm" in facts:
        cause = CAUSES["BatchNorm"]
    elif not are_most:
        cause = CAUSES["some"]
    else:
        cause = CAUSES["others"]
    seen = f"differ by {distance(was[differ], now[differ]):.1%}"
    if were_zero:
        seen = "are no longer zero"
    elif is_factor:
        seen = f"are {factor:.4g} times as large"
    return f"{cause}: the gradients of {words(new, differ)} {seen}"


def cause_of_factor(old, new, number, factor):
    """Return why all gradients are so many times as large."""
    ranks = new.world_size / old.world_size
    micro_batches = new.micro_batches[number] / old.micro_batches[number]
    causes = {
        "gradients are summed over the ranks, not averaged": ranks,
        "the loss is a sum, or is divided by the number of ranks, as DDP does": 1 / ranks,
        "the loss is not divided by the number of micro-batches": micro_batches,
    }
    found = [cause for cause, times in causes.items() if math.isclose(times, factor, rel_tol=0.02)]
    if math.isclose(factor, 1, rel_tol=0.02) or not found:
        return "Gradients are clipped by the norm of a part, or the loss is scaled"
    text = ", or ".join(found)
    return text[:1].upper() + text[1:]


def difference_of_updates(old, new, number):
    """Say how it differs what a step has done to the weights."""
    sizes = size_of(old.gradients[number])
    are_used = sizes >= NOISE * sizes.norm()
    was = (old.weights[number + 1] - old.weights[number])[are_used, 1:]
    now = (new.weights[number + 1] - new.weights[number])[are_used, 1:]
    share = distance(was, now)
    if share > (CLOSE_HALVES[-1] if "half" in old.facts | new.facts else CLOSE_UPDATES):
        farthest = new.names[are_used.nonzero()[size_of(now - was).argmax()]]
        cause = "The optimizer has other options, state or weights, or looks at a part of them"
        seen = f"gradients agree, but what is done to the weights differs by {share:.1%}"
        return f"{cause}: {seen}, most in {farthest},"
    return None


def words(run, are_meant):
    """Return the names of some weights for a sentence."""
    names = [run.names[number] for number in are_meant.nonzero()]
    if len(names) == len(run.names):
        return "all weights"
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


def size_of(numbers):
    """Return about how large tensors are: [..., numbers] -> [...]."""
    return numbers.square().mean(-1).sqrt()


def distance(old, new):
    """Return how far apart some tensors are together, as a share of their size."""
    return (size_of(new - old).norm() / size_of(old).norm()).item()


def differing(old, new, close):
    """Return which tensors are farther apart than this share of their size."""
    size = size_of(old).maximum(size_of(new))
    least = SMALL * size.norm(dim=-1, keepdim=True)
    return size_of(new - old) > close * size.maximum(least)
