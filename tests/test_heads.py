"""MLPSpeculator and Medusa: golden outputs, published files, trees, and losslessness with any heads."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import families
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from scripted import reference, watched

import labkit
from labkit import Heads, LabkitError, Medusa, MLPSpeculator, Rejection, Typical, best_tree, load_heads, save_heads
from labkit.heads.trees import FixedTree, ProductTree

GOLDEN = Path(__file__).parent / "data" / "golden"
SPECULATORS = ("untied", "tied_scaled", "sharded_fp16")


def target(width, vocab, seed=0):
    """A tiny target of the golden heads' width and vocabulary."""
    settings = families.COMMON | {"hidden_size": width, "vocab_size": vocab, "num_hidden_layers": 2}
    return labkit.Lab(families.build(hf.LlamaConfig, settings, seed, dtype=torch.float32, attn_implementation="sdpa"))


def golden(name):
    folder = GOLDEN / "mlp_speculator" / name
    config = json.loads((folder / "config.json").read_text())
    return folder, config, load_file(folder / "expected.safetensors")


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


# -- files ----------------------------------------------------------------------------------------------


def rewritten(tmp_path, name, change, config_change=lambda config: None, file="model.safetensors"):
    """A copy of a golden checkpoint with its tensors and config changed."""
    folder, config, _ = golden(name)
    tensors = {k: v for f in sorted(folder.glob("model*.safetensors")) for k, v in load_file(f).items()}
    tensors = change(tensors) or tensors
    config_change(config)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, tmp_path / file)
    else:
        torch.save(tensors, tmp_path / file)
    return tmp_path, target(config["emb_dim"], config["vocab_size"])


def assert_same_outputs(folder, lab, name):
    _, _, expected = golden(name)
    got = load_heads(folder, lab)(expected["state"], expected["tokens"])
    torch.testing.assert_close(got, expected["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "odd_name.pt"])
@pytest.mark.parametrize("prefix", ["speculator.", "", "model.speculator."])
def test_names_and_files(tmp_path, file, prefix):
    change = lambda tensors: {prefix + k.removeprefix("speculator."): v for k, v in tensors.items()}  # noqa: E731
    for name in ("untied", "tied_scaled"):
        folder, lab = rewritten(tmp_path / name, name, change, file=file)
        assert_same_outputs(folder, lab, name)


@pytest.mark.parametrize("kinds", [None, "MLPSpeculatorPreTrainedModel", [], ["Odd"]])
def test_architectures_missing_or_odd(tmp_path, kinds):
    def change(config):
        del config["architectures"]
        config |= {} if kinds is None else {"architectures": kinds}

    assert_same_outputs(*rewritten(tmp_path, "untied", lambda t: None, change), "untied")


def test_tied_stored_n_times(tmp_path):
    def change(tensors):
        for i in range(1, 4):
            for part in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
                tensors["speculator." + part.format(i)] = tensors["speculator." + part.format(0)].clone()
        for i in (2, 3):
            tensors[f"speculator.proj.{i}.weight"] = tensors["speculator.proj.1.weight"].clone()

    assert_same_outputs(*rewritten(tmp_path, "tied_scaled", change), "tied_scaled")

    def differ(tensors):
        change(tensors)
        tensors["speculator.emb.2.weight"] += 1

    with pytest.raises(LabkitError, match=r"emb\.0\.weight and emb\.2\.weight differ"):
        load_heads(*rewritten(tmp_path, "tied_scaled", differ))


def test_merged_model(tmp_path):
    """Heads beside the target's own weights: those are passed over."""
    others = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2), "lm_head.weight": torch.zeros(2)}
    assert_same_outputs(*rewritten(tmp_path, "untied", lambda tensors: tensors | others), "untied")


@pytest.mark.parametrize("layout", ["plain", "medusa_head.", "vllm", "pt"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_medusa_names(tmp_path, version, layout):
    folder = GOLDEN / "medusa" / version
    expected, tensors = load_file(folder / "expected.safetensors"), load_file(folder / "medusa_lm_head.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    if layout == "vllm":
        tensors = {
            f"blocks.{k[0]}.layers.0.{k.split('.')[-1]}" if "linear" in k else f"lm_heads.{k[0]}.weight": v
            for k, v in tensors.items()
        }
    elif layout == "medusa_head.":
        tensors = {layout + k: v for k, v in tensors.items()} | {"model.norm.weight": torch.zeros(2)}
    if layout == "pt":
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    lab = target(48, 131)
    lab.model.lm_head.weight.data = expected["lm_head"]
    torch.testing.assert_close(load_heads(tmp_path, lab)(expected["state"]), expected["logits"], atol=1e-5, rtol=1e-5)


def test_medusa_file_decides_with_a_warning(tmp_path):
    shutil.copytree(GOLDEN / "medusa" / "v2", tmp_path / "m")
    (tmp_path / "m" / "expected.safetensors").unlink()
    (tmp_path / "m" / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    with pytest.warns(UserWarning, match="the file holds 4"):
        assert load_heads(tmp_path / "m", target(48, 131)).count == 4
    (tmp_path / "m" / "config.json").write_text('{"medusa_num_heads": 5}')
    with pytest.raises(LabkitError, match="states 5 heads of 1 layers, and the file holds 4"):
        load_heads(tmp_path / "m", target(48, 131))


def drop(*names):
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


FAULTS = {
    "missing": (drop("speculator.ln.1.bias"), {}, r"missing ln\.1\.bias"),
    "extra": (lambda t: t | {"speculator.emb.3.weight": torch.zeros(2)}, {}, r"not expected emb\.3\.weight"),
    "alien": (lambda t: t | {"speculator.gate.0.weight": torch.zeros(2)}, {}, r"and others: gate\.0\.weight"),
    "shape": (lambda t: t | {"speculator.ln.0.bias": torch.zeros(9)}, {}, r"ln\.0\.bias is \(9,\), needed \(64,\)"),
    "n too large": (lambda t: t, {"n_predict": 4, "top_k_tokens_per_head": [1] * 4}, r"missing emb\.3\.weight"),
    "top-k": (lambda t: t, {"top_k_tokens_per_head": [5, 3]}, r"top_k=\(5, 3\) for 3 heads"),
    "no n": (lambda t: t, {"n_predict": None}, "lacks n_predict"),
    "arctic": (lambda t: t, {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "Arctic's LSTM"),
    "nothing known": (lambda t: {"transformer.w": torch.zeros(2)}, {}, r"no heads that labkit knows.*transformer\.w"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_checkpoints(tmp_path, fault):
    change, config_change, message = FAULTS[fault]

    def apply(config):
        config |= config_change
        for key in [k for k, v in config.items() if v is None]:
            del config[key]

    with pytest.raises(LabkitError, match=message):
        load_heads(*rewritten(tmp_path, "untied", change, apply))


DAMAGE = {
    "config not json": ("config.json", b"{oops"),
    "config a list": ("config.json", b"[]"),
    "config not text": ("config.json", bytes([255, 254])),
    "weights garbage": ("model.safetensors", b"garbage"),
    "weights empty": ("model.safetensors", b""),
    "index empty": ("model.safetensors.index.json", b"{}"),
    "index not json": ("model.safetensors.index.json", b"nope"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(tmp_path, damage):
    lab = target(48, 131)
    save_heads(made("mlp"), tmp_path, lab)
    name, content = DAMAGE[damage]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LabkitError):
        load_heads(tmp_path, lab)
    if name == "model.safetensors":
        (tmp_path / name).rename(tmp_path / "pytorch_model.bin")
        with pytest.raises(LabkitError):
            load_heads(tmp_path, lab)


@pytest.mark.parametrize(
    "entry",
    [{"inner_dim": "a"}, {"inner_dim": -3}, {"n_predict": "x"}, {"top_k_tokens_per_head": 5}, {"n_candidates": 0},
     {"scale_input": "no"}, {"architectures": 5}],
    ids=str,
)  # fmt: skip
def test_odd_config_entries(tmp_path, entry):
    with pytest.raises(LabkitError):
        load_heads(*rewritten(tmp_path, "untied", lambda t: None, lambda config: config.update(entry)))


def test_bad_arguments(tmp_path):
    lab, heads = target(48, 131), made("mlp")
    save_heads(heads, tmp_path / "heads", lab)
    (tmp_path / "file").write_text("")
    for call in (
        lambda: load_heads(None, lab), lambda: load_heads(tmp_path / "heads", None), lambda: save_heads(heads, None),
        lambda: load_heads(tmp_path / "heads", lab, dtype="int8"), lambda: save_heads(heads, tmp_path / "file"),
        lambda: save_heads(heads, tmp_path, 5), lambda: Heads(5), lambda: Heads(heads, top_k=5),
        lambda: Heads(heads, tree=5), lambda: Heads(heads, tree=[5]), lambda: Typical("a"), lambda: best_tree(None, 1),
        lambda: best_tree([0.5], 1), lambda: best_tree([["a"]], 1), lambda: MLPSpeculator(32, 61, 0),
        lambda: labkit.head_accuracies(lab, heads, [[1, 2, 3]], ranks=0),
        lambda: labkit.head_accuracies(lab, heads, [[1, 2, 300]]), lambda: labkit.head_accuracies(lab, heads, "text"),
        lambda: labkit.head_accuracies(lab, made("mlp", width=24), [[1, 2, 3, 4, 5, 6]]),
    ):  # fmt: skip
        with pytest.raises(LabkitError):
            call()
    assert load_heads(tmp_path / "heads", lab, dtype="float16").head[0].weight.dtype == torch.float16


def test_mismatched_pairs(tmp_path):
    folder = golden("untied")[0]
    with pytest.raises(LabkitError, match="width 48, and the target's head reads 40"):
        load_heads(folder, target(40, 131))
    with pytest.raises(LabkitError, match="vocabulary of 131 tokens, and the target's has 128"):
        load_heads(folder, target(48, 128))
    with pytest.raises(LabkitError, match="neither a folder nor a hub id"):
        load_heads(tmp_path / "nothing", target(48, 131))
    with pytest.raises(LabkitError, match="holds no weights"):
        load_heads(tmp_path, target(48, 131))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    with pytest.raises(LabkitError, match=r"lists part-1\.safetensors"):
        load_heads(tmp_path, target(48, 131))


def made(kind, width=48, vocab=131, **kwargs):
    torch.manual_seed(0)
    if kind.startswith("mlp"):
        heads = MLPSpeculator(width, vocab, 3, 24, tie=kind == "mlp tied", scale_input=True, top_k=(3, 2, 2),
                              candidates=4, **kwargs)  # fmt: skip
    else:
        heads = Medusa(width, vocab, 3, 2, **kwargs)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


@pytest.mark.parametrize("kind", ["mlp", "mlp tied", "medusa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path, kind, dtype):
    lab, heads = target(48, 131), made(kind, dtype=dtype)
    save_heads(heads, tmp_path / "heads", lab)
    assert sorted(p.name for p in (tmp_path / "heads").iterdir()) == sorted(
        ["config.json", "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"]
    )
    again = load_heads(tmp_path / "heads", lab, dtype=dtype)
    for (name, a), (other, b) in zip(heads.named_parameters(), again.named_parameters(), strict=True):
        assert name == other and a.dtype == b.dtype and torch.equal(a, b)
    assert (again.top_k, again.candidates) == (heads.top_k, heads.candidates)
    assert load_heads(tmp_path / "heads", lab).parameters().__next__().dtype == torch.float32
    stranger = target(48, 131, seed=5)
    with pytest.raises(LabkitError, match="check=False"):
        load_heads(tmp_path / "heads", stranger)
    load_heads(tmp_path / "heads", stranger, check=False)
    as_bf16 = labkit.Lab(target(48, 131).model.to(torch.bfloat16))
    load_heads(tmp_path / "heads", as_bf16)  # the hash is of rounded weights


class Int8(torch.nn.Module):
    """A linear layer stored in 8 bits, as weight-only quantisation leaves it."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))

    def forward(self, x):
        """The layer's product, in the input's dtype."""
        return x @ (self.weight * self.scale).to(x.dtype).T


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_heads_do_not_take_the_targets_quantisation(tmp_path, kind):
    lab = target(48, 131)
    for layer in lab.model.model.layers:
        for name, module in [*layer.named_modules()]:
            if isinstance(module, torch.nn.Linear):
                layer.set_submodule(name, Int8(module))
    lab = labkit.Lab(lab.model)
    save_heads(made(kind), tmp_path / "heads", lab)
    heads = load_heads(tmp_path / "heads", lab)
    assert {x.dtype for x in heads.parameters()} == {lab.backbone.dtype}
    assert not [m for m in heads.modules() if isinstance(m, Int8)]
    out = lab.generate([[1, 2, 3]], Heads(heads), max_new_tokens=12)
    assert out.tokens == lab.generate([[1, 2, 3]], max_new_tokens=12).tokens


LOADING = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_heads import load_heads, target

def anonymous_bytes():  # memory of this process that is not mapped from a file
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

lab = target(64, 20000)
before, peak, over = anonymous_bytes(), [0], threading.Event()

def sample():
    while not over.wait(0.001):
        peak[0] = max(peak[0], anonymous_bytes() - before)

watcher = threading.Thread(target=sample)
watcher.start()
heads = load_heads(sys.argv[2], lab)
over.set()
watcher.join()
print(sum(p.numel() * p.element_size() for p in heads.parameters()), peak[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_loading_allocates_once(tmp_path, file):
    """float16 on disk, float32 in place: at most one tensor's worth beside the heads themselves."""
    heads = MLPSpeculator(64, 20000, 3, 256, dtype=torch.float16)
    save_heads(heads, tmp_path)
    if file.endswith(".bin"):
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / file)
        (tmp_path / "model.safetensors").unlink()
    command = [sys.executable, "-c", LOADING, str(Path(__file__).parent), str(tmp_path)]
    size, peak = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert size == sum(p.numel() * 4 for p in heads.parameters())
    assert 0.5 * size < peak < size + 20000 * 256 * 4


def test_live_memory_formula_of_published_shapes():
    """formats.md's parameter counts, on the meta device."""

    def count(heads):
        return sum(p.numel() for p in heads.parameters())

    d, m, v, n = 4096, 3072, 128256, 4
    untied = MLPSpeculator(d, v, n, m, device="meta")
    assert count(untied) == 2 * n * v * m + d * m + (n - 1) * m * m + 2 * n * m
    d, m, v, n = 8192, 8192, 32000, 4
    tied = MLPSpeculator(d, v, n, 0, tie=True, scale_input=True, device="meta")
    assert count(tied) == 2 * v * m + d * m + m * m + 2 * m


# -- trees ----------------------------------------------------------------------------------------------


def test_best_tree():
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05]]
    assert best_tree(accuracies, 4) == [(0,), (1,), (0, 0), (0, 1)]
    assert best_tree([[0.1, 0.7], [0.5, 0.5]], 2) == [(1,), (1, 0)]  # ranks need not be in order of merit
    whole = best_tree(accuracies, 12)
    assert len(whole) == len(set(whole)) == 12

    def value(tree):
        return sum(math.prod(accuracies[level][rank] for level, rank in enumerate(choice)) for choice in tree)

    every = [(i,) for i in range(3)] + [(i, j) for i in range(3) for j in range(3)]
    for nodes in range(1, 6):  # against all trees
        trees = [t for t in itertools.combinations(every, nodes) if all(c[:-1] in t for c in t if len(c) > 1)]
        assert value(best_tree(accuracies, nodes)) == pytest.approx(max(map(value, trees)))
    for bad in (0, 13, True):
        with pytest.raises(LabkitError):
            best_tree(accuracies, bad)


BAD_SETTINGS = {  # settings, and words of the message
    "deeper than the heads": ({"top_k": (1, 1, 1, 1)}, "n_predict=3"),
    "a tree deeper than the heads": ({"tree": [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]}, "4 levels deep"),
    "a rank beyond top-k": ({"tree": [(0,), (3,)], "top_k": (3, 1, 1)}, "takes rank 3 at level 0"),
    "duplicate siblings": ({"tree": [(0,), (1,), (0,)]}, "more than once"),
    "an orphan": ({"tree": [(0,), (1, 0)]}, "without its parent (1,)"),
    "too many candidates": ({"top_k": (2, 2), "candidates": 5}, "has 1 .. 4 paths"),
    "top_k 0": ({"top_k": (0, 1)}, "top_k=(0, 1)"),
    "an empty tree": ({"tree": []}, "write choices"),
    "tree and candidates": ({"tree": [(0,)], "candidates": 2}, "leave out one"),
}


@pytest.mark.parametrize("bad", BAD_SETTINGS)
def test_bad_settings(bad):
    settings, message = BAD_SETTINGS[bad]
    with pytest.raises(LabkitError, match=re.escape(message)):
        Heads(made("mlp"), **settings)


def test_wrong_heads_for_the_target():
    with pytest.raises(LabkitError, match="width 24"):
        target(48, 131).generate([1, 2], Heads(made("mlp", width=24)), max_new_tokens=3)


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
def test_any_heads_are_lossless(name, kind, settings):
    lab = labkit.Lab(families.tiny(name))
    heads = made(kind, lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    out = watched(lab, PROMPTS, Heads(heads, **STRATEGIES[settings]), 1e-5, max_new_tokens=12)
    assert out.tokens == [reference(lab.model, p, 12) for p in PROMPTS]
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
    assert out.tokens == [reference(lab.model, p, 12) for p in PROMPTS]
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
        for settings in STRATEGIES.values():
            out = lab.generate(PROMPTS, Heads(heads, **settings), max_new_tokens=room)
            assert out.tokens == [reference(lab.model, p, room) for p in PROMPTS]


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


@pytest.mark.parametrize("swap", [lambda lab, heads: (heads, lab), lambda lab, heads: (lab.model, heads)])
def test_head_accuracies_with_other_arguments(swap):
    lab = target(48, 131)
    heads = labkit.MLPSpeculator(48, 131, 2, 24)
    with pytest.raises(LabkitError, match=r"write head_accuracies\(lab, heads, texts\)"):
        labkit.head_accuracies(*swap(lab, heads), [[1, 2, 3, 4, 5]])


def test_head_accuracies():
    lab = labkit.Lab(families.tiny("llama"))
    heads = made("mlp", lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    text = torch.randint(0, lab.backbone.vocab, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    rates = labkit.head_accuracies(lab, heads, [text], ranks=lab.backbone.vocab)
    assert all(sum(row) == pytest.approx(1) for row in rates)  # the true token has some rank
    out = lab.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
    rows = len(text) - 1 - heads.count
    logits = heads(out[:, :rows], torch.tensor([text[1:]]))
    for head in range(heads.count):
        top = logits[head, 0].argmax(-1)
        want = (top == torch.tensor(text[2 + head : 2 + head + rows])).float().mean().item()
        assert rates[head][0] == pytest.approx(want)
    assert best_tree([row[:5] for row in rates], 8)


def test_fixed_tree_equals_the_product_it_spans():
    """The same nodes from both constructions, for heads that look at tokens."""
    heads = made("mlp")
    state, token = torch.randn(2, 1, 48), torch.tensor([[3], [77]])
    choices = [(i,) for i in range(3)] + [(i, j) for i in range(3) for j in range(2)]
    fixed = FixedTree(heads, choices, token.device).draft(state, token, 2)
    product = ProductTree(heads, (3, 2), 6, token).draft(state, token, 2)

    def paths(draft, row):
        found = {-1: ()}
        for node, (t, p) in enumerate(zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)):
            found[node] = (*found[p], t)
        return set(found.values())

    for row in range(2):
        assert paths(fixed, row) == paths(product, row)


@pytest.mark.smollm2
def test_random_heads_on_the_real_model(smollm2):
    heads = made("mlp", 576, 49152)
    ids = smollm2.tokenizer("The capital of France is")["input_ids"]
    want = smollm2.generate(ids, max_new_tokens=16).tokens
    for settings in STRATEGIES.values():
        assert smollm2.generate(ids, Heads(heads, **settings), max_new_tokens=16).tokens == want


def test_live_memory_of_a_published_shape():
    """llama-160m-accelerator's heads: after the first round nothing grows."""
    from test_loop import live_bytes

    from labkit.lab import _Run

    settings = families.COMMON | {"hidden_size": 768, "vocab_size": 32000, "num_hidden_layers": 1}
    lab = labkit.Lab(families.build(hf.LlamaConfig, settings, dtype=torch.float32, attn_implementation="sdpa"))
    heads = MLPSpeculator(768, 32000, 3, 1024, top_k=(5, 3, 2), candidates=5).requires_grad_(False)
    assert sum(p.numel() for p in heads.parameters()) == 2 * 3 * 32000 * 1024 + 768 * 1024 + 2 * 1024**2 + 6 * 1024
    run, live = _Run(lab, [5, 9, 2], Heads(heads), {"max_new_tokens": 12}), []
    for happened in run.rounds():
        if run.stop.max_room > heads.count:
            live.append(live_bytes())
        del happened
    assert len(live) > 4 and max(live[1:]) - min(live[1:]) < 4096  # a tree of another depth has another path
