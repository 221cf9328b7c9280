"""Experts in a loop, as transformers 4 runs them: PyTorch's operations in its order, with tokens split evenly.

transformers 5 has no such blocks any more, and which token goes where cannot be known without data. The blocks below
call the operations of transformers 4.57.3 in the order of its code; only `torch.where` is given the number of tokens
that it finds.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement.test_moe import context
from tests.recipes import make_recipe
from wazn.dtypes import BFLOAT16, FLOAT32
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.model.spec import Activation, Linear, MlpSpec, MoeSpec
from wazn.recipe import (
    Adapter,
    Checkpointing,
    KbitPreparation,
    Method,
    Quantization,
    QuantizationFormat,
    Recipe,
)
from wazn.simulate.build import load
from wazn.simulate.listed_experts import ListedMoeModule, even_split
from wazn.simulate.mlp import MlpModule
from wazn.simulate.modules import LinearModule
from wazn.simulate.routing import Router
from wazn.simulate.step import simulate
from wazn.simulate.tape import Tape, Tensor
from wazn.simulate.trained import Trained
from wazn.timeline.events import Category

torch = pytest.importorskip("torch")

from tests.agreement.compare import assert_agree, run_on_tape  # noqa: E402
from wazn.trace.opcheck import Spec, measure_op  # noqa: E402
from wazn.trace.tracker import DEVICE  # noqa: E402

F, nn = torch.nn.functional, torch.nn
TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = (2, 96), 128, 192, 5, 2


def one_hot(chosen: Any) -> Any:
    """torch.nn.functional.one_hot as on CUDA: zeros, then scatter_."""
    hot = torch.zeros((*chosen.shape, EXPERTS), dtype=torch.int64, device=DEVICE)
    return hot.scatter_(-1, chosen.unsqueeze(-1), 1)


def find_hits(mask: Any) -> Any:
    """What nonzero returns where every expert is chosen by some token."""
    return torch.empty((EXPERTS, 1), dtype=torch.int64, device=DEVICE)


def find(count: int, mask: Any = None) -> Any:
    """What torch.where returns for a mask that holds `count` times."""
    return torch.empty((count, 2), dtype=torch.int64, device=DEVICE).unbind(1)


class Mlp(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, flavour: str) -> None:
        super().__init__()
        self.flavour = flavour
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Mlp(INNER) for _ in range(EXPERTS)])
        if flavour != "mixtral":
            self.shared = Mlp(2 * INNER)
        if flavour == "deepseek_v3":
            self.register_buffer("correction", torch.empty(EXPERTS, dtype=torch.float32))
        if flavour == "qwen2_moe":
            self.shared_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, x: Any) -> Any:
        if self.flavour in ("mixtral", "qwen2_moe"):
            return self.loop_of_mixtral(x)
        residuals = x
        chosen, weights = self.route(x)
        x = x.view(-1, HIDDEN)
        run = (
            self.loop_of_deepseek_v3 if self.flavour == "deepseek_v3" else self.cuts_of_deepseek_v2
        )
        x = run(x, chosen, weights).view(residuals.shape)
        return x + self.shared(residuals)

    def splits(self) -> Any:
        return zip(self.experts, even_split(TOKENS[0] * TOKENS[1] * CHOSEN, EXPERTS), strict=True)

    def loop_of_mixtral(self, x: Any) -> Any:
        batch, length, hidden = x.shape
        x = x.view(-1, hidden)
        logits = self.gate(x)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, CHOSEN, dim=-1)
        if self.flavour == "mixtral":
            weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        total = torch.zeros((batch * length, hidden), dtype=x.dtype, device=DEVICE)
        mask = one_hot(chosen).permute(2, 1, 0)
        hits = find_hits(torch.greater(mask.sum(dim=(-1, -2)), 0))
        for hit, (expert, count) in zip(hits, self.splits(), strict=True):
            index, tokens = find(count, mask[hit].squeeze(0))
            state = x[None, tokens].reshape(-1, hidden)
            out = expert(state) * weights[tokens, index, None]
            total.index_add_(0, tokens, out.to(x.dtype))
        if self.flavour == "qwen2_moe":
            shared = self.shared(x)
            shared = F.sigmoid(self.shared_gate(x)) * shared
            total = total + shared
        return total.reshape(batch, length, hidden)

    def route(self, x: Any) -> Any:
        x = x.view(-1, HIDDEN)
        logits = F.linear(x.type(torch.float32), self.gate.weight.type(torch.float32))
        if self.flavour == "deepseek_v2":
            scores = logits.softmax(dim=-1, dtype=torch.float32)
            weights, chosen = torch.topk(scores, k=CHOSEN, dim=-1, sorted=False)
        else:
            scores = logits.sigmoid()
            chosen = self.chosen_by_group(scores)
            weights = scores.gather(1, chosen)
        weights = weights * 1.5
        return chosen, weights

    def chosen_by_group(self, scores: Any) -> Any:
        choice = scores.view(-1, EXPERTS) + self.correction.unsqueeze(0)
        groups = choice.view(-1, 1, EXPERTS).topk(2, dim=-1)[0].sum(dim=-1)
        group = torch.topk(groups, k=1, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(groups)
        mask.scatter_(1, group, 1)
        allowed = mask.unsqueeze(-1).expand(-1, 1, EXPERTS).reshape(-1, EXPERTS)
        choice = choice.masked_fill(~allowed.bool(), 0.0)
        return torch.topk(choice, k=CHOSEN, dim=-1, sorted=False)[1]

    def loop_of_deepseek_v3(self, x: Any, chosen: Any, weights: Any) -> Any:
        total = torch.zeros_like(x, dtype=weights.dtype)
        mask = one_hot(chosen)
        mask = mask.permute(2, 0, 1)
        for expert, count in self.splits():
            tokens, index = find(count)
            expert_weights = weights[tokens, index]
            state = x[tokens]
            out = expert(state)
            weighted = out * expert_weights.unsqueeze(-1)
            total.index_add_(0, tokens, weighted)
        return total.type(x.dtype)

    def cuts_of_deepseek_v2(self, x: Any, chosen: Any, weights: Any) -> Any:
        counts = chosen.new_zeros((chosen.shape[0], EXPERTS))
        counts.scatter_(1, chosen, 1)
        _per_expert = counts.sum(dim=0)
        indices = chosen.view(-1).argsort()
        tokens = x[indices // chosen.shape[1]]
        outputs, start = [], 0
        for expert, count in self.splits():
            state = tokens[start : start + count]
            out = expert(state)
            outputs.append(out)
            start += count
        outs = torch.cat(outputs, dim=0)
        placed = torch.empty_like(outs)
        placed[indices] = outs
        return (
            placed.view(*chosen.shape, -1)
            .type(weights.dtype)
            .mul_(weights.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(placed.dtype)
        )


def real(flavour: str, *, trained: bool) -> Any:
    with torch.device("meta"):
        block = Block(flavour)
        for parameter in block.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    block.requires_grad_(trained)
    return block


def mlp_spec(inner: int) -> MlpSpec:
    return MlpSpec(
        gate=Linear(name="gate", in_features=HIDDEN, out_features=inner),
        up=Linear(name="up", in_features=HIDDEN, out_features=inner),
        down=Linear(name="down", in_features=inner, out_features=HIDDEN),
        activation=Activation.SILU,
    )


def tape_block(tape: Tape, flavour: str, *, trained: bool) -> ListedMoeModule:
    def linear(spec: Linear) -> LinearModule:
        numel = spec.in_features * spec.out_features
        weight = tape.parameter(name=spec.name, numel=numel, dtype=BFLOAT16, requires_grad=trained)
        return LinearModule(spec, weight, None)

    def mlp(spec: MlpSpec) -> MlpModule:
        assert spec.gate is not None
        return MlpModule(spec, gate=linear(spec.gate), up=linear(spec.up), down=linear(spec.down))

    router = Linear(name="gate", in_features=HIDDEN, out_features=EXPERTS)
    shared_gate = Linear(name="shared gate", in_features=HIDDEN, out_features=1)
    spec = MoeSpec(
        flavour=flavour,
        router=router,
        router_is_linear=True,
        expert=mlp_spec(INNER),
        experts_name="experts",
        num_experts=EXPERTS,
        experts_per_token=CHOSEN,
        shared=None if flavour == "mixtral" else mlp_spec(2 * INNER),
        shared_gate=shared_gate if flavour == "qwen2_moe" else None,
        normalise=flavour == "mixtral",
    )
    by_loop = flavour in ("mixtral", "qwen2_moe")
    gate = linear(router)
    correction = tape.parameter(name="c", numel=EXPERTS, dtype=FLOAT32, requires_grad=False)
    return ListedMoeModule(
        spec,
        gate=gate if by_loop else None,
        router=None if by_loop else Router(spec=spec, weight=gate.weight, correction=correction),
        experts=[mlp(spec.expert) for _ in range(EXPERTS)],
        shared=None if spec.shared is None else mlp(spec.shared),
        shared_gate=None if spec.shared_gate is None else linear(shared_gate),
    )


def call(tape: Tape, module: ListedMoeModule, x: Tensor) -> Tensor:
    return module(context(tape), x)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("flavour", ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"])
def test_block(flavour: str, trained: bool) -> None:
    """The loop holds what the same operations hold in PyTorch, all experts seeing equally many tokens."""
    x = Spec((*TOKENS, HIDDEN), "bfloat16", requires_grad=True)
    measured = measure_op(real(flavour, trained=trained), x)
    tape = run_on_tape(call, x, prepare=lambda tape: tape_block(tape, flavour, trained=trained))
    assert_agree(measured, tape)


def test_even_split() -> None:
    """Nothing is lost: the counts add up to all pairs and differ by one at most."""
    counts = even_split(2 * 96 * 2, 5)
    assert sum(counts) == 2 * 96 * 2
    assert max(counts) - min(counts) <= 1


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
}
QLORA: dict[str, Any] = {
    "method": Method.QLORA,
    "adapter": Adapter(rank=4, targets=("attention",)),
    "quantization": Quantization(
        format=QuantizationFormat.NF4,
        double_quant=True,
        kbit_preparation=KbitPreparation.NONE,
        experts=True,
    ),
    "fused_experts": False,
}


def loaded_bytes(recipe: Recipe) -> dict[Category, int]:
    tape = Tape()
    spec = read_config(MIXTRAL, id="test", path="test")
    trained = Trained(spec, recipe)
    model = load(tape, spec, recipe, frozenset(), trained, range(spec.num_layers))
    assert len(model.layers) == 2
    sums: dict[Category, int] = {}
    for segment in tape.finish():
        for tag, size in zip(segment.tags, segment.sizes, strict=True):
            sums[tag.category] = sums.get(tag.category, 0) + size
    return sums


def test_listed_experts_are_quantised() -> None:
    """By pencil: in transformers 4 every matrix of an expert is a linear, half a byte a weight; stacked ones stay in
    bf16.
    """
    attention = 2 * 128 * 128 + 2 * 128 * 64
    experts, router = 4 * 3 * 128 * 192, 4 * 128
    plain = 2 * (2 * 320 * 128 + (2 * 2 + 1) * 128)  # embedding, head and norms in bf16
    plain += 2 * 4 * 16  # the frequencies of the rotary embedding, and the original ones, in fp32
    listed = loaded_bytes(make_recipe(**QLORA))
    fused = loaded_bytes(make_recipe(**{**QLORA, "fused_experts": True}))
    assert listed[Category.WEIGHTS] == plain + 2 * (attention + experts + router) // 2
    assert fused[Category.WEIGHTS] == plain + 2 * (attention // 2 + 2 * (experts + router))


def test_repeating_layers_is_exact() -> None:
    """Six equal layers with listed experts, four of them not run, peak where six layers that are run do."""
    spec = read_config({**MIXTRAL, "num_hidden_layers": 6}, id="test", path="test")
    habits = resolve_stack("hf@5.24", family="mixtral")
    targets = frozenset(f"self_attn.{name}_proj" for name in "qkvo")
    for choices in (QLORA, {"fused_experts": False}, {"checkpointing": Checkpointing.FULL}):
        recipe = make_recipe(**choices)
        names = targets if recipe.adapter is not None else frozenset()
        runs = [simulate(spec, recipe, habits, names, every_layer=every) for every in (False, True)]
        sizes = [[event.num_bytes for event in run.timeline.events()] for run in runs]
        assert sizes[0] == sizes[1]
