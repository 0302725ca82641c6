r"""06, FSDP: split parameters, gradients and optimizer state over the ranks (ZeRO, stage 3).

Every rank keeps 1/N of each weight, of its gradient and of its optimizer state. A weight is put
together (all-gather) while the module before it computes, and given up after use; backward does
the same in reverse, and adds up each gradient (reduce-scatter) as soon as it is complete.

    make 06_sharded_optimizer/fsdp NPROC=2                                (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp/fsdp.py            (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/fsdp/fsdp.py                               (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO", SC 2020, sections 5.2 and 5.3; Zhao et al., "PyTorch FSDP",
VLDB 2023; Stanford CS336, assignment 2 (2026).
"""

import hashlib
import sys
from collections import deque
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook


class ShardedWeight:
    """A weight of which every rank keeps 1/N: this rank has `shard`, the parameter for it."""

    def __init__(self, name: str, module, weight: nn.Parameter, dtype, process_group):
        self.name = name
        self.module = module  # whose forward reads it
        self.shape = weight.shape
        self.dtype = dtype  # in which it travels
        self.process_group = process_group
        mine = self.split(weight.detach())[dist.get_rank(process_group)].clone()
        self.shard = nn.Parameter(mine, weight.requires_grad)

    def split(self, whole: torch.Tensor) -> torch.Tensor:
        """[world_size, 1, length]: a row for each rank, of a matrix; zeros fill up the end."""
        world_size = dist.get_world_size(self.process_group)
        flat = pad_to_multiple(world_size, whole.flatten())
        return flat.view(world_size, *[1] * (whole.ndim - 1), -1)


class Gathering:
    """A weight on its way to all ranks: wait() returns the whole."""

    def __init__(self, weight: ShardedWeight, dtype: torch.dtype):
        self.shape = weight.shape
        self.sent = weight.shard.detach().to(dtype).flatten()  # must outlive the work
        self.room = self.sent.new_empty(dist.get_world_size(weight.process_group) * len(self.sent))
        self.work = all_gather_single(self.room, self.sent, weight.process_group, async_op=True)

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.room[: self.shape.numel()].view(self.shape)


class Reduction:
    """A gradient on its way to the owners of its parts: wait() adds the mean to shard.grad."""

    def __init__(self, weight: ShardedWeight, gradient: torch.Tensor):
        self.shard = weight.shard
        # By all-to-all on gloo, which has no real one. What is sent must outlive the work.
        self.sent, self.received, self.work = begin_reduce_scatter(weight.split(gradient), weight)

    def wait(self) -> None:
        self.work.wait()
        mean = self.received.mean(0, dtype=self.shard.dtype)
        if self.shard.grad is not None:
            mean += self.shard.grad
        self.shard.grad = mean


class Gather(torch.autograd.Function):
    """From a shard to the whole weight; backward, from the gradient of that to the shard's."""

    @staticmethod
    def forward(ctx, shard, model, weight):
        ctx.model = model
        ctx.weight = weight
        return model.gather(weight)

    @staticmethod
    def backward(ctx, gradient):
        check_gradient(ctx, gradient)
        ctx.model.reduce(ctx.weight, gradient)
        return None, None, None  # the shard gets its gradient when the reduction ends


class FSDP(nn.Module):
    """Keep 1/N of each weight, of its gradient and of its optimizer state on N ranks.

    Biases and norms stay whole. parameters() has the shards: construct the optimizer afterwards.
    In `compute_dtype` weights travel, and the modules that have some compute; gradients are added
    up in the weight's own. ValueError, RuntimeError: what cannot be done.
    """

    def __init__(self, module, compute_dtype=None, process_group=None, prefetch=True):
        super().__init__()
        check_module(module, process_group)
        broadcast_from_rank_0(module, process_group)
        self.module = module
        self.process_group = process_group
        self.order = Order(self, prefetch)  # in which all ranks launch; a reader can skip it
        self.weights = put_shards_into(self, compute_dtype)  # shard -> ShardedWeight; adds hooks
        self.ahead = deque()  # the Gatherings of what the next module needs
        self.reduction = None  # the Reduction in flight; there is only one
        self.whole = {}  # identity -> ShardedWeight, of the whole weights that a forward has

    def forward(self, *inputs, **kwargs):
        check_forward(self)
        with self.order.forward(), saved_tensors_hooks(*with_versions(self.pack, self.unpack)):
            return self.module(*inputs, **kwargs)

    def before_forward(self, part: nn.Module, *_):
        """A hook. Hides each shard behind the whole weight: attributes come before parameters."""
        for owner, key, weight in sharded_in(self, part):
            whole = Gather.apply(weight.shard, self, weight)
            self.whole[identity(whole)] = weight
            owner.__dict__[key] = whole

    def after_forward(self, part: nn.Module, *_):
        """A hook. Lets go of the whole weights."""
        for owner, key, _ in read_by(part):
            if key in owner.__dict__:
                self.whole.pop(identity(owner.__dict__.pop(key)), None)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple:
        """What autograd keeps for backward: of a whole weight only which one it is."""
        weight = self.whole.get(identity(tensor))
        if weight is None or tensor.dtype != weight.dtype:
            return tensor.detach()
        return weight, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: torch.Tensor | tuple) -> torch.Tensor:
        """What backward needs: a weight is gathered again, all else is as it was kept."""
        if torch.is_tensor(kept):
            return kept
        weight, *view = kept
        return self.gather(weight).as_strided(*view)

    def gather(self, weight: ShardedWeight) -> torch.Tensor:
        """The whole weight; what the next module needs sets out meanwhile."""
        self.order.catch_up("gather", weight)
        gathering = self.ahead.popleft() if self.ahead else Gathering(weight, weight.dtype)
        whole = gathering.wait()
        for following in self.order.next_weights():
            self.ahead.append(Gathering(following, following.dtype))
        return whole

    def reduce(self, weight: ShardedWeight, gradient: torch.Tensor) -> None:
        """Begin to reduce a gradient; the one before it has arrived by then."""
        self.order.catch_up("reduce", weight)
        self.finish_reduction()
        self.reduction = Reduction(weight, gradient)

    def finish_reduction(self) -> None:
        if self.reduction:
            self.reduction.wait()
        self.reduction = None

    def finish_gradient_synchronization(self) -> None:
        """Complete all gradients. Call it after backward(), before optimizer.step()."""
        self.order.finish_backward()
        self.finish_reduction()
        average_replicated(self)  # biases, norms

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """The state_dict of the whole module, on every rank; all ranks must call it."""
        return full_state(self)

    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of what gather_full_params() returned on any number of ranks."""
        load_full_state(self, params)


# ==================================================================================================
# Below this line: the order, clipping and saving, what stages 02 and 03 teach, guards, and main.
# verify and the benchmark are in measure.py, the table of the memory is in memory.py.


class Order:
    """The same collectives in the same order on all ranks, also when these take other branches.

    Every phase (forward, backward, inference) is recorded when it first runs, and all ranks must
    then do the same. From then on every rank takes all steps of the record: those that it needs
    when it comes to them, others before them or at the end. What it gathers in vain it drops, and
    to a reduction it gives zeros.
    """

    def __init__(self, model: FSDP, prefetch: bool):
        self.model = model
        self.prefetch = prefetch
        self.recorded = {}  # phase -> [("gather" or "reduce", weight)]
        self.phase = None  # forward, backward or inference, while one runs
        self.complete = False  # nothing has interrupted the phase
        self.layout = None  # of the parameters, when they were sharded
        self.reduced = set()  # the Gathers whose backward ran in this phase
        self.done = []  # the steps of this phase, as in `recorded`
        self.coming = deque()  # those that are recorded and still to be taken

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.complete = False
        self.done = []
        self.reduced = set()
        self.coming = deque(self.recorded.get(phase, ()))
        self.model.whole.clear()

    @contextmanager
    def forward(self):
        """Around a forward of the whole model."""
        self.begin("forward" if torch.is_grad_enabled() else "inference")
        try:
            yield
            self.complete = True
        finally:
            self.end()

    def enter_module(self, *_) -> None:
        """A hook, before a module's forward. In backward a checkpoint is computed again."""
        if self.phase not in ("forward", "inference"):
            self.enter_backward()

    def enter_backward(self) -> None:
        """Before what only backward does; the first time, backward begins."""
        check_backward(self)
        if self.phase is None:
            self.begin("backward")
            call_after_backward(self.succeed)

    def succeed(self) -> None:
        self.complete = True

    def finish_backward(self) -> None:
        if self.phase is None:
            self.begin("backward")  # all ranks do, whether they had a loss or not
        self.end()

    def catch_up(self, kind: str, weight: ShardedWeight) -> None:
        """Before this step: take those that come first, whatever this rank does with them."""
        if self.phase is None or in_backward():
            self.enter_backward()
        check_step(self, kind, weight)
        while self.coming and self.coming[0] != (kind, weight):
            self.take(*self.coming[0])
        if self.coming:
            self.coming.popleft()
        self.done.append((kind, weight))

    def take(self, kind: str, weight: ShardedWeight) -> None:
        """A step that only other ranks need."""
        if kind == "gather":
            self.model.gather(weight)
        else:
            zeros = weight.shard.new_zeros(weight.shape, dtype=weight.dtype)
            self.model.reduce(weight, zeros)

    def next_weights(self) -> list[ShardedWeight]:
        """What the next module needs and is not on its way yet, as far as it is recorded."""
        if not self.prefetch:
            return []
        needed = []
        for weight in [weight for kind, weight in self.coming if kind == "gather"]:
            if weight in needed:
                break
            if needed and weight.module is not needed[0].module:
                break
            needed.append(weight)
        return needed[len(self.model.ahead) :]

    def __getstate__(self):
        raise RuntimeError("FSDP cannot be copied or pickled: gather_full_params() can be saved")

    def end(self) -> None:
        """Take the steps that this rank did not need; keep the record of a complete phase."""
        while self.coming:
            self.take(*self.coming[0])
        phase = self.phase
        self.phase = None
        if phase not in self.recorded and (self.complete or phase == "backward"):
            check_agreement(self, f"the end, {phase}")
        if self.complete:
            self.recorded[phase] = self.done


# torch has renamed them (2.13, 2.14), and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def pad_to_multiple(number: int, flat: torch.Tensor) -> torch.Tensor:
    missing = -len(flat) % number
    return F.pad(flat, (0, missing)) if missing else flat


def begin_reduce_scatter(sent: torch.Tensor, weight: ShardedWeight) -> tuple:
    """What each rank shall have: (what is sent, tensors whose mean is this rank's, work).

    gloo's reduce-scatter is an all-reduce, of twice the bytes. So there every rank gets all ranks'
    gradients of its shard. They are averaged in the shard's dtype either way.
    """
    group = weight.process_group
    if dist.get_backend(group) == "gloo":
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    else:
        sent = sent.to(weight.shard.dtype)
        received = torch.empty_like(sent[:1])
        average = dist.ReduceOp.AVG
        work = reduce_scatter_single(received, sent, average, group=group, async_op=True)
    return sent, received, work


def clip_grad_norm(model: FSDP, max_norm: float) -> torch.Tensor:
    """After the finish: scale all gradients to a norm of at most max_norm; returns what it was."""
    check_finished(model)
    square = sum_of_squares(model, model.weights)
    dist.all_reduce(square, group=model.process_group)
    square += sum_of_squares(model, replicated(model))  # once, because all ranks have them
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def sum_of_squares(model: FSDP, parameters) -> torch.Tensor:
    """Of their gradients, in float32 at least."""
    total = torch.zeros((), device=next(model.parameters()).device)
    for parameter in parameters:
        if parameter.requires_grad:
            dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
            total = total + torch.linalg.vector_norm(parameter.grad, dtype=dtype).square()
    return total


@torch.no_grad()
def full_state(model: FSDP) -> dict[str, torch.Tensor]:
    """Copies: of all parameters, whole, and of the buffers that a state_dict has."""
    state = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        weight = model.weights.get(parameter)
        if weight:
            state[name] = Gathering(weight, parameter.dtype).wait()
        else:
            state[name] = parameter.detach().clone()
    for name, buffer in persistent_buffers(model.module).items():
        state[name] = buffer.clone()
    return state


@torch.no_grad()
def load_full_state(model: FSDP, state: dict[str, torch.Tensor]) -> None:
    rank = dist.get_rank(model.process_group)
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        weight = model.weights.get(parameter)
        check_shape(name, state[name], weight or parameter)
        value = state[name]
        if weight:
            value = weight.split(value)[rank]
        parameter.copy_(value)
    for name, buffer in persistent_buffers(model.module).items():
        buffer.copy_(state[name])


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """{name: buffer}, of those that a state_dict has."""
    buffers = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}".lstrip(".")] = buffer
    return buffers


# Which parameters are sharded, and where they are read.


def put_shards_into(model: FSDP, compute_dtype) -> dict[nn.Parameter, ShardedWeight]:
    """Replace the weights of the wrapped module by shards, and have its hooks called.

    Returns {shard: ShardedWeight}.
    """
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    weights = {}  # the whole parameter -> ShardedWeight
    for part in model.module.modules():
        for _, _, parameter in read_by(part):
            if parameter.ndim >= 2 and parameter not in weights:
                dtype = parameter.dtype
                if compute_dtype and parameter.is_floating_point():
                    dtype = compute_dtype
                what = names[parameter], part, parameter, dtype
                weights[parameter] = ShardedWeight(*what, model.process_group)
    for part in model.module.modules():
        shards = {key: weights[p].shard for key, p in part._parameters.items() if p in weights}
        part._parameters.update(shards)
        if shards:  # one rank's part must not be saved and loaded as if it were all
            part.register_state_dict_pre_hook(refuse_to_save)
            part.register_load_state_dict_pre_hook(refuse_to_load)
    for part in filter(read_by, model.module.modules()):
        # The last one here is called first of all: other hooks may compute with the weight.
        if compute_dtype:
            part.register_forward_pre_hook(
                lambda *call: cast_the_rest(model, compute_dtype, *call),
                with_kwargs=True,
                prepend=True,
            )
        part.register_forward_pre_hook(model.before_forward, prepend=True)
        part.register_forward_pre_hook(model.order.enter_module, prepend=True)
        part.register_forward_hook(model.after_forward, always_call=True)
        if isinstance(part, nn.RNNBase):
            part.register_forward_hook(forget, always_call=True)
    for weight in weights.values():
        weight.shard.is_shard = True  # for refuse_optimizer
    model.order.layout = layout(model.module)
    return {weight.shard: weight for weight in weights.values()}


def read_by(part: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """What the forward of a module reads: (the module that owns a parameter, its name there, it).

    Its own parameters, and those of the modules within it that nobody calls: lists of parameters,
    and the projection in nn.MultiheadAttention, which takes that one's weight for itself.
    """
    found = [(part, key, p) for key, p in part._parameters.items() if p is not None]
    for name, child in part.named_children():
        never_called = type(child).forward is nn.Module.forward
        if isinstance(part, nn.MultiheadAttention) and name == "out_proj":
            never_called = True
        if never_called:
            found += read_by(child)
    return found


def sharded_in(model: FSDP, part: nn.Module) -> list[tuple[nn.Module, str, ShardedWeight]]:
    """As read_by: those that are sharded."""
    weights = model.weights
    return [(owner, key, weights[p]) for owner, key, p in read_by(part) if p in weights]


def replicated(model: FSDP) -> list[nn.Parameter]:
    """What every rank has whole: biases and norms."""
    return [parameter for parameter in model.module.parameters() if parameter not in model.weights]


def cast(value, dtype: torch.dtype):
    """In this dtype, if it is a tensor of floating-point numbers."""
    if torch.is_tensor(value) and value.is_floating_point():
        return value.to(dtype)
    return value


def cast_the_rest(model: FSDP, dtype, part: nn.Module, inputs: tuple, kwargs: dict) -> tuple:
    """A hook, for compute_dtype: the arguments of a module, and what it reads and is not sharded.

    A module without a weight, like a norm, computes in its own dtype.
    """
    parameters = read_by(part)
    if not sharded_in(model, part):
        dtype = parameters[0][2].dtype
    for owner, key, parameter in parameters:
        if parameter not in model.weights:
            owner.__dict__[key] = cast(parameter, dtype)
    inputs = tuple(cast(value, dtype) for value in inputs)
    return inputs, {key: cast(value, dtype) for key, value in kwargs.items()}


# Private in torch, which has no public name for any of these; nothing else here calls them.


def identity(tensor: torch.Tensor) -> int:
    """The same for all views of one memory, also on `meta`, where there is no address."""
    if tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage()._cdata


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function) -> None:
    """Call it when the backward that runs now has succeeded."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def forget(part: nn.RNNBase, *_) -> None:
    """A hook. A recurrent module has a list of its weights, too: have it made again."""
    part._init_flat_weights()


def broadcast_from_rank_0(module: nn.Module, process_group) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, group=process_group, group_src=0)
        tensor.detach().copy_(dense)


def average_replicated(model: FSDP) -> None:
    """With one all-reduce per dtype. What this rank did not use has a gradient of zeros."""
    for parameter in model.module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    group = model.process_group
    trained = [parameter for parameter in replicated(model) if parameter.requires_grad]
    for dtype in sorted({parameter.dtype for parameter in trained}, key=str):
        gradients = [parameter.grad for parameter in trained if parameter.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group)
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


# Guards.


def check_module(module: nn.Module, process_group) -> None:
    """ValueError, on all ranks, if the module cannot be wrapped."""
    if dist.get_rank(process_group) < 0:
        raise ValueError("this rank is not a member of process_group: wrap on its members only")
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors.values()):
        raise ValueError("a lazy module has no shapes yet: run one forward before you wrap it")
    mine = []
    for name, tensor in tensors.items():
        kind = f"{tuple(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad}"
        mine.append(f"{name} {kind}")
    check_same(mine, process_group, ValueError, "models differ")
    if any(hasattr(part, "finish_gradient_synchronization") for part in module.modules()):
        raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
    if not any(parameter.ndim >= 2 for parameter in module.parameters()):
        raise ValueError("there is no weight to shard: no parameter has two dimensions")
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) or getattr(part, "max_norm", None) is not None:
            raise ValueError(f"{name}: sparse gradients and max_norm are not supported")


def layout(module: nn.Module) -> list[tuple]:
    return [(id(p), p.requires_grad, p.dtype, p.device) for p in module.parameters()]


def check_forward(model: FSDP) -> None:
    if model.order.phase == "backward":
        raise RuntimeError("call finish_gradient_synchronization() after every backward()")
    if layout(model.module) != model.order.layout:
        raise RuntimeError("parameters were frozen, thawed, replaced, moved or cast: wrap again")


def check_backward(order: Order) -> None:
    if not in_backward():
        raise RuntimeError("the weights are sharded: call the FSDP model, not a part of it")
    if order.phase in ("forward", "inference"):
        raise RuntimeError("backward() inside of forward is not supported")


def check_gradient(ctx: Gather, gradient: torch.Tensor) -> None:
    order = ctx.model.order
    order.enter_backward()
    if gradient.requires_grad:
        raise RuntimeError("backward(create_graph=True) is not supported")
    if ctx in order.reduced:
        order.complete = False  # what was recorded is more than one backward
        raise RuntimeError(f"{ctx.weight.name}: backward() ran twice: finish in between")
    order.reduced.add(ctx)


def with_versions(pack, unpack) -> tuple:
    """These two hooks, with a check that autograd makes by itself, but not where there are hooks:
    that nobody has changed in the meantime what backward needs.
    """

    def pack_with_version(tensor):
        kept = pack(tensor)
        watched = kept if torch.is_tensor(kept) else kept[0].shard
        return kept, watched, watched._version

    def unpack_with_version(packed):
        kept, watched, version = packed
        if watched._version != version:
            if torch.is_tensor(kept):
                what = f"a tensor {tuple(kept.shape)} that backward needs"
                raise RuntimeError(f"{what} was changed in place after use")
            what = f"{kept[0].name} was changed between forward and backward"
            raise RuntimeError(f"{what}: optimizer.step() comes after backward()")
        return unpack(kept)

    return pack_with_version, unpack_with_version


def check_finished(model: FSDP) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if model.order.phase or any(parameter.grad is None for parameter in trained):
        raise RuntimeError("call finish_gradient_synchronization() before clip_grad_norm()")


def check_shape(name: str, value: torch.Tensor, expected: ShardedWeight | nn.Parameter) -> None:
    if value.shape != expected.shape:
        shapes = f"{tuple(value.shape)}, not {tuple(expected.shape)}"
        raise ValueError(f"{name} has shape {shapes}")


def check_step(order: Order, kind: str, weight: ShardedWeight) -> None:
    """RuntimeError before a step that the other ranks would not expect."""
    if order.phase not in order.recorded:
        check_agreement(order, f"{kind} {weight.name}, {order.phase}")
    elif order.phase == "backward" and not order.coming:
        raise RuntimeError(f"{weight.name}: backward() ran twice: finish in between")
    elif (kind, weight) not in order.coming:
        first = f"it comes later or more often than in the first {order.phase}"
        raise RuntimeError(f"{kind} {weight.name}: {first}; order.recorded.clear() records anew")


def check_same(mine: list[str], process_group, error: type, what: str) -> None:
    """Raise this error on all ranks if their lists differ; it names the first difference."""
    of_ranks = [None] * dist.get_world_size(process_group)
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    dist.all_gather_object(of_ranks, digest, group=process_group)
    if len(set(of_ranks)) == 1:
        return
    dist.all_gather_object(of_ranks, mine, group=process_group)
    for rank, theirs in enumerate(of_ranks):
        for expected, found in zip_longest(of_ranks[0], theirs, fillvalue="nothing"):
            if expected != found:
                raise error(f"{what}: rank 0 has {expected}, rank {rank} has {found}")


def check_agreement(order: Order, step: str) -> None:
    """While an order is recorded: RuntimeError on all ranks if their next steps differ."""
    what = "in the first step all ranks must use the same layers in the same order"
    check_same([step], order.model.process_group, RuntimeError, what)


def refuse_to_save(part: nn.Module, *_) -> None:
    raise RuntimeError("state_dict() would have this rank's shards: gather_full_params() has all")


def refuse_to_load(part: nn.Module, *_) -> None:
    raise RuntimeError("the weights are sharded: load_full_params() instead of load_state_dict()")


def refuse_optimizer(optimizer: torch.optim.Optimizer, *_) -> None:
    """Before a step of any optimizer: some look at a whole weight, and here it is a shard."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    for name in ("Adafactor", "LBFGS", "Muon"):
        if name in names:
            for group in optimizer.param_groups:
                if any(hasattr(parameter, "is_shard") for parameter in group["params"]):
                    raise RuntimeError(f"{name} needs whole weights, and FSDP's are sharded")


register_optimizer_step_pre_hook(refuse_optimizer)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent), str(folder.parent.parent)]
    try:
        import accounting
        import measure
        import memory
        from sharded_optimizer import LanguageModel

        from common import report, setup
    except ModuleNotFoundError as error:
        needed = "copy the repository's folder common/, sharded_optimizer.py and the files beside"
        sys.exit(f"error: {error}: {needed} fsdp.py, too")

    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, steps=6)
    setup.add_verify_arguments(parser)
    setup.add_plot_arguments(parser, "fsdp.png")
    parser.set_defaults(warmup=3)  # five candidates, and all within a minute
    add = parser.add_argument
    add("--no-prefetch", action="store_true", help="gather a weight when it is needed, not before")
    add("--compute-dtype", choices=["float16", "bfloat16"], help="in which FSDP's layers compute")
    add("--no-memory", action="store_true", help="no table and picture of the memory")
    add(
        "--accounting",
        action="store_true",
        help="only this: what each rank of many would hold, on the device meta",
    )
    add(
        "--ranks",
        type=setup.list_of(setup.whole_number(2)),
        default=[8, 64, 1024],
        metavar="N,N,…",
        help="numbers of ranks for --accounting (default: 8,64,1024)",
    )
    args = parser.parse_args()
    if args.save and args.no_verify:
        parser.error("argument --save: not with --no-verify, which trains no classifier")
    if args.no_memory and args.plot and args.plot != parser.get_default("plot"):
        parser.error("argument --plot: not with --no-memory, which leaves nothing to draw")

    def wrap(module, compute_dtype=None, process_group=None, prefetch=not args.no_prefetch):
        return FSDP(module, compute_dtype, process_group, prefetch)

    if args.accounting:
        accounting.show(args, wrap)
        return
    with setup.process_group(args) as device:
        result = report.begin("06_sharded_optimizer/fsdp", args, device)
        replicas = 1 if args.no_baseline else 4
        model = report.describe(LanguageModel, args, replicas)
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
