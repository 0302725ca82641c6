"""What a course's tests call; not all of it is written."""

from course_systems.attention import Attention


def get_attention():
    return Attention


def get_ddp(module):
    from a_course.model import Linear
    from course_systems.ddp import DDP

    assert type(module.first) is type(module.last) is Linear
    return DDP(module)


def ddp_on_after_backward(ddp_model, optimizer):
    assert optimizer.param_groups
    ddp_model.finish_gradient_synchronization()


def ddp_on_train_batch_start(ddp_model, optimizer):
    ddp_model.start()


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    from course_systems.mistakes import RightShards

    return RightShards(params, optimizer_cls, **kwargs)


def get_fsdp(module):
    from course_systems.fsdp import FSDP

    return FSDP(module)


def get_ddp_bucketed(module):
    raise NotImplementedError
