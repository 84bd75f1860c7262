"""The paper's costs to the integer, and the counting rules on models small enough to count by hand."""

import io
import json

import pytest
import timm
import torch
import torchvision
from torch import nn

from aaconv import AAConv2d
from aaconv.cost import count, count_named
from aaconv.cost.flops import attention_ops
from aaconv.cost.show import print_cost, print_models
from aaconv.layers.convolution import has_hooks

PAPER = {  # model: parameters, GFlops as the paper counts
    "plain_resnet34": (21_801_896, 7.356),
    "se_resnet34": (21_959_080, 7.359),
    "aa_resnet34": (20_749_296, 7.097),
    "plain_resnet50": (25_557_032, 8.186),
    "se_resnet50": (28_071_976, 8.202),
    "aa_resnet50": (25_809_392, 8.323),
    "plain_resnet101": (44_549_160, 15.614),
    "se_resnet101": (49_292_328, 15.641),
    "aa_resnet101": (45_386_728, 16.068),
    "plain_resnet152": (60_192_808, 23.042),
    "se_resnet152": (66_770_984, 23.082),
    "aa_resnet152": (61_613_536, 23.770),
    "plain_wrn28_10": (36_278_324, 10.431),
    "ge_wrn28_10": (36_278_324, 10.433),
    "se_wrn28_10": (36_547_124, 10.434),
    "aa_wrn28_10": (36_054_100, 11.054),
    "plain_mnasnet_075": (2_912_278, 0.448),
    "plain_mnasnet_100": (3_887_038, 0.625),
    "plain_mnasnet_125": (5_255_486, 1.009),
    "plain_mnasnet_140": (6_105_992, 1.175),
    "aa_mnasnet_075": (3_016_212, 0.507),
    "aa_mnasnet_100": (4_063_284, 0.703),
    "aa_mnasnet_125": (5_532_120, 1.112),
    "aa_mnasnet_140": (6_444_034, 1.294),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_models_cost_what_the_paper_says(name):
    cost = count_named(name)
    assert (cost.params, round(cost.gflops, 3)) == PAPER[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "params", "gflops"),
    [(0.25, 24_303_728, 7.880), (0.5, 22_342_680, 7.270), (0.75, 20_735_496, 6.745), (1.0, 19_383_560, 6.295)],
)
def test_ratio_ablation_costs_what_the_paper_says(ratio, params, gflops):
    cost = count_named("aa_resnet50", key_ratio=ratio, value_ratio=ratio)
    assert (cost.params, round(cost.gflops, 3)) == (params, gflops)


@pytest.mark.parametrize(
    ("name", "params"), [("bam_resnet50", 25_915_099), ("cbam_resnet50", 28_089_624), ("gala_resnet50", 29_360_600)]
)
def test_other_mechanisms_have_the_papers_parameters(name, params):
    assert count_named(name).params == params


def test_tables_per_head_make_the_relative_logits_a_batched_product():
    shared, per_head = count_named("aa_wrn28_10"), count_named("aa_wrn28_10", share_heads=False)
    assert (per_head.params, round(per_head.gflops, 3)) == (36_176_180, 10.866)
    assert per_head.true_flops == shared.true_flops


def test_true_count_adds_the_batched_products():
    cost = count_named("aa_resnet50")
    assert round(cost.true_gflops, 2) == 8.46
    products = sum(2 * (a.height * a.width) ** 2 * (a.key_channels + a.value_channels) for a in cost.attention)
    assert cost.true_flops - cost.flops == products


def test_attention_costs_what_the_appendix_says():
    branches = count_named("aa_resnet50").attention
    assert [branch.params for branch in branches] == [43_128] * 4 + [89_720] * 6 + [191_240] * 3
    without_stride = [branches[3], branches[9], branches[12]]
    assert [round(branch.flops / 1e6, 2) for branch in without_stride] == [22.28, 40.32, 19.24]
    assert [branch.map_bytes / 1024 for branch in without_stride] == pytest.approx([600, 600, 37.5], abs=0.3)
    assert sum(branch.params for branch in branches) == 1_284_552
    assert round(sum(branch.flops for branch in branches) / 1e6, 1) == 390.3
    assert round(sum(branch.map_bytes for branch in branches) / 2**20, 2) == 5.97


@pytest.mark.parametrize(("height", "width"), [(7, 7), (5, 11)])
@pytest.mark.parametrize(("stride", "downsample"), [(1, False), (2, False), (2, True)])
def test_attention_follows_the_papers_formula(height, width, stride, downsample):
    """2n [Fin (2dk + dv) + dv^2] + 2n dk (2H - 1 + 2W - 1) + 7 Nh n^2 + n dk + 9 Fin n_out per pooling."""
    layer = AAConv2d(
        24, 32, 3, stride, num_heads=4, key_channels=16, value_channels=8, size=(9, 9), downsample=downsample
    )
    branch = count(layer, (height, width)).attention[0]
    poolings = 0
    for halved in [True] * (stride == 2) + [True] * downsample:
        height, width = -(-height // 2), -(-width // 2)
        poolings += 9 * 24 * height * width * halved
    n = height * width
    projections = 2 * n * (24 * (2 * 16 + 8) + 8 * 8)
    relative = 2 * n * 16 * (2 * height - 1 + 2 * width - 1)
    assert (branch.height, branch.width) == (height, width)
    assert branch.flops == projections + relative + 7 * 4 * n * n + n * 16 + poolings
    assert branch.true_flops - branch.flops == 2 * n * n * (16 + 8)
    assert branch.map_bytes == 2 * 4 * n * n
    assert branch.params == 24 * 40 + 64 + 2 * 17 * 4


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_count_does_not_depend_on_the_backend(backend):
    options = {"num_heads": 2, "key_channels": 8, "value_channels": 4, "size": (6, 5)}
    assert count(AAConv2d(8, 16, 3, backend=backend, **options), (6, 5)) == count(AAConv2d(8, 16, 3, **options), (6, 5))


def test_no_position_counts_no_relative_logits():
    sizes = {"num_heads": 4, "key_channels": 16, "value_channels": 8}
    layer = AAConv2d(24, 32, 3, position="none", **sizes)
    n = 6 * 5
    projections = 2 * n * (24 * 40 + 64)
    assert count(layer, (6, 5)).attention[0].flops == projections + 5 * 4 * n * n + n * 16
    assert attention_ops(6, 5, **sizes, relative_lengths=[], share_heads=True).flops == 5 * 4 * n * n + n * 16


def test_tables_that_are_still_lazy_are_counted_and_stay_lazy():
    layer = AAConv2d(24, 32, 3, num_heads=4, key_channels=16, value_channels=8)
    cost = count(nn.Sequential(nn.Conv2d(3, 24, 1), layer), (6, 5))
    assert cost.attention[0].params == 24 * 40 + 64 + (2 * (6 + 5) - 2) * 4
    assert layer.size is None


class Gated(nn.Module):
    """One operation of each kind, on [1, 4, 6, 6]."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2, bias=False)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.fc = nn.Linear(2, 5)

    def forward(self, x):
        x = x + torch.relu(self.norm(self.conv(x)))
        x = x * torch.sigmoid(x.mean((2, 3), keepdim=True))
        x = self.pool(self.up(nn.functional.interpolate(x, scale_factor=0.5)))
        return self.fc(x.mean((2, 3))).softmax(1)


def test_every_rule_by_hand():
    cost = count(Gated(), (6, 6))
    flops = {layer.name: layer.flops for layer in cost.layers}
    assert flops["conv"] == 2 * 4 * 36 * 2 * 9 + 4 * 36
    assert flops["norm"] == 0
    assert flops["up"] == 2 * (4 * 9) * (2 * 4)
    assert flops["pool"] == 9 * 2 * 9
    assert flops["fc"] == 2 * 2 * 5 + 5
    add, mean, multiply = 4 * 36, 4 * 36, 4 * 36
    assert flops[""] == add + mean + multiply + 2 * 9 + 5 * 5
    assert cost.flops == cost.true_flops == sum(flops.values())
    assert cost.map_bytes == 0


def test_models_of_others_are_counted():
    ours, theirs = count_named("plain_resnet50"), count(torchvision.models.resnet50())
    assert (theirs.params, theirs.flops) == (ours.params, ours.flops)
    vit = count_named("vit_tiny_patch16_224")
    tokens, depth, width, heads = 197, 12, 192, 3
    assert vit.true_flops - vit.flops == depth * 2 * 2 * tokens**2 * width
    assert vit.map_bytes == depth * 2 * heads * tokens**2


def test_the_model_is_left_as_it_was():
    model = timm.create_model("aa_wrn28_2").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count(model)
    assert model.training
    assert not any(has_hooks(module) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_used_twice_count_once():
    shared = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    cost = count(nn.Sequential(shared, nn.ReLU(), shared), (4, 4))
    assert cost.params == 81
    assert cost.flops == 2 * 2 * 16 * 81


def test_a_weight_of_two_layers_counts_once():
    tied = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(2)))
    tied[1].weight = tied[0].weight
    cost = count(tied, (4, 4))
    assert cost.params == sum(parameter.numel() for parameter in tied.parameters()) == 81
    assert cost.flops == 2 * 2 * 16 * 81


def test_size_and_channels_come_from_the_model():
    assert count_named("aa_wrn28_2").size == (32, 32)
    assert count(nn.Conv2d(5, 1, 1, bias=False), (2, 3)).flops == 2 * 6 * 5
    wide = count_named("aa_resnet18", (64, 96))
    assert [(branch.height, branch.width) for branch in wide.attention][::2] == [(4, 6), (4, 6), (2, 3)]


def test_a_size_too_small_names_the_layer_and_the_smallest_that_works():
    with pytest.raises(ValueError, match=r"20 x 50 is too small for vgg11: layer features\.20 .* is 32 x 50$"):
        count_named("vgg11", (20, 50))
    with pytest.raises(ValueError, match=r"layer 2 would be empty; the smallest size that works is 8 x 8"):
        count(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)), (4, 6))
    with pytest.raises(ValueError, match="height and width must be 1 to 100,000, got size="):
        count_named("aa_resnet18", (0, 32))


def test_an_error_that_no_size_cures_is_not_called_too_small():
    with pytest.raises(ValueError, match="does not run on 3 x 4 x 4 images: layer 1"):
        count(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(5, 4, 1)), (4, 4))


def test_a_wrong_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean aa_resnet50"):
        print_cost("aa_resnt50")
    with pytest.raises(ValueError, match="no model fits"):
        print_models("alexnet")


def test_printed_cost_has_both_counts(capsys):
    print_cost("aa_resnet18", (64, 96), layers=True)
    printed = capsys.readouterr().out
    cost = count_named("aa_resnet18", (64, 96))
    for number in (cost.params, cost.flops, cost.true_flops):
        assert f"{number:,}" in printed
    assert "layer4.1.conv1.qkv" in printed
    assert "a multiply-add counts as two FLOPs" in printed
    assert "…" not in printed


def test_a_narrow_terminal_cuts_no_digit(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    print_cost("aa_resnet18", (64, 96), layers=True)
    assert "…" not in capsys.readouterr().out


def test_json_cost_adds_up(capsys):
    print_cost("aa_resnet18", (64, 96), layers=True, as_json=True)
    cost = json.load(io.StringIO(capsys.readouterr().out))
    for total in ("params", "flops", "true_flops", "map_bytes"):
        assert cost[total] == sum(layer[total] for layer in cost["layers"])
    assert cost["size"] == [64, 96]
    assert len(cost["attention"]) == 6


def test_models_are_listed_by_pattern(capsys):
    print_models("aa_wrn*_2", as_json=True)
    names = [model["model"] for model in json.loads(capsys.readouterr().out)]
    assert names == ["aa_wrn28_2", "aa_wrn40_2"]
    print_models("aa_wrn28_2")
    assert f"{count_named('aa_wrn28_2').params:,}" in capsys.readouterr().out
