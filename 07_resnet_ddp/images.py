"""07: the images of resnet_ddp.py, at any size: the digits that lie in common/, CIFAR-10, or noise.

resnet_ddp.py imports this file when it runs. Every rank has both sets whole; which images it takes
from them is sharded_loaders' business.
"""

import io
import os
from collections.abc import Callable, Sequence

import numpy
import torch
import torch.distributed as dist
from PIL import Image  # torchvision brings it along
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

from common.setup import ROOT, fail


class Images(Dataset):
    """(transform(images[i]), labels[i]): as torchvision's sets, of images that are in memory."""

    def __init__(self, images: Sequence, labels: torch.Tensor, transform: Callable):
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images[i]), self.labels[i]


def to_input(image_size: int, mean: list[float], std: list[float]) -> v2.Compose:
    """From an image, PIL or uint8 [3, height, width], to float32 [3, image_size, image_size].

    mean, std: a number per channel, of values from 0 to 1.
    """
    steps = [v2.PILToTensor(), v2.Resize([image_size, image_size])]
    return v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])


def load_images(
    data: str, download: bool, image_size: int, decode: int | None = None
) -> tuple[Dataset, Dataset]:
    """Training and held-out images.

    "digits" (1,500 and 297); "synthetic": as many as CIFAR-10 has, JPEGs of `decode` pixels a side
    (32 if it is None); or CIFAR-10 from the folder `data` (50,000 and 10,000).
    """
    if data == "digits":
        return load_digits(to_input(image_size, 3 * [0.287], 3 * [0.354]))
    if data == "synthetic":
        transform = v2.Compose([Image.open, to_input(image_size, 3 * [0.5], 3 * [0.25])])
        pixels = decode or 32
        return make_jpegs(pixels, 50_000, transform), make_jpegs(pixels, 10_000, transform)
    try:
        if download and os.environ["LOCAL_RANK"] == "0":
            CIFAR10(data, download=True)
        if download:
            dist.barrier()
        transform = to_input(image_size, [0.491, 0.482, 0.447], [0.247, 0.244, 0.262])
        return CIFAR10(data, True, transform), CIFAR10(data, False, transform)
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not CIFAR-10
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"argument --data: no readable CIFAR-10 in {data!r}; --download fetches it ({reason})")


def load_digits(transform: Callable) -> tuple[Images, Images]:
    """The digits in an order that is always the same; grey becomes three equal channels."""
    digits = numpy.load(ROOT / "common" / "digits.npz")
    order = numpy.random.default_rng(0).permutation(len(digits["labels"]))
    images = 15 * torch.tensor(digits["images"][order])  # from 0 to 240
    images = images[:, None].expand(-1, 3, -1, -1)
    labels = torch.tensor(digits["labels"][order]).long()
    train_set = Images(images[297:], labels[297:], transform)
    return train_set, Images(images[:297], labels[:297], transform)


def make_jpegs(pixels: int, count: int, transform: Callable) -> Images:
    """JPEGs in memory, decoded when they are asked for, as ImageFolder does; always the same.

    64 of them are different, of soft noise.
    """
    random = torch.Generator().manual_seed(count)
    size = [64, 3, pixels // 3, pixels // 3]
    noise = torch.randint(256, size, dtype=torch.uint8, generator=random)
    files = []
    for image in v2.functional.resize(noise, [pixels, pixels]):
        files.append(io.BytesIO())
        v2.functional.to_pil_image(image).save(files[-1], "JPEG")
    labels = torch.randint(10, [count], generator=random)
    return Images((files * (count // 64 + 1))[:count], labels, transform)
