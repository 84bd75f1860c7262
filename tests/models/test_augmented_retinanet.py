"""RetinaNet on pretrained backbones: the weights are really in it, and attention changes nothing before training."""

import copy

import pytest
import safetensors.torch
import timm
import torch

from aaconv import recipes
from aaconv.layers import AAConv2d, attention_parameters
from aaconv.models import create_model, create_without_memory, list_models
from aaconv.models.augmented_retinanet import BACKBONE, NAME
from aaconv.recipes.recipe import AROUND
from support.places import SHARED_DATA

LITE0 = SHARED_DATA / "pretrained" / "tf_efficientnet_lite0.safetensors"
SMALL = {"num_classes": 3, "channels": 16, "head_depth": 1}
FEW = {"combine": "add", "qk_norm": True, "num_heads": 2, "key_channels": 8, "value_channels": 4}
WHERE = {"test_efficientnet": "blocks.4.0.conv_pw", "test_resnet": "layer4.0.conv2"}


def small(backbone="test_resnet", attention=True, seed=0, **options):
    torch.manual_seed(seed)
    augmentations = [{"where": WHERE[backbone], **FEW}] if attention else []
    return create_model(NAME, backbone=backbone, augmentations=augmentations, **SMALL | options)


@pytest.fixture(params=["test_efficientnet", "test_resnet", "tf_efficientnet_lite0"])
def pretrained(request, tmp_path):
    """The name of a classifier and a file of its weights, with batch norm statistics of their own."""
    if request.param == BACKBONE:
        if not LITE0.is_file():
            pytest.skip(f"no weights in {LITE0}")
        return BACKBONE, LITE0
    model = timm.create_model(request.param)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    file = tmp_path / f"{request.param}.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    return request.param, file


def test_timm_builds_it_but_does_not_list_it():
    assert timm.is_model(NAME)
    assert NAME not in {*timm.list_models(), *list_models()}
    assert AROUND[NAME] == ("backbone", BACKBONE)


def test_the_backbone_has_the_weights_and_gives_the_features_of_the_classifier(pretrained):
    name, file = pretrained
    overlay = {"file": str(file)}
    classifier = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    detector = create_model(NAME, backbone=name, pretrained=True, pretrained_cfg_overlay=overlay, **SMALL).eval()
    there, own = safetensors.torch.load_file(file), detector.backbone.state_dict()
    assert own.keys() <= there.keys()
    assert any(key.endswith("running_var") for key in own)
    assert all(torch.equal(value, there[key]) for key, value in own.items())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        wanted = classifier.forward_intermediates(images, intermediates_only=True)
        found = detector.backbone(images)
    assert len(found) == 5
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("backbone", WHERE)
def test_attention_changes_no_bit_of_a_detector_that_starts_alike(backbone):
    plain, augmented = small(backbone, attention=False).eval(), small(backbone).eval()
    images = torch.randn(2, 3, 64, 96)
    assert all(map(torch.equal, plain(images), augmented(images)))
    assert attention_parameters(augmented)
    missing, unexpected = augmented.load_state_dict(plain.state_dict(), strict=False)
    assert set(missing) == attention_parameters(augmented)
    assert not unexpected


def test_the_recipes_attend_at_a_stride_of_16():
    model = recipes.get("coco-small-lite0-aa").model
    network = create_without_memory(model.name, img_size=256, **model.network_options)
    layers = {name: module for name, module in network.named_modules() if isinstance(module, AAConv2d)}
    assert list(layers) == ["backbone.blocks.3.2.conv_pw", "backbone.blocks.4.2.conv_pw"]
    assert {(one.size, one.num_heads, one.key_channels, one.value_channels) for one in layers.values()} == {
        ((16, 16), 4, 64, 32)
    }
    assert network.strides == (8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    "backbone", ["resnet18", "mobilenetv3_small_050", "convnext_atto", "swin_tiny_patch4_window7_224"]
)
def test_any_backbone_with_features(backbone):
    network = create_without_memory(NAME, backbone=backbone, img_size=64, drop_path_rate=0.1, **SMALL)
    logits, codes = network(torch.empty(2, 3, 64, 64, device="meta"))
    assert logits.shape == (2, 6 * (64 + 16 + 4 + 1 + 1), 3)
    assert codes.shape == (*logits.shape[:2], 4)


def test_images_are_normalised_as_the_backbone_knows_them():
    known = small(img_size=96).pretrained_cfg
    assert (known["mean"], known["std"]) == ((0.5,) * 3, (0.5,) * 3)
    assert (known["architecture"], known["input_size"], known["num_classes"]) == (NAME, (3, 96, 96), 3)
    model = small(img_size=96)
    assert model.get_submodule(known["first_conv"]).in_channels == 3
    assert model.get_submodule(known["classifier"]) is model.get_classifier()


def test_only_what_weight_decay_would_harm_is_left_out_of_it():
    model = small()
    assert model.no_weight_decay() == {
        f"backbone.{WHERE['test_resnet']}.{own}" for own in ("rel_h", "rel_w", "gate", "temperature")
    }
    assert copy.deepcopy(model).no_weight_decay() == model.no_weight_decay()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "resnet1"}, "unknown model 'resnet1'"),
        ({"backbone": "resnet51"}, "unknown model 'resnet51' to augment; did you mean .*resnet50"),
        ({"backbone": 5}, "must be a name of timm's, such as resnet50, got 5"),
        ({"backbone": "torchvision/resnet18"}, "must be a network of timm's, got 'torchvision/resnet18'"),
        ({"backbone": "vit_tiny_patch16_224"}, "three maps, each half as large"),
        ({"backbone": "test_resnet", "augmentations": ["layer4"]}, "must be mappings with `where`, got 'layer4'"),
        ({"backbone": "test_resnet", "augmentations": [{"where": "layer9"}]}, "matches none of the"),
        ({"backbone": "test_resnet", "num_classes": 0}, "num_classes=0"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        create_model(NAME, **options)
