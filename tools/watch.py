"""Watch a distributed training, and say what goes wrong in silence. Copy this file beside yours:

    from watch import watch
    watch(model, optimizer)  # after wrapping, before the first step

In steps 1, 2, 3, 10, 30 and every 100th each rank writes some numbers into the store through which
the ranks have met. Rank 0 reads them later, when all are there, and says what differs, what usually
causes it, and which rank the others wait for. There is no collective call, so a rank that skips or
sleeps hangs nothing. An error in here ends the watch, not the training. See docs/everyday.md.
"""

import functools
import itertools
import json
import time
from collections import Counter, deque

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

EARLY = 1, 2, 3, 10, 30  # steps that are checked besides every 100th
RING = 10  # at most so many unread checks: the store must not fill
BATCHES = 50  # how many of the first ones are compared,
ROWS = 64  # and how many samples of each
MOST_BATCHES = 10_000  # of those after them the first sample is noted, for their order
COLUMNS = 4096  # of a sample that has more numbers, every second one is taken, or third …
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
SHARDS = "to_local", "is_shard", "_fsdp_flattened"  # of fully_shard, of stage 06, of torch's FSDP
RATES = "the learning rates"
PRINT = functools.partial(print, flush=True)
STEPS = 20  # whose times are compared in a check
LATE_CHECKS = 3  # so many in a row must find the same rank late,
LEAST_MS, LEAST_SHARE = 10, 0.1  # by more than so many ms and so much of a step
DATA = "data loading, or elsewhere between steps"
PHASES = DATA, "forward", "backward", "the optimizer", "waiting"  # for other ranks
CAUSES = {
    "bare": "nothing averages gradients, because the model is not wrapped, or this is local SGD",
    "bypassed": "nothing averages gradients, because the loss comes from model.module, not model",
    "no_sync": "the last micro-batch runs in no_sync(), which is for all but the last",
    "some": "nothing averages some gradients, because their weights were unfrozen, added or "
    "replaced after wrapping, or are outside the wrapper",
    "gradients": "each rank takes its own gradients: finish_gradient_synchronization() is missing, "
    "autograd.grad() replaces backward(), all parameters are new ones, or a rank clips or zeroes "
    "gradients by itself",
    "start": "the ranks begin with other weights: nothing broadcasts them, a rank loads its own, "
    "or forward writes them from each rank's own samples",
    "rates": "a scheduler steps on one rank alone, or by each rank's own loss",
    "reduced": "the gradients are equal and the steps are not: a rank's optimizer has other "
    "options, state or random numbers, or a closure with its own loss; a rank has loaded weights "
    "or changed gradients; another kernel or kind of GPU rounds differently; or these are experts",
    "steps": "a rank skips a bad batch or a step by itself, or takes one more",
    "samples": "ranks train on the same samples: there is no DistributedSampler, it has another "
    "seed on each rank, a stream is not split, or each host lists its files in another order",
    "order": "the samples come in one order again: set_epoch() is missing, persistent workers keep "
    "a data set's own epoch, or you want it, as in several passes over a few batches",
    "NaN": "a bad batch brings NaN, and skipping its step does not mend BatchNorm's statistics",
    "late": "a rank has more to do than the others, or a slower device or disk",
}


def safe(method):
    """Let a method of the watch end the watch, and not the training, if it raises."""

    @torch.compiler.disable
    @functools.wraps(method)
    def call(self, *arguments):
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        try:
            if self.is_on and not capturing:
                method(self, *arguments)
        except Exception as error:
            self.is_on = False
            PRINT(f"{self.name} ends in step {self.step}: {error!r}")

    return call


class watch:
    """Compare the ranks of the model's process group, or of all, from now on.

    every: check each step that this divides. say: a function that is called with each sentence.
    """

    made = 0  # in this process: all ranks make theirs in the same order

    def __init__(self, model, optimizer, every=100, say=PRINT):
        watch.made += 1
        self.name = f"watch {watch.made}"
        self.say = say
        self.said = []  # keys of CAUSES
        self.apart = set()  # names of weights that were found to differ
        self.model = model
        self.module = getattr(model, "module", model)
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self.every = every
        self.is_on = True
        self.step = 0
        self.checks = 0  # of this rank
        self.judged = 0  # of those
        self.forwards = 0  # in training, through the wrapper and not in no_sync()
        self.in_no_sync = False  # the last of those in training
        self.batches = []  # numbers of samples, not posted yet
        self.noted = 0  # so many batches
        self.marks = []  # of this step: a phase, and when it ended
        self.steps = deque(maxlen=STEPS)  # the marks of the last ones
        self.late = deque(maxlen=LATE_CHECKS)  # whom the last checks have found late
        self.start()

    def tell(self, cause, seen):
        """Say what usually causes what was seen, unless this cause was said."""
        if cause not in self.said:
            self.said.append(cause)
            self.say(f"{self.name}, step {self.step}: {CAUSES[cause]} ({seen}).")

    @safe
    def start(self):
        group = getattr(self.model, "process_group", None) or dist.group.WORLD
        if group is None or group.size() == 1:
            raise RuntimeError("it compares nothing, because the process group has world size 1")
        self.store = group.get_group_store().clone()  # with a connection of its own
        self.rank = group.rank()
        self.samples = [[] for _ in range(group.size())]  # of each rank: batches of their numbers
        self.gpu = next((p.device for p in self.module.parameters() if p.is_cuda), None)
        # As torch's DDP has it called: a private name, but the only end of backward.
        self.at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
        self.model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        self.module.register_forward_pre_hook(self.before_module)
        self.model.register_forward_hook(self.after_forward)
        self.optimizer.register_step_pre_hook(self.before_step)
        self.optimizer.register_step_post_hook(self.after_step)
        if self.rank == 0:
            self.say(f"{self.name} compares weights (no shards), gradients, rates and samples.")

    @safe
    def before_forward(self, model, *inputs):
        if not is_training(model):
            return
        # What torch's DDP, and the classes of stages 02 to 05, set within no_sync().
        ours = getattr(model, "synchronizing", True)
        self.in_no_sync = not getattr(model, "require_backward_grad_sync", ours)
        self.forwards += not self.in_no_sync
        if self.noted < MOST_BATCHES:
            self.noted += 1
            self.batches += numbers_of_batch(inputs, ROWS if self.noted <= BATCHES else 1)
        self.mark(DATA)

    @safe
    def before_module(self, *_):
        if self.marks and self.marks[-1][0] == DATA:
            self.mark("waiting")  # torch's DDP sends rank 0's buffers

    @safe
    def after_forward(self, model, inputs, outputs):
        if not is_training(model):
            return
        self.mark("forward")
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self.begin_backward)

    @safe
    def begin_backward(self, _):
        self.at_end_of_backward(self.after_gradients)  # before torch's DDP, which waits then

    @safe
    def after_gradients(self):
        self.mark("backward")
        self.at_end_of_backward(functools.partial(self.mark, "waiting"))  # when DDP has waited

    @safe
    def before_step(self, *_):
        waits_in_finish = hasattr(self.model, "finish_gradient_synchronization")
        self.mark("waiting" if waits_in_finish else "the optimizer")
        self.step += 1
        if self.step in EARLY or self.step % self.every == 0:
            self.post()
        if self.rank == 0:
            self.read()

    @safe
    def after_step(self, *_):
        self.mark("the optimizer")
        self.steps.append(self.marks)
        self.marks = self.marks[-1:]  # the next step begins there

    @safe
    def mark(self, phase):
        """Note that what has run since the last mark was of this phase."""
        now = time.perf_counter()
        if self.gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.gpu))
        self.marks.append((phase, now))

    def post(self):
        """Write into the store what the ranks should have alike, and what their steps took."""
        parameters = self.parameters()
        buffers = dict(self.module.named_buffers())
        weights = {RATES: [float(group.get("lr") or 0) for group in self.optimizer.param_groups]}
        weights |= {name: number_of(each) for name, each in parameters.items()}
        check = {
            "weights": weights,
            "gradients": {name: number_of(each.grad) for name, each in parameters.items()},
            "nan": [name for name, each in (parameters | buffers).items() if has_nan(each)],
            "forwards": self.forwards,
            "in_no_sync": self.in_no_sync,
            "samples": [numbers.tolist() for numbers in self.batches],
            "times": [times_of(marks) for marks in self.steps],
        }
        self.batches = []
        self.store.set(f"{self.name} {self.checks % RING} {self.rank}", json.dumps(check))
        self.checks += 1

    def parameters(self):
        """Return the module's and the optimizer's by name, without ZeRO2's shards."""
        found = dict(self.module.named_parameters())
        others = {*found.values(), *getattr(self.model, "shards", [])}
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(trained):
            if parameter not in others:
                found[f"the optimizer's parameter {number}"] = parameter
        return found

    @safe
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

    def judge(self, weights, gradients, nan, forwards, in_no_sync, samples, times):
        """Say what is wrong; each argument is a list of what the ranks have posted."""
        for earlier, later in zip(self.samples, samples, strict=True):
            earlier += later
        self.judge_samples()
        self.judge_times(times)
        for rank, names in enumerate(nan):
            if names:
                self.tell("NaN", f"rank {rank} has it in {listed(names)}")
        apart = names_of_unequal(weights)
        new = [name for name in apart if name not in self.apart]
        self.apart.update(new)
        other = [rank for rank, count in enumerate(forwards) if count != forwards[0]]
        if other and (apart or hasattr(self.model, "reducer")):
            # torch's DDP, which has a reducer, runs as many forwards on all ranks.
            counts = f"{forwards[other[0]]} forwards by then, and rank 0 {forwards[0]}"
            self.tell("steps", f"rank {other[0]} has run {counts}")
        elif new:
            ranks = [f"rank {rank}" for rank, each in enumerate(weights) if each != weights[0]]
            cause = self.cause_of(new, gradients, forwards, in_no_sync)
            self.tell(cause, f"seen in {listed(new)}, {listed(ranks)} against rank 0")

    def cause_of(self, apart, gradients, forwards, in_no_sync):
        """Return what usually sets these weights apart."""
        unequal = [name for name in names_of_unequal(gradients) if name in apart]
        averaged = [name for name, n in gradients[0].items() if n and name not in unequal]
        if not unequal and RATES in self.apart:
            return "rates"
        if not unequal:
            return "start" if self.judged == 1 else "reduced"
        if self.model is self.module:
            return "bare"
        if any(in_no_sync):
            return "no_sync"
        if not any(forwards):
            return "bypassed"
        return "some" if averaged else "gradients"

    def judge_samples(self):
        # The second half may be of a new epoch, in which a rank has not seen its own again yet.
        half = min(first_epoch(batches[:BATCHES]) for batches in self.samples) // 2
        ranks = Counter()  # that have seen a sample
        for batches in self.samples:
            ranks.update({number for batch in batches[:half] for number in batch})
        several = ranks.total() - len(ranks)
        if several > len(self.samples) + 3:  # a sampler may repeat a few
            self.tell("samples", f"{several} of the first samples are on several ranks")
        first = [batch[0] for batch in self.samples[0]]
        for again in range(4, len(first)):
            if first[again : again + 8] == first[:8] and first[0] not in first[1:4]:
                self.tell("order", f"batch {again + 1} and those after it are the first ones again")

    def judge_times(self, times):
        if min(map(len, times)) < STEPS:
            return
        rank, late, phase = who_is_late(torch.tensor(times))
        self.late.append(rank)
        if rank is not None and self.late.count(rank) == LATE_CHECKS:
            how = f"by {late:.0f} ms a step, in {phase}; the others wait for it"
            self.tell("late", f"rank {rank} is late {how}")


def is_training(model):
    return torch.is_grad_enabled() and model.training


def listed(names):
    if len(names) > 3:
        return f"{names[0]} and {len(names) - 1} others"
    return ", ".join(names)


def times_of(marks):
    """Return the ms that a step has spent in each of the phases."""
    times = dict.fromkeys(PHASES, 0.0)
    for (_, before), (phase, after) in itertools.pairwise(marks):
        if isinstance(after, float):
            times[phase] += 1000 * (after - before)
        else:
            after.synchronize()
            times[phase] += before.elapsed_time(after)
    return list(times.values())


def who_is_late(times):
    """Return the rank that the others wait for, or None; by how many ms a step; in which phase.

    times: [rank, step, phase] in ms. In a step the last rank is the one that waits least.
    """
    waiting, ranks = times[:, :, -1].sort(dim=0)
    rank = ranks[0].mode().values.item()
    is_last = ranks[0] == rank
    late = (waiting[1] - waiting[0])[is_last].median().item()
    step = times.sum(dim=2).median().item()
    is_late = is_last.sum() >= 0.8 * STEPS and late > max(LEAST_MS, LEAST_SHARE * step)
    own = times[:, :, :-1].median(dim=1).values  # [rank, phase]
    others = own[torch.arange(len(own)) != rank]
    more = own[rank] - others.median(dim=0).values
    return rank if is_late else None, late, PHASES[more.argmax()]


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
    """Return a number that tells a tensor's bits and their places; 0 for a shard or sparse one."""
    if tensor is None:
        return None
    if tensor.layout != torch.strided or any(hasattr(tensor, mark) for mark in SHARDS):
        return 0
    while tensor.ndim:
        tensor = fold(tensor)
    return tensor.item()


def fold(tensor):
    """Add up the last dimension's bits, each number times one that depends on its place."""
    bits = tensor.detach().view(INTEGERS.get(tensor.element_size(), torch.int64))
    places = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
    factors = places * (0x9E3779B97F4A7C1 + 2 * bits.ndim)  # other ones in each dimension
    factors ^= factors >> 29
    if bits.ndim == 1:
        return (bits * factors).sum()
    # In pieces, because products are int64, which takes up to eight times a tensor's memory.
    return torch.cat([(piece * factors).sum(-1) for piece in bits.split(1024)])


def numbers_of_batch(inputs, count):
    """Return, in a list, a number for each of a batch's first samples; none if it has no rows."""
    for tensor in tree_leaves(inputs):
        if type(tensor) is torch.Tensor and tensor.ndim > 1 and tensor.numel():
            rows = tensor[:count].flatten(1)
            return [fold(rows[:, :: rows.shape[1] // COLUMNS + 1])]
    return []
