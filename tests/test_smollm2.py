"""The real model: the text of transformers' generate, and the acceptance of its assistant_early_exit."""

import pytest
import torch

import labkit
from labkit.bench import ours, theirs
from labkit.cli import as_ids, read_prompt_files
from labkit.compare import differences

pytestmark = pytest.mark.smollm2
COUNT = 24


@pytest.fixture(scope="module")
def prompts(smollm2):
    """One prompt of two sets, as ids."""
    return as_ids(smollm2, [read_prompt_files([name])[0] for name in ("arithmetic", "editing")])


@pytest.fixture(scope="module")
def texts(smollm2, prompts):
    """What transformers writes after each."""
    whole = [smollm2.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=COUNT)[0] for ids in prompts]
    return [text[len(ids) :].tolist() for ids, text in zip(prompts, whole, strict=True)]


@pytest.mark.parametrize(
    "drafter", [labkit.Plain(), labkit.EarlyExit(24, max_draft=2), labkit.PromptLookup()], ids=repr
)
def test_text_of_generate(smollm2, prompts, texts, drafter):
    for ids, want in zip(prompts, texts, strict=True):
        out = smollm2.generate(ids, drafter, max_new_tokens=COUNT)
        assert all(d.near_tie for d in differences(smollm2.backbone, [ids], [want], out.tokens))


def test_rounds_of_assistant_early_exit(smollm2, prompts):
    """As many rounds for the same text as transformers needs at the same exit and draft length."""
    ids = prompts[0]
    _, _, _, mine = ours(smollm2, "", labkit.EarlyExit(24, max_draft=2), COUNT).run(ids)
    _, _, _, other = theirs(smollm2, "", COUNT, assistant_early_exit=24, num_assistant_tokens=2).run(ids)
    assert mine == other


def test_self_draft_is_accepted_whole(smollm2, prompts):
    out = smollm2.generate(prompts[0], labkit.EarlyExit(30, max_draft=3), max_new_tokens=12)
    assert out.acceptance_rate == 1.0
