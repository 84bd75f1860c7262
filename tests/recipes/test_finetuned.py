"""The arms of the comparison on pretrained weights: alike but for what is added, small, and the same at the start."""

import timm
import torch

from aaconv import recipes
from aaconv.models import create_model
from aaconv.recipes.finetuned import ARMS, BASE


def test_the_arms_differ_in_the_network_alone():
    arms = [recipes.get(f"cifar100-lite0-{arm}") for arm in ARMS]
    ours = [{**vars(one), "name": "", "summary": "", "model": ""} for one in arms]
    assert all(one == ours[0] for one in ours)


def test_what_is_added_is_small_and_begins_as_the_pretrained_network():
    state, x = timm.create_model(BASE).state_dict(), torch.randn(2, 3, 96, 96)
    plain = timm.create_model(BASE).eval()
    plain.load_state_dict(state)
    size = sum(parameter.numel() for parameter in plain.parameters())
    for arm in ARMS:
        model = recipes.get(f"cifar100-lite0-{arm}").model
        network = create_model(model.name, **model.network_options, img_size=96).eval()
        assert sum(parameter.numel() for parameter in network.parameters()) <= 1.02 * size, arm
        if arm != "aa-concat":
            assert not network.load_state_dict(state, strict=False).unexpected_keys
            with torch.no_grad():
                assert torch.equal(network(x), plain(x)), arm


def test_a_network_is_called_after_what_is_added():
    titles = {arm: recipes.get(f"cifar100-lite0-{arm}").model.title for arm in ("plain", "se", "average", "aa-add")}
    added = {"plain": "", "se": " with se", "average": " with average", "aa-add": " with attention"}
    assert titles == {arm: BASE + text for arm, text in added.items()}
    assert recipes.get("coco-small-lite0-aa").model.title == f"RetinaNet on {BASE} with attention"
