"""Activation functions, as the operations of their code in transformers (`activations.py`, 5.24).

A function that is one kernel saves one tensor; one that is written out in Python saves what its
parts save. Calls are nested where the code nests them: a temporary dies when the call that it was
handed to returns.
"""

from __future__ import annotations

from collections.abc import Callable

from wazn.model.spec import Activation
from wazn.simulate.ops import (
    add,
    add_scalar,
    mul,
    mul_scalar,
    pointwise,
    pointwise_of_result,
    power,
)
from wazn.simulate.tape import Tape, Tensor

__all__ = ["ACTIVATIONS", "ActivationFunction"]

ActivationFunction = Callable[[Tape, Tensor], Tensor]


def gelu_new(tape: Tape, x: Tensor) -> Tensor:
    """0.5 * x * (1.0 + tanh(c * (x + 0.044715 * pow(x, 3.0)))) (NewGELUActivation)."""
    return mul(
        tape,
        mul_scalar(tape, x),
        add_scalar(
            tape,
            pointwise_of_result(
                tape, mul_scalar(tape, add(tape, x, mul_scalar(tape, power(tape, x))))
            ),
        ),
    )


def gelu_fast(tape: Tape, x: Tensor) -> Tensor:
    """0.5 * x * (1.0 + tanh(x * c * (1.0 + 0.044715 * x * x))) (FastGELUActivation)."""
    return mul(
        tape,
        mul_scalar(tape, x),
        add_scalar(
            tape,
            pointwise_of_result(
                tape,
                mul(
                    tape,
                    mul_scalar(tape, x),
                    add_scalar(tape, mul(tape, mul_scalar(tape, x), x)),
                ),
            ),
        ),
    )


def quick_gelu(tape: Tape, x: Tensor) -> Tensor:
    """x * sigmoid(1.702 * x) (QuickGELUActivation)."""
    return mul(tape, x, pointwise_of_result(tape, mul_scalar(tape, x)))


def relu2(tape: Tape, x: Tensor) -> Tensor:
    """square(relu(x)) (ReLUSquaredActivation)."""
    relu_applied = pointwise_of_result(tape, x)
    return power(tape, relu_applied)


def gelu_bloom(tape: Tape, x: Tensor) -> Tensor:
    """The forward pass of `gelu_fast` without a graph; keeps x and computes the derivative by hand
    (GeLUFunction of BLOOM).
    """
    with tape.no_grad():
        out = gelu_fast(tape, x)
    saved = tape.save(x if x.requires_grad else None)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        with tape.no_grad():
            return (_gelu_bloom_back(tape, gradient),)

    return tape.record(out, (x,), saved, backward)


def _gelu_bloom_back(tape: Tape, g: Tensor) -> Tensor:
    """g: the gradient, of the size and type of x. `bloom_gelu_back`, with x standing in for each of its operands."""
    x = Tensor(None, g.numel, g.dtype)
    tanh_out = pointwise_of_result(
        tape,
        mul(tape, mul_scalar(tape, x), add_scalar(tape, mul(tape, mul_scalar(tape, x), x))),
    )
    ff = add(
        tape,
        mul(
            tape,
            mul_scalar(tape, x),
            mul(
                tape,
                add_scalar(tape, mul(tape, tanh_out, tanh_out)),
                add_scalar(tape, mul(tape, mul_scalar(tape, x), x)),
            ),
        ),
        mul_scalar(tape, add_scalar(tape, tanh_out)),
    )
    return mul(tape, ff, g)


ACTIVATIONS: dict[Activation, ActivationFunction] = {
    Activation.SILU: pointwise,
    Activation.GELU: pointwise,
    Activation.GELU_TANH: pointwise,
    Activation.GELU_NEW: gelu_new,
    Activation.GELU_FAST: gelu_fast,
    Activation.GELU_BLOOM: gelu_bloom,
    Activation.RELU: pointwise_of_result,
    Activation.RELU2: relu2,
    Activation.QUICK_GELU: quick_gelu,
}
