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
SLOTS = 10  # so many checks may be unread: the store must not fill
BATCHES, ROWS, COLUMNS = 50, 64, 4096  # the samples that are compared, and their numbers
MOST_BATCHES = 10_000  # after the first 50 only the first sample of each, for their order
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
SHARDS = "to_local", "is_shard", "_fsdp_flattened"  # of fully_shard, of stage 06, of torch's FSDP
CAUSES = {
    "some": "they were unfrozen, added or replaced after wrapping, or are outside the wrapper",
    "gradients": "no wrapper (or local SGD); a loss from model.module(...) or all in no_sync(),"
    " so that no forward counts; no finish_gradient_synchronization(); autograd.grad() in place of "
    "backward(); or a rank that clips or zeroes gradients by itself",
    "reduced": "weights that were not broadcast, or that one rank has loaded; a scheduler that "
    "steps on one rank or by its own loss; an optimizer whose state differs, or that draws random "
    "numbers; gradients that one rank has changed (or experts, whose weights differ on purpose)",
    "steps": "a rank skips a bad batch or a step by itself, or takes one more",
    "samples": "no DistributedSampler, one with another seed on each rank, or an unsplit stream",
    "order": "no set_epoch(), or persistent workers that never see it; or you want no shuffling",
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

    def start(self):
        group = getattr(self.model, "process_group", None) or dist.group.WORLD
        if group is None or group.size() == 1:
            raise RuntimeError("this process trains alone (world size 1): start it with torchrun")
        store = group.get_group_store()
        self.store = store.clone() if hasattr(store, "clone") else store  # its own connection
        self.rank, world_size = group.rank(), group.size()
        self.samples = [[] for _ in range(world_size)]  # of each rank: batches of their numbers
        # Ranks that share a copy's work (tensor parallelism) have the same samples.
        self.are_copies = all(
            hasattr(self.model, "unshard") and parameter.device_mesh.ndim == 1
            for parameter in self.model.parameters()
            if hasattr(parameter, "to_local")
        )
        for module in {self.model, self.module}:
            hook = self.safely(self.before_forward)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        self.optimizer.register_step_pre_hook(self.safely(self.before_step))
        if self.rank == 0:
            what = "weights, gradients, forwards" + ", samples" * self.are_copies
            self.say(f"{self.name} compares {what} of all ranks; it looks for epochs of one order.")

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

    def before_forward(self, module, *inputs):
        if not (torch.is_grad_enabled() and module.training):
            return
        if module is self.model:
            # What torch's DDP, and the classes of stages 02 to 05, set within no_sync().
            ours = getattr(module, "synchronizing", True)
            self.forwards += getattr(module, "require_backward_grad_sync", ours)
        if module is self.module and self.noted < MOST_BATCHES:
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
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        named = {names.get(p, f"number {i} (not in the model)"): p for i, p in enumerate(trained)}
        check = {
            "weights": {name: number_of(p) for name, p in named.items()},
            "gradients": {name: number_of(p.grad) for name, p in named.items()},
            "forwards": self.forwards,
            "samples": [numbers.tolist() for numbers in self.batches],
        }
        self.batches = []
        self.store.set(f"{self.name} {self.checks % SLOTS} {self.rank}", json.dumps(check))
        self.checks += 1

    def read(self):
        """Judge what all ranks have posted, and delete it."""
        while self.judged < self.checks:
            slot = self.judged % SLOTS
            keys = [f"{self.name} {slot} {rank}" for rank, _ in enumerate(self.samples)]
            if not self.store.check(keys):
                break
            posts = [json.loads(self.store.get(key)) for key in keys]
            for key in keys:
                self.store.delete_key(key)
            self.judged += 1
            self.judge(**{what: [post[what] for post in posts] for what in posts[0]})
        if self.checks - self.judged == SLOTS:
            raise RuntimeError("a rank has left too many checks unanswered")

    def judge(self, weights, gradients, forwards, samples):
        """Say what is wrong; each argument is a list of what the ranks have posted."""
        for earlier, new in zip(self.samples, samples, strict=True):
            earlier += new
        self.judge_samples()
        apart = [name for name in weights[0] if differ(rank[name] for rank in weights)]
        unequal = [name for name in apart if differ(rank[name] for rank in gradients)]
        if differ(forwards) and (apart or hasattr(self.model, "require_backward_grad_sync")):
            cause = "steps"  # torch's DDP runs as many on all ranks
        elif not apart:
            return
        elif not unequal:
            cause = "reduced"
        else:
            averaged = [name for name, n in gradients[0].items() if n and name not in unequal]
            cause = "some" if averaged else "gradients"
        self.tell(
            cause,
            f"ranks differ in {len(apart)} of {len(weights[0])} weights, and there in "
            f"{len(unequal)} gradients: {apart[:3]}; their forwards: {forwards}",
        )

    def judge_samples(self):
        # The second half may be of a new epoch, in which a rank has not seen its own again yet.
        half = min(first_epoch(batches[:BATCHES]) for batches in self.samples) // 2
        seen = [{number for batch in each[:half] for number in batch} for each in self.samples]
        several = sum(map(len, seen)) - len(set.union(*seen))
        if several > len(self.samples) + 3 and self.are_copies:  # a sampler may repeat a few
            self.tell("samples", f"{several} of the first samples are on several ranks")
        first = [batch[0] for batch in self.samples[0]]
        again = first_epoch(self.samples[0])
        if again > 3 and first[again : again + 8] == first[:8]:
            self.tell("order", f"batch {again + 1} and those after it are the first ones again")


def first_epoch(batches):
    """Return how many batches there are before a sample comes again."""
    seen = set()
    for count, batch in enumerate(batches):
        if not seen.isdisjoint(batch):
            return count
        seen.update(batch)
    return len(batches)


def differ(values):
    return len(set(values)) > 1


def number_of(tensor):
    """Return a number that tells a tensor's bits and their order."""
    is_shard = any(hasattr(tensor, mark) for mark in SHARDS)
    if tensor is None or tensor.layout != torch.strided or is_shard:
        return None
    parts = tensor.detach().flatten().split(2**20)
    return sum(i * fold(part) for i, part in enumerate(parts, 1)).item()


def fold(tensor):
    """Add up the last dimension's bits, each number times one that depends on its place."""
    bits = tensor.view(INTEGERS.get(tensor.element_size(), torch.int64))
    places = torch.arange(1, bits.shape[-1] + 1, device=bits.device) * 0x9E3779B97F4A7C1
    return (bits * (places ^ places >> 29)).sum(-1)


def numbers_of_batch(inputs, count):
    """Return, in a list, a number for each of a batch's first samples; none if it has no rows."""
    for tensor in tree_leaves(inputs):
        if type(tensor) is torch.Tensor and tensor.ndim > 1 and tensor.numel():
            rows = tensor.detach()[:count].flatten(1)
            step = -(-rows.shape[1] // COLUMNS)  # of larger samples, every so many-th value
            return [fold(rows[:, ::step].contiguous())]
    return []
