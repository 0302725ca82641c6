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
from collections import ChainMap
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
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
        self.process_group, self.rank = process_group, dist.get_rank(process_group)
        self.local = None  # later: an optimizer_cls with the same groups and state
        self.owners = {}  # parameter -> the rank that keeps its state and updates it
        self.loads = [0] * dist.get_world_size(process_group)  # bytes that each rank owns
        self.flats = []  # what is broadcast, on all ranks in this order
        super().__init__(params, {})  # calls add_param_group() for each group
        self.local = optimizer_cls(self.param_groups, **options)
        self.defaults, self.state = self.local.defaults, self.local.state
        self.param_groups = self.local.param_groups  # both have what a scheduler changes in them
        for parameter, owner in self.owners.items():
            if owner != self.rank:
                self.state.pop(parameter, None)  # Adagrad makes it at once

    def add_param_group(self, param_group: dict) -> None:
        """Assign owners to a new group, also in mid-training; older ones keep owner and state."""
        (self.local or super()).add_param_group(param_group)  # to the list that both have
        parameters = self.param_groups[-1]["params"]
        if any(hasattr(parameter, "is_shard") for parameter in parameters):
            self.param_groups.pop()  # what is refused leaves no trace
            raise ValueError("these are FSDP's shards: their state is split already")
        self._choose_owners(parameters)
        alike = {}  # what one buffer can hold; frozen ones, in their own, are not sent
        for p in parameters:
            alike.setdefault((self.owners[p], p.requires_grad, p.dtype, p.device), []).append(p)
        self.flats += [FlatBuffer(self.owners[each[0]], each) for each in alike.values()]

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
        with torch.enable_grad():  # a closure runs backward
            loss = closure() if closure is not None else None
        for flat in self.flats:
            flat.check()
        hidden = {p: p.grad for p, owner in self.owners.items() if owner != self.rank}
        try:
            for parameter in hidden:
                parameter.grad = None  # the local optimizer skips it, and makes no state
            self.local.step()
        finally:
            for parameter, gradient in hidden.items():
                parameter.grad = gradient
        works = []
        for flat in self.flats:
            if any(p.requires_grad or p.grad is not None for p in flat.parameters):
                root = {"group": self.process_group, "group_src": flat.owner}
                works.append(dist.broadcast(flat.values, **root, async_op=True))
        for work in works:
            work.wait()
        return loss

    def _own(self, state: dict) -> dict:
        """Return what a state_dict has of this rank's parameters, which are numbers there."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {n: each for n, each in state.items() if self.owners[parameters[n]] == self.rank}

    def state_dict(self) -> dict:
        """Return the whole state on rank 0, on CPU, as without sharding; elsewhere the groups."""
        saved, of_ranks = self.local.state_dict(), [{} for _ in self.loads]
        own, received = on_cpu(self._own(saved["state"])), of_ranks if self.rank == 0 else None
        dist.gather_object(own, received, group=self.process_group, group_dst=0)
        return {**saved, "state": dict(sorted(ChainMap(*of_ranks).items()))}

    def load_state_dict(self, state_dict: dict | None) -> None:
        """Load what rank 0 passes: a whole state, saved at any world size or without sharding."""
        received = [on_cpu(state_dict)]
        dist.broadcast_object_list(received, group=self.process_group, group_src=0)
        self.local.load_state_dict({**received[0], "state": self._own(received[0]["state"])})
        self.param_groups, self.state = self.local.param_groups, self.local.state  # new ones


# ==================================================================================================
# Below this line: what is refused, flat buffers, main.


def check_can_be_sharded(optimizer_cls) -> None:
    """Raise ValueError, as far as one can tell, where a rank's part would be another optimizer."""
    if optimizer_cls is torch.optim.LBFGS:
        raise ValueError("LBFGS looks at all parameters at once: use it without sharding")
    if hasattr(optimizer_cls, "train"):
        raise ValueError("its train() and eval() would change the parameters of one rank alone")


class FlatBuffer:
    """Holds the values of alike parameters of one owner: they become views into it."""

    def __init__(self, owner: int, parameters: list[nn.Parameter]):
        self.owner, self.parameters = owner, parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.values = parameters[0].detach().new_empty(sum(sizes))
        for parameter, piece in zip(parameters, self.values.split(sizes), strict=True):
            strides = torch.empty_like(parameter, device="meta").stride()  # channels_last, too
            view = piece.as_strided(parameter.shape, strides)
            parameter.data = view.copy_(parameter.detach())

    def check(self) -> None:
        address = self.values.untyped_storage().data_ptr()
        if any(p.untyped_storage().data_ptr() != address for p in self.parameters):
            raise RuntimeError("a parameter has left its flat buffer: move or cast it before")


def on_cpu(state: dict) -> dict:
    """Return a copy of a state, with all tensors on the CPU."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


def of_adamw(cls):
    """Let a class shard AdamW."""
    return lambda params, **options: cls(params, torch.optim.AdamW, **options)


def main():
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]
    try:
        from memory import account

        from common import ladder
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ and memory.py, too")
    parser = ladder.stage_parser(__doc__)
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    args = parser.parse_args()
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    ours = {"ShardedOptimizer": of_adamw(ShardedOptimizer)}
    ours |= {name: of_adamw(each) for name, each in ladder.users_rows(args).items()}
    others = {"AdamW": torch.optim.AdamW, "torch ZeRO": zero}
    others["torch ZeRO view"] = partial(zero, parameters_as_bucket_view=True)
    ddp = ladder.torch_ddp(args)["torch DDP"]  # averages the gradients in every row
    ours = {name: ddp._replace(optimizer=each) for name, each in ours.items()}
    others = {name: ddp._replace(optimizer=each) for name, each in others.items()}
    ladder.main(args, ours, others, "torch ZeRO", account)


if __name__ == "__main__":
    main()
