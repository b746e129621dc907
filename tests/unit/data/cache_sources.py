"""Real data for the cache's tests: scikit-learn's digits, and the same digits as a folder of JPEG files."""

import io

import numpy as np
import torch
from PIL import Image

from thinwire.systems.data import CachedDataset
from thinwire.systems.data.arena import table_bytes
from thinwire.systems.data.values import pack


class Digits:
    """(image, label) as scikit-learn has them: a float64 array and a numpy integer."""

    def __init__(self, count=60):
        from sklearn.datasets import load_digits  # seconds, which every process that collects tests would spend

        data = load_digits()
        self.images, self.labels = data.images[:count], data.target[:count]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Jpegs:
    """A folder of JPEG files, listed as torchvision lists them; samples are (bytes, label)."""

    def __init__(self, folder, count=24):
        digits = Digits(count)
        self.samples = []
        for i, (image, label) in enumerate(digits):
            path = folder / f"{i:03d}.jpg"
            write_jpeg(path, image)
            self.samples.append((str(path), int(label)))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with open(path, "rb") as file:
            return file.read(), label


def write_jpeg(path, image):
    Image.fromarray((image * 15.9).astype(np.uint8)).resize((32, 32)).save(path, quality=90)


def decode(raw):
    data, label = raw
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)))), label


def scale(raw):
    image, label = raw
    return torch.tensor(image, dtype=torch.float32) / 16, int(label)


def shift(value, generator):
    """Moved by up to two pixels, with noise: in place, as augmentations like to be."""
    image, label = value
    dy, dx = torch.randint(-2, 3, (2,), generator=generator).tolist()
    image = torch.roll(image.float(), (dy, dx), (0, 1))
    return image.add_(torch.rand(image.shape, generator=generator)), label


def cached(source, prefix=scale, suffix=shift, **options):
    named = {"dataset_id": "digits", "version": 1, "prefix_id": prefix.__name__, "memory_bytes": 8 << 20}
    return CachedDataset(source, prefix, suffix, **{**named, **options})


def bytes_for(source, prefix, kept):
    """memory_bytes that hold exactly so many samples of equal size."""
    size = len(pack(prefix(source[0])))
    return table_bytes(max(16, 3 * (len(source) + 1) // 2)) + kept * (-(-size // 64) * 64)


def same(a, b):
    return torch.equal(a[0], b[0]) and a[1] == b[1]
