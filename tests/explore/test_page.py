"""The explorer's page in a real browser: chromium, without a server or a network."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import timm
import torch
from timm.layers.halo_attn import HaloAttn
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from aaconv.data import open_dataset
from aaconv.explore import show, write_page
from aaconv.explore.capture import attention_layers
from aaconv.explore.images import normalise
from aaconv.explore.page import render
from aaconv.explore.study import study
from aaconv.layers.accelerate import accelerate
from support.accelerated_laws import drawn
from support.explored import NAME, maps_of, small_network

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to show the page"),
]
PRECISION = 0.004


@pytest.fixture(scope="module")
def loaded():
    return small_network()


@pytest.fixture(scope="module")
def images():
    return open_dataset("shapes", None, "test", number=3).images


@pytest.fixture(scope="module")
def address(loaded, images, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(loaded, list(images), path, names=["first", "second", "third"])
    return path.as_uri()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser, address):
    """Opens the page, and sees to it that nothing goes wrong in it and nothing is asked of a network."""
    contexts, complaints = [], []

    def open_it(fragment="", **options):
        contexts.append(browser.new_context(viewport={"width": 1200, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:")) else complaints.append(request.url),
        )
        page.goto(address + fragment)
        page.wait_for_function("window.aaconv && window.aaconv.ready")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []


def state(page):
    return page.evaluate("() => window.aaconv.state")


def click_at(page, x, y):
    box = page.locator("#stage").bounding_box()
    page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])


def pixel(page, selector, x, y):
    """The colour a canvas has at a part of its width and height."""
    script = """([selector, x, y]) => {
      const canvas = document.querySelector(selector), context = canvas.getContext("2d");
      return [...context.getImageData(x * canvas.width, y * canvas.height, 1, 1).data];
    }"""
    return page.evaluate(script, [selector, x, y])


def inputs_of(layers, run):
    """What each layer is given while the network runs."""
    seen = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0]}))
        for name, layer in layers.items()
    ]
    run()
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def test_weights_in_the_page_are_the_layers_attention_maps(open_page, loaded, images):
    page = open_page()
    layers = attention_layers(loaded.model, NAME)
    for image, pixels in enumerate(images):
        x = normalise(pixels.permute(2, 0, 1), loaded.mean, loaded.std)[None]
        seen = inputs_of(layers, partial(loaded.model, x))
        for index, (name, layer) in enumerate(layers.items()):
            exact = layer.attention_maps(seen[name])[0].numpy()
            height, width = layer.attention_size(*seen[name].shape[-2:])
            for row, column in ((0, 0), (height // 2, 1), (height - 1, width - 1)):
                shown = page.evaluate(
                    "(at) => window.aaconv.weights(...at).map((head) => [...head])", [image, index, row, column]
                )
                expected = exact[:, row * width + column]
                assert np.abs(np.array(shown) - expected).max() <= PRECISION * expected.max()
                np.testing.assert_allclose(np.sum(shown, axis=1), 1, rtol=1e-5)


def test_the_page_opens_with_image_prediction_and_heads(open_page):
    page = open_page()
    assert page.locator("h1").inner_text() == f"What {NAME} attends to"
    assert page.locator("#untrained").is_visible()
    assert page.locator("#heads canvas").count() == 4
    assert page.locator("#layers button").count() == 3
    assert page.locator("#strip button").count() == 3
    assert page.locator("#top li").count() == 2
    total = sum(float(text.rstrip(" %")) for text in page.locator("#top li span:last-child").all_text_contents())
    assert total == pytest.approx(100, abs=0.2)
    assert not page.locator("#comparison").is_visible()


def test_the_image_is_shown_as_the_network_saw_it(open_page, images):
    page = open_page()
    script = """async () => {
      const picture = new Image();
      picture.src = window.aaconv.data.images[1].png;
      await picture.decode();
      const canvas = new OffscreenCanvas(32, 32), context = canvas.getContext("2d");
      context.drawImage(picture, 0, 0);
      return [...context.getImageData(0, 0, 32, 32).data];
    }"""
    shown = np.array(page.evaluate(script)).reshape(32, 32, 4)[..., :3]
    assert np.array_equal(shown, images[1].numpy())


def test_hovering_shows_and_clicking_keeps_a_position(open_page):
    page = open_page("#at=0.5,0.5&layer=first")
    before = page.locator("#place").inner_text()
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.9 * box["height"])
    page.wait_for_function(
        "() => document.querySelector('#place').textContent.startsWith('row 15 of 16, column 2 of 16')"
    )
    page.mouse.move(5, 5)
    page.wait_for_function("(text) => document.querySelector('#place').textContent === text", arg=before)
    click_at(page, 0.1, 0.9)
    page.mouse.move(5, 5)
    assert page.locator("#place").inner_text() == "row 15 of 16, column 2 of 16, pixels 27-28 and 1-2"


def test_the_overlay_lies_on_the_image(open_page):
    """The brightest cell of a tile is where the largest weight is, also on a coarser map."""
    for layer, name in ((0, "first"), (2, "coarse")):
        page = open_page(f"#image=2&layer={name}&at=0.2,0.7")
        page.keyboard.press("m")  # the map alone: colours without the image
        side = page.evaluate("(layer) => window.aaconv.data.layers[layer].height", layer)
        row, column = page.evaluate("() => Object.values(window.aaconv.cell({ x: 0.2, y: 0.7 }))")
        weights = np.array(page.evaluate("(at) => [...window.aaconv.weights(...at)[0]]", [1, layer, row, column]))
        most, least = weights.argmax(), weights.argmin()
        bright, dark = (
            sum(pixel(page, "#heads canvas", (cell % side) / side + 0.01, (cell // side) / side + 0.01)[:3])
            for cell in (most, least)
        )
        assert bright > dark + 100
        assert side == (8 if name == "coarse" else 16)


def test_layers_change_by_click_and_by_key(open_page):
    page = open_page("#layer=first&at=0.3,0.6")
    page.locator("#layers button").nth(2).click()
    assert page.locator("#heading").inner_text() == "4 heads of coarse"
    assert "of 8" in page.locator("#place").inner_text()
    page.keyboard.press("[")
    assert page.locator("#heading").inner_text() == "4 heads of second"
    page.keyboard.press("]")
    page.keyboard.press("]")
    assert page.locator("#heading").inner_text() == "4 heads of first"
    assert state(page)["at"] == {"x": 0.3, "y": 0.6}


def test_arrows_move_the_position_by_one_cell(open_page):
    page = open_page("#layer=first&at=0.5,0.5")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert page.locator("#place").inner_text().startswith("row 8 of 16, column 10 of 16")
    for _ in range(20):
        page.keyboard.press("ArrowUp")
    assert page.locator("#place").inner_text().startswith("row 1 of 16")


def test_pins_make_columns_of_heads(open_page):
    page = open_page("#layer=first")
    click_at(page, 0.2, 0.2)
    page.keyboard.press("p")
    click_at(page, 0.8, 0.4)
    page.locator("#pin").click()
    assert page.locator("#comparison").is_visible()
    assert page.locator("#pins td canvas").count() == 8
    assert page.locator("#marks text").all_text_contents() == ["1", "2"]
    page.locator("#pins button").first.click()
    assert page.locator("#pins td canvas").count() == 4
    assert state(page)["pins"] == [{"x": 0.828125, "y": 0.390625}]  # middles of cells
    page.keyboard.press("x")
    assert not page.locator("#comparison").is_visible()


def test_no_more_pins_than_there_are_digits(open_page):
    page = open_page()
    for _ in range(11):
        page.keyboard.press("p")
    assert len(state(page)["pins"]) == 9
    assert page.locator("#pin").is_disabled()


def test_a_head_is_laid_over_the_large_image(open_page):
    page = open_page("#layer=first&at=0.5,0.5")
    plain = pixel(page, "#image", 0.9, 0.1)
    page.keyboard.press("2")
    assert state(page)["head"] == 1
    assert pixel(page, "#image", 0.9, 0.1) != plain
    page.keyboard.press("0")
    assert state(page)["head"] == "mean"
    page.keyboard.press("0")
    assert pixel(page, "#image", 0.9, 0.1) == plain
    page.locator("#heads button").nth(3).click()
    assert state(page)["head"] == 3


def test_a_link_restores_everything(open_page):
    page = open_page()
    page.locator("#strip button").nth(2).click()
    page.locator("#layers button").nth(1).click()
    click_at(page, 0.3, 0.3)
    page.keyboard.press("p")
    click_at(page, 0.7, 0.6)
    page.keyboard.press("3")
    link = page.url
    assert "#image=3&layer=second&at=" in link
    other = open_page("#" + link.partition("#")[2])
    assert state(other)["at"] == pytest.approx(state(page)["at"], abs=1e-4)
    assert state(other)["pins"] == [pytest.approx(pin, abs=1e-4) for pin in state(page)["pins"]]
    for name in ("image", "layer", "head"):
        assert state(other)[name] == state(page)[name]
    assert other.locator("#pins td canvas").count() == 4
    other.evaluate("() => { location.hash = '#image=1&layer=coarse&at=0.1,0.1' }")
    other.wait_for_function("() => window.aaconv.state.image === 0 && window.aaconv.state.layer === 2")


@pytest.mark.parametrize("fragment", ["#image=99&layer=nothing&at=7,x&pins=;;2,2;a&head=77", "#%E0%A4%A", "#at="])
def test_a_broken_link_opens_the_page_all_the_same(open_page, fragment):
    page = open_page(fragment)
    assert page.locator("#heads canvas").count() == 4
    assert state(page)["image"] == 0
    assert state(page)["pins"] == []


def test_dark_follows_the_system_and_the_button(open_page):
    page = open_page(color_scheme="dark")
    theme = "() => document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    page.locator("#theme").click()
    assert page.evaluate(theme) == "light"
    page.reload()
    page.wait_for_function("window.aaconv && window.aaconv.ready")
    assert page.evaluate(theme) == "light"
    assert open_page(color_scheme="light").evaluate(theme) == "light"


def test_touch_moves_the_position_and_a_phone_needs_no_sideways_scrolling(browser, open_page):
    page = open_page("#layer=first", has_touch=True)
    page.set_viewport_size({"width": 390, "height": 844})
    box = page.locator("#stage").bounding_box()
    page.touchscreen.tap(box["x"] + 0.9 * box["width"], box["y"] + 0.1 * box["height"])
    assert page.locator("#place").inner_text().startswith("row 2 of 16, column 15 of 16")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_the_chosen_layer_and_image_are_in_sight(open_page):
    page = open_page("#layer=coarse&image=3")
    page.set_viewport_size({"width": 220, "height": 700})
    for row, key in (("#layers", "["), ("#strip", ",")):
        for _ in range(3):
            page.keyboard.press(key)
            chosen = page.locator(f'{row} [aria-current="true"], {row} [aria-selected="true"]').bounding_box()
            sight = page.locator(row).bounding_box()
            assert chosen["x"] >= sight["x"] - 1
            assert chosen["x"] + chosen["width"] <= sight["x"] + sight["width"] + 1


def test_ways_of_drawing_are_toggled(open_page):
    page = open_page("#layer=first")
    for name, key in (("overlay", "m"), ("smooth", "s"), ("shared", "c")):
        button = page.locator(f"#{name}")
        before = button.get_attribute("aria-pressed")
        page.keyboard.press(key)
        assert button.get_attribute("aria-pressed") != before
        button.click()
        assert button.get_attribute("aria-pressed") == before


def test_the_page_in_a_notebook(browser, loaded, images, tmp_path):
    """In a frame without an address of its own: it starts, takes clicks, and leaves the notebook's address alone."""
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html>{show(loaded, images[0], height=600)._repr_html_()}", encoding="utf-8")
    page, complaints = browser.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{notebook.as_uri()}#cell")
    frame = page.frames[1]
    frame.wait_for_function("window.aaconv && window.aaconv.ready")
    before = frame.evaluate("() => ({ ...window.aaconv.state.at })")
    frame.locator("#stage").click(position={"x": 5, "y": 5})
    assert frame.evaluate("() => ({ ...window.aaconv.state.at })") != before
    assert page.url.endswith("#cell")
    assert not frame.locator("#link").is_visible()
    assert page.locator("iframe").bounding_box()["height"] == 600
    page.close()
    assert complaints == []


@torch.no_grad()
def test_a_window_is_drawn_and_bounds_the_weights(browser, images, tmp_path):
    model = timm.create_model("aa_small", num_classes=2, window=5, window_dilation=2).eval()
    loaded = replace(small_network(), model=model)
    write_page(loaded, list(images[:1]), tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("window.aaconv && window.aaconv.ready")
    layers = attention_layers(model, NAME)
    x = normalise(images[0].permute(2, 0, 1), loaded.mean, loaded.std)[None]
    seen = inputs_of(layers, partial(model, x))
    for index, (name, layer) in enumerate(layers.items()):
        exact = layer.attention_maps(seen[name])[0].numpy()
        shown = page.evaluate("(at) => window.aaconv.weights(...at).map((head) => [...head])", [0, index, 0, 3])
        assert np.abs(np.array(shown) - exact[:, 3]).max() <= PRECISION * exact[:, 3].max()
        assert (np.array(shown) == 0).sum() == (exact[:, 3] == 0).sum() > 0
    box, cell = (page.locator(f"#marks .{name}").bounding_box() for name in ("window", "cell"))
    assert box["width"] > 3 * cell["width"]
    page.close()


class Strange(nn.Module):
    """Attention whose keys are not all the queries: padded windows, a halo, and a coarser map with a class token."""

    def __init__(self):
        super().__init__()
        self.sam = VisionTransformerSAM(
            img_size=32, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=2, use_rel_pos=True,
            window_size=6, global_attn_indexes=(), neck_chans=8,
        )  # fmt: skip
        self.halo = HaloAttn(8, 16, stride=2, num_heads=2, block_size=4, halo_size=2)
        pooled = {"kernel_kv": (3, 3), "stride_kv": (2, 2), "has_cls_token": True, "rel_pos_type": "spatial"}
        self.coarse = MultiScaleAttention(64, 64, (4, 4), num_heads=2, **pooled)

    def forward(self, x):
        x = self.sam.forward_features(x)  # [1, 8, 8, 8]
        self.coarse(self.halo(x).flatten(1).reshape(1, 4, 64).repeat(1, 5, 1)[:, :17], [4, 4])
        return x.mean((2, 3))[:, :2]


@torch.no_grad()
def test_keys_that_are_not_the_queries(browser, images, tmp_path):
    """The page computes what Factors does, which is held against the networks' own weights elsewhere."""
    torch.manual_seed(0)
    loaded = replace(small_network(), model=drawn(Strange(), torch.float32).eval())
    accelerate(loaded.model)
    looked_at = study(loaded, list(images[:1]))
    (tmp_path / "page.html").write_text(render(looked_at), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("window.aaconv && window.aaconv.ready")
    assert [layer.grid.key_map for layer in looked_at.layers] == [(8, 8), (8, 8), (2, 2)]
    for index, layer in enumerate(looked_at.layers):
        exact = maps_of(looked_at.pictures[0].attention[layer.name], layer)
        for row, column in np.ndindex(layer.height, layer.width):
            at = [0, index, row, column]
            shown = np.array(page.evaluate("(at) => window.aaconv.weights(...at).map((head) => [...head])", at))
            expected = exact[:, row * layer.width + column]
            assert np.abs(shown - expected).max() <= PRECISION * expected.max()
    page.goto((tmp_path / "page.html").as_uri() + "#layer=sam.blocks.0.attn&at=0.97,0.97")
    page.reload()
    page.wait_for_function("window.aaconv && window.aaconv.ready")
    assert "outside" in page.locator("#heads .caption").first.inner_text()
    box, cell = (page.locator(f"#marks .{name}").bounding_box() for name in ("window", "cell"))
    assert box["width"] == pytest.approx(2 * cell["width"], rel=0.1)  # columns 7 and 8; four more are padding
    page.close()
