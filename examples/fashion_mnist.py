"""Does Mixture-of-Head attention classify as well as multi-head attention? On Fashion-MNIST.

A small vision transformer, `keras_moh.models.MoHViT`, is trained three times over with each of

- MHA: multi-head attention, the same model with `router=None`;
- MoH 75 %: of 8 heads a token takes 3 shared and 3 routed ones;
- MoH 50 %: 2 shared and 2 routed ones.

The models have the same parameters but for the routers', and are trained for as many steps on the
same images: moved, flipped and mixed (arXiv 1710.09412) by Keras's layers. Measured are the share
of the 10,000 test images that is classified right, and the time that a step of training takes.

    python -m pip install "keras-moh[examples,jax]"
    python examples/fashion_mnist.py

The images are those of `keras.datasets`. Where that cannot be reached, `--source debian` takes them
from a Debian package. The output folder has the numbers (`results.json`) and a figure. Whatever is
finished stays there: run the example again, and it goes on where it was interrupted.
"""

from functools import partial

from common import add_time_again, exit_without, image_parser, markdown_table, use_backend

PARSER = image_parser(
    "Train a small vision transformer on Fashion-MNIST with Mixture-of-Head and with multi-head "
    "attention, and compare their accuracy and their speed.",
    "fashion_mnist_output",
    epochs=10,
)
add_time_again(PARSER)
OPTIONS = PARSER.parse_args()
use_backend(OPTIONS.backend)
try:
    import keras
    from comparing import with_router
    from fashion_images import HEADS, ImageComparison, vision_transformer
except ModuleNotFoundError as error:
    exit_without(error, f"examples,{OPTIONS.backend}")


def plain(depth: int) -> keras.Model:
    """With multi-head attention."""
    model = vision_transformer(depth, num_shared_heads=HEADS, top_k=0)
    return with_router(model, lambda layer: None)


VARIANTS = {
    "MHA": plain,
    "MoH 75 %": partial(vision_transformer, num_shared_heads=3, top_k=3),
    "MoH 50 %": partial(vision_transformer, num_shared_heads=2, top_k=2),
}


def main() -> None:
    comparison = ImageComparison(OPTIONS, VARIANTS)
    comparison.train_all()
    comparison.time_all()
    figure = comparison.draw("accuracy", "test images classified right, %")
    figure.savefig(OPTIONS.output / "fashion_mnist.png", dpi=110)
    header = ["attention", "parameters", "test accuracy, %", "step of training"]
    print(f"\n{markdown_table(header, comparison.rows('accuracy', 2))}")


if __name__ == "__main__":
    main()
