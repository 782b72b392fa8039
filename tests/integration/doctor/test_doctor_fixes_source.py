"""A source file that is edited by position: all else of it stays, and what is not clear is not made."""

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from anybatch.doctor.fixes.scene import nn_name, reader
from anybatch.doctor.fixes.source import Change, UnclearEdit, UserSource, unified

LOOP = """\
# é ü 漢字
for x in data :   # odd   spacing
    loss = ( model( x ) )  # a comment
    loss.backward( )
    clip( model.parameters( ), 1. )


    opt.step( )
"""


def source(text: str) -> UserSource:
    """A file with a text."""
    return UserSource("/home/me/train.py", text)


def test_a_line_that_comes_in_leaves_every_other_byte() -> None:
    one = source(LOOP)
    after = one.edit([one.inserted(one.statement(4), "opt.zero_grad()")]).after
    assert after == LOOP.replace("    loss.backward", "    opt.zero_grad()\n    loss.backward")
    behind = one.edit([one.inserted(one.statement(8), "opt.zero_grad()", after=True)]).after
    assert behind == f"{LOOP}    opt.zero_grad()\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_keep_their_ends_and_a_last_line_without_one_is_no_other(newline: str) -> None:
    text = newline.join(["for x in y:", "\tf(x)", "\tg(x)"])
    one = source(text)
    after = one.edit([one.inserted(one.statement(3), "if x:\n    h(x)", after=True)]).after
    assert after == newline.join(["for x in y:", "\tf(x)", "\tg(x)", "\tif x:", "\t    h(x)"])
    assert one.edit([one.removed(one.statement(2))]).after == newline.join(["for x in y:", "\tg(x)"])


@pytest.mark.parametrize(
    ("gone", "left"),
    [("a", "    b; c  # why\n"), ("b", "    a; c  # why\n"), ("c", "    a; b  # why\n"), ("ab", "    c  # why\n"),
     ("bc", "    a  # why\n")],
)  # fmt: skip
def test_a_statement_goes_from_a_line_with_several(gone: str, left: str) -> None:
    one = source("for x in y:\n    a; b; c  # why\n    d; e\n")
    loop = one.statement(1)
    assert isinstance(loop, ast.For)
    named = {one.of(statement): statement for statement in loop.body}
    after = one.edit([one.removed(named[name]) for name in gone]).after
    assert after == f"for x in y:\n{left}    d; e\n"
    whole = one.edit([one.removed(named[name]) for name in "de"]).after
    assert whole == "for x in y:\n    a; b; c  # why\n"
    assert one.around(loop.target) is loop


def test_a_statement_moves_with_its_comment_left_and_its_indentation_new() -> None:
    text = (
        "for e in range(3):\n    for x in y:\n        f(\n            x,\n        )\n        s.step()\n    print(e)\n"
    )
    one = source(text)
    moved = one.edit(one.moved(one.statement(6), one.statement(2), after=True)).after
    assert moved == text.replace("        s.step()\n", "    s.step()\n")
    long = one.edit(one.moved(one.statement(3), one.statement(7), after=True)).after
    assert long.endswith("        s.step()\n    print(e)\n    f(\n        x,\n    )\n")


@pytest.mark.parametrize(
    ("call", "name", "value", "expected"),
    [
        ("f()", "a", "1", "f(a=1)"),
        ("f(x)", "a", "1", "f(x, a=1)"),
        ("f(x, a=2, b = 3)", "a", "1", "f(x, a=1, b = 3)"),
        ("f(\n    x,  # first\n    y,\n)", "a", "1", "f(\n    x,  # first\n    y, a=1,\n)"),
        ("f((x for x in y), 2)", "a", "1", "f((x for x in y), 2, a=1)"),
        ("f('é', x)", "a", "1", "f('é', x, a=1)"),
    ],
)
def test_a_keyword_is_changed_or_added(call: str, name: str, value: str, expected: str) -> None:
    one = source(call)
    assert one.edit([one.keyword(one.one_call(one.tree, "f"), name, value)]).after == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [("f(x, a=1)", "f(x)"), ("f(a=1)", "f()"), ("f(a=1, b=2)", "f(b=2)"), ("f(x, a=1, b=2)", "f(x, b=2)")],
)
def test_a_keyword_goes_with_its_comma(call: str, expected: str) -> None:
    one = source(call)
    assert one.edit([one.without_keyword(one.one_call(one.tree, "f"), "a")]).after == expected


def test_a_block_loses_its_with() -> None:
    text = "if a:\n    with no_grad():  # why\n        x = 1  # one\n\n        if x:\n            y = 2\n    z = 3\n"
    one = source(text)
    outer = one.statement(2)
    assert isinstance(outer, ast.With)
    assert one.edit(one.dedented(outer)).after == "if a:\n    x = 1  # one\n\n    if x:\n        y = 2\n    z = 3\n"


UNCLEAR: dict[str, Callable[[], object]] = {
    "two statements on one line": lambda: [(one := source("a(); b()\nc()\n")).inserted(one.statement(1), "x()")],
    "a body on the line of its if": lambda: [
        (one := source("if a:\n    b()\nelse: c()\n")).inserted(one.statement(3), "x()")
    ],
    "the only statement of a block": lambda: [(one := source("if a:\n    b()\nc()\n")).removed(one.statement(2))],
    "a string of several lines moves": lambda: (one := source("f('''a\n  b''')\nc()\n")).moved(
        one.statement(1), one.statement(3)
    ),
    "keywords from a mapping": lambda: [(one := source("f(**g)")).keyword(one.one_call(one.tree, "f"), "a", "1")],
    "a bare generator": lambda: [(one := source("f(x for x in y)")).keyword(one.one_call(one.tree, "f"), "a", "1")],
    "two such calls": lambda: [(one := source("f(1); f(2)")).replaced(one.one_call(one.tree, "f"), "0")],
    "no line": lambda: [(one := source("f(1)\n")).inserted(one.statement(9), "x()")],
    "no Python": lambda: [source("f(1)\n").edit([Change(0, 1, "(")])],
    "nothing changes": lambda: [source("f(1)\n").edit([Change(0, 1, "f")])],
    "changes that overlap": lambda: [source("f(1)\n").edit([Change(0, 3, "g"), Change(2, 4, "h")])],
    "another encoding": lambda: [UserSource("x.py", "# -*- coding: latin-1 -*-\nx = 1\n")],
    "a file that is no Python": lambda: [source("def f(:\n")],
    "no torch.nn": lambda: [nn_name(source("import numpy\n"))],
    "a file that is not the user's": lambda: [reader(lambda path: False, {})(__file__)],
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_is_not_clear_is_not_made(case: str) -> None:
    with pytest.raises(UnclearEdit):
        UNCLEAR[case]()


@pytest.mark.parametrize(
    "text",
    ["import torch\nfrom torch import nn\n", "import torch.nn as nn\n", "from torch import optim, nn as nn\n"],
)
def test_the_name_of_torch_nn_is_that_of_the_file(text: str) -> None:
    assert nn_name(source(text)) == "nn"
    assert nn_name(source("import torch\n")) == "torch.nn"


@pytest.mark.parametrize("tool", ["git", "patch"])
@pytest.mark.parametrize("text", [LOOP, LOOP.rstrip("\n"), LOOP.replace("\n", "\r\n"), LOOP.replace("odd", "\x0codd")])
def test_git_and_patch_take_the_patch(tool: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    path = folder / "a file.py"
    path.write_bytes(text.encode())
    one = UserSource(str(path))
    edit = one.edit([one.inserted(one.statement(8), "opt.zero_grad()", after=True), *one.moved(
        one.statement(5), one.statement(4))])  # fmt: skip
    (folder / "fix.patch").write_bytes(unified({str(path): edit.before}, {str(path): edit.after}, str(folder)).encode())
    command = ["git", "apply", "fix.patch"] if tool == "git" else ["patch", "--binary", "-p1", "-i", "fix.patch"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().decode() == edit.after


def test_what_is_new_is_shown_and_otherwise_what_went() -> None:
    one = source(LOOP)
    assert one.edit([one.inserted(one.statement(4), "opt.zero_grad()")]).lines == "opt.zero_grad()"
    value = one.edit([one.replaced(one.one_call(one.tree, "model"), "model(y)")])
    assert value.lines == "loss = ( model(y) )  # a comment"
    assert one.edit([one.removed(one.statement(5))]).lines == "# without: clip( model.parameters( ), 1. )"
