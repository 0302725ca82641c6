"""05, predict: models of several kinds, each by a function that `MINE=` takes.

    make predict MINE=05_bucketed/predict/models.py:resnet18 NETWORK=1gbit,1ms

A function returns a model, and a function of it that returns the loss of one batch.
"""

import torch
import torch.nn.functional as F
import torchvision.models
from torch import nn


def classifier(model: nn.Module, batch_size: int):
    """Return the model and its loss on random images of 64 pixels."""
    images = torch.randn(batch_size, 3, 64, 64)
    labels = torch.randint(1000, (batch_size,))
    return model, lambda model: F.cross_entropy(model(images), labels)


def resnet18():
    return classifier(torchvision.models.resnet18(), batch_size=8)


def mobilenet():
    return classifier(torchvision.models.mobilenet_v3_small(), batch_size=16)


def vit():
    return classifier(torchvision.models.vit_b_16(image_size=64), batch_size=4)


def mlp():
    """Of its 68 MB 64 are one weight."""
    layers = nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    inputs = torch.randn(128, 256)
    labels = torch.randint(10, (128,))
    return nn.Sequential(*layers), lambda model: F.cross_entropy(model(inputs), labels)


class LSTM(nn.Module):
    """Tokens int64 [batch, length] -> logits [batch, length, 4000]."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4000, 512)
        self.lstm = nn.LSTM(512, 512, num_layers=3, batch_first=True)
        self.head = nn.Linear(512, 4000)

    def forward(self, tokens):
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states)


def lstm():
    tokens, targets = torch.randint(4000, (2, 8, 48))
    return LSTM(), lambda model: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def convolutions(channels: int, outputs: int) -> nn.Module:
    """Return two convolutions with BatchNorm."""
    layers = []
    for inputs in (channels, outputs):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images [batch, 3, height, width] -> logits [batch, 2, height, width]."""

    def __init__(self, widths=(24, 48, 96, 192, 384)):
        super().__init__()
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        self.merge = nn.ModuleList()
        channels = 3
        for width in widths:
            self.down.append(convolutions(channels, width))
            channels = width
        for width in widths[-2::-1]:
            self.up.append(nn.ConvTranspose2d(2 * width, width, 2, stride=2))
            self.merge.append(convolutions(2 * width, width))
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x):
        kept = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], dim=1))
        return self.head(x)


def unet():
    images = torch.randn(4, 3, 64, 64)
    masks = torch.randint(2, (4, 64, 64))
    return UNet(), lambda model: F.cross_entropy(model(images), masks)
