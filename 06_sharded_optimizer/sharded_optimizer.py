r"""06: split the optimizer's state over the ranks (ZeRO, stage 1).

Data-parallel ranks hold the same parameters and the same averaged gradients, so each of them would
keep the same optimizer state and compute the same update. Here every parameter has one owner: that
rank alone keeps its state (for Adam twice the parameter's bytes) and updates it, and then sends the
new values to all others. Gradients are averaged as before, by any of stages 02 to 05.

    make 06_sharded_optimizer NPROC=2                                     (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/sharded_optimizer.py  (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/sharded_optimizer.py                       (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.1 (P_os); Stanford CS336, assignment 2.
"""

import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_map_only


class ShardedOptimizer(torch.optim.Optimizer):
    """Act like `optimizer_cls(params, **options)`, with each parameter's state on one rank only.

        model = DDP(model)  # or another way to give all ranks the same values and gradients
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss_fn(model(x), y).backward()
        optimizer.step()  # with averaged gradients, on all ranks

    Parameters become views into flat buffers: move or cast the model before, not after. It works
    for optimizers that update each parameter from its own gradient alone.
    """

    def __init__(self, params, optimizer_cls, *, process_group=None, **options):
        check_can_be_sharded(optimizer_cls)
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.local = None  # later: an optimizer_cls of all parameters, which steps this rank's own
        self.owners = {}  # parameter -> the rank that keeps its state and updates it
        self.loads = [0] * dist.get_world_size(process_group)  # bytes that each rank owns
        self.flats = []  # what is broadcast, on all ranks in this order
        # 1. The base class calls add_param_group() for each group: owners and buffers.
        super().__init__(params, {})
        # 2. The local optimizer takes these groups, and adds its options to them.
        self.local = optimizer_cls(self.param_groups, **options)
        # 3. From now on both have the same groups, which a scheduler may change, and one state.
        self.defaults = self.local.defaults
        self.param_groups = self.local.param_groups
        self.state = self.local.state
        for parameter, owner in self.owners.items():
            if owner != self.rank:
                self.state.pop(parameter, None)  # Adagrad makes state here, for all parameters

    def add_param_group(self, param_group: dict) -> None:
        """Assign owners to a new group, also in mid-training; older ones keep owner and state."""
        if self.local is None:  # the base class calls it
            super().add_param_group(param_group)
        else:
            self.local.add_param_group(param_group)  # to the list that both have
        parameters = self.param_groups[-1]["params"]
        if any(hasattr(parameter, "is_shard") for parameter in parameters):
            self.param_groups.pop()  # what is refused leaves no trace
            raise ValueError("these are FSDP's or ZeRO2's shards: their state is split already")
        self._choose_owners(parameters)
        alike = {}  # what one buffer can hold; frozen ones, in their own, are not sent
        for p in parameters:
            kind = self.owners[p], p.requires_grad, p.dtype, p.device
            alike.setdefault(kind, []).append(p)
        for (owner, *_), members in alike.items():
            self.flats.append(FlatBuffer(owner, members))

    def _choose_owners(self, parameters: list[nn.Parameter]) -> None:
        """Give the largest first, frozen ones last, to the rank with the fewest bytes."""
        largest_first = sorted(parameters, key=lambda p: (p.requires_grad, p.nbytes), reverse=True)
        for parameter in largest_first:
            owner = self.loads.index(min(self.loads))
            self.loads[owner] += parameter.nbytes
            self.owners[parameter] = owner

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's parameters, and send them. All ranks call a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():  # it runs backward
                loss = closure()
        for flat in self.flats:
            flat.check()
        with self._gradients_of_others_hidden():
            self.local.step()
        self._send_values()
        return loss

    @contextmanager
    def _gradients_of_others_hidden(self):
        """The local optimizer skips a parameter without a gradient, and makes no state for it."""
        others = [parameter for parameter, owner in self.owners.items() if owner != self.rank]
        gradients = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(others, gradients, strict=True):
                parameter.grad = gradient

    def _send_values(self) -> None:
        """Broadcast the new values of each owner's parameters, but for frozen ones."""
        works = []
        for flat in self.flats:
            if any(p.requires_grad or p.grad is not None for p in flat.parameters):
                root = {"group": self.process_group, "group_src": flat.owner}
                works.append(dist.broadcast(flat.values, **root, async_op=True))
        for work in works:
            work.wait()

    def state_dict(self) -> dict:
        """Return the whole state on rank 0, on CPU, as without sharding; elsewhere the groups."""
        saved = self.local.state_dict()
        own = on_cpu(self._own(saved["state"]))
        of_ranks = [None] * len(self.loads) if self.rank == 0 else None  # one for each rank
        dist.gather_object(own, of_ranks, group=self.process_group, group_dst=0)
        whole = {}
        for of_rank in of_ranks or []:
            whole.update(of_rank)
        saved["state"] = {number: whole[number] for number in sorted(whole)}
        return saved

    def load_state_dict(self, state_dict: dict | None) -> None:
        """Load what rank 0 passes: a whole state, saved at any world size or without sharding."""
        received = [on_cpu(state_dict)]
        dist.broadcast_object_list(received, group=self.process_group, group_src=0)
        saved = received[0]
        self.local.load_state_dict({**saved, "state": self._own(saved["state"])})
        self.param_groups = self.local.param_groups  # they are new
        self.state = self.local.state

    def _own(self, state: dict) -> dict:
        """Return what a state_dict has of this rank's parameters, which it numbers by group."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        own = {}
        for number, of_parameter in state.items():
            if self.owners[parameters[number]] == self.rank:
                own[number] = of_parameter
        return own


def train_step(model, optimizer, inputs, targets):
    """Train on this rank's share of a batch; return its loss."""
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# ==================================================================================================
# Below this line: what is refused, flat buffers, and the comparison.


def check_can_be_sharded(optimizer_cls) -> None:
    """Raise ValueError, as far as one can tell, where a rank's part would be another optimizer."""
    if optimizer_cls is torch.optim.LBFGS:
        raise ValueError("LBFGS looks at all parameters at once: use it without sharding")
    if hasattr(optimizer_cls, "train"):
        raise ValueError("its train() and eval() would change the parameters of one rank alone")


class FlatBuffer:
    """Holds the values of alike parameters of one owner: they become views into it."""

    def __init__(self, owner: int, parameters: list[nn.Parameter]):
        self.owner = owner
        self.parameters = parameters
        size = sum(parameter.numel() for parameter in parameters)
        self.values = parameters[0].detach().new_empty(size)
        for parameter, view in zip(parameters, views_like(parameters, self.values), strict=True):
            parameter.data = view.copy_(parameter.detach())  # the same parameter in new memory

    def check(self) -> None:
        """Raise RuntimeError if a parameter is no longer a view."""
        address = self.values.untyped_storage().data_ptr()
        if any(p.untyped_storage().data_ptr() != address for p in self.parameters):
            raise RuntimeError("a parameter has left its flat buffer: move or cast it before")


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


def on_cpu(state: dict) -> dict:
    """Return a copy of a state, with all tensors on the CPU."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


def of_adamw(cls):
    """Let a class shard AdamW."""
    return lambda params, **options: cls(params, torch.optim.AdamW, **options)


def main():
    stage = Path(__file__).resolve().parent
    sys.path[:0] = [str(stage), str(stage.parent), str(stage.parent / "05_bucketed" / "compare")]
    try:
        from memory import account
        from users_class import users_rows

        from common import ladder
    except ModuleNotFoundError as error:
        folders = "common/, 05_bucketed/compare/ and 06_sharded_optimizer/"
        sys.exit(f"error: {error}: copy the repository's folders {folders}")
    parser = ladder.stage_parser(__doc__)
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    args = parser.parse_args()
    averages = ladder.torch_ddp()[ladder.TORCH_DDP]  # of gradients, in every row
    ours = {"ShardedOptimizer": ShardedOptimizer, **users_rows(args.mine)}
    ours = {name: averages._replace(optimizer=of_adamw(each)) for name, each in ours.items()}
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    views = partial(zero, parameters_as_bucket_view=True)
    others = {
        ladder.TORCH_DDP: averages,
        "torch ZeRO": averages._replace(optimizer=zero),
        "torch ZeRO view": averages._replace(optimizer=views),
    }
    ladder.main(args, train_step, ours, others, account)


if __name__ == "__main__":
    main()
