"""Recipes: the paper's experiments are all there and are what it says, YAML loses nothing, changes are checked."""

import re
import shlex
from dataclasses import fields, replace

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aaconv import recipes
from aaconv.cli import command_line, recipe_options
from aaconv.models import create_without_memory
from aaconv.recipes import Model, Recipe, diff, overrides
from aaconv.recipes.catalogue import ours
from aaconv.recipes.overrides import check_optimizer
from aaconv.recipes.paper import TABLES
from aaconv.recipes.pretrained import Start, start_from
from aaconv.recipes.yaml_file import from_yaml, to_yaml
from aaconv.training.launch import choose
from aaconv.training.optimize import peak_rate

ALL = [recipes.get(name) for name in recipes.names()]
OF_THE_PAPER = [recipe for recipe in ALL if recipe.evidence is not None]
SMALL = Recipe("small", "for tests", Model("aa_small"), "shapes", epochs=2, batch=8)


def test_every_experiment_on_images_has_a_recipe():
    """Each row with an accuracy of tables 1 to 4, 6 and 7: the same network with the same options."""
    there = {(recipe.model.name, tuple(sorted(_structure(recipe).items()))) for recipe in OF_THE_PAPER}
    for number in (1, 2, 3, 4, 6, 7):
        for row in TABLES[number].rows:
            assert (row.model, tuple(sorted(row.options.items()))) in there, row.name
            assert (row.model, tuple(sorted((row.options | row.fitted).items()))) in there, row.name


def _structure(recipe):
    return {name: value for name, value in recipe.model.options.items() if name != "drop_rate"}


def test_practical_recipes_are_there():
    names = set(recipes.names())
    assert {f"demo-{kind}" for kind in ("plain", "se", "aa")} <= names
    variants = ("plain", "ge", "se", "aa", "aa-per-head", "aa-no-position", "aa-init-paper")
    assert {f"cifar100-small-{variant}" for variant in variants} <= names
    assert {f"imagenette-{kind}-resnet{depth}" for kind in ("plain", "se", "aa") for depth in (18, 50)} <= names
    assert {"imagenette-aa-window-resnet50", "coco-small-aa-window-retinanet50"} <= names


@pytest.mark.parametrize("depth", [18, 50])
def test_the_recipes_of_tiny_imagenet_differ_in_the_network_alone(depth):
    """One of them sees the whole map without attending, with hardly more parameters; in another attention is added
    where that is."""
    kinds = ("plain", "se", "aa", "aa-se", "average", "aa-add")
    found = {kind: recipes.get(f"tiny-imagenet-resnet{depth}-{kind}") for kind in kinds}
    plain = replace(found["plain"], name="", summary="")
    assert all(replace(recipe, name="", summary="", model=plain.model) == plain for recipe in found.values())
    sizes = {}
    for kind in ("plain", "average", "aa-add"):
        network = create_without_memory(found[kind].model.name, num_classes=200, **found[kind].model.options)
        sizes[kind] = sum(parameter.numel() for parameter in network.parameters())
    assert 1 < sizes["average"] / sizes["plain"] < 1.03
    assert 1 < sizes["aa-add"] / sizes["average"] < 1.05


def test_the_recipes_of_windows_differ_in_the_network_alone():
    found = [recipes.get(name) for name in recipes.names("imagenette-windows-*")]
    networks = ["plain_resnet50", "se_resnet50", "augmented", "aa_resnet50", *["aa_window_resnet50"] * 3]
    assert [recipe.model.name for recipe in found] == networks
    alike = [replace(recipe, name="", summary="", model=found[0].model) for recipe in found]
    assert all(recipe == alike[0] for recipe in alike)
    assert (alike[0].epochs, alike[0].in_memory, alike[0].compile) == (20, True, "reduce-overhead")
    assert 9_469 // alike[0].batch * 10 == alike[0].checkpoint_every  # in the middle and at the end


def test_the_recipes_of_a_pretrained_detector_differ_in_what_is_put_into_it_alone():
    found = [recipes.get(f"coco-small-lite0-{kind}") for kind in ("plain", "se", "aa")]
    options = [dict(recipe.model.options) for recipe in found]
    plain, se, aa = (some.pop("augmentations") for some in options)
    assert plain == []
    assert se[0]["where"] == aa[0]["where"] == ["blocks.3.2.conv_pw", "blocks.4.2.conv_pw"]
    assert options[0] == options[1] == options[2]
    assert (options[0]["backbone"], options[0]["pretrained"]) == ("tf_efficientnet_lite0", True)
    alike = [replace(recipe, name="", summary="", model=found[0].model) for recipe in found]
    assert alike[0] == alike[1] == alike[2]
    assert (alike[0].normalize, alike[0].eval_every) == ("model", alike[0].epochs)
    assert 5_000 // alike[0].batch * 10 == alike[0].checkpoint_every  # in the middle and at the end


@pytest.mark.parametrize("recipe", OF_THE_PAPER, ids=lambda recipe: recipe.name)
def test_the_papers_cell_belongs_to_the_network(recipe):
    row = recipes.paper_row(recipe)
    assert row.model == recipe.model.name
    assert _structure(recipe) in (row.options, row.options | row.fitted, row.options | row.start)
    assert TABLES[recipe.evidence.table].dataset == recipe.data.partition("/")[0]


def test_every_network_is_registered():
    assert all(timm.is_model(recipe.model.name) for recipe in ALL)


# One network for each set of options, the detectors apart: that all can be built without is tested with the models.
CLASSIFIERS = [recipe.model for recipe in reversed(ALL) if recipe.task == "classify" and recipe.model.options]


@pytest.mark.filterwarnings("ignore:.*below the minimum")  # the paper's ratios, too, stop at its minimum of 20 a head
@pytest.mark.parametrize("model", {str(model.options): model for model in CLASSIFIERS}.values(), ids=str)
def test_networks_take_their_options(model):
    with torch.device("meta"):
        assert timm.create_model(model.name, **model.network_options) is not None


def test_values_are_the_papers():
    assert recipes.paper_value(recipes.get("cifar100-wrn28-10-aa"), "top-1") == 81.6
    assert recipes.paper_value(recipes.get("imagenet-resnet50-cbam"), "top-1") == 77.4
    assert recipes.paper_value(recipes.get("imagenet-resnet50-aa-ratio-1.0"), "top-5") == 91.5
    assert recipes.paper_value(recipes.get("demo-aa"), "top-1") is None


@pytest.mark.parametrize("part", recipes.PARTIAL)
def test_a_part_of_the_images_has_no_value_in_the_paper(part):
    assert recipes.paper_value(replace(recipes.get("cifar100-wrn28-10-aa"), **{part: 5000}), "top-1") is None


def test_cifar_is_trained_as_the_paper_says():
    plain, aa = (recipes.get(f"cifar100-wrn28-10-{kind}") for kind in ("plain", "aa"))
    for recipe, batch, decay in ((plain, 1024, 2e-4), (aa, 256, 5e-4)):
        assert (recipe.epochs, recipe.batch, recipe.weight_decay) == (500, batch, decay)
        assert peak_rate(recipe) == pytest.approx(0.2 * batch / 256)
        assert (recipe.optimizer, recipe.momentum, recipe.schedule, recipe.warmup) == ("momentum", 0.9, "cosine", 0.05)


@pytest.mark.parametrize("network", ["small", "wrn28-10"])
def test_attention_that_begins_as_the_papers_differs_in_the_start_alone(network):
    usual, begun = (recipes.get(f"cifar100-{network}-aa{end}") for end in ("", "-init-paper"))
    assert begun.model == Model(usual.model.name, {"init": "paper"})
    assert replace(begun, name=usual.name, summary=usual.summary, model=usual.model) == usual
    with torch.device("meta"):
        network = timm.create_model(begun.model.name, **begun.model.options)
    layers = [layer for layer in network.modules() if hasattr(layer, "qkv")]
    assert layers
    assert all(layer.qkv.bias is not None and layer.project.bias is not None for layer in layers)


def test_imagenet_is_trained_as_the_paper_says():
    recipe = recipes.get("imagenet-resnet50-aa")
    assert (recipe.epochs, recipe.weight_decay, recipe.decay_epochs) == (100, 1e-4, (30.0, 60.0, 80.0, 90.0))
    assert peak_rate(replace(recipe, batch=256)) == pytest.approx(0.128)
    assert (recipe.decay_rate, recipe.warmup) == (0.1, 0.05)
    assert "batch" in ours(recipe)
    assert "weight_decay" not in ours(recipe)


def test_what_the_paper_leaves_open_about_coco_is_marked_as_ours():
    recipe = recipes.get("coco-retinanet50-aa")
    assert {"warmup", "clip_grad", "batch", "lr_base", "precision"} <= set(ours(recipe))
    assert not {"epochs", "optimizer"} & set(ours(recipe))
    assert all(set(ours(recipes.get(name))) <= {field.name for field in fields(Recipe)} for name in recipes.names())


@pytest.mark.parametrize("width", ["075", "100", "125", "140"])
def test_augmented_mnasnets_begin_with_half_the_rate_and_end_with_the_same(width):
    plain, aa = (recipes.get(f"imagenet-mnasnet-{width}-{kind}") for kind in ("plain", "aa"))
    assert peak_rate(aa) == peak_rate(plain) / 2

    def final(recipe):
        return peak_rate(recipe) * recipe.decay_rate ** (recipe.epochs / recipe.decay_epochs[0])

    assert final(aa) == pytest.approx(final(plain), rel=1e-4)
    assert plain.epochs == aa.epochs == 350


def test_a_wrong_name_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"cifar100-smal-aa.*did you mean cifar100-small-aa"):
        recipes.get("cifar100-smal-aa")
    with pytest.raises(ValueError, match=r"did you mean demo-plain, demo-se, demo-aa\?"):
        recipes.get("demo")
    with pytest.raises(ValueError, match="no recipe fits 'nothing'"):
        recipes.names("nothing")
    assert recipes.names("demo-*") == ["demo-plain", "demo-se", "demo-aa"]
    with pytest.raises(ValueError, match="demo-aa"):
        recipes.register(recipes.get("demo-aa"))


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_yaml_loses_nothing(recipe):
    assert from_yaml(to_yaml(recipe)) == recipe


@settings(max_examples=60, deadline=None)
@given(
    lr=st.one_of(st.none(), st.floats(1e-300, 1e300)),
    decays=st.lists(st.floats(1e-9, 1e9)).map(tuple),
    text=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"))),
    option=st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.text("no yes:-#'\"1e3.~", max_size=6),
    ),
)
def test_yaml_loses_nothing_of_odd_values(lr, decays, text, option):
    recipe = replace(SMALL, lr=lr, decay_epochs=decays, summary=text, data_dir=text, no_decay=(text, "*.rel_?"))
    recipe = replace(recipe, model=Model("x", {"a": option}))
    again = from_yaml(to_yaml(recipe))
    assert again == recipe
    assert [type(value) for value in again.model.options.values()] == [type(option)]


def test_saved_and_loaded(tmp_path):
    recipes.save(SMALL, tmp_path / "recipe.yaml")
    assert recipes.load(tmp_path / "recipe.yaml") == SMALL
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("epochs: 2", "epoch: 2"), "field 'epoch', which a recipe does not have, did you mean 'epochs'"),
        (("epochs: 2", "epochs: two"), "epochs must be a whole number, got 'two'"),
        (("epochs: 2", "epochs: 0"), "epochs must be at least 1, got epochs=0"),
        (("momentum: 0.9", "momentum: 5.0"), "momentum must be at least 0 and below 1, got momentum=5.0"),
        (("no_decay: []", "no_decay: [1]"), "no_decay must be a text, got 1"),
        (("no_decay: []", "no_decay: rel_h"), "no_decay must be a list of texts, got 'rel_h'"),
        (("epochs: 2", "epochs: true"), "epochs must be a whole number, got True"),
        (("epochs: 2\n", ""), "lacks epochs"),
        (("schedule: cosine", "schedule: cosin"), "schedule must be one of cosine, step, exponential, constant"),
        (("data: shapes", "data: [shapes"), "is not YAML"),
        (("name: aa_small", "nam: aa_small"), "model has a field 'nam'"),
        (("options: {}", "options: [1]"), "options must be a mapping"),
        (("lr: null", "lr: .nan"), "lr must be a number, got nan"),
        (("seed: 0", "seed: !!python/object/apply:os.getcwd []"), "is not YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_in_a_line(change, told, tmp_path):
    text = to_yaml(SMALL)
    assert change[0] in text
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError, match=r"recipe\.yaml") as error:
        recipes.load(path)
    assert told in str(error.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is not text"):
        recipes.load(tmp_path / "recipe.yaml")
    with pytest.raises(FileNotFoundError, match=r"there is no recipe .*none\.yaml"):
        recipes.load(tmp_path / "none.yaml")
    with pytest.raises(IsADirectoryError, match=r"is a folder, not a recipe"):
        recipes.load(tmp_path)
    with pytest.raises(ValueError, match="must be a mapping"):
        from_yaml("just words")


def test_changes_are_made_and_the_papers_cell_stays_with_its_network():
    base = recipes.get("cifar100-wrn28-10-aa")
    changed = recipes.override(base, {"epochs": 3, "model_options": {"num_heads": 4}, "lr": 1})
    assert (changed.epochs, changed.lr, changed.model.options) == (3, 1.0, {"num_heads": 4})
    assert type(changed.lr) is float
    assert changed.evidence is None
    assert recipes.override(base, {"epochs": 3}).evidence == base.evidence
    assert recipes.override(base, {"data": "cifar10"}).evidence is None
    other = recipes.override(recipes.get("cifar100-small-aa-per-head"), {"model": "plain_small"})
    assert other.model == Model("plain_small")
    assert recipes.override(base, {"model_options": {"backend": "eager"}}).evidence == base.evidence


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"epocs": 3}, "no field 'epocs', did you mean 'epochs'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"warmup": 1.5}, "warmup must be at least 0 and below 1"),
        ({"schedule": "step"}, "needs decay_epochs"),
        ({"schedule": "exponential", "decay_epochs": (1.0, 2.0)}, "needs one of decay_epochs"),
        ({"accumulate": 3}, "divisible"),
        ({"model": "aa_smal"}, "unknown model 'aa_smal'; did you mean aa_small"),
        ({"model_options": {"num_head": 2}}, "takes no keyword 'num_head'; nearest: num_heads"),
        ({"model_options": {"num_heads": 0}}, "--model.num-heads 0: "),
        ({"model_options": {"position": "nowhere"}}, "position"),
    ],
)
def test_wrong_changes_are_told_in_a_line(changes, told):
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        recipes.override(SMALL, changes)
    assert "\n" not in str(error.value)


def test_several_processes_use_no_cuda_graphs_unless_told():
    recipe = recipes.get("imagenet-resnet50-aa")
    several = {"gpu": True, "cores": 16, "processes": 8}
    assert overrides.for_machine(recipe, (), **several).compile == "default"
    assert overrides.for_machine(recipe, ("compile",), **several).compile == "reduce-overhead"
    assert overrides.for_machine(replace(recipe, compile="off"), (), **several).compile == "off"
    assert overrides.for_machine(recipe, (), **several | {"processes": 1}).compile == "reduce-overhead"


def test_a_recipe_is_fitted_to_the_machine_unless_told():
    recipe = recipes.get("imagenet-resnet50-aa")
    assert (recipe.precision, recipe.compile, recipe.workers) == ("bf16", "reduce-overhead", 16)
    assert overrides.for_machine(recipe, (), gpu=True, cores=64) == recipe
    fitted = overrides.for_machine(recipe, (), gpu=False, cores=2)
    assert (fitted.precision, fitted.compile, fitted.workers) == ("float32", "off", 2)
    told = overrides.for_machine(recipe, ("precision", "workers"), gpu=False, cores=2)
    assert (told.precision, told.compile, told.workers) == ("bf16", "off", 16)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("none", "none"),
        ("[14, 14]", [14, 14]),
        ("a: b", "a: b"),
        ("{layer1.*: 2, layer2.*: 4}", {"layer1.*": 2, "layer2.*": 4}),
    ],
)
def test_values_of_network_options_are_read_as_in_yaml(text, value):
    assert recipe_options.parse_value(text) == value
    assert type(recipe_options.parse_value(text)) is type(value)


def test_network_options_are_spelt_out():
    given = ["train", "x", "--model.num-heads", "4", "--model.where=[a]", "--lr", "-1"]
    expected = ["train", "x", "--model.OPTION=num_heads=4", "--model.OPTION=where=[a]", "--lr", "-1"]
    assert recipe_options.spell_out(given) == expected
    for words in (["--model.num-heads"], ["--model.num-heads", "--lr"]):
        with pytest.raises(ValueError, match="needs a value"):
            recipe_options.spell_out(words)


def test_every_field_with_a_reason_says_it():
    texts = overrides.field_texts()
    assert texts["keep"] == "Checkpoints to keep, the newest ones."
    assert set(texts) < {field.name for field in fields(Recipe)}
    assert not [name for name, text in texts.items() if not text.endswith(".")]


def test_a_network_is_checked_without_its_weights(recwarn):
    recipe = recipes.override(recipes.get("cifar100-small-aa"), {"model_options": {"pretrained": True}})
    assert recipe.model.options["pretrained"]
    assert not recwarn.list


def test_the_head_of_a_detector_is_not_zeroed():
    """Its last layer begins at a low score for every class, its others would learn nothing."""
    with pytest.raises(ValueError, match="head='zero' is for the task 'classify', got task='detect'"):
        recipes.override(recipes.get("coco-small-lite0-plain"), {"head": "zero"})


def test_attention_goes_into_the_backbone_of_a_detector():
    start = Start(pretrained=False, where="blocks.4.*.conv_pw", attention={"qk_norm": True})
    plain = recipes.get("coco-small-lite0-plain").model
    model = start_from(plain, start)
    assert (model.name, model.base) == (plain.name, plain.base)
    assert (plain.title, model.title) == (f"RetinaNet on {plain.base}", f"RetinaNet on {plain.base} with attention")
    added = [{"where": "blocks.4.*.conv_pw", "combine": "add", "qk_norm": True}]
    assert model.options == plain.options | {"augmentations": added}
    with pytest.raises(ValueError, match="augmented already"):
        start_from(model, start)


def test_attention_goes_into_a_network_that_could_have_it_and_has_none():
    plain = recipes.get("cifar100-lite0-plain").model
    model = start_from(plain, Start(where="blocks.4.*.conv_pw"))
    added = [{"where": "blocks.4.*.conv_pw", "combine": "add"}]
    assert model == Model("augmented", plain.options | {"augmentations": added})
    with pytest.raises(ValueError, match="augmented already"):
        start_from(model, Start(where="blocks.4.*.conv_pw"))


@pytest.mark.parametrize("where", ["layer[34].*.conv2", ("layer4.0.conv1", "layer4.0.conv2")])
def test_the_command_of_an_augmented_network_can_be_pasted(where):
    usual = recipes.get("demo-plain")
    start = Start(where=where, attention={"num_heads": 2, "qk_norm": True, "window": None, "gate_init": 1e-5})
    changed = replace(usual, model=start_from(Model("test_resnet"), start))
    words = shlex.split(" ".join(diff.options_of(usual, diff.overrides_of(changed))))
    found = recipe_options.given(command_line().parse_args(["train", usual.name, *recipe_options.spell_out(words)]))
    assert Model(found["model"], found["model_options"]) == changed.model


@pytest.mark.parametrize("heads", [4, [2, 4, 4, 4], {"layer2.*": 2, "layer[34].*": 4}])
def test_the_command_of_other_heads_can_be_pasted(heads):
    usual = recipes.get("imagenette-aa-resnet18")
    changed = recipes.override(usual, {"model_options": {"num_heads": heads}})
    assert from_yaml(to_yaml(changed)) == changed
    words = shlex.split(" ".join(diff.options_of(usual, diff.overrides_of(changed))))
    assert words[0] == "--model.num-heads"
    found = recipe_options.given(command_line().parse_args(["train", usual.name, *recipe_options.spell_out(words)]))
    assert recipes.override(usual, found) == changed


def test_what_attention_is_compared_with_is_added_as_it_is():
    start = Start(where="layer4.0.conv2", attention={"instead": "se", "hidden": 4})
    model = start_from(Model("test_resnet"), start)
    overrides.check_model(replace(SMALL, model=model))
    assert model.options["augmentations"] == [{"where": "layer4.0.conv2", "instead": "se", "hidden": 4}]


def test_an_ablation_that_trains_the_same_network_is_told():
    """The key ratio of a narrow network stops at the minimum: 0.1 and 0.4 are the same."""
    for ratio in (0.1, 0.4):
        with pytest.warns(UserWarning, match=f"key_ratio={ratio} of 64 channels .*key_channels=160.*6 of 6 layers"):
            recipes.override(recipes.get("cifar100-small-aa"), {"model_options": {"key_ratio": ratio}})
    recipes.override(recipes.get("cifar100-small-aa"), {"model_options": {"key_channels": 8}})


@pytest.mark.parametrize("name", ["momentum", "adamw", "lookahead_adam", "AdamW", "rmsproptf"])
def test_optimizers_that_timm_has_are_taken(name):
    assert recipes.override(SMALL, {"optimizer": name}).optimizer == name


def test_an_unknown_optimizer_is_named_before_anything_is_begun(tmp_path):
    with pytest.raises(ValueError, match=r"unknown optimizer 'adamx'; did you mean .*adam"):
        recipes.override(SMALL, {"optimizer": "adamx"})
    recipes.save(replace(SMALL, optimizer="adamx"), tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match="unknown optimizer 'adamx'"):
        choose(None, str(tmp_path / "recipe.yaml"), {})


def test_every_recipe_has_an_optimizer_of_timms():
    for name in recipes.names():
        check_optimizer(recipes.get(name))
