"""Outline Python, Java, Go, Rust, JavaScript and TypeScript by tree-sitter.

In:    the bytes of one document and the name of its language
Out:   cuts and nodes as `outline` defines them, positions from the document's start
Keeps: the same answer in any process, thread and order; one pass over what a query found, without
       recursion; time in proportion to the text, whatever the text
Never: asks the clock, emits a cut inside a UTF-8 sequence or at an end of the document

Where cuts go. Whatever stands directly in the file or a namespace is a DECLARATION, in a class a
MEMBER, in a block a STATEMENT + depth (0 for the body of an outermost function); elements of lists,
arguments and objects of LONG bytes and more are ELEMENT + depth. Comments on the lines directly
above, decorators and attributes go with what follows; a comment behind code on its line, and one
followed by an empty line, do not. The cut stands at the beginning of the line where nothing but
white space precedes, else at the first byte. In errors, what begins a line counts as a statement.

A FUNCTION begins at its first decorator, attribute, modifier or `export` and ends after its body,
or with the statement that binds it to a name; both are cuts, of level EDGE if of no other.

Work is bounded, to some 0.5 s for 100 KB (2 s where two readings are followed all the way). Reads
of the text are counted, since a token that fails at the end of the file can be tried at every byte.
And tree-sitter takes time quadratic in the length of an error (100 KB of `a?` took Python's grammar
a minute) and of an expression with two readings, whose trees it compares from their beginning; with
no way out that works: its progress callback crashes under Python 3.11 to 3.13 (tree-sitter 0.25,
0.26). So the parser's log is sampled at each read, to see whether it is recovering or comparing,
and read whole, in short steps, while it is, or while there are two readings of all that went
before: to count its lines, the bytes compared, and what is left open. A document that takes too
much of one of these, or is larger than MAX_BYTES, has an empty outline, and is then cut by lines.
"""

import functools
import importlib
import importlib.util
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.errors import BadConfig
from penstock.prepare.outline.outline import (
    CLASS,
    DECLARATION,
    EDGE,
    ELEMENT,
    ENUM,
    FUNCTION,
    MAX_DEPTH,
    MEMBER,
    NAMESPACE,
    STATEMENT,
    Cut,
    Node,
)

if TYPE_CHECKING:
    import tree_sitter

MAX_BYTES: Final = 8 << 20
"""Larger documents are cut by lines: a tree takes some 50 times its text in memory."""

LONG: Final = 256
"""Literals and argument lists shorter than this are not cut between elements."""

_READ_BYTES: Final = 2039
"""A prime: samples at one byte of every block would see one phase of a repeated pattern."""

_SAMPLE: Final = 48
"""Lines of the parser's log seen at each read: some five tokens."""

_MAX_OPEN: Final = 4_000
"""Tokens that two readings may leave open in a row. Valid code leaves open what is nested, at most
230 in 27,000 files of Go and Java; 12 KB of Java's `a<` leave 30,000, and cost 0.8 s and 0.8 GB."""

_STEP_BYTES: Final = 256
_FREE_LINES: Final = 40_000
_LINES_PER_BYTE: Final = 32
"""Lines of the whole log, for each byte read with it. Valid Go and Java need 4.4 at most; 6 KB of
Go's `&;`, where each error closes all that is open, need 1,500 and cost 3.6 s."""

_FREE_COMPARED: Final = 100_000_000
_COMPARED_PER_BYTE: Final = 250
"""Bytes read before each place where two trees are compared, since two readings come to the same:
some 4 ns each, so 0.5 s for 100 KB. Of 4,000 files of Java the 120 with the most of it need 2
million at most, Go nothing; 52 KB of Java's `(a) - (b) * (c) - …` need 800 million and 8 s."""

_is_crowd: Final = re.compile(r" version_count:(?:[5-9]|\d\d)").search

_MAX_TREE_DEPTH: Final = 16_000
"""What lies deeper is not looked at: queries count depth in 16 bits, and take minutes beyond."""

_SPACES: Final = b" " * 65536

# What a kind of node is to us. The first four are as in `outline`.
_MEMBERS, _BLOCK, _LITERAL, _CLAUSE, _BINDER = range(10, 15)
_COMMENT, _ATTRIBUTE, _SKIP, _WRAPPER, _CALLABLE = range(20, 25)


@dataclass(frozen=True, slots=True)
class _Grammar:
    package: str
    roles: Mapping[int, str]
    """Kinds of nodes, by spaces, for each role."""
    factory: str = "language"


_JAVASCRIPT: Final = {
    FUNCTION: "function_declaration generator_function_declaration method_definition",
    CLASS: "class_declaration class abstract_class_declaration interface_declaration",
    ENUM: "enum_declaration",
    NAMESPACE: "internal_module module",
    _MEMBERS: "class_body interface_body enum_body",
    _BLOCK: "statement_block switch_body switch_case switch_default",
    _LITERAL: "object array arguments object_type jsx_element named_imports export_clause",
    _BINDER: "variable_declarator assignment_expression pair field_definition "
    "public_field_definition",
    _COMMENT: "comment",
    _ATTRIBUTE: "decorator",
    _SKIP: "empty_statement jsx_opening_element jsx_closing_element jsx_text",
    _WRAPPER: "export_statement ambient_declaration expression_statement lexical_declaration "
    "variable_declaration",
    _CALLABLE: "arrow_function function_expression generator_function",
}

_GRAMMARS: Final = {
    "python": _Grammar(
        "tree_sitter_python",
        {
            FUNCTION: "function_definition",
            CLASS: "class_definition",
            _BLOCK: "block",
            _LITERAL: "list dictionary set tuple argument_list",
            _CLAUSE: "elif_clause else_clause except_clause except_group_clause finally_clause",
            _COMMENT: "comment",
            _WRAPPER: "decorated_definition",
        },
    ),
    "java": _Grammar(
        "tree_sitter_java",
        {
            FUNCTION: "method_declaration constructor_declaration compact_constructor_declaration",
            CLASS: "class_declaration interface_declaration record_declaration "
            "annotation_type_declaration",
            ENUM: "enum_declaration",
            _MEMBERS: "class_body interface_body enum_body enum_body_declarations "
            "annotation_type_body",
            _BLOCK: "block constructor_body switch_block switch_block_statement_group",
            _LITERAL: "array_initializer argument_list element_value_array_initializer",
            _COMMENT: "line_comment block_comment",
            _SKIP: "switch_label enum_body_declarations",
        },
    ),
    "go": _Grammar(
        "tree_sitter_go",
        {
            FUNCTION: "function_declaration method_declaration",
            CLASS: "type_spec",
            _MEMBERS: "field_declaration_list interface_type",
            _BLOCK: "statement_list",
            _LITERAL: "literal_value argument_list const_declaration var_spec_list "
            "import_spec_list",
            _CLAUSE: "expression_case type_case communication_case default_case",
            _COMMENT: "comment",
            _SKIP: "empty_statement",
            _WRAPPER: "type_declaration",
        },
    ),
    "rust": _Grammar(
        "tree_sitter_rust",
        {
            FUNCTION: "function_item",
            CLASS: "struct_item union_item trait_item impl_item",
            ENUM: "enum_item",
            NAMESPACE: "mod_item foreign_mod_item",
            _MEMBERS: "declaration_list field_declaration_list enum_variant_list",
            _BLOCK: "block match_block",
            _LITERAL: "array_expression arguments tuple_expression use_list field_initializer_list",
            _COMMENT: "line_comment block_comment",
            _ATTRIBUTE: "attribute_item",
            _SKIP: "empty_statement label",
        },
    ),
    "javascript": _Grammar("tree_sitter_javascript", _JAVASCRIPT),
    "typescript": _Grammar("tree_sitter_typescript", _JAVASCRIPT, "language_typescript"),
    "tsx": _Grammar("tree_sitter_typescript", _JAVASCRIPT, "language_tsx"),
}

SYNTAX_LANGUAGES: Final = tuple(_GRAMMARS)
"""What `outline_syntax` takes."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """A grammar, loaded."""

    language: "tree_sitter.Language"
    query: "tree_sitter.Query"
    captured: Mapping[int, int]
    """The role of each kind that the query captures."""
    inside: Mapping[int, int]
    """The role of each kind that matters only as a child of a container."""
    fields: Mapping[str, int]


_FIELDS: Final = (
    "name", "body", "value", "declaration", "definition", "left", "right", "key", "property",
    "type",
)  # fmt: skip


def missing_grammars() -> list[str]:
    """The languages whose grammars are not installed."""
    has_parser = _is_installed("tree_sitter")
    return [
        name
        for name, grammar in _GRAMMARS.items()
        if not (has_parser and _is_installed(grammar.package))
    ]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was taken out of this process
        return False


@functools.cache
def _reader(name: str) -> _Reader:
    grammar = _GRAMMARS[name]
    try:
        import tree_sitter

        package = importlib.import_module(grammar.package)
    except ImportError as error:
        raise BadConfig(
            f"cannot read {name} without its grammar",
            why=str(error),
            do='pip install "penstock[code]"',
        ) from error
    language = tree_sitter.Language(getattr(package, grammar.factory)())
    captured: dict[int, int] = {}
    inside: dict[int, int] = {}
    patterns = []
    for role, kinds in grammar.roles.items():
        for kind in kinds.split():
            number = language.id_for_node_kind(kind, True)
            if not number:
                continue  # a kind of another version or dialect of the grammar
            if role < _COMMENT:
                captured[number] = role
                patterns.append(f"({kind})")
            else:
                inside[number] = role
    fields = {text: language.field_id_for_name(text) or 0 for text in _FIELDS}
    query = tree_sitter.Query(language, f"[{' '.join(patterns)}] @node")
    return _Reader(language, query, captured, inside, fields)


_local = threading.local()


def _parse(name: str, text: bytes) -> "tree_sitter.Tree | None":
    """The tree, or None where it would take too much work."""
    import tree_sitter

    parsers: dict[str, tree_sitter.Parser] = _local.__dict__.setdefault("parsers", {})
    if name not in parsers:
        parsers[name] = tree_sitter.Parser(_reader(name).language)
    parser = parsers[name]
    bytes_left = (1024 + 64 * (len(text) // _READ_BYTES)) * _READ_BYTES
    trouble_left = 8 + len(text) // _READ_BYTES // 8
    lines_left = _FREE_LINES
    compared_left = _FREE_COMPARED + _COMPARED_PER_BYTE * len(text)
    seen = -1
    sample_left = end = run = num_steps = num_alone = num_ambiguous = grown = num_compared = 0
    is_recovering = is_whole = is_crowded = is_comparing = gave_up = False

    def watch(_: object, line: str) -> None:
        nonlocal sample_left, lines_left, num_steps, num_alone, is_recovering, is_crowded, grown
        nonlocal num_compared, gave_up
        sample_left -= 1
        if line.startswith(("lex", "con")):  # half of all lines: lexing, condensing
            pass
        elif line.startswith(
            "process"
        ):  # a step of one version of the parse; state 0 is an error's
            num_steps += 1
            num_alone += " version_count:1," in line
            is_recovering |= sample_left >= 0 and " state:0," in line
            if not is_crowded and sample_left >= 0 and _is_crowd(line):
                is_crowded = True
                sample_left += 8 * _SAMPLE
        elif line.startswith("shift"):
            grown += 1
        elif line.startswith("reduce"):
            grown += 1 - int(line.rpartition(":")[2])
        elif line.startswith(("select_earlier", "select_existing")):
            num_compared += 1
        elif line.startswith(("skip_token", "resume", "recover")):
            # not detect_error: of two readings of valid code one ends there
            is_recovering |= sample_left >= 0
        if is_whole:
            lines_left -= 1
            gave_up |= lines_left < 0
        if gave_up or (not is_whole and (is_recovering or sample_left <= 0)):
            del parser.logger

    def read(at: int, _: object) -> bytes:
        nonlocal bytes_left, trouble_left, lines_left, compared_left, sample_left, end
        nonlocal run, seen, num_steps, num_alone, num_ambiguous, num_compared, grown
        nonlocal is_recovering, is_whole, is_crowded, is_comparing, gave_up
        # trouble: an error, or two readings of all that went before where neither comes to an end;
        # a long stretch of it costs its square
        block = at // _READ_BYTES
        if num_compared:
            compared_left -= num_compared * at
            num_compared = 0
            is_comparing = True
        if block > seen:
            run = run + 1 if is_recovering else 0
            trouble_left -= run
            num_ambiguous = num_ambiguous + 1 if num_steps > 2 and num_alone == 0 else 0
            grown = max(grown, 0) if num_ambiguous else 0
        gave_up |= min(bytes_left, trouble_left, compared_left) < 0 or run > 5 or grown > _MAX_OPEN
        if gave_up:
            # the file ends here, but for white space where bytes were seen before: where it ended
            # earlier, the lexer would crash; where white space went on to the text's end, each
            # version of the parse would read it over and over
            return _SPACES[: max(end - at, 0)]
        if block > seen:
            # the whole log makes a block 13 times slower: read from the second block of a stretch
            # on it took 45% more for all of Java's library, from the third on 3 to 15%
            is_whole = num_ambiguous > 1 or run > 0 or is_comparing
            if is_whole:
                lines_left += _LINES_PER_BYTE * _READ_BYTES * (block - seen)
            seen = block
            num_steps = num_alone = 0
            is_recovering = is_crowded = is_comparing = False
            sample_left = _SAMPLE
            parser.logger = watch
        # short where it is read whole: to be asked often, and so to be able to stop
        most = _STEP_BYTES if is_whole else _READ_BYTES
        chunk = text[at : min((block + 1) * _READ_BYTES, at + most)]
        bytes_left -= max(len(chunk), _STEP_BYTES)
        end = max(end, at + len(chunk))
        return chunk

    try:
        tree = parser.parse(read)
    finally:
        del parser.logger
    return None if gave_up or _is_rubble(tree.root_node) else tree


def _is_rubble(root: "tree_sitter.Node") -> bool:
    """Whether one error has so many children that a query, quadratic in them, is out of reach."""
    work_left = 100_000_000
    stack = [root] if root.has_error else []
    while stack:
        node = stack.pop()
        if node.is_error:
            work_left -= node.child_count**2
            if work_left < 0:
                return True
        stack.extend(child for child in node.children if child.has_error)
    return False


def outline_syntax(language: str, text: bytes) -> tuple[list[Cut], list[Node]]:
    """The cuts and nodes of one document; both empty where parsing it has no bound.

    >>> cuts, nodes = outline_syntax("python", b"import os\\n\\ndef f():\\n    return os\\n")
    >>> [(cut.at, cut.level) for cut in cuts], nodes[0].start, nodes[0].end
    ([(11, 1), (20, 3), (33, 51)], 11, 33)
    """
    if not text or len(text) > MAX_BYTES:
        return [], []
    tree = _parse(language, text)
    if tree is None:
        return [], []
    return _Walk(language, text).outline(tree)


@dataclass(slots=True)
class _Container:
    end: int
    level: int
    """What stands directly in it."""
    elements: int = 0
    """How many literals deep below that."""


class _Walk:
    """One pass over the containers and definitions of a tree, outer before inner."""

    def __init__(self, name: str, text: bytes) -> None:
        self.reader = _reader(name)
        self.text = text
        self.indented = name == "python"
        self.cuts: dict[int, int] = {}
        self.nodes: list[Node] = []
        self.span: dict[int, tuple[int, int]] = {}
        """Where a definition begins and ends with all that belongs to it, by the id of its node."""
        self.names: dict[int, tuple[int, int]] = {}
        self.bodies: dict[int, int] = {}
        """The role of a body that its kind does not tell."""

    def outline(self, tree: "tree_sitter.Tree") -> tuple[list[Cut], list[Node]]:
        import tree_sitter

        root = tree.root_node
        self._cut_between(root.named_children, DECLARATION)
        stack = [_Container(len(self.text) + 1, DECLARATION)]
        cursor = tree_sitter.QueryCursor(self.reader.query)
        cursor.set_max_start_depth(_MAX_TREE_DEPTH)
        for _, found in cursor.matches(root):  # outer before inner; captures have no order
            node = found["node"][0]
            while stack[-1].end <= node.start_byte:
                stack.pop()
            role = self.bodies.get(node.id) or self.reader.captured[node.kind_id]
            if role == _BINDER:
                self._bind(node)
            elif role == _CLAUSE:
                self._cut(node.start_byte, _deeper(stack[-1].level))
            elif role == _LITERAL:
                if node.end_byte - node.start_byte >= LONG:
                    top = stack[-1]
                    stack.append(_Container(node.end_byte, top.level, top.elements + 1))
                    depth = min(top.elements, MAX_DEPTH - 1)
                    self._cut_between(node.named_children, ELEMENT + depth)
            elif role in (_MEMBERS, _BLOCK) or node.id in self.bodies:
                level = _level_in(stack[-1].level, role)
                stack.append(_Container(node.end_byte, level))
                self._cut_between(self._statements(node), level, self.indented)
            else:
                self._define(node, role)
        nodes = self._nest()
        for function in nodes:
            if function.kind == FUNCTION:
                for at in (function.start, function.end):
                    if 0 < at < len(self.text):
                        self.cuts.setdefault(at, EDGE)
        return [Cut(at, level) for at, level in sorted(self.cuts.items())], nodes

    # Cuts

    def _cut(self, at: int, level: int) -> int:
        """Cut before what begins at `at`; where the cut is."""
        at = self._line_start(at)
        if 0 < at < len(self.text) and self.text[at] & 0xC0 != 0x80:
            self.cuts[at] = min(level, self.cuts.get(at, level))
        return at

    def _line_start(self, at: int) -> int:
        """The beginning of the line if only white space stands before `at` in it, else `at`."""
        start = max(at - 64, 0)
        before = self.text[start:at].rstrip(b" \t\f\v")
        while not before and start:
            at_most, start = start, max(start - 4096, 0)
            before = self.text[start:at_most].rstrip(b" \t\f\v")
        line = start + len(before)
        if not before or before[-1] in b"\n\r" or (line == 3 and before == b"\xef\xbb\xbf"):
            return line if line > 3 or before != b"\xef\xbb\xbf" else 0
        return at

    def _cut_between(
        self, children: "list[tree_sitter.Node]", level: int, indented: bool = False
    ) -> None:
        """Cut before each of these, with the comments and attributes above it."""
        inside = self.reader.inside
        group = attribute = -1  # where comments and attributes began that wait for what follows
        group_end = 0
        for child in _through_errors(children, self):
            role = inside.get(child.kind_id, 0)
            start = child.start_byte
            if role == _SKIP:
                continue
            if group >= 0 and attribute < 0 and self._has_empty_line(group_end, start):
                self._cut(group, level)
                group = -1
            if role in (_COMMENT, _ATTRIBUTE):
                if role == _COMMENT and group < 0 and not self._begins_line(start):
                    continue  # it belongs to what stands before it
                if group < 0:
                    group = start
                if role == _ATTRIBUTE and attribute < 0:
                    attribute = start
                group_end = child.end_byte
                continue
            if indented and group < 0:
                # tree-sitter leaves comments above a block's first statement outside the block
                start = self._comments_above(start)
            self._cut(group if group >= 0 else start, level)
            if attribute >= 0:
                self.span[child.id] = (attribute, child.end_byte)
            if role == _WRAPPER:
                self._unwrap(child)
            group = attribute = -1
            indented = False
        if group >= 0:
            self._cut(group, level)

    def _begins_line(self, at: int) -> bool:
        line = self._line_start(at)
        return line == 0 or self.text[line - 1] in b"\n\r"

    def _has_empty_line(self, start: int, end: int) -> bool:
        while start > 0 and self.text[start - 1] in b"\n\r":  # Rust's `///` includes the newline
            start -= 1
        return self.text.count(b"\n", start, end) > 1

    def _comments_above(self, at: int) -> int:
        line = self._line_start(at)
        while line > 0 and self.text[line - 1] == 10:
            start = self.text.rfind(b"\n", 0, line - 1) + 1
            if not self.text[start:line].lstrip(b" \t").startswith(b"#"):
                break
            line = at = start
        return at

    def _statements(self, node: "tree_sitter.Node") -> "list[tree_sitter.Node]":
        """The children of a block without what a `case` is compared with."""
        children = node.named_children
        value = node.child_by_field_id(self.reader.fields["value"])
        if value is not None and children and children[0] == value:
            return children[1:]
        return children

    # Nodes

    def _unwrap(self, node: "tree_sitter.Node") -> None:
        """Give the one definition in an `export`, a `const` or decorators the span of it all."""
        span = self.span.get(node.id, (node.start_byte, node.end_byte))
        fields = self.reader.fields
        inner: tree_sitter.Node | None = node
        while inner is not None:
            self.span[inner.id] = span
            role = self.reader.inside.get(inner.kind_id)
            if role == _CALLABLE and inner.id != node.id:
                self._define(inner, FUNCTION)  # export default () => …
            if role != _WRAPPER:
                break
            found = None
            for name in ("declaration", "definition", "value"):
                found = found or inner.child_by_field_id(fields[name])
            if found is None and inner.named_child_count == 1:
                found = inner.named_child(0)
            inner = found

    def _bind(self, node: "tree_sitter.Node") -> None:
        """`f = () => …`, `f: function () {…}`: the function or class has the name it is given."""
        fields = self.reader.fields
        value = node.child_by_field_id(fields["value"]) or node.child_by_field_id(fields["right"])
        if value is None:
            return
        span = self.span.get(node.id, (node.start_byte, node.end_byte))
        role = self.reader.captured.get(value.kind_id)
        if role == _BINDER:
            self.span[value.id] = span  # a = b = …
            return
        is_function = self.reader.inside.get(value.kind_id) == _CALLABLE
        if not is_function and role != CLASS:
            return
        name = None
        for text in ("name", "left", "key", "property"):
            name = name or node.child_by_field_id(fields[text])
        assert name is not None
        last = name.child_by_field_id(fields["property"]) or name
        self.names[value.id] = (last.start_byte, last.end_byte)
        self.span[value.id] = span
        if is_function:
            self._define(value, FUNCTION)

    def _define(self, node: "tree_sitter.Node", kind: int) -> None:
        fields = self.reader.fields
        start, end = self.span.get(node.id, (node.start_byte, node.end_byte))
        body = node.child_by_field_id(fields["body"])
        if body is None:
            shape = node.child_by_field_id(fields["type"])  # of Go
            if kind != CLASS or shape is None or shape.kind_id not in self._shapes():
                return
            body = shape
        elif kind == NAMESPACE:
            self.bodies[body.id] = NAMESPACE
        elif kind == CLASS and self.indented:
            self.bodies[body.id] = _MEMBERS
        name = node.child_by_field_id(fields["name"])
        if name is None and kind == CLASS:
            name = node.child_by_field_id(fields["type"])  # of Rust's impl
        first, last = (start, start) if name is None else (name.start_byte, name.end_byte)
        first, last = self.names.get(node.id, (first, last))
        inner = body.start_byte
        if self.indented:
            inner = self._line_start(self._comments_above(inner))
        self.nodes.append(Node(kind, start, max(inner, start), end, first, last))

    def _shapes(self) -> tuple[int | None, ...]:
        ids = self.reader.language.id_for_node_kind
        return ids("struct_type", True), ids("interface_type", True)

    def _nest(self) -> list[Node]:
        """The nodes in order, each with the number of the one around it."""
        nested: list[Node] = []
        stack: list[int] = []
        for node in sorted(self.nodes, key=lambda n: (n.start, -n.end)):
            while stack and nested[stack[-1]].end <= node.start:
                stack.pop()
            if stack and node.end > nested[stack[-1]].end:
                continue  # only where the parser saw nothing but errors
            edges = [at for at in (node.start, node.end) if at < len(self.text)]
            if node.start == node.end or any(self.text[at] & 0xC0 == 0x80 for at in edges):
                continue
            parent = stack[-1] if stack else -1
            stack.append(len(nested))
            nested.append(
                Node(
                    node.kind, node.start, node.body, node.end, node.name_start, node.name_end,
                    parent,
                )
            )  # fmt: skip
        return nested


def _through_errors(
    children: "list[tree_sitter.Node]", walk: _Walk
) -> "Iterator[tree_sitter.Node]":
    """The children; in place of an ERROR, those in it that begin a line or are known."""
    stack = [iter(children)]
    inside, captured = walk.reader.inside, walk.reader.captured
    while stack:
        for child in stack[-1]:
            if child.is_error:
                stack.append(iter(child.named_children))
                break
            if (
                len(stack) == 1
                or child.kind_id in inside
                or captured.get(child.kind_id, _MEMBERS) < _MEMBERS
                or walk._begins_line(child.start_byte)
            ):
                yield child
        else:
            stack.pop()


def _deeper(level: int) -> int:
    if level < STATEMENT:
        return STATEMENT
    return min(level + 1, STATEMENT + MAX_DEPTH - 1)


def _level_in(around: int, role: int) -> int:
    if role == NAMESPACE and around == DECLARATION:
        return DECLARATION
    if role == _MEMBERS and around <= MEMBER:
        return MEMBER
    return _deeper(around)
