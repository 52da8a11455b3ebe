"""Tells which form each accumulator took, and what it costs.

Builders leave their accumulators' descriptions here; they are plain numbers
and strings, and go with the graph.
"""

import weakref
from typing import (Any, List, MutableMapping, NamedTuple, Optional, Sequence,
                    Tuple)

import tensorflow.compat.v1 as tf

from accumgrad.annotations import GradsAndVars

# Graph -> list of (name of the train op, descriptions).
_DESCRIPTIONS: MutableMapping[
    tf.Graph, List[Tuple[str, List["AccumulatorDescription"]]]] = (
        weakref.WeakKeyDictionary())


class AccumulatorDescription(NamedTuple):
    """How one variable's gradient is held through a cycle.

    Attributes:
        variable: Name of the variable.
        shape: Its static shape, a tuple; None where a size is unknown, and
            None for all of it where the rank is.
        form: `"dense"`, `"rows"` or `"contraction"`.
        reason: Why that form: for a contraction, the terms that the gradient
            is a sum of.
        dense_bytes: Bytes of the dense form, a sum of the variable's shape;
            None where the shape is unknown.
        micro_batch_bytes: Bytes that one micro-batch adds to what is stored;
            0 for the dense form, None where they depend on the feed.
    """
    variable: str
    shape: Optional[Tuple[Optional[int], ...]]
    form: str
    reason: str
    dense_bytes: Optional[int]
    micro_batch_bytes: Optional[int]


class AccumulatorDescriptions(List[AccumulatorDescription]):
    """A list of descriptions that prints as a table."""

    def __str__(self) -> str:
        header = ("variable", "shape", "form", "dense", "a micro-batch",
                  "reason")
        rows = [(item.variable, _shape_text(item.shape), item.form,
                 _bytes_text(item.dense_bytes, "unknown"),
                 _bytes_text(item.micro_batch_bytes, "by the feed"),
                 item.reason)
                for item in self]
        widths = [max(map(len, column)) for column in zip(header, *rows)]
        lines = [header, tuple("-" * width for width in widths)] + rows
        return "\n".join(_line(cells, widths) for cells in lines)


def describe_accumulators(ops_or_graph: Any = None) -> AccumulatorDescriptions:
    """Tells how each variable's gradient is held: form, reason, bytes.

    A list to go through, which prints as a table::

        print(accumgrad.describe_accumulators(ops))

    Args:
        ops_or_graph: An `AccumulationOps`; or a `tf.Graph`, for all that were
            built into it.  Default: the default graph.

    Returns:
        A list of `AccumulatorDescription`, in the optimizer's order of the
        variables.  It prints as a table.

    Raises:
        TypeError: `ops_or_graph` is neither.
        ValueError: `build_accumulation_ops` did not build it, or built
            nothing into the graph.
    """
    if ops_or_graph is None:
        ops_or_graph = tf.get_default_graph()
    if isinstance(ops_or_graph, tf.Graph):
        built = _DESCRIPTIONS.get(ops_or_graph, [])
    elif isinstance(getattr(ops_or_graph, "train_op", None), tf.Operation):
        train_op = ops_or_graph.train_op
        built = [(name, items)
                 for name, items in _DESCRIPTIONS.get(train_op.graph, [])
                 if name == train_op.name]
    else:
        raise TypeError("`ops_or_graph` must be an AccumulationOps or a "
                        f"tf.Graph; got {ops_or_graph!r} "
                        f"({type(ops_or_graph).__name__}).")
    if not built:
        raise ValueError("`ops_or_graph` must come from, or hold what comes "
                         "from, build_accumulation_ops; got "
                         f"{ops_or_graph!r}, of which nothing is known.")
    return AccumulatorDescriptions(
        item for _, items in built for item in items)


def remember(train_op: tf.Operation, accumulators: Sequence[Any],
             grads_and_vars: GradsAndVars) -> None:
    """Keeps the descriptions of what a builder built, for its graph."""
    items = [_describe(accumulator, variable)
             for accumulator, (_, variable)
             in zip(accumulators, grads_and_vars)]
    _DESCRIPTIONS.setdefault(train_op.graph, []).append(
        (train_op.name, items))


def _describe(accumulator: Any,
              variable: tf.Variable) -> AccumulatorDescription:
    shape = variable.shape
    dense_bytes = None
    if shape.is_fully_defined():
        dense_bytes = shape.num_elements() * accumulator.dtype.size
    return AccumulatorDescription(
        variable.op.name,
        None if shape.rank is None else tuple(shape.as_list()),
        accumulator.form, accumulator.reason, dense_bytes,
        accumulator.micro_batch_bytes)


def _shape_text(shape: Optional[tuple]) -> str:
    if shape is None:
        return "unknown"
    sizes = ["?" if size is None else str(size) for size in shape]
    return " x ".join(sizes) or "scalar"


def _bytes_text(number: Optional[int], otherwise: str) -> str:
    if number is None:
        return otherwise
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if size < 999.95:  # what is rounded to 1000.0 is of the next unit
            break
        size /= 1000
    else:
        unit = "GB"
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:3], widths)]
    right = [cell.rjust(width)
             for cell, width in zip(cells[3:5], widths[3:5])]
    return "  ".join(left + right + list(cells[5:])).rstrip()
