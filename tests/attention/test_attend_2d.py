import importlib.util
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import aaconv.attention as attention
from aaconv.attention import attend_2d, attention_maps, choose_backend, default_backend, sdpa, set_default_backend
from aaconv.attention.eager import attention_logits
from support.reference import direct_attention, exact_results, largest_error, random_inputs, with_gradients

TORCH_BACKENDS = ["eager", "sdpa"]
SHAPES = [(1, 1, 1), (2, 7, 7), (1, 5, 11), (3, 1, 9), (2, 8, 1), (64, 3, 2), (1, 6, 10)]


def run(inputs, cotangent, backend, num_heads, key_channels):
    return with_gradients(
        lambda *tensors: attend_2d(*tensors, num_heads=num_heads, key_channels=key_channels, backend=backend),
        inputs,
        cotangent,
    )


@pytest.mark.parametrize("tables", ["shared", "per-head", "none"])
@pytest.mark.parametrize(("batch", "height", "width"), SHAPES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_backend_equals_the_equation_in_float64(backend, batch, height, width, tables):
    inputs = random_inputs(batch, height, width, num_heads=2, key_depth=5, value_depth=3, tables=tables)
    cotangent = torch.randn(batch, height, width, 6, dtype=torch.float64)
    exact = exact_results(inputs, cotangent, 2, 10)
    got = run(inputs, cotangent, backend, 2, 10)
    for name, value in exact.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tables", ["shared", "per-head", "none"])
@pytest.mark.parametrize(
    ("batch", "height", "width"), [(2, 7, 7), (1, 5, 11), (3, 1, 9), pytest.param(1, 12, 8, marks=pytest.mark.slow)]
)
def test_sdpa_is_as_precise_as_eager(batch, height, width, tables, dtype):
    inputs = random_inputs(batch, height, width, num_heads=4, key_depth=20, value_depth=3, tables=tables, dtype=dtype)
    cotangent = torch.randn(batch, height, width, 12).to(dtype).double()
    exact = exact_results(inputs, cotangent, 4, 80)
    eager, sdpa = (run(inputs, cotangent, backend, 4, 80) for backend in TORCH_BACKENDS)
    # One rounding of the largest number involved: below it the comparison is a lottery (in a map of one row the
    # gradient of rel_h is zero, and what is left of it is nothing but rounding).
    floor = torch.finfo(dtype).eps * max(value.abs().max().item() for value in exact.values())
    for name, value in exact.items():
        assert largest_error(sdpa[name], value) <= 2 * largest_error(eager[name], value) + floor, name


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(0, 3),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    num_heads=st.integers(1, 4),
    key_depth=st.integers(1, 9),
    value_depth=st.integers(1, 9),
    tables=st.sampled_from(["shared", "per-head", "none"]),
)
def test_backends_agree_on_any_shape(batch, height, width, num_heads, key_depth, value_depth, tables):
    depths = {"num_heads": num_heads, "key_depth": key_depth, "value_depth": value_depth}
    inputs = random_inputs(batch, height, width, **depths, tables=tables)
    cotangent = torch.randn(batch, height, width, num_heads * value_depth, dtype=torch.float64)
    eager, sdpa = (run(inputs, cotangent, backend, num_heads, num_heads * key_depth) for backend in TORCH_BACKENDS)
    for name, value in eager.items():
        torch.testing.assert_close(sdpa[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_any_memory_layout_gives_the_same(backend):
    qkv, rel_h, rel_w = random_inputs(2, 4, 6, num_heads=2, key_depth=4, value_depth=3)
    strided = qkv.detach().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    out, other = (attend_2d(t, rel_h, rel_w, num_heads=2, key_channels=8, backend=backend) for t in (qkv, strided))
    torch.testing.assert_close(out, other)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradcheck(backend):
    inputs = random_inputs(1, 2, 3, num_heads=2, key_depth=2, value_depth=1)
    assert torch.autograd.gradcheck(lambda *t: attend_2d(*t, num_heads=2, key_channels=4, backend=backend), inputs)


def test_relative_logits_commute_with_translation():
    """Content moved within a larger map of zeros: the logits between its pixels stay what they were."""
    content = torch.randn(1, 4, 5, 2 * 12 + 4, dtype=torch.float64)
    _, rel_h, rel_w = random_inputs(1, 9, 11, num_heads=2, key_depth=6, value_depth=2)

    def logits_at(top, left):
        qkv = torch.zeros(1, 9, 11, content.shape[-1], dtype=torch.float64)
        qkv[:, top : top + 4, left : left + 5] = content
        logits = attention_logits(qkv, rel_h, rel_w, num_heads=2, key_channels=12)
        return logits[:, :, top : top + 4, left : left + 5, top : top + 4, left : left + 5]

    for top, left in [(0, 6), (5, 0), (3, 2)]:
        torch.testing.assert_close(logits_at(top, left), logits_at(0, 0))
    unlike = logits_at(0, 0).flip(-1)
    assert not torch.allclose(unlike, logits_at(0, 0))


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_without_position_attention_commutes_with_any_permutation(backend):
    qkv = torch.randn(2, 3, 4, 2 * 8 + 4, dtype=torch.float64)
    order = torch.randperm(12)

    def permute(x):
        return x.flatten(1, 2)[:, order].view_as(x)

    def attend(x):
        return attend_2d(x, None, None, num_heads=2, key_channels=8, backend=backend)

    torch.testing.assert_close(attend(permute(qkv)), permute(attend(qkv)))


def test_relative_attention_does_not_commute_with_permutations():
    qkv, rel_h, rel_w = random_inputs(1, 3, 4, num_heads=2, key_depth=4, value_depth=2)
    moved = qkv.flip(2)
    out, other = (attend_2d(t, rel_h, rel_w, num_heads=2, key_channels=8) for t in (qkv, moved))
    assert not torch.allclose(out.flip(2), other)


def test_maps_are_the_weights_of_the_values():
    qkv, rel_h, rel_w = random_inputs(2, 3, 5, num_heads=2, key_depth=4, value_depth=3, tables="per-head")
    maps = attention_maps(qkv, rel_h, rel_w, num_heads=2, key_channels=8)
    assert maps.shape == (2, 2, 15, 15)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, 15, dtype=torch.float64))
    values = qkv[..., 16:].flatten(1, 2).unflatten(-1, (2, 3)).transpose(1, 2)
    by_hand = (maps @ values).transpose(1, 2).reshape(2, 3, 5, 6)
    torch.testing.assert_close(by_hand, direct_attention(qkv, rel_h, rel_w, 2, 8))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_backward_in_blocks_is_the_backward(threads, monkeypatch):
    """Blocks that do not divide the heads or the pixels, against torch's own backward of the same call."""
    before = torch.get_num_threads()
    inputs = random_inputs(2, 5, 7, num_heads=2, key_depth=4, value_depth=3, tables="per-head")
    cotangent = torch.randn(2, 5, 7, 6, dtype=torch.float64)
    torch.set_num_threads(threads)
    try:
        monkeypatch.setattr(sdpa, "QUERIES_AT_ONCE", 16)
        blocked = run(inputs, cotangent, "sdpa", 2, 8)
        monkeypatch.setattr(sdpa, "_has_own_derivatives", lambda q: False)
        whole = run(inputs, cotangent, "sdpa", 2, 8)
    finally:
        torch.set_num_threads(before)
    for name, value in whole.items():
        torch.testing.assert_close(blocked[name], value)


def test_vmap_and_grad_of_torch_func():
    qkv, rel_h, rel_w = random_inputs(3, 2, 3, num_heads=2, key_depth=4, value_depth=2)

    def loss(one):
        return attend_2d(one[None], rel_h, rel_w, num_heads=2, key_channels=8, backend="sdpa").square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(qkv.detach())
    alone = torch.stack([torch.func.grad(loss)(one) for one in qkv.detach()])
    torch.testing.assert_close(together, alone)


def test_sdpa_stores_nothing_quadratic():
    """Peak of the saved tensors at 32 x 32: a map alone would be 4 MB a head."""
    inputs = random_inputs(1, 32, 32, num_heads=4, key_depth=20, value_depth=3, dtype=torch.float32)
    saved = 0

    def count(tensor):
        nonlocal saved
        saved = max(saved, tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        attend_2d(*inputs, num_heads=4, key_channels=80, backend="sdpa")
    assert 0 < saved < 4 * 1024 * 1024


@pytest.mark.parametrize(
    ("device", "key_depth", "value_depth", "depth"),
    [("cpu", 6, 3, 13), ("cpu", 6, 20, 20), ("cuda", 6, 3, 16), ("cuda", 9, 3, 16), ("cuda", 6, 20, 24)],
)
def test_the_fused_call_gets_one_depth(device, key_depth, value_depth, depth, monkeypatch):
    """That of the keys and their 3 + 4 places, or of wider values, and on a GPU the next multiple of 8."""
    shapes = []

    def record(q, k, v, scale):
        shapes.extend([q.shape[-1], k.shape[-1], v.shape[-1]])
        return torch.empty_like(v)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", record)
    with FakeTensorMode():
        qkv = torch.empty(1, 3, 4, 2 * (2 * key_depth + value_depth), device=device)
        rel_h, rel_w = (torch.empty(length, key_depth, device=device) for length in (5, 7))
        out = sdpa.attend(qkv, rel_h, rel_w, num_heads=2, key_channels=2 * key_depth)
    assert shapes == [depth] * 3
    assert out.shape == (1, 3, 4, 2 * value_depth)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "multiple of num_heads, got key_channels=8, num_heads=3; try key_channels=9$"),
        ({"num_heads": 0}, "multiple of num_heads, got key_channels=8, num_heads=0$"),
        ({"num_heads": "2"}, "^num_heads must be an int, got num_heads='2'$"),
        ({"num_heads": 2.0}, "^num_heads must be an int, got num_heads=2.0$"),
        ({"num_heads": [2]}, r"^num_heads must be an int, got num_heads=\[2\]$"),
        ({"num_heads": True}, "^num_heads must be an int, got num_heads=True$"),
        ({"num_heads": torch.tensor(2)}, "^num_heads must be an int, got num_heads=a Tensor$"),
        ({"key_channels": None}, "^key_channels must be an int, got key_channels=None$"),
        ({"key_channels": 14}, "qkv must hold"),
        ({"key_channels": 2, "qkv": torch.zeros(1, 6, 3, 4)}, r"channels come first, try qkv.permute\(0, 2, 3, 1\)$"),
        ({"rel_h": None}, "both be None, got rel_h=None; for rel_w alone give zeros as rel_h$"),
        ({"rel_h": torch.zeros(3, 4)}, r"rel_h must be \[5, 4\] or \[2, 5, 4\] for a map of 3 x 4, got \[3, 4\]"),
        ({"rel_w": torch.zeros(2, 7, 4)}, r"both be shared by the heads .*; try rel_h.expand\(2, -1, -1\)$"),
        ({"qkv": torch.zeros(3, 4, 20)}, r"qkv must be .*; try qkv.unflatten\(1, \(height, width\)\)$"),
        (
            {"qkv": torch.zeros(1, 0, 4, 20)},
            "qkv must have pixels if there are tables, got an empty map of 0 x 4; rel_h=",
        ),
        (
            {"qkv": torch.zeros(1, 3, 4, 20).to(torch.float8_e4m3fn)},
            r"^qkv must be bfloat16, float16, float32 or float64, got torch.float8_e4m3fn; try qkv.to\(torch.bfloat16",
        ),
        ({"qkv": None, "rel_h": None, "rel_w": None}, "^qkv must be a torch.Tensor, got NoneType$"),
        ({"qkv": torch.zeros(1, 3, 4, 20).long()}, r"qkv must be floating-point, got torch.int64; try qkv.float\(\)"),
        ({"qkv": [1, 2]}, r"qkv must be a torch.Tensor, got list"),
        ({"rel_w": torch.zeros(7, 4).int()}, "rel_w must be floating-point, got torch.int32"),
        (
            {"rel_h": torch.zeros(5, 4, device="meta")},
            "rel_h must be on the device of qkv, cpu, got meta; try",
        ),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"backend": ["sdpa"]}, r"^backend must be one of eager, sdpa, triton or None, got backend=\['sdpa'\]$"),
        ({"backend": []}, r"^backend must be one of eager, sdpa, triton or None, got backend=\[\]$"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"qkv": torch.zeros(1, 3, 4, 20), "rel_h": torch.zeros(5, 4), "rel_w": torch.zeros(7, 4)}
    arguments |= {"num_heads": 2, "key_channels": 8, **change}
    with pytest.raises(ValueError, match=message):
        attend_2d(**arguments)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", [None, *TORCH_BACKENDS])
@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 0, 4), (1, 3, 0)], ids=str)
def test_empty_maps_have_empty_results(shape, backend, window):
    qkv = torch.zeros(*shape, 20, requires_grad=True)
    out = attend_2d(qkv, None, None, num_heads=2, key_channels=8, backend=backend, window=window)
    out.sum().backward()
    assert out.shape == (*shape, 4)
    assert qkv.grad.shape == qkv.shape


@pytest.mark.parametrize(
    ("device", "dtype", "runs"),
    [("cuda", torch.float64, False), ("cuda", torch.float32, True), ("cpu", torch.float64, True)],
)
def test_float64_has_no_fused_kernel_on_a_gpu(device, dtype, runs):
    with FakeTensorMode():
        qkv = torch.empty(1, 2, 2, 20, dtype=dtype, device=device)
    assert (sdpa.why_not(qkv, None, None, num_heads=2, key_channels=8) is None) == runs


def test_a_table_on_another_device_is_named_after_a_call_that_was_right():
    """Checks are done once for a kind of call: the devices of the tables are part of the kind."""
    arguments = torch.zeros(1, 3, 4, 20), torch.zeros(5, 4), torch.zeros(7, 4)
    attend_2d(*arguments, num_heads=2, key_channels=8)
    with pytest.raises(ValueError, match="rel_w must be on the device of qkv"):
        attend_2d(*arguments[:2], arguments[2].to("meta"), num_heads=2, key_channels=8)


def test_a_named_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(attention.sdpa, "why_not", lambda *a, **k: "the test says no")
    with pytest.raises(
        ValueError, match=r"backend='sdpa' cannot run: the test says no; backend=None takes the fastest"
    ):
        attend_2d(torch.zeros(1, 2, 2, 20), None, None, num_heads=2, key_channels=8, backend="sdpa")


def test_the_choice_falls_back_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(attention.sdpa, "why_not", lambda *a, **k: "the test says no")
    monkeypatch.setattr(attention, "BACKENDS", {"sdpa": attention.sdpa, "eager": attention.eager})
    qkv = torch.zeros(1, 2, 2, 20)
    with caplog.at_level(logging.INFO, logger="aaconv"):
        assert choose_backend(qkv, None, None, num_heads=2, key_channels=8) == "eager"
        assert choose_backend(qkv, None, None, num_heads=2, key_channels=8) == "eager"
    assert [record.getMessage() for record in caplog.records] == [
        "attention backend sdpa is passed over: the test says no"
    ]


def test_the_choice_can_be_overridden_for_a_process():
    qkv = torch.zeros(1, 2, 2, 20)
    choice = {"num_heads": 2, "key_channels": 8}
    assert choose_backend(qkv, None, None, **choice) == "sdpa"
    with default_backend("eager"):
        assert choose_backend(qkv, None, None, **choice) == "eager"
        assert choose_backend(qkv, None, None, **choice, backend="sdpa") == "sdpa"
    assert choose_backend(qkv, None, None, **choice) == "sdpa"
    with pytest.raises(ValueError, match="backend must be one of"):
        set_default_backend("sdap")


def test_an_unknown_default_is_named_where_it_is_used(monkeypatch):
    monkeypatch.setattr("aaconv.attention._default_backend", "nope")  # as AACONV_BACKEND=nope leaves it
    qkv, choice = torch.zeros(1, 2, 2, 20), {"num_heads": 2, "key_channels": 8}
    with pytest.raises(ValueError, match="AACONV_BACKEND must be one of eager, sdpa, triton, got 'nope'"):
        choose_backend(qkv, None, None, **choice)
    with default_backend("eager"):
        assert choose_backend(qkv, None, None, **choice) == "eager"
    assert choose_backend(qkv, None, None, **choice, backend="sdpa") == "sdpa"


@pytest.mark.parametrize("tables", ["none", "shared", "per-head"])
def test_half_precision_stays_finite_where_products_do_not(tables):
    """3000 squared is beyond float16: the logits stop at its largest number, and ordinary ones stay as they are."""
    qkv, *rel = random_inputs(2, 3, 4, num_heads=2, key_depth=8, value_depth=3, tables=tables, dtype=torch.float16)
    rel = [None if table is None else (3000 * table).detach().requires_grad_() for table in rel]
    large = torch.cat([3000 * qkv[..., :32], qkv[..., 32:]], -1).detach().requires_grad_()
    out = attend_2d(large, *rel, num_heads=2, key_channels=16, backend="eager")
    assert out.isfinite().all()
    assert out.abs().max() <= qkv[..., 32:].abs().max()  # an average of the values
    out.sum().backward()
    assert all(part.grad.isfinite().all() for part in (large, *rel) if part is not None)


def test_a_kind_of_call_is_checked_once(monkeypatch):
    checked, check = [], attention._check
    monkeypatch.setattr(attention, "_checked", {})
    monkeypatch.setattr(attention, "_check", lambda qkv, *rest: checked.append(tuple(qkv.shape)) or check(qkv, *rest))
    calls = [(1, 2, 2, 20), (1, 2, 2, 20), (1, 2, 3, 20), (1, 2, 2, 20)]
    for shape in calls:
        attend_2d(torch.zeros(shape), None, None, num_heads=2, key_channels=8)
    assert checked == [(1, 2, 2, 20), (1, 2, 3, 20)]
    attend_2d(torch.zeros(calls[0], dtype=torch.float64), None, None, num_heads=2, key_channels=8)
    with default_backend("eager"):
        attend_2d(torch.zeros(calls[0]), None, None, num_heads=2, key_channels=8)
    assert checked[2:] == [calls[0]] * 2


@pytest.mark.parametrize(("value", "chosen"), [("eager", "eager"), ("", None)])
def test_the_environment_chooses_the_backend(value, chosen, monkeypatch):
    monkeypatch.setenv("AACONV_BACKEND", value)
    again = importlib.util.module_from_spec(attention.__spec__)
    attention.__spec__.loader.exec_module(again)
    assert again.chosen_default() == chosen


def test_a_call_that_was_right_lets_no_wrong_one_pass():
    """Calls are checked once for their kind: one table is not none, and whole numbers are not the others."""
    qkv, rel_h, rel_w = torch.randn(1, 3, 4, 24), torch.randn(5, 4), torch.randn(7, 4)
    sizes = {"num_heads": 2, "key_channels": 8}
    for tables in ((None, None), (rel_h, rel_w)):
        attend_2d(qkv, *tables, **sizes)
    with pytest.raises(ValueError, match="both be given or both be None"):
        attend_2d(qkv, rel_h, None, **sizes)
    with pytest.raises(ValueError, match="rel_w must be floating-point"):
        attend_2d(qkv, rel_h, rel_w.long(), **sizes)
    for wrong in ({"num_heads": 2.0}, {"key_channels": 8.0}):  # to a dict they are the same
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be an int"):
            attend_2d(qkv, rel_h, rel_w, **sizes | wrong)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning")
def test_sizes_may_be_those_of_a_symbol_or_a_trace():
    class Attend(torch.nn.Module):
        def forward(self, qkv):
            return attend_2d(qkv, None, None, num_heads=2, key_channels=qkv.shape[-1] // 3)

    qkv = torch.randn(1, 3, 4, 24)
    wanted = Attend()(qkv)
    torch.testing.assert_close(torch.jit.trace(Attend(), qkv)(qkv), wanted)
    torch.testing.assert_close(torch.export.export(Attend(), (qkv,), strict=False).module()(qkv), wanted)
    compiled = torch.compile(Attend(), fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qkv), wanted)
