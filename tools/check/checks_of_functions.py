"""What a function has to do that averages gradients after backward, for models that are equal.

It is called as average_gradients(model); nothing of it runs at construction or during backward.
"""

from tools.check import checks_of_wrappers as wrappers

can_be_used = wrappers.can_be_used
OF_WRAPPERS = (
    wrappers.starts_with_the_parameters_of_rank_0,
    wrappers.starts_with_the_buffers_of_rank_0,
    wrappers.accumulates_with_no_sync,
)
COURSE = [check for check in wrappers.COURSE if check not in OF_WRAPPERS]
MEANING = [check for check in wrappers.MEANING if check not in OF_WRAPPERS]
BEYOND = [check for check in wrappers.BEYOND if check is not wrappers.keeps_buffers_equal]
