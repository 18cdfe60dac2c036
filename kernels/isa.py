"""Counts from GPU assembly: AMDGCN listings and NVIDIA SASS, read as basic blocks and loops."""

import collections
import dataclasses
import re

AMD_CLASSES = (
    ("matrix", r"v_mfma|v_smfmac"),
    ("global load", r"(global|buffer|flat)_load"),
    ("global store", r"(global|buffer|flat)_(store|atomic)"),
    ("lds", r"ds_"),
    ("scratch", r"scratch_"),
    ("scalar load", r"s_(load|buffer_load)"),
    ("wait", r"s_waitcnt"),
    ("barrier", r"s_barrier"),
    ("nop", r"s_nop"),
    ("branch", r"s_(cbranch|branch|setpc|endpgm)"),
    ("vector", r"v_"),
    ("scalar", r"s_"),
)
NVIDIA_CLASSES = (
    ("matrix", r"\w*GMMA\b|HMMA|QMMA|IMMA"),
    ("global load", r"LDG|LD\b|LDGSTS"),
    ("global store", r"STG|ST\b|RED|ATOM"),
    ("lds", r"LDS|STS|LDSM|STSM|SHFL"),
    ("scratch", r"LDL|STL"),
    ("scalar load", r"LDC|ULDC"),
    ("wait", r"DEPBAR|WARPSYNC|WARPGROUP"),
    ("barrier", r"BAR"),
    ("nop", r"NOP"),
    ("branch", r"BRA|EXIT|BSSY|BSYNC|CALL|RET"),
    ("scalar", r"U[A-Z]"),
    ("vector", r""),
)
_AMD_BYTES = {
    "dwordx4": 16,
    "dwordx3": 12,
    "dwordx2": 8,
    "dword": 4,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "ubyte": 1,
    "sbyte": 1,
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """One pass of an innermost loop.

    Attributes:
      classes: instructions by class.
      matrix: matrix instructions by name.
      loads: vector loads from global memory by width in bytes.
    """

    classes: dict[str, int]
    matrix: dict[str, int]
    loads: dict[int, int]

    @property
    def instructions(self) -> int:
        return sum(self.classes.values())

    @property
    def load_bytes(self) -> int:
        """Bytes one lane loads."""
        return sum(width * count for width, count in self.loads.items())


def amd_loops(assembly: str) -> list[Loop]:
    """Innermost loops with matrix instructions of an AMDGCN listing, in program order."""
    blocks: dict[str, list[str]] = {"": []}
    current = ""
    for line in assembly.splitlines():
        text = line.split(";")[0].split("//")[0].rstrip()
        label = re.match(r"([.\w$]+):", text)
        if label and label[1].startswith(".Lfunc_end"):
            break
        if label and (label[1].startswith(".LBB") or not label[1].startswith(".")):
            current = label[1]
            blocks[current] = []
        elif re.match(r"\s+(v_|s_|ds_|global_|buffer_|flat_|scratch_)", text):
            blocks[current].append(text.strip())
            if re.match(r"\s+s_(branch|cbranch|endpgm)", text):  # what follows is a block of its own
                current = f"{current}+"
                blocks[current] = []
    jump = re.compile(r"s_c?branch\w*\s+([.\w]+)")
    bodies = _inner_loops(blocks, jump, re.compile(r"s_branch|s_endpgm"), re.compile("v_mfma|v_smfmac"))
    return [_count(body, AMD_CLASSES, "v_mfma|v_smfmac", _amd_load) for body in bodies]


def nvidia_loops(sass: str) -> list[Loop]:
    """Innermost loops with matrix instructions of an ``nvdisasm`` listing, in program order."""
    blocks: dict[str, list[str]] = {"": []}
    current = ""
    for line in sass.splitlines():
        label = re.match(r"(\.L_\w+):", line)
        code = re.match(r"\s+(?:/\*[0-9a-f]+\*/)?\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", line)
        if label:
            current = label[1]
            blocks[current] = []
        elif code:
            blocks[current].append(f"{code[1] or ''}{code[2]}{code[3]}")
            if code[2].split(".")[0] in ("BRA", "EXIT"):
                current = f"{current}+"
                blocks[current] = []
    jump = re.compile(r"(?:@\S+\s+)?BRA\S*.*`\((\.L_\w+)\)")
    bodies = _inner_loops(blocks, jump, re.compile(r"BRA|EXIT"), re.compile("GMMA|HMMA|QMMA"))
    return [_count(body, NVIDIA_CLASSES, r"\w*GMMA|HMMA|QMMA", _nvidia_load) for body in bodies]


def _inner_loops(blocks, jump, ends, matrix):
    """Instruction lists of the natural loops that hold a matrix instruction and no smaller such loop."""
    order = {name: i for i, name in enumerate(blocks)}
    names = list(blocks)
    successors = {}
    for name, code in blocks.items():
        last = code[-1] if code else ""
        found = [target] if (m := jump.match(last)) and (target := m[1]) in blocks else []
        if not ends.match(last) and order[name] + 1 < len(names):
            found.append(names[order[name] + 1])
        successors[name] = found
    predecessors = collections.defaultdict(list)
    for name, targets in successors.items():
        for target in targets:
            predecessors[target].append(name)
    loops: dict[str, set[str]] = {}
    for name, targets in successors.items():
        for head in targets:
            if order[head] > order[name]:
                continue
            body, stack = {head}, [name]
            while stack:
                block = stack.pop()
                if block not in body:
                    body.add(block)
                    stack += predecessors[block]
            loops.setdefault(head, set()).update(body)
    held = {h: body for h, body in loops.items() if any(matrix.search(i) for b in body for i in blocks[b])}
    inner = [h for h, body in held.items() if not any(other < body for g, other in held.items() if g != h)]
    return [
        [i for name in names if name in held[h] for i in blocks[name]] for h in sorted(inner, key=lambda h: order[h])
    ]


def _count(instructions, classes, matrix, load_width):
    by_class: collections.Counter[str] = collections.Counter()
    by_matrix: collections.Counter[str] = collections.Counter()
    loads: collections.Counter[int] = collections.Counter()
    for instruction in instructions:
        name = re.sub(r"^@\S+\s+", "", instruction).split()[0]
        kind = next(kind for kind, pattern in classes if re.match(pattern, name))
        by_class[kind] += 1
        if re.match(matrix, name):
            by_matrix[name] += 1
        if kind == "global load":
            loads[load_width(name)] += 1
    return Loop(dict(by_class), dict(by_matrix), dict(loads))


def _amd_load(name: str) -> int:
    return _AMD_BYTES[find(r"(?:global|buffer|flat)_load_(?:lds_)?([a-z0-9]+)", name)]


def _nvidia_load(name: str) -> int:
    parts = name.split(".")
    for part in parts:
        if part in ("128", "64"):
            return int(part) // 8
    return 1 if {"U8", "S8"} & {*parts} else 2 if "U16" in parts else 4


def find(pattern: str, text: str) -> str:
    """The first group of ``pattern`` in ``text``, which must be there."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"text: no match of {pattern!r}; the compiler's listing has another form than expected")
    return found[1]


def amd_metadata(assembly: str) -> dict[str, int]:
    """Registers, spills and LDS of an AMDGCN listing's (only) kernel."""
    fields = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "group_segment_fixed_size")
    return {field: int(find(rf"\.{field}:\s+(\d+)", assembly)) for field in fields}
