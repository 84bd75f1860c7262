"""AAConv2d under the tools of torch: compile, export, autocast, memory formats, checkpointing, DDP, gradcheck."""

import copy
import warnings

import pytest
import timm
import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from aaconv import AAConv1d, AAConv2d, augment

SMALL = {"num_heads": 4, "value_ratio": 0.25, "min_key_channels_per_head": 3}
VARIANTS = [
    {},
    {"stride": 2, "downsample": True},
    {"position": "coordconv"},
    {"position": "sinusoidal"},
    {"share_heads": False, "value_ratio": 1.0},
    {"padding": 0},
]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def small(**options):
    return AAConv2d(6, 16, 3, **{**SMALL, **options})


def assert_compiles(layer, sizes):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for size in sizes:
        x = torch.randn(2, 6, *size, requires_grad=True)
        out = compiled(x)
        torch.testing.assert_close(out, layer(x))
        out.sum().backward()
        assert x.grad is not None


@pytest.mark.slow
@each_variant
def test_compile_without_graph_breaks(variant):
    assert_compiles(small(**variant, size=5), [(9, 6)])


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{}, {"padding": 0}], ids=str)
def test_compile_for_changing_sizes(variant):
    assert_compiles(small(**variant, size=5), [(5, 5), (9, 8), (12, 15)])


@pytest.mark.slow
def test_compile_a_lazy_layer():
    assert_compiles(small(), [(5, 7)])


@pytest.mark.slow
def test_compile_with_inductor():
    layer = small(size=5)
    x = torch.randn(2, 6, 5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        out = torch.compile(layer, fullgraph=True)(x)
        out.sum().backward()
    torch.testing.assert_close(out, layer(x))


def skip_if_pooling_binds_sizes(variant):
    """torch 2.11's avg_pool2d with a stride makes an export good for odd sizes alone, or for even ones."""
    if "stride" not in variant:
        return
    free = ({2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},)
    pooling = torch.export.export(nn.AvgPool2d(3, 2, 1), (torch.zeros(1, 1, 9, 9),), dynamic_shapes=free).module()
    try:
        pooling(torch.zeros(1, 1, 8, 8))
    except (AssertionError, RuntimeError):
        pytest.skip("the pooling of this torch binds sizes that were declared free")


@pytest.mark.slow
@each_variant
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_batch_height_and_width(variant, strict):
    skip_if_pooling_binds_sizes(variant)
    layer = small(**variant, size=(7, 7)).eval()
    batch, height, width = (torch.export.Dim(name, min=low, max=512) for name, low in (("b", 1), ("h", 8), ("w", 8)))
    program = torch.export.export(
        layer, (torch.randn(2, 6, 9, 11),), dynamic_shapes={"input": {0: batch, 2: height, 3: width}}, strict=strict
    )
    module = program.module()
    for shape in [(1, 6, 8, 8), (3, 6, 14, 9), (5, 6, 31, 40), (1, 6, 8, 150)]:
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{}, {"padding": 0}, {"stride": 2, "downsample": True}], ids=str)
def test_export_of_a_sequence_with_dynamic_length(variant):
    skip_if_pooling_binds_sizes(variant)
    layer = AAConv1d(6, 16, 3, **SMALL, **variant, size=7).eval()
    # AUTO: torch cannot prove of a named range that a strided length is never 1.
    dynamic = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}
    module = torch.export.export(layer, (torch.randn(2, 6, 9),), dynamic_shapes={"input": dynamic}).module()
    for shape in [(1, 6, 8), (3, 6, 200)]:
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), layer(x))


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_autocast(variant, dtype, backend):
    layer = small(**variant, size=6, backend=backend)
    x = torch.randn(2, 6, 6, 6)
    with torch.autocast("cpu", dtype=dtype):
        out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), layer(x), rtol=0.1, atol=0.1)
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


@each_variant
def test_channels_last_in_channels_last_out(variant):
    layer = small(**variant, size=6)
    x = torch.randn(2, 6, 8, 6)
    expected = layer(x)
    layer.to(memory_format=torch.channels_last)
    out = layer(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_deepcopy_and_state_dict_give_the_same_layer():
    layer, x = small(size=6), torch.randn(2, 6, 6, 6)
    fresh = small(size=6)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(fresh(x), layer(x))


def test_activation_checkpointing_gives_the_same_gradients():
    layer, x = small(size=6), torch.randn(2, 6, 6, 6, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), [x, *layer.parameters()])
    for got, want in zip(again, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # of a 1x1: of no consequence
@pytest.mark.parametrize("variant", [{}, {"value_ratio": 1.0}, {"position": "none"}], ids=str)
def test_distributed_data_parallel_finds_no_unused_parameter(variant, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Sequential(small(**variant, size=6)), find_unused_parameters=False)
        for _ in range(2):  # an unused parameter is reported at the second step
            model(torch.randn(2, 6, 6, 6)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()


@each_variant
def test_gradcheck_in_float64(variant):
    options = {"num_heads": 2, "key_channels": 4, "value_channels": 2, "size": 2, **variant}
    options.pop("value_ratio", None)
    layer = AAConv2d(2, 4, 3, **options).double()
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("variant", [{}, {"stride": 2, "downsample": True}, {"position": "none"}], ids=str)
def test_second_derivatives_and_forward_mode(variant):
    """As nn.Conv2d has them, without a backend to choose: a gradient penalty, and torch.func.jvp."""
    layer, eager = (small(**variant, size=5, backend=backend).double() for backend in (None, "eager"))
    eager.load_state_dict(layer.state_dict())
    x, direction = torch.randn(2, 2, 6, 5, 5, dtype=torch.float64)
    results = []
    for one in (layer, eager):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(one(leaf).square().sum(), leaf, create_graph=True)
        penalty = torch.autograd.grad(gradient.square().sum(), [leaf, *one.parameters()])
        results.append((*torch.func.jvp(one, (x,), (direction,)), *penalty))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
@each_variant
def test_jit_trace_with_gradients(variant):
    layer, x = small(**variant, size=5), torch.randn(2, 6, 9, 6)
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(x), layer(x))
    gradients = [torch.autograd.grad(one(x).square().sum(), [*layer.parameters()]) for one in (traced, layer)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_a_moving_average_of_the_weights():
    """timm's, of an augmented network, before any forward: augment knows the size of the tables."""
    model, _ = augment(timm.create_model("resnet18"), 64, where="layer4.*.conv1")
    average = ModelEmaV3(model, decay=0.75)
    before = model.layer4[0].conv1.rel_h.detach().clone()
    with torch.no_grad():
        model.layer4[0].conv1.rel_h.add_(1)
    average.update(model)
    torch.testing.assert_close(average.module.layer4[0].conv1.rel_h, before + 0.25)


def test_a_moving_average_of_lazy_tables_says_what_to_do():
    layer = small()
    average = ModelEmaV3(layer)
    with pytest.raises(ValueError, match=r"the relative tables are lazy.*pass size="):
        average.update(layer)


CHANGING = [(16, 16), (24, 24), (16, 28), (20, 12), (15, 17), (13, 13), (25, 14), (26, 26)]


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_sizes_that_change_are_compiled_a_few_times_whatever_they_are(training):
    """Again for maps that are not square, and where rows, columns or both are more than the tables know: not for odd
    and even sizes of each of the layers."""
    from torch._dynamo.testing import CompileCounter

    pooling = CompileCounter()
    pooled = torch.compile(lambda x: nn.functional.avg_pool2d(x, 3, 2, 1), dynamic=True, backend=pooling)
    for side in (16, 15):
        pooled(torch.randn(1, 2, side, side + 2))
    if pooling.frame_count > 1:
        pytest.skip(f"torch {torch.__version__} compiles every pooling anew for odd and for even sides")
    strided, halved = small(stride=2, size=8), AAConv2d(16, 16, 3, **SMALL, size=8, downsample=True)
    network, counter = nn.Sequential(strided, nn.ReLU(), halved).train(training), CompileCounter()
    compiled = torch.compile(network, dynamic=True, fullgraph=True, backend=counter)
    with torch.set_grad_enabled(training):
        for size in CHANGING:
            x = torch.randn(2, 6, *size, requires_grad=training)
            torch.testing.assert_close(compiled(x), network(x))
        few = counter.frame_count
        for size in CHANGING:
            compiled(torch.randn(3, 6, size[0] + 1, size[1] + 3, requires_grad=training))
    assert few <= 4
    assert counter.frame_count <= 5
