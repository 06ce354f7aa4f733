"""How the drafts that come with "tiny" do on held-out code: python data/results/tiny.py data/results/tiny.json.

Two texts that the model was not trained on: the held-out files of the standard library, and another package (pip).
For each: the loss after every layer and the exits' alpha, teacher-forced; and for every draft real runs from the
beginnings of its rows, greedy (Match) and at temperature 0.8 (Rejection), with the share of 4-grams in the new text
that it had before. Of the text that it was trained on, the teacher-forced figures only: how much it learnt by heart.
"""

import json
import sys
from collections.abc import Sequence

import labkit
from labkit import EarlyExit, Heads, Match, Rejection, data, load_heads
from labkit.doctor import machine
from labkit.heads.adapter_files import load_adapter
from labkit.training.early_exit_loss import LayerSkip, judge

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, ROWS, LENGTH = 16, 64, 128, 16, 1024


def repeated(tokens: Sequence[int]) -> float:
    """The share of 4-grams that came before in the same text."""
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / max(1, len(grams))


def some(rows, count: int):
    """So many rows from all over the text."""
    return rows[:: max(1, len(rows) // count)][:count]


def main(out: str) -> None:
    """Run all of it and write the figures."""
    lab = labkit.load("tiny", device="cpu", dtype="float32")
    drafters = {f"EarlyExit({exit}, max_draft=3)": EarlyExit(exit, max_draft=3) for exit in (2, 4, 6)}
    drafters["EarlyExit(2, adapter=kangaroo, max_draft=3)"] = EarlyExit(
        2, adapter=load_adapter("tiny/kangaroo", lab), max_draft=3
    )
    for name in ("mlp-speculator", "medusa"):
        drafters[f"Heads({name})"] = Heads(load_heads(f"tiny/{name}", lab))
    command = "python data/results/tiny.py data/results/tiny.json"
    found = {"command": command, "machine": machine(lab.backbone), "texts": {}}
    learnt, held_out = data.standard_library().split(0.05)
    texts = {"standard library, learnt": learnt, "standard library, held out": held_out, "pip": data.package("pip")}
    for title, corpus in texts.items():
        rows = corpus.rows(lab.tokenizer, LENGTH)
        judged = judge(LayerSkip(lab.model, steps=1).eval(), some(rows, ROWS))
        losses, alphas = (
            {layer: judged[f"{figure}_{layer}"] for layer in range(1, lab.backbone.depth + 1)}
            for figure in ("loss", "alpha")
        )
        found["texts"][title] = {"hash": corpus.hash, "loss": losses, "alpha": alphas, "runs": (runs := [])}
        print(title, losses, alphas, flush=True)
        if corpus is learnt:
            continue
        prompts = [row[:PROMPT_TOKENS].tolist() for row in some(rows, PROMPTS)]
        for temperature, acceptance in ((0.0, Match()), (0.8, Rejection())):
            for name, drafter in drafters.items():
                outs = [
                    lab.generate(prompt, drafter, max_new_tokens=NEW_TOKENS, temperature=temperature,
                                 acceptance=acceptance, seed=seed, eos_token_id=None)
                    for seed, prompt in enumerate(prompts)
                ]  # fmt: skip
                accepted, rejected = (sum(getattr(o, figure) for o in outs) for figure in ("accepted", "rejections"))
                figures = {
                    "drafter": name, "temperature": temperature, "alpha": accepted / (accepted + rejected),
                    "tokens_per_round": sum(o.new_tokens for o in outs) / sum(o.row_rounds for o in outs),
                    "repeated_4grams": sum(repeated(o.tokens[0]) for o in outs) / len(outs),
                }  # fmt: skip
                runs.append({key: round(v, 4) if isinstance(v, float) else v for key, v in figures.items()})
                print(title, runs[-1], flush=True)
    with open(out, "w") as file:
        json.dump(found, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
