"""Makes Triton's CPU interpreter (``TRITON_INTERPRET=1``) numerically honest for bfloat16.

The interpreter keeps bfloat16 as raw uint16, computes with those integers, truncates where it
should round, and in Triton 3.6 breaks on numpy 2.4. Import this before any kernel; without the
variable it does nothing. Products accumulate in float64 and round once per ``tl.dot``, so that a
row's result does not depend on its place in a tile.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter as _it

    _B = _it.InterpreterBuilder
    _H = _it.TensorHandle
    _FP8 = {tl.float8e4nv: (torch.float8_e4m3fn, 448.0), tl.float8e5: (torch.float8_e5m2, 57344.0)}

    def _up(h):
        """Handle -> float numpy array holding the real values."""
        dt = h.dtype.scalar
        if dt == tl.bfloat16:
            return (np.asarray(h.data).astype(np.uint32) << 16).view(np.float32)
        if dt in _FP8:
            raw = torch.from_numpy(np.ascontiguousarray(h.data).view(np.uint8))
            return raw.view(_FP8[dt][0]).float().numpy()
        return h.data

    def _to_bf16(x):
        u = np.ascontiguousarray(np.asarray(x, dtype=np.float32)).view(np.uint32)
        r = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), r)

    def _down(x, dt):
        if dt == tl.bfloat16:
            return _to_bf16(x)
        if dt in _FP8:
            tdt, lim = _FP8[dt]
            t = torch.from_numpy(np.ascontiguousarray(np.asarray(x, dtype=np.float32)))
            return t.clamp(-lim, lim).to(tdt).view(torch.uint8).numpy()
        return x

    def _small(h):
        return hasattr(h.dtype, "scalar") and (
            h.dtype.scalar == tl.bfloat16 or h.dtype.scalar in _FP8
        )

    _binary, _unary, _cast = _B.binary_op, _B.unary_op, _B.cast_impl
    _fp2fp, _dot = _B.create_fp_to_fp, _B.create_dot

    def binary_op(self, lhs, rhs, op):
        if not (_small(lhs) or _small(rhs)):
            return _binary(self, lhs, rhs, op)
        with np.errstate(all="ignore"):
            out = op(_up(lhs), _up(rhs))
        dt = lhs.dtype.scalar
        return _H(out if out.dtype == np.bool_ else _down(out, dt), dt)

    def unary_op(self, arg, op):
        if not _small(arg):
            return _unary(self, arg, op)
        return _H(_down(op(_up(arg)), arg.dtype.scalar), arg.dtype.scalar)

    def cast_impl(self, src, dst_type):
        d = dst_type.scalar
        if _small(src) or d == tl.bfloat16 or d in _FP8:
            val = _up(src)
            if d == tl.bfloat16 or d in _FP8:
                return _H(_down(val, d), d)
            return _H(val.astype(_it._get_np_dtype(dst_type)), d)
        return _cast(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        d = dst_type.scalar
        if _small(src) or d == tl.bfloat16 or d in _FP8:
            return cast_impl(self, src, dst_type)
        return _fp2fp(self, src, dst_type, rounding_mode)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        acc = np.matmul(_up(a).astype(np.float64), _up(b).astype(np.float64)).astype(d.data.dtype)
        return _H(acc + d.data, d.dtype.scalar)

    def create_rsqrt(self, arg):
        return _H(
            (1 / np.sqrt(_up(arg))).astype(np.float32) if _small(arg) else 1 / np.sqrt(arg.data),
            arg.dtype.scalar,
        )

    _B.binary_op, _B.unary_op, _B.cast_impl = binary_op, unary_op, cast_impl
    _B.create_fp_to_fp, _B.create_dot, _B.create_rsqrt = create_fp_to_fp, create_dot, create_rsqrt

    if hasattr(_it, "_patch_lang_tensor"):
        _orig_patch = _it._patch_lang_tensor

        def _patch_lang_tensor(tensor, scope, *args):
            _orig_patch(tensor, scope, *args)
            scope.set_attr(
                tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
            )

        _it._patch_lang_tensor = _patch_lang_tensor
