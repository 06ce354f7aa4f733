"""Checks at construction: which models the composition reproduces, and the reason where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit import views
from labkit.errors import LabkitError

if TYPE_CHECKING:
    from labkit.backbone import Backbone

RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "hybrid", "gated_delta", "lightning")
SPY_WINDOW, SPY_TOKENS = 4, 12


def refuse(model: Any) -> None:
    """Raise LabkitError, in one sentence with the reason, for kinds of model that labkit cannot run."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise LabkitError(f"got a {name}; labkit needs a transformers causal LM (AutoModelForCausalLM.from_pretrained)")
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise LabkitError(f"{name} is an encoder-decoder; labkit needs a decoder-only causal LM")
    if model.get_output_embeddings() is None:
        raise LabkitError(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or []]
    recurrent = sorted({kind for kind in kinds if any(word in kind for word in RECURRENT)})
    if recurrent or getattr(model, "_is_stateful", False):
        raise LabkitError(
            f"{name} keeps a recurrent state ({', '.join(recurrent) or 'a stateful cache'}), which cannot be rolled "
            "back after a rejected draft; labkit needs attention in every layer"
        )
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise LabkitError(
            f"{name} uses alibi biases, computed from a padding mask; labkit needs rotary or learned positions"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise LabkitError(
            f"{name} was loaded with {attention!r} attention, which takes no explicit mask; "
            'load it with attn_implementation="sdpa" (or "eager")'
        )
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise LabkitError(
            f"{name} has weights on the meta device (offloaded, or never loaded); "
            'load it whole, with device_map="auto" over devices that can hold it, or on one device'
        )
    if model.training:
        raise LabkitError(f"{name} is in training mode, where dropout changes its output; call model.eval() first")


def position_limit(config) -> int:
    """How many positions the model has, without rope rescaling that depends on the length.

    Dynamic-NTK and longrope change the rotation of every cached key beyond the original length: within it
    the text is right, beyond it the library itself gives other text cached than uncached.
    """
    limit = getattr(config, "max_position_embeddings", None) or 1 << 30
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if entry.get("rope_type", entry.get("type")) in ("dynamic", "longrope"):
            original = entry.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit


class Spy(nn.Module):
    """Runs a layer and remembers the attention mask it was handed."""

    def __init__(self, layer: nn.Module, seen: dict[int, Tensor | None], index: int):
        super().__init__()
        self.__dict__.update(layer=layer, seen=seen, index=index)

    def __getattr__(self, name):
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args, **kwargs):
        """Call the layer."""
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 4]
        self.seen[self.index] = masks[0] if masks else None
        return self.layer(*args, **kwargs)


def attention_layout(backbone: Backbone) -> tuple[list[bool], bool]:
    """Which layers slide, and whether the model's forward takes one mask for each layer type.

    The window is shrunk to 4 in a copied config and the library's own masks on 12 tokens are looked at:
    several models carry `sliding_window` and do not use it.
    """
    seen: dict[int, Tensor | None] = {}
    spied: Any = views.layer_range(
        backbone._decoder, 0, backbone.depth, width=backbone.width,
        substitute=lambda index, layer: Spy(layer, seen, index),
    )  # fmt: skip
    spied.config._attn_implementation = "eager"
    if backbone.window is not None:
        spied.config.sliding_window = SPY_WINDOW
    ids = (torch.arange(SPY_TOKENS, device=backbone.device) * 5 % backbone.vocab)[None]
    spied(input_ids=ids, use_cache=False)
    row = torch.arange(SPY_TOKENS)
    causal = row[:, None] >= row[None]
    windowed = causal & (row[:, None] - row[None] < SPY_WINDOW)
    slides = []
    for index in range(backbone.depth):
        mask = seen[index]
        visible = causal if mask is None else mask[0, 0].cpu()
        visible = visible if visible.dtype == torch.bool else visible > -1
        if torch.equal(visible, causal):
            slides.append(False)
        elif torch.equal(visible, windowed):
            slides.append(True)
        else:
            raise LabkitError(
                f"{type(backbone.model).__name__} masks layer {index} neither causally nor by a sliding window; "
                "labkit runs full and sliding-window attention"
            )
    if getattr(spied.config, "layer_types", None) is None:
        return slides, False
    sent = {name: torch.zeros((1, 1, SPY_TOKENS, SPY_TOKENS), dtype=backbone.dtype, device=backbone.device)
            for name in ("full_attention", "sliding_attention")}  # fmt: skip
    try:
        spied(input_ids=ids, attention_mask=dict(sent), use_cache=False)
    except (AttributeError, TypeError, KeyError, ValueError):
        return slides, False
    by_type = all(
        seen[index] is sent["sliding_attention" if slide else "full_attention"] for index, slide in enumerate(slides)
    )
    return slides, by_type


TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def check_composition(backbone: Backbone) -> None:
    """Compare the composition, split in the middle and fed in two chunks, with the model's own forward."""
    if any(backbone.slides) != all(backbone.slides) and not backbone._by_type:
        raise LabkitError(
            f"{type(backbone.model).__name__} mixes window and full attention in a way labkit cannot mask"
        )
    lengths, device = (7, 5), backbone.device
    ids = (torch.arange(14, device=device).view(2, 7) * 7 + 3) % backbone.vocab
    cache = backbone.cache(2, 8)
    middle = (backbone.depth + 1) // 2
    got = []
    for first, last in ((0, 4), (4, 7)):
        at = torch.arange(first, last, device=device).expand(2, -1)
        ok = at < torch.tensor(lengths, device=device)[:, None]
        slots, positions = torch.where(ok, at, 8), torch.where(ok, at, 0)
        key_positions = torch.arange(8, device=device)[None]
        mask = backbone.mask(key_positions[:, None] <= positions[:, :, None], positions, key_positions)
        try:
            x = backbone.run(ids[:, first:last], 0, middle, cache, slots, positions, mask)
            got.append(backbone.head(backbone.run(x, middle, backbone.depth, cache, slots, positions, mask)))
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
            raise LabkitError(
                f"{type(backbone.model).__name__} cannot be run layer by layer: {type(error).__name__}: {error}"
            ) from error
    got = torch.cat(got, 1)
    for row, length in enumerate(lengths):
        want = backbone.model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0].double()
        error = ((got[row, :length].double() - want).norm() / want.norm().clamp_min(1e-30)).item()
        if not error < TOLERANCE.get(backbone.dtype, 0.1):
            raise LabkitError(
                f"{type(backbone.model).__name__}, run layer by layer, differs from its own forward (relative error "
                f"{error:.2g}); a patched or hooked forward that labkit cannot see into, or an unsupported architecture"
            )
