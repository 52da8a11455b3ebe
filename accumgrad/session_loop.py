"""Drives accumulation cycles: zero, N micro-batches, one apply.

It takes anything with `zero_ops`, `accum_ops` and `train_op`, and adds no op
to the graph: all that it runs was built before.
"""

import collections.abc
import itertools
from typing import (Any, Callable, Iterable, Iterator, List, NamedTuple,
                    Optional, Sequence, Tuple, Union)

import numpy as np
import tensorflow.compat.v1 as tf

from accumgrad import checks
from accumgrad.annotations import Feed

PARTIALS = ("apply", "drop", "raise")


class CycleResult(NamedTuple):
    """What one accumulation cycle did.

    Attributes:
        index: Number of the cycle within its loop, from 0.
        num_micro_batches: Micro-batches in the update; 0 if nothing was
            applied, because the session was to stop or was lost.
        fetches: The structure of the loop's `fetches`, each leaf over the
            micro-batches: stacked to an array of shape
            `[num_micro_batches, ...]` where it is numeric and its shape stays
            the same, otherwise as a list.
    """
    # A tuple's own method of that name gives way.
    index: int  # type: ignore[assignment]
    num_micro_batches: int
    fetches: Any


def run_cycle(session: Any, ops: Any, feeds: Optional[Iterable[Feed]] = None,
              num_micro_batches: int = 128, *,
              fetches: Any = None) -> CycleResult:
    """Runs one cycle: zero, accumulate up to `num_micro_batches` times, train.

    Args:
        session: As in `run_cycles`.
        ops: As in `run_cycles`.
        feeds: As in `run_cycles`.  Of an iterator, just the feed dicts that
            the cycle needs are taken.
        num_micro_batches: Micro-batches in the cycle, an integer of at least
            1.  If the data has fewer left, these are applied.
        fetches: As in `run_cycles`.

    Returns:
        A `CycleResult` with index 0.

    Raises:
        TypeError: An argument is of a wrong kind.
        ValueError: `num_micro_batches` is below 1, or `feeds` is empty.
        tf.errors.OutOfRangeError: The graph's own input has no data left.
    """
    runner = _make_runner(session, ops, fetches)
    feeds = _check_feeds(feeds)
    num_micro_batches = checks.check_positive_integer("num_micro_batches",
                                                      num_micro_batches)
    fetched, end_of_input = _accumulate(
        runner, itertools.islice(feeds, num_micro_batches))
    if not fetched:
        raise end_of_input or ValueError(
            "`feeds` must have at least one feed dict left; got none, so "
            "nothing was applied.")
    by_leaf = _by_leaf(fetches, fetched)
    applied = not runner.should_stop() and runner.train()
    return CycleResult(0, len(fetched) if applied else 0, by_leaf)


def run_cycles(session: Any, ops: Any, feeds: Optional[Iterable[Feed]] = None,
               num_micro_batches: Union[int, Callable[[int], int]] = 128, *,
               num_cycles: Optional[int] = None, fetches: Any = None,
               partial: str = "apply",
               progress: bool = False) -> Iterator[CycleResult]:
    """Runs cycle after cycle, and yields a `CycleResult` after each update.

    Logging, saving and early stopping are the caller's::

        for cycle in run_cycles(session, ops, feeds, 128, fetches=loss):
            print(cycle.index, cycle.fetches.mean())

    An exception leaves the weights as the last whole cycle made them, and the
    next loop starts with clean accumulators.

    With a `MonitoredSession`, hooks run with the micro-batches and never with
    `zero_ops` or `train_op`.  The loop ends when `should_stop()` says so, and
    a cycle in which it does is dropped, whatever `partial` is:
    `StopAtStepHook` sees the last update with the micro-batch after it.  A
    cycle during which the session was lost and made anew is run again, on the
    data that follows.

    Args:
        session: A `tf.Session`, `InteractiveSession`, a `Supervisor`'s
            session, or a `MonitoredSession`.
        ops: An `AccumulationOps`, or anything with its three attributes.
        feeds: Iterable of feed dicts, one for each micro-batch; none is taken
            before it is needed.  `None` where the graph reads its own input.
            `tf.errors.OutOfRangeError`, from the graph or from the iterable,
            ends the data.
        num_micro_batches: Micro-batches in a cycle: an integer of at least 1,
            or a function that maps the cycle's index to one.
        num_cycles: Cycles to run, an integer of at least 1.  Default: until
            the data ends.
        fetches: What to evaluate with each micro-batch, in any structure that
            `session.run` takes.
        partial: What becomes of a last cycle for which the data was too
            short: `"apply"` it, `"drop"` it, or `"raise"` a `ValueError`.
        progress: Whether to show a progress bar for each cycle, where tqdm is
            installed.

    Returns:
        An iterator of `CycleResult`.

    Raises:
        TypeError: An argument is of a wrong kind.
        ValueError: A number is below 1, `partial` is none of the choices, or
            it is `"raise"` and the last cycle was not full.
    """
    checks.check_choice("partial", partial, PARTIALS)
    if num_cycles is not None:
        num_cycles = checks.check_positive_integer("num_cycles", num_cycles)
    if not callable(num_micro_batches):
        checks.check_positive_integer("num_micro_batches", num_micro_batches)
    # The generator begins behind the checks, so that they come with the call.
    return _cycles(_make_runner(session, ops, fetches), _check_feeds(feeds),
                   num_micro_batches, num_cycles, fetches, partial, progress)


def _cycles(runner: "_Runner", feeds: Iterator[Feed],
            num_micro_batches: Union[int, Callable[[int], int]],
            num_cycles: Optional[int], fetches: Any, partial: str,
            progress: bool) -> Iterator[CycleResult]:
    index = 0
    full = True
    while full and index != num_cycles and not runner.should_stop():
        size = _cycle_size(num_micro_batches, index)
        cycle_feeds: Iterable[Feed] = itertools.islice(feeds, size)
        if progress:
            cycle_feeds = _with_progress_bar(cycle_feeds, size, index)
        fetched, _ = _accumulate(runner, cycle_feeds)
        full = len(fetched) == size
        if runner.should_stop() or not fetched:
            return
        if not full and partial == "raise":
            raise ValueError(
                f"The data ended after {len(fetched)} of {size} micro-batches "
                f"of cycle {index}, which was not applied.  Pass "
                "`partial=\"apply\"` or `\"drop\"` to let it end there.")
        if not full and partial == "drop":
            return
        # All that can fail comes before the update.
        result = CycleResult(index, len(fetched), _by_leaf(fetches, fetched))
        if runner.train():
            yield result
            index += 1


def _accumulate(
        runner: "_Runner",
        feeds: Iterable[Feed]) -> Tuple[List[List[Any]], Optional[Exception]]:
    """Zeroes, and accumulates a micro-batch for each feed.

    Returns:
        The list of what each micro-batch fetched, and the OutOfRangeError
        that ended it, if one did.
    """
    runner.zero()
    fetched = []
    # The input that ends may also be read by who makes the feeds.
    try:
        for feed in feeds:
            values = runner.accumulate(_check_feed(feed))
            fetched.append([_own(value) for value in values])
            if runner.should_stop():
                break
    except tf.errors.OutOfRangeError as end_of_input:
        return fetched, end_of_input
    return fetched, None


class _SessionRunner:
    """Runs the ops in a plain session."""

    def __init__(self, session: Any, ops: Any, leaves: List[Any]) -> None:
        self._session = session
        self._num_leaves = len(leaves)
        self._micro_batch = leaves + list(ops.accum_ops)
        self._zero = session.make_callable(list(ops.zero_ops))
        self._train = session.make_callable([ops.train_op])
        self._accumulate_unfed = session.make_callable(self._micro_batch)

    def zero(self) -> None:
        self._zero()

    def accumulate(self, feed: Feed) -> List[Any]:
        # With feeds, make_callable comes down to session.run.
        values = (self._session.run(self._micro_batch, feed_dict=feed)
                  if feed else self._accumulate_unfed())
        return values[:self._num_leaves]

    def train(self) -> bool:
        """Returns whether the cycle was applied."""
        self._train()
        return True

    def should_stop(self) -> bool:
        return False


class _MonitoredSessionRunner:
    """Runs the ops in a `MonitoredSession`, hooks with micro-batches alone.

    A hook that fetches the loss would make `zero_ops` and `train_op` ask for
    a feed, or eat a batch of the graph's own input.
    """

    def __init__(self, session: Any, ops: Any, leaves: List[Any]) -> None:
        self._session = session
        self._ops = ops
        self._num_leaves = len(leaves)
        self._micro_batch = leaves + list(ops.accum_ops)
        self._zeroed_in = None

    def zero(self) -> None:
        self._zeroed_in = None
        while self._zeroed_in is None:
            self._zeroed_in = self._run_without_hooks(self._ops.zero_ops)

    def accumulate(self, feed: Feed) -> List[Any]:
        values = self._session.run(self._micro_batch, feed_dict=feed)
        return values[:self._num_leaves]

    def train(self) -> bool:
        """Returns whether the cycle was applied.

        Not if the session was lost meanwhile, and the accumulators with it.
        """
        return self._run_without_hooks(self._ops.train_op,
                                       self._zeroed_in) is not None

    def should_stop(self) -> bool:
        return self._session.should_stop()

    def _run_without_hooks(self, fetches: Any, only_in: Any = None) -> Any:
        """Runs `fetches` in the session inside, and returns that session.

        Returns None if it was lost, or is not `only_in`.
        """
        tried: List[Any] = []

        # MonitoredSession insists on the name of the argument.
        def run_once(step_context: Any) -> Any:
            session = step_context.session
            # If the session is lost in here, MonitoredSession makes a new one
            # and calls this again, but with the old one, which is closed.
            if tried or (only_in is not None and session is not only_in):
                return None
            tried.append(session)
            session.run(fetches)
            return session
        return self._session.run_step_fn(run_once)


_Runner = Union[_SessionRunner, _MonitoredSessionRunner]


def _make_runner(session: Any, ops: Any, fetches: Any) -> _Runner:
    for attribute in ("zero_ops", "accum_ops", "train_op"):
        if not hasattr(ops, attribute):
            raise TypeError(
                "`ops` must be an AccumulationOps, as build_accumulation_ops "
                f"returns it; got {ops!r} ({type(ops).__name__}), which has "
                f"no `{attribute}`.")
    leaves = [] if fetches is None else tf.nest.flatten(fetches)
    # In this order: tfdbg's wrapper of a plain session has both.
    if hasattr(session, "make_callable"):
        return _SessionRunner(session, ops, leaves)
    if hasattr(session, "run_step_fn"):
        return _MonitoredSessionRunner(session, ops, leaves)
    raise TypeError("`session` must be a tf.compat.v1.Session or "
                    f"MonitoredSession; got {session!r} "
                    f"({type(session).__name__}).")


def _check_feeds(feeds: Any) -> Iterator[Feed]:
    """Returns an iterator of feed dicts; of `None`, without end, for None."""
    if feeds is None:
        return itertools.repeat(None)
    if isinstance(feeds, (collections.abc.Mapping, str)) or not isinstance(
            feeds, collections.abc.Iterable):
        raise TypeError(
            "`feeds` must be an iterable of feed dicts, one for each "
            f"micro-batch; got {type(feeds).__name__}.  Of a single feed "
            "dict, pass a list of it.")
    return iter(feeds)


def _check_feed(feed: Any) -> Feed:
    if feed is not None and not isinstance(feed, collections.abc.Mapping):
        raise TypeError("`feeds` must yield feed dicts; got "
                        f"{feed!r} ({type(feed).__name__}).")
    return feed


def _cycle_size(num_micro_batches: Union[int, Callable[[int], int]],
                index: int) -> int:
    if not callable(num_micro_batches):
        return int(num_micro_batches)
    return checks.check_positive_integer(f"num_micro_batches({index})",
                                         num_micro_batches(index))


def _with_progress_bar(feeds: Iterable[Feed], size: int,
                       index: int) -> Iterable[Feed]:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return feeds
    return tqdm(feeds, total=size, desc=f"cycle {index}", leave=False,
                unit="micro-batch")


def _own(value: Any) -> Any:
    # A placeholder that is fetched comes back as the array that was fed,
    # which the caller may fill again for the next micro-batch.
    return value.copy() if isinstance(value, np.ndarray) else value


def _by_leaf(fetches: Any, fetched: List[List[Any]]) -> Any:
    """Turns a list over micro-batches into `fetches`' structure of lists."""
    if fetches is None:
        return None
    return tf.nest.pack_sequence_as(
        fetches, [_stack(values) for values in zip(*fetched)])


def _stack(values: Sequence[Any]) -> Any:
    # Not bytes: NumPy would cut them at their last non-zero byte.  Nor sparse
    # values, tuples of arrays, of which it would make one array, or fail.
    if all(isinstance(value, (np.ndarray, np.generic))
           and value.dtype.kind in "biufcV" and value.shape == values[0].shape
           for value in values):
        return np.stack(values)
    return list(values)
