"""Holds gradients through a cycle: one class for each form of gradient.

Every accumulator has the same small interface:

    form, reason         what it is, and why
    dtype                of the sum
    micro_batch_bytes    what one micro-batch makes it store, in bytes
    zero_ops             empty it, and initialise it if it never was
    zero()               an op that does so, made where it is called
    is_finite()          whether one micro-batch's gradient has neither a NaN
                         nor an infinity, a scalar bool `Tensor`
    accumulate(weight)   an op that adds one micro-batch's gradient, times a
                         scalar `Tensor`; as it is where that is None
    read(total_weight)   the sum, a `Tensor` or `IndexedSlices`, of
                         micro-batches whose weights add up to that
    early_reads          what `read` made that must be evaluated before any
                         variable is updated

A micro-batch of weight zero counts for nothing, whatever its gradient is.
Sums are float32 where the gradient is float16 or bfloat16.  This is the only
module that creates variables; it knows of no optimizer, loss or cycle.
"""

from typing import Callable, List, Optional, Sequence, Set, Tuple, Union

import tensorflow.compat.v1 as tf

from accumgrad import contractions
from accumgrad import graph_reading
from accumgrad.annotations import Gradient
from accumgrad.annotations import GradsAndVars

# Stored elements up to which rows are never folded: a MB costs less than
# adding up a small table's rows at every micro-batch.
MIN_ELEMENTS_TO_FOLD = 2 ** 18

# Elements of a variable from which its gradient is worth being deferred: a
# smaller dense sum takes no longer than storing its factors does.
MIN_ELEMENTS_TO_DEFER = 2 ** 20

# Sums in these stop growing soon: 2048 + 1 is 2048 in float16.
_HALF_PRECISION = (tf.float16, tf.bfloat16)


def make_accumulators(grads_and_vars: GradsAndVars, form: str,
                      operations: List[tf.Operation], *,
                      weighted: bool = False,
                      saved: bool = False) -> "List[Accumulator]":
    """Returns the accumulator for each variable's gradient.

    Args:
        grads_and_vars: Pairs of a `Tensor` or `IndexedSlices`, of one
            micro-batch, and the variable that it belongs to.
        form: `"auto"` for the smallest exact form, or `"dense"`.
        operations: What else runs with each micro-batch.
        weighted: Whether `accumulate` will be given a weight.
        saved: Whether checkpoints are to have the accumulators, which are
            then dense.
    """
    constant_ops = set()
    if form == "auto" and not saved and any(
            _is_large(gradient, variable)
            for gradient, variable in grads_and_vars):
        constant_ops = contractions.find_constant_ops(
            operations + [_values(gradient).op
                          for gradient, _ in grads_and_vars],
            [variable for _, variable in grads_and_vars])
    accumulators: List[Accumulator] = []
    for gradient, variable in grads_and_vars:
        # Under a parameter-server device function a worker's state stays with
        # the worker: where the gradient is computed, not where the variable
        # is.
        with tf.device(_values(gradient).device):
            if saved:
                accumulators.append(DenseAccumulator(
                    gradient, variable, "checkpoints have it", saved))
            elif form == "dense":
                accumulators.append(DenseAccumulator(
                    gradient, variable, "as asked"))
            else:
                accumulators.append(_make_smallest(
                    gradient, variable, constant_ops, weighted))
    return accumulators


def _make_smallest(gradient: Gradient, variable: tf.Variable,
                   constant_ops: Set[str], weighted: bool) -> "Accumulator":
    if isinstance(gradient, tf.IndexedSlices):
        return RowsAccumulator(gradient, variable)
    if not variable.shape.is_fully_defined():
        return DenseAccumulator(gradient, variable,
                                "the variable's static shape is unknown")
    if not _is_large(gradient, variable):
        return DenseAccumulator(gradient, variable, "it is small")
    contraction = contractions.find_contraction(gradient, variable.shape,
                                                constant_ops)
    if isinstance(contraction, str):
        return DenseAccumulator(gradient, variable, contraction)
    if _is_past_fold(contraction):
        return DenseAccumulator(
            gradient, variable,
            "a micro-batch's factors are larger than a quarter of it")
    return ContractionAccumulator(gradient, variable, contraction, weighted)


class DenseAccumulator:
    """One sum, of the variable's shape: `a += g`, as in the recipe."""

    form = "dense"
    early_reads: Sequence[tf.Tensor] = ()
    micro_batch_bytes = 0

    def __init__(self, gradient: Gradient, variable: tf.Variable, reason: str,
                 saved: bool = False) -> None:
        self.reason = reason
        self._gradient = _densify(gradient, variable)
        self._shape = variable.shape
        name = variable.op.name + "/accumulator"
        dtype = _sum_dtype(gradient.dtype)
        self._sum = (_EagerSum(name, self._shape, dtype, saved)
                     if self._shape.is_fully_defined()
                     else _LazySum(name, dtype, saved))
        self.dtype = self._sum.dtype
        self.zero_ops = self._sum.zero_ops

    def zero(self) -> tf.Operation:
        return self._sum.zero()

    def is_finite(self) -> tf.Tensor:
        return all_finite([self._gradient])

    def accumulate(self, weight: Optional[tf.Tensor] = None) -> tf.Operation:
        return self._sum.add(
            _times(tf.cast(self._gradient, self.dtype), weight))

    def read(self, total_weight: tf.Tensor) -> Gradient:
        del total_weight  # the sum is of that much
        total = self._sum.read()
        total.set_shape(self._shape)
        return total


class ContractionAccumulator:
    """The factors of matrix products, multiplied once a cycle.

    The sum of `left_i^T right_i` is the product of the factors' rows, one
    micro-batch's below the other's: `concat(left)^T concat(right)`.  A term
    that is the same in every micro-batch is not accumulated at all, but
    evaluated once and counted as often.

    So that memory stays bounded however long the cycle is, the factors are
    folded once they have a quarter of the elements at which storing them
    costs as much as the dense sum: multiplied, and added to one.  Until then
    it takes no memory.
    """

    form = "contraction"

    def __init__(self, gradient: Gradient, variable: tf.Variable,
                 contraction: contractions.Contraction,
                 weighted: bool) -> None:
        name = variable.op.name
        products, self._constants = contraction
        self.reason = _describe_terms(contraction)
        self._products = products
        self._shape = variable.shape
        self._sum = _LazySum(name + "/accumulator",
                             _sum_dtype(gradient.dtype))
        self.dtype = self._sum.dtype
        self._left = _TensorListVariable(
            name + "/left", tf.TensorShape([products[0].num_left]),
            products[0].left.dtype)
        self._right = _TensorListVariable(
            name + "/right", tf.TensorShape([products[0].num_right]),
            # A weight has to fit in as well.
            self.dtype if weighted else products[0].right.dtype)
        self._num_rows = count_variable(name + "/num_rows")
        self.zero_ops = self._sum.zero_ops + [
            state.initializer
            for state in (self._left, self._right, self._num_rows)]
        self.micro_batch_bytes = _factor_bytes(products)
        self.early_reads: List[tf.Tensor] = []

    def zero(self) -> tf.Operation:
        return tf.group(self._sum.zero(), self._left.zero(),
                        self._right.zero(), reset(self._num_rows))

    def is_finite(self) -> tf.Tensor:
        # What they are multiplied to is, unless that is too large.
        return all_finite([factor for product in self._products
                           for factor in (product.left, product.right)])

    def accumulate(self, weight: Optional[tf.Tensor] = None) -> tf.Operation:
        # A factor may be a reference variable's own memory, and the other be
        # computed after an assignment to it.  What is stored is what the
        # product would see, which waits for both.
        with tf.control_dependencies([
                _wait_for(factor) for product in self._products
                for factor in (product.left, product.right)]):
            left = _stack_rows([
                _as_rows(product.left, product.num_left,
                         product.transpose_left)
                for product in self._products])
            right = _stack_rows([
                _as_rows(product.right, product.num_right,
                         product.transpose_right)
                for product in self._products])
            if weight is not None:
                left = _none_if_zero(left, weight)
                right = _none_if_zero(
                    _times(tf.cast(right, self.dtype), weight), weight)
            num_rows = tf.shape(left, out_type=tf.int64)[0]
            pushed = [self._left.push(left), self._right.push(right),
                      self._num_rows.assign_add(num_rows, read_value=False)]
        with tf.control_dependencies(pushed):
            return run_if(
                self._num_rows.read_value() > _max_rows(self._products[0]),
                self._fold)

    def read(self, total_weight: tf.Tensor) -> Gradient:
        total = self._multiply()
        total = tf.cond(self._sum.is_started(),
                        lambda: total + self._sum.read(), lambda: total)
        if self._constants:
            # The constant terms read trained variables, which an optimizer
            # may change in a step of its own before it takes the gradient.
            self.early_reads = [self._read_constants(total_weight)]
            total += self.early_reads[0]
        return tf.reshape(total, self._shape)

    def _read_constants(self, total_weight: tf.Tensor) -> tf.Tensor:
        matrix_shape = [self._products[0].num_left,
                        self._products[0].num_right]
        # Made anew here: in a branch of `tf.cond`, an op from outside runs
        # whichever branch is taken, which would be with each micro-batch.
        constants = graph_reading.rebuild(self._constants)
        return tf.cast(total_weight, self._sum.dtype) * tf.add_n([
            tf.reshape(tf.cast(constant, self._sum.dtype), matrix_shape)
            for constant in constants])

    def _multiply(self) -> tf.Tensor:
        return tf.matmul(tf.cast(self._left.concat(), self._sum.dtype),
                         tf.cast(self._right.concat(), self._sum.dtype),
                         transpose_a=True)

    def _fold(self) -> tf.Operation:
        with tf.control_dependencies([self._sum.add(self._multiply())]):
            return tf.group(self._left.clear(), self._right.clear(),
                            reset(self._num_rows))


class RowsAccumulator:
    """The rows of `IndexedSlices`, kept as they come and summed at the end.

    A micro-batch costs what its rows cost, and the optimizer gets
    `IndexedSlices` again: every row that was touched, once, with its sum.

    So that memory stays bounded however long the cycle is, rows are folded
    once a quarter as many elements are stored as the table has: added to a
    dense sum, beside a mask of the rows that were touched.  Until then these
    two take no memory.
    """

    form = "rows"
    reason = "it is IndexedSlices"
    early_reads: Sequence[tf.Tensor] = ()

    def __init__(self, gradient: Gradient, variable: tf.Variable) -> None:
        name = variable.op.name
        self._gradient = gradient
        self._table_shape = _runtime_shape(variable)
        self._max_stored = _max_row_elements(variable, self._table_shape)
        self._values = _TensorListVariable(
            name + "/values", gradient.values.shape[1:],
            _sum_dtype(gradient.dtype))
        self._indices = _TensorListVariable(
            name + "/indices", tf.TensorShape([]), gradient.indices.dtype)
        self.dtype = self._values.dtype
        self._num_stored = count_variable(name + "/num_stored")
        self._sum = _LazySum(name + "/accumulator", self._values.dtype)
        self._touched = _LazySum(name + "/touched", tf.bool)
        self.zero_ops = self._sum.zero_ops + self._touched.zero_ops + [
            state.initializer
            for state in (self._values, self._indices, self._num_stored)]
        self.micro_batch_bytes = _known_bytes(
            [(gradient.values.shape, self._values.dtype),
             (gradient.indices.shape, self._indices.dtype)])

    def zero(self) -> tf.Operation:
        return tf.group(self._sum.zero(), self._touched.zero(),
                        self._values.zero(), self._indices.zero(),
                        reset(self._num_stored))

    def is_finite(self) -> tf.Tensor:
        return all_finite([self._gradient.values])

    def accumulate(self, weight: Optional[tf.Tensor] = None) -> tf.Operation:
        values = _times(tf.cast(self._gradient.values, self.dtype), weight)
        indices = self._gradient.indices
        if weight is not None:
            values = _none_if_zero(values, weight)
            indices = _none_if_zero(indices, weight)
        with tf.control_dependencies([
                self._values.push(values),
                self._indices.push(indices),
                self._num_stored.assign_add(
                    tf.size(values, out_type=tf.int64), read_value=False)]):
            return run_if(self._num_stored.read_value() > self._max_stored,
                          self._fold)

    def read(self, total_weight: tf.Tensor) -> Gradient:
        del total_weight  # the sum is of that much
        values, indices = tf.cond(self._sum.is_started(),
                                  self._read_folded, self._read_stored)
        dense_shape = self._table_shape
        if self._gradient.dense_shape is not None:
            dense_shape = tf.cast(dense_shape,
                                  self._gradient.dense_shape.dtype)
        return tf.IndexedSlices(values, indices, dense_shape)

    def _read_stored(self) -> Tuple[tf.Tensor, tf.Tensor]:
        indices, segments = tf.unique(self._indices.concat())
        values = tf.math.unsorted_segment_sum(
            self._values.concat(), segments, tf.size(indices))
        return values, indices

    def _read_folded(self) -> Tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([self._add_stored()]):
            indices = tf.reshape(
                tf.raw_ops.Where(condition=self._touched.read()), [-1])
            return (tf.gather(self._sum.read(), indices),
                    tf.cast(indices, self._indices.dtype))

    def _fold(self) -> tf.Operation:
        started = run_if(
            tf.logical_not(self._sum.is_started()),
            lambda: tf.group(
                self._sum.start(tf.zeros(self._table_shape, self.dtype)),
                self._touched.start(tf.zeros(self._table_shape[:1],
                                             tf.bool))))
        with tf.control_dependencies([started]):
            return self._add_stored()

    def _add_stored(self) -> tf.Operation:
        """Returns the op that adds what is stored to the sum, and drops it."""
        indices = self._indices.concat()
        added = [
            tf.raw_ops.ResourceScatterAdd(
                resource=self._sum.handle, indices=indices,
                updates=self._values.concat()),
            tf.raw_ops.ResourceScatterUpdate(
                resource=self._touched.handle, indices=indices,
                updates=True)]
        with tf.control_dependencies(added):
            return tf.group(self._values.clear(), self._indices.clear(),
                            reset(self._num_stored))


Accumulator = Union[DenseAccumulator, ContractionAccumulator,
                    RowsAccumulator]


class _EagerSum:
    """A sum that is there, as zeros, from the start."""

    def __init__(self, name: str, shape: tf.TensorShape, dtype: tf.DType,
                 saved: bool = False) -> None:
        self.dtype = dtype
        self._make_zeros = lambda: tf.zeros(shape, dtype)
        self._variable = state_variable(name, self._make_zeros, dtype,
                                        saved=saved)
        self.zero_ops = [self._variable.initializer]

    def zero(self) -> tf.Operation:
        """Returns an op that makes it zeros."""
        return self._variable.assign(self._make_zeros(), read_value=False)

    def add(self, value: tf.Tensor) -> tf.Operation:
        """Returns the op that adds `value`."""
        return self._variable.assign_add(value, read_value=False)

    def read(self) -> tf.Tensor:
        return self._variable.read_value()


class _LazySum:
    """A sum that takes no memory, and has no shape, until it is started.

    So it can be initialised before the variable whose shape it will have.
    """

    def __init__(self, name: str, dtype: tf.DType,
                 saved: bool = False) -> None:
        self.dtype = dtype
        # Never fed: it hides the static shape of the scalar.
        self._make_scalar = lambda: tf.placeholder_with_default(
            tf.zeros([], dtype), None)
        self._variable = state_variable(name, self._make_scalar, dtype,
                                        validate_shape=False, saved=saved)
        self.handle = self._variable.handle
        # Not read off the value's shape: the graph optimizer takes the shape
        # that is assigned anywhere for the one that it always has.
        self._started = state_variable(
            name + "_started", lambda: tf.zeros([], tf.bool), tf.bool,
            saved=saved)
        self.zero_ops = [self._variable.initializer,
                         self._started.initializer]

    def zero(self) -> tf.Operation:
        """Returns an op that makes it a sum that was never started."""
        return tf.group(
            self._variable.assign(self._make_scalar(), read_value=False),
            self._started.assign(False, read_value=False))

    def is_started(self) -> tf.Tensor:
        return self._started.read_value()

    def start(self, value: tf.Tensor) -> tf.Operation:
        """Returns the op that makes `value`, a fresh tensor, the sum."""
        return tf.group(self._variable.assign(value, read_value=False),
                        self._started.assign(True, read_value=False))

    def add(self, value: tf.Tensor) -> tf.Operation:
        """Returns the op that adds `value`, or starts with a copy of it."""
        def add() -> tf.Tensor:
            with tf.control_dependencies([
                    self._variable.assign_add(value, read_value=False)]):
                return tf.constant(True)

        def start() -> tf.Tensor:
            with tf.control_dependencies([
                    self.start(tf.raw_ops.DeepCopy(x=value))]):
                return tf.constant(True)
        return tf.cond(self.is_started(), add, start).op

    def read(self) -> tf.Tensor:
        return self._variable.read_value()


class _TensorListVariable:
    """A list of tensors that lives from one session run to the next.

    The tensors have one dtype, and one shape but for their first dimension.
    The value is a `TensorList`, a variant: what is pushed is not copied again
    as the list grows.
    """

    def __init__(self, name: str, item_shape: tf.TensorShape,
                 dtype: tf.DType) -> None:
        self.dtype = dtype
        self._item_shape = item_shape
        self._element_shape = _list_element_shape(item_shape)
        self._variable = state_variable(name, self._new_list, tf.variant)
        self.initializer = self._variable.initializer

    def zero(self) -> tf.Operation:
        """Returns an op that makes it a list to which nothing was pushed."""
        return self._variable.assign(self._new_list(), read_value=False)

    def push(self, tensor: tf.Tensor) -> tf.Operation:
        """Returns the op that appends `tensor`."""
        return self._assign(self._variable.read_value(), tensor)

    def concat(self) -> tf.Tensor:
        """Returns the tensors joined along their first dimension.

        Fails on a list to which nothing was ever pushed.
        """
        return tf.raw_ops.TensorListConcatV2(
            input_handle=self._variable.read_value(),
            element_dtype=self.dtype,
            element_shape=self._element_shape,
            leading_dims=tf.zeros([0], tf.int64)).tensor

    def clear(self) -> tf.Operation:
        """Returns the op that leaves an empty tensor, so `concat` works."""
        empty = (tf.zeros([0] + self._item_shape.as_list(), self.dtype)
                 if self._item_shape.is_fully_defined()
                 else self.concat()[:0])
        return self._assign(self._new_list(), empty)

    def _new_list(self) -> tf.Tensor:
        return tf.raw_ops.EmptyTensorList(
            element_shape=self._element_shape, max_num_elements=-1,
            element_dtype=self.dtype)

    def _assign(self, tensor_list: tf.Tensor, last: tf.Tensor) -> tf.Operation:
        # A stored tensor must own its memory.  Pushing copies nothing, and a
        # tensor may share its buffer with a fed array that the user fills
        # again, or with a reference variable that is updated in place.
        pushed = tf.raw_ops.TensorListPushBack(
            input_handle=tensor_list, tensor=tf.raw_ops.DeepCopy(x=last))
        return self._variable.assign(pushed, read_value=False)


def count_variable(name: str, dtype: tf.DType = tf.int64,
                   saved: bool = False) -> tf.Variable:
    """Returns a scalar state variable, zero at first."""
    return state_variable(name, lambda: tf.zeros([], dtype), dtype,
                          saved=saved)


def state_variable(name: str, initial_value: Callable[[], tf.Tensor],
                   dtype: tf.DType, *, validate_shape: bool = True,
                   saved: bool = False) -> tf.Variable:
    """Returns a resource variable for state of ours.

    Args:
        name: As of `tf.Variable`.
        initial_value: Function that returns a `Tensor`.
        dtype: Of that tensor.
        validate_shape: Whether the variable keeps that tensor's shape.
        saved: Whether it is a global variable, which checkpoints have, rather
            than a local one.
    """
    # tf.Variable, not get_variable: a scope's regularizer, partitioner,
    # getter or reuse is for the model.
    return tf.Variable(
        initial_value, trainable=False, dtype=dtype, name=name,
        collections=[tf.GraphKeys.GLOBAL_VARIABLES if saved
                     else tf.GraphKeys.LOCAL_VARIABLES],
        use_resource=True, validate_shape=validate_shape)


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether no tensor has a NaN or an infinity, a scalar bool."""
    # TensorFlow 1.14 knows no bfloat16 here.
    finite = [tf.reduce_all(tf.is_finite(
        tf.cast(tensor, _sum_dtype(tensor.dtype)))) for tensor in tensors]
    return finite[0] if len(finite) == 1 else tf.reduce_all(tf.stack(finite))


def run_if(condition: tf.Tensor,
           build_op: Callable[[], tf.Operation]) -> tf.Operation:
    """Returns an op that runs `build_op()` where `condition` holds."""
    def run() -> tf.Tensor:
        with tf.control_dependencies([build_op()]):
            return tf.constant(True)
    return tf.cond(condition, run, lambda: tf.constant(False)).op


def _times(tensor: tf.Tensor, weight: Optional[tf.Tensor]) -> tf.Tensor:
    if weight is None:
        return tensor
    # Zero, also times NaN, is zero.
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))


def _none_if_zero(rows: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns the rows, or, where `weight` is zero, none of them."""
    return rows[:tf.where(weight > 0, tf.shape(rows)[0], 0)]


def reset(count: tf.Variable) -> tf.Operation:
    """Returns an op that makes the count zero, made where it is called."""
    # Not its initializer: within a branch of `tf.cond`, an op from outside
    # runs whichever branch is taken.
    return count.assign(tf.zeros([], count.dtype.base_dtype),
                        read_value=False)


def _sum_dtype(dtype: tf.DType) -> tf.DType:
    dtype = dtype.base_dtype
    return tf.float32 if dtype in _HALF_PRECISION else dtype


def _densify(gradient: Gradient, variable: tf.Variable) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # What tf.convert_to_tensor does too, which warns and wants dense_shape.
    return tf.math.unsorted_segment_sum(
        gradient.values, gradient.indices, _runtime_shape(variable)[0])


def _runtime_shape(variable: tf.Variable) -> tf.Tensor:
    """Returns the shape as an int64 vector, a constant where it is known."""
    if variable.shape.is_fully_defined():
        return tf.constant(variable.shape.as_list(), tf.int64)
    return tf.shape(variable, out_type=tf.int64)


def _max_row_elements(variable: tf.Variable,
                      table_shape: tf.Tensor) -> Union[int, tf.Tensor]:
    """Returns how many elements of rows are stored before they are folded."""
    if variable.shape.is_fully_defined():
        return max(variable.shape.num_elements() // 4, MIN_ELEMENTS_TO_FOLD)
    return tf.maximum(tf.reduce_prod(table_shape) // 4, MIN_ELEMENTS_TO_FOLD)


def _values(gradient: Gradient) -> tf.Tensor:
    return (gradient.values if isinstance(gradient, tf.IndexedSlices)
            else gradient)


def _is_large(gradient: Gradient, variable: tf.Variable) -> bool:
    return (not isinstance(gradient, tf.IndexedSlices)
            and variable.shape.is_fully_defined()
            and variable.shape.num_elements() >= MIN_ELEMENTS_TO_DEFER)


def _max_rows(product: contractions.Product) -> int:
    """Returns how many rows of factors are stored before they are folded.

    Factors `[k, m]` and `[k, n]` have as many elements as their product
    `[m, n]` where `k (m + n) = m n`; this is a quarter of that `k`.
    """
    return product.num_left * product.num_right // (
        4 * (product.num_left + product.num_right))


def _is_past_fold(contraction: contractions.Contraction) -> bool:
    """Returns whether one micro-batch is known to have too many rows."""
    num_rows = sum(product.num_rows or 1 for product in contraction.products)
    return num_rows > _max_rows(contraction.products[0])


def _describe_terms(contraction: contractions.Contraction) -> str:
    products, constants = contraction
    parts = [f"{product.op_type}" for product in products]
    return " + ".join(parts + ["constant"] * len(constants))


def _factor_bytes(products: List[contractions.Product]) -> Optional[int]:
    """Returns the bytes of a micro-batch's factors, None if not known."""
    if any(product.num_rows is None for product in products):
        return None
    return sum(product.num_rows * (
        product.num_left * product.left.dtype.size
        + product.num_right * product.right.dtype.size)
        for product in products)


def _known_bytes(shapes_and_dtypes: List[Tuple[tf.TensorShape, tf.DType]]
                 ) -> Optional[int]:
    """Returns the bytes of tensors of these shapes, None if not known."""
    if not all(shape.is_fully_defined() for shape, _ in shapes_and_dtypes):
        return None
    return sum(shape.num_elements() * dtype.size
               for shape, dtype in shapes_and_dtypes)


def _wait_for(tensor: tf.Tensor) -> tf.Operation:
    """Returns an op that runs once `tensor` is there."""
    # Not its own op, which need not run where the tensor is fed; nor an
    # Identity, which the graph optimizer may take out.
    return tf.placeholder_with_default(tensor, tensor.shape).op


def _as_rows(factor: tf.Tensor, row_size: int, transpose: bool) -> tf.Tensor:
    """Returns a factor as a matrix with a row for each term of the sum."""
    if transpose:
        return tf.transpose(factor)
    return tf.reshape(factor, [-1, row_size])


def _stack_rows(matrices: List[tf.Tensor]) -> tf.Tensor:
    return matrices[0] if len(matrices) == 1 else tf.concat(matrices, axis=0)


def _list_element_shape(item_shape: tf.TensorShape) -> Union[int, List[int]]:
    """Returns the attribute for items of any number along dimension 0."""
    if item_shape.rank is None:
        return -1
    return [-1] + [-1 if size is None else size
                   for size in item_shape.as_list()]
