"""What a model makes once per forward pass and hands to every layer: attention masks, alibi, rotary tables.

Batches come with an attention mask of ones, as data collators add it. B micro-batch, S tokens, h heads.
Sources: masking_utils.py and the models' `forward` in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from wazn.dtypes import BOOL, FLOAT32, INT64, Dtype
from wazn.facts.stacks import WindowMask
from wazn.model.spec import AttentionSpec, LatentAttentionSpec, ModelSpec
from wazn.recipe import Attention
from wazn.simulate.attention import implementation
from wazn.simulate.context import Context
from wazn.simulate.latent_attention import latent_as_plain
from wazn.simulate.ops import to
from wazn.simulate.tape import Tape, Tensor

__all__ = ["make_masks", "make_rotary_tables"]


def make_masks(context: Context, spec: ModelSpec, dtype: Dtype) -> None:
    """Make the masks (and alibi) that the layers of `spec` ask for; dtype: of the embedded tokens."""
    tape = context.tape
    tape.label = "attention mask"
    attentions = {}
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, LatentAttentionSpec):
            attention = latent_as_plain(attention)
        attentions[attention.window] = attention
    first = next(iter(attentions.values()), None)
    with tape.no_grad():
        if first is not None and first.code == "gpt_neo":
            attentions = {None: first}
        if first is not None and first.alibi and first.code in ("bloom", "falcon"):
            context.alibi = _alibi(context, first, dtype)
        if first is not None and first.alibi and first.code == "mpt":
            assert spec.max_positions is not None
            context.alibi = _mpt_alibi(tape, first.num_heads, spec.max_positions)
        if _one_for_all(context):
            shared = _shared_mask(context, list(attentions.values()), dtype)
            if shared is not None:
                context.masks = dict.fromkeys(attentions, shared)
        else:
            for window, attention in attentions.items():
                mask = _mask(context, attention, window, dtype)
                if mask is not None:
                    context.masks[window] = mask
        if first is not None and first.alibi and first.code == "falcon":
            _merge_alibi(context, first, dtype)


def _one_for_all(context: Context) -> bool:
    """Whether one mask serves layers with a window and without one: before 4.53."""
    return context.habits.window_mask in (WindowMask.NONE, WindowMask.ADDITIVE)


def _shared_mask(
    context: Context, attentions: Sequence[AttentionSpec], dtype: Dtype
) -> Tensor | None:
    """The mask of models that write it themselves: additive where there is one; boolean in
    GPT-BigCode, MPT and GPT-Neo as now.
    """
    if not attentions:
        return None
    habits, first = context.habits, attentions[0]
    match implementation(habits, context.attention):
        case Attention.FLASH:
            return None
        case Attention.EAGER:
            return _mask(context, first, first.window, dtype)
        case _:
            if first.code == "falcon":
                return _mask(context, first, None, dtype)
            windows = [item.window for item in attentions if item.window is not None]
            is_needed = habits.sdpa_mask or (
                habits.window_mask is WindowMask.ADDITIVE
                and any(window <= context.seq_len for window in windows)
            )
            return _additive_mask(context, dtype) if is_needed else None


def _additive_mask(context: Context, dtype: Dtype) -> Tensor:
    """_prepare_4d_causal_attention_mask_with_cache_position: [B, 1, S, S], with a sum to find what
    is padded.
    """
    tape, square = context.tape, context.seq_len * context.seq_len
    causal = tape.new(square, dtype)
    mask = tape.new(square * context.micro_batch, dtype)
    del causal
    padding = tape.new(mask.numel, dtype)
    is_padding = tape.new(mask.numel, BOOL)
    del padding
    filled = tape.new(mask.numel, dtype)
    del filled, is_padding
    return mask


def _mask(
    context: Context, attention: AttentionSpec, window: int | None, dtype: Dtype
) -> Tensor | None:
    """create_causal_mask, create_sliding_window_causal_mask: [B, 1, S, S], or None where the kernel is causal itself.

    `scaled_dot_product_attention` gets a boolean one where the window is no longer than the sequence, and where the
    family always has one; eager attention always gets one to add; flash-attn gets none.
    """
    tape, habits = context.tape, context.habits
    padding = tape.new(context.num_tokens, BOOL)
    match implementation(habits, context.attention):
        case Attention.FLASH:
            return None
        case Attention.EAGER:
            mask = _boolean_mask(context, padding, sliding=window is not None)
            zero = tape.new(1, dtype)
            additive = tape.new(mask.numel, dtype)
            del zero
            if attention.code == "mpt":  # .to(torch.bool): both are alive until it returns
                del mask
                return tape.new(additive.numel, BOOL)
            return additive
        case _:
            if habits.window_mask is WindowMask.UNUSED and window is None:
                context.masks[0] = _boolean_mask(context, padding, sliding=True)
            if habits.sdpa_mask and attention.code != "falcon":
                return _additive_mask(context, dtype)
            is_needed = (
                habits.sdpa_mask
                or (attention.code == "falcon" and attention.alibi)
                or (window is not None and context.seq_len >= window)
            )
            return (
                _boolean_mask(context, padding, sliding=window is not None) if is_needed else None
            )


def _boolean_mask(context: Context, padding: Tensor, *, sliding: bool) -> Tensor:
    """sdpa_mask: the condition on places, written out for queries and keys, and the padding of each
    sample.
    """
    tape = context.tape
    places = tape.new(context.seq_len, INT64), tape.new(context.seq_len, INT64)
    square = context.seq_len * context.seq_len
    always = tape.new(1, BOOL)
    result = _sliding(tape, square) if sliding else tape.new(square, BOOL)
    result = tape.new(square, BOOL)  # & always
    rows = tape.new(padding.numel, BOOL)  # padding_mask[batch, keys]
    result = tape.new(square * context.micro_batch, BOOL)
    del rows, always, places
    return result


def _sliding(tape: Tape, square: int) -> Tensor:
    """and_masks(sliding window, causal)."""
    always = tape.new(1, BOOL)
    result = _and(tape, square)
    result = _and(tape, square)
    del always
    return result


def _and(tape: Tape, square: int) -> Tensor:
    """A comparison, and its conjunction with the result so far."""
    condition = tape.new(square, BOOL)
    result = tape.new(square, BOOL)
    del condition
    return result


def _alibi(context: Context, attention: AttentionSpec, dtype: Dtype) -> Tensor:
    """build_alibi_tensor of BLOOM (products in fp32) and Falcon (in bf16): [B * h, 1, S] in the
    type of the hidden states.
    """
    tape, heads = context.tape, attention.num_heads
    slopes = tape.new(heads, FLOAT32)
    positions = tape.new(context.num_tokens, INT64)
    product_dtype = FLOAT32 if attention.code == "bloom" else dtype
    alibi = tape.new(context.num_tokens * heads, product_dtype)
    del positions, slopes
    return to(tape, alibi, dtype)


def _mpt_alibi(tape: Tape, heads: int, max_positions: int) -> Tensor:
    """build_mpt_alibi_tensor: [h, 1, longest sequence] in fp32, of which attention takes the last S."""
    positions = tape.new(max_positions, INT64)
    alibi = tape.new(heads * max_positions, FLOAT32)
    del positions
    return alibi


def _merge_alibi(context: Context, attention: AttentionSpec, dtype: Dtype) -> None:
    """masked_fill of alibi by the mask: a mask [B, h, S, S] in the type of the hidden states
    (FalconModel).
    """
    tape, mask = context.tape, context.masks[None]
    if mask.dtype is BOOL:
        zero = tape.new(1, dtype)
        context.masks[None] = mask = tape.new(mask.numel, dtype)
        del zero
    scaled = tape.new(context.num_tokens * attention.num_heads, dtype)
    masked = tape.new(mask.numel, BOOL)
    context.masks[None] = tape.new(mask.numel * attention.num_heads, dtype)
    del masked, scaled


_FP32_TABLES = frozenset({"olmo", "ernie4_5"})
_STORED_IN_VAIN = frozenset({"llama", "olmo"})  # kept for others' code, not read


def make_rotary_tables(context: Context, spec: ModelSpec, dtype: Dtype) -> None:
    """Make cos and sin [1, S, rotary_dim] in the type of the hidden states, a second pair where
    sliding layers have their own.
    """
    if not spec.rotary_dim:
        return
    code = _rotary_code(spec)
    tape = context.tape
    tape.label = "rotary tables"
    with tape.no_grad():
        if code == "gptj":
            context.sin, context.cos = _gptj_tables(context, spec.rotary_dim, dtype)
            return
        if code == "deepseek_v2":
            context.cos = context.sin = _complex_tables(context, spec.rotary_dim)
            return
        table_dtype = FLOAT32 if code in _FP32_TABLES else dtype
        if context.habits.rotary_per_layer:
            context.layer_tables = partial(
                _layer_tables, rotary_dim=spec.rotary_dim, dtype=table_dtype, code=code
            )
            return
        windows = table_windows(spec)
        if None in windows:
            context.cos, context.sin = _tables(context, spec.rotary_dim, table_dtype, code)
        if len(windows - {None}):
            context.sliding_cos, context.sliding_sin = _tables(
                context, spec.rotary_dim, table_dtype, code
            )


def table_windows(spec: ModelSpec) -> frozenset[bool | None]:
    """For which layers a pass makes tables: None for all or the full ones, True for sliding ones
    with tables of their own.
    """
    if spec.rotary_tables == 1:
        return frozenset({None})
    attentions = [layer.attention for layer in spec.layers]
    return frozenset(
        True if isinstance(attention, AttentionSpec) and attention.window else None
        for attention in attentions
    )


def _layer_tables(
    context: Context, *, rotary_dim: int, dtype: Dtype, code: str
) -> tuple[Tensor, Tensor]:
    """The tables of one layer, in the type of its values: rows of what it stores, or made anew."""
    tape, habits = context.tape, context.habits
    if code not in _FP32_TABLES and tape.autocast_dtype is not None:
        dtype = tape.autocast_dtype
    with tape.no_grad():
        if habits.rotary_stored and habits.family not in _STORED_IN_VAIN:
            numel = context.seq_len * rotary_dim
            dtype = FLOAT32 if habits.family == "gpt_neox" else dtype
            return tape.new(numel, dtype), tape.new(numel, dtype)
        return _tables(context, rotary_dim, dtype, code)


def _rotary_code(spec: ModelSpec) -> str:
    return spec.layers[0].attention.rotary_code


def _tables(context: Context, rotary_dim: int, dtype: Dtype, code: str) -> tuple[Tensor, Tensor]:
    """LlamaRotaryEmbedding.forward: positions times frequencies, doubled (not in gpt-oss), cos and
    sin times a scale, cast.
    """
    tape, half = context.tape, context.seq_len * rotary_dim // 2
    positions = tape.new(context.seq_len, FLOAT32)
    freqs = tape.new(half, FLOAT32)
    del positions
    emb = freqs if code == "gpt_oss" else tape.new(2 * half, FLOAT32)
    cos = _scaled(tape, emb)
    sin = _scaled(tape, emb)
    return to(tape, cos, dtype), to(tape, sin, dtype)


def _scaled(tape: Tape, emb: Tensor) -> Tensor:
    raw = tape.new(emb.numel, FLOAT32)
    result = tape.new(emb.numel, FLOAT32)
    del raw
    return result


def _gptj_tables(context: Context, rotary_dim: int, dtype: Dtype) -> tuple[Tensor, Tensor]:
    """Rows of a table of sines and cosines, looked up and cast; two views of it."""
    tape = context.tape
    rows = tape.new(context.seq_len * rotary_dim, dtype)
    half = rows.numel // 2
    return rows.view(half), rows.view(half)


def _complex_tables(context: Context, rotary_dim: int) -> Tensor:
    """DeepseekV2RotaryEmbedding: [1, S, rotary_dim / 2] complex numbers, as many bytes as fp32 [1,
    S, rotary_dim].
    """
    tape, half = context.tape, context.seq_len * rotary_dim // 2
    positions = tape.new(context.seq_len, FLOAT32)
    freqs = tape.new(half, FLOAT32)
    del positions
    ones = tape.new(half, FLOAT32)
    freqs_cis = tape.new(2 * half, FLOAT32)
    del ones
    freqs_cis = tape.new(2 * half, FLOAT32)
    del freqs
    return freqs_cis
