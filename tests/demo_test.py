"""Tests of accumgrad/demo.py."""

import os
import re
import signal
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
import scipy.ndimage
import sklearn.datasets
import tensorflow.compat.v1 as tf

import accumgrad
from accumgrad import demo
from event_files import read_summaries

# Of VGG-16 with 1,000 classes at 224 x 224 pixels, as its authors published
# it: "138 million" in table 2 of the paper.
PUBLISHED_PARAMETERS = 138357544
PARAMETERS_AT_224 = PUBLISHED_PARAMETERS - 4097 * 1000 + 4097 * 128

CYCLES = 3
MICRO_BATCHES = 3
OPTIONS = ["--cycles", str(CYCLES), "--micro-batches", str(MICRO_BATCHES),
           "--image-size", "32", "--seed", "5"]
SUMMARIES = ["cycle_loss", "gradient_norm_before_clipping",
             "gradient_norm_after_clipping", "skipped_micro_batches"]


@pytest.fixture(scope="module")
def digits():
    return demo.load_images()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a whole run leaves: its lines, plot, checkpoints and summaries."""
    directory = tmp_path_factory.mktemp("undisturbed")
    plot = str(directory / "plot.png")
    checkpoints = str(directory / "checkpoints")
    logs = str(directory / "logs")
    lines = run_main(directory / "output", "--plot", plot,
                     "--checkpoint-dir", checkpoints, "--log-dir", logs)
    yield lines, plot, checkpoints, logs
    remove_checkpoints(checkpoints)


def run_main(output, *options):
    """Runs the program in this process, and returns the lines it printed."""
    # Not capsys, which a fixture for the module can't have.
    with open(str(output), "w") as file:
        stdout, sys.stdout = sys.stdout, file
        try:
            demo.main(OPTIONS + list(options))
        finally:
            sys.stdout = stdout
    with open(str(output)) as file:
        return file.read().splitlines()


def remove_checkpoints(directory):
    """Gives 400 MB back: pytest keeps temporary directories for a while."""
    for name in os.listdir(directory):
        os.remove(os.path.join(directory, name))


# The model.


@pytest.mark.parametrize("size, fc6_inputs, parameters", [
    (224, 25088, PARAMETERS_AT_224),
    (32, 512, PARAMETERS_AT_224 - (25088 - 512) * 4096),
])
def test_vgg16_has_the_layers_and_parameters_of_the_paper(
        size, fc6_inputs, parameters):
    with tf.Graph().as_default() as graph:
        model = demo.build_model(size, margin=0.1)
        shapes = [tuple(variable.shape.as_list())
                  for variable in tf.trainable_variables()]
        operations = graph.get_operations()
    assert [shape for shape in shapes if len(shape) == 4] == [
        (3, 3, 3, 64), (3, 3, 64, 64),
        (3, 3, 64, 128), (3, 3, 128, 128),
        (3, 3, 128, 256), (3, 3, 256, 256), (3, 3, 256, 256),
        (3, 3, 256, 512), (3, 3, 512, 512), (3, 3, 512, 512),
        (3, 3, 512, 512), (3, 3, 512, 512), (3, 3, 512, 512)]
    assert [shape for shape in shapes if len(shape) == 2] == [
        (fc6_inputs, 4096), (4096, 4096), (4096, 128)]
    assert sum(int(np.prod(shape)) for shape in shapes) == parameters
    layers = [operation for operation in operations
              if operation.type in ("Conv2D", "MaxPool", "MatMul")]
    assert [layer.type for layer in layers] == (
        2 * ["Conv2D"] + ["MaxPool"] + 2 * ["Conv2D"] + ["MaxPool"]
        + 3 * (3 * ["Conv2D"] + ["MaxPool"]) + 3 * ["MatMul"])
    assert [layer.outputs[0].shape.as_list()[1] for layer in layers
            if layer.type == "MaxPool"] == [
                size // 2, size // 4, size // 8, size // 16, size // 32]
    assert model.embeddings.shape.as_list() == [None, 128]


def test_embedding_is_numpys_forward_pass_and_of_norm_one():
    images = np.random.RandomState(0).normal(size=(2, 32, 32, 3))
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(0)
        model = demo.build_model(32, margin=0.1)
        session.run(tf.global_variables_initializer())
        # Biases begin at zero, where it would not show if they were left out.
        session.run([bias.assign(tf.random_normal(bias.shape, stddev=0.1))
                     for bias in tf.trainable_variables()
                     if bias.shape.rank == 1])
        embeddings = session.run(model.embeddings, {model.images: images})
        weights = {variable.op.name: value for variable, value in zip(
            tf.trainable_variables(), session.run(tf.trainable_variables()))}
    # float32 through 16 layers, against the same with float64 activations.
    np.testing.assert_allclose(embeddings, forward_pass(images, weights),
                               rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1.0,
                               rtol=1e-5)


def forward_pass(x, weights):
    """Returns VGG-16's embedding of `[batch, 32, 32, 3]`, by NumPy."""
    for block, num_convolutions in enumerate([2, 2, 3, 3, 3], 1):
        for layer in range(1, num_convolutions + 1):
            name = f"conv{block}_{layer}"
            x = np.maximum(convolution(x, weights[name + "/weights"])
                           + weights[name + "/biases"], 0)
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
        x = x.max(axis=(2, 4))
    x = x.reshape(len(x), -1)
    for name in ["fc6", "fc7"]:
        x = np.maximum(x @ weights[name + "/weights"]
                       + weights[name + "/biases"], 0)
    x = x @ weights["fc8/weights"] + weights["fc8/biases"]
    return x / np.sqrt(np.sum(x ** 2, axis=1, keepdims=True))


def convolution(x, kernel):
    _, height, width, _ = x.shape
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], "constant")
    return sum(padded[:, row:row + height, column:column + width]
               @ kernel[row, column]
               for row in range(3) for column in range(3))


def test_triplet_loss_is_numpys():
    random = np.random.RandomState(0)
    anchor, positive, negative = random.normal(size=(3, 50, 4))
    margin = 1.5
    losses = [max(((a - p) ** 2).sum() - ((a - n) ** 2).sum() + margin, 0.0)
              for a, p, n in zip(anchor, positive, negative)]
    assert 10 < sum(loss == 0.0 for loss in losses) < 40  # both branches
    with tf.Graph().as_default(), tf.Session() as session:
        loss = session.run(demo.triplet_loss(
            *map(tf.constant, (anchor, positive, negative)), margin))
    # Both sides are float64, and differ in the order of the sums.
    assert loss == pytest.approx(np.mean(losses), rel=1e-12)


def test_loss_takes_anchor_positive_and_negative_from_consecutive_rows():
    # Points on a line: any other order of the rows gives another loss.
    embeddings = np.zeros((6, 128), np.float32)
    embeddings[:, 0] = [0, 2, -1, 0, 1, -3]
    with tf.Graph().as_default(), tf.Session() as session:
        model = demo.build_model(32, margin=0.5)
        loss = session.run(model.loss, {model.embeddings: embeddings})
    # 4 - 1 + 0.5 is 3.5, and 1 - 9 + 0.5 is below 0.
    assert loss == pytest.approx((3.5 + 0.0) / 2, rel=1e-6)


def test_no_array_is_stored_in_the_graph_def():
    with tf.Graph().as_default() as graph:
        model = demo.build_model(32, margin=0.1)
        accumgrad.build_accumulation_ops(
            model.loss, tf.train.AdamOptimizer(), reduction="mean",
            global_step=tf.train.get_or_create_global_step())
        constants = [node.attr["value"]
                     for node in graph.as_graph_def().node
                     if node.op == "Const"]
    assert constants
    # An image is 256 bytes, before it is scaled.
    assert max(value.ByteSize() for value in constants) < 256


# The data.


def test_held_out_and_training_images_are_disjoint(digits):
    train, held_out = ({image.tobytes() for image in part.images}
                       for part in digits)
    assert len(train) == 1497  # no image is there twice
    assert len(held_out) == 300
    assert not train & held_out


def test_images_are_scikit_learns_standardised(digits):
    train, held_out = digits
    assert train.images.mean() == pytest.approx(0.0, abs=1e-5)
    assert train.images.std() == pytest.approx(1.0, rel=1e-5)
    # Back on scikit-learn's scale, from 0 to 16, all its images are there.
    images = np.concatenate([train.images, held_out.images])
    images = np.rint(16 * (images - images.min()) / np.ptp(images))
    labels = np.concatenate([train.labels, held_out.labels])
    original = sklearn.datasets.load_digits()
    assert (sorted(zip(images.reshape(-1, 64).tolist(), labels))
            == sorted(zip(original.data.tolist(), original.target)))


@pytest.mark.parametrize("size", [32, 33, 224])
def test_images_are_scaled_bilinearly(digits, size):
    images = digits[0].images[:2]
    position = (np.arange(size) + 0.5) * 8 / size - 0.5
    expected = [scipy.ndimage.map_coordinates(
        image, np.meshgrid(position, position, indexing="ij"), order=1,
        mode="nearest") for image in images]
    scaled = demo.scale_images(images, size)
    assert scaled.shape == (2, size, size, 3)
    assert scaled.dtype == np.float32
    for channel in range(3):
        np.testing.assert_allclose(scaled[..., channel], expected,
                                   rtol=1e-5, atol=1e-5)


def test_triplets_are_two_images_of_a_class_and_one_of_another():
    labels = np.array([0, 1, 0, 1, 2, 2])
    random = np.random.RandomState(0)
    triplets = {tuple(demo.draw_triplet(labels, random))
                for _ in range(1000)}
    # All that there are: 6 anchors, 1 positive each, 4 negatives each.
    assert triplets == {
        (a, p, n) for a in range(6) for p in range(6) for n in range(6)
        if a != p and labels[a] == labels[p] and labels[a] != labels[n]}


def test_feeds_from_a_later_cycle_are_those_of_the_whole_run(digits):
    with tf.Graph().as_default():
        model = demo.build_model(32, margin=0.1)

    def take(number, **kwargs):
        feeds = demo.triplet_feeds(model, digits[0], 4, **kwargs)
        return [next(feeds)[model.images] for _ in range(number)]

    whole = take(12, seed=3)
    np.testing.assert_array_equal(take(4, seed=3, first_cycle=2), whole[8:])
    assert len({images.tobytes() for images in whole}) == 12
    assert not np.array_equal(take(4, seed=4), whole[:4])
    assert whole[0].shape == (3, 32, 32, 3)


def test_accuracy_is_of_the_triplets_in_order():
    labels = np.arange(300) % 10
    by_class = np.eye(10)[labels]
    assert demo.triplet_accuracy(by_class, labels) == 1.0
    # All at one distance: none is closer than another.
    assert demo.triplet_accuracy(np.eye(300), labels) == 0.0
    # Random positions: 1,000 times one half, give or take 4 deviations.
    random = np.random.RandomState(0).normal(size=(300, 5))
    assert demo.triplet_accuracy(random, labels) == pytest.approx(
        0.5, abs=4 * 0.016)


# The program.


def test_main_prints_a_line_a_cycle_and_the_accuracies(undisturbed):
    lines, plot, _, _ = undisturbed
    cycles = [re.match(
        r"cycle (\d+): mean loss (\d\.\d{4}), (\d+\.\d) s, (\d+\.\d) "
        r"triplets/s, peak resident memory (\d+) MB$", line)
              for line in lines[1:-2]]
    assert [int(cycle.group(1)) for cycle in cycles] == list(range(CYCLES))
    for cycle in cycles:
        # Losses are between 0 and the largest squared distance, 4, + margin.
        assert 0.0 < float(cycle.group(2)) < 4.1
        seconds, rate, memory = map(float, cycle.groups()[2:])
        assert seconds * rate == pytest.approx(
            MICRO_BATCHES, abs=0.06 * (seconds + rate))
        # The weights, Adam's two slots, and the accumulators of the
        # convolutions, float32.
        assert memory > (3 * 34e6 + 14e6) * 4 / 2 ** 20
    before, after = [re.match(
        rf"held-out triplet accuracy {when} training: (\d+\.\d) %$", line)
        for when, line in [("before", lines[0]), ("after", lines[-2])]]
    # Better than chance, trained or not.
    assert 50.0 < float(before.group(1)) < 100.0
    assert 50.0 < float(after.group(1)) <= 100.0
    assert lines[-1] == f"plot written to {plot}"


def test_plot_is_an_image_with_something_in_each_panel(undisturbed):
    _, plot, _, _ = undisturbed
    image = matplotlib.image.imread(plot)[..., :3]
    for panel in np.array_split(image, 3, axis=1):
        assert 0.01 < np.mean(panel.min(axis=2) < 0.5) < 0.5


def test_event_file_has_the_summaries_of_each_cycle(undisturbed):
    lines, _, _, logs = undisturbed
    summaries = [read_summaries(logs, tag) for tag in SUMMARIES]
    for pairs in summaries:
        assert [step for step, _ in pairs] == list(range(CYCLES))
    for line, *values in zip(lines[1:-2], *summaries):
        loss, before, after, skipped = (value for _, value in values)
        assert f"mean loss {loss:.4f}," in line
        assert after == pytest.approx(min(before, 1.0), rel=1e-6)
        assert skipped == 0


def test_summaries_are_of_what_was_clipped_and_skipped(digits, tmp_path):
    # Every 7th image is NaN; cycles of 8 triplets.
    images = digits[0].images.copy()
    images[::7] = np.nan
    spoilt = digits[0]._replace(images=images)
    options = demo.parse_options([
        "--cycles", "2", "--micro-batches", "8", "--clip-norm", "0.01",
        "--log-dir", str(tmp_path)])
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(0)
        model = demo.build_model(32, margin=1.0)
        ops = demo.build_ops(model.loss, options)
        gradients = tf.gradients(model.loss, tf.trainable_variables())
        session.run([tf.global_variables_initializer(),
                     tf.local_variables_initializer()])
        feeds = demo.triplet_feeds(model, spoilt, 8, seed=0)
        images = [next(feeds)[model.images] for _ in range(16)]
        whole = [np.isfinite(triplet).all() for triplet in images]
        assert 0 < sum(whole[:8]) < 8 and 0 < sum(whole[8:]) < 8
        # Of the first cycle, as one batch of those that are whole.
        norm = np.sqrt(sum(
            np.sum(np.square(gradient, dtype=np.float64))
            for gradient in session.run(gradients, {
                model.images: np.concatenate([
                    triplet for triplet, counts in zip(images[:8], whole)
                    if counts])})))
        losses = demo.train(session, model, ops, spoilt, options)
        assert np.all(np.isfinite(losses))
    loss, before, after, skipped = [
        [value for _, value in read_summaries(tmp_path, tag)]
        for tag in SUMMARIES]
    np.testing.assert_allclose(loss, losses, rtol=1e-6)
    # float32 through 16 layers, of another batch size.
    assert before[0] == pytest.approx(norm, rel=1e-4)
    assert min(before) > 0.01
    np.testing.assert_allclose(after, 0.01, rtol=1e-5)
    assert skipped == [8 - sum(whole[:8]), 16 - sum(whole)]


def test_run_that_was_killed_goes_on_to_the_same_weights(
        undisturbed, tmp_path):
    lines, _, checkpoints, logs = undisturbed
    directory = str(tmp_path / "checkpoints")
    options = ["--checkpoint-dir", directory,
               "--log-dir", str(tmp_path / "logs")]
    run_until_killed(options)
    resumed = run_main(tmp_path / "output", *options)
    step = int(re.match(r"resuming at cycle (\d)", resumed[1]).group(1))
    assert 1 <= step < CYCLES
    assert [line.split(",")[0] for line in resumed[2:]] == [
        line.split(",")[0] for line in lines[1 + step:-1]]
    assert resumed[0] == lines[0]

    expected, found = (tf.train.load_checkpoint(path)
                       for path in (checkpoints, directory))
    names = expected.get_variable_to_shape_map()
    assert sorted(found.get_variable_to_shape_map()) == sorted(names)
    assert found.get_tensor("global_step") == CYCLES
    for name in names:
        np.testing.assert_array_equal(
            found.get_tensor(name), expected.get_tensor(name), name)
    remove_checkpoints(directory)
    for tag in SUMMARIES:
        assert (read_summaries(tmp_path / "logs", tag)
                == read_summaries(logs, tag))


def run_until_killed(options):
    """Kills a run in a process of its own once a cycle's line is printed."""
    root = os.path.dirname(os.path.dirname(accumgrad.__file__))
    child = subprocess.Popen(
        [sys.executable, "-m", "accumgrad.demo"] + OPTIONS + options,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        universal_newlines=True, env=dict(os.environ, PYTHONPATH=root))
    lines = []
    for line in child.stdout:
        lines.append(line)
        if re.search(r"cycle \d+: mean loss", line):  # behind the bar
            child.kill()
            break
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL, "".join(lines)


def test_finished_run_trains_no_more():
    options = demo.parse_options(["--cycles", "3"])
    with tf.Graph().as_default(), tf.Session() as session:
        global_step = tf.train.get_or_create_global_step()
        session.run(global_step.assign(3))
        assert demo.train(session, None, None, None, options) == []


def test_checkpoints_of_other_settings_are_refused(undisturbed):
    _, _, checkpoints, _ = undisturbed
    with pytest.raises(SystemExit, match=r"'seed': 5.*'seed': 6"):
        demo.main(OPTIONS + ["--seed", "6", "--checkpoint-dir", checkpoints])


@pytest.mark.parametrize("missing, options", [
    ("sklearn.datasets", []), ("tqdm", []), ("matplotlib", ["--plot", "x"])])
def test_missing_package_is_named_with_the_extra(
        monkeypatch, missing, options):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"needs {missing}, .*"
                       r"`pip install accumgrad\[demo\]`"):
        demo.main(options)


@pytest.mark.parametrize("option, value, message", [
    ("--cycles", "0", "must be from 1 to 4294967295; got 0"),
    ("--micro-batches", "0", "must be from 1 to 4294967295; got 0"),
    ("--image-size", "31", "must be from 32 to 4294967295; got 31"),
    ("--seed", "-1", "must be from 0 to 4294967295; got -1"),
    ("--clip-norm", "0", "must be above 0 and finite; got 0.0"),
    ("--clip-norm", "inf", "must be above 0 and finite; got inf"),
    ("--plot", "missing/plot.png", "no directory for missing/plot.png")])
def test_option_out_of_range_is_refused(capsys, option, value, message):
    with pytest.raises(SystemExit):
        demo.main([option, value])
    assert f"argument {option}: {message}" in capsys.readouterr().err
