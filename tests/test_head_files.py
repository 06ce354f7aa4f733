"""Checkpoints of heads: published names, faults, damage, pairs that do not fit."""

import json
import shutil

import pytest
import torch
from golden import GOLDEN, golden, made, target
from safetensors.torch import load_file, save_file

import labkit
from labkit import Heads, LabkitError, MLPSpeculator, Typical, best_tree, load_heads, save_heads


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
