r"""07: what sweep.py measures: the classification models of torchvision, or a model of your own.

Write a class with these three methods into a file, and name both:

    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/sweep/sweep.py \
        --model my_model.py:MyBenchmark

    import torch
    from torch import nn
    from sweep_models import Benchmark

    class MyBenchmark(Benchmark):
        def create_model(self):
            return nn.Linear(1000, 10).to(self.device)
        def generate_inputs(self):
            return [torch.rand(self.batch_size, 1000, device=self.device)]
        def generate_target(self):
            return torch.randint(10, (self.batch_size,), device=self.device)

Its batch_size and image_size are its own, 32 and 224 if it sets none; --batch-size and --image-size
win over them.

Source: `Benchmark` of PyTorch's benchmarks/distributed/ddp; its subclasses work here unchanged.
"""

import torch
import torchvision
from torch import nn

from common.setup import fail, load


class Benchmark:
    """What makes a model and one batch of inputs and targets for cross_entropy, on self.device."""

    batch_size = 32
    image_size = 224

    def __init__(self, device: torch.device, distributed_backend: str, bucket_size: int):
        self.device = device
        self.distributed_backend = distributed_backend
        self.bucket_size = bucket_size


class TorchvisionBenchmark(Benchmark):
    """A classification model of torchvision, float [batch_size, 3, image_size, image_size]."""

    name = "resnet50"

    def create_model(self) -> nn.Module:
        return torchvision.models.get_model(self.name).to(self.device)

    def generate_inputs(self) -> list[torch.Tensor]:
        size = self.batch_size, 3, self.image_size, self.image_size
        return [torch.rand(size, device=self.device)]

    def generate_target(self) -> torch.Tensor:
        return torch.randint(1000, (self.batch_size,), device=self.device)


def make(name: str, args, device: torch.device) -> Benchmark:
    """The benchmark of this name: a model of torchvision, or FILE.py:CLASS if that gives one."""
    create = load(name) if ".py:" in name else TorchvisionBenchmark
    benchmark = create(device, args.backend, args.bucket_size_mb)
    if create is TorchvisionBenchmark:
        benchmark.name = name
        if not args.full:
            benchmark.batch_size, benchmark.image_size = 8, 64
    benchmark.batch_size = args.batch_size or benchmark.batch_size
    benchmark.image_size = args.image_size or benchmark.image_size
    return benchmark


def check(args) -> None:
    """End the run now if a model is not there, or cannot be trained on such images.

    torchvision's are tried without memory, on torch's meta device.
    """
    for name in args.model:
        try:
            benchmark = make(name, args, torch.device("meta"))
            if isinstance(benchmark, TorchvisionBenchmark):
                with benchmark.device:
                    benchmark.create_model()(*benchmark.generate_inputs())
        except Exception as error:  # assertions, shapes that don't fit, whatever a file does, …
            reason = (str(error) or type(error).__name__).splitlines()[0]
            fail(f"argument --model: '{name}' cannot be trained: {reason}")
