"""What ZeRO of stage 2 has to do: train as a wrapper does, with a part of gradients and state.

Its optimizer gets model.shards; gather() or gather_full_params() makes all weights whole.
"""

import torch
import torch.distributed as dist

from tools.check import checks_of_wrappers as wrappers
from tools.check.checks_of_fsdp import large
from tools.check.checks_of_wrappers import can_be_used
from tools.check.findings import Failed
from tools.check.models import PLAIN, finish, new, trained, wrap

WHOLE = "reduce-scatter into slices of 1/N, give an optimizer these, and free the weights' .grad"


def keeps_a_part_of_gradients_and_state(mine, layout=PLAIN):
    """a rank keeps its part of the gradients, and so of AdamW's state, and not the whole"""
    module = new(large, layout).to(layout.dtype)
    whole = sum(weight.nbytes for weight in module.parameters())
    model = wrap(mine, module)
    optimizer = torch.optim.AdamW(trained(model))
    model(torch.ones(2, 64, dtype=layout.dtype)).square().mean().backward()
    finish(model)
    optimizer.step()
    gradients = [each.grad for each in [*trained(model), *module.parameters()]]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    for name, tensors in (("gradients", gradients), ("moments", moments)):
        memory = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        kept = sum({each.data_ptr(): each.nbytes() for each in memory}.values()) / whole
        needed = 1 / dist.get_world_size()
        if kept > 1.5 * needed:
            raise Failed(f"a rank keeps {kept:.0%} of the {name}, and needs {needed:.0%}", WHOLE)


RANKS = 3
COURSE = []
MEANING = [
    can_be_used,
    wrappers.starts_with_the_parameters_of_rank_0,
    wrappers.leaves_weights_to_the_optimizer,
    wrappers.trains_with_sgd,
    wrappers.trains_tied_and_frozen_weights,
    keeps_a_part_of_gradients_and_state,
    wrappers.starts_with_the_buffers_of_rank_0,
    wrappers.trains_several_dtypes,
    wrappers.averages_what_is_not_contiguous,
    wrappers.keeps_one_order_on_any_branch,
    wrappers.trains_sizes_that_ranks_cannot_divide,
    wrappers.accumulates_without_no_sync,
    wrappers.trains_after_two_forwards,
    wrappers.evaluates_in_between,
    wrappers.clips_by_the_norm_of_all,
]
BEYOND = wrappers.BEYOND
HAS_TO_HOLD = MEANING
