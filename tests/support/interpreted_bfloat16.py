"""bfloat16 in triton's interpreter, which holds the bits of such numbers as integers and would compute with those."""

import numpy as np
import pytest


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers):
    """To the nearest, of two as near the even one."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32).astype(np.uint64)
    upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), upper)


def teach_bfloat16(monkeypatch):
    """Casts, products and arithmetic: in float32, and rounded."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if not hasattr(InterpreterBuilder, "get_bf16"):
        pytest.skip("the interpreter of this triton does not know bfloat16")
    plain = {name: getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_dot", "binary_op", "unary_op")}

    def is_ours(handle):
        return handle.dtype.scalar == tl.bfloat16

    def wide(handle):
        return TensorHandle(widened(handle.data), tl.float32) if is_ours(handle) else handle

    def narrow(numbers):
        return TensorHandle(numbers, tl.int1) if numbers.dtype == bool else TensorHandle(rounded(numbers), tl.bfloat16)

    def cast(self, source, kind):
        if kind.scalar == tl.bfloat16:
            return source if is_ours(source) else narrow(source.data.astype(np.float32))
        return (
            wide(source)
            if kind.scalar == tl.float32 and is_ours(source)
            else plain["cast_impl"](self, wide(source), kind)
        )

    def dot(self, a, b, *rest):
        return plain["create_dot"](self, wide(a), wide(b), *rest)

    def binary(self, a, b, operation):
        return (
            narrow(operation(wide(a).data, wide(b).data)) if is_ours(a) else plain["binary_op"](self, a, b, operation)
        )

    def unary(self, a, operation):
        return narrow(operation(wide(a).data)) if is_ours(a) else plain["unary_op"](self, a, operation)

    for name, taught in (("cast_impl", cast), ("create_dot", dot), ("binary_op", binary), ("unary_op", unary)):
        monkeypatch.setattr(InterpreterBuilder, name, taught)
    monkeypatch.setattr(
        InterpreterBuilder, "create_fp_to_fp", lambda self, source, kind, _mode: cast(self, source, kind)
    )
