"""Exit adapters: what stands between an early layer's state and the head, residual and zero at the start."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from labkit.backbone import Backbone
from labkit.errors import LabkitError, check_count, check_lab


class Adapter(nn.Module):
    """From exit states to what the head reads. `layers`: how many layers with keys and values of its own it has.

    normed: its output goes to the head as it is; otherwise through the target's final norm first. A plain nn.Module of
    hidden -> hidden may stand where an Adapter is wanted; it has no keys and values.
    """

    layers: int = 0
    normed: bool = False
    width: int
    exit: int | None = None
    """The exit layer that it was trained for, if that is known."""
    target_head: str | None = None
    """The hash of the head of the target that it was loaded for."""

    @abstractmethod
    def forward(
        self,
        hidden: Float[Tensor, "batch rows width"],
        cache: Any = None,
        positions: Int[Tensor, "batch rows"] | None = None,
        mask: Float[Tensor, "batch 1 rows slots"] | None = None,
    ) -> Float[Tensor, "batch rows width"]:
        """Adapted states. cache: a SlotCache of `layers` layers, placed for these rows; mask: additive."""

    def check(self, width: int) -> None:
        """Raise LabkitError unless it was made for states of this width."""
        name, own = type(self).__name__, getattr(self, "width", None)
        if own is None:
            raise LabkitError(f"the {name} adapter has no width; write self.width = {width} in its __init__")
        if own != width:
            raise LabkitError(f"the {name} adapter has width {own}, and the target {width}")


class Affine(Adapter):
    """h + W h + b, which starts as the identity. Source: tuned lens, 2303.08112."""

    def __init__(self, width: int, dtype: torch.dtype | None = None, device: Any = None):
        check_count(width, "width", "Affine")
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width, dtype=dtype, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden, cache=None, positions=None, mask=None):
        """Each row by itself."""
        return hidden + self.linear(hidden)


class Kangaroo(Adapter):
    """Norm, causal attention over committed exit states, norm; no MLP. The head reads the last norm's output.

    heads, kv_heads, head_dim: of the attention; rope_theta: base of its rotary positions. Source: Kangaroo, 2404.18911.
    """

    layers = 1
    normed = True

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None, *,
        rope_theta: float = 10000.0, eps: float = 1e-5, dtype: torch.dtype | None = None, device: Any = None,
    ):  # fmt: skip
        given = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, value in given.items():
            if value is not None or name in ("width", "heads"):
                check_count(value, name, "Kangaroo")
        super().__init__()
        self.width, self.heads, self.kv_heads = width, heads, kv_heads or heads
        self.head_dim, self.rope_theta, self.eps = head_dim or width // heads, rope_theta, eps
        if self.heads % self.kv_heads or self.head_dim % 2 or not self.head_dim:
            raise LabkitError(
                f"got width={width}, heads={heads}, kv_heads={kv_heads}, head_dim={self.head_dim}; "
                "kv_heads must divide heads, and head_dim (if not given, width // heads) be even and above 0"
            )
        make = lambda rows, columns: nn.Linear(columns, rows, bias=False, dtype=dtype, device=device)  # noqa: E731
        self.norm_in, self.norm_out = (nn.RMSNorm(width, eps, dtype=dtype, device=device) for _ in range(2))
        self.q = make(self.heads * self.head_dim, width)
        self.k, self.v = (make(self.kv_heads * self.head_dim, width) for _ in range(2))
        self.o = make(width, self.heads * self.head_dim)
        nn.init.zeros_(self.o.weight)

    @classmethod
    def like(cls, lab: Any) -> "Kangaroo":
        """One with the attention shape, dtype and device of a Lab's target, its last norm a copy of the target's."""
        backbone = _backbone(lab, "Kangaroo.like(lab)")
        config = backbone.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        made = cls(
            backbone.width, config.num_attention_heads, getattr(config, "num_key_value_heads", None),
            getattr(config, "head_dim", None), rope_theta=float(rope.get("rope_theta") or 10000.0),
            eps=getattr(config, "rms_norm_eps", 1e-5), dtype=backbone.dtype, device=backbone.device,
        )  # fmt: skip
        final = backbone.rms_weight()
        if final is not None:
            with torch.no_grad():
                made.norm_out.weight.copy_(final)
        return made

    def forward(self, hidden, cache=None, positions=None, mask=None):
        """With a cache: rows see the slots that `mask` shows. Without: a whole text, each row what came before it."""
        batch, rows, _ = hidden.shape
        if positions is None:
            positions = torch.arange(rows, device=hidden.device)[None]
        x = self.norm_in(hidden)
        q, k, v = (part(x).view(batch, rows, -1, self.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        out = scaled_dot_product_attention(
            q, k, v, mask, is_causal=cache is None, enable_gqa=self.heads != self.kv_heads
        )
        return self.norm_out(hidden + self.o(out.transpose(1, 2).reshape(batch, rows, -1)))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        inverse = self.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angle = (positions[:, None, :, None] * inverse).to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class ExitClassifier(nn.Module):
    """Whether a row may leave: one logit from its normalised state; a rule in `labkit.classifier(module, 0.5)`.

    Source: CALM, 2207.07061.
    """

    exit: int | None = None
    """The deepest exit layer that it was trained for, if that is known."""
    target_head: str | None = None
    """The hash of the head of the target that it was loaded for."""

    def __init__(self, width: int, dtype: torch.dtype | None = None, device: Any = None):
        check_count(width, "width", "ExitClassifier")
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 1, dtype=dtype, device=device)

    def forward(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows 1"]:
        """The logit of leaving."""
        return self.linear(nn.functional.rms_norm(hidden, (self.width,)))

    def check(self, width: int) -> None:
        """Raise LabkitError unless it was made for states of this width."""
        if self.width != width:
            raise LabkitError(f"the exit classifier has width {self.width}, and the target {width}")


class DraftVocabulary(nn.Module):
    """A head over part of the vocabulary, mapped back: tokens it does not have get probability 0.

    head: (..., width) -> (..., len(tokens)) logits. tokens: their ids, without repetition. vocab: the target's.
    """

    tokens: Tensor
    settings: dict[str, Any] | None = None
    """The arguments of `reduced` that made it, if that did."""
    target_head: str | None = None
    """The hash of the head of the target that it was loaded for."""

    def __init__(self, head: nn.Module, tokens: Sequence[int] | Tensor, vocab: int):
        super().__init__()
        if not isinstance(head, nn.Module):
            raise LabkitError(f"got head={head!r}; give an nn.Module of width to len(tokens)")
        ids = _ids(tokens, vocab)
        self.head, self.vocab = head, vocab
        self.register_buffer("tokens", ids)

    @classmethod
    def of(cls, lab: Any, tokens: Sequence[int] | Tensor) -> "DraftVocabulary":
        """The target's own norm and the rows of its head for `tokens`."""
        backbone = _backbone(lab, "DraftVocabulary.of(lab, tokens)")
        weight = backbone.model.get_output_embeddings().weight
        ids = _ids(tokens, backbone.vocab)
        reduced = nn.Linear(weight.shape[1], len(ids), bias=False, dtype=weight.dtype, device=weight.device)
        made = cls(nn.Sequential(_Norm(backbone), reduced), ids, backbone.vocab).to(weight.device)
        with torch.no_grad():
            reduced.weight.copy_(weight[ids.to(weight.device)])
        return made

    @classmethod
    def reduced(
        cls, width: int, tokens: Sequence[int] | Tensor, vocab: int, *, norm: bool = True, eps: float = 1e-5,
        dtype: torch.dtype | None = None, device: Any = None,
    ) -> "DraftVocabulary":  # fmt: skip
        """One to train: a linear layer to `tokens`, behind an RMS norm of its own (`norm`), and nothing of the target.

        norm=False: for behind an adapter whose output is normed. eps: of the norm.
        """
        linear = nn.Linear(width, len(tokens), bias=False, dtype=dtype, device=device)
        before = nn.RMSNorm(width, eps, dtype=dtype, device=device) if norm else nn.Identity()
        made = cls(nn.Sequential(before, linear), tokens, vocab).to(device)
        made.settings = {"norm": norm, "eps": eps}
        return made

    def forward(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows vocab"]:
        """Logits of the whole vocabulary."""
        found = self.head(hidden)
        if found.shape[-1] != len(self.tokens):
            raise LabkitError(f"the head says {found.shape[-1]} tokens, and the map has {len(self.tokens)}")
        absent = torch.finfo(found.dtype).min / 2
        out = found.new_full((*found.shape[:-1], self.vocab), absent)
        return out.index_copy_(-1, self.tokens, found)


def _backbone(lab: Any, call: str) -> Backbone:
    """Of a Lab, or itself."""
    if isinstance(lab, Backbone):
        return lab
    check_lab(lab, call)
    return lab.backbone


def _ids(tokens: Any, vocab: int) -> Tensor:
    """Ids of part of a vocabulary, checked, on the CPU or where they are."""
    needed = f"needed is a list of different ids from 0 to {vocab - 1}"
    try:
        ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise LabkitError(f"got tokens={tokens!r}; {needed}") from error
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    listed = ids.tolist() if whole and ids.ndim == 1 else []
    if not listed or min(listed) < 0 or max(listed) >= vocab or len(set(listed)) < len(listed):
        raise LabkitError(f"got tokens of shape {tuple(ids.shape)}, {ids.dtype}; {needed}")
    return ids.long()


class _Norm(nn.Module):
    """The target's final norm; its weights stay the target's, and a copy takes no more of it along."""

    def __init__(self, backbone: Any):
        super().__init__()
        self._final = tuple(backbone.final)

    def forward(self, hidden: Tensor) -> Tensor:
        """What the head reads."""
        for module in self._final:
            hidden = module(hidden)
        return hidden
