"""What people do with a network next: fold batch norms, prune, copy, average, trace it. Right, or refused."""

import copy

import pytest
import timm
import torch
from timm.utils import ModelEmaV3, reparameterize_model
from torch import fx, nn
from torch.ao.quantization import fuse_modules
from torch.fx.experimental.optimization import fuse
from torch.nn.utils import prune
from torch.nn.utils.fusion import fuse_conv_bn_eval

from aaconv import AAConv1d, AAConv2d, augment
from aaconv.layers import fold_batch_norm
from support.random_network import randomize

FEW = {"num_heads": 2, "key_channels": 8, "value_channels": 4}
REASON = r"AAConv2d has no weight of its own.*would miss the attention; aaconv.layers.fold_batch_norm\(layer, norm\)"


def trained(network):
    """With open gates."""
    for module in network.modules():
        if isinstance(module, AAConv2d | AAConv1d) and module.gate is not None:
            nn.init.normal_(module.gate)
    return randomize(network).eval()


def conv_and_norm(**options):
    return trained(nn.Sequential(AAConv2d(6, 16, 3, size=5, **(FEW | options)), nn.BatchNorm2d(16)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "attention_bias": True},
        {"value_channels": 16},
        {"combine": "add"},
        {"combine": "add", "groups": 2, "bias": False, "attention_bias": True, "stride": 2, "downsample": True},
    ],
    ids=str,
)
def test_a_folded_batch_norm_gives_the_same(options):
    network = conv_and_norm(**options).double()
    x = torch.randn(2, 6, 7, 6, dtype=torch.float64)
    before = copy.deepcopy(network.state_dict())
    folded = fold_batch_norm(*network)
    torch.testing.assert_close(folded(x), network(x))
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_a_sequence_and_a_norm_without_scale():
    layer, norm = trained(nn.Sequential(AAConv1d(6, 16, 3, size=5, combine="add", **FEW), nn.BatchNorm1d(16)))
    x = torch.randn(2, 6, 9)
    plain = nn.BatchNorm1d(16, affine=False).eval()
    plain.running_var.uniform_(0.5, 2)
    for one in (norm, plain):
        torch.testing.assert_close(fold_batch_norm(layer, one)(x), one(layer(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (nn.BatchNorm2d(16).train(), "call eval"),
        (nn.GroupNorm(4, 16), "only a batch norm"),
        (nn.BatchNorm2d(16, track_running_stats=False), "running statistics"),
        (nn.BatchNorm2d(8), "the layer has 16 channels, the batch norm 8"),
        (timm.layers.BatchNormAct2d(16), "BatchNormAct2d does more than a batch norm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_folded_is_refused(norm, message):
    layer = AAConv2d(6, 16, 3, size=5, **FEW).eval()
    with pytest.raises(ValueError, match=message):
        fold_batch_norm(layer, norm if "eval" in message else norm.eval())


@pytest.mark.parametrize("combine", ["concat", "add"])
def test_fusions_that_read_the_weight_are_refused_with_a_reason(combine):
    network = conv_and_norm(combine=combine)
    with pytest.raises(AttributeError, match=REASON):
        fuse_conv_bn_eval(*network)
    with pytest.raises(AttributeError, match=REASON):
        like_ultralytics(*network)
    with pytest.raises((AssertionError, NotImplementedError), match="AAConv2d"):
        fuse_modules(network, ["0", "1"])


def like_ultralytics(conv, norm):
    fused = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, bias=True)
    scale = torch.diag(norm.weight.div(torch.sqrt(norm.eps + norm.running_var)))
    fused.weight.copy_(torch.mm(scale, conv.weight.clone().view(conv.out_channels, -1)).view(fused.weight.shape))
    return fused


@pytest.mark.parametrize("combine", ["concat", "add"])
def test_fusions_of_traced_networks_leave_the_layer_as_it_is(combine):
    network = nn.Sequential(conv_and_norm(combine=combine), nn.Conv2d(16, 4, 1), nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 6, 5, 5)
    fused = fuse(fx.symbolic_trace(network))
    torch.testing.assert_close(fused(x), network(x))
    assert sum(isinstance(module, nn.BatchNorm2d) for module in fused.modules()) == 1


def test_timms_reparameterization_is_right_or_refused():
    x = torch.randn(2, 3, 64, 64)
    beside, _ = augment(timm.create_model("resnet10t"), 64, where="layer4.*.conv1", combine="add", **FEW)
    trained(beside)
    torch.testing.assert_close(reparameterize_model(beside)(x), beside(x))
    inside, _ = augment(timm.create_model("repvgg_a0"), 64, where="stages.3.0.conv_kxk.conv", combine="add", **FEW)
    with pytest.raises(AttributeError, match=REASON):
        reparameterize_model(inside.eval())


@pytest.mark.parametrize("combine", ["concat", "add"])
def test_pruning_of_channels_is_refused_with_a_reason(combine):
    layer = AAConv2d(6, 16, 3, size=5, combine=combine, **FEW)
    with pytest.raises(AttributeError, match=REASON):
        prune.ln_structured(layer, "weight", amount=0.5, n=2, dim=0)


def test_channels_taken_out_of_the_convolution_alone_are_refused():
    layer, x = AAConv2d(6, 16, 3, size=5, combine="add", **FEW), torch.randn(1, 6, 5, 5)
    prune.ln_structured(layer.conv, "weight", amount=0.5, n=2, dim=0)
    nn.init.ones_(layer.gate)
    assert layer(x).shape == (1, 16, 5, 5)  # masked there, and attended
    layer.conv = nn.Conv2d(6, 1, 3, padding=1)  # which would broadcast
    with pytest.raises(ValueError, match=r"the convolution gives 1 channels, the gate is made for 16: .*not taken out"):
        layer(x)


@pytest.fixture(scope="module")
def network():
    model = timm.create_model("resnet10t", num_classes=5)
    return trained(augment(model, 64, where="layer[34].*.conv1", combine="add", qk_norm=True, **FEW)[0])


def test_copies_averages_and_traces_give_the_same(network):
    x = torch.randn(2, 3, 64, 64)
    for other in (copy.deepcopy(network), ModelEmaV3(network).module, fx.symbolic_trace(network)):
        assert torch.equal(other(x), network(x))
    # Its own convolutions, not those of the network.
    copied = copy.deepcopy(network)
    nn.init.zeros_(copied.layer4[0].conv1.conv.weight)
    assert not torch.equal(copied(x), network(x))


@pytest.mark.parametrize("name", ["resnet10t", "tf_efficientnet_lite0"])
def test_features_of_a_network(name):
    where = {"resnet10t": "layer[34].*.conv1", "tf_efficientnet_lite0": "blocks.[345].*.conv_dw"}[name]
    features = randomize(timm.create_model(name, features_only=True)).eval()
    x = torch.randn(1, 3, 64, 64)
    before = features(x)
    augment(features, 64, where=where, combine="add", **FEW)
    for ours, theirs in zip(features(x), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_an_exported_network(network):
    x = torch.randn(2, 3, 64, 64)
    exported = torch.export.export(network, (x,)).module()
    torch.testing.assert_close(exported(x), network(x), rtol=1e-4, atol=1e-5)


def fuse_children(module):
    """As mmcv and others do it: a batch norm into the convolution that stands before it among the children."""
    last = None
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            if last is not None:
                setattr(module, last, fuse_conv_bn_eval(getattr(module, last), child))
                setattr(module, name, nn.Identity())
            last = None
        elif isinstance(child, nn.Conv2d):
            last = name
        else:
            fuse_children(child)
    return module


def test_fusions_of_neighbouring_children_leave_the_layer_as_it_is():
    plain = timm.create_model("resnet18", num_classes=5)  # its norms do nothing but normalise
    augmented = trained(augment(plain, 64, where="layer[34].*.conv1", combine="add", **FEW)[0])
    fused = fuse_children(copy.deepcopy(augmented))
    before, after = (sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) for model in (augmented, fused))
    assert (before, after) == (20, 4)  # behind the four layers they stay
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(fused(x), augmented(x), rtol=1e-4, atol=1e-4)
