"""Optimizers: their states, made at the first step, and what a step holds for a moment.

A step goes over parameter groups, as Trainer makes them: with weight decay and without (biases and norms). Lists of
tensors that a foreach function makes are allocated parameter by parameter, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from wazn.dtypes import BFLOAT16, FLOAT16, FLOAT32, UINT8, Dtype
from wazn.errors import Unsupported
from wazn.recipe import Optimizer, Recipe
from wazn.simulate.tape import Parameter, Tape, Tensor
from wazn.timeline.events import Category, Phase
from wazn.units import ceil_div

__all__ = ["OptimizerModule", "clip_gradients", "make_optimizer"]

_CHUNK_ELEMENTS = 65536
# the names that Trainer gives no weight decay, and those of `nn.LayerNorm`s, whose type it knows (GPT-2, Falcon, MPT)
_NO_DECAY = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)(?:ln_[a-z0-9]+|norm_[12f])\."
)


class OptimizerModule(Protocol):
    """Holds states, and updates the parameters that have gradients."""

    managed_bytes: int
    """States in CUDA managed memory, outside PyTorch's allocator, for the whole model."""

    def step(self) -> None:
        """Do one update."""
        ...


def decay_groups(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Return the trained parameters with weight decay, and those without.

    Source: transformers, Trainer.create_optimizer and get_decay_parameter_names.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = [p for p in trained if not _NO_DECAY.search(p.name.lower())]
    rest = [p for p in trained if _NO_DECAY.search(p.name.lower())]
    return [group for group in (decayed, rest) if group]


def tensors_like(
    tape: Tape,
    parameters: Sequence[Parameter],
    category: Category,
    label: str,
    dtype: Dtype | None = None,
) -> list[Tensor]:
    """Allocate one tensor for each parameter, of its size, in order."""
    made = []
    for parameter in parameters:
        tape.enter_layer(parameter.layer)
        made.append(tape.new_tagged(parameter.numel, dtype or parameter.dtype, category, label))
    tape.enter_layer(None)
    return made


def release(tape: Tape, parameters: Sequence[Parameter], tensors: list[Tensor]) -> None:
    """Let go of a list that `tensors_like` made, last to first, as Python frees a list."""
    for parameter in reversed(parameters):
        tape.enter_layer(parameter.layer)
        tensors.pop()
    tape.enter_layer(None)


class _Base:
    """Groups, states, and what all optimizers here are made with."""

    def __init__(self, tape: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
        self.tape = tape
        self.recipe = recipe
        self.groups = decay_groups(parameters)
        self.states: dict[int, list[Tensor]] = {}
        self.managed_bytes = 0

    def state(self, numel: int, dtype: Dtype, label: str) -> Tensor:
        """Allocate one state in the current layer."""
        return self.tape.new_tagged(numel, dtype, Category.OPTIMIZER_STATES, label)


class AdamW(_Base):
    """torch.optim.AdamW: two states; with foreach the square roots of a group's second moments, for a moment.

    Source: torch/optim/adam.py: `_init_group` (the step counts are on the GPU only where fused), `_multi_tensor_adam`
    (`exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)`), `_fused_adam`.
    """

    fused = False

    def step(self) -> None:
        """Update each group; make its states first if it has none."""
        for group in self.groups:
            for parameter in group:
                if id(parameter) not in self.states:
                    self.tape.enter_layer(parameter.layer)
                    self.states[id(parameter)] = self._moments(parameter)
            self._update(group)
        self.tape.enter_layer(None)

    def _moments(self, parameter: Parameter) -> list[Tensor]:
        dtype = self.recipe.precision.state_dtype or parameter.dtype
        counts = [self.state(1, FLOAT32, "step")] if self.fused else []
        return [
            *counts,
            self.state(parameter.numel, dtype, "exp_avg"),
            self.state(parameter.numel, dtype, "exp_avg_sq"),
        ]

    def _update(self, group: Sequence[Parameter]) -> None:
        if self.fused:
            return
        dtype = self.recipe.precision.state_dtype
        roots = tensors_like(self.tape, group, Category.TEMPORARY, "exp_avg_sq_sqrt", dtype)
        release(self.tape, group, roots)


class FusedAdamW(AdamW):
    """torch.optim.AdamW(fused=True)."""

    fused = True


class MasterAdamW(_Base):
    """AdamW on an fp32 master copy of 16-bit weights, as DeepSpeed's ZeRO optimizers do it on one GPU.

    The copy is made with the optimizer; a step turns the gradients of a group to fp32 first.
    Source: deepspeed/runtime/zero/stage_1_and_2.py, `single_partition_of_fp32_groups` and `step`.
    """

    def __init__(self, tape: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
        super().__init__(tape, parameters, recipe)
        self.master_dtype = recipe.precision.master_dtype or FLOAT32
        self.masters = [
            tensors_like(tape, group, Category.OPTIMIZER_STATES, "master", self.master_dtype)
            for group in self.groups
        ]

    def step(self) -> None:
        """Update each group; make its states first if it has none."""
        tape = self.tape
        dtype = self.recipe.precision.state_dtype or self.master_dtype
        for group in self.groups:
            gradients = tensors_like(tape, group, Category.TEMPORARY, "gradient", self.master_dtype)
            for parameter in group:
                if id(parameter) not in self.states:
                    tape.enter_layer(parameter.layer)
                    self.states[id(parameter)] = [
                        self.state(parameter.numel, dtype, name)
                        for name in ("exp_avg", "exp_avg_sq")
                    ]
            release(tape, group, gradients)


class Sgd(_Base):
    """torch.optim.SGD(foreach=True) without weight decay: no state, or a copy of the first gradient with momentum.

    Source: torch/optim/sgd.py, `_multi_tensor_sgd`.
    """

    momentum = False

    def step(self) -> None:
        """Update each group in place."""
        if not self.momentum:
            return
        for group in self.groups:
            for parameter in group:
                if id(parameter) not in self.states:
                    self.tape.enter_layer(parameter.layer)
                    dtype = self.recipe.precision.state_dtype or parameter.dtype
                    buffer = self.state(parameter.numel, dtype, "momentum_buffer")
                    self.states[id(parameter)] = [buffer]
        self.tape.enter_layer(None)


class SgdMomentum(Sgd):
    """torch.optim.SGD(momentum=0.9)."""

    momentum = True


class Bitsandbytes(_Base):
    """bitsandbytes' blockwise optimizers: kernels without temporaries; `bits` 8 or 32, one or two states.

    In 8 bits: a byte per element, an fp32 scale per 256 elements, one table of 256 per state for all tensors; tensors
    of fewer than 4,096 elements keep fp32 states, and so do embeddings where Trainer registers them with
    `GlobalOptimManager`. Paged: states of 100,000 elements and more are managed memory.
    Source: bitsandbytes 0.50, optim/optimizer.py, `Optimizer2State.init_state`, `get_state_buffer`; transformers,
    `Trainer.create_optimizer`.
    """

    bits = 8
    num_states = 2
    paged = False
    embeddings_in_32_bits = True

    def __init__(self, tape: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
        super().__init__(tape, parameters, recipe)
        self.tables: list[Tensor] = []

    def step(self) -> None:
        """Update parameter by parameter; make its states first if it has none."""
        for group in self.groups:
            for parameter in group:
                if id(parameter) not in self.states:
                    self.states[id(parameter)] = self._make(parameter)
        self.tape.enter_layer(None)

    def _make(self, parameter: Parameter) -> list[Tensor]:
        kept = parameter.in_embedding and self.embeddings_in_32_bits
        in_8_bits = self.bits == 8 and parameter.numel >= 4096 and not kept
        if in_8_bits and not self.tables:
            self.tape.enter_layer(None)
            self.tables = [self.state(256, FLOAT32, "qmap") for _ in range(self.num_states)]
        self.tape.enter_layer(parameter.layer)
        dtype = UINT8 if in_8_bits else FLOAT32
        made = []
        for number in range(1, self.num_states + 1):
            if self.paged and parameter.numel >= 100_000:
                copies = self.tape.copies.get(parameter.layer, 1)
                self.managed_bytes += copies * parameter.numel * dtype.itemsize
            else:
                made.append(self.state(parameter.numel, dtype, f"state{number}"))
        if in_8_bits:
            for number in range(1, self.num_states + 1):
                made.append(self.state(ceil_div(parameter.numel, 256), FLOAT32, f"absmax{number}"))
        return made


class AdamW8bit(Bitsandbytes):
    """bitsandbytes.optim.AdamW8bit."""


class PagedAdamW8bit(Bitsandbytes):
    """bitsandbytes.optim.PagedAdamW8bit."""

    paged = True


class PagedAdamW(Bitsandbytes):
    """bitsandbytes.optim.PagedAdamW32bit."""

    bits = 32
    paged = True


class Lion(Bitsandbytes):
    """bitsandbytes.optim.Lion32bit."""

    bits = 32
    num_states = 1


class Lion8bit(Bitsandbytes):
    """bitsandbytes.optim.Lion8bit."""

    num_states = 1


class Adafactor(_Base):
    """transformers.Adafactor as Trainer makes it: factored second moments in fp32, no first moment, no weight decay.

    Parameter by parameter, with fp32 copies of gradient and weight where they are in 16 bits. The locals of the real
    loop live on into the next parameter's turn, until they are bound again.
    Source: transformers 5.24, optimization.py, `Adafactor.step`.
    """

    def step(self) -> None:
        """Update parameter by parameter."""
        tape = self.tape
        gradient = weight = update = None
        for group in self.groups:
            for parameter in group:
                tape.enter_layer(parameter.layer)
                numel, shape = parameter.numel, parameter.shape
                is_half = parameter.dtype is not FLOAT32
                gradient = None
                if is_half:
                    gradient = self._copy(numel)
                if id(parameter) not in self.states:
                    self.states[id(parameter)] = self._moments(numel, shape)
                weight = None
                if is_half:
                    weight = self._copy(numel)
                self.states[id(parameter)][-1] = self.state(1, FLOAT32, "RMS")
                squared = self._copy(numel)
                update = self._copy(numel)  # squared + eps
                del squared
                if len(shape) >= 2:
                    for count in (numel // shape[-1], numel // shape[-2]):
                        self._copy(count)  # the mean over columns, over rows: added in place
                    update = self._approximated(numel, shape)
                else:
                    update = self._copy(numel)
                self._copy(numel)  # -update, added in place
        tape.enter_layer(None)
        del gradient, weight, update

    def _copy(self, numel: int) -> Tensor:
        return self.tape.new_tagged(numel, FLOAT32, Category.TEMPORARY, "adafactor")

    def _moments(self, numel: int, shape: tuple[int, ...]) -> list[Tensor]:
        """Return the second moments, and a place for the root mean square of the weight."""
        sizes = {"exp_avg_sq": numel}
        if len(shape) >= 2:
            sizes = {
                "exp_avg_sq_row": numel // shape[-1],
                "exp_avg_sq_col": numel // shape[-2],
            }
        made = [self.state(size, FLOAT32, name) for name, size in sizes.items()]
        return [*made, made[0]]

    def _approximated(self, numel: int, shape: tuple[int, ...]) -> Tensor:
        """`_approx_sq_grad`."""
        mean = self._copy(numel // shape[-1] // shape[-2])
        row_factor = self._copy(numel // shape[-1])
        del mean
        column_factor = self._copy(numel // shape[-2])
        result = self._copy(numel)
        del row_factor, column_factor
        return result


class Muon(_Base):
    """torch.optim.Muon for the matrices of the layers, AdamW for everything else, as its documentation says.

    A momentum buffer of the gradient's type; a step orthogonalises one matrix after the other in bf16: with r its short
    side, two [r, r] products and two copies of the matrix at a time.
    Source: torch/optim/_muon.py, `_single_tensor_muon`, `_zeropower_via_newtonschulz`; 5 iterations.
    """

    def __init__(self, tape: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
        super().__init__(tape, parameters, recipe)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.matrices = [p for p in trained if len(p.shape) == 2 and p.layer is not None]
        chosen = {id(p) for p in self.matrices}
        self.rest = AdamW(tape, [p for p in trained if id(p) not in chosen], recipe)

    def step(self) -> None:
        """Update the matrices one by one, then the rest."""
        for parameter in self.matrices:
            if id(parameter) not in self.states:
                self.tape.enter_layer(parameter.layer)
                dtype = self.recipe.precision.state_dtype or parameter.dtype
                buffer = self.state(parameter.numel, dtype, "momentum_buffer")
                self.states[id(parameter)] = [buffer]
        for parameter in self.matrices:
            self.tape.enter_layer(parameter.layer)
            self._update(parameter)
        self.tape.enter_layer(None)
        self.rest.step()

    def _update(self, parameter: Parameter) -> None:
        tape, numel = self.tape, parameter.numel
        short = min(parameter.shape)

        def matrix(count: int, dtype: Dtype = BFLOAT16) -> Tensor:
            return tape.new_tagged(count, dtype, Category.TEMPORARY, "newton-schulz")

        update = matrix(numel, parameter.dtype)  # grad.lerp(buffer, momentum)
        orthogonal = update if parameter.dtype is BFLOAT16 else matrix(numel)
        norm = matrix(1)
        clamped = matrix(1)
        del norm, clamped
        gram = gram_update = None
        for _ in range(5):
            gram = matrix(short * short)
            gram_update = matrix(short * short)
            orthogonal = matrix(numel)
        del gram, gram_update, update, orthogonal


_CLASSES: dict[Optimizer, Callable[[Tape, Sequence[Parameter], Recipe], OptimizerModule]] = {
    Optimizer.ADAMW: AdamW,
    Optimizer.ADAMW_FUSED: FusedAdamW,
    Optimizer.ADAMW_8BIT: AdamW8bit,
    Optimizer.PAGED_ADAMW_8BIT: PagedAdamW8bit,
    Optimizer.PAGED_ADAMW: PagedAdamW,
    Optimizer.ADAFACTOR: Adafactor,
    Optimizer.LION: Lion,
    Optimizer.LION_8BIT: Lion8bit,
    Optimizer.SGD: Sgd,
    Optimizer.SGD_MOMENTUM: SgdMomentum,
    Optimizer.MUON: Muon,
}


def make_optimizer(
    tape: Tape,
    parameters: Sequence[Parameter],
    recipe: Recipe,
    *,
    embeddings_in_32_bits: bool = True,
) -> OptimizerModule:
    """Return the recipe's optimizer over the trained parameters; master copies are allocated here.

    embeddings_in_32_bits: a habit of Trainer, with 8-bit optimizers.

    Raises: Unsupported for a master copy under anything but AdamW.
    """
    if recipe.precision.master_dtype is None:
        made = _CLASSES[recipe.optimizer](tape, parameters, recipe)
        if isinstance(made, Bitsandbytes):
            made.embeddings_in_32_bits = embeddings_in_32_bits
        return made
    if recipe.optimizer not in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
        raise Unsupported(
            f"a master copy of the weights with `{recipe.optimizer}` is not modelled",
            hint="`--optimizer adamw`",
        )
    return MasterAdamW(tape, parameters, recipe)


def clip_gradients(tape: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
    """torch.nn.utils.clip_grad_norm_ with foreach: a norm per chunk and gradient, the norm of norms, a factor.

    Gradients of one type at a time, those in fp32 first.

    Source: torch/nn/utils/clip_grad.py, `_get_total_norm` and `_clip_grads_with_norm_`; `foreach_tensor_norm_cuda` in
    aten/src/ATen/native/cuda/ForeachReduceOp.cu.
    """
    if recipe.max_grad_norm is None:
        return
    tape.enter(Phase.CLIP)
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    tape.label = "norm"
    groups = [
        [p for p in trained if p.grad is not None and p.grad.dtype is dtype]
        for dtype in (FLOAT32, FLOAT16, BFLOAT16)
    ]
    norms = [_norms(tape, group) for group in groups if group]
    num_tensors = sum(tape.copies.get(parameter.layer, 1) for parameter in trained)
    stacked = tape.new(num_tensors, FLOAT32)
    total = tape.new(1, FLOAT32)
    del stacked, total
    for group in reversed([group for group in groups if group]):
        release(tape, group, norms.pop())


def _norms(tape: Tape, group: Sequence[Parameter]) -> list[Tensor]:
    """torch._foreach_norm of gradients of one type."""
    num_tensors = sum(tape.copies.get(parameter.layer, 1) for parameter in group)
    most_chunks = max(ceil_div(parameter.numel, _CHUNK_ELEMENTS) for parameter in group)
    of_chunks = tape.new(num_tensors * most_chunks, FLOAT32)
    norms = []
    for parameter in group:
        tape.enter_layer(parameter.layer)
        assert parameter.grad is not None
        norms.append(tape.new_tagged(1, parameter.grad.dtype, Category.TEMPORARY, "norm"))
    tape.enter_layer(None)
    del of_chunks
    return norms
