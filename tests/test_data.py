"""Corpora without a network, and replayed rounds."""

from dataclasses import replace
from types import SimpleNamespace

import families
import pytest
import torch

import labkit
from labkit import LabkitError, data
from labkit.data import PADDING, Corpus, Document
from labkit.replay import Replayed, ahead, replay_rounds


def corpus(count=40):
    return Corpus(tuple(Document(f"{i:02}.txt", f"{i} is a number. " * (1 + i % 3)) for i in range(count)))


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(corpus(), 280)


def names(side):
    return {document.name for document in side.documents}


def test_files_are_split_by_name():
    """Whatever else is in the corpus, a file stays on its side; no file is on both."""
    train, held_out = corpus().split(0.2)
    assert not names(train) & names(held_out) and names(train) | names(held_out) == names(corpus())
    assert 2 <= len(held_out.documents) <= 16
    fewer, held = Corpus(corpus().documents[::2]).split(0.2)
    assert names(fewer) <= names(train) and names(held) <= names(held_out)
    rewritten = Corpus(tuple(replace(document, text="other") for document in corpus().documents))
    assert names(rewritten.split(0.2)[1]) == names(held_out)
    assert names(corpus().split(0.1)[1]) < names(held_out)


def test_rows_are_one_stream(tokenizer):
    """Each document, then the end token; nothing lost but the last, shorter row."""
    some, end = corpus(7), tokenizer.eos_token_id
    rows = some.rows(tokenizer, 8)
    stream = rows.flatten().tolist()
    expected = "".join(document.text + data.END for document in some.documents)
    whole = sum(len(tokenizer(document.text)["input_ids"]) + 1 for document in some.documents)
    assert rows.shape[1] == 8 and rows.dtype == torch.long and expected.startswith(tokenizer.decode(stream))
    assert 0 <= whole - len(stream) < 8 and stream.count(end) >= 5
    first = len(tokenizer(some.documents[0].text)["input_ids"]) + 1
    assert some.rows(tokenizer, first)[0, -1] == end


def test_a_tokenizer_gives_back_every_text(tokenizer, tmp_path):
    for text in ("a , b .", "  def f(x):\n\t\treturn 'ü€'  # \x00\n", "\r\n\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == data.END and len(tokenizer) <= 280
    assert [tokenizer.encode(d.text) for d in corpus().documents] == [
        data.train_tokenizer(corpus(), 280).encode(d.text) for d in corpus().documents
    ]


def test_a_hash_is_of_names_and_texts():
    def hashed(*parts):
        return Corpus(tuple(Document(*part) for part in parts)).hash

    found = [hashed(("a", "bc")), hashed(("ab", "c")), hashed(("a", "b"), ("c", "d")), hashed(("a", "bc"), ("d", ""))]
    assert len(set(found)) == 4 and found[0] == hashed(("a", "bc")) and found[0].startswith("sha256:")
    rows = torch.arange(6)
    assert data.rows_hash(rows.view(2, 3)) != data.rows_hash(rows.view(3, 2))
    assert data.rows_hash(rows.view(2, 3)) == data.rows_hash(rows.view(3, 2).reshape(2, 3).clone())


def folder_of(folder, texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_text_files(tmp_path):
    texts = {"b.py": "b = 1", "sub/a.py": "a = 1", "test/t.py": "t", "notes": "n", "broken.py": b"\xff\xfe"}
    made = folder_of(tmp_path, texts)
    found = data.text_files(made, endings=(".py",), without=("test",))
    assert [(d.name, d.text) for d in found.documents] == [("b.py", "b = 1"), ("sub/a.py", "a = 1")]
    assert [d.name for d in data.text_files([made / "notes", str(made / "b.py")]).documents] == ["b.py", "notes"]
    assert data.named(str(made / "sub")).documents[0].name == "a.py" and data.named(found) is found
    with pytest.raises(LabkitError, match=r"broken.py.*cannot be read as UTF-8"):
        data.text_files([made / "broken.py"])
    with pytest.raises(LabkitError, match="no file or folder"):
        data.text_files([made / "absent"])
    with pytest.raises(LabkitError, match="without any text"):
        data.text_files([made], endings=(".c",))


def test_packages(tmp_path, monkeypatch):
    """A package, a module, a namespace package: their sources without their tests."""
    whole = {"zz_whole/__init__.py": "w = 1", "zz_whole/tests/test_w.py": "t = 1", "zz_whole/n.txt": "n"}
    folder_of(tmp_path, {"zz_one.py": "one = 1", "zz_space/deep/m.py": "m = 1", **whole})
    monkeypatch.syspath_prepend(tmp_path)
    found = data.named("package:zz_whole,zz_one,zz_space")
    assert [d.name for d in found.documents] == ["zz_one/zz_one.py", "zz_space/deep/m.py", "zz_whole/__init__.py"]
    assert "labkit/data.py" in {d.name for d in data.package("labkit").documents}
    for name in ("zz_absent", "zz_absent.part", "", "sys", "zz_one.part", "torch._C"):
        with pytest.raises(LabkitError, match="no installed package with Python sources"):
            data.named(f"package:{name}")


def test_the_standard_library(tmp_path, monkeypatch):
    """Its sources without tests and what was installed beside them; or its docstrings."""
    source = (
        '"""Top."""\n\nclass C:\n    """Of C."""\n\n    async def f(self):\n        "Of f."\n\n    def g(self): pass\n'
    )
    kept = {"a.py": source, "plain.py": "x = 1", "bad.py": "def (", "email/b.py": '"""Mail."""'}
    dropped = {
        "test/c.py": "c",
        "idlelib/d.py": "d",
        "unittest/test/e.py": "e",
        "site-packages/f.py": "f",
        "g.txt": "g",
    }
    made = folder_of(tmp_path, {**kept, **dropped})
    monkeypatch.setattr("labkit.data.sysconfig.get_paths", lambda: {"stdlib": str(made)})
    assert [d.name for d in data.named("stdlib").documents] == ["a.py", "bad.py", "email/b.py", "plain.py"]
    said = {d.name: d.text for d in data.named("stdlib-docstrings").documents}
    assert said == {"a.py": "Top.\n\nOf C.\n\nOf f.", "email/b.py": "Mail."}


BAD = {
    "no text": (lambda t: Corpus((Document("a", ""),)), "without any text"),
    "share 0": (lambda t: corpus().split(0.0), "held_out=0.0"),
    "share as text": (lambda t: corpus().split("0.1"), "held_out='0.1'"),
    "share of all": (lambda t: corpus().split(1), "held_out=1"),
    "one file": (lambda t: corpus(1).split(0.5), "1 files are too few"),
    "short": (lambda t: corpus(2).rows(t, 1000), r"the corpus has \d+ tokens, and one row needs 1000"),
    "short side": (lambda t: corpus().split(0.2)[1].rows(t, 5000), r"the held-out text has \d+ tokens"),
    "no end": (lambda t: corpus().rows(SimpleNamespace(eos_token_id=None), 8), "no eos_token"),
    "vocabulary": (lambda t: data.train_tokenizer(corpus(), 256), "vocab=256.*more than 256"),
    "no corpus": (lambda t: data.named(3), "corpus=3"),
    "no prompts": (lambda t: data.continuations(None, []), "at least one"),
    "one prompt": (lambda t: data.continuations(None, "abc"), "give a list"),
    "batch": (lambda t: data.continuations(None, ["abc"], batch=0), "batch=0"),
}


@pytest.mark.parametrize("fault", BAD)
def test_refusals(fault, tokenizer):
    make, message = BAD[fault]
    with pytest.raises(LabkitError, match=message):
        make(tokenizer)


def test_continuations_do_not_depend_on_the_batch():
    """Row i is prompt i and what the target makes of it alone, drawn with seed + i."""
    lab, done = labkit.Lab(families.tiny("llama", layers=2)), []
    prompts = [[3, 1], [4], [1, 5, 9, 2], [6, 5], [3]]
    rows = data.continuations(lab, prompts, max_new_tokens=6, batch=2, seed=7, progress=done.append)
    assert done == [2, 4, 5] and rows.shape == (5, 10)
    assert torch.equal(rows, data.continuations(lab, prompts, max_new_tokens=6, batch=5, seed=7))
    for i, prompt in enumerate(prompts):
        alone = lab.generate([prompt], max_new_tokens=6, temperature=1.0, seed=7 + i).tokens[0]
        assert rows[i].tolist() == [*prompt, *alone, *[PADDING] * (4 - len(prompt))]
    greedy = data.continuations(lab, prompts, max_new_tokens=6, temperature=0.0)
    assert greedy[1, 1:7].tolist() == lab.generate([[4]], max_new_tokens=6).tokens[0]
    assert not torch.equal(rows, data.continuations(lab, prompts, max_new_tokens=6, seed=8))


def walk(agree, known):
    """Round after round, token by token: what replay_rounds says in one go."""
    accepted, drafted = [], []
    for row, here in zip(agree.tolist(), known.tolist(), strict=True):
        text = [at for at, yes in enumerate(here) if yes]
        while text:
            taken, asked = 0, 0
            for guess in row[text[0]]:
                if asked == len(text) - 1:
                    break
                asked += 1
                if taken == asked - 1 and guess:
                    taken += 1
            accepted.append(taken)
            drafted.append(asked)
            text = text[taken + 1 :]
    return Replayed(accepted, drafted)


@pytest.mark.parametrize("guesses", [1, 2, 4])
def test_replayed_rounds(guesses):
    random = torch.Generator().manual_seed(guesses)
    agree = torch.rand(5, 17, guesses, generator=random) < 0.7
    known = torch.arange(17) < torch.tensor([17, 1, 5, 0, 16])[:, None]
    found = replay_rounds(agree, known)
    assert found == walk(agree, known) and sum(a + 1 for a in found.accepted) == int(known.sum())
    assert found.tokens_per_round == pytest.approx(int(known.sum()) / len(found.accepted))
    rejected = sum(a < d for a, d in zip(found.accepted, found.drafted, strict=True))
    assert found.alpha == pytest.approx(sum(found.accepted) / (sum(found.accepted) + rejected))


def test_replay_of_the_extremes():
    known = torch.ones(2, 10, dtype=torch.bool)
    best = replay_rounds(torch.ones(2, 10, 4, dtype=torch.bool), known)
    worst = replay_rounds(torch.zeros(2, 10, 4, dtype=torch.bool), known)
    assert (best.tokens_per_round, best.alpha) == (5, 1) and (worst.tokens_per_round, worst.alpha) == (1, 0)
    assert replay_rounds(torch.ones(1, 3, 4, dtype=torch.bool), known[:1, :3]) == Replayed([2], [2])
    assert (Replayed([], []).tokens_per_round, Replayed([], []).alpha) == (1, 0)


def test_guesses_that_do_not_depend_on_the_round():
    same = torch.tensor([[True, False, True, True]])
    seen = ahead(same, 3)
    assert seen.int().tolist() == [[[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]]] and seen.dtype == torch.bool
