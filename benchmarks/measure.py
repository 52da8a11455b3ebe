"""Measures one contender at one case: a process of its own runs this.

    python -m benchmarks.measure '{"case": "perceptron", ...}'

The last line that it prints is what it measured, as JSON.
"""

import itertools
import json
import platform
import statistics
import sys
import time

import tensorflow.compat.v1 as tf

from accumgrad import demo
from benchmarks import cases
from benchmarks import contenders
from benchmarks import models

# The first runs of a graph are slow: it is optimised, and memory is claimed.
NUM_WARM_UP = 2


class ClockedSession:
    """A session that notes when each of its runs begins.

    So what Python does between two runs is counted with the first of them.
    """

    def __init__(self, session):
        self._session = session
        self.begins = []

    def run(self, fetches, feed_dict=None):
        self.begins.append(time.perf_counter())
        return self._session.run(fetches, feed_dict=feed_dict)

    def make_callable(self, fetches):
        run = self._session.make_callable(fetches)

        def clocked_run():
            self.begins.append(time.perf_counter())
            return run()
        return clocked_run


def measure(case, contender, sizes, num_micro_batches, num_timed, seconds):
    """Returns what one contender takes, in this process.

    Args:
        case: A `cases.Case`.
        contender: One of `cases.CONTENDERS`.
        sizes: Arguments of the case's model.
        num_micro_batches: In a cycle.
        num_timed: Micro-batches to run instead, where a whole cycle of this
            contender is not called for.
        seconds: How long to go on with whole cycles, one at least.

    Returns:
        Dict, of times in seconds and of the process's peak resident memory in
        MB of 2**20:

        num_whole_cycles, num_timed: Cycles, 0 if they were not whole, and
            micro-batches that the times are of.
        zero_s, micro_batch_s, apply_s: Medians.
        cycle_s: Median, or computed from these three.
        micro_batch_mean_s: Mean.
        late_median_s, late_mean_s: Of a micro-batch in the second half of
            each cycle.
        initialized_mb, warm_mb, accumulated_mb, peak_mb: Once the variables
            are initialised, after the warm-up, at the last micro-batch of the
            first cycle, and at the end.
        dense_mb: Not a peak, but what dense accumulators take.
    """
    whole = contender == "auto" or not case.costly
    length = num_micro_batches if whole else num_timed
    model, cycles = _build(case, contender, sizes)
    memory = {"dense_mb": _dense_mb()}
    feeds = _watch_memory(itertools.cycle(model.make_feeds(num_micro_batches)),
                          length, memory)
    measured = []
    with tf.Session() as session:
        _initialize(session)
        memory["initialized_mb"] = demo.peak_memory_mb()
        clocked = ClockedSession(session)
        started = time.perf_counter()
        for index, _ in enumerate(cycles(
                clocked, feeds,
                lambda index: length if index else NUM_WARM_UP)):
            end = time.perf_counter()
            if index:
                measured.append(_parts(clocked.begins, end, length))
                if not whole or end - started >= seconds:
                    break
            else:
                started = end
            clocked.begins.clear()
    memory["peak_mb"] = demo.peak_memory_mb()
    return dict(_summary(measured, num_micro_batches, whole), **memory)


def _watch_memory(feeds, length, memory):
    """Yields the feeds, and notes the peak memory where it is of interest."""
    yield from itertools.islice(feeds, NUM_WARM_UP)
    # The warm-up's train_op is over when the first cycle asks for its feed.
    memory["warm_mb"] = demo.peak_memory_mb()
    yield from itertools.islice(feeds, length - 1)
    memory["accumulated_mb"] = demo.peak_memory_mb()
    yield from feeds


def _build(case, contender, sizes):
    """Returns the model, and the generator function of its cycles."""
    tf.set_random_seed(0)
    model = getattr(models, case.model)(**sizes)
    optimizer = models.OPTIMIZERS[case.optimizer]()
    return model, getattr(contenders, contender)(model.loss, optimizer)


def _dense_mb():
    return sum(variable.shape.num_elements() * variable.dtype.base_dtype.size
               for variable in tf.trainable_variables()) / 2 ** 20


def _initialize(session):
    # One by one: what is wanted is the peak of the training, not of all the
    # initial values at once.
    for variable in tf.global_variables():
        session.run(variable.initializer)


def _parts(begins, end, num_micro_batches):
    """Splits a cycle in seconds of zero, of each micro-batch, and of apply."""
    times = [after - before
             for before, after in zip(begins, begins[1:] + [end])]
    if len(times) == num_micro_batches:
        return 0.0, times, 0.0
    zero_s, *times, apply_s = times
    assert len(times) == num_micro_batches
    return zero_s, times, apply_s


def _summary(measured, num_micro_batches, whole):
    zeros, micro_batches, applies = zip(*measured)
    times = [t for cycle in micro_batches for t in cycle]
    late = [t for cycle in micro_batches for t in cycle[len(cycle) // 2:]]
    zero_s = statistics.median(zeros)
    micro_batch_s = statistics.median(times)
    apply_s = statistics.median(applies)
    if whole:
        cycle_s = statistics.median(
            zero + sum(cycle) + apply for zero, cycle, apply in measured)
    else:
        cycle_s = zero_s + num_micro_batches * micro_batch_s + apply_s
    return {"num_whole_cycles": len(measured) if whole else 0,
            "num_timed": len(times), "zero_s": zero_s,
            "micro_batch_s": micro_batch_s, "apply_s": apply_s,
            "cycle_s": cycle_s, "micro_batch_mean_s": statistics.mean(times),
            "late_median_s": statistics.median(late),
            "late_mean_s": statistics.mean(late)}


def main(job):
    """Does what `job`, a dict, says, and returns a dict of results."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    if tf.__version__ >= "2":
        tf.disable_v2_behavior()
    case = dict(cases.CASES, **cases.LONG_CASES)[job.pop("case")]
    return dict(measure(case, **job), tensorflow=tf.__version__,
                python=platform.python_version())


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
