"""Does it train as one process would? Copy this file beside your script:

    from same import same
    same(model, optimizer, "one.json")  # after wrapping, before the first step

The first run, usually one process with the whole batch, records steps 1 to 3 into the file. A run
that finds the file, usually N ranks with 1/N of the batch each, compares. Then rank 0 says in one
sentence what differs first and its usual cause, or that nothing does. The ranks' numbers go through
the store through which they have met: there is no collective call, and nobody waits. After step 3
the hooks are removed. An error in here ends the comparison alone. Its limits: docs/everyday.md.
"""

import json
import os
import time
from collections import Counter
from functools import cache
from math import isclose
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.utils._pytree import tree_leaves

STEPS = 3
COLUMNS = 4096  # of a sample that has more numbers every second one is taken, or third …
PERIOD = 2**18  # so long are the patterns of signs with which a tensor's numbers are added up
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
HALVES = {torch.float16, torch.bfloat16}
# So far apart, as a share of their size, may be:
CLOSE_RANKS = 1e-6  # what all ranks should have alike
CLOSE_START = 1e-5  # the weights before the first step
CLOSE_GRADIENTS = {"float": (0.01, 0.02, 0.03), "half": (0.03, 0.3, 0.3)}  # in steps 1 to 3
CLOSE_UPDATES = {"float": 0.02, "half": 0.3}  # what a step does to the weights
SMALL = 1e-3  # of the size of all: a smaller tensor counts as if it were so large
NOISE = 1e-4  # of it: what a step does with a smaller gradient may be chance


def safely(method):
    """Return a method that calls this one, and ends the comparison if it raises."""

    @torch.compiler.disable
    def call(self, *arguments):
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        try:
            if self.is_on and not capturing:
                method(self, *arguments)
        except Exception as error:
            self.is_on = False
            print(f"{self.name} ends after step {len(self.rates)}: {error!r}", flush=True)

    return call


class same:
    """Record three steps into the file, or compare them with it if it is there.

    say: a function that rank 0 calls with the verdict, a sentence.
    """

    made = 0  # in this process: all ranks make theirs in the same order

    def __init__(self, model, optimizer, file, say=print):
        same.made += 1
        self.name = f"same {same.made}"
        self.model = model
        self.module = getattr(model, "module", model)
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's has torch's
        self.file = file
        self.say = say
        self.is_on = True
        self.is_judged = False
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
            self.model.register_forward_hook(self.after_wrapper),
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

    @safely
    def after_wrapper(self, *_):
        if self.model is not self.module:
            self.facts.add("wrapped")

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
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.rates.append(rates)
        self.samples.append([])

    @safely
    def after_step(self, *_):
        """Note the weights; after the last step give the numbers to rank 0."""
        self.weights.append(self.numbers())
        if len(self.rates) == STEPS:
            self.post()
            if self.rank == 0:
                self.read()

    def find_weights(self):
        """Find by name the weights of the model, and those that the optimizer alone has."""
        slices = {}  # a weight -> the part that the optimizer has of it, in stage 06's ZeRO2
        for bucket in getattr(self.model, "buckets", []):
            slices |= getattr(bucket, "shards", {})
        self.found = {}
        self.starts = {}  # of parts: the number of the weight with which they begin
        for name, weight in self.module.named_parameters():
            name = name.replace("_orig_mod.", "")  # of a compiled module
            self.found[name] = slices.get(weight, weight)
            if weight in slices:
                self.starts[name] = slices[weight].storage_offset() - weight.storage_offset()
            elif getattr(weight, "placements", None) == (Shard(0),):  # as by fully_shard
                first_row = weight.__create_chunk_list__()[0].offsets[0]
                self.starts[name] = first_row * weight.stride(0)
            elif hasattr(weight, "placements") or hasattr(weight, "is_shard"):  # stage 06's FSDP
                self.starts[name] = None  # it is not known
        known = {*self.module.parameters(), *slices.values()}
        for group in self.optimizer.param_groups:
            for number, weight in enumerate(group["params"]):
                if weight not in known:
                    self.found[f"the optimizer's weight {number}"] = weight
        if all(self.starts.get(name, 0) is None for name in self.found):
            raise RuntimeError("all weights are cut up in a way that it does not know")

    def numbers(self, of_gradients=False):
        """Return the numbers of all weights, or of their gradients: [weights, numbers]."""
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
            is_norm = isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
            if is_norm and module.training:
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

    def read(self):
        """Give the verdict, once the numbers of all ranks are there."""
        keys = [f"{self.name} {rank}" for rank in range(self.world_size)]
        if self.store.check(keys):
            self.is_judged = True
            posts = [json.loads(self.store.get(key)) for key in keys]
            for key in keys:
                self.store.delete_key(key)
            self.say(verdict(self.file, posts))

    def leave(self):
        """Remove the hooks, but on rank 0 one stays until the verdict."""
        if self.rank == 0 and not self.is_judged:
            self.read()
        for hook in self.hooks[1:]:
            hook.remove()
        if self.rank > 0 or self.is_judged:
            self.hooks[0].remove()


# ----------------------------------------------------------------------- on the device: numbers


def rows_of(inputs):
    """Return a batch's samples, [samples, numbers]: the rows of its first tensor that has any."""
    for tensor in tree_leaves(inputs):
        if type(tensor) is torch.Tensor and tensor.ndim > 1 and tensor.numel():
            rows = tensor.detach().flatten(1)
            every = rows.shape[1] // COLUMNS + 1
            return rows[:, ::every].contiguous()
    return torch.empty(0, 1)


def checksums(rows):
    """Return a number for each row; zeros at its end, as from padding, do not change it."""
    bits = rows.view(INTEGERS.get(rows.element_size(), torch.int64))
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    factors = places * 0x9E3779B97F4A7C1
    factors ^= factors >> 29
    return (bits * factors).sum(1)


def numbers_of(tensor, start):
    """Return a tensor's sum of squares, and its sums with four patterns of signs.

    Those of all parts of a weight add up to those of the weight. Without a start they are NaN.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    flat = tensor.detach().flatten()
    if start is None:
        return torch.full((5,), torch.nan, dtype=torch.float64, device=flat.device)
    signs = patterns(flat.device).roll(-start, 1)
    size = torch.linalg.vector_norm(flat, dtype=torch.float64)
    sums = 0
    for piece in flat.split(PERIOD):
        sums += (piece * signs[:, : len(piece)]).sum(1, dtype=torch.float64)
    return torch.cat([size.square().view(1), sums]).nan_to_num(nan=torch.inf)


@cache
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
    if not os.path.exists(file):
        return record(file, posts)
    with open(file) as text:
        recorded = json.load(text)
    old = whole_run(recorded["posts"])
    new = whole_run(posts)
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
    cut_up = (old.weights + new.weights)[0, :, 0].isnan()
    if cut_up.any():
        not_compared += f", and shards, which are parts of {words(new, cut_up)}"
    return (
        f"The same as {old.ranks}: {compared} of {STEPS} steps on {new.ranks} are those of "
        f"{origin}; not compared: {not_compared}."
    )


def record(file, posts):
    """Write the file, unless the ranks differ from each other; return a sentence."""
    run = whole_run(posts)
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
    run.are_parts = torch.tensor(run.are_parts)
    run.world_size = len(posts)
    run.ranks = "one process" if len(posts) == 1 else f"{len(posts)} ranks"
    run.facts = set()
    run.lengths = set()
    run.samples = [Counter() for _ in range(STEPS)]
    for post in posts:
        run.facts.update(post["facts"])
        run.lengths.update(post["lengths"])
        for step, samples in enumerate(post["samples"]):
            run.samples[step].update(samples)
    run.weights, run.weights_apart = together(run, [post["weights"] for post in posts])
    run.gradients, run.gradients_apart = together(run, [post["gradients"] for post in posts])
    return run


def together(run, of_ranks):
    """Return the numbers of whole tensors, and which ones differ between ranks but should not.

    of_ranks: [ranks, steps, weights, numbers]
    """
    of_ranks = torch.tensor(of_ranks, dtype=torch.float64)
    whole = torch.where(run.are_parts[:, None], of_ranks.sum(0), of_ranks[0])
    whole[:, :, 0].sqrt_()  # the first number is now the size
    sums = of_ranks[:, :, :, 1:]
    differ = differing(sums[0], sums, CLOSE_RANKS) & ~run.are_parts
    return whole, differ.any(0)


def first_difference(old, new):
    """Return what differs first, after its usual cause; None if nothing does."""
    if old.names != new.names:
        others = {*old.names} ^ {*new.names}
        return (
            "The models differ, or the optimizer has weights that the model has not: "
            f"{len(others)} are in one run alone, such as {min(others)}"
        )
    for number in range(STEPS):
        start = difference_of_start(old, new) if number == 0 else None
        gradients = difference_of_gradients(old, new, number)
        found = (
            difference_of_samples(old, new, number, bool(start or gradients))
            or difference_of_rates(old, new, number)
            or start
            or gradients
            or difference_of_updates(old, new, number)
        )
        if found:
            return f"{found} in step {number + 1}"
    return None


def difference_of_samples(old, new, number, is_different):
    """Say how a step's samples differ if its gradients do, or that each comes several times."""
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
        micro_batches = f"{new.micro_batches[number]} instead of {old.micro_batches[number]}"
        return (
            "The batch size is not divided by the number of ranks, micro-batches are wrong, or a "
            f"rank skips some: there are {now.total()} samples instead of {was.total()}, and "
            f"{micro_batches} micro-batches a rank,"
        )
    if len(old.lengths | new.lengths) > 1:
        return None  # the same sample may be padded to another length
    ever_was = sum(old.samples, Counter())
    ever_now = sum(new.samples, Counter())
    again = len(ever_was) - len(ever_now)
    never = len(ever_was - ever_now)
    seen = f"{(was & now).total()} of {was.total()} samples are those of the other run"
    if again > 0 and again >= never / 2:
        return (
            "Ranks share samples, as without a DistributedSampler or with one of fewer ranks: "
            f"in {STEPS} steps {again} come again and {never} never, and {seen}"
        )
    return (
        "The samples come in another order, by a shuffle of the loader's own, contiguous shares "
        f"or a sampler seeded by rank, or are augmented at random: {seen}"
    )


def difference_of_rates(old, new, number):
    """Say how a step's learning rates differ."""
    for was, now in zip(old.rates[number], new.rates[number], strict=False):
        if not isclose(was, now, rel_tol=1e-6):
            return (
                "The learning rate depends on the number of ranks, or a scheduler counts other "
                f"steps: it is {now:.3g} instead of {was:.3g}"
            )
    return None


def difference_of_start(old, new):
    """Say how the weights differ before the first step."""
    apart = new.weights_apart[0]
    if apart.any():
        return (
            "Nothing broadcasts the initial weights, or one rank has loaded others: "
            f"the ranks differ in {words(new, apart)}"
        )
    differ = differing(old.weights[0], new.weights[0], CLOSE_START)
    if differ.any():
        return (
            "There is another seed, a checkpoint, or random numbers are drawn before the model "
            f"is made: the initial values of {words(new, differ)} differ"
        )
    return None


def difference_of_gradients(old, new, number):
    """Say how a step's gradients differ."""
    was = old.gradients[number]
    now = new.gradients[number]
    if now.isinf().any():
        return "A bad batch, or an overflow: there are gradients that are not finite"
    apart = new.gradients_apart[number]
    if apart.any():
        seen = f"the ranks have different gradients of {words(new, apart)}"
        return f"{cause_of_apart(new, number)}: {seen}"
    close = CLOSE_GRADIENTS[precision(old, new)][number]
    differ = differing(was, now, close)
    if not differ.any():
        return None
    factor = ((was * now)[differ].sum() / was[differ].square().sum()).item()
    is_factor = not differing(factor * was, now, 2 * close)[differ].any()
    are_large = size_of(was) > SMALL * norm(size_of(was))
    if "half" in old.facts ^ new.facts:
        cause = "One run alone computes in half precision"
    elif differ.sum() < 0.6 * are_large.sum():
        cause = "Some gradients are averaged twice, or left out, or those of one rank alone"
    elif is_factor:
        cause = cause_of_factor(old, new, number, factor)
    else:
        cause = cause_of_others(old, new)
    seen = f"differ by {distance(was, now, differ):.1%}"
    if is_factor:
        seen = f"are {factor:.4g} times as large"
    return f"{cause}: the gradients of {words(new, differ)} {seen}"


def cause_of_apart(new, number):
    """Return why ranks have different gradients."""
    others = ~new.gradients_apart[number] & ~new.are_parts
    if "wrapped" not in new.facts and not new.are_parts.any():
        return "The model is not wrapped, or the loss comes from model.module(...)"
    if new.gradients[number][others].any():
        return "Some weights are unfrozen, added or replaced after wrapping, or outside the wrapper"
    if new.micro_batches[number] > 1:
        return "The last micro-batch runs in no_sync(), or gradients are not averaged"
    return "Gradients are not averaged over all ranks, or a rank clips or zeroes its own"


def cause_of_factor(old, new, number, factor):
    """Return why all gradients are so many times as large."""
    ranks = new.world_size / old.world_size
    micro_batches = new.micro_batches[number] / old.micro_batches[number]
    causes = {
        "gradients are summed over the ranks, not averaged": ranks,
        "the loss is a sum, or is divided by the number of ranks, too": 1 / ranks,
        "the loss is not divided by the number of micro-batches": micro_batches,
    }
    found = [cause for cause, times in causes.items() if isclose(times, factor, rel_tol=0.02)]
    if isclose(factor, 1, rel_tol=0.02) or not found:
        return "Gradients are clipped by the norm of a part, or the loss is scaled"
    return ", or ".join(found).capitalize()


def cause_of_others(old, new):
    """Return why all gradients differ in various ways."""
    facts = old.facts | new.facts
    if "random" in facts:
        return "The model draws random numbers, as dropout does: switch this off in both runs"
    if "BatchNorm" in facts:
        return "BatchNorm sees one rank's samples alone: use SyncBatchNorm, or eval() in both runs"
    return (
        "Each rank's loss is a mean over its own tokens or class weights, or pairs its own "
        "samples, or gradients are clipped before they are averaged, or a part of them is missing, "
        "or some are from an earlier step, without zero_grad()"
    )


def difference_of_updates(old, new, number):
    """Say how it differs what a step has done to the weights."""
    apart = new.weights_apart[number + 1]
    if apart.any():
        return (
            "The ranks' optimizers have other rates, options, state or random numbers, or one rank "
            f"changes weights by itself: the ranks become different in {words(new, apart)}"
        )
    was = (old.weights[number + 1] - old.weights[number])[:, 1:]
    now = (new.weights[number + 1] - new.weights[number])[:, 1:]
    sizes = size_of(old.gradients[number])
    are_used = sizes >= NOISE * norm(sizes)
    differ = (was.any(1) != now.any(1)) & are_used
    if differ.any():
        return (
            "The optimizer lacks weights, as if made before they were replaced or unfrozen: "
            f"one run alone trains {words(new, differ)}"
        )
    share = distance(was, now, are_used)
    if share > CLOSE_UPDATES[precision(old, new)]:
        return (
            "The optimizer has other options or state, or looks at a part of the weights: "
            f"gradients agree, but what is done to the weights differs by {share:.1%}"
        )
    return None


# ----------------------------------------------------------------------- numbers of tensors


def words(run, are_meant):
    """Return the names of some weights for a sentence."""
    names = [run.names[number] for number in are_meant.nonzero()]
    if len(names) == len(run.names):
        return "all weights"
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


def precision(old, new):
    return "half" if "half" in old.facts | new.facts else "float"


def size_of(numbers):
    """Return about how large tensors are: [..., numbers] -> [...]."""
    return numbers.square().mean(-1).sqrt()


def distance(old, new, are_meant):
    """Return how far apart some tensors are together, as a share of their size."""
    far = size_of(new - old)
    size = size_of(old)
    return (far[are_meant].norm() / size[are_meant].norm()).item()


def norm(sizes):
    """Return the size of all tensors that are known: [..., weights] -> [..., 1]."""
    return sizes.square().nansum(-1, keepdim=True).sqrt()


def differing(old, new, close):
    """Return which tensors are farther apart than this share of their size."""
    size = size_of(old)
    size = size.maximum(size_of(new)).maximum(SMALL * norm(size))
    return size_of(new - old) > close * size
