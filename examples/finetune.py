"""Put attention into a pretrained network, and fine-tune it on a folder of images: DIR/{train,val}/CLASS/*.jpg.

python examples/finetune.py DIR --model resnet50.a1_in1k --where 'layer[34].*.conv2' --epochs 5
"""

import argparse

import timm
import torch
from timm.data import create_transform, resolve_model_data_config
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import aaconv

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--model", default="resnet50.a1_in1k", help="any convolutional network of timm")
parser.add_argument("--where", default="layer[34].*.conv2", help="which convolutions, by a pattern of their names")
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--from-scratch", action="store_true", help="without timm's weights, which are downloaded")


def main() -> None:
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classes = len(ImageFolder(f"{chosen.data}/train").classes)
    model = timm.create_model(chosen.model, pretrained=not chosen.from_scratch, num_classes=classes)
    config = resolve_model_data_config(model) | {"input_size": (3, chosen.size, chosen.size)}
    loaders = {}
    for split in ("train", "val"):
        images = ImageFolder(f"{chosen.data}/{split}", create_transform(**config, is_training=split == "train"))
        loaders[split] = DataLoader(images, chosen.batch, shuffle=split == "train", num_workers=2)

    model, report = aaconv.augment(model, chosen.size, where=chosen.where, value_ratio=0.1)
    print(report)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), chosen.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, chosen.lr, chosen.epochs * len(loaders["train"]))
    for epoch in range(chosen.epochs):
        model.train()
        for images, labels in loaders["train"]:
            loss = cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loaders["val"])
        print(f"epoch {epoch + 1}  loss {loss.item():.3f}  top-1 {100 * right / len(loaders['val'].dataset):.1f} %")


if __name__ == "__main__":
    main()
