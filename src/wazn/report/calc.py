"""The words of `wazn calc`: each answer as rows of a formula with its numbers put in.

The textbooks speak GB (10^9 bytes), and so do these rows; the peak is also given in GiB, in which
PyTorch and the driver speak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from wazn.calc import (
    Accumulation,
    Adapter,
    Inference,
    KvCache,
    Lora,
    OptimizerRule,
    Qlora,
    Split,
    Training,
)
from wazn.units import GIB, format_ratio, format_size

__all__ = ["Answer", "Row", "answer", "as_json", "as_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line: what it is, the formula with its numbers, the value in words."""

    code: str
    label: str
    formula: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Rows that belong together, under a title or under none."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What `wazn calc NAME` says: the exact numbers for programs, the rows for people."""

    calc: str
    inputs: dict[str, Any]
    result: dict[str, Any]
    sections: tuple[Section, ...]
    notes: tuple[tuple[str, str], ...]


_TERMS = {
    "weights": "weights",
    "gradients": "gradients",
    "master-weights": "fp32 master copy",
    "momentum": "momentum",
    "variance": "variance",
    "block-constants": "constants of the 8-bit blocks",
}

_SPLITS = {
    "mixed-precision": "mixed precision, the ZeRO accounting",
    "with-master-copy": "16-bit weights and gradients, with an fp32 master copy",
    "without-master-copy": "16-bit weights and gradients, without a master copy",
    "all-bf16": "weights, gradients and states all in bf16",
    "all-fp32": "weights, gradients and states all in fp32",
}

_NOTES = {
    "activations-not-given": "Activations are not in this figure; `--activations` adds them.",
    "rule-of-thumb": (
        "A rule of thumb is a habit, the counted split is a sum: use the count where they differ."
    ),
    "block-constants": (
        "bitsandbytes keeps one 4-byte scale per block of 256 elements and state, and 32-bit states"
        " for tensors under 4,096 elements, which this leaves out."
    ),
    "accumulation-keeps-gradients": (
        "Accumulation leaves the activations as they are, but it is not free: the gradients of all"
        " trained parameters stay in memory through every forward and backward pass."
    ),
    "all-weights-in-4-bits": (
        "As the textbook has it, with every weight in 4 bits. Real QLoRA keeps embeddings, norms and"
        " the output head in 16 or 32 bits; `wazn estimate --method qlora` counts them."
    ),
    "cache-windows-not-used": (
        "Some layers look back only over a window; a cache that makes use of it holds less."
    ),
    "kv-cache-not-asked-for": (
        "Plus the KV cache: `--layers --kv-heads --head-dim --tokens`, or `--model NAME --tokens`."
    ),
}


def answer(result: Training | Accumulation | Lora | Qlora | KvCache | Inference) -> Answer:
    """Return the words and numbers of any result of `wazn.calc`."""
    speak: dict[type, Callable[[Any], Answer]] = {
        Training: _training,
        Accumulation: _accumulation,
        Lora: _lora,
        Qlora: _qlora,
        KvCache: _kv_cache,
        Inference: _inference,
    }
    return speak[type(result)](result)


def as_text(answer: Answer, *, width: int | None = None) -> str:
    """Return the answer as lines for people: a table, or stacked lines where `width` is too narrow.

    `width` is the terminal's, in characters; None (a pipe, a file) is as wide as the table.
    """
    rows = [row for section in answer.sections for row in section.rows]
    label_width = max(len(row.label) for row in rows)
    formula_width = max(len(row.formula) for row in rows)
    table_width = label_width + formula_width + max(len(row.value) for row in rows) + 7
    lines: list[str] = []
    for section in answer.sections:
        if lines:
            lines.append("")
        if section.title:
            lines.append(section.title)
        for row in section.rows:
            if width is not None and table_width > width:
                lines += [f"  {row.label}", f"    {row.formula}", f"    = {row.value}"]
            else:
                label, formula = f"{row.label:<{label_width}}", f"{row.formula:<{formula_width}}"
                lines.append(f"  {label}  {formula}  = {row.value}")
    if answer.notes:
        from textwrap import wrap

        lines.append("")
        for _, text in answer.notes:
            lines += wrap(f"Note: {text}", width=max(20, min(width or 100, 100)))
    return "\n".join(lines)


def as_json(answer: Answer) -> dict[str, Any]:
    """Return the answer in the schema `wazn.calc/1`: every key always present, bytes exact."""
    return {
        "schema": "wazn.calc/1",
        "calc": answer.calc,
        "inputs": _plain(answer.inputs),
        "result": _plain(answer.result),
        "formulas": [
            {
                "section": section.title,
                "code": row.code,
                "label": row.label,
                "formula": row.formula,
                "value": row.value,
            }
            for section in answer.sections
            for row in section.rows
        ],
        "notes": [{"code": code, "params": {}, "text": text} for code, text in answer.notes],
    }


def _training(result: Training) -> Answer:
    sections = []
    rule = result.rule
    if rule is None:
        sections.append(_rule_section("", result, result.bytes_per_parameter))
    else:
        counted_equals_rule = rule.splits[0].bytes_per_parameter == result.bytes_per_parameter
        if rule.rule_of_thumb is not None and not (counted_equals_rule and len(rule.splits) == 1):
            title = f"Rule of thumb for {result.optimizer}"
            sections.append(_rule_section(title, result, Fraction(rule.rule_of_thumb)))
        sections.extend(_split_section(result, split) for split in rule.splits)
    return Answer(
        calc="training",
        inputs={
            "num_parameters": result.num_parameters,
            "bytes_per_parameter": None if rule else result.bytes_per_parameter,
            "optimizer": result.optimizer,
            "activation_bytes": result.activation_bytes,
        },
        result={
            "bytes_per_parameter": result.bytes_per_parameter,
            "states_bytes": result.states_bytes,
            "activation_bytes": result.activation_bytes,
            "peak_bytes": result.peak_bytes,
            "rule_of_thumb_bytes_per_parameter": rule.rule_of_thumb if rule else None,
            "counted": [_split_json(result, split) for split in rule.splits] if rule else [],
        },
        sections=tuple(sections),
        notes=_notes(*result.notes, *_rule_notes(rule)),
    )


def _rule_section(title: str, result: Training, per_parameter: Fraction) -> Section:
    states_bytes = _ceil(result.num_parameters * per_parameter)
    states = Row(
        code="states",
        label="weights, gradients, optimizer",
        formula=f"{result.num_parameters:,} parameters × {_bytes(per_parameter)}",
        value=_gb(states_bytes),
    )
    return Section(title=title, rows=(states, *_peak_rows(result, states_bytes)))


def _split_section(result: Training, split: Split) -> Section:
    rows = [
        Row(
            code=part.code,
            label=_TERMS[part.code],
            formula=f"{result.num_parameters:,} × {_bytes(part.bytes_per_parameter)}",
            value=_gb(_ceil(result.num_parameters * part.bytes_per_parameter)),
        )
        for part in split.parts
    ]
    of_optimizer = split.optimizer_bytes_per_parameter
    if of_optimizer:
        rows.append(
            Row(
                code="optimizer-states",
                label="of these, optimizer state",
                formula=f"{result.num_parameters:,} × {_bytes(of_optimizer)}",
                value=_gb(_ceil(result.num_parameters * of_optimizer)),
            )
        )
    terms = " + ".join(_number(part.bytes_per_parameter) for part in split.parts)
    states_bytes = _ceil(result.num_parameters * split.bytes_per_parameter)
    rows.append(
        Row(
            code="states",
            label="weights, gradients, optimizer",
            formula=(
                f"{result.num_parameters:,} × ({terms} = {_number(split.bytes_per_parameter)}) bytes"
            ),
            value=_gb(states_bytes),
        )
    )
    rows.extend(_peak_rows(result, states_bytes))
    title = f"Counted for {result.optimizer}: {_SPLITS[split.code]}"
    return Section(title=title, rows=tuple(rows))


def _peak_rows(result: Training, states_bytes: int) -> tuple[Row, ...]:
    if not result.activation_bytes:
        return ()
    peak_bytes = states_bytes + result.activation_bytes
    return (
        Row(
            code="peak",
            label="with activations",
            formula=f"{_gb(states_bytes)} + {_gb(result.activation_bytes)}",
            value=_gb_and_gib(peak_bytes),
        ),
    )


def _rule_notes(rule: OptimizerRule | None) -> tuple[str, ...]:
    if rule is None:
        return ()
    differs = any(split.bytes_per_parameter != rule.rule_of_thumb for split in rule.splits)
    blocks = any(part.code == "block-constants" for split in rule.splits for part in split.parts)
    codes = ("rule-of-thumb",) if rule.rule_of_thumb is not None and differs else ()
    return (*codes, *(("block-constants",) if blocks else ()))


def _split_json(result: Training, split: Split) -> dict[str, Any]:
    return {
        "assumptions": split.code,
        "bytes_per_parameter": split.bytes_per_parameter,
        "states_bytes": _ceil(result.num_parameters * split.bytes_per_parameter),
        "optimizer_bytes": _ceil(result.num_parameters * split.optimizer_bytes_per_parameter),
        "parts": [
            {
                "code": part.code,
                "bytes_per_parameter": part.bytes_per_parameter,
                "bytes": _ceil(result.num_parameters * part.bytes_per_parameter),
            }
            for part in split.parts
        ],
    }


def _accumulation(result: Accumulation) -> Answer:
    replicas = f"{result.replicas:,} replica" + ("" if result.replicas == 1 else "s")
    per_sample = _gb(result.activation_per_sample_bytes)
    rows = (
        Row(
            code="effective-batch",
            label="effective batch",
            formula=f"{result.micro_batch:,} per micro-batch × {result.steps:,} steps × {replicas}",
            value=f"{result.effective_batch:,}",
        ),
        Row(
            code="peak-activations",
            label="peak activations per GPU",
            formula=f"{result.micro_batch:,} per micro-batch × {per_sample} per sample",
            value=_gb(result.peak_activation_bytes),
        ),
    )
    return Answer(
        calc="accumulation",
        inputs={
            "micro_batch": result.micro_batch,
            "steps": result.steps,
            "replicas": result.replicas,
            "activation_per_sample_bytes": result.activation_per_sample_bytes,
        },
        result={
            "effective_batch": result.effective_batch,
            "peak_activation_bytes": result.peak_activation_bytes,
        },
        sections=(Section(title="", rows=rows),),
        notes=_notes(*result.notes),
    )


def _lora(result: Lora) -> Answer:
    rows = [
        Row(
            code="adapter",
            label=f"one adapter on {adapter.module}",
            formula=_adapter_formula(result.rank, adapter),
            value=f"{adapter.num_parameters:,}",
        )
        for adapter in result.adapters
    ]
    rows.append(
        Row(
            code="trainable",
            label="trainable parameters",
            formula=_lora_sum(result),
            value=f"{result.num_trainable:,}",
        )
    )
    if result.num_parameters is not None:
        rows.append(
            Row(
                code="share",
                label="share of the model",
                formula=f"{result.num_trainable:,} / {result.num_parameters:,}",
                value=_percent(Fraction(result.num_trainable, result.num_parameters)),
            )
        )
    return Answer(
        calc="lora",
        inputs={"rank": result.rank, "num_parameters": result.num_parameters},
        result={
            "num_trainable": result.num_trainable,
            "trainable_fraction": result.trainable_fraction,
            "adapters": [
                {
                    "module": adapter.module,
                    "in_features": adapter.in_features,
                    "out_features": adapter.out_features,
                    "matrices": adapter.matrices,
                    "num_parameters": adapter.num_parameters,
                    "times": adapter.times,
                }
                for adapter in result.adapters
            ],
        },
        sections=(Section(title="", rows=tuple(rows)),),
        notes=_notes(*result.notes),
    )


def _adapter_formula(rank: int, adapter: Adapter) -> str:
    one = f"{rank:,} × ({adapter.in_features:,} + {adapter.out_features:,})"
    return one if adapter.matrices == 1 else f"{adapter.matrices:,} matrices × {one}"


def _lora_sum(result: Lora) -> str:
    """`32 × (65,536 + 65,536)` where every module occurs equally often, else a plain sum."""
    times = {adapter.times for adapter in result.adapters}
    if len(times) == 1:
        terms = " + ".join(f"{adapter.num_parameters:,}" for adapter in result.adapters)
        return f"{times.pop():,} × ({terms})"
    return " + ".join(
        f"{adapter.times:,} × {adapter.num_parameters:,}" for adapter in result.adapters
    )


def _qlora(result: Qlora) -> Answer:
    params = f"{result.num_parameters:,}"
    plain_total = result.weights_bytes + result.constants_bytes
    double_total = result.weights_bytes + result.double_constants_bytes
    sections = (
        Section(
            title="Weights",
            rows=(
                Row(
                    code="weights",
                    label="weights in 4 bits",
                    formula=f"{params} parameters × 4 bits / 8",
                    value=_gb(result.weights_bytes),
                ),
            ),
        ),
        Section(
            title="Constants of the blocks in fp32",
            rows=(
                Row(
                    code="constant-bits",
                    label="per parameter",
                    formula=f"32 / {result.block:,}",
                    value=_bits(result.constant_bits_per_parameter),
                ),
                Row(
                    code="constants",
                    label="constants",
                    formula=f"{params} × {_bits(result.constant_bits_per_parameter)} / 8",
                    value=_gb(result.constants_bytes),
                ),
                Row(
                    code="total",
                    label="in all",
                    formula=f"{_gb(result.weights_bytes)} + {_gb(result.constants_bytes)}",
                    value=_gb_and_gib(plain_total),
                ),
            ),
        ),
        Section(
            title="Constants double-quantized",
            rows=(
                Row(
                    code="double-constant-bits",
                    label="per parameter",
                    formula=(
                        f"8 / {result.block:,} + 32 / ({result.block:,} × {result.double_block:,})"
                    ),
                    value=_bits(result.double_constant_bits_per_parameter),
                ),
                Row(
                    code="double-constants",
                    label="constants",
                    formula=f"{params} × {_bits(result.double_constant_bits_per_parameter)} / 8",
                    value=_gb(result.double_constants_bytes),
                ),
                Row(
                    code="double-total",
                    label="in all",
                    formula=f"{_gb(result.weights_bytes)} + {_gb(result.double_constants_bytes)}",
                    value=_gb_and_gib(double_total),
                ),
            ),
        ),
    )
    return Answer(
        calc="qlora",
        inputs={
            "num_parameters": result.num_parameters,
            "block": result.block,
            "double_block": result.double_block,
        },
        result={
            "weights_bytes": result.weights_bytes,
            "constant_bits_per_parameter": result.constant_bits_per_parameter,
            "constants_bytes": result.constants_bytes,
            "total_bytes": plain_total,
            "double_constant_bits_per_parameter": result.double_constant_bits_per_parameter,
            "double_constants_bytes": result.double_constants_bytes,
            "double_total_bytes": double_total,
        },
        sections=sections,
        notes=_notes(*result.notes),
    )


def _kv_cache(result: KvCache) -> Answer:
    return Answer(
        calc="kv-cache",
        inputs=_cache_inputs(result),
        result={"per_token_bytes": result.per_token_bytes, "total_bytes": result.total_bytes},
        sections=(Section(title="", rows=_cache_rows(result)),),
        notes=_notes(*result.notes),
    )


def _cache_inputs(cache: KvCache) -> dict[str, Any]:
    return {
        "layers": cache.layers,
        "kv_heads": cache.kv_heads,
        "head_dim": cache.head_dim,
        "latent_dim": cache.latent_dim,
        "tokens": cache.tokens,
        "sequences": cache.sequences,
        "bits": cache.bits,
    }


def _cache_rows(cache: KvCache) -> tuple[Row, ...]:
    per_layer = (
        f"2 × {cache.layers:,} layers × {cache.kv_heads:,} KV heads × {cache.head_dim:,}"
        if cache.latent_dim is None
        else f"{cache.layers:,} layers × {cache.latent_dim:,} latent"
    )
    per_token = Row(
        code="kv-per-token",
        label="keys and values per token",
        formula=f"{per_layer} × {_number(cache.bits)} bits / 8",
        value=f"{_number(cache.per_token_bytes)} bytes",
    )
    sequences = f"{cache.sequences:,} sequence" + ("" if cache.sequences == 1 else "s")
    total = Row(
        code="kv-cache",
        label="KV cache",
        formula=f"{_number(cache.per_token_bytes)} bytes × {cache.tokens:,} tokens × {sequences}",
        value=_gb_and_gib(cache.total_bytes),
    )
    return per_token, total


def _inference(result: Inference) -> Answer:
    rows = [
        Row(
            code="weights",
            label="weights",
            formula=f"{result.num_parameters:,} parameters × {_number(result.bits)} bits / 8",
            value=_gb(result.weights_bytes),
        )
    ]
    if result.cache is not None:
        rows.extend(_cache_rows(result.cache))
        rows.append(
            Row(
                code="total",
                label="in all",
                formula=f"{_gb(result.weights_bytes)} + {_gb(result.cache.total_bytes)}",
                value=_gb_and_gib(result.total_bytes),
            )
        )
    return Answer(
        calc="inference",
        inputs={
            "num_parameters": result.num_parameters,
            "bits": result.bits,
            "cache": _cache_inputs(result.cache) if result.cache else None,
        },
        result={
            "weights_bytes": result.weights_bytes,
            "kv_cache_bytes": result.cache.total_bytes if result.cache else None,
            "total_bytes": result.total_bytes,
        },
        sections=(Section(title="", rows=tuple(rows)),),
        notes=_notes(*result.notes),
    )


def _notes(*codes: str) -> tuple[tuple[str, str], ...]:
    return tuple((code, _NOTES[code]) for code in codes)


def _gb(num_bytes: int) -> str:
    """Write bytes in the largest of GB, MB and bytes that does not begin with a zero."""
    if num_bytes >= 10**8:
        unit = "GB"
    elif num_bytes >= 10**5:
        unit = "MB"
    else:
        return f"{num_bytes:,} bytes"
    number, unit = format_size(num_bytes, unit=unit, digits=3).split()
    return f"{_grouped(number)} {unit}"


def _gb_and_gib(num_bytes: int) -> str:
    """Beside the GB of the textbook, the GiB of the card."""
    if num_bytes < GIB // 100:
        return _gb(num_bytes)
    return f"{_gb(num_bytes)} ({_grouped(format_ratio(num_bytes, GIB, digits=2), trim=False)} GiB)"


def _grouped(number: str, *, trim: bool = True) -> str:
    whole, _, decimals = number.partition(".")
    decimals = decimals.rstrip("0") if trim else decimals
    return f"{int(whole):,}" + (f".{decimals}" if decimals else "")


def _number(value: Fraction) -> str:
    """Write a number exactly where six decimals suffice, else rounded to six."""
    return _grouped(format_ratio(value.numerator, value.denominator, digits=6))


def _bytes(value: Fraction) -> str:
    return f"{_number(value)} byte" + ("" if value == 1 else "s")


def _bits(value: Fraction) -> str:
    number = _grouped(format_ratio(value.numerator, value.denominator, digits=3))
    return f"{number} bit" + ("s" if value > 1 else "")


def _percent(value: Fraction) -> str:
    digits = 2 if value >= Fraction(1, 20_000) else 6
    return f"{format_ratio(value.numerator * 100, value.denominator, digits=digits)} %"


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _plain(value: Any) -> Any:
    """Return what JSON knows: a fraction becomes an integer where it is one, else a float."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
