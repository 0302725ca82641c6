r"""07: what sweep.py measures: torchvision's classification models, or a model of your own.

For your own, write a class with these three methods into a file, and name both:

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

Its batch_size and image_size come from the flags (8 and 64 by default, 32 and 224 with --full).

Source: `Benchmark` of PyTorch's benchmarks/distributed/ddp.
"""

import torch
import torchvision
from torch import nn

from common.setup import fail, load


class Benchmark:
    """Makes a model and one batch of inputs and targets for cross_entropy, on self.device."""

    def __init__(self, device: torch.device, distributed_backend: str, bucket_size: int):
        self.device = device
        self.distributed_backend = distributed_backend
        self.bucket_size = bucket_size


class TorchvisionBenchmark(Benchmark):
    """Makes a torchvision model, and float inputs [batch_size, 3, image_size, image_size]."""

    def create_model(self) -> nn.Module:
        return torchvision.models.get_model(self.name).to(self.device)

    def generate_inputs(self) -> list[torch.Tensor]:
        size = self.batch_size, 3, self.image_size, self.image_size
        return [torch.rand(size, device=self.device)]

    def generate_target(self) -> torch.Tensor:
        return torch.randint(1000, (self.batch_size,), device=self.device)


def make(name: str, args, device: torch.device, backend: str) -> Benchmark:
    """Return the benchmark of a torchvision model, or of FILE.py:CLASS."""
    try:
        create = load(name) if ".py:" in name else TorchvisionBenchmark
        benchmark = create(device, backend, args.bucket_size_mb)
        if create is TorchvisionBenchmark:
            torchvision.models.get_model_builder(name)  # is there one?
    except Exception as error:  # whatever a file does
        fail(f"argument --model: '{name}' is no model to measure ({error!r})")
    benchmark.name = name
    benchmark.batch_size = args.batch_size or (32 if args.full else 8)
    benchmark.image_size = args.image_size or (224 if args.full else 64)
    return benchmark
