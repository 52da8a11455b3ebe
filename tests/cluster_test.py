"""A real cluster: a parameter server, and a worker that accumulates."""

import json
import os
import socket
import subprocess
import sys

import pytest

from programs import run_python

SERVER = """
import json, sys
import tensorflow.compat.v1 as tf
tf.train.Server(json.loads(sys.argv[1]), job_name="ps", task_index=0).join()
"""

WORKER = """
import json, sys
import numpy as np
import tensorflow.compat.v1 as tf
import accumgrad

tf.disable_eager_execution()
getattr(tf, sys.argv[3])()
if tf.__version__ >= "2":
    tf.disable_control_flow_v2()  # for reference variables
cluster, door = json.loads(sys.argv[1]), sys.argv[2]
server = tf.train.Server(cluster, job_name="worker", task_index=0)
with tf.device(tf.train.replica_device_setter(
        cluster=cluster, worker_device="/job:worker/task:0")):
    step = tf.train.get_or_create_global_step()
    w = tf.get_variable("w", [1200, 1000], initializer=tf.zeros_initializer())
    table = tf.get_variable("table", [4, 2],
                            initializer=tf.zeros_initializer())
    x = tf.placeholder(tf.float32, [None, 1200])
    ids = tf.placeholder(tf.int32, [None])
    loss = (tf.reduce_sum(tf.matmul(x, w))
            + tf.reduce_sum(tf.gather(table, ids)))
    optimizer = tf.train.GradientDescentOptimizer(1.0)
    if door == "builder":
        ops = accumgrad.build_accumulation_ops(loss, optimizer,
                                               global_step=step)
    else:
        train_op = accumgrad.AccumulatingOptimizer(optimizer, 3).minimize(
            loss, global_step=step)
forms = sorted(item.form for item in accumgrad.describe_accumulators())
assert forms == ["contraction", "rows"], forms
for variable in tf.local_variables():
    assert variable.device.startswith("/job:worker"), variable
for variable in tf.global_variables():
    assert variable.device.startswith("/job:ps"), variable
feeds = [{x: np.full([2, 1200], value), ids: [value, value]}
         for value in (1, 2, 3)]
with tf.train.MonitoredTrainingSession(master=server.target) as session:
    for _ in range(2):
        if door == "builder":
            accumgrad.run_cycle(session, ops, feeds)
        else:
            for feed in feeds:
                session.run(train_op, feed)
    values = session.run_step_fn(
        lambda step_context: step_context.session.run([step, w, table]))
assert values[0] == 2
# Of each cycle: two examples of 1, 2 and 3; each of these rows twice.
np.testing.assert_array_equal(values[1], np.full([1200, 1000], -24))
np.testing.assert_array_equal(values[2][:, 0], [0, -4, -4, -4])
"""


def free_address():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return "localhost:%d" % listener.getsockname()[1]


@pytest.mark.parametrize("variables", ["disable_resource_variables",
                                       "enable_resource_variables"])
@pytest.mark.parametrize("door", ["builder", "optimizer"])
def test_parameter_server(tmp_path, door, variables):
    cluster = json.dumps({"ps": [free_address()], "worker": [free_address()]})
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, cluster],
        env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        status, output = run_python(WORKER, tmp_path, cluster, door,
                                    variables)
    finally:
        server.kill()
        server.wait()
    assert status == 0, output
