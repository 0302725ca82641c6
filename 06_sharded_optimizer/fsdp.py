r"""06, FSDP: split parameters, gradients and optimizer state over the ranks (ZeRO, stage 3).

Every rank keeps 1/N of each weight, of its gradient and of its optimizer state. A weight is put
together (all-gather) while the layer before it computes, and given up after use; backward does
the same in reverse, and adds up each gradient (reduce-scatter) as soon as it is complete.

    make 06_sharded_optimizer/fsdp NPROC=2                                (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp.py            (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/fsdp.py                                (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO", SC 2020, sections 5.2 and 5.3; Zhao et al., "PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Stanford CS336, assignment 2 (2026).
"""

import sys
import weakref
from collections import deque
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map


def padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Flat, with zeros up to this length; not a copy where it fits."""
    flat = tensor.flatten()
    return F.pad(flat, (0, length - len(flat))) if len(flat) < length else flat


class Unit:
    """A weight: this rank's flat shard of it, and the room in which the whole is put together."""

    def __init__(self, name: str, weight: nn.Parameter, compute_dtype, process_group):
        self.name, self.shape, self.process_group = name, weight.shape, process_group
        self.world_size = dist.get_world_size(process_group)
        self.length = -(-weight.numel() // self.world_size)  # rounded up: zeros fill the last shard
        self.shard = nn.Parameter(self.part_of(weight.detach()).clone(), weight.requires_grad)
        self.room = self.shard.new_empty(self.world_size * self.length, dtype=compute_dtype)
        # Through .data: autograd counts writes to what it has saved, and refilling is not one.
        whole = self.room.data[: weight.numel()].view(weight.shape)
        self.whole = nn.Parameter(whole, weight.requires_grad)
        self.work = None  # the all-gather in flight, and what it sends
        self.free()

    def is_there(self) -> bool:
        return self.room.untyped_storage().nbytes() > 0

    def gather(self) -> None:
        """Begin to put the weight together. What travels has the dtype of the computation."""
        self.wait()
        self.room.untyped_storage().resize_(self.room.nbytes)
        mine = self.shard.detach().to(self.room.dtype)
        work = dist.all_gather_into_tensor(self.room, mine, self.process_group, async_op=True)
        self.work = work, mine

    def wait(self) -> None:
        if self.work:
            self.work[0].wait()
            self.work = None

    def free(self) -> None:
        """Give up the whole weight. Autograd keeps the tensor, and gather() fills it again."""
        self.wait()
        self.room.untyped_storage().resize_(0)

    def reduce(self):
        """Begin to add up the gradient; returns a function that ends it and returns the mean.

        By all-to-all: every rank gets all ranks' gradients of its shard, and adds them up itself,
        in the shard's dtype. gloo's reduce_scatter is an all-reduce, of twice the bytes.
        """
        gradient, self.whole.grad = self.whole.grad, None
        if gradient is None:  # this rank did not use the weight
            gradient = self.room.new_zeros(self.shape)
        if gradient.requires_grad:
            raise RuntimeError("backward(create_graph=True) is not supported")
        self.free()
        flat = padded(gradient, len(self.room))
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, group=self.process_group, async_op=True)

        def end():
            work.wait()
            first, *others = received.split(self.length)
            mean = first.to(self.shard.dtype) / self.world_size
            for other in others:
                mean.add_(other, alpha=1 / self.world_size)
            return mean

        return end

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a whole weight."""
        start = dist.get_rank(self.process_group) * self.length
        return padded(whole, self.world_size * self.length)[start:][: self.length]


class Schedule:
    """What all ranks launch, in which order: recorded as each phase first runs, then kept to."""

    def __init__(self, units: list[Unit], process_group, prefetch: bool):
        self.units, self.process_group, self.prefetch = units, process_group, prefetch
        self.recorded = {}  # forward, backward or inference -> [("gather" or "reduce", unit)]
        self.start_over()

    def start_over(self) -> None:
        self.phase = self.kept = None
        self.needed = set()  # units whose weight backward has asked for
        self.reduced = set()  # units whose gradient is complete
        self.reducing = deque()  # (unit, function that ends its reduction): what is in flight
        self.means = []  # (unit, its averaged gradient)

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.coming = deque(self.recorded.get(phase, ()))
        self.recording = [] if phase not in self.recorded else None
        if self.kept and phase == "backward":
            self.coming.popleft()
        elif self.kept:
            self.kept.free()
        kind, unit = self.recorded.get("backward", [("", None)])[0]  # what forward uses last, stays
        self.kept = unit if phase == "forward" and kind == "gather" else None

    def reach(self, kind: str, unit: Unit) -> None:
        """Launch this, but first all that comes before it: whatever this rank does with it."""
        check_step(self, kind, unit)
        if self.recording is not None:
            check_agreement(self, f"{kind} {unit.name}")
            self.recording.append((kind, unit))
            return self.launch(kind, unit)
        while (step := self.coming.popleft()) != (kind, unit):
            self.launch(*step)
        self.launch(kind, unit)

    def launch(self, kind: str, unit: Unit) -> None:
        if kind == "gather":
            return unit.gather()
        self.end_reductions()  # so that only one is in flight
        self.needed.discard(unit)
        self.reduced.add(unit)
        self.reducing.append((unit, unit.reduce()))

    def end_reductions(self) -> None:
        while self.reducing:
            unit, end = self.reducing.popleft()
            self.means.append((unit, end()))

    def bring(self, unit: Unit) -> None:
        """Wait until the weight is whole, and then, while it is used, gather the next one."""
        if not unit.is_there():
            self.reach("gather", unit)
        unit.wait()
        if self.prefetch and self.coming:
            kind, following = self.coming[0]
            if kind == "gather" and not following.is_there():
                self.launch(*self.coming.popleft())

    def release(self, unit: Unit) -> None:
        """Free a weight after forward, unless backward needs it now or first of all."""
        kept = unit is self.kept and ("gather", unit) not in self.coming
        if unit not in self.needed and not kept:
            unit.free()

    def never_used(self) -> list[Unit]:
        if self.phase == "backward":
            trained = [unit for unit in self.units if unit.shard.requires_grad]
            return [unit for unit in trained if unit not in self.reduced]
        return [unit for unit in self.units if ("gather", unit) not in self.recording]

    def end(self, complete: bool) -> None:
        """Launch what this rank did not need, so that all ranks launch the same, and free all."""
        if self.recording is not None and (complete or self.phase == "backward"):
            for unit in self.never_used():
                self.reach("gather", unit)
                if self.phase == "backward":
                    self.reach("reduce", unit)
            check_agreement(self, "the end")
            if self.prefetch:
                self.recording = one_gather_ahead(self.recording)
            if complete:
                self.recorded[self.phase] = self.recording
        while self.coming:
            self.launch(*self.coming.popleft())
        for unit in [unit for unit in self.units if unit is not self.kept]:
            unit.free()


class FSDP(nn.Module):
    """Keep 1/N of each chosen weight, of its gradient and of its optimizer state on N ranks.

    `shard` chooses the modules whose `weight` is split, by class or by a function of the module;
    by default all that own a matrix of that name, as Linear and Embedding do, torch's and yours.
    The rest is replicated. parameters() has the flat shards: construct the optimizer afterwards.
    In `compute_dtype` the chosen modules compute and send; shards and their gradients keep the
    weight's dtype. ValueError if the module cannot be wrapped, RuntimeError on wrong use.
    """

    def __init__(self, module, compute_dtype=None, process_group=None, shard=None, prefetch=True):
        super().__init__()
        self.module, self.process_group, self.compute_dtype = module, process_group, compute_dtype
        chosen = check_module(module, process_group, shard)
        broadcast_from_rank_0(module, process_group)

        units = {w: Unit(name, w, compute_dtype, process_group) for w, name in chosen.items()}
        self.schedule = Schedule(list(units.values()), process_group, prefetch)
        self.replicated = [p for p in module.parameters() if p.requires_grad and p not in units]
        self.at_rest = {}  # module -> its parameters outside of its forward: shards for weights
        for part in [part for part in module.modules() if part._parameters]:
            held = {key: units[p] for key, p in part._parameters.items() if p in units}
            part._parameters.update({key: unit.shard for key, unit in held.items()})
            self.at_rest[part] = dict(part._parameters)
            if held:
                before = partial(self._before_forward, held)
                part.register_forward_pre_hook(before, with_kwargs=True)
                part.register_forward_hook(partial(self._after_forward, held), always_call=True)
            elif compute_dtype:
                part.register_forward_pre_hook(compute_in_own_dtype, with_kwargs=True)
        self.trained = {unit.whole: unit for unit in units.values() if unit.shard.requires_grad}
        ready = weakref.WeakMethod(self._gradient_is_ready)  # weak: else nothing is ever freed
        for whole in self.trained:
            whole.register_post_accumulate_grad_hook(lambda whole: ready()(whole))
        self.layout = self._layout()

    def forward(self, *inputs, **kwargs):
        check_forward(self)
        self.schedule.begin("forward" if torch.is_grad_enabled() else "inference")
        complete = False
        try:
            outputs = self.module(*inputs, **kwargs)
            complete = True
        finally:
            self.schedule.end(complete)
        return outputs

    def _layout(self):
        return [(id(p), p.requires_grad, p.dtype, p.device) for p in self.module.parameters()]

    def _before_forward(self, held: dict, part: nn.Module, inputs: tuple, kwargs: dict):
        if self.schedule.phase not in ("forward", "inference"):
            self._enter_backward()  # which computes a forward again: activation checkpointing
        for unit in held.values():
            self.schedule.bring(unit)
        for key, parameter in self.at_rest[part].items():
            whole = held[key].whole if key in held else cast(parameter, self.compute_dtype)
            part._parameters[key] = whole
        return tree_map(partial(cast, dtype=self.compute_dtype), (inputs, kwargs))

    def _after_forward(self, held: dict, part: nn.Module, inputs: tuple, outputs):
        part._parameters.update(self.at_rest[part])
        for unit in held.values():
            self.schedule.release(unit)
        for tensor in differentiable(outputs):
            tensor.register_hook(partial(self._before_backward, held))

    def _enter_backward(self):
        if torch._C._current_graph_task_id() == -1:
            raise RuntimeError("the weights are sharded: call the FSDP model, not a part of it")
        if self.schedule.phase != "backward":
            self.schedule.begin("backward")

    def _before_backward(self, held: dict, gradient: torch.Tensor):
        self._enter_backward()
        needed = self.schedule.needed
        for unit in [unit for unit in needed if not unit.shard.requires_grad]:
            needed.discard(unit)  # a frozen one: it is done when another one begins
            unit.free()
        needed.update(held.values())
        for unit in held.values():
            self.schedule.bring(unit)

    def _gradient_is_ready(self, whole: nn.Parameter):
        self._enter_backward()
        self.schedule.reach("reduce", self.trained[whole])

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients. Call it after backward(), before optimizer.step()."""
        if self.schedule.phase != "backward":
            self.schedule.begin("backward")  # all ranks do, whether they had a loss or not
        try:
            self.schedule.end(bool(self.schedule.recording))
            average(self.replicated, self.process_group)
            self.schedule.end_reductions()
            for unit, mean in self.schedule.means:
                unit.shard.grad = mean if unit.shard.grad is None else unit.shard.grad + mean
        finally:
            self.schedule.start_over()

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """{name in the wrapped module: the whole parameter}: copies, on every rank."""
        units = {unit.shard: unit for unit in self.schedule.units}
        params = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            params[name] = parameter.clone()
            if parameter in units:
                whole = parameter.new_empty(len(units[parameter].room))
                dist.all_gather_into_tensor(whole, parameter, group=self.process_group)
                shape = units[parameter].shape
                params[name] = whole[: shape.numel()].view(shape)
        return params

    @torch.no_grad()
    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of what gather_full_params() returned, there on any ranks."""
        units = {unit.shard: unit for unit in self.schedule.units}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            value = params[name]
            expected = units[parameter].shape if parameter in units else parameter.shape
            if value.shape != expected:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, not {tuple(expected)}")
            parameter.copy_(units[parameter].part_of(value) if parameter in units else value)


def one_gather_ahead(recorded: list) -> list:
    """Every gather moves up by one: from G1 R1 G2 R2 G3 R3 to G1 G2 R1 G3 R2 R3."""
    gathers = deque(step for step in recorded if step[0] == "gather")
    moved = []
    for step in [("gather", None), *recorded]:  # at the start there is room for one more
        if step[0] == "reduce":
            moved.append(step)
        elif gathers:
            moved.append(gathers.popleft())
    return moved


def differentiable(outputs) -> list[torch.Tensor]:
    """Tensors of which backward has the gradient just before it reads the weight."""
    tensors = [one for one in tree_leaves(outputs) if torch.is_tensor(one) and one.grad_fn]
    # Of a view the base, because a change in place cuts the view off.
    tensors = [t._base if t._is_view() and t._base.grad_fn else t for t in tensors]
    return [tensor for tensor in tensors if not looks_up_rows(tensor.grad_fn)]


def looks_up_rows(node) -> bool:
    """Whether it takes rows of a parameter, as Embedding does: backward does not read those."""
    takes_rows = type(node).__name__ in ("EmbeddingBackward0", "IndexBackward0")
    return takes_rows and type(node.next_functions[0][0]).__name__ == "AccumulateGrad"


def cast(value, dtype: torch.dtype | None):
    """In this dtype, if it is a tensor of floating-point numbers and a dtype is given."""
    if dtype and torch.is_tensor(value) and value.is_floating_point():
        return value.to(dtype)
    return value


def compute_in_own_dtype(part: nn.Module, inputs: tuple, kwargs: dict):
    """Before the forward of a module that is replicated: its inputs get its parameters' dtype."""
    own = next(part.parameters(recurse=False)).dtype
    return tree_map(partial(cast, dtype=own), (inputs, kwargs))


def broadcast_from_rank_0(module: nn.Module, process_group) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, group=process_group, group_src=0)
        tensor.detach().copy_(dense)


def average(parameters: list[nn.Parameter], process_group) -> None:
    """Average gradients with one all-reduce per dtype, with zeros for what was not used."""
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        same = [p for p in parameters if p.dtype == dtype]
        for parameter in [p for p in same if p.grad is None]:
            parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.flatten() for p in same]).div_(dist.get_world_size(process_group))
        dist.all_reduce(flat, group=process_group)
        for parameter, mean in zip(same, flat.split([p.numel() for p in same]), strict=True):
            parameter.grad.copy_(mean.view(parameter.shape))


def clip_grad_norm(model: FSDP, max_norm: float) -> torch.Tensor:
    """After the finish: scale all gradients to a norm of at most max_norm; returns what it was."""
    shards = [unit.shard.grad for unit in model.trained.values()]
    others = [parameter.grad for parameter in model.replicated]
    square = torch.stack(torch._foreach_norm(shards)).square().sum()
    dist.all_reduce(square, group=model.process_group)  # the rest counts once: all ranks have it
    norm = (square + sum(gradient.square().sum() for gradient in others)).sqrt()
    torch._foreach_mul_([*shards, *others], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


# ==================================================================================================
# Below this line: guards and main. What main verifies and measures is in fsdp_measure.py.


def owns_matrix(part: nn.Module) -> bool:
    """What FSDP shards by default: a module with a matrix called `weight`, whose forward runs."""
    weight = part._parameters.get("weight")
    # MultiheadAttention takes the weight of its out_proj, but never calls it.
    runs = not isinstance(part, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return weight is not None and weight.ndim == 2 and runs


def check_module(module: nn.Module, process_group, shard) -> dict[nn.Parameter, str]:
    """{weight that `shard` chooses: its name}; ValueError, on all ranks, if there is a mistake."""
    if dist.get_rank(process_group) < 0:
        raise ValueError("this rank is not a member of process_group: wrap on its members only")
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors.values()):
        raise ValueError("a lazy module has no shapes yet: run one forward before you wrap it")
    by_class = isinstance(shard, type | tuple)
    chosen, parts = {}, {}
    for name, part in module.named_modules():
        is_chosen = isinstance(part, shard) if by_class else (shard or owns_matrix)(part)
        if is_chosen and part._parameters.get("weight") is not None:
            parts[name] = part
            chosen.setdefault(part.weight, f"{name}.weight".lstrip("."))
    mine = []
    for name, one in tensors.items():
        kind = f"{tuple(one.shape)} {one.dtype} requires_grad={one.requires_grad}"
        mine.append(f"{name} {kind} sharded={one in chosen}")
    check_same(mine, process_group, ValueError, "models differ")
    if any(hasattr(part, "finish_gradient_synchronization") for part in module.modules()):
        raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
    if not chosen:
        raise ValueError("there is no weight to shard: `shard` chooses no module that owns one")
    for name, part in parts.items():
        if getattr(part, "sparse", False) or getattr(part, "max_norm", None) is not None:
            raise ValueError(f"{name}: sparse gradients and max_norm are not supported")
    return chosen


def check_forward(model: FSDP) -> None:
    if model.schedule.phase == "backward":
        raise RuntimeError("call finish_gradient_synchronization() after every backward()")
    if model._layout() != model.layout:
        raise RuntimeError("parameters were frozen, thawed, replaced, moved or cast: wrap again")


def check_step(schedule: Schedule, kind: str, unit: Unit) -> None:
    """RuntimeError before a step that the other ranks would not expect."""
    if unit in schedule.reduced:
        raise RuntimeError(f"{unit.name}: backward() ran twice: finish in between")
    if schedule.recording is None and (kind, unit) not in schedule.coming:
        first = f"it comes later or more often than in the first {schedule.phase}"
        raise RuntimeError(f"{kind} {unit.name}: {first}; schedule.recorded.clear() records anew")


def check_same(mine: list[str], process_group, error: type, what: str) -> None:
    """Raise this error on all ranks if their lists differ; it names the first difference."""
    everyones = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyones, mine, group=process_group)
    for rank, theirs in enumerate(everyones):
        for expected, found in zip_longest(everyones[0], theirs, fillvalue="nothing"):
            if expected != found:
                raise error(f"{what}: rank 0 has {expected}, rank {rank} has {found}")


def check_agreement(schedule: Schedule, step: str) -> None:
    """While a schedule is recorded: RuntimeError on all ranks if their next steps differ."""
    what = "in the first step all ranks must use the same layers in the same order"
    check_same([f"{step}, {schedule.phase}"], schedule.process_group, RuntimeError, what)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import fsdp_measure as measure

        from common import setup
    except ModuleNotFoundError as error:
        needed = "copy the repository's folder common/ and fsdp_*.py beside this script"
        sys.exit(f"error: {error}: {needed}")

    parser = setup.Parser(__doc__)
    measure.add_arguments(parser)
    measure.run(parser, FSDP)


if __name__ == "__main__":
    main()
