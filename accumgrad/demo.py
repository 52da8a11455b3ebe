"""Trains a VGG-16 triplet network on 128 micro-batches of one triplet each.

    python -m accumgrad.demo --plot demo.png

The network (Simonyan and Zisserman, 2015, configuration D) maps an image of a
handwritten digit to a point on the unit sphere, so that images of the same
digit lie closer together than images of different digits.  One triplet at a
time is all that a micro-batch holds; Adam gets the mean gradient of 128, its
global norm clipped.

Needs the `demo` extra: `pip install accumgrad[demo]`.  Knows only the public
names of accumgrad; the functions that build the model and read the images
serve elsewhere too.
"""

import argparse
import importlib
import itertools
import json
import os
import sys
import time
from typing import (Any, Callable, Dict, Iterator, List, NamedTuple, Optional,
                    Sequence, Tuple)

import numpy as np
import tensorflow.compat.v1 as tf

import accumgrad

# A gradient, and the variable that it belongs to.
Pairs = List[Tuple[tf.Tensor, tf.Variable]]

# Of each block of VGG-16: output channels, and number of convolutions.
BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
HIDDEN_SIZE = 4096
EMBEDDING_SIZE = 128
CHANNELS = 3
# Each block halves the image, and one pixel has to be left.
MIN_IMAGE_SIZE = 2 ** len(BLOCKS)

NUM_HELD_OUT_IMAGES = 300
NUM_HELD_OUT_TRIPLETS = 1000
# Images in one run of the network when nothing is trained.
EVALUATION_BATCH_SIZE = 10

# The largest seed that NumPy takes.
MAX_INTEGER = 2 ** 32 - 1

# What the weights depend on: a checkpoint is of one setting of these.
SETTINGS = ("seed", "micro_batches", "image_size", "learning_rate", "margin",
            "clip_norm")


class Digits(NamedTuple):
    """Images of handwritten digits.

    Attributes:
        images: float32 array `[num_images, 8, 8]`, grey.
        labels: int array `[num_images]`, the digits, 0 to 9.
    """
    images: np.ndarray
    labels: np.ndarray


class TripletModel(NamedTuple):
    """The tensors of a triplet network.

    Attributes:
        images: Placeholder, float32 `[batch, size, size, 3]`.  For the loss:
            anchor, positive, negative, anchor, positive, negative, ...
        embeddings: float32 `[batch, 128]`, of norm one.
        loss: Scalar float32, the mean over the triplets.
    """
    images: tf.Tensor
    embeddings: tf.Tensor
    loss: tf.Tensor


def vgg16_embedding(images: tf.Tensor,
                    embedding_size: int = EMBEDDING_SIZE) -> tf.Tensor:
    """Builds VGG-16 with a normalised embedding in place of its classes.

    Thirteen 3 x 3 convolutions in five blocks, each followed by 2 x 2 maximum
    pooling, and three fully connected layers (Simonyan and Zisserman, 2015,
    table 1, column D).  Without the dropout.  Weights are initialised as in
    He et al., 2015.  At 224 x 224 pixels it has 134.8 million parameters.

    Args:
        images: float32 `[batch, height, width, channels]`, centred round 0.
            All but the batch must be known, and height and width at least 32
            pixels.
        embedding_size: Units of the last layer.

    Returns:
        float32 `[batch, embedding_size]`, each row of norm one.
    """
    x = images
    for block, (channels, num_convolutions) in enumerate(BLOCKS, 1):
        for layer in range(1, num_convolutions + 1):
            x = _convolution(x, channels, f"conv{block}_{layer}")
        x = tf.nn.max_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], "VALID")
    x = tf.reshape(x, [-1, x.shape[1:].num_elements()])
    x = tf.nn.relu(_fully_connected(x, HIDDEN_SIZE, "fc6"))
    x = tf.nn.relu(_fully_connected(x, HIDDEN_SIZE, "fc7"))
    x = _fully_connected(x, embedding_size, "fc8")
    return tf.nn.l2_normalize(x, axis=1)


def _convolution(x: tf.Tensor, channels: int, name: str) -> tf.Tensor:
    with tf.variable_scope(name):
        kernel = _weights([3, 3, x.shape.as_list()[-1], channels])
        x = tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME")
        return tf.nn.relu(tf.nn.bias_add(x, _biases(channels)))


def _fully_connected(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    with tf.variable_scope(name):
        weights = _weights([x.shape.as_list()[-1], units])
        return tf.nn.bias_add(tf.matmul(x, weights), _biases(units))


def _weights(shape: Sequence[int]) -> tf.Variable:
    return tf.get_variable(
        "weights", shape,
        initializer=tf.variance_scaling_initializer(scale=2.0, mode="fan_in"))


def _biases(size: int) -> tf.Variable:
    return tf.get_variable("biases", [size],
                           initializer=tf.zeros_initializer())


def triplet_loss(anchor: tf.Tensor, positive: tf.Tensor, negative: tf.Tensor,
                 margin: float) -> tf.Tensor:
    """Returns the triplet loss, the mean over the triplets.

    Of one triplet it is `max(|a - p|^2 - |a - n|^2 + margin, 0)` (Schroff,
    Kalenichenko and Philbin, 2015, equation 3).

    Args:
        anchor: Embeddings, float `[batch, embedding_size]`.
        positive: Embeddings of others of the same class, same shape.
        negative: Embeddings of others of another class, same shape.
        margin: By how much the negative's squared distance is to exceed the
            positive's: from 0 to 4, the largest between unit vectors.

    Returns:
        Scalar, of the embeddings' dtype.
    """
    to_positive = tf.reduce_sum(tf.square(anchor - positive), axis=1)
    to_negative = tf.reduce_sum(tf.square(anchor - negative), axis=1)
    return tf.reduce_mean(
        tf.nn.relu(to_positive - to_negative + margin))


def build_model(image_size: int, margin: float) -> TripletModel:
    """Builds the triplet network into the default graph.

    All three images go through the network in one batch, so that each weight
    is used once.

    Args:
        image_size: Height and width of the images in pixels, at least 32.
        margin: As in `triplet_loss`.

    Returns:
        A `TripletModel`.
    """
    images = tf.placeholder(
        tf.float32, [None, image_size, image_size, CHANNELS], name="images")
    embeddings = vgg16_embedding(images)
    triplets = tf.reshape(embeddings, [-1, 3, EMBEDDING_SIZE])
    anchor, positive, negative = tf.unstack(triplets, axis=1)
    loss = triplet_loss(anchor, positive, negative, margin)
    return TripletModel(images, embeddings, loss)


def load_images() -> Tuple[Digits, Digits]:
    """Returns scikit-learn's handwritten digits, split for good.

    The grey values are standardised: over the training images, their mean is
    0 and their standard deviation 1.

    Returns:
        Two `Digits`: 1,497 to train with and 300 that are held out, drawn at
        random, and always the same.

    Raises:
        ImportError: scikit-learn is missing.
    """
    digits = _import_extra("sklearn.datasets").load_digits()
    order = np.random.RandomState(0).permutation(len(digits.images))
    held_out, train = np.split(order, [NUM_HELD_OUT_IMAGES])
    images = digits.images - digits.images[train].mean()
    images = (images / images[train].std()).astype(np.float32)
    return (Digits(images[train], digits.target[train]),
            Digits(images[held_out], digits.target[held_out]))


def scale_images(images: np.ndarray, image_size: int) -> np.ndarray:
    """Scales grey images up to what the network takes.

    Args:
        images: float32 array `[num_images, size, size]`.
        image_size: Height and width to scale to, in pixels, by bilinear
            interpolation between the centres of the pixels.

    Returns:
        float32 array `[num_images, image_size, image_size, 3]`: the grey
        channel three times.
    """
    size = images.shape[1]
    position = (np.arange(image_size) + 0.5) * size / image_size - 0.5
    distance = np.abs(np.clip(position, 0, size - 1)[:, np.newaxis]
                      - np.arange(size))
    weights = np.maximum(1.0 - distance, 0.0).astype(np.float32)
    scaled = weights @ images @ weights.T
    return np.repeat(scaled[..., np.newaxis], CHANNELS, axis=3)


def draw_triplet(labels: np.ndarray,
                 random: np.random.RandomState) -> np.ndarray:
    """Draws an anchor, another image of its class, and one of another class.

    Args:
        labels: int array `[num_images]`, each class at least twice.
        random: `np.random.RandomState` to draw from.

    Returns:
        int array `[3]`: the images' indices.
    """
    anchor = random.randint(len(labels))
    same = labels == labels[anchor]
    different = np.flatnonzero(~same)
    same[anchor] = False
    return np.array([anchor, random.choice(np.flatnonzero(same)),
                     random.choice(different)])


def triplet_feeds(
        model: TripletModel, digits: Digits, num_micro_batches: int, seed: int,
        first_cycle: int = 0) -> Iterator[Dict[tf.Tensor, np.ndarray]]:
    """Yields feed dicts of one triplet each, without end.

    What a cycle sees depends on the seed and the cycle alone, so that a run
    that was stopped goes on with the triplets that it would have seen.

    Args:
        model: A `TripletModel`.
        digits: `Digits` to draw from.  Only the three images of a feed are
            scaled, when it is asked for.
        num_micro_batches: Feeds in a cycle.
        seed: Integer from 0 to 2**32 - 1.
        first_cycle: Number of the cycle to begin with.
    """
    image_size = model.images.shape.as_list()[1]
    for cycle in itertools.count(first_cycle):
        random = np.random.RandomState([seed, cycle])
        for _ in range(num_micro_batches):
            triplet = draw_triplet(digits.labels, random)
            yield {model.images: scale_images(digits.images[triplet],
                                              image_size)}


def embed(session: tf.Session, model: TripletModel,
          digits: Digits) -> np.ndarray:
    """Returns the embeddings of all images, a float32 array `[num, 128]`."""
    image_size = model.images.shape.as_list()[1]
    starts = range(0, len(digits.images), EVALUATION_BATCH_SIZE)
    return np.concatenate([
        session.run(model.embeddings, {model.images: scale_images(
            digits.images[start:start + EVALUATION_BATCH_SIZE], image_size)})
        for start in starts])


def triplet_accuracy(embeddings: np.ndarray, labels: np.ndarray) -> float:
    """Returns how many of 1,000 fixed triplets are in order.

    Args:
        embeddings: float array `[num_images, embedding_size]`.
        labels: int array `[num_images]`.

    Returns:
        Fraction, from 0 to 1, of the triplets whose anchor lies closer to the
        positive than to the negative.  Chance is 0.5.
    """
    random = np.random.RandomState(0)
    triplets = np.array([draw_triplet(labels, random)
                         for _ in range(NUM_HELD_OUT_TRIPLETS)])
    anchor, positive, negative = (embeddings[column] for column in triplets.T)
    return np.mean(np.linalg.norm(anchor - positive, axis=1)
                   < np.linalg.norm(anchor - negative, axis=1))


def build_ops(loss: tf.Tensor,
              options: argparse.Namespace) -> accumgrad.AccumulationOps:
    """Builds the ops of a cycle, and scalar summaries of what it did.

    These read the accumulators, and so are to be run between `train_op` and
    the next `zero_ops`.

    Args:
        loss: Scalar `Tensor` of one micro-batch.
        options: The command line's.

    Returns:
        The `AccumulationOps`.
    """
    step = tf.train.get_or_create_global_step()
    # An update op, so that a skipped micro-batch takes it back.
    counted = tf.get_variable(
        "counted_micro_batches", [], tf.int64, trainable=False,
        initializer=tf.zeros_initializer())
    ops = accumgrad.build_accumulation_ops(
        loss, tf.train.AdamOptimizer(options.learning_rate),
        reduction="mean", update_ops=[tf.assign_add(counted, 1)],
        transform_gradients=_clip_and_summarize(options.clip_norm),
        nonfinite="skip_micro_batch", global_step=step)
    tf.summary.scalar("skipped_micro_batches",
                      step * options.micro_batches - counted)
    return ops


def _clip_and_summarize(
        clip_norm: float) -> Callable[[Pairs], Pairs]:
    clip = accumgrad.clip_by_global_norm(clip_norm)

    def transform(grads_and_vars: Pairs) -> Pairs:
        clipped = clip(grads_and_vars)
        for when, pairs in ("before", grads_and_vars), ("after", clipped):
            tf.summary.scalar(
                f"gradient_norm_{when}_clipping",
                tf.global_norm([gradient for gradient, _ in pairs]))
        return clipped
    return transform


class CycleLog:
    """Writes a cycle's loss, and the graph's summaries, for TensorBoard."""

    def __init__(self, directory: str, first_cycle: int) -> None:
        """Opens an event file.

        Args:
            directory: Where to, made if it is not there.
            first_cycle: Number of the cycle that comes next.  What an earlier
                run that was killed may have written of it counts no more.
        """
        self._summaries = tf.summary.merge_all()
        self._writer = tf.summary.FileWriter(directory,
                                             tf.get_default_graph())
        self._writer.add_session_log(
            tf.SessionLog(status=tf.SessionLog.START), first_cycle)

    def write(self, session: tf.Session, cycle: int, loss: float) -> None:
        """Writes the summaries of a cycle whose gradients are still there.

        Args:
            session: What the cycle ran in.
            cycle: Its number.
            loss: Its mean loss.
        """
        self._writer.add_summary(session.run(self._summaries), cycle)
        self._writer.add_summary(tf.Summary(value=[tf.Summary.Value(
            tag="cycle_loss", simple_value=loss)]), cycle)
        self._writer.flush()


def train(session: tf.Session, model: TripletModel,
          ops: accumgrad.AccumulationOps, digits: Digits,
          options: argparse.Namespace,
          saver: Optional[tf.train.Saver] = None) -> List[float]:
    """Trains from the cycle that the global step says is next.

    Prints a line a cycle; by then the cycle is in the checkpoint and in the
    event file, if there is to be one.

    Returns:
        List of the mean loss of each cycle.
    """
    first_cycle = session.run(tf.train.get_global_step())
    if first_cycle >= options.cycles:
        print(f"all {options.cycles} cycles are done")
        return []
    feeds = triplet_feeds(model, digits, options.micro_batches, options.seed,
                          first_cycle)
    log = (CycleLog(options.log_dir, first_cycle) if options.log_dir
           else None)
    losses = []
    start = time.perf_counter()
    for cycle in accumgrad.run_cycles(
            session, ops, feeds, options.micro_batches,
            num_cycles=options.cycles - first_cycle, fetches=model.loss,
            progress=True):
        seconds = time.perf_counter() - start
        number = first_cycle + cycle.index
        # A micro-batch that was skipped may have a loss that is NaN.
        losses.append(np.nanmean(cycle.fetches))
        if log is not None:
            log.write(session, number, losses[-1])
        if saver is not None:
            _save(session, saver, options.checkpoint_dir)
        print(f"cycle {number}: "
              f"mean loss {losses[-1]:.4f}, {seconds:.1f} s, "
              f"{cycle.num_micro_batches / seconds:.1f} triplets/s, "
              f"peak resident memory {peak_memory_mb():.0f} MB", flush=True)
        start = time.perf_counter()
    return losses


def peak_memory_mb() -> float:
    """Returns the most memory that the process ever held, in MB of 2**20.

    The resident set size; NaN on Windows, which does not tell.
    """
    try:
        import resource
    except ImportError:
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in kB, macOS in bytes.
    return peak / 2 ** (20 if sys.platform == "darwin" else 10)


def check_settings(directory: str, options: argparse.Namespace) -> None:
    """Writes down what the weights depend on, or compares with what is there.

    Raises:
        ValueError: The directory's checkpoints are of other settings.
    """
    settings = {name: getattr(options, name) for name in SETTINGS}
    path = os.path.join(directory, "settings.json")
    if os.path.exists(path):
        with open(path) as file:
            written = json.load(file)
        if written != settings:
            raise ValueError(
                f"The checkpoints in {directory} were made with {written}; "
                f"got {settings}.  Go on with the same options, or choose "
                "another --checkpoint-dir.")
        return
    os.makedirs(directory, exist_ok=True)
    # Renamed into place, so that a killed run leaves no half-written file.
    with open(path + ".new", "w") as file:
        json.dump(settings, file)
    os.replace(path + ".new", path)


def restore(session: tf.Session, saver: tf.train.Saver,
            directory: str) -> None:
    """Restores the last finished cycle, if there is one; says so."""
    state = tf.train.get_checkpoint_state(directory)
    if state is None:
        return
    saver.restore(session, state.model_checkpoint_path)
    # Or the saver would not know to remove it after the next cycle.
    saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
    step = session.run(tf.train.get_global_step())
    print(f"resuming at cycle {step}, from {state.model_checkpoint_path} "
          "(\"before training\" is before cycle 0)", flush=True)


def _save(session: tf.Session, saver: tf.train.Saver, directory: str) -> None:
    saver.save(session, os.path.join(directory, "vgg16"),
               global_step=tf.train.get_global_step(),
               write_meta_graph=False)


def plot(path: str, losses: List[float], first_cycle: int, before: np.ndarray,
         after: np.ndarray, labels: np.ndarray) -> None:
    """Draws the loss, and the held-out embeddings before and after training.

    Args:
        path: File to write; its ending says in which format.
        losses: Mean loss of each cycle.
        first_cycle: Number of the first of these cycles.
        before: Embeddings of the untrained network, `[num_images, 128]`.
        after: Embeddings of the trained network, same shape.
        labels: int array `[num_images]`, the digits.
    """
    figure = _import_extra("matplotlib.figure").Figure(
        figsize=(12, 4), dpi=150)
    _import_extra("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    loss_axes, before_axes, after_axes = figure.subplots(1, 3)
    loss_axes.plot(range(first_cycle, first_cycle + len(losses)), losses,
                   "o-", color="black")
    loss_axes.set_title("Training")
    loss_axes.set_xlabel("cycle (one weight update each)")
    loss_axes.set_ylabel("mean triplet loss (squared distance)")
    loss_axes.set_ylim(bottom=0)
    loss_axes.locator_params(axis="x", integer=True)
    plot_embeddings(before_axes, before, labels,
                    "Held-out digits, before training")
    plot_embeddings(after_axes, after, labels,
                    "Held-out digits, after training")
    figure.tight_layout()
    figure.savefig(path)


def plot_embeddings(axes: Any, embeddings: np.ndarray, labels: np.ndarray,
                    title: str) -> None:
    """Draws embeddings in the plane of their two principal components.

    Args:
        axes: `matplotlib.axes.Axes` to draw into.
        embeddings: float array `[num_images, embedding_size]`.
        labels: int array `[num_images]`, the digits.
        title: Of the axes.
    """
    pca = _import_extra("sklearn.decomposition").PCA(2)
    points = pca.fit_transform(embeddings)
    for digit in range(10):
        # Each point is its digit, to be read without colours too.
        axes.plot(points[labels == digit, 0], points[labels == digit, 1],
                  linestyle="", marker=f"${digit}$", color=f"C{digit}",
                  markersize=6)
    axes.set_title(title)
    axes.set_aspect("equal", adjustable="datalim")
    share = 100.0 * pca.explained_variance_ratio_
    axes.set_xlabel(f"principal component 1 ({share[0]:.0f} % of variance)")
    axes.set_ylabel(f"principal component 2 ({share[1]:.0f} % of variance)")


def parse_options(arguments: Optional[List[str]] = None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m accumgrad.demo",
        description="Trains a VGG-16 triplet network on handwritten digits "
        "by gradient accumulation over micro-batches of one triplet.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--cycles", type=_integer_from(1), default=6,
        help="cycles (weight updates) in all, those before a stop included")
    add("--micro-batches", type=_integer_from(1), default=128,
        help="micro-batches (triplets) in a cycle")
    add("--image-size", type=_integer_from(MIN_IMAGE_SIZE), default=32,
        help="height and width to scale the images to, in pixels")
    add("--learning-rate", type=float, default=5e-5, help="of Adam")
    add("--margin", type=float, default=0.1,
        help="of the triplet loss, a squared distance")
    add("--clip-norm", type=_positive, default=1.0,
        help="largest global norm of a cycle's mean gradient")
    add("--seed", type=_integer_from(0), default=0,
        help="of the initial weights and of the triplets")
    add("--checkpoint-dir", metavar="DIR",
        help="save there after each cycle, and go on from what is there")
    add("--log-dir", metavar="DIR",
        help="write summaries there, for TensorBoard")
    add("--plot", metavar="FILE",
        help="draw the loss and the held-out embeddings to this file")
    options = parser.parse_args(arguments)
    # Before the training, not after it.
    if options.plot and not os.path.isdir(os.path.dirname(options.plot)
                                          or os.curdir):
        parser.error(f"argument --plot: no directory for {options.plot}")
    return options


def _integer_from(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if not minimum <= value <= MAX_INTEGER:
            raise argparse.ArgumentTypeError(
                f"must be from {minimum} to {MAX_INTEGER}; got {value}")
        return value
    return integer


def _positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be above 0 and finite; got {value}")
    return value


def check_extras(options: argparse.Namespace) -> None:
    """Raises ImportError if a package that the run will need is missing."""
    names = ["sklearn.datasets", "tqdm"]
    if options.plot:
        names += ["matplotlib", "sklearn.decomposition"]
    for name in names:
        _import_extra(name)


def _import_extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"The demo needs {name}, which cannot be imported here: "
            "`pip install accumgrad[demo]`.  "
            f"(Importing it said: {error})") from error


def run(options: argparse.Namespace) -> None:
    """Builds, trains and evaluates; prints what it does."""
    train_digits, held_out = load_images()
    tf.set_random_seed(options.seed)
    model = build_model(options.image_size, options.margin)
    ops = build_ops(model.loss, options)
    initialize = [tf.global_variables_initializer(),
                  tf.local_variables_initializer()]
    saver = tf.train.Saver(max_to_keep=1)
    with tf.Session() as session:
        # The seed gives a resumed run the same untrained network, so that
        # "before" means the same to it.
        session.run(initialize)
        before = embed(session, model, held_out)
        _print_accuracy("before", before, held_out.labels)
        if options.checkpoint_dir:
            restore(session, saver, options.checkpoint_dir)
        first_cycle = session.run(tf.train.get_global_step())
        losses = train(session, model, ops, train_digits, options,
                       saver if options.checkpoint_dir else None)
        after = embed(session, model, held_out)
    _print_accuracy("after", after, held_out.labels)
    if options.plot:
        plot(options.plot, losses, first_cycle, before, after,
             held_out.labels)
        print(f"plot written to {options.plot}")


def _print_accuracy(when: str, embeddings: np.ndarray,
                    labels: np.ndarray) -> None:
    accuracy = triplet_accuracy(embeddings, labels)
    print(f"held-out triplet accuracy {when} training: "
          f"{100.0 * accuracy:.1f} %", flush=True)


def main(arguments: Optional[List[str]] = None) -> None:
    """Runs the program; `arguments` are those of the command line."""
    options = parse_options(arguments)
    try:
        check_extras(options)
        if options.checkpoint_dir:
            check_settings(options.checkpoint_dir, options)
    except (ImportError, ValueError) as error:
        raise SystemExit(f"accumgrad.demo: {error}")
    with tf.Graph().as_default():
        run(options)


if __name__ == "__main__":
    # What TensorFlow says while it is imported, before this line, takes
    # TF_CPP_MIN_LOG_LEVEL=3 in the environment to silence.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    tf.logging.set_verbosity(tf.logging.ERROR)
    main()
