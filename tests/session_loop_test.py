"""The session loop: `run_cycle` and `run_cycles`, in every kind of session.

Nearly all tests train `loss = w x` from w = 1 with plain gradient descent at
rate 1, on x = 1, 2, 3, ...: a cycle takes the sum of its x off w, so that the
weights tell which micro-batches went into which update.
"""

import contextlib
import inspect
import itertools
import re
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad

PARTIALS = ("apply", "drop", "raise")
LOOPS = ("run_cycle", "run_cycles")


@pytest.fixture(autouse=True)
def fresh_graph():
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        yield graph


class Model(NamedTuple):
    x: Any
    w: Any
    loss: Any
    global_step: Any
    ops: accumgrad.AccumulationOps
    init: tf.Operation

    def feeds(self, *values):
        return [{self.x: value} for value in values]

    def state(self, session):
        """Returns w and the global step, as Python numbers."""
        w, global_step = peek(session, [self.w, self.global_step])
        return float(w), int(global_step)


def build_model(x=None, reduction="sum", use_resource=True):
    if x is None:
        x = tf.placeholder(tf.float32, [], name="x")
    w = tf.Variable(1.0, name="w", use_resource=use_resource)
    loss = tf.reduce_sum(w * x, name="loss")
    global_step = tf.train.get_or_create_global_step()
    ops = accumgrad.build_accumulation_ops(
        loss, tf.train.GradientDescentOptimizer(1.0), reduction=reduction,
        global_step=global_step)
    return Model(x, w, loss, global_step, ops,
                 tf.global_variables_initializer())


def numpy_training(values, num_micro_batches):
    """Returns w after each cycle, and the loss of each micro-batch."""
    w, weights, losses = 1.0, [], []
    for start in range(0, len(values), num_micro_batches):
        cycle = np.array(values[start:start + num_micro_batches], np.float64)
        losses.extend((w * cycle).tolist())
        w -= cycle.sum()
        weights.append(w)
    return weights, losses


def count_up_to(last):
    """Returns a `tf.data` dataset of 1.0, 2.0, ..., `last`."""
    return tf.data.Dataset.range(1, last + 1).map(
        lambda value: tf.cast(value, tf.float32))


def read_once(dataset):
    return tf.data.make_one_shot_iterator(dataset).get_next()


def read_initializable(dataset):
    """The iterator is initialised with the tables, as Scaffold does it."""
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS,
                         iterator.initializer)
    return iterator.get_next()


def peek(session, fetches):
    """Evaluates beside all hooks, also after the session was to stop."""
    if not hasattr(session, "run_step_fn"):
        return session.run(fetches)
    return session.run_step_fn(
        lambda step_context: step_context.session.run(fetches))


def start(model):
    """Returns a plain session in which the model is initialised."""
    session = tf.Session()
    session.run([model.init, tf.tables_initializer()])
    return session


def run_loop(loop, session, ops, feeds=None, num_micro_batches=128,
             **options):
    """Runs one cycle with either function."""
    if loop == "run_cycle":
        return accumgrad.run_cycle(session, ops, feeds, num_micro_batches,
                                   **options)
    return next(accumgrad.run_cycles(session, ops, feeds, num_micro_batches,
                                     **options))


@contextlib.contextmanager
def plain_session(model):
    with start(model) as session:
        yield session


@contextlib.contextmanager
def interactive_session(model):
    session = tf.InteractiveSession()
    try:
        session.run(model.init)
        yield session
    finally:
        session.close()


@contextlib.contextmanager
def supervised_session(model):
    supervisor = tf.train.Supervisor()
    with supervisor.managed_session() as session:
        yield session


def monitored_session(model):
    return tf.train.MonitoredSession()


def monitored_training_session(model, hooks=()):
    return tf.train.MonitoredTrainingSession(hooks=list(hooks))


def singular_monitored_session(model):
    return tf.train.SingularMonitoredSession()


SESSIONS = [plain_session, interactive_session, supervised_session,
            monitored_session, monitored_training_session,
            singular_monitored_session]
TWO_SESSIONS = [plain_session, monitored_training_session]


# What a cycle is.


@pytest.mark.parametrize("open_session", SESSIONS)
@pytest.mark.parametrize("use_resource", [False, True])
def test_every_kind_of_session_serves(open_session, use_resource):
    model = build_model(use_resource=use_resource)
    with open_session(model) as session:
        seen = [(cycle.index, cycle.num_micro_batches,
                 cycle.fetches.tolist(), model.state(session))
                for cycle in accumgrad.run_cycles(
                    session, model.ops, model.feeds(*range(1, 11)), 4,
                    fetches=model.loss)]
    assert seen == [(0, 4, [1, 2, 3, 4], (-9, 1)),
                    (1, 4, [-45, -54, -63, -72], (-35, 2)),
                    (2, 2, [-315, -350], (-54, 3))]


@pytest.mark.parametrize("open_session", SESSIONS)
def test_run_cycle_makes_one_update_in_every_kind_of_session(open_session):
    model = build_model()
    with open_session(model) as session:
        cycle = accumgrad.run_cycle(session, model.ops,
                                    model.feeds(1, 2, 3, 4), 4,
                                    fetches=model.loss)
        assert model.state(session) == (-9, 1)
    assert cycle[:2] == (0, 4)
    assert cycle.fetches.tolist() == [1, 2, 3, 4]


def test_a_debugger_around_a_plain_session_serves(tmp_path):
    # tfdbg's documented home is tensorflow.python.debug; it has no other.
    wrapper = pytest.importorskip(
        "tensorflow.python.debug.wrappers.dumping_wrapper")
    model = build_model()
    with start(model) as plain:
        session = wrapper.DumpingDebugWrapperSession(
            plain, session_root=str(tmp_path))
        cycles = list(accumgrad.run_cycles(
            session, model.ops, model.feeds(1, 2, 3), 2, fetches=model.loss))
        assert [cycle.fetches.tolist() for cycle in cycles] == [[1, 2], [-6]]
        assert model.state(plain) == (-5, 2)


def test_the_ops_of_the_literal_recipe_serve():
    x = tf.placeholder(tf.float32, [])
    w = tf.Variable(1.0)
    total = tf.Variable(5.0, trainable=False)
    recipe = types.SimpleNamespace(
        zero_ops=[total.assign(0.0)],
        accum_ops=[total.assign_add(x)],
        train_op=w.assign_sub(total))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        cycles = list(accumgrad.run_cycles(
            session, recipe, [{x: value} for value in range(1, 7)], 3,
            fetches={"x": x}))
        assert session.run(w) == 1 - 6 - 15
    assert [cycle.fetches["x"].tolist() for cycle in cycles] == [[1, 2, 3],
                                                                 [4, 5, 6]]


def test_signatures_are_the_documented_ones():
    positional = ["session", "ops", "feeds", "num_micro_batches"]
    keyword_only = {
        accumgrad.run_cycle: {"fetches": None},
        accumgrad.run_cycles: {"num_cycles": None, "fetches": None,
                               "partial": "apply", "progress": False}}
    for function, options in keyword_only.items():
        specification = inspect.getfullargspec(function)
        assert specification.args == positional
        assert specification.defaults == (None, 128)
        assert specification.kwonlydefaults == options
    assert accumgrad.CycleResult._fields == ("index", "num_micro_batches",
                                             "fetches")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cycle_has_128_micro_batches_by_default(loop):
    model = build_model()
    feeds = iter(model.feeds(*[1] * 130))
    with start(model) as session:
        cycle = run_loop(loop, session, model.ops, feeds)
        assert cycle == (0, 128, None)
        assert model.state(session) == (1 - 128, 1)
    assert len(list(feeds)) == 2


def test_nothing_runs_before_the_first_cycle_is_asked_for():
    model = build_model()
    feeds = iter(model.feeds(1, 2))
    with tf.Session() as session:
        # Not even initialised: any run of the ops would fail.
        cycles = accumgrad.run_cycles(session, model.ops, feeds, 2)
        session.run(model.init)
        assert next(cycles).num_micro_batches == 2
        assert model.state(session) == (-2, 1)


def test_the_caller_may_run_what_he_likes_between_cycles():
    model = build_model()
    double = model.w.assign(2.0 * model.w)
    with start(model) as session:
        for _ in accumgrad.run_cycles(session, model.ops,
                                      model.feeds(1, 2, 3, 4), 2):
            session.run(double)
        assert model.state(session) == (((1 - 3) * 2 - 7) * 2, 2)


def test_two_loops_may_alternate_on_one_stream_of_feeds():
    """A GAN's two builders, each with its own variables."""
    x = tf.placeholder(tf.float32, [])
    variables, ops = [], []
    for name in ("generator", "discriminator"):
        variables.append(tf.Variable(0.0, name=name))
        ops.append(accumgrad.build_accumulation_ops(
            variables[-1] * x, tf.train.GradientDescentOptimizer(1.0),
            var_list=variables[-1:]))
    feeds = ({x: value} for value in range(1, 9))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        pairs = list(zip(accumgrad.run_cycles(session, ops[0], feeds, 2),
                         accumgrad.run_cycles(session, ops[1], feeds, 2)))
        assert len(pairs) == 2
        assert session.run(variables) == [-(1 + 2 + 5 + 6), -(3 + 4 + 7 + 8)]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_mean_divides_by_the_micro_batches_of_each_cycle(open_session):
    model = build_model(reduction="mean")
    with open_session(model) as session:
        weights = [model.state(session)[0] for _ in accumgrad.run_cycles(
            session, model.ops, model.feeds(1, 2, 3, 6, 5, 8), 4)]
    assert weights == [1 - 12 / 4, 1 - 12 / 4 - 13 / 2]


# Feeds.


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", [
    list, tuple, iter, dict.values, lambda feeds: (feed for feed in feeds)],
    ids=["list", "tuple", "iterator", "view", "generator"])
def test_feeds_may_be_any_iterable(loop, kind):
    model = build_model()
    feeds = model.feeds(1, 2, 3, 4, 5)
    if kind is dict.values:
        feeds = dict(enumerate(feeds))
    with start(model) as session:
        cycle = run_loop(loop, session, model.ops, kind(feeds), 3,
                         fetches=model.x)
        assert cycle.fetches.tolist() == [1, 2, 3]
        assert model.state(session) == (1 - 6, 1)


def test_cycles_that_share_an_iterator_lose_no_feed():
    model = build_model()
    feeds = iter(model.feeds(*range(1, 12)))
    with start(model) as session:
        seen = [accumgrad.run_cycle(session, model.ops, feeds, size,
                                    fetches=model.x).fetches.tolist()
                for size in (3, 1, 4)]
        assert model.state(session) == (1 - sum(range(1, 9)), 3)
    assert seen == [[1, 2, 3], [4], [5, 6, 7, 8]]
    assert next(feeds) == {model.x: 9}


def test_no_feed_is_taken_before_it_is_needed():
    model = build_model()
    taken = []

    def feeds():
        for value in range(1, 100):
            # The micro-batch before this one has run by now.
            assert len(seen) == value - 1
            taken.append(value)
            yield {model.x: value}

    seen = []
    note = tf.py_func(lambda value: seen.append(value) or value, [model.x],
                      tf.float32)
    with start(model) as session:
        for cycle in accumgrad.run_cycles(session, model.ops, feeds(), 3,
                                          num_cycles=2, fetches=note):
            assert taken == list(range(1, 3 * cycle.index + 4))
    assert taken == seen == [1, 2, 3, 4, 5, 6]


def test_num_cycles_leaves_the_rest_of_the_feeds():
    model = build_model()
    feeds = iter(model.feeds(*range(1, 20)))
    with start(model) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, feeds, 4,
                                           num_cycles=np.int64(3)))
        assert model.state(session) == (1 - sum(range(1, 13)), 3)
    assert [cycle.index for cycle in cycles] == [0, 1, 2]
    assert next(feeds) == {model.x: 13}


def test_num_cycles_beyond_the_data_ends_with_the_data():
    model = build_model()
    with start(model) as session:
        cycles = list(accumgrad.run_cycles(
            session, model.ops, model.feeds(1, 2, 3), 2, num_cycles=9))
        assert model.state(session) == (1 - 6, 2)
    assert [cycle.num_micro_batches for cycle in cycles] == [2, 1]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_break_leaves_whole_cycles_and_the_rest_of_the_feeds(open_session):
    model = build_model()
    feeds = iter(model.feeds(*range(1, 20)))
    with open_session(model) as session:
        for cycle in accumgrad.run_cycles(session, model.ops, feeds, 4,
                                          fetches=model.loss):
            if cycle.fetches.mean() < 0:
                break
        assert cycle.index == 1
        assert model.state(session) == (1 - 10 - 26, 2)
        # Another loop takes up where this one stopped.
        cycle = next(accumgrad.run_cycles(session, model.ops, feeds, 2))
        assert cycle.index == 0
        assert model.state(session) == (1 - 10 - 26 - 19, 3)
    assert next(feeds) == {model.x: 11}


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_empty_feed_dicts_are_micro_batches(open_session):
    model = build_model(read_once(count_up_to(100)))
    with open_session(model) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, [{}] * 5, 2))
        assert model.state(session) == (1 - 15, 3)
    assert [cycle.num_micro_batches for cycle in cycles] == [2, 2, 1]


# The graph's own input.


@pytest.mark.parametrize("open_session", [
    plain_session, supervised_session, monitored_training_session,
    singular_monitored_session])
@pytest.mark.parametrize("read", [read_once, read_initializable])
def test_a_cycle_takes_just_its_batches_from_tf_data(read, open_session):
    model = build_model(read(count_up_to(10)))
    with open_session(model) as session:
        seen = [(cycle.num_micro_batches, cycle.fetches.tolist(),
                 model.state(session))
                for cycle in accumgrad.run_cycles(
                    session, model.ops, None, 4, fetches=model.x)]
    assert seen == [(4, [1, 2, 3, 4], (-9, 1)),
                    (4, [5, 6, 7, 8], (-35, 2)),
                    (2, [9, 10], (-54, 3))]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_run_cycle_leaves_the_next_batch_in_tf_data(open_session):
    batch = read_once(count_up_to(100))
    model = build_model(batch)
    with open_session(model) as session:
        for size in (3, 1):
            accumgrad.run_cycle(session, model.ops, num_micro_batches=size)
        assert model.state(session) == (1 - 10, 2)
        assert peek(session, batch) == 5


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_a_repeated_feed_and_tf_data_go_together(open_session):
    keep_prob = tf.placeholder(tf.float32, [])
    model = build_model(read_once(count_up_to(10)) * keep_prob)
    with open_session(model) as session:
        cycles = list(accumgrad.run_cycles(
            session, model.ops, itertools.repeat({keep_prob: 0.5}), 4,
            fetches=model.x))
        assert model.state(session) == (1 - 55 / 2, 3)
    assert [cycle.fetches.tolist() for cycle in cycles] == [
        [0.5, 1, 1.5, 2], [2.5, 3, 3.5, 4], [4.5, 5]]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_the_run_that_finds_no_data_adds_nothing(open_session):
    batch = read_once(count_up_to(6))
    model = build_model(batch)
    offset = tf.Variable(0.0)
    # The gradient of `offset` is 3, whatever the data; the mean is over the
    # micro-batches that there were.
    ops = accumgrad.build_accumulation_ops(
        model.loss + 3.0 * offset, tf.train.GradientDescentOptimizer(1.0),
        reduction="mean")
    init = tf.global_variables_initializer()
    with open_session(model._replace(init=init)) as session:
        seen = [peek(session, [model.w, offset])
                for _ in accumgrad.run_cycles(session, ops, None, 4)]
    assert seen == [[1 - 10 / 4, -3], [1 - 10 / 4 - 11 / 2, -6]]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_input_that_ends_while_the_feeds_are_made_ends_the_data(
        open_session):
    batch = read_once(count_up_to(6))
    x = tf.placeholder(tf.float32, [])
    model = build_model(x)
    ops = accumgrad.build_accumulation_ops(
        model.loss, tf.train.GradientDescentOptimizer(1.0))
    with open_session(model) as session:
        def feeds():
            while True:
                yield {x: peek(session, batch)}

        seen = [(cycle.num_micro_batches, peek(session, model.w))
                for cycle in accumgrad.run_cycles(session, ops, feeds(), 4)]
    assert seen == [(4, 1 - 10), (2, 1 - 10 - 11)]


@contextlib.contextmanager
def coordinated_session(model):
    """The queue runners started by hand, as in the guides of the time."""
    with tf.Session() as session:
        session.run([model.init, tf.local_variables_initializer()])
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(session, coordinator)
        try:
            yield session
        finally:
            coordinator.request_stop()
            coordinator.join(threads)


QUEUE_SESSIONS = [coordinated_session, supervised_session,
                  monitored_training_session, singular_monitored_session]


@pytest.mark.parametrize("open_session", QUEUE_SESSIONS)
@pytest.mark.parametrize("partial, weights", [
    ("apply", [-9, -35, -54]), ("drop", [-9, -35])])
def test_string_input_producer_feeds_the_cycles(partial, weights,
                                                open_session):
    queue = tf.train.string_input_producer(
        [str(value) for value in range(1, 11)], num_epochs=1, shuffle=False)
    model = build_model(tf.string_to_number(queue.dequeue()))
    with open_session(model) as session:
        seen = [model.state(session) for _ in accumgrad.run_cycles(
            session, model.ops, None, 4, partial=partial)]
    assert seen == list(zip(weights, itertools.count(1)))


@pytest.mark.parametrize("open_session", QUEUE_SESSIONS)
def test_limit_epochs_and_batch_feed_the_cycles(open_session):
    numbers = tf.train.limit_epochs(tf.constant([1.0, 2.0, 3.0]), 4)
    batch = tf.train.batch([numbers], batch_size=2, enqueue_many=True,
                           capacity=12)
    model = build_model(batch)
    with open_session(model) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, None, 4,
                                           fetches=batch))
        assert model.state(session) == (1 - 4 * 6, 2)
    assert [cycle.fetches.tolist() for cycle in cycles] == [
        [[1, 2], [3, 1], [2, 3], [1, 2]], [[3, 1], [2, 3]]]


# A last cycle that the data does not fill.


def input_of(source, last):
    """Returns the model and its feeds, for input of 1, 2, ..., `last`."""
    if source == "feeds":
        model = build_model()
        return model, model.feeds(*range(1, last + 1))
    if source == "tf.data":
        return build_model(read_once(count_up_to(last))), None
    scale = tf.placeholder(tf.float32, [])
    model = build_model(read_once(count_up_to(last)) * scale)
    return model, itertools.repeat({scale: 1.0})


SOURCES = ("feeds", "tf.data", "both")


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_partial_apply_makes_a_smaller_last_cycle(source, open_session):
    model, feeds = input_of(source, 6)
    with open_session(model) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, feeds, 4,
                                           fetches=model.x, partial="apply"))
        assert model.state(session) == (1 - 10 - 11, 2)
    assert [cycle[:2] for cycle in cycles] == [(0, 4), (1, 2)]
    assert cycles[1].fetches.tolist() == [5, 6]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_partial_drop_changes_nothing_after_whole_cycles(source,
                                                         open_session):
    model, feeds = input_of(source, 6)
    with open_session(model) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, feeds, 4,
                                           partial="drop"))
        assert model.state(session) == (1 - 10, 1)
    assert cycles == [(0, 4, None)]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_partial_raise_says_what_was_missing(source, open_session):
    model, feeds = input_of(source, 6)
    with open_session(model) as session:
        cycles = accumgrad.run_cycles(session, model.ops, feeds, 4,
                                      partial="raise")
        assert next(cycles) == (0, 4, None)
        with pytest.raises(ValueError, match=(
                r"ended after 2 of 4 micro-batches of cycle 1, which was not "
                r"applied\..*`partial=\"apply\"` or `\"drop\"`")):
            next(cycles)
        assert model.state(session) == (1 - 10, 1)


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("source", SOURCES)
def test_data_that_ends_with_a_cycle_leaves_no_part(source, partial,
                                                    open_session):
    model, feeds = input_of(source, 8)
    with open_session(model) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, feeds, 4,
                                           partial=partial))
        assert model.state(session) == (1 - 10 - 26, 2)
    assert cycles == [(0, 4, None), (1, 4, None)]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("source", SOURCES)
def test_no_data_makes_no_cycle(source, partial, open_session):
    model, feeds = input_of(source, 0)
    with open_session(model) as session:
        assert list(accumgrad.run_cycles(session, model.ops, feeds, 4,
                                         partial=partial)) == []
        assert model.state(session) == (1, 0)


@pytest.mark.parametrize("source", SOURCES)
def test_run_cycle_applies_what_data_there_is(source):
    model, feeds = input_of(source, 3)
    with start(model) as session:
        cycle = accumgrad.run_cycle(session, model.ops, feeds, 4,
                                    fetches=model.x)
        assert model.state(session) == (1 - 6, 1)
    assert cycle.num_micro_batches == 3
    assert cycle.fetches.tolist() == [1, 2, 3]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_run_cycle_refuses_empty_feeds(open_session):
    model = build_model()
    feeds = iter(model.feeds(1, 2))
    with open_session(model) as session:
        accumgrad.run_cycle(session, model.ops, feeds, 2)
        with pytest.raises(ValueError, match=(
                "`feeds` must have at least one feed dict left; got none, so "
                "nothing was applied")):
            accumgrad.run_cycle(session, model.ops, feeds, 2)
        assert model.state(session) == (1 - 3, 1)
        accumgrad.run_cycle(session, model.ops, model.feeds(5), 2)
        assert model.state(session) == (1 - 3 - 5, 2)


@pytest.mark.parametrize("source", ["tf.data", "both"])
@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_run_cycle_hands_on_the_end_of_the_graphs_input(open_session, source):
    model, feeds = input_of(source, 2)
    with open_session(model) as session:
        accumgrad.run_cycle(session, model.ops, feeds, 2)
        with pytest.raises(tf.errors.OutOfRangeError,
                           match="End of sequence"):
            accumgrad.run_cycle(session, model.ops, feeds, 2)
        assert model.state(session) == (1 - 3, 1)


def test_an_epoch_is_a_loop_until_the_iterator_ends():
    iterator = tf.data.make_initializable_iterator(count_up_to(5))
    model = build_model(iterator.get_next())
    with start(model) as session:
        for _ in range(3):
            session.run(iterator.initializer)
            sizes = [cycle.num_micro_batches for cycle in
                     accumgrad.run_cycles(session, model.ops, None, 2)]
            assert sizes == [2, 2, 1]
        assert model.state(session) == (1 - 3 * 15, 9)


# How many micro-batches.


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_num_micro_batches_may_follow_the_index_of_the_cycle(open_session):
    model = build_model()
    asked = []

    def batch_size_schedule(index):
        asked.append(index)
        return np.int32(2 ** index)

    with open_session(model) as session:
        seen = [(cycle.num_micro_batches, cycle.fetches.tolist(),
                 model.state(session)[0])
                for cycle in accumgrad.run_cycles(
                    session, model.ops, model.feeds(*range(1, 10)),
                    batch_size_schedule, fetches=model.x)]
    assert seen == [(1, [1], 1 - 1), (2, [2, 3], 1 - 6),
                    (4, [4, 5, 6, 7], 1 - 28), (2, [8, 9], 1 - 45)]
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 5, 7, np.int64(3), np.uint8(4)])
def test_any_number_of_micro_batches_makes_numpys_weights(size):
    model = build_model()
    values = list(range(1, 13))
    weights, losses = numpy_training(values, int(size))
    with start(model) as session:
        seen, fetched = [], []
        for cycle in accumgrad.run_cycles(session, model.ops,
                                          model.feeds(*values), size,
                                          fetches=model.loss):
            seen.append(model.state(session)[0])
            fetched.extend(cycle.fetches.tolist())
    assert seen == weights
    assert fetched == losses


@pytest.mark.parametrize("loop", LOOPS)
def test_more_micro_batches_than_ever_come_are_no_error(loop):
    model = build_model()
    with start(model) as session:
        cycle = run_loop(loop, session, model.ops, model.feeds(1, 2),
                         10 ** 12)
        assert cycle == (0, 2, None)
        assert model.state(session) == (1 - 3, 1)


@pytest.mark.parametrize("size, error, message", [
    (0, ValueError, "must be at least 1; got 0"),
    (2.5, TypeError, r"must be an integer of at least 1; got 2\.5"),
    (None, TypeError, "must be an integer of at least 1; got None")])
def test_a_schedules_bad_number_is_named_with_its_cycle(size, error, message):
    model = build_model()
    feeds = iter(model.feeds(1, 2, 3))
    with start(model) as session:
        cycles = accumgrad.run_cycles(session, model.ops, feeds,
                                      lambda index: [2, size][index])
        assert next(cycles).num_micro_batches == 2
        with pytest.raises(error, match=(
                r"`num_micro_batches\(1\)` " + message)):
            next(cycles)
        assert model.state(session) == (1 - 3, 1)
    assert next(feeds) == {model.x: 3}


# Exceptions in mid-cycle.


class FeedsBroke(Exception):
    pass


def wrong_shape(model):
    return [{model.x: 3}, {model.x: [4, 5]}, {model.x: 6}]


def wrong_type(model):
    return [{model.x: 3}, [4], {model.x: 6}]


def raising_generator(model):
    yield {model.x: 3}
    raise FeedsBroke("disk is gone")


def not_a_number(model):
    return model.feeds(3, float("nan"), 6)


FAILURES = [
    (wrong_shape, ValueError, r"Cannot feed value of shape \(2,\)"),
    (wrong_type, TypeError, r"`feeds` must yield feed dicts; got \[4\] "
                            r"\(list\)"),
    (raising_generator, FeedsBroke, "disk is gone"),
    (not_a_number, tf.errors.InvalidArgumentError, "x is no number")]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("failing_feeds, error, message", FAILURES)
def test_an_exception_in_mid_cycle_leaves_the_weights(
        failing_feeds, error, message, loop, open_session):
    x = tf.placeholder(tf.float32, [])
    model = build_model(tf.check_numerics(x, "x is no number"))
    model = model._replace(x=x)
    with open_session(model) as session:
        run_loop(loop, session, model.ops, model.feeds(1, 2), 2)
        with pytest.raises(error, match=message):
            run_loop(loop, session, model.ops, failing_feeds(model), 3)
        assert model.state(session) == (1 - 3, 1)
        # The next cycle starts clean: 3 is in no update.
        cycle = run_loop(loop, session, model.ops, model.feeds(10, 20), 2)
        assert cycle.num_micro_batches == 2
        assert model.state(session) == (1 - 3 - 30, 2)


def test_the_feeds_after_a_failed_cycle_are_left():
    model = build_model()
    feeds = iter(model.feeds(1, 2, [0, 0], 4, 5))
    with start(model) as session:
        with pytest.raises(ValueError, match="Cannot feed value of shape"):
            list(accumgrad.run_cycles(session, model.ops, feeds, 4))
        cycles = list(accumgrad.run_cycles(session, model.ops, feeds, 2))
        assert cycles == [(0, 2, None)]
        assert model.state(session) == (1 - 9, 1)


@pytest.mark.parametrize("fetches, error", [
    (lambda model: [model.loss, None], TypeError),
    (lambda model: "no_such_tensor:0", ValueError),
    (lambda model: 3, TypeError)])
def test_bad_fetches_fail_before_a_feed_is_taken(fetches, error):
    model = build_model()
    feeds = iter(model.feeds(1))
    with start(model) as session:
        with pytest.raises(error, match="None|no_such_tensor|3"):
            accumgrad.run_cycles(session, model.ops, feeds, 1,
                                 fetches=fetches(model))
        assert model.state(session) == (1, 0)
    assert next(feeds) == {model.x: 1}


# Fetches.


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_fetches_keep_their_structure(open_session):
    model = build_model()
    fetches = {"pair": Pair(model.loss, {"x": model.x}),
               "list": [model.x + 1, (model.x * 2,)],
               "empty": []}
    with open_session(model) as session:
        fetched = accumgrad.run_cycle(session, model.ops,
                                      model.feeds(3, 4), 2,
                                      fetches=fetches).fetches
    assert set(fetched) == {"pair", "list", "empty"}
    assert type(fetched["pair"]) is Pair
    assert fetched["pair"].first.tolist() == [3, 4]
    assert fetched["pair"].second["x"].tolist() == [3, 4]
    assert type(fetched["list"]) is list
    assert fetched["list"][0].tolist() == [4, 5]
    assert type(fetched["list"][1]) is tuple
    assert fetched["list"][1][0].tolist() == [6, 8]
    assert fetched["empty"] == []


@pytest.mark.parametrize("fetches", [None, [], (), {}])
def test_nothing_to_fetch_comes_back_as_it_was(fetches):
    model = build_model()
    with start(model) as session:
        cycle = accumgrad.run_cycle(session, model.ops, model.feeds(1, 2), 2,
                                    fetches=fetches)
        assert model.state(session) == (1 - 3, 1)
    assert cycle.fetches == fetches and type(cycle.fetches) is type(fetches)


@pytest.mark.parametrize("dtype", [
    tf.bool, tf.uint8, tf.int32, tf.int64, tf.float16, tf.bfloat16,
    tf.float32, tf.float64, tf.complex64])
def test_equal_shapes_are_stacked_and_keep_their_dtype(dtype):
    model = build_model()
    tensor = tf.cast(tf.fill([2, 3], model.x), dtype)
    with start(model) as session:
        fetched = accumgrad.run_cycle(session, model.ops, model.feeds(0, 1),
                                      2, fetches=tensor).fetches
    assert fetched.shape == (2, 2, 3)
    assert fetched.dtype == dtype.as_numpy_dtype
    assert (fetched[0] == 0).all() and (fetched[1] == 1).all()


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_shapes_that_differ_make_a_list(open_session):
    x = tf.placeholder(tf.float32, [None])
    model = build_model(x)
    fetches = (2 * x, model.loss)
    with open_session(model) as session:
        ragged, loss = accumgrad.run_cycle(
            session, model.ops, model.feeds([1], [2, 3], []), 3,
            fetches=fetches).fetches
    assert type(ragged) is list
    assert [array.tolist() for array in ragged] == [[2], [4, 6], []]
    assert loss.tolist() == [1, 5, 0]


def test_ranks_that_differ_make_a_list():
    x = tf.placeholder(tf.float32, None)
    model = build_model(x)
    with start(model) as session:
        fetched = accumgrad.run_cycle(session, model.ops,
                                      model.feeds(1, [1]), 2,
                                      fetches=x + 1).fetches
    assert type(fetched) is list
    assert [np.shape(value) for value in fetched] == [(), (1,)]


def test_strings_come_as_a_list_with_every_byte():
    model = build_model()
    text = tf.placeholder(tf.string, [])
    texts = [b"ab\0", b"c\0\0", b""]
    feeds = [{model.x: 1, text: value} for value in texts]
    with start(model) as session:
        scalar, vector = accumgrad.run_cycle(
            session, model.ops, feeds, 3,
            fetches=[tf.identity(text), tf.stack([text, "d\0"])]).fetches
    assert scalar == texts
    assert type(vector) is list
    assert [value.tolist() for value in vector] == [
        [value, b"d\0"] for value in texts]


def test_a_summary_comes_as_serialised_protos():
    model = build_model()
    summary = tf.summary.scalar("shown", model.loss)
    with start(model) as session:
        fetched = accumgrad.run_cycle(session, model.ops, model.feeds(3, 4),
                                      2, fetches=summary).fetches
    assert [tf.Summary.FromString(proto).value[0].simple_value
            for proto in fetched] == [3, 4]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_an_operation_runs_once_a_micro_batch_and_gives_none(open_session):
    model = build_model()
    total = tf.Variable(0.0, trainable=False, use_resource=True)
    update = total.assign_add(model.x, read_value=False)
    if not isinstance(update, tf.Operation):
        update = update.op
    init = tf.global_variables_initializer()
    with open_session(model._replace(init=init)) as session:
        fetched = accumgrad.run_cycle(
            session, model.ops, model.feeds(1, 2, 3), 3,
            fetches={"update": update, "x": model.x}).fetches
        assert peek(session, total) == 6
    assert fetched["update"] == [None, None, None]
    assert fetched["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
@pytest.mark.parametrize("indices, dense_shape", [
    ([[0, 0], [1, 2]], [3, 4]),
    # Shapes of which NumPy could make one array.
    ([[5]], [9])])
def test_a_sparse_tensor_gives_a_list_of_its_values(indices, dense_shape,
                                                    open_session):
    model = build_model()
    sparse = tf.SparseTensor(indices, tf.fill([len(indices)], model.x),
                             dense_shape)
    with open_session(model) as session:
        fetched = accumgrad.run_cycle(session, model.ops, model.feeds(1, 2),
                                      2, fetches={"sparse": sparse}).fetches
        assert model.state(session) == (1 - 3, 1)
    assert type(fetched["sparse"]) is list
    for value, expected in zip(fetched["sparse"], (1, 2)):
        assert isinstance(value, tf.SparseTensorValue)
        assert value.indices.tolist() == indices
        assert value.values.tolist() == [expected] * len(indices)
        assert value.dense_shape.tolist() == dense_shape


def test_names_may_be_fetched():
    model = build_model()
    with start(model) as session:
        fetched = accumgrad.run_cycle(session, model.ops, model.feeds(3, 4),
                                      2, fetches={"loss": "loss:0"}).fetches
    assert fetched["loss"].tolist() == [3, 4]


def test_fetches_outlive_the_array_that_was_fed():
    """One array, filled again for each micro-batch, is a common habit."""
    x = tf.placeholder(tf.float32, [1024])
    model = build_model(x)

    def feeds():
        array = np.zeros([1024], np.float32)
        for value in (1, 2, 3):
            array[:] = value
            yield {x: array}

    with start(model) as session:
        fetched = accumgrad.run_cycle(session, model.ops, feeds(), 3,
                                      fetches=[x, tf.identity(x)]).fetches
        assert model.state(session) == (1 - 6 * 1024, 1)
    for values in fetched:
        assert values[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("use_resource", [False, True])
def test_a_fetched_variable_is_as_before_the_update(use_resource):
    x = tf.placeholder(tf.float32, [])
    w = tf.Variable(tf.ones([5]), use_resource=use_resource)
    ops = accumgrad.build_accumulation_ops(
        x * tf.reduce_sum(w), tf.train.GradientDescentOptimizer(1.0))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        fetched = [cycle.fetches[:, 0].tolist()
                   for cycle in accumgrad.run_cycles(
                       session, ops, [{x: 1.0}] * 4, 2, fetches=w)]
        assert session.run(w).tolist() == [-3] * 5
    assert fetched == [[1, 1], [-1, -1]]


# The graph.


@pytest.mark.parametrize("finalize", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_loop_adds_no_op(loop, finalize, fresh_graph):
    keep_prob = tf.placeholder_with_default(1.0, [])
    model = build_model(read_once(count_up_to(12)))
    fetches = {"loss": model.loss, "x": [model.x]}
    with start(model) as session:
        if finalize:
            fresh_graph.finalize()
        before = [op.name for op in fresh_graph.get_operations()]
        for feeds in (None, [{keep_prob: 1.0}] * 3):
            for _ in range(2):
                run_loop(loop, session, model.ops, feeds, 3, fetches=fetches)
        assert [op.name for op in fresh_graph.get_operations()] == before
        assert model.state(session) == (1 - sum(range(1, 13)), 4)


def test_a_loop_outside_the_graphs_context_works():
    model = build_model()
    graph = tf.get_default_graph()
    with tf.Graph().as_default():
        with tf.Session(graph=graph) as session:
            session.run(model.init)
        with tf.Session(graph=graph) as session:
            session.run(model.init)
            with tf.Graph().as_default():
                cycles = list(accumgrad.run_cycles(
                    session, model.ops, model.feeds(1, 2, 3), 2,
                    fetches=model.x))
                assert model.state(session) == (1 - 6, 2)
    assert [cycle.fetches.tolist() for cycle in cycles] == [[1, 2], [3]]


# Monitored sessions: hooks, and when to stop.


class LossHook(tf.train.SessionRunHook):
    """Notes the loss of every run that it takes part in."""

    def __init__(self, loss):
        self._loss = loss
        self.losses = []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self._loss)

    def after_run(self, run_context, run_values):
        self.losses.append(float(run_values.results))


class StopHook(tf.train.SessionRunHook):
    """Requests a stop in its `at`-th run."""

    def __init__(self, at):
        self._left = at

    def after_run(self, run_context, run_values):
        self._left -= 1
        if not self._left:
            run_context.request_stop()


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("make_session", [
    tf.train.MonitoredTrainingSession, tf.train.SingularMonitoredSession,
    lambda hooks: tf.train.MonitoredSession(hooks=hooks)],
    ids=["training", "singular", "monitored"])
@pytest.mark.parametrize("loop", LOOPS)
def test_hooks_run_with_every_micro_batch_and_with_nothing_else(
        loop, make_session, size):
    """With zero_ops or train_op, the hook would ask them for a feed."""
    model = build_model()
    hook = LossHook(model.loss)
    feeds = iter(model.feeds(*range(1, 3 * size + 1)))
    with make_session(hooks=[hook]) as session:
        for _ in range(3):
            run_loop(loop, session, model.ops, feeds, size)
    assert hook.losses == numpy_training(range(1, 3 * size + 1), size)[1]


def test_hooks_eat_no_batch_of_the_graphs_input():
    model = build_model(read_once(count_up_to(8)))
    hook = LossHook(model.loss)
    with monitored_training_session(model, [hook]) as session:
        seen = [cycle.fetches.tolist() for cycle in accumgrad.run_cycles(
            session, model.ops, None, 4, fetches=model.x)]
    assert seen == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert hook.losses == numpy_training(range(1, 9), 4)[1]


def test_a_hook_may_do_the_feeding():
    model = build_model()
    values = itertools.count(1.0)
    hook = tf.train.FeedFnHook(lambda: {model.x: next(values)})
    with monitored_training_session(model, [hook]) as session:
        list(accumgrad.run_cycles(session, model.ops, None, 4, num_cycles=2))
        assert model.state(session) == (1 - 36, 2)
    assert next(values) == 9


@pytest.mark.parametrize("size, weights, next_batch", [
    # The summed gradients are 10, 26, 42.
    (4, [1 - 10, 1 - 36, 1 - 78], 14),
    (1, [1 - 1, 1 - 3, 1 - 6], 5)])
@pytest.mark.parametrize("stop", [
    {"last_step": 3}, {"num_steps": 3}], ids=["last_step", "num_steps"])
def test_stop_at_step_hook_ends_at_its_step_exactly(stop, size, weights,
                                                    next_batch):
    batch = read_once(count_up_to(1000))
    model = build_model(batch)
    hooks = [tf.train.NanTensorHook(model.loss),
             tf.train.StopAtStepHook(**stop)]
    with monitored_training_session(model, hooks) as session:
        seen = [model.state(session) for _ in accumgrad.run_cycles(
            session, model.ops, None, size)]
        assert session.should_stop()
        assert model.state(session) == (weights[-1], 3)
        # It is noticed with the micro-batch after the last update.
        assert peek(session, batch) == next_batch
    assert seen == list(zip(weights, [1, 2, 3]))


def test_run_cycle_until_should_stop_makes_the_right_number_of_updates():
    """The loop that every guide to MonitoredTrainingSession has."""
    model = build_model(read_once(count_up_to(1000)))
    cycles = []
    with monitored_training_session(
            model, [tf.train.StopAtStepHook(last_step=3)]) as session:
        while not session.should_stop():
            cycles.append(accumgrad.run_cycle(session, model.ops, None, 4,
                                              fetches=model.x))
        assert model.state(session) == (1 - 78, 3)
    assert [cycle.num_micro_batches for cycle in cycles] == [4, 4, 4, 0]
    assert cycles[-1].fetches.tolist() == [13]


def test_training_goes_on_from_a_checkpoint_to_the_same_last_step(tmp_path):
    model = build_model()
    feeds = iter(model.feeds(*range(1, 100)))
    steps = []
    for last_step in (2, 5):
        with tf.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), save_checkpoint_secs=None,
                save_checkpoint_steps=100,
                hooks=[tf.train.StopAtStepHook(last_step=last_step)]
                ) as session:
            for _ in accumgrad.run_cycles(session, model.ops, feeds, 2):
                steps.append(model.state(session))
    # 5, and 12, come in the micro-batches with which the stop is noticed.
    sums = np.cumsum([1 + 2, 3 + 4, 6 + 7, 8 + 9, 10 + 11])
    assert steps == list(zip((1 - sums).tolist(), range(1, 6)))
    assert next(feeds) == {model.x: 13}


@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("at", [5, 6, 8])
def test_a_stop_in_mid_cycle_drops_the_cycle(at, partial):
    model = build_model()
    feeds = iter(model.feeds(*range(1, 20)))
    with monitored_training_session(model, [StopHook(at)]) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, feeds, 4,
                                           partial=partial))
        assert model.state(session) == (1 - 10, 1)
        # And once it is to stop, there is no further cycle.
        assert list(accumgrad.run_cycles(session, model.ops, feeds, 4)) == []
    assert cycles == [(0, 4, None)]
    assert next(feeds) == {model.x: at + 1}


@pytest.mark.parametrize("partial", PARTIALS)
def test_a_stop_with_the_last_batch_drops_the_cycle(partial):
    model = build_model()
    with monitored_training_session(model, [StopHook(6)]) as session:
        cycles = list(accumgrad.run_cycles(
            session, model.ops, model.feeds(*range(1, 7)), 4,
            partial=partial))
        assert model.state(session) == (1 - 10, 1)
    assert cycles == [(0, 4, None)]


@pytest.mark.parametrize("at", [1, 3, 4])
def test_run_cycle_that_is_stopped_says_that_nothing_was_applied(at):
    model = build_model()
    with monitored_training_session(model, [StopHook(at)]) as session:
        cycle = accumgrad.run_cycle(session, model.ops,
                                    model.feeds(1, 2, 3, 4), 4,
                                    fetches=model.x)
        assert model.state(session) == (1, 0)
    assert cycle[:2] == (0, 0)
    assert cycle.fetches.tolist() == list(range(1, at + 1))


@pytest.mark.parametrize("partial", PARTIALS)
def test_a_nan_drops_its_cycle_where_it_ends_the_training(partial):
    model = build_model()
    hook = tf.train.NanTensorHook(model.loss, fail_on_nan_loss=False)
    feeds = model.feeds(1, 2, 3, float("nan"), 5, 6)
    with monitored_training_session(model, [hook]) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, feeds, 2,
                                           partial=partial))
        assert model.state(session) == (1 - 3, 1)
    assert cycles == [(0, 2, None)]


def test_a_nan_that_a_hook_raises_for_leaves_the_weights():
    model = build_model()
    feeds = model.feeds(1, 2, 3, float("nan"))
    with monitored_training_session(
            model, [tf.train.NanTensorHook(model.loss)]) as session:
        with pytest.raises(tf.train.NanLossDuringTrainingError,
                           match="NaN loss"):
            list(accumgrad.run_cycles(session, model.ops, feeds, 2))
        assert model.state(session) == (1 - 3, 1)
        cycle = accumgrad.run_cycle(session, model.ops, model.feeds(5), 2)
        assert cycle.num_micro_batches == 1
        assert model.state(session) == (1 - 3 - 5, 2)


def test_logging_tensor_hook_sees_every_micro_batch():
    model = build_model()
    logged = []
    hook = tf.train.LoggingTensorHook(
        {"loss": model.loss}, every_n_iter=1,
        formatter=lambda values: logged.append(float(values["loss"])) or "")
    with monitored_training_session(model, [hook]) as session:
        list(accumgrad.run_cycles(session, model.ops,
                                  model.feeds(*range(1, 7)), 3))
    assert logged == numpy_training(range(1, 7), 3)[1]


def test_summary_saver_hook_writes_each_loss_at_its_cycle(tmp_path):
    model = build_model()
    hook = tf.train.SummarySaverHook(
        save_steps=1, output_dir=str(tmp_path),
        summary_op=tf.summary.scalar("shown", model.loss))
    with monitored_training_session(model, [hook]) as session:
        list(accumgrad.run_cycles(session, model.ops,
                                  model.feeds(*range(1, 13)), 3))
    events = [(event.step, value.simple_value)
              for path in sorted(tmp_path.iterdir())
              for event in tf.train.summary_iterator(str(path))
              for value in event.summary.value if value.tag == "shown"]
    steps = [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert events == list(zip(steps, numpy_training(range(1, 13), 3)[1]))


def test_checkpoint_saver_hook_saves_whole_cycles(tmp_path):
    model = build_model()
    hook = tf.train.CheckpointSaverHook(
        str(tmp_path), save_steps=1, saver=tf.train.Saver(max_to_keep=9))
    with monitored_training_session(model, [hook]) as session:
        list(accumgrad.run_cycles(session, model.ops,
                                  model.feeds(*range(1, 10)), 3))
    saved = {}
    for path in tf.train.get_checkpoint_state(
            str(tmp_path)).all_model_checkpoint_paths:
        reader = tf.train.load_checkpoint(path)
        assert set(reader.get_variable_to_shape_map()) == {"w", "global_step"}
        saved[int(reader.get_tensor("global_step"))] = float(
            reader.get_tensor("w"))
    assert saved == {0: 1, 1: 1 - 6, 2: 1 - 21, 3: 1 - 45}


# Sessions that are lost and made anew.


class Losses:
    """Says in which runs a session is lost: the `at`-th that has `op`."""

    def __init__(self, error, op, at):
        self._error = error
        self._op = op
        self._left = at
        self.num_sessions = 0

    def check(self, fetches):
        if self._op in flat(fetches):
            self._left -= 1
            if not self._left:
                raise self._error(None, None, "the machine was taken away")


def flat(fetches):
    if isinstance(fetches, dict):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        return [leaf for item in fetches for leaf in flat(item)]
    return [fetches]


class LosableSession(tf.Session):
    """Fails where a lost machine shows: in `run`, before anything is run.

    A py_func can't stand in for it: its AbortedError comes as UnknownError.
    """
    losses = None

    def run(self, fetches, *args, **kwargs):
        if self.losses is not None:
            self.losses.check(fetches)
        return super().run(fetches, *args, **kwargs)


class LosableSessionCreator(tf.train.SessionCreator):
    """Initialises the model in each session, or only in the first one.

    With a server, the variables outlive the session.
    """

    def __init__(self, losses, target=""):
        self._losses = losses
        self._target = target
        self._init = tf.global_variables_initializer()
        self._local_init = tf.local_variables_initializer()

    def create_session(self):
        session = LosableSession(self._target)
        if not self._target or not self._losses.num_sessions:
            session.run([self._init, self._local_init])
        self._losses.num_sessions += 1
        session.losses = self._losses
        return session


LOSSES = [tf.errors.AbortedError, tf.errors.UnavailableError]


@pytest.mark.parametrize("error", LOSSES)
@pytest.mark.parametrize("op, at, weights", [
    # Lost with the 6th micro-batch, which is run again in the new session;
    # what has 7 and 8 but not 5 is no update: 9 to 12 make the next.
    ("accum_ops", 6, [1 - 10, 1 - 42, 1 - 42 - 58]),
    # With the first, and the last, of the second cycle.
    ("accum_ops", 5, [1 - 10, 1 - 42, 1 - 42 - 58]),
    ("accum_ops", 8, [1 - 10, 1 - 42, 1 - 42 - 58]),
    # Before the second cycle, which has lost nothing.
    ("zero_ops", 2, [1 - 10, 1 - 26, 1 - 26 - 42, 1 - 26 - 42 - 58]),
    # With all of the second cycle accumulated.
    ("train_op", 2, [1 - 10, 1 - 42, 1 - 42 - 58])])
def test_a_cycle_in_which_the_session_is_lost_is_run_again(
        op, at, weights, error):
    model = build_model()
    losses = Losses(error, flat(getattr(model.ops, op))[0], at)
    creator = LosableSessionCreator(losses)
    with tf.train.MonitoredSession(creator) as session:
        seen = [(cycle.index, cycle.num_micro_batches, model.state(session))
                for cycle in accumgrad.run_cycles(
                    session, model.ops, model.feeds(*range(1, 17)), 4)]
    assert losses.num_sessions == 2
    # The new session's variables start from their initial values.
    assert seen == [
        (index, 4, (w, index + 1 if index == 0 else index))
        for index, w in enumerate(weights)]


@pytest.mark.parametrize("op, at, weights", [
    ("accum_ops", 6, [1 - 10, 1 - 52, 1 - 52 - 58]),
    ("accum_ops", 8, [1 - 10, 1 - 52, 1 - 52 - 58]),
    ("zero_ops", 2, [1 - 10, 1 - 36, 1 - 36 - 42, 1 - 36 - 42 - 58]),
    ("train_op", 2, [1 - 10, 1 - 52, 1 - 52 - 58])])
def test_a_lost_session_takes_nothing_off_a_server_that_is_left(
        op, at, weights):
    """As with parameter servers: the variables outlive the session."""
    model = build_model()
    losses = Losses(tf.errors.UnavailableError,
                    flat(getattr(model.ops, op))[0], at)
    server = tf.train.Server.create_local_server()
    creator = LosableSessionCreator(losses, server.target)
    with tf.train.MonitoredSession(creator) as session:
        seen = [(cycle.index, model.state(session))
                for cycle in accumgrad.run_cycles(
                    session, model.ops, model.feeds(*range(1, 17)), 4)]
    assert losses.num_sessions == 2
    assert seen == [(index, (w, index + 1))
                    for index, w in enumerate(weights)]


class LosingHook(tf.train.SessionRunHook):
    """Loses the session once, after its `at`-th micro-batch was run."""

    def __init__(self, at):
        self._left = at

    def after_run(self, run_context, run_values):
        self._left -= 1
        if not self._left:
            raise tf.errors.AbortedError(None, None, "taken away")


def test_training_goes_on_from_the_checkpoint_before_the_loss(tmp_path):
    model = build_model()
    hooks = [LosingHook(10), tf.train.StopAtStepHook(last_step=4)]
    with tf.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), save_checkpoint_secs=None,
            save_checkpoint_steps=1, hooks=hooks) as session:
        seen = [(cycle.index, cycle.fetches.tolist(), model.state(session))
                for cycle in accumgrad.run_cycles(
                    session, model.ops, model.feeds(*range(1, 100)), 4,
                    fetches=model.x)]
    # 10 is run again after the loss; 9 to 12 are in no update.
    assert seen == [(0, [1, 2, 3, 4], (1 - 10, 1)),
                    (1, [5, 6, 7, 8], (1 - 36, 2)),
                    (2, [13, 14, 15, 16], (1 - 94, 3)),
                    (3, [17, 18, 19, 20], (1 - 168, 4))]


@pytest.mark.parametrize("partial", ["apply", "drop"])
def test_a_lost_last_cycle_is_dropped(partial):
    model = build_model()
    with monitored_training_session(model, [LosingHook(6)]) as session:
        cycles = list(accumgrad.run_cycles(
            session, model.ops, model.feeds(*range(1, 8)), 4,
            partial=partial))
        # The session has started from the initial values again.
        assert model.state(session) == (1, 0)
    assert cycles == [(0, 4, None)]


def test_run_cycle_says_that_a_lost_cycle_was_not_applied():
    model = build_model()
    with monitored_training_session(model, [LosingHook(2)]) as session:
        cycle = accumgrad.run_cycle(session, model.ops, model.feeds(1, 2, 3),
                                    3, fetches=model.x)
        assert model.state(session) == (1, 0)
    assert cycle[:2] == (0, 0)
    assert cycle.fetches.tolist() == [1, 2, 3]


@pytest.mark.parametrize("error", LOSSES)
@pytest.mark.parametrize("make_session", [
    lambda hooks: tf.train.SingularMonitoredSession(hooks=hooks)],
    ids=["singular"])
def test_a_session_that_does_not_recover_hands_the_loss_on(make_session,
                                                           error):
    model = build_model()

    class Hook(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise error(None, None, "taken away")

    with make_session([Hook()]) as session:
        with pytest.raises(error, match="taken away"):
            accumgrad.run_cycle(session, model.ops, model.feeds(1, 2), 2)
        assert model.state(session) == (1, 0)


# The progress bar.


@pytest.mark.parametrize("open_session", TWO_SESSIONS)
def test_progress_shows_a_bar_for_each_cycle(open_session, capsys):
    pytest.importorskip("tqdm")
    model = build_model()
    with open_session(model) as session:
        cycles = list(accumgrad.run_cycles(
            session, model.ops, model.feeds(*range(1, 7)),
            lambda index: index + 2, progress=True))
        assert model.state(session) == (1 - 21, 3)
    assert [cycle.num_micro_batches for cycle in cycles] == [2, 3, 1]
    shown = capsys.readouterr().err
    for index, size in enumerate((2, 3, 4)):
        assert re.search(r"cycle {}: .*\b0/{} ".format(index, size), shown)


def test_no_progress_is_shown_unless_asked_for(capsys):
    model = build_model()
    with start(model) as session:
        list(accumgrad.run_cycles(session, model.ops, model.feeds(1, 2), 1))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cycle" not in captured.err


def test_progress_takes_no_more_of_the_feeds():
    model = build_model()
    feeds = iter(model.feeds(*range(1, 9)))
    with start(model) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops, feeds, 3,
                                           num_cycles=2, progress=True))
        assert model.state(session) == (1 - 21, 2)
    assert len(cycles) == 2
    assert next(feeds) == {model.x: 7}


def test_progress_without_tqdm_runs_all_the_same(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    model = build_model()
    with start(model) as session:
        cycles = list(accumgrad.run_cycles(session, model.ops,
                                           model.feeds(1, 2, 3), 2,
                                           progress=True))
        assert model.state(session) == (1 - 6, 2)
    assert [cycle.num_micro_batches for cycle in cycles] == [2, 1]
    assert "cycle" not in capsys.readouterr().err


# Bad arguments.


def check_refused(error, message, loop, **changes):
    """The call raises, and neither runs anything nor takes a feed."""
    model = build_model()
    graph = tf.get_default_graph()
    feeds = iter(model.feeds(1, 2))
    with start(model) as session:
        arguments = {"session": session, "ops": model.ops, "feeds": feeds,
                     "num_micro_batches": 2}
        for argument, value in changes.items():
            arguments[argument] = (value(model) if argument == "feeds"
                                   else value)
        before = [op.name for op in graph.get_operations()]
        with pytest.raises(error, match=message):
            # Of run_cycles, the call itself: no `next`.
            getattr(accumgrad, loop)(**arguments)
        assert [op.name for op in graph.get_operations()] == before
        assert model.state(session) == (1, 0)
    assert next(feeds) == {model.x: 1}


BAD_NUMBERS = [
    (0, ValueError, "must be at least 1; got 0"),
    (-1, ValueError, "must be at least 1; got -1"),
    (2.5, TypeError, r"must be an integer of at least 1; got 2\.5 "
                     r"\(builtins\.float\)"),
    (True, TypeError, "must be an integer of at least 1; got True "
                      r"\(builtins\.bool\)"),
    ("3", TypeError, "must be an integer of at least 1; got '3' "
                     r"\(builtins\.str\)"),
    (np.float32(2), TypeError, r"must be an integer of at least 1; got .*2"),
    (np.array([2]), TypeError, r"must be an integer of at least 1; got "
                               r"array\(\[2\]\)")]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("number, error, message", BAD_NUMBERS + [
    (None, TypeError, "must be an integer of at least 1; got None")])
def test_num_micro_batches_must_be_a_positive_integer(number, error, message,
                                                      loop):
    check_refused(error, "`num_micro_batches` " + message, loop,
                  num_micro_batches=number)


def test_run_cycle_takes_no_schedule():
    check_refused(TypeError, "`num_micro_batches` must be an integer of at "
                  "least 1; got <function", "run_cycle",
                  num_micro_batches=lambda index: 2)


@pytest.mark.parametrize("number, error, message", BAD_NUMBERS)
def test_num_cycles_must_be_a_positive_integer(number, error, message):
    check_refused(error, "`num_cycles` " + message, "run_cycles",
                  num_cycles=number)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("feeds, got", [
    (lambda model: {model.x: 1}, "dict"), (lambda model: 3, "int"),
    (lambda model: "x", "str")], ids=["dict", "int", "str"])
def test_feeds_must_be_an_iterable_of_dicts(feeds, got, loop):
    check_refused(TypeError, "`feeds` must be an iterable of feed dicts, one "
                  "for each micro-batch; got {}\\.  Of a single feed dict, "
                  "pass a list of it".format(got), loop, feeds=feeds)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("feed, got", [
    (1.5, r"1\.5 \(float\)"), ("x", r"'x' \(str\)"),
    ([("x", 1)], r"\[\('x', 1\)\] \(list\)")])
def test_each_feed_must_be_a_dict(feed, got, loop):
    model = build_model()
    with start(model) as session:
        with pytest.raises(TypeError, match=(
                "`feeds` must yield feed dicts; got " + got)):
            run_loop(loop, session, model.ops, [feed], 2)
        assert model.state(session) == (1, 0)


@pytest.mark.parametrize("partial", ["skip", "Apply", True, None, ["drop"]])
def test_partial_must_be_one_of_its_choices(partial):
    check_refused(ValueError, re.escape(
        "`partial` must be one of 'apply', 'drop', 'raise'; got {!r}.".format(
            partial)), "run_cycles", partial=partial)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("ops, missing", [
    (None, "zero_ops"),
    (([], [], None), "zero_ops"),
    (types.SimpleNamespace(zero_ops=[], train_op=None), "accum_ops"),
    (types.SimpleNamespace(zero_ops=[], accum_ops=[]), "train_op")])
def test_ops_must_have_the_three_attributes(ops, missing, loop):
    check_refused(TypeError, r"`ops` must be an AccumulationOps, .*got {}.*"
                  r"which has no `{}`".format(re.escape(repr(ops)), missing),
                  loop, ops=ops)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("session, got", [
    (None, r"None \(NoneType\)"), ("local", r"'local' \(str\)"),
    (tf.Graph(), r".*Graph.* \(Graph\)")])
def test_session_must_be_a_session(session, got, loop):
    check_refused(TypeError, r"`session` must be a tf\.compat\.v1\.Session or "
                  "MonitoredSession; got " + got, loop, session=session)


@pytest.mark.parametrize("loop", LOOPS)
def test_session_and_ops_in_the_wrong_order_are_told_apart(loop):
    model = build_model()
    with start(model) as session:
        with pytest.raises(TypeError, match="`ops` must be an "
                           "AccumulationOps.*which has no `zero_ops`"):
            getattr(accumgrad, loop)(model.ops, session, model.feeds(1), 1)


# Races.


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("source", ["feeds", "tf.data"])
def test_every_update_has_just_its_four_micro_batches(source, use_resource):
    """300 cycles; integers, which float32 adds without rounding."""
    num_cycles, size, width = 300, 4, 5
    random = np.random.RandomState(0)
    values = random.randint(-4, 5, size=[num_cycles * size, width])
    ids = random.randint(0, 3, size=[num_cycles * size, 2])
    if source == "feeds":
        x = tf.placeholder(tf.float32, [width])
        row_ids = tf.placeholder(tf.int32, [2])
        feeds = [{x: value, row_ids: pair}
                 for value, pair in zip(values, ids)]
    else:
        x, row_ids = read_once(tf.data.Dataset.from_tensor_slices(
            (values.astype(np.float32), ids.astype(np.int32))))
        feeds = None
    weights = [tf.Variable(tf.zeros([width]), use_resource=use_resource)
               for _ in range(6)]
    table = tf.Variable(tf.zeros([3, width]), use_resource=use_resource)
    loss = tf.reduce_sum(x * tf.gather(table, row_ids))
    for scale, weight in enumerate(weights, 1):
        loss += scale * tf.reduce_sum(x * weight)
    global_step = tf.train.get_or_create_global_step()
    ops = accumgrad.build_accumulation_ops(
        loss, tf.train.GradientDescentOptimizer(1.0),
        global_step=global_step)

    expected_weights = np.zeros([6, width])
    expected_table = np.zeros([3, width])
    with tf.Session(config=tf.ConfigProto(
            inter_op_parallelism_threads=8,
            use_per_session_threads=True)) as session:
        session.run(tf.global_variables_initializer())
        for cycle in accumgrad.run_cycles(session, ops, feeds, size):
            batch = slice(cycle.index * size, (cycle.index + 1) * size)
            total = values[batch].sum(axis=0)
            expected_weights -= np.arange(1, 7)[:, np.newaxis] * total
            for pair, value in zip(ids[batch], values[batch]):
                for row in pair:
                    expected_table[row] -= value
            got_weights, got_table, step = session.run(
                [weights, table, global_step])
            np.testing.assert_array_equal(got_weights, expected_weights)
            np.testing.assert_array_equal(got_table, expected_table)
            assert step == cycle.index + 1
    assert cycle.index == num_cycles - 1
