"""From the last hidden states to the loss, as transformers writes it."""

from __future__ import annotations

from wazn.dtypes import FLOAT32, INT64
from wazn.simulate.modules import Module
from wazn.simulate.ops import to
from wazn.simulate.tape import Tape, Tensor
from wazn.timeline.events import Category, Phase

__all__ = ["causal_lm_loss", "log_softmax", "nll_loss"]


def log_softmax(tape: Tape, x: Tensor) -> Tensor:
    """log_softmax over the vocabulary; saves its result, backward is one kernel."""
    out = tape.new(x.numel, x.dtype)
    saved = tape.save_result(out)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(gradient.numel, gradient.dtype),)

    return tape.record(out, (x,), saved, backward)


def nll_loss(tape: Tape, log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """nll_loss: a scalar and the total weight; saves its inputs; backward fills a tensor of zeros."""
    saved = tape.save(log_probabilities, labels)
    numel, dtype = log_probabilities.numel, log_probabilities.dtype
    out, total_weight = tape.new(1, dtype), tape.new(1, dtype)
    saved += tape.save(total_weight)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, dtype),)

    return tape.record(out, (log_probabilities,), saved, backward)


def causal_lm_loss(
    tape: Tape, head: Module, hidden: Tensor, labels: Tensor, *, micro_batch: int
) -> tuple[Tensor, Tensor]:
    """Return loss and logits [B, S, V] (ForCausalLMLoss of transformers 4.49 and later)."""
    tape.category = Category.LOGITS_AND_LOSS
    logits = head(tape, hidden)
    tape.enter(Phase.LOSS)
    tape.label = "loss"
    upcast = to(tape, logits, FLOAT32)
    padded = tape.new(labels.numel + micro_batch, INT64)
    shifted = tape.new(labels.numel, INT64)
    del padded
    log_probabilities = log_softmax(tape, upcast)
    loss = nll_loss(tape, log_probabilities, shifted)
    tape.category = Category.TEMPORARY
    return loss, logits
