"""Builds the three ops of the accumulation recipe into the graph.

Reads top to bottom as the recipe: compute, accumulate, reduce, apply.  It
knows nothing of sessions, nor of how gradients are accumulated.
"""

import warnings
import weakref
from typing import (Any, Callable, Iterable, List, MutableMapping, NamedTuple,
                    Optional, Sequence, Union)

import numpy as np
import tensorflow.compat.v1 as tf

from accumgrad import accumulators as accumulators_lib
from accumgrad import checks
from accumgrad import cycle as cycle_lib
from accumgrad import describe
from accumgrad import graph_reading
from accumgrad.annotations import GradsAndVars
from accumgrad.annotations import Transform

# Graph -> the optimizers that a builder was given for it.
_OPTIMIZERS: MutableMapping[tf.Graph, weakref.WeakSet] = (
    weakref.WeakKeyDictionary())


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


def build_accumulation_ops(loss: tf.Tensor, optimizer: Any,
                           var_list: Any = None, *, reduction: str = "sum",
                           weight: Union[None, float, tf.Tensor] = None,
                           transform_gradients: "Optional[Transform]" = None,
                           update_ops: Any = None,
                           global_step: Optional[tf.Variable] = None,
                           nonfinite: str = "apply",
                           accumulators: str = "auto",
                           save_accumulators: bool = False,
                           colocate_gradients_with_ops: bool = False,
                           name: str = "accumgrad") -> AccumulationOps:
    """Builds ops that accumulate gradients, and apply them once a cycle.

    After `zero_ops`, N runs of `accum_ops` that see gradients `g_1 ... g_n`
    and weights `w_1 ... w_n`, and `train_op`, the variables are where
    `optimizer.apply_gradients` of `w_1 g_1 + ... + w_n g_n` takes them
    (`"sum"`), or of that divided by `w_1 + ... + w_n` (`"mean"`).  Without
    `weight`, each is one::

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
            the recipe, or `"mean"`, which divides by what was accumulated:
            the number of micro-batches, or the sum of their weights.
        weight: Scalar `Tensor` of a floating-point or integer dtype,
            evaluated with each micro-batch; not negative.  With the number of
            examples (or tokens), a mean loss and `"mean"`, a cycle gives what
            one batch of all of them gives.  A micro-batch of weight zero
            counts for nothing, even where its gradient is NaN.
        transform_gradients: Function from a list of pairs (gradient,
            variable) to such a list, called once.  It sees the cycle's
            reduced gradients, in float32 where they are of half precision,
            and what it returns is applied: clipped
            (`accumgrad.clip_by_global_norm`), summed over workers, made
            noisy.  A variable that it leaves out is not moved.
        update_ops: Ops that run with each micro-batch, such as
            `tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)`.
        global_step: Optional scalar integer variable, which counts cycles:
            it moves by one with each update, also where the optimizer
            ignores it.
        nonfinite: What becomes of a NaN or an infinity.  `"apply"` it, as
            TensorFlow would.  `"skip"` the cycle: `train_op` leaves weights,
            slots and global step as they are.  `"skip_micro_batch"`: a
            micro-batch with one in its gradient counts for nothing, and what
            its update ops did is taken back; it holds all gradients of a
            micro-batch at once.  (Of a product that is held as its factors,
            the factors are looked at.)  `"raise"`: `train_op` raises
            `tf.errors.InvalidArgumentError`, which names the variable, and
            changes nothing.
        accumulators: `"auto"` holds each gradient in its smallest exact form:
            `IndexedSlices` as rows; a matrix product over the batch as its
            factors, multiplied once a cycle; all else as a sum of the
            variable's shape.  `describe_accumulators` tells which.  `"dense"`
            takes the sum for all, and hands it on as a dense tensor: bit for
            bit what the recipe does.  float16 and bfloat16 gradients are
            summed in float32.
        save_accumulators: Whether the accumulators are global variables
            instead, so that a checkpoint made within a cycle has them, and a
            job that was killed goes on from there.  They are dense then.
        colocate_gradients_with_ops: As in `optimizer.compute_gradients`.
        name: Name scope of the accumulators and of the three ops.

    Returns:
        An `AccumulationOps`.  Its `accum_ops` raise
        `tf.errors.InvalidArgumentError`, and accumulate nothing, where
        `weight` is negative, NaN or infinite.

    Raises:
        RuntimeError: Eager execution is on, or a function is being traced.
        TypeError: `loss` is not a floating-point tensor, `optimizer` lacks
            the two methods, `var_list` or `global_step` is not made of
            variables, `weight` is no real scalar, `update_ops` holds
            something other than ops, or the optimizer or
            `transform_gradients` returns something other than gradients and
            variables.
        ValueError: `reduction`, `nonfinite` or `accumulators` is none of the
            choices; what was passed is of another graph; there is no
            variable, or one twice; `loss` depends on none;
            `transform_gradients` returns a variable that it was not given;
            `nonfinite` is other than `"apply"` with an optimizer that owns a
            dynamic loss scale, or `"skip"` with `SyncReplicasOptimizer` or
            with reference variables under control flow v2.
        NotImplementedError, RuntimeError: The optimizer, or a variable's
            constraint, has no rule for `IndexedSlices`: pass
            `accumulators="dense"`.
    """
    checks.check_graph_mode()
    checks.check_loss(loss)
    checks.check_optimizer(optimizer)
    checks.check_global_step(global_step)
    checks.check_name(name)
    var_list = checks.check_var_list(var_list, optimizer)
    options = cycle_lib.check_options(cycle_lib.Options(
        reduction, weight, transform_gradients, update_ops, nonfinite,
        accumulators, save_accumulators), optimizer)
    if nonfinite == "skip":
        checks.check_conditional(
            "`nonfinite` must not be 'skip'", optimizer,
            (tf.trainable_variables() if var_list is None else var_list)
            + ([] if global_step is None else [global_step]))

    # Gradients and slots are named as `optimizer.minimize` would name them
    # here: the library's own name scope is open round its own ops alone.
    with tf.control_dependencies(None):
        grads_and_vars = _compute_gradients(loss, optimizer, var_list,
                                            colocate_gradients_with_ops)
    scope = open_scope(name)
    # Only this stays under the caller's control dependencies.
    cycle = cycle_lib.Cycle(grads_and_vars, options, [loss], scope)
    accum_ops = [cycle.accumulate()]

    with tf.control_dependencies(None):
        # What is applied is read behind the check, so that nothing moves
        # where it fails.
        with tf.name_scope(scope):
            accumulated = cycle_lib.check(
                cycle.is_accumulated(),
                "accumgrad: train_op found nothing accumulated since zero_ops"
                + (", or only micro-batches that count for nothing"
                   if cycle.is_weighted else "")
                + ".  Run accum_ops at least once before it.")
        with tf.control_dependencies([accumulated]):
            reduced_and_vars = cycle.reduce()
        reduced_and_vars = cycle.transform(reduced_and_vars)
        before_update = [accumulated] + cycle.early_reads(reduced_and_vars)
        condition = None
        with tf.name_scope(scope):
            if nonfinite == "raise":
                before_update += [
                    cycle_lib.check(*finite)
                    for finite in cycle.are_finite(reduced_and_vars)]
            elif nonfinite == "skip":
                condition = cycle_lib.all_of(
                    cycle.are_finite(reduced_and_vars))
        warn_if_shared(optimizer)
        train_op = apply(reduced_and_vars, optimizer, global_step,
                         before_update, condition, scope)
    describe.remember(train_op, cycle.accumulators, grads_and_vars)
    return AccumulationOps(cycle.zero_ops, accum_ops, train_op)


def _compute_gradients(loss: tf.Tensor, optimizer: Any, var_list: Any,
                       colocate_gradients_with_ops: bool) -> GradsAndVars:
    """Returns the pairs that have a gradient."""
    # An optimizer of the user's own need not know the option.
    options = {}
    if colocate_gradients_with_ops:
        options["colocate_gradients_with_ops"] = True
    grads_and_vars = checks.check_grads_and_vars(
        "optimizer.compute_gradients",
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


def open_scope(name: str) -> str:
    """Returns the name scope for the library's ops, which is new."""
    with tf.name_scope(name) as scope:
        return scope


def warn_if_shared(optimizer: Any) -> None:
    """Warns where the optimizer has state that another builder moves too."""
    if not isinstance(optimizer, tf.train.Optimizer):
        return
    optimizers = _OPTIMIZERS.setdefault(tf.get_default_graph(),
                                        weakref.WeakSet())
    if optimizer in optimizers:
        slots = {id(optimizer.get_slot(variable, name))
                 for name in optimizer.get_slot_names()
                 for variable in tf.global_variables()}
        shared = [variable.op.name for variable in optimizer.variables()
                  if id(variable) not in slots]
        if shared:
            warnings.warn(
                "accumgrad: the same optimizer object was passed to another "
                "builder in this graph.  Both of them move: "
                f"{', '.join(shared)}.  Pass each an object of its own.",
                stacklevel=3)
    optimizers.add(optimizer)


def apply(grads_and_vars: GradsAndVars, optimizer: Any,
          global_step: Optional[tf.Variable], before_update: Sequence[Any],
          condition: Optional[tf.Tensor], scope: str) -> tf.Operation:
    """Returns the op that applies the gradients and moves `global_step`.

    Args:
        grads_and_vars: What to apply.
        optimizer: What applies them.
        global_step: Variable or None.
        before_update: Ops and tensors that come before any change.
        condition: Scalar bool `Tensor`: only where it holds is anything
            changed.  None where it always does.
        scope: The library's name scope.
    """
    train_ops = tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)
    num_train_ops = len(train_ops)
    if condition is not None:
        with tf.name_scope(scope), tf.control_dependencies(before_update):
            condition = tf.identity(condition)
        outside = tf.get_default_graph().get_name_scope()
        with tf.name_scope(scope):
            train_op = accumulators_lib.run_if(
                condition, in_name_scope(outside, lambda: _apply_and_step(
                    grads_and_vars, optimizer, global_step, scope)))
    else:
        # Adam's sparse rule decays its slots whatever the gradient is, so the
        # gradients' own order behind the check is not enough.  Only
        # SyncReplicasOptimizer makes ops here that initialise, or run in a
        # thread of their own: they must not wait for a cycle, and what it
        # pushes is the gradients alone.
        if isinstance(optimizer, tf.train.SyncReplicasOptimizer):
            with tf.name_scope(scope), tf.control_dependencies(before_update):
                grads_and_vars = [
                    (cycle_lib.map_values(tf.identity, gradient), variable)
                    for gradient, variable in grads_and_vars]
            before_update = []
        with tf.control_dependencies(before_update):
            train_op = _apply_and_step(grads_and_vars, optimizer, global_step,
                                       scope)
    with tf.name_scope(scope):
        train_op = tf.group(train_op, name="train")
    # The optimizer's own op, if it put it there, is not the one to fetch.
    train_ops[num_train_ops:] = [train_op]
    return train_op


def in_name_scope(name_scope: str,
                  build: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
    """Returns `build` made to run in the name scope, from within a branch.

    So that the optimizer's variables have the names that they have outside.
    """
    def build_in_scope() -> tf.Tensor:
        with tf.name_scope(name_scope + "/" if name_scope else None):
            return build()
    return build_in_scope


def _apply_and_step(grads_and_vars: GradsAndVars, optimizer: Any,
                    global_step: Optional[tf.Variable],
                    scope: str) -> tf.Operation:
    graph = tf.get_default_graph()  # a branch may have one of its own
    num_ops = len(graph.get_operations())
    options = {} if global_step is None else {"global_step": global_step}
    try:
        with tf.variable_creator_scope(_make_initial_value_free):
            train_op = optimizer.apply_gradients(grads_and_vars, **options)
    except (NotImplementedError, RuntimeError) as error:
        if any(isinstance(gradient, tf.IndexedSlices)
               for gradient, _ in grads_and_vars):
            raise type(error)(
                f"{error}\nA gradient is IndexedSlices, for which the "
                "optimizer or a variable's constraint may have no rule.  "
                "With `accumulators=\"dense\"` it gets a dense tensor.")
        raise
    if global_step is not None and not _moves(
            graph.get_operations()[num_ops:], global_step):
        with tf.name_scope(scope), tf.control_dependencies([train_op]):
            train_op = tf.assign_add(global_step, 1)
    return train_op if isinstance(train_op, tf.Operation) else train_op.op


def _make_initial_value_free(next_creator: Callable[..., tf.Variable],
                             **kwargs: Any) -> tf.Variable:
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


def _moves(operations: Iterable[tf.Operation],
           global_step: tf.Variable) -> bool:
    """Returns whether one of `operations` may assign to `global_step`.

    Read off the graph, not from the value before and after: a wrapper that
    scales the loss holds the step back when it skips, and then it must stay;
    and another worker may move it in between.
    """
    variable_op = global_step.op
    if variable_op.graph is not tf.get_default_graph():
        # A branch of control flow v2 has its own name for what it captures.
        variable_op = tf.raw_ops.ReadVariableOp(
            resource=global_step.handle, dtype=global_step.dtype).op.inputs[
                0].op
    return variable_op.name in graph_reading.find_written(operations)
