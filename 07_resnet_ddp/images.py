"""07: the images of resnet_ddp.py: the digits that lie in common/, or CIFAR-10, at any size.

resnet_ddp.py imports this file when it runs. Every rank loads both sets whole; which images it
takes from them is sharded_loaders' business.
"""

import json
import os
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import Dataset


class Images(Dataset):
    """Images [n, 3, height, width] of any number type and their labels.

    An image is normalised and resized when it is asked for. mean, std: a number per channel.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        mean: list[float],
        std: list[float],
        image_size: int,
    ):
        self.images = images
        self.labels = labels
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)
        self.size = (image_size, image_size)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = (self.images[i].float() - self.mean) / self.std
        [image] = F.interpolate(image[None], self.size, mode="bilinear")
        return image, self.labels[i]


def load_images(data: str | None, download: bool, image_size: int) -> tuple[Images, Images]:
    """Training and held-out images: the digits (1,500 and 297), or CIFAR-10 from `data`."""
    from common.setup import fail

    if data is None:
        return load_digits(image_size)
    try:
        return load_cifar10(data, download, image_size)
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not CIFAR-10
        reason = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"holds no readable CIFAR-10 ({reason}); --download fetches it"
        fail(f"argument --data: {data!r} {problem}")


def load_digits(image_size: int) -> tuple[Images, Images]:
    """The digits in an order that is always the same; grey becomes three equal channels."""
    import common.setup

    digits = numpy.load(Path(common.setup.__file__).with_name("digits.npz"))
    shuffled = numpy.random.default_rng(0).permutation(len(digits["labels"]))
    images = torch.tensor(digits["images"][shuffled])[:, None].expand(-1, 3, -1, -1)
    labels = torch.tensor(digits["labels"][shuffled], dtype=torch.int64)
    mean = [4.88] * 3
    std = [6.02] * 3
    held_out = Images(images[:297], labels[:297], mean, std, image_size)
    return Images(images[297:], labels[297:], mean, std, image_size), held_out


def name_of(data: str | None) -> str:
    """How the output calls the images of --data."""
    if data is None:
        return "digits"
    return "synthetic CIFAR-10" if own_sums(data) else "CIFAR-10"


def own_sums(folder: str) -> dict | None:
    """The checksums that make_cifar.py wrote beside its files; None: they are CIFAR-10's own."""
    path = Path(folder) / "cifar-10-batches-py" / "synthetic.json"
    return json.loads(path.read_text()) if path.exists() else None


def loader_class(folder: str) -> type:
    """torchvision's CIFAR10, which knows the real files by their checksums, or one of others."""
    from torchvision.datasets import CIFAR10

    sums = own_sums(folder)
    if sums is None:
        return CIFAR10

    class Synthetic(CIFAR10):
        train_list = [[name, sums[name]] for name, _ in CIFAR10.train_list]
        test_list = [[name, sums[name]] for name, _ in CIFAR10.test_list]
        meta = CIFAR10.meta | {"md5": sums["batches.meta"]}

    return Synthetic


def load_cifar10(folder: str, download: bool, image_size: int) -> tuple[Images, Images]:
    """CIFAR-10 through torchvision; `download`: one rank of each host fetches it first."""
    loader = loader_class(folder)
    if download:
        if int(os.environ["LOCAL_RANK"]) == 0:
            loader(folder, download=True)
        dist.barrier()
    mean = [125.3, 123.0, 113.9]
    std = [63.0, 62.1, 66.7]
    sets = []
    for split in (loader(folder, train=True), loader(folder, train=False)):
        images = torch.from_numpy(split.data).permute(0, 3, 1, 2)
        labels = torch.tensor(split.targets)
        sets.append(Images(images, labels, mean, std, image_size))
    return tuple(sets)
