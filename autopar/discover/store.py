"""The rules found so far, on disk.

One JSON file per version of onnx and of this package's search: rules by signature, and for each real op (by the digest
of its sketch) the signature it shrinks to, so that a second run executes nothing. The file is replaced atomically and
holds the hash of its content, and every rule in it is checked for its form; a file with a fault is ignored and written
anew.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from autopar.discover.rules import Rule, rule_from_json, rule_to_json
from autopar.errors import PlanError
from autopar.writing import write_atomically

VERSION = 12
"""Raise it whenever the search may find other rules than before."""


class _Content(msgspec.Struct):
    """What a file holds: rules by signature, and signatures by digest of a sketch."""

    rules: dict[str, Any]
    signatures: dict[str, str]


class _File(msgspec.Struct):
    """A file: content as JSON, and its SHA-256."""

    version: int
    sha256: str
    content: msgspec.Raw


class Store:
    """Rules by signature and signatures by sketch; kept in memory only if there is no folder."""

    def __init__(self, folder: str | Path | None) -> None:
        self._rules: dict[str, Rule] = {}
        self._signatures: dict[str, str] = {}
        self._path: Path | None = None
        self._changed = False
        if folder is not None:
            from importlib.metadata import version

            self._path = Path(folder) / f"rules-v{VERSION}-onnx{version('onnx')}.json"
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

    def save(self) -> str:
        """Write what is new, together with what others wrote meanwhile.

        Returns:
            Why it could not be written, for people; "" if it was, or need not be.
        """
        if self._path is None or not self._changed:
            return ""
        self._load(self._path)
        rules = {signature: rule_to_json(rule) for signature, rule in sorted(self._rules.items())}
        content = msgspec.json.encode(_Content(rules, dict(sorted(self._signatures.items()))))
        file = _File(VERSION, hashlib.sha256(content).hexdigest(), msgspec.Raw(content))
        try:
            write_atomically(self._path, msgspec.json.encode(file))
        except PlanError as error:
            return str(error.args[0])
        self._changed = False
        return ""

    def _load(self, path: Path) -> None:
        """Add what the file holds; own entries win."""
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
            if file.version != VERSION or hashlib.sha256(file.content).hexdigest() != file.sha256:
                return
            content = msgspec.json.decode(file.content, type=_Content)
            rules = {signature: rule_from_json(rule) for signature, rule in content.rules.items()}
        except (OSError, msgspec.MsgspecError, ValueError):
            return  # absent or damaged: a cache may be rebuilt
        self._rules = rules | self._rules
        self._signatures = content.signatures | self._signatures
