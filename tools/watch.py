"""Watch a distributed training, and say what goes wrong in silence. Copy this file beside yours:

    from watch import watch
    watch(model, optimizer)  # after wrapping, before the first step

In steps 1, 2, 3, 10, 30 and every 100th each rank writes some numbers into the store through which
the ranks have met. Rank 0 reads them later, when all are there, and says what differs and what
usually causes it. Nobody waits, and there is no collective call, so a rank that skips or sleeps
hangs nothing. An error in here ends the watch, not the training. Its limits: docs/everyday.md.
"""

import json

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

EARLY = 1, 2, 3, 10, 30  # steps that are checked besides every 100th
RING = 10  # so many checks may wait to be read: the store must not fill
BATCHES, ROWS, COLUMNS = 50, 64, 4096  # the samples that are compared, and their numbers
MOST_BATCHES = 10_000  # after the first 50 only the first sample of each, for their order
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
SHARDS = "to_local", "is_shard", "_fsdp_flattened"  # of fully_shard, of stage 06, of torch's FSDP
CAUSES = {
    "bare": "nothing averages gradients, because the model is not wrapped (or it is local SGD)",
    "bypassed": "the loss comes from model.module(...), or every forward runs in no_sync()",
    "some": "they were unfrozen, added or replaced after wrapping, or are outside the wrapper",
    "gradients": "no finish_gradient_synchronization(), autograd.grad() in place of backward(), "
    "all parameters replaced, or a rank that clips or zeroes gradients by itself",
    "reduced": "no broadcast, or weights that one rank has loaded; a scheduler that steps on one "
    "rank or by its loss; an optimizer with other options, state or random numbers, or a closure "
    "with one rank's loss; gradients that one rank has changed (or experts, which should differ)",
    "steps": "a rank skips a bad batch or a step by itself, or takes one more",
    "samples": "no DistributedSampler, one with another seed on each rank, or an unsplit stream",
    "order": "no set_epoch(), or persistent workers that never see it; or you want no shuffling",
    "NaN": "a bad batch; skipping its step does not mend BatchNorm's statistics",
}


def print_at_once(sentence):
    print(sentence, flush=True)


class watch:
    """Compare the ranks of the model's process group, or of all, from now on.

    every: check each step that this divides. say: a function that is called with each sentence.
    """

    made = 0  # in this process: all ranks make theirs in the same order

    def __init__(self, model, optimizer, every=100, say=print_at_once):
        watch.made += 1
        self.name, self.say, self.said = f"watch {watch.made}", say, set()
        self.model, self.module = model, getattr(model, "module", model)
        self.optimizer, self.every = optimizer, every
        self.is_on = True
        self.step = self.checks = self.judged = 0  # steps and checks of this rank
        self.forwards = 0  # in training, through the wrapper and not in no_sync()
        self.batches, self.noted = [], 0  # numbers of samples, not posted yet; how many there were
        self.safely(self.start)()

    def safely(self, function):
        """Return a function that calls this one, and ends the watch if it raises."""

        @torch.compiler.disable
        def call(*arguments):
            capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            try:
                if self.is_on and not capturing:
                    function(*arguments)
            except Exception as error:
                self.is_on = False
                print_at_once(f"{self.name} ends in step {self.step}: {error!r}")

        return call

    def tell(self, cause, seen):
        """Say this, unless this cause was said."""
        if cause not in self.said:
            self.said.add(cause)
            self.say(f"{self.name}, step {self.step}: {seen}. Usual cause: {CAUSES[cause]}.")

    def start(self):
        group = getattr(self.model, "process_group", None) or dist.group.WORLD
        if group is None or group.size() == 1:
            raise RuntimeError("this process trains alone (world size 1): start it with torchrun")
        self.store = group.get_group_store().clone()  # with a connection of its own
        self.rank = group.rank()
        self.samples = [[] for _ in range(group.size())]  # of each rank: batches of their numbers
        # Ranks that share a copy's work (tensor parallelism) have the same samples.
        self.are_copies = all(
            hasattr(self.model, "unshard") and parameter.device_mesh.ndim == 1
            for parameter in self.model.parameters()
            if hasattr(parameter, "to_local")
        )
        self.model.register_forward_pre_hook(self.safely(self.before_forward), with_kwargs=True)
        self.optimizer.register_step_pre_hook(self.safely(self.before_step))
        if self.rank == 0:
            what = "weights (no shards), gradients, rates, forwards" + ", samples" * self.are_copies
            self.say(f"{self.name} compares {what}; it looks for NaN and for epochs of one order.")

    def before_forward(self, model, *inputs):
        if not (torch.is_grad_enabled() and model.training):
            return
        # What torch's DDP, and the classes of stages 02 to 05, set within no_sync().
        ours = getattr(model, "synchronizing", True)
        self.forwards += getattr(model, "require_backward_grad_sync", ours)
        if self.noted < MOST_BATCHES:
            self.noted += 1
            self.batches += numbers_of_batch(inputs, ROWS if self.noted <= BATCHES else 1)

    def before_step(self, *_):
        self.step += 1
        if self.step in EARLY or self.step % self.every == 0:
            self.post()
        if self.rank == 0:
            self.read()

    def post(self):
        """Write into the store what the ranks should have alike."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        rates = {"rates": [float(group.get("lr") or 0) for group in self.optimizer.param_groups]}
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        named = {names.get(p, f"number {i} (not in the model)"): p for i, p in enumerate(trained)}
        tensors = named | dict(self.module.named_buffers())
        check = {
            "weights": rates | {name: number_of(p) for name, p in named.items()},
            "gradients": {name: number_of(p.grad) for name, p in named.items()},
            "nan": [name for name, tensor in tensors.items() if has_nan(tensor)][:3],
            "forwards": self.forwards,
            "samples": [numbers.tolist() for numbers in self.batches],
        }
        self.batches = []
        self.store.set(f"{self.name} {self.checks % RING} {self.rank}", json.dumps(check))
        self.checks += 1

    def read(self):
        """Judge what all ranks have posted, and delete it."""
        while self.judged < self.checks:
            keys = [f"{self.name} {self.judged % RING} {rank}" for rank in range(len(self.samples))]
            if not self.store.check(keys):
                break
            posts = [json.loads(self.store.get(key)) for key in keys]
            for key in keys:
                self.store.delete_key(key)
            self.judged += 1
            self.judge(**{what: [post[what] for post in posts] for what in posts[0]})
        if self.checks - self.judged == RING:
            raise RuntimeError("a rank has left too many checks unanswered")

    def judge(self, weights, gradients, nan, forwards, samples):
        """Say what is wrong; each argument is a list of what the ranks have posted."""
        for earlier, new in zip(self.samples, samples, strict=True):
            earlier += new
        self.judge_samples()
        if any(nan):
            self.tell("NaN", f"the ranks have NaN in {nan}")
        apart = names_of_unequal(weights)
        unequal = [name for name in names_of_unequal(gradients) if name in apart]
        averaged = [name for name, n in gradients[0].items() if n and name not in unequal]
        if min(forwards) < max(forwards) and (apart or hasattr(self.model, "reducer")):
            cause = "steps"  # torch's DDP, which has a reducer, runs as many on all ranks
        elif not apart:
            return
        elif not unequal:
            cause = "reduced"
        elif self.model is self.module:
            cause = "bare"
        elif not any(forwards):
            cause = "bypassed"
        else:
            cause = "some" if averaged else "gradients"
        ranks = [rank for rank, each in enumerate(weights) if each != weights[0]]
        seen = f"the ranks' forwards are {forwards}"
        if apart:
            what = f"weights or rates ({len(apart)}: {apart[:3]} …), their gradients in"
            seen += f"; ranks {ranks} differ from rank 0 in {what} {len(unequal)}"
        self.tell(cause, seen)

    def judge_samples(self):
        # The second half may be of a new epoch, in which a rank has not seen its own again yet.
        half = min(first_epoch(batches[:BATCHES]) for batches in self.samples) // 2
        seen = [{number for batch in each[:half] for number in batch} for each in self.samples]
        several = sum(map(len, seen)) - len(set.union(*seen))
        if several > len(self.samples) + 3 and self.are_copies:  # a sampler may repeat a few
            self.tell("samples", f"{several} of the first samples are on several ranks")
        first = [batch[0] for batch in self.samples[0]]
        for again in range(4, len(first)):
            if first[again : again + 8] == first[:8] and first[0] not in first[1:4]:
                self.tell("order", f"batch {again + 1} and those after it are the first ones again")


def first_epoch(batches):
    """Return how many batches there are before a sample comes again."""
    seen = set()
    for count, batch in enumerate(batches):
        if not seen.isdisjoint(batch):
            return count
        seen.update(batch)
    return len(batches)


def names_of_unequal(of_ranks):
    first, *others = of_ranks
    return [name for name in first if any(other[name] != first[name] for other in others)]


def has_nan(tensor):
    return not hasattr(tensor, "to_local") and tensor.isnan().any()


def number_of(tensor):
    """Return a number that tells a tensor's bits and their places; None for a shard."""
    is_shard = any(hasattr(tensor, mark) for mark in SHARDS)
    if tensor is None or tensor.layout != torch.strided or is_shard:
        return None
    while tensor.ndim:
        tensor = fold(tensor)
    return tensor.item()


def fold(tensor):
    """Add up the last dimension's bits, each number times one that depends on its place."""
    bits = tensor.detach().view(INTEGERS.get(tensor.element_size(), torch.int64))
    places = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
    factors = places * (0x9E3779B97F4A7C1 + 2 * bits.ndim)  # other ones in each dimension
    return (bits * (factors ^ factors >> 29)).sum(-1)


def numbers_of_batch(inputs, count):
    """Return, in a list, a number for each of a batch's first samples; none if it has no rows."""
    for tensor in tree_leaves(inputs):
        if type(tensor) is torch.Tensor and tensor.ndim > 1 and tensor.numel():
            rows = tensor[:count].flatten(1)
            # Of a sample of more than so many numbers it takes every second one, or third …
            return [fold(rows[:, :: rows.shape[1] // COLUMNS + 1])]
    return []
