"""Warnings of torch on a GPU that say nothing about us."""

EXPECTED = [
    # The compiler's advice about float32; exact products are what is wanted here.
    "TensorFloat32 tensor cores",
    # Of the graph that keeps the memory of its CUDA graphs. Torch does not show it, but makes it.
    "The CUDA Graph is empty",
    # Of the backward's thread, where its first work is a matrix product.
    "Attempting to run cuBLAS, but there was no current CUDA context",
]


def pytest_configure(config):
    for message in EXPECTED:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
