"""Programs of others that take a network and look into it, on ours and on an augmented one of torchvision."""

import pytest
import timm
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torchvision.models import resnet18

from aaconv import AAConv2d, augment

torchs_own = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)


def named():
    return timm.create_model("aa_small", img_size=16), torch.randn(2, 3, 16, 16)


def augmented():
    return augment(resnet18(num_classes=3), 32, where="layer2.*.conv1")[0], torch.randn(2, 3, 32, 32)


both = pytest.mark.parametrize("make", [named, augmented])


def attention_layers(model):
    return [module for module in model.modules() if isinstance(module, AAConv2d)]


@torchs_own
@both
def test_a_traced_network(make):
    """In training mode, too: gradients flow into whatever was traced."""
    model, x = make()
    traced = torch.jit.trace(model.eval(), x)
    torch.testing.assert_close(traced(x), model(x))
    traced(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@torchs_own
@both
def test_the_graph_in_tensorboard(make, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    model, x = make()
    with SummaryWriter(tmp_path) as writer:
        writer.add_graph(model, x)
    (events,) = tmp_path.iterdir()
    assert b"AAConv2d" in events.read_bytes()


@both
def test_torchinfo_counts_every_parameter_once(make):
    torchinfo = pytest.importorskip("torchinfo", reason="torchinfo is not installed")
    model, x = make()
    summary = torchinfo.summary(model, input_data=x, verbose=0, depth=6)
    assert summary.total_params == sum(parameter.numel() for parameter in model.parameters())
    assert str(summary).count("AAConv2d") >= len(attention_layers(model)) > 0


@pytest.mark.filterwarnings("ignore:Input Tensor:UserWarning", "ignore:.*backward hook.*:UserWarning")
@both
def test_captum_attributes_an_output_to_pixels_and_to_a_layer(make):
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    model, x = make()
    model.eval()
    pixels, error = attr.IntegratedGradients(model).attribute(x, target=1, n_steps=40, return_convergence_delta=True)
    assert pixels.shape == x.shape
    assert error.abs().max() < 0.05 * pixels.abs().sum()  # they add up to the difference of the outputs
    layer = attention_layers(model)[-1]
    cam = attr.LayerGradCam(model, layer).attribute(x, target=1)
    assert cam.shape[:2] == (2, 1)
    assert cam.abs().max() > 0


@both
def test_gradients_of_each_image(make):
    """torch.func: those of a batch at once are those of one image after the other."""
    model, x = make()
    model.eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(weights, image):
        return functional_call(model, (weights, buffers), (image[None],)).square().sum()

    at_once = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    for index, image in enumerate(x):
        for name, gradient in grad(loss)(weights, image).items():
            torch.testing.assert_close(at_once[name][index], gradient, rtol=1e-3, atol=1e-4, msg=name)


@both
def test_sizes_are_known_before_the_first_forward(make):
    model, _ = make()
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    model.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Conv2d) else None)
    average = timm.utils.ModelEmaV3(model, decay=0.5)
    average.update(model)
