"""An independent decoder that leaves early (CALM), and rules and models to run it with."""

import families
import torch

import labkit

COUNT = 12
PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
RULES = {
    "confidence": (labkit.confidence(0.4), None),
    "margin at two depths": (labkit.margin(0.3), (1, 3)),
    "saturation": (labkit.saturation(0.75), (1, 3)),
    "decaying": (labkit.confidence(labkit.exits.decaying(0.5, rate=4, length=4)), (1, 2)),
}
_labs: dict = {}


def odd(layer, before, after, logits, step):
    return (step % 2 == 1) & (layer == 2)


RULES["every other token"] = (odd, None)


def lab_of(family="llama"):
    if family not in _labs:
        _labs[family] = labkit.Lab(families.tiny(family))
    return _labs[family]


def always(layer, before, after, logits, step):
    return torch.ones_like(step, dtype=torch.bool)


def never(layer, before, after, logits, step):
    return torch.zeros_like(step, dtype=torch.bool)


# -- CALM, written out ------------------------------------------------------------------------------------


class Calm:
    """Greedy decoding of one prompt that leaves by a rule, on a llama, layer by layer in plain torch.

    The tokens before the last one of the prompt go through all layers. A state that has left goes up unchanged, and
    each layer above projects its keys and values from it. Uses the model's weights and rotary tables, no labkit.
    """

    def __init__(self, model):
        self.inner, self.head, config = model.model, model.lm_head, model.config
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads
        self.size = config.hidden_size // self.heads
        self.keys = [[] for _ in self.inner.layers]
        self.values = [[] for _ in self.inner.layers]

    def turned(self, x, position):
        cos, sin = self.inner.rotary_emb(x, torch.tensor([[position]]))
        half = self.size // 2
        return x * cos[0, 0] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[0, 0]

    def write(self, index, state, position):
        layer = self.inner.layers[index]
        normed = layer.input_layernorm(state)
        self.keys[index].append(self.turned(layer.self_attn.k_proj(normed).view(self.shared, self.size), position))
        self.values[index].append(layer.self_attn.v_proj(normed).view(self.shared, self.size))
        return normed

    def layer(self, index, state, position):
        layer, group = self.inner.layers[index], self.heads // self.shared
        normed = self.write(index, state, position)
        query = self.turned(layer.self_attn.q_proj(normed).view(self.heads, self.size), position)
        out = []
        for head in range(self.heads):
            keys = torch.stack([k[head // group] for k in self.keys[index]])
            values = torch.stack([v[head // group] for v in self.values[index]])
            out.append((keys @ query[head] / self.size**0.5).softmax(0) @ values)
        state = state + layer.self_attn.o_proj(torch.cat(out))
        return state + layer.mlp(layer.post_attention_layernorm(state))

    def logits(self, state):
        return self.head(self.inner.norm(state))

    def token(self, token, position, rule, depths, step):
        """Logits after one more token, and the depth it was read after."""
        state, count, left = self.inner.embed_tokens(torch.tensor(token)), len(self.inner.layers), None
        for index in range(count):
            if left is not None:
                self.write(index, state, position)
                continue
            before, state = state, self.layer(index, state, position)
            if rule is not None and index + 1 in depths:
                said = rule(
                    index + 1, before[None], state[None], lambda: self.logits(state)[None], torch.tensor([step])
                )
                left = index + 1 if bool(said) else None
        return self.logits(state), left or count

    @torch.inference_mode()
    def decode(self, prompt, count, rule, depths):
        text, exits = list(prompt), []
        for position, token in enumerate(prompt[:-1]):
            self.token(token, position, None, (), 0)
        for step in range(count):
            logits, left = self.token(text[-1], len(text) - 1, rule, depths, step)
            text.append(int(logits.argmax()))
            exits.append(left)
        return text[len(prompt) :], exits


def calm(model, prompt, rule, layers, count=COUNT):
    depths = [d for d in layers or range(1, 4) if d < 4]
    return Calm(model).decode(prompt, count, rule, depths)
