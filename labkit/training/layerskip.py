"""LayerSkip: a causal LM whose early layers predict through the one head (2404.16710)."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from labkit import data, views
from labkit.backbone import Backbone
from labkit.errors import LabkitError
from labkit.loading import choose_device, choose_dtype, load_model
from labkit.replay import ahead, replay_rounds
from labkit.training.fit import Schedule, Trained, fit

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
    against the last layer's (0, as published: the first exits weigh next to nothing). scratch: dropout grows from 0
    over the run, as for a model that starts from random weights. exits=False: the last layer alone, without dropout.
    compile: fuse operations with torch.compile (on a CPU twice as fast; it wants a C++ compiler).
    """

    backbone: Any
    exit_loss: Any

    def __init__(
        self, model: Any, *, steps: int, dropout: float = 0.1, exit_scale: float = 1.0, exit_floor: float = 0.0,
        rotation: int = 4, scratch: bool = True, exits: bool = True, compile: bool = False, seed: int = 0,
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
        self.exits, self.step = exits, 0
        self.dropout = [dropout * (2 ** (layer / max(1, depth - 1)) - 1) for layer in range(depth)]
        below = [exit_scale * sum(range(layer + 1)) for layer in range(depth - 1)]
        last = depth - 1 + exit_scale * sum(range(depth - 1)) or 1.0
        self.weights = [*(max(weight, exit_floor * last) for weight in below), last]
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
        on = [layer for layer in range(last) if self.exits and (layer - self.step) % self.rotation == 0]
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
        """The weighted sum of the cross-entropies of this step's exits."""
        states, labels = self.states(tokens), tokens[:, 1:].flatten()
        return {"loss": torch.stack([weight * self.exit_loss(states[at], labels) for at, weight in self.on()]).sum()}

    def _exit_loss(self, state: Float[Tensor, "batch rows width"], labels: Int[Tensor, "places"]) -> Tensor:
        return cross_entropy(self.logits(state)[:, :-1].flatten(0, 1).float(), labels)


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


def layerskip(
    out: Any,
    *,
    model: str | None = None,
    corpus: Any = "stdlib",
    held_out: Any = 0.05,
    layers: int = 12,
    width: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    inner: int = 512,
    vocab: int = 4096,
    tokens: int = 30_000_000,
    batch: int = 8,
    length: int = 1024,
    lr: float = 2e-3,
    dropout: float = 0.1,
    exit_scale: float = 1.0,
    exit_floor: float = 0.0,
    rotation: int = 4,
    exits: bool = True,
    compile: bool = False,
    save_every: int = 50,
    eval_every: int = 200,
    eval_rows: int = 32,
    seed: int = 0,
    device: Any = None,
    dtype: Any = "bfloat16",
    progress: bool = True,
) -> Trained:
    """Train a causal LM with layer dropout and the early-exit loss, so that its exits draft well.

    out: the run's folder; a run that stopped goes on
    model: continue this one (a folder, hub id or shipped name); default: a Llama from scratch, with a new tokenizer
    corpus: stdlib, stdlib-docstrings, package:NAME, a file or a folder
    held_out: share of the files held out for evaluation
    layers: layers of a model from scratch
    width: width of its residual stream
    heads: its attention heads
    kv_heads: its heads of keys and values, shared by several attention heads
    inner: width of its MLP
    vocab: tokens of its byte-level BPE tokenizer
    tokens: tokens to train on in each process, repetitions counted
    batch: rows a step, in each process
    length: tokens a row, and the positions of a model from scratch
    lr: highest learning rate
    dropout: share of the samples that pass by the last layer, p_max; by the first none do
    exit_scale: how much the exits weigh in the loss against the last layer, e_scale
    exit_floor: least weight of an exit, as a share of the last layer's; 0 as published
    rotation: every so many-th exit learns in a step, in turn, and the last layer always
    exits: let the exits learn; without, the same model is trained plainly, for comparison
    compile: fuse operations with torch.compile, which wants a C++ compiler
    save_every: steps between checkpoints
    eval_every: steps between evaluations
    eval_rows: held-out rows to evaluate on
    seed: seed of weights, order and dropout
    device: cpu or cuda; default: cuda where there is one
    dtype: bfloat16 or float32, of the computation; the weights are float32 while they learn
    progress: show a bar
    """
    place = choose_device(device)
    computed, steps = choose_dtype(dtype, place), tokens // max(1, batch * length)
    if computed not in (torch.float32, torch.bfloat16):
        raise LabkitError(f"got dtype={dtype!r}; write 'bfloat16' or 'float32'")
    if min(batch, eval_rows, steps) < 1 or length < 2:
        raise LabkitError(
            f"got tokens={tokens}, batch={batch}, length={length}, eval_rows={eval_rows}; a step takes batch x length "
            "tokens, and a row at least 2: write tokens for one step or more, and the others from 1"
        )
    if min(layers, heads, kv_heads, inner, width) < 1 or width % (2 * heads) or heads % kv_heads:
        raise LabkitError(
            f"got layers={layers}, width={width}, heads={heads}, kv_heads={kv_heads}, inner={inner}; each must be 1 or "
            "more, width an even multiple of heads, and heads a multiple of kv_heads"
        )
    schedule = Schedule(steps, batch, lr, save_every=save_every, eval_every=eval_every, seed=seed)
    train, rest = data.named(corpus).split(held_out)
    torch.manual_seed(seed)
    if model is None:
        tokenizer = data.train_tokenizer(train, vocab)
        shape: dict[str, Any] = dict(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        made: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**shape))
        tokenizer.model_max_length = length
    else:
        made, tokenizer = load_model(model, device="cpu", dtype=torch.float32)
        if tokenizer is None:
            raise LabkitError(f"{model!r} has no tokenizer; give one that save_pretrained wrote next to the model")
    learn, kept = train.rows(tokenizer, length), rest.rows(tokenizer, length)[:eval_rows]
    module = LayerSkip(
        made, steps=steps, dropout=dropout, exit_scale=exit_scale, exit_floor=exit_floor, rotation=rotation,
        scratch=model is None, exits=exits, compile=compile, seed=seed,
    ).to(place)  # fmt: skip
    if length > module.backbone.limit:
        raise LabkitError(f"got length={length}, and the model has {module.backbone.limit} positions; write no more")

    def evaluate() -> dict[str, float]:
        with torch.autocast(place.type, computed, enabled=computed != torch.float32):
            return judge(module, kept)

    def write(folder: Path) -> None:
        made.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    settings = dict(
        recipe="layerskip", model=model, corpus=train.hash, length=length, layers=layers, width=width, heads=heads,
        kv_heads=kv_heads, inner=inner, vocab=vocab, dropout=dropout, exit_scale=exit_scale,
        exit_floor=exit_floor, rotation=rotation, exits=exits, dtype=str(computed),
    )  # fmt: skip
    known = {
        "data": {"train": train.hash, "held_out": rest.hash, "held_out_files": [d.name for d in rest.documents],
                 "train_tokens": learn.numel(), "train_bytes": train.size_bytes},
        "parameters": sum(p.numel() for p in made.parameters()),
    }  # fmt: skip
    return fit(
        module, Rows(learn), out, schedule, write=write, evaluate=evaluate, config=settings, provenance=known,
        tokens_per_row=length, device=place, dtype=computed, progress=progress,
    )  # fmt: skip
