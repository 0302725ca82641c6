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
from itertools import chain
from math import isclose
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

STEPS = 3
PATIENCE = 100  # steps after which rank 0 gives up a rank whose numbers are not there
COLUMNS = 4096  # of a sample that has more numbers every second one is taken, or third …
PERIOD = 2**18  # a pattern of signs, with which a tensor's numbers are added up, repeats itself
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
HALVES = torch.float16, torch.bfloat16
# So far apart, as a share of their size, may be:
CLOSE_RANKS = 1e-6  # what all ranks should have alike
CLOSE_START = 1e-5  # the weights before the first step
CLOSE = 0.003, 0.02  # gradients; and if something is in half precision
CLOSE_UPDATES = 0.05, 0.5  # what a step does to the weights
SMALL = 1e-3  # of the size of all: a smaller tensor counts as if it were so large
NOISE = 1e-4  # of it: what a step does with a smaller gradient may be chance


class Part(NamedTuple):
    """What a rank has of a weight."""

    tensor: torch.Tensor
    start: int = 0  # the number of the weight with which it begins
    copies: int = 0  # so many ranks have this part; 0: all have the whole


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
        self.is_posted = False
        self.is_judged = False
        self.looks = 0  # for the other ranks' numbers
        self.weights = []  # numbers of them, before the first step and after each
        self.gradients = []
        self.rates = []
        self.samples = []  # checksums of each micro-batch's
        self.micro_batches = []  # until the end of each step
        self.lengths = set()  # of samples
        self.is_wrapped = False  # a forward has come through the wrapper
        self.is_random = False
        self.is_half = False
        self.safely(self.start)()

    def safely(self, function):
        """Return a function that calls this one, and ends the comparison if it raises."""

        @torch.compiler.disable
        def call(*arguments):
            capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            try:
                if self.is_on and not capturing:
                    function(*arguments)
            except Exception as error:
                self.is_on = False
                print(f"{self.name} ends after step {len(self.rates)}: {error!r}", flush=True)

        return call

    def start(self):
        group = getattr(self.model, "process_group", None) or dist.group.WORLD
        self.rank = 0
        self.world_size = 1
        self.store = dist.HashStore()
        if group:
            self.rank = group.rank()
            self.world_size = group.size()
            self.store = group.get_group_store().clone()  # with a connection of its own
        before_forward = self.safely(self.before_forward)
        self.hooks = [
            self.model.register_forward_pre_hook(self.safely(self.before_wrapper)),
            self.module.register_forward_pre_hook(before_forward, with_kwargs=True),
            self.module.register_forward_hook(self.safely(self.after_forward)),
            self.optimizer.register_step_pre_hook(self.safely(self.before_step)),
            self.optimizer.register_step_post_hook(self.safely(self.after_step)),
        ]

    def before_wrapper(self, *_):
        self.is_wrapped |= torch.is_grad_enabled()

    def before_forward(self, _, *inputs):
        if self.is_posted:
            self.leave()
        elif torch.is_grad_enabled():
            rows = rows_of(inputs)
            self.lengths.add(rows.shape[1])
            self.samples.append(checksums(rows))
            self.random = states_of_random()

    def after_forward(self, _, inputs, outputs):
        if torch.is_grad_enabled() and not self.is_posted:
            dtypes = [getattr(output, "dtype", None) for output in tree_leaves(outputs)]
            self.is_half |= not set(HALVES).isdisjoint(dtypes)
            self.is_random |= states_of_random() != self.random

    def before_step(self, *_):
        if self.is_posted:
            return
        self.find_parts()
        if not self.weights:
            self.weights.append(self.numbers())
        self.gradients.append(self.numbers(of_gradients=True))
        self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
        self.micro_batches.append(len(self.samples))

    def after_step(self, *_):
        if self.is_posted:
            return
        self.weights.append(self.numbers())
        if len(self.rates) == STEPS:
            self.is_posted = True
            self.post()
            if self.rank == 0:
                self.read()

    def find_parts(self):
        """Find by name the weights of the model, and those that the optimizer alone has."""
        slices = {}  # a weight -> what the optimizer has of it, in stage 06's ZeRO2
        for bucket in getattr(self.model, "buckets", []):
            slices |= getattr(bucket, "shards", {})
        self.parts = {}
        self.left_out = []
        for name, weight in self.module.named_parameters():
            part = Part(weight)
            if weight in slices:
                start = slices[weight].storage_offset() - weight.storage_offset()
                part = Part(slices[weight], start, copies=1)
            elif hasattr(weight, "to_local"):
                part = part_of(weight)
            elif hasattr(weight, "is_shard"):  # in stage 06's FSDP, which does not say where
                part = None
            if part is None:
                self.left_out.append(name)
            else:
                self.parts[name.replace("_orig_mod.", "")] = part  # of a compiled module
        known = {*self.module.parameters(), *slices.values()}
        trained = chain(*(group["params"] for group in self.optimizer.param_groups))
        for number, parameter in enumerate(trained):
            if parameter not in known:
                self.parts[f"the optimizer's parameter {number}"] = Part(parameter)

    def numbers(self, of_gradients=False):
        """Return the numbers of all weights, or of their gradients: [weights, numbers]."""
        rows = []
        for part in self.parts.values():
            tensor = part.tensor
            if of_gradients:
                tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            rows.append(numbers_of(tensor, part.start, max(1, part.copies)))
        return torch.stack(rows)

    def post(self):
        """Copy the numbers to the host, and write them into the store."""
        numbers = torch.stack([*self.weights, *self.gradients]).tolist()
        sizes = [len(samples) for samples in self.samples]
        samples = [each.tolist() for each in torch.cat(self.samples).cpu().split(sizes)]
        of_steps = zip([0, *self.micro_batches], self.micro_batches, strict=False)
        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.training]
        dtypes = {part.tensor.dtype for part in self.parts.values()}
        post = {
            "names": [*self.parts],
            "is_part": [part.copies > 0 for part in self.parts.values()],
            "weights": numbers[: STEPS + 1],
            "gradients": numbers[STEPS + 1 :],
            "rates": self.rates,
            "samples": [samples[begin:end] for begin, end in of_steps],
            "lengths": sorted(self.lengths),
            "left_out": self.left_out,
            "is_bare": self.model is self.module and not any(p.copies for p in self.parts.values()),
            "is_wrapped": self.is_wrapped,
            "is_random": self.is_random,
            "is_half": self.is_half or not dtypes.isdisjoint(HALVES),
            "has_batch_norm": any(not isinstance(n, torch.nn.SyncBatchNorm) for n in norms),
            "has_buffers": any(b.is_floating_point() for b in self.module.buffers()),
        }
        self.store.set(f"{self.name} {self.rank}", json.dumps(post))

    def read(self):
        """Give the verdict, if the numbers of all ranks are there."""
        keys = [f"{self.name} {rank}" for rank in range(self.world_size)]
        self.looks += 1
        if self.store.check(keys):
            self.is_judged = True
            posts = [json.loads(self.store.get(key)) for key in keys]
            for key in keys:
                self.store.delete_key(key)
            self.say(verdict(self.file, posts))
        elif self.looks > PATIENCE:
            self.is_judged = True
            self.say(f"Not compared with {self.file}: a rank has not taken {STEPS} steps.")

    def leave(self):
        """Remove the hooks, but on rank 0 only after the verdict."""
        if self.rank == 0 and not self.is_judged:
            self.read()
        if self.rank > 0 or self.is_judged:
            self.is_on = False
            for hook in self.hooks:
                hook.remove()


# ----------------------------------------------------------------------- on the device: numbers


def rows_of(inputs):
    """Return a batch's samples, [samples, numbers], those of its first tensor of two dimensions."""
    for tensor in tree_leaves(inputs):
        if type(tensor) is torch.Tensor and tensor.ndim > 1 and tensor.numel():
            rows = tensor.detach().flatten(1)
            return rows[:, :: rows.shape[1] // COLUMNS + 1]
    return torch.empty(0, 1)


def checksums(rows):
    """Return a number for each row; zeros at its end, as from padding, do not change it."""
    bits = rows.contiguous().view(INTEGERS.get(rows.element_size(), torch.int64))
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    factors = places * 0x9E3779B97F4A7C1
    return (bits * (factors ^ factors >> 29)).sum(1)


def part_of(weight):
    """Return a DTensor's part; None if it is cut otherwise than by rows."""
    copies = 1
    for number, placement in enumerate(weight.placements):
        if placement.is_replicate():
            copies *= weight.device_mesh.size(number)
        elif not placement.is_shard(0):
            return None
    first_row = weight.__create_chunk_list__()[0].offsets[0]
    return Part(weight, first_row * weight.stride(0), copies)


def numbers_of(tensor, start, copies):
    """Return a tensor's sum of squares, and its sums with four patterns of signs.

    Those of all parts of a weight add up to those of the weight.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    flat = tensor.detach().flatten()
    signs = signs_on(flat.device).roll(-start, 1)
    square = torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    sums = torch.zeros(len(signs), dtype=torch.float64, device=flat.device)
    for piece in flat.split(PERIOD):
        sums += (piece * signs[:, : len(piece)]).sum(1, dtype=torch.float64)
    return torch.cat([square.view(1), sums]) / copies


@cache
def signs_on(device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (4, PERIOD), generator=generator, device="cpu")
    return (2 * bits - 1).to(device, torch.int8)


def states_of_random():
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [state.numpy().tobytes() for state in states]


# ----------------------------------------------------------------------- on rank 0: the verdict


def verdict(file, posts):
    """Record what the ranks have posted, or compare it with what is recorded; return a sentence."""
    new = whole_run(posts)
    if not os.path.exists(file):
        if found := first_difference(new, new):
            return f"{found}; so nothing is recorded."
        with open(f"{file}.part", "w") as text:
            json.dump({"made": time.strftime("%Y-%m-%d at %H:%M"), "posts": posts}, text)
        os.replace(f"{file}.part", file)
        return f"Steps 1 to {STEPS} of {new['ranks']} are recorded in {file}."
    with open(file) as text:
        record = json.load(text)
    old = whole_run(record["posts"])
    origin = f"{file}, made by {old['ranks']} on {record['made']}"
    if len(record["posts"]) > 1:
        origin += ", so a mistake that both runs make is not seen"
    if found := first_difference(old, new):
        return f"{found}; compared with {origin}."
    compared, left = what_was_compared(old, new)
    found = f"{compared} of {STEPS} steps on {new['ranks']} are those in {origin}"
    return f"The same as {old['ranks']}: {found}; not compared: {left}."


def whole_run(posts):
    """Return what all ranks have done together."""
    run = dict(posts[0])
    for key in ("is_random", "is_half", "has_batch_norm"):
        run[key] = any(post[key] for post in posts)
    run["world_size"] = len(posts)
    run["ranks"] = "one process" if len(posts) == 1 else f"{len(posts)} ranks"
    run["rates_differ"] = any(post["rates"] != run["rates"] for post in posts)
    run["lengths"] = {length for post in posts for length in post["lengths"]}
    run["micro_batches"] = [len(batches) for batches in run["samples"]]
    run["samples"] = []  # Counters, [step][rank]
    for of_ranks in zip(*[post["samples"] for post in posts], strict=True):
        run["samples"].append([Counter(chain(*batches)) for batches in of_ranks])
    is_part = torch.tensor(run["is_part"])
    for key in ("weights", "gradients"):
        of_ranks = torch.tensor([post[key] for post in posts], dtype=torch.float64)
        differ = differing(of_ranks[0, :, :, 1:], of_ranks[:, :, :, 1:], CLOSE_RANKS)
        run[f"{key}_apart"] = (differ & ~is_part).any(0)  # [steps, weights]
        run[key] = torch.where(is_part[:, None], of_ranks.sum(0), of_ranks[0])
        run[key][:, :, 0].sqrt_()  # [steps, weights, numbers]
    return run


def first_difference(old, new):
    """Return what differs first, after its usual cause; None if nothing does."""
    if names := sorted({*old["names"]} ^ {*new["names"]}):
        cause = "The models differ, or the optimizer has weights that the model has not"
        return f"{cause}: {names[0]} and {len(names) - 1} more are in one run alone"
    for number in range(STEPS):
        start = difference_of_start(old, new) if number == 0 else None
        gradients = difference_of_gradients(old, new, number)
        found = difference_of_samples(old, new, number, bool(start or gradients))
        found = found or difference_of_rates(old, new, number) or start or gradients
        found = found or difference_of_updates(old, new, number)
        if found:
            return f"{found} in step {number + 1}"
    return None


def difference_of_samples(old, new, number, is_different):
    """Say how a step's samples differ, if its gradients do, or that each comes several times."""
    a = sum(old["samples"][number], Counter())
    b = sum(new["samples"][number], Counter())
    if a == b or not a or not b:
        return None
    times = b.total() / a.total()
    if times > 1 and all(b[sample] == times * count for sample, count in a.items()):
        return f"Every rank reads all samples instead of a share: each comes {times:g} times"
    if not is_different:
        return None
    if times != 1:
        return difference_of_number(old, new, number, a.total(), b.total())
    if len(old["lengths"] | new["lengths"]) > 1:
        return None  # the same sample may be padded to another length
    seen = f"{(a & b).total()} of {a.total()} samples are those of the other run"
    all_a, all_b = (sum(chain(*run["samples"]), Counter()) for run in (old, new))
    again = sum(count - 1 for sample, count in all_b.items() if count > max(1, all_a[sample]))
    if again and again >= (all_a - all_b).total() / 2:
        cause = "Ranks share samples, as without a DistributedSampler or with one of fewer ranks"
        return f"{cause}: {seen}, and in {STEPS} steps {again} come again,"
    common = [(a & own).total() / max(1, own.total()) for own in new["samples"][number]]
    if min(common) < 0.5 and max(common) == 1:
        cause = "Shares are contiguous, or a sampler or a shuffle is seeded by rank"
        return f"{cause}: {seen}, and those are of rank {common.index(1)}"
    return f"The samples come in another order, or are augmented at random: {seen}"


def difference_of_number(old, new, number, old_count, count):
    old_micro = old["micro_batches"][number]
    micro = new["micro_batches"][number]
    cause = "The steps have another number of samples"
    if isclose(count / old_count, new["world_size"] / old["world_size"], rel_tol=0.01):
        cause = "The batch size is not divided by the number of ranks"
    if micro != old_micro and isclose(count / old_count, micro / old_micro, rel_tol=0.01):
        cause = "There are too many micro-batches, or they are too large"
    seen = f"there are {count} samples instead of {old_count}"
    return f"{cause}: {seen}, in {micro} micro-batches a rank instead of {old_micro},"


def difference_of_rates(old, new, number):
    if new["rates_differ"]:
        return "A scheduler steps on one rank alone or by its loss: the ranks' rates differ"
    for was, now in zip(old["rates"][number], new["rates"][number], strict=True):
        if not isclose(was, now, rel_tol=1e-6):
            cause = "The rate depends on the number of ranks, or a scheduler counts other steps"
            return f"{cause}: the learning rate is {now:.3g} instead of {was:.3g}"
    return None


def difference_of_start(old, new):
    if new["weights_apart"][0].any():
        names = words(new, new["weights_apart"][0])
        return f"Nothing broadcasts the weights: the ranks begin with different {names}"
    differ = differing(old["weights"][0], new["weights"][0], CLOSE_START)
    if differ.any():
        cause = "Another seed, random numbers drawn before the model was made, or a checkpoint"
        return f"{cause}: {words(new, differ)} are others before training"
    return None


def difference_of_gradients(old, new, number):
    was = old["gradients"][number]
    now = new["gradients"][number]
    if not now.isfinite().all():
        names = words(new, ~now.isfinite().all(1))
        return f"A bad batch, or an overflow: the gradients of {names} are not finite"
    if new["gradients_apart"][number].any():
        names = words(new, new["gradients_apart"][number])
        return f"{cause_of_apart(new, number)}: the ranks have different gradients of {names}"
    close = (number + 1) * CLOSE[old["is_half"] or new["is_half"]]
    differ = differing(was, now, close)
    if not differ.any():
        return None
    factor = (was[differ] * now[differ]).sum() / was[differ].square().sum()
    seen = f"the gradients of {words(new, differ)} differ by {distance(was, now, differ):.0%}"
    is_factor = factor > 0 and not differing(factor * was, now, 2 * close)[differ].any()
    if is_factor:
        seen = f"the gradients of {words(new, differ)} are {factor:.4g} times as large"
    is_large = size_of(was) > SMALL * size_of(was).norm()
    if differ.sum() < 0.6 * is_large.sum():
        cause = "Some gradients are averaged twice, or left out, or those of one rank alone"
    elif is_factor:
        cause = cause_of_factor(old, new, number, factor)
    else:
        cause = cause_of_others(old, new, number)
    return f"{cause}: {seen}"


def cause_of_apart(new, number):
    others = ~new["gradients_apart"][number] & ~torch.tensor(new["is_part"])
    if new["is_bare"]:
        return "Nothing averages gradients, because the model is not wrapped"
    if not new["is_wrapped"]:
        return "The loss comes from model.module(...), so nothing averages gradients"
    if new["gradients"][number][others].any():
        return "Some weights are unfrozen, added or replaced after wrapping, or outside the wrapper"
    if new["micro_batches"][number] > 1:
        return "The last micro-batch runs in no_sync(), or gradients are not averaged at all"
    return "Gradients are not averaged over all ranks, or a rank clips or zeroes its own"


def cause_of_factor(old, new, number, factor):
    ranks = new["world_size"] / old["world_size"]
    micro = new["micro_batches"][number] / old["micro_batches"][number]
    causes = {
        "gradients are summed over the ranks, not averaged": ranks,
        "the loss is a sum, or is divided by the number of ranks, too": 1 / ranks,
        "the loss is not divided by the number of micro-batches": micro,
        "the loss is divided by the number of micro-batches twice": 1 / micro,
    }
    found = [cause for cause, times in causes.items() if isclose(times, factor, rel_tol=0.02)]
    if isclose(factor, 1, rel_tol=0.02) or not found:
        return "Gradients are clipped by the norm of a part, or the loss is scaled"
    return " or ".join(found).capitalize()


def cause_of_others(old, new, number):
    was = old["gradients"][number]
    now = new["gradients"][number]
    before = new["gradients"][number - 1]
    if old["is_random"] or new["is_random"]:
        return "The model draws random numbers, as dropout does: switch this off in both runs"
    if old["has_batch_norm"] or new["has_batch_norm"]:
        return "BatchNorm sees one rank's samples alone: use SyncBatchNorm, or eval() in both runs"
    if old["is_half"] != new["is_half"]:
        return "One of the runs computes in half precision"
    if number and not differing((was + before)[:, 1:], now[:, 1:], 0.05).any():
        return "zero_grad() is missing, so the gradients of the step before are still there"
    return (
        "Each rank's loss is a mean over its own tokens or class weights, or pairs its own "
        "samples; or gradients are clipped before they are averaged; or a part of them is missing"
    )


def difference_of_updates(old, new, number):
    if new["weights_apart"][number + 1].any():
        cause = "The ranks' optimizers have other options, state or random numbers, or one skips"
        names = words(new, new["weights_apart"][number + 1])
        return f"{cause}: {names} become different between the ranks"
    was = (old["weights"][number + 1] - old["weights"][number])[:, 1:]
    now = (new["weights"][number + 1] - new["weights"][number])[:, 1:]
    sizes = size_of(old["gradients"][number])
    is_noise = sizes < NOISE * sizes.norm()
    is_left = (was.any(1) != now.any(1)) & ~is_noise
    if is_left.any():
        cause = "The optimizer lacks weights, as if made before they were replaced or unfrozen"
        return f"{cause}: {words(new, is_left)} changes in one run alone"
    share = distance(was, now, ~is_noise)
    if share > CLOSE_UPDATES[old["is_half"] or new["is_half"]]:
        cause = "The optimizer has other options or state, or looks at a part of the weights"
        return f"{cause}: gradients agree, but what is done to the weights differs by {share:.0%}"
    return None


def what_was_compared(old, new):
    """Return in words what two runs have alike, and what was not compared."""
    compared = "samples, rates, gradients and weights"
    left = []
    samples = [[sum(of_ranks, Counter()) for of_ranks in run["samples"]] for run in (old, new)]
    if samples[0] != samples[1] or not all(samples[0]):
        compared = "rates, gradients and weights"
        left.append("samples, which are padded otherwise or have no rows")
    if new["left_out"]:
        left.append(f"the shards of {len(new['left_out'])} weights")
    if new["has_buffers"]:
        left.append("buffers")
    return compared, " and ".join(left or ["later steps"])


# ----------------------------------------------------------------------- numbers of tensors


def words(run, is_one):
    """Return the names of some weights for a sentence."""
    names = [name for name, of_one in zip(run["names"], is_one, strict=True) if of_one]
    if len(names) == len(is_one):
        return "all weights"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def size_of(numbers):
    """Return the sizes of tensors, about: [..., numbers] -> [...]."""
    return numbers.square().mean(-1).sqrt()


def distance(old, new, is_one):
    """Return how far apart some tensors are together, as a share of their size."""
    return (size_of(new - old)[is_one].norm() / size_of(old)[is_one].norm()).item()


def differing(old, new, close):
    """Return which tensors are farther apart than this share of their size, or are not finite."""
    least = SMALL * size_of(old).norm(dim=-1, keepdim=True)
    sizes = torch.maximum(size_of(old), size_of(new))
    return ~(size_of(new - old) <= close * torch.maximum(sizes, least))
