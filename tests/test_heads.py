"""MLPSpeculator and Medusa: golden outputs, trees, and losslessness with any heads."""

import math

import families
import pytest
import torch
from golden import GOLDEN, SPECULATORS, golden, made, target
from roster import lab_of, texts
from safetensors.torch import load_file
from scripted import reference, watched

import labkit
from labkit import Heads, LabkitError, Rejection, Typical, load_heads
from labkit.heads.trees import ProductTree


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculator_golden(name):
    folder, config, expected = golden(name)
    heads = load_heads(folder, target(config["emb_dim"], config["vocab_size"]))
    logits = heads(expected["state"], expected["tokens"])
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5, rtol=1e-5)
    for count in range(1, heads.count):  # fewer heads in use: the same logits
        torch.testing.assert_close(heads(expected["state"], expected["tokens"], count), logits[:count])
    state, token = expected["last_state"][:, None], expected["last_token"][:, None]
    tree = ProductTree(heads, heads.top_k, heads.candidates, token)
    assert torch.equal(tree.candidates(state, token, heads.count)[1], expected["candidates"])
    chain = ProductTree(heads, [1] * heads.count, 1, token).candidates(state, token, heads.count)[1][:, 0]
    assert torch.equal(chain, expected["greedy_chain"])


@pytest.mark.parametrize("name", SPECULATORS)
def test_merged_tree_holds_the_candidates(name):
    folder, config, expected = golden(name)
    heads = load_heads(folder, target(config["emb_dim"], config["vocab_size"]))
    state, token = expected["last_state"][:, None], expected["last_token"][:, None]
    draft = ProductTree(heads, heads.top_k, heads.candidates, token).draft(state, token, heads.count)
    for row in range(2):
        paths, parents = {-1: ()}, draft.parents[row].tolist()
        for node, valid in enumerate(draft.valid[row].tolist()):
            if valid:
                paths[node] = (*paths[parents[node]], draft.tokens[row, node].item())
        found = list(paths.values())
        assert len(found) == len(set(found))  # shared prefixes are merged
        wanted = {tuple(path[:k]) for path in expected["candidates"][row].tolist() for k in range(1 + heads.count)}
        assert set(found) == wanted
        leaves = [path for path in found if len(path) == heads.count]
        assert leaves == [tuple(path) for path in expected["candidates"][row].tolist()]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_medusa_golden(version):
    folder = GOLDEN / "medusa" / version
    expected = load_file(folder / "expected.safetensors")
    vocab, width = expected["lm_head"].shape
    lab = target(width, vocab)
    lab.model.lm_head.weight.data = expected["lm_head"]
    heads = load_heads(folder, lab)
    torch.testing.assert_close(heads(expected["state"]), expected["logits"], atol=1e-5, rtol=1e-5)


# -- decoding -------------------------------------------------------------------------------------------

PROMPTS = [[5, 9, 2, 44, 17, 8], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


class Told(torch.nn.Module):
    """Heads that are told the texts: rank 0 (or `rank`) of every head is the right token."""

    def __init__(self, prompts, texts, width, vocab, count=3, rank=0):
        super().__init__()
        self.width, self.vocab, self.count, self.rank = width, vocab, count, rank
        self.top_k, self.candidates = (1,) * count, 1
        self.whole = [[*p, *t, *[0] * 8] for p, t in zip(prompts, texts, strict=True)]
        self.lengths = [len(p) for p in prompts]

    def start(self, state):
        return state

    def step(self, head, state, tokens):
        return state

    def logits(self, head, state):
        logits = torch.zeros((len(self.whole), 1, self.vocab))
        for row, (whole, n) in enumerate(zip(self.whole, self.lengths, strict=True)):
            logits[row, 0, whole[n + head]] = 2.0
            for other in range(self.rank):
                logits[row, 0, (whole[n + head] + 1 + other) % self.vocab] = 3.0 + other
        return logits


class TellingHeads(Heads):
    """Heads whose module is told how far each row is."""

    def propose(self, state, context):
        self.heads.lengths = list(context.lengths)
        return super().propose(state, context)


STRATEGIES = {
    "chain": {"top_k": (1, 1, 1)},
    "product tree": {"top_k": (3, 2, 2), "candidates": 5},
    "best path of a product": {"top_k": (3, 2), "candidates": 1},
    "fixed tree": {"tree": [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)]},
}


@pytest.mark.parametrize("settings", STRATEGIES)
@pytest.mark.parametrize("kind", ["mlp", "mlp tied", "medusa"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "deepseek_v3", "mistral"])
def test_any_heads_are_lossless(name, kind, settings, request):
    if name != "llama":
        request.getfixturevalue("unshaped")
    lab = lab_of(name)
    heads = made(kind, lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    out = watched(lab, PROMPTS, Heads(heads, **STRATEGIES[settings]), 1e-5, max_new_tokens=12)
    assert out.tokens == texts(name, PROMPTS, 12)
    assert out.drafted > 0 and not out.rounds[0].drafted[1]  # a prompt of one token has no state yet


@pytest.mark.parametrize("settings", STRATEGIES)
def test_told_heads_are_accepted_whole(settings):
    lab = labkit.Lab(families.tiny("llama"))
    prompts = [PROMPTS[0], PROMPTS[2]]
    texts = [reference(lab.model, p, 24) for p in prompts]
    told = Told(prompts, texts, lab.backbone.head_width, lab.backbone.vocab)
    drafter = TellingHeads(told, **STRATEGIES[settings])
    out = lab.generate(prompts, drafter, max_new_tokens=20)
    depth = drafter.levels
    assert out.tokens == [t[:20] for t in texts]
    assert len(out.rounds) == math.ceil(20 / (1 + depth))
    if settings == "fixed tree":  # rank 2 is in the tree at the first level, with rank 0 below it
        told = Told(prompts, texts, lab.backbone.head_width, lab.backbone.vocab, rank=2)
        out = lab.generate(prompts, TellingHeads(told, **STRATEGIES[settings]), max_new_tokens=20)
        assert out.tokens == [t[:20] for t in texts] and out.accepted > 0


@pytest.mark.parametrize("settings", STRATEGIES)
def test_sampling_is_drafter_invariant(settings):
    lab = labkit.Lab(families.tiny("llama"))
    heads = made("mlp", lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    options = dict(max_new_tokens=15, temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=7)
    want = lab.generate(PROMPTS, **options).tokens
    assert lab.generate(PROMPTS, Heads(heads, **STRATEGIES[settings]), **options).tokens == want


@pytest.mark.parametrize("settings", STRATEGIES)
def test_rejection_runs_and_greedy_rejection_is_plain(settings):
    lab = labkit.Lab(families.tiny("llama"))
    heads = made("mlp", lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    drafter = Heads(heads, **STRATEGIES[settings])
    out = lab.generate(PROMPTS, drafter, max_new_tokens=12, acceptance=Rejection())
    assert out.tokens == texts("llama", PROMPTS, 12)
    assert lab.generate(PROMPTS, drafter, max_new_tokens=12, temperature=1.0, acceptance=Rejection()).lossless


@pytest.mark.parametrize("name", ["llama", "opt", "gemma3"])
def test_heads_read_the_state_of_the_last_accepted_token(name):
    """Every draft is what the heads say on a plain forward's state in place n-2, whatever was accepted before."""
    lab = labkit.Lab(families.tiny(name))
    backbone = lab.backbone
    heads = made("mlp", backbone.head_width, backbone.vocab, dtype=backbone.dtype)
    texts = [list(p) for p in PROMPTS]
    out = lab.generate(PROMPTS, Heads(heads, top_k=(1, 1, 1)), max_new_tokens=12)
    checked = 0
    for happened in out.rounds:
        for row, text in enumerate(texts):
            if happened.drafted[row]:
                ids = torch.tensor([text])
                residual = lab.model(ids, output_hidden_states=True).hidden_states[-1]  # after the final norm
                assert residual.shape[-1] == heads.width
                current, token = heads.start(residual[:, -2:-1]), ids[:, -1:]
                for head, drafted in enumerate(happened.drafted[row]):
                    current = heads.step(head, current, token[:, :, None])
                    token = heads.logits(head, current)[:, 0].argmax(-1, keepdim=True)
                    assert token.item() == drafted
                    checked += 1
            text += happened.tokens[row]
    assert checked > 30


def brute_typical(draft, laws, rule, row):
    """The longest path of typical nodes, first in index order, by looking at all of them."""
    best, paths = [], {-1: []}
    for node in range(draft.nodes):
        parent = draft.parents[row, node].item()
        law = laws[row, parent + 1]
        entropy = -(law * law.log()).sum()
        fits = law[draft.tokens[row, node]] > min(rule.epsilon, rule.delta * math.exp(-entropy))
        if parent in paths and draft.valid[row, node] and fits:
            paths[node] = [*paths[parent], node]
            best = paths[node] if len(paths[node]) > len(best) else best
    return best


@pytest.mark.parametrize("rule", [Typical(), Typical(0.2, 5.0), Typical(0.05, 0.9), Typical(1.0, 0.4)], ids=str)
def test_typical_against_brute_force(rule):
    from labkit.noise import Noise

    generator, lengths = torch.Generator().manual_seed(0), set()
    for trial in range(60):
        nodes, vocab = 7, 5
        parents = torch.stack([torch.randint(-1, i, (3,), generator=generator) for i in range(nodes)], 1)
        valid = torch.rand((3, nodes), generator=generator) < 0.85
        for node in range(nodes):  # a node is valid only if its parent is
            above = parents[:, node]
            valid[:, node] &= (above < 0) | valid.gather(1, above.clamp_min(0)[:, None])[:, 0]
        tokens = torch.randint(vocab, (3, nodes), generator=generator)
        draft = labkit.Draft(tokens, parents, valid, torch.zeros_like(valid), depth=nodes, is_chain=False)
        scores = 1.5 * torch.randn((3, 1 + nodes, vocab), generator=generator)
        noise = Noise.of(trial, 3, silent=True, device=torch.device("cpu"))
        verdict = rule(draft, scores, noise, torch.full((3,), 9), 0)
        for row in range(3):
            want = brute_typical(draft, scores.softmax(-1), rule, row)
            assert verdict.path[row].tolist() == want + [-1] * (nodes - len(want))
            lengths.add(len(want))
    assert {0, 1, 2} <= lengths


def test_near_the_end_of_the_room():
    lab = labkit.Lab(families.tiny("llama"))
    heads = made("mlp", lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    for room in range(1, 7):
        want = [reference(lab.model, p, room) for p in PROMPTS]
        for settings in STRATEGIES.values():
            assert lab.generate(PROMPTS, Heads(heads, **settings), max_new_tokens=room).tokens == want


def test_typical_is_lossy_and_says_so():
    lab = labkit.Lab(families.tiny("llama"))
    heads = made("medusa", lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    drafter = Heads(heads, tree=STRATEGIES["fixed tree"]["tree"])
    out = lab.generate(PROMPTS, drafter, max_new_tokens=12, temperature=1.0, acceptance=Typical(0.0, 0.0))
    assert not out.lossless and "Typical" in out.settings["acceptance"]
    assert out.accepted > 10  # a threshold of zero takes the longest path there is
    strict = lab.generate(PROMPTS, drafter, max_new_tokens=12, temperature=1.0, acceptance=Typical(1.0, 1e9))
    assert strict.accepted == 0  # nothing is surer than certain
    with pytest.raises(LabkitError, match="epsilon"):
        Typical(epsilon=2.0)


@pytest.mark.parametrize("settings", STRATEGIES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9}], ids=["greedy", "sampled"])
def test_typical_on_one_prompt(settings, options):
    """The last tokens of a lossy text may differ: alone, a row has a shallower tree near the end of its room."""
    lab = labkit.Lab(families.tiny("llama"))
    heads = made("mlp", lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    drafter = Heads(heads, **STRATEGIES[settings])
    together = lab.generate(PROMPTS, drafter, max_new_tokens=9, acceptance=Typical(), **options).tokens
    for row, prompt in enumerate(PROMPTS):
        alone = lab.generate(prompt, drafter, max_new_tokens=9, acceptance=Typical(), seed=row, **options).tokens[0]
        assert alone[:5] == together[row][:5]


@pytest.mark.smollm2
def test_random_heads_on_the_real_model(smollm2):
    heads = made("mlp", 576, 49152)
    ids = smollm2.tokenizer("The capital of France is")["input_ids"]
    want = smollm2.generate(ids, max_new_tokens=16).tokens
    for settings in STRATEGIES.values():
        assert smollm2.generate(ids, Heads(heads, **settings), max_new_tokens=16).tokens == want
