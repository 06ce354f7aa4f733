"""The command line: `labkit demo | generate | bench | fetch | doctor`."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.bench import bench, report, write_json
from labkit.doctor import doctor, machine
from labkit.drafters import EarlyExit, PromptLookup
from labkit.drafters.written import read_strategy
from labkit.errors import LabkitError
from labkit.lab import Lab, load
from labkit.loading import fetch, load_model

DEMO = ("arithmetic-01", "code-01", "editing-01")


def prompts_folder() -> Path:
    """data/prompts of the repository, or the copy inside an installed package."""
    here = Path(__file__).parent
    return next((p for p in (here.parent / "data" / "prompts", here / "_data" / "prompts") if p.exists()), here)


def read_prompt_files(names: Sequence[str]) -> list[dict[str, str]]:
    """Prompts {"id", "task", "prompt"} from shipped sets (by name) or JSONL files; none named = all shipped sets."""
    shipped = {path.stem: path for path in sorted(prompts_folder().glob("*.jsonl"))}
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

    chat = getattr(lab.tokenizer, "chat_template", None) is not None
    texts: list[Any] = [[{"role": "user", "content": p["prompt"]}] if chat else p["prompt"] for p in prompts]
    return read_prompts(texts, None, lab.tokenizer, lab.backbone.vocab).rows


def demo(args: argparse.Namespace) -> None:
    """A few real prompts, several strategies, a table and a picture."""
    picture = _writable(args.picture)
    assert picture is not None
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise LabkitError(f"got --picture {args.picture}; write a name that ends in .png, .svg or .pdf")
    lab = load(args.model, device=args.device, dtype=args.dtype)
    from labkit.view import demo_picture

    wanted = [p for p in read_prompt_files([]) if p["id"] in DEMO]
    exit = max(1, lab.backbone.depth * 4 // 5)
    asked = [read_strategy(text, _opener(args)) for text in args.drafter]
    drafters = asked or [EarlyExit(exit, max_draft=2), PromptLookup()]
    comparison = lab.compare(as_ids(lab, wanted), drafters, max_new_tokens=args.max_new_tokens)
    m = machine(lab.backbone)
    caption = f"{m['model']}, {m['dtype']}, {m['device']}, {m['threads']} threads, {len(wanted)} prompts, greedy"
    demo_picture(comparison, lab.decode, caption, prompt=len(wanted) - 1).savefig(picture)
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
    if len(args.drafter) > 1:
        raise LabkitError(f"generate takes one --drafter and got {len(args.drafter)}; labkit bench compares several")
    drafter = read_strategy(args.drafter[0], _opener(args)) if args.drafter else None
    prompt: Any = args.prompt
    if not args.raw and getattr(lab.tokenizer, "chat_template", None) is not None:
        prompt = [{"role": "user", "content": args.prompt}]
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "early_exit", "seed")}
    options = {name: value for name, value in options.items() if value is not None}
    out = lab.generate(prompt, drafter, max_new_tokens=args.max_new_tokens, **options)
    if args.json:
        print(json.dumps({"text": out.text, "tokens": out.tokens, "settings": dict(out.settings),
                          "reasons": out.reasons,
                          "tokens_per_round": out.tokens_per_round, "acceptance_rate": out.acceptance_rate,
                          "alpha": out.alpha, "seconds": out.seconds, "lossless": out.lossless}))  # fmt: skip
    else:
        print(out)


def run_bench(args: argparse.Namespace) -> None:
    """Strategies against plain, their own ideal, and transformers."""
    file = _writable(args.json)
    lab = load(args.model, device=args.device, dtype=args.dtype)
    drafters = [read_strategy(text, _opener(args)) for text in [*args.drafter, *(args.drafters or [])]]
    names = args.prompts or sorted(path.stem for path in prompts_folder().glob("*.jsonl"))
    prompts = [prompt for name in names for prompt in read_prompt_files([name])[: args.per_set]]
    result = bench(
        lab, as_ids(lab, prompts), drafters, max_new_tokens=args.max_new_tokens, repeats=args.repeats,
        progress=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    result["command"] = "labkit " + " ".join(repr(word) if " " in word or "(" in word else word for word in args.argv)
    result["settings"]["ids"] = [p["id"] for p in prompts]
    print(report(result))
    if file is not None:
        write_json(result, file)


def _opener(args: argparse.Namespace) -> Callable[[str], Any]:
    """How a draft model named in a strategy is loaded: where and as the target is."""
    return lambda name: load_model(name, device=args.device, dtype=args.dtype)[0]


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = argparse.ArgumentParser(prog="labkit", description="Speculative decoding on real models, in one real loop.")
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run, text: str, model: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if model:
            sub.add_argument("--model", default="smollm2-135m", help="a shipped name, a folder or a hub id")
            sub.add_argument("--device")
            sub.add_argument("--dtype", help="float32, bfloat16, float16 or float64")
            sub.add_argument("--drafter", action="append", default=[], help="such as 'EarlyExit(24, max_draft=2)'")
            sub.add_argument("--max-new-tokens", type=int, default=64)
        return sub

    one = command("demo", demo, "a few prompts, several strategies, a table and a picture")
    one.add_argument("--picture", default="labkit-demo.png")
    one.add_argument("--json", action="store_true")
    one = command("generate", generate, "generate from one prompt")
    one.add_argument("prompt")
    one.add_argument("--raw", action="store_true", help="no chat template")
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("early-exit", int), ("seed", int)):
        one.add_argument(f"--{name}", type=kind)
    one.add_argument("--json", action="store_true")
    one = command("bench", run_bench, "speed against plain, the ideal, and transformers' generate")
    one.add_argument("--drafters", nargs="+", help="several strategies at once")
    one.add_argument("--prompts", nargs="+", help="prompt sets or JSONL files; default all shipped sets")
    one.add_argument("--per-set", type=int, default=2, help="prompts taken from each set")
    one.add_argument("--repeats", type=int, default=1)
    one.add_argument("--json", metavar="FILE")
    one = command("fetch", lambda args: print(fetch(args.name, force=args.force)), "fetch a shipped model", model=False)
    one.add_argument("name")
    one.add_argument("--force", action="store_true")
    command("doctor", lambda args: print(doctor()), "what this machine has, and what is missing", model=False)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 with the reason on standard error."""
    args = parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args.run(args)
    except LabkitError as error:
        print(f"labkit {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
