"""Accelerated models under the tools of torch, calls that go to a module's own forward, reports and errors."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.vision_transformer_sam import Attention, VisionTransformerSAM
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from aaconv.layers.accelerate import accelerate
from aaconv.layers.accelerated import Accelerated
from support.accelerated_laws import assert_as_exact, assert_same, counted, drawn, output_and_gradients


def attention(size=(3, 4), **options):
    return drawn(Attention(12, num_heads=3, use_rel_pos=True, input_size=size, **options), torch.float32)


class TwoBlocks(nn.Sequential):
    """Two SAM attentions one after the other, the second with tables for another size."""

    def __init__(self, **options):
        super().__init__(attention((3, 4), **options), attention((5, 2), **options))


def pixels(*size):
    return torch.randn(2, *size, 12)


@pytest.mark.slow
def test_fullgraph_compilation():
    model, x = TwoBlocks(), pixels(3, 4)
    theirs = output_and_gradients(model, x)
    accelerate(model)
    assert_same(output_and_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x), theirs)


@pytest.mark.slow
def test_compilation_for_changing_sizes():
    model = attention()
    own = copy.deepcopy(model)
    accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in ((3, 4), (6, 5), (7, 9)):
        x = pixels(*size)
        torch.testing.assert_close(compiled(x), own(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (BottleneckAttn(12, feat_size=(3, 4)), ((2, 12, 3, 4),)),
        (HaloAttn(12, num_heads=3, block_size=4, halo_size=1), ((2, 12, 8, 4),)),
        (MultiScaleAttention(12, 12, (4, 4), 3, kernel_kv=(3, 3), stride_kv=(2, 2)), ((2, 17, 12), (4, 4))),
    ],
    ids=["bottleneck", "halo", "multiscale"],
)
def test_fullgraph_compilation_of_other_families(module, shape):
    module, inputs = drawn(module, torch.float32), (torch.randn(shape[0]), *shape[1:])
    theirs = output_and_gradients(module, *inputs)
    accelerate(module)
    assert_same(output_and_gradients(torch.compile(module, fullgraph=True, backend="aot_eager"), *inputs), theirs)


def test_a_compiled_model_notices_accelerate_and_undo():
    model, x = TwoBlocks(), pixels(3, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(x)
    report = accelerate(compiled)
    for row in report.replaced:
        row.accelerated.compute = lambda x: torch.zeros_like(x)
    assert not compiled(x).any()
    report.undo()
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled(x).any()


@pytest.mark.slow
def test_compile_with_inductor():
    model, x = attention().eval(), pixels(3, 4)
    wanted = model(x)
    accelerate(model)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), wanted)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Attention(32, num_heads=2, use_rel_pos=True, input_size=(6, 5)), ((16, 6, 5, 32),)),
        (Attention(32, num_heads=2, use_rel_pos=True, input_size=(4, 4), qk_norm=True), ((16, 6, 5, 32),)),
        (BottleneckAttn(32, feat_size=(6, 5), num_heads=2), ((16, 32, 6, 5),)),
        (HaloAttn(32, num_heads=2, block_size=4, halo_size=2), ((16, 32, 8, 4),)),
        (
            MultiScaleAttention(32, 32, (4, 4), 2, kernel_q=(3, 3), kernel_kv=(3, 3), stride_kv=(2, 2)),
            ((16, 17, 32), (4, 4)),
        ),
    ],
    ids=["sam", "sam with norms", "bottleneck", "halo", "multiscale"],
)
def test_autocast_is_as_exact_as_the_librarys_own(module, shape):
    assert_as_exact(drawn(module, torch.float32), torch.randn(shape[0]), *shape[1:])


def test_a_bfloat16_model_keeps_its_dtype():
    model = TwoBlocks().to(torch.bfloat16)
    accelerate(model)
    found = output_and_gradients(model, pixels(6, 5).bfloat16())
    assert {part.dtype for part in found.values()} == {torch.bfloat16}


def test_checkpointing():
    model, x = TwoBlocks(), pixels(3, 4)
    theirs = output_and_gradients(model, x)
    accelerate(model)
    holder = nn.Module()
    holder.forward = lambda x: checkpoint(model, x, use_reentrant=False)
    holder.model = model
    found = output_and_gradients(holder, x)
    assert_same({name.removeprefix("model."): part for name, part in found.items()}, theirs)


def test_a_copy_is_accelerated_on_its_own():
    model, x = TwoBlocks(), pixels(3, 4)
    report = accelerate(model)
    twin = copy.deepcopy(model)
    assert twin[0].forward.module is twin[0]
    with torch.no_grad():
        model[0].qkv.weight.zero_()
    wanted = copy.deepcopy(twin)
    accelerate(wanted).undo()
    torch.testing.assert_close(twin(x), wanted(x))
    report.undo()
    assert isinstance(twin[0].forward, Accelerated)
    accelerate(twin).undo()
    assert "forward" not in vars(twin[0])


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_pickled_model_stays_accelerated(way):
    model, x = TwoBlocks(), pixels(3, 4)
    accelerate(model)
    if way == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert isinstance(loaded[1].forward, Accelerated)
    assert loaded[1].forward.module is loaded[1]
    assert torch.equal(loaded(x), model(x))


def test_state_dicts_fit_both_ways():
    model, plain = TwoBlocks(), TwoBlocks()
    accelerate(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    model.load_state_dict(plain.state_dict())
    x = pixels(3, 4)
    torch.testing.assert_close(model(x), plain(x))


def test_distributed_data_parallel(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        model, x = TwoBlocks(), pixels(3, 4)
        theirs = output_and_gradients(model, x)
        parallel = DistributedDataParallel(model)
        accelerate(parallel)
        parallel(x).backward(
            torch.randn(2, 3, 4, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
        )
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name])
    finally:
        dist.destroy_process_group()


def test_gradients_of_gradients():
    module = drawn(Attention(6, num_heads=2, use_rel_pos=True, input_size=(2, 3)))
    accelerate(module)
    x = torch.randn(1, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, h: torch.func.functional_call(module, {"rel_pos_h": h}, x), (x, module.rel_pos_h)
    )


def test_frozen_tables_get_no_gradient():
    model = TwoBlocks().requires_grad_(False)
    accelerate(model)
    x = pixels(3, 4).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_of_the_weights_goes_to_the_own_forward_in_training():
    model, x = TwoBlocks(attn_drop=0.5), pixels(3, 4)
    own = copy.deepcopy(model)
    report = accelerate(model)
    calls = counted(report)
    torch.manual_seed(3)
    wanted = own(x)
    torch.manual_seed(3)
    assert torch.equal(model(x), wanted)
    assert not any(calls.values())
    torch.testing.assert_close(model.eval()(x), own.eval()(x))
    assert all(calls.values())
    assert "own forward in training: attention dropout 0.5" in str(report)


def test_dropout_of_the_output_is_kept():
    module, x = attention(proj_drop=0.5), pixels(3, 4)
    torch.manual_seed(3)
    wanted = module(x)
    accelerate(module)
    torch.manual_seed(3)
    torch.testing.assert_close(module(x), wanted)


def test_hooks_are_called():
    module, seen = attention(), []
    accelerate(module)
    for part in (module, module.qkv, module.proj):
        part.register_forward_hook(lambda part, inputs, output: seen.append(part))
    module(pixels(3, 4))
    assert seen == [module.qkv, module.proj, module]


def test_another_module_in_the_place_of_qkv_is_used():
    """As adapters of fine-tuning put one there, before or after accelerate."""
    module, x = attention(), pixels(3, 4)
    accelerate(module)
    module.qkv = nn.Sequential(module.qkv, nn.Tanh())
    own = copy.deepcopy(module)
    accelerate(own).undo()
    torch.testing.assert_close(module(x), own(x))


def test_wrong_inputs_get_the_modules_own_error():
    module = drawn(BottleneckAttn(12, feat_size=(3, 4)), torch.float32)
    accelerate(module)
    with pytest.raises(AssertionError):
        module(torch.randn(1, 12, 5, 4))
    sam = attention()
    accelerate(sam)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        sam(torch.randn(2, 12))
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        sam(pixels(3, 4), y=1)


def test_the_random_numbers_of_the_process_are_not_touched():
    model = TwoBlocks()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    accelerate(model)
    assert torch.equal(torch.rand(3), wanted)


def test_training_mode_and_weights_are_not_touched():
    model = TwoBlocks()
    before = copy.deepcopy(model.state_dict())
    accelerate(model)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_report_is_a_table():
    model = VisionTransformerSAM(
        img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=2, use_rel_pos=True, window_size=3, neck_chans=8,
        global_attn_indexes=(1,),
    )  # fmt: skip
    report = accelerate(model)
    assert str(report).splitlines() == [
        "module         class      heads  depth  tables  computed by  notes",
        "blocks.0.attn  Attention      2      6   3 x 3  attend_2d",
        "blocks.1.attn  Attention      2      6   4 x 4  attend_2d",
        "in all                                          2 of 2",
    ]
    assert repr(report) == str(report)
    assert "<td>blocks.1.attn</td><td>Attention</td><td>2</td>" in report._repr_html_()


def test_accelerate_twice_is_accelerate_once():
    model = TwoBlocks()
    first, second = accelerate(model), accelerate(model)
    assert str(first) == str(second)
    second.undo()
    first.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_module_alone():
    assert accelerate(attention()).replaced[0].name == "the model itself"


def test_relative_positions_that_are_off_are_left_alone():
    model = nn.Sequential(Attention(12, num_heads=3), attention())
    report = accelerate(model)
    assert [(row.name, row.reason) for row in report.kept] == [("0", "relative positions are off: use_rel_pos=False")]
    assert "forward" not in vars(model[0])
    assert "relative positions are off" in str(report)
    assert "1 of 2" in str(report)


class OtherDirection(Attention):
    """The same attributes, another formula."""

    def forward(self, x):
        with torch.no_grad():
            tables = self.rel_pos_h.clone()
            self.rel_pos_h.copy_(tables.flip(0))
            try:
                return super().forward(x)
            finally:
                self.rel_pos_h.copy_(tables)


class Broken(Attention):
    def forward(self, x):
        raise KeyError("nothing")


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.rel_pos_h, self.rel_pos_w = (nn.Parameter(torch.zeros(3, 4)) for _ in range(2))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda **sizes: OtherDirection(12, **sizes), "its own forward gives something else on a trial input"),
        (lambda **sizes: Broken(12, **sizes), "on a trial input KeyError: 'nothing'"),
        (lambda **sizes: Tables(), "not the parts of a family that accelerate knows"),
    ],
    ids=["other formula", "broken", "other parts"],
)
def test_an_unknown_form_is_left_alone(made, reason):
    model = nn.Sequential(made(num_heads=3, use_rel_pos=True, input_size=(3, 4)))
    report = accelerate(model)
    assert not report.replaced
    assert report.kept[0].reason.startswith("unknown form: ")
    assert reason in report.kept[0].reason
    assert "forward" not in vars(model[0])


def test_a_forward_that_somebody_replaced_is_left_alone():
    model = TwoBlocks()
    model[0].forward = lambda x: x
    report = accelerate(model)
    assert [row.name for row in report.replaced] == ["1"]
    assert report.kept[0].reason == "its forward has been replaced already, by function"


def test_undo_refuses_where_somebody_replaced_ours():
    model = TwoBlocks()
    report = accelerate(model)
    model[1].forward = lambda x: x
    with pytest.raises(ValueError, match="the forward of 1 has been replaced since accelerate"):
        report.undo()
    assert isinstance(model[0].forward, Accelerated)


def test_parameters_on_two_devices_are_left_alone():
    model = attention()
    model.proj.to("meta")
    assert accelerate(model).kept[0].reason == "its parameters are on cpu and meta: move it to one device first"


def test_a_model_without_memory_is_accelerated_and_then_loaded():
    full = TwoBlocks()
    with torch.device("meta"):
        model = TwoBlocks()
    accelerate(model)
    model.to_empty(device="cpu").load_state_dict(full.state_dict())
    x = pixels(3, 4)
    torch.testing.assert_close(model(x), full(x))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ([attention()], "model must be a torch.nn.Module, got list"),
        (Attention, "model must be a torch.nn.Module, got type"),
        (
            nn.Linear(2, 2),
            "Linear has no attention with 2-D relative positions: .* rel_pos_h and rel_pos_w .* height_rel",
        ),
    ],
    ids=["list", "class", "no attention"],
)
def test_bad_input_is_named_in_one_line(model, told):
    with pytest.raises(ValueError, match=told) as error:
        accelerate(model)
    assert "\n" not in str(error.value)
