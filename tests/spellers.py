"""Small tokenizers of three kinds, and generations that are told, not run: texts without a model."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from labkit.decoding import Round
from labkit.spelling import Spelling, _byte_letters
from labkit.trace import Generation


class Lab:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


def wrapped(tokenizer):
    return Lab(PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False))


def byte_level():
    letters = {byte: letter for letter, byte in _byte_letters().items()}
    vocab = {letters[byte]: byte for byte in range(256)}
    merges = [(letters[ord(" ")], "a"), ("a", "b"), ("<", "s"), (letters[0xE2], letters[0x82])]
    vocab |= {a + b: 256 + at for at, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return wrapped(made)


def sentence_piece():
    words = [f"<0x{byte:02X}>" for byte in range(256)] + [
        "<unk>",
        "▁",
        *"abcdefghijklmnopqrstuvwxyz<>&$'\"/()",
        "▁a",
        "▁b",
    ]
    made = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(made)


def byte_tokens():
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(made)


def told(prompt, tokens, dice, lab=None, wrongs=range(250)):
    """A generation that commits these tokens in rounds with drafts accepted, rejected (of `wrongs`) and unjudged."""
    rounds, at, wrongs = [], 0, list(wrongs)
    while at < len(tokens):
        block = tokens[at : at + dice.randint(1, 4)]
        accepted = len(block) - 1
        wrong = [dice.choice(wrongs) for _ in range(dice.randint(0, 3))]
        drafted = block[:accepted] + wrong
        rounds.append(Round(
            tokens=[block], drafted=[drafted], q=[[0.25] * len(drafted)], p=[[0.5] * len(drafted)],
            target=[[*block, *[0] * len(wrong)]], accepted=[accepted], rejected=[bool(wrong)],
            parents=[list(range(-1, len(drafted) - 1))], path=[list(range(accepted))], exit=[[3] * len(drafted)],
            left=[[]], seconds=[{"draft": 0.001, "verify": 0.002, "accept": 0.0, "commit": 0.0}], own=[0.5],
        ))  # fmt: skip
        at += len(block)
    return Generation(
        None, [tokens], [prompt], rounds, ["length"], {"drafter": "x"}, True, 1.0, 0.1, Spelling(lab and lab.tokenizer)
    )
