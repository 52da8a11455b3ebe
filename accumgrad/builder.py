"""Builds the three ops of the accumulation recipe into the graph.

Reads top to bottom as the recipe: compute, accumulate, reduce, apply.  It
knows nothing of sessions, nor of how an accumulator holds its gradient.
"""

from typing import List, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from accumgrad import accumulators as accumulators_lib
from accumgrad import checks
from accumgrad import describe

REDUCTIONS = ("sum", "mean")
ACCUMULATORS = ("auto", "dense")

# Ops that run a function, which may assign to a variable handed to it.
_CALLS = ("If", "StatelessIf", "Case", "While", "PartitionedCall",
          "StatefulPartitionedCall")


class AccumulationOps(NamedTuple):
    """The ops of an accumulation cycle: zero, N times accumulate, train.

    Run them in separate `session.run` calls: ops that are fetched together
    are in no order.

    Attributes:
        zero_ops: Empty the accumulators, and initialise them if they never
            were.  Need no feed.
        accum_ops: Add the gradient of one micro-batch to the accumulators.
            Need the feed of the loss.
        train_op: Applies the reduced gradient.  Needs no feed.  Raises
            `tf.errors.InvalidArgumentError`, and changes nothing, if nothing
            was accumulated since `zero_ops`.
    """
    zero_ops: List[tf.Operation]
    accum_ops: List[tf.Operation]
    train_op: tf.Operation


def build_accumulation_ops(loss, optimizer, var_list=None, *,
                           reduction="sum", global_step=None,
                           accumulators="auto",
                           colocate_gradients_with_ops=False,
                           name="accumgrad"):
    """Builds ops that accumulate gradients, and apply them once a cycle.

    After `zero_ops`, N runs of `accum_ops` that see gradients `g_1 ... g_n`,
    and `train_op`, the variables are where `optimizer.apply_gradients` of
    `g_1 + ... + g_n` takes them (`"sum"`), or of `(g_1 + ... + g_n) / N`
    (`"mean"`):

        session.run(ops.zero_ops)
        for i in range(128):
            session.run(ops.accum_ops, feed_dict={x: xs[i], y: ys[i]})
        session.run(ops.train_op)

    The accumulators are local variables (`tf.GraphKeys.LOCAL_VARIABLES`), so
    a checkpoint of the model neither has nor asks for them.  `zero_ops`
    initialise them, and so does `tf.compat.v1.local_variables_initializer()`.
    Control dependencies in whose scope this is called (batch normalisation's
    `UPDATE_OPS`) go to `accum_ops` alone.  One set of ops is for one thread.

    Args:
        loss: Floating-point `Tensor`, the loss of one micro-batch.  Where it
            is no scalar, its sum is meant, as in `tf.gradients`.
        optimizer: A `tf.compat.v1.train.Optimizer`, or anything with its
            `compute_gradients` and `apply_gradients`.  Each is called once.
        var_list: Variables to train, in any nest of lists; partitioned ones
            too.  Default: the trainable variables.
        reduction: How the N gradients of a cycle become one: `"sum"`, as in
            the recipe, or `"mean"`, which divides by the number of
            micro-batches that were accumulated.
        global_step: Optional scalar integer variable, which counts cycles:
            it moves by one with each `train_op`, also where the optimizer
            ignores it.
        accumulators: `"auto"` holds each gradient in its smallest exact form:
            `IndexedSlices` as rows; a matrix product over the batch as its
            factors, multiplied once a cycle; all else as a sum of the
            variable's shape.  `describe_accumulators` tells which.  `"dense"`
            takes the sum for all, and hands it on as a dense tensor: bit for
            bit what the recipe does.  float16 and bfloat16 gradients are
            summed in float32.
        colocate_gradients_with_ops: As in `optimizer.compute_gradients`.
        name: Name scope of the accumulators and of the three ops.

    Returns:
        An `AccumulationOps`.

    Raises:
        RuntimeError: Eager execution is on, or a function is being traced.
        TypeError: `loss` is not a floating-point tensor, `optimizer` lacks
            the two methods, `var_list` or `global_step` is not made of
            variables, or the optimizer returns something other than
            gradients and variables.
        ValueError: `reduction` or `accumulators` is none of the choices;
            `loss`, `global_step` or a variable is of another graph;
            there is no variable, or one twice; `loss` depends on none.
        NotImplementedError, RuntimeError: The optimizer, or a variable's
            constraint, has no rule for `IndexedSlices`: pass
            `accumulators="dense"`.
    """
    checks.check_graph_mode()
    checks.check_choice("reduction", reduction, REDUCTIONS)
    checks.check_choice("accumulators", accumulators, ACCUMULATORS)
    checks.check_loss(loss)
    checks.check_optimizer(optimizer)
    checks.check_global_step(global_step)
    checks.check_name(name)
    var_list = checks.check_var_list(var_list, optimizer)

    # Gradients and slots are named as `optimizer.minimize` would name them
    # here: the library's own name scope is open round its own ops alone.
    with tf.control_dependencies(None):
        grads_and_vars = _compute_gradients(loss, optimizer, var_list,
                                            colocate_gradients_with_ops)
    with tf.name_scope(name) as scope:
        # Only an op can tell what control dependencies the caller has set.
        caller = tf.no_op(name="caller")
    with tf.control_dependencies(None), tf.name_scope(scope):
        held = accumulators_lib.make_accumulators(
            grads_and_vars, accumulators, [loss.op, caller])
        with tf.device(loss.device):
            count = accumulators_lib.count_variable("num_micro_batches")
        zero_ops = [op for accumulator in held for op in accumulator.zero_ops]
        zero_ops.append(count.initializer)

    # Only these stay under the caller's control dependencies.  They wait for
    # the loss, so that a run that fails for want of data counts for nothing.
    with tf.name_scope(scope), tf.control_dependencies([loss]):
        accum_ops = [accumulator.accumulate() for accumulator in held]
        accum_ops.append(count.assign_add(1, read_value=False))
        # As one: what a session run is asked for costs it time, op by op.
        accum_ops = [tf.group(*accum_ops, name="accumulate")]

    with tf.control_dependencies(None):
        # What is applied is read behind the check, so that nothing moves
        # where it fails.
        with tf.name_scope(scope):
            accumulated = _check_accumulated(count)
        with tf.name_scope(scope), tf.control_dependencies([accumulated]):
            total = count.read_value()
            reduced = [_reduce(accumulator.read(total),
                               total if reduction == "mean" else None,
                               gradient.dtype)
                       for accumulator, (gradient, _)
                       in zip(held, grads_and_vars)]
        before_update = [accumulated] + [
            tensor for accumulator in held
            for tensor in accumulator.early_reads]
        train_op = _apply(
            [(gradient, variable) for gradient, (_, variable)
             in zip(reduced, grads_and_vars)],
            optimizer, global_step, before_update, scope)
    describe.remember(train_op, held, grads_and_vars)
    return AccumulationOps(zero_ops, accum_ops, train_op)


def _compute_gradients(loss, optimizer, var_list, colocate_gradients_with_ops):
    """Returns the pairs that have a gradient."""
    # An optimizer of the user's own need not know the option.
    options = {}
    if colocate_gradients_with_ops:
        options["colocate_gradients_with_ops"] = True
    grads_and_vars = checks.check_grads_and_vars(
        optimizer.compute_gradients(loss, var_list=var_list, **options))
    with_gradient = [(gradient, variable)
                     for gradient, variable in grads_and_vars
                     if gradient is not None]
    if not with_gradient:
        names = ", ".join(variable.op.name for _, variable in grads_and_vars)
        raise ValueError(
            f"`loss` ({loss.name!r}) has no gradient with respect to any of "
            f"the variables: {names}.  Pass a `var_list` that it depends on.")
    return with_gradient


def _check_accumulated(count):
    return tf.raw_ops.Assert(
        condition=count.read_value() > 0,
        data=[tf.constant(
            "accumgrad: train_op found nothing accumulated since zero_ops.  "
            "Run accum_ops at least once before it.")])


def _reduce(total, divisor, dtype):
    """Returns `total / divisor` in the gradient's own dtype."""
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(_reduce(total.values, divisor, dtype),
                                total.indices, total.dense_shape)
    if divisor is not None:
        total = total / tf.cast(divisor, total.dtype)
    return tf.cast(total, dtype)


def _identity(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values),
                                gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


def _apply(grads_and_vars, optimizer, global_step, before_update, scope):
    """Returns the op that applies the gradients and moves `global_step`."""
    # Adam's sparse rule decays its slots whatever the gradient is, so the
    # gradients' own order behind the check is not enough.  Only
    # SyncReplicasOptimizer makes ops here that initialise, or run in a thread
    # of their own: they must not wait for a cycle, and what it pushes is the
    # gradients alone.
    if isinstance(optimizer, tf.train.SyncReplicasOptimizer):
        with tf.name_scope(scope), tf.control_dependencies(before_update):
            grads_and_vars = [(_identity(gradient), variable)
                              for gradient, variable in grads_and_vars]
        before_update = []
    train_ops = tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)
    num_train_ops = len(train_ops)
    graph = tf.get_default_graph()
    num_ops = len(graph.get_operations())
    options = {} if global_step is None else {"global_step": global_step}
    try:
        with tf.control_dependencies(
                before_update), tf.variable_creator_scope(
                _make_initial_value_free):
            train_op = optimizer.apply_gradients(grads_and_vars, **options)
    except (NotImplementedError, RuntimeError) as error:
        if any(isinstance(gradient, tf.IndexedSlices)
               for gradient, _ in grads_and_vars):
            raise type(error)(
                f"{error}\nA gradient is IndexedSlices, for which the "
                "optimizer or a variable's constraint may have no rule.  "
                "With `accumulators=\"dense\"` it gets a dense tensor.")
        raise
    with tf.name_scope(scope):
        if global_step is not None and not _moves(
                graph.get_operations()[num_ops:], global_step):
            with tf.control_dependencies([train_op]):
                train_op = tf.assign_add(global_step, 1)
        train_op = tf.group(train_op, name="train")
    # The optimizer's own op, if it put it there, is not the one to fetch.
    train_ops[num_train_ops:] = [train_op]
    return train_op


def _make_initial_value_free(next_creator, **kwargs):
    """Creates a variable whose initializer waits for no cycle.

    A slot made as `tf.Variable(tf.zeros(shape))` has a tensor for its initial
    value that stands under the check already.
    """
    initial_value = kwargs.get("initial_value")
    if isinstance(initial_value, tf.Tensor):
        value = tf.get_static_value(initial_value)
        if value is not None and value.size and np.all(value == value.flat[0]):
            kwargs["initial_value"] = lambda: tf.fill(value.shape,
                                                      value.flat[0])
    return next_creator(**kwargs)


def _moves(operations, global_step):
    """Returns whether one of `operations` may assign to `global_step`.

    Read off the graph, not from the value before and after: a wrapper that
    scales the loss holds the step back when it skips, and then it must stay;
    and another worker may move it in between.
    """
    handle = global_step.op.outputs[0].name
    for operation in operations:
        if operation.type.startswith("Assign"):
            written = operation.inputs[:1]
        elif operation.type in _CALLS:
            written = operation.inputs
        else:
            continue
        if any(_source(tensor).name == handle for tensor in written):
            return True
    return False


def _source(tensor):
    """Returns the tensor that control flow v1 hands on as `tensor`."""
    while tensor.op.type in ("Switch", "RefSwitch", "Enter", "RefEnter"):
        tensor = tensor.op.inputs[0]
    return tensor
