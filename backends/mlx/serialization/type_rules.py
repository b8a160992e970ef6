"""The rule that gives the types of an IR node's results, for each IR node.

A table of the schema holds the fields of one or more IR nodes: `UnaryNode` is the table of `AbsNode`, `NegNode` and
others. `TABLE_RULES` has the rule that the IR nodes of a table share. `OP_RULES` has the rules of single IR nodes,
which take precedence. The results of an IR node without a rule have an unknown type.
"""

from __future__ import annotations

from . import ir, result_types
from .result_types import Rule
from .types import at_least_float


def rule_of(op: type[ir.Op]) -> Rule | None:
    """Return the rule for an IR node, or None if there is none."""
    return OP_RULES.get(op) or TABLE_RULES.get(op.TABLE)


TABLE_RULES: dict[type[ir.Table], Rule] = {
    ir.UnaryNode: result_types.floating,
    ir.BinaryNode: result_types.binary,
    ir.ReduceNode: result_types.reduction(at_least_float),
    ir.VarianceNode: result_types.reduction(at_least_float),
    ir.ArgReduceNode: result_types.arg_reduction,
    ir.AxisNode: result_types.same_as("x"),
    ir.KthNode: result_types.same_as("x"),
    ir.TriangleNode: result_types.same_as("x"),
    # elementwise
    ir.ClipParams: result_types.clip,
    ir.GeluParams: result_types.floating,
    ir.RoundParams: result_types.same_as("x"),
    ir.WhereParams: result_types.where,
    ir.AsTypeParams: result_types.as_type,
    ir.CumsumParams: result_types.same_as("x"),
    # shape
    ir.SqueezeParams: result_types.squeeze,
    ir.TransposeParams: result_types.transpose,
    ir.FlipParams: result_types.same_as("x"),
    ir.TileParams: result_types.tile,
    ir.RepeatParams: result_types.repeat,
    ir.RollParams: result_types.same_as("x"),
    ir.SplitParams: result_types.split,
    ir.PadParams: result_types.pad,
    ir.AsStridedParams: result_types.as_strided,
    # index
    ir.TakeParams: result_types.take,
    ir.TakeAlongAxisParams: result_types.take_along_axis,
    ir.GatherParams: result_types.gather,
    ir.SliceParams: result_types.slice_,
    ir.SliceUpdateParams: result_types.same_as("dst"),
    ir.IndexCopyParams: result_types.same_as("dst"),
    ir.ScatterAddParams: result_types.same_as("x"),
    # create, random
    ir.ARangeParams: result_types.arange,
    ir.FullParams: result_types.full,
    ir.FullLikeParams: result_types.full_like,
    ir.TriParams: result_types.tri,
    ir.RandomBitsParams: result_types.random_bits,
    ir.SampleParams: result_types.sample,
    ir.MaskLogitsParams: result_types.mask_logits,
    # groups of processes
    ir.AllSumParams: result_types.same_as("x"),
    ir.AllGatherParams: result_types.all_gather,
    # linalg, norm, attention
    ir.AddmmParams: result_types.addmm,
    ir.GatherMmParams: result_types.gather_mm,
    ir.SoftmaxParams: result_types.floating,
    ir.RMSNormParams: result_types.same_as("x"),
    ir.LayerNormParams: result_types.same_as("x"),
    ir.RopeParams: result_types.same_as("x"),
    ir.SdpaParams: result_types.attention,
    ir.UpdateAndAttendParams: result_types.update_and_attend,
    ir.RowSdpaParams: result_types.attention,
    ir.RowUpdateParams: result_types.same_as("dst"),
    ir.QuantizeEntriesParams: result_types.quantize_entries,
    ir.QuantizedSdpaParams: result_types.quantized_sdpa,
    # recurrence
    ir.GatedRecurrenceParams: result_types.gated_recurrence,
    ir.SelectiveScanParams: result_types.selective_scan,
    ir.ReadLayerStateParams: result_types.read_layer_state,
    # training
    ir.SdpaGradientsParams: result_types.attention_gradients,
    ir.RMSNormGradientParams: result_types.same_as("x"),
    ir.CrossEntropyParams: result_types.cross_entropy,
    ir.CrossEntropyGradientParams: result_types.same_as("logits"),
    ir.SiluGradientParams: result_types.same_as("x"),
    # conv
    ir.Conv1DParams: result_types.convolution(""),
    ir.Conv2DParams: result_types.convolution("hw"),
    ir.Conv3DParams: result_types.convolution("dhw"),
    ir.ConvTranspose1DParams: result_types.convolution("", transposed=True),
    ir.ConvTranspose2DParams: result_types.convolution("hw", transposed=True),
    ir.ConvTranspose3DParams: result_types.convolution("dhw", transposed=True),
    # quant
    ir.DequantizeParams: result_types.dequantize,
    ir.QuantizedMatmulParams: result_types.quantized_matmul,
    ir.Int8QuantizedMatmulParams: result_types.int8_quantized_matmul,
    ir.GatherQmmParams: result_types.gather_qmm,
}


def _rule_by_op(*rules: tuple[Rule, tuple[type[ir.Op], ...]]) -> dict[type[ir.Op], Rule]:
    return {op: rule for rule, ops in rules for op in ops}


OP_RULES: dict[type[ir.Op], Rule] = _rule_by_op(
    # UnaryNode
    (result_types.same_as("x"), (ir.IdCopyNode, ir.ContiguousNode, ir.AbsNode, ir.NegNode, ir.SignNode, ir.SquareNode)),
    (result_types.same_as("x"), (ir.FloorNode, ir.CeilNode, ir.TruncNode, ir.BitwiseInvertNode)),
    (result_types.with_dtype("bool"), (ir.LogicalNotNode,)),
    # BinaryNode
    (result_types.binary_floating, (ir.DivideNode, ir.Atan2Node, ir.LogAddExpNode)),
    (result_types.comparison, (ir.EqualNode, ir.NotEqualNode, ir.LessNode, ir.LessEqualNode)),
    (result_types.comparison, (ir.GreaterNode, ir.GreaterEqualNode, ir.LogicalAndNode, ir.LogicalOrNode)),
    # ReduceNode
    (result_types.reduction(lambda dtype: "bool"), (ir.AllNode, ir.AnyNode)),
    (result_types.reduction(lambda dtype: dtype), (ir.MaxNode, ir.MinNode)),
    (result_types.reduction(result_types.summed_dtype), (ir.SumNode, ir.ProdNode)),
    # AxisNode, KthNode, ShapeNode, JoinNode
    (result_types.expand_dims, (ir.ExpandDimsNode,)),
    (result_types.with_dtype("uint32"), (ir.ArgsortNode, ir.ArgPartitionNode)),
    (result_types.reshape, (ir.ReshapeNode,)),
    (result_types.broadcast_to, (ir.BroadcastToNode,)),
    (result_types.concatenate, (ir.ConcatenateNode,)),
    (result_types.stack, (ir.StackNode,)),
)

# IR nodes whose results share the memory of their first operand.
VIEWS = {
    ir.IdCopyNode,
    ir.ExpandDimsNode,
    ir.SqueezeNode,
    ir.ReshapeNode,
    ir.BroadcastToNode,
    ir.TransposeNode,
    ir.AsStridedNode,
    ir.SliceNode,
    ir.SplitNode,
}
