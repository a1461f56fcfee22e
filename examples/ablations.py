"""What matters in Mixture-of-Head attention? The paper's ablations, small, on Fashion-MNIST.

The vision transformer of `fashion_mnist.py`, of whose 8 heads a token takes 6, is trained three
times over as it is there, with 3 shared heads, and with one thing changed:

- no shared heads, and 6 routed ones; or 1, 2, 4 or 5 shared heads, and as many fewer routed ones;
- one stage: no learned balance of shared and routed heads. The weights of each kind still are;
- the load-balancing loss with a weight of 0 and of 0.1, where it is 0.01.

Measured are the share of the 10,000 test images that is classified right, and how many of their
tokens take each routed head.

    python -m pip install "keras-moh[examples,jax]"
    python examples/ablations.py

The options are those of `fashion_mnist.py`. The output folder has the numbers (`results.json`), and
figures of the accuracy and of the loads of the heads. Whatever is finished stays there: run the
example again, and it goes on where it was interrupted.
"""

from functools import partial
from typing import Any

from common import exit_without, image_parser, markdown_table, use_backend

OPTIONS = image_parser(
    "Train a small vision transformer with Mixture-of-Head attention on Fashion-MNIST, change one "
    "thing of it after the other, and see what that does.",
    "ablations_output",
    epochs=3,
).parse_args()
use_backend(OPTIONS.backend)
try:
    import keras
    from comparing import Comparison, with_router
    from fashion_images import HEADS, ImageComparison, vision_transformer
    from matplotlib.figure import Figure

    import keras_moh
except ModuleNotFoundError as error:
    exit_without(error, f"examples,{OPTIONS.backend}")

SHARED, ACTIVE = 3, 6


@keras.saving.register_keras_serializable("ablations")
class OneStageRouter(keras_moh.TwoStageRouter):
    """Without the weights of the two kinds of heads."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group_scores = None


def sharing(num_shared_heads: int, depth: int, **arguments: Any) -> keras.Model:
    return vision_transformer(
        depth, num_shared_heads=num_shared_heads, top_k=ACTIVE - num_shared_heads, **arguments
    )


def one_stage(depth: int) -> keras.Model:
    return with_router(
        sharing(SHARED, depth), lambda layer: OneStageRouter(HEADS, SHARED, ACTIVE - SHARED)
    )


AS_IT_IS = "as it is"
BALANCES = {
    "balance 0": partial(sharing, SHARED, balance_loss_weight=0.0),
    AS_IT_IS: partial(sharing, SHARED),
    "balance 0.1": partial(sharing, SHARED, balance_loss_weight=0.1),
}
VARIANTS = {
    AS_IT_IS: BALANCES[AS_IT_IS],
    "one stage": one_stage,
    **{f"{shared} shared": partial(sharing, shared) for shared in (0, 1, 2, 4, 5)},
    **BALANCES,
}


def draw_loads(comparison: Comparison) -> Figure:
    """For each weight of the balancing loss, the loads of the routed heads: seed 0, by layer."""
    even = (ACTIVE - SHARED) / (HEADS - SHARED)
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(BALANCES), sharey=True), BALANCES, strict=True):
        loads = comparison.of_seeds(name, "loads")[0]
        width = 0.8 / len(loads)
        for number, of_heads in enumerate(loads):
            places = [
                SHARED + i + (number - (len(loads) - 1) / 2) * width for i in range(len(of_heads))
            ]
            axis.bar(places, of_heads, width, label=f"layer {number + 1}")
        axis.axhline(even, color="black", linewidth=0.8, linestyle=":")
        axis.set(
            title="balance 0.01" if name == AS_IT_IS else name, xlabel="routed head", ylim=(0, 1)
        )
        axis.set_xticks(range(SHARED, HEADS))
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"share of the tokens ({even:.2f} if even)")
    figure.axes[-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main() -> None:
    comparison = ImageComparison(OPTIONS, VARIANTS)
    comparison.train_all()
    comparison.draw("accuracy", "test images classified right, %").savefig(
        OPTIONS.output / "accuracy.png", dpi=110
    )
    draw_loads(comparison).savefig(OPTIONS.output / "loads.png", dpi=110)
    header = ["variant", "parameters", "test accuracy, %"]
    print(f"\n{markdown_table(header, comparison.rows('accuracy', 2))}")


if __name__ == "__main__":
    main()
