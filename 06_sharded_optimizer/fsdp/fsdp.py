r"""06, FSDP: split parameters, gradients and optimizer state over the ranks (ZeRO, stage 3).

Every rank keeps 1/N of each weight, of its gradient and of its optimizer state. The weights of a
*unit*, such as a layer, are gathered (all-gather) before it computes, and freed afterwards.
Backward does the same in reverse, and sends each rank its part of the gradients (reduce-scatter).

    make 06_sharded_optimizer/fsdp NPROC=2                                (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp/fsdp.py            (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/fsdp/fsdp.py                               (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023; CS336 (2026).
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only


class FlatParameter:
    """A unit's weights, one after another in `unsharded`, which has memory only while in use.

    This rank keeps `local_shard`, one of N equal slices. Autograd keeps the tensor `unsharded` for
    backward, and its version, which counts writes. Neither freeing its memory nor filling it again
    through `.data` is a write: backward finds the same tensor with the same values.
    """

    def __init__(self, name: str, number: int, weights, dtype: torch.dtype, process_group):
        self.name, self.group = name, process_group
        self.requires_grad = weights[0].requires_grad  # that of all
        world_size = dist.get_world_size(process_group)
        flat = flatten(weights, world_size)
        self.local_shard = flat.view(world_size, -1)[dist.get_rank(process_group)].clone()
        self.unsharded = torch.empty_like(flat, dtype=dtype)  # weights travel in this dtype
        self.sharded_params = parts_of(weights, self.local_shard, process_group)  # to be optimized
        views = split_like(weights, self.unsharded)  # modules compute with them
        self.unsharded_params = [v.detach().requires_grad_(self.requires_grad) for v in views]
        self.owners = []  # where modules read them: (module, name, weight)
        self.number = torch.tensor([number], device=flat.device)  # of this unit, on all ranks
        self.numbers = self.number.repeat(world_size)  # of the units that the ranks have gathered
        self.gathering = []  # calls under way
        self.missing = set(self.unsharded_params)  # those still without a gradient
        self.reshard()

    def unshard(self) -> None:
        """Begin to gather the whole weights. The unit's number travels beside them."""
        if self.unsharded.untyped_storage().size() > 0:
            return
        self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
        local = self.local_shard.to(self.unsharded.dtype)
        gather = partial(all_gather_single, group=self.group, async_op=True)
        self.gathering = [gather(self.numbers, self.number), gather(self.unsharded.data, local)]

    def wait(self) -> None:
        while self.gathering:
            self.gathering.pop().wait()
        set_version(self.unsharded, self.local_shard._version)  # a backward of an older step raises

    def reshard(self) -> None:
        """Free the memory. Autograd keeps the empty weights: backward fills them again."""
        self.wait()
        self.unsharded.untyped_storage().resize_(0)
        set_version(self.unsharded, NO_MEMORY)  # autograd refuses to read it until it is filled


class FSDP(nn.Module):
    """Keep 1/N of each weight, of its gradient and of its optimizer state; biases stay whole.

    model = FSDP(model)  # or with compute_dtype=torch.bfloat16, units=[model.block1, …]
    optimizer = torch.optim.AdamW(model.parameters())  # of this rank's shards
    loss_fn(model(x), y).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    """

    def __init__(self, module, compute_dtype=None, process_group=None, prefetch=True, units=None):
        super().__init__()
        units = units or choose_units(module)
        check_and_broadcast(module, process_group)
        self.module, self.process_group, self.prefetch = module, process_group, prefetch
        self.flats, uses = shard_weights(module, units, compute_dtype, process_group)
        self.uses = [None, *[flat for _, flat in uses], None]  # usually forward's order
        self.order = [flat for flat in reversed(self.flats) if flat.requires_grad]
        self.waiting = self.order.copy()  # all ranks reduce their gradients in this order
        self.reduction = None  # the one under way
        self.in_backward = self.has_gradients = False  # both are False after the finish
        for flat in self.order:
            for weight in flat.unsharded_params:
                weight.register_post_accumulate_grad_hook(partial(self._gradient_is_there, flat))
        for number, (part, _) in enumerate(uses, start=1):
            part.register_forward_pre_hook(partial(self._before_forward, number), prepend=True)
            part.register_forward_hook(partial(self._after_forward, number), always_call=True)
        self.layout = layout_of(module)  # which parameters there are; begin_forward compares

    def forward(self, *inputs, **kwargs):
        begin_forward(self)  # frees what an earlier one gathered in vain
        return self.module(*inputs, **kwargs)

    def _unshard(self, number: int) -> None:
        """Gather the weights of this use, and begin to gather those of the next (prefetch)."""
        current = self.uses[number]
        following = self.uses[number - 1 if self.in_backward else number + 1]
        current.unshard()  # nothing if it was prefetched
        current.wait()
        check_numbers(self, current)  # have all ranks gathered the same unit?
        if following and self.prefetch:
            following.unshard()

    def _before_forward(self, number: int, *_) -> None:
        """Hook 1, before a module's forward; torch.utils.checkpoint repeats it in backward."""
        self._unshard(number)
        use_unsharded_params(self.uses[number])  # now module.weight is the whole weight

    def _after_forward(self, number: int, module: nn.Module, inputs, outputs) -> None:
        """Hook 2, after a module's forward."""
        use_sharded_params(self.uses[number])  # module.weight is this rank's shard again
        for tensor in tensors_in_backward(self.uses[number], inputs, outputs):
            tensor.register_hook(partial(self._before_backward, number))
        if not self.in_backward:  # in backward a checkpoint needs them next
            self.uses[number].reshard()

    def _before_backward(self, number: int, _) -> None:
        """Hook 3, when backward reaches what a module returned."""
        self.in_backward = True
        self._unshard(number)

    def _gradient_is_there(self, flat: FlatParameter, weight: torch.Tensor) -> None:
        """Hook 4, when a weight's gradient is complete. All ranks reduce in one order."""
        refuse_second_gradient(self, flat, weight)
        self.has_gradients = True
        flat.missing.remove(weight)
        if not flat.missing:
            flat.reshard()
        while self.waiting and not self.waiting[0].missing:
            begin_reduction(self, self.waiting.pop(0))

    def finish_gradient_synchronization(self) -> None:
        """Complete all gradients. Call it after backward(), before optimizer.step()."""
        while self.waiting:
            begin_reduction(self, self.waiting.pop(0))  # with zeros for what is missing
        end_reduction(self)
        reshard_all(self)  # frozen ones, and what was gathered in vain
        average_replicated(self)  # gradients of biases and norms
        self.waiting = self.order.copy()
        self.in_backward = self.has_gradients = False

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the whole gradient's norm, as torch does; on all ranks, after the finish."""
        return clip(self, max_norm)

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """The state_dict of the whole module, on every rank; all ranks must call it."""
        return full_state(self)

    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of what gather_full_params() returned on any number of ranks."""
        load_full_state(self, params)


# ==================================================================================================
# Below this line: reduction, clipping, which module needs which weights, saving, what is refused.
# verify, the benchmark and the memory are in measure.py.


# torch has renamed it (2.13, 2.14), and warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
NO_MEMORY = 2**30  # a version that no weight has


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Of a tensor and its views; autograd refuses another than it has kept. (Private in torch.)"""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


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


def parts_of(weights: list[nn.Parameter], shard: torch.Tensor, process_group) -> list[nn.Parameter]:
    """Of each weight the part in this rank's shard, maybe empty, with as many dimensions."""
    start = -dist.get_rank(process_group) * len(shard)  # of a weight, counted from this shard's
    parts = []
    for weight in weights:
        end = start + weight.numel()
        piece = shard[max(start, 0) : max(end, 0)]
        shape = [1] * (weight.ndim - 1)  # recipes decay what has two dimensions
        parts.append(nn.Parameter(piece.view(*shape, -1), weight.requires_grad))
        parts[-1].is_shard = True
        start = end
    return parts


def check_numbers(model: FSDP, *flats: FlatParameter) -> None:
    """RuntimeError, on all ranks, if they have gathered different units of one size.

    On a GPU only the finish looks at the numbers, because to read them is to wait for the GPU.
    """
    if model.waiting and flats[0].numbers.is_cuda:
        return
    for flat in flats:
        if (flat.numbers != flat.number).any():
            names = [model.flats[number].name for number in flat.numbers.tolist()]
            todo = "use the same modules in one order, or units=[the module that has them]"
            raise RuntimeError(f"rank by rank {names} were gathered: {todo}")


def layout_of(module: nn.Module) -> list[tuple]:
    return [(id(p), p.requires_grad, p.data_ptr()) for p in module.parameters()]


def check_layout(model: FSDP) -> None:
    if layout_of(model.module) != model.layout:
        raise RuntimeError("parameters were frozen, replaced, moved or cast: wrap the module again")


def begin_forward(model: FSDP) -> None:
    """Free what an earlier forward has gathered in vain; RuntimeError where it cannot go on."""
    if model.has_gradients:
        raise RuntimeError("call finish_gradient_synchronization() after every backward()")
    check_layout(model)
    reshard_all(model)
    model.in_backward = False


def reshard_all(model: FSDP) -> None:
    for flat in model.flats:
        flat.reshard()


def refuse_second_gradient(model: FSDP, flat: FlatParameter, weight: torch.Tensor) -> None:
    if flat not in model.waiting or weight not in flat.missing:
        todo = "finish after every backward, and checkpoint with use_reentrant=False"
        raise RuntimeError(f"a weight's gradient came twice: {todo}")


def gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def begin_reduction(model: FSDP, flat: FlatParameter) -> None:
    """Send each rank its part of the gradients by an all-to-all; gloo's own sends twice as much.

    Only after the one before it, because each needs as much memory as the weights, twice.
    """
    end_reduction(model)
    sent = flatten(map(gradient_or_zeros, flat.unsharded_params), len(flat.numbers))
    for weight in flat.unsharded_params:
        weight.grad = None
    flat.missing = set(flat.unsharded_params)  # the next ones
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=flat.group, async_op=True)
    model.reduction = flat, sent, received, work


def end_reduction(model: FSDP) -> None:
    """Add the mean of all ranks to the gradients of the shards."""
    if model.reduction is None:
        return
    flat, _, received, work = model.reduction
    model.reduction = None
    work.wait()
    mean = received.view(len(flat.numbers), -1).mean(0, dtype=flat.local_shard.dtype)
    gradients = split_like(flat.sharded_params, mean)
    for shard, gradient in zip(flat.sharded_params, gradients, strict=True):
        shard.grad = gradient if shard.grad is None else shard.grad + gradient


def average_replicated(model: FSDP) -> None:
    """With one all-reduce; what this rank did not use has a gradient of zeros.

    One more number travels with them: a sum of the parameters' own bits, so small that its sum over
    the ranks is exact. Where it is not the same on all ranks, they have parted.
    """
    check_numbers(model, *model.flats)
    replicated = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "is_shard")]
    if not replicated:
        return
    world_size = dist.get_world_size(model.process_group)
    values = flatten(replicated, 1)
    largest = int(2 / torch.finfo(values.dtype).eps) // world_size  # above it sums are rounded
    bits = values.view(torch.int16).sum() % max(largest, 1)
    gradients = flatten(map(gradient_or_zeros, replicated), 1)
    mean = torch.cat([gradients / world_size, bits.view(1)])
    dist.all_reduce(mean, group=model.process_group)
    if mean[-1] != bits * world_size:
        todo = "clip by model.clip_grad_norm_(), with the same learning rates and seeds everywhere"
        raise RuntimeError(f"biases and norms differ between ranks since the last step: {todo}")
    for parameter, gradient in zip(replicated, split_like(replicated, mean), strict=True):
        parameter.grad = gradient.to(parameter.dtype)


@torch.no_grad()
def clip(model: FSDP, max_norm: float) -> torch.Tensor:
    """In float32 at least; inf and nan as in torch. Of what is sharded each rank adds its part."""
    if model.has_gradients:
        raise RuntimeError("call finish_gradient_synchronization() before clip_grad_norm_()")
    world_size = dist.get_world_size(model.process_group)
    squares = []
    for parameter in model.parameters():
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.grad is not None:
            square = torch.linalg.vector_norm(parameter.grad, dtype=dtype).square()
            squares.append(square if hasattr(parameter, "is_shard") else square / world_size)
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=model.process_group)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total.sqrt())
    return total.sqrt()


def use_unsharded_params(flat: FlatParameter) -> None:
    """Hide the shards behind the whole weights: Python finds attributes before parameters."""
    for module, name, weight in flat.owners:
        module.__dict__[name] = weight.to(flat.unsharded.dtype)  # a bias, too


def use_sharded_params(flat: FlatParameter) -> None:
    for module, name, _ in flat.owners:
        module.__dict__.pop(name, None)


def tensors_in_backward(flat: FlatParameter, inputs, outputs) -> list[torch.Tensor]:
    """What a module returned, and backward comes to before it comes to the module's weights.

    No gradient says when backward is done with frozen weights: those of the module's inputs do.
    """
    given, returned = trained_in(inputs), trained_in(outputs)
    if given and torch.is_grad_enabled() and not flat.requires_grad:
        register_multi_grad_hook(given, lambda _: flat.reshard())
    # A view that is changed in place loses its hooks: so its base has them, too.
    return returned + [tensor._base for tensor in returned if tensor._base is not None]


def trained_in(values) -> list[torch.Tensor]:
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.requires_grad]


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

    Weights of one FlatParameter are alike in dtype and in whether they are trained. Returns all,
    and who needs which: (module, flat). A tied weight is needed by several modules.
    """
    in_units = {weight for unit in units for weight in unit.parameters()}
    weights_of = {module: [weight for weight in module.parameters() if weight not in in_units]}
    weights_of |= {unit: list(unit.parameters()) for unit in units}
    names = {part: name or "the module" for name, part in module.named_modules()}
    flats, uses = [], []
    shards = {}  # weight -> (its FlatParameter, this rank's shard, the whole)
    for unit, parameters in weights_of.items():
        weights = [parameter for parameter in parameters if parameter.ndim >= 2]
        alike = {}
        for weight in weights:
            if weight not in shards:
                alike.setdefault((weight.dtype, weight.requires_grad), []).append(weight)
        for (dtype, _), members in alike.items():
            dtype = compute_dtype or dtype
            flat = FlatParameter(names[unit], len(flats), members, dtype, process_group)
            flats.append(flat)
            whole = zip(flat.sharded_params, flat.unsharded_params, strict=True)
            shards |= {weight: (flat, *each) for weight, each in zip(members, whole, strict=True)}
        uses += dict.fromkeys((unit, shards[weight][0]) for weight in weights)
    for owner in module.modules():
        for name, weight in owner.named_parameters(recurse=False, remove_duplicate=False):
            if weight in shards:
                flat, owner._parameters[name], whole = shards[weight]
                flat.owners.append((owner, name, whole))
                owner.register_state_dict_pre_hook(refuse_to_save)
    if compute_dtype:
        compute_in(compute_dtype, module, flats)
    return flats, uses


def compute_in(dtype: torch.dtype, module: nn.Module, flats: list[FlatParameter]) -> None:
    """Modules with weights compute in this dtype, those without, such as norms, in their own."""
    flat_of = {owner: flat for flat in flats for owner, _, _ in flat.owners}
    for owner in module.modules():
        own = owner.named_parameters(recurse=False)
        small = [(owner, name, parameter) for name, parameter in own if parameter.ndim < 2]
        if owner in flat_of:
            flat_of[owner].owners += small
        if owner in flat_of or small:
            to = dtype if owner in flat_of else small[0][2].dtype
            owner.register_forward_pre_hook(partial(cast, to), with_kwargs=True, prepend=True)


def cast(dtype: torch.dtype, module: nn.Module, inputs: tuple, kwargs: dict) -> tuple:
    """A hook: all tensors with decimals, in lists and dicts, too."""

    def in_dtype(value):
        return value.to(dtype) if value.is_floating_point() else value

    return tree_map_only(torch.Tensor, in_dtype, (inputs, kwargs))


@torch.no_grad()
def full_state(model: FSDP) -> dict[str, torch.Tensor]:
    """Copies: of all parameters, whole, and of the buffers that a state_dict has."""
    check_layout(model)
    whole = {}
    for flat in model.flats:
        values = flat.local_shard.new_empty(len(flat.unsharded))
        all_gather_single(values, flat.local_shard, flat.group)
        whole |= zip(flat.sharded_params, split_like(flat.unsharded_params, values), strict=True)
    held = model.module.state_dict(keep_vars=True)
    return {name: whole.get(tensor, tensor).clone() for name, tensor in held.items()}


@torch.no_grad()
def load_full_state(model: FSDP, state: dict[str, torch.Tensor]) -> None:
    """ValueError for other names, before anything is loaded, and for other shapes."""
    held = model.module.state_dict(keep_vars=True)
    if differing := sorted(state.keys() ^ held.keys()):
        raise ValueError(f"missing, or not in the model: {differing}")
    values = {tensor: state[name] for name, tensor in held.items()}
    for flat in model.flats:
        whole = flat.local_shard.new_zeros(len(flat.unsharded))
        weights = split_like(flat.unsharded_params, whole)
        for weight, shard in zip(weights, flat.sharded_params, strict=True):
            copy_same(weight, values.pop(shard))
        flat.local_shard.copy_(whole.view(len(flat.numbers), -1)[dist.get_rank(flat.group)])
    for tensor, value in values.items():
        copy_same(tensor, value)


def copy_same(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """copy_, but ValueError where it would repeat a smaller value."""
    if value.shape != tensor.shape:
        raise ValueError(f"a shape of {list(value.shape)} instead of {list(tensor.shape)}")
    tensor.copy_(value)


def check_and_broadcast(module: nn.Module, process_group) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for part in module.modules():
        if hasattr(part, "no_sync") or hasattr(part, "finish_gradient_synchronization"):
            raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"{name} has hooks, which nobody would call: take them out")
    for tensor in (*module.parameters(), *module.buffers()):
        contiguous = tensor.detach().contiguous()
        dist.broadcast(contiguous, group=process_group, group_src=0)
        tensor.detach().copy_(contiguous)


def refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # as full_state() and load_full_state() have it
        raise RuntimeError("state_dict() would have shards: gather_full_params() has all")


def main():
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:3]]
    try:
        import measure
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ and its 06_*, too")
    measure.main(__doc__, FSDP, choose_units)


if __name__ == "__main__":
    main()
