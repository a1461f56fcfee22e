"""Make `<backend>.keras` and `<backend>.npz` here, for the backend that Keras uses.

A model of the layer's several kinds, with the outputs it gives for some inputs: `test_saving.py`
loads the files of every backend. To make all of them anew, with `BACKEND` torch, jax, tensorflow:

    KERAS_BACKEND=BACKEND python tests/saved/make.py
"""

import zipfile
from pathlib import Path

import keras
import numpy as np

import keras_moh

HERE = Path(__file__).parent
TOKENS = np.array([[5, 8, 2, 0, 0, 0, 0], [3, 12, 4, 1, 7, 7, 9]], "int32")


def model() -> keras.Model:
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(13, 11, mask_zero=True)(tokens)
    routed = keras_moh.MoHAttention(
        num_heads=6,
        key_dim=3,
        num_shared_heads=2,
        top_k=2,
        num_key_value_heads=2,
        value_dim=5,
        dropout=0.1,
        qk_norm="rms",
        z_loss_weight=0.001,
        kernel_regularizer=keras.regularizers.L2(1e-4),
        seed=3,
    )
    router = keras_moh.TwoStageRouter(num_heads=4, num_shared_heads=1, top_k=1)
    own_router = keras_moh.MoHAttention(4, 3, router=router, qk_norm=True, sliding_window=3)
    plain = keras_moh.MoHAttention(num_heads=2, key_dim=7, router=None, output_shape=17)
    x = routed(x, use_causal_mask=True)
    x = own_router(x)
    return keras.Model(tokens, plain(x, x))


def compress(path: Path) -> None:
    """Compress a `.keras` file, which is a zip archive that Keras does not compress."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    backend = keras.backend.backend()
    made = model()
    for weight in made.weights:  # else the biases are zeros and the norms' factors ones
        if weight.dtype == "float32":
            weight.assign_add(keras.random.normal(weight.shape, stddev=0.1))
    made.save(HERE / f"{backend}.keras")
    compress(HERE / f"{backend}.keras")
    outputs = keras.ops.convert_to_numpy(made.predict(TOKENS, verbose=0))
    np.savez(HERE / f"{backend}.npz", tokens=TOKENS, outputs=outputs)
