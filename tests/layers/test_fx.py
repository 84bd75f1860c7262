"""Networks with our layers under torch.fx, and what is built on it: torchvision's and timm's feature extractors."""

import pytest
import timm
import torch
from torch import fx, nn
from torchvision.models import resnet18
from torchvision.models.feature_extraction import create_feature_extractor

from aaconv import AAConv1d, AAConv2d, augment
from aaconv.layers.gates import GATES
from support.small_layers import SMALL, VARIANTS, small


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_traced_network_calls_the_layer(variant):
    network = nn.Sequential(small(**variant, size=5), nn.ReLU())
    traced = fx.symbolic_trace(network)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    for size in ((5, 5), (9, 8)):
        x = torch.randn(2, 6, *size)
        assert torch.equal(traced(x), network(x))


def test_a_traced_sequence():
    network = nn.Sequential(AAConv1d(6, 16, 3, **SMALL, size=7))
    x = torch.randn(2, 6, 9)
    assert torch.equal(fx.symbolic_trace(network)(x), network(x))


@pytest.mark.parametrize("name", GATES)
def test_traced_gates(name):
    network = nn.Sequential(GATES[name](16), nn.ReLU()).eval()
    for size in ((4, 4), (1, 1), (5, 7)):
        x = torch.randn(2, 16, *size)
        torch.testing.assert_close(fx.symbolic_trace(network)(x), network(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "node", "shape"),
    [
        ("aa_resnet18", "layer4", (2, 512, 2, 2)),
        ("aa_wrn16_4", "stages.1", (2, 128, 8, 8)),
        ("ge_wrn16_4", "stages.2", (2, 256, 4, 4)),
        ("bam_wrn16_4", "stages.0", (2, 64, 16, 16)),
        ("aa_mnasnet_075", "blocks.6", (2, 240, 2, 2)),
        ("aa_small", "blocks.2", (2, 32, 16, 16)),
    ],
)
def test_networks_are_traced_and_give_features(name, node, shape, training):
    side = 16 if "wrn" in name else 64
    model, x = timm.create_model(name).train(training), torch.randn(2, 3, side, side)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(fx.symbolic_trace(model)(x), expected)
    (features,) = create_feature_extractor(model, [node])(x).values()
    assert features.shape == shape
    assert timm.models.create_feature_extractor(model, {node: "features"})(x)["features"].shape == shape


def test_an_augmented_network_gives_features_as_before():
    model = resnet18().eval()
    augment(model, 64, where="layer[34].*.conv1")
    x = torch.randn(1, 3, 64, 64)
    extracted = create_feature_extractor(model, ["layer3.0.conv1", "layer4"])(x)
    assert [feature.shape for feature in extracted.values()] == [(1, 256, 4, 4), (1, 512, 2, 2)]
    parts = [module for name, module in model.named_children() if name not in ("avgpool", "fc")]
    torch.testing.assert_close(extracted["layer4"], nn.Sequential(*parts)(x))


def test_what_cannot_be_traced_is_told():
    with pytest.raises(ValueError, match=r"torch.fx does not look into AAConv2d: trace a network that contains it"):
        fx.symbolic_trace(small(size=5))
    with pytest.raises(ValueError, match=r"the relative tables are lazy.*run a forward first"):
        fx.symbolic_trace(nn.Sequential(AAConv2d(6, 16, 3, **SMALL)))
