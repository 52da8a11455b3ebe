"""Reads a gradient's graph: what is it a sum of?

A term is a matrix product over the batch, or the same in every micro-batch,
or something else.  Whatever is not recognised for certain is something else.

This module reads graphs and adds no op to them; it knows nothing of
variables' state, optimizers or cycles.
"""

import collections
from typing import Iterable, List, NamedTuple, Optional, Set, Tuple, Union

import tensorflow.compat.v1 as tf

from accumgrad import graph_reading

# A gradient that sums more is not worth storing; and terms that are shared
# may be exponentially many.
_MAX_TERMS = 1000

# Ops whose outputs differ from run to run, or depend on which branch ran,
# though TensorFlow does not call them stateful.
_VARYING = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault",
            "PyFuncStateless", "Switch", "RefSwitch", "Merge", "RefMerge",
            "Enter", "RefEnter", "Exit", "RefExit", "NextIteration",
            "RefNextIteration", "LoopCond", "If", "StatelessIf", "Case",
            "StatelessCase", "While", "StatelessWhile", "PartitionedCall",
            "SymbolicGradient", "RemoteCall", "BatchFunction", "ReadFile",
            "MatchingFiles")

# Ops that raise or write, though TensorFlow 1 does not call them stateful.
_EFFECTS = ("CheckNumerics", "CheckNumericsV2", "EnsureShape", "WriteFile")


class Product(NamedTuple):
    """A matrix product `left^T right`, once each factor is made a matrix.

    Attributes:
        left: Tensor of `num_rows * num_left` elements.
        right: Tensor of `num_rows * num_right` elements.
        num_left: Rows of the product, an int.
        num_right: Columns of the product, an int.
        num_rows: Over how many the product sums, an int where that is known
            statically, else `None`.
        transpose_left: Whether `left` is `[num_left, num_rows]` rather than
            rows of `num_left`.
        transpose_right: Likewise for `right`.
        op_type: The TensorFlow op that makes the product.
    """
    left: tf.Tensor
    right: tf.Tensor
    num_left: int
    num_right: int
    num_rows: Optional[int]
    transpose_left: bool
    transpose_right: bool
    op_type: str


class Contraction(NamedTuple):
    """A gradient that is a sum of products and of constant terms.

    Attributes:
        products: The `Product`s, at least one, of the same size and dtype.
        constants: Tensors that are the same in every micro-batch, of as many
            elements as the product.
    """
    products: List[Product]
    constants: List[tf.Tensor]


def find_contraction(gradient: tf.Tensor, shape: tf.TensorShape,
                     constant_ops: Set[str]) -> Union[Contraction, str]:
    """Returns the `Contraction` that `gradient` is, or why it is none.

    Args:
        gradient: A `Tensor`.
        shape: The static shape that it should have, its variable's.
        constant_ops: Of `find_constant_ops`.

    Returns:
        A `Contraction`, or a string that says what is in the way.
    """
    if not gradient.shape.is_fully_defined():
        return "its static shape is unknown"
    if gradient.shape.as_list() != shape.as_list():
        return "its shape is not the variable's"
    if not gradient.dtype.is_floating:
        return f"its dtype is {gradient.dtype.name}"
    products: List[Product] = []
    constants: List[tf.Tensor] = []
    terms = [(gradient, shape.as_list())]
    while terms:
        term, term_shape = terms.pop()
        if len(terms) + len(products) + len(constants) >= _MAX_TERMS:
            return f"it sums more than {_MAX_TERMS} terms"
        if term.op.name in constant_ops:
            constants.append(term)
            continue
        parts = _split(term, term_shape)
        if parts:
            terms.extend(reversed(parts))
            continue
        product = _as_product(term, term_shape)
        if product is None:
            return f"{term.op.type} is no matrix product over the batch"
        products.append(product)
    if not products:
        return "it is the same in every micro-batch"
    if len({(product.num_left, product.num_right, product.left.dtype)
            for product in products}) > 1:
        return "it sums matrix products of different sizes or dtypes"
    effect = _find_lost_effect(gradient, products)
    if effect is not None:
        return f"{effect} must run with it in every micro-batch"
    return Contraction(products, constants)


def find_constant_ops(operations: Iterable[tf.Operation],
                      variables: Iterable[tf.Variable]) -> Set[str]:
    """Returns the names of ops whose outputs stay the same through a cycle.

    They depend on constants and on `variables` alone, through ops without
    state.

    Args:
        operations: The ops that run with each micro-batch; those upstream of
            them are meant too.
        variables: The variables that are trained.  They stay as they are
            through a cycle, but for those that one of the ops assigns to.
    """
    running = list(graph_reading.upstream(operations))
    steady = {variable.op.name for variable in variables}
    for op in running:
        if not graph_reading.only_reads(op):
            steady.difference_update(tensor.op.name for tensor in op.inputs)
    constant, varying = set(), []
    followers = collections.defaultdict(list)
    for op in running:
        constant.add(op.name)
        if op.name in steady:
            continue
        for before in graph_reading.directly_before(op):
            followers[before.name].append(op)
        if not (_is_pure(op) or (
                graph_reading.only_reads(op)
                and op.inputs[0].op.name in steady)):
            varying.append(op)
    while varying:
        op = varying.pop()
        if op.name in constant:
            constant.remove(op.name)
            varying.extend(followers[op.name])
    return constant


def _split(tensor: tf.Tensor,
           shape: List[int]) -> Optional[List[Tuple[tf.Tensor, List[int]]]]:
    """Returns what `tensor` is the sum of, up to shape and dtype, if it is.

    Args:
        tensor: A `Tensor`.
        shape: Its shape, a list, which may say more than the static one.

    Returns:
        A list of pairs of a tensor and its shape.
    """
    op = tensor.op
    if op.type in ("Identity", "AddN", "AccumulateNV2"):
        return [(part, shape) for part in op.inputs]
    if op.type in ("Add", "AddV2"):
        if all(_has_shape(part, shape) for part in op.inputs):
            return [(part, shape) for part in op.inputs]
    elif op.type in ("Reshape", "Cast", "Transpose"):
        before = op.inputs[0]
        if (before.shape.is_fully_defined()
                and before.dtype.is_floating and tensor.dtype.is_floating
                # A sum in float32 must not hold what float64 had to compute.
                and before.dtype.size <= max(tensor.dtype.size,
                                             tf.float32.size)
                and (op.type != "Transpose" or _keeps_order(op.inputs[1]))):
            return [(before, before.shape.as_list())]
    return None


def _has_shape(tensor: tf.Tensor, shape: List[int]) -> bool:
    return (tensor.shape.is_fully_defined()
            and tensor.shape.as_list() == shape)


def _keeps_order(permutation: tf.Tensor) -> bool:
    """Returns whether it is known to be 0, 1, ...; so is its inverse then."""
    if permutation.op.type == "InvertPermutation":
        permutation = permutation.op.inputs[0]
    order = tf.get_static_value(permutation)
    return order is not None and list(order) == list(range(len(order)))


def _as_product(tensor: tf.Tensor, shape: List[int]) -> Optional[Product]:
    """Returns the `Product` that `tensor`, of this shape, is, or None."""
    op = tensor.op
    if not tensor.dtype.is_floating or any(
            map(graph_reading.is_reference, op.inputs)):
        return None
    if op.type == "MatMul":
        return _matmul_product(op, shape)
    if op.type == "Conv2DBackpropFilter":
        return _filter_product(op, shape)
    return None


def _matmul_product(op: tf.Operation, shape: List[int]) -> Optional[Product]:
    left, right = op.inputs
    if [left.shape.rank, right.shape.rank] != [2, 2]:
        return None
    num_left, num_right = shape
    # `left^T right` wants `left` transposed, and `right` as it is.
    transpose_left = not op.get_attr("transpose_a")
    transpose_right = op.get_attr("transpose_b")
    num_rows = (left.shape.as_list()[1 if transpose_left else 0]
                or right.shape.as_list()[1 if transpose_right else 0])
    return Product(left, right, num_left, num_right, num_rows,
                   transpose_left, transpose_right, op.type)


def _filter_product(op: tf.Operation, shape: List[int]) -> Optional[Product]:
    """Returns a convolution's filter gradient as a product, where it is one.

    It is where the kernel covers the whole input, so that there is one
    position; and where the kernel has one pixel, so that every position is a
    row of its own.  In a convolution of groups neither holds.
    """
    images, _, gradient = op.inputs
    if (op.get_attr("data_format") != b"NHWC"
            or list(op.get_attr("dilations")) != [1, 1, 1, 1]
            or [images.shape.rank, gradient.shape.rank] != [4, 4]):
        return None
    height, width, channels, filters = shape
    batch, *positions, _ = gradient.shape.as_list()
    covers = (op.get_attr("padding") == b"VALID"
              and images.shape.as_list()[1:3] == [height, width]
              and positions == [1, 1])
    one_pixel = (height == width == 1 and None not in positions
                 and list(op.get_attr("strides")) == [1, 1, 1, 1]
                 and op.get_attr("padding") in (b"VALID", b"SAME"))
    if images.shape.as_list()[3] != channels or not (covers or one_pixel):
        return None
    num_rows = batch and batch * positions[0] * positions[1]
    return Product(images, gradient, height * width * channels, filters,
                   num_rows, False, False, op.type)


def _find_lost_effect(gradient: tf.Tensor,
                      products: List[Product]) -> Optional[str]:
    """Returns the type of an op that runs for `gradient` alone, or None.

    Only the factors are computed with each micro-batch.  What a user tied to
    the gradient itself by a control dependency, an assignment or a check,
    would no longer run.
    """
    factors = [factor.op for product in products
               for factor in (product.left, product.right)]
    kept = None
    for op in graph_reading.upstream([gradient.op], factors):
        if graph_reading.has_effect(op) or op.type in _EFFECTS:
            if kept is None:
                kept = {op.name for op in graph_reading.upstream(factors)}
            if op.name not in kept:
                return op.type
    return None


def _is_pure(op: tf.Operation) -> bool:
    """Returns whether `op` has no effect, and depends on its inputs alone."""
    return not (op.type in _VARYING or op.op_def.is_stateful or any(
        graph_reading.is_reference(tensor)
        or tensor.dtype in (tf.resource, tf.variant)
        for tensor in list(op.inputs) + list(op.outputs)))
