"""Imports point one way, and functions stay small (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70

# Each layer, and the layers whose modules it may import beside its own.
LAYERS = {
    "base": set(),
    "core": {"base"},
    "backends": {"base", "core"},
    "move": {"base", "core"},
    "device": {"base", "core"},
    "observe": {"base", "core"},
    "config": {"base", "core"},
    "stack": {"base", "core", "move", "observe", "config"},
    "testing": {"base", "core", "backends", "move", "observe", "config", "stack"},
    "vllm": {"base", "core", "move", "observe", "config", "stack", "backends", "device"},
    "sglang": {"base", "core", "move", "config", "stack", "device"},
    "door": {"base", "config", "stack"},  # kvtier/__init__.py: the names that users begin with
    "cli": {
        *("base", "core", "move", "observe", "config", "stack"),
        *("vllm", "device", "backends", "testing"),
    },
}
LAYER_OF = {
    "": "door",
    **dict.fromkeys(("types", "errors", "amounts", "guard", "weight_fingerprints"), "base"),
    **dict.fromkeys(("record", "settings", "system", "interfaces", "inspect"), "core"),
    **dict.fromkeys(("eviction", "slab", "cost", "chain"), "core"),
    "stack": "stack",
    "__main__": "cli",
}
BUILT_IN = {"cpu", "nvme", "object", "memory"}
HEAVY = {
    *("torch", "triton", "llvmlite", "kvikio", "boto3", "botocore"),
    *("vllm", "sglang", "transformers"),
}
MAY_IMPORT_HEAVY = {
    "vllm": {"torch", "vllm", "transformers"},
    "sglang": {"torch", "sglang"},
    "backends": {"boto3", "botocore", "kvikio"},
    "device": {"torch", "triton", "llvmlite", "kvikio"},
}

GUARDS = {
    "kvtier/guard.py": "no exception may reach an engine's scheduler",
    "kvtier/move/threads.py": "a handler's mistake must not end the thread that moves blocks",
    "kvtier/interfaces/backend.py": "a package of others may raise anything at import",
    "kvtier/chain/isolated_tier.py": "and when it is used",
    "kvtier/eviction/policy.py": "likewise",
    "kvtier/system/calls.py": "what a thread raises ends no wait for it",
    "kvtier/slab/keeper.py": "without its thread no slab is made",
    "backends/object/keeper.py": "without its thread nothing is recorded",
    "backends/object/stores/credentials.py": "credentials come from programs of the user's",
    "backends/object/stores/bucket_store.py": "obstore's errors have no base of their own",
}
"""The files that may catch whatever is raised, and why."""


def product_files() -> list[Path]:
    roots = [ROOT / "kvtier", ROOT / "backends"]
    files = (path for root in roots for path in root.rglob("*.py"))
    return sorted(path for path in files if "kvtier/backends" not in str(path.relative_to(ROOT)))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "backends":
        parts = ("kvtier", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    _, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return LAYER_OF.get(first, first)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every module imported anywhere in a file, within functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that they can be read alone"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


tree_of = functools.cache(parse)
"""For those that only look."""


def holds_for(check: Callable[[Path], None], paths: list[Path]) -> None:
    """Hold a rule against every file, and tell of all that break it."""
    broken = []
    for path in paths:
        try:
            check(path)
        except (AssertionError, pytest.fail.Exception) as error:
            broken.append(str(error))
    assert paths
    assert not broken, "\n".join(broken)


def test_imports_point_one_way() -> None:
    holds_for(check_imports, product_files())


def check_imports(path: Path) -> None:
    module = module_of(path)
    layer = layer_of(module)
    assert layer in LAYERS, f"{module} is in no layer: name it in ARCHITECTURE.md and here"
    for line, name in imports(tree_of(path)):
        top = name.partition(".")[0]
        if top == "backends":
            pytest.fail(f"{path}:{line} imports {name}: its name is kvtier.backends")
        if top in HEAVY:
            allowed = MAY_IMPORT_HEAVY.get(layer, set())
            assert top in allowed, f"{path}:{line}: {layer} must not import {top}"
        if top == "kvtier":
            target = layer_of(name)
            if name.count(".") == 1 and target not in LAYERS:
                target = "base"  # `from kvtier import __version__`
            assert target == layer or target in LAYERS[layer], (
                f"{path}:{line}: {layer} must not import {target} ({name})"
            )


def test_backends_do_not_know_each_other() -> None:
    holds_for(check_other_backends, sorted((ROOT / "backends").glob("*/**/*.py")))


def check_other_backends(path: Path) -> None:
    own = module_of(path).split(".")[2]
    for line, name in imports(tree_of(path)):
        if name.startswith("kvtier.backends."):
            assert name.split(".")[2] == own, f"{path}:{line}: {own} must not import {name}"


def test_files_and_functions_are_small() -> None:
    holds_for(check_sizes, product_files())


def check_sizes(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES_MAX, f"{path} has {lines} lines, more than {FILE_LINES_MAX}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, (
                f"{path}:{node.lineno}: {node.name} has {length} lines, "
                f"more than {FUNCTION_LINES_MAX}"
            )


KNOWS_BACKENDS = {
    "kvtier/cli/config.py": "the text of a new stack names the built-in tiers",
}
"""The files outside backends/ that may import one by name, and why."""


def test_backends_are_unknown_outside() -> None:
    """So that a tier of another package is one like any other: by its entry point alone."""
    found = set()
    for path in product_files():
        name = str(path.relative_to(ROOT))
        if name.startswith("backends/"):
            continue
        tree = tree_of(path)
        if any(each.startswith("kvtier.backends.") for _, each in imports(tree)):
            found.add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare | ast.MatchValue):
                texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                about_kinds = "kind" in ast.unparse(node) or isinstance(node, ast.MatchValue)
                kinds = BUILT_IN.intersection(texts) if about_kinds else set()
                assert not kinds, f"{path}:{node.lineno} compares a kind of tier with {kinds}"
    assert found == set(KNOWS_BACKENDS)


def modules() -> dict[str, Path]:
    return {module_of(path): path for path in product_files()}


def graph_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """Which module imports which, within functions too; what is only for types counts nothing."""
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        tree = parse(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        targets = set()
        for _, name in imports(tree):
            targets.add(name if name in known else name.rpartition(".")[0])
        graph[module] = {name for name in targets if name in known and name != module}
    return graph


def circles_in(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, whatever the way: Tarjan's strongly connected components."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_no_import_goes_in_a_circle() -> None:
    assert circles_in(graph_of(modules())) == []


def test_any_exception_is_caught_in_few_places() -> None:
    found = set()
    for path in product_files():
        for node in ast.walk(tree_of(path)):
            caught = []
            if isinstance(node, ast.ExceptHandler):
                caught = [node.type]
            elif isinstance(node, ast.Call):
                caught = node.args
            if any(isinstance(each, ast.Name) and each.id == "Exception" for each in caught):
                found.add(str(path.relative_to(ROOT)))
    assert found == set(GUARDS)


def test_who_catches_whatever_ends_a_block_passes_it_on() -> None:
    """To tidy up first."""
    for path in product_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                everything = node.type is None or ast.unparse(node.type) == "BaseException"
                passed_on = any(isinstance(each, ast.Raise) for each in ast.walk(node))
                assert passed_on or not everything, (
                    f"{path}:{node.lineno} keeps KeyboardInterrupt from whoever waits for it"
                )


def test_every_file_says_what_it_is_for() -> None:
    holds_for(check_docstring, product_files())


def check_docstring(path: Path) -> None:
    tree = tree_of(path)
    if tree.body:
        assert ast.get_docstring(tree), f"{path} does not begin with a sentence about itself"


PROMISED = {"vllm", "vllm.config", "vllm.platforms"}
"""The modules of vLLM that may be imported outside kvtier/vllm/hooks/."""
NAMED_TUPLES = {"_asdict", "_replace"}


def outside_the_border() -> list[Path]:
    files = (ROOT / "kvtier" / "vllm").rglob("*.py")
    return sorted(path for path in files if "hooks" not in path.parts)


def test_vllm_is_reached_into_by_its_hooks_alone() -> None:
    """What vLLM does not promise is touched in kvtier/vllm/hooks/, where it stands in a table."""
    holds_for(check_border, outside_the_border())


def check_border(path: Path) -> None:
    tree = tree_of(path)
    for line, name in imports(tree):
        module = name.rpartition(".")[0] or name
        assert not name.startswith("vllm") or {name, module} & PROMISED, (
            f"{path}:{line}: {name} belongs into kvtier/vllm/hooks/"
        )
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            mine = ast.unparse(node.value) in ("self", "cls") or node.attr in own | NAMED_TUPLES
            assert mine, f"{path}:{node.lineno}: {ast.unparse(node)} is private to somebody else"
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) != "setattr", f"{path}:{node.lineno} changes another's"


def test_nobody_looks_at_who_calls() -> None:
    holds_for(check_callers, sorted((ROOT / "kvtier" / "vllm").rglob("*.py")))


def check_callers(path: Path) -> None:
    walks = {"_getframe", "currentframe", "f_back", "f_locals"}
    for node in ast.walk(tree_of(path)):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        assert name not in walks, f"{path}:{node.lineno} walks up Python's stack"


def test_each_folder_lists_its_files() -> None:
    """In backticks, in the docstring of its `__init__.py`; a list names nothing that is gone."""
    wrong = []
    for init in (*ROOT.glob("kvtier/*/**/__init__.py"), *ROOT.glob("backends/**/__init__.py")):
        if "kvtier/backends" in str(init):
            continue
        there = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        named = {name.removesuffix(".py") for name in re.findall(r"`([^`]+)`", text)}
        items = re.findall(r"^- (`[^:]*`):", text, re.MULTILINE)
        leading = re.findall(r"`([^`]+)`", " ".join(items))
        listed = {name.rstrip("/").removesuffix(".py") for name in leading}
        folders = {path.name for path in init.parent.iterdir() if path.is_dir()}
        if init.parent.name == "cli":  # "each command has a file of its name"
            there -= {module for module, _ in COMMANDS.values()}
        wrong += [f"{init}: {name} is gone" for name in sorted(listed - there - folders)]
        wrong += [f"{init}: lacks {name}" for name in sorted(there - named)]
    assert wrong == []


def test_no_class_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = {}
    for path in (
        *ROOT.glob("kvtier/*.py"),
        *ROOT.glob("kvtier/*/**/*.py"),
        *ROOT.glob("backends/**/*.py"),
    ):
        if "kvtier/backends" not in str(path):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
