"""LayerSkip: a causal LM whose early layers predict through the one head (2404.16710)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf

from labkit import data
from labkit.errors import LabkitError
from labkit.heads.trained import model_hash
from labkit.loading import choose_device, choose_dtype, load_model
from labkit.training.early_exit_loss import LayerSkip, Rows, judge
from labkit.training.fit import Schedule, Trained, fit


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
    focus: int = 0,
    distill: float = 0.0,
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
    focus: an exit that learns in every step and weighs as much as the last layer; 0: none
    distill: share of the exits' loss taken against the last layer's law in place of the text; 0 as published
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
        start = None
        tokenizer.model_max_length = length
    else:
        made, tokenizer = load_model(model, device="cpu", dtype=torch.float32)
        if tokenizer is None:
            raise LabkitError(f"{model!r} has no tokenizer; give one that save_pretrained wrote next to the model")
        start = model_hash(SimpleNamespace(model=made))
    learn, kept = train.rows(tokenizer, length), rest.rows(tokenizer, length)[:eval_rows]
    module = LayerSkip(
        made, steps=steps, dropout=dropout, exit_scale=exit_scale, exit_floor=exit_floor, focus=focus,
        distill=distill, rotation=rotation, scratch=model is None, exits=exits, compile=compile, seed=seed,
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
        recipe="layerskip", model=model, start=start, corpus=train.hash, length=length, layers=layers, width=width,
        heads=heads, kv_heads=kv_heads, inner=inner, vocab=vocab, dropout=dropout, exit_scale=exit_scale,
        exit_floor=exit_floor, focus=focus, distill=distill, rotation=rotation, exits=exits, dtype=str(computed),
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
