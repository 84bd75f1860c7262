"""The compiled fused kernels: accuracy in every dtype, and what torch does with the operator around them."""

import functools
import random
import re

import pytest
import torch

from aaconv.attention import eager, triton_backend, triton_plan
from aaconv.benchmark.measure import graphed
from aaconv.benchmark.model import prepare_training
from aaconv.data import shapes
from aaconv.models import create_model
from support import fused_laws
from support.fused_laws import assert_as_good_as_eager, output_and_gradients

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PAPER_SHAPES = [  # batch, height, width, heads, key depth, value depth
    (4, 14, 14, 8, 20, 1),
    (4, 14, 14, 8, 20, 3),
    (4, 7, 7, 8, 20, 6),
    (2, 32, 32, 8, 20, 2),
    (2, 16, 16, 8, 20, 4),
    (4, 8, 8, 8, 20, 8),
    (2, 32, 32, 8, 20, 1),  # these three: Wide-ResNet-16-4
    (2, 16, 16, 8, 20, 2),
    (4, 8, 8, 8, 20, 4),
    (2, 14, 14, 8, 32, 32),
    (2, 9, 14, 4, 20, 16),
    (1, 40, 40, 8, 12, 6),
    (2, 16, 16, 8, 6, 3),
    (2, 8, 8, 8, 3, 1),
    (1, 64, 64, 2, 20, 3),
    (1, 1, 1, 1, 20, 1),
    (1, 128, 9, 1, 20, 3),
    (1, 5, 128, 1, 20, 3),
    (1, 12, 12, 2, 128, 128),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


random_inputs = functools.partial(fused_laws.random_inputs, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", PAPER_SHAPES, ids=str)
def test_paper_shapes_match_float64(shape, dtype):
    assert_as_good_as_eager(random_inputs(*shape), dtype, shape[3], shape[4])


@pytest.mark.usefixtures("small_kernels")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "shape",
    [shape for shape in PAPER_SHAPES if max(shape[1:3]) <= 16 and shape[4] <= 32 and shape[5] <= 14]
    + [(3, 5, 11, 2, 32, 8), (2, 13, 14, 1, 24, 14), (2, 1, 7, 3, 28, 3)],
    ids=str,
)
def test_small_maps_with_few_heads_match_float64(shape, dtype):
    """With all gradients of a head in one program, which elsewhere takes more heads than these."""
    assert_as_good_as_eager(random_inputs(*shape), dtype, shape[3], shape[4])


@pytest.mark.parametrize("seed", range(30))
def test_random_shapes_match_float64(seed):
    pick = random.Random(seed)
    height, width = pick.choice(
        [(pick.randint(1, 20), pick.randint(1, 20)), (pick.randint(1, 50), pick.randint(1, 50))]
    )
    heads, depth, value_depth = (
        pick.randint(1, 8),
        pick.choice([1, 4, 12, 20, 32, 40]),
        pick.choice([1, 3, 6, 8, 15, 16, 20, 32]),
    )
    tables = pick.choice(["shared", "per head", "none"])
    inputs = random_inputs(pick.randint(1, 3), height, width, heads, depth, value_depth, tables, seed)
    assert_as_good_as_eager(inputs, pick.choice(DTYPES), heads, depth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_may_rise_far_above_those_of_the_first_keys(dtype):
    for value_depth, rise in [(3, 40), (16, 2)]:
        inputs = fused_laws.rising_inputs(2, 14, 14, 2, 20, value_depth, rise=rise, device="cuda")
        assert_as_good_as_eager(inputs, dtype, 2, 20)


def test_tf32_is_used_only_when_allowed():
    inputs = random_inputs(2, 14, 14, 2, 20, 3)
    exact = output_and_gradients(eager.attend, inputs, torch.float64, 2, 20)[0]
    errors = {}
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        out = output_and_gradients(triton_backend.attend, inputs, torch.float32, 2, 20)[0]
        errors[precision] = (out - exact).abs().max().item()
    torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 1e-5 < errors["high"] < 1e-2


@pytest.mark.parametrize("shape", [(8, 14, 14, 8, 20, 3), (2, 40, 40, 8, 20, 3)], ids=str)
def test_every_run_gives_the_same_bits(shape):
    inputs = random_inputs(*shape)
    first = output_and_gradients(triton_backend.attend, inputs, torch.bfloat16, 8, 20)
    for _ in range(5):
        again = output_and_gradients(triton_backend.attend, inputs, torch.bfloat16, 8, 20)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("side", "value_depth"), [(32, 1), (16, 2), (8, 4)])
def test_a_batch_as_in_training_is_its_images(side, value_depth):
    fused_laws.assert_a_batch_is_its_images(
        random_inputs(256, side, side, 8, 20, value_depth), torch.bfloat16, 8, 20, parts=8
    )


needs_overlap = pytest.mark.skipif(not triton_plan.launches_overlap(), reason="this GPU's kernels cannot overlap")


def overlapping(overlap, monkeypatch):
    monkeypatch.setattr(triton_plan, "launches_overlap", lambda: overlap)
    triton_backend.plan_for.cache_clear()


@needs_overlap
@pytest.mark.parametrize("side", [7, 14, 32, 40, 128])
@pytest.mark.parametrize("tables", ["shared", "none"])
def test_kernels_that_overlap_give_the_same_bits(side, tables, monkeypatch):
    """In a graph they follow each other without a pause. Who reads too early reads the poison, which is there anew."""
    batch = {7: 128, 14: 64, 32: 16, 40: 8, 128: 1}[side]
    inputs = random_inputs(batch, side, side, 8, 20, 3, tables)
    qkv, rel_h, rel_w, grad = [None if tensor is None else tensor.bfloat16() for tensor in inputs]

    def run():
        arguments, sizes = (qkv.flatten(1, 2), rel_h, rel_w), (side, 8, 160)
        out, lse = triton_backend.attend_forward(*arguments, *sizes)
        return out, *triton_backend.attend_backward(grad.flatten(1, 2), *arguments, out, lse, *sizes)

    overlapping(False, monkeypatch)
    expected = run()
    overlapping(True, monkeypatch)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))


@needs_overlap
def test_training_with_kernels_that_overlap_gives_the_same_bits(monkeypatch):
    """Whole steps in a graph, so that torch's kernels stand before and after ours."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    def weights_after(steps):
        torch.manual_seed(0)
        network = create_model("aa_wrn16_4", backend="triton")
        step = graphed(prepare_training(network, 64, 32, False, torch.device("cuda"))[0])
        for _ in range(steps):
            step()
        return torch.cat([weight.detach().flatten() for weight in network.parameters()])

    overlapping(False, monkeypatch)
    expected = weights_after(200)
    assert expected.isfinite().all()
    assert torch.equal(weights_after(200), expected)  # else torch's own kernels are to blame
    overlapping(True, monkeypatch)
    assert torch.equal(weights_after(200), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_operator_is_registered_correctly():
    qkv, rel_h, rel_w, _ = random_inputs(2, 5, 7, 2, 20, 3)
    tables = [table.float().requires_grad_() for table in (rel_h, rel_w)]
    for some in (tables, [None, None]):
        arguments = (qkv.float().flatten(1, 2).requires_grad_(), *some, 5, 2, 40)
        torch.library.opcheck(torch.ops.aaconv.attend_2d.default, arguments)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_in_one_graph(mode):
    inputs = random_inputs(2, 7, 9, 2, 20, 3)

    @torch.compile(fullgraph=True, mode=mode)
    def compiled(qkv, rel_h, rel_w, *, num_heads, key_channels):
        assert triton_backend.why_not(qkv, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels) is None
        return triton_backend.attend(qkv * 1.0, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels) * 1.0

    expected = output_and_gradients(triton_backend.attend, inputs, torch.bfloat16, 2, 20)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        result = output_and_gradients(compiled, inputs, torch.bfloat16, 2, 20)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_exports():
    class Attention(torch.nn.Module):
        def forward(self, qkv, rel_h, rel_w):
            return triton_backend.attend(qkv, rel_h, rel_w, num_heads=2, key_channels=40)

    arguments = tuple(t.bfloat16() for t in random_inputs(2, 7, 9, 2, 20, 3)[:3])
    program = torch.export.export(Attention(), arguments)
    assert torch.equal(program.module()(*arguments), Attention()(*arguments))


# The last call is on another stream than the capture, whose graph of gradients still lives: that is the comparison.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_captured_in_a_cuda_graph():
    qkv, rel_h, rel_w, grad = (t.bfloat16() for t in random_inputs(2, 14, 14, 8, 20, 3))
    leaves = [t.requires_grad_() for t in (qkv, rel_h, rel_w)]

    def step():
        out = triton_backend.attend(*leaves, num_heads=8, key_channels=160)
        return out, *torch.autograd.grad(out, leaves, grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        qkv.copy_(torch.randn_like(qkv))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def peak_bytes(side):
    qkv, rel_h, rel_w, grad = (t.bfloat16() for t in random_inputs(1, side, side, 8, 20, 3))
    leaves = [t.requires_grad_() for t in (qkv, rel_h, rel_w)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    triton_backend.attend(*leaves, num_heads=8, key_channels=160).backward(grad)
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_linear_in_pixels():
    peak_bytes(16)
    assert peak_bytes(128) <= 4.3 * peak_bytes(64)


@pytest.mark.alone
def test_more_than_two_billion_elements():
    """The last image of a batch past 2**31 elements equals the same image in a small batch, which is still large enough
    for the same kernels."""
    batch, side, heads, depth, few = 26500, 16, 8, 20, 64
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of GPU memory, {free / 2**30:.0f} are free")
    qkv = torch.zeros(batch, side, side, heads * (2 * depth + 1), dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    qkv[-1].normal_()
    rel_h, rel_w = (torch.randn(2 * side - 1, depth, device="cuda") for _ in range(2))
    results = []
    for part in (qkv.requires_grad_(), qkv.detach()[-few:].clone().requires_grad_()):
        out = triton_backend.attend(part, rel_h, rel_w, num_heads=heads, key_channels=heads * depth)
        out.backward(torch.ones_like(out))
        results.append((out[-1].detach(), part.grad[-1]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@functools.cache
def batches(steps):
    drawing = shapes.draw(64 * steps, seed=1)
    images = drawing.images.cuda().permute(0, 3, 1, 2).float() / 255 - 0.3
    return list(zip(images.split(64), drawing.labels.cuda().split(64), strict=True))


def course(backend, nudge=None, steps=300):
    """The demo's network with attention, trained on drawn images in bfloat16: the losses of all steps, and how far the
    weights of attention have moved after three, by name. `nudge` is the seed of a change of all weights at the
    beginning by as much as bfloat16 rounds."""
    torch.manual_seed(0)
    network = create_model("aa_small", num_classes=2, backend=backend).cuda().train()
    weights = {name: weight for name, weight in network.named_parameters() if re.search(r"qkv|rel_", name)}
    if nudge is not None:
        generator = torch.Generator("cuda").manual_seed(nudge)
        with torch.no_grad():
            for weight in network.parameters():
                weight *= 1 + 2**-9 * (2 * torch.rand(weight.shape, generator=generator, device="cuda") - 1)
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    history = []
    for x, labels in batches(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(network(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
        if len(history) == 3:
            moved = {name: weight.detach() - start[name] for name, weight in weights.items()}
    return torch.stack(history).cpu(), moved


def mean_move(backend, nudges):
    """How far the weights of attention move in three steps, by name: the mean of networks with these nudges."""
    moves = [course(backend, nudge, steps=3)[1] for nudge in nudges]
    return {name: torch.stack([move[name] for move in moves]).mean(0) for name in moves[0]}


def test_training_with_either_backend_moves_the_weights_alike():
    """Within twice what networks of one backend that differ by a rounding at the start are apart. Single ones are so
    far apart that half a gradient would not be noticed, so it is the means of eight."""
    reference, *others = (mean_move("eager", range(first, first + 8)) for first in range(0, 40, 8))

    def apart(one):
        return max(((move - reference[name]).norm() / reference[name].norm()).item() for name, move in one.items())

    allowed = 2 * max(map(apart, others))
    assert apart(mean_move("triton", range(40, 48))) <= allowed < 0.4


def test_training_with_either_backend_has_the_same_losses_within_noise():
    reference, fused = course("eager")[0], course("triton")[0]
    nudged = [course("eager", nudge)[0] for nudge in range(4)]

    def distance(one):
        return (one - reference).view(-1, 50).mean(1).square().mean().sqrt().item()

    assert distance(fused) <= 2 * max(map(distance, nudged))
    assert fused[-50:].mean() < 0.7 * fused[:50].mean()


def test_training_with_either_backend_has_the_same_loss_on_average():
    """The mean of the first 50 losses, within 0.01. Of single networks that differ by a rounding at the start it lies
    up to 0.05 apart, so it is that of 48 of each kind: then the difference has a standard error of about 0.0035."""
    losses = [
        torch.stack([course(backend, nudge, steps=50)[0].mean() for nudge in range(48)])
        for backend in ("eager", "triton")
    ]
    assert sum(loss.var() / len(loss) for loss in losses).sqrt() < 0.005
    torch.testing.assert_close(losses[1].mean(), losses[0].mean(), atol=0.01, rtol=0)
