r"""06, FSDP: split parameters, gradients and optimizer state over the ranks (ZeRO, stage 3).

Every rank keeps 1/N of each weight, of its gradient and of its optimizer state. The weights of a
*unit*, such as a layer, are put together (all-gather) before it computes, and given up afterwards.
Backward does the same in reverse, and sends each rank its part of the gradients (reduce-scatter).

    make 06_sharded_optimizer/fsdp NPROC=2                                (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp/fsdp.py            (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/fsdp/fsdp.py                               (two hosts; R is 0 on HOST0)

Names are torch's: FlatParameter (FSDPParamGroup in fully_shard), unshard, reshard, sharded_params.
Source: Rajbhandari et al., "ZeRO", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023; CS336 (2026).
"""

import sys
import weakref
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook


class FlatParameter:
    """A unit's weights, one after another in `unsharded`, which has memory only for a while.

    This rank keeps `local_shard`, one of N equal slices. Of each weight the optimizer gets a view
    into it, with as many dimensions as the weight, so that "decay what has two" still works.
    """

    def __init__(self, name: str, weights: list[nn.Parameter], dtype: torch.dtype, process_group):
        self.name, self.group = name, process_group
        self.requires_grad = weights[0].requires_grad  # that of all
        world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        flat = flatten(weights, world_size)
        self.local_shard = flat.view(world_size, -1)[rank].clone()
        self.unsharded = torch.empty_like(flat, dtype=dtype)  # weights travel in this dtype
        self.sharded_params = []  # of each weight this rank's part: for the optimizer
        self.unsharded_params = []  # of each weight the whole: for its module, a leaf of autograd
        start, low = 0, rank * len(self.local_shard)  # of the weight and of the slice in `flat`
        for weight, whole in zip(weights, split_like(weights, self.unsharded), strict=True):
            first = max(start, low)
            start += weight.numel()
            last = max(first, min(start, low + len(self.local_shard)))
            mine = self.local_shard[first - low : last - low].view(*[1] * (weight.ndim - 1), -1)
            self.sharded_params.append(nn.Parameter(mine, self.requires_grad))
            self.unsharded_params.append(whole.detach().requires_grad_(self.requires_grad))
        self.owners = []  # where modules read them: (module, name, weight)
        self.missing = set(self.unsharded_params)  # those whose gradient is not there yet
        self.users = 0  # forwards that compute with it now
        self.gathering = None  # while it is put together
        self.reshard()

    def unshard(self) -> None:
        """Begin to put the whole weights together."""
        self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
        sent = self.local_shard.to(self.unsharded.dtype)
        self.gathering = all_gather_single(self.unsharded.data, sent, self.group, async_op=True)

    def wait_for_unshard(self) -> None:
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
            set_version(self.unsharded, self.local_shard._version)  # autograd refuses older graphs

    def reshard(self) -> None:
        """Give up the memory. Autograd keeps the empty weights: backward fills them again."""
        if self.users == 0:
            self.wait_for_unshard()
            self.unsharded.untyped_storage().resize_(0)
            set_version(self.unsharded, NO_MEMORY)  # autograd refuses to read it until it is filled


class FSDP(nn.Module):
    """Keep 1/N of each weight, of its gradient and of its optimizer state; biases stay whole.

    Construct the optimizer afterwards, of this rank's shards. `units`: modules whose weights are
    gathered together (default: choose_units). `compute_dtype`: of weights and inputs, but norms'.
    """

    def __init__(self, module, compute_dtype=None, process_group=None, prefetch=True, units=None):
        super().__init__()
        units = units or choose_units(module)
        check_and_broadcast(module, units, process_group)
        self.module, self.process_group = module, process_group
        self.flats, uses = shard_weights(module, units, compute_dtype, process_group)
        self.uses = [flat for _, flat in uses]  # modules need them in this order, mostly
        self.ahead = 3 if prefetch else 1
        self.agreement = Agreement(self.flats, process_group)  # on what is gathered next
        self.order = [flat for flat in reversed(self.flats) if flat.requires_grad]
        self.waiting = self.order.copy()  # they are reduced in this order
        self.reduction = None  # the one that is reduced now
        self.in_backward = False  # until the finish
        self.flat_of = {weight: flat for flat in self.order for weight in flat.unsharded_params}
        hook = partial(FSDP._gradient_is_there, weakref.proxy(self))  # or it is never freed
        for weight in self.flat_of:
            weight.register_post_accumulate_grad_hook(hook)
        for number, (module, _) in enumerate(uses):
            module.register_forward_pre_hook(partial(self._before_forward, number), prepend=True)
            module.register_forward_hook(partial(self._after_forward, number), always_call=True)
        self.layout = layout_of(self.module)

    def forward(self, *inputs, **kwargs):
        check_before_forward(self)
        reshard_all(self)  # what an earlier forward has gathered in vain
        return self.module(*inputs, **kwargs)

    def _unshard(self, number: int) -> None:
        """Gather the weights of this use, begin to gather the next, announce those of one more."""
        coming = self.uses[number::-1] if self.in_backward else self.uses[number:]
        self.agreement.unshard(*coming[: self.ahead])

    def _before_forward(self, number: int, *_) -> None:
        """Hook 1, before a module's forward. In backward a checkpoint calls it again."""
        self._unshard(number)
        use_unsharded_params(self.uses[number])  # now module.weight is the whole weight

    def _after_forward(self, number: int, module: nn.Module, inputs, outputs) -> None:
        """Hook 2, after a module's forward."""
        flat = self.uses[number]
        use_sharded_params(flat)  # module.weight is this rank's shard again
        for tensor in tensors_in_backward(module, flat, inputs, outputs):
            tensor.register_hook(partial(self._before_backward, number))
        if not self.in_backward:  # there a checkpoint's own backward comes next
            flat.reshard()

    def _before_backward(self, number: int, _) -> None:
        """Hook 3, when backward comes to what a module returned."""
        self.in_backward = True
        self._unshard(number)

    def _gradient_is_there(self, weight: torch.Tensor) -> None:
        """Hook 4, when a weight's gradient is complete. All ranks reduce in one order."""
        flat = self.flat_of[weight]
        if flat not in self.waiting or weight not in flat.missing:
            weight.grad = None
            raise RuntimeError(CAME_TWICE)
        self.in_backward = True
        flat.missing.remove(weight)
        if not flat.missing:
            flat.reshard()
        while self.waiting and not self.waiting[0].missing:
            begin_reduction(self, self.waiting.pop(0))

    def finish_gradient_synchronization(self) -> None:
        """Complete all gradients. Call it after backward(), before optimizer.step()."""
        self.agreement.finish()  # no rank gathers anything more
        while self.waiting:
            begin_reduction(self, self.waiting.pop(0))  # with zeros for the missing
        end_reduction(self)
        average_replicated(self)  # biases, norms
        reshard_all(self)  # frozen ones, and what was gathered in vain
        self.waiting = self.order.copy()
        self.in_backward = False

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """The state_dict of the whole module, on every rank; all ranks must call it."""
        return full_state(self)

    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of what gather_full_params() returned on any number of ranks."""
        load_full_state(self, params)

    def whole(self):
        """On all ranks: `with model.whole():` weights are whole without a forward."""
        return all_unsharded(self)


# ==================================================================================================
# Below this line: what ranks agree on, the reduction, clipping, which module needs which weights,
# saving, and what is refused. verify, the benchmark and the memory are in measure.py.


# torch has renamed them (2.13, 2.14), and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
CAME_TWICE = """\
a weight's gradient came twice before the finish. Either backward() ran twice: finish in between.
Or one backward did it, with two re-entrant checkpoints of a layer, or a head in chunks that each
run a backward: use checkpoint(..., use_reentrant=False), which needs no second backward."""


def flatten(tensors, multiple: int) -> torch.Tensor:
    """Their values, one after another, and zeros up to a multiple of a number."""
    pieces = [tensor.detach().flatten() for tensor in tensors]
    padding = -sum(map(len, pieces)) % multiple
    return torch.cat([*pieces, pieces[0].new_zeros(padding)])


def split_like(tensors, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views into flat memory, one after another, in the shapes of these tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


class Agreement:
    """All ranks must gather the same in the same order: where sizes differ, gloo ends the process.

    So each rank announces ahead, in a second group, the number of what it gathers next. When all
    have announced the same it is gathered; if they differ, all ranks raise.
    """

    second_groups = weakref.WeakKeyDictionary()  # of the same ranks, by the first group

    def __init__(self, flats: list[FlatParameter], process_group):
        self.numbers = {flat: number for number, flat in enumerate([*flats, None])}  # None: no more
        self.announced = {}  # one of them -> (all ranks' numbers, work), in order
        first = process_group or dist.group.WORLD
        if first not in self.second_groups:
            ranks, backend = dist.get_process_group_ranks(first), dist.get_backend(first)
            backend = "gloo" if "nccl" in backend else backend  # numbers are on the CPU
            group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            self.second_groups[first] = group
        self.group = self.second_groups[first]

    def announce(self, flat: FlatParameter | None) -> None:
        number = torch.tensor([self.numbers[flat]], device="cpu")
        numbers = number.new_empty(dist.get_world_size(self.group))
        work = all_gather_single(numbers, number, self.group, async_op=True)
        self.announced[flat] = numbers, work

    def unshard(self, now: FlatParameter, *ahead: FlatParameter) -> None:
        """Wait for it, begin to gather the next one, announce what probably comes then."""
        for flat in (now, *ahead):
            if flat.unsharded.untyped_storage().size() == 0 and flat not in self.announced:
                self.announce(flat)
        while not self.announced.keys().isdisjoint([now, *ahead[:1]]):
            self.unshard_first()
        now.wait_for_unshard()

    def unshard_first(self) -> None:
        """What was announced first, and now all have announced."""
        flat = next(iter(self.announced))
        numbers, work = self.announced.pop(flat)
        work.wait()
        if (numbers != numbers[0]).any():
            names = [each.name if each else "nothing more" for each in self.numbers]
            found = [names[number] for number in numbers.tolist()]
            raise RuntimeError(
                f"rank by rank {found} are gathered: all ranks must use the same units in the same"
                " order, or units=[that module]"
            )
        if flat:
            flat.unshard()

    def finish(self) -> None:
        """Gather what was announced in vain; then no rank gathers more before the next forward."""
        self.announce(None)
        while self.announced:
            self.unshard_first()

    def __getstate__(self):
        raise RuntimeError("FSDP cannot be copied or pickled: gather_full_params() can be saved")


def gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def begin_reduction(model: FSDP, flat: FlatParameter) -> None:
    """After the one before it, because each needs as much memory as the weights, twice.

    gloo's reduce-scatter is an all-reduce, of twice the bytes. So there every rank gets all ranks'
    gradients of its part. They are averaged in the shard's dtype either way.
    """
    end_reduction(model)
    sent = flatten(map(gradient_or_zeros, flat.unsharded_params), dist.get_world_size(flat.group))
    for weight in flat.unsharded_params:
        weight.grad = None
    flat.missing = set(flat.unsharded_params)  # the next ones
    if dist.get_backend(flat.group) in ("gloo", "slow_network"):
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=flat.group, async_op=True)
    else:
        sent = sent.to(flat.local_shard.dtype)
        received = torch.empty_like(flat.local_shard)
        mean = dist.ReduceOp.AVG
        work = reduce_scatter_single(received, sent, mean, group=flat.group, async_op=True)
    model.reduction = flat, sent, received, work


def end_reduction(model: FSDP) -> None:
    """Add the mean to `grad` of the shards, and call their hooks, as autograd does with weights."""
    if model.reduction is None:
        return
    flat, _, received, work = model.reduction
    model.reduction = None
    work.wait()
    received = received.view(-1, len(flat.local_shard))  # from each rank
    mean = received.mean(0, dtype=flat.local_shard.dtype)
    gradients = split_like(flat.sharded_params, mean)
    for shard, gradient in zip(flat.sharded_params, gradients, strict=True):
        gradient = gradient if shard.grad is None else shard.grad + gradient
        shard.grad = gradient.as_subclass(ShardedGradient)
        shard.grad.group = flat.group
        for hook in hooks_of(shard)[1].values():
            hook(shard)


def average_replicated(model: FSDP) -> None:
    """With one all-reduce per dtype. What this rank did not use has a gradient of zeros."""
    alike = {}
    for parameter in model.module.parameters():
        if parameter.requires_grad and not hasattr(parameter, "is_shard"):
            parameter.grad = gradient_or_zeros(parameter)
            alike.setdefault(parameter.dtype, []).append(parameter.grad)
    for gradients in alike.values():
        flat = nn.utils.parameters_to_vector(gradients)
        flat.div_(dist.get_world_size(model.process_group))
        dist.all_reduce(flat, group=model.process_group)
        nn.utils.vector_to_parameters(flat, gradients)


def clip_grad_norm(model: FSDP, max_norm: float) -> torch.Tensor:
    """torch's clip_grad_norm_ in one all-reduce, after the finish; returns the norm of all."""
    if model.in_backward:
        raise RuntimeError("call finish_gradient_synchronization() before clip_grad_norm()")
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)


class ShardedGradient(torch.Tensor):
    """This rank's part of a gradient; its norm is that of the whole, and a call of all ranks.

    So torch's clip_grad_norm_ is right here, and with foreach=True it is one all-reduce.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch._foreach_norm:
            return norms_of_whole(*args, **kwargs)
        if function in (torch.linalg.vector_norm, torch.norm, torch.Tensor.norm):
            return norms_of_whole([args[0]], *args[1:], **kwargs)[0]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


def norms_of_whole(gradients, p="fro", ord=2, **options) -> list[torch.Tensor]:
    """In float32 at least, whatever the default dtype is; RuntimeError for another than the 2-norm.

    With one all-reduce. Of gradients that are not sharded every rank has the whole.
    """
    if p not in ("fro", 2) or ord != 2 or any(options.values()):
        raise RuntimeError(f"of a sharded gradient there is only the 2-norm, not {p, ord, options}")
    squares = []
    for gradient in gradients:
        part = gradient.as_subclass(torch.Tensor)
        dtype = torch.promote_types(part.dtype, torch.float32)
        squares.append(torch.linalg.vector_norm(part, dtype=dtype).square())
    squares = torch.stack(squares)
    sharded = [i for i, each in enumerate(gradients) if isinstance(each, ShardedGradient)]
    if sharded:
        summed = squares[sharded]
        dist.all_reduce(summed, group=gradients[sharded[0]].group)
        squares[sharded] = summed
    return squares.sqrt().unbind()


def reshard_all(model: FSDP) -> None:
    for flat in model.flats:
        flat.reshard()


def use_unsharded_params(flat: FlatParameter) -> None:
    """Hide the shards behind the whole weights: Python finds attributes before parameters."""
    flat.users += 1
    for module, name, weight in flat.owners:
        module.__dict__[name] = weight.to(flat.unsharded.dtype)  # a bias, too


def use_sharded_params(flat: FlatParameter) -> None:
    """Take the whole weights away, when the last forward that needs them is over."""
    flat.users -= 1
    if flat.users == 0:
        for module, name, _ in flat.owners:
            del module.__dict__[name]


@contextmanager
def all_unsharded(model: FSDP):
    """For what reads weights without a forward, such as model.module.generate()."""
    with torch.no_grad():
        for flat in model.flats:
            model.agreement.unshard(flat)
            use_unsharded_params(flat)
        try:
            yield
        finally:
            for flat in model.flats:
                use_sharded_params(flat)
                flat.reshard()


def tensors_in_backward(module: nn.Module, flat, inputs, outputs) -> list[torch.Tensor]:
    """Those of a module that backward comes to before its weights: it returned them or keeps them.

    RuntimeError for a weight among them: it has no memory soon. No gradient says when backward is
    done with frozen weights: those of the module's inputs do.
    """
    returned = leaves_of(outputs)
    whole = memory_of(flat.unsharded)
    if any(torch.is_tensor(leaf) and memory_of(leaf) == whole for leaf in returned):
        raise RuntimeError("a module returned its weight, or a view of it: return a clone()")
    if not torch.is_grad_enabled():
        return []
    if with_gradient(inputs) and not flat.requires_grad:
        register_multi_grad_hook(with_gradient(inputs), lambda _: flat.reshard())
    tensors = with_gradient(returned)
    plain = torch.Tensor | int | float | str | None
    unknown = {type(leaf).__name__ for leaf in returned if not isinstance(leaf, plain)}
    if unknown and not tensors:
        raise RuntimeError(
            f"{flat.name} returned {unknown}, in which FSDP sees no tensor with a gradient:"
            " return tensors, or lists, tuples, dicts, namespaces or dataclasses of them"
        )
    for each in module.modules():
        kept = [value for value in vars(each).values() if torch.is_tensor(value) and value.grad_fn]
        tensors += [tensor for tensor in kept if all(tensor is not other for other in inputs)]
    # A view that is changed in place loses its hooks: so its base has them, too.
    return tensors + with_gradient([tensor._base for tensor in tensors])


def leaves_of(value) -> list:
    """What is in lists, tuples, mappings, dataclasses and namespaces; else the value itself."""
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for element in value for leaf in leaves_of(element)]


def with_gradient(value) -> list[torch.Tensor]:
    """The tensors in it that take part in backward."""
    return [leaf for leaf in leaves_of(value) if torch.is_tensor(leaf) and leaf.requires_grad]


def choose_units(module: nn.Module) -> list[nn.Module]:
    """The elements of a ModuleList or Sequential; elsewhere the modules that own parameters."""
    chosen = []
    for child in module.children():
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        is_called = type(child).forward is not nn.Module.forward  # lists and dicts are not
        if is_called and (listed or next(child.parameters(recurse=False), None) is not None):
            chosen.append(child)
        else:
            chosen += choose_units(child)
    return chosen


def shard_weights(module, units, compute_dtype, process_group) -> tuple[list, list]:
    """Put shards in place of the weights of each unit, and of what is in none of them.

    Weights that differ in dtype, or in whether they are trained, are not in one FlatParameter.
    Returns all, and who needs which: (module, flat). A tied weight is needed by several modules.
    """
    names = {part: name or "the module" for name, part in module.named_modules()}
    owners = {}  # weight -> [(module, name), …]
    for owner in names:
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.ndim >= 2 and parameter.numel():
                owners.setdefault(parameter, []).append((owner, name))
    in_units = {parameter for unit in units for parameter in unit.parameters()}
    in_units -= set(module.parameters(recurse=False))
    weights_of = {module: [weight for weight in owners if weight not in in_units]}
    for unit in units:
        weights_of[unit] = [weight for weight in unit.parameters() if weight in owners]
    flat_of = {}
    uses = []
    for unit, weights in weights_of.items():
        alike = {}
        for weight in weights:
            if weight not in flat_of:
                alike.setdefault((weight.dtype, weight.requires_grad), []).append(weight)
        for (dtype, _), members in alike.items():
            dtype = compute_dtype if compute_dtype and dtype.is_floating_point else dtype
            flat = FlatParameter(names[unit], members, dtype, process_group)
            put_shards_in(flat, members, owners)
            flat_of |= dict.fromkeys(members, flat)
        uses += dict.fromkeys((unit, flat_of[weight]) for weight in weights)
    flats = list(dict.fromkeys(flat_of.values()))
    if compute_dtype:
        compute_in(compute_dtype, module, flats)
    return flats, uses


def put_shards_in(flat: FlatParameter, weights: list[nn.Parameter], owners: dict) -> None:
    """With the attributes that a weight was given, and its hooks that autograd would call last."""
    shards = zip(flat.sharded_params, flat.unsharded_params, weights, strict=True)
    for shard, whole, weight in shards:
        vars(shard).update(vars(weight), is_shard=True)
        for hook in hooks_of(weight)[1].values():
            shard.register_post_accumulate_grad_hook(hook)
        for module, name in owners[weight]:
            module._parameters[name] = shard
            module.register_state_dict_pre_hook(refuse_to_save)
            flat.owners.append((module, name, whole))


def compute_in(dtype: torch.dtype, module: nn.Module, flats: list[FlatParameter]) -> None:
    """Modules with weights compute in this dtype, those without, such as norms, in their own."""
    rounded = [flat for flat in flats if flat.unsharded.dtype == dtype]
    flat_of = {owner: flat for flat in rounded for owner, _, _ in flat.owners}
    for owner in module.modules():
        own = owner.named_parameters(recurse=False)
        small = [(owner, name, parameter) for name, parameter in own if parameter.ndim < 2]
        if owner in flat_of:
            flat_of[owner].owners += small
            cast_inputs = partial(cast, dtype)
        elif small:
            cast_inputs = partial(cast, small[0][2].dtype)
        else:
            continue
        owner.register_forward_pre_hook(cast_inputs, with_kwargs=True, prepend=True)


def cast(dtype: torch.dtype, module: nn.Module, inputs: tuple, kwargs: dict) -> tuple:
    """A hook. Only tensors: lists and dicts stay what they are, as a module may write into them."""

    def in_dtype(value):
        is_float = torch.is_tensor(value) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tuple(map(in_dtype, inputs)), {name: in_dtype(kwargs[name]) for name in kwargs}


@torch.no_grad()
def full_state(model: FSDP) -> dict[str, torch.Tensor]:
    """Copies: of all parameters, whole, and of the buffers that a state_dict has."""
    whole = {}
    for flat in model.flats:
        values = flat.local_shard.new_empty(len(flat.unsharded))
        all_gather_single(values, flat.local_shard, flat.group)
        whole |= zip(flat.sharded_params, split_like(flat.unsharded_params, values), strict=True)
    held = model.module.state_dict(keep_vars=True)
    return {name: whole.get(tensor, tensor).clone() for name, tensor in held.items()}


@torch.no_grad()
def load_full_state(model: FSDP, state: dict[str, torch.Tensor]) -> None:
    whole = {}
    for flat in model.flats:
        flat.reshard()
        whole |= zip(flat.sharded_params, flat.unsharded_params, strict=True)
    values = {}
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        found, expected = state[name].shape, whole.get(tensor, tensor).shape
        if found != expected:
            raise ValueError(f"{name} has shape {tuple(found)}, not {tuple(expected)}")
        values[tensor] = state[name]
    for flat in model.flats:
        slices = flatten([values.pop(shard) for shard in flat.sharded_params], len(flat.unsharded))
        flat.local_shard.copy_(slices.view(-1, len(flat.local_shard))[dist.get_rank(flat.group)])
    for buffer, value in values.items():
        buffer.copy_(value)


def check_and_broadcast(module: nn.Module, units: list[nn.Module], process_group) -> None:
    """Give every rank the parameters and buffers of rank 0. ValueError, on all, if they differ."""
    names = {part: name for name, part in module.named_modules()}
    mine = [f"unit {names[unit]}" for unit in units]
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, p in tensors.items():
        mine.append(f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}")
    all_ranks = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(all_ranks, mine, group=process_group)
    for rank, theirs in enumerate(all_ranks):
        if theirs != all_ranks[0]:
            differing = sorted(set(theirs) ^ set(all_ranks[0]))[:2] or "their order"
            raise ValueError(f"models differ on ranks 0 and {rank}: {differing}")
    for part, name in names.items():
        if hasattr(part, "finish_gradient_synchronization"):
            raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
        if getattr(part, "max_norm", None) is not None:
            raise ValueError(f"{name}: max_norm would be forgotten, as it changes gathered weights")
        if isinstance(part, nn.RNNBase) and next(part.parameters()).is_cuda:
            raise ValueError(f"{name}: cuDNN would move the weights of an RNN elsewhere")
    refuse_hooks(module)
    for tensor in tensors.values():
        contiguous = tensor.detach().contiguous()
        dist.broadcast(contiguous, group=process_group, group_src=0)
        tensor.detach().copy_(contiguous)


def refuse_hooks(module: nn.Module) -> None:
    """Those that nobody would call, or with the gradient of one rank alone."""
    for name, parameter in module.named_parameters():
        of_gradient, after_it = hooks_of(parameter)
        if of_gradient or (after_it and parameter.ndim < 2):
            raise RuntimeError(
                f"{name}: only weights can have hooks, by register_post_accumulate_grad_hook"
            )


def layout_of(module: nn.Module) -> list[tuple]:
    return [(id(p), p.requires_grad, p.dtype, p.data_ptr()) for p in module.parameters()]


def check_before_forward(model: FSDP) -> None:
    if model.in_backward:
        raise RuntimeError("call finish_gradient_synchronization() after every backward()")
    if layout_of(model.module) != model.layout:
        raise RuntimeError(
            "parameters were frozen, unfrozen, replaced, moved or cast: wrap the module again"
        )
    refuse_hooks(model.module)


def refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # as full_state() and load_full_state() have it
        raise RuntimeError("state_dict() would have shards: gather_full_params() has all")


def refuse_sharded_weights(optimizer: torch.optim.Optimizer, *_) -> None:
    """A hook of every optimizer's step: some look at a whole weight, and here it is a shard."""
    if isinstance(optimizer, torch.optim.Adafactor | torch.optim.LBFGS | torch.optim.Muon):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(hasattr(p, "is_shard") for p in parameters):
            name = type(optimizer).__name__
            raise RuntimeError(f"{name} needs whole weights, and FSDP's are sharded")


register_optimizer_step_pre_hook(refuse_sharded_weights)


# Private in torch, which has no public name for any of these; nothing else here is.


def memory_of(tensor: torch.Tensor) -> int:
    """The same for all views of one memory, also on `meta`, where there is no address."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


NO_MEMORY = 2**30  # a version that no weight has


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Of a tensor and its views: autograd refuses what has not the version that it has kept."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def hooks_of(parameter: nn.Parameter) -> tuple[dict, dict]:
    """Of register_hook, of register_post_accumulate_grad_hook."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent), str(folder.parent.parent)]
    try:
        import measure
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ and its 06_*, too")
    measure.main(__doc__, FSDP, choose_units)


if __name__ == "__main__":
    main()
