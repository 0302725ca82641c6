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
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only


class FlatParameter:
    """Hold a unit's weights, one after another in `unsharded`, which has memory only while in use.

    This rank keeps `local_shard`, one of N equal slices. Autograd differentiates views into
    `unsharded`, and the optimizer sees views into `local_shard`. Autograd does not notice that the
    memory comes and goes, so NO_MEMORY and set_version() tell it whose values there are.
    """

    def __init__(self, weights: list[nn.Parameter], dtype: torch.dtype, process_group):
        self.group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.requires_grad = weights[0].requires_grad  # that of all
        flat = flatten(weights, self.world_size)
        self.local_shard = flat.view(self.world_size, -1)[self.rank].clone()
        self.sharded_params = []  # what this rank has of each weight, maybe nothing
        for piece in pieces_of(weights, self.local_shard, self.rank):
            self.sharded_params.append(nn.Parameter(piece, self.requires_grad))
        mark_for_optimizers(weights, self.sharded_params, process_group)
        self.unsharded = torch.empty_like(flat, dtype=dtype)  # weights travel in this dtype
        self.unsharded_params = []  # modules compute with them
        for view in views_like(weights, self.unsharded):
            self.unsharded_params.append(view.detach().requires_grad_(self.requires_grad))
        self.readers = []  # modules that compute with them: (module, name, whole weight)
        self.gathering = None  # the call under way
        self.missing = set(self.unsharded_params)  # those still without a gradient
        self.reducing = None  # the call under way
        self.reshard()

    def unshard(self) -> None:
        """Begin to gather the whole weights, unless they are here or on their way."""
        if has_memory(self.unsharded):
            return
        allocate(self.unsharded)
        local = self.local_shard.to(self.unsharded.dtype)
        whole = self.unsharded.data
        self.gathering = all_gather_single(whole, local, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait until the whole weights are here."""
        if self.gathering:
            self.gathering.wait()
        self.gathering = None
        # Each optimizer's step is a new version: backward through an older one's graph raises.
        set_version(self.unsharded, self.local_shard._version)

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
        free(self.unsharded)

    def begin_reduce_scatter(self) -> None:
        """Begin to send each rank its slice, by an all-to-all, after which each rank adds.

        So sums are in the shards' dtype. gloo's own reduce-scatter would send twice as much.
        """
        gradients = [gradient_or_zeros(weight) for weight in self.unsharded_params]
        self.sent = flatten(gradients, self.world_size)
        self.received = torch.empty_like(self.sent)
        for weight in self.unsharded_params:
            weight.grad = None
        self.missing = set(self.unsharded_params)  # the next ones
        buffers = self.received, self.sent
        self.reducing = dist.all_to_all_single(*buffers, group=self.group, async_op=True)

    def end_reduce_scatter(self) -> None:
        """Add the mean of all ranks, if it is on its way, to the gradients of the shards."""
        if self.reducing is None:
            return
        self.reducing.wait()
        mean = self.received.view(self.world_size, -1).mean(0, dtype=self.local_shard.dtype)
        gradients = views_like(self.sharded_params, mean)
        for shard, gradient in zip(self.sharded_params, gradients, strict=True):
            shard.grad = gradient if shard.grad is None else shard.grad + gradient
        self.reducing = self.sent = self.received = None


class Use:
    """A unit that computes with a FlatParameter, between those before and after it in forward.

    Several units use that of a tied weight.
    """

    def __init__(self, unit: nn.Module, flat: FlatParameter):
        self.unit = unit
        self.flat = flat
        self.before = self  # the first has none before it: to prefetch itself does nothing
        self.after = self


class FSDP(nn.Module):
    """Keep 1/N of each weight, of its gradient and of its optimizer state; biases stay whole.

    model = FSDP(model)  # or with compute_dtype=torch.bfloat16, units=[model.block1, …]
    optimizer = torch.optim.AdamW(model.parameters())  # of this rank's shards
    loss_fn(model(x), y).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    """

    def __init__(self, module, compute_dtype=None, process_group=None, prefetch=True, units=None):
        super().__init__()
        broadcast_from_rank_0(module, process_group)
        self.module = module
        self.process_group = process_group  # the ranks that train together; None: all of them
        self.prefetch = prefetch
        self.flats, uses = shard_weights(module, units, compute_dtype, process_group)
        if compute_dtype:
            compute_in(compute_dtype, module, self.flats)
        for use, following in zip(uses, uses[1:], strict=False):
            use.after = following
            following.before = use
        self.order = [flat for flat in reversed(self.flats) if flat.requires_grad]
        self.waiting = self.order.copy()  # all ranks reduce their gradients in this order
        self.in_backward = False
        self.has_gradients = False  # True from the first gradient to the finish
        for flat in self.order:
            for weight in flat.unsharded_params:
                hook = partial(self._gradient_is_ready, flat)
                weight.register_post_accumulate_grad_hook(hook)
        self.replicated = []  # trained biases and norms
        for parameter in module.parameters():
            if parameter.requires_grad and not hasattr(parameter, "is_shard"):
                self.replicated.append(parameter)
                parameter.register_post_accumulate_grad_hook(self._note_gradient)
        for use in uses:
            before, after = partial(self._before_forward, use), partial(self._after_forward, use)
            use.unit.register_forward_pre_hook(before, prepend=True)
            use.unit.register_forward_hook(after, always_call=True)
        self.layout = layout_of(module)  # which parameters there are; forward compares

    def forward(self, *inputs, **kwargs):
        if self.has_gradients:
            raise RuntimeError("call finish_gradient_synchronization() after every backward()")
        self._check_layout()
        for flat in self.flats:  # what an earlier forward has gathered and not used
            flat.reshard()
        self.in_backward = False
        return self.module(*inputs, **kwargs)

    def _unshard(self, use: Use) -> None:
        """Gather the weights of this use, and begin to gather those of the next (prefetch)."""
        use.flat.unshard()  # nothing if it was prefetched
        use.flat.wait()
        following = use.before if self.in_backward else use.after
        if self.prefetch:
            following.flat.unshard()

    def _before_forward(self, use: Use, *_) -> None:
        """Hook 1, before a module's forward; torch.utils.checkpoint repeats it in backward."""
        self._unshard(use)
        use.flat.show_whole()  # now module.weight is the whole weight

    def _after_forward(self, use: Use, module: nn.Module, inputs, outputs) -> None:
        """Hook 2, after a module's forward."""
        use.flat.show_shards()  # module.weight is this rank's shard again
        for tensor in trained_in(outputs):
            tensor.register_hook(partial(self._before_backward, use))
        if not self.in_backward:  # in backward a checkpoint needs them next
            use.flat.reshard()

    def _before_backward(self, use: Use, _) -> None:
        """Hook 3, when the gradient of what a module returned arrives: its backward is next."""
        self.in_backward = True
        self._unshard(use)

    def _gradient_is_ready(self, flat: FlatParameter, weight: torch.Tensor) -> None:
        """Hook 4, when a weight's gradient is complete."""
        if flat not in self.waiting or weight not in flat.missing:
            todo = "finish after every backward, and checkpoint with use_reentrant=False"
            raise RuntimeError(f"a weight's gradient came twice: {todo}")
        self._note_gradient(weight)
        flat.missing.remove(weight)
        if not flat.missing:
            flat.reshard()
        self._launch_ready()

    def _note_gradient(self, _) -> None:
        self.has_gradients = True

    def _launch_ready(self) -> None:
        """Reduce gradients that are complete, on all ranks in one order."""
        while self.waiting and not self.waiting[0].missing:
            self._reduce_next()

    def _reduce_next(self) -> None:
        """End the reduction under way, which frees its buffers, and begin the next unit's."""
        for flat in self.order:
            flat.end_reduce_scatter()
        self.waiting.pop(0).begin_reduce_scatter()

    def finish_gradient_synchronization(self) -> None:
        """Complete all gradients. Call it after backward(), before optimizer.step()."""
        while self.waiting:
            self._reduce_next()  # with zeros for what is missing
        for flat in self.flats:
            flat.end_reduce_scatter()
            flat.reshard()  # frozen ones, and what was gathered but not used
        self._average_replicated()
        self.waiting = self.order.copy()
        self.in_backward = False
        self.has_gradients = False

    def _average_replicated(self) -> None:
        """Average the gradients of biases and norms; zeros for unused ones."""
        alike = {}  # dtype -> parameters: one all-reduce for each
        for parameter in self.replicated:
            alike.setdefault(parameter.dtype, []).append(parameter)
        for parameters in alike.values():
            gradients = [gradient_or_zeros(parameter) for parameter in parameters]
            mean = flatten(gradients, 1) / dist.get_world_size(self.process_group)
            dist.all_reduce(mean, group=self.process_group)
            for parameter, gradient in zip(parameters, views_like(parameters, mean), strict=True):
                parameter.grad = gradient

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm of the whole gradient, as torch does; after the finish, on all ranks."""
        if self.has_gradients:
            raise RuntimeError("call finish_gradient_synchronization() before clip_grad_norm_()")
        world_size = dist.get_world_size(self.process_group)
        squares = []
        for parameter in [each for each in self.parameters() if each.grad is not None]:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            square = torch.linalg.vector_norm(parameter.grad, dtype=dtype).square()
            is_shard = hasattr(parameter, "is_shard")  # of what is whole each rank adds 1/N
            squares.append(square if is_shard else square / world_size)
        square = torch.stack(squares).sum()
        dist.all_reduce(square, group=self.process_group)
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, square.sqrt())
        return square.sqrt()

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return a copy of the whole module's state_dict, on every rank; all ranks must call it."""
        self._check_layout()
        whole = {}  # shard -> the whole weight
        for flat in self.flats:
            values = flat.local_shard.new_empty(len(flat.unsharded))
            all_gather_single(values, flat.local_shard, flat.group)
            weights = views_like(flat.unsharded_params, values)
            whole |= zip(flat.sharded_params, weights, strict=True)
        held = self.module.state_dict(keep_vars=True)
        return {name: whole.get(tensor, tensor).clone() for name, tensor in held.items()}

    @torch.no_grad()
    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's slice of what gather_full_params() returned on any number of ranks.

        Raises ValueError for other names, before it loads, and for other shapes.
        """
        held = self.module.state_dict(keep_vars=True)
        if differing := sorted(params.keys() ^ held.keys()):
            raise ValueError(f"missing, or not in the model: {differing}")
        values = {tensor: params[name] for name, tensor in held.items()}
        for flat in self.flats:
            whole = flat.local_shard.new_zeros(len(flat.unsharded))
            weights = views_like(flat.unsharded_params, whole)
            for weight, shard in zip(weights, flat.sharded_params, strict=True):
                copy_same(weight, values.pop(shard))
            flat.local_shard.copy_(whole.view(flat.world_size, -1)[flat.rank])
        for tensor, value in values.items():
            copy_same(tensor, value)

    def _check_layout(self) -> None:
        if layout_of(self.module) != self.layout:
            raise RuntimeError("parameters were frozen, replaced, moved or cast: wrap again")


def train_step(model, optimizer, inputs, targets):
    """Train on this rank's share of a batch; return its loss."""
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# ==================================================================================================
# Below this line: memory that comes and goes, flat memory, what is refused, which module needs
# which weights. What ranks hold and how long steps take is measured in accounting.py.


# torch has renamed it (2.13, 2.14), and warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Autograd keeps a tensor for backward with its version, the number of writes to it, and raises if
# the version is another when backward comes. Freeing memory, and filling it through `.data`, are no
# writes to autograd. So we set the version: it tells whether there are values, and of which step.
NO_MEMORY = 2**30  # a version that no weight has


def has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has memory now."""
    return tensor.untyped_storage().size() > 0


def allocate(tensor: torch.Tensor) -> None:
    """Give memory to a tensor and its views."""
    tensor.untyped_storage().resize_(tensor.nbytes)


def free(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor and its views."""
    tensor.untyped_storage().resize_(0)
    set_version(tensor, NO_MEMORY)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version of a tensor and its views; the function is private in torch."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def flatten(tensors: list[torch.Tensor], multiple: int) -> torch.Tensor:
    """Return their values one after another, and zeros up to a multiple of a number."""
    size = sum(tensor.numel() for tensor in tensors)
    flat = tensors[0].detach().new_empty(size + -size % multiple)
    flat[size:] = 0
    for tensor, view in zip(tensors, views_like(tensors, flat), strict=True):
        view.copy_(tensor.detach())
    return flat


def views_like(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return each tensor's place in flat memory, one after another, in its shape and strides."""
    views = []
    start = 0
    for tensor in tensors:
        strides = torch.empty_like(tensor, device="meta").stride()  # channels_last, too
        place = flat[start : start + tensor.numel()]
        views.append(place.as_strided(tensor.shape, strides))
        start += tensor.numel()
    return views


def pieces_of(weights: list[torch.Tensor], part: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Return what a rank's part of flat memory has of each weight, maybe nothing.

    A piece has as many dimensions as its weight: recipes decay what has two.
    """
    pieces = []
    begins = 0  # of a weight, in flat memory
    part_begins = rank * len(part)
    for weight in weights:
        ends = begins + weight.numel()
        first = max(begins - part_begins, 0)
        last = max(ends - part_begins, 0)
        ones = [1] * (weight.ndim - 1)
        pieces.append(part[first:last].view(*ones, -1))
        begins = ends
    return pieces


def gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    """Return .grad, which is set to zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def copy_same(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value. Raises ValueError for another shape, even where copy_ would repeat it."""
    if value.shape != tensor.shape:
        raise ValueError(f"a shape of {list(value.shape)} instead of {list(tensor.shape)}")
    tensor.copy_(value)


def trained_in(values) -> list[torch.Tensor]:
    """Return the tensors with a gradient in nested lists and dicts, as torch's pytree sees them."""
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.requires_grad]


def layout_of(module: nn.Module) -> list[tuple]:
    """Return what must not change while the module is wrapped."""
    return [(id(p), p.requires_grad, p.data_ptr()) for p in module.parameters()]


def mark_for_optimizers(weights: list, shards: list, group) -> None:
    """Let check_optimizer() know these weights and shards."""
    for weight in weights:
        weight.is_sharded = True
    for shard in shards:
        shard.is_shard = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"


def check_optimizer(optimizer: torch.optim.Optimizer, *_) -> None:
    """Refuse whole weights, which get no gradient, and another rank's state. Runs before a step."""
    for group in optimizer.param_groups:
        if any(hasattr(parameter, "is_sharded") for parameter in group["params"]):
            raise RuntimeError("this optimizer holds whole weights: give it model.parameters()")
        for shard in [parameter for parameter in group["params"] if hasattr(parameter, "is_shard")]:
            saved_by = group.setdefault("shards of", shard.is_shard)  # it is saved with the state
            if saved_by != shard.is_shard:
                raise RuntimeError(f"{shard.is_shard} has loaded the state of {saved_by}")


register_optimizer_step_pre_hook(check_optimizer)


def refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse state_dict(), but for that of gather_full_params() and load_full_params()."""
    if not keep_vars:
        raise RuntimeError("state_dict() would have shards: gather_full_params() has all")


def broadcast_from_rank_0(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Give all ranks rank 0's parameters and buffers. ValueError if the module is wrapped."""
    for submodule in module.modules():
        if hasattr(submodule, "no_sync") or hasattr(submodule, "finish_gradient_synchronization"):
            raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
    for tensor in [*module.parameters(), *module.buffers()]:
        contiguous = tensor.detach().contiguous()  # as collectives need it
        dist.broadcast(contiguous, group=process_group, group_src=0)
        tensor.detach().copy_(contiguous)


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
    and who uses which. Several units use a tied weight.
    """
    units = units or choose_units(module)
    in_units = {weight for unit in units for weight in unit.parameters()}
    rest = [weight for weight in module.parameters() if weight not in in_units]
    weights_of = [(module, rest), *[(unit, unit.parameters()) for unit in units]]
    flats, uses = [], []
    shards = {}  # weight -> (its FlatParameter, this rank's slice, the whole)
    for unit, parameters in weights_of:
        weights = [each for each in parameters if each.ndim >= 2]  # biases and norms stay whole
        alike = {}  # (dtype, whether it is trained) -> weights of this unit
        for weight in weights:
            if weight not in shards:
                alike.setdefault((weight.dtype, weight.requires_grad), []).append(weight)
        for (dtype, _), members in alike.items():
            flat = FlatParameter(members, compute_dtype or dtype, process_group)
            flats.append(flat)
            for number, weight in enumerate(members):
                shards[weight] = flat, flat.sharded_params[number], flat.unsharded_params[number]
        used = []
        for weight in weights:
            flat = shards[weight][0]
            if flat not in used:
                used.append(flat)
                uses.append(Use(unit, flat))
    place_shards(module, shards)
    return flats, uses


def place_shards(module: nn.Module, shards: dict) -> None:
    """Put its shard in place of each weight, and let the FlatParameter know who reads it."""
    for submodule in module.modules():
        parameters = submodule.named_parameters(recurse=False, remove_duplicate=False)
        for name, weight in list(parameters):
            if weight in shards:
                flat, shard, whole = shards[weight]
                setattr(submodule, name, shard)
                flat.readers.append((submodule, name, whole))
                submodule.register_state_dict_pre_hook(refuse_to_save)


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


def main():
    stage = Path(__file__).resolve().parents[1]
    compare = stage.parent / "05_bucketed" / "compare"
    sys.path[:0] = [str(folder) for folder in (stage.parent, stage, compare)]
    try:
        import accounting
    except ModuleNotFoundError as error:
        folders = "common/, 05_bucketed/compare/ and 06_sharded_optimizer/"
        sys.exit(f"error: {error}: copy the repository's folders {folders}")
    accounting.main(__doc__, FSDP, choose_units, train_step)


if __name__ == "__main__":
    main()
