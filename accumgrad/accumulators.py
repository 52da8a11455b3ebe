"""Holds gradients through a cycle: one class for each form of gradient.

Every accumulator has the same small interface:

    zero_ops        empty it, and initialise it if it never was
    accumulate()    an op that adds one micro-batch's gradient
    read()          the sum, a `Tensor` or `IndexedSlices`

Sums are float32 where the gradient is float16 or bfloat16.  This is the only
module that creates variables; it knows of no optimizer, loss or cycle.
"""

import tensorflow.compat.v1 as tf

# Stored elements up to which rows are never folded: a MB costs less than
# adding up a small table's rows at every micro-batch.
MIN_ELEMENTS_TO_FOLD = 2 ** 18

# Sums in these stop growing soon: 2048 + 1 is 2048 in float16.
_HALF_PRECISION = (tf.float16, tf.bfloat16)


def make_accumulator(gradient, variable, form):
    """Returns the accumulator for one variable's gradient.

    Args:
        gradient: A `Tensor` or `IndexedSlices`, of one micro-batch.
        variable: The variable that it belongs to.
        form: `"auto"` for the smallest exact form, or `"dense"`.
    """
    rows = isinstance(gradient, tf.IndexedSlices)
    # Under a parameter-server device function a worker's state stays with the
    # worker: where the gradient is computed, not where the variable is.
    with tf.device(gradient.values.device if rows else gradient.device):
        if rows and form == "auto":
            return RowsAccumulator(gradient, variable)
        return DenseAccumulator(gradient, variable)


class DenseAccumulator:
    """One sum, of the variable's shape: `a += g`, as in the recipe."""

    def __init__(self, gradient, variable):
        self._gradient = _densify(gradient, variable)
        self._shape = variable.shape
        self._sum = _sum_variable(variable.op.name + "/accumulator",
                                  self._shape, _sum_dtype(gradient.dtype))
        self.zero_ops = [self._sum.initializer]

    def accumulate(self):
        gradient = tf.cast(self._gradient, self._sum.dtype)
        if self._sum.shape.is_fully_defined():
            return self._sum.assign_add(gradient, read_value=False)
        return self._sum.assign(self._sum.read_value() + gradient,
                                read_value=False)

    def read(self):
        total = self._sum.read_value()
        total.set_shape(self._shape)
        return total


class RowsAccumulator:
    """The rows of `IndexedSlices`, kept as they come and summed at the end.

    A micro-batch costs what its rows cost, and the optimizer gets
    `IndexedSlices` again: every row that was touched, once, with its sum.

    So that memory stays bounded however long the cycle is, rows are folded
    once a quarter as many elements are stored as the table has: added to a
    dense sum, beside a mask of the rows that were touched.  Until then these
    two are scalars, and take no memory.
    """

    def __init__(self, gradient, variable):
        name = variable.op.name
        self._gradient = gradient
        self._table_shape = _runtime_shape(variable)
        self._limit = _rows_limit(variable, self._table_shape)
        self._values = _TensorListVariable(
            name + "/values", gradient.values.shape[1:],
            _sum_dtype(gradient.dtype))
        self._indices = _TensorListVariable(
            name + "/indices", tf.TensorShape([]), gradient.indices.dtype)
        self._num_stored = _sum_variable(
            name + "/num_stored", tf.TensorShape([]), tf.int64)
        self._sum = _sum_variable(
            name + "/accumulator", tf.TensorShape(None), self._values.dtype)
        self._touched = _sum_variable(
            name + "/touched", tf.TensorShape(None), tf.bool)
        # Not read off the sum's shape: the graph optimizer takes the one that
        # is assigned anywhere for the one that it always has.
        self._folded = _sum_variable(
            name + "/folded", tf.TensorShape([]), tf.bool)
        self.zero_ops = [
            state.initializer for state in (
                self._values, self._indices, self._num_stored, self._sum,
                self._touched, self._folded)]

    def accumulate(self):
        values = tf.cast(self._gradient.values, self._values.dtype)
        with tf.control_dependencies([
                self._values.push(values),
                self._indices.push(self._gradient.indices),
                self._num_stored.assign_add(
                    tf.size(values, out_type=tf.int64), read_value=False)]):
            return _run_if(self._num_stored.read_value() > self._limit,
                           self._fold)

    def read(self):
        values, indices = tf.cond(self._folded.read_value(),
                                  self._read_folded, self._read_stored)
        dense_shape = self._table_shape
        if self._gradient.dense_shape is not None:
            dense_shape = tf.cast(dense_shape,
                                  self._gradient.dense_shape.dtype)
        return tf.IndexedSlices(values, indices, dense_shape)

    def _read_stored(self):
        indices, segments = tf.unique(self._indices.concat())
        values = tf.math.unsorted_segment_sum(
            self._values.concat(), segments, tf.size(indices))
        return values, indices

    def _read_folded(self):
        with tf.control_dependencies([self._fold()]):
            touched = self._touched.read_value()
            indices = tf.reshape(tf.raw_ops.Where(condition=touched), [-1])
            return (tf.gather(self._sum.read_value(), indices),
                    tf.cast(indices, self._indices.dtype))

    def _fold(self):
        indices = self._indices.concat()
        with tf.control_dependencies([
                _run_if(tf.logical_not(self._folded.read_value()),
                        self._make_room)]):
            added = [
                tf.raw_ops.ResourceScatterAdd(
                    resource=self._sum.handle, indices=indices,
                    updates=self._values.concat()),
                tf.raw_ops.ResourceScatterUpdate(
                    resource=self._touched.handle, indices=indices,
                    updates=True)]
        with tf.control_dependencies(added):
            return tf.group(self._values.clear(), self._indices.clear(),
                            self._num_stored.initializer)

    def _make_room(self):
        return tf.group(
            self._sum.assign(
                tf.zeros(self._table_shape, self._sum.dtype),
                read_value=False),
            self._touched.assign(
                tf.zeros(self._table_shape[:1], tf.bool), read_value=False),
            self._folded.assign(True, read_value=False))


class _TensorListVariable:
    """A list of tensors that lives from one session run to the next.

    The tensors have one dtype, and one shape but for their first dimension.
    The value is a `TensorList`, a variant: what is pushed is not copied again
    as the list grows.
    """

    def __init__(self, name, item_shape, dtype):
        self.dtype = dtype
        self._item_shape = item_shape
        self._element_shape = _list_element_shape(item_shape)
        self._variable = _local_variable(name, self._new_list, tf.variant)
        self.initializer = self._variable.initializer

    def push(self, tensor):
        """Returns the op that appends `tensor`."""
        return self._assign(self._variable.read_value(), tensor)

    def concat(self):
        """Returns the tensors joined along their first dimension.

        Fails on a list to which nothing was ever pushed.
        """
        return tf.raw_ops.TensorListConcatV2(
            input_handle=self._variable.read_value(),
            element_dtype=self.dtype,
            element_shape=self._element_shape,
            leading_dims=tf.zeros([0], tf.int64)).tensor

    def clear(self):
        """Returns the op that leaves an empty tensor, so `concat` works."""
        empty = (tf.zeros([0] + self._item_shape.as_list(), self.dtype)
                 if self._item_shape.is_fully_defined()
                 else self.concat()[:0])
        return self._assign(self._new_list(), empty)

    def _new_list(self):
        return tf.raw_ops.EmptyTensorList(
            element_shape=self._element_shape, max_num_elements=-1,
            element_dtype=self.dtype)

    def _assign(self, tensor_list, last):
        # A stored tensor must own its memory.  Pushing copies nothing, and a
        # tensor may share its buffer with a fed array that the user fills
        # again, or with a reference variable that is updated in place.
        pushed = tf.raw_ops.TensorListPushBack(
            input_handle=tensor_list, tensor=tf.raw_ops.DeepCopy(x=last))
        return self._variable.assign(pushed, read_value=False)


def count_variable(name, dtype=tf.int64):
    """Returns a scalar local variable, zero at first."""
    return _sum_variable(name, tf.TensorShape([]), dtype)


def _sum_variable(name, shape, dtype):
    """Returns a local variable of zeros, of which `x + zeros == x` holds.

    Where the shape is not known it is a scalar zero, which the first sum
    broadcasts: so it can be initialised before the model is, and needs no
    memory until then.
    """
    if shape.is_fully_defined():
        return _local_variable(name, lambda: tf.zeros(shape, dtype), dtype)
    return _local_variable(
        name,
        # The placeholder is never fed: it hides the scalar's static shape.
        lambda: tf.placeholder_with_default(tf.zeros([], dtype), shape=None),
        dtype, validate_shape=False)


def _local_variable(name, initial_value, dtype, validate_shape=True):
    # tf.Variable, not get_variable: a scope's regularizer, partitioner,
    # getter or reuse is for the model.  Local, so that checkpoints of the
    # model neither have nor ask for it.
    return tf.Variable(
        initial_value, trainable=False, dtype=dtype, name=name,
        collections=[tf.GraphKeys.LOCAL_VARIABLES], use_resource=True,
        validate_shape=validate_shape)


def _sum_dtype(dtype):
    dtype = dtype.base_dtype
    return tf.float32 if dtype in _HALF_PRECISION else dtype


def _densify(gradient, variable):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # What tf.convert_to_tensor does too, which warns and wants dense_shape.
    return tf.math.unsorted_segment_sum(
        gradient.values, gradient.indices, _runtime_shape(variable)[0])


def _runtime_shape(variable):
    """Returns the shape as an int64 vector, a constant where it is known."""
    if variable.shape.is_fully_defined():
        return tf.constant(variable.shape.as_list(), tf.int64)
    return tf.shape(variable, out_type=tf.int64)


def _rows_limit(variable, table_shape):
    """Returns how many elements of rows are stored before they are folded."""
    if variable.shape.is_fully_defined():
        return max(variable.shape.num_elements() // 4, MIN_ELEMENTS_TO_FOLD)
    return tf.maximum(tf.reduce_prod(table_shape) // 4, MIN_ELEMENTS_TO_FOLD)


def _list_element_shape(item_shape):
    """Returns the attribute for items of any number along dimension 0."""
    if item_shape.rank is None:
        return -1
    return [-1] + [-1 if size is None else size
                   for size in item_shape.as_list()]


def _run_if(condition, build_op):
    """Returns an op that runs `build_op()` where `condition` holds."""
    def run():
        with tf.control_dependencies([build_op()]):
            return tf.constant(True)
    return tf.cond(condition, run, lambda: tf.constant(False)).op
