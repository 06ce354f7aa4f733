"""The command line: `labkit demo | generate | bench | train | fetch | doctor | lab`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from labkit.bench import bench, report, write_json
from labkit.doctor import doctor, machine
from labkit.drafters import EarlyExit, PromptLookup
from labkit.drafters.written import Opener, read_early_exit, read_strategy
from labkit.errors import LabkitError
from labkit.heads import load_adapter, load_draft_head, load_heads
from labkit.lab import Lab, load
from labkit.loading import DTYPES, SHIPPED, fetch, load_model
from labkit.open_lab import open_lab
from labkit.protocol import Drafter
from labkit.shipped import data_folder
from labkit.training.command import add_recipes

DEMO = {True: ("arithmetic-01", "code-01", "editing-01"), False: ("completion-01", "completion-04", "completion-07")}
"""The prompts of a demo, for a model that chats, and for one that only goes on with a text."""
DRAFTS = {"tiny": ("EarlyExit(4, max_draft=3)", "Heads('tiny/mlp-speculator')", "PromptLookup()")}
"""The strategies of a demo on a model that comes with drafts of its own."""


def prompt_sets() -> dict[str, Path]:
    """The shipped sets of prompts by name."""
    return {path.stem: path for path in sorted((data_folder() / "prompts").glob("*.jsonl"))}


def read_prompt_files(names: Sequence[str]) -> list[dict[str, str]]:
    """Prompts {"id", "task", "prompt"} from shipped sets (by name) or JSONL files; none named = all shipped sets."""
    shipped = prompt_sets()
    paths = [shipped.get(name, Path(name)) for name in names or shipped]
    found = []
    for path in paths:
        if not path.exists():
            raise LabkitError(
                f"no prompt set or file {str(path)!r}; write one of {', '.join(shipped)}, or a JSONL file"
            )
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LabkitError(f"{str(path)!r} cannot be read as JSON lines ({error})") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                found.append({"id": f"{path.stem}-{number:02}", "task": path.stem, **_prompt(path, number, line)})
    return found


def chats(lab: Lab) -> bool:
    """Whether the target has a chat template; else prompts are texts for it to go on with."""
    return getattr(lab.tokenizer, "chat_template", None) is not None


def fitting_sets(lab: Lab) -> list[str]:
    """The shipped sets for such a target: instructions for one that chats, else beginnings of texts."""
    return [name for name in prompt_sets() if (name == "completion") != chats(lab)]


def _prompt(path: Path, number: int, line: str) -> dict[str, str]:
    try:
        read = json.loads(line)
    except json.JSONDecodeError as error:
        raise LabkitError(f"line {number} of {path} is not JSON ({error})") from error
    if not isinstance(read, dict) or not isinstance(read.get("prompt"), str):
        raise LabkitError(f'line {number} of {path} has no prompt; write {{"id": "my-01", "prompt": "…"}} in each line')
    return read


def _writable(path: str | None) -> Path | None:
    """The path, if a file can be written there: asked before the work is done, not after."""
    if path is not None and Path(path).is_dir():
        raise LabkitError(f"{path!r} is a folder; write the name of a file in it")
    if path is not None and not (folder := Path(path).absolute().parent).is_dir():
        raise LabkitError(f"{path!r} cannot be written: there is no folder {str(folder)!r}; make it")
    return None if path is None else Path(path)


def as_ids(lab: Lab, prompts: Sequence[dict[str, str]]) -> list[list[int]]:
    """Prompts as rows of ids, through the chat template where there is one."""
    from labkit.prompts import read_prompts

    texts: list[Any] = [[{"role": "user", "content": p["prompt"]}] if chats(lab) else p["prompt"] for p in prompts]
    return read_prompts(texts, None, lab.tokenizer, lab.backbone.vocab).rows


def demo(args: argparse.Namespace) -> None:
    """A few real prompts, several strategies, a table and a picture."""
    picture = _writable(args.picture)
    assert picture is not None
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise LabkitError(f"got --picture {args.picture}; write a name that ends in .png, .svg or .pdf")
    lab = load(args.model, device=args.device, dtype=args.dtype)
    from labkit.view import demo_picture

    wanted = [p for p in read_prompt_files([]) if p["id"] in DEMO[chats(lab)]]
    args.drafters = args.drafters or DRAFTS.get(args.model, ())
    drafters = read_drafters(args, lab) or [EarlyExit(max(1, lab.backbone.depth * 4 // 5), 2), PromptLookup()]
    comparison = lab.compare(as_ids(lab, wanted), drafters, max_new_tokens=args.max_new_tokens)
    m = machine(lab.backbone)
    caption = f"{m['model']}, {m['dtype']}, {m['device']}, {m['threads']} threads, {len(wanted)} prompts, greedy"
    shown = wanted[-1]
    asked = f"{shown['id']}: {shown['prompt'].strip()}"
    demo_picture(comparison, caption, prompt=len(wanted) - 1, asked=asked).savefig(picture)
    if args.json:
        print(
            json.dumps(
                {"machine": m, "entries": [vars(e) for e in comparison.entries], "notes": comparison.notes}, indent=1
            )
        )
        return
    for prompt, out in zip(wanted, next(iter(comparison.generations.values())), strict=True):
        print(
            f"[{prompt['id']}] {prompt['prompt'].strip().splitlines()[0][:100]}\n    {str(out.text).strip()[:200]!r}\n"
        )
    print(f"{caption}\n\n{comparison}\n\nwhat each strategy drafted, token by token: {picture}")


def generate(args: argparse.Namespace) -> None:
    """One prompt, streamed or whole."""
    lab = load(args.model, device=args.device, dtype=args.dtype)
    if len(args.drafters) > 1:
        raise LabkitError(f"generate takes one --drafter and got {len(args.drafters)}; labkit bench compares several")
    drafter = next(iter(read_drafters(args, lab)), None)
    prompt: Any = args.prompt
    if not args.raw and chats(lab):
        prompt = [{"role": "user", "content": args.prompt}]
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "exit_layers", "seed")}
    if args.early_exit is not None:
        options["early_exit"] = read_early_exit(args.early_exit, openers(args, lab))
    options = {name: value for name, value in options.items() if value is not None}
    out = lab.generate(prompt, drafter, max_new_tokens=args.max_new_tokens, **options)
    if args.json:
        print(json.dumps({"text": out.text, "tokens": out.tokens, "settings": dict(out.settings),
                          "reasons": out.reasons,
                          "tokens_per_round": out.tokens_per_round, "acceptance_rate": out.acceptance_rate,
                          "alpha": out.alpha, "seconds": out.seconds, "lossless": out.lossless}))  # fmt: skip
    else:
        print(out)


def bar(steps: Sequence, file: TextIO | None = None) -> Iterable:
    """The steps with a bar on a terminal, and in silence elsewhere."""
    return tqdm(steps, desc="prompts", unit="prompt", disable=None, file=file)


def run_bench(args: argparse.Namespace) -> None:
    """Strategies against plain, their own ideal, and transformers."""
    file = _writable(args.json)
    lab = load(args.model, device=args.device, dtype=args.dtype)
    drafters = read_drafters(args, lab)
    sets = args.prompts or fitting_sets(lab)
    prompts = [prompt for name in sets for prompt in read_prompt_files([name])[: args.per_set]]
    result = bench(
        lab,
        as_ids(lab, prompts),
        drafters,
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        progress=bar,
    )
    result["command"] = "labkit " + " ".join(repr(word) if " " in word or "(" in word else word for word in args.argv)
    result["settings"]["ids"] = [p["id"] for p in prompts]
    print(report(result))
    if file is not None:
        write_json(result, file)


def read_drafters(args: argparse.Namespace, lab: Lab) -> list[Drafter]:
    """The strategies asked for."""
    return [read_strategy(text, openers(args, lab)) for text in args.drafters]


def openers(args: argparse.Namespace, lab: Lab) -> dict[str, Opener]:
    """What opens what a strategy names: a draft model, loaded where and as the target is, or modules for the target."""
    return {
        "model": lambda name: load_model(name, device=args.device, dtype=args.dtype)[0],
        "heads": lambda source: load_heads(source, lab),
        "adapter": lambda folder: load_adapter(folder, lab),
        "head": lambda folder: load_draft_head(folder, lab),
        "module": lambda folder: load_adapter(folder, lab),
    }


def depths(text: str) -> tuple[int, ...]:
    """Depths written as "18,24"."""
    try:
        return tuple(int(depth) for depth in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}; write depths with commas, such as 18,24") from error


def add_target(add: Callable) -> None:
    """The options that say which model is loaded, where and how."""
    add("--model", default="tiny", help="a shipped name, a folder or a hub id (default: %(default)s)")
    add("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    add("--dtype", help=f"{', '.join(DTYPES)} (default: bfloat16 on cuda, else float32)")


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = argparse.ArgumentParser(prog="labkit", description="Speculative decoding on real models, in one real loop.")
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable, text: str, drafters: Mapping[str, Any] | None = None):
        """A command; one that takes `drafters` loads a model."""
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if drafters is not None:
            add_target(add := sub.add_argument)
            add("--drafter", "--drafters", dest="drafters", metavar="STRATEGY", default=[], **drafters)
            add("--max-new-tokens", type=int, default=64, help="tokens to generate at most (default: %(default)s)")
        return sub

    written = (
        "written as in Python: 'EarlyExit(24, max_draft=2)', PromptLookup, \"DraftModel('gpt2')\", "
        "\"Heads('folder')\", \"EarlyExit(2, adapter='folder')\""
    )
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    fifths = "those that come with the model, else EarlyExit at four fifths of the layers and PromptLookup"
    add = command("demo", demo, "a few prompts, several strategies, a table and a picture",
                  several | {"help": f"strategies, {written} (default: {fifths})"}).add_argument  # fmt: skip
    add("--picture", default="labkit-demo.png", help="the .png, .svg or .pdf to write (default: %(default)s)")
    add("--json", action="store_true", help="print the figures as JSON")
    add = command("generate", generate, "generate from one prompt",
                  {"action": "append", "help": f"a strategy, {written} (default: Plain)"}).add_argument  # fmt: skip
    add("prompt", help="the text to answer, or with --raw to continue")
    add("--raw", action="store_true", help="no chat template")
    add("--temperature", type=float, help="above 0 draws tokens (default: 0, the likeliest one)")
    add("--top-k", type=int, help="draw from the K likeliest tokens (default: no limit)")
    add("--top-p", type=float, help="draw from the likeliest tokens of this share (default: no limit)")
    add("--early-exit", metavar="E", help="decode with the first E layers only, or leave where a rule such as "
        "'confidence(0.9)' or \"classifier('folder')\" says, lossy (default: all layers)")  # fmt: skip
    add("--exit-layers", type=depths, metavar="D,D", help="depths at which that rule is tested (default: all)")
    add("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    add("--json", action="store_true", help="print text, tokens, settings and figures as JSON")
    add = command("bench", run_bench, "speed against plain, the ideal, and transformers' generate",
                  several | {"help": f"strategies, {written} (default: Plain alone)"}).add_argument  # fmt: skip
    add(
        "--prompts",
        nargs="+",
        metavar="SET",
        help="shipped sets or JSONL files (default: the sets that suit the model)",
    )
    add("--per-set", type=int, default=2, help="prompts taken from each set (default: %(default)s)")
    add("--repeats", type=int, default=1, help="runs of each prompt (default: %(default)s)")
    add("--json", metavar="FILE", help="write the figures to this file too (default: none)")
    add_recipes(command("train", lambda args: None, "train a model whose exits draft well, or a draft"), add_target)
    add = command("fetch", lambda args: print(fetch(args.name, force=args.force)), "fetch a shipped model").add_argument
    add("name", help=f"one of: {', '.join(SHIPPED)}")
    add("--force", action="store_true", help="make it anew")
    command("doctor", lambda args: print(doctor()), "what this machine has, and what is missing")
    add = command(
        "lab", lambda args: open_lab(args.notebooks, args.more), "open JupyterLab on the notebooks"
    ).add_argument
    add("--notebooks", metavar="FOLDER", help="where they are (default: the repository's)")
    add("more", nargs="*", help="arguments for JupyterLab, behind --, such as -- --no-browser --port=8889")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 with the reason on standard error, or 130 if it was interrupted."""
    args = parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args.run(args)
    except LabkitError as error:
        print(f"labkit {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"labkit {args.command}: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
