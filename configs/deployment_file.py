"""Deployment files: YAML read into the configuration tree, with errors that name file, key and value."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path

import pydantic
import yaml

from antiphon.configs.schema import DeploymentConfig
from antiphon.protocol.errors import ConfigError


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML's loaders silently drop the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} twice", key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_deployment(path: Path, overrides: dict[str, object] | None = None) -> DeploymentConfig:
    """Read a deployment file; ``overrides`` maps dotted keys (``router.port``) to values.

    Raises:
        ConfigError: no such file, not YAML, an unknown key or a bad value; names file, key and value.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(tree).__name__}")
    for dotted, value in (overrides or {}).items():
        _set_dotted(tree, dotted, value)
    try:
        return DeploymentConfig.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_describe(e) for e in error.errors())) from error


def _set_dotted(tree: dict[str, object], dotted: str, value: object) -> None:
    *parents, leaf = dotted.split(".")
    node = tree
    for key in parents:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: {key} is not a section")
        node = child
    node[leaf] = value


_CREDENTIALS = re.compile(r"://[^/@\s]*@")
"""User and password of a URL: an error says what is wrong without them."""


def _describe(error: object) -> str:
    assert isinstance(error, dict)
    where = ".".join(str(part) for part in error["loc"]) or "deployment"
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    described = f"{where}: {error['msg']} (got {error['input']!r})" if error["loc"] else f"{error['msg']}"
    return _CREDENTIALS.sub("://***@", described)
