r"""06, FSDP: split parameters, gradients and optimizer state over the ranks (ZeRO, stage 3).

Every rank keeps 1/N of each weight, of its gradient and of its optimizer state. The weights of a
*unit*, such as a layer, are put together (all-gather) before it computes, and given up afterwards.
Backward does the same in reverse, and sends each rank its part of the gradients (reduce-scatter).

    make 06_sharded_optimizer/fsdp NPROC=2                                (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp/fsdp.py            (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/fsdp/fsdp.py                               (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO", SC 2020, sections 5.2 and 5.3; Zhao et al., "PyTorch FSDP",
VLDB 2023; Stanford CS336, assignment 2 (2026).
"""

import sys
import weakref
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves


class Unit:
    """Weights one after another in `whole`, which has memory only from gather() to free().

    This rank keeps its share, one of N equal slices. Of each weight it has a shard: a view into the
    share, with as many dimensions as the weight, so that "decay what has two of them" still works.
    """

    def __init__(self, weights: list[nn.Parameter], dtype: torch.dtype, process_group):
        self.group = process_group
        world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        flat = pad_to_multiple(world_size, torch.cat([w.detach().flatten() for w in weights]))
        self.share = flat.view(world_size, -1)[rank].clone()
        self.whole = torch.empty_like(flat, dtype=dtype)  # weights travel in this dtype
        self.weights = {}  # shard -> the whole weight: a leaf of autograd that lies in `whole`
        end = -rank * len(self.share)  # where the first weight begins, counted from the share
        for weight, whole in zip(weights, split_like(weights, self.whole), strict=True):
            start, end = end, end + weight.numel()
            mine = self.share[max(start, 0) : max(end, 0)]
            shard = nn.Parameter(mine.view(*[1] * (weight.ndim - 1), -1), weight.requires_grad)
            self.weights[shard] = whole.detach().requires_grad_(weight.requires_grad)
        self.trained = {weight for weight in self.weights.values() if weight.requires_grad}
        self.missing = set(self.trained)  # those whose gradient is not there yet
        self.places, self.biases = [], []  # where modules read them: (module, name, weight)
        self.users = 0  # forwards that compute with it now
        self.gathering = None  # the all-gather in flight
        self.free()

    def gather(self) -> None:
        """Begin to put the whole together, unless it is there or under way."""
        if self.whole.untyped_storage().size() == 0:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            sent = self.share.to(self.whole.dtype)
            self.gathering = all_gather_single(self.whole.data, sent, self.group, async_op=True)

    def wait(self) -> None:
        """Until it is there."""
        self.gather()
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
            set_version(self.whole, self.share._version)  # autograd refuses older graphs

    def free(self) -> None:
        """Give up the memory. Autograd keeps the empty weights: backward fills them again."""
        if self.gathering:
            self.wait()
        self.whole.untyped_storage().resize_(0)
        set_version(self.whole, NO_MEMORY)  # autograd refuses to read it until it is filled


class Reduction:
    """A unit's gradients on their way. wait() adds their mean to `grad` of this rank's shards."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.sent, self.received, self.work = begin_reduce_scatter(take_gradients(unit), unit)

    def wait(self) -> None:
        self.work.wait()
        mean = self.received.mean(0, dtype=self.unit.share.dtype)  # of a row from each rank
        gradients = split_like(self.unit.weights, mean)
        for shard, gradient in zip(self.unit.weights, gradients, strict=True):
            shard.grad = gradient if shard.grad is None else shard.grad + gradient


class FSDP(nn.Module):
    """Keep 1/N of each weight, of its gradient and of its optimizer state on N ranks.

    Biases and norms stay whole. parameters() has the shards: construct the optimizer afterwards.
    `units`: modules whose weights are gathered together, by default choose_units(module).
    `compute_dtype`: in which weights travel and their modules compute. Gradients are averaged in
    the weight's own. ValueError, RuntimeError: what cannot be done.
    """

    def __init__(self, module, compute_dtype=None, process_group=None, prefetch=True, units=None):
        super().__init__()
        check_and_broadcast(module, process_group)
        self.module = module
        self.process_group = process_group
        self.units_of = make_units(self, units, compute_dtype)  # module -> its Units, mostly one
        parts = list(self.units_of) if prefetch else []
        self.after = dict(pairwise(parts))  # module -> the next one, in order of registration
        self.before = dict(pairwise(reversed(parts)))
        self.units = list(dict.fromkeys(unit for units in self.units_of.values() for unit in units))
        self.order = [unit for unit in reversed(self.units) if unit.trained]  # they are reduced so
        self.waiting = deque(self.order)  # units that are still to be reduced
        self.in_flight = []  # at most one Reduction
        self.in_backward = False  # until the finish
        self.guard = Guard(self)
        self.unit_of = {weight: unit for unit in self.units for weight in unit.trained}
        for weight in self.unit_of:
            weight.register_post_accumulate_grad_hook(self._gradient_is_there)
        for part in self.units_of:
            part.register_forward_pre_hook(self._before_forward, prepend=True)
            part.register_forward_hook(self._after_forward, always_call=True)

    def forward(self, *inputs, **kwargs):
        self.guard.before_forward(self)
        return self.module(*inputs, **kwargs)

    def _gather(self, part: nn.Module, order: dict) -> None:
        """Wait for the units of a module, and begin to gather those of the next one."""
        for unit in self.units_of[part]:
            unit.wait()
        for unit in self.units_of.get(order.get(part), []):
            unit.gather()

    def _before_forward(self, part: nn.Module, *_) -> None:
        """Hook 1, before a module's forward. In backward a checkpoint calls it again."""
        self._gather(part, self.before if self.in_backward else self.after)
        show(self.units_of[part])  # from here on part.weight is the whole weight

    def _after_forward(self, part: nn.Module, inputs, outputs) -> None:
        """Hook 2, after a module's forward."""
        hide(self.units_of[part])  # part.weight is this rank's shard again
        for tensor in tensors_in_backward(self.units_of[part], inputs, outputs):
            tensor.register_hook(partial(self._before_backward, part))
        if not self.in_backward:  # there a checkpoint's own backward comes next
            free_unused(self.units_of[part])

    def _before_backward(self, part: nn.Module, _) -> None:
        """Hook 3, when backward comes to what a module returned."""
        self.in_backward = True
        self._gather(part, self.before)

    def _gradient_is_there(self, weight: torch.Tensor) -> None:
        """Hook 4, when a weight's gradient is complete. All ranks reduce in one order."""
        unit = self.unit_of[weight]
        self.guard.check_gradient(self, weight)
        unit.missing.remove(weight)
        if not unit.missing:
            unit.free()
        while self.waiting and not self.waiting[0].missing:
            begin_reduction(self.waiting.popleft(), self.in_flight)

    def finish_gradient_synchronization(self) -> None:
        """Complete all gradients. Call it after backward(), before optimizer.step()."""
        while self.waiting:
            begin_reduction(self.waiting.popleft(), self.in_flight)  # with zeros for the missing
        wait_for(self.in_flight)
        average_replicated(self)  # biases, norms
        free_unused(self.units)  # frozen ones, and what was gathered in vain
        self.waiting.extend(self.order)
        self.in_backward = False
        self.guard.after_finish(self)

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """The state_dict of the whole module, on every rank; all ranks must call it."""
        return full_state(self)

    def load_full_params(self, params: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of what gather_full_params() returned on any number of ranks."""
        load_full_state(self, params)


# ==================================================================================================
# Below this line: which module needs which unit, clipping and saving, what 02 and 03 teach, guards.
# verify and the benchmark are in measure.py, the table of the memory is in memory.py.


# torch has renamed them (2.13, 2.14), and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def pad_to_multiple(number: int, flat: torch.Tensor) -> torch.Tensor:
    return torch.cat([flat, flat.new_zeros(-len(flat) % number)])


def split_like(tensors, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views into flat memory, one after another, in the shapes of these tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def take_gradients(unit: Unit) -> torch.Tensor:
    """The gradients of a unit, flat, with zeros for what has none; and expect the next ones."""
    unit.missing = set(unit.trained)
    gradients = [gradient_or_zeros(weight).flatten() for weight in unit.weights.values()]
    used = sum(len(gradient) for gradient in gradients)
    gradients.append(unit.whole.new_zeros(len(unit.whole) - used))
    for weight in unit.trained:
        weight.grad = None
    return torch.cat(gradients)


def gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def begin_reduce_scatter(sent: torch.Tensor, unit: Unit) -> tuple:
    """What each rank shall have: (what is sent, tensors whose mean is this rank's part, work).

    gloo's reduce-scatter is an all-reduce, of twice the bytes. So there every rank gets all ranks'
    gradients of its part. They are averaged in the shard's dtype either way.
    """
    if dist.get_backend(unit.group) == "gloo":
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=unit.group, async_op=True)
    else:
        sent = sent.to(unit.share.dtype)
        received = torch.empty_like(unit.share)
        mean = dist.ReduceOp.AVG
        work = reduce_scatter_single(received, sent, mean, group=unit.group, async_op=True)
    return sent, received.view(-1, len(unit.share)), work


def begin_reduction(unit: Unit, in_flight: list[Reduction]) -> None:
    """After the one before it: each needs as much memory as the whole unit, twice."""
    wait_for(in_flight)
    in_flight.append(Reduction(unit))


def wait_for(in_flight: list[Reduction]) -> None:
    while in_flight:
        in_flight.pop().wait()


def free_unused(units: list[Unit]) -> None:
    """Those that no forward computes with now."""
    for unit in units:
        if unit.users == 0:
            unit.free()


# A module reads its weights as attributes. In a forward they stand where otherwise the shards are.


def show(units: list[Unit]) -> None:
    """Hide the shards behind the whole weights: Python finds attributes before parameters."""
    for unit in units:
        unit.users += 1
        for module, name, weight in unit.places:
            module.__dict__[name] = weight
        for module, name, bias in unit.biases:
            module.__dict__[name] = bias.to(unit.whole.dtype)


def hide(units: list[Unit]) -> None:
    """Take the whole weights away, when the last forward that needs them is over."""
    for unit in units:
        unit.users -= 1
        if unit.users == 0:
            for module, name, _ in [*unit.places, *unit.biases]:
                del module.__dict__[name]


def tensors_in_backward(units: list[Unit], inputs, outputs) -> list[torch.Tensor]:
    """Those that a module has returned and that backward comes to, before the module's weights.

    RuntimeError for a weight among them: it has no memory soon. No gradient says when backward is
    done with frozen weights: those of the module's inputs do.
    """
    memory = {memory_of(unit.whole) for unit in units}
    for tensor in filter(torch.is_tensor, tree_leaves(outputs)):
        if memory_of(tensor) in memory:
            raise RuntimeError("a module returned its weight, or a view of it: return a clone()")
    if not torch.is_grad_enabled():
        return []
    frozen = [unit for unit in units if not unit.trained]
    if frozen and with_gradient(inputs):
        register_multi_grad_hook(with_gradient(inputs), lambda _: free_unused(frozen))
    tensors = with_gradient(outputs)
    # A view that is changed in place loses its hooks: so its base has them, too.
    return tensors + with_gradient([tensor._base for tensor in tensors])


def with_gradient(value) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts that take part in backward."""
    return [leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf) and leaf.requires_grad]


# Which module needs which unit.


def choose_units(module: nn.Module) -> list[nn.Module]:
    """The elements of a ModuleList or Sequential; elsewhere the modules that own parameters."""
    chosen = []
    for child in module.children():
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        if is_called(child) and (listed or any(True for _ in child.parameters(recurse=False))):
            chosen.append(child)
        else:
            chosen += choose_units(child)
    return chosen


def is_called(module: nn.Module) -> bool:
    """Lists and dicts of modules and of parameters are not."""
    return type(module).forward is not nn.Module.forward


def make_units(model: FSDP, chosen, compute_dtype) -> dict[nn.Module, list[Unit]]:
    """Make a Unit of the weights of each chosen module, and one of the others; put shards in.

    Weights that differ in dtype, or in whether they are trained, are not in one unit. Returns which
    units a module's forward needs; with a tied weight several need the same one.
    """
    module = model.module
    chosen = chosen or choose_units(module)
    if not all(map(is_called, chosen)):
        raise ValueError("units: must be modules that have a forward")
    places = {}  # weight -> [(module, name), …]
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.ndim >= 2 and parameter.numel():
                places.setdefault(parameter, []).append((part, name))
    of_parts = {part: [p for p in part.parameters() if p in places] for part in chosen}
    elsewhere = {weight for weights in of_parts.values() for weight in weights}
    own = set(module.parameters(recurse=False))
    rest = [weight for weight in places if weight in own or weight not in elsewhere]
    unit_of = {}
    needs = {}
    for part, weights in [(module, rest), *of_parts.items()]:
        alike = {}
        for weight in weights:
            if weight not in unit_of:
                alike.setdefault((weight.dtype, weight.requires_grad), []).append(weight)
        for (dtype, _), members in alike.items():
            if compute_dtype and dtype.is_floating_point:
                dtype = compute_dtype
            unit = Unit(members, dtype, model.process_group)
            unit_of |= dict.fromkeys(members, unit)
            put_shards_in(unit, [places[weight] for weight in members])
        if weights:
            needs[part] = list(dict.fromkeys(unit_of[weight] for weight in weights))
    if compute_dtype:
        compute_in(compute_dtype, module, set(unit_of.values()))
    return needs


def put_shards_in(unit: Unit, places: list) -> None:
    """Replace weights by their shards; `places` are those of each weight."""
    for (shard, weight), of_weight in zip(unit.weights.items(), places, strict=True):
        shard.is_shard = True
        for module, name in of_weight:
            module._parameters[name] = shard
            unit.places.append((module, name, weight))
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters = lambda: None  # on a GPU it moves weights elsewhere


def is_shard(parameter: nn.Parameter) -> bool:
    """And not what every rank has whole: a bias, a norm."""
    return hasattr(parameter, "is_shard")


def compute_in(dtype: torch.dtype, module: nn.Module, units: set[Unit]) -> None:
    """Modules with weights compute in this dtype, those without, such as norms, in their own."""
    sharded = {part: unit for unit in units for part, _, _ in unit.places}
    for part in module.modules():
        small = [(part, name, p) for name, p in part.named_parameters(recurse=False) if p.ndim < 2]
        its_dtype = dtype
        if part in sharded:
            sharded[part].biases += small
        elif small:
            its_dtype = small[0][2].dtype
        else:
            continue
        part.register_forward_pre_hook(partial(cast, its_dtype), with_kwargs=True, prepend=True)


def cast(dtype: torch.dtype, part: nn.Module, inputs: tuple, kwargs: dict) -> tuple:
    """A hook. Only tensors: lists and dicts stay what they are, as a module may write into them."""

    def in_dtype(value):
        is_float = torch.is_tensor(value) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tuple(map(in_dtype, inputs)), {name: in_dtype(kwargs[name]) for name in kwargs}


# What concerns all ranks at once: broadcast, average, clipping, saving, loading.


def check_and_broadcast(module: nn.Module, process_group) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    check_module(module, process_group)
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, group=process_group, group_src=0)
        tensor.detach().copy_(dense)


def average_replicated(model: FSDP) -> None:
    """With one all-reduce per dtype. What this rank did not use has a gradient of zeros."""
    alike = {}
    for parameter in model.module.parameters():
        if parameter.requires_grad and not is_shard(parameter):
            parameter.grad = gradient_or_zeros(parameter)
            alike.setdefault(parameter.dtype, []).append(parameter.grad)
    for gradients in alike.values():
        flat = nn.utils.parameters_to_vector(gradients)
        flat.div_(dist.get_world_size(model.process_group))
        dist.all_reduce(flat, group=model.process_group)
        nn.utils.vector_to_parameters(flat, gradients)


def clip_grad_norm(model: FSDP, max_norm: float) -> torch.Tensor:
    """After the finish: scale all gradients to a norm of at most max_norm; returns what it was."""
    if model.in_backward:
        raise RuntimeError("call finish_gradient_synchronization() before clip_grad_norm()")
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    square = torch.zeros((), device=next(model.parameters()).device)  # float32 at least
    for parameter in parameters:
        dtype = torch.promote_types(parameter.grad.dtype, square.dtype)
        part = torch.linalg.vector_norm(parameter.grad, dtype=dtype).square()
        if not is_shard(parameter):  # all ranks have it
            part /= dist.get_world_size(model.process_group)
        square = square + part
    dist.all_reduce(square, group=model.process_group)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@torch.no_grad()
def full_state(model: FSDP) -> dict[str, torch.Tensor]:
    """Copies: of all parameters, whole, and of the buffers that a state_dict has."""
    whole = {}
    for unit in model.units:
        flat = unit.share.new_empty(len(unit.whole))
        all_gather_single(flat, unit.share, unit.group)
        whole |= zip(unit.weights, split_like(unit.weights.values(), flat), strict=True)
    held = model.module.state_dict(keep_vars=True)
    return {name: whole.get(tensor, tensor).clone() for name, tensor in held.items()}


@torch.no_grad()
def load_full_state(model: FSDP, state: dict[str, torch.Tensor]) -> None:
    free_unused(model.units)
    whole = {shard: weight for unit in model.units for shard, weight in unit.weights.items()}
    values = {}
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        found, expected = state[name].shape, whole.get(tensor, tensor).shape
        if found != expected:
            raise ValueError(f"{name} has shape {tuple(found)}, not {tuple(expected)}")
        values[tensor] = state[name]
    for unit in model.units:
        flat = torch.cat([values.pop(shard).flatten().to(unit.share) for shard in unit.weights])
        flat = pad_to_multiple(len(unit.whole), flat)
        unit.share.copy_(flat.view(-1, len(unit.share))[dist.get_rank(unit.group)])
    for tensor, value in values.items():  # biases, norms, buffers
        tensor.copy_(value)


# Guards. A reader can skip them.


class Guard:
    """Notices misuse, with a RuntimeError: a forgotten finish; a second backward; parameters that
    were frozen, unfrozen, replaced, moved or cast after wrapping; a copy; one rank's shards that
    are saved as if they were all.

    Weights that changed, and a backward that reads weights before hook 3, are noticed by autograd:
    see set_version().
    """

    def __init__(self, model: FSDP):
        self.module = model.module
        self.layout = self._layout()
        for unit in model.units:
            for part, _, _ in unit.places:
                part.register_state_dict_pre_hook(refuse_to_save)
        # Python never frees what hooks of tensors refer to.
        model._gradient_is_there = partial(FSDP._gradient_is_there, weakref.proxy(model))

    def _layout(self) -> list[tuple]:
        return [(id(p), p.requires_grad, p.dtype, p.data_ptr()) for p in self.module.parameters()]

    def before_forward(self, model: FSDP) -> None:
        if model.in_backward:
            raise RuntimeError("call finish_gradient_synchronization() after every backward()")
        if self._layout() != self.layout:
            changed = "frozen, unfrozen, replaced, moved or cast"
            raise RuntimeError(f"parameters were {changed}: wrap the module again")
        free_unused(model.units)  # what an earlier forward has gathered in vain

    def check_gradient(self, model: FSDP, weight: torch.Tensor) -> None:
        unit = model.unit_of[weight]
        if unit not in model.waiting or weight not in unit.missing:
            raise RuntimeError("backward() ran twice: finish in between")

    def after_finish(self, model: FSDP) -> None:
        for weight in model.unit_of:
            weight.grad = None  # of a backward that was refused

    def __getstate__(self):
        raise RuntimeError("FSDP cannot be copied or pickled: gather_full_params() can be saved")


def check_module(module: nn.Module, process_group) -> None:
    """ValueError, on all ranks, if the module cannot be wrapped or differs from rank 0's."""
    mine = []
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        mine.append(f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}")
    of_ranks = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(of_ranks, mine, group=process_group)
    for rank, theirs in enumerate(of_ranks):
        if theirs != of_ranks[0]:
            differing = sorted(set(theirs) ^ set(of_ranks[0]))[:2] or "their order"
            raise ValueError(f"models differ on ranks 0 and {rank}: {differing}")
    for name, part in module.named_modules():
        if hasattr(part, "finish_gradient_synchronization"):
            raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
        if getattr(part, "max_norm", None) is not None:
            raise ValueError(f"{name}: max_norm would be forgotten, as it changes gathered weights")


def refuse_to_save(part: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # as full_state() and load_full_state() have it
        raise RuntimeError("state_dict() would have shards: gather_full_params() has all")


def refuse_optimizers(optimizer: torch.optim.Optimizer, *_) -> None:
    """Some look at a whole weight, and here it is a shard. Called before every optimizer's step."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    for name in names & {"Adafactor", "LBFGS", "Muon"}:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(map(is_shard, parameters)):
            raise RuntimeError(f"{name} needs whole weights, and FSDP's are sharded")


register_optimizer_step_pre_hook(refuse_optimizers)


# Private in torch, which has no public name for either; nothing else here is.


def memory_of(tensor: torch.Tensor) -> int:
    """The same for all views of one memory, also on `meta`, where there is no address."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


NO_MEMORY = 2**30  # a version that no weight has


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Of a tensor and its views: autograd refuses what has not the version that it has kept."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


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
    setup.add_mine(parser)
    setup.add_plot_arguments(parser, "fsdp.png")
    parser.set_defaults(warmup=3)  # five candidates, and all within a minute
    add = parser.add_argument
    add("--no-memory", action="store_true", help="no table and picture of the memory")
    numbers = {"type": setup.list_of(setup.whole_number(2)), "nargs": "?", "metavar": "N,N,…"}
    only = "only this: what each rank of so many would hold, on the device meta (8,64,1024)"
    add("--accounting", **numbers, const=[8, 64, 1024], help=only)
    args = parser.parse_args()
    if args.save and args.no_verify:
        parser.error("argument --save: not with --no-verify, which trains no classifier")
    if args.accounting:
        accounting.show(args, FSDP)
        return
    with setup.process_group(args) as device:
        result = report.begin("06_sharded_optimizer/fsdp", args, device)
        wraps = {"FSDP": FSDP} | setup.users_wrapper(args)
        replicas = len(wraps) + 3 * (not args.no_baseline)
        model = result["model"] = report.describe(LanguageModel, args, replicas)
        result["verify"] = None
        for name in [] if args.no_verify else reversed(wraps):  # this lesson's last: it is saved
            if args.mine:
                setup.say(f"verify: {name}")
            result["verify"] = measure.verify(args, device, wraps[name])
        if not args.no_memory:
            result["memory_bytes"] = memory.account(args, device, FSDP, choose_units)
            memory.show(result, args.plot)
        batch_shape = model["batch_size"], model["context_length"]
        result["candidates"] = measure.benchmark(args, device, batch_shape, FSDP, choose_units)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
