"""`wazn calc`: the textbook formulas, one subcommand each."""

from __future__ import annotations

from fractions import Fraction

import click

from wazn import calc
from wazn.cli.base import (
    COUNT,
    DECIMAL,
    SIZE,
    Command,
    NamedGroup,
    common_options,
    option,
    require_english,
    terminal_width,
)
from wazn.errors import InputError
from wazn.report.calc import answer, as_json, as_text

__all__ = ["command"]

Result = calc.Training | calc.Accumulation | calc.Lora | calc.Qlora | calc.KvCache | calc.Inference


@click.group("calc", cls=NamedGroup)
def command() -> None:
    """The textbook formulas, with the numbers put in.

    These know neither the loss nor the allocator; `wazn estimate` weighs a real run.
    Sizes are written as `0.5GB` or `512 MiB`, counts as `7B`, `350M` or `4096`.
    """


@command.command("training", cls=Command)
@option("--params", "num_parameters", type=COUNT, required=True, help="Parameters, such as 7B.")
@option(
    "--bytes-per-param",
    "bytes_per_parameter",
    type=DECIMAL,
    help="Bytes per parameter: 16 for Adam in mixed precision.",
)
@option(
    "--optimizer",
    metavar="NAME",
    help=f"Instead of the bytes, an optimizer and its split: {', '.join(calc.OPTIMIZER_RULES)}.",
)
@option(
    "--activations", "activation_bytes", type=SIZE, default=0, help="Activations, such as 20GB."
)
@common_options
def training(
    num_parameters: int,
    bytes_per_parameter: Fraction | None,
    optimizer: str | None,
    activation_bytes: int,
    output_format: str,
    lang: str,
) -> None:
    """Parameters × bytes per parameter, plus activations.

    Give either --bytes-per-param or --optimizer.
    """
    _show(
        calc.training(
            num_parameters=num_parameters,
            bytes_per_parameter=bytes_per_parameter,
            optimizer=optimizer,
            activation_bytes=activation_bytes,
        ),
        output_format,
        lang,
    )


@command.command("accumulation", cls=Command)
@option("--micro-batch", type=COUNT, required=True, help="Samples per forward pass and GPU.")
@option("--steps", type=COUNT, required=True, help="Micro-batches per optimizer step.")
@option("--replicas", type=COUNT, default=1, show_default=True, help="Data-parallel replicas.")
@option(
    "--activation-per-sample",
    "activation_per_sample_bytes",
    type=SIZE,
    required=True,
    help="Activations of one sample, such as 0.5GB.",
)
@common_options
def accumulation(
    micro_batch: int,
    steps: int,
    replicas: int,
    activation_per_sample_bytes: int,
    output_format: str,
    lang: str,
) -> None:
    """Effective batch, and the activations of one micro-batch."""
    _show(
        calc.accumulation(
            micro_batch=micro_batch,
            steps=steps,
            replicas=replicas,
            activation_per_sample_bytes=activation_per_sample_bytes,
        ),
        output_format,
        lang,
    )


@command.command("lora", cls=Command)
@option("--rank", type=COUNT, required=True, help="Rank of the adapters.")
@option("--layers", type=COUNT, help="Layers of the model.")
@option("--hidden", type=COUNT, help="Hidden size.")
@option(
    "--model", help="Instead of the sizes, a model: its matrices are counted as peft adapts them."
)
@option(
    "--modules",
    default="q,v",
    show_default=True,
    help="Adapted matrices, of q, k, v, o, gate, up, down; of a --model also attention, all-linear, names.",
)
@option("--kv-hidden", type=COUNT, help="Output width of k and v, where it is not the hidden size.")
@option("--intermediate", type=COUNT, help="Width of the MLP, for gate, up and down.")
@option("--params", "num_parameters", type=COUNT, help="Parameters of the model, for the share.")
@common_options
def lora(
    rank: int,
    layers: int | None,
    hidden: int | None,
    model: str | None,
    modules: str,
    kv_hidden: int | None,
    intermediate: int | None,
    num_parameters: int | None,
    output_format: str,
    lang: str,
) -> None:
    """Trainable parameters: rank × (in + out) for each adapted matrix.

    Give --layers and --hidden, or --model.
    """
    names = tuple(modules.split(","))
    if model is not None:
        _refuse_beside_model(
            layers=layers,
            hidden=hidden,
            kv_hidden=kv_hidden,
            intermediate=intermediate,
            num_parameters=num_parameters,
        )
        from wazn.facts.models import load_model

        result = calc.lora_of_model(load_model(model), rank=rank, modules=names)
    else:
        if layers is None or hidden is None:
            raise InputError("`layers` and `hidden` must be given, or `model` NAME")
        result = calc.lora(
            rank=rank,
            layers=layers,
            hidden=hidden,
            modules=names,
            kv_hidden=kv_hidden,
            intermediate=intermediate,
            num_parameters=num_parameters,
        )
    _show(result, output_format, lang)


@command.command("qlora", cls=Command)
@option("--params", "num_parameters", type=COUNT, required=True, help="Parameters, such as 7B.")
@option("--block", type=COUNT, default=64, show_default=True, help="Weights per constant.")
@option(
    "--double-block", type=COUNT, default=256, show_default=True, help="Constants per constant."
)
@common_options
def qlora(
    num_parameters: int, block: int, double_block: int, output_format: str, lang: str
) -> None:
    """4-bit weights and the constants of their blocks."""
    _show(
        calc.qlora(num_parameters=num_parameters, block=block, double_block=double_block),
        output_format,
        lang,
    )


@command.command("inference", cls=Command)
@option("--params", "num_parameters", type=COUNT, help="Parameters, such as 7B.")
@option("--model", help="Instead of the parameters, a model: its weights and cache are counted.")
@option("--bits", type=DECIMAL, default=16, show_default=True, help="Bits per weight.")
@option("--layers", type=COUNT, group="KV cache", help="Layers of the model.")
@option("--kv-heads", type=COUNT, group="KV cache", help="Key-value heads per layer.")
@option("--head-dim", type=COUNT, group="KV cache", help="Size of one head.")
@option("--tokens", type=COUNT, group="KV cache", help="Tokens per sequence, prompt and answer.")
@option(
    "--sequences",
    type=COUNT,
    default=1,
    show_default=True,
    group="KV cache",
    help="Sequences at a time.",
)
@option(
    "--kv-bits",
    type=DECIMAL,
    default=16,
    show_default=True,
    group="KV cache",
    help="Bits per cached element.",
)
@common_options
def inference(
    num_parameters: int | None,
    model: str | None,
    bits: int | Fraction,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    tokens: int | None,
    sequences: int,
    kv_bits: int | Fraction,
    output_format: str,
    lang: str,
) -> None:
    """Weights at any bit width, plus the KV cache.

    Give --params with --layers, --kv-heads, --head-dim and --tokens for the cache, or --model with --tokens.
    """
    if (num_parameters is None) == (model is None):
        raise InputError("exactly one of `num_parameters` and `model` must be given")
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    if model is not None:
        _refuse_beside_model(**sizes)
        from wazn.facts.models import load_model
        from wazn.model.parameters import count_parameters

        spec = load_model(model)
        num_parameters = count_parameters(spec)
        cache = (
            calc.kv_cache_of_model(spec, tokens=tokens, sequences=sequences, bits=kv_bits)
            if tokens is not None
            else None
        )
    else:
        cache = _cache(sizes | {"tokens": tokens}, sequences=sequences, bits=kv_bits)
    assert num_parameters is not None
    _show(
        calc.inference(num_parameters=num_parameters, bits=bits, cache=cache), output_format, lang
    )


def _refuse_beside_model(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None:
            raise InputError(f"`{name}` is known of the `model`", hint=f"leave out `{name}`")


def _cache(
    sizes: dict[str, int | None], *, sequences: int, bits: int | Fraction
) -> calc.KvCache | None:
    """Return the cache of sizes given by hand: all of them, or none."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if not given:
        return None
    missing = [f"`{name}`" for name in sizes if name not in given]
    if missing:
        raise InputError(
            f"the KV cache also needs {', '.join(missing)}",
            hint="or `model` NAME, of which they are known",
        )
    return calc.kv_cache(**given, sequences=sequences, bits=bits)


@command.command("kv-cache", cls=Command)
@option("--layers", type=COUNT, required=True, help="Layers of the model.")
@option("--kv-heads", type=COUNT, required=True, help="Key-value heads per layer.")
@option("--head-dim", type=COUNT, required=True, help="Size of one head.")
@option("--tokens", type=COUNT, required=True, help="Tokens per sequence, prompt and answer.")
@option("--sequences", type=COUNT, default=1, show_default=True, help="Sequences at a time.")
@option("--bits", type=DECIMAL, default=16, show_default=True, help="Bits per element.")
@common_options
def kv_cache(
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    sequences: int,
    bits: int | Fraction,
    output_format: str,
    lang: str,
) -> None:
    """Keys and values of every layer, head and token."""
    _show(
        calc.kv_cache(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            tokens=tokens,
            sequences=sequences,
            bits=bits,
        ),
        output_format,
        lang,
    )


def _show(result: Result, output_format: str, lang: str) -> None:
    require_english(lang)
    spoken = answer(result)
    if output_format == "json":
        import json

        click.echo(json.dumps(as_json(spoken), indent=2, ensure_ascii=False))
    else:
        click.echo(as_text(spoken, width=terminal_width()))
