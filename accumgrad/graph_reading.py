"""Reads off the graph what runs before an op, and what an op writes to.

It knows nothing of gradients or cycles.
"""

from typing import Iterable, Iterator, List, Sequence, Set

import tensorflow.compat.v1 as tf

# Ops that give their variable's value, or what follows from it, and leave it
# as it is.  (Of a resource, Identity gives the handle.)
_READS = ("ReadVariableOp", "Identity", "Shape", "VariableShape",
          "ResourceGather", "ResourceGatherNd", "IsVariableInitialized",
          "VarIsInitializedOp")

# Ops by which control flow v1 hands a variable on, into a branch or a loop.
_HANDS_ON = ("Switch", "RefSwitch", "Enter", "RefEnter")

_VARIABLES = ("Variable", "VariableV2", "VarHandleOp")


def upstream(operations: Iterable[tf.Operation],
             stop: Iterable[tf.Operation] = ()) -> Iterator[tf.Operation]:
    """Yields ops and all that runs before them, once each, not past `stop`."""
    seen, stack = {op.name for op in stop}, list(operations)
    while stack:
        op = stack.pop()
        if op.name not in seen:
            seen.add(op.name)
            yield op
            stack.extend(directly_before(op))


def directly_before(op: tf.Operation) -> List[tf.Operation]:
    """Returns the ops for which `op` waits."""
    return [tensor.op for tensor in op.inputs] + list(op.control_inputs)


def rebuild(tensors: Sequence[tf.Tensor]) -> List[tf.Tensor]:
    """Returns the tensors made anew where it is called, of the same values.

    Args:
        tensors: What depends on nothing but constants and variables, through
            ops without an effect.  Large arrays are not copied: constants
            stay the same ops.
    """
    rebuilt = {}

    def rebuild_tensor(tensor: tf.Tensor) -> tf.Tensor:
        op = tensor.op
        if op.type in _VARIABLES or op.type == "Const":
            return tensor
        if op.name not in rebuilt:
            rebuilt[op.name] = tf.get_default_graph().create_op(
                op.type, [rebuild_tensor(before) for before in op.inputs],
                [output.dtype for output in op.outputs],
                # Where it was placed need not be where this is.
                attrs={name: value for name, value
                       in op.node_def.attr.items()
                       if not name.startswith("_")})
        return rebuilt[op.name].outputs[tensor.value_index]
    return [rebuild_tensor(tensor) for tensor in tensors]


def only_reads(op: tf.Operation) -> bool:
    """Returns whether `op` leaves variables that it takes as they are."""
    if op.type == "Identity":
        return op.inputs[0].dtype != tf.resource
    return op.type in _READS


def is_reference(tensor: tf.Tensor) -> bool:
    """Returns whether `tensor` is a reference variable's own memory."""
    return tensor.dtype != tensor.dtype.base_dtype


def has_effect(op: tf.Operation) -> bool:
    """Returns whether `op` does more than to compute its outputs."""
    if op.type in _READS + _VARIABLES:
        return False
    return op.op_def.is_stateful or any(
        argument.is_ref for argument in op.op_def.input_arg)


def find_written(operations: Iterable[tf.Operation]) -> Set[str]:
    """Returns the names of the variables' ops that `operations` may write to.

    An op that calls a function may write to each variable handed to it.
    """
    written = set()
    for op in operations:
        if only_reads(op) or _hands_on(op):
            continue
        takes_references = any(
            argument.is_ref for argument in op.op_def.input_arg)
        for tensor in op.inputs:
            if tensor.dtype == tf.resource or (
                    takes_references and is_reference(tensor)):
                written.add(_source(tensor).op.name)
    return written


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that is handed on as `tensor`."""
    while _hands_on(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor


def _hands_on(op: tf.Operation) -> bool:
    return op.type in _HANDS_ON or (
        op.type == "Identity" and op.inputs[0].dtype == tf.resource)
