"""FLOPs of a layer, against numbers computed by hand from its shapes, 2 for each multiply-add."""

import keras
import numpy as np
import pytest

from keras_moh import MoHAttention, Router, TwoStageRouter, attention_flops

PARTS = ("query", "key", "value", "core", "output", "router")


def parts(flops):
    return tuple(getattr(flops, part) for part in PARTS)


def built(*shapes, **arguments):
    layer = MoHAttention(**arguments)
    layer.build(*shapes)
    return layer


@pytest.mark.parametrize(("length", "limit"), [(256, 1.40), (1024, 1.54), (4096, 1.76)])
def test_half_of_the_heads_of_a_square_layer(length, limit):
    """Without the router: (8 D + 4 N) N D of all heads, (6 D + 2 N) N D of half of them."""
    layer = built((None, None, 768), num_heads=12, key_dim=64, num_shared_heads=3, top_k=3)
    active, dense = (
        getattr(attention_flops(layer, 1, length), kind) for kind in ("active", "dense")
    )
    assert dense.total == (8 * 768 + 4 * length) * length * 768
    assert active.total - active.router == (6 * 768 + 2 * length) * length * 768
    # 9 scores of routed heads, 3 of shared ones, 2 of the two kinds.
    assert (active.router, dense.router) == (2 * length * 768 * (9 + 3 + 2), 0)
    assert round(dense.total / (active.total - active.router), 2) == limit


def test_every_part_of_cross_attention_with_grouped_queries():
    """Every width and length its own: B=2, T=5, S=7, D=11, D_v=13, D_k=17, output (19, 23)."""
    layer = built(
        *((2, 5, 11), (2, 7, 13), (2, 7, 17)),
        num_heads=6,
        num_key_value_heads=3,
        key_dim=29,
        value_dim=31,
        output_shape=(19, 23),
        num_shared_heads=1,
        top_k=2,
    )
    flops = attention_flops(layer, 2, 5, 7)
    key, value = 2 * 2 * 7 * 17 * 3 * 29, 2 * 2 * 7 * 13 * 3 * 31
    assert parts(flops.dense) == (
        2 * 2 * 5 * 11 * 6 * 29,
        key,
        value,
        2 * 2 * 5 * 7 * 6 * (29 + 31),
        2 * 2 * 5 * 6 * 31 * 19 * 23,
        0,
    )
    assert parts(flops.active) == (
        2 * 2 * 5 * 11 * 3 * 29,
        key,
        value,
        2 * 2 * 5 * 7 * 3 * (29 + 31),
        2 * 2 * 5 * 3 * 31 * 19 * 23,
        2 * 2 * 5 * 11 * (5 + 2),  # one shared head: it has no scores
    )
    assert flops.dense.total == sum(parts(flops.dense))
    assert flops.active.total == sum(parts(flops.active))
    assert flops.speedup_limit == flops.dense.total / flops.active.total


@pytest.mark.parametrize(
    ("query_length", "key_length", "causal", "window", "pairs"),
    [
        (4, None, False, None, 4 * 4),
        (4, None, True, None, 1 + 2 + 3 + 4),
        (3, 5, True, None, 1 + 2 + 3),
        (5, 3, True, None, 1 + 2 + 3 + 3 + 3),
        (4, None, False, 2, 2 + 3 + 3 + 2),
        (4, None, True, 2, 1 + 2 + 2 + 2),
        (4, None, True, 9, 1 + 2 + 3 + 4),
        (5, 2, False, 2, 2 + 2 + 1 + 0 + 0),
    ],
)
def test_core_counts_the_pairs_that_positions_allow(
    query_length, key_length, causal, window, pairs
):
    layer = built(
        (None, None, 3),
        num_heads=2,
        key_dim=5,
        num_shared_heads=1,
        top_k=1,
        sliding_window=window,
    )
    flops = attention_flops(layer, 1, query_length, key_length, use_causal_mask=causal)
    assert flops.dense.core == 2 * pairs * 2 * (5 + 5)
    layer = built((None, None, 3), num_heads=2, key_dim=5, router=None, sliding_window=window)
    flops = attention_flops(layer, 1, query_length, key_length, use_causal_mask=causal)
    assert flops.active.core == 2 * pairs * 2 * (5 + 5)


def test_plain_attention_has_nothing_to_gain():
    layer = built((None, None, 8), num_heads=4, key_dim=2, router=None)
    flops = attention_flops(layer, 3, 5)
    assert flops.active == flops.dense
    assert flops.speedup_limit == 1


def test_a_router_of_ones_own_counts_its_matrices():
    class Biased(Router):
        def build(self, input_shape):
            self.add_weight(shape=(input_shape[-1], 7))
            self.add_weight(shape=(7,))

    layer = built((None, None, 8), num_heads=4, key_dim=2, router=Biased(4, 1, 1))
    assert attention_flops(layer, 3, 5).active.router == 2 * 3 * 5 * 8 * 7


def test_higher_rank_counts_as_its_sequences():
    """Rank 4 attending over its last axis but one: 3 x 5 sequences of 7 tokens."""
    arguments = {"num_heads": 4, "key_dim": 2, "num_shared_heads": 1, "top_k": 1}
    layer = built((3, 5, 7, 8), attention_axes=2, **arguments)
    assert attention_flops(layer, 3 * 5, 7) == attention_flops(
        built((15, 7, 8), **arguments), 15, 7
    )


def test_quantization_changes_no_count():
    layer = built((None, None, 8), num_heads=4, key_dim=2, num_shared_heads=1, top_k=1)
    before = attention_flops(layer, 2, 5)
    layer.quantize("int8")
    assert attention_flops(layer, 2, 5) == before


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (keras.layers.MultiHeadAttention(2, 3), (1, 5), "`layer`: expected a `keras_moh.MoHA"),
        (TwoStageRouter(4, 1, 1), (1, 5), "`layer`: expected a `keras_moh.MoHA"),
        (None, (1, 5), "`layer`: expected a `keras_moh.MoHA.*layer=None"),
        (MoHAttention(4, 3, 1, 1), (1, 5), "`layer`: expected a built layer"),
    ],
)
def test_a_layer_that_cannot_be_counted_is_refused(layer, arguments, message):
    with pytest.raises(ValueError, match=message):
        attention_flops(layer, *arguments)


@pytest.mark.parametrize("name", ["batch", "query_length", "key_length", "use_causal_mask"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", np.ones(2)])
def test_a_length_that_is_none_is_refused(name, value):
    layer = built((None, None, 8), num_heads=4, key_dim=2, num_shared_heads=1, top_k=1)
    with pytest.raises(ValueError, match=f"`{name}`"):
        attention_flops(layer, **{"batch": 1, "query_length": 5, "key_length": 7, name: value})
