"""Attention functions that a view may call instead of the model's: packed groups, keys only, the best keys.

Each has the signature that transformers calls registered attention functions with: query (batch, heads, rows, dim), key
and value (batch, kv_heads, width, dim), an additive mask (batch, 1, rows, width); it gives (batch, rows, heads, dim).
"""

from collections.abc import Callable

from einops import einsum, rearrange, repeat
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED = "labkit_packed_gqa"
PACK_AT_MOST = 64
"""Rows up to which queries are folded; a longer prefill block expands keys and values as usual."""


def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    """Call sdpa with the query group folded into the rows, so that K and V need no expansion.

    query (batch, heads, rows, dim), key and value (batch, kv_heads, width, dim). Bit-equal to expanding.
    """
    batch, heads, rows, dim = query.shape
    group = heads // key.shape[1]
    plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if rows > PACK_AT_MOST or attention_mask is None or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if group > 1:
        query = query.reshape(batch, key.shape[1], group * rows, dim)
        mask = attention_mask.expand(batch, 1, rows, -1)
        attention_mask = mask.expand(-1, -1, group, -1) if rows == 1 else mask.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(query, key, value, attention_mask, scale=kwargs.get("scaling"))
    return out.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def keys_only(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    """Attend to nothing: the keys and values have been written, and that is all that is wanted."""
    return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


KEYS_ONLY = "labkit_keys_only"
AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(KEYS_ONLY, keys_only)


def top_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, budget: int, **kwargs
):
    """Attend, for each query, to the `budget` keys of the highest scores only: their values alone are gathered."""
    heads, kv_heads, rows = query.shape[1], key.shape[1], query.shape[2]
    query = rearrange(query, "b (k g) r d -> b k (g r) d", k=kv_heads)
    scores = query @ key.mT * (kwargs.get("scaling") or query.shape[3] ** -0.5)
    if kwargs.get("softcap") is not None:
        scores = (scores / kwargs["softcap"]).tanh() * kwargs["softcap"]
    scores = scores + repeat(attention_mask, "b 1 r w -> b 1 (g r) w", g=heads // kv_heads)
    best, at = scores.topk(min(budget, scores.shape[3]), -1)
    weights = best.float().softmax(-1).to(value.dtype)
    chosen = value.gather(2, repeat(at, "b k q n -> b k (q n) d", d=value.shape[3]))
    out = einsum(weights, rearrange(chosen, "b k (q n) d -> b k q n d", q=at.shape[2]), "b k q n, b k q n d -> b k q d")
    return rearrange(out, "b k (g r) d -> b r (k g) d", r=rows), None


def register_attention(name: str, function: Callable) -> str:
    """Make a function known to transformers under a name, which is returned."""
    AttentionInterface.register(name, function)
    return name
