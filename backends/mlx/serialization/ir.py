# Generated from schema.fbs by generate.py. Do not edit.
"""The MLX IR: one class per table and one class per op.

A field without a default is required. `Output` and `InOut` mark the fields that an
instruction writes. An op inherits the fields of its table; `FIELDS` describes them
(see table.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .table import Field, InOut, Op, Output, Table, int8, int32, int64, uint8, uint32, uint64, double, string


@dataclass(frozen=True)
class Tid:
    """A tensor slot. `idx` counts the constants first, then the inputs, outputs, mutable
    buffers and temporaries.
    """

    idx: int


@dataclass(frozen=True)
class Vid:
    """A value slot: an int64, double or bool on the host."""

    idx: int


@dataclass(kw_only=True)
class IntOrVid(Table):
    """A literal or a value slot. FlatBuffers has no vectors of unions, so the choice
    is a table with a discriminator.
    """

    literal: int64 = 0
    vid: Vid | None = None
    is_vid: bool = False


@dataclass(kw_only=True)
class FloatOrVid(Table):
    literal: double = 0.0
    vid: Vid | None = None
    is_vid: bool = False


@dataclass(kw_only=True)
class VidOrTid(Table):
    vid: Vid | None = None
    tid: Tid | None = None
    is_vid: bool = False


@dataclass(kw_only=True)
class IntOrVidOrTid(Table):
    literal: int64 = 0
    vid: Vid | None = None
    tid: Tid | None = None
    kind: uint8 = 0  # 0 literal, 1 vid, 2 tid


@dataclass(kw_only=True)
class EmptyNode(Table):
    pass


@dataclass(kw_only=True)
class UnaryNode(Table):
    x: Tid
    out: Output[Tid]


@dataclass(kw_only=True)
class BinaryNode(Table):
    a: Tid
    b: Tid
    out: Output[Tid]


@dataclass(kw_only=True)
class BinaryIntNode(Table):
    """Integer arithmetic on sizes and offsets, on the host."""

    a: IntOrVid
    b: IntOrVid
    out: Output[Vid]


@dataclass(kw_only=True)
class ReduceNode(Table):
    x: Tid
    out: Output[Tid]
    axes: list[int32] | None = None
    keepdims: bool = False


@dataclass(kw_only=True)
class VarianceNode(Table):
    x: Tid
    out: Output[Tid]
    axes: list[int32] | None = None
    keepdims: bool = False
    ddof: int32 = 0


@dataclass(kw_only=True)
class ArgReduceNode(Table):
    x: Tid
    out: Output[Tid]
    axis: int32 = 0
    keepdims: bool = False


@dataclass(kw_only=True)
class AxisNode(Table):
    x: Tid
    out: Output[Tid]
    axis: int32 = 0


@dataclass(kw_only=True)
class KthNode(Table):
    x: Tid
    out: Output[Tid]
    kth: IntOrVid
    axis: int32 = 0


@dataclass(kw_only=True)
class ShapeNode(Table):
    x: Tid
    out: Output[Tid]
    shape: list[IntOrVid]


@dataclass(kw_only=True)
class JoinNode(Table):
    tensors: list[Tid]
    out: Output[Tid]
    axis: int32 = 0


@dataclass(kw_only=True)
class TriangleNode(Table):
    x: Tid
    out: Output[Tid]
    k: int32 = 0  # diagonal: 0 main, > 0 above, < 0 below


@dataclass(kw_only=True)
class ClipParams(Table):
    x: Tid
    out: Output[Tid]
    a_min: Tid | None = None
    a_max: Tid | None = None


@dataclass(kw_only=True)
class GeluParams(Table):
    x: Tid
    out: Output[Tid]
    approximate: string  # "none" or "tanh"


@dataclass(kw_only=True)
class RoundParams(Table):
    x: Tid
    out: Output[Tid]
    decimals: int32 = 0


@dataclass(kw_only=True)
class WhereParams(Table):
    condition: Tid
    x: Tid
    y: Tid
    out: Output[Tid]


@dataclass(kw_only=True)
class AsTypeParams(Table):
    x: Tid
    out: Output[Tid]
    scalar_type: int8 = 0


@dataclass(kw_only=True)
class CumsumParams(Table):
    x: Tid
    out: Output[Tid]
    axis: int32 = 0
    reverse: bool = False
    inclusive: bool = True


@dataclass(kw_only=True)
class SqueezeParams(Table):
    x: Tid
    out: Output[Tid]
    dims: list[int32] | None = None


@dataclass(kw_only=True)
class TransposeParams(Table):
    x: Tid
    out: Output[Tid]
    perm: list[int32]


@dataclass(kw_only=True)
class FlipParams(Table):
    x: Tid
    out: Output[Tid]
    axes: list[int32]


@dataclass(kw_only=True)
class TileParams(Table):
    x: Tid
    out: Output[Tid]
    reps: list[IntOrVid]


@dataclass(kw_only=True)
class RepeatParams(Table):
    x: Tid
    out: Output[Tid]
    repeats: IntOrVid
    axis: int32 = 0


@dataclass(kw_only=True)
class RollParams(Table):
    x: Tid
    out: Output[Tid]
    shift: list[IntOrVid]
    axes: list[int32]


@dataclass(kw_only=True)
class SplitParams(Table):
    x: Tid
    outs: Output[list[Tid]]
    sizes: list[IntOrVid]
    axis: int32 = 0


@dataclass(kw_only=True)
class PadParams(Table):
    x: Tid
    out: Output[Tid]
    pad_width: list[IntOrVid]  # (before, after) of each axis
    mode: string  # "constant" or "edge"
    constant_value: float = 0.0


@dataclass(kw_only=True)
class AsStridedParams(Table):
    x: Tid
    out: Output[Tid]
    shape: list[IntOrVid]
    strides: list[IntOrVid]  # in elements
    offset: uint64 = 0  # in elements


@dataclass(kw_only=True)
class TakeParams(Table):
    x: Tid
    out: Output[Tid]
    index: IntOrVidOrTid
    axis: int32 = 0


@dataclass(kw_only=True)
class TakeAlongAxisParams(Table):
    x: Tid
    indices: Tid
    out: Output[Tid]
    axis: int32 = 0


@dataclass(kw_only=True)
class GatherParams(Table):
    x: Tid
    indices: list[Tid]
    out: Output[Tid]
    axes: list[int32]
    slice_sizes: list[int32]


@dataclass(kw_only=True)
class SliceParams(Table):
    x: Tid
    out: Output[Tid]
    axis: IntOrVid
    start: IntOrVid
    stop: IntOrVid
    step: int32 = 1


@dataclass(kw_only=True)
class SliceUpdateParams(Table):
    """If `out` is `dst`, the update is in place."""

    dst: Tid
    update: Tid
    out: Output[Tid]
    axis: IntOrVid
    start: IntOrVid
    stop: IntOrVid
    step: int32 = 1


@dataclass(kw_only=True)
class IndexCopyParams(Table):
    """dst[.., indices[i], ..] = update[.., i, ..]. If `out` is `dst`, the update is
    in place.
    """

    dst: Tid
    update: Tid
    indices: Tid
    out: Output[Tid]
    axis: int32 = 0


@dataclass(kw_only=True)
class ScatterAddParams(Table):
    x: Tid
    indices: Tid
    updates: Tid
    out: Output[Tid]
    axis: int32 = 0


@dataclass(kw_only=True)
class ARangeParams(Table):
    out: Output[Tid]
    start: IntOrVid
    stop: IntOrVid
    step: IntOrVid
    scalar_type: int8 | None = None


@dataclass(kw_only=True)
class FullParams(Table):
    out: Output[Tid]
    shape: list[IntOrVid]
    v: FloatOrVid
    scalar_type: int8 = 0


@dataclass(kw_only=True)
class FullLikeParams(Table):
    x: Tid
    out: Output[Tid]
    v: FloatOrVid
    scalar_type: int8 | None = None  # absent: the dtype of x


@dataclass(kw_only=True)
class TriParams(Table):
    out: Output[Tid]
    n: IntOrVid
    m: IntOrVid
    k: int32 = 0
    scalar_type: int8 = 0


@dataclass(kw_only=True)
class ItemIntParams(Table):
    x: Tid
    out: Output[Vid]


@dataclass(kw_only=True)
class SymSizeParams(Table):
    a: Tid
    dim: int32 = 0
    out: Output[Vid]


@dataclass(kw_only=True)
class AddmmParams(Table):
    """alpha * mat1 @ mat2 + beta * bias"""

    mat1: Tid
    mat2: Tid
    out: Output[Tid]
    bias: Tid | None = None
    alpha: float = 1.0
    beta: float = 1.0


@dataclass(kw_only=True)
class GatherMmParams(Table):
    a: Tid
    b: Tid
    out: Output[Tid]
    lhs_indices: Tid | None = None
    rhs_indices: Tid | None = None
    sorted_indices: bool = False
    sorted_indices_flag: IntOrVid | None = None  # if present, overrides sorted_indices


@dataclass(kw_only=True)
class SoftmaxParams(Table):
    x: Tid
    out: Output[Tid]
    axis: int32 = 0
    precise: bool = False  # accumulate in float32


@dataclass(kw_only=True)
class RMSNormParams(Table):
    x: Tid
    weight: Tid | None = None
    out: Output[Tid]
    eps: float = 0.0


@dataclass(kw_only=True)
class LayerNormParams(Table):
    x: Tid
    out: Output[Tid]
    weight: Tid | None = None
    bias: Tid | None = None
    eps: float = 0.0


@dataclass(kw_only=True)
class RopeParams(Table):
    x: Tid
    out: Output[Tid]
    dims: int32 = 0
    offset: VidOrTid  # position of the first token: one number, or one for each sequence
    freqs: Tid | None = None
    traditional: bool = False
    base: float = 500000.0
    scale: float = 1.0


@dataclass(kw_only=True)
class SdpaParams(Table):
    q: Tid
    k: Tid
    v: Tid
    out: Output[Tid]
    scale: float = 0.0
    mask: Tid | None = None
    causal: bool = False


@dataclass(kw_only=True)
class UpdateAndAttendParams(Table):
    """Appends k and v to the KV cache of layer `layer_id`, which the runtime owns, and then
    computes attention over this cache. `layer_id` and `scale` must be present. Their
    default is null only to distinguish an absent field from 0. If `out_dtype` is absent,
    the result has the dtype of q.
    """

    q: Tid
    k: Tid
    v: Tid
    position: Tid
    out: Output[Tid]
    layer_id: int32 | None = None
    scale: float | None = None
    out_dtype: int8 | None = None


@dataclass(kw_only=True)
class Conv1DParams(Table):
    x: Tid
    w: Tid
    out: Output[Tid]
    stride: int32 = 1
    padding: int32 = 0
    dilation: int32 = 1
    groups: int32 = 1


@dataclass(kw_only=True)
class Conv2DParams(Table):
    x: Tid
    w: Tid
    out: Output[Tid]
    stride_h: int32 = 1
    stride_w: int32 = 1
    padding_h: int32 = 0
    padding_w: int32 = 0
    dilation_h: int32 = 1
    dilation_w: int32 = 1
    groups: int32 = 1


@dataclass(kw_only=True)
class Conv3DParams(Table):
    x: Tid
    w: Tid
    out: Output[Tid]
    stride_d: int32 = 1
    stride_h: int32 = 1
    stride_w: int32 = 1
    padding_d: int32 = 0
    padding_h: int32 = 0
    padding_w: int32 = 0
    dilation_d: int32 = 1
    dilation_h: int32 = 1
    dilation_w: int32 = 1
    groups: int32 = 1


@dataclass(kw_only=True)
class ConvTranspose1DParams(Table):
    x: Tid
    w: Tid
    out: Output[Tid]
    stride: int32 = 1
    padding: int32 = 0
    dilation: int32 = 1
    output_padding: int32 = 0
    groups: int32 = 1


@dataclass(kw_only=True)
class ConvTranspose2DParams(Table):
    x: Tid
    w: Tid
    out: Output[Tid]
    stride_h: int32 = 1
    stride_w: int32 = 1
    padding_h: int32 = 0
    padding_w: int32 = 0
    dilation_h: int32 = 1
    dilation_w: int32 = 1
    output_padding_h: int32 = 0
    output_padding_w: int32 = 0
    groups: int32 = 1


@dataclass(kw_only=True)
class ConvTranspose3DParams(Table):
    x: Tid
    w: Tid
    out: Output[Tid]
    stride_d: int32 = 1
    stride_h: int32 = 1
    stride_w: int32 = 1
    padding_d: int32 = 0
    padding_h: int32 = 0
    padding_w: int32 = 0
    dilation_d: int32 = 1
    dilation_h: int32 = 1
    dilation_w: int32 = 1
    output_padding_d: int32 = 0
    output_padding_h: int32 = 0
    output_padding_w: int32 = 0
    groups: int32 = 1


@dataclass(kw_only=True)
class DequantizeParams(Table):
    w: Tid
    scales: Tid
    out: Output[Tid]
    biases: Tid | None = None
    group_size: int32 = 0
    bits: int32 = 0
    mode: string
    global_scale: Tid | None = None
    dtype: int8 | None = None


@dataclass(kw_only=True)
class QuantizedMatmulParams(Table):
    x: Tid
    w: Tid
    scales: Tid
    out: Output[Tid]
    biases: Tid | None = None
    group_size: int32 = 0
    bits: int32 = 0
    mode: string
    transpose: bool = True


@dataclass(kw_only=True)
class Int8QuantizedMatmulParams(Table):
    """x [..., K] @ w.T for a matrix w [N, K] in affine packing, with activations in 8 bits: the result is [..., N] in the
    dtype of x. Each group of `group_size` values of a row of x is rounded to integers in [-127, 127] with a scale of its
    own. custom_kernel_ops/int8_activations.py defines the result, except for the rounding of sums.
    """

    x: Tid
    w: Tid
    scales: Tid
    biases: Tid
    out: Output[Tid]
    group_size: int32 = 0
    bits: int32 = 0


@dataclass(kw_only=True)
class GatherQmmParams(Table):
    x: Tid
    w: Tid
    scales: Tid
    out: Output[Tid]
    mode: string
    biases: Tid | None = None
    lhs_indices: Tid | None = None
    rhs_indices: Tid | None = None
    transpose: bool = True
    group_size: int32 = 0
    bits: int32 = 0
    sorted_indices: bool = False
    sorted_indices_flag: IntOrVid | None = None


@dataclass(kw_only=True)
class RandomBitsParams(Table):
    """Random bits. The key is random::key(seed). If `seed` is absent, the key is the next
    one of MLX's own key sequence.
    """

    out: Output[Tid]
    shape: list[IntOrVid]
    seed: Vid | None = None
    width: int32 = 4  # bytes per element: 1, 2 or 4


@dataclass(kw_only=True)
class SampleParams(Table):
    """Draws a token from each row of logits [B, V] in float32, float16 or bfloat16. The result is int64 [B].
    custom_kernel_ops/sample.py defines which token is drawn. temperature, top_p and min_p are float32, and seed and
    top_k are int64. Each of these five has one element, or one for each row. Without `seed`, the draw takes the next
    key of MLX's own key sequence.
    """

    logits: Tid
    temperature: Tid
    top_p: Tid
    seed: Tid | None = None
    top_k: Tid | None = None
    min_p: Tid | None = None
    out: Output[Tid]


@dataclass(kw_only=True)
class MaskLogitsParams(Table):
    """Sets logits [B, V], floats, to -inf where the bit of a token is 0. The result is float32. Bit v % 32 of the integer
    allowed[b, v / 32] belongs to token v. `allowed` is int32 [B, ceil(V / 32)].
    """

    logits: Tid
    allowed: Tid
    out: Output[Tid]


@dataclass(kw_only=True)
class RowSdpaParams(Table):
    """Attention of q [1, H, N, D], one query for each of N rows. Query i attends to the keys k[:, :, starts[i]:stops[i]]
    and to the values at the same indices of v. k is [1, G, L, D] and v is [1, G, L, E]; they are read in their own dtype
    or cast to that of q. The result is [1, H, N, E]. `masks` is empty or has a mask for each query, bool or float, which
    broadcasts to [1, H, 1, stops[i] - starts[i]].
    """

    q: Tid
    k: Tid
    v: Tid
    out: Output[Tid]
    starts: list[IntOrVid]
    stops: list[IntOrVid]
    masks: list[Tid] | None = None
    scale: float = 0.0


@dataclass(kw_only=True)
class RowUpdateParams(Table):
    """Sets dst[:, :, starts[i]] to update[:, :, i] for each i. `update` [B, G, N, D] has the dtype of dst [B, G, L, D]."""

    dst: Tid
    update: Tid
    out: Output[Tid]
    starts: list[IntOrVid]


@dataclass(kw_only=True)
class QuantizeEntriesParams(Table):
    """Quantizes the tensors `xs` [B, H, S, ...], concatenated along their last axis, in groups of this axis."""

    xs: list[Tid]
    out: Output[Tid]  # uint8 [B, H, S, bytes]
    out_scales: Output[Tid]  # [B, H, S, 2 * groups]: the scales, then the biases
    group_size: int32 = 0
    bits: int32 = 0
    rotate: bool = False
    scale_type: int8 = 0


@dataclass(kw_only=True)
class QuantizedSdpaParams(Table):
    """Attention of q [1, H, S, D] over the entries [start, stop) of a quantized cache [1, G, N, bytes]. The keys are the
    first D numbers of an entry, and the values are `value_size` numbers from `value_offset` on.
    """

    q: Tid
    cache: Tid
    scales: Tid
    out: Output[Tid]
    start: IntOrVid
    stop: IntOrVid
    value_offset: int32 = 0
    value_size: int32 = 0
    group_size: int32 = 0
    bits: int32 = 0
    rotate: bool = False
    scale: float = 0.0
    mask: Tid | None = None
    causal: bool = False


@dataclass(kw_only=True)
class GatedRecurrenceParams(Table):
    """For each of S tokens: state = exp(decay) * state, then state += key ⊗ value, then out = query @ state. query and key
    are [B, G, S, K], value and out [B, H, S, V], and state and out_state [B, H, K, V]; G divides H. decay is [B, H, S],
    or [B, H, S, K] for a decay of each channel of the keys. With beta [B, H, S], which is the gated delta rule,
    beta * (value - key @ state) takes the place of the value.
    """

    query: Tid
    key: Tid
    value: Tid
    decay: Tid
    beta: Tid | None = None
    state: Tid
    out: Output[Tid]
    out_state: Output[Tid]


@dataclass(kw_only=True)
class SelectiveScanParams(Table):
    """For each of S tokens: state = exp(step * rates) * state + step * x ⊗ key, then out = state @ query. x, step and out
    are [B, S, D], key and query [B, S, N], rates [D, N], and state and out_state [B, D, N].
    """

    x: Tid
    step: Tid
    key: Tid
    query: Tid
    rates: Tid
    state: Tid
    out: Output[Tid]
    out_state: Output[Tid]


@dataclass(kw_only=True)
class ReadLayerStateParams(Table):
    """Copies the states of B rows from `states` [1, 1, R, N], of any dtype. The result [B, N] has states[0, 0, row[i]] at
    index i, or zeros if start[i] is 0. start and row are int64 [B]. Without row, R is 1.
    """

    states: Tid
    start: Tid
    row: Tid | None = None
    out: Output[Tid]


@dataclass(kw_only=True)
class AllSumParams(Table):
    """The sum of x over the processes of a group. All processes get the same bits, which do not depend on the shape of x.
    The program is for the process `rank` of a group of `size` processes.
    """

    x: Tid
    out: Output[Tid]
    rank: int32 = 0
    size: int32 = 0


@dataclass(kw_only=True)
class AllGatherParams(Table):
    """The arrays x of all processes of a group, concatenated along `axis` in the order of the ranks."""

    x: Tid
    out: Output[Tid]
    axis: int32 = 0
    rank: int32 = 0
    size: int32 = 0


@dataclass(kw_only=True)
class ScanParams(Table):
    """Iterates over axis `scan_axis` of the arrays `originals`. Each iteration first sets
    `sliced[i]` to the slice of `originals[i]` at the current index, and then runs chain
    `body_chain_idx`. The slots `carry` keep their values from one iteration to the next.
    The chain writes its results to the slots `outputs`. At the end, each of these slots
    gets the results of all iterations, stacked along `scan_axis`.
    """

    originals: list[Tid]
    sliced: Output[list[Tid]]
    outputs: Output[list[Tid]]
    carry: InOut[list[Tid]]
    body_chain_idx: int32 = 0
    scan_axis: int32 = 1


@dataclass(kw_only=True)
class IfParams(Table):
    """Runs one of two chains. Both write the same slots."""

    cond: IntOrVid
    then_chain_idx: uint32 = 0
    else_chain_idx: uint32 = 0


@dataclass(kw_only=True)
class WhileParams(Table):
    """A while loop. Chain `cond_chain_idx` runs before each iteration and writes `cond`;
    the loop ends when `cond` is 0. Chain `body_chain_idx` is the body. The slots `carry`
    keep their values from one iteration to the next.
    """

    cond: IntOrVid
    carry: InOut[list[Tid]]
    cond_chain_idx: uint32 = 0
    body_chain_idx: uint32 = 0


@dataclass(kw_only=True)
class MetalKernelParams(Table):
    """mlx::core::fast::metal_kernel. `output_shapes_flat` concatenates the output
    shapes, and `output_shape_lengths` contains the rank of each shape. The template
    arguments are three lists of the same length: names, kinds and values. Kind 0 is an
    int, 1 a bool, 2 a ScalarType.
    """

    name: string
    source: string
    inputs: list[Tid]
    outputs: Output[list[Tid]]
    grid: list[IntOrVid]
    threadgroup: list[IntOrVid]
    header: string | None = None
    input_names: list[string] | None = None
    output_names: list[string] | None = None
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    output_shapes_flat: list[IntOrVid] | None = None
    output_shape_lengths: list[int32] | None = None
    output_dtypes: list[int8] | None = None
    template_arg_names: list[string] | None = None
    template_arg_kinds: list[int8] | None = None
    template_arg_values: list[int32] | None = None
    init_value: float | None = None


@dataclass(kw_only=True)
class Instruction(Table):
    op: Op


@dataclass(kw_only=True)
class InstructionChain(Table):
    """Instructions that run in order."""

    instructions: list[Instruction]


@dataclass(kw_only=True)
class ShapeDim(Table):
    value: int32 = -1  # -1: dynamic, within the bounds
    min_value: int32 = 0
    max_value: int32 = -1  # -1: unbounded


@dataclass(kw_only=True)
class TensorMeta(Table):
    shape: list[ShapeDim]
    scalar_type: int8 = 0
    dim_order: list[uint8] | None = None


class SlotType(IntEnum):
    TensorSlot = 0
    IntValueSlot = 1
    FloatValueSlot = 2
    BoolValueSlot = 3


@dataclass(kw_only=True)
class SlotVariant(Table):
    idx: uint32 = 0
    slot_type: SlotType = SlotType.TensorSlot


@dataclass(kw_only=True)
class NamedSlot(Table):
    """The name of a slot. For constants and mutable buffers, it is also the key in
    ExecuTorch's named data map.
    """

    name: string
    slot: SlotVariant


@dataclass(kw_only=True)
class Replacement(Table):
    """Instructions [first, first + count) of a chain compute a result for which `instruction` would suffice: an extension
    that ExecuTorch's own MLX delegate lacks. This runtime runs `instruction` in their place. Other runtimes do not read
    this table. No instruction outside the range reads what the range writes, except for the results of `instruction`.
    """

    chain: uint32 = 0
    first: uint32 = 0
    count: uint32 = 0
    instruction: Instruction


@dataclass(kw_only=True)
class MLXGraph(Table):
    version: string | None = None
    num_constant_tensors: uint32 = 0
    num_input_tensors: uint32 = 0
    num_output_tensors: uint32 = 0
    num_mutable_buffer_tensors: uint32 = 0
    num_temp_tensors: uint32 = 0
    num_values: uint32 = 0
    instruction_chains: list[InstructionChain]
    main_chain_idx: uint32 = 0  # runs in every call
    init_chain_idx: int32 = -1  # runs once at load; -1: none
    input_map: list[SlotVariant] | None = None
    output_map: list[SlotVariant] | None = None
    mutable_buffer_map: list[SlotVariant] | None = None
    named_slots: list[NamedSlot] | None = None
    tensor_meta: list[TensorMeta] | None = None  # by tensor slot; temporaries have none
    replacements: list[Replacement] | None = None  # an extension; the ranges do not overlap


# fmt: off
class NoopNode(EmptyNode, Op): OP_TYPE = 1
class IdCopyNode(UnaryNode, Op): OP_TYPE = 2
class AddmmNode(AddmmParams, Op): OP_TYPE = 3
class ItemIntNode(ItemIntParams, Op): OP_TYPE = 4
class ExpandDimsNode(AxisNode, Op): OP_TYPE = 5
class TileNode(TileParams, Op): OP_TYPE = 6
class TakeAlongAxisNode(TakeAlongAxisParams, Op): OP_TYPE = 7
class TakeNode(TakeParams, Op): OP_TYPE = 8
class RMSNormNode(RMSNormParams, Op): OP_TYPE = 9
class LayerNormNode(LayerNormParams, Op): OP_TYPE = 10
class RopeNode(RopeParams, Op): OP_TYPE = 11
class SdpaNode(SdpaParams, Op): OP_TYPE = 12
class AddNode(BinaryNode, Op): OP_TYPE = 13
class AddIntNode(BinaryIntNode, Op): OP_TYPE = 14
class SubtractIntNode(BinaryIntNode, Op): OP_TYPE = 15
class MultiplyIntNode(BinaryIntNode, Op): OP_TYPE = 16
class FloorDivideIntNode(BinaryIntNode, Op): OP_TYPE = 17
class SymSizeNode(SymSizeParams, Op): OP_TYPE = 18
class MultiplyNode(BinaryNode, Op): OP_TYPE = 19
class DivideNode(BinaryNode, Op): OP_TYPE = 20
class SubtractNode(BinaryNode, Op): OP_TYPE = 21
class Conv1DNode(Conv1DParams, Op): OP_TYPE = 22
class Conv2DNode(Conv2DParams, Op): OP_TYPE = 23
class Conv3DNode(Conv3DParams, Op): OP_TYPE = 24
class GeluNode(GeluParams, Op): OP_TYPE = 25
class ARangeNode(ARangeParams, Op): OP_TYPE = 26
class SiluNode(UnaryNode, Op): OP_TYPE = 27
class SigmoidNode(UnaryNode, Op): OP_TYPE = 28
class TanhNode(UnaryNode, Op): OP_TYPE = 29
class SqueezeNode(SqueezeParams, Op): OP_TYPE = 30
class SplitNode(SplitParams, Op): OP_TYPE = 31
class RsqrtNode(UnaryNode, Op): OP_TYPE = 32
class MaximumNode(BinaryNode, Op): OP_TYPE = 33
class MinimumNode(BinaryNode, Op): OP_TYPE = 34
class LogNode(UnaryNode, Op): OP_TYPE = 35
class SoftmaxNode(SoftmaxParams, Op): OP_TYPE = 36
class BroadcastToNode(ShapeNode, Op): OP_TYPE = 37
class PadNode(PadParams, Op): OP_TYPE = 38
class WhereNode(WhereParams, Op): OP_TYPE = 39
class ReshapeNode(ShapeNode, Op): OP_TYPE = 40
class TransposeNode(TransposeParams, Op): OP_TYPE = 41
class AsStridedNode(AsStridedParams, Op): OP_TYPE = 42
class ContiguousNode(UnaryNode, Op): OP_TYPE = 43
class GatherNode(GatherParams, Op): OP_TYPE = 44
class SliceNode(SliceParams, Op): OP_TYPE = 45
class AsTypeNode(AsTypeParams, Op): OP_TYPE = 46
class ConcatenateNode(JoinNode, Op): OP_TYPE = 47
class FullNode(FullParams, Op): OP_TYPE = 48
class FullLikeNode(FullLikeParams, Op): OP_TYPE = 49
class ArgmaxNode(ArgReduceNode, Op): OP_TYPE = 50
class SliceUpdateNode(SliceUpdateParams, Op): OP_TYPE = 51
class IndexCopyNode(IndexCopyParams, Op): OP_TYPE = 52
class DequantizeNode(DequantizeParams, Op): OP_TYPE = 53
class LessNode(BinaryNode, Op): OP_TYPE = 54
class LessEqualNode(BinaryNode, Op): OP_TYPE = 55
class GreaterNode(BinaryNode, Op): OP_TYPE = 56
class GreaterEqualNode(BinaryNode, Op): OP_TYPE = 57
class EqualNode(BinaryNode, Op): OP_TYPE = 58
class NotEqualNode(BinaryNode, Op): OP_TYPE = 59
class LogicalNotNode(UnaryNode, Op): OP_TYPE = 60
class LogicalAndNode(BinaryNode, Op): OP_TYPE = 61
class LogicalOrNode(BinaryNode, Op): OP_TYPE = 62
class TriNode(TriParams, Op): OP_TYPE = 63
class TrilNode(TriangleNode, Op): OP_TYPE = 64
class TriuNode(TriangleNode, Op): OP_TYPE = 65
class FloorNode(UnaryNode, Op): OP_TYPE = 66
class CeilNode(UnaryNode, Op): OP_TYPE = 67
class SquareNode(UnaryNode, Op): OP_TYPE = 68
class ExpNode(UnaryNode, Op): OP_TYPE = 69
class SinNode(UnaryNode, Op): OP_TYPE = 70
class CosNode(UnaryNode, Op): OP_TYPE = 71
class TanNode(UnaryNode, Op): OP_TYPE = 72
class ArcsinNode(UnaryNode, Op): OP_TYPE = 73
class ArccosNode(UnaryNode, Op): OP_TYPE = 74
class ArctanNode(UnaryNode, Op): OP_TYPE = 75
class SinhNode(UnaryNode, Op): OP_TYPE = 76
class CoshNode(UnaryNode, Op): OP_TYPE = 77
class ArcsinhNode(UnaryNode, Op): OP_TYPE = 78
class ArccoshNode(UnaryNode, Op): OP_TYPE = 79
class ArctanhNode(UnaryNode, Op): OP_TYPE = 80
class Log2Node(UnaryNode, Op): OP_TYPE = 81
class Log10Node(UnaryNode, Op): OP_TYPE = 82
class Log1pNode(UnaryNode, Op): OP_TYPE = 83
class ErfNode(UnaryNode, Op): OP_TYPE = 84
class Expm1Node(UnaryNode, Op): OP_TYPE = 85
class RoundNode(RoundParams, Op): OP_TYPE = 86
class ReciprocalNode(UnaryNode, Op): OP_TYPE = 87
class SqrtNode(UnaryNode, Op): OP_TYPE = 88
class AbsNode(UnaryNode, Op): OP_TYPE = 89
class NegNode(UnaryNode, Op): OP_TYPE = 90
class Atan2Node(BinaryNode, Op): OP_TYPE = 91
class LogAddExpNode(BinaryNode, Op): OP_TYPE = 92
class FloorDivideNode(BinaryNode, Op): OP_TYPE = 93
class PowerNode(BinaryNode, Op): OP_TYPE = 94
class LogSumExpNode(ReduceNode, Op): OP_TYPE = 95
class SumNode(ReduceNode, Op): OP_TYPE = 96
class MeanNode(ReduceNode, Op): OP_TYPE = 97
class VarNode(VarianceNode, Op): OP_TYPE = 98
class StdNode(VarianceNode, Op): OP_TYPE = 99
class ProdNode(ReduceNode, Op): OP_TYPE = 100
class MaxNode(ReduceNode, Op): OP_TYPE = 101
class MinNode(ReduceNode, Op): OP_TYPE = 102
class ArgminNode(ArgReduceNode, Op): OP_TYPE = 103
class MedianNode(ReduceNode, Op): OP_TYPE = 104
class ModIntNode(BinaryIntNode, Op): OP_TYPE = 105
class RemainderNode(BinaryNode, Op): OP_TYPE = 106
class ConvTranspose1DNode(ConvTranspose1DParams, Op): OP_TYPE = 107
class ConvTranspose2DNode(ConvTranspose2DParams, Op): OP_TYPE = 108
class ConvTranspose3DNode(ConvTranspose3DParams, Op): OP_TYPE = 109
class ClipNode(ClipParams, Op): OP_TYPE = 110
class CumsumNode(CumsumParams, Op): OP_TYPE = 111
class StackNode(JoinNode, Op): OP_TYPE = 112
class SignNode(UnaryNode, Op): OP_TYPE = 113
class AnyNode(ReduceNode, Op): OP_TYPE = 114
class AllNode(ReduceNode, Op): OP_TYPE = 115
class RepeatNode(RepeatParams, Op): OP_TYPE = 116
class SortNode(AxisNode, Op): OP_TYPE = 117
class ArgsortNode(AxisNode, Op): OP_TYPE = 118
class PartitionNode(KthNode, Op): OP_TYPE = 119
class ArgPartitionNode(KthNode, Op): OP_TYPE = 120
class QuantizedMatmulNode(QuantizedMatmulParams, Op): OP_TYPE = 121
class ScatterAddNode(ScatterAddParams, Op): OP_TYPE = 122
class GatherMmNode(GatherMmParams, Op): OP_TYPE = 123
class GatherQmmNode(GatherQmmParams, Op): OP_TYPE = 124
class ScanNode(ScanParams, Op): OP_TYPE = 125
class MetalKernelNode(MetalKernelParams, Op): OP_TYPE = 126
class BitwiseInvertNode(UnaryNode, Op): OP_TYPE = 127
class RollNode(RollParams, Op): OP_TYPE = 128
class BitwiseAndNode(BinaryNode, Op): OP_TYPE = 129
class BitwiseOrNode(BinaryNode, Op): OP_TYPE = 130
class BitwiseXorNode(BinaryNode, Op): OP_TYPE = 131
class IfNode(IfParams, Op): OP_TYPE = 132
class RandomBitsNode(RandomBitsParams, Op): OP_TYPE = 133
class UpdateAndAttendNode(UpdateAndAttendParams, Op): OP_TYPE = 134
class TruncNode(UnaryNode, Op): OP_TYPE = 135
class FlipNode(FlipParams, Op): OP_TYPE = 136
class ErfInvNode(UnaryNode, Op): OP_TYPE = 200
class WhileNode(WhileParams, Op): OP_TYPE = 201
class SampleNode(SampleParams, Op): OP_TYPE = 210
class MaskLogitsNode(MaskLogitsParams, Op): OP_TYPE = 211
class RowSdpaNode(RowSdpaParams, Op): OP_TYPE = 220
class RowUpdateNode(RowUpdateParams, Op): OP_TYPE = 221
class Int8QuantizedMatmulNode(Int8QuantizedMatmulParams, Op): OP_TYPE = 230
class GatedRecurrenceNode(GatedRecurrenceParams, Op): OP_TYPE = 240
class SelectiveScanNode(SelectiveScanParams, Op): OP_TYPE = 241
class ReadLayerStateNode(ReadLayerStateParams, Op): OP_TYPE = 242
class AllSumNode(AllSumParams, Op): OP_TYPE = 250
class AllGatherNode(AllGatherParams, Op): OP_TYPE = 251
class QuantizeEntriesNode(QuantizeEntriesParams, Op): OP_TYPE = 252
class QuantizedSdpaNode(QuantizedSdpaParams, Op): OP_TYPE = 253
# fmt: on

FIRST_EXTENSION = 200
"""The first tag of the extensions: nodes that ExecuTorch's own MLX delegate lacks."""

OPS: dict[int, type[Op]] = {op.OP_TYPE: op for op in Op.__subclasses__()}
"""Every op by its tag in the union."""
