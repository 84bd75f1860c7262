"""Data sets by name: the real files where they lie beside the repository, and all that can be wrong with files."""

import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
import threading
import types
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from aaconv.data import ArrayDataset, FileDataset, UnreadableImage, open_dataset
from support.places import SHARED_DATA

DATA = SHARED_DATA
CIFAR_PIECES = DATA / "cifar100"
IMAGENETTE = DATA / "imagenette160"


@pytest.fixture(scope="module")
def cifar_dir(tmp_path_factory):
    if not (CIFAR_PIECES / "unpack.py").exists():
        pytest.skip(f"no CIFAR-100 in {CIFAR_PIECES}")
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, CIFAR_PIECES / "unpack.py", folder], check=True, capture_output=True)
    return folder


def save_image(path, colour=(200, 30, 30), size=(12, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def make_folder(root, classes=("ant", "bee"), number=3):
    for split in ("train", "val"):
        for label, name in enumerate(classes):
            for image in range(number):
                save_image(root / split / name / f"{image}.png", (60 * label, 10 * image, 0))
    return root


# CIFAR


@pytest.mark.slow
def test_cifar100_is_the_published_one(cifar_dir):
    train, test = open_dataset("cifar100", cifar_dir), open_dataset("cifar100", cifar_dir, "test")
    assert isinstance(train, ArrayDataset)
    assert train.images.shape == (50_000, 32, 32, 3)
    assert train.images.dtype == torch.uint8
    assert len(test) == 10_000
    assert train.labels.bincount().tolist() == [500] * 100
    assert test.labels.bincount().tolist() == [100] * 100
    assert train.classes[:3] == ("apple", "aquarium_fish", "baby")
    with Image.open(CIFAR_PIECES / "train-007.webp") as column:
        pixels = np.asarray(column.convert("RGB")).reshape(500, 32, 32, 3)
    assert np.array_equal(train.images[3500:4000].numpy(), pixels)
    mean = (train.images[::10].double() / 255).mean((0, 1, 2))
    assert torch.allclose(mean, torch.tensor(train.mean).double(), atol=5e-3)


def test_cifar_folder_itself_may_be_named(cifar_dir):
    assert len(open_dataset("cifar100", cifar_dir / "cifar-100-python", "test")) == 10_000


def test_truncated_cifar_is_refused_by_name(cifar_dir, tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "meta"):
        (folder / name).symlink_to(cifar_dir / "cifar-100-python" / name)
    with (cifar_dir / "cifar-100-python" / "test").open("rb") as file:
        (folder / "test").write_bytes(file.read(1_000_000))
    with pytest.raises(ValueError, match=r"cifar-100-python/test is not the published file") as error:
        open_dataset("cifar100", tmp_path)
    assert "\n" not in str(error.value)


class TouchesAFile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("official", [CIFAR10, CIFAR100])
def test_pickle_with_code_in_it_is_refused_and_not_run(official, tmp_path):
    folder, trace = tmp_path / official.base_folder, tmp_path / "it-ran"
    folder.mkdir()
    code = pickle.dumps(TouchesAFile(trace))
    for name, _ in [*official.train_list, *official.test_list, (official.meta["filename"], "")]:
        (folder / name).write_bytes(code)
    with pytest.raises(ValueError, match="is not the published file"):
        open_dataset(official.__name__.lower(), tmp_path)
    assert not trace.exists()
    pickle.loads(code).close()
    assert trace.exists(), "the pickle would have run code"


def test_cifar_half_there_says_what_is_missing(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "train").write_bytes(b"some")
    monkeypatch.setattr(CIFAR100, "train_list", [["train", hashlib.md5(b"some").hexdigest()]])
    with pytest.raises(FileNotFoundError, match=r"cifar-100-python/test is missing; unpack https://"):
        open_dataset("cifar100", tmp_path)


def test_cifar_without_network_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("AACONV_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(CIFAR100, "url", "http://127.0.0.1:9/cifar-100-python.tar.gz")
    with pytest.raises(
        OSError, match=r"cannot be downloaded .*; unpack .* so that .*data/cifar-100-python holds"
    ) as error:
        open_dataset("cifar100")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "data").iterdir()), "nothing half-done is left"


def test_cifar_is_downloaded_where_there_is_a_network(tmp_path, monkeypatch):
    """A small stand-in with the layout of CIFAR-10, served on this machine."""
    random = np.random.default_rng(0)
    source, wanted = tmp_path / "source" / "cifar-10-batches-py", random.integers(256, size=(6, 3072), dtype=np.uint8)
    source.mkdir(parents=True)
    contents = {
        "data_batch_1": {"data": wanted, "labels": [0, 1, 2, 0, 1, 2]},
        "test_batch": {"data": wanted[:2], "labels": [2, 1]},
        "batches.meta": {"label_names": ["a", "b", "c"]},
    }
    sums = {name: hashlib.md5(pickle.dumps(content)).hexdigest() for name, content in contents.items()}
    for name, content in contents.items():
        (source / name).write_bytes(pickle.dumps(content))
    with tarfile.open(source.parent / "cifar.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    handler = partial(
        type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}), directory=source.parent
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/cifar.tar.gz")
    archive_sum = hashlib.md5((source.parent / "cifar.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR10, "tgz_md5", archive_sum)
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    monkeypatch.setenv("AACONV_DATA", str(tmp_path / "cache"))
    try:
        dataset = open_dataset("cifar10")
    finally:
        server.shutdown()
        server.server_close()
    assert np.array_equal(dataset.images.numpy(), wanted.reshape(6, 3, 32, 32).transpose(0, 2, 3, 1))
    assert dataset.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert open_dataset("cifar10", split="test").labels.tolist() == [2, 1], "the second time without a server"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["cifar-10-batches-py"]


# Folders


def test_imagenette_folder(tmp_path):
    archive = IMAGENETTE / "val.tar"
    if not archive.exists():
        pytest.skip(f"no Imagenette in {IMAGENETTE}")
    with tarfile.open(archive) as tar:
        for number, member in zip(range(3), (member for member in tar if member.isreg()), strict=False):
            member.name = f"set/{('train', 'val')[number % 2]}/{Path(member.name).parent.name}/{number}.webp"
            tar.extract(member, tmp_path, filter="data")
    train, test = (open_dataset("folder/set", tmp_path, split) for split in ("train", "test"))
    assert (len(train), len(test)) == (2, 1)
    image, label = train[0]
    assert image.dtype == torch.uint8
    assert image.shape[0] == 3
    assert min(image.shape[1:]) >= 100
    assert train.classes[label] == "n01440764"


def test_folder_reads_every_split_and_form_of_the_name(tmp_path, monkeypatch):
    make_folder(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    for name, data_dir in (("set", None), ("folder/set", None), ("folder/set", tmp_path), ("folder", "set")):
        dataset = open_dataset(name, data_dir, "test")
        assert isinstance(dataset, FileDataset)
        assert (len(dataset), dataset.classes) == (6, ("ant", "bee"))
    image, label = dataset[5]
    assert image.shape == (3, 10, 12)
    assert image[:, 0, 0].tolist() == [60, 20, 0]
    assert label == 1
    assert open_dataset("imagenet", "set").name == "imagenet"


def test_labels_of_test_images_are_those_of_training(tmp_path):
    make_folder(tmp_path, ("ant", "bee", "cat"))
    for file in (tmp_path / "val" / "ant").iterdir():
        file.unlink()
    test = open_dataset(str(tmp_path), split="test")
    assert {test[index][1] for index in range(len(test))} == {1, 2}
    assert test.classes == ("ant", "bee", "cat")


def test_flat_folder_is_for_training_only(tmp_path):
    save_image(tmp_path / "ant" / "1.jpg")
    assert len(open_dataset(str(tmp_path))) == 1
    with pytest.raises(FileNotFoundError, match="has no folder of test images; expected one named val or"):
        open_dataset(str(tmp_path), split="test")


def test_class_that_training_does_not_know_is_an_error(tmp_path):
    make_folder(tmp_path)
    save_image(tmp_path / "val" / "wasp" / "1.png")
    with pytest.raises(ValueError, match=r"has a class 'wasp' that .*train does not have"):
        open_dataset(str(tmp_path), split="test")


def test_images_outside_class_folders_are_an_error(tmp_path):
    make_folder(tmp_path)
    save_image(tmp_path / "val" / "ILSVRC2012_val_00000001.png")
    with pytest.raises(ValueError, match="images in it that are in no class folder"):
        open_dataset(str(tmp_path), split="test")


def test_empty_folder_and_tar_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there are no images in it"):
        open_dataset(str(tmp_path))
    with pytest.raises(ValueError, match="must be unpacked first"):
        open_dataset("folder/images.tar", tmp_path)


@pytest.mark.parametrize("content", [b"", b"no image", "truncated"], ids=["empty", "text", "truncated"])
def test_unreadable_image_is_named(tmp_path, content):
    make_folder(tmp_path)
    broken = tmp_path / "train" / "ant" / "1.png"
    if content == "truncated":
        noise = np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(broken)
        content = broken.read_bytes()[:2000]
    broken.write_bytes(content)
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(UnreadableImage) as error:
        dataset[1]
    assert error.value.name == str(broken)
    assert error.value.reason
    assert dataset[2][1] == 0


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_every_colour_mode_becomes_rgb(tmp_path, mode):
    path = tmp_path / "a" / "1.tiff"
    path.parent.mkdir()
    Image.new("RGB", (9, 7), (255, 255, 255)).convert(mode).save(path)
    image, _ = open_dataset(str(tmp_path))[0]
    assert image.shape == (3, 7, 9)
    assert image.eq(255).all()


# Shards


def write_shard(path, samples):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in samples.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def png(colour):
    file = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(file, "PNG")
    return file.getvalue()


def test_shards_are_read_in_any_order(tmp_path):
    write_shard(tmp_path / "set-train-00.tar", {"a/0.png": png((10, 0, 0)), "a/0.cls": b"1", "a/0.json": b"{}"})
    write_shard(tmp_path / "set-train-01.tar", {"1.cls": b"0", "1.png": png((20, 0, 0)), "2.png": png((0, 0, 0))})
    write_shard(tmp_path / "set-val-00.tar", {"3.png": png((30, 0, 0)), "3.cls": b"2\n"})
    train, test = (open_dataset(f"wds/{tmp_path.name}", tmp_path.parent, split) for split in ("train", "test"))
    assert len(train) == 2, "an image without a label is no example"
    assert [(int(train[i][0][0, 0, 0]), train[i][1]) for i in (1, 0)] == [(20, 0), (10, 1)]
    assert (len(test), test[0][1]) == (1, 2)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert open_dataset(f"wds/{tmp_path}").classes == ("ant", "bee", "cat")


@pytest.mark.parametrize("label", [b"100000", b"100000000", b"10000000000000", b"9" * 30, b"9" * 90])
def test_a_label_of_a_shard_takes_no_memory(tmp_path, label):
    images = {"a.png": png((1, 2, 3)), "b.png": png((0, 0, 0))}
    write_shard(tmp_path / "train-0.tar", images | {"a.cls": b"0", "b.cls": label})
    with pytest.raises(ValueError, match=r"train-0\.tar: the label of b is .*, expected less than 100,000; .*classes"):
        open_dataset(f"wds/{tmp_path}")
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(ValueError, match=r"classes\.txt must name each of .* classes .*, got 2 names"):
        open_dataset(f"wds/{tmp_path}")


@pytest.mark.parametrize("label", [b"", b"x", b"1.5", b"1" * 101, b"-1"])
def test_a_label_that_is_none(tmp_path, label):
    write_shard(tmp_path / "train-0.tar", {"a.png": png((1, 2, 3)), "a.cls": label})
    with pytest.raises(ValueError, match=r"train-0\.tar"):
        open_dataset(f"wds/{tmp_path}")


@pytest.mark.parametrize("size", [2**63 - 1, 8 * 2**30, 100_000])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_header_that_claims_more_than_there_is(tmp_path, size, kind):
    write_shard(tmp_path / "train-0.tar", {"a.png": png((1, 2, 3)), "a.cls": b"0"})
    member = tarfile.TarInfo("b.cls")
    member.size, member.type = size, kind
    header = member.tobuf(tarfile.GNU_FORMAT)
    data = (tmp_path / "train-0.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(header + data)
    with pytest.raises(ValueError, match=r"train-0\.tar is not a webdataset shard"):
        open_dataset(f"wds/{tmp_path}")


def test_shards_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="no shards for the split 'train'"):
        open_dataset(f"wds/{tmp_path}")
    (tmp_path / "train-0.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(ValueError, match=r"train-0\.tar is not a webdataset shard"):
        open_dataset(f"wds/{tmp_path}")


def test_broken_image_in_a_shard_is_named(tmp_path):
    write_shard(tmp_path / "train-0.tar", {"x.jpg": b"no image", "x.cls": b"0"})
    with pytest.raises(UnreadableImage) as error:
        open_dataset(f"wds/{tmp_path}")[0]
    assert error.value.name.endswith("train-0.tar:x")


# Hugging Face


def fake_datasets(columns, splits, calls):
    """The part of the package `datasets` that timm's reader uses, with images in memory."""

    class Table(list):
        features = columns
        info = types.SimpleNamespace(features=columns, splits={})

        def cast_column(self, *_):
            return self

    def load_dataset(name, *, split, **options):
        calls.append((name, split, options))
        if split not in splits:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.')
        table = Table(splits[split])
        table.info.splits = {split: types.SimpleNamespace(num_examples=len(table))}
        return table

    module = types.ModuleType("datasets")
    module.__spec__ = types.SimpleNamespace()
    module.load_dataset, module.Image = load_dataset, lambda decode: None
    return module


class ClassLabel:
    names = ("ant", "bee")

    def str2int(self, name):
        return self.names.index(name)


def test_hugging_face_through_timm(tmp_path, monkeypatch):
    calls, rows = [], [{"img": {"bytes": png((40, 0, 0)), "path": None}, "fine": 1}]
    columns = {"img": object(), "fine": ClassLabel()}
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(columns, {"train": rows, "test": rows}, calls))
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    dataset = open_dataset("hfds/some/set", tmp_path, "test", input_key="img", target_key="fine")
    assert dataset.classes == ("ant", "bee")
    assert (int(dataset[0][0][0, 0, 0]), dataset[0][1]) == (40, 1)
    assert [(name, split) for name, split, _ in calls] == [("some/set", "validation"), ("some/set", "test")]
    wanted = [{"cache_dir": str(tmp_path)} | code for code in ({}, {"trust_remote_code": False})]  # timm 1.0.31, before
    assert all(options in wanted for *_, options in calls)
    with pytest.raises(ValueError, match="'label' is not a column of class labels; it has img, fine"):
        open_dataset("hfds/some/set", input_key="img")


def test_hugging_face_without_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install datasets"):
        open_dataset("hfds/some/set")


def test_images_without_a_label_are_no_examples(tmp_path, monkeypatch):
    rows = [{"image": {"bytes": png((40, 0, 0)), "path": None}, "label": -1}]
    columns = {"image": object(), "label": ClassLabel()}
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(columns, {"test": rows}, []))
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    with pytest.raises(ValueError, match="image 0 of some/set has the label -1, expected 0 to 1"):
        open_dataset("hfds/some/set", split="test")[0]


# Names and options


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("shape", "did you mean 'shapes'"),
        ("cifar-100", "did you mean 'cifar100'"),
        ("imagnet", "did you mean 'imagenet'"),
        ("foldr/x", "did you mean 'folder/x'"),
        ("quux", "choose one of shapes, cifar10"),
        ("wds", "did you mean 'wds/PATH'"),
        ("cifar100/x", "did you mean 'cifar100'"),
        ("", "choose one of"),
    ],
)
def test_wrong_names_suggest_the_nearest(name, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"unknown data set or folder {name!r}; {hint}"):
        open_dataset(name)


def test_other_mistakes_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("AACONV_DATA", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'tset'"):
        open_dataset("shapes", split="tset")
    with pytest.raises(ValueError, match="shapes has no option 'sise'; it has size, number, seed"):
        open_dataset("shapes", sise=3)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        open_dataset("cifar10", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="ImageNet must lie there as train/<class>/"):
        open_dataset("imagenet")


def test_take_chooses_by_seed(tmp_path):
    make_folder(tmp_path)
    for dataset in (open_dataset("shapes", number=50), open_dataset(str(tmp_path))):
        part = dataset.take(4, seed=3)
        assert len(part) == 4
        assert all(torch.equal(part[i][0], dataset.take(4, seed=3)[i][0]) for i in range(4))
        assert len(part.take(2)) == 2
        with pytest.raises(ValueError, match=f"can take 1 to {len(dataset)} images, got 51"):
            dataset.take(51)
    shapes = open_dataset("shapes", number=50)
    assert shapes.take(3).boxes.shape == (3, 2, 4)
