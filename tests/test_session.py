"""Rows, runs and commits: trees against plain forwards over each path, resumed from any depth."""

import families
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import assert_invariant, reference

import labkit
from labkit import Backbone, Draft, LabkitError, Partial, Session
from labkit.session import bucket

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
NAMES = ["llama", "mistral", "gemma3", "gpt2", "deepseek_v3"]
BACKBONES: dict = {}


def backbone_of(name):
    if name not in BACKBONES:
        BACKBONES[name] = Backbone(families.tiny(name))
    return BACKBONES[name]


def fresh(name, room=12, taps=(), prompts=PROMPTS):
    session = Session(backbone_of(name), len(prompts), max(map(len, prompts)) + room, taps)
    with torch.inference_mode():
        session.prefill(prompts)
    return session


def tree(seed, nodes, batch=3, vocab=61):
    """A random tree, another in each row."""
    generator = torch.Generator().manual_seed(seed)
    number = lambda below: int(torch.randint(below, (), generator=generator))  # noqa: E731
    parents = [[max(number(i + 1) - 1, number(i + 1) - 1) for i in range(nodes)] for _ in range(batch)]
    levels = []
    for row in parents:
        level = []
        for parent in row:
            level.append(0 if parent < 0 else level[parent] + 1)
        levels.append(level)
    tokens = torch.randint(vocab, (batch, nodes), generator=generator)
    return Draft(
        tokens=tokens,
        parents=torch.tensor(parents),
        valid=torch.ones_like(tokens, dtype=torch.bool),
        drawn=torch.zeros_like(tokens, dtype=torch.bool),
        depth=max(max(level) for level in levels) + 1,
        is_chain=False,
    )


def path_to(draft, row, node):
    path = []
    while node >= 0:
        path.append(node)
        node = int(draft.parents[row, node])
    return path[::-1]


def expected(name, draft, prompts=PROMPTS):
    """Logits after the pending token and after each node, by a forward over prefix and path."""
    model, rows = backbone_of(name).model, []
    for row, prompt in enumerate(prompts):
        texts = [prompt] + [
            prompt + [int(draft.tokens[row, i]) for i in path_to(draft, row, node)] for node in range(draft.nodes)
        ]
        rows.append(torch.stack([model(input_ids=torch.tensor([t]), use_cache=False).logits[0, -1] for t in texts]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 9), depth=st.integers(1, 4), share=st.floats(0, 1))
def test_tree_and_partial(name, seed, nodes, depth, share):
    """Every node sees its own ancestors only, with and without states handed over at any depth."""
    tolerance = 10 * families.tolerance(name)
    with torch.inference_mode():
        draft = tree(seed, nodes)
        want = expected(name, draft)
        torch.testing.assert_close(fresh(name).verify(draft), want, atol=tolerance, rtol=tolerance)
        session = fresh(name)
        rows = session.tree(draft)
        count = 1 + int(share * nodes)
        some = labkit.session.Rows(rows.slots[:, :count], rows.positions[:, :count], rows.mask.__class__(
            *(None if m is None else m[:, :, :count] for m in (rows.mask.full, rows.mask.sliding))))  # fmt: skip
        ids = torch.cat([session.pending(), draft.tokens], 1)[:, :count]
        hidden = session.run(ids, 0, depth, some)
        import dataclasses

        resumed = dataclasses.replace(draft, partial=session.partial(hidden, depth))
        torch.testing.assert_close(session.verify(resumed), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 8), leaf=st.integers(0, 7), less=st.integers(0, 2))
def test_commit_of_any_path(name, seed, nodes, leaf, less):
    """Whatever path is accepted, and however it is trimmed, cache and taps hold what a plain forward writes."""
    with torch.inference_mode():
        session, draft = fresh(name, taps=(2, 3)), tree(seed, nodes)
        session.verify(draft)
        path = torch.full((3, draft.depth), -1)
        accepted, keep = torch.zeros((3, draft.depth + 1), dtype=torch.long), []
        for row in range(3):
            nodes_on = path_to(draft, row, leaf % nodes) if row != 1 else []
            for at, node in enumerate(nodes_on):
                path[row, at], accepted[row, at] = node, draft.tokens[row, node]
            accepted[row, len(nodes_on)] = 7
            keep.append(max(1, len(nodes_on) + 1 - less))
        session.commit(accepted, path, keep)
        assert session.lengths == [len(p) + k for p, k in zip(PROMPTS, keep, strict=True)]
        for row, k in enumerate(keep):
            n = session.lengths[row]
            assert session.tokens[row, n - k : n].tolist() == accepted[row, :k].tolist()
        assert_invariant(session, 10 * families.tolerance(name))


def test_partials_that_do_not_hold():
    import dataclasses

    session, draft = fresh("llama"), Draft.chain(torch.tensor([[1, 2]] * 3))
    with torch.inference_mode():
        hidden = session.run(session.pending(), 0, 2, session.chain(0, 1))
        stale = dataclasses.replace(draft, partial=session.partial(hidden, 2))
        session.run(session.pending(), 0, 1, session.chain(0, 1))
        with pytest.raises(LabkitError, match="stale"):
            session.verify(stale)
        for rows, depth in ((1, 5), (4, 2)):
            misfit = session.partial(hidden.expand(-1, rows, -1), depth)
            with pytest.raises(LabkitError, match="does not fit"):
                session.verify(dataclasses.replace(draft, partial=misfit))
    assert Partial().rows == 0 and Partial().depth == 0


@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_chunks(name, monkeypatch):
    monkeypatch.setattr(labkit.session, "PREFILL_ROWS", 5)
    prompts = [[(7 * i + n) % 61 for i in range(n)] for n in (1, 4, 5, 6, 7, 11, 20)]
    session = fresh(name, prompts=prompts, taps=(1,))
    assert_invariant(session, 10 * families.tolerance(name))


def test_padding_goes_to_scrap():
    """Buffers start as zeros, and slots above the pending token stay untouched by a prefill."""
    session = fresh("llama", room=6)
    for layer in session.cache.layers:
        for row, prompt in enumerate(PROMPTS):
            assert layer.keys[row, :, len(prompt) - 1 : -1].abs().sum() == 0
        assert layer.keys[:, :, -1].abs().sum() > 0


def test_other_layers_may_be_ahead():
    """Runs through the first layers alone leave the verification's result as it was."""
    with torch.inference_mode():
        session, draft = fresh("gemma3"), tree(3, 4)
        want = fresh("gemma3").verify(draft)
        for level in range(4):
            session.run(session.pending(), 0, 2, session.chain(level, 1))
        torch.testing.assert_close(session.verify(draft), want, atol=1e-9, rtol=1e-9)


def test_last_position_of_the_model():
    """Learned positions are never overrun, though drafts reach past the room."""
    lab = labkit.Lab(families.tiny("gpt2"))
    prompt = [5] * (lab.backbone.limit - 6)
    want = reference(lab.model, prompt, 6)
    for drafter in (labkit.EarlyExit(2, max_draft=8), labkit.PromptLookup(max_draft=9)):
        assert lab.generate(prompt, drafter, max_new_tokens=6).tokens == [want]
    with pytest.raises(LabkitError, match="max_new_tokens=6 or less"):
        lab.generate(prompt, max_new_tokens=7)


def test_widths_come_in_few_sizes():
    widths = [bucket(n) for n in range(1, 5000)]
    assert all(w >= n and w <= max(64, 1.26 * n + 64) for n, w in enumerate(widths, 1))
    assert widths == sorted(widths) and len(set(widths)) < 25


def test_latent_attention_has_buffers_of_two_widths():
    layer = fresh("deepseek_v3").cache.layers[0]
    assert layer.keys.shape[:3] == layer.values.shape[:3] and layer.keys.shape[3] != layer.values.shape[3]
