"""The arguments of the matrix products of the CPU kernels, which `matmul.h` describes."""

import ctypes

FLOAT32, FLOAT16, BFLOAT16 = range(3)  # the numbers of the types
SILU, GELU = 5, 7  # the numbers of the operations


class QuantizedMatmul(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "w", "scales", "biases")]
    _fields_ += [(name, ctypes.c_int) for name in ("scale_type", "bits", "group_size", "m", "n", "k")]
    _fields_ += [("y", ctypes.c_void_p), ("type", ctypes.c_int), ("integer_panels", ctypes.c_void_p)]


class HalfMatmul(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("m", "n", "k")),
        ("y", ctypes.c_void_p),
        ("x_type", ctypes.c_int),
        ("y_type", ctypes.c_int),
        ("panels", ctypes.c_void_p),
    ]


class Epilogue(ctypes.Structure):
    _fields_ = [("activation", ctypes.c_uint8), ("residual", ctypes.c_void_p)]


class Matmul(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("b_row_stride", ctypes.c_int64),
        ("b_column_stride", ctypes.c_int64),
        ("c", ctypes.c_void_p),
        ("c_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("m", "n", "k")),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("y", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("epilogue", ctypes.c_void_p),
    ]
