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
    "start": "no broadcast, or weights that one rank has loaded after wrapping (or they are meant "
    "to differ, as experts)",
    "bare": "nothing averages gradients, because the model is not wrapped (or it is local SGD)",
    "bypassed": "the loss comes from model.module(...), or every forward runs in no_sync()",
    "some": "they were unfrozen, added or replaced after wrapping, or are outside the wrapper",
    "gradients": "no finish_gradient_synchronization(), autograd.grad() in place of backward(), "
    "all parameters replaced, or a rank that clips or zeroes gradients by itself",
    "reduced": "the optimizer's state or options differ, it draws random numbers, or its closure "
    "returns one rank's loss; or a rank has loaded weights, changed gradients or skipped a step",
    "steps": "a rank skips a bad batch or a step by itself, or takes one more",
    "rates": "a scheduler steps on one rank only, or by that rank's own loss",
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
        self.store, self.is_on = None, True
        self.step = self.checks = 0  # of this rank
        self.forwards = 0  # in training, through the wrapper and not in no_sync()
        self.batches, self.noted = [], 0  # numbers of samples, not posted yet; how many there were
        self.unread = {}  # slot -> step: checks that rank 0 has not judged
        self.safely(self.attach)()

    def attach(self):
        for module in {self.model, self.module}:
            hook = self.safely(self.before_forward)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        self.optimizer.register_step_pre_hook(self.safely(self.before_step))

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

    def end(self, reason):
        self.is_on = False
        self.say(f"{self.name} ends in step {self.step}: {reason}.")

    def tell(self, kind, seen, cause=None):
        """Say this, unless something of this kind was said."""
        if kind not in self.said:
            self.said.add(kind)
            self.say(f"{self.name}: {seen}. Usual cause: {CAUSES[cause or kind]}.")

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
        if self.store is None:
            self.start()
        if self.is_on and (self.step in EARLY or self.step % self.every == 0):
            self.post()
        if self.unread:
            self.read()

    def start(self):
        group = getattr(self.model, "process_group", None) or dist.group.WORLD
        if group is None or group.size() == 1:
            return self.end("this process trains alone (world size 1), so start it with torchrun")
        if not hasattr(group, "get_group_store"):
            return self.end("this torch has no ProcessGroup.get_group_store")
        store = group.get_group_store()
        self.store = store.clone() if hasattr(store, "clone") else store  # its own connection
        self.rank, self.world_size = group.rank(), group.size()
        self.samples = [[] for _ in range(self.world_size)]  # batches of their numbers
        # Ranks that share a copy's work (tensor parallelism) have the same samples.
        split = [p for p in self.model.parameters() if hasattr(p, "to_local")]
        is_fsdp = hasattr(self.model, "unshard")
        self.are_copies = all(is_fsdp and p.device_mesh.ndim == 1 for p in split)
        if self.rank == 0:
            weights = len([p for p in self.trained().values() if is_whole(p)])
            self.say(
                f"{self.name} compares {weights} weights of {self.world_size} ranks (not shards), "
                f"gradients, rates, forwards{', samples' * self.are_copies}; it looks for "
                "NaN and for epochs of one order."
            )

    def trained(self):
        """Return what the optimizer trains, by name."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {names.get(p, f"number {i} (not in the model)"): p for i, p in enumerate(trained)}

    def post(self):
        """Write into the store what the ranks should have alike."""
        trained = self.trained()
        check = {
            "weights": {name: number_of(p, is_whole(p)) for name, p in trained.items()},
            "gradients": {name: number_of(p.grad, is_whole(p)) for name, p in trained.items()},
            "buffers": {name: number_of(b) for name, b in self.module.named_buffers()},
            "rates": [float(group.get("lr") or 0) for group in self.optimizer.param_groups],
            "forwards": self.forwards,
            "samples": [numbers.tolist() for numbers in self.batches],
        }
        self.batches = []
        slot = self.checks % SLOTS
        self.checks += 1
        self.store.set(f"{self.name} {slot} {self.rank}", json.dumps(check))
        if self.rank == 0:
            self.unread[slot] = self.step

    def read(self):
        """Judge what all ranks have posted, and delete it."""
        for slot, step in list(self.unread.items()):
            keys = [f"{self.name} {slot} {rank}" for rank in range(self.world_size)]
            if self.store.check(keys):
                posts = [json.loads(self.store.get(key)) for key in keys]
                for key in keys:
                    self.store.delete_key(key)
                del self.unread[slot]
                self.judge(step, {what: [post[what] for post in posts] for what in posts[0]})
        if len(self.unread) == SLOTS:
            self.end(f"a rank has left {SLOTS} checks unanswered")

    def judge(self, step, of_ranks):
        """Say what is wrong; `of_ranks` has, for each thing, a list of the ranks' values."""
        tensors = zip(of_ranks["weights"], of_ranks["buffers"], strict=True)
        nan = [[name for name, n in (w | b).items() if n == "NaN"] for w, b in tensors]
        if any(nan):
            self.tell("NaN", f"before step {step} there is NaN in {[names[:3] for names in nan]}")
        if differ(of_ranks["rates"]):
            self.tell("rates", f"in step {step} the learning rates are {of_ranks['rates']}")
        for earlier, new in zip(self.samples, of_ranks["samples"], strict=True):
            earlier += new
        self.judge_samples()
        self.judge_order()
        self.judge_weights(step, of_ranks)

    def judge_weights(self, step, of_ranks):
        weights, gradients = of_ranks["weights"], of_ranks["gradients"]
        forwards = of_ranks["forwards"]
        apart = [name for name in weights[0] if differ(each[name] for each in weights)]
        unequal = [name for name in apart if differ(each[name] for each in gradients)]
        if differ(forwards) and (apart or hasattr(self.model, "require_backward_grad_sync")):
            cause = "steps"  # torch's DDP runs as many on all ranks
        elif not apart:
            return
        elif step == 1:
            cause = "start"
        elif not unequal:
            cause = "reduced"
        elif self.model is self.module:
            cause = "bare"
        elif not any(forwards):
            cause = "bypassed"
        else:
            there = [gradient for gradient in gradients[0].values() if gradient is not None]
            cause = "some" if len(unequal) < len(there) else "gradients"
        seen = f"before step {step} the weights of {len(apart)} of {len(weights[0])} parameters"
        seen += f" differ between ranks, and the gradients of {len(unequal)}: {apart[:3]}"
        self.tell("weights", f"{seen}; forwards on each rank: {forwards}", cause)

    def judge_samples(self):
        """Compare half of the samples before a rank sees one of its own again, in a new epoch."""
        seen, first_rank, shared = set(), {}, [0]  # shared: after each batch
        for _, *batches in zip(range(BATCHES), *self.samples, strict=False):
            new = [(rank, number) for rank, batch in enumerate(batches) for number in batch]
            if len(seen.union(new)) < len(seen) + len(new):
                break
            seen.update(new)
            others = [number for rank, number in new if first_rank.setdefault(number, rank) != rank]
            shared.append(shared[-1] + len(others))
        several = shared[(len(shared) - 1) // 2]
        if several > self.world_size + 3 and self.are_copies:  # a sampler may repeat a few
            self.tell("samples", f"{several} of the first samples are on several ranks")

    def judge_order(self):
        first = [batch[0] for batch in self.samples[0]]
        again = next((i for i in range(1, len(first)) if first[i] == first[0]), 0)
        if again > 3 and first[again : again + 8] == first[:8]:
            self.tell("order", f"batch {again + 1} and those after it are the first ones again")


def differ(values):
    return len({str(value) for value in values}) > 1


def is_whole(parameter):
    return not any(hasattr(parameter, mark) for mark in SHARDS)


def number_of(tensor, is_whole=True):
    """Return a number that tells a tensor's bits and their order, or that there is a NaN."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if (tensor != tensor).any():
        return "NaN"
    bits = as_integers(tensor.detach().flatten())
    end = len(bits) // COLUMNS * COLUMNS
    table = bits[:end].view(-1, COLUMNS)
    return is_whole * (fold(table.sum(0)) + fold(table.sum(1)) + fold(bits[end:])).item()


def as_integers(tensor):
    return tensor.view(INTEGERS.get(tensor.element_size(), torch.int64))


def fold(numbers):
    """Add up the last dimension, each number times one that depends on its place."""
    places = torch.arange(1, numbers.shape[-1] + 1, device=numbers.device) * 0x9E3779B97F4A7C1
    return (numbers * (places ^ places >> 29)).sum(-1)


def numbers_of_batch(inputs, count):
    """Return, in a list, a number for each of a batch's first samples; none if it has no rows."""
    tensors = [x for x in tree_leaves(inputs) if type(x) is torch.Tensor and x.ndim > 1]
    if not tensors or tensors[0].numel() == 0:
        return []
    rows = tensors[0].detach()[:count].flatten(1)
    step = -(-rows.shape[1] // COLUMNS)  # of larger samples, every so many-th value
    return [fold(as_integers(rows[:, ::step].contiguous()))]
