#!/usr/bin/env python3
"""The reference of the Python package, made from its docstrings: python-reference.py >docs/python.md.

Comes in: an interpreter that has redsync. Goes out: Markdown with every public name of it. What must hold: the same docstrings
give the same text on every version of Python; a test compares it with docs/python.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import redsync

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")
BEGINNING = """# The Python package, name by name

<!-- Made of the docstrings by lab/python-reference.py: change those, then run it. -->

What `import redsync` brings; `help(redsync.attach)` says the same. `crates/redsync-python/README.md` explains what happens, with
examples."""
ORDER = (
    ("To begin", ("attach",)),
    ("The attachment", ("Attachment",)),
    ("Without holding on to the attachment", ("stats", "state_dict", "load_state_dict", "of")),
    ("What was sent", ("Stats", "Traffic", "LayerStats")),
    ("Errors", ("Error", "UsageError", "MismatchError", "GradientError", "PeerError")),
    ("Version", ("__version__",)),
)
KINDS = {"Gradients": "of a DDP model", "LocalSteps": "with `every`"}


def text(lines: list[str]) -> str:
    """Lines as paragraphs of one line each, with Markdown's quotes."""
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent("\n".join(lines)).strip())
    return "\n\n".join(" ".join(paragraph.split()).replace("``", "`") for paragraph in paragraphs if paragraph)


def sections(docstring: str) -> dict[str, list[str]]:
    """The parts of a docstring by their headings; what comes first has none."""
    found: dict[str, list[str]] = {"": []}
    part = ""
    for line in docstring.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            part = line.rstrip(":")
            found[part] = []
        else:
            found[part].append(line)
    return found


def entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The names of a section, each with what is said about it."""
    for entry in re.split(r"\n(?=\S)", textwrap.dedent("\n".join(lines)).strip()):
        name, _, said = entry.partition(":")
        yield name.strip(), text(said.splitlines())


def example(lines: list[str]) -> str:
    """Code without prompts; what it prints as a comment."""
    code = []
    for line in textwrap.dedent("\n".join(lines)).strip().splitlines():
        prompt = line.startswith((">>>", "..."))
        bare = re.sub(r"\s*# doctest:.*$", "", line[4:] if prompt else line)
        code.append(bare if prompt else f"# {bare}")
    return "\n".join(["```python", *code, "```"])


def annotation(of: Any) -> str:
    """A type as it is written in the source."""
    return "" if of is inspect.Parameter.empty else str(of)


def declared(parameter: inspect.Parameter) -> str:
    said = parameter.name
    if annotation(parameter.annotation):
        said += f": {annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        said += f" = {quoted(parameter.default)}"
    return said


def quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def call(function: Any, owner: str) -> str:
    """How a function is called: names only, since types and defaults stand with the arguments."""
    signature = inspect.signature(function)
    names, keywords = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            names.append("*")
            keywords = True
        names.append(parameter.name if len(signature.parameters) > 8 else declared(parameter))
    returned = annotation(signature.return_annotation)
    lines = textwrap.wrap(f"{owner}.{function.__name__}({', '.join(names)}) -> {returned}", 120, subsequent_indent="    ")
    return "\n".join(["```python", *lines, "```"])


def body(of: Any, parameters: dict[str, inspect.Parameter] | None = None) -> list[str]:
    """What a docstring says, section by section."""
    parts = sections(inspect.cleandoc(of.__doc__ or ""))
    said = [text(parts[""])]
    for part in ("Args", "Attributes"):
        if part in parts:
            shown = [(declared(parameters[name]) if parameters else name, about) for name, about in entries(parts[part])]
            said.append("\n".join(f"- `{name}`: {about}" for name, about in shown))
    if "Returns" in parts:
        said.append(f"Returns: {text(parts['Returns'])}")
    if "Raises" in parts:
        said.append("\n".join(f"- raises `{name}`: {about}" for name, about in entries(parts["Raises"])))
    if "Example" in parts:
        said.append(example(parts["Example"]))
    return said


def function(of: Any, owner: str) -> list[str]:
    return [call(of, owner), *body(of, dict(inspect.signature(of).parameters))]


def fields(of: type) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass, and the strings below them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(of))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, following in zip(tree.body, [*tree.body[1:], ast.Pass()]):
        if isinstance(field, ast.AnnAssign):
            about = following.value if isinstance(following, ast.Expr) else None
            said = str(about.value) if isinstance(about, ast.Constant) else ""
            yield f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}", text(inspect.cleandoc(said).splitlines())


def members(of: type) -> Iterator[tuple[str, Any]]:
    """What a class itself has for everybody, in the order of its source."""
    for name, member in vars(of).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield name, member


def properties(of: type) -> list[str]:
    said = []
    for name, member in members(of):
        if isinstance(member, property) and member.fget is not None:
            kind = annotation(inspect.signature(member.fget).return_annotation)
            said.append(f"- `{name}: {kind}`: {text([member.__doc__ or ''])}")
    return said


def methods(of: type) -> dict[str, Any]:
    return {name: member for name, member in members(of) if inspect.isfunction(member)}


def attachment(of: type) -> list[str]:
    """Its methods; then those that one kind has for itself. What every kind has for itself is not told of the base."""
    said = [*body(of), *properties(of)]
    kinds: list[type] = sorted(of.__subclasses__(), key=lambda kind: str(kind.__name__))
    for name, member in methods(of).items():
        if not all(name in vars(kind) for kind in kinds):
            said += [f"#### {name}", *function(member, "attachment")]
    for kind in kinds:
        for name, member in methods(kind).items():
            said += [f"#### {name}, {KINDS[kind.__name__]}", *function(member, "attachment")]
    return said


def described(name: str) -> list[str]:
    of = getattr(redsync, name)
    if name == "__version__":
        return ["A text: the version of the package, which is that of the Rust crates."]
    if inspect.isfunction(of):
        return function(of, "redsync")
    if name == "Attachment":
        return attachment(of)
    if issubclass(of, Exception):
        bases = " and ".join(f"`{base.__name__}`" for base in of.__bases__)
        return [f"{body(of)[0]} It is also: {bases}.", *body(of)[1:]]
    return [*body(of), "\n".join([f"- `{field}`: {about}" for field, about in fields(of)] + properties(of))]


def main() -> None:
    listed = [name for _, names in ORDER for name in names]
    assert sorted(listed) == sorted(redsync.__all__), set(listed) ^ set(redsync.__all__)
    said = [BEGINNING]
    for heading, names in ORDER:
        said.append(f"## {heading}")
        for name in names:
            said += [f"### {name}", *described(name)]
    print("\n\n".join(part for part in said if part))


main()
