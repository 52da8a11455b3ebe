"""One op that accumulates, and applies at every N-th run.

For loops that are not the user's own and know only one op.  The accumulators
are those of the builder, and so is what they promise.
"""

from typing import Any, Dict, List, Optional, Tuple, Union

import tensorflow.compat.v1 as tf

from accumgrad import accumulators as accumulators_lib
from accumgrad import builder
from accumgrad import checks
from accumgrad import cycle as cycle_lib
from accumgrad import describe
from accumgrad import hooks
from accumgrad.annotations import GradsAndVars
from accumgrad.annotations import IterableOfPairs
from accumgrad.annotations import MaybeGradsAndVars
from accumgrad.annotations import Transform


class AccumulatingOptimizer(tf.train.Optimizer):
    """Makes an optimizer apply its gradients once in `num_micro_batches` runs.

    For `tf.estimator`, `tf_slim.learning.train`, `MonitoredTrainingSession`
    and all other loops that run one `train_op` again and again::

        optimizer = accumgrad.AccumulatingOptimizer(
            tf.train.AdamOptimizer(1e-4), 128, reduction="mean")
        train_op = optimizer.minimize(
            loss, global_step=tf.train.get_or_create_global_step())

    Each run of `train_op` accumulates one micro-batch.  Every
    `num_micro_batches`-th also applies the reduced gradient, moves
    `global_step` by one, and empties the accumulators.  In between, weights,
    slots and global step stay as they are, bit for bit.  So schedules,
    `StopAtStepHook` and checkpoints count cycles.

    `compute_gradients` and `apply_gradients` may be called one by one, with
    code of the user's between them.  A gradient that it leaves alone is held
    in its smallest exact form; one that it rewrites is rewritten in every
    micro-batch.  What is to be done once a cycle, such as clipping, goes to
    `transform_gradients`.

    The accumulators are local variables.  Where nobody initialises these, the
    first run does.  A process that starts from a checkpoint begins a new
    cycle, unless `save_accumulators` is true.  An error that a run raises
    where it applies ends its cycle, and the next begins with the next run.
    """

    def __init__(self, optimizer: Any,
                 num_micro_batches: Union[int, tf.Tensor] = 128, *,
                 reduction: str = "sum",
                 weight: Union[None, float, tf.Tensor] = None,
                 transform_gradients: "Optional[Transform]" = None,
                 update_ops: Any = None, nonfinite: str = "apply",
                 accumulators: str = "auto",
                 save_accumulators: bool = False,
                 name: str = "accumgrad") -> None:
        """Wraps an optimizer.

        Args:
            optimizer: As of `accumgrad.build_accumulation_ops`.  Wrap each
                once.
            num_micro_batches: Runs in a cycle: an integer of at least 1, or
                a scalar integer `Tensor`, evaluated with each run (and
                before it, where there is a hook of `per_cycle`: then it must
                need no feed).
            reduction: As of `accumgrad.build_accumulation_ops`, and so are
                all that follow.
            weight: See there.
            transform_gradients: See there.
            update_ops: See there.
            nonfinite: See there.  With `"skip"`, a cycle that is skipped
                ends nevertheless.  `"skip_micro_batch"`: one that is skipped
                is one of the runs of its cycle nevertheless, and a cycle of
                nothing else ends with `tf.errors.InvalidArgumentError`.  What
                update ops write is taken back to what it was after the run
                before, or when the local variables were initialised: do that
                after restoring, as `MonitoredSession` does.
            accumulators: See there.
            save_accumulators: See there.
            name: See there.

        Raises:
            RuntimeError: Eager execution is on, or a function is being
                traced.
            TypeError, ValueError: As of `accumgrad.build_accumulation_ops`;
                or `num_micro_batches` is no integer of at least 1;
                `optimizer` is a `SyncReplicasOptimizer`.
        """
        checks.check_graph_mode()
        checks.check_optimizer(optimizer)
        checks.check_num_micro_batches(num_micro_batches)
        checks.check_name(name)
        options = cycle_lib.check_options(cycle_lib.Options(
            reduction, weight, transform_gradients, update_ops, nonfinite,
            accumulators, save_accumulators), optimizer)
        checks.check_conditional("`optimizer` must not be wrapped", optimizer,
                                 [])
        super().__init__(use_locking=False, name=name)
        self._optimizer = optimizer
        self._num_micro_batches = num_micro_batches
        self._options = options
        # The losses, and what was built, by graph.
        self._losses: Dict[tf.Graph, List[tf.Tensor]] = {}
        self._built: Dict[tf.Graph, "_OneOp"] = {}

    def compute_gradients(
            self, loss: tf.Tensor, var_list: Any = None, *args: Any,
            **kwargs: Any) -> MaybeGradsAndVars:
        """Returns the optimizer's own `compute_gradients`, of a micro-batch.

        Args:
            loss: As of `accumgrad.build_accumulation_ops`.
            var_list: As there.
            *args: As of the optimizer's method.
            **kwargs: As of the optimizer's method.

        Returns:
            List of pairs (gradient, variable).
        """
        checks.check_graph_mode()
        checks.check_loss(loss)
        var_list = checks.check_var_list(var_list, self._optimizer)
        # An optimizer of the user's own need not know the options.
        defaults = {"gate_gradients": self.GATE_OP,
                    "aggregation_method": None,
                    "colocate_gradients_with_ops": False, "grad_loss": None}
        options = {name: value for name, value in kwargs.items()
                   if name not in defaults or value is not defaults[name]}
        # As in the builder: the caller's control dependencies, on batch
        # normalisation's update ops say, are for what `apply_gradients`
        # makes.  A term of weight decay that waited for them would not look
        # constant.
        with tf.control_dependencies(None):
            pairs = checks.check_grads_and_vars(
                "optimizer.compute_gradients",
                self._optimizer.compute_gradients(loss, var_list, *args,
                                                  **options))
        self._losses.setdefault(loss.graph, []).append(loss)
        return pairs

    def apply_gradients(
            self,
            grads_and_vars: IterableOfPairs,
            global_step: Optional[tf.Variable] = None,
            name: Optional[str] = None) -> tf.Operation:
        """Returns the op that accumulates, and applies at the end of a cycle.

        Args:
            grads_and_vars: Pairs of one micro-batch's gradient, a `Tensor`,
                `IndexedSlices` or `None`, and its variable.
            global_step: Optional scalar integer variable, which counts
                cycles: it moves by one with each update, also where the
                optimizer ignores it.
            name: Optional name of the op.

        Returns:
            A `tf.Operation`.

        Raises:
            ValueError: There is no gradient; it was called before for this
                graph; or a variable is a reference variable, and control flow
                v2 is on.
        """
        checks.check_graph_mode()
        graph = tf.get_default_graph()
        checks.check_global_step(global_step)
        grads_and_vars = [
            (gradient, variable) for gradient, variable
            in checks.check_grads_and_vars("grads_and_vars", grads_and_vars,
                                           "must have")
            if gradient is not None]
        if not grads_and_vars:
            raise ValueError("`grads_and_vars` must have a gradient for at "
                             "least one variable; got none.")
        if graph in self._built:
            raise ValueError(
                "An AccumulatingOptimizer serves one `apply_gradients` in a "
                "graph, as it has one counter; got a second.  Make another "
                "for it.")
        checks.check_conditional(
            "`apply_gradients` cannot be done at the end of a cycle",
            self._optimizer, [variable for _, variable in grads_and_vars]
            + ([] if global_step is None else [global_step]))
        builder.warn_if_shared(self._optimizer)
        train_ops = tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)
        num_train_ops = len(train_ops)
        built = _OneOp(self._optimizer, grads_and_vars, global_step,
                       self._losses.get(graph, []), self._num_micro_batches,
                       self._options, builder.open_scope(self.get_name()))
        train_op = tf.group(built.train_op, name=name or "train")
        # The optimizer's own op, if it put it there, is not the one to fetch.
        train_ops[num_train_ops:] = [train_op]
        self._built[graph] = built
        describe.remember(train_op, built.cycle.accumulators, grads_and_vars)
        return train_op

    @property
    def has_updated(self) -> tf.Tensor:
        """Scalar bool `Tensor`: whether the last run of `train_op` applied.

        It reads a variable: fetch it in a run of its own, after the other.
        It needs no feed.
        """
        return self._get_built().has_updated

    @property
    def mean_loss(self) -> tf.Tensor:
        """Scalar `Tensor`: the mean loss over the cycle so far.

        To be fetched with `train_op`, as summaries are: of the micro-batches
        before, and of this one; so of all of them in the run that applies.
        With `weight`, the weighted mean; 0 where nothing counts.  float32,
        or float64 as the loss.

        Raises:
            ValueError: `compute_gradients` was not called exactly once in the
                graph, or `apply_gradients` not yet.
        """
        mean_loss = self._get_built().mean_loss
        if mean_loss is None:
            raise ValueError(
                "`mean_loss` is of the loss that `compute_gradients` was "
                "called with, and it was not called exactly once in this "
                "graph.")
        return mean_loss

    def flush_op(self) -> tf.Operation:
        """Returns an op that applies what a cycle has so far, and ends it.

        For a last cycle for which the data was too short.  It needs no feed.
        With nothing accumulated it raises `tf.errors.InvalidArgumentError`.
        It calls `apply_gradients` of the optimizer a second time, in reuse of
        its variables; an optimizer that would make new ones cannot be
        flushed.

        Raises:
            ValueError: `apply_gradients` was not called yet, or the optimizer
                makes variables again.
        """
        return self._get_built().flush_op()

    def per_cycle(self, hook: tf.train.SessionRunHook) -> hooks.PerCycleHook:
        """Returns a hook that runs `hook` only at the end of a cycle.

        Args:
            hook: A `tf.train.SessionRunHook`.

        Returns:
            A `tf.train.SessionRunHook`.  Before each run it looks into the
            accumulators' counter, so it adds a short run to each.

        Raises:
            TypeError: `hook` is none.
            ValueError: `apply_gradients` was not called yet.
        """
        if not isinstance(hook, tf.train.SessionRunHook):
            raise TypeError("`hook` must be a tf.compat.v1.train."
                            f"SessionRunHook; got {hook!r} "
                            f"({type(hook).__name__}).")
        return hooks.PerCycleHook(hook, self._get_built().will_update)

    def get_slot(self, var: tf.Variable, name: str) -> Optional[tf.Variable]:
        """Returns the optimizer's own slot."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> List[str]:
        """Returns the names of the optimizer's own slots."""
        return self._optimizer.get_slot_names()

    def variables(self) -> List[tf.Variable]:
        """Returns the optimizer's own variables."""
        return self._optimizer.variables()

    def _get_built(self) -> "_OneOp":
        built = self._built.get(tf.get_default_graph())
        if built is None:
            raise ValueError("Call `minimize` or `apply_gradients` first, in "
                             "the default graph.")
        return built


class _OneOp:
    """What is built for one graph.

    Attributes:
        cycle: The `cycle.Cycle`.
        train_op, has_updated, mean_loss: As of `AccumulatingOptimizer`.
        will_update: Scalar bool `Tensor`: whether the next run will apply.
    """

    def __init__(self, optimizer: Any, grads_and_vars: GradsAndVars,
                 global_step: Optional[tf.Variable], losses: List[tf.Tensor],
                 num_micro_batches: Union[int, tf.Tensor],
                 options: cycle_lib.Options, scope: str) -> None:
        self._optimizer = optimizer
        self._global_step = global_step
        self._options = options
        self._scope = scope
        self._name_scope = tf.get_default_graph().get_name_scope()
        self._variable_scope = tf.get_variable_scope()
        self.cycle = cycle_lib.Cycle(grads_and_vars, options, losses, scope)
        saved = options.save_accumulators
        with tf.name_scope(scope):
            with tf.control_dependencies(None), tf.device(self.cycle.device):
                # Of the cycle that is under way; below zero from where one is
                # to be applied until that is done.  Should it fail, the next
                # run begins a new one.
                self._count = accumulators_lib.count_variable(
                    "num_runs", tf.int64, saved)
                self._loss_sum = accumulators_lib.count_variable(
                    "loss_sum", tf.float64, saved)
                self._updated = accumulators_lib.state_variable(
                    "has_updated", lambda: tf.zeros([], tf.bool), tf.bool,
                    saved=saved)
                size = tf.cast(num_micro_batches, tf.int64)
                # They are initialised together.
                is_ready = tf.raw_ops.VarIsInitializedOp(
                    resource=self._count.handle)
                self.has_updated = tf.cond(
                    is_ready, self._updated.read_value,
                    lambda: tf.constant(False), name="has_updated")
                self._num_accumulated = tf.maximum(tf.cond(
                    is_ready, self._count.read_value,
                    lambda: tf.zeros([], tf.int64)), 0)
                self.will_update = self._num_accumulated + 1 >= size
                begins = tf.cond(is_ready,
                                 lambda: self._count.read_value() < 0,
                                 lambda: tf.constant(True))
            begun = accumulators_lib.run_if(begins,
                                            lambda: self._begin(is_ready))
        with tf.control_dependencies([begun]):
            with tf.name_scope(scope):
                count = self._count.read_value() + 1
                loss_sum = self._loss_sum.read_value()
                total_weight = self.cycle.total_weight.read_value()
            # What was read is what was there before this run.
            with tf.control_dependencies([count, loss_sum, total_weight]):
                accumulated = self.cycle.accumulate()
        with tf.name_scope(scope):
            counted = [accumulated]
            self.mean_loss = None
            if len(losses) == 1:
                loss_sum, self.mean_loss = self._add_loss(
                    losses[0], loss_sum, total_weight)
                with tf.control_dependencies([accumulated]):
                    counted.append(self._loss_sum.assign(loss_sum,
                                                         read_value=False))
            is_last = count >= size
            with tf.control_dependencies([accumulated]):
                counted.append(self._count.assign(
                    tf.where(is_last, tf.constant(-1, tf.int64), count),
                    read_value=False))
            with tf.control_dependencies(counted):
                is_last = tf.identity(is_last)
            # Nothing here is the micro-batch's but the condition.
            with tf.control_dependencies(None):
                self.train_op = tf.cond(
                    is_last,
                    builder.in_name_scope(self._name_scope, self._apply),
                    self._rest).op

    def flush_op(self) -> tf.Operation:
        """See `AccumulatingOptimizer.flush_op`."""
        before = {id(variable) for variable in tf.global_variables()}
        train_ops = tf.get_collection(tf.GraphKeys.TRAIN_OP)
        with tf.control_dependencies(None):
            with tf.name_scope(self._scope), tf.name_scope("flush"):
                accumulated = cycle_lib.check(
                    self._num_accumulated > 0,
                    "accumgrad: flush_op found nothing accumulated since the "
                    "last update.  Run train_op at least once before it.")
                with tf.control_dependencies([accumulated]):
                    begun = self._count.assign(-1, read_value=False)
            with tf.control_dependencies([begun]), tf.variable_scope(
                    self._variable_scope, reuse=True,
                    auxiliary_name_scope=False):
                applied = builder.in_name_scope(self._name_scope,
                                                self._apply)().op
        tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)[:] = train_ops
        made = [variable.op.name for variable in tf.global_variables()
                if id(variable) not in before]
        if made:
            raise ValueError(
                "`flush_op` cannot be had with an optimizer that makes its "
                "variables anew in each call of `apply_gradients`; it made: "
                + ", ".join(made) + ".")
        return applied

    def _add_loss(self, loss: tf.Tensor, loss_sum: tf.Tensor,
                  total_weight: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        """Returns the sum and the mean of the losses, with this one."""
        value = tf.cast(tf.reduce_sum(loss), tf.float64)
        weight = self.cycle.weight
        if weight is None:
            total = tf.cast(total_weight + 1, tf.float64)
        else:
            weight = tf.cast(weight, tf.float64)
            total = tf.cast(total_weight, tf.float64) + weight
            # Times zero, also a NaN is zero.
            value = tf.math.multiply_no_nan(value, weight)
        loss_sum += value
        dtype = tf.float64 if loss.dtype == tf.float64 else tf.float32
        mean = tf.math.divide_no_nan(loss_sum, total)
        return loss_sum, tf.cast(mean, dtype, name="mean_loss")

    def _apply(self) -> tf.Tensor:
        """Ends the cycle; returns whether something was applied."""
        cycle = self.cycle
        pairs = cycle.transform(cycle.reduce())
        with tf.name_scope(self._scope):
            conditions = []  # with a message where it is to be an error
            if cycle.is_weighted:
                conditions.append((
                    cycle.is_accumulated(),
                    "accumgrad: no micro-batch of the cycle counts for "
                    "anything; nothing was applied."))
            if self._options.nonfinite == "raise":
                conditions += cycle.are_finite(pairs)
            errors = list(conditions)
            if self._options.nonfinite == "skip":
                conditions += cycle.are_finite(pairs)
            condition = (cycle_lib.all_of(conditions) if conditions
                         else None)
        applied = builder.apply(pairs, self._optimizer, self._global_step,
                                cycle.early_reads(pairs), condition,
                                self._scope)
        has_updated = tf.constant(True) if condition is None else condition
        with tf.name_scope(self._scope):
            with tf.control_dependencies([applied]):
                ended = tf.group(
                    self.cycle.zero(), self._reset_counts(),
                    self._updated.assign(has_updated, read_value=False))
            # Only now, so that the next cycle begins clean; and in turn, for
            # where nothing counts, a mean is NaN.
            done = ended
            for error in errors:
                with tf.control_dependencies([done]):
                    done = cycle_lib.check(*error)
            with tf.control_dependencies([done]):
                return tf.identity(has_updated)

    def _rest(self) -> tf.Tensor:
        with tf.control_dependencies([
                self._updated.assign(False, read_value=False)]):
            return tf.constant(False)

    def _begin(self, is_ready: tf.Tensor) -> tf.Operation:
        """Returns an op that begins a cycle where none was ended."""
        operations = [self.cycle.zero(), self._reset_counts(),
                      self._updated.assign(False, read_value=False)]
        if self._options.nonfinite == "skip_micro_batch":
            operations.append(accumulators_lib.run_if(
                tf.logical_not(is_ready), self.cycle.forget_updates))
        return tf.group(*operations)

    def _reset_counts(self) -> tf.Operation:
        return tf.group(accumulators_lib.reset(self._count),
                        accumulators_lib.reset(self._loss_sum))
