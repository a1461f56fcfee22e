"""Train a small vision transformer whose attention is Mixture-of-Head attention.

Every token of an image, a patch of it, passes through only some of the attention heads: the shared
ones, and `top_k` more that a router chooses for it. The same transformer with plain attention,
where every token passes through every head, is trained beside it at the same budget. The images
are scikit-learn's 1,797 handwritten digits, so nothing is downloaded. It takes about a minute:

    python -m pip install "keras-moh[examples,jax]"
    python examples/vit_digits.py

Then the output folder holds the trained model (`model.keras`), a figure of the heads that the
images of each class take (`heads.png`), and the numbers (`results.json`). `--help` lists options.
"""

import argparse
import importlib
import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

WIDTH, DEPTH = 64, 2
BATCH_SIZE, LEARNING_RATE = 128, 4e-3


def integer_from(minimum):
    def parse(text):
        if text.isdecimal() and int(text) >= minimum:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected an integer of at least {minimum}, not {text!r}")

    return parse


def parse_options():
    parser = argparse.ArgumentParser(
        description="Train a small vision transformer with Mixture-of-Head attention, compare it "
        "with plain attention, and draw which heads the images of each class take.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, backends = parser.add_argument, ["jax", "torch", "tensorflow"]
    add("--backend", choices=backends, default="jax", help="Keras's framework")
    add("--dataset", choices=["digits", "fashion-mnist"], default="digits", help="the images")
    add("--output", metavar="FOLDER", type=Path, default="vit_digits_output", help="of the results")
    for name, minimum, default, text in [
        ("heads", 1, 8, "attention heads of a layer"),
        ("shared-heads", 0, 2, "heads among them that every token takes"),
        ("top-k", 1, 2, "other heads that a token takes"),
        ("epochs", 1, 10, "passes over the training images"),
        ("samples", 1, None, "training images to use, all if not given"),
        ("seed", 0, 0, "of the weights and the order of the images"),
    ]:
        add(f"--{name}", metavar="N", type=integer_from(minimum), default=default, help=text)
    options = parser.parse_args()
    if options.shared_heads + options.top_k > options.heads:
        parser.error(
            f"--shared-heads {options.shared_heads} and --top-k {options.top_k} "
            f"are more than the {options.heads} of --heads"
        )
    return options


OPTIONS = parse_options()
os.environ["KERAS_BACKEND"] = OPTIONS.backend  # Keras reads it when it is imported, which is next
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # PyTorch: no thread spins on a busy machine
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow: errors only
try:
    import keras
    import numpy as np
    from keras import layers
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import keras_moh
except ModuleNotFoundError as error:
    sys.exit(
        f"This example needs {error.name}, which is not installed. Install everything it needs by\n"
        f'    python -m pip install "keras-moh[examples,{OPTIONS.backend}]"'
    )


def load_images(dataset):
    """Training images and labels, test images and labels; an image is `(side, side, 1)`."""
    if dataset == "fashion-mnist":
        (images, labels), (test_images, test_labels) = keras.datasets.fashion_mnist.load_data()
        return scaled(images, 255), labels, scaled(test_images, 255), test_labels
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(
        scaled(images.reshape(-1, 8, 8), 16), labels, test_size=0.2, stratify=labels, random_state=0
    )
    # Moved by one pixel a digit stays what it is: that makes five images of one.
    moves = [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)]
    images = np.concatenate([moved(images, *move) for move in moves])
    return images, np.tile(labels, len(moves)), test_images, test_labels


def scaled(images, maximum):
    return (images[..., np.newaxis] / maximum).astype("float32")


def moved(images, down, right):
    side = images.shape[1]
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)])
    return padded[:, 1 - down :, 1 - right :][:, :side, :side]


def attentions(options):
    """The two kinds of attention layer, which are alike but for the router."""
    heads, key_dim = options.heads, math.ceil(WIDTH / options.heads)
    moh = partial(
        keras_moh.MoHAttention,
        num_heads=heads,
        key_dim=key_dim,
        num_shared_heads=options.shared_heads,
        top_k=options.top_k,
        balance_loss_weight=0.01 / DEPTH,  # Keras sums the losses of the layers
    )
    return {"MoH": moh, "plain": partial(layers.MultiHeadAttention, heads, key_dim)}


def vision_transformer(attention, side):
    """A pre-norm transformer on 4 x 4 overlapping patches of an image, for ten classes."""
    images = keras.Input((side, side, 1))
    step = side // 4
    patches = keras.ops.image.extract_patches(images, 2 * step, strides=step, padding="same")
    x = layers.Reshape((16, -1))(patches)
    # A linear map whose bias is different at every position: patch and position embedding in one.
    x = layers.EinsumDense("btp,pd->btd", (16, WIDTH), bias_axes="td")(x)
    for _ in range(DEPTH):
        tokens = layers.LayerNormalization()(x)
        x = layers.add([x, attention()(tokens, tokens)])
        tokens = layers.LayerNormalization()(x)
        tokens = layers.Dense(2 * WIDTH, activation="gelu")(tokens)
        x = layers.add([x, layers.Dense(WIDTH)(tokens)])
    features = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(images, layers.Dense(10, activation="softmax")(features))


def train(model, images, labels, epochs):
    steps = epochs * math.ceil(len(images) / BATCH_SIZE)
    warmup = steps // 10
    learning_rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=LEARNING_RATE, warmup_steps=warmup
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(images, labels, batch_size=BATCH_SIZE, epochs=epochs)


def routed_head_loads(model, images, labels):
    """The share of each class's tokens that take each routed head: `(layers, heads, classes)`."""
    moh_layers = [layer for layer in model.layers if isinstance(layer, keras_moh.MoHAttention)]
    # A second model, on the same layers, gives the tokens that each attention layer routes.
    tokens_model = keras.Model(model.input, [layer.input[0] for layer in moh_layers])
    loads = []
    for layer, tokens in zip(moh_layers, tokens_model.predict(images, verbose=0), strict=True):
        heads = keras.ops.convert_to_numpy(layer.router(tokens).heads)
        candidates = np.arange(layer.num_shared_heads, layer.num_heads)
        taken = np.any(heads[..., np.newaxis] == candidates, axis=2)  # (images, tokens, heads)
        loads.append([taken[labels == label].mean(axis=(0, 1)) for label in range(10)])
    return np.swapaxes(loads, 1, 2)


def draw(loads, images, labels, options):
    """A heat map of the loads for each layer, below the mean image of every class."""
    even = options.top_k / (options.heads - options.shared_heads)
    class_means = np.hstack([images[labels == label, ..., 0].mean(axis=0) for label in range(10)])
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle("Share of the tokens of each class that take each routed head")
    axes = figure.subplots(1, DEPTH, sharey=True)
    for number, (axis, load) in enumerate(zip(axes, loads, strict=True), start=1):
        axis.imshow(class_means, cmap="Greys", extent=(-0.5, 9.5, -0.6, -1.6))
        colours = axis.imshow(load, cmap="RdBu_r", vmin=0, vmax=2 * even)
        for (head, label), share in np.ndenumerate(load):
            colour = "white" if abs(share / even - 1) > 0.7 else "black"
            axis.text(label, head, f"{share:.0%}", ha="center", va="center", size=7, color=colour)
        axis.set(title=f"layer {number}", xlabel="class", xticks=range(10))
        axis.set(yticks=range(len(load)), yticklabels=range(options.shared_heads, options.heads))
        axis.set_ylim(len(load) - 0.5, -1.6)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("routed head")
    bar = figure.colorbar(colours, ax=axes, shrink=0.7, extend="max", format=PercentFormatter(1, 0))
    bar.set_label(f"share of the tokens ({even:.0%} if even)")
    return figure


def main(options):
    images, labels, *test = load_images(options.dataset)
    images, labels = images[: options.samples], labels[: options.samples]
    models, results = {}, {}
    for name, attention in attentions(options).items():
        print(f"\nTraining with {name} attention, on {options.backend}")
        keras.utils.set_random_seed(options.seed)
        start = time.perf_counter()
        models[name] = vision_transformer(attention, images.shape[1])
        train(models[name], images, labels, options.epochs)
        seconds = time.perf_counter() - start
        results[name] = {
            **models[name].evaluate(*test, verbose=0, return_dict=True),
            "parameters": models[name].count_params(),
            "seconds": round(seconds, 1),
        }
    results["MoH"]["active_heads"] = (options.shared_heads + options.top_k) / options.heads
    results["plain"]["active_heads"] = 1.0

    options.output.mkdir(parents=True, exist_ok=True)
    model_file, figure_file = options.output / "model.keras", options.output / "heads.png"
    models["MoH"].save(model_file)
    reloaded = keras.saving.load_model(model_file)
    results["reloaded"] = reloaded.evaluate(*test, verbose=0, return_dict=True)
    loads = routed_head_loads(reloaded, *test)
    draw(loads, *test, options).savefig(figure_file, dpi=110)
    modules = ["keras_moh", "keras", "numpy", options.backend]
    report = {
        "options": vars(options),
        "results": results,
        "routed_head_loads": loads.tolist(),
        "versions": {name: importlib.import_module(name).__version__ for name in modules},
    }
    (options.output / "results.json").write_text(json.dumps(report, default=str, indent=1) + "\n")

    print(f"\nOn {len(test[0]):,} test images:")
    for name in "MoH", "plain":
        print(
            "{:>5} attention: {accuracy:.2%} correct with {active_heads:.0%} of the heads active, "
            "{parameters:,} parameters, {seconds:.0f} s".format(name, **results[name])
        )
    print(f"  MoH reloaded from {model_file}: {results['reloaded']['accuracy']:.2%} correct")
    print(f"The heads that each class takes are drawn in {figure_file}")
    if not math.isclose(results["reloaded"]["loss"], results["MoH"]["loss"], rel_tol=1e-5):
        sys.exit("The reloaded model scores differently from the one that was saved.")


if __name__ == "__main__":
    main(OPTIONS)
