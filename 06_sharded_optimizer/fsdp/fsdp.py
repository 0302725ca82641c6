r"""06, FSDP: split parameters, gradients and optimizer state over the ranks (ZeRO, stage 3).

Every rank keeps 1/N of each weight, of its gradient and of its optimizer state. A weight is put
together (all-gather) while the layer before it computes, and given up after use; backward does
the same in reverse, and adds up each gradient (reduce-scatter) as soon as it is complete.

    make 06_sharded_optimizer/fsdp NPROC=2                                (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp/fsdp.py            (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/fsdp/fsdp.py                                (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO", SC 2020, sections 5.2 and 5.3; Zhao et al., "PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Stanford CS336, assignment 2 (2026).
"""

import sys
from collections import deque
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

# torch 2.13 has renamed it, and warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Unit:
    """A weight that is split: this rank's flat shard, and how the whole is gathered and reduced."""

    def __init__(self, name: str, weight: nn.Parameter, compute_dtype, process_group):
        self.name, self.shape, self.process_group = name, weight.shape, process_group
        self.dtype = compute_dtype or weight.dtype
        mine = self.parts(weight.detach())[dist.get_rank(process_group)].clone()
        self.shard = nn.Parameter(mine, weight.requires_grad)

    def parts(self, whole: torch.Tensor) -> torch.Tensor:
        """[world_size, length]: the shards of all ranks; zeros fill up the last."""
        world_size = dist.get_world_size(self.process_group)
        flat, missing = whole.flatten(), -whole.numel() % world_size
        return (F.pad(flat, (0, missing)) if missing else flat).view(world_size, -1)

    def gather(self, dtype: torch.dtype):
        """Begin to put it together in this dtype; returns a function that waits for the whole."""
        mine = self.shard.detach().to(dtype)
        room = mine.new_empty(len(mine) * dist.get_world_size(self.process_group))
        work = all_gather_single(room, mine, self.process_group, async_op=True)

        def end(sent=mine):  # what travels must outlive the work
            work.wait()  # the caller has the only reference to the room: without it, it is free
            return room[: self.shape.numel()].view(self.shape)

        return end

    def reduce(self, gradient: torch.Tensor):
        """Begin to add up the gradient; returns a function that adds the mean to shard.grad.

        By all-to-all, as gloo's reduce_scatter is an all-reduce, of twice the bytes: every rank
        gets all ranks' gradients of its shard, and adds them up itself, in the shard's dtype.
        """
        mine = self.parts(gradient)
        received = torch.empty_like(mine)
        work = dist.all_to_all_single(received, mine, group=self.process_group, async_op=True)

        def end(sent=mine):
            work.wait()
            mean = received[0].to(self.shard.dtype) / len(received)
            for other in received[1:]:
                mean.add_(other, alpha=1 / len(received))
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean

        return end


class Schedule:
    """What all ranks do, in which order: recorded as each phase first runs, then kept to."""

    def __init__(self, prefetch: bool, process_group):
        self.prefetch, self.process_group = prefetch, process_group
        self.recorded = {}  # forward, backward or inference -> [("gather" or "reduce", unit)]
        self.phase, self.ahead, self.reducing = None, None, []

    def begin(self, phase: str) -> None:
        self.phase, self.done, self.complete = phase, [], False
        self.coming = deque(self.recorded.get(phase, ()))
        self.held = {}  # address -> unit, of the whole weights that modules have right now

    def enter_backward(self) -> None:
        check_backward(self)
        if self.phase is None:
            self.begin("backward")
            succeeded = partial(setattr, self, "complete", True)
            torch.autograd.Variable._execution_engine.queue_callback(succeeded)

    def reach(self, kind: str, unit: Unit, gradient: torch.Tensor | None = None):
        """Take this step, but first all that come before it: whatever this rank does with them."""
        check_step(self, kind, unit)
        while self.coming and (step := self.coming.popleft()) != (kind, unit):
            self.take(*step)
        return self.take(kind, unit, gradient)

    def take(self, kind: str, unit: Unit, gradient: torch.Tensor | None = None):
        """Gather a weight and return it, the next one on its way; or begin to reduce a gradient."""
        self.done.append((kind, unit))
        if kind == "gather":
            whole = (self.ahead or unit.gather(unit.dtype))()
            gathers = (one for kind, one in self.coming if kind == "gather" and self.prefetch)
            following = next(gathers, None)
            self.ahead = following and following.gather(following.dtype)
            return whole
        while self.reducing:  # so that only one is in flight
            self.reducing.pop()()
        if gradient is None:  # this rank did not use the weight
            gradient = unit.shard.new_zeros(unit.shape, dtype=unit.dtype)
        self.reducing.append(unit.reduce(gradient))

    def end(self) -> None:
        """Take the steps that this rank did not need, so that all ranks take the same."""
        while self.coming:
            self.take(*self.coming.popleft())
        while self.reducing:
            self.reducing.pop()()
        phase, self.phase = self.phase, None
        if phase not in self.recorded and (self.complete or phase == "backward"):
            check_agreement(self, f"the end, {phase}")
        if self.complete:
            self.recorded[phase] = self.done

    def pack(self, tensor: torch.Tensor):
        """What autograd keeps for backward: of a whole weight only which one it is."""
        is_dense = tensor.layout == torch.strided
        unit = self.held.get(tensor.untyped_storage().data_ptr()) if is_dense else None
        if unit and tensor.dtype == unit.dtype:
            return unit, (tensor.shape, tensor.stride(), tensor.storage_offset())
        return tensor.detach(), tensor._version

    def unpack(self, packed) -> torch.Tensor:
        kept, how = packed
        if isinstance(kept, Unit):
            self.enter_backward()
            return self.reach("gather", kept).as_strided(*how)
        check_version(kept, how)
        return kept


class Gather(torch.autograd.Function):
    """From a shard to the whole weight; backward, from the gradient of that to the shard's."""

    @staticmethod
    def forward(ctx, shard, schedule, unit):
        ctx.schedule, ctx.unit, ctx.reduced_in = schedule, unit, None
        return schedule.reach("gather", unit)

    @staticmethod
    def backward(ctx, gradient):
        ctx.schedule.enter_backward()
        check_gradient(ctx, gradient)
        ctx.reduced_in = ctx.schedule.done
        ctx.schedule.reach("reduce", ctx.unit, gradient)
        return None, None, None  # the shard gets its gradient when the reduction ends


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
        self.module, self.process_group = module, process_group
        chosen = check_module(module, process_group, shard)
        broadcast_from_rank_0(module, process_group)

        units = {w: Unit(name, w, compute_dtype, process_group) for w, name in chosen.items()}
        self.schedule = Schedule(prefetch, process_group)
        self.replicated = [p for p in module.parameters() if p.requires_grad and p not in units]
        for part in module.modules():
            own = {key: p for key, p in part._parameters.items() if p is not None}
            shards = {key: units[p].shard for key, p in own.items() if p in units}
            part._parameters.update(shards)
            if shards or (own and compute_dtype):
                dtype = compute_dtype if shards else [*own.values()][0].dtype
                before = partial(self._before_forward, dtype)
                part.register_forward_pre_hook(before, with_kwargs=True)
                part.register_forward_hook(self._after_forward, always_call=True)
        self.units = {unit.shard: unit for unit in units.values()}
        self.layout = layout(module)

    def forward(self, *inputs, **kwargs):
        check_forward(self)
        self.schedule.begin("forward" if torch.is_grad_enabled() else "inference")
        try:
            with saved_tensors_hooks(self.schedule.pack, self.schedule.unpack):
                outputs = self.module(*inputs, **kwargs)
            self.schedule.complete = True
        finally:
            self.schedule.end()
        return outputs

    def _before_forward(self, dtype, part: nn.Module, inputs: tuple, kwargs: dict):
        """Hide the shard behind the whole weight: attributes are found before parameters."""
        if self.schedule.phase not in ("forward", "inference"):
            # A checkpoint is computed again. It keeps all weights of its part until they are used.
            self.schedule.enter_backward()
        for key, parameter in part._parameters.items():
            if unit := self.units.get(parameter):
                whole = Gather.apply(parameter, self.schedule, unit)
                self.schedule.held[whole.untyped_storage().data_ptr()] = unit
            part.__dict__[key] = whole if unit else cast(parameter, dtype)
        return tree_map(partial(cast, dtype=dtype), (inputs, kwargs))

    def _after_forward(self, part: nn.Module, *_):
        for key in part._parameters:
            hidden = part.__dict__.pop(key, None)
            if hidden is not None:
                self.schedule.held.pop(hidden.untyped_storage().data_ptr(), None)

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients. Call it after backward(), before optimizer.step()."""
        if self.schedule.phase is None:
            self.schedule.begin("backward")  # all ranks do, whether they had a loss or not
        self.schedule.end()
        give_zeros_to_unused(self.module)
        average(self.replicated, self.process_group)

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """{name in the wrapped module: the whole parameter}: copies, on every rank."""
        params = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            unit = self.units.get(parameter)
            params[name] = unit.gather(parameter.dtype)() if unit else parameter.clone()
        return params

    @torch.no_grad()
    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of what gather_full_params() returned, there on any ranks."""
        rank = dist.get_rank(self.process_group)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            unit = self.units.get(parameter)
            check_shape(name, params[name], unit or parameter)
            parameter.copy_(unit.parts(params[name])[rank] if unit else params[name])


def cast(value, dtype: torch.dtype | None):
    """In this dtype, if it is a tensor of floating-point numbers and a dtype is given."""
    if dtype and torch.is_tensor(value) and value.is_floating_point():
        return value.to(dtype)
    return value


def clip_grad_norm(model: FSDP, max_norm: float) -> torch.Tensor:
    """After the finish: scale all gradients to a norm of at most max_norm; returns what it was."""
    shards = [shard.grad for shard in model.units if shard.requires_grad]
    others = [parameter.grad for parameter in model.replicated]
    square = torch.stack(torch._foreach_norm(shards)).square().sum()
    dist.all_reduce(square, group=model.process_group)  # the rest counts once: all ranks have it
    norm = (square + sum(gradient.square().sum() for gradient in others)).sqrt()
    torch._foreach_mul_([*shards, *others], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


# ==================================================================================================
# Below this line: what stages 02 and 03 teach, guards, and main. It measures in measure.py.


def broadcast_from_rank_0(module: nn.Module, process_group) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, group=process_group, group_src=0)
        tensor.detach().copy_(dense)


def give_zeros_to_unused(module: nn.Module) -> None:
    """A gradient of zeros for each parameter that this rank did not use."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def average(parameters: list[nn.Parameter], process_group) -> None:
    """Average gradients with one all-reduce per dtype."""
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        gradients = [p.grad for p in parameters if p.dtype == dtype]
        flat = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(flat.div_(dist.get_world_size(process_group)), group=process_group)
        means = flat.split([one.numel() for one in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


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


def layout(module: nn.Module) -> list[tuple]:
    return [(id(p), p.requires_grad, p.dtype, p.device) for p in module.parameters()]


def check_forward(model: FSDP) -> None:
    if model.schedule.phase == "backward":
        raise RuntimeError("call finish_gradient_synchronization() after every backward()")
    if layout(model.module) != model.layout:
        raise RuntimeError("parameters were frozen, thawed, replaced, moved or cast: wrap again")


def check_backward(schedule: Schedule) -> None:
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError("the weights are sharded: call the FSDP model, not a part of it")
    if schedule.phase in ("forward", "inference"):
        raise RuntimeError("backward() inside of forward is not supported")


def check_gradient(ctx: Gather, gradient: torch.Tensor) -> None:
    if gradient.requires_grad:
        raise RuntimeError("backward(create_graph=True) is not supported")
    if ctx.reduced_in is ctx.schedule.done:
        ctx.schedule.complete = False  # what was recorded is more than one backward
        raise RuntimeError(f"{ctx.unit.name}: backward() ran twice: finish in between")


def check_version(kept: torch.Tensor, version: int) -> None:
    """What autograd checks by itself, but not where there are hooks for what it keeps."""
    if kept._version != version:
        shape = tuple(kept.shape)
        raise RuntimeError(f"a tensor {shape} that backward needs was changed in place after use")


def check_shape(name: str, value: torch.Tensor, expected: Unit | nn.Parameter) -> None:
    if value.shape != expected.shape:
        shapes = f"{tuple(value.shape)}, not {tuple(expected.shape)}"
        raise ValueError(f"{name} has shape {shapes}")


def check_step(schedule: Schedule, kind: str, unit: Unit) -> None:
    """RuntimeError before a step that the other ranks would not expect."""
    if schedule.phase not in schedule.recorded:
        check_agreement(schedule, f"{kind} {unit.name}, {schedule.phase}")
    elif schedule.phase == "backward" and not schedule.coming:
        raise RuntimeError(f"{unit.name}: backward() ran twice: finish in between")
    elif (kind, unit) not in schedule.coming:
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
    check_same([step], schedule.process_group, RuntimeError, what)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent), str(folder.parent.parent)]
    try:
        import measure

        from common import setup
    except ModuleNotFoundError as error:
        needed = "copy the repository's folder common/, sharded_optimizer.py and the files beside fsdp.py, too"
        sys.exit(f"error: {error}: {needed}")

    parser = setup.Parser(__doc__)
    measure.add_arguments(parser)
    measure.run(parser, FSDP)


if __name__ == "__main__":
    main()
