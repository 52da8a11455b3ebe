"""What is told of the accumulators."""

import gc
import re
import weakref

import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from accumgrad import accumulators
from optimizers import sgd


@pytest.fixture
def layers(graph, monkeypatch):
    """Ops of one variable of each form; the table is 4000 x 8."""
    monkeypatch.setattr(accumulators, "MIN_ELEMENTS_TO_DEFER", 1000)
    table = tf.get_variable("table", [4000, 8])
    kernel = tf.get_variable("kernel", [8, 500])
    bias = tf.get_variable("bias", [500])
    hidden = tf.gather(table, tf.placeholder(tf.int32, [3]))
    outputs = tf.matmul(hidden, kernel) + bias
    # Decay of the kernel is the same in every micro-batch.
    loss = tf.reduce_sum(tf.square(outputs)) + tf.nn.l2_loss(kernel)
    # So flat a kernel would fold at every second row, and so be dense.
    monkeypatch.setattr(accumulators, "_max_rows", lambda product: 10)
    return accumgrad.build_accumulation_ops(loss, sgd())


def test_each_form_and_its_bytes(layers):
    described = {item.variable: item
                 for item in accumgrad.describe_accumulators(layers)}
    table, kernel, bias = (described[name]
                           for name in ("table", "kernel", "bias"))
    # Three rows of 8 float32, and three int32 indices.
    assert table == ("table", (4000, 8), "rows", "it is IndexedSlices",
                     4000 * 8 * 4, 3 * 8 * 4 + 3 * 4)
    # Three rows of 8 and 500 float32.
    assert kernel == ("kernel", (8, 500), "contraction", "MatMul + constant",
                      8 * 500 * 4, 3 * (8 + 500) * 4)
    assert bias == ("bias", (500,), "dense", "it is small", 500 * 4, 0)


def test_prints_as_a_table(layers):
    lines = str(accumgrad.describe_accumulators(layers)).splitlines()
    assert len(lines) == 2 + 3
    assert re.split(r"\s{2,}", lines[0]) == [
        "variable", "shape", "form", "dense", "a micro-batch", "reason"]
    [kernel] = [line for line in lines if line.startswith("kernel")]
    assert re.split(r"\s{2,}", kernel) == [
        "kernel", "8 x 500", "contraction", "16.0 kB", "6.1 kB",
        "MatMul + constant"]
    # Columns: the last begins at one place in every line.
    start = lines[0].index("reason")
    assert all(line[start - 1] == " " != line[start] for line in lines
               if not line.startswith("-"))


def test_dense_as_asked(graph):
    w = tf.get_variable("w", [3])
    ops = accumgrad.build_accumulation_ops(tf.reduce_sum(w), sgd(),
                                           accumulators="dense")
    [item] = accumgrad.describe_accumulators(ops)
    assert (item.form, item.reason) == ("dense", "as asked")


def test_what_depends_on_the_feed_is_none(graph):
    table = tf.get_variable("table", [4, 2])
    ids = tf.placeholder(tf.int32, [None])
    accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.gather(table, ids)), sgd())
    described = accumgrad.describe_accumulators()
    assert described[0].micro_batch_bytes is None
    assert "by the feed" in str(described)


def test_graph_has_all_its_builders(graph):
    a, b = tf.get_variable("a", []), tf.get_variable("b", [])
    first = accumgrad.build_accumulation_ops(a * b, sgd(), [a])
    second = accumgrad.build_accumulation_ops(a * b, sgd(), [b])

    def names(ops_or_graph):
        return [item.variable for item in
                accumgrad.describe_accumulators(ops_or_graph)]
    assert names(first) == ["a"]
    assert names(second) == ["b"]
    assert names(graph) == names(None) == ["a", "b"]


def test_slim_vgg16_defers_its_large_layers(graph):
    slim = pytest.importorskip("tf_slim")
    from tf_slim.nets import vgg

    images = tf.placeholder(tf.float32, [3, 224, 224, 3])
    with slim.arg_scope(vgg.vgg_arg_scope()):
        outputs, _ = vgg.vgg_16(images, num_classes=128)
    tf.losses.add_loss(tf.reduce_sum(tf.square(outputs)))
    ops = accumgrad.build_accumulation_ops(tf.losses.get_total_loss(), sgd())
    described = {item.variable: item
                 for item in accumgrad.describe_accumulators(ops)}
    for layer, num_inputs in (("fc6", 7 * 7 * 512), ("fc7", 4096)):
        item = described[f"vgg_16/{layer}/weights"]
        assert item.form == "contraction"
        assert item.reason == "Conv2DBackpropFilter + constant"
        assert item.dense_bytes == num_inputs * 4096 * 4
        assert item.micro_batch_bytes == 3 * (num_inputs + 4096) * 4
    assert {name for name, item in described.items()
            if item.form != "dense"} == {"vgg_16/fc6/weights",
                                         "vgg_16/fc7/weights"}


@pytest.mark.parametrize("junk", [3, "ops", ([], [], None)])
def test_junk_is_refused(graph, junk):
    with pytest.raises(TypeError, match="`ops_or_graph` must be an Accum"):
        accumgrad.describe_accumulators(junk)


def test_graph_without_accumulation_is_refused(graph):
    with pytest.raises(ValueError, match="of which nothing is known"):
        accumgrad.describe_accumulators(graph)


def test_descriptions_do_not_keep_a_graph_alive(behavior):
    graph = tf.Graph()
    with graph.as_default():
        w = tf.get_variable("w", [3])
        accumgrad.build_accumulation_ops(tf.reduce_sum(w), sgd())
    reference = weakref.ref(graph)
    del graph, w
    gc.collect()
    assert reference() is None
