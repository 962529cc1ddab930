"""Right programs in the forms of MBPP, HumanEval, APPS, LiveCodeBench and Codeforces, with the rows that test them.

Each program passes its tests in plain Python. The sandbox must agree, whatever types the program returns and however
Python's compiler warns about it.
"""

from __future__ import annotations

import json
import re

MBPP = {
    # name: (program, assertions or (setup, assertions))
    "integer": ("def f(a, b): return a + b", ["assert f(1, 2) == 3", "assert f(-1, 1) == 0"]),
    "list": ("def f(n): return [i * i for i in range(n)]", ["assert f(3) == [0, 1, 4]", "assert f(0) == []"]),
    "tuple": ("def f(a): return tuple(sorted(a)), len(a)", ["assert f([2, 1]) == ((1, 2), 2)"]),
    "set": ("def f(a, b): return set(a) & set(b)", ["assert f([1, 2], [2]) == {2}", "assert 2 in f([2], [2])"]),
    "frozen set": ("def f(a): return frozenset(a)", ["assert f('ab') == {'a', 'b'}", "assert hash(f('')) is not None"]),
    "dictionary": ("def f(a): return {c: a.count(c) for c in a}", ["assert f('aab') == {'a': 2, 'b': 1}"]),
    "counter": (
        "from collections import Counter\ndef f(a): return Counter(a)",
        ["assert f('aab') == {'a': 2, 'b': 1}", "assert f('aab').most_common(1) == [('a', 2)]"],
    ),
    "default dictionary": (
        "from collections import defaultdict\ndef f(a):\n    d = defaultdict(list)\n"
        "    for x in a: d[x % 2].append(x)\n    return d",
        ["assert f([1, 2, 3]) == {1: [1, 3], 0: [2]}", "assert f([1])[1] == [1]"],
    ),
    "range": ("def f(n): return range(n)", ["assert f(3) == range(3)", "assert list(f(2)) == [0, 1]"]),
    "fraction": (
        "from fractions import Fraction\ndef f(a, b): return Fraction(a, b)",
        ["assert f(2, 4) == 0.5", "assert f(1, 3).denominator == 3", "assert f(4, 2) == 2"],
    ),
    "decimal": (
        "from decimal import Decimal\ndef f(a): return Decimal(a)",
        ["assert f('1.50') == Decimal('1.5')", "assert str(f('1.50')) == '1.50'", "assert f('2') == 2"],
    ),
    "date": (
        "from datetime import date, timedelta\ndef f(y): return date(y, 2, 28) + timedelta(days=1)",
        [
            "assert f(2024) == datetime.date(2024, 2, 29)",
            "assert f(2023).isoformat() == '2023-03-01'",
            "assert f(2024) - f(2023) == datetime.timedelta(365)",
        ],
    ),
    "date and time": (
        "import datetime as d\ndef f(s): return d.datetime.fromtimestamp(s, d.timezone.utc)",
        ["assert f(0).year == 1970", "assert f(0) == datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)"],
    ),
    "deque": (
        "from collections import deque\ndef f(a, n): return deque(a, maxlen=n)",
        ["assert list(f([1, 2, 3], 2)) == [2, 3]", "assert f([1], 3) == collections.deque([1])"],
    ),
    "keys": ("def f(d): return d.keys()", ["assert f({1: 2}) == {1}", "assert list(f({2: 0, 1: 0})) == [2, 1]"]),
    "values": (
        "def f(d): return d.values()",
        ["assert sorted(f({1: 3, 2: 2})) == [2, 3]", "assert sum(f({1: 3})) == 3"],
    ),
    "items": ("def f(d): return d.items()", ["assert list(f({1: 2})) == [(1, 2)]", "assert (1, 2) in f({1: 2})"]),
    "integer subclass": (
        "import enum\nclass Level(enum.IntEnum):\n    LOW = 1\n    HIGH = 2\n"
        "def f(x): return Level.HIGH if x else Level.LOW",
        ["assert f(1) == 2", "assert f(0) + 1 == 2", "assert max(f(0), f(1)) == 2"],
    ),
    "text subclass": (
        "class Name(str):\n    pass\ndef f(x): return Name(x).upper() if x else Name('none')",
        ["assert f('a') == 'A'", "assert f('') == 'none'", "assert f('').startswith('n')"],
    ),
    "number subclass": ("class Metres(float):\n    pass\ndef f(x): return Metres(x)", ["assert f(1) == 1.0"]),
    "truth value": ("def f(n): return n % 2 == 0", ["assert f(2) == True", "assert f(3) is False", "assert not f(1)"]),
    "none": ("def f(a): a.sort()", ["assert f([]) is None", "x = [2, 1]; f(x); assert x == [1, 2]"]),
    "bytes": ("def f(s): return s.encode()", ["assert f('é') == b'\\xc3\\xa9'"]),
    "byte array": ("def f(n): return bytearray(n)", ["assert f(2) == b'\\0\\0'"]),
    "complex": ("def f(a): return complex(0, a) ** 2", ["assert f(2) == -4", "assert f(1).real == -1"]),
    "large integer": ("def f(n): return 3 ** n", ["assert f(10000) == 3 ** 10000", "assert len(str(f(9000))) == 4295"]),
    "infinity": ("def f(): return float('inf'), float('nan')", ["assert f()[0] == math.inf and math.isnan(f()[1])"]),
    "named tuple": (
        "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\ndef f(a): return Point(a, a + 1)",
        ["assert f(1) == (1, 2)", "assert f(1).y == 2", "x, y = f(3); assert y == 4"],
    ),
    "generator": (
        "def f(n):\n    for i in range(n): yield i",
        ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(4)) == 6", "assert next(f(1)) == 0"],
    ),
    "map": ("def f(a): return map(str, a)", ["assert list(f([1, 2])) == ['1', '2']", "assert ''.join(f([1])) == '1'"]),
    "zip": ("def f(a): return zip(a, a[1:])", ["assert list(f([1, 2, 3])) == [(1, 2), (2, 3)]"]),
    "function": ("def f(n): return lambda x: x + n", ["assert f(2)(3) == 5", "assert callable(f(1))"]),
    "class": (
        "class Stack:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n"
        "    def pop(self): return self.a.pop()\n    def __len__(self): return len(self.a)",
        ["s = Stack(); s.push(1); s.push(2); assert s.pop() == 2 and len(s) == 1", "assert Stack().a == []"],
    ),
    "one object twice": (
        "class One: pass\none = One()\ndef f(): return one\n",
        ["assert f() is not None and f() == f()", "assert one == f()"],
    ),
    "enumeration": (
        "from enum import Enum\nclass Color(Enum):\n    RED = 'red'\ndef f(): return Color.RED",
        ["assert f() == Color.RED", "assert f().value == 'red'"],
    ),
    "changed argument": (
        "def f(d, s):\n    d['a'] = 1\n    s.add(2)",
        ["d, s = {}, {1}; f(d, s); assert d == {'a': 1} and s == {1, 2}"],
    ),
    "error": (
        "class TooSmall(ValueError): pass\ndef f(x):\n    if x < 0: raise TooSmall('below 0')\n    return x",
        [
            "try:\n    f(-1); assert False\nexcept ValueError as error:\n    assert str(error) == 'below 0'",
            "assert f(1) == 1",
        ],
    ),
    "error of the library": (
        "import json\ndef f(t): return json.loads(t)",
        ["try:\n    f('{'); assert False\nexcept ValueError:\n    pass", "assert f('[1]') == [1]"],
    ),
    "escape that warns": ("import re\ndef f(s): return re.findall('\\d+', s)", ["assert f('a1b22') == ['1', '22']"]),
    "docstring that warns": (
        'def f(s):\n    """Split at \\s."""\n    return s.split()',
        ["assert f('a b') == ['a', 'b']"],
    ),
    "comparison that warns": ("def f(x): return x is 5 or x == 5", ["assert f(5)"]),
    "assertion that warns": ("def f(x):\n    assert (x, 'message')\n    return x", ["assert f(1) == 1"]),
    "setup with the program's class": (
        "class Node:\n    def __init__(self, v, l=None, r=None): self.v, self.l, self.r = v, l, r\n"
        "def f(t): return 0 if t is None else 1 + max(f(t.l), f(t.r))",
        ("root = Node(1)\nroot.l = Node(2)\nroot.l.l = Node(3)", ["assert f(root) == 3", "assert f(root.l) == 2"]),
    ),
    "setup with helpers": (
        "def f(a): return sum(a)",
        (
            "import math\nfrom itertools import chain\ndef flat(x): return list(chain(*x))",
            ["assert f(flat([[1], [2]])) == 3"],
        ),
    ),
    "ordered dictionary": (
        "from collections import OrderedDict\ndef f(): return OrderedDict([(1, 2), (3, 4)])",
        ["assert f() != collections.OrderedDict([(3, 4), (1, 2)])", "assert f() == {3: 4, 1: 2}"],
    ),
    "type": (
        "def f(a, kind): return [type(x) for x in a if type(x) is not kind]",
        ["assert f((4, 5, 7.7), int) == [float]"],
    ),
    "operators of a class": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
        "    def __lt__(self, o): return self.x < o.x\n    def __add__(self, o): return P(self.x + o.x)\n"
        "    def __bool__(self): return self.x > 0",
        ["assert P(1) + P(2) == P(3) != P(4)", "assert sorted([P(2), P(1)])[0].x == 1", "assert not P(0) and P(1)"],
    ),
    "arguments of an error": (
        "def f(d): return d['k']",
        ["try:\n    f({}); assert False\nexcept KeyError as error:\n    assert error.args == ('k',)"],
    ),
    "recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", ["assert f(900) == 900"]),
    "memory": ("def f(n): return len(bytearray(n))", ["assert f(2 ** 27) == 2 ** 27"]),
    "main": ("def f(): return 1\nif __name__ == '__main__':\n    raise SystemExit(3)", ["assert f() == 1"]),
}  # fmt: skip
CALLS = {
    # name: (program, name of the function, arguments and results)
    "apps function": ("def add(a, b): return a + b", "add", [([1, 2], 3), ([0, 0], 0)]),
    "apps method": ("class Solution:\n    def rev(self, s):\n        return s[::-1]", "rev", [(["ab"], "ba")]),
    "apps tuple": ("def f(x): return x, x", "f", [([1], [1, 1])]),
    "apps range": ("def f(n): return [*range(n)]", "f", [([2], [0, 1])]),
    "apps table": ("def f(r, c): return [[0] * c for _ in range(r)]", "f", [([2, 1], [[0], [0]])]),
}
INPUTS = {
    # name: (program, inputs and outputs)
    "sum": ("a, b = map(int, input().split())\nprint(a + b)", [("1 2\n", "3\n"), ("5 7", "12")]),
    "whole input": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", [("1 2\n3", "6"), ("", "0")]),
    "lines": ("import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", [("ab\ncd\n", "ba\ndc\n")]),
    "bytes": (
        "import sys\nfor n in sys.stdin.buffer.read().split():\n    sys.stdout.buffer.write(n + b'\\n')",
        [("1 2", "1\n2\n")],
    ),
    "descriptor": ("import os\nprint(len(os.read(0, 100).split()))", [("a b c", "3")]),
    "open 0": ("print(*sorted(open(0).read().split()))", [("b a", "a b  \n\n")]),
    "main": ("def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()", [("4", "8")]),
    "exit": ("import sys\nprint('YES' if input() else 'NO')\nsys.exit()", [("x", "YES"), ("\n", "NO")]),
    "quit": ("print(input())\nquit()\nprint('no')", [("x", "x")]),
    "warnings": ("import re\nprint(*re.findall('\\d', input()))", [("a1", "1"), ("22", "2 2")]),
    "many inputs": ("print(int(input()) + 1)", [(str(i), str(i + 1)) for i in range(30)]),
    "file": (
        "import os\nassert not os.path.exists('x')\nopen('x', 'w').write(input())\nprint(open('x').read())",
        [("1", "1"), ("2", "2")],
    ),
    "thread": (
        "import sys, threading\nsys.setrecursionlimit(10**5)\nthreading.stack_size(2**26)\ndef f(n):\n"
        "    return 0 if n == 0 else 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(int(input()))))\n"
        "t.start()\nt.join()",
        [("20000", "20000")],
    ),
}


def cases() -> dict[str, tuple[str, dict]]:
    """Return program and row of each case by name."""
    found = {}
    for name, (program, tests) in MBPP.items():
        setup, tests = tests if isinstance(tests, tuple) else ("", tests)
        found[name] = program, {"text": "?", "test_setup_code": setup, "test_list": tests}
    for name, (program, function, pairs) in CALLS.items():
        given = {"fn_name": function, "inputs": [a for a, _ in pairs], "outputs": [b for _, b in pairs]}
        found[name] = program, {"question": "?", "input_output": json.dumps(given)}
    for name, (program, pairs) in INPUTS.items():
        found[f"input: {name}"] = program, {"prompt": "?", "tests": [{"input": a, "output": b} for a, b in pairs]}
    return found


def together() -> tuple[str, dict]:
    """Return the programs in the form of MBPP as one program and row, because the start of a sandbox takes CPU time."""
    programs, setups, asserted = [], [], []
    for number, (program, tests) in enumerate(MBPP.values()):
        setup, tests = tests if isinstance(tests, tuple) else ("", tests)
        for texts, more in ((programs, [program]), (setups, [setup]), (asserted, tests)):
            texts += [re.sub(r"\bf\(", f"f{number}(", text) for text in more]
    row = {"text": "?", "test_setup_code": "\n".join(setups), "test_list": asserted}
    return "\n".join(programs), row
