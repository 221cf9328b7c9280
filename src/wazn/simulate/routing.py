"""Which expert sees which token: the operations on indices, and the routers of the families.

A router takes tokens x [T, H] and returns logits [T, E], the weights of the chosen experts [T, k] and their numbers
[T, k].
Sources: the `*TopKRouter` classes of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wazn.dtypes import BOOL, FLOAT32, INT64
from wazn.model.spec import MoeSpec
from wazn.simulate.lora import AdaptedStack, value_of
from wazn.simulate.ops import (
    add,
    add_scalar,
    div,
    linear,
    masked_fill,
    mul_scalar,
    pointwise_of_result,
    promote,
    softmax,
    to,
)
from wazn.simulate.tape import Tape, Tensor

__all__ = [
    "HAS_CORRECTION_BUFFER",
    "IN_FP32",
    "ROUTERS",
    "Router",
    "clamp_one_side",
    "gather",
    "index_rows",
    "sort",
    "sum_axis",
    "top_k",
]


def sort(tape: Tape, numel: int) -> tuple[Tensor, Tensor]:
    """torch.sort of `numel` integers: values and places."""
    return tape.new(numel, INT64), tape.new(numel, INT64)


def top_k(tape: Tape, x: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """torch.topk giving `numel` values and places; saves the places; backward writes into zeros."""
    full, out, places = x.numel, tape.new(numel, x.dtype), tape.new(numel, INT64)
    saved = tape.save(places if x.requires_grad else None)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(full, gradient.dtype),)

    return tape.record(out, (x,), saved, backward), places


def gather(tape: Tape, x: Tensor, places: Tensor) -> Tensor:
    """x.gather(1, places): one element per place; saves the places; backward adds into zeros."""
    return index_rows(tape, x, places, numel=places.numel)


def index_rows(tape: Tape, x: Tensor, places: Tensor, *, numel: int) -> Tensor:
    """x[places], `numel` elements in all; saves the places; backward adds into zeros."""
    full = x.numel
    saved = tape.save(places if x.requires_grad else None)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(full, gradient.dtype),)

    return tape.record(tape.new(numel, x.dtype), (x,), saved, backward)


def sum_axis(tape: Tape, x: Tensor, size: int) -> Tensor:
    """x.sum over an axis of `size`, in fp32 under autocast; the gradient is an expanded view."""
    full, dtype = x.numel, x.dtype if tape.autocast_dtype is None else FLOAT32

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (gradient.view(full),)

    return tape.record(tape.new(x.numel // size, dtype), (x,), (), backward)


def clamp_one_side(tape: Tape, x: Tensor) -> Tensor:
    """x.clamp with one bound only; backward compares and selects."""
    saved = tape.save(x if x.requires_grad else None)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        # where(self >= min, grad, 0), clamp_backward of FunctionsManual.cpp
        zero, inside = tape.new(1, gradient.dtype), tape.new(gradient.numel, BOOL)
        result = tape.new(gradient.numel, gradient.dtype)
        del inside, zero
        return (result,)

    return tape.record(tape.new(x.numel, x.dtype), (x,), saved, backward)


def normalise_in_place(tape: Tape, weights: Tensor, *, chosen: int, epsilon: bool) -> Tensor:
    """weights /= weights.sum(-1, keepdim=True), or that sum plus epsilon.

    Division in place by what needs a gradient saves a copy of what was there.
    """
    total = sum_axis(tape, weights, chosen)
    if epsilon:
        total = add_scalar(tape, total)
    needs_grad = weights.requires_grad and tape.grad_enabled
    kept = tape.new(weights.numel, weights.dtype) if needs_grad else weights.detach()
    saved = tape.save(total, kept) if needs_grad else ()
    del kept
    numel, dtype = weights.numel, promote(weights.dtype, total.dtype)

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
        # -grad * ((self / other) / other), div_tensor_other_backward of FunctionsManual.cpp
        ratio = tape.new(numel, dtype)
        over_total = tape.new(numel, dtype)
        negative = tape.new(numel, gradient.dtype)
        for_total = tape.new(numel, dtype)
        del negative, over_total, ratio
        return tape.new(numel, dtype), for_total

    out = Tensor(weights.storage, numel, weights.dtype)
    return tape.record(out, (weights, total), saved, backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """The weights of a router; `correction` [E] is added to what experts are chosen by."""

    spec: MoeSpec
    weight: Tensor | AdaptedStack
    bias: Tensor | None = None
    correction: Tensor | None = None

    def logits(self, tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
        """The product with the router's matrix: [T, E]."""
        return linear(
            tape, x, weight, self.bias, out_features=self.spec.num_experts, is_matrix=True
        )

    def num_tokens(self, x: Tensor) -> int:
        """T."""
        return x.numel // self.spec.router.in_features


Routed = tuple[Tensor, Tensor, Tensor]


def mixtral(tape: Tape, router: Router, x: Tensor) -> Routed:
    """Softmax in fp32; the chosen weights are normalised and stay in fp32."""
    spec = router.spec
    router_logits = router.logits(tape, x, value_of(router.weight))
    router_probs = softmax(tape, to(tape, router_logits, FLOAT32), FLOAT32)
    chosen = router.num_tokens(x) * spec.experts_per_token
    router_top_value, router_indices = top_k(tape, router_probs, chosen)
    router_top_value = normalise_in_place(
        tape, router_top_value, chosen=spec.experts_per_token, epsilon=False
    )
    return router_logits, router_top_value, router_indices


def qwen_moe(tape: Tape, router: Router, x: Tensor) -> Routed:
    """Softmax in fp32; the chosen weights are normalised if the configuration says so, and cast to the type of the
    logits.
    """
    spec = router.spec
    router_logits = router.logits(tape, x, value_of(router.weight))
    router_probs = softmax(tape, router_logits, FLOAT32)
    chosen = router.num_tokens(x) * spec.experts_per_token
    router_top_value, router_indices = top_k(tape, router_probs, chosen)
    if spec.normalise:
        router_top_value = normalise_in_place(
            tape, router_top_value, chosen=spec.experts_per_token, epsilon=False
        )
    router_top_value = to(tape, router_top_value, router_logits.dtype)
    return router_logits, router_top_value, router_indices


def granitemoe(tape: Tape, router: Router, x: Tensor) -> Routed:
    """The logits in fp32; softmax over the chosen ones, cast to the type of the tokens."""
    router_logits = to(tape, router.logits(tape, x, value_of(router.weight)), FLOAT32)
    chosen = router.num_tokens(x) * router.spec.experts_per_token
    top_k_logits, top_k_index = top_k(tape, router_logits, chosen)
    top_k_weights = to(tape, softmax(tape, top_k_logits, FLOAT32), x.dtype)
    return router_logits, top_k_weights, top_k_index


def gpt_oss(tape: Tape, router: Router, x: Tensor) -> Routed:
    """Softmax over the chosen logits, in their type."""
    router_logits = router.logits(tape, x, value_of(router.weight))
    chosen = router.num_tokens(x) * router.spec.experts_per_token
    router_top_value, router_indices = top_k(tape, router_logits, chosen)
    router_scores = softmax(tape, router_top_value, router_top_value.dtype)
    return router_logits, router_scores, router_indices


def deepseek_v2(tape: Tape, router: Router, x: Tensor) -> Routed:
    """Tokens and weight in fp32, softmax; experts only from the best groups where there are groups."""
    spec = router.spec
    router_logits = _logits_in_fp32(tape, router, x)
    scores = softmax(tape, router_logits, FLOAT32)
    tokens = router.num_tokens(x)
    if spec.num_groups > 1:
        group_scores, places = top_k(tape, scores, tokens * spec.num_groups)  # max(-1).values
        del places
        masks = _group_masks(tape, spec, group_scores, tokens)
        scores = masked_fill(tape, scores, masks.pop())
    topk_weights, topk_indices = top_k(tape, scores, tokens * spec.experts_per_token)
    topk_weights = mul_scalar(tape, topk_weights)
    return router_logits, topk_weights, topk_indices


def deepseek_v3(tape: Tape, router: Router, x: Tensor) -> Routed:
    """Tokens and weight in fp32, sigmoid; chosen by corrected scores, experts only from the best groups."""
    spec = router.spec
    assert router.correction is not None
    router_logits = _logits_in_fp32(tape, router, x)
    scores = pointwise_of_result(tape, router_logits)
    scores_for_choice = add(tape, scores, router.correction)
    tokens = router.num_tokens(x)
    best, places = top_k(tape, scores_for_choice, tokens * spec.num_groups * 2)
    del places
    group_scores = sum_axis(tape, best, 2)
    del best
    masks = _group_masks(tape, spec, group_scores, tokens)
    scores_for_choice = masked_fill(tape, scores_for_choice, masks.pop())
    topk_indices = top_k(tape, scores_for_choice, tokens * spec.experts_per_token)[1]
    topk_weights = gather(tape, scores, topk_indices)
    if spec.normalise:
        topk_weights = normalise_in_place(
            tape, topk_weights, chosen=spec.experts_per_token, epsilon=True
        )
    topk_weights = mul_scalar(tape, topk_weights)
    return router_logits, topk_weights, topk_indices


def _logits_in_fp32(tape: Tape, router: Router, x: Tensor) -> Tensor:
    return router.logits(tape, to(tape, x, FLOAT32), to(tape, value_of(router.weight), FLOAT32))


def _group_masks(tape: Tape, spec: MoeSpec, group_scores: Tensor, tokens: int) -> list[Tensor]:
    """Return where no expert may be chosen [T, E], last, after what it is made of, which lives as long as the
    router's frame.
    """
    group_idx = top_k(tape, group_scores, tokens * spec.groups_per_token)[1]
    group_mask = tape.new(group_scores.numel, FLOAT32)
    score_mask = group_mask  # of one group, a view
    if spec.num_groups > 1:
        score_mask = tape.new(tokens * spec.num_experts, FLOAT32)
    allowed = tape.new(tokens * spec.num_experts, BOOL)
    mask = tape.new(tokens * spec.num_experts, BOOL)
    del allowed
    return [group_idx, group_mask, score_mask, mask]


def ernie4_5_moe(tape: Tape, router: Router, x: Tensor) -> Routed:
    """Without autocast: tokens and weight in fp32, softmax, chosen by corrected scores, normalised, cast to the
    tokens' type.
    """
    spec = router.spec
    assert router.correction is not None
    with tape.autocast(None):
        router_logits = _logits_in_fp32(tape, router, x)
        routing_weights = softmax(tape, router_logits, FLOAT32)
        chosen = router.num_tokens(x) * spec.experts_per_token
        corrected = add(tape, routing_weights, router.correction)
        _, selected_experts = top_k(tape, corrected, chosen)
        del corrected
        routing_weights = gather(tape, routing_weights, selected_experts)
        routing_weights = div(
            tape,
            routing_weights,
            clamp_one_side(tape, sum_axis(tape, routing_weights, spec.experts_per_token)),
        )
    routing_weights = to(tape, routing_weights, x.dtype)
    return router_logits, routing_weights, selected_experts


def minimax_m2(tape: Tape, router: Router, x: Tensor) -> Routed:
    """Sigmoid in fp32; chosen by corrected scores, normalised."""
    spec = router.spec
    assert router.correction is not None
    router_logits = router.logits(tape, to(tape, x, router.weight.dtype), value_of(router.weight))
    routing_weights = pointwise_of_result(tape, to(tape, router_logits, FLOAT32))
    scores_for_choice = add(tape, routing_weights, router.correction)
    chosen = router.num_tokens(x) * spec.experts_per_token
    _, top_k_index = top_k(tape, scores_for_choice, chosen)
    top_k_weights = gather(tape, routing_weights, top_k_index)
    top_k_weights = normalise_in_place(
        tape, top_k_weights, chosen=spec.experts_per_token, epsilon=False
    )
    return router_logits, top_k_weights, top_k_index


ROUTERS: dict[str, Callable[[Tape, Router, Tensor], Routed]] = {
    "mixtral": mixtral,
    "qwen2_moe": qwen_moe,
    "qwen3_moe": qwen_moe,
    "olmoe": qwen_moe,
    "granitemoe": granitemoe,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": deepseek_v3,
    "glm4_moe_lite": deepseek_v3,
    "ernie4_5_moe": ernie4_5_moe,
    "minimax_m2": minimax_m2,
}

# families whose router stays in fp32 in any model (`_keep_in_fp32_modules_strict`)
IN_FP32 = frozenset(("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite"))
# families whose correction of the scores is a buffer
HAS_CORRECTION_BUFFER = frozenset(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2"))
