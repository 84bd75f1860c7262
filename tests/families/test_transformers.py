"""accelerate against the attention modules of transformers: output and all gradients, in float64."""

import copy
import importlib

import pytest
import torch

from aaconv.layers.accelerate import accelerate
from support.accelerated_laws import assert_accelerates, counted, drawn

pytest.importorskip("transformers", reason="transformers is not installed; `make test-families` installs it")

LIKE_SAM = [
    ("sam", "SamVisionAttention", "SamVisionConfig"),
    ("sam", "SamVisionSdpaAttention", "SamVisionConfig"),
    ("sam_hq", "SamHQVisionAttention", "SamHQVisionConfig"),
    ("sam_hq", "SamHQVisionSdpaAttention", "SamHQVisionConfig"),
    ("got_ocr2", "GotOcr2VisionAttention", "GotOcr2VisionConfig"),
    ("slanext", "SLANeXtVisionAttention", "SLANeXtVisionConfig"),
    ("pp_formulanet", "PPFormulaNetVisionAttention", "PPFormulaNetVisionConfig"),
    ("deepseek_ocr2", "DeepseekOcr2SamVisionAttention", "DeepseekOcr2SamVisionConfig"),
    ("deepseek_ocr2", "DeepseekOcr2SamVisionSdpaAttention", "DeepseekOcr2SamVisionConfig"),
    ("unlimited_ocr", "UnlimitedOcrSamVisionAttention", "UnlimitedOcrSamVisionConfig"),
    ("unlimited_ocr", "UnlimitedOcrSamVisionSdpaAttention", "UnlimitedOcrSamVisionConfig"),
]
SMALL = {"hidden_size": 12, "num_attention_heads": 3, "image_size": 20, "patch_size": 4}
SIZES = [(5, 5), (3, 7), (8, 2), (1, 1)]


@pytest.fixture(autouse=True)
def _softmax_in_float64(monkeypatch):
    """Some of these modules compute their softmax in float32 whatever they are given."""
    softmax = torch.nn.functional.softmax

    def exact(x, *args, dtype=None, **kwargs):
        return softmax(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", exact)


def made(family, name):
    """A class or function of a family, where this version of transformers has it."""
    for kind in ("modeling", "configuration"):
        try:
            module = importlib.import_module(f"transformers.models.{family}.{kind}_{family}")
        except ModuleNotFoundError:
            pytest.skip(f"this transformers has no {family}")
        if hasattr(module, name):
            return getattr(module, name)
    return pytest.skip(f"this transformers has no {name}")


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("family", "attention", "config"), LIKE_SAM, ids=[name for _, name, _ in LIKE_SAM])
def test_attention_like_sams(family, attention, config, size):
    module = drawn(made(family, attention)(made(family, config)(**SMALL), window_size=0))
    assert_accelerates(module, random(2, *size, 12))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_vitdet(size):
    config = made("vitdet", "VitDetConfig")(**SMALL, use_relative_position_embeddings=True)
    assert_accelerates(drawn(made("vitdet", "VitDetAttention")(config, (5, 4))), random(2, *size, 12))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_seggpt(size):
    module = drawn(made("seggpt", "SegGptAttention")(made("seggpt", "SegGptConfig")(**SMALL)))
    assert_accelerates(module, random(2, *size, 12))


def sam_encoder(implementation="eager", **options):
    config = made("sam", "SamVisionConfig")(
        **SMALL,
        num_hidden_layers=3,
        window_size=3,
        global_attn_indexes=[1],
        output_channels=8,
        mlp_dim=16,
        attn_implementation=implementation,
        **options,
    )
    return drawn(made("sam", "SamVisionModel")(config)).eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_whole_sam_encoder(implementation):
    """Windows of 3 x 3 in a map of 5 x 5."""

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = sam_encoder(implementation)

        def forward(self, x):
            return self.model(x).last_hidden_state

    assert_accelerates(Encoder(), random(2, 3, 20, 20), modules=3)


def test_a_whole_vitdet():
    config = made("vitdet", "VitDetConfig")(
        **SMALL,
        num_hidden_layers=3,
        window_size=2,
        window_block_indices=[0, 2],
        use_relative_position_embeddings=True,
    )

    class Backbone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = made("vitdet", "VitDetModel")(config)

        def forward(self, x):
            return self.model(x).last_hidden_state

    assert_accelerates(drawn(Backbone()), random(1, 3, 20, 20), modules=3)


def test_weights_that_are_asked_for_are_the_librarys_own():
    model, x = sam_encoder("eager"), random(1, 3, 20, 20)
    twin = copy.deepcopy(model)
    report = accelerate(model)
    calls = counted(report)
    model(x)
    assert all(calls.values())
    found, wanted = model(x, output_attentions=True).attentions, twin(x, output_attentions=True).attentions
    assert len(found) == len(wanted) == 3
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "hooks, which may read the weights" in str(report)


def test_output_attentions_goes_to_the_own_forward():
    config = made("vitdet", "VitDetConfig")(**SMALL, use_relative_position_embeddings=True)
    module, x = drawn(made("vitdet", "VitDetAttention")(config, (5, 4))), random(2, 5, 4, 12)
    wanted = module(x, output_attentions=True)
    report = accelerate(module)
    for found in (module(x, output_attentions=True), module(x, True), module(hidden_state=x, output_attentions=True)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert len(module(x, output_attentions=False)) == 1
    assert "own forward with output_attentions=True" in str(report)


def test_dropout_goes_to_the_own_forward_in_training():
    model, x = sam_encoder("eager", attention_dropout=0.5).train(), random(1, 3, 20, 20)
    twin = copy.deepcopy(model)
    calls = counted(accelerate(model))
    torch.manual_seed(3)
    wanted = twin(x).last_hidden_state
    torch.manual_seed(3)
    assert torch.equal(model(x).last_hidden_state, wanted)
    assert not any(calls.values())


def test_switched_off():
    model = sam_encoder(use_rel_pos=False)
    assert {row.reason for row in accelerate(model).kept} == {"relative positions are off: use_rel_pos=False"}
    config = made("vitdet", "VitDetConfig")(**SMALL)
    report = accelerate(made("vitdet", "VitDetAttention")(config, (5, 4)))
    assert report.kept[0].reason == "relative positions are off: use_relative_position_embeddings=False"


def test_gradient_checkpointing():
    model, x = sam_encoder("sdpa").train(), random(1, 3, 20, 20)
    twin = copy.deepcopy(model)
    accelerate(model)
    # Older versions of transformers have the second name alone, newer ones warn about it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for one in (model, twin):
        one(x).last_hidden_state.square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_fullgraph_compilation():
    model, x = sam_encoder("sdpa"), random(1, 3, 20, 20)
    wanted = model(x).last_hidden_state
    accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x).last_hidden_state, wanted)
