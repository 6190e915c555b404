"""Which installed packages a set of entry points needs, found by walking their imports.

Imports are read from source, those inside functions included where that is asked for, so what is loaded late
is found too. From the packages that are imported outright, each one's own requirements are followed for the
machine that is meant.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TARGET = {"python_version": "3.12", "python_full_version": "3.12.3", "implementation_version": "3.12.3"}
"""How the machine's Python differs from this one, as requirements ask for it."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def normal(name: str) -> str:
    """A distribution's name as registries compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def source_of(module: str) -> Path | None:
    """The file of one of the project's modules; None for a folder and for what is not ours."""
    first, *rest = module.split(".")
    if first != "antiphon":
        return None
    base = ROOT.joinpath(*rest)
    return next((path for path in (base.with_suffix(".py"), base / "__main__.py") if path.is_file()), None)


@cache
def imports_of(path: Path, late: bool) -> frozenset[str]:
    """Every module that a file names in an import, what is imported from it included.

    Args:
        late: those inside functions too. Imports for the type checker alone never count.
    """
    return frozenset(_imports(ast.parse(path.read_text()), late))


def _imports(tree: ast.Module, late: bool) -> Iterator[str]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, _FUNCTIONS) and not late:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def files_of(entries: Iterable[str | Path], late: bool = True) -> list[Path]:
    """Every file of the project that entries load, they themselves first.

    Args:
        entries: modules of the project, or its files.
        late: what functions import counts too.

    Raises:
        ModuleNotFoundError: an entry is none of the project's files.
    """
    found = dict[Path, None]()
    for entry in entries:
        path = ROOT / entry if isinstance(entry, Path) else source_of(entry)
        if path is None or not path.is_file():
            raise ModuleNotFoundError(f"{entry}: no such file in {ROOT}")
        found[path] = None
    waiting = list(found)
    while waiting:
        for module in sorted(imports_of(waiting.pop(), late)):
            path = source_of(module)
            if path is not None and path not in found:
                found[path] = None
                waiting.append(path)
    return list(found)


def imported(files: Iterable[Path], late: bool = True) -> set[str]:
    """Top-level names of others' modules that files import, but for the standard library's and neighbours."""
    return {
        first
        for path in files
        for first in {module.partition(".")[0] for module in imports_of(path, late)}
        if first != "antiphon"
        and first not in sys.stdlib_module_names
        and not path.with_name(f"{first}.py").is_file()
    }


def distributions(
    modules: Iterable[str],
    further: Iterable[str],
    there: Collection[str],
    instead: Mapping[str, Collection[str]],
) -> set[str]:
    """Installed distributions that provide top-level modules, and all that these require.

    Args:
        modules: names as they are imported.
        further: distributions that nothing imports by name.
        there: distributions that the machine has, which are neither packed nor followed.
        instead: distribution -> what is required in place of its own requirements.

    Raises:
        LookupError: a module or a requirement is not installed here.
    """
    providers = metadata.packages_distributions()
    waiting = list(further)
    for module in sorted(modules):
        if module not in providers:
            raise LookupError(f"{module}: no installed package has a module of that name")
        waiting += providers[module]
    found: set[str] = set()
    while waiting:
        name = normal(waiting.pop())
        if name in found or name in there:
            continue
        found.add(name)
        waiting += instead[name] if name in instead else requirements_of(name)
    return found


def requirements_of(name: str) -> list[str]:
    """What an installed distribution requires on the machine that is meant, no extra of it asked for.

    Raises:
        LookupError: it is not installed here.
    """
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        raise LookupError(f"{name}: required, and not installed here") from None
    environment: dict[str, str | AbstractSet[str]] = {
        **{name: str(value) for name, value in default_environment().items()},
        **TARGET,
        "extra": "",
    }
    wanted = [Requirement(text) for text in texts]
    return [each.name for each in wanted if each.marker is None or each.marker.evaluate(environment)]


def locked(lock: Path) -> dict[str, str]:
    """Distribution -> version, as a file of pins says.

    Raises:
        LookupError: a line is no pin.
    """
    found = {}
    for line in lock.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, equal, version = line.partition("==")
        if not equal:
            raise LookupError(f"{lock}: {line!r} pins no version")
        found[normal(name.strip())] = version.strip()
    return found
