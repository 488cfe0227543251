"""JUnit XML against `junit.xsd`, whose head says where that comes from, by lxml."""

from __future__ import annotations

from pathlib import Path

import pytest

SCHEMA = Path(__file__).with_name("junit.xsd")


def complaints(document: bytes) -> list[str]:
    """What the schema, or XML itself, has against a document, a line each; the test is skipped where lxml is not
    installed."""
    etree = pytest.importorskip("lxml.etree", reason="lxml is not installed (pip install -e '.[test]')")
    schema = etree.XMLSchema(etree.parse(SCHEMA))
    try:
        parsed = etree.fromstring(document)
    except etree.XMLSyntaxError as error:
        return [str(error)]
    schema.validate(parsed)
    return [f"line {error.line}: {error.message}" for error in schema.error_log]
