"""Bytes that a compiled training step reads and writes, and its kernels, for a GPU that need not be here:

    PYTHONPATH=src python tools/count_compiled.py --capability 90 plain_resnet50 aa_resnet50    # a minute or two each

Forward, cross entropy and backward, weights in bfloat16, channels_last, 128 images of 224 pixels unless something else
is said. Bytes are the compiler's own count: what a kernel, a convolution or a product takes is read once, and what it
leaves is written once. Kernels are those that the compiler writes; calls go to libraries and to operators such as ours.

Nothing runs: tensors have no memory, torch.cuda answers as a GPU of that compute capability would, convolutions keep
channels_last as cuDNN's do, and compiled graphs are thrown away. torch's autograd asks the driver about the GPU of a
tensor, so the backward is traced on the CPU, and the compiler gets both graphs back as those of a GPU. Made for torch
2.15, whose private names it takes.
"""

import argparse
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch._inductor.config
import torch.utils._triton
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import metrics
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernel, MultiOutput
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from aaconv.benchmark.model import Network

MULTIPROCESSORS = {80: 108, 89: 128, 90: 132}
"""Of an A100, a 4090 and an H200: the compiler cuts its sums by them."""


class Graph(NamedTuple):
    """What became of a forward or a backward."""

    bytes: int
    kernels: int
    calls: int


class Counted(Exception):
    """In place of a call of a compiled graph."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["plain_resnet50", "aa_resnet50"], help="or NAME:option=value")
    parser.add_argument("--capability", type=int, default=90, choices=MULTIPROCESSORS, help="90 for 9.0")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    pretend(args.capability)
    print(f"sm_{args.capability}, {args.batch} images of {args.size} x {args.size}, torch {torch.__version__}")
    print(f"{'':20}{'GB, forward':>12}{'backward':>12}{'sum':>8}{'kernels':>12}{'calls':>12}")
    for name in args.models:
        forward, backward = count(Network.parse(name), args.batch, args.size)
        sizes = f"{forward.bytes / 1e9:12.2f}{backward.bytes / 1e9:12.2f}{(forward.bytes + backward.bytes) / 1e9:8.2f}"
        numbers = (f"{forward.kernels} + {backward.kernels}", f"{forward.calls} + {backward.calls}")
        print(f"{name:20}{sizes}{numbers[0]:>12}{numbers[1]:>12}", flush=True)


def count(network: Network, batch: int, size: int) -> list[Graph]:
    """Of the forward and the backward."""
    found: list[Graph] = []

    def keep(lowering: GraphLowering) -> Any:
        metrics.reset()
        lowering.codegen()
        nodes = lowering.scheduler.nodes
        calls = sum(isinstance(node.node, ExternKernel) and not isinstance(node.node, MultiOutput) for node in nodes)
        total = sum(node.get_read_write_buffers_sizes() for node in nodes)
        found.append(Graph(total, metrics.generated_kernel_count, calls))
        return SimpleNamespace(call=not_called, __file__="")

    GraphLowering.compile_to_module = keep
    torch._dynamo.reset()
    with torch.device("meta"):
        model = network.build(size).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for kept in (module._parameters, module._buffers):
                kept.update({name: on_gpu(tensor) for name, tensor in kept.items() if tensor is not None})
        images = on_gpu(torch.empty(batch, 3, size, size))
        labels = torch.empty(batch, dtype=torch.long, device="cuda")

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(images), labels)

    try:
        torch.compile(loss_of, backend=compiler, fullgraph=True)(images, labels)
    except Counted:
        return found
    raise AssertionError("nothing was compiled")


def on_gpu(tensor: Tensor) -> Tensor:
    """As a parameter of half precision in channels_last memory has it."""
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    new = torch.empty(tensor.shape, dtype=dtype, device="cuda")
    new = new.contiguous(memory_format=torch.channels_last) if new.dim() == 4 else new
    return nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new


def not_called(*_: Any) -> None:
    raise Counted


def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Any:
    """torch's own, that traces the backward on the CPU."""
    return compile_fx(*moved(graph, inputs, "cpu"), inner_compile=compiler_for_gpu)


def compiler_for_gpu(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    return compile_fx_inner(*moved(graph, inputs, "cuda:0"), **options)


def moved(graph: GraphModule, inputs: Sequence[Any], device: str) -> tuple[GraphModule, list[Any]]:
    """The graph, in place, and its inputs on another device."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(device)
        if not isinstance(value, FakeTensor):
            return value
        with value.fake_mode, torch.no_grad():
            new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(new, value.requires_grad)
        return new.requires_grad_(value.requires_grad)

    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = map_aggregate(node.args, move), map_aggregate(node.kwargs, move)
                node.meta |= {
                    key: tree_map(move, node.meta[key]) for key in ("example_value", "val") if key in node.meta
                }
            module.recompile()
    return graph, [move(value) for value in inputs]


def pretend(capability: int) -> None:
    """That there is a GPU of this capability, as far as the compiler asks."""
    major, minor = divmod(capability, 10)
    sizes = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024}
    properties = SimpleNamespace(
        name="none", major=major, minor=minor, warp_size=32, multi_processor_count=MULTIPROCESSORS[capability], **sizes
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "get_rng_state": torch.empty(0, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        for place, known in ((torch.cuda, name), (CudaInterface, name.removeprefix("_"))):
            if hasattr(place, known):
                setattr(place, known, staticmethod(lambda *_, answer=answer, **__: answer))
    torch.accelerator.is_available = lambda: False  # else the compiler asks for streams
    FakeTensorMode.avoid_device_init = property(lambda _: True)
    torch._C._conv_determine_backend_memory_format = as_cudnn
    torch.utils._triton.triton_hash_with_backend = lambda: ""
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True
    torch._functorch.config.force_non_lazy_backward_lowering = True


def as_cudnn(images: Tensor, weight: Tensor, _: Any) -> torch.memory_format:
    """channels_last where the images or the weight are."""
    last = torch.channels_last
    if any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (images, weight)):
        return last
    return torch.contiguous_format


if __name__ == "__main__":
    main()
