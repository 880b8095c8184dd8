"""Names say what things are: few functions that other modules call, and at most half of the locals, are one word.

The limits are what has been reached. Whoever adds a name of one word, where a limit is met, finds a better one.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

from tests.test_rooms import trees

LIMITS = {"functions": 0.14, "methods": 0.19, "locals": 0.49}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_locals(function: Function) -> set[str]:
    """The names that a function binds itself, without its parameters and what is bound in functions within it."""
    bound, nodes = set[str](), list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.strip("_"):
            bound.add(node.id)
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            nodes.extend(ast.iter_child_nodes(node))
    parameters = function.args
    return bound - {a.arg for a in [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]}


def test_names_of_one_word_stay_few() -> None:
    users = defaultdict[str, set[str]](set)  # the modules in which a name occurs
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name | ast.alias):
                users[getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))].add(module)
    names = defaultdict[str, list[str]](list)
    for module, tree in trees().items():
        methods = {child for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
        for node in ast.walk(tree):
            if isinstance(node, Function):
                names["locals"] += find_locals(node)
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                if users[node.name] - {module} and not node.name.startswith("_") and not is_property:
                    names["methods" if node in methods else "functions"].append(node.name)
    shares = {kind: sum("_" not in n.strip("_") for n in every) / len(every) for kind, every in names.items()}
    common = {kind: Counter(n for n in every if "_" not in n).most_common(5) for kind, every in names.items()}
    assert all(shares[kind] <= limit for kind, limit in LIMITS.items()), (shares, common)
