"""07: the images of resnet_ddp.py, at any size: the digits of common/, or CIFAR-10.

Every rank has both sets whole, and loaders_of_shares chooses its images from them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

from common import setup


@dataclass
class Images(Dataset):
    """Holds images in memory, and gives (transform(images[i]), labels[i]) as torchvision's sets."""

    images: torch.Tensor
    labels: torch.Tensor
    transform: Callable

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images[i]), self.labels[i]


def to_input(image_size: int, mean: list[float], std: list[float]) -> v2.Compose:
    """Return what makes float32 [3, image_size, image_size] of PIL or uint8 [3, height, width].

    mean, std: a number per channel, of values from 0 to 1.
    """
    steps = [v2.PILToTensor(), v2.Resize([image_size, image_size])]
    return v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])


def image_sets(data: str | None, download: bool, image_size: int) -> tuple[Dataset, Dataset]:
    """Return training and held-out images.

    They are CIFAR-10 from the folder `data` (50,000 and 10,000), which `download` fills first, or
    else the digits (1,500 and 297).
    """
    if not data and not download:
        digits, labels = setup.load_digits()
        grey = (15 * digits)[:, None].expand(-1, 3, -1, -1)  # from 0 to 240, in three channels
        transform = to_input(image_size, 3 * [0.287], 3 * [0.354])
        train_set = Images(grey[297:], labels[297:], transform)
        return train_set, Images(grey[:297], labels[:297], transform)
    try:
        if download:
            # Rank 0 first: if its folder is that of all hosts, the others find everything there.
            for number in ("RANK", "LOCAL_RANK"):
                if os.environ[number] == "0":
                    CIFAR10(data, download=True)
                dist.barrier()
        transform = to_input(image_size, [0.491, 0.482, 0.447], [0.247, 0.244, 0.262])
        return CIFAR10(data, True, transform), CIFAR10(data, False, transform)
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not CIFAR-10
        setup.fail(
            f"argument --data: {data!r} holds no readable CIFAR-10 ({error!r}): fetch it with "
            "--download, and raise --timeout if that takes long"
        )
