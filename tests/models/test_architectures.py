"""How the networks are put together, beyond their parameter counts."""

import copy

import timm
import torch
from torch import nn

from aaconv import AAConv2d
from aaconv.layers.gates import BAM


def on_meta(name):
    with torch.device("meta"):
        return timm.create_model(name)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_plain_networks_are_timms_where_timm_has_them():
    x = torch.randn(1, 3, 64, 64)
    for ours, theirs in (("plain_resnet50", "resnet50"), ("plain_mnasnet_100", "semnasnet_100")):
        model, other = timm.create_model(ours).eval(), timm.create_model(theirs).eval()
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), other(x))


def test_the_first_stage_projects_in_every_resnet():
    for name in ("plain_resnet18", "aa_resnet34", "se_resnet50"):
        model = on_meta(name)
        for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
            assert isinstance(stage[0].downsample[0], nn.Conv2d)
            assert all(block.downsample is None for block in stage[1:])


def test_bam_stands_behind_every_stage_but_the_last():
    places = [path for path, module in on_meta("bam_resnet50").named_modules() if isinstance(module, BAM)]
    assert places == ["layer1.3", "layer2.4", "layer3.6"]
    places = [path for path, module in on_meta("bam_wrn28_10").named_modules() if isinstance(module, BAM)]
    assert places == ["stages.0.gate", "stages.1.gate"]


def test_wide_resnet_shortcuts_carry_the_image_without_parameters():
    """With silent residual branches only the shortcuts are left: each stage doubles its input, and all three add it."""
    model = timm.create_model("plain_wrn16_4").eval()
    for path, parameter in model.named_parameters():
        if path.endswith("conv2.weight"):
            nn.init.zeros_(parameter)
    stem = model.conv1(torch.randn(1, 3, 8, 8))
    x = model.stages[0](stem)
    activated = model.stages[0].blocks[0].bn1(stem).relu()
    torch.testing.assert_close(x[:, 24:40], stem + activated)
    assert (x[:, :24] == 0).all()
    assert (x[:, 40:] == 0).all()
    deep = model.stages[1](x)
    torch.testing.assert_close(deep[:, 32:96], 2 * nn.functional.avg_pool2d(x, 2))
    assert model.shortcut(stem).shape == (1, 256, 2, 2)
    assert not list(model.shortcut.parameters())


def test_wide_resnet_batch_norms_learn_scale_and_shift():
    model = on_meta("se_wrn16_4")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 13
    assert all([path for path, _ in norm.named_parameters()] == ["weight", "bias"] for norm in norms)


def test_wide_resnets_convert_to_synchronised_batch_norm():
    """As built, moved, cast, copied or loaded: what is learned, its count and the result stay."""
    model = timm.create_model("aa_wrn16_4").eval()
    number, learned = parameters(model), {path for path, _ in model.named_parameters()}
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    loaded = on_meta("aa_wrn16_4").eval()
    loaded.load_state_dict(model.state_dict(), assign=True)
    for one in (copy.deepcopy(model), copy.deepcopy(model).double(), loaded):
        assert parameters(one) == number
        x = torch.randn(1, 3, 8, 8, dtype=one.conv1.weight.dtype)
        with torch.no_grad():
            expected, keys = one(x), one.state_dict().keys()
            synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(one)
            torch.testing.assert_close(synchronised(x), expected)
        assert not any(isinstance(module, nn.BatchNorm2d) for module in synchronised.modules())
        assert {path for path, p in synchronised.named_parameters() if p.requires_grad} == learned
        assert synchronised.state_dict().keys() == keys


def test_resnets_without_the_pooling_of_their_stem():
    """For 64 pixels: maps of 32, 16, 8 and 4, attention over the last three as they are, with a gate as well."""
    model = timm.create_model("aa_resnet18", stem_pool=False, gate="se", img_size=64, num_classes=5)
    maps = model.forward_intermediates(torch.randn(1, 3, 64, 64), intermediates_only=True)
    assert [one.shape[-1] for one in maps] == [32, 32, 16, 8, 4]
    assert [info["reduction"] for info in model.feature_info] == [2, 2, 4, 8, 16]
    attention = [module for module in model.modules() if isinstance(module, AAConv2d)]
    assert [layer.size for layer in attention] == [(16, 16)] * 2 + [(8, 8)] * 2 + [(4, 4)] * 2
    assert parameters(model) > parameters(timm.create_model("aa_resnet18", num_classes=5, img_size=64))
