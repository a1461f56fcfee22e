"""`MoHLLM`: the paper's language models, made of keras-hub's Llama."""

from __future__ import annotations

from typing import Any

from keras_moh.conversion.convert import plan, put
from keras_moh.conversion.selection import Budget
from keras_moh.errors import integer, optional_integer
from keras_moh.models.keras_hub_models import keras_hub_models
from keras_moh.models.parts import check_multiple


def MoHLLM(  # noqa: N802 - in capitals as the models of `keras.applications` are
    vocabulary_size: int,
    num_layers: int = 12,
    hidden_size: int = 768,
    num_heads: int = 12,
    num_shared_heads: Budget = 0.5,
    top_k: Budget = 0.25,
    num_key_value_heads: int | None = None,
    intermediate_size: int | None = None,
    tie_word_embeddings: bool = False,
    balance_loss_weight: float = 0.01,
    preprocessor: Any = None,
    dtype: Any = None,
) -> Any:
    """A language model with Mixture-of-Head attention, to be trained from the start: MoH-LLM.

    It is keras-hub's Llama (rotary embedding, RMS normalization, SwiGLU) whose attention is
    `MoHAttention` with the two-stage router (arXiv 2410.11842, "MoH for large language models"). It
    trains with `fit` on the next token, and `generate` decodes with the cache.

    The defaults are the paper's S; its B has 24 layers, a `hidden_size` of 1536 and 16 heads. The
    paper has both with 75 % and 50 % of the heads active, and does not say how many are shared: the
    default is that of its MoH-LLaMA3, half of all heads, and a quarter routed.

    Args:
        vocabulary_size: Number of tokens.
        num_layers: Number of layers. Defaults to 12.
        hidden_size: Features of a token, a multiple of `num_heads`. Defaults to 768.
        num_heads: Number of attention heads of a layer. Defaults to 12.
        num_shared_heads: Heads that every token takes: a number, or as a float a share of all. As
            of `convert_to_moh`. Defaults to 0.5.
        top_k: Routed heads that a token takes beside them, likewise. Defaults to 0.25.
        num_key_value_heads: Number of key/value heads, a divisor of `num_heads`. Defaults to
            `num_heads`.
        intermediate_size: Width of the MLPs' hidden layer. Defaults to `hidden_size * 8 // 3`.
        tie_word_embeddings: Whether the logits are by the embeddings of the tokens. Defaults to
            `False`.
        balance_loss_weight: Weight of the load-balancing loss, averaged over the routed layers.
            Defaults to 0.01.
        preprocessor: A `keras_hub.models.LlamaCausalLMPreprocessor`, with which the model takes and
            gives text. Defaults to `None`: it takes numbers of tokens.
        dtype: Dtype or policy of the layers. Defaults to Keras's global policy.

    Returns:
        A `keras_hub.models.LlamaCausalLM`. Without a preprocessor its inputs are dicts of
        `token_ids (B, T)` and `padding_mask (B, T)`, its outputs logits `(B, T, vocabulary_size)`.

    Raises:
        ImportError: if keras-hub is not installed.
        ValueError: for an argument out of its range, or numbers of heads that do not fit.

    Example:
    ```python
    model = keras_moh.models.MoHLLM(vocabulary_size=100, num_layers=2, hidden_size=64, num_heads=8)
    tokens = {"token_ids": np.ones((2, 9), "int32"), "padding_mask": np.ones((2, 9), "int32")}
    model.generate(tokens, stop_token_ids=None)
    ```
    """
    models = keras_hub_models("MoHLLM")
    vocabulary_size = integer("vocabulary_size", vocabulary_size, 1)
    check_multiple("hidden_size", hidden_size, "num_heads", num_heads)
    groups = optional_integer("num_key_value_heads", num_key_value_heads, 1) or num_heads
    check_multiple("num_heads", num_heads, "num_key_value_heads", groups)
    inner = optional_integer("intermediate_size", intermediate_size, 1) or hidden_size * 8 // 3
    backbone = models.LlamaBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=integer("num_layers", num_layers, 1),
        num_query_heads=num_heads,
        num_key_value_heads=groups,
        hidden_dim=hidden_size,
        intermediate_dim=inner,
        tie_word_embeddings=tie_word_embeddings,
        dtype=dtype,
    )
    model = models.LlamaCausalLM(backbone, preprocessor=preprocessor)
    adapters, _ = plan(
        model,
        num_shared_heads,
        top_k,
        router="two_stage",
        balance_loss_weight=balance_loss_weight,
    )
    put(adapters, model)
    return model
