"""Mixture-of-Head attention (arXiv 2410.11842) in NumPy and float64, slowly and plainly.

Written from the mathematics, one head after another, to compare the package with; it shares
no code with it. Names of shapes: `B` batch, `T` queries, `S` keys, `D` features, `H` heads, `G`
key/value heads, `d` and `dv` widths, `E` routed candidates. Weights come by name, in the shapes
that the layer gives them (`"query/kernel"`: `(D, H, d)`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


class Routing(NamedTuple):
    """The routing of `(..., D)` tokens, over all heads or all candidates."""

    gates: np.ndarray  # (..., H), 0 where a head is not taken
    taken: np.ndarray  # (..., H)
    probabilities: np.ndarray  # (..., E)
    scores: np.ndarray  # (..., E)
    chosen: np.ndarray  # (..., E): the candidates taken
    margin: float  # the smallest gap, of any choice, between the last one taken and the first left


def heads_by_group(
    H: int, num_shared_heads: int, routing_groups: int
) -> list[tuple[list[int], list[int]]]:
    """The shared heads and the candidates of every group of neighbouring heads."""
    groups: list[tuple[list[int], list[int]]] = [([], []) for _ in range(routing_groups)]
    for h in range(H):
        shared, candidates = groups[h // (H // routing_groups)]
        (shared if len(shared) < num_shared_heads // routing_groups else candidates).append(h)
    return groups


def route(
    x: np.ndarray,
    weights: Mapping[str, np.ndarray],
    H: int,
    num_shared_heads: int,
    top_k: int,
    routing_groups: int = 1,
) -> Routing:
    """The two-stage router; the lowest candidate of a group wins a tie."""
    groups = heads_by_group(H, num_shared_heads, routing_groups)
    shared_heads = [h for shared, _ in groups for h in shared]
    candidates = [h for _, routed in groups for h in routed]
    tokens = x.shape[:-1]
    gates, taken = np.zeros((*tokens, H)), np.zeros((*tokens, H), bool)
    scores = np.zeros((*tokens, len(candidates)))
    if top_k:
        scores = x @ weights["routed_scores/kernel"]
    probabilities = softmax(scores) if top_k else scores
    margin = np.inf

    for token in np.ndindex(*tokens):
        routed_factor = shared_factor = 1.0
        if top_k and num_shared_heads:
            shared_factor, routed_factor = 2 * softmax(x[token] @ weights["group_scores/kernel"])
        if num_shared_heads == 1:
            gates[token][shared_heads] = shared_factor
        elif num_shared_heads > 1:
            shared = softmax(x[token] @ weights["shared_scores/kernel"])
            gates[token][shared_heads] = shared_factor * num_shared_heads * shared
        taken[token][shared_heads] = True

        p = dict(zip(candidates, probabilities[token], strict=True))
        best = []
        for _, routed in groups:
            order = sorted(routed, key=lambda h: (-p[h], h))
            count = top_k // routing_groups
            best += order[:count]
            if 0 < count < len(order):
                margin = min(margin, p[order[count - 1]] - p[order[count]])
        for h in best:
            gates[token][h] = routed_factor * top_k * p[h] / sum(p[other] for other in best)
            taken[token][h] = True
    return Routing(gates, taken, probabilities, scores, taken[..., candidates], float(margin))


def route_by_query_norm(
    query: np.ndarray,
    num_shared_heads: int,
    top_k: int,
    routing_groups: int = 1,
    constants: tuple[np.ndarray, np.ndarray] | None = None,
) -> Routing:
    """The router that takes the longest of the query vectors `(..., H, d)` of a token.

    Differences of outputs see gates that do not change: with the `constants` that stand for a
    router's choice and its probabilities, the gates are those that it is differentiated by.
    """
    *tokens, H, _ = query.shape
    groups = heads_by_group(H, num_shared_heads, routing_groups)
    shared_heads = [h for shared, _ in groups for h in shared]
    candidates = [h for _, routed in groups for h in routed]
    norms = np.sqrt((query[..., candidates, :] ** 2).sum(axis=-1))
    deviation = np.ones(tuple(tokens))
    if len(candidates) > 1:
        deviation = norms.std(axis=-1, ddof=1)
    deviation = np.where(deviation > 1e-6 * norms.max(axis=-1, initial=0), deviation, 1)
    scores = norms / deviation[..., None]
    probabilities = softmax(scores) if candidates else scores
    gates, taken = np.zeros((*tokens, H)), np.zeros((*tokens, H), bool)
    gates[..., shared_heads], taken[..., shared_heads] = 1, True
    margin = np.inf
    for token in np.ndindex(*tokens):
        length = dict(zip(candidates, norms[token], strict=True))
        for _, routed in groups:
            order = sorted(routed, key=lambda h: (-length[h], h))
            count = top_k // routing_groups
            taken[token][order[:count]] = True
            if 0 < count < len(order):
                gap = length[order[count - 1]] - length[order[count]]
                margin = min(margin, gap / max(norms[token].max(), 1e-30))
    if constants is not None:
        chosen, before = constants
        gates[..., candidates] = np.where(chosen, 1 + probabilities - before, 0)
    else:
        gates[taken] = 1
    return Routing(gates, taken, probabilities, scores, taken[..., candidates], float(margin))


def load_balancing_loss(
    probabilities: np.ndarray,
    taken: np.ndarray,
    valid: np.ndarray | None = None,
    fraction: np.ndarray | None = None,
) -> float:
    """`E * sum_e P_e f_e`, of candidates; a given `fraction` takes the place of `f`."""
    if valid is None:
        valid = np.ones(probabilities.shape[:-1], bool)
    if not valid.any():
        return 0.0
    E = probabilities.shape[-1]
    if fraction is None:
        fraction = taken[valid].mean(axis=0)
    return E * float(probabilities[valid].mean(axis=0) @ fraction)


def router_z_loss(scores: np.ndarray, valid: np.ndarray | None = None) -> float:
    """The mean over valid tokens of the squared logarithm of the softmax's denominator."""
    if valid is None:
        valid = np.ones(scores.shape[:-1], bool)
    if not valid.any():
        return 0.0
    scores = scores[valid]
    largest = scores.max(axis=-1)  # lengths of queries that are nearly equal give large scores
    rest = np.exp(scores - largest[:, np.newaxis]).sum(axis=-1)
    return float(((largest + np.log(rest)) ** 2).mean())


def allowed(
    T: int,
    S: int,
    is_causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | None = None,
) -> np.ndarray:
    """`(T, S)`: where positions alone let a query attend to a key."""
    distance = np.arange(T)[:, None] + causal_offset - np.arange(S)
    mask = np.ones((T, S), bool)
    if is_causal:
        mask &= distance >= 0
    if sliding_window is not None:
        mask &= abs(distance) < sliding_window
    return mask


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Ungated outputs `(B, T, H, dv)` and scores `(B, H, T, S)`; 0 in a row without a key."""
    B, T, H, d = query.shape
    S, G = key.shape[1:3]
    if scale is None:
        scale = d**-0.5
    mask = np.broadcast_to(mask, (B, H, T, S))
    outputs, scores = np.zeros((B, T, H, value.shape[-1])), np.zeros((B, H, T, S))
    for b, h in np.ndindex(B, H):
        g, rows = h // (H // G), mask[b, h].any(axis=-1)
        logits = np.where(mask[b, h], scale * query[b, :, h] @ key[b, :, g].T, -np.inf)
        if rows.any():
            scores[b, h, rows] = softmax(logits[rows])
        outputs[b, :, h] = scores[b, h] @ value[b, :, g]
    return outputs, scores


def attend_gradients(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    gates: np.ndarray,
    mask: np.ndarray,
    cotangent: np.ndarray,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of `sum(cotangent * gates * outputs)`, by query, key, value and gates `(B, T, H)`."""
    B, _, H, d = query.shape
    G = key.shape[2]
    if scale is None:
        scale = d**-0.5
    outputs, scores = attend(query, key, value, mask, scale)
    by_query, by_key, by_value = (np.zeros(x.shape) for x in (query, key, value))
    for b, h in np.ndindex(B, H):
        g = h // (H // G)
        p, by_outputs = scores[b, h], gates[b, :, h, None] * cotangent[b, :, h]
        by_p = by_outputs @ value[b, :, g].T
        by_logits = p * (by_p - (p * by_p).sum(axis=-1, keepdims=True))
        by_query[b, :, h] = scale * by_logits @ key[b, :, g]
        by_key[b, :, g] += scale * by_logits.T @ query[b, :, h]
        by_value[b, :, g] += p.T @ by_outputs
    return by_query, by_key, by_value, (outputs * cotangent).sum(axis=-1)


def rotate(
    x: np.ndarray, max_wavelength: float, scaling_factor: float = 1, start: int = 0
) -> np.ndarray:
    """Rotary position embedding of `(B, T, H, d)`, one pair of features after another."""
    rotated = np.zeros(x.shape)
    half = x.shape[-1] // 2
    for t, i in np.ndindex(x.shape[1], half):
        angle = (t + start) / scaling_factor * max_wavelength ** (-i / half)
        point = x[:, t, :, i] + 1j * x[:, t, :, i + half]
        turned = point * np.exp(1j * angle)
        rotated[:, t, :, i], rotated[:, t, :, i + half] = turned.real, turned.imag
    return rotated


class Output(NamedTuple):
    """What the layer computes."""

    output: np.ndarray
    scores: np.ndarray
    routing: Routing
    balance_loss: float
    z_loss: float


def layer(
    weights: Mapping[str, Any],
    query: np.ndarray,
    value: np.ndarray | None = None,
    key: np.ndarray | None = None,
    *,
    num_shared_heads: int | None = None,
    top_k: int = 0,
    routing_groups: int = 1,
    qk_norm: bool | str = False,
    query_mask: np.ndarray | None = None,
    value_mask: np.ndarray | None = None,
    key_mask: np.ndarray | None = None,
    attention_mask: np.ndarray | None = None,
    use_causal_mask: bool = False,
    sliding_window: int | None = None,
    fraction: np.ndarray | None = None,
    router: str | None = "two_stage",
    rotary: tuple[float, float] | None = None,
    constants: tuple[np.ndarray, np.ndarray] | None = None,
) -> Output:
    """The whole layer on inputs `(B, T, D)`; `num_shared_heads=None` is plain attention.

    The balancing loss holds the fraction of tokens by which a head is taken for a constant, which
    differences of outputs do not know: `fraction` gives it. `constants` are those of
    `route_by_query_norm`.
    """
    weights = {name: np.asarray(array, "float64") for name, array in weights.items()}
    query = query.astype("float64")
    value, value_mask = (
        (query, _both(query_mask, value_mask))
        if value is None
        else (
            value.astype("float64"),
            value_mask,
        )
    )
    key = value if key is None else key.astype("float64")

    def project(name: str, x: np.ndarray) -> np.ndarray:
        heads = np.einsum("btd,dhe->bthe", x, weights[f"{name}/kernel"])
        return heads + weights.get(f"{name}/bias", 0)

    q, k, v = project("query", query), project("key", key), project("value", value)
    projected = q
    if qk_norm:
        q, k = _norm(q, "query_norm", weights, qk_norm), _norm(k, "key_norm", weights, qk_norm)
    if rotary is not None:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    (B, T, H, _), S = q.shape, k.shape[1]

    mask = np.broadcast_to(allowed(T, S, use_causal_mask, 0, sliding_window), (B, H, T, S))
    if query_mask is not None:
        mask = mask & query_mask[:, None, :, None]
    for padding in (value_mask, key_mask):
        if padding is not None:
            mask = mask & padding[:, None, None, :]
    if attention_mask is not None:
        if attention_mask.ndim == 3:
            attention_mask = attention_mask[:, None]
        mask = mask & attention_mask

    if num_shared_heads is None:
        every, none = np.ones((B, T, H)), np.zeros((B, T, 0))
        routing = Routing(every, every > 0, none, none, none > 0, np.inf)
    elif router == "query_norm":
        routing = route_by_query_norm(projected, num_shared_heads, top_k, routing_groups, constants)
    else:
        kernels = {
            name.removeprefix("router/"): array
            for name, array in weights.items()
            if name.startswith("router/")
        }
        routing = route(query, kernels, H, num_shared_heads, top_k, routing_groups)

    heads, scores = attend(q, k, v, mask)
    output_kernel = weights["attention_output/kernel"]
    output = np.zeros((B, T, *output_kernel.shape[2:]))
    for h in range(H):
        gated = routing.gates[..., h, None] * heads[:, :, h]
        output += np.tensordot(gated, output_kernel[h], axes=1)
    output = output + weights.get("attention_output/bias", 0)

    losses = (0.0, 0.0)
    if top_k:
        losses = (
            load_balancing_loss(routing.probabilities, routing.chosen, query_mask, fraction),
            router_z_loss(routing.scores, query_mask),
        )
    return Output(output, scores, routing, *losses)


def _both(*masks: np.ndarray | None) -> np.ndarray | None:
    masks = tuple(mask for mask in masks if mask is not None)
    return np.logical_and.reduce(masks) if masks else None


def _norm(
    x: np.ndarray, name: str, weights: Mapping[str, np.ndarray], kind: bool | str
) -> np.ndarray:
    if kind == "rms":
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weights[f"{name}/scale"]
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
    return x * weights[f"{name}/gamma"] + weights[f"{name}/beta"]
