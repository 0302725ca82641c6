"""07: the checkpoints of resnet_ddp.py: a run that is killed goes on after its last whole epoch.

resnet_ddp.py imports this file when it runs.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist


def save(path: Path, settings: dict, progress: dict, modules: dict, device: torch.device) -> None:
    """Write all that the rest of the training depends on, after an epoch.

    `modules` are model, optimizer and scheduler by name. The file stands there whole, or not at
    all. The sampler's position is progress["epoch"]: with the seed, one of the settings, it gives
    the next order.
    """
    from common.setup import say

    random_state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random_state["cuda"] = torch.cuda.get_rng_state(device)
    random_states = [None] * dist.get_world_size()
    dist.all_gather_object(random_states, random_state)
    if dist.get_rank() != 0:
        return
    checkpoint = {"settings": settings, "progress": progress, "random_states": random_states}
    for name, module in modules.items():
        checkpoint[name] = module.state_dict()
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on the disk before the name is, should power fail
    beside.replace(path)
    say(f"written: {path}")


def load(path: Path, settings: dict, modules: dict, device: torch.device) -> dict:
    """Restore on this rank what `save` wrote, and return its progress.

    ValueError if the settings were others; only the number of epochs may have grown.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in settings.items():
        written = checkpoint["settings"][name]
        is_longer = name == "epochs" and written < value
        if written != value and not is_longer:
            raise ValueError(f"it was written with {name} {written}, not {value}")
    for name, module in modules.items():
        module.load_state_dict(checkpoint[name])
    random_state = checkpoint["random_states"][dist.get_rank()]
    torch.set_rng_state(random_state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(random_state["cuda"], device)
    return checkpoint["progress"]


def resume(path: Path, start: dict, settings: dict, modules: dict, device: torch.device) -> dict:
    """The progress to go on from: the checkpoint's if any rank finds it, otherwise `start`.

    Ends the run if a rank cannot read what another one finds.
    """
    from common.setup import fail, say

    ranks_that_find_it = torch.tensor(float(path.exists()), device=device)
    dist.all_reduce(ranks_that_find_it)
    if ranks_that_find_it == 0:
        return start
    try:
        progress = load(path, settings, modules, device)
    except Exception as error:  # torch.load has many kinds: missing on this host, cut short
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(
            f"argument --checkpoint: '{path}' is not one that rank {dist.get_rank()} can resume "
            f"from ({reason})"
        )
    say(f"resumed from {path} after epoch {progress['epoch']}")
    return progress
