"""The README's picture of the speed-up of early exits: python data/results/speedup.py data/pictures/speedup.png.

Foretold from one forward pass over the model's own texts, and measured by a sweep over the same prompts.
"""

import sys

import labkit
import labkit.view
from labkit.cli import as_ids, read_prompt_files
from labkit.costs import measure_costs
from labkit.doctor import machine

EXITS, LENGTHS, NEW_TOKENS = (2, 4, 6, 8), (1, 2, 4), 96


def main(out: str) -> None:
    """Run it, and write the picture."""
    lab = labkit.load("tiny", device="cpu")
    prompts = as_ids(lab, read_prompt_files(["completion"]))
    texts = [lab.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts]
    foretold = labkit.replay(lab, texts, exits=range(1, lab.backbone.depth), ngram=False, max_draft=max(LENGTHS))
    surface = foretold.surface(measure_costs(lab), thresholds=(None,), max_drafts=LENGTHS)
    grid = [labkit.EarlyExit(exit, max_draft=length) for exit in EXITS for length in LENGTHS]
    measured = labkit.sweep(lab, prompts, grid, max_new_tokens=NEW_TOKENS, repeats=1).to_pandas()
    m = machine(lab.backbone)
    caption = f"{m['model']}, {m['dtype']}, {m['device']}, {m['threads']} threads, {len(prompts)} prompts, {m['date']}"
    labkit.view.speedup(surface, measured, caption).savefig(out)


if __name__ == "__main__":
    main(sys.argv[1])
