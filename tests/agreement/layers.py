"""The real decoder layer of a family on fake tensors, and the layer of the tape built from the same configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.agreement.compare import DTYPES, TapeTrace, leaf, run_on_tape
from tests.recipes import BF16, make_recipe
from wazn.dtypes import INT64
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.recipe import Attention, Method
from wazn.simulate.build import load
from wazn.simulate.context import Context
from wazn.simulate.forward import layers_take_positions
from wazn.simulate.tables import make_masks, make_rotary_tables
from wazn.simulate.tape import Tape, Tensor
from wazn.simulate.trained import Trained
from wazn.trace.specs import OpTrace, Spec

if TYPE_CHECKING:
    from wazn.trace.world import World

BATCH, LENGTH = 2, 256


class RealLayer:
    """One layer of the model that `config` describes, called with the arguments that its model hands it."""

    def __init__(
        self,
        world: World,
        config: dict[str, Any],
        *,
        index: int,
        dtype: str,
        attention: str,
        trained: bool,
    ) -> None:
        self._world = world
        self._model = _build(config, dtype=dtype, attention=attention, trained=trained)
        self._prefix = read_config(config, id="test", path="test").layer_prefix.format(index)
        self._call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, x: Any) -> Any:
        """Run the layer on x."""
        if self._call is None:
            self._call = self._capture(x.shape)
        layer, args, kwargs = self._call
        return layer(x, *args, **kwargs)

    def _capture(self, shape: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        import torch

        from wazn.trace.tracker import DEVICE

        self._world.materialise(self._model)
        layer = self._model.get_submodule(self._prefix.rstrip("."))
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}))

        handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
        with torch.no_grad():
            inputs = torch.empty(shape[:2], dtype=torch.int64, device=DEVICE)
            ones = torch.ones(shape[:2], dtype=torch.int64, device=DEVICE)
            self._model.base_model(input_ids=inputs, attention_mask=ones, use_cache=False)
        handle.remove()
        self._model = None
        return layer, *seen[0]


def _build(config: dict[str, Any], *, dtype: str, attention: str, trained: bool) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = dict(config)
    hf_config = AutoConfig.for_model(wanted.pop("model_type"), **wanted)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    model.requires_grad_(trained)
    return model.train()


def real_layer(
    config: dict[str, Any],
    *,
    index: int = 0,
    dtype: str = "bfloat16",
    attention: str = "sdpa",
    trained: bool = True,
    batch: int = BATCH,
    length: int = LENGTH,
    autocast: str | None = None,
) -> OpTrace:
    """Measure the real layer."""
    from wazn.trace.flash_attn import flash_attn_stand_in
    from wazn.trace.opcheck import measure_op
    from wazn.trace.world import World

    world = World()
    named = "flash_attention_2" if attention == "flash" else attention
    x = Spec((batch, length, _hidden_size(config)), dtype, requires_grad=True)
    with flash_attn_stand_in():
        layer = RealLayer(world, config, index=index, dtype=dtype, attention=named, trained=trained)
        return measure_op(layer, x, world=world, autocast=autocast)


def _hidden_size(config: dict[str, Any]) -> int:
    return read_config(config, id="test", path="test").hidden_size


def tape_layer(
    config: dict[str, Any],
    *,
    index: int = 0,
    dtype: str = "bfloat16",
    attention: str = "sdpa",
    trained: bool = True,
    batch: int = BATCH,
    length: int = LENGTH,
    autocast: str | None = None,
) -> TapeTrace:
    """Measure the layer of the tape."""
    spec = read_config(config, id="test", path="test")
    how = make_recipe(
        method=Method.FULL if trained else Method.LORA,
        micro_batch=batch,
        seq_len=length,
        attention=Attention(attention),
        precision=replace(BF16, weight_dtype=DTYPES[dtype]),
    )

    def prepare(tape: Tape) -> Any:
        context = Context(
            tape=tape,
            habits=resolve_stack("hf", family=spec.family),
            micro_batch=batch,
            seq_len=length,
            attention=how.attention,
            capability=(8, 0),
        )
        hidden = leaf(tape, Spec((batch, length, spec.hidden_size), dtype))
        make_masks(context, spec, hidden.dtype)
        make_rotary_tables(context, spec, hidden.dtype)
        if layers_take_positions(spec):
            context.position_ids = tape.new(length, INT64)
        trainable = Trained(spec, how)
        model = load(tape, spec, how, frozenset(), trainable, range(spec.num_layers))
        return context, model.layers[index]

    def run(tape: Tape, prepared: Any, x: Tensor) -> Tensor:
        context, layer = prepared
        out = layer(context, x)
        context.layer_weights[0] = None
        return out

    x = Spec((batch, length, spec.hidden_size), dtype, requires_grad=True)
    return run_on_tape(
        run, x, prepare=prepare, autocast=None if autocast is None else DTYPES[autocast]
    )
