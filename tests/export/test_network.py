"""Networks as files: what is written computes the same, at other sizes too, and what does not is not kept."""

import copy
import errno
import importlib.util
import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from aaconv import AAConv2d, cli
from aaconv.detection.postprocess import PostprocessSettings
from aaconv.export import network
from aaconv.models.aa_retinanet import retinanet
from aaconv.runs.load import TrainedModel, load_model

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in network.PACKAGES),
    reason="onnx, onnxscript and onnxruntime are not installed",
)


class Network(nn.Module):
    """One augmented convolution and a classifier."""

    def __init__(self, size=8, **options):
        super().__init__()
        self.conv = AAConv2d(3, 8, 3, stride=2, num_heads=2, key_channels=8, value_channels=4, size=size, **options)
        self.classify = nn.Linear(8, 4)

    def forward(self, x):
        return self.classify(self.conv(x).mean((2, 3)))


@pytest.fixture
def loaded():
    torch.manual_seed(0)
    return TrainedModel(Network().eval(), None, None, (0.5,) * 3, (0.25,) * 3, 16, "classify", "network", None)


def outputs_of(path, images):
    """Run the file by what would run it elsewhere."""
    if path.suffix == ".pt2":
        found = torch.export.load(path).module()(images)
        return [found] if isinstance(found, torch.Tensor) else list(found)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(part) for part in session.run(None, {"images": images.numpy()})]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param("onnx", marks=needs_onnx), "pt2"])
def test_the_file_computes_what_the_network_does(loaded, tmp_path, ending):
    said = []
    path = tmp_path / f"model.{ending}"
    checks = network.export(loaded, path, say=said.append)
    assert [check.shape for check in checks] == [(1, 3, 16, 16), (3, 3, 16, 16), (1, 3, 24, 20), (2, 3, 24, 20)]
    assert all(check.error < 1e-5 for check in checks)
    assert said[-1].endswith("images [batch, 3, 16, 16] -> logits; free: batch, height, width")
    images = torch.randn(5, 3, 30, 18)
    with torch.no_grad():
        torch.testing.assert_close(outputs_of(path, images)[0], loaded.model(images), rtol=1e-4, atol=1e-5)
    assert list(tmp_path.iterdir()) == [path]
    if ending == "onnx":
        assert sizes_of(path) == (["batch", 3, "height", "width"], ["batch", 4])


@pytest.mark.slow
def test_the_file_can_be_compiled_to_run_without_python(loaded, tmp_path):
    """As docs/export.md says; sizes that are free stay so."""
    network.export(loaded, tmp_path / "model.pt2", say=lambda _: None)
    program = torch.export.load(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2"))
    compiled = torch._inductor.aoti_load_package(str(tmp_path / "compiled.pt2"))
    for shape in ((2, 3, 32, 32), (3, 3, 24, 40)):
        images = torch.randn(shape)
        torch.testing.assert_close(compiled(images), loaded.model(images))


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param("onnx", marks=needs_onnx), "pt2"])
def test_the_file_says_how_it_is_used(loaded, tmp_path, ending):
    path, classes = tmp_path / f"model.{ending}", ("cat", "dog", "Käse", "fish")
    network.export(replace(loaded, classes=classes, crop=0.9), path, size=24, fixed=True, say=lambda _: None)
    if ending == "pt2":
        extra = {"aaconv.json": ""}
        torch.export.load(path, extra_files=extra)
        found = json.loads(extra["aaconv.json"])
    else:
        import onnxruntime

        texts = onnxruntime.InferenceSession(str(path)).get_modelmeta().custom_metadata_map
        found = texts | {
            name: json.loads(texts[name]) for name in ("classes", "mean", "std", "size", "crop", "outputs")
        }
    expected = {"model": "network", "task": "classify", "classes": list(classes), "outputs": ["logits"], "size": 24}
    images = {"crop": 0.9, "interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.25] * 3}
    assert {key: found[key] for key in expected | images} == expected | images
    assert found["image"].startswith("RGB")


def sizes_of(path):
    """What an ONNX file calls the sizes of its input and its output."""
    import onnx

    model = onnx.load(str(path))
    onnx.checker.check_model(model)
    ends = (*model.graph.input, *model.graph.output)
    return tuple([dim.dim_param or dim.dim_value for dim in end.type.tensor_type.shape.dim] for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param("onnx", marks=needs_onnx), "pt2"])
def test_added_attention_is_exported(loaded, tmp_path, ending):
    """Behind gates that are open, and behind some that are not."""
    model = Network(combine="add", qk_norm=True).eval()
    nn.init.normal_(model.conv.gate[:5])
    network.export(replace(loaded, model=model), path := tmp_path / f"model.{ending}", say=print)
    images = torch.randn(3, 3, 20, 24)
    with torch.inference_mode():
        torch.testing.assert_close(outputs_of(path, images)[0], model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param("onnx", marks=needs_onnx), "pt2"])
def test_windows_are_exported_for_one_size(loaded, tmp_path, ending):
    said = []
    model = Network(size=None, window=3).eval()
    network.export(replace(loaded, model=model), path := tmp_path / f"model.{ending}", say=said.append)
    assert said[1].endswith("torch.export: windows are cut into tiles for one height and width")
    assert said[-1].endswith("free: batch")
    images = torch.randn(3, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(outputs_of(path, images)[0], model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_windows_that_cover_the_map_are_exported_for_one_size_as_well(loaded, tmp_path):
    """Traced they are attention to the whole map, which they are not on a larger one."""
    said = []
    model = Network(size=None, window=12).eval()
    network.export(replace(loaded, model=model), tmp_path / "model.pt2", say=said.append)
    assert said[1].endswith("torch.export: what is computed changes beyond a height of 24")
    assert said[-1].endswith("free: batch")


@pytest.mark.slow
def test_what_the_network_pins_is_said(loaded, tmp_path):
    class Pinned(Network):
        def forward(self, x):
            return super().forward(x) if x.shape[2] == 16 else x  # a branch on the height

    said = []
    model = Pinned().eval()
    checks = network.export(replace(loaded, model=model), tmp_path / "model.pt2", say=said.append)
    assert said[1].startswith("not with batch, height, width free: torch.export: ")
    assert said[-1].endswith("free: batch")
    assert len(checks) == 2


@pytest.mark.slow
def test_everything_is_as_before_afterwards(loaded, tmp_path):
    loaded.model.conv.backend = "eager"
    checks = network.export(loaded, tmp_path / "model.pt2", size=24, fixed=True, say=lambda _: None)
    assert [check.shape for check in checks] == [(1, 3, 24, 24), (3, 3, 24, 24)]
    assert loaded.model.conv.backend == "eager"
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


@pytest.mark.slow
def test_a_file_that_is_off_is_not_kept(loaded, tmp_path, monkeypatch):
    (tmp_path / "model.pt2").write_text("the old one")
    write = network._write_program

    def slightly_wrong(*given):
        run = write(*given)
        return lambda images: [part + 0.01 for part in run(images)]

    monkeypatch.setattr(network, "_write_program", slightly_wrong)
    with pytest.raises(ValueError, match="the file is not kept: its outputs differ"):
        network.export(loaded, tmp_path / "model.pt2", fixed=True, say=lambda _: None)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the old one"]


@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True])
def test_sizes_that_are_bound_all_the_same_are_not_called_free(always, loaded, tmp_path, monkeypatch):
    real, said = network._write_program, []

    def bound(*given):
        run = real(*given)

        def at_one_size(images):
            if always or images.shape[-1] != loaded.size:
                raise AssertionError("Guard failed: x.size()[3] % 2 == 0")
            return run(images)

        return at_one_size

    monkeypatch.setattr(network, "_write_program", bound)
    if always:
        with pytest.raises(ValueError, match="does not run on 1 x 3 x 16 x 16 images and is not kept: Guard failed"):
            network.export(loaded, tmp_path / "model.pt2", say=said.append)
        assert not (tmp_path / "model.pt2").exists()
    else:
        network.export(loaded, tmp_path / "model.pt2", say=said.append)
        assert said[-1].endswith("free: batch")
    assert any(line.startswith("not with batch, height, width free: the file does not run on") for line in said)


@pytest.mark.slow
def test_a_nan_is_off(loaded, tmp_path):
    nn.init.constant_(loaded.model.classify.weight, float("nan"))
    with pytest.raises(ValueError, match="not kept"):
        network.export(loaded, tmp_path / "model.pt2", fixed=True, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param("onnx", marks=needs_onnx), "pt2"])
def test_files_do_not_tell_where_they_were_made(loaded, tmp_path, ending):
    path = tmp_path / f"model.{ending}"
    network.export(loaded, path, fixed=True, say=lambda _: None)
    written = path.read_bytes()
    for folder in (Path(network.__file__).parent, Path(torch.__file__).parent, Path(__file__).parent, tmp_path):
        assert str(folder).encode() not in written


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(loaded, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left on device"):
        network.export(loaded, tmp_path / "model.pt2", fixed=True, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(("opset", "reason"), [(5, "version 18, not 5"), (99, "version 18, not 99")])
def test_operators_of_no_version_are_refused(loaded, tmp_path, opset, reason):
    with pytest.raises(ValueError, match=reason):
        network.export(loaded, tmp_path / "model.onnx", fixed=True, opset=opset, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_size_beyond_all_memory_is_refused(loaded, tmp_path):
    with pytest.raises(ValueError, match=r"torch\.export: .*memory"):
        network.export(loaded, tmp_path / "model.pt2", size=10_000_000, fixed=True, say=lambda _: None)


# Detection


@pytest.fixture(scope="module")
def detector():
    torch.manual_seed(0)
    model = retinanet("test_resnet", channels=8, head_depth=1, num_classes=3).eval()
    nn.init.normal_(model.class_head.predict.weight, std=0.5)
    nn.init.constant_(model.class_head.predict.bias, -2.0)
    return TrainedModel(model, None, None, (0.5,) * 3, (0.25,) * 3, 64, "detect", "detector", None)


@pytest.mark.parametrize("settings", [PostprocessSettings(), PostprocessSettings(threshold=0.13, overlap=0.3, most=7)])
def test_the_exported_detector_is_the_networks_own(detector, settings):
    module = network.Detector(detector.model, 64, settings)
    for seed in range(4):
        image = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            ours = module(image[None])
        [exact] = detector.model.detect([image], settings)
        assert 0 < len(exact.boxes) <= settings.most
        for part, other in zip(ours, exact, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_a_detector_is_exported_with_its_postprocessing(detector, tmp_path):
    said = []
    network.export(detector, tmp_path / "model.pt2", say=said.append)
    assert "images [1, 3, 64, 64] -> boxes, scores, labels; free: nothing: images differ in their number" in said[-1]
    assert any("objects" in line for line in said)
    image = torch.randn(3, 64, 64)
    [exact] = detector.model.detect([image])
    for part, other in zip(outputs_of(tmp_path / "model.pt2", image[None]), exact, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_a_detector_that_finds_nothing_is_compared_by_scores(detector, tmp_path):
    silent = copy.deepcopy(detector.model)
    nn.init.constant_(silent.class_head.predict.bias, -6.0)
    said = []
    [check] = network.export(replace(detector, model=silent), tmp_path / "model.pt2", say=said.append)
    assert check.objects == 0
    again = said.index("no objects in random images: once more with a threshold of 0, in a file that is not kept")
    assert "100 objects" in said[again + 3]
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.slow
def test_raw_outputs_of_a_detector(detector, tmp_path):
    said = []
    network.export(detector, tmp_path / "model.pt2", raw=True, fixed=True, say=said.append)
    assert "-> logits, box_codes" in said[-1]
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for part, other in zip(outputs_of(tmp_path / "model.pt2", images), detector.model(images), strict=True):
            torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-5)


# The command


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "aa_small", "-o", "model.pt2", "--fixed"]) == 0
    printed = capsys.readouterr().out
    assert "1 x 3 x 32 x 32: largest difference" in printed
    assert "wrote model.pt2" in printed
    assert load_model("aa_small").size == 32


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["aa_small", "-o", "model.h5"], "must end in .onnx or .pt2, or for the weights of a run in .safetensors"),
        (["aa_small", "-o", "nowhere/model.pt2"], "there is no folder nowhere"),
        (["aa_smal", "-o", "model.pt2"], "did you mean aa_small"),
        (["aa_small", "-o", "model.pt2", "--opset", "18"], "opset belongs to .onnx"),
        (["aa_small", "-o", "model.pt2", "--raw"], "does not detect"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert hint in error
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ValueError, match=r"ONNX files need onnxscript: pip install 'aaconv\[export\]'"):
        network.export(loaded, tmp_path / "model.onnx")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.CRITICAL])
def test_what_the_process_logs_is_as_before(level):
    logging.disable(level)
    try:
        with network._torch_alone(nn.Identity()):
            assert logging.root.manager.disable == max(level, logging.WARNING)
        assert logging.root.manager.disable == level
    finally:
        logging.disable(logging.NOTSET)
