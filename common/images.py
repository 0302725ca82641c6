"""Small real images: the digits that lie in this folder, or MNIST."""

from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from common.setup import fail


def load_images(data: str | None, download: bool, device="cpu") -> list[torch.Tensor]:
    """Training images, their labels, test images, their labels: float64 [n, pixels], int64 [n].

    Without `data` the 1,797 digits of 8×8 pixels: 297 are held out, the others come ten times, so
    that an epoch is long enough. With `data` MNIST from that folder (28×28).
    """
    if data is None:
        digits = numpy.load(Path(__file__).with_name("digits.npz"))
        shuffled = numpy.random.default_rng(0).permutation(len(digits["labels"]))
        images = torch.tensor(digits["images"][shuffled], dtype=torch.float64).flatten(1) - 8
        labels = torch.tensor(digits["labels"][shuffled], dtype=torch.int64)
        parts = [images[297:].repeat(10, 1), labels[297:].repeat(10), images[:297], labels[:297]]
        return [part.to(device) for part in parts]
    try:
        from torchvision.datasets import MNIST

        if download and dist.get_rank() == 0:
            MNIST(data, download=True)
        dist.barrier()
        parts = []
        for split in (MNIST(data, train=True), MNIST(data, train=False)):
            parts += [split.data.double().flatten(1) / 16 - 8, split.targets]  # as the digits
        return [part.to(device) for part in parts]
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not MNIST
        reason = f"holds no readable MNIST ({error!r}); --download fetches it"
        fail(f"argument --data: {data!r} {reason}")
