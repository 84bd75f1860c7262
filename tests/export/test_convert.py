"""Foreign state dicts: a converted layer computes what the other one does, by a formula written out pixel by pixel."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from aaconv import cli
from aaconv.export.convert import LAYOUTS, convert, convert_file

IN, OUT, DK, DV, HEADS, HEIGHT, WIDTH = 5, 14, 12, 6, 3, 3, 4
DEPTH = DK // HEADS


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=random.generator)


@pytest.fixture(autouse=True)
def _seed():
    random.generator = torch.Generator().manual_seed(0)


def foreign_state(layout, *, prefix="", bias=True, relative=True, height=HEIGHT, width=WIDTH, groups=1):
    """A state dict as that implementation saves it."""
    conv, qkv, project = LAYOUTS[layout].names
    state = {
        f"{prefix}{conv}.weight": random(OUT - DV, IN // groups, 3, 3),
        f"{prefix}{qkv}.weight": random(2 * DK + DV, IN, 1, 1),
        f"{prefix}{project}.weight": random(DV, DV, 1, 1),
    }
    if bias:
        state |= {
            f"{prefix}{name}.bias": random(state[f"{prefix}{name}.weight"].shape[0]) for name in (conv, qkv, project)
        }
    if relative:
        tables = {"key_rel_h": random(2 * height - 1, DEPTH), "key_rel_w": random(2 * width - 1, DEPTH)}
        by_depth = layout == "chexpert"
        state |= {f"{prefix}{name}": table.T.contiguous() if by_depth else table for name, table in tables.items()}
    return state


def output_of(layout, state, x):
    """What a layer of LegenDong's, or of chexpert's since def99f9, makes of x: one pixel, one head at a time."""
    by_depth, tables = layout == "chexpert", ("key_rel_h", "key_rel_w")
    conv, qkv, project = ((state[f"{name}.weight"], state.get(f"{name}.bias")) for name in LAYOUTS[layout].names)
    packed = F.conv2d(x, *qkv)
    batch, _, height, width = packed.shape
    attended = torch.zeros(batch, DV, height, width, dtype=x.dtype)
    value_depth = DV // HEADS
    for head in range(HEADS):
        q = packed[:, head * DEPTH : (head + 1) * DEPTH] / DEPTH**0.5
        k = packed[:, DK + head * DEPTH : DK + (head + 1) * DEPTH]
        v = packed[:, 2 * DK + head * value_depth : 2 * DK + (head + 1) * value_depth]
        for row in range(height):
            for column in range(width):
                logits = torch.empty(batch, height, width, dtype=x.dtype)
                for there in range(height):
                    for across in range(width):
                        key = k[:, :, there, across]
                        if "key_rel_h" in state:
                            rel_h, rel_w = (state[name].T if by_depth else state[name] for name in tables)
                            key = key + rel_h[there - row + height - 1] + rel_w[across - column + width - 1]
                        logits[:, there, across] = (q[:, :, row, column] * key).sum(1)
                weights = logits.flatten(1).softmax(1)
                channels = slice(head * value_depth, (head + 1) * value_depth)
                attended[:, channels, row, column] = (weights[:, None] * v.flatten(2)).sum(2)
    return torch.cat([F.conv2d(x, *conv, padding=1), F.conv2d(attended, *project)], dim=1)


@pytest.mark.parametrize(
    ("layout", "relative", "bias"),
    [("legendong", True, True), ("legendong", False, True), ("chexpert", False, False), ("chexpert", True, False)],
)
def test_a_converted_layer_computes_the_same(layout, relative, bias):
    state = foreign_state(layout, relative=relative, bias=bias)
    layer = convert(state, layout).build("", num_heads=HEADS)
    x = random(2, IN, HEIGHT, WIDTH)
    torch.testing.assert_close(layer(x), output_of(layout, state, x), rtol=1e-10, atol=1e-10)


def test_an_earlier_chexpert_with_tables_is_another_formula():
    """Its relative term takes the query of the transposed pixel: even with the best conversion the outputs differ."""
    state = foreign_state("chexpert", bias=False, height=4, width=4)
    with pytest.raises(
        ValueError, match=r"relative term of pixel \(y, x\) from the query of pixel \(x, y\).*--inexact"
    ):
        convert(state, source="a6739a7")
    converted = convert(state, source="a6739a7", inexact=True)
    layer = converted.build("")
    x = random(1, IN, 4, 4)
    torch.testing.assert_close(
        layer.attention_maps(x), chexpert_maps(state, x, transposed=False), rtol=1e-9, atol=1e-12
    )
    assert (layer.attention_maps(x) - chexpert_maps(state, x, transposed=True)).abs().max() > 0.01
    symmetric = (x + x.transpose(2, 3)) / 2  # here the two queries are the same
    torch.testing.assert_close(
        layer.attention_maps(symmetric), chexpert_maps(state, symmetric, transposed=True), rtol=1e-9, atol=1e-12
    )


def chexpert_maps(state, x, *, transposed):
    """logit((y, x) -> (v, u)) = q_yx . k_vu + q' . (table_w[v - y] + table_h[u - x]), q' = q_xy (theirs) or q_yx."""
    packed = F.conv2d(x, state["in_proj_qkv.weight"])
    q, k = (part.unflatten(1, (HEADS, DEPTH)) for part in (packed[:, :DK] / DEPTH**0.5, packed[:, DK : 2 * DK]))
    other = q.transpose(3, 4) if transposed else q
    side = x.shape[-1]
    distance = torch.arange(side)[None, :] - torch.arange(side)[:, None] + side - 1
    by_row, by_column = state["key_rel_w"][:, distance], state["key_rel_h"][:, distance]
    logits = torch.einsum("bndyx,bndvu->bnyxvu", q, k)
    logits = logits + torch.einsum("bndyx,dyv->bnyxv", other, by_row)[..., None]
    logits = logits + torch.einsum("bndyx,dxu->bnyxu", other, by_column)[..., None, :]
    return logits.flatten(4).softmax(-1).flatten(2, 3)


def test_a_map_that_is_not_square_is_refused_even_inexactly():
    with pytest.raises(ValueError, match="not square"):
        convert(foreign_state("chexpert"), source="a6739a7", inexact=True)


def test_a_source_of_another_repository_is_named(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"source=a6739a7 is a commit of chexpert, and these .* layout legendong"):
        convert(foreign_state("legendong"), source="a6739a7")
    with pytest.raises(ValueError, match="source must be one of def99f9, a6739a7, got 'main'"):
        convert(foreign_state("chexpert"), source="main")
    torch.save(foreign_state("chexpert", bias=False), tmp_path / "theirs.pt")
    assert cli.main(["convert", str(tmp_path / "theirs.pt"), "-o", str(tmp_path / "ours.safetensors")]) == 0
    assert "if before, pass --source a6739a7" in capsys.readouterr().out


def test_whole_networks_keep_their_other_names():
    state = {f"module.{name}": value for name, value in foreign_state("legendong", prefix="layer1.0.conv1.").items()}
    state |= {f"module.{name}": value for name, value in foreign_state("legendong", prefix="layer1.1.conv1.").items()}
    state["module.linear.weight"] = random(10, OUT)
    converted = convert(state)
    assert converted.layout == "legendong"
    assert list(converted.layers) == ["layer1.0.conv1", "layer1.1.conv1"]
    assert torch.equal(converted.state["linear.weight"], state["module.linear.weight"])
    assert torch.equal(converted.state["layer1.1.conv1.rel_w"], state["module.layer1.1.conv1.key_rel_w"])
    assert len(converted.state) == len(state)
    assert converted.layers["layer1.0.conv1"] == {
        "in_channels": IN,
        "out_channels": OUT,
        "kernel_size": (3, 3),
        "groups": 1,
        "bias": True,
        "num_heads": HEADS,
        "key_channels": DK,
        "value_channels": DV,
        "size": (HEIGHT, WIDTH),
        "position": "relative",
        "attention_bias": True,
    }


def test_a_fully_attentional_layer_has_no_convolution():
    state = foreign_state("chexpert", bias=False, relative=False)
    del state["conv.weight"]
    layer = convert(state).build("", num_heads=2)
    assert layer.conv is None
    assert layer.out_channels == DV


def test_heads_that_no_shape_tells_are_asked_for():
    with pytest.raises(ValueError, match="number of heads"):
        convert(foreign_state("chexpert", bias=False, relative=False)).build("")


def test_another_formula_is_refused():
    with pytest.raises(ValueError, match=r"leaderj1001.*mixes pixels and channels"):
        convert(foreign_state("leaderj1001"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attn_layer.weight": None}, "no output projection"),
        ({"key_rel_w": None}, "one relative table of two"),
        ({"key_rel_w": torch.zeros(6, DEPTH)}, "2 length - 1 rows"),
        ({"key_rel_w": torch.zeros(7, 5)}, "tables do not fit the keys"),
        ({"qkv_layer.weight": torch.zeros(2 * DK + DV + 1, IN, 1, 1)}, "differ in depth"),
        ({"qkv_layer.weight": torch.zeros(2 * DK + DV, IN, 3, 3)}, "1 x 1"),
    ],
)
def test_damaged_layers_are_named(change, reason):
    state = foreign_state("legendong", prefix="conv1.") | {f"conv1.{name}": value for name, value in change.items()}
    with pytest.raises(ValueError, match=f"conv1 is damaged.*{reason}"):
        convert({name: value for name, value in state.items() if value is not None})


def test_a_table_of_another_layouts_shape_is_named():
    state = foreign_state("chexpert", height=4, width=4)
    with pytest.raises(ValueError, match="2 length - 1 rows"):
        convert(state | {"key_rel_h": state["key_rel_h"][None]})


def test_the_command_writes_safetensors(tmp_path, capsys):
    state = foreign_state("legendong", prefix="conv1.")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "theirs.pt")
    target = tmp_path / "ours.safetensors"
    assert cli.main(["convert", str(tmp_path / "theirs.pt"), "-o", str(target)]) == 0
    printed = capsys.readouterr().out
    assert f"conv1: AAConv2d(in_channels={IN}, out_channels={OUT}" in printed
    assert printed.endswith(f"wrote {target}: 1 layer of the layout legendong, 8 weights\n")
    assert torch.equal(load_file(target)["conv1.rel_h"], state["conv1.key_rel_h"])


class _Danger:
    def __reduce__(self):
        return print, ("code ran",)


def test_nothing_in_a_file_can_run(tmp_path, capsys):
    (tmp_path / "bad.pt").write_bytes(pickle.dumps({"state_dict": _Danger()}, protocol=2))
    with pytest.raises(ValueError, match=r"bad\.pt"):
        convert_file(tmp_path / "bad.pt", tmp_path / "out.safetensors")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["missing.pt", "-o", "out.safetensors"], "there is no file missing.pt"),
        (["picture.pt", "-o", "out.safetensors"], "picture.pt"),
        (["numbered.pt", "-o", "out.safetensors"], "numbered.pt holds no weights by name"),
        (["state.pt", "-o", "out.pt"], "must end in .safetensors"),
        (["state.pt", "-o", "out.safetensors"], "no layer of a known layout"),
        (["state.pt", "-o", "out.safetensors", "--layout", "chexpert"], "no layer in the layout chexpert"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.zeros(2)}, "state.pt")
    torch.save({3: torch.zeros(2)}, "numbered.pt")
    (tmp_path / "picture.pt").write_bytes(b"RIFF\x00\x00\x00\x00WEBPVP8 ")
    assert cli.main(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1
