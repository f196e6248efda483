"""The code reads as the field writes it: names begin with verbs, a word has one meaning, files and functions are whole.

The limits are what holds today, rounded; mend the code rather than a limit.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_arrows import name_module

ROOT = Path(__file__).parents[1]
FILES = [path for top in ("engines", "mpi4dl_nb") for path in sorted((ROOT / top).rglob("*.py"))]

PRIVATE_WORDS = {
    *("told", "said", "heard", "seen", "given", "woven", "apart", "alone", "behind", "beside", "anew", "whoever"),
    *("somebody", "foreseen", "spoken", "away", "theirs", "meanwhile", "lane", "shelf"),
}
"""Words that name nothing by themselves: say what is sent, received, cached, recomputed or offloaded."""

NO_VERBS = re.compile(r"^(of|main|default|from_\w+|resnet\w*|unet|amoebanet|ceil_div|lcm|gcd|volume|\w+_rank)$")
"""Constructors, mathematics and models, which are called as what they are."""

VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        abort accept add advance align allocate allow analyse answer apply arrange assemble assign backward batch
        begin bench bind build calibrate call can cancel capture cast check choose clamp classify clean clear close
        collect combine compare compile compose compute connect convert copy count create crop cut decode delay
        describe detect disable discard divide draw drop emit encode end ensure enter estimate evaluate exchange
        exclude exec execute exit expand explain export extend extract fetch fill find finish fit flatten flush forget
        format forward freeze gather generate get go grade group guess halve handle has hash heal hold identify ignore
        import infer inline insert install interpolate interrupt invert is iterate jitter join keep kill label launch
        limit list load locate lock lower make map mark mask materialise measure merge multiply name narrow needs
        normalise notify nudge offload open optimise order pack pad pair parse pass pause peek permute pick pickle
        place plan poll pool post predict prefetch prepare print process propagate prune publish push put query quote
        raise read receive recompute record recover redirect redraw reduce refresh refuse register release remove
        render reorder repeat replace replay report request require resample reserve reset reshape resize resolve
        restart restore restrict resume reverse revoke rewrite round run sample save scale scatter schedule search seek
        select send serialise serve set shard share shift shorten show shrink shuffle silence simulate skip slide sort
        split stack start step stop submit subtract sum summarise supervise suspend switch sync take terminate time to
        trace track train transfer translate transpose trim truncate try tune undo unpack update upsample use verify
        view visit wait warn watch with wrap write zoom
        """,
    )
)
"""First words of functions; a new one has to be a verb of the field."""

LEAST_VERBS, MOST_PRIVATE_WORDS, MOST_SAME_CLASSES = 0.85, 10, 5
MOST_FILE_LINES, MOST_FUNCTION_LINES = 500, 100


@cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def list_functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    """All but properties, and methods whose names Python or a library has chosen."""
    for path in FILES:
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                prop = any("property" in ast.unparse(each) for each in node.decorator_list)
                yield from [] if prop else [(path, node)]


def test_functions_begin_with_a_verb():
    names = [node.name.strip("_") for _, node in list_functions()]
    begin = [name for name in names if name.partition("_")[0] in VERBS or NO_VERBS.match(name)]
    assert len(begin) / len(names) >= LEAST_VERBS


def test_no_function_is_called_as_a_bare_participle():
    nouns = {"embed", "feed", "need", "seed", "speed", "shed", "proceed"}
    names = [node.name.strip("_") for _, node in list_functions()]
    bare = [name for name in names if re.fullmatch("[a-z]{3,}ed", name) and name not in nouns]
    assert len(bare) <= MOST_PRIVATE_WORDS, bare


def test_names_have_no_words_of_a_private_language():
    found = [f"{path.name}:{node.name}" for path, node in list_functions() if PRIVATE_WORDS & set(node.name.split("_"))]
    assert len(found) <= MOST_PRIVATE_WORDS, found


def test_a_class_name_has_one_meaning():
    places = defaultdict(set)
    for path in FILES:
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(path.name)
    assert sum(len(files) > 1 for files in places.values()) <= MOST_SAME_CLASSES, places


def test_docstrings_begin_with_a_subject_or_a_verb():
    """Not with a riddle: `Whoever waits`, `What is left`, `That of`, `As one process has it`."""
    riddle = re.compile(r"(Whoever|That of|As (?:one|a|the)|And |But )")
    found = [
        f"{path.name}:{node.name}: {text.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(parse_file(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)) and riddle.match(text)
    ]
    assert found == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_not_too_long(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_FILE_LINES
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < MOST_FUNCTION_LINES, node.name


NAMES = {name_module(path.relative_to(ROOT).as_posix()): path for path in FILES}


def list_imports(path: Path) -> set[str]:
    """The project's modules that a file imports anywhere: at its top, within functions, or for type checkers."""
    found = set()
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{each.name}" for each in node.names]
            found |= {name if name in NAMES else node.module for name in inner}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & NAMES.keys()


def find_modules_in_circles(imports: dict[str, set[str]]) -> set[str]:
    """Those from which imports lead back to them, and those between two of them."""
    left = {name: needs - {name} for name, needs in imports.items()}
    while ends := {name for name in left if not left[name] & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in ends}
    while ends := left.keys() - set().union(*left.values()):
        left = {name: needs for name, needs in left.items() if name not in ends}
    return set(left)


def test_imports_run_in_no_circle():
    assert find_modules_in_circles({name: list_imports(path) for name, path in NAMES.items()}) == set()


def test_a_circle_is_found():
    circle = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": {"c", "f"}, "f": set()}
    assert find_modules_in_circles(circle) == {"b", "c"}


TEXT = {"read_text", "write_text", "open", "fdopen", "NamedTemporaryFile", "TextIOWrapper"}
PROGRAMS = {"run", "Popen", "check_output"}
NO_TEXT = {"Image", "Checkpoint", "os", "zarr"}  # whose `open` has other arguments


def find_unencoded(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that read or write text in the encoding of the user's locale; ruff knows a part of them."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or any(word.arg == "encoding" for word in call.keywords):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owner = getattr(getattr(call.func, "value", None), "id", "")
        values = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        is_file = name in TEXT and (owner not in NO_TEXT or name == "fdopen") and ast.unparse(call) != "super().open()"
        # Unless it is told otherwise, a temporary file is binary, and others are text.
        is_binary = any("b" in mode for mode in modes) or (name == "NamedTemporaryFile" and not modes)
        is_output = name in PROGRAMS and any(word.arg in ("text", "universal_newlines") for word in call.keywords)
        if is_output or (is_file and not is_binary):
            yield call


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("path.read_text(); path.read_text(errors='replace'); open(p); path.open('x'); os.fdopen(3, 'w')", 5),
        ("subprocess.run(c, text=True); NamedTemporaryFile('w'); path.write_text(t)", 3),
        ("path.read_text(encoding='utf-8'); open(p, 'rb'); os.open(p, 0); Image.open(p); NamedTemporaryFile()", 0),
    ],
)
def test_text_without_an_encoding_is_found(code: str, count: int):
    assert len(list(find_unencoded(ast.parse(code)))) == count


def test_text_has_the_same_encoding_in_any_locale():
    found = [f"{path}:{call.lineno}" for path in FILES for call in find_unencoded(parse_file(path))]
    assert not found, "say encoding='utf-8': " + ", ".join(found)
