"""The source tree keeps design.md's rules: which way imports point, and how large things may grow."""

import ast
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).parent
LAYERS = [
    {"errors", "shipped", "saved", "spelling"},
    {"cache", "draft", "noise"},
    {"attention", "views", "probe", "exits", "backbone"},
    {"session"},
    {"protocol", "heads"},
    {"acceptance", "costs", "warp", "stopping", "drafters", "decoding"},
    {"prompts", "options", "pieces", "trace", "compare", "loading", "lab", "data"},
    {"doctor"},
    {"bench", "lossy", "calibration", "layers", "guesses", "replay", "sweep", "integrations", "training"},
    {"view"},
    {"cli", "open_lab", "__main__"},
    {""},
]
"""An import may point to the same line or to one above; "" is labkit/__init__.py."""

KNOW_TRANSFORMERS = {
    *("backbone", "views", "probe", "cache", "attention"),
    *("warp", "stopping", "loading", "lab"),  # only names that transformers documents
    *("integrations", "training", "data", "heads", "cli", "doctor"),
}
SOURCES = sorted(ROOT.rglob("*.py"))
MOST_LINES, MOST_ALTOGETHER, MOST_NAMES = 300, 3600, 45


def part(path: Path) -> str:
    """The module or sub-package of labkit that a file belongs to."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(tree: ast.AST, package: str = "labkit") -> set[str]:
    """The full dotted names that a file imports, those under `if TYPE_CHECKING` and in functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            found |= {module} if module != "labkit" else set()
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def code_lines(source: str) -> int:
    """Lines that are neither blank, comment nor docstring: what has to be understood, however well it is explained."""
    lines = {n for n, line in enumerate(source.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def rank(name: str) -> int:
    place = next((i for i, names in enumerate(LAYERS) if name in names), None)
    assert place is not None, f"labkit/{name} is in no line of LAYERS: say between which others it stands"
    return place


def parts_imported(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("labkit.")}


def wrong_arrows(name: str, source: str) -> list[str]:
    """Imports of labkit's own parts that point down."""
    there = {other for other in parts_imported(imports(ast.parse(source))) if other[:1].islower()}
    return [f"{name} -> {other}" for other in sorted(there) if rank(other) > rank(name)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    assert wrong_arrows(part(path), path.read_text()) == []


def test_a_wrong_arrow_is_seen():
    assert wrong_arrows("session", "from labkit import lab\n") == ["session -> lab"]
    assert wrong_arrows("cache", "def f():\n    import labkit.backbone\n") == ["cache -> backbone"]
    assert wrong_arrows("draft", "from .session import Session\n") == ["draft -> session"]
    assert wrong_arrows("lab", "from labkit.session import Session\nfrom labkit import views\n") == []


def runtime_edges() -> dict[str, set[str]]:
    """Between single files: who imports whom at import time."""
    names = {
        ".".join(("labkit", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): p for p in SOURCES
    }
    edges = {}
    for name, path in names.items():
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        edges[name] = {x for x in imports(ast.Module(top, [])) if x in names and x != name}
    return edges


def test_no_file_imports_in_a_circle():
    edges = runtime_edges()
    while edges:
        free = [name for name, there in edges.items() if not there & set(edges)]
        assert free, f"a circle among {sorted(edges)}"
        edges = {name: there for name, there in edges.items() if name not in free}


def test_the_loop_knows_no_drafter():
    for name in ("decoding", "session", "protocol", "acceptance", "warp", "stopping"):
        tree = ast.parse((ROOT / f"{name}.py").read_text())
        assert "drafters" not in parts_imported(imports(tree)), name
        words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not words & {"EarlyExit", "PromptLookup", "DraftModel", "Plain"}, name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_who_may_import_what(path):
    roots = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
    if part(path) not in KNOW_TRANSFORMERS:
        assert "transformers" not in roots
    if part(path) != "view":
        assert not roots & {"matplotlib", "ipywidgets", "IPython"}
    assert not {name for name in imports(ast.parse(path.read_text())) if "pyplot" in name or "pylab" in name}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_small_files_with_telling_names(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES
    assert path.stem not in ("utils", "util", "helpers", "misc", "common", "config", "manager", "registry")
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not path.read_text().strip()
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if name.endswith(("Manager", "Config", "Registry", "Utils", "Helper"))]


def test_small_library():
    """design.md's bound; strategies and heads are pages of their own, left out like training: they are not the loop.

    Nor is what looks at runs and texts afterwards, left out like the pictures of it.
    """
    apart = {"training", "data", "view", "heads", "drafters"}
    apart |= {"pieces", "spelling", "saved", "layers", "guesses", "replay", "sweep"}
    counted = [path for path in SOURCES if part(path) not in apart]
    assert sum(code_lines(path.read_text()) for path in counted) <= MOST_ALTOGETHER


def test_few_public_names():
    assert len(labkit.__all__) <= MOST_NAMES
    assert labkit.__all__ == sorted(labkit.__all__, key=lambda name: (name.islower(), name))
    assert not [name for name in labkit.__all__ if not getattr(labkit, name).__doc__]


def test_one_exception_class():
    assert issubclass(labkit.LabkitError, ValueError)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and part(path) != "errors":
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not {b for b in bases if b.endswith(("Error", "Exception"))}, node.name


def test_no_global_random_numbers_and_no_shouting():
    for path in SOURCES:
        calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = {f.attr for f in calls if isinstance(f, ast.Attribute)} | {
            f.id for f in calls if isinstance(f, ast.Name)
        }
        if part(path) not in ("training", "heads"):
            assert not names & {"manual_seed", "multinomial", "set_default_device", "set_default_dtype"}, path
        if path.name not in ("cli.py", "command.py"):
            assert "print" not in names, path


def test_inference_mode_never_around_a_yield():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.With) and "inference_mode" in ast.unparse(node.items[0]):
                inside = [x for stmt in node.body for x in ast.walk(stmt)]
                assert not [x for x in inside if isinstance(x, ast.Yield | ast.YieldFrom)], path


# -- the package ----------------------------------------------------------------------------------------


def test_every_package_and_prompt_set_is_shipped():
    import tomllib

    top = ROOT.parent
    listed = tomllib.loads((top / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(path.parent.relative_to(top).parts) for path in ROOT.rglob("__init__.py")}
    assert set(listed["packages"]) == found | {"labkit._data.prompts", "labkit._data.tiny"}
    for name in ("prompts", "tiny"):
        assert listed["package-dir"][f"labkit._data.{name}"] == f"data/{name}"
    assert list((top / "data" / "prompts").glob("*.jsonl"))
