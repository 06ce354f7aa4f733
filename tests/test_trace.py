"""The record of a generation: tables, one file, and the text of every token in its place."""

import dataclasses
import gzip
import json
import os
import re
import sys

import families
import pytest
import torch
import transformers as hf
from letters import TEXTS, greedy, ids, lab
from scripted import RandomTree, Replay
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import labkit
from labkit import EarlyExit, Generation, LabkitError
from labkit.decoding import PHASES
from labkit.spelling import Spelling

PROMPTS = [ids(t) for t in TEXTS]
OUTPUTS = [greedy(t, 30) for t in TEXTS]
RUNS = {
    "plain": lambda: lab().generate(TEXTS, max_new_tokens=14),
    "exit": lambda: lab().generate(TEXTS, EarlyExit(3, 4), max_new_tokens=14),
    "chain": lambda: lab().generate(TEXTS, Replay(PROMPTS, OUTPUTS, 4, (2, 4, 0)), max_new_tokens=13),
    "trees": lambda: lab().generate(TEXTS, RandomTree(PROMPTS, OUTPUTS), max_new_tokens=14),
    "eos": lambda: lab().generate(TEXTS, Replay(PROMPTS, OUTPUTS, 4, (4,)), max_new_tokens=20,
                                  eos_token_id=OUTPUTS[0][6]),
    "sampled": lambda: lab().generate(TEXTS, EarlyExit(3, 4), max_new_tokens=14, temperature=1.0, seed=3,
                                      acceptance=labkit.Rejection()),
    "leaving": lambda: lab().generate(TEXTS[0], EarlyExit(1, 2), max_new_tokens=9, early_exit=labkit.confidence(0.4)),
}  # fmt: skip
every_run = pytest.mark.parametrize("run", RUNS)


@every_run
def test_the_tables_say_what_happened(run):
    out = RUNS[run]()
    tokens, rounds, whole = (out.to_pandas(level) for level in ("token", "round", "run"))
    kinds = tokens.kind.value_counts().to_dict()
    assert kinds.get("accepted", 0) == out.accepted == rounds.accepted.sum() == whole.accepted[0]
    assert len(tokens) - kinds.get("target", 0) == out.drafted == rounds.drafted.sum() == whole.drafted[0]
    assert rounds.rejected.sum() == out.rejections and rounds.committed.sum() == out.new_tokens
    assert len(rounds) == out.row_rounds == whole.row_rounds[0] and whole.drafter[0] == out.settings["drafter"]
    for phase in PHASES:
        assert whole[f"{phase}_ms"][0] == pytest.approx(1000 * out.phase_seconds[phase])
    for row, text in enumerate(out.tokens):
        mine = tokens[tokens.row == row]
        kept = mine[mine.kind.isin(["accepted", "target"])]
        assert kept.token.tolist() == text
        begin = len(out.prompts[row])
        assert kept.position.tolist() == list(range(begin, begin + len(text)))
        assert "".join(kept.text) == lab().decode(text)
        assert out.prompt_text[row] == "".join(out.texts.prompts[row]) == TEXTS[row]
    judged = tokens[tokens.kind.isin(["accepted", "rejected"])]
    if out.settings["acceptance"] == "Match()":
        assert ((judged.token == judged.target_token) == (judged.kind == "accepted")).all()
    assert (tokens.loc[tokens.token == tokens.target_token, "text"]
            == tokens.loc[tokens.token == tokens.target_token, "target_text"]).all()  # fmt: skip
    assert tokens[["target_probability", "draft_ms"]].notna().all().all()
    assert (tokens.exit_layer.dropna() >= 1).all() and tokens.token.map(lambda t: t >= 0).all()


def test_a_round_line_by_line():
    """One chain written by hand: two right, one wrong, one behind it, and the target's own."""
    out = lab().generate(TEXTS[0], Replay(PROMPTS[:1], OUTPUTS[:1], 4, (2,)), max_new_tokens=14)
    first = out.to_pandas().query("round == 0")
    assert first.kind.tolist() == ["accepted", "accepted", "rejected", "unjudged", "target"]
    assert first.depth.tolist() == [1, 2, 3, 4, 3] and first.parent.tolist() == [-1, 0, 1, 2, 1]
    assert first.node.tolist()[:4] == [0, 1, 2, 3] and first.node.isna().tolist()[4]
    assert first.position.tolist() == [13, 14, 15, 16, 15]
    wrong = (OUTPUTS[0][2] + 1) % 61
    assert first.token.tolist()[2] == wrong and first.target_token.tolist()[2:5:2] == [OUTPUTS[0][2]] * 2
    model = lab().model(torch.tensor([PROMPTS[0] + OUTPUTS[0][:2]])).logits[0, -1].softmax(-1)
    shown = first.target_probability.tolist()
    assert shown[2] == pytest.approx(model[wrong].item(), abs=1e-6)
    assert shown[4] == pytest.approx(model[OUTPUTS[0][2]].item(), abs=1e-6)
    assert first.exit_layer.tolist()[4] == 4
    exits = lab().generate(TEXTS[0], EarlyExit(3, 4), max_new_tokens=14).to_pandas()
    assert set(exits[exits.kind != "target"].exit_layer) == {3} and exits.draft_probability.notna().any()


def test_siblings_and_what_the_end_of_the_text_cut():
    rows = RUNS["trees"]().to_pandas()
    assert {"accepted", "rejected", "unjudged", "target"} == set(rows.kind)
    cut = RUNS["eos"]().to_pandas().query("row == 0")
    assert cut.token.tolist().count(OUTPUTS[0][6]) >= 1
    last = cut[cut["round"] == cut["round"].max()]
    assert "rejected" not in set(last.kind) and (last.kind == "unjudged").any() == (last.kind != "target").all()


@every_run
@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_saved_and_loaded(run, name, tmp_path):
    out = RUNS[run]()
    out.save(tmp_path / name)
    back = Generation.load(tmp_path / name)
    assert back.spelling.tokenizer is None and os.listdir(tmp_path) == [name]
    for part in ("text", "tokens", "prompts", "rounds", "reasons", "lossless", "seconds", "prefill_seconds"):
        assert getattr(back, part) == getattr(out, part), part
    assert back.texts == out.texts and back.summary() == out.summary() and back.pieces(0) == out.pieces(0)
    for level in ("token", "round", "run"):
        assert back.to_pandas(level).equals(out.to_pandas(level))
    assert json.loads(json.dumps({**back.settings})) == back.settings


def test_a_failed_save_leaves_the_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    out = RUNS["plain"]()
    out.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        out.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["run.json"]


def test_bad_files(tmp_path):
    good, path = tmp_path / "good.json", tmp_path / "bad.json"
    RUNS["plain"]().save(good)
    data = json.loads(good.read_text())
    whole = good.read_bytes()
    packed = gzip.compress(whole)
    cases = {
        "truncated": [whole[: len(whole) // 2], packed[: len(packed) // 2], packed[:-6], b"", b"\x80\x81"],
        "version 99 of a generation": [json.dumps(data | {"version": 99}).encode()],
        "holds layers": [json.dumps(data | {"labkit": "layers"}).encode()],
        "something else": [b"[1]", b"3"],
        "lacks parts": [json.dumps({k: v for k, v in data.items() if k != "rounds"}).encode(),
                        json.dumps(data | {"told": {}}).encode()],
    }  # fmt: skip
    for words, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(LabkitError, match=words):
                Generation.load(path)
    with pytest.raises(LabkitError, match="cannot be read"):
        Generation.load(tmp_path / "none.json")
    for where in (tmp_path, tmp_path / "no" / "folder.json"):
        with pytest.raises(LabkitError, match="cannot be written"):
            RUNS["plain"]().save(where)


def test_bad_input(monkeypatch):
    out = RUNS["plain"]()
    with pytest.raises(LabkitError, match=r"got level='tokens'.*\"token\""):
        out.to_pandas("tokens")
    with pytest.raises(LabkitError, match=r"got row=3.*rows 0 to 2"):
        out.pieces(3)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LabkitError, match="pip install pandas"):
        out.to_pandas()
    assert out.pieces() and out.figures()


def test_without_a_tokenizer_texts_are_ids():
    out = labkit.Lab(families.tiny("llama")).generate([3, 1, 4], EarlyExit(3, 2), max_new_tokens=4)
    assert out.prompt_text == ["3 1 4"] and all(p.text == str(p.token) for p in out.pieces())


# -- the text of one token ------------------------------------------------------------------------------


def byte_level():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend)


def sentence_pieces():
    vocab = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcxy<&\"'$>é"]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(parts)
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend)


FUZZ = ["a <b> & \"c\" 'x' $y$", "a\0b\n\tc", "שלום abc", "é x\u0301y", "👩‍👩‍👧 a 🏳️‍🌈", "日本語 a", "\ufffd a"]


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_pieces()], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", FUZZ)
def test_texts_of_tokens_round_trip(tokenizer, text):
    given = tokenizer(text, add_special_tokens=False)["input_ids"]
    spelling = Spelling(tokenizer)
    found = spelling.texts(given)
    shown = "".join(found)
    for byte in range(0x80, 0x100):  # the bytes of unfinished characters are extra
        shown = shown.replace(f"<{byte:02X}>", "")
    assert shown == spelling.whole(given) == tokenizer.decode(given)
    assert "\ufffd" in text or not any("\ufffd" in one for one in found)
    assert spelling.texts(given[5:], given[:5]) == found[5:]


def test_unfinished_characters_are_hex():
    tokenizer = byte_level()
    given = tokenizer("a€")["input_ids"]
    assert Spelling(tokenizer).texts(given) == ["a", "<E2>", "<82>", "€"]
    assert Spelling(tokenizer).texts([given[1], given[0], given[2]]) == ["<E2>", "a", "<82>"]
    pieces = sentence_pieces()
    assert Spelling(pieces).texts(pieces.convert_tokens_to_ids(["a", "<0xE2>", "<0x82>", "<0xAC>"]))[-3:] == [
        "<E2>",
        "<82>",
        "€",
    ]


@pytest.mark.smollm2
def test_smollm2_texts(smollm2):
    out = smollm2.generate("Say héllo in 日本語 😀:", EarlyExit(24, 3), max_new_tokens=24)
    kept = re.sub("(<[89A-F][0-9A-F]>)+", "", "".join(p.text for p in out.pieces() if p.kind in ("accepted", "target")))
    assert kept == smollm2.tokenizer.decode(out.tokens[0]).rstrip("\ufffd") and out.prompt_text == [
        "Say héllo in 日本語 😀:"
    ]
    assert dataclasses.asdict(out.pieces()[0])["exit_layer"] == 24
