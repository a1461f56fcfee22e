"""The attention layers of the authors' MoH-LLaMA3 (see `goldens/README.md`), whole and cached."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras import ops

import keras_moh
from tests.helpers import compiled, set_weights_by_name, to_numpy

FILES = sorted(Path(__file__).parent.joinpath("goldens", "llama_attention").glob("*.npz"))
IMPLEMENTATIONS = ("reference", None)


class Case:
    """One layer of a golden file."""

    def __init__(self, path: Path, index: int) -> None:
        arrays, self.index = np.load(path), index
        self.meta = json.loads(str(arrays["meta"]))
        config = self.meta["config"]
        self.num_heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.features, self.theta = config["hidden_size"], config["rope_theta"]
        self.key_dim = self.features // self.num_heads
        self.x, self.output = (arrays[f"f64/layer{index}/attn_{way}"] for way in ("in", "out"))
        self.head_mask = arrays["head_mask"][index] == 1
        self.probabilities = arrays["f64/router_probs"][index]
        self.weights = {}
        for letter, name in zip("qkv", ("query", "key", "value"), strict=True):
            weight = arrays[f"param/layer{index}/{letter}_proj.weight"]
            self.weights[f"{name}/kernel"] = weight.T.reshape(self.features, -1, self.key_dim)
        weight = arrays[f"param/layer{index}/o_proj.weight"]
        self.weights["attention_output/kernel"] = weight.T.reshape(
            self.num_heads, self.key_dim, self.features
        )

    def layer(self, dtype: str, implementation: str | None) -> keras_moh.MoHAttention:
        layer = keras_moh.MoHAttention(
            self.num_heads,
            self.key_dim,
            num_shared_heads=self.meta["shared_head"],
            top_k=self.meta["routed_head"],
            num_key_value_heads=self.groups,
            use_bias=False,
            router="query_norm",
            rotary_embedding=keras_moh.RotaryEmbedding(self.theta),
            implementation=implementation,
            dtype=dtype,
        )
        layer.build(self.x.shape)
        set_weights_by_name(layer, self.weights)
        return layer


@pytest.fixture(params=[(path, i) for path in FILES for i in (0, 1)], ids=lambda p: p[0].stem)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def check(case: Case, dtype: str, implementation: str | None, tolerance: float) -> None:
    layer = case.layer(dtype, implementation)
    x = ops.convert_to_tensor(case.x, dtype)

    def call(x: Any) -> Any:
        return layer(x, use_causal_mask=True, return_routing=True)

    output, routing = compiled(call, x)
    np.testing.assert_allclose(to_numpy(output), case.output, rtol=0, atol=tolerance)
    taken = np.zeros(case.head_mask.shape, bool)
    np.put_along_axis(taken, to_numpy(routing.heads), True, axis=-1)
    np.testing.assert_array_equal(taken, case.head_mask)
    probabilities = to_numpy(routing.probabilities)
    np.testing.assert_allclose(probabilities, case.probabilities, rtol=0, atol=10 * tolerance)

    # Decoding: all but the last three tokens, and these one by one.
    batch, length = case.x.shape[:2]
    cache = ops.zeros((batch, 2, length, case.groups, case.key_dim), dtype=dtype)
    for start, stop in [(0, length - 3), *((i, i + 1) for i in range(length - 3, length))]:
        part, cache = layer(
            x[:, start:stop], use_causal_mask=True, cache=cache, cache_update_index=start
        )
        np.testing.assert_allclose(
            to_numpy(part), case.output[:, start:stop], rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("always_worth_it")
def test_in_float32(case: Case, implementation: str | None) -> None:
    check(case, "float32", implementation, 2e-5)


@pytest.mark.float64
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("always_worth_it")
def test_in_float64(case: Case, implementation: str | None) -> None:
    check(case, "float64", implementation, 1e-9)


def test_files_are_there() -> None:
    assert len(FILES) == 3
