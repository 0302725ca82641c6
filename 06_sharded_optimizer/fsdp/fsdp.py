r"""06, FSDP: split parameters, gradients and optimizer state over the ranks (ZeRO, stage 3).

Every rank keeps 1/N of each weight, of its gradient and of its optimizer state. A weight is put
together (all-gather) while the layer before it computes, and given up after use; backward does
the same in reverse, and adds up each gradient (reduce-scatter) as soon as it is complete.

    make 06_sharded_optimizer/fsdp NPROC=2                                (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp/fsdp.py            (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/fsdp/fsdp.py                               (two hosts; R is 0 on HOST0)

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
        self.name = name
        self.shape = weight.shape
        self.process_group = process_group
        self.dtype = compute_dtype or weight.dtype
        mine = self.parts(weight.detach())[dist.get_rank(process_group)].clone()
        self.shard = nn.Parameter(mine, weight.requires_grad)

    def parts(self, whole: torch.Tensor) -> torch.Tensor:
        """[world_size, length]: the shards of all ranks; zeros fill up the last."""
        world_size = dist.get_world_size(self.process_group)
        flat = whole.flatten()
        missing = -flat.numel() % world_size
        if missing:
            flat = F.pad(flat, (0, missing))
        return flat.view(world_size, -1)

    def gather(self, dtype: torch.dtype) -> "Gathering":
        """Begin to put it together in this dtype."""
        return Gathering(self, dtype)

    def reduce(self, gradient: torch.Tensor) -> "Reduction":
        """Begin to add up the gradient of the whole weight."""
        return Reduction(self, gradient)


class Gathering:
    """A weight on its way to all ranks: wait() returns the whole."""

    def __init__(self, unit: Unit, dtype: torch.dtype):
        self.shape = unit.shape
        self.sent = unit.shard.detach().to(dtype)  # what travels must outlive the work
        world_size = dist.get_world_size(unit.process_group)
        self.room = self.sent.new_empty(len(self.sent) * world_size)
        self.work = all_gather_single(self.room, self.sent, unit.process_group, async_op=True)

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.room[: self.shape.numel()].view(self.shape)


class Reduction:
    """A gradient on its way to the owners of its parts: wait() adds the mean to shard.grad.

    By all-to-all, as gloo's reduce_scatter is an all-reduce, of twice the bytes: every rank gets
    all ranks' gradients of its shard, and adds them up itself, in the shard's dtype.
    """

    def __init__(self, unit: Unit, gradient: torch.Tensor):
        self.shard = unit.shard
        self.sent = unit.parts(gradient)  # what travels must outlive the work
        self.received = torch.empty_like(self.sent)
        self.work = dist.all_to_all_single(
            self.received, self.sent, group=unit.process_group, async_op=True
        )

    def wait(self) -> None:
        self.work.wait()
        world_size = len(self.received)
        mean = self.received[0].to(self.shard.dtype) / world_size
        for gradient in self.received[1:]:
            mean.add_(gradient, alpha=1 / world_size)
        if self.shard.grad is not None:
            mean = self.shard.grad + mean
        self.shard.grad = mean


class Schedule:
    """What all ranks do, in which order: recorded as each phase first runs, then kept to."""

    def __init__(self, prefetch: bool, process_group):
        self.prefetch = prefetch
        self.process_group = process_group
        self.recorded = {}  # phase -> [("gather" or "reduce", unit)]
        self.phase = None  # forward, backward or inference, while one runs
        self.complete = False  # nothing has interrupted the phase
        self.done = []  # the steps of this phase, as in `recorded`
        self.coming = deque()  # those that are recorded and still to be taken
        self.held = {}  # address -> unit, of the whole weights that modules have right now
        self.ahead = None  # the Gathering of the next weight
        self.reduction = None  # the Reduction in flight; there is only one

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.complete = False
        self.done = []
        self.coming = deque(self.recorded.get(phase, ()))
        self.held = {}

    def enter_backward(self) -> None:
        check_backward(self)
        if self.phase is None:
            self.begin("backward")
            call_after_backward(self.succeed)

    def succeed(self) -> None:
        self.complete = True

    def reach(self, kind: str, unit: Unit, gradient: torch.Tensor | None = None):
        """Take this step, but first all that come before it: whatever this rank does with them."""
        check_step(self, kind, unit)
        while self.coming:
            step = self.coming.popleft()
            if step == (kind, unit):
                break
            self.take(*step)
        return self.take(kind, unit, gradient)

    def take(self, kind: str, unit: Unit, gradient: torch.Tensor | None = None):
        """Gather a weight and return it, the next one on its way; or begin to reduce a gradient."""
        self.done.append((kind, unit))
        if kind == "gather":
            gathering = self.ahead or unit.gather(unit.dtype)
            whole = gathering.wait()
            following = self.next_gathered()
            self.ahead = following.gather(following.dtype) if following else None
            return whole
        self.finish_reduction()
        if gradient is None:  # this rank did not use the weight
            gradient = unit.shard.new_zeros(unit.shape, dtype=unit.dtype)
        self.reduction = unit.reduce(gradient)

    def next_gathered(self) -> Unit | None:
        """The weight to fetch while the one before it is used."""
        if self.prefetch:
            for kind, unit in self.coming:
                if kind == "gather":
                    return unit
        return None

    def finish_reduction(self) -> None:
        reduction = self.reduction
        self.reduction = None
        if reduction:
            reduction.wait()

    def end(self) -> None:
        """Take the steps that this rank did not need, so that all ranks take the same."""
        while self.coming:
            self.take(*self.coming.popleft())
        self.finish_reduction()
        phase = self.phase
        self.phase = None
        if phase not in self.recorded and (self.complete or phase == "backward"):
            check_agreement(self, f"the end, {phase}")
        if self.complete:
            self.recorded[phase] = self.done

    def pack(self, tensor: torch.Tensor):
        """What autograd keeps for backward: of a whole weight only which one it is."""
        if tensor.layout == torch.strided:
            unit = self.held.get(tensor.untyped_storage().data_ptr())
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
        ctx.schedule = schedule
        ctx.unit = unit
        ctx.reduced_in = None  # the list of steps in which backward has reduced it
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
        self.module = module
        self.process_group = process_group
        chosen = check_module(module, process_group, shard)
        broadcast_from_rank_0(module, process_group)
        self.schedule = Schedule(prefetch, process_group)
        self.replicated = []
        for parameter in module.parameters():
            if parameter.requires_grad and parameter not in chosen:
                self.replicated.append(parameter)
        units = {}  # weight -> Unit
        for weight, name in chosen.items():
            units[weight] = Unit(name, weight, compute_dtype, process_group)
        for part in module.modules():
            self._put_shards_into(part, units, compute_dtype)
        self.units = {unit.shard: unit for unit in units.values()}
        self.layout = layout(module)

    def _put_shards_into(self, part: nn.Module, units: dict, compute_dtype) -> None:
        """Replace a module's chosen weights by their shards; hooks hide these while it computes."""
        own = {key: p for key, p in part._parameters.items() if p is not None}
        shards = {key: units[p].shard for key, p in own.items() if p in units}
        part._parameters.update(shards)
        if shards:
            dtype = compute_dtype
        elif own and compute_dtype:  # its inputs may come from a module that is sharded
            dtype = next(iter(own.values())).dtype
        else:
            return
        before = partial(self._before_forward, dtype)
        part.register_forward_pre_hook(before, with_kwargs=True)
        part.register_forward_hook(self._after_forward, always_call=True)

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
            unit = self.units.get(parameter)
            if unit:
                whole = Gather.apply(parameter, self.schedule, unit)
                self.schedule.held[whole.untyped_storage().data_ptr()] = unit
                part.__dict__[key] = whole
            else:
                part.__dict__[key] = cast(parameter, dtype)
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
            if unit:
                params[name] = unit.gather(parameter.dtype).wait()
            else:
                params[name] = parameter.clone()
        return params

    @torch.no_grad()
    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of what gather_full_params() returned, there on any ranks."""
        rank = dist.get_rank(self.process_group)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            unit = self.units.get(parameter)
            check_shape(name, params[name], unit or parameter)
            value = params[name]
            if unit:
                value = unit.parts(value)[rank]
            parameter.copy_(value)


def cast(value, dtype: torch.dtype | None):
    """In this dtype, if it is a tensor of floating-point numbers and a dtype is given."""
    if dtype and torch.is_tensor(value) and value.is_floating_point():
        return value.to(dtype)
    return value


def clip_grad_norm(model: FSDP, max_norm: float) -> torch.Tensor:
    """After the finish: scale all gradients to a norm of at most max_norm; returns what it was."""
    shards = [shard for shard in model.units if shard.requires_grad]
    square = nn.utils.get_total_norm([shard.grad for shard in shards]).square()
    dist.all_reduce(square, group=model.process_group)
    # The rest counts once: all ranks have it.
    square += nn.utils.get_total_norm([other.grad for other in model.replicated]).square()
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_([*shards, *model.replicated], max_norm, norm)
    return norm


# ==================================================================================================
# Below this line: what stages 02 and 03 teach, guards, and main. verify and the benchmark are
# in measure.py, the table of the memory is in memory.py.


# Private in torch, which has no public name for either; nothing else here calls them.


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function) -> None:
    """Call it when the backward that runs now has succeeded."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


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
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat.div_(dist.get_world_size(process_group)), group=process_group)
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def owns_matrix(part: nn.Module) -> bool:
    """What FSDP shards by default: a module with a matrix called `weight`, whose forward runs."""
    weight = part._parameters.get("weight")
    # MultiheadAttention takes the weight of its out_proj, but never calls it.
    runs = not isinstance(part, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return weight is not None and weight.ndim == 2 and runs


def is_chosen(part: nn.Module, shard) -> bool:
    """What the option `shard` says of a module: by class, by a function, or by default."""
    if isinstance(shard, type | tuple):
        return isinstance(part, shard)
    return (shard or owns_matrix)(part)


def check_module(module: nn.Module, process_group, shard) -> dict[nn.Parameter, str]:
    """{weight that `shard` chooses: its name}; ValueError, on all ranks, if there is a mistake."""
    if dist.get_rank(process_group) < 0:
        raise ValueError("this rank is not a member of process_group: wrap on its members only")
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors.values()):
        raise ValueError("a lazy module has no shapes yet: run one forward before you wrap it")
    chosen = {}
    parts = {}  # name -> module
    for name, part in module.named_modules():
        if is_chosen(part, shard) and part._parameters.get("weight") is not None:
            parts[name] = part
            chosen.setdefault(part.weight, f"{name}.weight".lstrip("."))
    mine = []
    for name, tensor in tensors.items():
        kind = f"{tuple(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad}"
        mine.append(f"{name} {kind} sharded={tensor in chosen}")
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
    if not in_backward():
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
    of_ranks = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(of_ranks, mine, group=process_group)
    for rank, theirs in enumerate(of_ranks):
        for expected, found in zip_longest(of_ranks[0], theirs, fillvalue="nothing"):
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
        import memory

        from common import report, setup
    except ModuleNotFoundError as error:
        needed = "copy the repository's folder common/, sharded_optimizer.py and the files beside"
        sys.exit(f"error: {error}: {needed} fsdp.py, too")

    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, measure.SIZES, steps=6)
    setup.add_verify_arguments(parser)
    setup.add_plot_arguments(parser, "fsdp.png")
    parser.set_defaults(warmup=3)  # five candidates, and all within a minute
    add = parser.add_argument
    add("--no-prefetch", action="store_true", help="gather a weight when it is needed, not before")
    add("--compute-dtype", choices=["float16", "bfloat16"], help="in which FSDP's layers compute")
    add("--no-memory", action="store_true", help="no table and picture of the memory")
    args = parser.parse_args()
    if args.save and args.no_verify:
        parser.error("argument --save: not with --no-verify, which trains no classifier")
    if args.no_memory and args.plot and args.plot != parser.get_default("plot"):
        parser.error("argument --plot: not with --no-memory, which leaves nothing to draw")

    wrap = partial(FSDP, prefetch=not args.no_prefetch)
    with setup.process_group(args) as device:
        result = report.begin("06_sharded_optimizer/fsdp", args, device)
        replicas = 1 if args.no_baseline else 4
        model = report.describe(measure.LanguageModel, measure.SIZES, args, replicas)
        result["model"] = model
        result["verify"] = None
        if not args.no_verify:
            result["verify"] = measure.verify(args, device, wrap)
        if not args.no_memory:
            result["memory_bytes"] = memory.account(args, device, wrap)
            memory.show(result, args.plot)
        batch_shape = model["batch_size"], model["context_length"]
        result["candidates"] = measure.benchmark(args, device, batch_shape, wrap)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
