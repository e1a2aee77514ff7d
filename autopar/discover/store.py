"""The rules found so far, on disk.

One JSON file per version of onnx and of this package's search: rules by signature, and for each real op (by the digest
of its sketch) the signature it shrinks to, so that a second run executes nothing. The file is replaced atomically; one
that cannot be read is ignored and written anew.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autopar.discover.rules import Rule, rule_from_json, rule_to_json

VERSION = 6
"""Raise it whenever the search may find other rules than before."""


class Store:
    """Rules by signature and signatures by sketch; kept in memory only if there is no folder."""

    def __init__(self, folder: Path | None) -> None:
        self._rules: dict[str, Rule] = {}
        self._signatures: dict[str, str] = {}
        self._path: Path | None = None
        self._changed = False
        if folder is not None:
            from importlib.metadata import version

            self._path = folder / f"rules-v{VERSION}-onnx{version('onnx')}.json"
            self._load(self._path)

    def by_sketch(self, digest: str) -> Rule | None:
        """Return the rule of a real op, if known."""
        return self._rules.get(self._signatures.get(digest, ""))

    def by_signature(self, signature: str) -> Rule | None:
        """Return the rule of a shrunk op, if known."""
        return self._rules.get(signature)

    def add(self, digest: str, rule: Rule) -> None:
        """Remember the rule of a real op."""
        self._rules[rule.signature] = rule
        self._signatures[digest] = rule.signature
        self._changed = True

    def save(self) -> None:
        """Write what is new, together with what others wrote meanwhile.

        Raises:
            OSError: If the folder cannot be written.
        """
        if self._path is None or not self._changed:
            return
        self._load(self._path)
        data = {
            "version": VERSION,
            "rules": {signature: rule_to_json(rule) for signature, rule in sorted(self._rules.items())},
            "signatures": dict(sorted(self._signatures.items())),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(temporary, self._path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._changed = False

    def _load(self, path: Path) -> None:
        """Add what the file holds; own entries win."""
        try:
            data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                return
            rules = {signature: rule_from_json(rule) for signature, rule in data["rules"].items()}
            signatures = {str(digest): str(signature) for digest, signature in data["signatures"].items()}
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return  # absent or damaged: a cache may be rebuilt
        self._rules = rules | self._rules
        self._signatures = signatures | self._signatures
