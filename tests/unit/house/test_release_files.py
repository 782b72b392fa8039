"""The files that say what a release is and needs agree: the citation, the conda recipe, the Dockerfile, the lock."""

import re
import tomllib

import pytest

import anybatch
from source_tree import ROOT

yaml = pytest.importorskip("yaml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == anybatch.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_recipe_is_of_this_version_and_licence() -> None:
    assert RECIPE["context"]["version"] == anybatch.__version__
    assert RECIPE["about"]["license"] == PROJECT["license"]
    lowest = yaml.safe_load((ROOT / "conda" / "variants.yaml").read_text(encoding="utf-8"))["python_min"]
    assert PROJECT["requires-python"] == f">={lowest[0]}"


def test_the_recipe_needs_what_the_package_needs() -> None:
    needed = {requirement.replace(">=", " >=").replace("torch ", "pytorch ") for requirement in PROJECT["dependencies"]}
    assert set(RECIPE["requirements"]["run"]) == needed | {"python >=${{ python_min }}"}
    (script,) = PROJECT["scripts"].items()
    assert RECIPE["build"]["python"]["entry_points"] == [" = ".join(script)]


def test_the_recipe_is_one() -> None:
    rattler_build = pytest.importorskip("rattler_build")
    recipe = rattler_build.Stage0Recipe.from_file(ROOT / "conda" / "recipe.yaml")
    (rendered,) = recipe.render(rattler_build.VariantConfig.from_file(ROOT / "conda" / "variants.yaml"))
    assert rendered.recipe.package.version == anybatch.__version__


def test_the_image_has_the_torch_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"torch[=:](?:=)?(\d[\d.]*)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))) == {pinned}


def test_the_lock_has_the_versions_of_the_constraints_and_a_hash_for_each() -> None:
    pins = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", re.MULTILINE)
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = {name.replace("_", "-").lower(): version for name, version in pins.findall(text)}
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = {name.replace("_", "-").lower(): version for name, version in pins.findall(constraints)}
    assert {name: version for name, version in locked.items() if tested.get(name, version) != version} == {}
    assert {re.split(r"[>=]", one)[0] for one in PROJECT["dependencies"]} <= locked.keys()
    assert all("--hash=sha256:" in one for one in re.split(r"\n(?=[a-z])", text)[1:])
