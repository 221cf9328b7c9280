"""Mixtures of experts: the experts on sorted tokens, and the blocks of the families around them.

Shapes: T tokens, H hidden size, I intermediate size, E experts, k experts per token, S = T x k chosen pairs.
Sources: transformers 5.24, integrations/moe.py (`grouped_mm_experts_forward`, the default on every device) and the
`*SparseMoeBlock` classes; grouped products need compute capability 8.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wazn.dtypes import INT32, INT64
from wazn.model.spec import MoeSpec
from wazn.simulate.activations import ACTIVATIONS
from wazn.simulate.context import Context
from wazn.simulate.lora import AdaptedStack, value_of, while_adapted
from wazn.simulate.mlp import MlpModule
from wazn.simulate.modules import Module
from wazn.simulate.ops import (
    add,
    add_in_place,
    add_scalar,
    clamp,
    mul,
    mul_scalar,
    narrow,
    pointwise_of_result,
    split,
    to,
)
from wazn.simulate.routing import ROUTERS, Router, clamp_one_side, index_rows, sort, sum_axis
from wazn.simulate.tape import Tape, Tensor

__all__ = ["Experts", "MoeModule", "grouped_experts", "grouped_mm", "grouped_mm_fallback"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The stacked weights: gate_up [E, 2I, H] and down [E, H, I], or both transposed; with biases [E, 2I] and [E, H]
    in gpt-oss.
    """

    gate_up: Tensor | AdaptedStack
    down: Tensor | AdaptedStack
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def grouped_mm(
    tape: Tape, x: Tensor, weight: Tensor, offsets: Tensor, *, rows: int, out_features: int
) -> Tensor:
    """torch.nn.functional.grouped_mm of sorted rows [S, in] with a stack of matrices.

    Autocast does not know it; transformers casts x to the type of the weight. The gradient of the weight is a
    transposed view.
    """
    x = to(tape, x, weight.dtype)
    need_x, need_weight = x.requires_grad, weight.requires_grad
    saved = (
        tape.save(x if need_weight else None, weight if need_x else None, offsets)
        if need_x or need_weight
        else ()
    )
    numel_x, numel_weight = x.numel, weight.numel

    def backward(gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        for_weight = for_x = None
        if need_weight:
            for_weight = tape.new(numel_weight, gradient.dtype).view_with_base()
        if need_x:
            for_x = tape.new(numel_x, gradient.dtype)
        return for_x, for_weight

    return tape.record(tape.new(rows * out_features, x.dtype), (x, weight), saved, backward)


def grouped_mm_fallback(
    tape: Tape, x: Tensor, weight: Tensor, offsets: Tensor, *, rows: int, out_features: int
) -> Tensor:
    """transformers::grouped_mm_fallback, on cards before compute capability 8.0.

    Both arguments are kept and both gradients made, also that of a frozen weight; the offsets stay as an attribute.
    """
    x = to(tape, x, weight.dtype)
    needs = x.requires_grad or weight.requires_grad
    saved = tape.save(x, weight) if needs else ()
    if needs:
        tape.hold(offsets)
    numel_x, numel_weight = x.numel, weight.numel

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
        return tape.new(numel_x, gradient.dtype), tape.new(numel_weight, gradient.dtype)

    return tape.record(tape.new(rows * out_features, x.dtype), (x, weight), saved, backward)


def grouped_linear(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    *,
    rows: int,
    out_features: int,
    fallback: bool,
) -> Tensor:
    """_grouped_linear: the product, and the bias of each row's expert added in place."""
    product = grouped_mm_fallback if fallback else grouped_mm
    out = product(tape, x, weight, offsets, rows=rows, out_features=out_features)
    return out if bias is None else add_in_place(tape, out, bias)


def grouped_experts(
    tape: Tape,
    spec: MoeSpec,
    experts: Experts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    fallback: bool = False,
) -> Tensor:
    """grouped_mm_experts_forward: tokens sorted by expert, two grouped products, summed back per token."""
    hidden_dim, intermediate = spec.expert.down.out_features, spec.expert.down.in_features
    rows = top_k_index.numel
    expert_ids_g, perm = sort(tape, rows)
    selected_hidden_states_g = _select(tape, hidden_states, perm, rows * hidden_dim)
    sample_weights_g = index_rows(tape, top_k_weights, perm, numel=rows)
    histc_input = tape.new(rows, INT32)
    tokens_per_expert = tape.new(spec.num_experts, INT32)
    offsets = tape.new(spec.num_experts, INT32)
    biases = _biases(tape, experts.gate_up_bias, expert_ids_g, rows * 2 * intermediate)
    up_out = grouped_linear(
        tape,
        selected_hidden_states_g,
        value_of(experts.gate_up),
        offsets,
        biases,
        rows=rows,
        out_features=2 * intermediate,
        fallback=fallback,
    )
    proj_out = APPLY_GATE.get(spec.flavour, apply_gate)(tape, spec, up_out)
    del up_out
    biases = _biases(tape, experts.down_bias, expert_ids_g, rows * hidden_dim)
    proj_out = grouped_linear(
        tape,
        proj_out,
        value_of(experts.down),
        offsets,
        biases,
        rows=rows,
        out_features=hidden_dim,
        fallback=fallback,
    )
    weighted_out = mul(tape, proj_out, sample_weights_g)
    inv_perm = tape.new(rows, INT64)
    arange = tape.new(rows, INT64)
    del arange
    weighted_out = index_rows(tape, weighted_out, inv_perm, numel=rows * hidden_dim)
    final_hidden_states = sum_axis(tape, unflattened(tape, weighted_out), spec.experts_per_token)
    final_hidden_states = to(tape, final_hidden_states, hidden_states.dtype)
    del histc_input, tokens_per_expert
    return final_hidden_states


def _select(tape: Tape, hidden_states: Tensor, perm: Tensor, numel: int) -> Tensor:
    """hidden_states[perm // num_top_k]."""
    return index_rows(tape, hidden_states, tape.new(perm.numel, INT64), numel=numel)


def unflattened(tape: Tape, x: Tensor) -> Tensor:
    """x.view(T, k, H) before a sum over k: backward copies the gradient where it comes expanded,
    and not cast.
    """

    def backward(gradient: Tensor) -> tuple[Tensor]:
        num_bytes = gradient.numel * gradient.dtype.itemsize
        if gradient.storage is None or gradient.storage.num_bytes == num_bytes:
            return (gradient.view_with_base(),)
        return (tape.new(gradient.numel, gradient.dtype),)

    return tape.record(x.detach(), (x,), (), backward)


def _biases(tape: Tape, bias: Tensor | None, expert_ids: Tensor, numel: int) -> Tensor | None:
    return None if bias is None else index_rows(tape, bias, expert_ids, numel=numel)


def apply_gate(tape: Tape, spec: MoeSpec, gate_up: Tensor) -> Tensor:
    """_default_apply_gate: act(gate) * up."""
    gate, up = split(tape, gate_up, (gate_up.numel // 2,) * 2)
    return mul(tape, ACTIVATIONS[spec.expert.activation](tape, gate), up)


def gpt_oss_apply_gate(tape: Tape, spec: MoeSpec, gate_up: Tensor) -> Tensor:
    """GptOssExperts._apply_gate: gate and up interleaved and clamped, (up + 1) * gate *
    sigmoid(gate * alpha).
    """
    half = gate_up.numel // 2
    gate, up = narrow(tape, gate_up, half), narrow(tape, gate_up, half)
    gate = clamp_one_side(tape, gate)
    up = clamp(tape, up)
    glu = mul(tape, gate, pointwise_of_result(tape, mul_scalar(tape, gate)))
    return mul(tape, add_scalar(tape, up), glu)


APPLY_GATE: dict[str, Callable[[Tape, MoeSpec, Tensor], Tensor]] = {"gpt_oss": gpt_oss_apply_gate}


class MoeModule:
    """A sparse feed-forward block: router, experts, and where there are, experts that see every token."""

    __slots__ = ("experts", "router", "shared", "shared_gate", "spec")

    def __init__(
        self,
        spec: MoeSpec,
        *,
        router: Router,
        experts: Experts,
        shared: MlpModule | None = None,
        shared_gate: Module | None = None,
    ) -> None:
        self.spec = spec
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, context: Context, x: Tensor) -> Tensor:
        """x: [B, S, H]; returns [B, S, H]."""
        return BLOCKS.get(self.spec.flavour, plain_block)(self, context, x)

    def route(self, tape: Tape, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits, the weights of the chosen experts and their numbers."""
        tape.label = self.spec.router.name
        route = ROUTERS[self.spec.flavour]
        return while_adapted(tape, (self.router.weight,), lambda: route(tape, self.router, x))

    def run_experts(self, context: Context, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts."""
        tape, fallback = context.tape, context.capability < (8, 0)
        tape.label = self.spec.experts_name
        experts = self.experts
        return while_adapted(
            tape,
            (experts.down, experts.gate_up),  # peft wraps the second matrix around the first
            lambda: grouped_experts(tape, self.spec, experts, x, index, weights, fallback=fallback),
        )


def reshaped(tape: Tape, x: Tensor) -> Tensor:
    """hidden_states.view(-1, hidden_dim): a node of its own, where the gradients of all that use
    the tokens meet.
    """
    return tape.record(x.detach(), (x,), (), _view_backward)


def _view_backward(gradient: Tensor) -> tuple[Tensor]:
    return (gradient.view_with_base(),)


def plain_block(module: MoeModule, context: Context, x: Tensor) -> Tensor:
    """MixtralSparseMoeBlock and others without shared experts."""
    tape = context.tape
    hidden_states = reshaped(tape, x)
    with tape.flat_rows():
        _, top_k_weights, top_k_index = module.route(tape, hidden_states)
        hidden_states = module.run_experts(context, hidden_states, top_k_index, top_k_weights)
    return reshaped(tape, hidden_states)


def qwen2_moe(module: MoeModule, context: Context, x: Tensor) -> Tensor:
    """Qwen2MoeSparseMoeBlock: the shared expert first, scaled by a sigmoid of its own at the end."""
    tape = context.tape
    assert module.shared is not None
    assert module.shared_gate is not None
    hidden_states = reshaped(tape, x)
    with tape.flat_rows():
        shared_expert_output = module.shared(context, hidden_states)
        _, routing_weights, selected_experts = module.route(tape, hidden_states)
        expert_output = module.run_experts(
            context, hidden_states, selected_experts, routing_weights
        )
        shared_expert_output = mul(
            tape,
            pointwise_of_result(tape, module.shared_gate(tape, hidden_states)),
            shared_expert_output,
        )
        expert_output = add(tape, expert_output, shared_expert_output)
    return reshaped(tape, expert_output)


def deepseek(module: MoeModule, context: Context, x: Tensor) -> Tensor:
    """DeepseekV3MoE: routed experts, then the shared ones on the same tokens, unflattened."""
    tape = context.tape
    with tape.flat_rows():
        _, topk_weights, topk_indices = module.route(tape, reshaped(tape, x))
        hidden_states = reshaped(tape, x)
        hidden_states = module.run_experts(context, hidden_states, topk_indices, topk_weights)
    hidden_states = reshaped(tape, hidden_states)
    if module.shared is None:
        return hidden_states
    return add(tape, hidden_states, module.shared(context, x))


def ernie4_5_moe(module: MoeModule, context: Context, x: Tensor) -> Tensor:
    """Ernie4_5_MoeSparseMoeBlock: the shared experts first."""
    tape = context.tape
    hidden_states = reshaped(tape, x)
    with tape.flat_rows():
        shared_output = None
        if module.shared is not None:
            shared_output = module.shared(context, hidden_states)
        _, top_k_weights, top_k_index = module.route(tape, hidden_states)
        final_hidden_states = module.run_experts(context, hidden_states, top_k_index, top_k_weights)
        if shared_output is not None:
            final_hidden_states = add(tape, final_hidden_states, shared_output)
    return to(tape, reshaped(tape, final_hidden_states), x.dtype)


BLOCKS: dict[str, Callable[[MoeModule, Context, Tensor], Tensor]] = {
    "qwen2_moe": qwen2_moe,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "glm4_moe": deepseek,
    "glm4_moe_lite": deepseek,
    "ernie4_5_moe": ernie4_5_moe,
}
