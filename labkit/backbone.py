"""The model behind one wall: any Hugging Face decoder as a few verbs.

Only this file, its views and probe, and the cache know transformers' internals.
"""

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from labkit import views
from labkit.attention import PACKED
from labkit.cache import SlotCache
from labkit.errors import LabkitError
from labkit.exits import Leaving, check_depths
from labkit.probe import attention_layout, check_composition, position_limit, refuse

MOST_VIEWS = 256
LOOK_UP: ContextVar[Callable[[], None]] = ContextVar("labkit.look_up", default=lambda: None)
"""Called before every run of layers and every head of this thread: what raises there ends long work."""


@dataclass(frozen=True)
class Mask:
    """What each row may see: `(batch, 1, rows, slots)`, 0 where it does and the dtype's lowest number elsewhere.

    Additive for sdpa too, which would turn a boolean mask into this one again in every layer.
    """

    full: Tensor | None
    sliding: Tensor | None

    def rows(self, start: int) -> "Mask":
        """The mask of rows `start` and later."""
        return Mask(*(None if m is None else m[:, :, start:] for m in (self.full, self.sliding)))

    @property
    def width(self) -> int:
        """The number of slots shown."""
        return next(mask.shape[-1] for mask in (self.full, self.sliding) if mask is not None)


class Backbone:
    """A causal LM taken apart at its layers.

    depth: the number of layers L. width: of the residual stream. head_width, vocab: of the head. final: the modules
    between the last layer and the head. limit: positions the model has. Construction compares the composition with the
    model's own forward on two short inputs and raises LabkitError, with the reason, for a model that it does not
    reproduce or cannot roll back.
    """

    def __init__(self, model: Any):
        model = getattr(model, "_orig_mod", model)
        refuse(model)
        self.model = model
        self._decoder = views.find_decoder(model)
        self._layers = views.layers_of(self._decoder)
        self.final = views.final_of(self._decoder)
        self.depth = len(self._layers)
        config = model.config.get_text_config()
        self.width: int = config.hidden_size
        head: Any = model.get_output_embeddings()
        self.vocab: int = head.weight.shape[0]
        self.head_width: int = head.weight.shape[1]
        self.limit: int = position_limit(config)
        embedding: Any = model.get_input_embeddings()
        self.device: torch.device = embedding.weight.device
        self.dtype: torch.dtype = embedding.weight.dtype
        lowest = torch.finfo(self.dtype).min
        self._seen_or_not = [torch.tensor(x, dtype=self.dtype, device=self.device) for x in (0, lowest)]
        self._cache_name = (
            "cache" if "cache" in inspect.signature(type(self._decoder).forward).parameters else ("past_key_values")
        )
        self.window: int | None = getattr(config, "sliding_window", None)
        self._substitute: Callable[[int, nn.Module], nn.Module] = lambda index, layer: layer
        if config._attn_implementation == "sdpa":
            self._substitute = lambda index, layer: views.with_attention(layer, PACKED)
        self._views: dict[Any, nn.Module] = {}
        self._course: Callable | None = None
        self._prompts: Backbone | None = None
        self._held: Backbone | None = None
        self._head = views.head_of(model)
        self._parts = self._identities()
        with torch.inference_mode():
            self.slides, self._by_type = attention_layout(self)
            check_composition(self)

    def __repr__(self) -> str:
        return f"Backbone({type(self.model).__name__}, {self.depth} layers, width {self.width}, {self.vocab} tokens)"

    def _identities(self) -> list:
        """What views were made of, and must still be."""
        model: Any = self.model
        layers = [module for layer in views.layers_of(self._decoder) for module in layer.modules()]
        hooks = [hook for part in (model, self._decoder) for hook in (*part._forward_hooks, *part._forward_pre_hooks)]
        weight = model.get_input_embeddings().weight
        return [*map(id, [*layers, *views.final_of(self._decoder), model.get_output_embeddings()]), hooks,
                weight.dtype, weight.device]  # fmt: skip

    def check_unchanged(self) -> None:
        """Raise LabkitError if the model was taken apart, moved, hooked or cast since the views of it were made."""
        refuse(self.model)
        if self._identities() != self._parts:
            raise LabkitError(
                f"the {type(self.model).__name__} was changed (layers, norm, head, forward hooks, dtype or device) "
                "since this Lab was made; make a new one: labkit.Lab(model, tokenizer)"
            )

    def cut(self, layers: Any) -> "Backbone":
        """The same model ending after its first `layers` layers: the target of static early exit."""
        self.check_exit(layers, "early_exit", ", or a rule such as labkit.confidence(0.9)")
        cut = copy.copy(self)
        cut.depth = layers
        return cut

    def exiting(self, rule: Any, layers: Any = None) -> "Backbone":
        """The same model leaving its layers where `rule` says: the target of CALM's lossy decoding.

        Tested at `layers` (depths; default every one). Prompts still go through all layers. See labkit.exits.
        """
        depths = check_depths(layers, self.depth, "exit_layers")
        holding = self.holding()  # first, so that the copy has it too
        other = copy.copy(self)
        other._course, other._prompts = Leaving(self, holding, rule, depths), self
        return other

    @property
    def for_prompts(self) -> "Backbone":
        """What prompts are run through: itself, or all layers of a target that exits early."""
        return self._prompts or self

    def holding(self) -> "Backbone":
        """The same layers writing keys and values only: states that have left propagate through it unchanged."""
        if self._held is None:
            self._held = self.substituted(lambda index, layer: views.holding(layer))
        return self._held

    def substituted(self, substitute: Callable[[int, nn.Module], nn.Module]) -> "Backbone":
        """The same weights with some layers replaced: `substitute(index, layer)` returns the layer to run.

        labkit.views has the replacements: another attention function, a skipped sub-layer.
        """
        other, before = copy.copy(self), self._substitute
        other._substitute = lambda index, layer: substitute(index, before(index, layer))
        other._views, other._held = {}, None
        return other

    def check_exit(self, exit: Any, name: str = "exit", instead: str = "") -> None:
        """Raise LabkitError unless 1 <= exit <= depth."""
        if isinstance(exit, bool) or not isinstance(exit, int) or not 1 <= exit <= self.depth:
            raise LabkitError(
                f"{name}={exit!r}, but the target has {self.depth} layers; write an int from 1 to {self.depth} "
                f"({name}={self.depth} runs the whole model){instead}"
            )

    def cache(self, batch: int, capacity: int, taps=()) -> SlotCache:
        """Room for `capacity` slots in each of `batch` rows."""
        return SlotCache(len(self._layers), batch, capacity, taps)

    def view(self, start: int, stop: int) -> nn.Module:
        """The decoder's own forward over layers [start, stop); cached."""
        key = (start, stop)
        if key not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.pop(next(iter(self._views)))
            self._views[key] = views.layer_range(
                self._decoder, start, stop, substitute=self._substitute, width=self.width
            )
        return self._views[key]

    def run(
        self,
        x: Tensor,
        start: int,
        stop: int,
        cache: SlotCache,
        slots: Int[Tensor, "batch rows"],
        positions: Int[Tensor, "batch rows"],
        mask: Mask,
    ) -> Float[Tensor, "batch rows width"]:
        """Run rows through layers [start, stop) and return the residual stream, without the final norm.

        x: token ids `(batch, rows)` when start is 0, else hidden states `(batch, rows, width)`. The rows'
        keys and values go to `slots`; `mask` says which slots each row sees.
        """
        LOOK_UP.get()()
        if start == stop > 0:
            return x
        if self._course is not None:
            return self._course(x, start, stop, cache, slots, positions, mask)
        cache.place(slots, mask.width)
        return self.view(start, stop)(
            **{"input_ids" if start == 0 else "inputs_embeds": x, self._cache_name: cache},
            attention_mask=self.attention_mask(mask, start),
            position_ids=positions,
            use_cache=True,
            return_dict=True,
        ).last_hidden_state

    def attention_mask(self, mask: Mask, start: int):
        """A mask in the form that this model's forward takes."""
        if self._by_type:
            return {"full_attention": mask.full, "sliding_attention": mask.sliding}
        return mask.sliding if self.slides[min(start, len(self.slides) - 1)] else mask.full

    def mask(
        self,
        visible: Bool[Tensor, "batch rows slots"],
        positions: Int[Tensor, "batch rows"],
        slot_positions: Int[Tensor, "#batch slots"],
    ) -> Mask:
        """The masks of one run: `visible`, narrowed to the window (by positions) for layers that slide."""
        full = sliding = None
        if self._by_type or not all(self.slides):
            full = self._additive(visible)
        if self._by_type or any(self.slides):
            window = self.window or self.limit
            sliding = self._additive(visible & (positions[:, :, None] - slot_positions[:, None] < window))
        return Mask(full, sliding)

    def _additive(self, visible: Tensor) -> Tensor:
        return torch.where(visible, *self._seen_or_not)[:, None]

    def norm(self, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows out"]:
        """What the head reads: the residual stream after the final norm (and output projection)."""
        for module in self.final:
            hidden = module(hidden)
        return hidden

    def rms_weight(self) -> Tensor | None:
        """The weight of the final norm, if that is a plain RMSNorm."""
        weight = getattr(self.final[0], "weight", None)
        x = torch.linspace(-1, 1, self.width, dtype=self.dtype, device=self.device)[None, None]
        eps = getattr(self.model.config.get_text_config(), "rms_norm_eps", 1e-6)
        plain = weight is not None and weight.shape == x.shape[2:] and len(self.final) == 1
        same = plain and torch.allclose(
            self.norm(x), torch.nn.functional.rms_norm(x, x.shape[2:], weight, eps), atol=1e-3
        )
        return weight if same else None

    def logits(self, normed: Float[Tensor, "batch rows out"]) -> Float[Tensor, "batch rows vocab"]:
        """The model's own head path, logit scales and soft-caps included, on `norm`'s output."""
        LOOK_UP.get()()
        return self._head(inputs_embeds=normed, use_cache=False, return_dict=True).logits

    def head(self, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows vocab"]:
        """Final norm, then logits: what the model would say if it ended at this depth."""
        return self.logits(self.norm(hidden))
