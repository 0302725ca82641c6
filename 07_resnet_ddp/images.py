"""07: the images of resnet_ddp.py, at any size: the digits that lie in common/, CIFAR-10, or noise.

resnet_ddp.py imports this file when it runs. Every rank loads both sets whole; which images it
takes from them is sharded_loaders' business.
"""

import io
import os

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image  # torchvision and matplotlib bring it along
from torch.utils.data import Dataset


class Images(Dataset):
    """Images [n, 3, height, width] of any number type and their labels.

    An image is normalised and resized when it is asked for. mean, std: a number per channel.
    """

    def __init__(self, images, labels, mean: list[float], std: list[float], image_size: int):
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


class Photographs:
    """JPEGs in memory: indexing decodes one to uint8 [3, pixels, pixels], as ImageFolder does.

    There are 64 different ones, of soft noise.
    """

    def __init__(self, pixels: int, random: torch.Generator):
        self.files = []
        for _ in range(64):
            noise = torch.randint(256, (1, 3, pixels // 3, pixels // 3), generator=random)
            [soft] = F.interpolate(noise.float(), (pixels, pixels), mode="bilinear")
            file = io.BytesIO()
            Image.fromarray(soft.byte().permute(1, 2, 0).numpy()).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __getitem__(self, i: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(self.files[i % len(self.files)]))
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def load_images(
    data: str | None, download: bool, image_size: int, decode: int | None = None
) -> tuple[Images, Images]:
    """Training and held-out images.

    The digits (1,500 and 297), CIFAR-10 from the folder `data` (50,000 and 10,000), or for
    "synthetic" noise of CIFAR-10's shapes; or JPEGs of `decode` pixels a side, as many.
    """
    from common.setup import fail

    if data is None:
        return load_digits(image_size)
    if data == "synthetic":
        return make_noise(image_size, decode)
    try:
        return load_cifar10(data, download, image_size)
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not CIFAR-10
        reason = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"holds no readable CIFAR-10 ({reason}); --download fetches it"
        fail(f"argument --data: {data!r} {problem}")


def load_digits(image_size: int) -> tuple[Images, Images]:
    """The digits in an order that is always the same; grey becomes three equal channels."""
    from common.setup import ROOT

    digits = numpy.load(ROOT / "common" / "digits.npz")
    shuffled = numpy.random.default_rng(0).permutation(len(digits["labels"]))
    images = torch.tensor(digits["images"][shuffled])[:, None].expand(-1, 3, -1, -1)
    labels = torch.tensor(digits["labels"][shuffled], dtype=torch.int64)
    mean = [4.88] * 3
    std = [6.02] * 3
    held_out = Images(images[:297], labels[:297], mean, std, image_size)
    return Images(images[297:], labels[297:], mean, std, image_size), held_out


def name_of(data: str | None, decode: int | None = None) -> str:
    """How the output calls the images of --data and --decode."""
    if decode:
        return f"synthetic JPEGs of {decode} × {decode} pixels"
    return {None: "digits", "synthetic": "synthetic CIFAR-10"}.get(data, "CIFAR-10")


def make_noise(image_size: int, decode: int | None) -> tuple[Images, Images]:
    """Noise in CIFAR-10's shapes, always the same: it costs what CIFAR-10 costs to load and train.

    Accuracies say nothing. `decode`: JPEGs of so many pixels a side instead.
    """
    random = torch.Generator().manual_seed(0)
    sets = []
    for count in (50_000, 10_000):
        if decode:
            images = Photographs(decode, random)
        else:
            images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=random)
        labels = torch.randint(10, (count,), generator=random)
        sets.append(Images(images, labels, [127.5] * 3, [73.9] * 3, image_size))
    return tuple(sets)


def load_cifar10(folder: str, download: bool, image_size: int) -> tuple[Images, Images]:
    """CIFAR-10 through torchvision; `download`: one rank of each host fetches it first."""
    from torchvision.datasets import CIFAR10

    if download:
        if int(os.environ["LOCAL_RANK"]) == 0:
            CIFAR10(folder, download=True)
        dist.barrier()
    mean = [125.3, 123.0, 113.9]
    std = [63.0, 62.1, 66.7]
    sets = []
    for split in (CIFAR10(folder, train=True), CIFAR10(folder, train=False)):
        images = torch.from_numpy(split.data).permute(0, 3, 1, 2)
        labels = torch.tensor(split.targets)
        sets.append(Images(images, labels, mean, std, image_size))
    return tuple(sets)
