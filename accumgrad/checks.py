"""Checks of what the user passed in, before the first op is added.

Each check raises or returns its argument in plain form.  None adds an op.
"""

import collections.abc
import inspect
import numbers
import re
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence

import tensorflow.compat.v1 as tf

from accumgrad.annotations import GradsAndVars
from accumgrad.annotations import MaybeGradsAndVars

# The base of TensorFlow 1's variables and of 2's: `tf.Variable` of compat.v1
# is no base of what `tf.compat.v2.Variable` makes.
VARIABLE_TYPE = tf.Variable.__base__


def check_graph_mode() -> None:
    """Raises RuntimeError where ops would not go into a plain graph."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "accumgrad builds graphs, but eager execution is on.  Call "
            "`tf.compat.v1.disable_eager_execution()` at the start of the "
            "program, or build under `with tf.Graph().as_default():`.")
    if tf.get_default_graph().building_function:
        raise RuntimeError(
            "accumgrad builds into a plain graph, but a function is being "
            "traced (`tf.function`, or a branch of `tf.cond`, or the body of "
            "`tf.while_loop`).  Build outside it.")


def check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    # Not `value in choices`: comparing a tensor or an array is no bool.
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{argument}` must be one of {listed}; "
                         f"got {value!r}.")


def check_name(name: Any) -> None:
    """Raises unless `name` can open a name scope of its own."""
    if not isinstance(name, str):
        raise TypeError("`name` must be a string, the name scope of the ops; "
                        f"got {name!r} ({_type_name(name)}).")
    # As TensorFlow has it for scopes at the root; no "/" at the end, which
    # would enter a scope that exists.
    if not re.match(r"^[A-Za-z0-9.]([A-Za-z0-9_.\\/>-]*[A-Za-z0-9_.>-])?$",
                    name):
        raise ValueError("`name` must be a valid name scope, such as "
                         f"'accumgrad'; got {name!r}.")


def check_loss(loss: Any) -> None:
    """Raises unless `loss` is a floating-point tensor of the default graph."""
    if not isinstance(loss, tf.Tensor):
        raise TypeError("`loss` must be a tf.Tensor, the loss of one "
                        f"micro-batch; got {loss!r} ({_type_name(loss)}).")
    if not loss.dtype.is_floating:
        raise TypeError("`loss` must have a floating-point dtype, or it has "
                        f"no gradient; got {loss.name!r} of dtype "
                        f"{loss.dtype.name}.")
    if loss.graph is not tf.get_default_graph():
        raise ValueError(
            f"`loss` must be in the default graph; got {loss.name!r} of "
            "another graph.  Build under `with loss.graph.as_default():`.")


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError unless `optimizer` has the two methods of TF 1's."""
    for method in ("compute_gradients", "apply_gradients"):
        if not callable(getattr(optimizer, method, None)):
            raise TypeError(
                "`optimizer` must have the methods `compute_gradients` and "
                "`apply_gradients` of tf.compat.v1.train.Optimizer; got "
                f"{optimizer!r} ({_type_name(optimizer)}), which has no "
                f"`{method}`.  A Keras optimizer does not serve; its "
                "namesake in tf.compat.v1.train does.")
    if _takes_tape(optimizer.compute_gradients):
        raise TypeError(
            "`optimizer` must be a tf.compat.v1.train.Optimizer or shaped "
            f"like one; got {optimizer!r} ({_type_name(optimizer)}), a Keras "
            "optimizer, which computes gradients with a tape.  Take its "
            "namesake in tf.compat.v1.train.")


def check_var_list(var_list: Any,
                   optimizer: Any) -> Optional[List[tf.Variable]]:
    """Returns `var_list` as a flat list of variables, or None if it is None.

    Raises:
        TypeError: Something in it is not a variable.
        ValueError: It is empty (or None, and nothing is trainable), has a
            variable twice, or one of another graph.
    """
    if var_list is None:
        # An optimizer-shaped object may bring its own variables.
        if isinstance(optimizer, tf.train.Optimizer) and not (
                tf.trainable_variables()):
            raise ValueError(
                "`var_list` is None, which means the trainable variables, "
                "and the graph has none.  Build the model first, or pass "
                "`var_list`.")
        return None
    variables = list(_flat_variables(var_list))
    if not variables:
        raise ValueError("`var_list` must have at least one variable; got "
                         f"{var_list!r}.  Leave it out to train all that is "
                         "trainable.")
    graph = tf.get_default_graph()
    foreign = [v.op.name for v in variables if v.graph is not graph]
    if foreign:
        raise ValueError("`var_list` must hold variables of the default "
                         "graph; of another graph are: " + ", ".join(foreign))
    check_distinct("var_list", variables)
    return variables


def check_distinct(argument: str, variables: Iterable[tf.Variable]) -> None:
    """Raises ValueError if a variable is in the list twice."""
    seen, repeated = set(), []
    for variable in variables:
        if id(variable) in seen:
            repeated.append(variable.op.name)
        seen.add(id(variable))
    if repeated:
        raise ValueError(
            f"`{argument}` must have each variable once, or it would be "
            "moved twice; more than once are: " + ", ".join(repeated))


def check_global_step(global_step: Any) -> None:
    """Raises unless `global_step` is None or a scalar integer variable."""
    if global_step is None:
        return
    if not isinstance(global_step, VARIABLE_TYPE):
        raise TypeError("`global_step` must be a variable, as "
                        "`tf.compat.v1.train.get_or_create_global_step()` "
                        f"makes it; got {global_step!r} "
                        f"({_type_name(global_step)}).")
    if not (global_step.dtype.base_dtype.is_integer
            and global_step.shape.is_compatible_with([])):
        raise TypeError(
            "`global_step` must be a scalar of an integer dtype; got "
            f"{global_step.op.name!r} of shape {global_step.shape} and dtype "
            f"{global_step.dtype.base_dtype.name}.")
    if global_step.graph is not tf.get_default_graph():
        raise ValueError("`global_step` must be in the default graph; got "
                         f"{global_step.op.name!r} of another graph.")


def check_weight(weight: Any) -> None:
    """Raises unless `weight` is None or a scalar real tensor or number."""
    if weight is None:
        return
    if isinstance(weight, numbers.Real) and not isinstance(weight, bool):
        if weight <= 0 or not weight < float("inf"):
            raise ValueError("`weight` must be above 0 and finite where it "
                             f"is a number; got {weight!r}.")
        return
    if not isinstance(weight, (tf.Tensor, VARIABLE_TYPE)):
        raise TypeError(
            "`weight` must be a scalar tf.Tensor, evaluated with each "
            f"micro-batch; got {weight!r} ({_type_name(weight)}).")
    dtype = weight.dtype.base_dtype
    if not ((dtype.is_floating or dtype.is_integer)
            and weight.shape.is_compatible_with([])):
        raise TypeError(
            "`weight` must be a scalar of a floating-point or integer dtype; "
            f"got {weight.name!r} of shape {weight.shape} and dtype "
            f"{dtype.name}.  Reduce it, as with tf.reduce_sum.")
    if weight.graph is not tf.get_default_graph():
        raise ValueError("`weight` must be in the default graph; got "
                         f"{weight.name!r} of another graph.")


def check_update_ops(update_ops: Any) -> List[tf.Operation]:
    """Returns `update_ops` as a flat list of operations.

    Raises:
        TypeError: Something in it is neither an operation nor what an
            assignment returns.
        ValueError: One is of another graph.
    """
    operations = []
    for op in tf.nest.flatten([] if update_ops is None else update_ops):
        # An assignment returns its variable, or a tensor.
        if isinstance(op, (tf.Tensor, VARIABLE_TYPE)):
            op = op.op
        if not isinstance(op, tf.Operation):
            raise TypeError(
                "`update_ops` must hold ops, as tf.compat.v1.get_collection("
                "tf.compat.v1.GraphKeys.UPDATE_OPS) does; got "
                f"{op!r} ({_type_name(op)}).")
        if op.graph is not tf.get_default_graph():
            raise ValueError("`update_ops` must be in the default graph; got "
                             f"{op.name!r} of another graph.")
        operations.append(op)
    return operations


def check_transform(transform_gradients: Any) -> None:
    """Raises TypeError unless it is None or can be called."""
    if transform_gradients is not None and not callable(transform_gradients):
        raise TypeError(
            "`transform_gradients` must be a function from a list of pairs "
            "(gradient, variable) to such a list; got "
            f"{transform_gradients!r} ({_type_name(transform_gradients)}).")


def check_loss_scale(nonfinite: str, optimizer: Any) -> None:
    """Raises ValueError if an infinity would be hidden from the optimizer."""
    if nonfinite != "apply" and _owns_dynamic_loss_scale(optimizer):
        raise ValueError(
            "`nonfinite` must be 'apply' with an optimizer that owns a "
            "dynamic loss scale, which it brings down when it sees an "
            f"infinity; got {nonfinite!r} with {optimizer!r} "
            f"({_type_name(optimizer)}).")


def check_conditional(what: str, optimizer: Any,
                      variables: Iterable[tf.Variable]) -> None:
    """Raises ValueError if it is not possible to apply in a `tf.cond`.

    Args:
        what: What cannot be done then, the beginning of the message.
        optimizer: The optimizer.
        variables: What is assigned to by it.
    """
    if isinstance(optimizer, tf.train.SyncReplicasOptimizer):
        raise ValueError(
            f"{what} with SyncReplicasOptimizer, for whose gradients other "
            "workers wait.")
    # TensorFlow 1.14 has no such name, and control flow v1.
    if getattr(tf, "control_flow_v2_enabled", bool)():
        reference = [variable.op.name for variable in variables
                     if variable.dtype != variable.dtype.base_dtype]
        if reference:
            raise ValueError(
                f"{what} for reference variables under control flow v2, in "
                "which they cannot be assigned to: " + ", ".join(reference)
                + ".  Call tf.compat.v1.enable_resource_variables() before "
                "they are made, or "
                "tf.compat.v1.disable_control_flow_v2().")


def check_flag(argument: str, value: Any) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{argument}` must be True or False; got {value!r} "
                        f"({_type_name(value)}).")


def check_grads_and_vars(
        name: str, grads_and_vars: Any,
        must: str = "must return") -> MaybeGradsAndVars:
    """Returns checked pairs: what the function `name` returned.

    Or what the argument `name` has; then it "must have" them.
    """
    pairs, what = [], f"`{name}` {must}"
    # Before it is asked for its items: a tensor would say that it has none.
    if isinstance(grads_and_vars, tf.Tensor) or not isinstance(
            grads_and_vars, collections.abc.Iterable):
        raise TypeError(f"{what} a list of pairs (gradient, variable); "
                        f"got {grads_and_vars!r} "
                        f"({_type_name(grads_and_vars)}).")
    for pair in grads_and_vars:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{what} pairs (gradient, variable); got "
                            f"{pair!r} ({_type_name(pair)}).")
        gradient, variable = pair
        if not (gradient is None
                or isinstance(gradient, (tf.Tensor, tf.IndexedSlices))):
            raise TypeError(
                f"{what} gradients that are each a tf.Tensor, "
                f"tf.IndexedSlices or None; got {gradient!r} "
                f"({_type_name(gradient)}).")
        if not isinstance(variable, VARIABLE_TYPE):
            raise TypeError(
                f"{what} each gradient with a variable; got {variable!r} "
                f"({_type_name(variable)}).")
        pairs.append((gradient, variable))
    check_distinct(name, [variable for _, variable in pairs])
    return pairs


def check_transformed(grads_and_vars: Any,
                      given: Sequence[tf.Variable]) -> GradsAndVars:
    """Returns what `transform_gradients` returned, but for what it dropped.

    Args:
        grads_and_vars: What it returned.
        given: The variables of what it was given.

    Raises:
        TypeError: That is not pairs of a gradient and a variable, or a
            gradient has no floating-point dtype where its variable has.
        ValueError: A variable was not given to it, or comes twice, or has
            another shape than its gradient; or no variable is left.
    """
    source = "transform_gradients"
    pairs = [(gradient, variable) for gradient, variable
             in check_grads_and_vars(source, grads_and_vars)
             if gradient is not None]
    if not pairs:
        raise ValueError(f"`{source}` must return at least one gradient; got "
                         f"{grads_and_vars!r}.")
    given_ids = {id(variable) for variable in given}
    for gradient, variable in pairs:
        if id(variable) not in given_ids:
            raise ValueError(
                f"`{source}` must return variables that it was given; got "
                f"{variable.op.name!r}, which is none of them: "
                + ", ".join(variable.op.name for variable in given))
        if (gradient.dtype.is_floating
                != variable.dtype.base_dtype.is_floating):
            raise TypeError(
                f"`{source}` must return a gradient of its variable's dtype; "
                f"got one of {gradient.dtype.name} for {variable.op.name!r} "
                f"of {variable.dtype.base_dtype.name}.")
        if isinstance(gradient, tf.Tensor) and not (
                gradient.shape.is_compatible_with(variable.shape)):
            raise ValueError(
                f"`{source}` must return a gradient of its variable's shape; "
                f"got one of {gradient.shape} for {variable.op.name!r} of "
                f"{variable.shape}.")
    return pairs


def check_num_micro_batches(num_micro_batches: Any) -> None:
    """Raises unless it is an integer of at least 1 or an integer scalar."""
    name = "num_micro_batches"
    if not isinstance(num_micro_batches, (tf.Tensor, VARIABLE_TYPE)):
        check_positive_integer(name, num_micro_batches)
        return
    if not (num_micro_batches.dtype.base_dtype.is_integer
            and num_micro_batches.shape.is_compatible_with([])):
        raise TypeError(
            f"`{name}` must be a scalar of an integer dtype; got "
            f"{num_micro_batches.name!r} of shape {num_micro_batches.shape} "
            f"and dtype {num_micro_batches.dtype.base_dtype.name}.")
    if num_micro_batches.graph is not tf.get_default_graph():
        raise ValueError(f"`{name}` must be in the default graph; got "
                         f"{num_micro_batches.name!r} of another graph.")


def check_positive_integer(argument: str, value: Any) -> int:
    """Returns `value` as an int of at least 1, or raises."""
    # bool is an Integral too, but True micro-batches is a mistake.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{argument}` must be an integer of at least 1; "
                        f"got {value!r} ({_type_name(value)}).")
    if value < 1:
        raise ValueError(f"`{argument}` must be at least 1; got {value!r}.")
    return int(value)


def _flat_variables(var_list: Any) -> Iterator[tf.Variable]:
    """Yields the variables in a nest of lists, each partition by itself."""
    if isinstance(var_list, VARIABLE_TYPE):
        yield var_list
    elif isinstance(var_list, collections.abc.Mapping):
        yield from _flat_variables(list(var_list.values()))
    elif _is_partitioned(var_list) or isinstance(
            var_list, (list, tuple, set, collections.abc.Iterator)):
        for item in var_list:
            yield from _flat_variables(item)
    else:
        raise TypeError(
            "`var_list` must hold tf.Variable objects; got "
            f"{var_list!r} ({_type_name(var_list)}).  Of a tensor, pass the "
            "variable that it was read from; of a Keras 3 variable, its "
            "`.value`.")


def _is_partitioned(value: Any) -> bool:
    # TensorFlow has no public name for the class of partitioned variables.
    return hasattr(value, "as_tensor") and hasattr(value, "__iter__")


def _owns_dynamic_loss_scale(optimizer: Any) -> bool:
    """Returns whether it, or an optimizer inside it, holds a loss scale."""
    experimental = tf.train.experimental
    seen, inside = set(), [optimizer]
    while inside:
        owner = inside.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for value in getattr(owner, "__dict__", {}).values():
            if (isinstance(value, experimental.LossScale)
                    and not isinstance(value, experimental.FixedLossScale)):
                return True
            if isinstance(value, tf.train.Optimizer):
                inside.append(value)
    return False


def _takes_tape(compute_gradients: Callable[..., Any]) -> bool:
    try:
        return "tape" in inspect.signature(compute_gradients).parameters
    except (TypeError, ValueError):
        return False  # a callable without a signature: let it try


def _type_name(value: Any) -> str:
    return type(value).__module__ + "." + type(value).__qualname__
