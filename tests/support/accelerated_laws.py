"""The law of accelerate: output and every gradient stay what the library's own module gives."""

import copy
import functools

import torch

from aaconv.layers.accelerate import accelerate


def drawn(module, dtype=torch.float64):
    """The module with parameters drawn at random: libraries begin with tables of zeros."""
    module = module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5 if parameter.dim() == 1 else parameter[0].numel() ** -0.5)
        for name, parameter in module.named_parameters():
            if "rel" in name.rpartition(".")[2]:
                parameter.normal_(std=0.3)
    return module


def output_and_gradients(module, x, *rest, **options):
    """The output, and the gradients of the input and of every parameter, by name."""
    x = x.detach().clone().requires_grad_()
    result = module(x, *rest, **options)
    out = result[0] if isinstance(result, tuple) else result
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu").to(
        out
    )
    named = {name.replace("_orig_mod.", ""): parameter for name, parameter in module.named_parameters()}  # compiled
    gradients = torch.autograd.grad(out, [x, *named.values()], weights, allow_unused=True)
    return {"output": out.detach(), "x": gradients[0], **dict(zip(named, gradients[1:], strict=True))}


def assert_same(ours, theirs, **tolerance):
    """Equal up to rounding; in float64 to ten digits."""
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert (ours[name] is None) == (wanted is None), name
        if wanted is not None:
            digits = {}
            if wanted.dtype == torch.float64:
                digits = {"rtol": 1e-10, "atol": 1e-10 * max(1.0, float(wanted.abs().max()))}
            message = functools.partial("{}: {}".format, name)
            torch.testing.assert_close(ours[name], wanted, msg=message, **digits | tolerance)


def assert_accelerates(module, x, *rest, modules=1, tolerance=None, **options):
    """All attention of the module is replaced, nothing else changes, and undo brings the module back, bit for bit."""
    theirs = output_and_gradients(module, x, *rest, **options)
    kinds = type(module(x, *rest, **options))
    before = copy.deepcopy(module.state_dict())
    report = accelerate(module)
    assert not report.kept, report
    assert len(report.replaced) == modules, report
    calls = counted(report)
    assert_same(output_and_gradients(module, x, *rest, **options), theirs, **(tolerance or {}))
    assert all(calls.values()), "a forward of the library ran instead of ours"
    assert type(module(x, *rest, **options)) is kinds
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    report.undo()
    assert_same(output_and_gradients(module, x, *rest, **options), theirs, rtol=0, atol=0)


def assert_as_exact(module, x, *rest, precision=torch.bfloat16):
    """Under autocast, output and gradients are at most twice as far from float64 as those of the module's own forward.

    module and x are float32, on the device of the comparison.
    """
    exact = output_and_gradients(copy.deepcopy(module).double(), x.double(), *rest)
    largest = max(wanted.abs().max() for wanted in exact.values())

    def errors():
        with torch.autocast(x.device.type, precision):
            found = output_and_gradients(module, x, *rest)
        return {name: (found[name].double() - wanted).norm() for name, wanted in exact.items()}

    theirs = errors()
    report = accelerate(module)
    calls = counted(report)
    for name, error in errors().items():
        # What is zero but for rounding, such as the gradient of a bias of the keys, is compared with the rest.
        floor = torch.finfo(precision).eps * largest if exact[name].abs().max() < 1e-6 * largest else 0.0
        assert error <= 2 * theirs[name] + floor, f"{name}: {error:.3g} against {theirs[name]:.3g}"
    assert calls
    assert all(calls.values())
    report.undo()


def counted(report):
    """How often each module was computed by ours, from now on."""
    calls = {row.name: 0 for row in report.replaced}
    for row in report.replaced:
        compute = row.accelerated.compute

        def count(*inputs, name=row.name, compute=compute):
            calls[name] += 1
            return compute(*inputs)

        row.accelerated.compute = count
    return calls
