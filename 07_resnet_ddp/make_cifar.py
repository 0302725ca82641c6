"""07: write a synthetic data set of CIFAR-10's size, in CIFAR-10's own file format.

    python 07_resnet_ddp/make_cifar.py results/cifar
    python 07_resnet_ddp/resnet_ddp.py --data results/cifar --image-size 224 --workers 2

50,000 training and 10,000 test images of 32 × 32 × 3, 184 MB, for measuring where CIFAR-10 cannot
be fetched: loading, resizing and batching cost what they cost there, because the files hold raw
bytes. Accuracies say nothing about CIFAR-10. An image is a grating in noise; its class decides
angle and colour. The files lie where torchvision looks for CIFAR-10's, with a list of their
checksums (synthetic.json) beside them, by which images.py tells them from the real ones.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; the format is
that of cifar-10-python.tar.gz.
"""

import hashlib
import json
import pickle
import sys
from pathlib import Path

import numpy

FOLDER = "cifar-10-batches-py"  # where torchvision looks, in the folder that it is told
SUMS = "synthetic.json"
CLASSES = 10


def make_images(count: int, random: numpy.random.Generator) -> tuple[numpy.ndarray, list[int]]:
    """Images uint8 [count, 3072], red, green, blue, each row by row; labels from 0 to 9."""
    labels = random.integers(0, CLASSES, count)
    angle = labels * numpy.pi / CLASSES + random.normal(0, 0.05, count)
    frequency = random.uniform(0.5, 1.0, count)
    phase = random.uniform(0, 2 * numpy.pi, count)
    y, x = numpy.mgrid[0:32, 0:32].reshape(2, 1, -1)
    along = x * numpy.cos(angle)[:, None] + y * numpy.sin(angle)[:, None]
    wave = numpy.sin(frequency[:, None] * along + phase[:, None])
    hue = labels[:, None] * 2 * numpy.pi / CLASSES + numpy.array([0, 2, 4]) * numpy.pi / 3
    colour = 123 + 30 * numpy.cos(hue)
    images = colour[:, :, None] + 30 * wave[:, None, :]
    images += random.normal(0, 45, images.shape)
    images = images.clip(0, 255).astype(numpy.uint8)
    return images.reshape(count, 3072), labels.tolist()


def write(folder: Path, per_file: int = 10_000, seed: int = 0) -> None:
    """Write five training files, a test file and batches.meta, `per_file` images in each.

    The same seed gives the same files.
    """
    inner = folder / FOLDER
    inner.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(seed)
    contents = {"batches.meta": {"label_names": [f"class {i}" for i in range(CLASSES)]}}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        images, labels = make_images(per_file, random)
        files = [f"synthetic_{name}_{i}.png" for i in range(per_file)]
        contents[name] = {"batch_label": name, "data": images, "labels": labels, "filenames": files}
    sums = {}
    for name, content in contents.items():
        text = pickle.dumps(content)
        (inner / name).write_bytes(text)
        sums[name] = hashlib.md5(text).hexdigest()
    (inner / SUMS).write_text(json.dumps(sums, indent=1) + "\n")  # last: whoever finds it has all


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder.parent)]
    try:
        from common import setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = setup.Parser(__doc__)
    parser.add_argument("folder", metavar="DIR", help="where to write; it is made if not there")
    images = "images per file; five files are for training, one for testing"
    per_file = {"type": setup.whole_number(1, 10_000), "default": 10_000}
    parser.add_argument("--per-file", **per_file, metavar="N", help=images)
    parser.add_argument("--seed", type=setup.whole_number(0), default=0)
    args = parser.parse_args()
    target = Path(args.folder or "/dev/null")
    inner = target / FOLDER
    if (inner / "data_batch_1").exists() and not (inner / SUMS).exists():
        setup.fail(f"argument DIR: '{args.folder}' holds another CIFAR-10; name another folder")
    try:
        write(target, args.per_file, args.seed)
    except OSError as error:
        setup.fail(f"argument DIR: '{args.folder}' cannot be written ({error.strerror})")
    counts = f"{5 * args.per_file} training and {args.per_file} test images"
    setup.say(f"written: {inner}: {counts}, synthetic")


if __name__ == "__main__":
    main()
