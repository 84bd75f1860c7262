"""Images on their way to a network: data sets by name, augmentation, and loaders that give batches on a device."""

from .base_loader import Loader
from .datasets import ArrayDataset, Dataset, FileDataset, open_dataset
from .images import Skipped, UnreadableImage
from .loaders import DeviceLoader, WorkerLoader, make_loader, takes_whole_images
from .transforms import CropAndFlip, Normalize, cifar_train, eval_transform, inception_train

__all__ = [
    "ArrayDataset",
    "CropAndFlip",
    "Dataset",
    "DeviceLoader",
    "FileDataset",
    "Loader",
    "Normalize",
    "Skipped",
    "UnreadableImage",
    "WorkerLoader",
    "cifar_train",
    "eval_transform",
    "inception_train",
    "make_loader",
    "open_dataset",
    "takes_whole_images",
]
