import pytest
import torch

from aaconv.layers.gates import BAM, CBAM, GALA, GATES, GE, SE


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 7), (5, 11)])
@pytest.mark.parametrize("name", GATES)
def test_gate_keeps_the_shape_and_teaches_every_parameter(name, height, width):
    x = torch.randn(2, 32, height, width, requires_grad=True)
    gate = GATES[name](32)
    y = gate(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is not None for p in gate.parameters())


@pytest.mark.parametrize("name", GATES)
def test_gate_rescales_and_never_shifts(name):
    gate = GATES[name](16).eval()
    x = torch.randn(2, 16, 6, 6)
    x[:, :, 2, 3] = 0
    assert (gate(x)[:, :, 2, 3] == 0).all()


# C = channels, r = C / 16; the formulae are those of the gates' papers.
@pytest.mark.parametrize("channels", [64, 256, 2048])
def test_parameters(channels):
    r = channels // 16
    assert parameters(SE(channels)) == 2 * channels * r
    assert parameters(SE(channels, bias=True)) == 2 * channels * r + r + channels
    assert parameters(GE(channels)) == parameters(GE(channels, extent=4)) == 0
    assert parameters(GE(channels, learned=True, extent=4)) == 2 * (9 + 2) * channels
    assert parameters(GE(channels, learned=True, size=(7, 5))) == (35 + 2) * channels
    channel_path = channels * r + r + 2 * r + r * channels + channels
    spatial_path = channels * r + 3 * r + 2 * (9 * r * r + 3 * r) + r + 1
    assert parameters(BAM(channels)) == channel_path + spatial_path
    assert parameters(CBAM(channels)) == 2 * channels * r + r + channels + 98 + 2
    assert parameters(GALA(channels)) == 3 * channels * r + r + 2 * channels


def test_a_reduction_of_one_keeps_all_channels():
    assert parameters(SE(8, reduction=1)) == 2 * 8 * 8
    with pytest.raises(ValueError, match="at least 1, got channels=8, reduction=0"):
        SE(8, reduction=0)


def test_channels_below_the_reduction_keep_one_hidden_channel():
    assert parameters(SE(8, reduction=16)) == 16


def test_se_is_its_formula():
    x, gate = torch.randn(3, 16, 4, 4), SE(16, reduction=4)
    hidden = torch.relu(x.mean((2, 3)) @ gate.mlp[0].weight[:, :, 0, 0].T)
    scale = torch.sigmoid(hidden @ gate.mlp[2].weight[:, :, 0, 0].T)
    torch.testing.assert_close(gate(x), x * scale[:, :, None, None])


def test_bam_is_its_formula():
    x, gate = torch.randn(2, 16, 5, 5), BAM(16).eval()
    together = gate.channel(x.mean((2, 3)))[:, :, None, None] + gate.spatial(x)
    torch.testing.assert_close(gate(x), x * (1 + together.sigmoid()))


def test_gala_starts_as_the_mean_of_its_two_gates():
    x, gate = torch.randn(2, 16, 5, 5), GALA(16)
    g, m = gate.channel(x.mean((2, 3), keepdim=True)).sigmoid(), gate.saliency(x).sigmoid()
    torch.testing.assert_close(gate(x), x * (g + m) / 2)
    torch.nn.init.normal_(gate.sum_weight)
    torch.nn.init.normal_(gate.product_weight)
    torch.testing.assert_close(gate(x), x * (gate.sum_weight * (g + m) + gate.product_weight * g * m))


def test_ge_of_the_whole_map_is_one_weighted_sum_a_channel():
    x, gate = torch.randn(2, 3, 5, 4), GE(3, learned=True, size=(5, 4)).eval()
    gathered = (x * gate.gather[0].weight[:, 0]).sum((2, 3), keepdim=True) / (1 + gate.gather[1].eps) ** 0.5
    torch.testing.assert_close(gate(x), x * gathered.sigmoid())


def test_ge_gathers_around_each_pixel():
    x = torch.zeros(1, 1, 8, 8)
    x[..., :4, :4] = 1
    near = GE(1, extent=2)(x)
    assert near[0, 0, 0, 0] == torch.tensor(1.0).sigmoid()
    torch.testing.assert_close(GE(1)(x)[0, 0, 0, 0], torch.tensor(0.25).sigmoid())
    # extent 2: the output pixel at (6, 6) gathers rows and columns 5 to 7 only
    grad = torch.ones(1, 1, 8, 8, requires_grad=True)
    GE(1, extent=2)(grad)[0, 0, 6, 6].backward()
    assert (grad.grad[0, 0] != 0).nonzero().min() == 5


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("extent", [2, 4, 8])
@pytest.mark.parametrize("size", [(9, 13), (4, 2), (2, 4), (1, 1)], ids=str)
def test_ge_of_any_extent_keeps_odd_shapes(learned, extent, size):
    assert GE(8, learned, extent)(torch.randn(2, 8, *size)).shape == (2, 8, *size)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: GE(8, extent=3), "extent=3"),
        (lambda: GE(8, learned=True), "size="),
        (lambda: CBAM(8, kernel_size=4), "try 5"),
        (lambda: SE(0), "channels=0"),
    ],
)
def test_errors_name_the_argument(make, told):
    with pytest.raises(ValueError, match=told):
        make()
