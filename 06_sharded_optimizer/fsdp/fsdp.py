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
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only


class FlatParameter:
    """Hold a unit's weights, one after another in `unsharded`, which has memory only while in use.

    This rank keeps `local_shard`, one of N equal slices. Autograd keeps `unsharded` for backward,
    and counts writes to it. Freeing its memory or filling it through `.data` is no write.
    """

    def __init__(self, weights: list[nn.Parameter], dtype: torch.dtype, process_group):
        self.group, self.world_size = process_group, dist.get_world_size(process_group)
        self.requires_grad = weights[0].requires_grad  # that of all
        flat = flatten(weights, self.world_size)
        self.local_shard = flat.view(self.world_size, -1)[dist.get_rank(process_group)].clone()
        self.unsharded = torch.empty_like(flat, dtype=dtype)  # weights travel in this dtype
        self.sharded_params = slices_of(weights, self.local_shard, process_group)  # to be optimized
        views = split_like(weights, self.unsharded)  # modules compute with them
        self.unsharded_params = [v.detach().requires_grad_(self.requires_grad) for v in views]
        self.readers = []  # modules that compute with them: (module, name, whole weight)
        self.gathering = None  # the call under way
        self.missing = set(self.unsharded_params)  # those still without a gradient
        self.reduction = None  # the call under way, what it sends, and what it receives
        self.reshard()

    def unshard(self) -> None:
        """Begin to gather the whole weights, unless they are here or on their way."""
        if self.unsharded.untyped_storage().size() > 0:
            return
        self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
        local, whole = self.local_shard.to(self.unsharded.dtype), self.unsharded.data
        self.gathering = all_gather_single(whole, local, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait until the whole weights are here."""
        if self.gathering:
            self.gathering.wait()
        self.gathering = None
        set_version(self.unsharded, self.local_shard._version)  # a backward of an older step raises

    def show_whole(self) -> None:
        """Hide the shards behind the whole weights: Python finds attributes before parameters."""
        for module, name, weight in self.readers:
            module.__dict__[name] = weight.to(self.unsharded.dtype)  # a bias, too

    def show_shards(self) -> None:
        """Make module.weight this rank's shard again, as the optimizer sees it."""
        for module, name, _ in self.readers:
            module.__dict__.pop(name, None)

    def reshard(self) -> None:
        """Free the memory. Autograd keeps the empty weights: backward fills them again."""
        self.wait()
        self.unsharded.untyped_storage().resize_(0)
        set_version(self.unsharded, NO_MEMORY)  # autograd refuses to read it until it is filled

    def begin_reduction(self) -> None:
        """Begin to send each rank its slice; gloo's own reduce-scatter would send twice as much."""
        sent = flatten(map(gradient_or_zeros, self.unsharded_params), self.world_size)
        for weight in self.unsharded_params:
            weight.grad = None
        self.missing = set(self.unsharded_params)  # the next ones
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        self.reduction = work, sent, received

    def end_reduction(self) -> None:
        """Add the mean of all ranks, if it is on its way, to the gradients of the shards."""
        if self.reduction is None:
            return
        work, _, received = self.reduction
        self.reduction = None
        work.wait()
        mean = received.view(self.world_size, -1).mean(0, dtype=self.local_shard.dtype)
        gradients = split_like(self.sharded_params, mean)
        for shard, gradient in zip(self.sharded_params, gradients, strict=True):
            shard.grad = gradient if shard.grad is None else shard.grad + gradient


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
        check_and_broadcast(module, process_group)
        self.module, self.process_group, self.prefetch = module, process_group, prefetch
        self.flats, uses = shard_weights(module, units, compute_dtype, process_group)
        self.uses = [None, *[flat for _, flat in uses], None]  # usually forward's order
        self.order = [flat for flat in reversed(self.flats) if flat.requires_grad]
        self.waiting = self.order.copy()  # all ranks reduce their gradients in this order
        self.in_backward = self.has_gradients = False  # both are False after the finish
        for flat in self.order:
            for weight in flat.unsharded_params:
                weight.register_post_accumulate_grad_hook(partial(self.gradient_is_there, flat))
        for number, (unit, _) in enumerate(uses, start=1):
            unit.register_forward_pre_hook(partial(self.before_forward, number), prepend=True)
            unit.register_forward_hook(partial(self.after_forward, number), always_call=True)
        self.layout = layout_of(module)  # which parameters there are; forward compares

    def forward(self, *inputs, **kwargs):
        if self.has_gradients:
            raise RuntimeError("call finish_gradient_synchronization() after every backward()")
        check_layout(self)
        for flat in self.flats:  # what an earlier forward has gathered and not used
            flat.reshard()
        self.in_backward = False
        return self.module(*inputs, **kwargs)

    def _unshard(self, number: int) -> None:
        """Gather the weights of this use, and begin to gather those of the next (prefetch)."""
        self.uses[number].unshard()  # nothing if it was prefetched
        self.uses[number].wait()
        following = self.uses[number - 1 if self.in_backward else number + 1]
        if following and self.prefetch:
            following.unshard()

    def before_forward(self, number: int, *_) -> None:
        """Hook 1, before a module's forward; torch.utils.checkpoint repeats it in backward."""
        self._unshard(number)
        self.uses[number].show_whole()  # now module.weight is the whole weight

    def after_forward(self, number: int, module: nn.Module, inputs, outputs) -> None:
        """Hook 2, after a module's forward."""
        self.uses[number].show_shards()  # module.weight is this rank's shard again
        for tensor in trained_in(outputs):
            tensor.register_hook(partial(self.before_backward, number))
        if not self.in_backward:  # in backward a checkpoint needs them next
            self.uses[number].reshard()

    def before_backward(self, number: int, _) -> None:
        """Hook 3, when the gradient of what a module returned arrives: its backward is next."""
        self.in_backward = True
        self._unshard(number)

    def gradient_is_there(self, flat: FlatParameter, weight: torch.Tensor) -> None:
        """Hook 4, when a weight's gradient is complete. All ranks reduce in one order."""
        refuse_second_gradient(self, flat, weight)
        self.has_gradients = True
        flat.missing.remove(weight)
        if not flat.missing:
            flat.reshard()
        while self.waiting and not self.waiting[0].missing:
            self._reduce_next()

    def _reduce_next(self) -> None:
        """Begin to reduce the next unit's gradients; to save memory those before arrive first."""
        for flat in self.order:
            flat.end_reduction()
        self.waiting.pop(0).begin_reduction()

    def finish_gradient_synchronization(self) -> None:
        """Complete all gradients. Call it after backward(), before optimizer.step()."""
        while self.waiting:
            self._reduce_next()  # with zeros for what is missing
        for flat in self.flats:
            flat.end_reduction()
            flat.reshard()  # frozen ones, and what was gathered but not used
        self._average_replicated()
        self.waiting = self.order.copy()
        self.in_backward = self.has_gradients = False

    def _average_replicated(self) -> None:
        """Average the gradients of biases and norms with one all-reduce; zeros for unused ones."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        replicated = [parameter for parameter in trained if not hasattr(parameter, "is_shard")]
        if not replicated:
            return
        gradients = [gradient_or_zeros(parameter) for parameter in replicated]
        mean = flatten(gradients, 1) / dist.get_world_size(self.process_group)
        dist.all_reduce(mean, group=self.process_group)
        for parameter, gradient in zip(replicated, split_like(replicated, mean), strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the whole gradient's norm, as torch does; on all ranks, after the finish."""
        return clip(self, max_norm)

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return the state_dict of the whole module, on every rank; all ranks must call it."""
        return full_state(self)

    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's slice of what gather_full_params() returned on any number of ranks."""
        load_full_state(self, params)


# ==================================================================================================
# Below this line: helpers, what is refused, clipping, which module needs which weights, saving.
# verify, what ranks hold and how long steps take are in accounting.py.


# torch has renamed it (2.13, 2.14), and warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
NO_MEMORY = 2**30  # a version that no weight has


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version of a tensor and its views; autograd raises if it has kept another.

    It is private in torch, but reading freed memory would end the process.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def flatten(tensors: Iterable[torch.Tensor], multiple: int) -> torch.Tensor:
    """Return their values one after another, and zeros up to a multiple of a number."""
    pieces = [tensor.detach().flatten() for tensor in tensors]
    padding = -sum(map(len, pieces)) % multiple
    return torch.cat([*pieces, pieces[0].new_zeros(padding)])


def split_like(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return views into flat memory, one after another, in the shapes of these tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def slices_of(weights: list[nn.Parameter], shard: torch.Tensor, group) -> list[nn.Parameter]:
    """Return each weight's piece of this rank's shard, maybe empty, with as many dimensions."""
    start = -dist.get_rank(group) * len(shard)  # of a weight, counted from this shard's
    slices = []
    for weight in weights:
        end = start + weight.numel()
        piece = shard[max(start, 0) : max(end, 0)]
        shape = [1] * (weight.ndim - 1)  # recipes decay what has two dimensions
        slices.append(nn.Parameter(piece.view(*shape, -1), weight.requires_grad))
        slices[-1].is_shard = True
        start = end
    return slices


def gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Return .grad, which is set to zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def trained_in(values) -> list[torch.Tensor]:
    """Return the tensors with a gradient in nested lists and dicts, as torch's pytree sees them."""
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.requires_grad]


def layout_of(module: nn.Module) -> list[tuple]:
    return [(id(p), p.requires_grad, p.data_ptr()) for p in module.parameters()]


def check_layout(model: FSDP) -> None:
    if layout_of(model.module) != model.layout:
        raise RuntimeError("parameters were frozen, replaced, moved or cast: wrap the module again")


def refuse_second_gradient(model: FSDP, flat: FlatParameter, weight: torch.Tensor) -> None:
    if flat not in model.waiting or weight not in flat.missing:
        todo = "finish after every backward, and checkpoint with use_reentrant=False"
        raise RuntimeError(f"a weight's gradient came twice: {todo}")


@torch.no_grad()
def clip(model: FSDP, max_norm: float) -> torch.Tensor:
    """Clip in float32 at least; inf and nan as in torch. Of shards each rank adds its own."""
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


def choose_units(module: nn.Module) -> list[nn.Module]:
    """Return the elements of a ModuleList or Sequential; elsewhere the modules with parameters."""
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
    """Put shards in place of the weights of each unit, and of those that are in none.

    Weights of one FlatParameter are alike in dtype and in whether they are trained. Returns all,
    and who needs which: (unit, flat). A tied weight is needed by several units.
    """
    units = units or choose_units(module)
    in_units = {weight for unit in units for weight in unit.parameters()}
    rest = [weight for weight in module.parameters() if weight not in in_units]
    weights_of = [(module, rest), *[(unit, unit.parameters()) for unit in units]]
    flats, uses = [], []
    shards = {}  # weight -> (its FlatParameter, this rank's slice, the whole)
    for unit, parameters in weights_of:
        weights = [parameter for parameter in parameters if parameter.ndim >= 2]
        alike = {}
        for weight in weights:
            if weight not in shards:
                alike.setdefault((weight.dtype, weight.requires_grad), []).append(weight)
        for (dtype, _), members in alike.items():
            flat = FlatParameter(members, compute_dtype or dtype, process_group)
            flats.append(flat)
            for number, weight in enumerate(members):
                shards[weight] = flat, flat.sharded_params[number], flat.unsharded_params[number]
        for weight in weights:
            if (unit, shards[weight][0]) not in uses:
                uses.append((unit, shards[weight][0]))
    for submodule in module.modules():
        parameters = submodule.named_parameters(recurse=False, remove_duplicate=False)
        for name, weight in list(parameters):
            if weight in shards:
                flat, shard, whole = shards[weight]
                setattr(submodule, name, shard)
                flat.readers.append((submodule, name, whole))
                submodule.register_state_dict_pre_hook(refuse_to_save)
    if compute_dtype:
        compute_in(compute_dtype, module, flats)
    return flats, uses


def compute_in(dtype: torch.dtype, module: nn.Module, flats: list[FlatParameter]) -> None:
    """Let modules with weights compute in this dtype, others, such as norms, in their own."""
    flat_of = {reader: flat for flat in flats for reader, _, _ in flat.readers}
    for submodule in module.modules():
        own = submodule.named_parameters(recurse=False)
        small = [(submodule, name, parameter) for name, parameter in own if parameter.ndim < 2]
        if submodule in flat_of:
            flat_of[submodule].readers += small
        if submodule in flat_of or small:
            to = dtype if submodule in flat_of else small[0][2].dtype
            submodule.register_forward_pre_hook(partial(cast, to), with_kwargs=True, prepend=True)


def cast(dtype: torch.dtype, module: nn.Module, inputs: tuple, kwargs: dict) -> tuple:
    """Cast all tensors with decimals, in lists and dicts, too: a hook before forward."""

    def in_dtype(value):
        return value.to(dtype) if value.is_floating_point() else value

    return tree_map_only(torch.Tensor, in_dtype, (inputs, kwargs))


@torch.no_grad()
def full_state(model: FSDP) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, whole, and of the buffers that a state_dict has."""
    check_layout(model)
    whole = {}  # shard -> the whole weight
    for flat in model.flats:
        values = flat.local_shard.new_empty(len(flat.unsharded))
        all_gather_single(values, flat.local_shard, flat.group)
        weights = split_like(flat.unsharded_params, values)
        for shard, weight in zip(flat.sharded_params, weights, strict=True):
            whole[shard] = weight
    held = model.module.state_dict(keep_vars=True)
    return {name: whole.get(tensor, tensor).clone() for name, tensor in held.items()}


@torch.no_grad()
def load_full_state(model: FSDP, state: dict[str, torch.Tensor]) -> None:
    """Load a whole state. Raises ValueError for other names, before it loads, and other shapes."""
    held = model.module.state_dict(keep_vars=True)
    if differing := sorted(state.keys() ^ held.keys()):
        raise ValueError(f"missing, or not in the model: {differing}")
    values = {tensor: state[name] for name, tensor in held.items()}
    for flat in model.flats:
        whole = flat.local_shard.new_zeros(len(flat.unsharded))
        weights = split_like(flat.unsharded_params, whole)
        for weight, shard in zip(weights, flat.sharded_params, strict=True):
            copy_same(weight, values.pop(shard))
        flat.local_shard.copy_(whole.view(flat.world_size, -1)[dist.get_rank(flat.group)])
    for tensor, value in values.items():
        copy_same(tensor, value)


def copy_same(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value. Raises ValueError for another shape, even where copy_ would repeat it."""
    if value.shape != tensor.shape:
        raise ValueError(f"a shape of {list(value.shape)} instead of {list(tensor.shape)}")
    tensor.copy_(value)


def check_and_broadcast(module: nn.Module, process_group) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for submodule in module.modules():
        is_wrapper = hasattr(submodule, "finish_gradient_synchronization")
        if is_wrapper or hasattr(submodule, "no_sync"):
            raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
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
        import accounting
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ and its 06_*, too")
    accounting.main(__doc__, FSDP, choose_units)


if __name__ == "__main__":
    main()
