"""Loops that know one op: MonitoredTrainingSession, Estimator, slim."""

import glob
import logging
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from event_files import read_summaries
from optimizers import sgd
from programs import run_python

N = 4


@pytest.fixture
def model(graph):
    """A loss whose gradient is what the input pipeline has: 1, 2, 3, ..."""
    step = tf.train.get_or_create_global_step()
    x = tf.data.make_one_shot_iterator(
        tf.data.Dataset.range(1, 1000)).get_next()
    w = tf.get_variable("w", [], tf.float64, tf.zeros_initializer())
    taken = tf.get_variable("taken", [], tf.int64, trainable=False,
                            initializer=tf.zeros_initializer())
    update = tf.assign(taken, x)
    return step, w, taken, update, w * tf.cast(x, tf.float64)


class Recorder(tf.train.SessionRunHook):
    """Keeps what it fetched in each run, and counts how often it asked."""

    def __init__(self, fetches):
        self.fetches = fetches
        self.seen = []
        self.asked = 0

    def before_run(self, run_context):
        self.asked += 1
        return tf.train.SessionRunArgs(self.fetches)

    def after_run(self, run_context, run_values):
        self.seen.append(run_values.results)


def test_monitored_training_session(model, tmp_path):
    step, w, taken, update, loss = model
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), N, update_ops=[update])
    train_op = optimizer.minimize(loss, global_step=step)
    tf.summary.scalar("mean_loss", optimizer.mean_loss)
    recorder = Recorder(optimizer.mean_loss)
    directory = str(tmp_path)
    steps = []
    with tf.train.MonitoredTrainingSession(
            checkpoint_dir=directory, save_checkpoint_secs=None,
            save_summaries_steps=None, save_summaries_secs=None,
            log_step_count_steps=None, hooks=[
                tf.train.StopAtStepHook(last_step=3),
                tf.train.CheckpointSaverHook(directory, save_steps=1),
                tf.train.LoggingTensorHook([loss], every_n_iter=1),
                optimizer.per_cycle(recorder),
                optimizer.per_cycle(tf.train.SummarySaverHook(
                    save_steps=1, output_dir=directory,
                    summary_op=tf.summary.merge_all())),
                optimizer.per_cycle(tf.train.StepCounterHook(
                    every_n_steps=1, output_dir=directory)),
            ]) as session:
        while not session.should_stop():
            session.run(train_op)
            state = session.run_step_fn(
                lambda step_context: step_context.session.run(
                    [step, w, taken]))
            steps.append(int(state[0]))
    # The gradients' sums are 10, 26, 42; the pipeline gave 12.
    assert steps == [0] * 3 + [1] * 4 + [2] * 4 + [3]
    assert state == [3, -10 - 26 - 42, 12]
    # d loss / d w = x, at w of 0, -10 and -36.
    means = [0, -10 * 26 / 4, -36 * 42 / 4]
    assert recorder.seen == means
    assert recorder.asked == len(means)
    assert [value for _, value in read_summaries(
        directory, "mean_loss")] == means
    counted = [at for at, _ in read_summaries(directory, "global_step/sec")]
    assert counted and set(counted) <= {1, 2, 3}
    saved = {path.rsplit("-", 1)[1].split(".")[0] for path in glob.glob(
        os.path.join(directory, "model.ckpt-*.index"))}
    assert saved == {"0", "1", "2", "3"}


def test_stops_after_whole_cycles(model):
    step, w, taken, update, loss = model
    train_op = accumgrad.AccumulatingOptimizer(
        sgd(), N, update_ops=[update]).minimize(loss, global_step=step)
    runs = 0
    with tf.train.MonitoredTrainingSession(
            hooks=[tf.train.StopAtStepHook(num_steps=2)]) as session:
        while not session.should_stop():
            session.run(train_op)
            runs += 1
    assert runs == 2 * N


def test_killed_in_mid_cycle_and_resumed(behavior, tmp_path):
    # With saved accumulators, four micro-batches are four, whoever runs them.
    def run(num_runs):
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            w = tf.get_variable("w", [], tf.float64, tf.zeros_initializer())
            x = tf.placeholder(tf.float64, [])
            train_op = accumgrad.AccumulatingOptimizer(
                sgd(), N, save_accumulators=True).minimize(
                    w * x, global_step=step)
            saver = tf.train.Saver()
            with tf.train.MonitoredTrainingSession(
                    checkpoint_dir=str(tmp_path),
                    save_checkpoint_secs=None) as session:
                def raw(fetches):
                    return session.run_step_fn(
                        lambda step_context: step_context.session.run(
                            fetches))
                for value in range(num_runs):
                    session.run(train_op, {x: value + 1})
                session.run_step_fn(
                    lambda step_context: saver.save(
                        step_context.session, str(tmp_path / "model")))
                return raw([step, w])
    assert run(3) == [0, 0]
    assert run(2) == [1, -(1 + 2 + 3 + 1)]
    assert run(3) == [2, -7 - (2 + 1 + 2 + 3)]


SLIM = """
import sys
import tensorflow.compat.v1 as tf
import tf_slim as slim
import accumgrad

getattr(tf, sys.argv[1])()
folder = sys.argv[2]
step = tf.train.get_or_create_global_step()
x = tf.data.make_one_shot_iterator(tf.data.Dataset.range(1, 1000)).get_next()
w = tf.get_variable("w", [], tf.float64, tf.zeros_initializer())
taken = tf.get_variable("taken", [], tf.int64, trainable=False,
                        initializer=tf.zeros_initializer())
optimizer = accumgrad.AccumulatingOptimizer(
    tf.train.GradientDescentOptimizer(1.0), 4)
train_op = slim.learning.create_train_op(
    w * tf.cast(x, tf.float64), optimizer, global_step=step,
    update_ops=[tf.assign(taken, x)])
slim.learning.train(
    train_op, folder, number_of_steps=3, log_every_n_steps=1,
    save_summaries_secs=0, save_interval_secs=600)
reader = tf.train.NewCheckpointReader(tf.train.latest_checkpoint(folder))
for name, value in [("global_step", 3), ("w", -10 - 26 - 42), ("taken", 12)]:
    assert reader.get_tensor(name) == value, (name, reader.get_tensor(name))
assert not [name for name in reader.get_variable_to_shape_map()
            if "accumgrad" in name]
"""


@pytest.mark.parametrize("switch", ["disable_v2_behavior",
                                    "disable_eager_execution"])
def test_slim_learning(tmp_path, switch):
    # In a program of its own: its threads need eager execution to be off.
    if tf.__version__ < "2" and switch == "disable_eager_execution":
        pytest.skip("it is off in TensorFlow 1")
    pytest.importorskip("tf_slim")
    status, output = run_python(SLIM, tmp_path, switch, tmp_path / "logs")
    assert status == 0, output


class Warnings(logging.Handler):
    """Keeps what TensorFlow warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def warnings_of_tensorflow():
    handler = Warnings()
    logger = tf.get_logger()
    logger.addHandler(handler)
    tf.logging.set_verbosity(tf.logging.WARN)
    yield handler.messages
    tf.logging.set_verbosity(tf.logging.ERROR)
    logger.removeHandler(handler)


def digits():
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    return (images / 16.0).astype(np.float32), labels.astype(np.int32)


def input_fn(batch_size, training):
    images, labels = digits()
    held_out = np.arange(len(labels)) % 5 == 0
    chosen = ~held_out if training else held_out
    dataset = tf.data.Dataset.from_tensor_slices(
        (images[chosen], labels[chosen]))
    if training:
        dataset = dataset.shuffle(2000, seed=0).repeat()
    return dataset.batch(batch_size)


def model_fn(features, labels, mode, params):
    """A real model: batch normalisation, weight decay, a schedule."""
    training = mode == tf.estimator.ModeKeys.TRAIN
    hidden = tf.layers.dense(
        features, 64, kernel_regularizer=lambda w: 1e-4 * tf.nn.l2_loss(w))
    hidden = tf.nn.relu(tf.layers.batch_normalization(hidden, momentum=0.9,
                                                      training=training))
    logits = tf.layers.dense(hidden, 10)
    loss = (tf.losses.sparse_softmax_cross_entropy(labels, logits)
            + tf.losses.get_regularization_loss())
    metrics = {"accuracy": tf.metrics.accuracy(
        labels, tf.argmax(logits, axis=1))}
    if not training:
        return tf.estimator.EstimatorSpec(mode, loss=loss,
                                          eval_metric_ops=metrics)
    step = tf.train.get_global_step()
    rate = tf.train.piecewise_constant(step, [40], [0.02, 0.005])
    optimizer = accumgrad.AccumulatingOptimizer(
        tf.train.AdamOptimizer(rate), N, reduction="mean",
        weight=tf.shape(labels)[0])
    with tf.control_dependencies(
            tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train_op = optimizer.minimize(loss, global_step=step)
    runs = params["make_recorder"](step)
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=[
            # Not StepCounterHook: it reads the step before the update or
            # after, and takes that for a step that stands still.
            runs, optimizer.per_cycle(tf.train.LoggingTensorHook(
                {"loss": optimizer.mean_loss}, every_n_iter=10))])


@pytest.mark.skipif(not hasattr(tf, "estimator")
                    or tf.__version__ >= "2.16",
                    reason="TensorFlow 2.16 dropped tf.estimator")
def test_estimator(behavior, tmp_path, warnings_of_tensorflow):
    recorders = []

    def make_recorder(fetches):
        recorders.append(Recorder(fetches))
        return recorders[-1]

    def train(max_steps):
        estimator = tf.estimator.Estimator(
            model_fn, str(tmp_path),
            config=tf.estimator.RunConfig(
                tf_random_seed=0, log_step_count_steps=None,
                save_checkpoints_steps=20),
            params={"make_recorder": make_recorder})
        return tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(lambda: input_fn(8, True),
                                   max_steps=max_steps),
            tf.estimator.EvalSpec(lambda: input_fn(100, False), steps=None,
                                  start_delay_secs=0, throttle_secs=0))[0]
    result = train(30)
    assert result["global_step"] == 30
    runs = sum(len(recorder.seen) for recorder in recorders)
    # Evaluations end a cycle now and then, and with it at most N - 1 runs.
    assert 30 * N <= runs <= 30 * N + 2 * (N - 1)
    # Resumed from its checkpoint.
    result = train(60)
    assert result["global_step"] == 60
    assert result["accuracy"] > 0.9
    assert not [message for message in warnings_of_tensorflow
                if "has not been increased" in message]
    names = [name for name, _ in tf.train.list_variables(str(tmp_path))]
    assert "dense/kernel/Adam" in names and "beta1_power" in names
    assert not [name for name in names if "accumgrad" in name]


def test_tf_keras_model_of_tensorflow_1(graph):
    # `fit` of a graph-mode Keras model is a loop of one op as well.
    if tf.__version__ >= "2":
        pytest.skip("from TensorFlow 2 on, Keras takes its own optimizers")
    x = tf.keras.layers.Input([1])
    y = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(x)
    model = tf.keras.models.Model(x, y)
    model.compile(accumgrad.AccumulatingOptimizer(sgd(0.5), N,
                                                  reduction="mean"), "mse")
    values = np.arange(1.0, 5.0).reshape([4, 1])
    with tf.Session() as session:
        tf.keras.backend.set_session(session)
        model.fit(values, values, batch_size=1, epochs=1, verbose=0,
                  shuffle=False)
        # d/dw of (w x - x)^2 at w = 0 is -2 x^2, of which the mean is -15.
        np.testing.assert_allclose(model.get_weights()[0], [[7.5]], 1e-6)
