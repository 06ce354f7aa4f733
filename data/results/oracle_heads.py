"""How close the loop comes to the ideal with heads that are always right: python data/results/oracle_heads.py FILE.

An MLPSpeculator of random weights (inner width 1024, as in llama-160m-accelerator) is told the target's own greedy
text, so that its cost is real and its drafts are accepted whole.
"""

import sys

import torch

import labkit
from labkit.bench import bench, report, write_json
from labkit.cli import as_ids, read_prompt_files

HEADS, COUNT = 3, 64


class Oracle(labkit.MLPSpeculator):
    """Heads whose logits are lifted at the tokens that are right."""

    right: list[int] = [0] * HEADS

    def logits(self, head, state):
        """As without, and the right token's far above."""
        logits = super().logits(head, state)
        logits[..., self.right[head]] += 1e4
        return logits


class Told(labkit.Heads):
    """Tells the oracle where it is in which text."""

    def propose(self, state, context):
        """A chain of right tokens."""
        history = context.history[0]
        whole = next(text for text in TEXTS if text[: len(history)] == list(history))
        self.heads.right = (whole + [0] * HEADS)[len(history) : len(history) + HEADS]
        return super().propose(state, context)


lab = labkit.load("smollm2-135m", device="cpu")
names = ("arithmetic", "chat", "code", "editing", "question_answering", "summarising", "translation")
prompts = as_ids(lab, [read_prompt_files([name])[0] for name in names])
TEXTS = [[*ids, *lab.generate(ids, max_new_tokens=COUNT).tokens[0]] for ids in prompts]
torch.manual_seed(0)
oracle = Oracle(lab.backbone.head_width, lab.backbone.vocab, HEADS, 1024).eval().requires_grad_(False)
result = bench(lab, prompts, [Told(oracle)], max_new_tokens=COUNT)
result["command"] = "python data/results/oracle_heads.py " + sys.argv[1]
print(report(result))
write_json(result, sys.argv[1])
