"""From the last hidden states to the loss, as each version of transformers writes it.

B micro-batch, S tokens, V vocabulary rows. The functions below are the scopes of the real code: what is a local
variable there is one here, and dies when that function returns. The programs and their versions: docs/stacks.md.
"""

from __future__ import annotations

from wazn.dtypes import FLOAT32, INT64
from wazn.facts.stacks import Habits, KvCache, LossProgram, Shift, Upcast
from wazn.model.spec import ModelSpec
from wazn.simulate.modules import Module
from wazn.simulate.ops import contiguous, mul_scalar, narrow, pointwise_of_result, to
from wazn.simulate.tape import Tape, Tensor
from wazn.timeline.events import Category, Phase

__all__ = ["causal_lm_loss", "cross_entropy", "held_outputs", "log_softmax", "nll_loss"]

Cache = list[tuple[int | None, Tensor, Tensor]]


def log_softmax(tape: Tape, x: Tensor) -> Tensor:
    """log_softmax over the vocabulary; saves its result, backward is one kernel."""
    out = tape.new(x.numel, x.dtype)
    saved = tape.save_result(out) if x.requires_grad else ()
    numel, dtype = x.numel, x.dtype

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, dtype),)

    return tape.record(out, (x,), saved, backward)


def nll_loss(tape: Tape, log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """nll_loss: a scalar and the total weight; saves its inputs; backward fills a tensor of zeros."""
    needs = log_probabilities.requires_grad
    saved = tape.save(log_probabilities, labels) if needs else ()
    numel, dtype = log_probabilities.numel, log_probabilities.dtype
    out, total_weight = tape.new(1, dtype), tape.new(1, dtype)
    if needs:
        saved += tape.save(total_weight)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, dtype),)

    return tape.record(out, (log_probabilities,), saved, backward)


def cross_entropy(tape: Tape, logits: Tensor, labels: Tensor) -> Tensor:
    """torch.nn.functional.cross_entropy; under autocast log_softmax and nll_loss run in fp32."""
    if tape.autocast_dtype is not None:
        logits = to(tape, logits, FLOAT32)
    return nll_loss(tape, log_softmax(tape, logits), labels)


def causal_lm_loss(
    tape: Tape,
    spec: ModelSpec,
    head: Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    habits: Habits,
    micro_batch: int,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the logits that the model's outputs hold, [B, S, V]."""
    tape.category = Category.LOGITS_AND_LOSS
    loss, logits = _forward(tape, spec, head, hidden, labels, habits, micro_batch)
    tape.category = Category.TEMPORARY
    return loss, logits


def held_outputs(tape: Tape, logits: Tensor, cache: Cache | None, habits: Habits) -> list[object]:
    """Return what the outputs hold beside the loss: under autocast accelerate copies their 16-bit tensors to fp32.

    It looks into tuples, not into a cache object. What was copied dies when everything has been.
    """
    if tape.autocast_dtype is None or not habits.outputs_to_fp32:
        return [logits, cache]
    tape.category = Category.LOGITS_AND_LOSS
    raised: list[object] = [to(tape, logits, FLOAT32)]
    tape.category = Category.ACTIVATIONS
    if cache is None or habits.kv_cache is not KvCache.TUPLE:
        raised.append(cache)
    else:
        tape.label = "keys and values in fp32"
        with tape.no_grad():  # nobody asks for their gradients
            for layer, key, value in cache:
                tape.enter_layer(layer)
                raised.append((to(tape, key, FLOAT32), to(tape, value, FLOAT32)))
        tape.enter_layer(None)
    tape.category = Category.TEMPORARY
    return raised


def _forward(
    tape: Tape,
    spec: ModelSpec,
    head: Module,
    hidden: Tensor,
    labels: Tensor,
    habits: Habits,
    micro_batch: int,
) -> tuple[Tensor, Tensor]:
    """The end of `*ForCausalLM.forward`."""
    program = habits.loss
    logits = head(tape, hidden)
    dtype = logits.dtype
    tape.label = "loss"
    if spec.logits_scaled and not habits.logits_scaled_in_fp32:
        logits = mul_scalar(tape, logits)
    if spec.logit_softcap is not None:
        logits = mul_scalar(tape, logits)
        logits = pointwise_of_result(tape, logits)
        logits = mul_scalar(tape, logits)
    if program.upcast is Upcast.FORWARD:
        logits = to(tape, logits, FLOAT32)
    if spec.logits_scaled and habits.logits_scaled_in_fp32:
        logits = mul_scalar(tape, logits)
    tape.enter(Phase.LOSS)
    if program.shift is Shift.COPY_LOGITS and program.copy_lives_in is Upcast.FORWARD:
        shifted, shifted_labels = _shift(tape, logits, labels, micro_batch)
        loss = cross_entropy(tape, shifted, shifted_labels)
    else:
        loss = _loss_function(tape, logits, labels, program, micro_batch)
    if program.recast_outputs:
        logits = to(tape, logits, dtype)
    return loss, logits


def _loss_function(
    tape: Tape, logits: Tensor, labels: Tensor, program: LossProgram, micro_batch: int
) -> Tensor:
    """`ForCausalLMLoss`."""
    if program.upcast is not Upcast.NONE:
        logits = to(tape, logits, FLOAT32)
    if program.shift is Shift.PAD_LABELS:
        # both live until the function returns; with one sample the shifted labels are a view
        padded = tape.new(labels.numel + micro_batch, INT64)
        shifted_labels = padded if micro_batch == 1 else tape.new(labels.numel, INT64)
        return cross_entropy(tape, logits, shifted_labels)
    shifted, shifted_labels = _shift(tape, logits, labels, micro_batch)
    return cross_entropy(tape, shifted, shifted_labels)


def _shift(tape: Tape, logits: Tensor, labels: Tensor, micro_batch: int) -> tuple[Tensor, Tensor]:
    """logits[..., :-1, :].contiguous() and labels[..., 1:].contiguous(); with one sample both are views."""
    vocabulary = logits.numel // labels.numel
    shifted = narrow(tape, logits, logits.numel - micro_batch * vocabulary)
    if micro_batch == 1:
        return shifted, labels
    return contiguous(tape, shifted), tape.new(labels.numel - micro_batch, INT64)
