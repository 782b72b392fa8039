#!/usr/bin/env python3
"""Writes what a wheel of anybatch brings along: a software bill of materials (CycloneDX 1.6), or a table of licences.

.venv/bin/python scripts/sbom.py dist/anybatch.cdx.json   # the core's dependencies as they are installed
.venv/bin/python scripts/sbom.py --licences               # a table of the same, in Markdown
"""

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

_NAME = re.compile(r"^[A-Za-z0-9._-]+")


def main(arguments: list[str]) -> int:
    """Writes the file that is named, or prints the table."""
    found = sorted(installed("anybatch"), key=lambda one: one.metadata["Name"].lower())
    if arguments == ["--licences"]:
        sys.stdout.write("| package | version | licence |\n|---|---|---|\n")
        sys.stdout.writelines(f"| {one.metadata['Name']} | {one.version} | {licence_of(one)} |\n" for one in found)
        return 0
    if len(arguments) != 1:
        sys.stderr.write("usage: scripts/sbom.py FILE | --licences\n")
        return 2
    Path(arguments[0]).write_text(json.dumps(bill(found), indent=2) + "\n", encoding="utf-8")
    return 0


def installed(root: str) -> Iterator[Distribution]:
    """The distributions that one needs without extras, and what those need, each once; itself left out."""
    seen, waiting = {root}, [root]
    while waiting:
        for requirement in distribution(waiting.pop()).requires or ():
            named = _NAME.match(requirement)
            if named is None or "extra ==" in requirement or named[0].lower() in seen:
                continue
            seen.add(named[0].lower())
            try:
                yield distribution(named[0])
            except PackageNotFoundError:  # of another platform
                continue
            waiting.append(named[0])


def licence_of(one: Distribution) -> str:
    """The licence by its SPDX expression, else as the package words it."""
    metadata = one.metadata
    classified = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if "License ::" in line]
    stated = metadata.get("License-Expression") or (metadata.get("License") or "").partition("\n")[0]
    return stated if stated and len(stated) < 120 else ", ".join(classified) or "see the package"


def bill(found: list[Distribution]) -> dict[str, object]:
    """The bill of materials as plain values."""
    components = [
        {
            "type": "library",
            "name": one.metadata["Name"],
            "version": one.version,
            "purl": f"pkg:pypi/{one.metadata['Name'].lower()}@{one.version}",
            "licenses": [{"license": {"name": licence_of(one)}}],
        }
        for one in found
    ]
    subject = {"type": "library", "name": "anybatch", "version": distribution("anybatch").version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
