"""The loss of LayerSkip, and how every exit does on held-out text (2404.16710)."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from labkit import views
from labkit.backbone import Backbone
from labkit.errors import LabkitError
from labkit.replay import ahead, replay_rounds

GUESSES = 4
"""Draft length at which tokens per round are replayed while training."""


class Rows(Dataset):
    """Rows of tokens as a Trainer wants them."""

    def __init__(self, tokens: Int[Tensor, "rows length"]):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[at]}


class LayerSkip(nn.Module):
    """The loss of a model with layer dropout and early exits; `step` says where in training it is.

    steps: of the whole run. dropout: the last layer's p_max. exit_scale: e_scale of the exits' weights. rotation: every
    R-th exit is on in a step, another one in the next; the last layer always. exit_floor: least weight of an exit
    against the last layer's (0, as published: the first exits weigh next to nothing). focus: an exit, counted from 1,
    that learns in every step and weighs as much as the last layer; 0: none. distill: share of the exits' loss that is
    taken against the last layer's law (without a gradient to it) in place of the text. scratch: dropout grows from 0
    over the run, as for a model that starts from random weights. exits=False: the last layer alone, without dropout.
    compile: fuse operations with torch.compile (on a CPU twice as fast; it wants a C++ compiler).
    """

    backbone: Any
    exit_loss: Any

    def __init__(
        self, model: Any, *, steps: int, dropout: float = 0.1, exit_scale: float = 1.0, exit_floor: float = 0.0,
        focus: int = 0, distill: float = 0.0, rotation: int = 4, scratch: bool = True, exits: bool = True,
        compile: bool = False, seed: int = 0,
    ):  # fmt: skip
        super().__init__()
        self.model, self.steps, self.rotation, self.scratch, self.seed = model, steps, rotation, scratch, seed
        self.__dict__["backbone"] = Backbone(model.eval())
        self.decoder = views.find_decoder(model)
        self.layers = views.layers_of(self.decoder)
        depth = len(self.layers)
        if not 0 <= dropout < 1 or min(exit_scale, exit_floor) < 0 or not 1 <= rotation <= depth:
            raise LabkitError(
                f"got dropout={dropout}, exit_scale={exit_scale}, exit_floor={exit_floor}, rotation={rotation}; write "
                f"dropout from 0 to below 1, the exits' from 0, and rotation from 1 to the model's {depth} layers"
            )
        if not 0 <= focus < depth or not 0 <= distill <= 1:
            raise LabkitError(
                f"got focus={focus}, distill={distill}; write an exit from 1 to {depth - 1} (0: none), and a share"
            )
        self.exits, self.focus, self.distill, self.step = exits, focus - 1, distill, 0
        self.dropout = [dropout * (2 ** (layer / max(1, depth - 1)) - 1) for layer in range(depth)]
        below = [exit_scale * sum(range(layer + 1)) for layer in range(depth - 1)]
        last = depth - 1 + exit_scale * sum(range(depth - 1)) or 1.0
        self.weights = [*(max(weight, exit_floor * last) for weight in below), last]
        if focus:
            self.weights[self.focus] = last
        self.__dict__["exit_loss"] = torch.compile(self._exit_loss) if compile else self._exit_loss
        for layer in self.layers if compile else ():
            layer.forward = torch.compile(layer.forward)

    def keep(self, batch: int, device: torch.device) -> Tensor | None:
        """`(layers, batch)` bool: which layers each sample of this step goes through; a function of seed and step."""
        if not self.training or not self.exits:
            return None
        share = 2 ** (self.step / max(1, self.steps - 1)) - 1 if self.scratch else 1.0
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        random = torch.Generator().manual_seed((self.seed * 1_000_003 + self.step) * 1009 + rank)
        drawn = torch.rand(len(self.layers), batch, generator=random, device="cpu")
        return (drawn >= share * torch.tensor(self.dropout, device="cpu")[:, None]).to(device)

    def on(self) -> list[tuple[int, float]]:
        """(layer, weight) of the exits of this step, the last layer among them; the weights' sum is 1."""
        last = len(self.layers) - 1
        learns = [(layer - self.step) % self.rotation == 0 or layer == self.focus for layer in range(last)]
        on = [layer for layer in range(last) if self.exits and learns[layer]]
        weights = {layer: self.weights[layer] for layer in (*on, last) if layer == last or self.weights[layer]}
        return [(layer, weight / sum(weights.values())) for layer, weight in weights.items()]

    def states(self, tokens: Int[Tensor, "batch rows"]) -> list[Float[Tensor, "batch rows width"]]:
        """The residual stream after every layer, with the dropout of this step."""
        keep, found = self.keep(len(tokens), tokens.device), []

        def hook(layer: int):
            def seen(module, given, output):
                out = output[0] if isinstance(output, tuple) else output
                if keep is not None:
                    out = torch.where(keep[layer, :, None, None], out, given[0].to(out.dtype))
                found.append(out)
                return (out, *output[1:]) if isinstance(output, tuple) else out

            return seen

        handles = [layer.register_forward_hook(hook(at)) for at, layer in enumerate(self.layers)]
        try:
            self.decoder(input_ids=tokens, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def logits(self, state: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows vocab"]:
        """Through the one norm and head."""
        return self.backbone.logits(self.backbone.norm(state))

    def forward(self, tokens: Int[Tensor, "batch rows"]) -> dict[str, Tensor]:
        """The weighted sum of the losses of this step's exits."""
        states, labels = self.states(tokens), tokens[:, 1:].flatten()
        law = None
        if self.distill and self.exits:
            with torch.no_grad():
                law = self._flat(states[-1]).softmax(-1)
        last = len(states) - 1
        losses = [weight * self.exit_loss(states[at], labels, law if at < last else None) for at, weight in self.on()]
        return {"loss": torch.stack(losses).sum()}

    def _flat(self, state: Float[Tensor, "batch rows width"]) -> Float[Tensor, "places vocab"]:
        return self.logits(state)[:, :-1].flatten(0, 1).float()

    def _exit_loss(
        self, state: Float[Tensor, "batch rows width"], labels: Int[Tensor, "places"],
        law: Float[Tensor, "places vocab"] | None,
    ) -> Tensor:  # fmt: skip
        logits = self._flat(state)
        loss = cross_entropy(logits, labels)
        return loss if law is None else torch.lerp(loss, cross_entropy(logits, law), self.distill)


@torch.no_grad()
def judge(module: LayerSkip, tokens: Int[Tensor, "rows length"], temperature: float = 0.8, batch: int = 4) -> dict:
    """How every exit does on held-out text, by teacher-forced passes; exits are counted 1 to L.

    loss_E: in nats a token. agree_E: share of places where the exit's best token is the last layer's.
    overlap_E: mean of sum(min(p, q)) at the temperature, the chance that a drawn token is accepted by `Rejection`.
    tokens_per_round_E, alpha_E: of a replay with drafts of 4, as if the text were the target's own.
    """
    depth, device = len(module.layers), next(module.parameters()).device
    loss, overlap = [0.0] * depth, [0.0] * depth
    agree: list[list[Tensor]] = [[] for _ in range(depth)]
    for some in tokens.split(batch):
        some = some.to(device)
        states, labels = module.states(some), some[:, 1:].flatten()
        target = module.logits(states[-1])[:, :-1].float()
        best, law = target.argmax(-1), (target / temperature).softmax(-1)
        for layer, state in enumerate(states):
            logits = module.logits(state)[:, :-1].float()
            loss[layer] += cross_entropy(logits.flatten(0, 1), labels).item() * len(some)
            agree[layer].append((logits.argmax(-1) == best).cpu())
            overlap[layer] += torch.minimum((logits / temperature).softmax(-1), law).sum(-1).mean().item() * len(some)
    row: dict[str, float] = {}
    for layer in range(depth):
        same = torch.cat(agree[layer])
        run = replay_rounds(ahead(same, GUESSES), torch.ones_like(same))
        row |= {
            f"loss_{layer + 1}": loss[layer] / len(tokens), f"agree_{layer + 1}": same.float().mean().item(),
            f"overlap_{layer + 1}": overlap[layer] / len(tokens), f"alpha_{layer + 1}": run.alpha,
            f"tokens_per_round_{layer + 1}": run.tokens_per_round,
        }  # fmt: skip
    return {name: round(value, 4) for name, value in row.items()}
