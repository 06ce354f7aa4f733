"""Views: shallow copies of a model's own modules that run a range of its layers, or its head alone.

Nothing is re-implemented and the user's model is never changed: a view shares every weight with it and
differs in its dict of children. What a view replaces is listed here, once, by the names transformers uses.
"""

import copy
import functools
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from labkit.attention import KEYS_ONLY
from labkit.errors import LabkitError

LAYERS = ("layers", "h")
FINAL = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "project_out")
POSITIONS = ("wpe", "embed_positions")
MLPS = ("mlp", "block_sparse_moe", "feed_forward", "fc2")
EMBEDDING_SIDE = ("project_in", "embed_norm", "embedding_norm", "emb_norm", "word_embeddings_layernorm")


class Same(nn.Module):
    """The identity, whatever else it is handed."""

    def forward(self, x, *args, **kwargs):
        """Return the first argument."""
        return x


class NoPositions(nn.Module):
    """Stands for learned positions above layer 0, where they have been added already."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, positions: Tensor, *args, position_ids: Tensor | None = None, **kwargs) -> Tensor:
        """Zeros of one row a position, on the positions' device."""
        at = positions if position_ids is None else position_ids
        return torch.zeros((*at.shape, self.width), dtype=self.dtype, device=at.device)


class GivenDecoder(nn.Module):
    """Stands for the decoder under a head: returns the hidden state it is given, None for all else."""

    @dataclass
    class Output(BaseModelOutputWithPast):
        """Any other output that a head might read is absent."""

        last_hidden_state: Any = None

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    @property
    def decoder(self) -> "GivenDecoder":
        """Some heads reach for a decoder inside the base model."""
        return self

    def forward(self, *args, inputs_embeds: Tensor, **kwargs) -> "GivenDecoder.Output":
        """Hand `inputs_embeds` through."""
        return self.Output(last_hidden_state=inputs_embeds)


def bare(module: Any) -> Any:
    """A shallow copy with its own dict of children, free of what patched this one instance.

    Hooks, compiled calls and replaced forwards belong to the original and would run it as a whole.
    """
    module = getattr(module, "_orig_mod", module)
    view = copy.copy(module)
    view.__dict__["_modules"] = dict(module._modules)
    for patched in ("forward", "_old_forward", "_hf_hook", "_compiled_call_impl"):
        view.__dict__.pop(patched, None)
    return view


def unhooked(view: nn.Module) -> nn.Module:
    """The view without the original's own forward hooks, which would take a part for the whole."""
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        view.__dict__[hooks] = OrderedDict()
    return view


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The module of a causal LM that holds its decoder layers."""
    module = getattr(model, model.base_model_prefix, None)
    while module is not None:
        module = getattr(module, "_orig_mod", module)
        if child(module, LAYERS):
            return module
        module = module._modules.get("decoder")
    raise LabkitError(
        f"{type(model).__name__} has no list of decoder layers that labkit knows ({' or '.join(LAYERS)}); "
        "labkit needs a decoder-only causal LM such as AutoModelForCausalLM returns"
    )


def child(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """The first of `names` that is a child of the module."""
    return next((name for name in names if module._modules.get(name) is not None), None)


def layers_of(decoder: nn.Module) -> Any:
    """The decoder's list of layers."""
    return decoder._modules[child(decoder, LAYERS) or LAYERS[0]]


def final_of(decoder: nn.Module) -> list[nn.Module]:
    """What the decoder does after its last layer, in order: the norm, and an output projection where there is one."""
    return [decoder._modules[name] for name in FINAL if decoder._modules.get(name) is not None]  # type: ignore


def layer_range(decoder: nn.Module, start: int, stop: int, *, substitute: Callable, width: int) -> nn.Module:
    """The decoder's own forward over layers [start, stop), without the final norm.

    `substitute(index, layer) -> layer` may replace a layer; input-side work is left to start == 0.
    """
    view = unhooked(bare(decoder))
    layers = layers_of(decoder)
    view._modules[child(decoder, LAYERS) or LAYERS[0]] = nn.ModuleList(
        [substitute(i, layers[i]) for i in range(start, stop)]
    )
    config: Any = copy.copy(decoder.config)
    view.__dict__["config"] = config
    config.num_hidden_layers = stop - start
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types[start:stop])
    absent: list[str] = list(FINAL)
    if start > 0:
        absent += EMBEDDING_SIDE
        dtype = next(decoder.parameters()).dtype
        for position in POSITIONS:
            if view._modules.get(position) is not None:
                view._modules[position] = NoPositions(width, dtype)
        if "embedding_multiplier" in view.__dict__:
            view.__dict__["embedding_multiplier"] = 1.0
    for gone in absent:
        if view._modules.get(gone) is not None:
            view._modules[gone] = Same()
    return view.eval()


def with_attention(layer: nn.Module, implementation: str) -> nn.Module:
    """A layer whose attention modules call another registered attention function."""
    name = attention_of(layer)
    module: Any = layer._modules[name]
    if not takes_attention_function(type(module)):
        return layer
    view, attention = bare(layer), bare(module)
    attention.__dict__["config"] = copy.copy(module.config)
    attention.config._attn_implementation = implementation
    rehook(module, attention)
    view._modules[name] = attention
    rehook(layer, view)
    return view


def rehook(original: nn.Module, view: nn.Module) -> None:
    """Give a view of a dispatched layer the hook that moves its inputs to its device."""
    hook = getattr(original, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(view, copy.copy(hook))


def head_of(model: PreTrainedModel) -> nn.Module:
    """The causal LM's own head path (scales, soft-caps) over a decoder that returns what it is given."""
    view = unhooked(bare(model))
    view._modules[model.base_model_prefix] = GivenDecoder()
    return view.eval()


@functools.cache
def takes_attention_function(attention_class: type) -> bool:
    """Whether a class of attention module calls the function registered under its config's name."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(attention_class.forward).__code__.co_names


def attention_of(layer: nn.Module) -> str:
    """The name of a decoder layer's attention module."""
    found = [name for name, module in layer._modules.items() if module is not None and hasattr(module, "layer_idx")]
    named = [name for name in ("self_attn", "attn", "attention", "self_attention") if name in layer._modules]
    if not (found or named):
        raise LabkitError(f"{type(layer).__name__} has no attention module that labkit can find")
    return (found or named)[0]


class Zeros(nn.Module):
    """Stands for a skipped sub-layer: adds nothing to the residual stream."""

    def __init__(self, outputs: int):
        super().__init__()
        self.outputs = outputs

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        """Zeros like the input; a tuple padded with None where the sub-layer returns several things."""
        nothing = torch.zeros_like(hidden_states)
        return nothing if self.outputs == 1 else (nothing, *[None] * (self.outputs - 1))


class ZeroRow(Zeros):
    """Zeros of another width, for a projection inside an inlined MLP (opt's fc2)."""

    def __init__(self, width: int):
        super().__init__(1)
        self.width = width

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        """Zeros of the residual stream's width."""
        return hidden_states.new_zeros((*hidden_states.shape[:-1], self.width))


@functools.cache
def outputs_of(layer_class: type, name: str) -> int:
    """How many things a class of decoder layer takes from the sub-layer that it calls by this name."""
    call = re.search(rf"([\w, ]+?) = self\.{name}\(", inspect.getsource(inspect.unwrap(layer_class.forward)))
    return 1 if call is None else call[1].count(",") + 1


def without(layer: nn.Module, *, attention: bool = False, mlp: bool = False) -> nn.Module:
    """The layer with its attention or its MLP skipped: its residual stream passes that sub-layer unchanged.

    Norms before and after it still run; a norm after it makes nothing of zeros, unless it has a bias.
    """
    view = bare(layer)
    names = [attention_of(layer)] if attention else []
    if mlp:
        found = child(layer, MLPS)
        if found is None:
            raise LabkitError(f"{type(layer).__name__} has no MLP that labkit can find; skip its attention only")
        names.append(found)
    for name in names:
        if name == "fc2":
            view._modules["fc1"], view._modules[name] = Same(), ZeroRow(getattr(layer, name).out_features)
        else:
            view._modules[name] = Zeros(outputs_of(type(layer), name))
    rehook(layer, view)
    return view


def holding(layer: nn.Module) -> nn.Module:
    """The layer writing its keys and values only: the residual stream passes it unchanged, bit by bit."""
    view = with_attention(layer, KEYS_ONLY)
    if child(layer, MLPS) is not None:
        view = without(view, mlp=True)
    inner = bare(view)

    def forward(hidden_states: Tensor, *args, **kwargs):
        out = type(inner).forward(inner, hidden_states, *args, **kwargs)
        return hidden_states if isinstance(out, Tensor) else (hidden_states, *out[1:])

    view = bare(view)
    view.__dict__["forward"] = forward
    rehook(layer, view)
    return view
