"""07: the checkpoints of resnet_ddp.py: a run that is killed goes on after its last whole epoch.

resnet_ddp.py imports this file when it runs. Nothing random is in its training but the order of the
images, which comes from the seed and the epoch; with dropout or augmentation save each rank's
torch.get_rng_state() as well.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from common.setup import fail, say


def save(path: Path, settings: dict, progress: dict, modules: dict) -> None:
    """Write all that the rest of the training depends on, after an epoch; call it on one rank.

    `modules` are model, optimizer and scheduler by name. The file stands there whole, or not at
    all.
    """
    checkpoint = {name: module.state_dict() for name, module in modules.items()}
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        torch.save({"settings": settings, "progress": progress, **checkpoint}, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on the disk before the name is, should power fail
    beside.replace(path)
    say(f"written: {path}")


def load(path: Path, settings: dict, modules: dict) -> dict:
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
    return checkpoint["progress"]


def resume(path: Path, start: dict, settings: dict, modules: dict, device: torch.device) -> dict:
    """The progress to go on from: the checkpoint's if any rank finds it, otherwise `start`.

    Ends the run if a rank cannot read what another one finds.
    """
    ranks_that_find_it = torch.tensor(float(path.exists()), device=device)
    dist.all_reduce(ranks_that_find_it)
    if ranks_that_find_it == 0:
        return start
    try:
        progress = load(path, settings, modules)
    except Exception as error:  # torch.load has many kinds: missing on this host, cut short
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(
            f"argument --checkpoint: rank {dist.get_rank()} cannot resume from '{path}' ({reason})"
        )
    say(f"resumed from {path} after epoch {progress['epoch']}")
    return progress
