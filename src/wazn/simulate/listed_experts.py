"""Mixtures of experts as transformers 4 writes them: one module per expert, and a loop over the experts.

How many tokens an expert sees depends on the data. Here all experts see the same number, one more for the first few
where the pairs do
not divide evenly: an assumption, under which the loop's temporaries are smallest.

Shapes: T tokens, H hidden size, E experts, k experts per token, S = T x k chosen pairs.
Sources: transformers 4.57.3, the `*SparseMoeBlock` and `*MoE` classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wazn.dtypes import BOOL, FLOAT32, INT64
from wazn.model.spec import MoeSpec
from wazn.simulate.context import Context
from wazn.simulate.mlp import MlpModule
from wazn.simulate.modules import Module
from wazn.simulate.moe import reshaped
from wazn.simulate.ops import add, cat, mul, narrow, pointwise_of_result, softmax, to
from wazn.simulate.routing import ROUTERS, Router, index_rows, normalise_in_place, sum_axis, top_k
from wazn.simulate.tape import Tape, Tensor

__all__ = ["LISTED", "ListedMoeModule", "even_split"]


def even_split(pairs: int, experts: int) -> tuple[int, ...]:
    """Return how many of the pairs each expert gets.

    >>> even_split(10, 4)
    (3, 3, 2, 2)
    """
    each, rest = divmod(pairs, experts)
    return (each + 1,) * rest + (each,) * (experts - rest)


class ListedMoeModule:
    """A sparse feed-forward block with a list of experts.

    gate: the router's matrix where it is a linear; router: where it is not.
    """

    __slots__ = ("experts", "gate", "router", "shared", "shared_gate", "spec")

    def __init__(
        self,
        spec: MoeSpec,
        *,
        gate: Module | None,
        router: Router | None,
        experts: Sequence[MlpModule],
        shared: MlpModule | None,
        shared_gate: Module | None,
    ) -> None:
        self.spec = spec
        self.gate = gate
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, context: Context, x: Tensor) -> Tensor:
        """x: [B, S, H]; returns [B, S, H]."""
        return LISTED[self.spec.flavour](self, context, x)

    def splits(self, tokens: int) -> tuple[int, ...]:
        """Return how many tokens each expert sees."""
        return even_split(tokens * self.spec.experts_per_token, self.spec.num_experts)


def index_add(tape: Tape, total: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """total.index_add_(0, index, source): in place; saves index and source; backward selects the rows of the source."""
    numel = source.numel
    saved = tape.save(index, source) if source.requires_grad else ()

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, tape.new(numel, gradient.dtype)

    out = Tensor(total.storage, total.numel, total.dtype)
    out.requires_grad, out.node, out.output_nr = total.requires_grad, total.node, total.output_nr
    return tape.record(out, (total, source), saved, backward)


def unsqueezed(tape: Tape, x: Tensor) -> Tensor:
    """x[None]: the gradient is squeezed, a view."""
    return reshaped(tape, x)


def where(tape: Tape, count: int) -> Tensor:
    """torch.where of a condition that holds `count` times: both columns of indices in one block."""
    return tape.new(2 * count, INT64)


def top2(module: ListedMoeModule, context: Context, x: Tensor) -> Tensor:
    """MixtralSparseMoeBlock, and those that were written after it, with a shared expert in Qwen2-MoE."""
    tape, spec = context.tape, module.spec
    assert module.gate is not None
    hidden_states = reshaped(tape, x)
    with tape.flat_rows():
        router_logits = module.gate(tape, hidden_states)
        tape.label = spec.router.name
        tokens = hidden_states.numel // spec.router.in_features
        chosen = tokens * spec.experts_per_token
        routing_weights = softmax(tape, router_logits, FLOAT32)
        routing_weights, selected_experts = top_k(tape, routing_weights, chosen)
        if spec.normalise:
            routing_weights = normalise_in_place(
                tape, routing_weights, chosen=spec.experts_per_token, epsilon=False
            )
        routing_weights = to(tape, routing_weights, hidden_states.dtype)
        tape.label = spec.experts_name
        final_hidden_states = tape.new(hidden_states.numel, hidden_states.dtype)
        expert_mask = tape.new(chosen * spec.num_experts, INT64)
        expert_hit = _hit(tape, spec)
        current_state = current_hidden_states = top_x = None
        for expert_layer, count in zip(module.experts, module.splits(tokens), strict=True):
            top_x = _tokens_of(tape, spec, chosen, count)
            current_state = index_rows(
                tape,
                unsqueezed(tape, hidden_states),
                top_x,
                numel=count * spec.router.in_features,
            )
            current_hidden_states = mul(
                tape,
                expert_layer(context, current_state),
                index_rows(tape, unsqueezed(tape, routing_weights), top_x, numel=count),
            )
            final_hidden_states = index_add(
                tape,
                final_hidden_states,
                top_x,
                to(tape, current_hidden_states, hidden_states.dtype),
            )
        if module.shared is not None and module.shared_gate is not None:
            shared_expert_output = module.shared(context, hidden_states)
            shared_expert_output = mul(
                tape,
                pointwise_of_result(tape, module.shared_gate(tape, hidden_states)),
                shared_expert_output,
            )
            final_hidden_states = add(tape, final_hidden_states, shared_expert_output)
    del current_state, current_hidden_states, top_x, expert_hit, expert_mask, selected_experts
    return reshaped(tape, final_hidden_states)


def _hit(tape: Tape, spec: MoeSpec) -> Tensor:
    """torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()."""
    sums = tape.new(spec.num_experts, INT64)
    greater = tape.new(spec.num_experts, BOOL)
    del sums
    hit = tape.new(spec.num_experts, INT64)
    del greater
    return hit


def _tokens_of(tape: Tape, spec: MoeSpec, chosen: int, count: int) -> Tensor:
    """torch.where(expert_mask[expert_idx].squeeze(0)): the mask of one expert is a copy, as its number is a tensor."""
    if spec.flavour == "olmoe":  # a number there: a view
        return where(tape, count)
    mask = tape.new(chosen, INT64)
    found = where(tape, count)
    del mask
    return found


def deepseek_v3(module: ListedMoeModule, context: Context, x: Tensor) -> Tensor:
    """DeepseekV3MoE: the sum is kept in the type of the weights, fp32."""
    tape = context.tape
    assert module.router is not None
    with tape.flat_rows():
        topk_weights, topk_indices = _routed(module, tape, x)
        hidden_states = reshaped(tape, x)
        hidden_states = _deepseek_v3_experts(
            module, context, hidden_states, topk_indices, topk_weights
        )
    hidden_states = reshaped(tape, hidden_states)
    return _with_shared(module, context, hidden_states, x)


def _routed(module: ListedMoeModule, tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of the chosen experts; the logits stay inside the router."""
    assert module.router is not None
    tape.label = module.spec.router.name
    _logits, weights, indices = ROUTERS[module.spec.flavour](tape, module.router, reshaped(tape, x))
    return weights, indices


def _with_shared(
    module: ListedMoeModule, context: Context, hidden_states: Tensor, x: Tensor
) -> Tensor:
    if module.shared is None:
        return hidden_states
    return add(context.tape, hidden_states, module.shared(context, x))


def _deepseek_v3_experts(
    module: ListedMoeModule,
    context: Context,
    hidden_states: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
) -> Tensor:
    tape, spec = context.tape, module.spec
    hidden = spec.router.in_features
    tokens = hidden_states.numel // hidden
    tape.label = spec.experts_name
    final_hidden_states = tape.new(hidden_states.numel, topk_weights.dtype)
    expert_mask = tape.new(topk_indices.numel * spec.num_experts, INT64)
    expert_input = expert_output = weighted_output = expert_weights = None
    for expert, count in zip(module.experts, module.splits(tokens), strict=True):
        token_indices = where(tape, count)
        if count:
            expert_weights = index_rows(tape, topk_weights, token_indices, numel=count)
            expert_input = index_rows(tape, hidden_states, token_indices, numel=count * hidden)
            expert_output = expert(context, expert_input)
            weighted_output = mul(tape, expert_output, expert_weights)
            final_hidden_states = index_add(
                tape, final_hidden_states, token_indices, weighted_output
            )
    final_hidden_states = to(tape, final_hidden_states, hidden_states.dtype)
    del expert_input, expert_output, weighted_output, expert_weights, expert_mask
    return final_hidden_states


def deepseek_v2(module: ListedMoeModule, context: Context, x: Tensor) -> Tensor:
    """DeepseekV2MoE: tokens sorted by expert and cut, results joined and put back in order."""
    tape = context.tape
    with tape.flat_rows():
        topk_weights, topk_indices = _routed(module, tape, x)
        hidden_states = reshaped(tape, x)
        hidden_states = _deepseek_v2_experts(
            module, context, hidden_states, topk_indices, topk_weights
        )
    hidden_states = reshaped(tape, hidden_states)
    return _with_shared(module, context, hidden_states, x)


def _deepseek_v2_experts(
    module: ListedMoeModule,
    context: Context,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weight: Tensor,
) -> Tensor:
    tape, spec = context.tape, module.spec
    hidden, chosen = spec.router.in_features, topk_ids.numel
    tokens = chosen // spec.experts_per_token
    tape.label = spec.experts_name
    cnts = tape.new(tokens * spec.num_experts, INT64)
    tokens_per_expert = tape.new(spec.num_experts, INT64)
    indices = _argsort(tape, chosen)
    sorted_tokens = index_rows(tape, hidden_states, tape.new(chosen, INT64), numel=chosen * hidden)
    outputs = []
    tokens_for_this_expert = expert_out = None
    for expert, count in zip(module.experts, module.splits(tokens), strict=True):
        if count:
            tokens_for_this_expert = narrow(tape, sorted_tokens, count * hidden)
            expert_out = expert(context, tokens_for_this_expert)
            outputs.append(expert_out)
    outs = cat(tape, outputs)
    new_x = _index_put(tape, tape.new(outs.numel, outs.dtype), indices, outs)
    dtype = new_x.dtype
    hidden_states = to(tape, new_x, topk_weight.dtype)
    hidden_states = _mul_in_place(tape, hidden_states, topk_weight)
    hidden_states = sum_axis(tape, hidden_states, spec.experts_per_token)
    hidden_states = to(tape, hidden_states, dtype)
    del cnts, tokens_per_expert, tokens_for_this_expert, expert_out, outputs
    return hidden_states


def _argsort(tape: Tape, numel: int) -> Tensor:
    """x.argsort(): the sorted values die at once."""
    values, indices = tape.new(numel, INT64), tape.new(numel, INT64)
    del values
    return indices


def _index_put(tape: Tape, target: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """target[indices] = values, in place; saves the indices; backward reads the gradient there."""
    numel = values.numel
    saved = tape.save(indices) if values.requires_grad else ()

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, gradient.dtype),)

    out = Tensor(target.storage, target.numel, target.dtype)
    return tape.record(out, (values,), saved, backward)


def _mul_in_place(tape: Tape, x: Tensor, weights: Tensor) -> Tensor:
    """x.mul_(weights): what was there before is copied where the weights need a gradient."""
    need_x, need_weights = x.requires_grad, weights.requires_grad
    kept = tape.new(x.numel, x.dtype) if need_weights and tape.grad_enabled else None
    saved = tape.save(kept, weights if need_x else None) if need_x or need_weights else ()
    del kept
    numel = x.numel

    def backward(gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        for_weights = tape.new(numel, gradient.dtype) if need_weights else None
        for_x = tape.new(numel, gradient.dtype) if need_x else None
        return for_x, for_weights

    return tape.record(Tensor(x.storage, numel, x.dtype), (x, weights), saved, backward)


LISTED: dict[str, Callable[[ListedMoeModule, Context, Tensor], Tensor]] = {
    "mixtral": top2,
    "qwen2_moe": top2,
    "qwen3_moe": top2,
    "olmoe": top2,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": deepseek_v3,
}
