"""The ops of PyTorch that models are made of, as contracts: what an op saves, what it allocates,
what its backward allocates.

Each function stands for one ATen op (named in its docstring where the name differs) and takes the
tape first. Views cost nothing and are not written. `numel` of a result is the caller's to say where
it does not follow from the inputs; broadcasting follows from the larger operand. A gradient that
comes out larger than its input is summed, one of another type is cast, by the engine.

Every contract is compared with the real op on fake tensors, allocation by allocation, in
tests/agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from wazn.dtypes import BOOL, FLOAT16, FLOAT32, INT64, Dtype
from wazn.simulate.tape import Parameter, Tape, Tensor

__all__ = [
    "add",
    "add_in_place",
    "add_scalar",
    "autocast",
    "baddbmm",
    "cat",
    "clamp",
    "clamp_in_place",
    "contiguous",
    "copy_slice",
    "div",
    "div_scalar_in_place",
    "dropout",
    "embedding",
    "expand",
    "expand_copy",
    "layer_norm",
    "linear",
    "masked_fill",
    "matmul",
    "max_of_rows",
    "mean",
    "mul",
    "mul_scalar",
    "narrow",
    "neg",
    "pad",
    "pointwise",
    "pointwise_of_result",
    "power",
    "promote",
    "rsqrt",
    "softmax",
    "split",
    "sub",
    "take",
    "to",
    "view",
    "where",
]

_MOST_TOKENS_WITHOUT_SORTING = 3072
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD of EmbeddingBackwardKernel.cu


def promote(a: Dtype, b: Dtype) -> Dtype:
    """Return the type of an elementwise result of two floating-point tensors."""
    return a if a.itemsize >= b.itemsize else b


def to(tape: Tape, x: Tensor, dtype: Dtype) -> Tensor:
    """Cast; the tensor itself when it has the type already."""
    if x.dtype is dtype:
        return x
    source = x.dtype

    def backward(gradient: Tensor) -> tuple[Tensor | None]:
        return (tape.new(gradient.numel, source),)

    return tape.record(tape.new(x.numel, dtype), (x,), (), backward)


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a + b; saves nothing, both gradients are the incoming one."""
    out = tape.new(max(a.numel, b.numel), promote(a.dtype, b.dtype))
    return tape.record(out, (a, b), (), _same_twice)


def _same_twice(gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, gradient


def _same(gradient: Tensor) -> tuple[Tensor]:
    return (gradient,)


def add_scalar(tape: Tape, x: Tensor) -> Tensor:
    """x + number."""
    return tape.record(tape.new(x.numel, x.dtype), (x,), (), _same)


def neg(tape: Tape, x: Tensor) -> Tensor:
    """-x."""
    return tape.record(tape.new(x.numel, x.dtype), (x,), (), partial(_like_gradient, tape))


def _like_gradient(tape: Tape, gradient: Tensor) -> tuple[Tensor]:
    return (tape.new(gradient.numel, gradient.dtype),)


def narrow(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """A view of a part of x (slice, narrow, select); its backward makes a whole gradient of zeros
    and copies into it.
    """
    full = x.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(full, gradient.dtype),)

    return tape.record(x.view(numel), (x,), (), backward)


def split(tape: Tape, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of all parts of x (split, chunk, unbind); backward puts the gradients together in one new tensor."""
    parts = tuple([x.view(numel) for numel in sizes])
    full, dtype = x.numel, x.dtype

    def backward(*gradients: Tensor | None) -> tuple[Tensor]:
        # split_backward and unbind_backward put zeros where a gradient is missing
        zeros = [
            tape.new(numel, dtype)
            for numel, gradient in zip(sizes, gradients, strict=True)
            if gradient is None
        ]
        result = tape.new(full, dtype)
        del zeros
        return (result,)

    tape.record_many(parts, (x,), (), backward)
    return parts


def cat(tape: Tape, parts: Sequence[Tensor]) -> Tensor:
    """Concatenate, in the widest type; backward gives each part a view of the gradient."""
    sizes = [part.numel for part in parts]
    dtype = parts[0].dtype
    for part in parts:
        dtype = promote(dtype, part.dtype)

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple([gradient.view(numel) for numel in sizes])

    return tape.record(tape.new(sum(sizes), dtype), parts, (), backward)


def contiguous(tape: Tape, x: Tensor) -> Tensor:
    """Copy a view that is not contiguous (contiguous, reshape, clone); backward passes the gradient on."""
    return tape.record(tape.new(x.numel, x.dtype), (x,), (), _same)


def expand_copy(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """expand and copy (repeat_kv); the gradient, larger, is summed by the node of expand."""
    small = x.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(small, gradient.dtype),)

    return tape.record(tape.new(numel, x.dtype), (x,), (), backward)


def take(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """Index with a list of one number (`x[..., [0], :]`): a copy; the index is made and saved;
    backward fills zeros.
    """
    index = tape.new(1, INT64)
    saved = tape.save(index if x.requires_grad else None)
    full = x.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(full, gradient.dtype),)

    return tape.record(tape.new(numel, x.dtype), (x,), saved, backward)


def pad(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """torch.nn.functional.pad with a constant: a copy, and another for the gradient."""
    small = x.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(small, gradient.dtype),)

    return tape.record(tape.new(numel, x.dtype), (x,), (), backward)


def sub(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a - b; the gradient of b is negated."""
    need_b = b.requires_grad

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        return gradient, tape.new(gradient.numel, gradient.dtype) if need_b else None

    out = tape.new(max(a.numel, b.numel), promote(a.dtype, b.dtype))
    return tape.record(out, (a, b), (), backward)


def add_in_place(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a += b: the result is in a's memory."""
    return tape.record(Tensor(a.storage, a.numel, a.dtype), (a, b), (), _same_twice)


def div_scalar_in_place(tape: Tape, x: Tensor) -> Tensor:
    """x /= number, x *= number: the result is in x's memory; a Python number is no saved tensor."""
    out = Tensor(x.storage, x.numel, x.dtype)
    return tape.record(out, (x,), (), partial(_like_gradient, tape))


def clamp(tape: Tape, x: Tensor) -> Tensor:
    """x.clamp(min, max)."""
    saved = tape.save(x if x.requires_grad else None)
    return tape.record(
        tape.new(x.numel, x.dtype), (x,), saved, partial(_where_inside, tape, x.dtype)
    )


def clamp_in_place(tape: Tape, x: Tensor) -> Tensor:
    """x.clamp_(min, max): backward needs what was there before, so a copy of it is saved."""
    saved = tape.save(contiguous(tape, x.detach()) if x.requires_grad else None)
    out = Tensor(x.storage, x.numel, x.dtype)
    return tape.record(out, (x,), saved, partial(_where_inside, tape, x.dtype))


def _where_inside(tape: Tape, dtype: Dtype, gradient: Tensor) -> tuple[Tensor]:
    # where(self >= min && self <= max, grad, 0), clamp_backward of FunctionsManual.cpp
    zero = tape.new(1, gradient.dtype)
    above, below = tape.new(gradient.numel, BOOL), tape.new(gradient.numel, BOOL)
    result = tape.new(gradient.numel, gradient.dtype)
    del below, above, zero
    return (result,)


def expand(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """A broadcast view; the gradient, larger, is summed."""
    small = x.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(small, gradient.dtype),)

    return tape.record(x.view(numel), (x,), (), backward)


def max_of_rows(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """x.max(-1, keepdim=True).values; saves the places; backward fills zeros with the gradient."""
    full = x.numel
    out, places = tape.new(rows, x.dtype), tape.new(rows, INT64)
    saved = tape.save(places if x.requires_grad else None)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(full, gradient.dtype),)

    return tape.record(out, (x,), saved, backward)


def copy_slice(tape: Tape, base: Tensor, source: Tensor) -> Tensor:
    """base[..., i:j].copy_(source), in place; backward copies the whole gradient, then the slice.

    Source: torch/csrc/autograd/functions/tensor.cpp, `CopySlices` and `CopyBackwards`.
    """
    has_history = base.requires_grad
    whole, part = base.numel, source.numel

    def backward(gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        for_base = tape.new(whole, gradient.dtype)
        for_source = tape.new(part, gradient.dtype)
        if not has_history:
            return None, for_source
        zeros = tape.new(part, gradient.dtype)
        del zeros
        return for_base, for_source

    out = Tensor(base.storage, base.numel, base.dtype)
    return tape.record(out, (base, source), (), backward)


def mul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a * b; saves each operand that the other's gradient needs."""
    saved = tape.save(a if b.requires_grad else None, b if a.requires_grad else None)
    numel = max(a.numel, b.numel)
    need_a, need_b = a.requires_grad, b.requires_grad
    dtype_a, dtype_b = a.dtype, b.dtype

    def backward(gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        for_b = tape.new(numel, promote(gradient.dtype, dtype_a)) if need_b else None
        for_a = tape.new(numel, promote(gradient.dtype, dtype_b)) if need_a else None
        return for_a, for_b

    return tape.record(tape.new(numel, promote(dtype_a, dtype_b)), (a, b), saved, backward)


def div(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a / b; the gradient of b needs both."""
    need_a, need_b = a.requires_grad, b.requires_grad
    saved = tape.save(a if need_b else None, b if need_a or need_b else None)
    numel = max(a.numel, b.numel)
    dtype = promote(a.dtype, b.dtype)

    def backward(gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        for_a = for_b = None
        if need_b:
            # -grad * ((self / other) / other), div_tensor_other_backward of FunctionsManual.cpp
            ratio = tape.new(numel, dtype)
            over_b = tape.new(numel, dtype)
            negative = tape.new(numel, gradient.dtype)
            for_b = tape.new(numel, gradient.dtype)
            del negative, over_b, ratio
        if need_a:
            for_a = tape.new(numel, gradient.dtype)
        return for_a, for_b

    return tape.record(tape.new(numel, dtype), (a, b), saved, backward)


def mul_scalar(tape: Tape, x: Tensor) -> Tensor:
    """x * number, x / number: a Python number is no saved tensor, so checkpointing does not run again for it."""
    return tape.record(tape.new(x.numel, x.dtype), (x,), (), partial(_like_gradient, tape))


def pointwise(tape: Tape, x: Tensor) -> Tensor:
    """An elementwise function that saves its input and whose backward is one kernel: silu, gelu."""
    saved = tape.save(x if x.requires_grad else None)

    return tape.record(tape.new(x.numel, x.dtype), (x,), saved, partial(_like_gradient, tape))


def pointwise_of_result(tape: Tape, x: Tensor) -> Tensor:
    """An elementwise function that saves its result and whose backward is one kernel: relu, tanh, sigmoid."""
    out = tape.new(x.numel, x.dtype)
    saved = tape.save_result(out) if x.requires_grad else ()
    return tape.record(out, (x,), saved, partial(_like_gradient, tape))


def power(tape: Tape, x: Tensor) -> Tensor:
    """x.pow(number), square(x); under autocast in fp32."""
    cast = x if tape.autocast_dtype is None else to(tape, x, FLOAT32)
    saved = tape.save(cast if x.requires_grad else None)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        # grad * (exponent * self.pow(exponent - 1)), pow_backward of FunctionsManual.cpp
        powered = tape.new(gradient.numel, gradient.dtype)
        scaled = tape.new(gradient.numel, gradient.dtype)
        result = tape.new(gradient.numel, gradient.dtype)
        del scaled, powered
        return (result,)

    return tape.record(tape.new(cast.numel, cast.dtype), (cast,), saved, backward)


def mean(tape: Tape, x: Tensor, size: int) -> Tensor:
    """x.mean over an axis of `size`, kept."""
    numel = x.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, gradient.dtype),)  # grad.expand(shape) / size

    return tape.record(tape.new(numel // size, x.dtype), (x,), (), backward)


def rsqrt(tape: Tape, x: Tensor) -> Tensor:
    """x.rsqrt(); saves its result; under autocast in fp32."""
    cast = x if tape.autocast_dtype is None else to(tape, x, FLOAT32)
    out = tape.new(cast.numel, cast.dtype)
    saved = tape.save_result(out) if x.requires_grad else ()

    def backward(gradient: Tensor) -> tuple[Tensor]:
        # -0.5 * grad * result.pow(3)
        cubed = tape.new(gradient.numel, gradient.dtype)
        scaled = tape.new(gradient.numel, gradient.dtype)
        result = tape.new(gradient.numel, gradient.dtype)
        del cubed, scaled
        return (result,)

    return tape.record(out, (cast,), saved, backward)


def linear(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out_features: int,
    is_matrix: bool = False,
    conv1d: bool = False,
) -> Tensor:
    """torch.nn.functional.linear: mm, or addmm with a bias; under autocast its arguments are cast
    first.

    x: [..., in_features]; weight: [out_features, in_features]; the result: [..., out_features]. The
    gradient of the weight is a transposed view, and that of x a reshaped one unless x `is_matrix`.
    conv1d: transformers' Conv1D, an addmm itself.
    """
    # the caller's argument lives until the call returns, as does its cast
    cast_x, cast_weight = x, weight
    if tape.autocast_dtype is not None:
        # the last argument is cast first: the compiler evaluates linear(x, weight, bias) and
        # addmm(bias, x, weight) from the right
        if bias is not None and not conv1d:
            bias = autocast(tape, bias)
        cast_weight = autocast(tape, weight)
        cast_x = autocast(tape, x)
        if bias is not None and conv1d:
            bias = autocast(tape, bias)
    numel_x, numel_weight = x.numel, weight.numel
    need_x, need_weight, has_bias = x.requires_grad, weight.requires_grad, bias is not None
    is_matrix = is_matrix or tape.rows_are_flat
    saved = tape.save(cast_x if need_weight else None, cast_weight if need_x else None)
    out = tape.product(numel_x * out_features // (numel_weight // out_features), cast_x.dtype)

    def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
        for_x = for_weight = None
        # MmBackward computes mat2 first, AddmmBackward mat1 first: generated in alphabetical order
        if has_bias and need_x:
            for_x = tape.new(numel_x, gradient.dtype)
        if need_weight:
            for_weight = tape.new(numel_weight, gradient.dtype).view_with_base()
        if not has_bias and need_x:
            for_x = tape.new(numel_x, gradient.dtype)
        if for_x is not None and not is_matrix:
            for_x = for_x.view_with_base()
        return (for_x, for_weight, gradient) if has_bias else (for_x, for_weight)

    inputs = (cast_x, cast_weight) if bias is None else (cast_x, cast_weight, bias)
    return tape.record(out, inputs, saved, backward)


def layer_norm(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int
) -> Tensor:
    """native_layer_norm over the last axis of `size`; keeps its input and an fp32 mean and scale
    per row; in fp32 under autocast.
    """
    argument = x  # lives until the call returns
    if tape.autocast_dtype is not None:
        x = to(tape, x, FLOAT32)
        weight = None if weight is None else to(tape, weight, FLOAT32)
        bias = None if bias is None else to(tape, bias, FLOAT32)
    parameters = [item for item in (weight, bias) if item is not None]
    needs = [x.requires_grad, *[item.requires_grad for item in parameters]]
    numels = [x.numel, *[item.numel for item in parameters]]
    saved = tape.save(x, weight, bias) if any(needs) else ()
    out = tape.new(x.numel, x.dtype)
    mean_of_rows, scale_of_rows = (
        tape.new(x.numel // size, FLOAT32),
        tape.new(x.numel // size, FLOAT32),
    )
    if any(needs):
        saved += tape.save(mean_of_rows, scale_of_rows)

    del argument

    def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            [
                tape.new(numel, gradient.dtype) if need else None
                for numel, need in zip(numels, needs, strict=True)
            ]
        )

    return tape.record(out, (x, *parameters), saved, backward)


def autocast(tape: Tape, x: Tensor) -> Tensor:
    """Cast an argument of an op on autocast's lower-precision list; trainable fp32 leaves once per region.

    Source: aten/src/ATen/autocast_mode.cpp, `cached_cast`.
    """
    dtype = tape.autocast_dtype
    if dtype is None or x.dtype is dtype:
        return x
    if isinstance(x, Parameter) and x.requires_grad and x.dtype is FLOAT32:
        cast = tape.cached_cast(x)
        if cast is None:
            cast = to(tape, x, dtype)
            tape.remember_cast(x, cast)
        return cast
    return to(tape, x, dtype)


def matmul(tape: Tape, a: Tensor, b: Tensor, *, numel: int) -> Tensor:
    """bmm of two activations, giving `numel` elements; saves what each gradient needs."""
    if tape.autocast_dtype is not None:
        b = autocast(tape, b)
        a = autocast(tape, a)
    saved = tape.save(a if b.requires_grad else None, b if a.requires_grad else None)
    need_a, need_b = a.requires_grad, b.requires_grad
    numel_a, numel_b = a.numel, b.numel

    def backward(gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        for_b = tape.new(numel_b, gradient.dtype) if need_b else None
        for_a = tape.new(numel_a, gradient.dtype) if need_a else None
        return for_a, for_b

    return tape.record(tape.new(numel, a.dtype), (a, b), saved, backward)


def softmax(tape: Tape, x: Tensor, dtype: Dtype) -> Tensor:
    """softmax(x, dtype=...): a cast (fused with the kernel only from float16 to float32), then the
    kernel, which saves its result.

    dtype: the argument, or the type of x where the code gives none.

    Source: aten/src/ATen/native/SoftMax.cpp, `softmax`.
    """
    fused = x.dtype is FLOAT16 and dtype is FLOAT32
    cast = x if fused else to(tape, x, dtype)  # the argument lives until the call returns
    out = tape.new(x.numel, dtype)
    saved = tape.save_result(out) if x.requires_grad else ()
    source = cast.dtype

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(gradient.numel, source),)

    return tape.record(out, (cast,), saved, backward)


def dropout(tape: Tape, x: Tensor, probability: float) -> Tensor:
    """Dropout in training on CUDA: native_dropout makes the result and a mask of one byte per element.

    With probability 0 the tensor itself comes back (`dropout` in aten/src/ATen/native/Dropout.cpp).
    """
    if probability == 0:
        return x
    out = tape.new(x.numel, x.dtype)
    mask = tape.new(x.numel, BOOL)
    saved = tape.save(mask if x.requires_grad else None)
    return tape.record(out, (x,), saved, partial(_like_gradient, tape))


def embedding(tape: Tape, weight: Tensor, indices: Tensor, *, size: int) -> Tensor:
    """Look rows up; saves the indices; backward is a dense gradient of the table's size.

    Above 3,072 tokens the gradients of equal tokens are summed in fp32, by segments of the sorted tokens, in buffers
    that have a size for the worst case. Source: `embedding_dense_backward_cuda` in
    aten/src/ATen/native/cuda/Embedding.cu and `embedding_backward_cuda_kernel` in EmbeddingBackwardKernel.cu.
    """
    saved = tape.save(indices if weight.requires_grad else None)
    numel_weight, num_tokens = weight.numel, indices.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        if num_tokens <= _MOST_TOKENS_WITHOUT_SORTING:
            return (tape.new(numel_weight, gradient.dtype),)
        order = [tape.new(num_tokens, INT64) for _ in ("sorted tokens", "original positions")]
        result = tape.new(numel_weight, gradient.dtype)
        num_segments = min(num_tokens, numel_weight // size)
        num_partials = num_tokens // _ROWS_PER_THREAD + num_segments
        counts = (num_tokens, 1, num_segments, num_segments, 1, num_partials)
        segments = [tape.new(count, INT64) for count in counts]
        partial_sums = tape.new(num_partials * size, FLOAT32)
        del partial_sums, segments, order
        return (result,)

    out = tape.new(indices.numel * size, weight.dtype)
    return tape.record(out, (weight,), saved, backward)


def baddbmm(tape: Tape, a: Tensor, b: Tensor, *, numel: int) -> Tensor:
    """c.baddbmm(a, b, alpha=number) with a c that needs no gradient; each gradient is a product, then scaled."""
    need_a, need_b = a.requires_grad, b.requires_grad
    saved = tape.save(a if need_b else None, b if need_a else None)
    numel_a, numel_b = a.numel, b.numel

    def backward(gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gradients: list[Tensor | None] = [None, None]
        for number, (needed, size) in enumerate(((need_a, numel_a), (need_b, numel_b))):
            if needed:
                product = tape.new(size, gradient.dtype)
                gradients[number] = tape.new(size, gradient.dtype)
                del product
        return gradients[0], gradients[1]

    return tape.record(tape.new(numel, a.dtype), (a, b), saved, backward)


def masked_fill(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """x.masked_fill(mask, number); saves the mask."""
    saved = tape.save(mask if x.requires_grad else None)
    return tape.record(tape.new(x.numel, x.dtype), (x,), saved, partial(_like_gradient, tape))


def where(tape: Tape, condition: Tensor, x: Tensor) -> Tensor:
    """where(condition, x, number); saves the condition; backward makes a zero and selects."""
    saved = tape.save(condition if x.requires_grad else None)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        zero = tape.new(1, gradient.dtype)
        result = tape.new(gradient.numel, gradient.dtype)
        del zero
        return (result,)

    return tape.record(tape.new(x.numel, x.dtype), (x,), saved, backward)


def view(tape: Tape, x: Tensor) -> Tensor:
    """x.view(...) where its gradient meets another: the engine adds to no view in place
    (`can_accumulate_inplace`).
    """
    return tape.record(x.view(x.numel), (x,), (), _view_of)


def _view_of(gradient: Tensor) -> tuple[Tensor]:
    return (gradient.view_with_base(),)
