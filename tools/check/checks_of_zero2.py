"""What ZeRO of stage 2 has to do: train as a wrapper does, with a part of gradients and state.

Its optimizer gets model.shards; gather() or gather_full_params() makes all weights whole.
"""

import torch
import torch.distributed as dist

from tools.check import checks_of_wrappers as wrappers
from tools.check.checks_of_fsdp import large
from tools.check.findings import Failed
from tools.check.models import PLAIN, finish, new, trained, wrap

WHOLE = "reduce-scatter into slices of 1/N, give an optimizer these, and free the weights' .grad"


def keeps_a_part_of_gradients_and_state(mine, layout=PLAIN):
    """a rank keeps its part of the gradients, and so of AdamW's state, and not the whole"""
    module = new(large, layout)
    whole = sum(weight.nbytes for weight in module.parameters())
    model = wrap(mine, module)
    optimizer = torch.optim.AdamW(trained(model))
    model(torch.ones(2, 64)).square().mean().backward()
    finish(model)
    optimizer.step()
    gradients = [each.grad for each in [*trained(model), *module.parameters()]]
    averages = [state["exp_avg"] for state in optimizer.state.values()]
    for what, tensors in (("gradients", gradients), ("state", averages)):
        memory = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        kept = sum({each.data_ptr(): each.nbytes() for each in memory}.values())
        if kept > 1.5 * whole / dist.get_world_size():
            raise Failed(f"a rank keeps {kept / whole:.0%} of the {what}", WHOLE)


RANKS = wrappers.RANKS
can_be_used = wrappers.can_be_used
OF_WRAPPERS = list(wrappers.HAS_TO_HOLD)
OF_WRAPPERS.remove(wrappers.accumulates_with_no_sync)
COURSE = []
MEANING = [*OF_WRAPPERS, keeps_a_part_of_gradients_and_state, wrappers.clips_by_the_norm_of_all]
BEYOND = wrappers.BEYOND
HAS_TO_HOLD = MEANING
